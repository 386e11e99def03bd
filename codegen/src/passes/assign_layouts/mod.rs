//! Gives every tile a layout: the step from stage *tile* to stage *laid*.
//!
//! Does: chooses a *home* layout for values that are costly to compute twice (loads, dots, reductions, loop-carried tiles and
//! what is computed from them), leaves the rest *flexible* (constants, ranges, broadcasts and arithmetic on them) to be
//! recomputed in whatever layout a user of the value wants, and rebuilds the function with a `convert_layout` wherever a
//! home is not what a user wants. Replaces `dot` by the product that the target has for it, with operands that come
//! straight from memory put into shared memory.
//! Requires: views are resolved (`resolve_views`).
//! Keeps: meaning, order of effects, names.
//! Does not: pipeline loads or place barriers.

mod choose;
mod dot;
mod homes;
mod rewrite;
mod tf32;

pub use choose::{ViewParts, coalesced, copied_at_once, copy_layout, pointer_vector, view_parts, view_vector};
pub use dot::{DotPlan, plan_dot};

use crate::ir::Func;
use crate::target::{CompileOptions, GpuArch};

/// See the module's page.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) {
    let homes = homes::Homes::choose(func, arch, options);
    *func = rewrite::rewrite(&homes);
}
