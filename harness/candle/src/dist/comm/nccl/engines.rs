//! Runs overlapped collectives on copy engines: submits the commands of [`copies`](super::super::copies) to the driver.
//!
//! Every rank allocates one block, which the other processes of the host map (CUDA IPC). A lane is a stream: a
//! [`Command`] is one driver call on it, or one kernel launch. A flag of another rank is set in the same way as in
//! NCCL's copy-engine collectives: the value is written into a cell of the local block, and a copy of four bytes
//! transfers it after the copy of the data.
//!
//! Lanes that wait for a lost rank are released by setting all flags far ahead ([`RELEASE`]), repeatedly: a signal in
//! flight may set one back.

use std::ffi::CString;
use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use tilewright::cudarc::driver::result::stream::get_priority_range;
use tilewright::cudarc::driver::result::{free_sync, malloc_sync, memset_d8_async};
use tilewright::cudarc::driver::sys;
use tilewright::cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use tilewright::kernels::{FloatElement, rank_sum};
use tilewright::{Buffer, Device, View, ViewMut};

use super::super::backend::{Deadline, PeerBuffer};
use super::super::call::{Call, Dtype, Op};
use super::super::copies::plan::{LANES, RELEASE, SEGMENT};
use super::super::copies::{Addresses, Command, Kind, Plan};
use super::super::{CommError, Result};
use super::ControlLinks;
use super::ipc::{self, HANDLE_BYTES};
use super::start::host_name;
use tilewright::escape::printable_lines;

/// A collective that copy engines run.
#[derive(Clone, Copy, Debug)]
pub struct CopyCollective {
    pub kind: Kind,
    /// Whether a reduction averages instead of summing.
    pub average: bool,
    /// f32, bf16 or f16.
    pub dtype: Dtype,
    pub count: usize,
    pub address: u64,
}

/// One rank's lanes, and all ranks' blocks. Memory that is neither [closed](CopyEngines::close) nor
/// [freed](CopyEngines::free) is leaked: after a failure another rank may still write to it.
pub struct CopyEngines {
    context: Arc<CudaContext>,
    plan: Plan,
    addresses: Addresses,
    lanes: Vec<Lane>,
    /// The memory for exchanges with the peer, and the address of the peer's memory in this process.
    peer_buffer: Option<(PeerBuffer, u64)>,
    /// A stream that never waits, with a different priority, so that waits of other streams do not delay it.
    release: Arc<CudaStream>,
}

struct Lane {
    stream: Arc<CudaStream>,
    /// The stream as a device for Tilewright kernels.
    device: Device,
}

/// Interval of checks for completion.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Creates the copy engines. All ranks call it; if one fails, all get the same error.
///
/// # Errors
/// Ranks on several hosts, memory that cannot be shared, copies that do not arrive, and errors of the sockets.
pub fn open(
    rank: usize,
    world: usize,
    control: &mut ControlLinks,
    context: &Arc<CudaContext>,
    timeout: Duration,
) -> Result<CopyEngines> {
    let mut status = StatusExchange { control, rank, world, deadline: Deadline::after(timeout) };
    let made = allocate(rank, world, context);
    let payload = made.as_ref().map(|(_, handle)| [handle.as_slice(), &host_name()].concat()).map_err(Clone::clone);
    let payloads = match status.all_gather(payload) {
        Ok(payloads) => payloads,
        Err(error) => {
            // No rank has mapped the block.
            made.into_iter().for_each(|(engines, _)| engines.free());
            return Err(error);
        }
    };
    // An error of this rank would have been returned above.
    let (mut engines, _) = made.map_err(CommError::Setup)?;
    let tried = check_one_host(&payloads)
        .and_then(|()| {
            let opened = engines.open_others(&payloads);
            status.all_gather(opened.map(|()| Vec::new()))
        })
        .and_then(|_| {
            // Earlier than the other ranks' timeout, to report the cause.
            let checked = engines.check(Deadline::after(timeout / 3));
            status.all_gather(checked.map(|()| Vec::new()))
        });
    match tried {
        Ok(_) => {
            tracing::debug!("{LANES} lanes of copy engines, blocks of {} bytes", engines.plan.block().bytes());
            Ok(engines)
        }
        Err(error) => {
            if engines.release(RELEASE_TIMEOUT) {
                engines.close();
                // The block is freed when all ranks have unmapped it.
                if status.all_gather(Ok(Vec::new())).is_ok() {
                    engines.free();
                }
            }
            Err(error)
        }
    }
}

