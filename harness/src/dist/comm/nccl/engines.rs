//! Copy engines as the backend of what runs beside computing: [`copies`](super::super::copies)' commands, given to the driver.
//!
//! Every rank allocates one block, which the other processes of the host map (CUDA's inter-process memory). A lane is a stream: a command of
//! [`Command`] is one call of the driver there, or the launch of one kernel. A flag of another rank is set as NCCL's own copy-engine
//! collectives do it: the value is written into a cell of our own, and a copy of four bytes takes it over, behind the copy of the data.
//!
//! Whoever waits for a rank that is gone is let go by setting all flags far ahead ([`RELEASE`]), again and again: a signal that was on
//! its way may set one back.

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
use crate::escape::printable_lines;

/// A collective that copy engines carry.
#[derive(Clone, Copy, Debug)]
pub struct CopyCollective {
    pub kind: Kind,
    /// Whether a reduction is an average, and not a sum.
    pub average: bool,
    /// f32, bf16 or f16.
    pub dtype: Dtype,
    pub count: usize,
    pub address: u64,
}

/// One rank's lanes, and all ranks' blocks. Memory that is neither [closed](CopyEngines::close) nor [freed](CopyEngines::free) stays until the
/// process ends: after a failure another rank may still write there.
pub struct CopyEngines {
    context: Arc<CudaContext>,
    plan: Plan,
    addresses: Addresses,
    lanes: Vec<Lane>,
    /// Where what the other one of two ranks exchanges goes, or what it reads in place; and the begin of that rank's as this process sees it.
    peer_buffer: Option<(PeerBuffer, u64)>,
    /// A stream that waits for nothing, with a priority of its own, so that no other stream's waits hold it up.
    release: Arc<CudaStream>,
}

struct Lane {
    stream: Arc<CudaStream>,
    /// The stream as our kernels know it.
    device: Device,
}

/// How often is looked whether lanes have ended.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// All ranks call it. On any trouble of one rank all get the same error.
///
/// # Errors
/// Ranks on several hosts, memory that processes may not share, copies that do not arrive; and those of the sockets.
pub fn open(
    rank: usize,
    world: usize,
    control: &mut ControlLinks,
    context: &Arc<CudaContext>,
    timeout: Duration,
) -> Result<CopyEngines> {
    let mut status = StatusExchange { control, rank, world, deadline: Deadline::after(timeout) };
    let made = allocate(rank, world, context);
    let shown = made.as_ref().map(|(_, handle)| [handle.as_slice(), &host_name()].concat()).map_err(Clone::clone);
    let shown = match status.all_gather(shown) {
        Ok(shown) => shown,
        Err(error) => {
            // Nobody has opened it.
            made.into_iter().for_each(|(engines, _)| engines.free());
            return Err(error);
        }
    };
    // An error of this rank would have been everybody's.
    let (mut engines, _) = made.map_err(CommError::Setup)?;
    let tried = check_one_host(&shown)
        .and_then(|()| {
            let opened = engines.open_others(&shown);
            status.all_gather(opened.map(|()| Vec::new()))
        })
        .and_then(|_| {
            // Sooner than the others lose timeout, to say what it was.
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
                // Freed when all have closed it.
                if status.all_gather(Ok(Vec::new())).is_ok() {
                    engines.free();
                }
            }
            Err(error)
        }
    }
}

/// How long lanes may take to end when they are let go.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Ranks that show each other whether all is well.
struct StatusExchange<'a> {
    control: &'a mut ControlLinks,
    rank: usize,
    world: usize,
    deadline: Deadline,
}

