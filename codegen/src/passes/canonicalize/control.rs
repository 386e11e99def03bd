//! Rewrite rules of loops, branches and checks.

use super::Change;
use crate::ir::{Func, Literal, OpId};
use crate::num;

/// Removes a loop without iterations, and inlines a loop with one.
pub(super) fn for_loop(func: &Func, id: OpId) -> Option<Change> {
    let data = func.op(id);
    let dtype = func.ty(data.operands[0]).dtype()?;
    let bound = |i: usize| {
        let bits = super::constants::constant_bits(func, data.operands[i])?;
        Some(num::decode_int(dtype, bits))
    };
    let (lower, upper, step) = (bound(0)?, bound(1)?, bound(2)?);
    let carried = &data.operands[3..];
    if step <= 0 {
        return None;
    }
    if lower >= upper {
        return Some(Change::Replace(carried.to_vec()));
    }
    (lower + step >= upper).then(|| Change::Inline(data.regions[0], [&data.operands[..1], carried].concat()))
}

pub(super) fn branch(func: &Func, id: OpId) -> Option<Change> {
    let data = func.op(id);
    match func.constant(data.operands[0])? {
        Literal::Bool(true) => Some(Change::Inline(data.regions[0], Vec::new())),
        Literal::Bool(false) => Some(Change::Inline(data.regions[1], Vec::new())),
        Literal::Int(_) | Literal::Float(_) => None,
    }
}

/// Removes an assumption or an assertion that always holds.
pub(super) fn known_true(func: &Func, id: OpId) -> Option<Change> {
    let holds = func.constant(func.op(id).operands[0]) == Some(Literal::Bool(true));
    holds.then(|| Change::Replace(Vec::new()))
}
