//! Chooses the `wgmma` of a loop that run in pipeline stage 1, or whose wait is deferred, so that they overlap with the
//! next iteration.
//!
//! Does: in a loop where one `wgmma` depends on the result of another (in attention, P V depends on the scores), marks
//! the dependent ones for stage 1: as many of them, from the last one back, as registers allow. `rotate_loops` then
//! moves them. Where only the next iteration's accumulation depends on a `wgmma` (a plain matmul), marks its wait as
//! deferred: the next iteration issues its own `wgmma` before it waits for this one (`delay_waits`). The dependents
//! of a marked `wgmma` must be arithmetic that the rest of the loop does not use, and its shared operands must be
//! allocated outside of the loop or loaded from global memory, so that `pipeline_loads` can keep them longer.
//! Requires: stage *layout*, `wgmma` scheduled by `order_dots`.
//! Keeps: everything: marks are hints.
//! Does not: consider loops inside of the loop, nor `mma.sync`, which is synchronous.

use super::edit::uses;
use super::stage_one;
use crate::analysis::registers;
use crate::ir::{BlockId, Def, Func, Op, OpId, Type, Value};
use crate::target::CompileOptions;
use std::collections::{HashMap, HashSet};

/// Registers per thread for addresses, counters and ptxas's register alignment, in addition to tiles: between 25 and 70
/// in the attention kernels.
const RESERVED_REGISTERS: u32 = 52;

/// Runs the pass.
pub fn run(func: &mut Func, options: &CompileOptions) {
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    for id in loops {
        let Op::For { overlap, .. } = func.op(id).op else { continue };
        let wanted = overlap.or(options.schedule.overlap);
        if wanted == Some(false) {
            continue;
        }
        // An explicit request ignores the register limit.
        let limit = if wanted == Some(true) { u32::MAX } else { limit(options) };
        let region = func.op(id).regions[0];
        let chosen = choose_stage_one(func, region, limit);
        for &dot in &chosen {
            if let Op::Wgmma { stage_one, .. } = func.op_mut(dot) {
                *stage_one = Some(true);
            }
        }
        let sums = if chosen.is_empty() { accumulating_dots(func, region) } else { Vec::new() };
        for dot in sums {
            if let Op::Wgmma { defer_wait, .. } = func.op_mut(dot) {
                *defer_wait = Some(true);
            }
        }
    }
}

/// Registers per thread available to the tiles of a loop.
fn limit(options: &CompileOptions) -> u32 {
    let share = registers::available(options.num_warps * 32);
    share.min(options.max_registers.unwrap_or(share)).saturating_sub(RESERVED_REGISTERS)
}

/// The `wgmma` to run in stage 1.
fn choose_stage_one(func: &Func, region: BlockId, limit: u32) -> Vec<OpId> {
    let mut chained = dependent_dots(func, region);
    while !chained.is_empty() {
        let buffers =
            chained.iter().all(|&id| func.op(id).operands[..2].iter().all(|&v| outlives_iteration(func, region, v)));
        if buffers
            && let Some(stage_one) = stage_one::dependent_ops(func, region, &chained)
            && register_pressure(func, region, &stage_one) <= limit
        {
            return chained;
        }
        chained.remove(0);
    }
    Vec::new()
}

/// The `wgmma` of a loop body that only accumulate into a carried value, with operands in shared memory that outlives
/// the iteration.
fn accumulating_dots(func: &Func, region: BlockId) -> Vec<OpId> {
    let adds = |&id: &OpId| {
        let Op::Wgmma { .. } = func.op(id).op else { return false };
        let [a, b, acc] = func.op(id).operands[..] else { return false };
        let shared =
            [a, b].iter().all(|&v| matches!(func.ty(v), Type::Shared { .. }) && outlives_iteration(func, region, v));
        shared && func.uses(acc).len() == 1 && stage_one::accumulator_of(func, region, id).is_some()
    };
    func.block(region).ops.iter().copied().filter(adds).collect()
}