/// Timeout for released lanes to finish.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Exchanges outcomes between ranks.
struct StatusExchange<'a> {
    control: &'a mut ControlLinks,
    rank: usize,
    world: usize,
    deadline: Deadline,
}

impl StatusExchange<'_> {
    /// Returns the bytes of all ranks, by rank; if any rank has an error, all ranks get the same error.
    fn all_gather(&mut self, own: Result<Vec<u8>, String>) -> Result<Vec<Vec<u8>>> {
        /// Bytes of one rank's outcome: success flag, length, payload.
        const MAX_BYTES: usize = 1024;
        let (success, bytes) = match &own {
            Ok(bytes) => (1, bytes.as_slice()),
            Err(why) => (0, why.as_bytes()),
        };
        let bytes = &bytes[..bytes.len().min(MAX_BYTES - 3)];
        let mut all = vec![0; MAX_BYTES * self.world];
        let slot = &mut all[MAX_BYTES * self.rank..][..MAX_BYTES];
        slot[0] = success;
        slot[1..3].copy_from_slice(&(bytes.len() as u16).to_le_bytes());
        slot[3..3 + bytes.len()].copy_from_slice(bytes);
        let call = Call { op: Op::AllGather, dtype: Dtype::U8, count: all.len(), comm_dtype: None };
        let outcome = self.control.execute(&call, &mut all, self.deadline);
        outcome.map_err(|error| self.control.explain(&call, self.deadline, error))?;
        let (mut payloads, mut errors) = (Vec::new(), String::new());
        for (rank, slot) in all.chunks_exact(MAX_BYTES).enumerate() {
            let length = usize::from(u16::from_le_bytes([slot[1], slot[2]])).min(MAX_BYTES - 3);
            let bytes = &slot[3..3 + length];
            if slot[0] == 0 {
                errors += &format!("\n  rank {rank}: {}", printable_lines(bytes));
            }
            payloads.push(bytes.to_vec());
        }
        match errors.is_empty() {
            true => Ok(payloads),
            false => Err(unavailable(&errors)),
        }
    }
}

fn unavailable(errors: &str) -> CommError {
    CommError::Setup(format!(
        "copy engines cannot transfer gradients here:{errors}\n  help: leave --copy-engines out; NCCL then transfers them"
    ))
}

/// Driver functions that older drivers lack, or that only this module uses.
const FUNCTIONS: [&str; 5] = [
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuStreamWaitValue32_v2",
    "cuStreamWriteValue32_v2",
];

/// Checks that the driver has all [`FUNCTIONS`]: a call to a missing one would end the process.
fn check_driver_functions() -> Result<(), String> {
    // SAFETY: the driver's library is loaded already; looking up names changes nothing.
    let missing = unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY);
        if driver.is_null() {
            return Err("the driver's library libcuda.so.1 was not found".into());
        }
        let is_present =
            |name: &&&str| CString::new(**name).is_ok_and(|name| !libc::dlsym(driver, name.as_ptr()).is_null());
        FUNCTIONS.iter().find(|name| !is_present(name))
    };
    match missing {
        None => Ok(()),
        Some(name) => Err(format!("the driver does not have {name}: it is older than CUDA 12")),
    }
}

