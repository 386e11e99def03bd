//! Collectives between GPUs, carried by NCCL on a stream of its own.
//!
//! Before a collective is queued, ranks show each other what they call over the host's links, as everywhere; this goes on while
//! earlier collectives run. The stream of collectives waits for what the stream that computes had been given when the collective was
//! called, and [`Handle::wait`](super::Handle::wait) makes the stream that computes wait for the collective: the host waits for neither.
//!
//! A collective that the GPU does not end in time is given up, and with it NCCL's communicator, which ends its kernels.
//!
//! Gradients that travel as bf16 or f16 are rounded into a buffer of this back end; NCCL adds two values at a time in f32, and rounds
//! after each addition.

use std::sync::Arc;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use tilewright::cudarc::driver::sys::CUevent_flags;
use tilewright::cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use tilewright::cudarc::nccl::{result, sys};
use tilewright::{Buffer, Device, Element as KernelElement, View, ViewMut, kernels};

use super::call::{Call, Dtype, HEADER_BYTES, Op, Reduce, decode, encode};
use super::carrier::{Carrier, Deadline, Fence, Memory, Ready, compare};
use super::{CommError, Communicator, Options, Result};

/// The communicator of GPUs whose processes `host` and `guard` connect; `compute` is the stream that the model runs on.
///
/// `host` carries collectives of host memory, and `guard` what ranks show each other: two, since they are used by two threads.
///
/// # Errors
/// NCCL is not installed, two ranks have one GPU, and NCCL's own.
pub fn connect(
    host: Communicator,
    guard: Communicator,
    compute: Arc<CudaStream>,
    options: Options,
) -> Result<Communicator> {
    let (rank, world) = (host.rank(), host.world());
    // SAFETY: only looks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(CommError::Setup(
            "NCCL is not installed: libnccl.so was not found\n  help: install it (libnccl2, or the package nvidia-nccl-cu13 from PyPI), and put its folder into LD_LIBRARY_PATH".into(),
        ));
    }
    let mut id = [0_u8; 128];
    if rank == 0 {
        let made = result::get_uniqueid().map_err(|error| CommError::Setup(format!("NCCL cannot start: {error:?}")))?;
        id = made.internal.map(|byte| byte as u8);
    }
    host.broadcast(&mut id, 0)?;
    let marked = compute.clone();
    let mark = move || -> Result<Ready> {
        let event = marked.record_event(None).map_err(|error| driver("a mark on the stream", rank, error))?;
        Ok(Box::new(event))
    };
    let make = move || Nccl::new(rank, world, id, guard, compute);
    let communicator = Communicator::with_carrier(rank, world, "nccl", options, Some(Box::new(mark)), make)?;
    Ok(communicator.with_host(host))
}

fn driver(call: impl ToString, rank: usize, error: DriverError) -> CommError {
    CommError::Carrier { rank, call: call.to_string(), message: error.to_string() }
}

struct Nccl {
    rank: usize,
    world: usize,
    guard: Communicator,
    comm: Option<sys::ncclComm_t>,
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    /// The stream as our kernels know it.
    device: Device,
    /// What has been queued, oldest first.
    under_way: Vec<(Call, Instant, Duration, Arc<Span>)>,
    /// Gradients in half floats, as bytes of the device.
    wire: Option<Buffer<u8>>,
}

/// A collective on the stream.
struct Span {
    begin: CudaEvent,
    end: CudaEvent,
    compute: Arc<CudaStream>,
    rank: usize,
    call: Call,
}

impl Fence for Span {
    fn join(&self) -> Result<()> {
        self.compute.wait(&self.end).map_err(|error| driver(self.call, self.rank, error))
    }

    fn synchronize(&self) -> Result<()> {
        self.end.synchronize().map_err(|error| driver(self.call, self.rank, error))
    }

    fn seconds(&self) -> Option<f64> {
        match self.end.is_complete() {
            true => self.begin.elapsed_ms(&self.end).ok().map(|ms| f64::from(ms) * 1e-3),
            false => None,
        }
    }
}