impl StatusExchange<'_> {
    /// What every rank shows, by rank, or the same error on all ranks if any has one to show.
    fn all_gather(&mut self, own: Result<Vec<u8>, String>) -> Result<Vec<Vec<u8>>> {
        /// Bytes of what a rank shows: whether all is well, the length, and that much.
        const MAX_BYTES: usize = 1024;
        let (well, bytes) = match &own {
            Ok(bytes) => (1, bytes.as_slice()),
            Err(why) => (0, why.as_bytes()),
        };
        let bytes = &bytes[..bytes.len().min(MAX_BYTES - 3)];
        let mut all = vec![0; MAX_BYTES * self.world];
        let place = &mut all[MAX_BYTES * self.rank..][..MAX_BYTES];
        place[0] = well;
        place[1..3].copy_from_slice(&(bytes.len() as u16).to_le_bytes());
        place[3..3 + bytes.len()].copy_from_slice(bytes);
        let call = Call { op: Op::AllGather, dtype: Dtype::U8, count: all.len(), comm_dtype: None };
        let carried = self.control.carry(&call, &mut all, self.deadline);
        carried.map_err(|error| self.control.explain(&call, self.deadline, error))?;
        let (mut shown, mut errors) = (Vec::new(), String::new());
        for (rank, place) in all.chunks_exact(MAX_BYTES).enumerate() {
            let length = usize::from(u16::from_le_bytes([place[1], place[2]])).min(MAX_BYTES - 3);
            let bytes = &place[3..3 + length];
            if place[0] == 0 {
                errors += &format!("\n  rank {rank}: {}", printable_lines(bytes));
            }
            shown.push(bytes.to_vec());
        }
        match errors.is_empty() {
            true => Ok(shown),
            false => Err(refused(&errors)),
        }
    }
}

fn refused(errors: &str) -> CommError {
    CommError::Setup(format!(
        "copy engines cannot carry gradients here:{errors}\n  help: leave --copy-engines out, and NCCL carries them"
    ))
}

/// Functions that not every driver has, or that only this uses.
const FUNCTIONS: [&str; 5] = [
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuStreamWaitValue32_v2",
    "cuStreamWriteValue32_v2",
];

/// Whether the driver has them: calling one that is missing would end the process.
fn find_functions() -> Result<(), String> {
    // SAFETY: the driver's library is in this process already; looking for names changes nothing.
    let missing = unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY);
        if driver.is_null() {
            return Err("the driver's library libcuda.so.1 was not found".into());
        }
        let there = |name: &&&str| CString::new(**name).is_ok_and(|name| !libc::dlsym(driver, name.as_ptr()).is_null());
        FUNCTIONS.iter().find(|name| !there(name))
    };
    match missing {
        None => Ok(()),
        Some(name) => Err(format!("the driver does not have {name}: it is older than CUDA 12")),
    }
}

/// Whether all ranks, of which each shows a handle and its host's name, are on one. All ranks find the same.
fn check_one_host(shown: &[Vec<u8>]) -> Result<()> {
    let name = |rank: usize| {
        let bytes = shown[rank].get(HANDLE_BYTES..).unwrap_or_default();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        printable_lines(&bytes[..end])
    };
    match (1..shown.len()).find(|&rank| name(rank) != name(0)) {
        None => Ok(()),
        Some(other) => Err(refused(&format!(
            "\n  rank 0 is on host `{}`, rank {other} on `{}`: memory is shared on one host only",
            name(0),
            name(other)
        ))),
    }
}

