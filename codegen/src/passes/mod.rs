//! Passes: each a function from one function to another, in a file of its own.

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

/// A pass that needs nothing but the function, by its name.
#[derive(Clone, Copy)]
pub struct Pass {
    pub name: &'static str,
    /// One line for people.
    pub summary: &'static str,
    pub run: fn(&mut Func),
}

/// The passes that tools can name.
pub const PASSES: &[Pass] = &[
    Pass {
        name: "canonicalize",
        summary: "compute constants, drop ops that change nothing",
        run: |f| {
            canonicalize::run(f);
        },
    },
    Pass {
        name: "carried",
        summary: "take values out of loops and branches that carry them without need",
        run: |f| {
            carried::run(f);
        },
    },
    Pass {
        name: "carried_offsets",
        summary: "carry how far a tile of pointers has moved instead of the tile",
        run: |f| {
            carried_offsets::run(f);
        },
    },
    Pass {
        name: "cse",
        summary: "compute equal expressions once",
        run: |f| {
            cse::run(f);
        },
    },
    Pass {
        name: "dce",
        summary: "drop what nobody needs",
        run: |f| {
            dce::run(f);
        },
    },
    Pass { name: "defer_sums", summary: "let warps meet behind a loop for what it sums up", run: defer_sums::run },
    Pass { name: "delay_waits", summary: "wait for products where their results are needed", run: delay_waits::run },
    Pass {
        name: "delay_waits_in_turn",
        summary: "the same, but products of f32 are waited for one after the other",
        run: |f| delay_waits::run_for(f, false),
    },
    Pass {
        name: "direct_local_loads",
        summary: "read shared buffers in the layout that is wanted",
        run: direct_local_loads::run,
    },
    Pass {
        name: "early_arrivals",
        summary: "give buffers back as soon as they have been read",
        run: early_arrivals::run,
    },
    Pass {
        name: "hoist_buffers",
        summary: "fill shared buffers before the loops that only read them",
        run: hoist_buffers::run,
    },
    Pass {
        name: "join_reductions",
        summary: "let warps meet once for reductions that stand side by side",
        run: join_reductions::run,
    },
    Pass {
        name: "licm",
        summary: "move loop-invariant ops out of loops",
        run: |f| {
            licm::run(f);
        },
    },
    Pass {
        name: "order_products",
        summary: "start products as early as their operands allow",
        run: order_products::run,
    },
    Pass {
        name: "resolve_views",
        summary: "make views where they are used; carry only the offsets that change",
        run: resolve_views::run,
    },
    Pass {
        name: "rotate_loops",
        summary: "start late products under the next iteration's arithmetic",
        run: rotate_loops::run,
    },
    Pass {
        name: "skew_products",
        summary: "choose the products that start an iteration late",
        run: |f| skew_products::run(f, &CompileOptions::default()),
    },
    Pass {
        name: "split_masks",
        summary: "split loops where a mask begins or ends to matter",
        run: |f| {
            split_masks::run(f);
        },
    },
];

/// The pass of that name.
pub fn by_name(name: &str) -> Option<&'static Pass> {
    PASSES.iter().find(|pass| pass.name == name)
}
