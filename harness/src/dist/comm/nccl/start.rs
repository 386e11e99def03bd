//! How GPUs' ranks come together: sockets for what they show each other, and NCCL's own communicator.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use tilewright::cudarc::driver::CudaContext;
use tilewright::cudarc::nccl::result::{self, NcclError};
use tilewright::cudarc::nccl::sys;

use super::super::backend::{Backend, Deadline};
use super::super::call::{Call, Dtype, Op};
use super::super::error::seconds;
use super::super::handle::PANICKED;
use super::super::links::OverLinks;
use super::super::tcp::Sockets;
use super::super::{CommError, Communicator, Options, Result};
use super::{ControlLinks, POLL_INTERVAL, SPIN, explain};
use crate::dist::rank::RankInfo;
use crate::dist::rendezvous::{self, Job};
use crate::dist::watchdog::{WATCHDOG_MARGIN, guard};
use crate::escape::printable_lines;

/// Whether NCCL is there. Candle's CUDA back end links CUDA's libraries, and NCCL with them: such a program does not start without it.
pub fn is_installed() -> bool {
    #[cfg(feature = "cuda")]
    return true;
    // SAFETY: only looks whether the library can be loaded.
    #[cfg(not(feature = "cuda"))]
    unsafe {
        sys::is_culib_present()
    }
}

/// Sockets for what ranks show each other: where rank 0 says, at a port of its own.
pub fn connect_control(
    host: &Communicator,
    rank_info: &RankInfo,
    job: &Job,
    id: &[u8],
    options: Options,
) -> Result<ControlLinks> {
    let failed = |error| CommError::Setup(format!("no port for NCCL's ranks to meet: {error}"));
    let mut port = [0_u32];
    let address = match host.backend() {
        "mpi" => rank0_address(host)?,
        _ => rank_info.master.0.clone(),
    };
    if host.rank() == 0 {
        let free = TcpListener::bind((address.as_str(), 0)).and_then(|free| free.local_addr()).map_err(failed)?;
        port = [free.port().into()];
    }
    host.broadcast(&mut port, 0)?;
    // NcclComm anew by rank 0 for every world, so that it tells jobs apart.
    let name: String = id.iter().take(32).map(|byte| format!("{byte:02x}")).collect();
    let job = Job { name, access: job.access.clone() };
    let (rank, world) = (host.rank(), host.world());
    let rank_info = RankInfo { rank, world, master: (address, port[0] as u16), ..rank_info.clone() };
    let sockets = rendezvous::sockets(&rank_info, &job, "calls of GPUs", options)?;
    Ok(OverLinks::new(Sockets::new(rank, sockets)?.with_spin(SPIN)))
}

/// This host's name, in as many bytes on all: zeros follow it, one at least.
pub fn host_name() -> [u8; 64] {
    let mut name = [0; 64];
    // SAFETY: the buffer has room for so many bytes, and a zero stays behind them.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    name
}

/// Rank 0's address where nobody named one: this host, or its name where there are several.
fn rank0_address(host: &Communicator) -> Result<String> {
    let own = host_name();
    let mut names = vec![0_u8; own.len() * host.world()];
    names[own.len() * host.rank()..][..own.len()].copy_from_slice(&own);
    host.all_gather(&mut names)?;
    let (first, others) = names.split_at(own.len());
    if others.chunks(own.len()).all(|other| other == first) {
        return Ok("127.0.0.1".into());
    }
    let end = first.iter().position(|byte| *byte == 0).unwrap_or(first.len());
    Ok(printable_lines(&first[..end]))
}

/// NCCL's handle, for the thread that gets it.
pub struct NcclComm(pub sys::ncclComm_t);

// SAFETY: NCCL's communicators belong to no thread; one at a time uses this one.
unsafe impl Send for NcclComm {}

/// NCCL's communicator of all ranks.
pub fn initialize(
    rank: usize,
    world: usize,
    id: [u8; 128],
    control: &mut ControlLinks,
    context: &Arc<CudaContext>,
    timeout: Duration,
) -> Result<sys::ncclComm_t> {
    let help = "every rank needs a GPU of its own";
    with_timeout(rank, control, context, (timeout, help), move || {
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as _) };
        let mut comm: sys::ncclComm_t = std::ptr::null_mut();
        // SAFETY: the communicator's handle is written by the call; this thread's context is the GPU's.
        let made = unsafe { result::comm_init_rank(&mut comm, world as i32, id, rank as i32) };
        made.map(|_| NcclComm(comm)).map_err(|error| explain(None, &error))
    })
}

