//! Lowerings: from Tile IR to LLVM IR.

pub mod nvptx;
