//! Standard output of a command.

use std::io::{self, BufWriter, Stdout, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

/// Whether this process was started with standard output closed, as by `>&-`. Rust's runtime opens `/dev/null` in its
/// place before `main`, where all writes succeed.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Sets [`CLOSED`] before Rust's runtime starts.
#[used]
#[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
static INIT_CLOSED: extern "C" fn() = {
    extern "C" fn init_closed() {
        // SAFETY: F_GETFD only reads the descriptor's flags, and fails if the descriptor is closed.
        CLOSED.store(unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } < 0, Ordering::Relaxed);
    }
    init_closed
};

/// Checks that standard output was open when the process started.
///
/// # Errors
/// Standard output is closed, so that all output would be lost.
pub fn expect_open() -> io::Result<()> {
    match CLOSED.load(Ordering::Relaxed) {
        true => Err(io::Error::other("standard output is closed")),
        false => Ok(()),
    }
}

/// Buffered standard output. For a command whose work matters more than its output, write errors can be deferred
/// ([`Output::keep_going_on_write_errors`]).
pub struct Output {
    stdout: BufWriter<Stdout>,
    ignores_write_errors: bool,
    first_error: Option<io::Error>,
}

impl Output {
    #[allow(clippy::new_without_default, reason = "standard output exists once per process")]
    pub fn new() -> Output {
        Output { stdout: BufWriter::new(io::stdout()), ignores_write_errors: false, first_error: None }
    }

    /// Makes all further writes succeed and drops output after the first error, so that a closed pipe or a full disk
    /// does not abort hours of training. [`Output::finish`] returns that error.
    pub fn keep_going_on_write_errors(&mut self) -> &mut Output {
        self.ignores_write_errors = true;
        self
    }

    /// Flushes the output.
    ///
    /// # Errors
    /// The first write error, of this flush or of an earlier write. After [`Output::keep_going_on_write_errors`],
    /// neither a closed pipe nor a closed standard output is an error.
    pub fn finish(&mut self) -> io::Result<()> {
        self.flush()?;
        match self.first_error.take() {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe && expect_open().is_ok() => Err(error),
            _ => Ok(()),
        }
    }

    fn attempt<T>(&mut self, instead: T, write: impl FnOnce(&mut BufWriter<Stdout>) -> io::Result<T>) -> io::Result<T> {
        if self.first_error.is_some() {
            return Ok(instead);
        }
        match write(&mut self.stdout) {
            Err(error) if self.ignores_write_errors && error.kind() != io::ErrorKind::Interrupted => {
                self.first_error = Some(error);
                Ok(instead)
            }
            outcome => outcome,
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.attempt(bytes.len(), |stdout| expect_open().and_then(|()| stdout.write(bytes)))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.attempt((), BufWriter::flush)
    }
}

/// Serializes a plain struct as JSON, which cannot fail.
pub fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_else(|error| format!("\"{error}\""))
}
