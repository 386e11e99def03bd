//! Queries about the stages of a scheduled loop: which ops run behind its main stage, one iteration later.

use crate::analysis::buffers::buffer_of;
use crate::ir::nested::{replace_in, uses};
use crate::ir::{BlockId, Builder, Def, Func, Op, OpId, Partition, Placement, Value};
use std::collections::{HashMap, HashSet};

/// Positions among the ops that a loop runs together, where some run behind the main stage.
pub mod order {
    /// Ops of the main stage before its first `wgmma_wait`.
    pub const FIRST: u32 = 0;
    /// Ops behind: their `wgmma` are in flight together with those of [`FIRST`].
    pub const BEHIND: u32 = 1;
    /// The other ops of the main stage.
    pub const REST: u32 = 2;
    /// Ops at the end: tiles that only ops behind use, because these overwrite registers that `wgmma` in flight still
    /// read, and releases of buffers.
    pub const LAST: u32 = 3;
}

/// The stage whose iterations a loop counts; `None` for a loop without schedule.
pub fn main_stage(func: &Func, region: BlockId) -> Option<u32> {
    func.op(func.terminator(region)).place.map(|place| place.stage)
}

/// Whether an op runs behind the main stage of its loop.
pub fn is_behind(func: &Func, main: Option<u32>, id: OpId) -> bool {
    main.is_some_and(|main| func.op(id).place.is_some_and(|place| place.stage > main))
}

/// The ops of a loop body that run behind the main stage, without deferred waits.
pub fn behind_ops(func: &Func, region: BlockId) -> HashSet<OpId> {
    let deferred: Vec<Value> = deferred_dots(func, region).into_iter().map(|dot| func.result(dot)).collect();
    let is_deferred = |id: OpId| {
        matches!(func.op(id).op, Op::WgmmaWait { .. }) && func.op(id).operands.iter().any(|v| deferred.contains(v))
    };
    let main = main_stage(func, region);
    let ops = func.block(region).ops.iter().copied();
    ops.filter(|&id| is_behind(func, main, id) && !is_deferred(id)).collect()
}

/// The `wgmma` of a block whose wait is deferred to the next iteration, in order.
pub fn deferred_dots(func: &Func, region: BlockId) -> Vec<OpId> {
    let is_deferred = |&id: &OpId| matches!(func.op(id).op, Op::Wgmma { .. }) && is_wait_deferred(func, id);
    func.block(region).ops.iter().copied().filter(is_deferred).collect()
}

/// Whether the wait for a `wgmma` runs one stage after it.
pub fn is_wait_deferred(func: &Func, dot: OpId) -> bool {
    let Some(stage) = func.op(dot).place.map(|place| place.stage).or(main_stage(func, func.parent_block(dot))) else {
        return false;
    };
    let waits = func.uses(func.result(dot)).iter().filter(|u| matches!(func.op(u.op).op, Op::WgmmaWait { .. }));
    waits.filter_map(|u| func.op(u.op).place).any(|wait| wait.stage > stage)
}

/// Puts the wait for a `wgmma` into the stage of the `wgmma` again where it cannot be deferred: where the `wgmma` reads a
/// buffer that the loop itself fills, or registers, which must not change until the wait; and where its result has another
/// use than the next value of its accumulator. Must run before a loop is rotated, because the prologue then contains copies
/// of its `wgmma`.
pub fn undefer_unsafe_waits(func: &mut Func, region: BlockId) {
    for dot in deferred_dots(func, region) {
        let is_outside = |&v: &Value| buffer_of(func, v).is_some_and(|buffer| !func.is_in(buffer, region));
        let outside = func.op(dot).operands[..2].iter().all(is_outside);
        if !outside || accumulator_of(func, region, dot).is_none() {
            undefer_wait(func, dot);
        }
    }
}

/// Puts the wait for a `wgmma` into the stage of the `wgmma`.
pub fn undefer_wait(func: &mut Func, dot: OpId) {
    let place = func.op(dot).place;
    let users: Vec<OpId> = func.uses(func.result(dot)).iter().map(|used| used.op).collect();
    for user in users {
        if matches!(func.op(user).op, Op::WgmmaWait { .. }) {
            func.set_place(user, place);
        }
    }
}

