//! What the simulated GPU reports, and where it found it.

use std::fmt;

/// Why a run stopped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimError {
    /// Coordinates of the program.
    pub block: [u32; 3],
    /// `tid.x` of the thread; `None` where several threads or a whole program are to blame.
    pub thread: Option<u32>,
    /// The LLVM IR instruction; empty where none is to blame.
    pub instruction: String,
    /// The line of the kernel's source that the instruction comes from (`file:line:column`); empty where it is not known.
    pub place: String,
    pub message: String,
}

impl fmt::Display for SimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
        }
        let [x, y, z] = self.block;
        write!(f, "block ({x}, {y}, {z})")?;
        if let Some(thread) = self.thread {
            write!(f, ", thread {thread}")?;
        }
        write!(f, ": {}", self.message)?;
        if !self.instruction.is_empty() {
            write!(f, "\n  at `{}`", self.instruction)?;
        }
        Ok(())
    }
}

impl std::error::Error for SimError {}

impl From<SimError> for String {
    fn from(error: SimError) -> String {
        error.to_string()
    }
}
