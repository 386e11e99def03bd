//! Gives buffers back as soon as they have been read.
//!
//! Does: moves each `mbarrier_arrive` up to just after the last of the ops that it waits for: those that compute its operands, and
//! those whose regions read an operand that is a buffer.
//! Requires: stage async, waits for products in their places. Keeps: meaning: its operands say what comes before it.
//! Does not: move anything else, nor across the end of a block.

use super::edit::uses;
use crate::analysis::buffers::buffer_of;
use crate::ir::{BlockId, Func, Op, OpId, Value};

/// See the module's page.
pub fn run(func: &mut Func) {
    for block in (0..func.num_blocks() as u32).map(BlockId) {
        let arrival = |id: &OpId| matches!(func.op(*id).op, Op::MbarrierArrive { .. });
        let arrivals: Vec<OpId> = func.block(block).ops.iter().copied().filter(arrival).collect();
        for id in arrivals {
            // Without anything to wait for, nothing says how far up it may go.
            if func.op(id).operands.len() < 3 {
                continue;
            }
            let from = func.block(block).ops.iter().position(|&op| op == id);
            let from = from.expect("internal compiler error: a lost op");
            let operands = &func.op(id).operands;
            let buffers: Vec<OpId> = operands.iter().filter_map(|&v| buffer_of(func, v)).collect();
            // Under any name: a transposed view of a buffer is that buffer.
            let reads_inside = |op: OpId| {
                let regions = &func.op(op).regions;
                let is_one = |&v: &Value| buffer_of(func, v).is_some_and(|buffer| buffers.contains(&buffer));
                !buffers.is_empty() && !regions.is_empty() && uses(func, op).iter().any(is_one)
            };
            let after = |op: &OpId| func.op(*op).results.iter().any(|v| operands.contains(v)) || reads_inside(*op);
            let to = func.block(block).ops[..from].iter().rposition(after).map_or(0, |at| at + 1);
            let ops = &mut func.block_mut(block).ops;
            ops.remove(from);
            ops.insert(to, id);
        }
    }
}
