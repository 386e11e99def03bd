//! A simulator of NVIDIA GPUs: executes the LLVM IR that the GPU lowering emits, thread by thread.
//!
//! It tests the lowering without a GPU. It interprets instructions and does not know tiles or layouts. A thread runs
//! until it reaches a collective instruction (a shuffle or `mma.sync` of its warp, `wgmma` of its warpgroup, a barrier
//! of the block), in an order chosen by a seed.
//!
//! It reports errors that a GPU shows only sometimes: data races in shared memory between two barriers, accumulators
//! that are used before their `wgmma` was waited for, shared memory that `wgmma` reads without a proxy fence, copies
//! that are not waited for, that overwrite data still being read, or whose bytes differ from the expected transaction
//! count, out-of-bounds accesses, and deadlocks.
//!
//! The programs of the grid run interleaved: [`grid`] defines the memory model between them.
//!
//! Reading order: [`parse`] (text to instructions), [`check`] (unsupported instructions), [`value`] (arithmetic on
//! bits), [`clock`] (happens-before), [`memory`] (shared memory, races), [`global`] (global memory, races), [`grid`]
//! (programs), [`machine`] (threads and scheduling), [`barriers`] (mbarriers, TMA loads), [`bulk_write`] (bulk
//! reductions and TMA stores), [`asm`] (PTX of the lowering), [`ptx`] (PTX of users), [`matrix`] (fragments and descriptors),
//! `mutate` (fault injection for tests of the simulator).

mod asm;
mod barriers;
mod bulk_write;
#[cfg(test)]
mod bulk_write_tests;
mod callee;
mod check;
mod clock;
mod error;
#[cfg(test)]
mod exchange_tests;
mod global;
mod grid;
#[cfg(test)]
mod grid_tests;
#[cfg(test)]
mod hazard_tests;
mod machine;
mod matrix;
mod memory;
#[cfg(any(test, feature = "testgen"))]
pub mod mutate;
#[cfg(test)]
mod numeric_edge_tests;
#[cfg(test)]
mod ordered_adds_tests;
#[cfg(test)]
mod out_of_bounds_tests;
#[cfg(test)]
mod padding_tests;
mod parse;
mod ptx;
mod random;
#[cfg(test)]
mod take_index_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tf32_tests;
#[cfg(test)]
mod tma_store_tests;
#[cfg(test)]
mod tma_tests;
#[cfg(test)]
mod unsupported_tests;
mod value;
#[cfg(test)]
mod warp_specialize_tests;

pub use error::{Fault, SimError, UnsupportedCode, UnsupportedKind};
pub use global::Global;
pub use grid::{Launch, run, run_in_order};
