//! Lowerings: from Tile IR to LLVM IR, as text.

pub mod host;
pub mod nvptx;

use crate::ir::Loc;

/// Something that the kernel asks for and the target (or this compiler, for it) does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported {
    pub loc: Loc,
    /// What is not supported, and on which target.
    pub message: String,
    /// What to do instead.
    pub help: Option<String>,
}

impl std::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.loc, self.message)?;
        match &self.help {
            Some(help) => write!(f, "\nhelp: {help}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Unsupported {}
