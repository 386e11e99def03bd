//! Schedules `wgmma` as early as their operands allow.
//!
//! Does: for each `wgmma` of a block in order, places the ops that it depends on and then the `wgmma` itself before all
//! ops that it does not depend on. Independent `wgmma` are then issued back to back, and arithmetic overlaps with them.
//! Requires: stage *layout*.
//! Keeps: results, the order of the `wgmma`, and the order of memory writes, loops and branches: nothing moves across
//! these.
//! Does not: consider registers. Other ops follow the `wgmma` in their original order.

use crate::ir::nested::uses;
use crate::ir::{BlockId, Effects, Func, Op, OpId};
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
    let mut placed: HashSet<OpId> = HashSet::new();
    let mut ordered = Vec::new();
    for &id in segment.iter().filter(|&&id| matches!(func.op(id).op, Op::Wgmma { .. })) {
        let mut needed = HashSet::from([id]);
        // In reverse order: definitions precede uses.
        for &op in segment.iter().rev() {
            if needed.contains(&op) {
                needed.extend(uses(func, op).into_iter().filter_map(|v| func.def_op(v)));
            }
        }
        for &op in segment.iter().filter(|op| needed.contains(op)) {
            if placed.insert(op) {
                ordered.push(op);
            }
        }
    }
    ordered.extend(segment.iter().filter(|op| !placed.contains(op)));
    ordered
}