/// Lanes, and a block with flags at zero, with the handle by which others open it.
fn allocate(
    rank: usize,
    world: usize,
    context: &Arc<CudaContext>,
) -> Result<(CopyEngines, [u8; HANDLE_BYTES]), String> {
    let say = |what: &'static str| move |error: DriverError| format!("{what}: {error}");
    find_functions()?;
    context.bind_to_thread().map_err(say("its GPU"))?;
    let (least, first) = get_priority_range().map_err(say("priorities of streams"))?;
    let stream = |priority| context.new_stream_with_priority(priority).map_err(say("a stream"));
    let mut lanes = Vec::new();
    for _ in 0..LANES {
        // A reduction is short, and others wait for it.
        let stream = stream(first)?;
        let device = Device::from_cuda_stream(stream.clone()).map_err(|error| error.to_string())?;
        lanes.push(Lane { stream, device });
    }
    let release = stream((first + 1).min(least))?;
    let plan = Plan::new(rank, world, LANES, SEGMENT);
    let block = plan.block();
    // SAFETY: it is freed once at most, by `free`. Memory of the driver's pools could not be shared this way.
    let own = unsafe { malloc_sync(block.bytes()) }.map_err(say("memory for what others send"))?;
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
    /// The block's handle, when its flags are zero.
    fn export(&self, own: u64) -> Result<[u8; HANDLE_BYTES], String> {
        let stream = &self.release;
        // SAFETY: the flags begin the block, which is ours alone yet.
        unsafe {
            memset_d8_async(own, 0, 2 * self.plan.block().flags(), stream.cu_stream())
                .and_then(|()| stream.synchronize())
                .map_err(|error| format!("clearing its flags: {error}"))?;
        }
        ipc::handle(own)
    }

    /// Maps the other ranks' blocks.
    fn open_others(&mut self, shown: &[Vec<u8>]) -> Result<(), String> {
        for (rank, shown) in shown.iter().enumerate() {
            if rank == self.addresses.rank {
                continue;
            }
            self.addresses.blocks[rank] = ipc::open(rank, shown)?;
        }
        Ok(())
    }

    /// From now on `peer_buffer` is where the other rank's part of an exchange goes, or what it reads in place; both ranks call it, with as many bytes
    /// or both without one. The peer_buffer before it, which nothing uses any more, is given back when both have closed it. On any trouble of one
    /// rank both get the same error, and memory stays until the process ends: the other one may have it open. Gives where the other rank's is
    /// read from; without NVLink nothing is, in place: the peer_buffer is given back then.
    ///
    /// # Errors
    /// Memory that processes may not share; and those of the sockets.
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
        let shown = status.all_gather(handle)?;
        let mut before = self.peer_buffer.take();
        before.iter_mut().for_each(|(_, there)| ipc::close(there));
        let opened = match peer_buffer {
            None => Ok(None),
            Some(peer_buffer) => match ipc::open(1 - rank, &shown[1 - rank]) {
                Ok(there) => Ok(Some((peer_buffer, there))),
                Err(why) => {
                    std::mem::forget(peer_buffer);
                    Err(why)
                }
            },
        };
        let can = |opened: &Option<(PeerBuffer, u64)>| {
            let too_far =
                |(peer_buffer, there): &(PeerBuffer, u64)| peer_buffer.is_peer_read() && !ipc::has_nvlink(*there);
            u8::from(!opened.as_ref().is_some_and(too_far))
        };
        let shown = match status.all_gather(opened.as_ref().map(|opened| vec![can(opened)]).map_err(Clone::clone)) {
            Ok(shown) => shown,
            Err(error) => {
                std::mem::forget((before, opened));
                return Err(error);
            }
        };
        // The other rank has closed what was before.
        self.peer_buffer = opened.unwrap_or_default();
        if shown.iter().any(|can| can != &[1]) {
            return self.set_peer_buffer(control, None, timeout);
        }
        Ok(self
            .peer_buffer
            .as_ref()
            .map(|(peer_buffer, there)| if peer_buffer.is_peer_read() { *there } else { peer_buffer.dest }))
    }

    /// Whether collectives give what they should, on all lanes: a driver that shares memory in name only is found out here.
    fn check(&mut self, deadline: Deadline) -> Result<(), String> {
        let (rank, world, each) = (self.addresses.rank, self.addresses.block.world, 3000);
        let failed = |error: tilewright::Error| format!("the first copies: {error}");
        let value = |rank: usize, i: usize| ((rank + 1) * (i % 7 + 1)) as f32;
        let values: Vec<f32> = (0..world * each).map(|i| value(rank, i)).collect();
        // What is freed on this stream is freed behind all that was queued.
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
                // Not among them: they are of memory of the caller's.
                Kind::Exchange | Kind::PeerRead => false,
            });
            if !good {
                return Err(format!("the first copies between GPUs brought something else ({kind:?})"));
            }
        }
        Ok(())
    }

    /// Queues a collective, which begins when all of `after` have been reached; what comes on `then` from now on comes behind it.
    ///
    /// # Errors
    /// The driver's; then lanes wait for what does not come, until they are let go.
    pub fn queue(&mut self, work: &CopyCollective, after: &[&CudaEvent], then: &CudaStream) -> Result<(), String> {
        let queued = self.queue_steps(work, after);
        // With an error, too: what was queued uses the memory.
        for lane in &self.lanes {
            lane.stream.record_event(None).and_then(|event| then.wait(&event)).map_err(|error| error.to_string())?;
        }
        queued
    }

    fn queue_steps(&mut self, work: &CopyCollective, after: &[&CudaEvent]) -> Result<(), String> {
        let (kind, there) = match (work.kind, &self.peer_buffer) {
            (Kind::Exchange, Some((peer_buffer, there))) => {
                let offset = peer_buffer.offset(work.address, work.count * work.dtype.size());
                let kind = if peer_buffer.is_peer_read() { Kind::PeerRead } else { Kind::Exchange };
                (kind, there + offset.ok_or("it is outside of the memory that is exchanged")?)
            }
            (Kind::Exchange, None) => return Err("there is no peer_buffer for it".into()),
            (kind, _) => (kind, 0),
        };
        for lane in &self.lanes {
            after.iter().try_for_each(|event| lane.stream.wait(event)).map_err(|error| error.to_string())?;
        }
        for (lane, step) in self.plan.steps(kind, work.count, work.dtype.size()) {
            for command in self.addresses.commands(lane, &step, work.address, there) {
                self.enqueue(&self.lanes[lane], command, work).map_err(|error| format!("{step:?}: {error}"))?;
            }
        }
        Ok(())
    }

    fn enqueue(&self, lane: &Lane, command: Command, work: &CopyCollective) -> Result<(), String> {
        let stream = lane.stream.cu_stream();
        // SAFETY: addresses are of blocks, which all ranks keep until all have ended, and of the buffer, which is this collective's; the
        // plan sees to it that nobody else uses them meanwhile. Words are aligned to lines.
        let given = unsafe {
            match command {
                Command::Copy { to, from, bytes } => sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream),
                Command::Write { at, value } => {
                    let flags = sys::CUstreamWriteValue_flags_enum::CU_STREAM_WRITE_VALUE_DEFAULT;
                    sys::cuStreamWriteValue32_v2(stream, at, value, flags as u32)
                }
                Command::Wait { at, value } => {
                    // What another GPU's copy has written before this word is seen behind it without a flush; that is for other devices' writes.
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
        given.result().map_err(|error| error.to_string())
    }

    fn reduce<T: FloatElement>(&self, lane: &Lane, command: Command, average: bool) -> Result<(), String> {
        let Command::Reduce { own, recv, stride, send, bytes } = command else { return Ok(()) };
        let (rank, world, size) = (self.addresses.rank, self.addresses.block.world, size_of::<T>());
        let (device, n, stride) = (&lane.device, bytes / size, stride / size);
        // SAFETY: as for every command; all of it has been written when the lane comes to this, and nobody else uses it before the lane
        // says that it has.
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

    /// Whether all that was queued has ended, well or not.
    pub fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| {
            // SAFETY: the stream lives.
            let state = unsafe { sys::cuStreamQuery(lane.stream.cu_stream()) };
            state != sys::CUresult::CUDA_ERROR_NOT_READY
        })
    }

    /// Lets go all that waits for other ranks; from then on memory holds anything. Whether the lanes have ended after that.
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
                tracing::warn!("lanes of copy engines do not end");
                return false;
            }
            for (lane, from) in (0..self.lanes.len()).flat_map(|lane| (0..world).map(move |from| (lane, from))) {
                let (at, value) = (self.addresses.flag(lane, from), self.plan.last_signal(lane).wrapping_add(RELEASE));
                let flags = sys::CUstreamWriteValue_flags_enum::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
                // SAFETY: a flag of our own block, which is not freed before this has returned.
                let _ = unsafe { sys::cuStreamWriteValue32_v2(self.release.cu_stream(), at, value, flags) };
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Gives the other ranks' memory back, which our lanes do not use any more: they have ended.
    pub fn close(&mut self) {
        let own = self.addresses.rank;
        let others = self.addresses.blocks.iter_mut().enumerate().filter(|(rank, _)| *rank != own);
        others.for_each(|(_, block)| ipc::close(block));
        self.peer_buffer.iter_mut().for_each(|(_, there)| ipc::close(there));
    }

    /// Leaves all memory as it is until the process ends: other ranks may still write there.
    pub fn leak(self) {
        std::mem::forget(self.peer_buffer);
    }

    /// Frees our block, which no other rank uses any more: they have closed it.
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

    /// What both ranks of a pair find when each shows what `own` says.
    fn shown(own: impl Fn(usize) -> Result<Vec<u8>, String> + Sync) -> [Result<Vec<Vec<u8>>>; 2] {
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
        for found in shown(|rank| Ok(vec![rank as u8 + 7; 3 * rank])) {
            assert_eq!(found, Ok(vec![vec![], vec![8; 3]]));
        }
        let [here, there] =
            shown(|rank| if rank == 1 { Err("it has no way to rank 0".into()) } else { Ok(vec![1; 64]) });
        assert_eq!(here, there);
        let message = here.unwrap_err().to_string();
        for part in ["rank 1: it has no way to rank 0", "leave --copy-engines out"] {
            assert!(message.contains(part), "{message}");
        }
        // What is too long is cut off, and does no harm.
        let [here, there] = shown(|rank| if rank == 0 { Err("why ".repeat(1000)) } else { Ok(Vec::new()) });
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
