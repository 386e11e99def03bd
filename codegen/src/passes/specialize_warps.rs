//! Warp specialization: a producer warp loads the operands of dots for consumer warpgroups.
//!
//! Does: where a schedule gives loads to a producer, splits the body of the kernel into two partitions. The consumer
//! partition runs the body, except that it waits for the *full* mbarrier of a buffer before its first use and arrives
//! at its *empty* mbarrier after the last. The producer partition runs the same loops with only the addresses: it waits
//! for *empty*, and loads. Consecutive loops with buffers of equal types share their rings, so that the producer runs
//! ahead from one loop into the next.
//! Requires: stage *schedule*.
//! Keeps: results.
//! Does not: choose. [`crate::schedule::partitions`] does.
//!
//! The state of a ring is its next slot and the parity of the slot's phase, carried through loops and branches in both
//! partitions. The producer waits for the *previous* phase, so its parities are inverted.

mod build;

use crate::ir::Func;
use crate::schedule::{Slice, partitions::Plan};
use crate::target::{CompileOptions, GpuArch};

/// Runs the pass.
///
/// # Errors
/// What a schedule asks for and cannot be carried out, and why.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Result<(), String> {
    if let Some(plan) = Plan::scheduled(func, arch, options)? {
        let slice = Slice::new(func, &plan)?;
        build::build(func, &plan, &slice);
    }
    Ok(())
}
