//! NCCL backend: collectives between GPUs on a dedicated stream.
//!
//! Before a collective is queued, ranks exchange their calls over sockets that serve only this purpose, while earlier
//! collectives still run. The communication stream waits for all work that was queued on the compute stream before the
//! call, and [`Handle::wait`](super::Handle::wait) makes the compute stream wait for the collective. The host waits for
//! neither.
//!
//! If the GPU does not complete a collective in time, it is aborted together with NCCL's communicator, which ends its
//! kernels. This happens immediately if the sockets report that a rank has ended.
//!
//! Overlapped collectives can use a second NCCL communicator whose kernels have fewer CTAs: each CTA occupies an SM
//! that compute kernels could use. The collectives of both communicators are queued on one stream, so that they never
//! run concurrently.
//!
//! Alternatively, copy engines run overlapped collectives ([`engines`]) on their own streams, which need not wait for
//! each other. The communication stream waits for them, so that it still reflects completion.
//!
//! Gradients that are sent as bf16 or f16 are rounded into a buffer of this backend. NCCL adds two values at a time in
//! f32, and rounds after each addition.

mod engines;
mod ipc;
mod start;

use std::collections::VecDeque;
use std::ffi::CStr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::convert::convert;
use half::{bf16, f16};
use tilewright::cudarc::driver::result::stream::get_priority_range;
use tilewright::cudarc::driver::sys::{CUevent_flags, cuStreamGetPriority};
use tilewright::cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use tilewright::cudarc::nccl::result::{self, NcclError};
use tilewright::cudarc::nccl::sys;
use tilewright::{Buffer, Device, Element as KernelElement, View, ViewMut, kernels};

use super::backend::{Backend, CompletionEvent, Compute, Deadline, EventTimer, Memory, PeerBuffer, Ready};
use super::call::{Call, Dtype, Op, Reduce};
use super::copies::Kind;
use super::links::OverLinks;
use super::tcp::Sockets;
use super::{CommError, Communicator, Options, Result};
use crate::dist::rank::RankInfo;
use crate::dist::rendezvous::Job;
use crate::dist::watchdog::{WATCHDOG_MARGIN, guard};
use engines::{CopyCollective, CopyEngines};
use start::{NcclComm, connect_control, initialize, is_installed, split_with_max_ctas};

type ControlLinks = OverLinks<Sockets>;

/// Interval of checks for completion.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long a rank polls for the others' calls before it sleeps: about twice the cost of a wakeup.
const SPIN: Duration = Duration::from_micros(100);
/// Time that collectives get after a rank has ended: it may have ended because all of them are complete.
const PEER_EXIT_GRACE: Duration = Duration::from_secs(1);
/// Timeout for all ranks to finish before the communicator is dropped: they may still read this rank's memory.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for released copy-engine streams to finish: they come after work that the GPU still runs.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Creates the communicator for GPUs whose processes `host` connects; `compute` is the stream of the model. Collectives
/// of host memory still use `host`.
///
/// # Errors
/// NCCL is not installed, two ranks use the same GPU, and NCCL's errors.
pub fn connect(
    host: Communicator,
    rank_info: &RankInfo,
    job: &Job,
    compute: Arc<CudaStream>,
    options: Options,
) -> Result<Communicator> {
    let (rank, world) = (host.rank(), host.world());
    if !is_installed() {
        return Err(CommError::Setup(
            "NCCL is not installed: libnccl.so was not found\n  help: install it (libnccl2, or the package nvidia-nccl-cu13 from PyPI), and add its folder to LD_LIBRARY_PATH".into(),
        ));
    }
    let mut id = [0_u8; 128];
    if rank == 0 {
        let made = result::get_uniqueid();
        let made = made.map_err(|error| CommError::Setup(format!("NCCL cannot start: {}", explain(None, &error))))?;
        id = made.internal.map(|byte| byte as u8);
    }
    host.broadcast(&mut id, 0)?;
    let control = connect_control(&host, rank_info, job, &id, options)?;
    let stream = ComputeStream { stream: compute.clone(), rank };
    let make = move || Nccl::new(rank, world, id, control, compute, options);
    let communicator = Communicator::with_backend(rank, world, "nccl", options, Some(Box::new(stream)), make)?;
    Ok(communicator.with_host(host))
}

