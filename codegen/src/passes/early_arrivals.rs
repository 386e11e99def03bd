//! Gives buffers back as soon as they have been read.
//!
//! Does: moves each `mbarrier_arrive` up to just after the last of the ops that it waits for: those that compute its operands, and
//! those whose regions read an operand that is a buffer.
//! Requires: stage async, waits for products in their places. Keeps: meaning: its operands say what comes before it.
//! Does not: move anything else, nor across the end of a block.

use super::edit::uses;
use crate::ir::{BlockId, Func, Op, OpId, Type, Value};

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
            let buffers: Vec<Value> =
                operands.iter().copied().filter(|&v| matches!(func.ty(v), Type::Shared { .. })).collect();
            let reads_inside = |op: OpId| {
                let regions = &func.op(op).regions;
                !buffers.is_empty() && !regions.is_empty() && uses(func, op).iter().any(|v| buffers.contains(v))
            };
            let after = |op: &OpId| func.op(*op).results.iter().any(|v| operands.contains(v)) || reads_inside(*op);
            let to = func.block(block).ops[..from].iter().rposition(after).map_or(0, |at| at + 1);
            let ops = &mut func.block_mut(block).ops;
            ops.remove(from);
            ops.insert(to, id);
        }
    }
}
