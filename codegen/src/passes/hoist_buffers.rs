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
        let mut stay = Vec::new();
        for op in func.take_ops(r) {
            let data = func.op(op);
            let buffer = match data.op {
                Op::LocalAlloc => !data.operands.is_empty(),
                Op::LocalTrans { .. } => true,
                _ => false,
            };
            if buffer && data.operands.iter().all(|v| !inside.contains(v)) {
                inside.remove(&data.results[0]);
                moved.push(op);
            } else {
                stay.push(op);
            }
        }
        func.set_ops(r, &stay);
    }
    func.insert(func.parent_block(id), func.position(id), &moved);
}
