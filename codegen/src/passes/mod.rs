//! Passes: functions that transform one function of Tile IR in place, each in a file of its own whose page says what it
//! does, requires and keeps.

pub mod assign_layouts;
pub mod assume_ranges;
pub mod canonicalize;
pub mod carried_offsets;
pub mod cse;
pub mod dce;
pub mod defer_reductions;
pub mod delay_waits;
pub mod direct_local_loads;
pub mod early_release;
pub(crate) mod edit;
pub mod fold_carried;
pub mod fuse_reductions;
pub mod hoist_buffers;
pub mod licm;
pub mod order_dots;
pub mod pingpong;
pub mod pipeline_loads;
pub mod resolve_views;
pub mod rotate_loops;
pub mod skew_dots;
pub mod specialize_warps;
pub mod split_loops;
mod stage_one;

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
        name: "fold_carried",
        summary: "remove redundant loop-carried values and branch results",
        run: |f| {
            fold_carried::run(f);
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
    Pass {
        name: "defer_reductions",
        summary: "move cross-warp sum reductions out of loops",
        run: defer_reductions::run,
    },
    Pass { name: "delay_waits", summary: "keep wgmma in flight until its result is used", run: delay_waits::run },
    Pass {
        name: "delay_waits_except_f32",
        summary: "delay_waits, without keeping f32 wgmma in flight",
        run: |f| delay_waits::run_with(f, false),
    },
    Pass {
        name: "direct_local_loads",
        summary: "fold layout conversions into loads from shared memory",
        run: direct_local_loads::run,
    },
    Pass {
        name: "early_release",
        summary: "arrive at empty barriers right after the last read",
        run: early_release::run,
    },
    Pass { name: "hoist_buffers", summary: "hoist loop-invariant shared buffers", run: hoist_buffers::run },
    Pass {
        name: "fuse_reductions",
        summary: "fuse cross-warp reductions that can share a barrier",
        run: fuse_reductions::run,
    },
    Pass {
        name: "licm",
        summary: "move loop-invariant ops out of loops",
        run: |f| {
            licm::run(f);
        },
    },
    Pass { name: "order_dots", summary: "schedule wgmma as early as its operands allow", run: order_dots::run },
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
        name: "skew_dots",
        summary: "choose the wgmma of pipeline stage 1",
        run: |f| skew_dots::run(f, &CompileOptions::default()),
    },
    Pass {
        name: "split_loops",
        summary: "split loops at mask boundaries",
        run: |f| {
            split_loops::run(f);
        },
    },
];

/// Finds a pass by its name, or by a former one.
pub fn by_name(name: &str) -> Option<&'static Pass> {
    PASSES.iter().find(|pass| pass.name == current_name(name))
}

/// The current name of a pass or stage, given a former one; other names are returned unchanged.
pub fn current_name(name: &str) -> &str {
    match name {
        "carried" => "fold_carried",
        "split_masks" => "split_loops",
        "laid" => "layout",
        "licm_laid" => "licm_layout",
        "cse_laid" => "cse_layout",
        "dce_laid" => "dce_layout",
        "defer_sums" => "defer_reductions",
        "join_reductions" => "fuse_reductions",
        "order_products" => "order_dots",
        "skew_products" => "skew_dots",
        "delay_waits_in_turn" => "delay_waits_except_f32",
        "early_arrivals" => "early_release",
        "take_turns" => "pingpong",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::PASS_NAMES;

    #[test]
    fn former_names_are_names_of_passes() {
        for former in [
            "carried",
            "split_masks",
            "defer_sums",
            "join_reductions",
            "order_products",
            "skew_products",
            "early_arrivals",
        ] {
            assert_eq!(by_name(former).map(|pass| pass.name), Some(current_name(former)), "{former}");
        }
        assert!(by_name("delay_waits_in_turn").is_some() && by_name("cse").is_some() && by_name("nonsense").is_none());
        for former in ["licm_laid", "cse_laid", "dce_laid", "take_turns", "skew_products"] {
            assert!(!PASS_NAMES.contains(&former) && PASS_NAMES.contains(&current_name(former)), "{former}");
        }
    }
}
