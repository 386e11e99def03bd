//! Schedules: when and where the ops of a loop run, as data.
//!
//! A loop is scheduled where the ops of its body have a [`Placement`](crate::ir::Placement): stage, order and
//! partition, and for a load that runs ahead the depth of its ring. `tile-opt` and `--emit schedule` print placements
//! (`at {stage = 1, order = 2}`), and a function with placements written by hand parses. The meaning of a function does
//! not depend on its placements; docs/schedule.md has what they promise.
//!
//! The loop counts the iterations of its *main* stage, that of its terminator. Ops of earlier stages run ahead of it:
//! loads into rings, and the loads of their addresses. Ops of the stage after it run *behind*, one iteration later, so
//! that their `wgmma` overlap with arithmetic of the main stage. A `wgmma_wait` alone can be behind its `wgmma`: its wait
//! is deferred until the next iteration has issued its own. Pure ops that ops of another stage use are copied to it.
//!
//! [`choose()`] makes the schedule. `specialize_warps`, `pipeline_loads` and `rotate_loops` carry it out.

pub mod candidates;
pub mod dynamic;
mod exchange;
pub mod given;
pub mod overlap;
pub mod partitions;
mod prefetch;
pub mod problem;
pub mod requests;
mod slice;
pub mod stages;
pub mod turns;

use crate::ir::{Func, Op, OpId};
use crate::target::{CompileOptions, GpuArch};
use overlap::Overlap;
use problem::LoopSchedules;
pub use slice::Slice;

/// Chooses a schedule for each loop, or takes that of the options ([`CompileOptions::loops`]). Returns notes: what the
/// options or hints ask for and the schedule does not do, and why.
pub fn choose(func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Vec<String> {
    let mut notes = Vec::new();
    let plan = match partitions::Plan::choose(func, arch, options, &mut notes) {
        Ok(plan) => plan,
        Err(reason) => {
            notes.push(format!("warp specialization is requested but not applied: {reason}"));
            None
        }
    };
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    for id in loops {
        // The ops of a loop around others with loads stay in its iteration.
        let is_around = plan.as_ref().is_some_and(|plan| plan.is_around_loops(func, func.op(id).regions[0]));
        let mut overlap = if is_around { Overlap::default() } else { overlap::choose(func, id, options) };
        let loads = match &plan {
            Some(plan) => plan.loads_of(func.op(id).regions[0]),
            None => prefetch::choose(func, id, &mut overlap, arch, options, &mut notes),
        };
        notes.extend(overlap::note(func, id, &overlap, &loads, options));
        overlap.place(func, id, &loads);
        if let Some(plan) = &plan {
            exchange::place(func, id, plan, arch);
        }
    }
    notes.extend(dynamic::notes(func, plan.as_ref()));
    notes.extend(func.walk().into_iter().filter(|&id| is_while_with_dots(func, id)).map(|id| {
        format!("the `while` loop at {} has dots, and is not pipelined: only `for` loops are", func.op(id).loc)
    }));
    if let Some(plan) = &plan {
        plan.place_around(func);
    }
    if let Some(text) = &options.loops
        && let Err(why) = match given::is_text(text) {
            true => given::apply(func, text),
            false => text.parse().and_then(|given: LoopSchedules| given.apply(func, arch, options)),
        }
    {
        let text = if given::is_text(text) { "" } else { &format!(" `loops={text}`") };
        notes.push(format!("the given schedule{text} is not applied: {why}"));
    }
    notes
}

fn is_while_with_dots(func: &Func, id: OpId) -> bool {
    let regions = &func.op(id).regions;
    func.op(id).op == Op::While && regions.iter().flat_map(|&r| &func.block(r).ops).any(|&id| func.op(id).op.is_dot())
}