/// The `wgmma` of a block that depend on others of the same iteration.
fn dependent_dots(func: &Func, region: BlockId) -> Vec<OpId> {
    let mut from_dots: HashSet<Value> = HashSet::new();
    let mut found = Vec::new();
    for &id in &func.block(region).ops {
        let is_dot = matches!(func.op(id).op, Op::Wgmma { .. });
        let depends = !uses(func, id).is_disjoint(&from_dots);
        if is_dot && depends {
            found.push(id);
        }
        if is_dot || depends {
            from_dots.extend(&func.op(id).results);
        }
    }
    found
}

/// Whether an operand is still available in the next iteration: a tile in registers, or a buffer that is filled outside
/// of the loop or can be kept in a ring.
fn outlives_iteration(func: &Func, region: BlockId, v: Value) -> bool {
    if !matches!(func.ty(v), Type::Shared { .. }) {
        return true;
    }
    let Some(id) = func.def_op(v).filter(|&id| func.is_in(id, region)) else { return true };
    let data = func.op(id);
    match data.op {
        Op::LocalTrans { .. } => outlives_iteration(func, region, data.operands[0]),
        Op::LocalAlloc => data.operands.first().is_some_and(|&tile| {
            let load = func.def_op(tile).filter(|&id| func.is_in(id, region));
            load.is_some_and(|id| matches!(func.op(id).op, Op::LoadView { .. } | Op::Load { .. }))
        }),
        _ => false,
    }
}

/// A value in the loop body after rotation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Live {
    Current(Value),
    /// A value of the previous iteration.
    Previous(Value),
}

/// The maximum number of registers per thread that tiles take at any point of the loop, after rotation.
fn register_pressure(func: &Func, region: BlockId, stage_one: &HashSet<OpId>) -> u32 {
    let end = func.terminator(region);
    let (second, first): (Vec<OpId>, Vec<OpId>) =
        func.block(region).ops.iter().filter(|&&id| id != end).partition(|id| stage_one.contains(id));
    let wait = first.iter().position(|&id| matches!(func.op(id).op, Op::WgmmaWait { .. })).unwrap_or(first.len());
    let order = [&first[..wait], &second[..], &first[wait..]].concat();
    let is_stage_one = |v: Value| func.def_op(v).is_some_and(|id| stage_one.contains(&id));
    // Ops of stage 1 use values of stage 0 of the previous iteration.
    let live = |op: OpId, v: Value| {
        let inside = func.def_op(v).is_some_and(|id| func.is_in(id, region));
        if stage_one.contains(&op) && inside && !is_stage_one(v) { Live::Previous(v) } else { Live::Current(v) }
    };
    let mut weights: HashMap<Live, u32> = HashMap::new();
    let mut at_end: HashSet<Live> = func.op(end).operands.iter().map(|&v| Live::Current(v)).collect();
    for &op in &second {
        for v in sources(func, op) {
            if let Live::Previous(v) = live(op, v) {
                at_end.insert(Live::Current(v));
            }
        }
    }
    let invariant: HashSet<Live> = order
        .iter()
        .flat_map(|&op| sources(func, op))
        .filter(|&v| match func.value(v).def {
            Def::Param(block, _) => block != region,
            Def::Result(id, _) => !func.is_in(id, region),
        })
        .map(Live::Current)
        .collect();
    let mut weigh = |l: &Live| {
        let (Live::Current(v) | Live::Previous(v)) = *l;
        *weights.entry(*l).or_insert_with(|| registers::tile_registers(func, v))
    };
    let mut alive: HashSet<Live> = at_end.union(&invariant).copied().collect();
    let mut most = alive.iter().map(&mut weigh).sum::<u32>();
    for &op in order.iter().rev() {
        for &v in &func.op(op).results {
            alive.remove(&Live::Current(v));
        }
        alive.extend(sources(func, op).into_iter().map(|v| live(op, v)));
        alive.extend(&invariant);
        most = most.max(alive.iter().map(&mut weigh).sum());
    }
    most
}

/// The values that an op reads from registers: the sources of shape ops instead of their results.
fn sources(func: &Func, id: OpId) -> Vec<Value> {
    // Shape ops are rematerialized at their uses.
    if registers::is_shape_op(&func.op(id).op) {
        return Vec::new();
    }
    uses(func, id).into_iter().map(|v| registers::source(func, v)).collect()
}