/// Fails unless all ranks are on one host; each rank sent an IPC handle and its host name. All ranks get the same
/// result.
fn check_one_host(payloads: &[Vec<u8>]) -> Result<()> {
    let name = |rank: usize| {
        let bytes = payloads[rank].get(HANDLE_BYTES..).unwrap_or_default();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        printable_lines(&bytes[..end])
    };
    match (1..payloads.len()).find(|&rank| name(rank) != name(0)) {
        None => Ok(()),
        Some(other) => Err(unavailable(&format!(
            "\n  rank 0 is on host `{}`, rank {other} on `{}`: memory can be shared on one host only",
            name(0),
            name(other)
        ))),
    }
}

/// Allocates the lanes, and a block with zeroed flags with its IPC handle.
fn allocate(
    rank: usize,
    world: usize,
    context: &Arc<CudaContext>,
) -> Result<(CopyEngines, [u8; HANDLE_BYTES]), String> {
    let say = |what: &'static str| move |error: DriverError| format!("{what}: {error}");
    check_driver_functions()?;
    context.bind_to_thread().map_err(say("its GPU"))?;
    let (least, first) = get_priority_range().map_err(say("stream priorities"))?;
    let stream = |priority| context.new_stream_with_priority(priority).map_err(say("a stream"));
    let mut lanes = Vec::new();
    for _ in 0..LANES {
        // High priority: a reduction is short, and other ranks wait for it.
        let stream = stream(first)?;
        let device = Device::from_cuda_stream(stream.clone()).map_err(|error| error.to_string())?;
        lanes.push(Lane { stream, device });
    }
    let release = stream((first + 1).min(least))?;
    let plan = Plan::new(rank, world, LANES, SEGMENT);
    let block = plan.block();
    // SAFETY: freed at most once, by `free`. Memory of the driver's pools cannot be shared in this way.
    let own = unsafe { malloc_sync(block.bytes()) }.map_err(say("memory for data of other ranks"))?;
    let mut blocks = vec![0; world];
    blocks[rank] = own;
    let addresses = Addresses { rank, block, blocks };
    let engines = CopyEngines { context: context.clone(), plan, addresses, lanes, peer_buffer: None, release };
    match engines.export(own) {
        Ok(handle) => Ok((engines, handle)),
        Err(why) => {
            engines.free();
            Err(why)
        }
    }
}

impl CopyEngines {
    /// Zeroes the flags, and returns the block's IPC handle.
    fn export(&self, own: u64) -> Result<[u8; HANDLE_BYTES], String> {
        let stream = &self.release;
        // SAFETY: the flags are at the start of the block, which only this rank uses yet.
        unsafe {
            memset_d8_async(own, 0, 2 * self.plan.block().flags(), stream.cu_stream())
                .and_then(|()| stream.synchronize())
                .map_err(|error| format!("clearing its flags: {error}"))?;
        }
        ipc::handle(own)
    }

    /// Maps the other ranks' blocks.
    fn open_others(&mut self, payloads: &[Vec<u8>]) -> Result<(), String> {
        for (rank, payload) in payloads.iter().enumerate() {
            if rank == self.addresses.rank {
                continue;
            }
            self.addresses.blocks[rank] = ipc::open(rank, payload)?;
        }
        Ok(())
    }

