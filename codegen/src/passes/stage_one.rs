//! Analyses of the two-stage software pipelining of loops: which ops run in stage 1, one iteration after stage 0.
//!
//! `skew_dots` marks the `wgmma` of stage 1, and `rotate_loops` moves them with all ops that depend on them. A
//! second mark defers only the wait for a `wgmma` to the next iteration.

use super::edit::uses;
use crate::ir::{BlockId, Builder, Def, Effects, Func, Op, OpId, Type, Value};
use std::collections::{HashMap, HashSet};

/// The `wgmma` of a block that are marked for stage 1, in order.
pub fn marked_dots(func: &Func, region: BlockId) -> Vec<OpId> {
    let stage_one = |&id: &OpId| matches!(func.op(id).op, Op::Wgmma { stage_one: Some(true), .. });
    func.block(region).ops.iter().copied().filter(stage_one).collect()
}

/// The `wgmma` of a block whose wait is deferred to the next iteration, in order.
pub fn deferred_dots(func: &Func, region: BlockId) -> Vec<OpId> {
    let is_deferred = |&id: &OpId| matches!(func.op(id).op, Op::Wgmma { defer_wait: Some(true), .. });
    func.block(region).ops.iter().copied().filter(is_deferred).collect()
}

/// Drops the deferred-wait mark where it is not safe: where a `wgmma` reads a buffer that the loop itself fills, or
/// where its result has another use than the next value of its accumulator. Must run before a loop is rotated, because
/// the prologue then contains copies of its `wgmma`.
pub fn drop_unsafe_marks(func: &mut Func, region: BlockId) {
    for dot in deferred_dots(func, region) {
        let outside = func.op(dot).operands[..2].iter().all(|&v| allocated_outside(func, region, v));
        if !outside || accumulator_of(func, region, dot).is_none() {
            wait_in_iteration(func, dot);
        }
    }
}

/// Drops the deferred-wait mark: the iteration that issues the `wgmma` waits for it.
pub fn wait_in_iteration(func: &mut Func, dot: OpId) {
    if let Op::Wgmma { defer_wait, .. } = func.op_mut(dot) {
        *defer_wait = None;
    }
}

/// Whether a shared operand is in a buffer allocated outside of the loop.
fn allocated_outside(func: &Func, region: BlockId, v: Value) -> bool {
    match func.def_op(v) {
        Some(id) if matches!(func.op(id).op, Op::LocalSlot | Op::LocalTrans { .. }) => {
            allocated_outside(func, region, func.op(id).operands[0])
        }
        Some(id) => !func.is_in(id, region),
        None => false,
    }
}

/// The ops of a loop body that have to run in stage 1 if these `wgmma` do: all that depend on their results, in the
/// same iteration or through a carried value. `None` where these include other ops than arithmetic and buffer releases,
/// include another `wgmma`, or where carried values are swapped.
pub fn dependent_ops(func: &Func, region: BlockId, dots: &[OpId]) -> Option<HashSet<OpId>> {
    let end = func.terminator(region);
    let ops: Vec<OpId> = func.block(region).ops.iter().copied().filter(|&id| id != end).collect();
    let params = &func.block(region).params;
    let mut values: HashSet<Value> = HashSet::new();
    let mut stage_one: HashSet<OpId> = HashSet::new();
    loop {
        let before = (values.len(), stage_one.len());
        for &id in &ops {
            if dots.contains(&id) || !uses(func, id).is_disjoint(&values) {
                stage_one.insert(id);
                values.extend(&func.op(id).results);
            }
        }
        let carried = func.op(end).operands.iter().zip(&params[1..]);
        let carried: Vec<Value> = carried.filter(|(y, _)| values.contains(y)).map(|(_, &param)| param).collect();
        values.extend(carried);
        if (values.len(), stage_one.len()) == before {
            break;
        }
    }
    if func.op(end).operands.iter().any(|y| values.contains(y) && func.def_op(*y).is_none()) {
        return None;
    }
    let arithmetic = stage_one.iter().all(|&id| match func.op(id).op {
        Op::Wgmma { .. } => dots.contains(&id),
        Op::WgmmaWait { .. } | Op::MbarrierArrive { .. } => true,
        _ => func.op(id).op.effects() == Effects::Pure,
    });
    arithmetic.then_some(stage_one)
}