/// The order of each op of a scheduled loop body, without the terminator. Ops without placement follow the op of the main
/// stage before them.
pub fn orders(func: &Func, region: BlockId) -> Vec<(OpId, u32)> {
    let main_stage = main_stage(func, region);
    let mut main = order::FIRST;
    let (_, ops) =
        func.block(region).ops.split_last().expect("internal compiler error: an empty loop; please report this");
    let order = |&op: &OpId| {
        let place = func.op(op).place;
        let order = place.map(|place| place.order);
        let is_main =
            place.is_some_and(|place| place.partition == Partition::Consumer) && !is_behind(func, main_stage, op);
        let stays = |order: &u32| *order != order::LAST && is_main;
        main = order.filter(stays).unwrap_or(main);
        (op, order.unwrap_or(main))
    };
    ops.iter().map(order).collect()
}

/// Removes the schedule of a loop.
pub fn clear(func: &mut Func, region: BlockId) {
    for id in func.block(region).ops.clone() {
        func.set_place(id, None);
    }
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

/// Places a view of a shared buffer, in a loop with this main stage, in the stages of its users. Where ops of both stages
/// use it, copies it. Returns whether only ops behind use it.
pub fn place_view(func: &mut Func, region: BlockId, main: Option<u32>, id: OpId) -> bool {
    let Some(stage) = main else { return false };
    let result = func.result(id);
    let users: Vec<OpId> =
        func.block(region).ops.iter().copied().filter(|&op| uses(func, op).contains(&result)).collect();
    let (late, other): (Vec<OpId>, Vec<OpId>) = users.into_iter().partition(|&op| is_behind(func, main, op));
    let first = late.iter().filter_map(|&op| func.op(op).place).map(|place| place.order).min();
    let behind = Placement { stage: stage + 1, order: first.unwrap_or(order::BEHIND), ..Placement::default() };
    if !late.is_empty() && other.is_empty() {
        func.set_place(id, Some(behind));
        return true;
    }
    if !late.is_empty() {
        let copy = copy_for(func, id, &late);
        func.set_place(copy, Some(behind));
    }
    false
}

/// Inserts a copy of an op after it, and lets these users use the copy.
pub fn copy_for(func: &mut Func, id: OpId, users: &[OpId]) -> OpId {
    let data = func.op(id).clone();
    let ty = func.ty(data.results[0]).clone();
    let copy = Builder::after(func, id, data.loc).op(data.op, &data.operands, &[ty]);
    let map = HashMap::from([(data.results[0], func.result(copy))]);
    for &user in users {
        replace_in(func, user, &map);
    }
    copy
}

/// The carried values that ops behind compute: the value in the body, and what it becomes.
pub fn carried_from<'f>(
    func: &'f Func,
    region: BlockId,
    behind: &'f HashSet<OpId>,
) -> impl Iterator<Item = (Value, Value)> + 'f {
    let yields = &func.op(func.terminator(region)).operands;
    let carried = func.block(region).params[1..].iter().copied().zip(yields.iter().copied());
    carried.filter(|(_, y)| func.def_op(*y).is_some_and(|id| behind.contains(&id)))
}

/// The values of the main stage that ops behind use, in order of first use: the loop has to carry them to the next
/// iteration.
pub fn cross_stage_values(func: &Func, region: BlockId, behind: &HashSet<OpId>) -> Vec<Value> {
    let end = func.terminator(region);
    let params = &func.block(region).params;
    let is_from_behind = |v: Value| func.def_op(v).is_some_and(|id| behind.contains(&id));
    let mut found = Vec::new();
    for &id in func.block(region).ops.iter().filter(|id| behind.contains(id)) {
        let mut used: Vec<Value> = uses(func, id).into_iter().collect();
        used.sort();
        for v in used {
            let crosses = match func.value(v).def {
                Def::Param(block, 0) => block == region,
                Def::Param(block, i) => block == region && !is_from_behind(func.op(end).operands[i - 1]),
                Def::Result(op, _) => !behind.contains(&op) && func.is_in(op, region),
            };
            if crosses && !found.contains(&v) {
                found.push(v);
            }
        }
    }
    debug_assert!(found.iter().all(|v| params.contains(v) || func.def_op(*v).is_some()));
    found
}