fn driver_error(call: impl ToString, rank: usize, error: DriverError) -> CommError {
    CommError::Backend { rank, call: call.to_string(), message: error.to_string() }
}

/// NCCL's error message.
fn explain(comm: Option<sys::ncclComm_t>, error: &NcclError) -> String {
    // SAFETY: both functions return null or a string that lives as long as the library; the communicator is valid.
    let texts = unsafe {
        [sys::ncclGetErrorString(error.0), comm.map_or(std::ptr::null(), |comm| sys::ncclGetLastError(comm))]
            .map(|text| (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned()))
    };
    let messages: Vec<String> = texts.into_iter().flatten().filter(|text| !text.is_empty()).collect();
    format!("NCCL reports `{}`; NCCL_DEBUG=WARN prints more", messages.join(": "))
}

/// The compute stream of the thread that calls collectives.
struct ComputeStream {
    stream: Arc<CudaStream>,
    rank: usize,
}

impl Compute for ComputeStream {
    fn record(&self) -> Result<Ready> {
        let event = self.stream.record_event(None);
        Ok(Box::new(event.map_err(|error| driver_error("recording an event on the compute stream", self.rank, error))?))
    }

    fn start_timer(&self) -> Result<Box<dyn EventTimer>> {
        let (stream, rank) = (self.stream.clone(), self.rank);
        let begin = stream
            .record_event(TIMED)
            .map_err(|error| driver_error("recording an event on the compute stream", rank, error))?;
        Ok(Box::new(StreamTimer { stream, rank, begin, end: None }))
    }
}

const TIMED: Option<CUevent_flags> = Some(CUevent_flags::CU_EVENT_DEFAULT);

struct StreamTimer {
    stream: Arc<CudaStream>,
    rank: usize,
    begin: CudaEvent,
    end: Option<CudaEvent>,
}

impl EventTimer for StreamTimer {
    fn stop(&mut self) -> Result<()> {
        let end = self.stream.record_event(TIMED);
        self.end =
            Some(end.map_err(|error| driver_error("recording an event on the compute stream", self.rank, error))?);
        Ok(())
    }

    fn seconds(&self) -> Option<f64> {
        self.begin.elapsed_ms(self.end.as_ref()?).ok().map(|ms| f64::from(ms) * 1e-3)
    }
}

struct Nccl {
    rank: usize,
    world: usize,
    control: ControlLinks,
    comm: Option<sys::ncclComm_t>,
    /// Communicators of the same ranks with a limit of CTAs, by limit.
    split_comms: Vec<(u32, sys::ncclComm_t)>,
    /// The limit for overlapped collectives; 0 means `comm`.
    max_ctas: u32,
    /// Whether the next collective is overlapped.
    overlapped: bool,
    /// Whether copy engines run overlapped collectives where they can.
    use_copy_engines: bool,
    /// Created on first use.
    engines: Option<CopyEngines>,
    /// Whether the last operation on the stream is to wait for the copy engines.
    waits_for_copies: bool,
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    stream: Arc<CudaStream>,
    /// The stream as a device for Tilewright kernels.
    device: Device,
    /// Queued collectives, oldest first; they complete in this order.
    in_flight: VecDeque<InFlight>,
    /// Time at which a rank was found to have ended.
    peer_lost_at: Option<Instant>,
    /// Gradients in the communication dtype, as bytes on the device.
    cast_buffer: Option<Buffer<u8>>,
    /// Timeout for creating further NCCL communicators.
    start_timeout: Duration,
}

/// The stream's priority; lower numbers go first.
fn priority(stream: &CudaStream) -> std::result::Result<i32, DriverError> {
    let mut priority = 0;
    // SAFETY: the stream is alive, and `priority` receives the result.
    unsafe { cuStreamGetPriority(stream.cu_stream(), &raw mut priority) }.result().map(|()| priority)
}