    /// Sets the memory for exchanges with the peer; both ranks call it, with the same number of bytes or both with
    /// `None`. The previous memory, which is no longer in use, is released when both ranks have unmapped it. If one
    /// rank fails, both get the same error, and the memory is leaked, since the peer may have it mapped. Returns the
    /// address from which the peer's data is read. Peer reads need NVLink: without it, returns `None` and releases the
    /// memory.
    ///
    /// # Errors
    /// Memory that cannot be shared, and errors of the sockets.
    pub fn set_peer_buffer(
        &mut self,
        control: &mut ControlLinks,
        peer_buffer: Option<PeerBuffer>,
        timeout: Duration,
    ) -> Result<Option<u64>> {
        let (rank, world) = (self.addresses.rank, self.addresses.block.world);
        let mut status = StatusExchange { control, rank, world, deadline: Deadline::after(timeout) };
        let handle = peer_buffer
            .as_ref()
            .map_or(Ok(Vec::new()), |peer_buffer| ipc::handle(peer_buffer.dest).map(|handle| handle.to_vec()));
        let handles = status.all_gather(handle)?;
        let mut before = self.peer_buffer.take();
        before.iter_mut().for_each(|(_, peer_address)| ipc::close(peer_address));
        let opened = match peer_buffer {
            None => Ok(None),
            Some(peer_buffer) => match ipc::open(1 - rank, &handles[1 - rank]) {
                Ok(peer_address) => Ok(Some((peer_buffer, peer_address))),
                Err(why) => {
                    std::mem::forget(peer_buffer);
                    Err(why)
                }
            },
        };
        let can = |opened: &Option<(PeerBuffer, u64)>| {
            let too_far = |(peer_buffer, peer_address): &(PeerBuffer, u64)| {
                peer_buffer.is_peer_read() && !ipc::has_nvlink(*peer_address)
            };
            u8::from(!opened.as_ref().is_some_and(too_far))
        };
        let usable = match status.all_gather(opened.as_ref().map(|opened| vec![can(opened)]).map_err(Clone::clone)) {
            Ok(usable) => usable,
            Err(error) => {
                std::mem::forget((before, opened));
                return Err(error);
            }
        };
        // The peer has unmapped the previous memory.
        self.peer_buffer = opened.unwrap_or_default();
        if usable.iter().any(|can| can != &[1]) {
            return self.set_peer_buffer(control, None, timeout);
        }
        Ok(self.peer_buffer.as_ref().map(
            |(peer_buffer, peer_address)| if peer_buffer.is_peer_read() { *peer_address } else { peer_buffer.dest },
        ))
    }

