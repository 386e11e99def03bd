//! Starts products as early as their operands allow.
//!
//! Does: puts, for each product of a block in turn, what it is computed from and then itself before everything that it
//! does not need. Products whose operands are there then start side by side, and the arithmetic for one runs under
//! another.
//! Requires: stage laid.
//! Keeps: meaning, the order of the products, and the order of whatever writes memory or branches: nothing moves across it.
//! Does not: look at registers; what nothing needs yet moves behind the products in the order it had.

use super::edit::uses;
use crate::ir::{BlockId, Effects, Func, Op, OpId};
use std::collections::HashSet;

/// See the module's page.
pub fn run(func: &mut Func) {
    for b in 0..func.num_blocks() as u32 {
        let block = BlockId(b);
        let ops = func.block(block).ops.clone();
        let segments = ops.chunk_by(|&a, &b| movable(func, a) && movable(func, b));
        let ordered: Vec<OpId> = segments.flat_map(|segment| order(func, segment)).collect();
        func.block_mut(block).ops = ordered;
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
        // From the last to the first: what an op needs stands before it.
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
