//! Standard output of a command.

use std::io::{self, BufWriter, Stdout, Write};

/// Buffered standard output. For a command whose work matters more than its output, write errors can be deferred
/// ([`Output::going_on`]).
pub struct Output {
    to: BufWriter<Stdout>,
    goes_on: bool,
    lost: Option<io::Error>,
}

impl Output {
    #[allow(clippy::new_without_default, reason = "standard output exists once per process")]
    pub fn new() -> Output {
        Output { to: BufWriter::new(io::stdout()), goes_on: false, lost: None }
    }

    /// Makes all further writes succeed and drops output after the first error, so that a closed pipe or a full disk
    /// does not abort hours of training. [`Output::finish`] returns that error.
    pub fn going_on(&mut self) -> &mut Output {
        self.goes_on = true;
        self
    }

    /// Flushes the output.
    ///
    /// # Errors
    /// The first write error, now or earlier. A closed pipe is not an error after [`Output::going_on`].
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
