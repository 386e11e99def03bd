//! Joins reductions that stand side by side, so that warps meet once for all of them.
//!
//! Does: where two `reduce`s of a block go along the same axis of tiles in the same layout, across warps, and neither needs
//! the other's result, makes one `reduce` of more operands of them, where the first one was. What the second one needs and
//! stands between them is computed before. (A mean and a mean of products of the same row, say: each would wait for all
//! warps twice.)
//! Requires: stage laid.
//! Keeps: every value, bit for bit, and the order of effects.
//! Does not: join what no warps share, as such reductions do not wait; nor move anything but arithmetic.

use super::edit::{copy_op, terminator, uses};
use crate::ir::{BlockId, Effects, Func, LayoutId, Op, OpId, Type, Value};
use std::collections::{HashMap, HashSet};

/// Runs the pass.
pub fn run(func: &mut Func) {
    let regions = func.walk().into_iter().flat_map(|id| func.op(id).regions.clone());
    for block in std::iter::once(func.body).chain(regions).collect::<Vec<_>>() {
        join_in(func, block);
    }
}

fn join_in(func: &mut Func, block: BlockId) {
    let mut at = 0;
    while at < func.block(block).ops.len() {
        let first = func.block(block).ops[at];
        match crosses_warps(func, first).then(|| partner(func, block, at)).flatten() {
            // The joined one stands where the first was, or behind what was moved: it may have a third partner.
            Some((second, moved)) => join(func, block, first, second, &moved),
            None => at += 1,
        }
    }
}

/// Whether an op is a reduction for which warps have to meet.
pub(super) fn crosses_warps(func: &Func, id: OpId) -> bool {
    let data = func.op(id);
    let Op::Reduce { axis } = data.op else { return false };
    let Some(layout) = layout(func, id) else { return false };
    func.layout(layout).reduction(axis).is_some_and(|steps| !steps.warps.is_empty())
}

/// The layout of an op's first operand; none before layouts are assigned.
fn layout(func: &Func, id: OpId) -> Option<LayoutId> {
    func.ty(func.op(id).operands[0]).layout()
}

/// A reduction behind the one at a place of a block that can be joined with it, and what has to be computed before for
/// that.
fn partner(func: &Func, block: BlockId, at: usize) -> Option<(OpId, Vec<OpId>)> {
    let ops = &func.block(block).ops;
    let first = ops[at];
    let alike = |id: OpId| func.op(id).op == func.op(first).op && layout(func, id) == layout(func, first);
    ops[at + 1..].iter().enumerate().filter(|&(_, &id)| alike(id)).find_map(|(between, &second)| {
        let mut needed: HashSet<Value> = uses(func, second);
        let mut moved = Vec::new();
        for &id in ops[at + 1..][..between].iter().rev() {
            if func.op(id).results.iter().any(|v| needed.contains(v)) {
                if func.effects(id) != Effects::Pure {
                    return None;
                }
                needed.extend(uses(func, id));
                moved.push(id);
            }
        }
        moved.reverse();
        let apart = func.op(first).results.iter().all(|v| !needed.contains(v));
        apart.then_some((second, moved))
    })
}

/// Makes one of two reductions, behind `moved`.
fn join(func: &mut Func, block: BlockId, first: OpId, second: OpId, moved: &[OpId]) {
    let parts = [func.op(first).clone(), func.op(second).clone()];
    let region = func.add_block();
    let mut map: HashMap<Value, Value> = HashMap::new();
    // What is accumulated, of both; then the next values of both.
    for half in [0, 1] {
        for part in &parts {
            let n = part.operands.len();
            for i in half * n..(half + 1) * n {
                let param = func.block(part.regions[0]).params[i];
                let ty = func.ty(param).clone();
                let new = func.add_param(region, ty);
                map.insert(param, new);
            }
        }
    }
    let mut yielded = Vec::new();
    for part in &parts {
        let (end, ops) = (terminator(func, part.regions[0]), func.block(part.regions[0]).ops.clone());
        for &id in ops.iter().filter(|&&id| id != end) {
            copy_op(func, id, region, &mut map);
        }
        yielded.extend(func.op(end).operands.iter().map(|v| map.get(v).copied().unwrap_or(*v)));
    }
    func.append(region, Op::Yield, yielded, Vec::new(), Vec::new(), parts[0].loc.clone());
    let of_both =
        |list: fn(&crate::ir::OpData) -> &Vec<Value>| parts.iter().flat_map(list).copied().collect::<Vec<_>>();
    let (operands, results) = (of_both(|part| &part.operands), of_both(|part| &part.results));
    let types: Vec<Type> = results.iter().map(|&v| func.ty(v).clone()).collect();
    let joined = func.create_op(parts[0].op.clone(), operands, types, vec![region], parts[0].loc.clone());
    for (old, new) in results.into_iter().zip(func.op(joined).results.clone()) {
        func.replace_uses(old, new);
    }
    let gone: HashSet<OpId> = moved.iter().copied().chain([second]).collect();
    let mut ops = Vec::new();
    for &id in &func.block(block).ops {
        if id == first {
            ops.extend(moved.iter().copied().chain([joined]));
        } else if !gone.contains(&id) {
            ops.push(id);
        }
    }
    func.block_mut(block).ops = ops;
}
