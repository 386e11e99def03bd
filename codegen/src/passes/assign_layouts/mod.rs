//! Assigns a layout to every tile: the step from stage *tile* to stage *layout*.
//!
//! Does: assigns layouts to values that are costly to compute twice (loads, dots, reductions, loop-carried tiles and
//! values computed from them), seeded by anchors with priorities: memory accesses and dots. Leaves constants, ranges,
//! broadcasts and arithmetic on them *flexible*: they are recomputed in the layout of each user. Rebuilds the function
//! with a `convert_layout` wherever a user needs another layout. Replaces `dot` by the target's instruction (`wgmma`,
//! `mma_sync` or `fma_dot`), and puts operands that are loaded from memory into shared memory, and those that would go through it.
//! Requires: resolved views (`resolve_views`).
//! Keeps: results, the order of effects, names.
//! Does not: pipeline loads or place barriers.

mod access;
mod anchors;
mod dot;
mod k_major;
mod rewrite;
mod tf32;

use crate::ir::Func;
use crate::target::{CompileOptions, GpuArch};

/// Runs the pass.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) {
    let assignments = anchors::Assignments::choose(func, arch, options);
    *func = rewrite::rewrite(&assignments);
}