    /// Checks the results of test collectives on all lanes: detects drivers that claim to share memory and do not.
    fn check(&mut self, deadline: Deadline) -> Result<(), String> {
        let (rank, world, each) = (self.addresses.rank, self.addresses.block.world, 3000);
        let failed = |error: tilewright::Error| format!("the first copies: {error}");
        let value = |rank: usize, i: usize| ((rank + 1) * (i % 7 + 1)) as f32;
        let values: Vec<f32> = (0..world * each).map(|i| value(rank, i)).collect();
        // Memory that is freed on this stream is freed after all queued work.
        let stream = self.lanes[0].stream.clone();
        let kinds = [Kind::AllReduce, Kind::ReduceScatter, Kind::AllGather, Kind::AllReduce];
        let mut buffers = Vec::new();
        for kind in kinds {
            let mut buffer = Buffer::from_slice(&self.lanes[0].device, &values).map_err(failed)?;
            let address = buffer.view_mut().address();
            buffers.push(buffer);
            let after = stream.record_event(None).map_err(|error| error.to_string())?;
            let work = CopyCollective { kind, average: false, dtype: Dtype::F32, count: values.len(), address };
            self.queue(&work, &[&after], &stream)?;
        }
        while !self.is_idle() {
            if deadline.is_over() {
                return Err("the first copies between GPUs did not arrive".into());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        for (kind, buffer) in kinds.iter().zip(&buffers) {
            let found = buffer.to_vec().map_err(failed)?;
            let sum = |i: usize| (0..world).map(|rank| value(rank, i)).sum::<f32>();
            let good = found.iter().enumerate().all(|(i, &found)| match kind {
                Kind::AllReduce => found == sum(i),
                Kind::ReduceScatter => i / each != rank || found == sum(i),
                Kind::AllGather => found == value(i / each, i),
                // Not tested: these need memory of the caller.
                Kind::Exchange | Kind::PeerRead => false,
            });
            if !good {
                return Err(format!("the first copies between GPUs gave wrong data ({kind:?})"));
            }
        }
        Ok(())
    }

    /// Queues a collective, which starts when all events in `after` are complete; work that is queued on `then` from
    /// now on runs after it.
    ///
    /// # Errors
    /// Errors of the driver; lanes then wait until they are released.
    pub fn queue(&mut self, work: &CopyCollective, after: &[&CudaEvent], then: &CudaStream) -> Result<(), String> {
        let queued = self.queue_steps(work, after);
        // After an error too: the queued work uses the memory.
        for lane in &self.lanes {
            lane.stream.record_event(None).and_then(|event| then.wait(&event)).map_err(|error| error.to_string())?;
        }
        queued
    }

    fn queue_steps(&mut self, work: &CopyCollective, after: &[&CudaEvent]) -> Result<(), String> {
        let (kind, peer_address) = match (work.kind, &self.peer_buffer) {
            (Kind::Exchange, Some((peer_buffer, peer_address))) => {
                let offset = peer_buffer.offset(work.address, work.count * work.dtype.size());
                let kind = if peer_buffer.is_peer_read() { Kind::PeerRead } else { Kind::Exchange };
                (kind, peer_address + offset.ok_or("it is outside of the exchanged memory")?)
            }
            (Kind::Exchange, None) => return Err("no buffer is set for it".into()),
            (kind, _) => (kind, 0),
        };
        for lane in &self.lanes {
            after.iter().try_for_each(|event| lane.stream.wait(event)).map_err(|error| error.to_string())?;
        }
        for (lane, step) in self.plan.steps(kind, work.count, work.dtype.size()) {
            for command in self.addresses.commands(lane, &step, work.address, peer_address) {
                self.enqueue(&self.lanes[lane], command, work).map_err(|error| format!("{step:?}: {error}"))?;
            }
        }
        Ok(())
    }

    fn enqueue(&self, lane: &Lane, command: Command, work: &CopyCollective) -> Result<(), String> {
        let stream = lane.stream.cu_stream();
        // SAFETY: the addresses are in blocks, which stay allocated until all ranks have finished, or in the buffer,
        // which belongs to this collective; the plan guarantees exclusive use. Words are aligned to cache lines.
        let status = unsafe {
            match command {
                Command::Copy { to, from, bytes } => sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream),
                Command::Write { at, value } => {
                    let flags = sys::CUstreamWriteValue_flags_enum::CU_STREAM_WRITE_VALUE_DEFAULT;
                    sys::cuStreamWriteValue32_v2(stream, at, value, flags as u32)
                }
                Command::Wait { at, value } => {
                    // Data that another GPU's copy wrote before this word is visible after it without a flush; flushes
                    // are for writes of other devices.
                    let flags = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ;
                    sys::cuStreamWaitValue32_v2(stream, at, value, flags as u32)
                }
                Command::Reduce { .. } => {
                    return match work.dtype {
                        Dtype::Bf16 => self.reduce::<bf16>(lane, command, work.average),
                        Dtype::F16 => self.reduce::<f16>(lane, command, work.average),
                        _ => self.reduce::<f32>(lane, command, work.average),
                    };
                }
            }
        };
        status.result().map_err(|error| error.to_string())
    }

    fn reduce<T: FloatElement>(&self, lane: &Lane, command: Command, average: bool) -> Result<(), String> {
        let Command::Reduce { own, recv, stride, send, bytes } = command else { return Ok(()) };
        let (rank, world, size) = (self.addresses.rank, self.addresses.block.world, size_of::<T>());
        let (device, n, stride) = (&lane.device, bytes / size, stride / size);
        // SAFETY: as for every command; the data is written when the lane reaches this command, and unused by others
        // until the lane signals completion.
        let (y, x, copy) = unsafe {
            (
                ViewMut::<T>::from_address(device, own, n),
                View::<T>::from_address(device, recv, (world - 2) * stride + n),
                send.map(|at| ViewMut::<T>::from_address(device, at, n)),
            )
        };
        let ranks = rank_sum::RankReduction { rank, world, average };
        rank_sum::reduce(device, y, (x, stride), copy, ranks, None).map_err(|error| error.to_string())
    }

    /// Whether all queued work has finished, with or without errors.
    pub fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| {
            // SAFETY: the stream is alive.
            let state = unsafe { sys::cuStreamQuery(lane.stream.cu_stream()) };
            state != sys::CUresult::CUDA_ERROR_NOT_READY
        })
    }

    /// Releases all waits for other ranks; memory is undefined from then on. Returns whether the lanes have finished.
    pub fn release(&self, timeout: Duration) -> bool {
        let deadline = Deadline::after(timeout);
        if self.context.bind_to_thread().is_err() {
            return false;
        }
        let world = self.addresses.block.world;
        loop {
            if self.is_idle() {
                return true;
            }
            if deadline.is_over() {
                tracing::warn!("lanes of copy engines do not finish");
                return false;
            }
            for (lane, from) in (0..self.lanes.len()).flat_map(|lane| (0..world).map(move |from| (lane, from))) {
                let (at, value) = (self.addresses.flag(lane, from), self.plan.last_signal(lane).wrapping_add(RELEASE));
                let flags = sys::CUstreamWriteValue_flags_enum::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
                // SAFETY: a flag of the local block, which is freed only after this returns.
                let _ = unsafe { sys::cuStreamWriteValue32_v2(self.release.cu_stream(), at, value, flags) };
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Unmaps the other ranks' memory. The lanes have finished.
    pub fn close(&mut self) {
        let own = self.addresses.rank;
        let others = self.addresses.blocks.iter_mut().enumerate().filter(|(rank, _)| *rank != own);
        others.for_each(|(_, block)| ipc::close(block));
        self.peer_buffer.iter_mut().for_each(|(_, peer_address)| ipc::close(peer_address));
    }

    /// Leaks all memory: other ranks may still write to it.
    pub fn leak(self) {
        std::mem::forget(self.peer_buffer);
    }

    /// Frees the local block, which all other ranks have unmapped.
    pub fn free(self) {
        // SAFETY: allocated by `allocate`, and not used again.
        let _ = unsafe { free_sync(self.addresses.blocks[self.addresses.rank]) };
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::super::super::links::OverLinks;
    use super::super::super::tcp::Sockets;
    use super::*;

    /// The results of both ranks of a pair, with the outcomes that `own` returns.
    fn gathered(own: impl Fn(usize) -> Result<Vec<u8>, String> + Sync) -> [Result<Vec<Vec<u8>>>; 2] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let here = listener.accept().unwrap().0;
        let run = |rank: usize, peers: Vec<Option<TcpStream>>| {
            let mut control: ControlLinks = OverLinks::new(Sockets::new(rank, peers).unwrap());
            let deadline = Deadline::after(Duration::from_secs(20));
            StatusExchange { control: &mut control, rank, world: 2, deadline }.all_gather(own(rank))
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| run(1, vec![Some(there), None]));
            [run(0, vec![None, Some(here)]), other.join().unwrap()]
        })
    }

    #[test]
    fn all_gather_returns_all_statuses_or_one_error() {
        for found in gathered(|rank| Ok(vec![rank as u8 + 7; 3 * rank])) {
            assert_eq!(found, Ok(vec![vec![], vec![8; 3]]));
        }
        let [here, there] =
            gathered(|rank| if rank == 1 { Err("it has no peer access to rank 0".into()) } else { Ok(vec![1; 64]) });
        assert_eq!(here, there);
        let message = here.unwrap_err().to_string();
        for part in ["rank 1: it has no peer access to rank 0", "leave --copy-engines out"] {
            assert!(message.contains(part), "{message}");
        }
        // Longer texts are truncated.
        let [here, there] = gathered(|rank| if rank == 0 { Err("why ".repeat(1000)) } else { Ok(Vec::new()) });
        assert!(here == there && here.unwrap_err().to_string().contains("why why"));
    }

    #[test]
    fn ranks_on_several_hosts_are_named() {
        let on = |host: &str| [vec![0xff; HANDLE_BYTES], host.as_bytes().to_vec(), vec![0; 3]].concat();
        assert_eq!(check_one_host(&[on("a"), on("a")]), Ok(()));
        let message = check_one_host(&[on("a"), on("a"), on("b")]).unwrap_err().to_string();
        for part in ["rank 2", "`a`", "`b`", "--copy-engines"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(host_name().len(), 64);
    }
}