/// A queued collective that is not known to be complete.
struct InFlight {
    collective: Arc<QueuedCollective>,
    /// Addresses of the memory that it uses.
    memory: Range<u64>,
    since: Instant,
    timeout: Duration,
}

/// A collective on the stream.
struct QueuedCollective {
    begin: CudaEvent,
    end: CudaEvent,
    compute: Arc<CudaStream>,
    rank: usize,
    call: Call,
    timeout: Duration,
}

impl CompletionEvent for QueuedCollective {
    fn join(&self) -> Result<()> {
        self.compute.wait(&self.end).map_err(|error| driver_error(self.call, self.rank, error))
    }

    fn synchronize(&self) -> Result<()> {
        // The collective's timeout aborts it before the watchdog's limit.
        let (rank, call) = (self.rank, self.call);
        let limit = self.timeout.saturating_add(DRAIN_TIMEOUT + WATCHDOG_MARGIN);
        let _guarded = guard(limit, move || format!("rank {rank}: {call}, on the GPU"));
        self.end.synchronize().map_err(|error| driver_error(self.call, self.rank, error))
    }

    fn seconds(&self) -> Option<f64> {
        match self.end.is_complete() {
            true => self.begin.elapsed_ms(&self.end).ok().map(|ms| f64::from(ms) * 1e-3),
            false => None,
        }
    }
}

impl Nccl {
    fn new(
        rank: usize,
        world: usize,
        id: [u8; 128],
        mut control: ControlLinks,
        compute: Arc<CudaStream>,
        options: Options,
    ) -> Result<Nccl> {
        let failed = |error: DriverError| driver_error("the start of NCCL", rank, error);
        let context = compute.context().clone();
        context.bind_to_thread().map_err(failed)?;
        // Collectives use few CTAs and other ranks wait for them: with a high priority they get the next free SMs.
        let (_, first) = get_priority_range().map_err(failed)?;
        let stream = context.new_stream_with_priority(first).map_err(failed)?;
        let [ours, other] = [&stream, &compute].map(|stream| priority(stream));
        tracing::debug!("priorities: {:?} of collectives, {:?} of compute; lower numbers go first", ours, other);
        let device = Device::from_cuda_stream(stream.clone())
            .map_err(|error| CommError::Setup(format!("no stream for collectives: {error}")))?;
        let comm = Some(initialize(rank, world, id, &mut control, &context, options.start_timeout)?);
        Ok(Nccl {
            rank,
            world,
            control,
            comm,
            split_comms: Vec::new(),
            max_ctas: 0,
            overlapped: false,
            use_copy_engines: false,
            engines: None,
            waits_for_copies: false,
            context,
            compute,
            stream,
            device,
            in_flight: VecDeque::new(),
            peer_lost_at: None,
            cast_buffer: None,
            start_timeout: options.start_timeout,
        })
    }

    /// Removes completed collectives.
    fn retire_completed(&mut self) -> Result<()> {
        while let Some(InFlight { collective, .. }) = self.in_flight.front() {
            match collective.end.try_is_complete() {
                Ok(true) => drop(self.in_flight.pop_front()),
                Ok(false) => break,
                Err(error) => return Err(driver_error(collective.call, self.rank, error)),
            }
        }
        Ok(())
    }

