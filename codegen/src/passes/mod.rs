//! Passes: functions that transform one function of Tile IR in place, each in a file of its own whose page says what it
//! does, requires and keeps.

pub mod assign_layouts;
pub mod canonicalize;
pub mod carried;
pub mod carried_offsets;
pub mod cse;
pub mod dce;
pub mod defer_sums;
pub mod delay_waits;
pub mod direct_local_loads;
pub mod early_arrivals;
pub(crate) mod edit;
pub mod hoist_buffers;
pub mod join_reductions;
mod late;
pub mod licm;
pub mod order_products;
pub mod pipeline_loads;
pub mod resolve_views;
pub mod rotate_loops;
pub mod skew_products;
pub mod specialize_warps;
pub mod split_masks;
pub mod take_turns;

use crate::ir::Func;
use crate::target::CompileOptions;

/// A pass that takes only the function.
#[derive(Clone, Copy)]
pub struct Pass {
    pub name: &'static str,
    /// One line for lists of passes.
    pub summary: &'static str,
    pub run: fn(&mut Func),
}

/// The passes that tools such as `tile-opt` can run by name.
pub const PASSES: &[Pass] = &[
    Pass {
        name: "canonicalize",
        summary: "fold constants, simplify ops and control flow",
        run: |f| {
            canonicalize::run(f);
        },
    },
    Pass {
        name: "carried",
        summary: "remove redundant loop-carried values and branch results",
        run: |f| {
            carried::run(f);
        },
    },
    Pass {
        name: "carried_offsets",
        summary: "carry a scalar offset through loops instead of a tile of pointers",
        run: |f| {
            carried_offsets::run(f);
        },
    },
    Pass {
        name: "cse",
        summary: "eliminate common subexpressions",
        run: |f| {
            cse::run(f);
        },
    },
    Pass {
        name: "dce",
        summary: "eliminate dead code",
        run: |f| {
            dce::run(f);
        },
    },
    Pass { name: "defer_sums", summary: "move cross-warp sum reductions out of loops", run: defer_sums::run },
    Pass { name: "delay_waits", summary: "keep wgmma in flight until its result is used", run: delay_waits::run },
    Pass {
        name: "delay_waits_in_turn",
        summary: "delay_waits, without keeping f32 wgmma in flight",
        run: |f| delay_waits::run_for(f, false),
    },
    Pass {
        name: "direct_local_loads",
        summary: "fold layout conversions into loads from shared memory",
        run: direct_local_loads::run,
    },
    Pass {
        name: "early_arrivals",
        summary: "arrive at empty barriers right after the last read",
        run: early_arrivals::run,
    },
    Pass { name: "hoist_buffers", summary: "hoist loop-invariant shared buffers", run: hoist_buffers::run },
    Pass {
        name: "join_reductions",
        summary: "fuse cross-warp reductions that can share a barrier",
        run: join_reductions::run,
    },
    Pass {
        name: "licm",
        summary: "move loop-invariant ops out of loops",
        run: |f| {
            licm::run(f);
        },
    },
    Pass { name: "order_products", summary: "schedule wgmma as early as its operands allow", run: order_products::run },
    Pass {
        name: "resolve_views",
        summary: "rebuild views at their uses; loops carry only offsets that change",
        run: resolve_views::run,
    },
    Pass {
        name: "rotate_loops",
        summary: "software-pipeline loops in two stages, as marked on wgmma",
        run: rotate_loops::run,
    },
    Pass {
        name: "skew_products",
        summary: "choose the wgmma of pipeline stage 1",
        run: |f| skew_products::run(f, &CompileOptions::default()),
    },
    Pass {
        name: "split_masks",
        summary: "split loops at mask boundaries",
        run: |f| {
            split_masks::run(f);
        },
    },
];

/// Finds a pass by its name.
pub fn by_name(name: &str) -> Option<&'static Pass> {
    PASSES.iter().find(|pass| pass.name == name)
}