/// For a `wgmma` that accumulates into a carried value, with no other use than that value's next state (and buffer
/// releases): the wait for it, and the index of the carried value.
pub fn accumulator_of(func: &Func, region: BlockId, dot: OpId) -> Option<(OpId, usize)> {
    let Def::Param(of, i) = func.value(func.op(dot).operands[2]).def else { return None };
    let end = func.terminator(region);
    let yields = &func.op(end).operands;
    let is_wait = |id: &&OpId| func.op(**id).op == Op::WgmmaWait { pending: 0 };
    let mut users = func.block(region).ops.iter().filter(|&&op| uses(func, op).contains(&func.result(dot)));
    let wait = users.next().filter(is_wait).copied()?;
    let waited = func.result(wait);
    let is_release = |op: OpId| matches!(func.op(op).op, Op::MbarrierArrive { .. });
    let others = func
        .walk_from(region)
        .into_iter()
        .filter(|&op| op != end && !is_release(op) && func.op(op).operands.contains(&waited));
    let carried = of == region && i > 0 && yields.get(i - 1) == Some(&waited);
    let once = yields.iter().filter(|&&y| y == waited).count() == 1;
    (carried && once && users.next().is_none() && others.count() == 0).then_some((wait, i - 1))
}

/// Adds to stage 1 the ops that only stage 1 uses and that cost nothing to defer: constants, ops that change the shape
/// of a value, and ops that name a part of shared memory, with the wait on its full barrier. Copies ops that name
/// shared memory for both stages.
pub fn sink(func: &mut Func, region: BlockId, stage_one: &mut HashSet<OpId>) {
    let end = func.terminator(region);
    for id in func.block(region).ops.clone().into_iter().rev() {
        if stage_one.contains(&id) || !is_free_to_sink(func, id) {
            continue;
        }
        let result = func.result(id);
        let users: Vec<OpId> =
            func.block(region).ops.iter().copied().filter(|&op| uses(func, op).contains(&result)).collect();
        if users.is_empty() || !users.iter().any(|op| stage_one.contains(op)) {
            continue;
        }
        if users.iter().all(|&op| op != end && stage_one.contains(&op)) {
            stage_one.insert(id);
            stage_one.extend(full_barrier_wait(func, region, id));
        } else if matches!(func.ty(result), Type::Shared { .. }) {
            stage_one.insert(clone_for_stage_one(func, id, &users, stage_one));
        }
    }
}

/// The wait on the full barrier of a buffer, directly before the `local_slot` that names the buffer.
fn full_barrier_wait(func: &Func, region: BlockId, slot: OpId) -> Option<OpId> {
    let ops = &func.block(region).ops;
    let at = func.position(slot).checked_sub(1)?;
    let waits = func.op(slot).op == Op::LocalSlot && func.op(ops[at]).op == Op::MbarrierWait;
    (waits && func.op(ops[at]).operands[1] == func.op(slot).operands[1]).then_some(ops[at])
}

/// Inserts a copy of an op after it, and lets its users in stage 1 use the copy.
fn clone_for_stage_one(func: &mut Func, id: OpId, users: &[OpId], stage_one: &HashSet<OpId>) -> OpId {
    let data = func.op(id).clone();
    let ty = func.ty(data.results[0]).clone();
    let copy = Builder::after(func, id, data.loc).op(data.op, &data.operands, &[ty]);
    let map = HashMap::from([(data.results[0], func.result(copy))]);
    for &user in users.iter().filter(|op| stage_one.contains(op)) {
        super::edit::replace_in(func, user, &map);
    }
    copy
}

fn is_free_to_sink(func: &Func, id: OpId) -> bool {
    matches!(
        func.op(id).op,
        Op::ExpandDims { .. } | Op::Broadcast | Op::Splat | Op::Constant { .. } | Op::LocalSlot | Op::LocalTrans { .. }
    )
}

/// The values of stage 0 that stage 1 uses, in order of first use: the loop has to carry them to the next iteration.
pub fn cross_stage_values(func: &Func, region: BlockId, stage_one: &HashSet<OpId>) -> Vec<Value> {
    let end = func.terminator(region);
    let params = &func.block(region).params;
    let is_stage_one = |v: Value| func.def_op(v).is_some_and(|id| stage_one.contains(&id));
    let mut found = Vec::new();
    for &id in func.block(region).ops.iter().filter(|id| stage_one.contains(id)) {
        let mut used: Vec<Value> = uses(func, id).into_iter().collect();
        used.sort();
        for v in used {
            let crosses = match func.value(v).def {
                Def::Param(block, 0) => block == region,
                Def::Param(block, i) => block == region && !is_stage_one(func.op(end).operands[i - 1]),
                Def::Result(op, _) => !stage_one.contains(&op) && func.is_in(op, region),
            };
            if crosses && !found.contains(&v) {
                found.push(v);
            }
        }
    }
    debug_assert!(found.iter().all(|v| params.contains(v) || func.def_op(*v).is_some()));
    found
}
