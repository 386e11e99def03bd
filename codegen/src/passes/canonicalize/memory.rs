//! Rewrite rules of pointers, views, and masked loads and stores.

use super::Change;
use crate::ir::{Eviction, Func, Literal, Op, OpId, Value};

/// Removes a `ptr_add` of 0.
pub(super) fn ptr_add(func: &Func, id: OpId) -> Option<Change> {
    let operands = &func.op(id).operands;
    (func.constant_int(operands[1]) == Some(0)).then(|| Change::Replace(vec![operands[0]]))
}

/// Makes a dimension of stride 1 the fastest: wide accesses run along it, and TMA takes no other one.
pub(super) fn make_view(func: &Func, id: OpId, order: &[usize]) -> Option<Change> {
    let data = func.op(id);
    let block = func.ty(data.results[0]).shape();
    let is_contiguous = |d: usize| func.constant_int(data.operands[1 + order.len() + d]) == Some(1);
    let fastest = order.iter().copied().find(|&d| is_contiguous(d) && block[d] > 1)?;
    if is_contiguous(order[0]) {
        return None;
    }
    let others = order.iter().copied().filter(|&d| d != fastest);
    Some(Change::Into(Op::MakeView { order: std::iter::once(fastest).chain(others).collect() }, data.operands.clone()))
}

/// Removes an `advance` by 0.
pub(super) fn advance(func: &Func, id: OpId) -> Option<Change> {
    let operands = &func.op(id).operands;
    let still = operands[1..].iter().all(|&delta| func.constant_int(delta) == Some(0));
    still.then(|| Change::Replace(vec![operands[0]]))
}

/// The constant value of the mask at operand `i`, if there is one.
fn constant_mask(func: &Func, operands: &[Value], i: usize) -> Option<bool> {
    match func.constant(*operands.get(i)?)? {
        Literal::Bool(mask) => Some(mask),
        Literal::Int(_) | Literal::Float(_) => None,
    }
}

pub(super) fn load(func: &Func, id: OpId, eviction: Eviction) -> Option<Change> {
    let data = func.op(id);
    match (constant_mask(func, &data.operands, 1)?, data.operands.get(2)) {
        (true, _) => Some(Change::Into(Op::Load { eviction }, vec![data.operands[0]])),
        (false, Some(&other)) => Change::replace_with(other),
        (false, None) => Change::constant(super::constants::literal(func.ty(data.results[0]).dtype()?, 0)),
    }
}

pub(super) fn store(func: &Func, id: OpId, eviction: Eviction) -> Option<Change> {
    let operands = &func.op(id).operands;
    match constant_mask(func, operands, 2)? {
        true => Some(Change::Into(Op::Store { eviction }, operands[..2].to_vec())),
        false => Some(Change::Replace(Vec::new())),
    }
}
