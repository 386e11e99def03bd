//! The socket between a rank and the launcher that started it.
//!
//! The rank holds one end and the launcher the other. When the launcher ends, for whatever reason, the rank sees its
//! end close and exits. The rank reports the begin and the end of every save, so that a launcher that has to end its
//! ranks can wait longer for a save. Programs that do not use the socket inherit it and pass it on. Programs that close
//! it are still ended by the launcher's guard ([`super::launch`]).

use std::io::Read;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::thread;

use super::comm::{CommError, Result};

/// Environment variable that names the socket by descriptor and inode: `7:12345`. The descriptor alone could refer to
/// another file by now.
pub const VARIABLE: &str = "TILEWRIGHT_LIFELINE";

const SAVE_BEGINS: u8 = b'+';
const SAVE_ENDS: u8 = b'-';

static LIFELINE: OnceLock<Option<UnixStream>> = OnceLock::new();

/// Ends this process when its launcher ends, if a launcher started it. To be called at program start, before files are
/// opened.
///
/// # Errors
/// The variable is malformed. A socket that does not exist (any more) is not an error.
pub fn attach() -> Result<()> {
    let value = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
    let address = value.map(|value| parse_variable(&value.to_string_lossy())).transpose()?;
    let line = LIFELINE.get_or_init(|| address.and_then(open_inherited));
    let Some(mut reading) = line.as_ref().and_then(|line| line.try_clone().ok()) else { return Ok(()) };
    let watch = move || {
        // Launchers send nothing.
        while reading.read(&mut [0_u8; 16]).is_ok_and(|n| n > 0) {}
        // SAFETY: ends this process. The launcher's guard ends whatever else the launcher started.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    };
    // If no thread can be started, the guard ends this process.
    let _ = thread::Builder::new().name("lifeline".into()).spawn(watch);
    Ok(())
}

/// Parses the descriptor and the inode in `value`.
fn parse_variable(value: &str) -> Result<(i32, u64)> {
    let read = || {
        let (descriptor, inode) = value.split_once(':')?;
        Some((descriptor.parse().ok().filter(|number| *number > 2)?, inode.parse().ok()?))
    };
    let expected = "DESCRIPTOR:INODE, as `tilewright launch` sets it; unset it elsewhere";
    read().ok_or_else(|| CommError::Setup(format!("{VARIABLE} is `{value}`, expected {expected}")))
}

/// Opens the socket with this descriptor and inode, if it exists.
fn open_inherited((descriptor, inode): (i32, u64)) -> Option<UnixStream> {
    // SAFETY: only queries the descriptor. The handle is neither used nor closed unless it is the launcher's socket,
    // which nothing else in this process uses.
    let socket = unsafe { ManuallyDrop::new(UnixStream::from_raw_fd(descriptor)) };
    (inode_of(&socket)? == inode).then(|| ManuallyDrop::into_inner(socket))
}

fn inode_of(socket: &UnixStream) -> Option<u64> {
    let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call initializes the struct when it returns 0.
    unsafe { (libc::fstat(socket.as_raw_fd(), found.as_mut_ptr()) == 0).then(|| found.assume_init().st_ino) }
}

/// Tells the launcher, if there is one, that this rank saves its state until the returned value is dropped.
pub fn saving() -> Saving {
    send(SAVE_BEGINS);
    Saving(())
}

/// A save in progress.
#[must_use]
pub struct Saving(());

impl Drop for Saving {
    fn drop(&mut self) {
        send(SAVE_ENDS);
    }
}

fn send(message: u8) {
    if let Some(Some(line)) = LIFELINE.get() {
        // Non-blocking: a launcher that is stopped (SIGSTOP) reads nothing, and training must continue.
        // SAFETY: the byte lives through the call.
        unsafe {
            libc::send(line.as_raw_fd(), (&raw const message).cast(), 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        };
    }
}

/// The launcher's end of the socket.
pub struct LauncherEnd {
    socket: UnixStream,
    saving: usize,
}

/// Creates a socket pair. Returns the launcher's end, the rank's end, and the value of [`VARIABLE`] for the rank.
///
/// # Errors
/// No file descriptors left.
pub fn pair() -> std::io::Result<(LauncherEnd, UnixStream, String)> {
    let (launcher_end, rank_end) = UnixStream::pair()?;
    launcher_end.set_nonblocking(true)?;
    let inode = inode_of(&rank_end).unwrap_or_default();
    let name = format!("{}:{inode}", rank_end.as_raw_fd());
    Ok((LauncherEnd { socket: launcher_end, saving: 0 }, rank_end, name))
}

impl LauncherEnd {
    /// Whether the rank is saving its state now. Does not block.
    pub fn is_saving(&mut self) -> bool {
        let mut messages = [0_u8; 64];
        while let Ok(count @ 1..) = self.socket.read(&mut messages) {
            for message in &messages[..count] {
                match *message {
                    SAVE_BEGINS => self.saving += 1,
                    SAVE_ENDS => self.saving = self.saving.saturating_sub(1),
                    _ => {}
                }
            }
        }
        self.saving > 0
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_launcher_sees_saves() {
        let (mut launcher_end, mut rank_end, _) = pair().unwrap();
        assert!(!launcher_end.is_saving());
        rank_end.write_all(b"+").unwrap();
        assert!(launcher_end.is_saving() && launcher_end.is_saving());
        rank_end.write_all(b"-+-").unwrap();
        assert!(!launcher_end.is_saving());
        rank_end.write_all(b"+").unwrap();
        drop(rank_end);
        assert!(launcher_end.is_saving());
    }

    #[test]
    fn only_the_socket_itself_is_taken() {
        let (_held, rank_end, name) = pair().unwrap();
        let (descriptor, inode) = parse_variable(&name).unwrap();
        let other = std::fs::File::open("/dev/null").unwrap();
        for wrong in [(other.as_raw_fd(), inode), (descriptor, inode + 1)] {
            assert!(open_inherited(wrong).is_none(), "{wrong:?}");
        }
        for nonsense in ["zz", ":", "x:1", "7", "7:", &format!("1:{inode}")] {
            let message = parse_variable(nonsense).unwrap_err().to_string();
            assert!(message.contains(&format!("{VARIABLE} is `{nonsense}`, expected DESCRIPTOR")), "{message}");
        }
        // The new owner closes the descriptor.
        let taken = open_inherited((descriptor, inode)).unwrap();
        assert_eq!(taken.as_raw_fd(), rank_end.as_raw_fd());
        std::mem::forget(rank_end);
    }
}
