//! Passes: functions that transform one function of Tile IR in place, each in a file of its own whose page says what it
//! does, requires and keeps.

pub mod alternate_buffers;
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
pub mod expand_f64;
pub mod fold_carried;
pub mod fuse_reductions;
pub mod hoist_buffers;
pub mod invariant_divisors;
pub mod licm;
pub mod order_dots;
pub mod pingpong;
pub mod pipeline_loads;
pub mod prefetch_views;
pub mod resolve_views;
pub mod rotate_loops;
pub mod specialize_warps;
pub mod split_ctas;
pub mod split_loops;
pub mod split_tiles;
pub mod spread_loads;
pub mod tma_stores;

use crate::ir::Func;
use crate::schedule;
use crate::target::{CompileOptions, GpuArch};

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
    // First: the others require extents that are powers of two.
    Pass {
        name: "split_tiles",
        summary: "split tiles into parts whose extents are powers of two",
        run: split_tiles::run,
    },
    Pass {
        name: "alternate_buffers",
        summary: "give buffers of tiles the slots that a schedule asks for (stage async)",
        run: alternate_buffers::run,
    },
    Pass {
        name: "assume_ranges",
        summary: "assume signs of dividends and divisors that a launch checks (before the other passes)",
        run: |f| {
            assume_ranges::run(f);
        },
    },
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
        summary: "move sum reductions across lanes and warps out of loops",
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
    Pass { name: "expand_f64", summary: "expand elementary functions of f64 to arithmetic", run: expand_f64::run },
    Pass { name: "hoist_buffers", summary: "hoist loop-invariant shared buffers", run: hoist_buffers::run },
    Pass {
        name: "fuse_reductions",
        summary: "fuse cross-warp reductions that can share a barrier",
        run: fuse_reductions::run,
    },
    Pass {
        name: "invariant_divisors",
        summary: "divide by loop-invariant numbers with a multiplication",
        run: invariant_divisors::run,
    },
    Pass {
        name: "licm",
        summary: "move loop-invariant ops out of loops",
        run: |f| {
            licm::run(f);
        },
    },
    Pass {
        name: "order_dots",
        summary: "schedule wgmma early: as soon as operands are there, or during a barrier",
        run: order_dots::run,
    },
    Pass {
        name: "prefetch_views",
        summary: "bring what is read after a loop of products into the L2 cache while it runs",
        run: prefetch_views::run,
    },
    Pass {
        name: "resolve_views",
        summary: "rebuild views at their uses; loops carry only offsets that change",
        run: resolve_views::run,
    },
    Pass {
        name: "rotate_loops",
        summary: "run the ops behind the main stage one iteration later",
        run: rotate_loops::run,
    },
    Pass {
        name: "spread_loads",
        summary: "load parts from shared memory while wgmma run, and shuffle them to the lanes that use them",
        run: spread_loads::run,
    },
    Pass {
        name: "split_loops",
        summary: "split loops at mask boundaries",
        run: |f| {
            split_loops::run(f);
        },
    },
];

/// A pass that depends on the target. Returns notes: what the options or hints ask for and it does not do, and why.
#[derive(Clone, Copy)]
pub struct TargetPass {
    pub name: &'static str,
    /// One line for lists of passes.
    pub summary: &'static str,
    pub run: fn(&mut Func, GpuArch, &CompileOptions) -> Result<Vec<String>, String>,
}

/// The passes of the GPU pipeline that depend on the target, which tools can run by name.
pub const TARGET_PASSES: &[TargetPass] = &[
    TargetPass {
        name: "split_ctas",
        summary: "split tiles among the CTAs of a cluster, where options ask for it (before split_tiles)",
        run: |f, _, options| match split_ctas::run(f, options.num_ctas) {
            Ok(()) => Ok(Vec::new()),
            Err((id, why)) => Err(format!("the `{}` at {}: {why}", f.op(id).op.mnemonic(), f.op(id).loc)),
        },
    },
    TargetPass {
        name: "assign_layouts",
        summary: "assign a layout to every tile (stage layout; needs resolve_views)",
        run: |f, arch, options| {
            assign_layouts::run(f, arch, options);
            Ok(Vec::new())
        },
    },
    TargetPass {
        name: "tma_stores",
        summary: "store tiles by TMA, each warp its own boxes",
        run: |f, arch, options| {
            tma_stores::run(f, arch, options);
            Ok(Vec::new())
        },
    },
    TargetPass {
        name: "schedule_loops",
        summary: "choose when and where the ops of loops run (stage schedule)",
        run: |f, arch, options| Ok(schedule::choose(f, arch, options)),
    },
    TargetPass {
        name: "specialize_warps",
        summary: "split the kernel into a producer and consumers, as scheduled (stage async)",
        run: |f, arch, options| specialize_warps::run(f, arch, options).map(|()| Vec::new()),
    },
    TargetPass {
        name: "pipeline_loads",
        summary: "prefetch loads into rings, as scheduled (stage async)",
        run: |f, arch, _| pipeline_loads::run(f, arch).map(|()| Vec::new()),
    },
    TargetPass {
        name: "pingpong",
        summary: "let consumer warpgroups alternate on the tensor cores, where options ask for it",
        run: |f, _, options| Ok(pingpong::run(f, options)),
    },
];

/// A pass with its parameters.
pub type Step = Box<dyn Fn(&mut Func) -> Result<Vec<String>, String>>;

/// The pass of a name, or of a former name, for a target; `None` if there is none.
pub fn step(name: &str, arch: GpuArch, options: &CompileOptions) -> Option<Step> {
    if let Some(pass) = by_name(name) {
        return Some(Box::new(move |f| {
            (pass.run)(f);
            Ok(Vec::new())
        }));
    }
    let pass = TARGET_PASSES.iter().find(|pass| pass.name == current_name(name))?;
    let options = options.clone();
    Some(Box::new(move |f| (pass.run)(f, arch, &options)))
}

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
        "skew_products" | "skew_dots" => "schedule_loops",
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
        for former in ["carried", "split_masks", "defer_sums", "join_reductions", "order_products", "early_arrivals"] {
            assert_eq!(by_name(former).map(|pass| pass.name), Some(current_name(former)), "{former}");
        }
        for former in ["skew_dots", "skew_products", "take_turns"] {
            assert!(step(former, GpuArch::Sm90a, &CompileOptions::default()).is_some(), "{former}");
        }
        assert!(by_name("delay_waits_in_turn").is_some() && by_name("cse").is_some() && by_name("nonsense").is_none());
        for former in ["licm_laid", "cse_laid", "dce_laid", "take_turns", "skew_products"] {
            assert!(!PASS_NAMES.contains(&former) && PASS_NAMES.contains(&current_name(former)), "{former}");
        }
    }
}
