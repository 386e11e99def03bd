//! The fault injector inside of a rank: stops the process at the chosen point.
//!
//! Writes, fsync and connections are intercepted exactly: this file defines the C library functions that Rust's
//! standard library calls, as system calls with hooks. Phases of a step are found by polling the open trace span.

use std::ffi::c_void;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tilewright::trace::{self, Recording};

use crate::plan::Phase;

/// Environment variable with the fault: `PHASE COUNT EFFECT FOLDER`, where EFFECT is `full` or `stop`.
pub const MOMENT: &str = "TORTURE_MOMENT";
/// Environment variable with the number of that rank.
pub const RANK: &str = "TORTURE_RANK";
/// File next to the run's folder that reports the injection, with the rank's process id.
pub const INJECTED: &str = "hit";

struct InjectionPoint {
    phase: Phase,
    /// Simulates a full disk from then on; otherwise the process is stopped.
    full: bool,
    /// The run's folder.
    folder: PathBuf,
}

static INJECTION: OnceLock<InjectionPoint> = OnceLock::new();
/// Remaining occurrences of the phase.
static LEFT: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicBool = AtomicBool::new(false);
static FULL: AtomicBool = AtomicBool::new(false);
/// Whether a checkpoint file is on the disk; the folder is synchronized next, for the file's new name.
static SAVED: AtomicBool = AtomicBool::new(false);

/// Starts the injector, if this process is the rank with the fault.
pub fn start() {
    let own = std::env::var("RANK").unwrap_or_else(|_| "0".into());
    let (Ok(point), Ok(rank)) = (std::env::var(MOMENT), std::env::var(RANK)) else { return };
    if rank != own || std::env::args().nth(1).as_deref() != Some("train") {
        return;
    }
    let words: Vec<&str> = point.splitn(4, ' ').collect();
    let phase = Phase::ALL.into_iter().find(|phase| phase.name() == words[0]).unwrap();
    LEFT.store(words[1].parse().unwrap(), Ordering::Relaxed);
    let _ = INJECTION.set(InjectionPoint { phase, full: words[2] == "full", folder: words[3].into() });
    if matches!(phase, Phase::Forward | Phase::Backward | Phase::Collective | Phase::Update) {
        let options = trace::Options { spans: true, ..trace::Options::default() };
        std::mem::forget(Recording::start(options).unwrap());
        std::thread::spawn(move || watch(phase));
    }
}

/// The phase of the innermost open span.
fn now() -> Option<Phase> {
    let names = trace::open_span_names();
    if names.iter().any(|name| name == tilewright_harness::dist::comm::handle::WAIT) {
        return Some(Phase::Collective);
    }
    match names.first()?.as_str() {
        "forward" => Some(Phase::Forward),
        "backward" => Some(Phase::Backward),
        "optimizer" => Some(Phase::Update),
        _ => None,
    }
}

fn watch(phase: Phase) {
    let mut before = None;
    while !DONE.load(Ordering::Relaxed) {
        let now = now();
        if now == Some(phase) && before != now {
            inject(phase);
        }
        before = now;
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Handles an occurrence of a phase, and injects the fault at the chosen one.
fn inject(phase: Phase) {
    let Some(point) = INJECTION.get().filter(|point| point.phase == phase) else { return };
    let counted = LEFT.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
    if counted != Ok(1) || DONE.swap(true, Ordering::SeqCst) {
        return;
    }
    let place = point.folder.with_file_name(INJECTED);
    // Renamed, so that it appears with its contents.
    let made = place.with_extension("new");
    std::fs::write(&made, std::process::id().to_string()).unwrap();
    std::fs::rename(&made, &place).unwrap();
    match point.full {
        true => FULL.store(true, Ordering::SeqCst),
        // SAFETY: stops this process.
        false => unsafe {
            let _ = libc::kill(libc::getpid(), libc::SIGSTOP);
        },
    }
}

/// Whether this thread writes checkpoints.
fn saves() -> bool {
    let mut name = [0_u8; 16];
    // SAFETY: the call fills at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(b"save\0")
}

/// File type of a descriptor: `S_IFREG`, `S_IFDIR`.
fn kind(fd: i32) -> u32 {
    let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: read only if the call initialized it.
    unsafe { if libc::fstat(fd, found.as_mut_ptr()) == 0 { found.assume_init().st_mode & libc::S_IFMT } else { 0 } }
}

/// Whether a descriptor refers to the run's folder.
fn is_folder(fd: i32) -> bool {
    let Some(point) = INJECTION.get() else { return false };
    let (own, there) = (std::fs::read_link(format!("/proc/self/fd/{fd}")), std::fs::canonicalize(&point.folder));
    matches!((own, there), (Ok(own), Ok(there)) if own.as_os_str().as_bytes() == there.as_os_str().as_bytes())
}

fn wants(phase: Phase) -> bool {
    !DONE.load(Ordering::Relaxed) && INJECTION.get().is_some_and(|point| point.phase == phase)
}

/// Replaces the C library's `write`: fails with ENOSPC while a full disk is simulated, and injects the fault in the
/// middle of a write to a checkpoint.
///
/// # Safety
/// As in the C library: `count` bytes at `from`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: i32, from: *const c_void, count: usize) -> isize {
    if fd > 2 && FULL.load(Ordering::Relaxed) && kind(fd) == libc::S_IFREG {
        // SAFETY: this thread's errno.
        unsafe { *libc::__errno_location() = libc::ENOSPC };
        return -1;
    }
    let hit = wants(Phase::Write) && count > 1 && saves() && kind(fd) == libc::S_IFREG;
    // A short write: the rest is written after the injection.
    let count = if hit { count / 2 } else { count };
    // SAFETY: the caller's memory, of which the first bytes are read.
    let written = unsafe { libc::syscall(libc::SYS_write, fd, from, count) };
    if hit {
        inject(Phase::Write);
    }
    written as isize
}

/// Replaces the C library's `fsync`: injects the fault before or after a checkpoint is renamed.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fsync(fd: i32) -> i32 {
    let looks = wants(Phase::Rename);
    // The new name exists, and may not be on the disk yet.
    if looks && SAVED.load(Ordering::Relaxed) && kind(fd) == libc::S_IFDIR && is_folder(fd) {
        inject(Phase::Rename);
    }
    // SAFETY: a system call without pointers.
    let done = unsafe { libc::syscall(libc::SYS_fsync, fd) };
    // The file is on the disk, and is renamed next.
    if looks && saves() && kind(fd) == libc::S_IFREG {
        SAVED.store(true, Ordering::Relaxed);
        inject(Phase::Rename);
    }
    done as i32
}

/// Replaces the C library's `connect`: injects the fault after a connection of the rendezvous.
///
/// # Safety
/// As in the C library: `length` bytes at `address`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: i32, address: *const libc::sockaddr, length: libc::socklen_t) -> i32 {
    // SAFETY: the caller's memory.
    let (done, family) =
        unsafe { (libc::syscall(libc::SYS_connect, fd, address, length), i32::from((*address).sa_family)) };
    // SAFETY: this thread's errno, which the code below must not change.
    let errno = unsafe { *libc::__errno_location() };
    if wants(Phase::Rendezvous) && family == libc::AF_INET {
        inject(Phase::Rendezvous);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    done as i32
}

/// Replaces the C library's `listen`: injects the fault when a rank listens for the rendezvous.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: i32, backlog: i32) -> i32 {
    // SAFETY: a system call without pointers.
    let done = unsafe { libc::syscall(libc::SYS_listen, fd, backlog) };
    if wants(Phase::Rendezvous) {
        inject(Phase::Rendezvous);
    }
    done as i32
}
