//! Hoists shared buffers of loop-invariant tiles out of loops.
//!
//! Does: moves each `local_alloc` whose tile is defined outside of a loop, and each `local_trans` whose buffer is,
//! before the loop.
//! Requires: stage *layout*.
//! Keeps: results: such a buffer is written only once (`local_store` writes only to buffers allocated without a tile).
//! Does not: move other ops.

use crate::ir::{Func, Op, OpId, Value};
use std::collections::HashSet;

/// Runs the pass.
pub fn run(func: &mut Func) {
    // In a walk, inner loops follow the loops that contain them: in reverse order, a buffer leaves all loops in which
    // it is invariant.
    let loops: Vec<OpId> =
        func.walk().into_iter().rev().filter(|&id| matches!(func.op(id).op, Op::For { .. } | Op::While)).collect();
    for id in loops {
        hoist(func, id);
    }
}

fn hoist(func: &mut Func, id: OpId) {
    let regions = func.op(id).regions.clone();
    let mut inside: HashSet<Value> = HashSet::new();
    for &r in &regions {
        inside.extend(&func.block(r).params);
        for op in func.walk_from(r) {
            inside.extend(&func.op(op).results);
            for &nested in &func.op(op).regions {
                inside.extend(&func.block(nested).params);
            }
        }
    }
    let mut moved = Vec::new();
    for &r in &regions {
        for op in func.block(r).ops.clone() {
            let data = func.op(op);
            let buffer = match data.op {
                Op::LocalAlloc => !data.operands.is_empty(),
                Op::LocalTrans { .. } => true,
                _ => false,
            };
            if buffer && data.operands.iter().all(|v| !inside.contains(v)) {
                inside.remove(&data.results[0]);
                moved.push(op);
            }
        }
        func.block_mut(r).ops.retain(|op| !moved.contains(op));
    }
    if moved.is_empty() {
        return;
    }
    let parent = func.parent_block(id);
    let ops = &mut func.block_mut(parent).ops;
    let at = ops.iter().position(|&op| op == id).expect("internal compiler error: a loop is not in its block");
    ops.splice(at..at, moved);
}