    /// Fails if a collective in flight can no longer complete.
    fn check_in_flight(&mut self) -> Result<()> {
        let settled = self.retire_completed();
        let Some(InFlight { collective, since, timeout, .. }) = self.in_flight.front() else { return settled };
        if since.elapsed() > *timeout {
            let (rank, call) = (self.rank, collective.call.to_string());
            let message = format!(
                "the GPU did not complete it within {}: a rank hangs or has ended",
                super::error::seconds(timeout)
            );
            return Err(CommError::Backend { rank, call, message });
        }
        let (call, deadline) = (collective.call, Deadline::after(*timeout));
        let lost = self.control.links().closed_peer().map(|lost| self.control.explain(&call, deadline, lost));
        let failed = settled.and_then(|()| self.check_nccl(&call));
        match (lost, failed) {
            // Errors of the GPU and of NCCL are consequences.
            (Some(lost), Err(_)) => Err(lost),
            (Some(lost), Ok(())) if self.peer_lost_at.get_or_insert_with(Instant::now).elapsed() > PEER_EXIT_GRACE => {
                Err(lost)
            }
            (None, Err(error)) => Err(self.root_cause(&call, deadline, error)),
            (_, failed) => failed,
        }
    }

    /// Waits until no collective is in flight.
    fn drain(&mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            std::thread::sleep(POLL_INTERVAL / 20);
            self.check_in_flight()?;
        }
        Ok(())
    }

    /// Returns a GPU error or its cause: copies may fail because a rank has ended before its socket reports it.
    fn root_cause(&mut self, call: &Call, deadline: Deadline, error: CommError) -> CommError {
        let until = Deadline::after(PEER_EXIT_GRACE);
        while self.engines.is_some() && !until.is_over() {
            if let Some(lost) = self.control.links().closed_peer() {
                return self.control.explain(call, deadline, lost);
            }
            std::thread::sleep(POLL_INTERVAL / 20);
        }
        error
    }

    /// Checks the asynchronous errors of NCCL.
    fn check_nccl(&self, call: &Call) -> Result<()> {
        self.comms().try_for_each(|comm| self.check_comm(comm, call))
    }

    /// All NCCL communicators.
    fn comms(&self) -> impl Iterator<Item = sys::ncclComm_t> {
        self.comm.into_iter().chain(self.split_comms.iter().map(|(_, comm)| *comm))
    }

    /// The communicator of the next collective.
    fn next_comm(&self) -> Option<sys::ncclComm_t> {
        let split = self.split_comms.iter().find(|(ctas, _)| self.overlapped && *ctas == self.max_ctas);
        self.comm.map(|all| split.map_or(all, |(_, comm)| *comm))
    }

    fn check_comm(&self, comm: sys::ncclComm_t, call: &Call) -> Result<()> {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is valid, and `state` receives the result.
        let asked = unsafe { sys::ncclCommGetAsyncError(comm, &raw mut state) };
        let is_ok = |state: &sys::ncclResult_t| {
            matches!(state, sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress)
        };
        match [asked, state].into_iter().find(|state| !is_ok(state)) {
            None => Ok(()),
            Some(bad) => Err(CommError::Backend {
                rank: self.rank,
                call: call.to_string(),
                message: explain(Some(comm), &NcclError(bad)),
            }),
        }
    }

    /// Queues the data transfer. Its memory may be used when all events in `ready_after` are complete; if there are
    /// none, when the stream reaches this work.
    fn queue(&mut self, call: &Call, address: u64, ready_after: &[&CudaEvent]) -> Result<()> {
        let Some(comm_dtype) = call.comm_dtype else { return self.queue_as(call, call.dtype, address, ready_after) };
        match comm_dtype {
            Dtype::F16 => self.queue_rounded::<f16>(call, comm_dtype, address),
            _ => self.queue_rounded::<bf16>(call, comm_dtype, address),
        }
    }

    fn queue_rounded<T: KernelElement + kernels::FloatElement>(
        &mut self,
        call: &Call,
        comm_dtype: Dtype,
        address: u64,
    ) -> Result<()> {
        let rank = self.rank;
        let failed =
            |error: tilewright::Error| CommError::Backend { rank, call: call.to_string(), message: error.to_string() };
        let (device, bytes) = (&self.device, call.count * comm_dtype.size());
        if self.cast_buffer.as_ref().is_none_or(|buffer| buffer.len() < bytes) {
            self.cast_buffer = Some(Buffer::uninit(device, bytes).map_err(failed)?);
        }
        let at = self.cast_buffer.as_ref().map_or(0, |buffer| buffer.view().address());
        // SAFETY: the caller hands the gradients over until the collective is complete, and only this backend uses the
        // buffer; both have `count` elements.
        let (exact, rounded) = unsafe {
            (View::<f32>::from_address(device, address, call.count), ViewMut::<T>::from_address(device, at, call.count))
        };
        convert(device, exact, rounded).map_err(failed)?;
        self.queue_as(call, comm_dtype, at, &[])?;
        let device = &self.device;
        self.waits_for_copies = false;
        // After a reduce-scatter only this rank's chunk is defined.
        let (each, size) = (call.count / self.world, size_of::<f32>());
        let (first, count) = match call.op {
            Op::ReduceScatter(_) => (self.rank * each, each),
            _ => (0, call.count),
        };
        let (address, at) = (address + (first * size) as u64, at + (first * comm_dtype.size()) as u64);
        // SAFETY: as above.
        let (exact, rounded) = unsafe {
            (ViewMut::<f32>::from_address(device, address, count), View::<T>::from_address(device, at, count))
        };
        convert(device, rounded, exact).map_err(failed)
    }

    /// The collective as work for the copy engines; `None` if NCCL runs it.
    fn copy_collective(&self, call: &Call, dtype: Dtype, address: u64) -> Option<CopyCollective> {
        let (kind, average) = match call.op {
            Op::AllReduce(reduce @ (Reduce::Sum | Reduce::Avg)) => (Kind::AllReduce, reduce == Reduce::Avg),
            Op::ReduceScatter(reduce @ (Reduce::Sum | Reduce::Avg)) => (Kind::ReduceScatter, reduce == Reduce::Avg),
            Op::AllGather => (Kind::AllGather, false),
            Op::Exchange => (Kind::Exchange, false),
            _ => return None,
        };
        let can = matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16);
        let wanted = self.use_copy_engines && self.overlapped && can;
        wanted.then_some(CopyCollective { kind, average, dtype, count: call.count, address })
    }

    /// Queues a collective on the copy engines.
    fn queue_copies(&mut self, call: &Call, work: &CopyCollective, ready_after: &[&CudaEvent]) -> Result<()> {
        let rank = self.rank;
        let Some(engines) = &mut self.engines else { return Ok(()) };
        // Copies in flight on other memory need not be waited for: a lane may start while the other one finishes.
        let queued = if self.waits_for_copies && !ready_after.is_empty() {
            engines.queue(work, ready_after, &self.stream)
        } else {
            let before = self.stream.record_event(None).map_err(|error| driver_error(call, rank, error))?;
            engines.queue(work, &[&before], &self.stream)
        };
        self.waits_for_copies = true;
        queued.map_err(|message| CommError::Backend { rank, call: call.to_string(), message })
    }

    fn queue_as(&mut self, call: &Call, dtype: Dtype, address: u64, ready_after: &[&CudaEvent]) -> Result<()> {
        if let Some(work) = self.copy_collective(call, dtype, address).filter(|_| self.engines.is_some()) {
            return self.queue_copies(call, &work, ready_after);
        }
        self.waits_for_copies = false;
        let Some(comm) = self.next_comm() else { return Ok(()) };
        let (each, ty) = (call.count / self.world, nccl_type(dtype));
        let stream = self.stream.cu_stream().cast();
        let all = address as *mut std::ffi::c_void;
        let own = (address + (self.rank * each * dtype.size()) as u64) as *mut std::ffi::c_void;
        // SAFETY: the memory is on this GPU, has `count` elements, and is handed over until the collective is complete.
        // NCCL works in place if this rank's chunk is at its offset.
        let queued = unsafe {
            match call.op {
                Op::AllReduce(reduce) => result::all_reduce(all, all, call.count, ty, nccl_op(reduce), comm, stream),
                Op::ReduceScatter(reduce) => result::reduce_scatter(all, own, each, ty, nccl_op(reduce), comm, stream),
                Op::AllGather => result::all_gather(own, all, each, ty, comm, stream),
                Op::Broadcast { root } => result::broadcast(all, all, call.count, ty, root as i32, comm, stream),
                Op::Barrier => return Ok(()),
                Op::Exchange => {
                    let message = "only copy engines run it, as an overlapped collective".to_string();
                    return Err(CommError::Backend { rank: self.rank, call: call.to_string(), message });
                }
            }
        };
        queued.map(drop).map_err(|error| CommError::Backend {
            rank: self.rank,
            call: call.to_string(),
            message: explain(Some(comm), &error),
        })
    }

    /// Aborts NCCL and the copy engines: their kernels end, and threads that wait for the GPU continue.
    fn abort_nccl(&mut self) {
        let engines = self.engines.take();
        let waiting = engines.as_ref().filter(|engines| !engines.is_idle());
        // SAFETY: not used again.
        let abort = |NcclComm(comm)| drop(unsafe { result::comm_abort(comm) });
        let mut all: Vec<NcclComm> =
            self.split_comms.drain(..).map(|(_, comm)| comm).chain(self.comm.take()).map(NcclComm).collect();
        let last = all.pop();
        if self.in_flight.is_empty() && waiting.is_none() {
            all.into_iter().chain(last).for_each(abort);
            engines.into_iter().for_each(CopyEngines::leak);
            return;
        }
        // Freeing a communicator waits for all kernels of the GPU, also those of other communicators, which end when
        // these are aborted: each is aborted on its own thread.
        let context = &self.context;
        std::thread::scope(|scope| {
            if let Some(engines) = waiting {
                drop(std::thread::Builder::new().spawn_scoped(scope, || engines.release(DRAIN_TIMEOUT)));
            }
            for comm in all {
                let on_thread = move || {
                    let _ = context.bind_to_thread();
                    abort(comm);
                };
                // Without a thread the communicator is leaked, and its kernels continue.
                drop(std::thread::Builder::new().spawn_scoped(scope, on_thread));
            }
            last.into_iter().for_each(abort);
        });
        engines.into_iter().for_each(CopyEngines::leak);
    }
}

