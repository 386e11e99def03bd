//! The body of a loop as steps, and the offsets of its slots.

use std::collections::HashMap;

use crate::ir::{BlockId, Def, Func, Op, OpId, Value};

/// What a group of warps does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Op(OpId),
    /// Arrives at a barrier of the partition, before `op` or by it.
    Arrive(OpId),
    /// Waits until all groups of the partition have arrived.
    Sync(OpId),
    /// The result of a branch is a value of its first region.
    Forward {
        from: Value,
        to: Value,
    },
}

/// The ops of a loop's body, with those of the first region of each branch.
pub fn flatten(func: &Func, id: OpId) -> Vec<OpId> {
    let ops = steps(func, id, &|_| false).into_iter();
    ops.filter_map(|step| if let Step::Op(op) = step { Some(op) } else { None }).collect()
}

/// The steps of an iteration; `has_barrier` tells ops before which the lowering inserts a barrier.
pub fn steps(func: &Func, id: OpId, has_barrier: &dyn Fn(OpId) -> bool) -> Vec<Step> {
    let mut found = Vec::new();
    of_block(func, func.op(id).regions[0], has_barrier, &mut found);
    found
}

fn of_block(func: &Func, block: BlockId, has_barrier: &dyn Fn(OpId) -> bool, found: &mut Vec<Step>) {
    for &id in &func.block(block).ops {
        let data = func.op(id);
        let is_barrier = matches!(data.op, Op::BlockBarrier { .. });
        if is_barrier || has_barrier(id) {
            found.extend([Step::Arrive(id), Step::Sync(id)]);
        }
        match data.op {
            // Copies of one iteration: the first one fills a buffer of the loop around.
            Op::If if data.results.is_empty() && loads(func, data.regions[0]) => {}
            Op::If => {
                of_block(func, data.regions[0], has_barrier, found);
                let yields = &func.op(func.terminator(data.regions[0])).operands;
                found.extend(yields.iter().zip(&data.results).map(|(&from, &to)| Step::Forward { from, to }));
            }
            Op::Yield | Op::BlockBarrier { .. } => {}
            _ => found.push(Step::Op(id)),
        }
    }
}

fn loads(func: &Func, block: BlockId) -> bool {
    func.walk_from(block).into_iter().any(|id| matches!(func.op(id).op, Op::TmaLoad { .. }))
}

/// How many iterations a slot of a ring lags behind the loop's own: 0 for a value that advances with the loop, 1 for
/// one that the loop carries from it, −1 for its next value.
pub fn lag(func: &Func, region: BlockId, mut slot: Value) -> i64 {
    let yields = &func.op(func.terminator(region)).operands;
    let next = |v: Value| match func.value(v).def {
        Def::Param(block, i) if block == region && i > 0 => Some(yields[i - 1]),
        _ => None,
    };
    if next(slot).is_none() {
        return if yields.contains(&slot) { -1 } else { 0 };
    }
    let mut lag = 0;
    // A slot may be carried many times, but not more often than the loop has values.
    for _ in 0..yields.len() {
        match next(slot) {
            Some(before) if before != slot && next(before).is_some() => {
                slot = before;
                lag += 1;
            }
            _ => break,
        }
    }
    lag
}

/// Counts of ops on each mbarrier in the steps of a loop.
pub fn count_by_barrier(func: &Func, ops: &[OpId], of: impl Fn(&Op) -> Option<usize>) -> HashMap<Value, usize> {
    let mut counts = HashMap::new();
    for &id in ops {
        let data = func.op(id);
        if let Some(operand) = of(&data.op) {
            *counts.entry(data.operands[operand]).or_insert(0) += 1;
        }
    }
    counts
}
