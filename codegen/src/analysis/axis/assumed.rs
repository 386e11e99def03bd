//! Ranges of arguments from `assume`. An `assume` outside branches and loops that compares an argument with a constant
//! is checked by every launch ([`crate::analysis::bounds`]), so it holds from the first op of the kernel on.

use super::full_range;
use crate::ir::{BinaryOp, CmpOp, Func, Op, OpId, Value};

/// Range of an argument under the `assume`s at the top level of the kernel.
pub(super) fn range(func: &Func, argument: Value) -> (i128, i128) {
    let full = full_range(func.ty(argument).elem());
    let assumes = func.block(func.body).ops.iter().map(|&id| func.op(id)).filter(|data| data.op == Op::Assume);
    let (low, high) = assumes.fold(full, |range, data| narrowed(func, data.operands[0], argument, range));
    // No launch passes the check if the range is empty.
    if low <= high { (low, high) } else { full }
}

/// The subrange in which a condition can be true.
fn narrowed(func: &Func, condition: Value, argument: Value, (low, high): (i128, i128)) -> (i128, i128) {
    let Some(data) = func.def_op(condition).map(|id: OpId| func.op(id)) else { return (low, high) };
    let &[a, b] = &data.operands[..] else { return (low, high) };
    // u64 constants above `i64::MAX` are stored as negative numbers.
    let (first, last) = full_range(func.ty(argument).elem());
    let constant = |v| func.constant_int(v).map(i128::from).filter(|n| (first..=last).contains(n));
    let (op, n) = match data.op {
        Op::Binary(BinaryOp::And) => {
            let range = narrowed(func, a, argument, (low, high));
            return narrowed(func, b, argument, range);
        }
        Op::Cmp(op) if a == argument => (op, constant(b)),
        Op::Cmp(op) if b == argument => (swapped(op), constant(a)),
        _ => return (low, high),
    };
    match (op, n) {
        (_, None) | (CmpOp::Ne, _) => (low, high),
        (CmpOp::Eq, Some(n)) => (low.max(n), high.min(n)),
        (CmpOp::Lt, Some(n)) => (low, high.min(n - 1)),
        (CmpOp::Le, Some(n)) => (low, high.min(n)),
        (CmpOp::Gt, Some(n)) => (low.max(n + 1), high),
        (CmpOp::Ge, Some(n)) => (low.max(n), high),
    }
}

/// The predicate with swapped operands.
fn swapped(op: CmpOp) -> CmpOp {
    match op {
        CmpOp::Lt => CmpOp::Gt,
        CmpOp::Le => CmpOp::Ge,
        CmpOp::Gt => CmpOp::Lt,
        CmpOp::Ge => CmpOp::Le,
        CmpOp::Eq | CmpOp::Ne => op,
    }
}
