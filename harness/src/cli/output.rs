//! Standard output of a command.

use std::io::{self, BufWriter, Stdout, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this process was started with standard output closed, as by `>&-`. When `main` begins, Rust's library has opened `/dev/null` in its
/// place, where all writes succeed.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Runs before `main`.
#[used]
#[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
static LOOK: extern "C" fn() = {
    extern "C" fn look() {
        // SAFETY: asks for a flag of the descriptor, whatever it is.
        CLOSED.store(unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } < 0, Ordering::Relaxed);
    }
    look
};

/// Fails where nothing that is written to standard output goes anywhere.
pub fn expect_open() -> io::Result<()> {
    match CLOSED.load(Ordering::Relaxed) {
        true => Err(io::Error::other("standard output is closed")),
        false => Ok(()),
    }
}

/// Standard output, buffered. For a command whose work is worth more than its words, it loses what cannot be written.
pub struct Output {
    to: BufWriter<Stdout>,
    goes_on: bool,
    lost: Option<io::Error>,
}

impl Output {
    #[allow(clippy::new_without_default, reason = "it is the process's, and there is one")]
    pub fn new() -> Output {
        Output { to: BufWriter::new(io::stdout()), goes_on: false, lost: None }
    }

    /// The same, where from now on writes seem to succeed: a reader that goes away, or a full disk, must not end hours of training.
    pub fn going_on(&mut self) -> &mut Output {
        self.goes_on = true;
        self
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// What could not be written, now or before. A reader that went away from a command that goes on without it is none, nor is one that there
    /// never was.
    pub fn finish(&mut self) -> io::Result<()> {
        self.flush()?;
        match self.lost.take() {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe && expect_open().is_ok() => Err(error),
            _ => Ok(()),
        }
    }

    fn attempt<T>(&mut self, instead: T, write: impl FnOnce(&mut BufWriter<Stdout>) -> io::Result<T>) -> io::Result<T> {
        if self.lost.is_some() {
            return Ok(instead);
        }
        match write(&mut self.to) {
            Err(error) if self.goes_on && error.kind() != io::ErrorKind::Interrupted => {
                self.lost = Some(error);
                Ok(instead)
            }
            outcome => outcome,
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.attempt(bytes.len(), |to| expect_open().and_then(|()| to.write(bytes)))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.attempt((), BufWriter::flush)
    }
}
