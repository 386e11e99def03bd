//! Releases shared buffers right after the last read.
//!
//! Does: moves each `mbarrier_arrive` on an empty barrier up to just after the last op that it depends on: the ops that
//! compute its operands, and the ops whose regions read one of its operands that is a buffer. It passes ops with regions
//! that do not read the buffer, such as the last ops behind of a rotated loop: their results are no longer its operands.
//! Requires: stage *async*, with `wgmma_wait` in final position (`delay_waits`).
//! Keeps: results: the operands of an arrival name everything that must precede it.
//! Does not: move other ops, or arrivals out of their block.

use crate::analysis::buffers::buffer_of;
use crate::ir::nested::uses;
use crate::ir::{BlockId, Func, Op, OpId, Value};

/// Whether a region of an op may wait for a `wgmma` that is in flight before.
fn awaits_outside(func: &Func, op: OpId) -> bool {
    let ops: Vec<OpId> = func.op(op).regions.iter().flat_map(|&region| func.walk_from(region)).collect();
    let is_issued_inside = |v: &Value| {
        func.def_op(*v).is_some_and(|def| ops.contains(&def) && matches!(func.op(def).op, Op::Wgmma { .. }))
    };
    let mut waits = ops.iter().filter(|&&id| matches!(func.op(id).op, Op::WgmmaWait { .. }));
    !waits.all(|&id| func.op(id).operands.iter().all(is_issued_inside))
}

/// Runs the pass.
pub fn run(func: &mut Func) {
    for block in (0..func.num_blocks() as u32).map(BlockId) {
        let arrival = |id: &OpId| matches!(func.op(*id).op, Op::MbarrierArrive { .. });
        let arrivals: Vec<OpId> = func.block(block).ops.iter().copied().filter(arrival).collect();
        for id in arrivals {
            // Without operands to depend on, no position is known to be safe.
            if func.op(id).operands.len() < 3 {
                continue;
            }
            let from = func.position(id);
            let operands = &func.op(id).operands;
            let buffers: Vec<OpId> = operands.iter().filter_map(|&v| buffer_of(func, v)).collect();
            // A transposed view of a buffer counts as the buffer.
            let reads_inside = |op: OpId| {
                let regions = &func.op(op).regions;
                let is_one = |&v: &Value| buffer_of(func, v).is_some_and(|buffer| buffers.contains(&buffer));
                !buffers.is_empty() && !regions.is_empty() && uses(func, op).iter().any(is_one)
            };
            // A region that does not read the buffer only passes on what an op before has computed from it.
            let gives = |op: OpId| {
                func.op(op).results.iter().any(|v| operands.contains(v))
                    && (buffers.is_empty() || func.op(op).regions.is_empty() || awaits_outside(func, op))
            };
            let after = |op: &OpId| gives(*op) || reads_inside(*op);
            let to = func.block(block).ops[..from].iter().rposition(after).map_or(0, |at| at + 1);
            let passed: Vec<Value> =
                func.block(block).ops[to..from].iter().flat_map(|&op| func.op(op).results.clone()).collect();
            let keep: Vec<bool> = func.op(id).operands.iter().map(|v| !passed.contains(v)).collect();
            func.retain_operands(id, &keep);
            func.detach(id);
            func.insert(block, to, &[id]);
        }
    }
}
