//! Lowers Tile IR to LLVM IR text: [`nvptx`] for NVIDIA GPUs, [`host`] for CPUs.

pub mod host;
pub mod nvptx;

use crate::ir::Loc;

/// A feature that the kernel uses and the target, or this compiler for it, does not support.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported {
    pub loc: Loc,
    /// The unsupported feature, and the target.
    pub message: String,
    /// A suggestion for what to do instead.
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
