//! Setup of the NCCL backend: control sockets between ranks, and NCCL's communicators.

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
use tilewright::escape::printable_lines;

/// Whether NCCL is installed. With candle's CUDA backend it always is: that backend links CUDA's libraries and NCCL,
/// and the program does not start without them.
pub fn is_installed() -> bool {
    #[cfg(feature = "cuda")]
    return true;
    // SAFETY: only checks whether the library can be loaded.
    #[cfg(not(feature = "cuda"))]
    unsafe {
        sys::is_culib_present()
    }
}

/// Connects the control sockets: at rank 0's address, on a separate port.
pub fn connect_control(
    host: &Communicator,
    rank_info: &RankInfo,
    job: &Job,
    id: &[u8],
    options: Options,
) -> Result<ControlLinks> {
    let failed = |error| CommError::Setup(format!("no port for the control connections of NCCL's ranks: {error}"));
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
    // NCCL's unique id, which rank 0 generates for each world, identifies the job.
    let name: String = id.iter().take(32).map(|byte| format!("{byte:02x}")).collect();
    let job = Job { name, access: job.access.clone() };
    let (rank, world) = (host.rank(), host.world());
    let rank_info = RankInfo { rank, world, master: (address, port[0] as u16), ..rank_info.clone() };
    let sockets = rendezvous::sockets(&rank_info, &job, "calls of GPUs", options)?;
    Ok(OverLinks::new(Sockets::new(rank, sockets)?.with_spin(SPIN)))
}

/// This host's name, padded with at least one NUL byte to a fixed length.
pub fn host_name() -> [u8; 64] {
    let mut name = [0; 64];
    // SAFETY: the buffer is one byte longer than the length passed, and its last byte stays NUL.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    name
}

/// Rank 0's address if none is set: the loopback interface, or its host name if there are several hosts.
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

/// An NCCL communicator that can be sent to another thread.
pub struct NcclComm(pub sys::ncclComm_t);

// SAFETY: NCCL's communicators are not bound to a thread; only one thread at a time uses this one.
unsafe impl Send for NcclComm {}

/// Initializes NCCL's communicator of all ranks.
pub fn initialize(
    rank: usize,
    world: usize,
    id: [u8; 128],
    control: &mut ControlLinks,
    context: &Arc<CudaContext>,
    timeout: Duration,
) -> Result<sys::ncclComm_t> {
    let help = "every rank needs its own GPU";
    with_timeout(rank, control, context, (timeout, help), move || {
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as _) };
        let mut comm: sys::ncclComm_t = std::ptr::null_mut();
        // SAFETY: the call initializes the communicator's handle; the GPU's context is current on this thread.
        let made = unsafe { result::comm_init_rank(&mut comm, world as i32, id, rank as i32) };
        made.map(|_| NcclComm(comm)).map_err(|error| explain(None, &error))
    })
}

/// The first fields of `ncclConfig_t`, whose first field is its size and which grows with NCCL's versions: those of
/// `ncclConfig_v21700`, and one more field, which would otherwise be padding.
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

/// NCCL's value for default settings, and the magic number of `ncclConfig_t`.
const UNDEFINED: i32 = i32::MIN;
const MAGIC: u32 = 0xcafe_beef;

/// The first version with `ncclCommSplit`, 2.18.1, as encoded by `ncclGetVersion`.
const MIN_SPLIT_VERSION: i32 = 21_801;

/// Creates another communicator of the same ranks and GPUs, whose kernels have at most `max_ctas` CTAs: each occupies
/// an SM. Nothing may be in flight on `all`.
pub fn split_with_max_ctas(
    all: sys::ncclComm_t,
    rank: usize,
    max_ctas: u32,
    control: &mut ControlLinks,
    context: &Arc<CudaContext>,
    timeout: Duration,
) -> Result<sys::ncclComm_t> {
    let all = NcclComm(all);
    let help = "`--nccl-ctas 0` removes the limit of NCCL's CTAs";
    with_timeout(rank, control, context, (timeout, help), move || {
        let version = result::get_nccl_version().map_err(|error| explain(None, &error))?;
        if version < MIN_SPLIT_VERSION {
            return Err(format!(
                "its version is {version}, expected at least {MIN_SPLIT_VERSION} to limit the CTAs of some collectives"
            ));
        }
        // Captures the whole struct; its pointer field alone is not `Send`.
        let all = all;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: 21_700,
            blocking: UNDEFINED,
            // No clusters: they would wait for several free SMs of one GPC.
            cga_cluster_size: 0,
            min_ctas: 1,
            max_ctas: i32::try_from(max_ctas).unwrap_or(i32::MAX),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        };
        let mut comm: sys::ncclComm_t = std::ptr::null_mut();
        // SAFETY: `all` is valid, and nothing else uses it now; NCCL reads as much of the configuration as its size
        // field states.
        let made = unsafe { sys::ncclCommSplit(all.0, 0, rank as i32, &raw mut comm, (&raw mut config).cast()) };
        match made {
            sys::ncclResult_t::ncclSuccess => Ok(NcclComm(comm)),
            error => Err(explain(Some(all.0), &NcclError(error))),
        }
    })
}

/// Runs an NCCL call that would wait forever for a missing rank on a thread that can be abandoned.
fn with_timeout(
    rank: usize,
    control: &mut ControlLinks,
    context: &Arc<CudaContext>,
    (timeout, help): (Duration, &str),
    make: impl FnOnce() -> Result<NcclComm, String> + Send + 'static,
) -> Result<sys::ncclComm_t> {
    let (sender, receiver) = channel();
    let what = move || format!("rank {rank}: NCCL's call that connects it to the other ranks");
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
            Err(RecvTimeoutError::Timeout) => match control.links().closed_peer() {
                Some(lost) => control.explain(&barrier, deadline, lost),
                None if deadline.is_over() => CommError::Setup(format!(
                    "NCCL did not connect rank {rank} within {}\n  help: NCCL_DEBUG=INFO prints what it does; TILEWRIGHT_START_TIMEOUT=SECONDS raises the limit",
                    seconds(&timeout)
                )),
                None => continue,
            },
        };
        control.abort(&error);
        // The thread may still hang in NCCL, and would keep the process from exiting regularly.
        if !thread.is_finished() {
            guarded.keep_watching();
        }
        return Err(error);
    }
}
