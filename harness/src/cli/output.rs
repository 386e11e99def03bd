//! Standard output of a command.

use std::io::{self, BufWriter, Stdout, Write};

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
    /// What could not be written, now or before. A reader that went away from a command that goes on without it is none.
    pub fn finish(&mut self) -> io::Result<()> {
        self.flush()?;
        match self.lost.take() {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
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
        self.attempt(bytes.len(), |to| to.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.attempt((), BufWriter::flush)
    }
}
