//! A process that ends the ranks if the launcher is killed. It runs in its own session.
//!
//! Every rank is the leader of a process group. Before a rank's program starts, it registers its group with the guard,
//! through a pipe whose write end only the launcher keeps open. The launcher unregisters groups that are empty. When
//! the pipe closes, the launcher has ended, and the guard sends SIGKILL to the remaining groups. Linux's parent-death
//! signals would end only the ranks themselves, not their child processes.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use crate::dist::lifeline;
use crate::signals::STOP_SIGNALS;

/// The hidden subcommand of `tilewright` that runs the guard.
pub const COMMAND: &str = "launch-guard";

/// A message: a process group, or its negative to unregister it, in native byte order.
type Message = libc::pid_t;
const MESSAGE_BYTES: usize = size_of::<Message>();

/// The launcher's handle of its guard.
pub struct Guard {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Starts the guard.
    ///
    /// # Errors
    /// The system has no more processes.
    pub fn start() -> io::Result<Guard> {
        let mut command = Command::new(own_program()?);
        // The guard has to outlive the launcher, and the launcher of the launcher.
        command.env_remove(lifeline::VARIABLE);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: setsid is safe to call between fork and exec. Signals to the launcher's group must not reach the
        // guard.
        unsafe {
            command.pre_exec(|| if libc::setsid() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) });
        }
        let mut process = command.spawn()?;
        let pipe = process.stdin.take();
        Ok(Guard { process, pipe })
    }

    /// Descriptor of the pipe for [`register_group`].
    pub fn descriptor(&self) -> RawFd {
        self.pipe.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Unregisters a group that is empty.
    pub fn unregister_group(&mut self, group: Message) {
        if let Some(pipe) = &mut self.pipe {
            // Fails only if the guard has ended.
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

/// Path of this program, valid even if its file was replaced.
fn own_program() -> io::Result<std::path::PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok("/proc/self/exe".into()),
        false => std::env::current_exe(),
    }
}

/// Registers the caller's process group with the guard; called between fork and exec.
pub fn register_group(pipe: RawFd) {
    // SAFETY: getpid and write are safe to call there, and the bytes live through the call.
    unsafe {
        let message = libc::getpid().to_ne_bytes();
        libc::write(pipe, message.as_ptr().cast(), MESSAGE_BYTES);
    }
}

/// Runs the guard: reads until the launcher has ended, then kills the remaining groups.
pub fn watch() {
    for signal in STOP_SIGNALS {
        // SAFETY: installs no handler. A signal to all processes is meant for the ranks and the launcher.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let mut groups: Vec<Message> = Vec::new();
    let mut input = io::stdin().lock();
    let mut message = [0_u8; MESSAGE_BYTES];
    while input.read_exact(&mut message).is_ok() {
        match Message::from_ne_bytes(message) {
            group @ 2.. => groups.push(group),
            over => groups.retain(|group| *group != -over),
        }
    }
    for group in groups {
        // SAFETY: the launcher has not seen this group become empty, so its number is not reused.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
}