/// The beginning of `ncclConfig_t`, which is as large as its first field says, and grows with NCCL's versions: that of 2.17, and one
/// field more, without which padding would end up in it.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    net_name: *const std::ffi::c_char,
    split_share: i32,
    traffic_class: i32,
}

/// NCCL's value for what is left to it, and the mark of a `ncclConfig_t`.
const UNDEFINED: i32 = i32::MIN;
const MAGIC: u32 = 0xcafe_beef;

/// The first version with `ncclCommSplit`, 2.18.1, as `ncclGetVersion` says it.
const MIN_SPLIT_VERSION: i32 = 21_801;

/// Another communicator of the ranks of `all`, for the same GPUs, whose kernels have at most `blocks` blocks: each takes a
/// multiprocessor. Nothing is under way on `all`.
pub fn split_with_max_ctas(
    all: sys::ncclComm_t,
    rank: usize,
    blocks: u32,
    control: &mut ControlLinks,
    context: &Arc<CudaContext>,
    timeout: Duration,
) -> Result<sys::ncclComm_t> {
    let all = NcclComm(all);
    let help = "`--nccl-ctas 0` does without a limit of NCCL's blocks";
    with_timeout(rank, control, context, (timeout, help), move || {
        let version = result::get_nccl_version().map_err(|error| explain(None, &error))?;
        if version < MIN_SPLIT_VERSION {
            return Err(format!(
                "its version is {version}, and the first that limits blocks of some collectives is {MIN_SPLIT_VERSION}"
            ));
        }
        // All of it, not the pointer alone, which may not move between threads.
        let all = all;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: 21_700,
            blocking: UNDEFINED,
            // Without clusters, which would wait for several multiprocessors of one group to be free at once.
            cga_cluster_size: 0,
            min_ctas: 1,
            max_ctas: i32::try_from(blocks).unwrap_or(i32::MAX),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        };
        let mut comm: sys::ncclComm_t = std::ptr::null_mut();
        // SAFETY: `all` works, and nobody else uses it now; NCCL reads as much of the configuration as its size says.
        let made = unsafe { sys::ncclCommSplit(all.0, 0, rank as i32, &raw mut comm, (&raw mut config).cast()) };
        match made {
            sys::ncclResult_t::ncclSuccess => Ok(NcclComm(comm)),
            error => Err(explain(Some(all.0), &NcclError(error))),
        }
    })
}

/// What NCCL itself would wait for without end if a rank does not come is made on a thread that can be left behind.
fn with_timeout(
    rank: usize,
    others: &mut ControlLinks,
    context: &Arc<CudaContext>,
    (timeout, help): (Duration, &str),
    make: impl FnOnce() -> Result<NcclComm, String> + Send + 'static,
) -> Result<sys::ncclComm_t> {
    let (sender, receiver) = channel();
    let what = move || format!("rank {rank}: NCCL's call that connects it to the others");
    let guarded = guard(timeout.saturating_add(WATCHDOG_MARGIN), what);
    let context = context.clone();
    let make = move || {
        let made = context.bind_to_thread().map_err(|error| error.to_string()).and_then(|()| make());
        drop(sender.send(made));
    };
    let thread = std::thread::Builder::new().name(format!("NCCL {rank}")).spawn(make);
    let thread = thread.map_err(|error| CommError::Setup(format!("cannot start a thread: {error}")))?;
    let barrier = Call { op: Op::Barrier, dtype: Dtype::U8, count: 0, comm_dtype: None };
    let deadline = Deadline::after(timeout);
    loop {
        let error = match receiver.recv_timeout(POLL_INTERVAL) {
            Ok(Ok(NcclComm(comm))) => return Ok(comm),
            Ok(Err(why)) => CommError::Setup(format!("NCCL cannot connect rank {rank}: {why}\n  help: {help}")),
            Err(RecvTimeoutError::Disconnected) => CommError::Setup(PANICKED.into()),
            Err(RecvTimeoutError::Timeout) => match others.links().closed_peer() {
                Some(lost) => others.explain(&barrier, deadline, lost),
                None if deadline.is_over() => CommError::Setup(format!(
                    "NCCL did not connect rank {rank} within {}\n  help: NCCL_DEBUG=INFO says what it does; TILEWRIGHT_START_TIMEOUT=SECONDS waits longer",
                    seconds(&timeout)
                )),
                None => continue,
            },
        };
        others.abort(&error);
        // It may still hang there, and would keep the process from ending in order.
        if !thread.is_finished() {
            guarded.disarm_on_exit();
        }
        return Err(error);
    }
}
