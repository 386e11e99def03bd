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
//! (programs), [`machine`] (threads and scheduling), [`barriers`] (mbarriers, TMA loads), [`bulk_add`] (bulk
//! reductions), [`asm`] (PTX of the lowering), [`ptx`] (PTX of users), [`matrix`] (fragments and descriptors),
//! [`mutate`] (fault injection for tests of the simulator).

mod asm;
mod barriers;
mod bulk_add;
#[cfg(test)]
mod bulk_add_tests;
#[cfg(test)]
mod bulk_tests;
mod check;
mod clock;
mod error;
#[cfg(test)]
mod far_tests;
mod global;
mod grid;
#[cfg(test)]
mod grid_tests;
#[cfg(test)]
mod hazard_tests;
mod machine;
mod matrix;
#[cfg(test)]
mod meaning_tests;
mod memory;
#[cfg(any(test, feature = "testgen"))]
pub mod mutate;
#[cfg(test)]
mod padding_tests;
mod parse;
mod ptx;
mod random;
#[cfg(test)]
mod role_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tf32_tests;
#[cfg(test)]
mod unknown_tests;
mod value;

pub use error::{Fault, SimError, Unknown, What};
pub use global::Global;
pub use grid::{Launch, run, run_in_order};