impl Backend for Nccl {
    fn run(
        &mut self,
        seq: u64,
        call: &Call,
        memory: &mut Memory,
        ready: Option<Ready>,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn CompletionEvent>>> {
        let rank = self.rank;
        self.control.check_agreement(seq, call, deadline)?;
        let failed = |error: DriverError| driver_error(call, rank, error);
        self.context.bind_to_thread().map_err(failed)?;
        let ready = ready.and_then(|ready| ready.downcast::<CudaEvent>().ok());
        if let Some(ready) = &ready {
            self.stream.wait(ready).map_err(failed)?;
        }
        let begin = self.stream.record_event(TIMED).map_err(failed)?;
        if let Err(error) = self.retire_completed() {
            return Err(self.root_cause(call, deadline, error));
        }
        let address = memory.address as u64;
        let memory = address..address + memory.bytes as u64;
        if call.count > 0 {
            // Collectives in flight on the same memory come first.
            let overlaps = |other: &&InFlight| other.memory.start < memory.end && memory.start < other.memory.end;
            let overlapping: Vec<Arc<QueuedCollective>> =
                self.in_flight.iter().filter(overlaps).map(|other| other.collective.clone()).collect();
            // NCCL may connect to other ranks first.
            let (what, limit) = (*call, deadline.timeout.saturating_add(WATCHDOG_MARGIN));
            let _guarded = guard(limit, move || format!("rank {rank}: {what}, in NCCL"));
            let ready_after: Vec<&CudaEvent> =
                ready.as_deref().into_iter().chain(overlapping.iter().map(|collective| &collective.end)).collect();
            self.queue(call, address, if ready.is_some() { &ready_after } else { &[] })?;
        }
        let end = self.stream.record_event(TIMED).map_err(failed)?;
        let (since, timeout) = (Instant::now(), deadline.timeout);
        let collective =
            Arc::new(QueuedCollective { begin, end, compute: self.compute.clone(), rank, call: *call, timeout });
        self.in_flight.push_back(InFlight { collective: collective.clone(), memory, since, timeout });
        Ok(Some(collective))
    }

    fn set_overlapped(&mut self, overlapped: bool) {
        self.overlapped = overlapped;
    }

    fn set_max_ctas(&mut self, seq: u64, max_ctas: u32, deadline: Deadline) -> Result<()> {
        let call = Call { op: Op::Barrier, dtype: Dtype::U8, count: 0, comm_dtype: None };
        self.control.check_agreement(seq, &call, deadline)?;
        self.max_ctas = max_ctas;
        let known = self.split_comms.iter().any(|(ctas, _)| *ctas == max_ctas);
        let Some(all) = self.comm.filter(|_| max_ctas > 0 && !known) else { return Ok(()) };
        // NCCL requires that nothing is in flight when a communicator is created.
        self.drain()?;
        let (rank, timeout) = (self.rank, self.start_timeout);
        match split_with_max_ctas(all, rank, max_ctas, &mut self.control, &self.context, timeout) {
            Ok(comm) => self.split_comms.push((max_ctas, comm)),
            Err(error) => {
                // Leaks the communicator: the thread of the abandoned call may still use it. None of its kernels is in
                // flight.
                self.comm = None;
                return Err(error);
            }
        }
        Ok(())
    }

    fn set_copy_engines(&mut self, seq: u64, on: bool, deadline: Deadline) -> Result<()> {
        let call = Call { op: Op::Barrier, dtype: Dtype::U8, count: 0, comm_dtype: None };
        self.control.check_agreement(seq, &call, deadline)?;
        self.use_copy_engines = on;
        if on && self.engines.is_none() && self.world > 1 {
            let made = engines::open(self.rank, self.world, &mut self.control, &self.context, self.start_timeout);
            self.engines = Some(made?);
        }
        Ok(())
    }

    fn set_peer_buffer(
        &mut self,
        seq: u64,
        peer_buffer: Option<PeerBuffer>,
        deadline: Deadline,
    ) -> Result<Option<u64>> {
        let count = peer_buffer.as_ref().map_or(0, |peer_buffer| peer_buffer.bytes);
        let call = Call { op: Op::Exchange, dtype: Dtype::U8, count, comm_dtype: None };
        self.control.check_agreement(seq, &call, deadline)?;
        self.drain()?;
        let Some(engines) = self.engines.as_mut().filter(|_| self.world == 2) else { return Ok(None) };
        engines.set_peer_buffer(&mut self.control, peer_buffer.filter(|_| self.use_copy_engines), self.start_timeout)
    }

    fn check_progress(&mut self) -> Result<()> {
        self.check_in_flight()
    }

    fn abort(&mut self, error: &CommError) {
        self.control.abort(error);
        self.abort_nccl();
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if self.comm.is_none() {
            return;
        }
        let timeout = self.in_flight.iter().map(|in_flight| in_flight.timeout).max().unwrap_or_default();
        let (rank, limit) = (self.rank, timeout.saturating_add(SHUTDOWN_TIMEOUT + DRAIN_TIMEOUT + WATCHDOG_MARGIN));
        let _guarded = guard(limit, move || format!("rank {rank}: the shutdown of NCCL"));
        // The results of collectives in flight may still be used.
        let is_ok = loop {
            match self.check_in_flight() {
                Ok(()) if self.in_flight.is_empty() => break true,
                Ok(()) => std::thread::sleep(POLL_INTERVAL / 20),
                Err(error) => {
                    self.control.abort(&error);
                    break false;
                }
            }
        };
        if is_ok {
            let mut engines = self.engines.take();
            engines.iter_mut().for_each(CopyEngines::close);
            // No memory is freed while another rank's kernel may read it, or has it mapped. Ranks that have ended use
            // none.
            self.control.links().shutdown(SHUTDOWN_TIMEOUT);
            engines.into_iter().for_each(CopyEngines::free);
        }
        self.abort_nccl();
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
