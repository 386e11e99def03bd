//! Schedules `wgmma` early: as soon as their operands are there, or during the barrier before the next one.
//!
//! Does: for each `wgmma` of a block in order, places the ops that it depends on and then the `wgmma` itself before all
//! ops that it does not depend on. Independent `wgmma` are then issued back to back, and arithmetic overlaps with them.
//! Before a `wgmma` that reads what other warps store, there is a barrier: an independent one directly before it, which has
//! no such barrier itself, is issued after the stores, so that the tensor cores have work during the barrier.
//! Requires: stage *layout*.
//! Keeps: results, the order of the `wgmma`, and the order of memory writes, loops and branches: nothing moves across
//! these.
//! Does not: consider registers, except that the rule of barriers leaves out f32. Other ops follow the `wgmma` in their original order.

use crate::ir::nested::uses;
use crate::ir::{BlockId, Effects, Func, Op, OpId, Value};
use std::collections::HashSet;

/// Runs the pass.
pub fn run(func: &mut Func) {
    for b in 0..func.num_blocks() as u32 {
        let block = BlockId(b);
        let ops = func.block(block).ops.clone();
        let segments = ops.chunk_by(|&a, &b| movable(func, a) && movable(func, b));
        let ordered: Vec<OpId> = segments.flat_map(|segment| order(func, segment)).collect();
        func.set_ops(block, &ordered);
    }
}

fn movable(func: &Func, id: OpId) -> bool {
    match func.op(id).op {
        Op::LocalAlloc | Op::Wgmma { .. } | Op::WgmmaWait { .. } => true,
        Op::For { .. } | Op::While | Op::If => false,
        _ => matches!(func.op(id).op.effects(), Effects::Pure | Effects::Read),
    }
}

fn order(func: &Func, segment: &[OpId]) -> Vec<OpId> {
    let dots: Vec<OpId> = segment.iter().copied().filter(|&id| matches!(func.op(id).op, Op::Wgmma { .. })).collect();
    let needs: Vec<HashSet<OpId>> = dots.iter().map(|&dot| needed(func, segment, dot)).collect();
    let mut placed: HashSet<OpId> = HashSet::new();
    let mut ordered = Vec::new();
    // Stores that are not placed yet.
    let mut exchanges: HashSet<OpId> = segment.iter().copied().filter(|&op| is_exchange(func, op)).collect();
    let mut place = |which: &dyn Fn(OpId) -> bool| {
        ordered.extend(segment.iter().copied().filter(|&op| which(op) && placed.insert(op)));
    };
    for (i, dot) in dots.iter().enumerate() {
        if let Some(next) = dots.get(i + 1)
            && !needs[i + 1].contains(dot)
            && !needs[i].iter().any(|op| exchanges.contains(op))
            && needs[i + 1].iter().any(|op| exchanges.contains(op))
        {
            place(&|op| op != *dot && op != *next && (needs[i].contains(&op) || needs[i + 1].contains(&op)));
        }
        place(&|op| needs[i].contains(&op));
        exchanges.retain(|op| !needs[i].contains(op));
    }
    place(&|_| true);
    ordered
}

/// A `wgmma` and the ops of the segment that it depends on.
fn needed(func: &Func, segment: &[OpId], dot: OpId) -> HashSet<OpId> {
    let mut needed = HashSet::from([dot]);
    // In reverse order: definitions precede uses.
    for &op in segment.iter().rev() {
        if needed.contains(&op) {
            needed.extend(uses(func, op).into_iter().filter_map(|v| func.def_op(v)));
        }
    }
    segment.iter().copied().filter(|op| needed.contains(op)).collect()
}

/// Whether an op stores a tile that threads computed to shared memory, where others read it after a barrier. Not of f32: its
/// operands take twice the registers, and would have to stay in them during the arithmetic before the store.
fn is_exchange(func: &Func, id: OpId) -> bool {
    let data = func.op(id);
    let is_loaded =
        |v: &Value| func.def_op(*v).is_some_and(|id| matches!(func.op(id).op, Op::LoadView { .. } | Op::Load { .. }));
    let narrow = |v: &Value| func.ty(*v).dtype().is_some_and(|dtype| dtype.bytes() <= 2);
    data.op == Op::LocalAlloc && data.operands.first().is_some_and(|tile| narrow(tile) && !is_loaded(tile))
}
