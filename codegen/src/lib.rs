//! The Tilewright compiler: from typed tile programs to PTX and native code.
//!
//! No file, environment variable or device is touched in this crate: text and values go in, an
//! [`Artifact`](target::Artifact) comes out.

pub mod analysis;
pub mod ir;
pub mod layout;
pub mod llvm;
pub mod lower;
pub mod passes;
pub mod target;
pub mod text;
