//! Rewrite rules of shape ops.

use super::Change;
use crate::ir::{Func, Op, OpId};

/// Simplifies `expand_dims`, `broadcast` and `reshape`: removes one to the same type, replaces one of a splat by a
/// splat, and merges two consecutive broadcasts or reshapes if tiles have no layouts yet.
pub(super) fn repeat_or_reshape(func: &Func, id: OpId) -> Option<Change> {
    let data = func.op(id);
    let (x, to) = (data.operands[0], func.ty(data.results[0]));
    if func.ty(x) == to {
        return Change::replace_with(x);
    }
    let inner = func.op(func.def_op(x)?);
    let no_layouts = to.layout().is_none();
    match (&data.op, &inner.op) {
        (_, Op::Splat) => Some(Change::Into(Op::Splat, inner.operands.clone())),
        (Op::Broadcast, Op::Broadcast) if no_layouts => Some(Change::Into(Op::Broadcast, inner.operands.clone())),
        (Op::Reshape, Op::Reshape | Op::ExpandDims { .. }) if no_layouts => {
            Some(Change::Into(Op::Reshape, inner.operands.clone()))
        }
        _ => None,
    }
}

pub(super) fn trans(func: &Func, id: OpId, perm: &[usize]) -> Option<Change> {
    let data = func.op(id);
    let (x, to) = (data.operands[0], func.ty(data.results[0]));
    if func.ty(x) == to && perm.is_sorted() {
        return Change::replace_with(x);
    }
    let inner = func.op(func.def_op(x)?);
    match &inner.op {
        Op::Splat => Some(Change::Into(Op::Splat, inner.operands.clone())),
        Op::Trans { perm: first } => {
            let both: Vec<usize> = perm.iter().map(|&d| first[d]).collect();
            if both.is_sorted() && func.ty(inner.operands[0]) == to {
                return Change::replace_with(inner.operands[0]);
            }
            let no_layouts = to.layout().is_none();
            no_layouts.then(|| Change::Into(Op::Trans { perm: both }, inner.operands.clone()))
        }
        _ => None,
    }
}

/// Removes `split` of `join`.
pub(super) fn split(func: &Func, id: OpId) -> Option<Change> {
    let data = func.op(id);
    let inner = func.op(func.def_op(data.operands[0])?);
    let same = inner.op == Op::Join && func.ty(inner.operands[0]) == func.ty(data.results[0]);
    same.then(|| Change::Replace(inner.operands.clone()))
}

/// Removes a conversion to the same layout, and merges conversions of conversions.
pub(super) fn convert_layout(func: &Func, id: OpId) -> Option<Change> {
    let data = func.op(id);
    let x = data.operands[0];
    if func.ty(x) == func.ty(data.results[0]) {
        return Change::replace_with(x);
    }
    let inner = func.op(func.def_op(x)?);
    match inner.op {
        Op::ConvertLayout => Some(Change::Into(Op::ConvertLayout, inner.operands.clone())),
        Op::Splat => Some(Change::Into(Op::Splat, inner.operands.clone())),
        _ => None,
    }
}
