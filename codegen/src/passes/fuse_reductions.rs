//! Fuses cross-warp reductions that can share a barrier.
//!
//! Does: where two `reduce` of a block have the same axis and the same operand layout, cross warps, and do not depend
//! on each other, merges them into one `reduce` with the operands of both, at the position of the first. Moves the pure
//! ops in between that the second depends on before it. (Example: the mean and the mean of squares of a row, each of
//! which would synchronize all warps.)
//! Requires: stage *layout*.
//! Keeps: every value, bit for bit, and the order of effects.
//! Does not: fuse reductions within warps, which need no barrier, nor move ops with effects.

use crate::ir::nested::{copy_op, uses};
use crate::ir::{BlockId, Effects, Func, LayoutId, Op, OpId, Type, Value};
use std::collections::{HashMap, HashSet};

/// Runs the pass.
pub fn run(func: &mut Func) {
    let regions = func.walk().into_iter().flat_map(|id| func.op(id).regions.clone());
    for block in std::iter::once(func.body).chain(regions).collect::<Vec<_>>() {
        fuse_in_block(func, block);
    }
}

fn fuse_in_block(func: &mut Func, block: BlockId) {
    let mut at = 0;
    while at < func.block(block).ops.len() {
        let first = func.block(block).ops[at];
        match is_cross_warp(func, first).then(|| fusable_reduction(func, block, at)).flatten() {
            // Looks again at the same position: the merged reduction may have a third candidate.
            Some((second, moved)) => fuse(func, block, first, second, &moved),
            None => at += 1,
        }
    }
}

/// Whether an op is a reduction across warps, which needs a barrier.
pub(super) fn is_cross_warp(func: &Func, id: OpId) -> bool {
    let data = func.op(id);
    let Op::Reduce { axis } = data.op else { return false };
    let Some(layout) = layout(func, id) else { return false };
    func.layout(layout).reduction(axis).is_some_and(|steps| !steps.warps.is_empty())
}

/// The layout of the first operand of an op; `None` before layouts are assigned.
fn layout(func: &Func, id: OpId) -> Option<LayoutId> {
    func.ty(func.op(id).operands[0]).layout()
}

/// A later reduction that can merge with the one at position `at` of a block, and the ops in between that have to move
/// before it.
fn fusable_reduction(func: &Func, block: BlockId, at: usize) -> Option<(OpId, Vec<OpId>)> {
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

/// Merges two reductions into one, placed after `moved`.
fn fuse(func: &mut Func, block: BlockId, first: OpId, second: OpId, moved: &[OpId]) {
    let parts = [func.op(first).clone(), func.op(second).clone()];
    let region = func.add_block();
    let mut map: HashMap<Value, Value> = HashMap::new();
    // The parameters are the accumulated values of both reductions, then the next values of both.
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
        let (end, ops) = (func.terminator(part.regions[0]), func.block(part.regions[0]).ops.clone());
        for &id in ops.iter().filter(|&&id| id != end) {
            let copy = copy_op(func, id, &mut map);
            func.push(region, copy);
        }
        yielded.extend(func.op(end).operands.iter().map(|v| map.get(v).copied().unwrap_or(*v)));
    }
    func.append(region, Op::Yield, yielded, Vec::new(), Vec::new(), parts[0].loc.clone());
    let of_both =
        |list: fn(&crate::ir::OpData) -> &Vec<Value>| parts.iter().flat_map(list).copied().collect::<Vec<_>>();
    let (operands, results) = (of_both(|part| &part.operands), of_both(|part| &part.results));
    let types: Vec<Type> = results.iter().map(|&v| func.ty(v).clone()).collect();
    let fused = func.create_op(parts[0].op.clone(), operands, types, vec![region], parts[0].loc.clone());
    for (old, new) in results.into_iter().zip(func.op(fused).results.clone()) {
        func.replace_uses(old, new);
    }
    moved.iter().for_each(|&id| func.move_before(id, first));
    func.insert(block, func.position(first), &[fused]);
    [first, second].into_iter().for_each(|id| func.erase(id));
}
