//! A GPU made of plain Rust: runs the LLVM IR that the GPU lowering writes, thread by thread.
//!
//! This is how the lowering is tested without a GPU. It knows nothing of tiles or layouts, only of the instructions:
//! every thread runs on its own until it needs others (a shuffle or `mma.sync` its warp, `wgmma` its warpgroup, a barrier
//! the block), in an order drawn from a seed. On the way it reports what a real GPU would only sometimes show: two
//! threads meeting in a byte of shared memory between two barriers, a product whose result is touched before it is
//! waited for, shared memory that `wgmma` reads without a proxy fence, copies that were not waited for, that overwrite
//! what may still be read, or that are not announced as they come, accesses outside their buffer, and threads that wait
//! for each other for ever.
//!
//! Programs of the grid run interleaved: [`grid`] says what one may expect of another.
//!
//! Reading order: [`parse`] (text to instructions), [`check`] (which of them are known), [`value`] (arithmetic on bits), [`clock`] (happens-before), [`memory`] (shared memory,
//! races), [`global`] (global memory, races), [`grid`] (programs), [`machine`] (threads and scheduling), [`barriers`] (phases, bulk copies),
//! [`bulk_add`], [`asm`] (the PTX that the lowering writes), [`ptx`] (the PTX that users write), [`matrix`] (matrix fragments, descriptors),
//! [`mutate`] (faults for tests of the simulator).

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