impl Nccl {
    fn new(rank: usize, world: usize, id: [u8; 128], guard: Communicator, compute: Arc<CudaStream>) -> Result<Nccl> {
        let failed = |error: DriverError| driver("the start of NCCL", rank, error);
        let context = compute.context().clone();
        context.bind_to_thread().map_err(failed)?;
        let stream = context.new_stream().map_err(failed)?;
        let device = Device::from_cuda_stream(stream.clone())
            .map_err(|error| CommError::Setup(format!("no stream for collectives: {error}")))?;
        // All ranks are there now; NCCL itself would wait for a missing one without end.
        guard.barrier()?;
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as _) };
        let mut comm: sys::ncclComm_t = std::ptr::null_mut();
        // SAFETY: the communicator's handle is written by the call; this thread's context is the GPU's.
        let made = unsafe { result::comm_init_rank(&mut comm, world as i32, id, rank as i32) };
        made.map_err(|error| {
            CommError::Setup(format!("NCCL cannot connect rank {rank}: {error:?}\n  help: every rank needs a GPU of its own; NCCL_DEBUG=WARN says more"))
        })?;
        let (comm, under_way, wire) = (Some(comm), Vec::new(), None);
        Ok(Nccl { rank, world, guard, comm, context, compute, stream, device, under_way, wire })
    }

    /// Whether all ranks call the same.
    fn agree(&self, seq: u64, call: &Call) -> Result<()> {
        let mut headers = vec![0_u8; HEADER_BYTES * self.world];
        headers[self.rank * HEADER_BYTES..][..HEADER_BYTES].copy_from_slice(&encode(seq, call));
        self.guard.all_gather(&mut headers)?;
        let unreadable = || CommError::Setup("a rank runs another version of this program".into());
        let read = |bytes: &[u8]| bytes.try_into().ok().and_then(decode).ok_or_else(unreadable);
        compare(&headers.chunks(HEADER_BYTES).map(read).collect::<Result<Vec<_>>>()?)
    }

    /// Queues the data's part on the stream.
    fn queue(&mut self, call: &Call, address: u64) -> Result<()> {
        let Some(wire) = call.wire else { return self.queue_as(call, call.dtype, address) };
        match wire {
            Dtype::F16 => self.queue_rounded::<f16>(call, wire, address),
            _ => self.queue_rounded::<bf16>(call, wire, address),
        }
    }

    fn queue_rounded<T: KernelElement + kernels::FloatElement>(
        &mut self,
        call: &Call,
        wire: Dtype,
        address: u64,
    ) -> Result<()> {
        let failed = |error: tilewright::Error| CommError::Carrier {
            rank: self.rank,
            call: call.to_string(),
            message: error.to_string(),
        };
        let (device, bytes) = (&self.device, call.count * wire.size());
        if self.wire.as_ref().is_none_or(|wire| wire.len() < bytes) {
            self.wire = Some(Buffer::uninit(device, bytes).map_err(failed)?);
        }
        let at = self.wire.as_ref().map_or(0, |wire| wire.view().address());
        let row = [1, call.count];
        // SAFETY: the gradients are ours until the collective is done, and the buffer is this back end's alone; both have `count` elements.
        let (exact, rounded) = unsafe {
            (View::<f32>::from_address(device, address, call.count), ViewMut::<T>::from_address(device, at, call.count))
        };
        let (exact, rounded) = (
            kernels::Tensor::dense(exact, row).map_err(failed)?,
            kernels::TensorMut::dense(rounded, row).map_err(failed)?,
        );
        kernels::cast::forward(device, exact, rounded).map_err(failed)?;
        self.queue_as(call, wire, at)?;
        // SAFETY: as above.
        let (exact, rounded) = unsafe {
            (ViewMut::<f32>::from_address(device, address, call.count), View::<T>::from_address(device, at, call.count))
        };
        let (exact, rounded) = (
            kernels::TensorMut::dense(exact, row).map_err(failed)?,
            kernels::Tensor::dense(rounded, row).map_err(failed)?,
        );
        kernels::cast::forward(device, rounded, exact).map_err(failed)
    }

    fn queue_as(&self, call: &Call, dtype: Dtype, address: u64) -> Result<()> {
        let Some(comm) = self.comm else { return Ok(()) };
        let (each, ty) = (call.count / self.world, nccl_type(dtype));
        let stream = self.stream.cu_stream().cast();
        let all = address as *mut std::ffi::c_void;
        let own = (address + (self.rank * each * dtype.size()) as u64) as *mut std::ffi::c_void;
        // SAFETY: the memory is on this GPU, has `count` elements, and is ours until the collective is done; NCCL works in place where the
        // own chunk lies at its place.
        let queued = unsafe {
            match call.op {
                Op::AllReduce(reduce) => result::all_reduce(all, all, call.count, ty, nccl_op(reduce), comm, stream),
                Op::ReduceScatter(reduce) => result::reduce_scatter(all, own, each, ty, nccl_op(reduce), comm, stream),
                Op::AllGather => result::all_gather(own, all, each, ty, comm, stream),
                Op::Broadcast { root } => result::broadcast(all, all, call.count, ty, root as i32, comm, stream),
                Op::Barrier => return Ok(()),
            }
        };
        queued.map(drop).map_err(|error| CommError::Carrier {
            rank: self.rank,
            call: call.to_string(),
            message: format!("NCCL says {error:?}; NCCL_DEBUG=WARN says more"),
        })
    }

    /// Gives NCCL up: its kernels end, and so does whoever waits for the GPU.
    fn abort(&mut self) {
        if let Some(comm) = self.comm.take() {
            // SAFETY: not used again.
            let _ = unsafe { result::comm_abort(comm) };
        }
    }
}

