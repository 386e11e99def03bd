//! What ends ranks when the launcher cannot: a process beside it, in a session of its own.
//!
//! Every rank is the leader of a process group. Before a rank's program starts it tells the guard its group, through a pipe that only the
//! launcher holds open; the launcher takes groups back that are empty. When the pipe closes, the launcher has ended, and the guard ends the
//! groups that are left (SIGKILL). Parent-death signals, which Linux has, end only the ranks themselves, not what they started.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use crate::dist::lifeline;
use crate::signals::STOP_SIGNALS;

/// The hidden command of the program `tilewright` that is the guard.
pub const COMMAND: &str = "launch-guard";

/// A process group, and its negative when it is over: in the bytes of this machine.
type Word = libc::pid_t;
const WORD: usize = size_of::<Word>();

/// The launcher's hold on its guard.
pub struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Starts it.
    ///
    /// # Errors
    /// The system has no more processes.
    pub fn start() -> io::Result<Guard> {
        let mut command = Command::new(own_program()?);
        // It outlives the launcher, and the launcher of the launcher.
        command.env_remove(lifeline::VARIABLE);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: setsid is safe to call between fork and exec. What ends the launcher's group must not end the guard.
        unsafe {
            command.pre_exec(|| if libc::setsid() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) });
        }
        let mut process = command.spawn()?;
        let pipe = process.stdin.take();
        Ok(Guard { process, pipe })
    }

    /// Where a group announces itself ([`register_group`]).
    pub fn descriptor(&self) -> RawFd {
        self.pipe.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// A group that has ended.
    pub fn unregister_group(&mut self, group: Word) {
        if let Some(pipe) = &mut self.pipe {
            // A guard that was ended has nothing to forget.
            let _ = pipe.write_all(&(-group).to_ne_bytes());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.process.wait();
    }
}

/// This program, also where its file has been replaced.
fn own_program() -> io::Result<std::path::PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok("/proc/self/exe".into()),
        false => std::env::current_exe(),
    }
}

/// Tells the guard the caller's own group: between fork and exec.
pub fn register_group(pipe: RawFd) {
    // SAFETY: getpid and write are safe to call there, and the bytes live through the call.
    unsafe {
        let word = libc::getpid().to_ne_bytes();
        libc::write(pipe, word.as_ptr().cast(), WORD);
    }
}

/// The guard: reads until the launcher has ended, then ends the groups that are left.
pub fn watch() {
    for signal in STOP_SIGNALS {
        // SAFETY: no handler runs. Whoever signals all processes means the ranks and the launcher.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let mut groups: Vec<Word> = Vec::new();
    let mut input = io::stdin().lock();
    let mut word = [0_u8; WORD];
    while input.read_exact(&mut word).is_ok() {
        match Word::from_ne_bytes(word) {
            group @ 2.. => groups.push(group),
            over => groups.retain(|group| *group != -over),
        }
    }
    for group in groups {
        // SAFETY: the number is that of a group which the launcher has not seen end.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}