impl Carrier for Nccl {
    fn run(
        &mut self,
        seq: u64,
        call: &Call,
        memory: &mut Memory,
        ready: Option<Ready>,
        deadline: Deadline,
    ) -> Result<Option<Box<dyn Fence>>> {
        let rank = self.rank;
        self.agree(seq, call)?;
        let failed = |error: DriverError| driver(call, rank, error);
        self.context.bind_to_thread().map_err(failed)?;
        if let Some(ready) = ready.and_then(|ready| ready.downcast::<CudaEvent>().ok()) {
            self.stream.wait(&ready).map_err(failed)?;
        }
        let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let begin = self.stream.record_event(timed).map_err(failed)?;
        if call.count > 0 {
            self.queue(call, memory.address as u64)?;
        }
        let end = self.stream.record_event(timed).map_err(failed)?;
        let span = Arc::new(Span { begin, end, compute: self.compute.clone(), rank, call: *call });
        self.under_way.retain(|(.., span)| !span.end.is_complete());
        self.under_way.push((*call, Instant::now(), deadline.patience, span.clone()));
        Ok(Some(Box::new(Shared(span))))
    }

    /// Looks whether the GPU ends what it was given.
    fn watch(&mut self) -> Result<()> {
        self.under_way.retain(|(.., span)| !span.end.is_complete());
        let late = self.under_way.iter().find(|(_, since, patience, _)| since.elapsed() > *patience);
        let Some((call, _, patience, _)) = late else { return Ok(()) };
        let error = CommError::Carrier {
            rank: self.rank,
            call: call.to_string(),
            message: format!(
                "the GPU did not end it within {}: a rank hangs or is gone",
                super::error::seconds(patience)
            ),
        };
        self.abort();
        Err(error)
    }

    fn give_up(&mut self, error: &CommError) {
        self.guard.give_up(&error.to_string());
        self.abort();
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if self.comm.is_some() {
            // What is under way may be somebody's gradients.
            let _ = self.stream.synchronize();
        }
        self.abort();
    }
}

/// A span of which the carrier keeps a part too.
struct Shared(Arc<Span>);

impl Fence for Shared {
    fn join(&self) -> Result<()> {
        self.0.join()
    }

    fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    fn seconds(&self) -> Option<f64> {
        self.0.seconds()
    }
}

fn nccl_type(dtype: Dtype) -> sys::ncclDataType_t {
    use sys::ncclDataType_t as Type;
    match dtype {
        Dtype::F32 => Type::ncclFloat32,
        Dtype::F64 => Type::ncclFloat64,
        Dtype::Bf16 => Type::ncclBfloat16,
        Dtype::F16 => Type::ncclFloat16,
        Dtype::I32 => Type::ncclInt32,
        Dtype::I64 => Type::ncclInt64,
        Dtype::U8 => Type::ncclUint8,
        Dtype::U32 => Type::ncclUint32,
        Dtype::U64 => Type::ncclUint64,
    }
}

fn nccl_op(reduce: Reduce) -> sys::ncclRedOp_t {
    match reduce {
        Reduce::Sum => sys::ncclRedOp_t::ncclSum,
        Reduce::Avg => sys::ncclRedOp_t::ncclAvg,
        Reduce::Max => sys::ncclRedOp_t::ncclMax,
    }
}
