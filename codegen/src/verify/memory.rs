//! Type rules of views, pointers, and accesses to global memory.

use super::shape::permutation;
use super::{Check, OpCx, Rule, require};
use crate::ir::{AtomicOp, DType, Elem, Padding, Type};

/// Requires that operand 0 is a view; returns its block shape and element type.
pub(super) fn view<'f>(cx: &OpCx<'f>) -> Result<(&'f [usize], DType), super::Violation> {
    match cx.operand(0) {
        Type::View { block, elem } => Ok((block, *elem)),
        other => {
            let message = format!("operand 0 should be a view, found {other}");
            Err(super::Violation { rule: Rule::OperandTypes, message })
        }
    }
}

/// Requires that all operands from `first` on are scalar i64.
fn offsets(cx: &OpCx, first: usize) -> Check {
    let i64 = Type::scalar(DType::I64);
    (first..cx.data.operands.len()).try_for_each(|i| cx.operand_is(i, &format!("operand {i}"), &i64))
}

pub(super) fn make_view(cx: &OpCx, order: &[usize]) -> Check {
    let Type::View { block, elem } = cx.result(0) else {
        return require(false, Rule::ResultTypes, || format!("the result should be a view, found {}", cx.result(0)));
    };
    let (rank, n) = (block.len(), cx.data.operands.len());
    require(n == 1 + 3 * rank, Rule::OperandTypes, || {
        format!(
            "a view of rank {rank} takes a base, then {rank} each of shape, strides and offsets; found {n} operands"
        )
    })?;
    cx.operand_is(0, "the base", &Type::Scalar(Elem::Ptr(*elem)))?;
    offsets(cx, 1)?;
    permutation(cx, "order", order, rank)
}

pub(super) fn advance(cx: &OpCx) -> Check {
    let (block, _) = view(cx)?;
    let n = cx.data.operands.len();
    require(n == 1 + block.len(), Rule::OperandTypes, || {
        format!("a view of rank {0} takes {0} offsets, found {1}", block.len(), n - 1)
    })?;
    offsets(cx, 1)?;
    cx.result_is(0, cx.operand(0))
}

/// Requires that `boundary` lists dimensions below the rank in ascending order.
pub(super) fn boundary_of(cx: &OpCx, boundary: &[usize], rank: usize) -> Check {
    let ascending = boundary.windows(2).all(|w| w[0] < w[1]);
    let below = boundary.last().is_none_or(|&d| d < rank);
    cx.attribute(ascending && below, || {
        format!("`boundary` should list dimensions below {rank} in ascending order, found {boundary:?}")
    })
}

/// Checks the boundary and padding of a load through a view.
pub(super) fn check_padding(cx: &OpCx, boundary: &[usize], padding: Padding, rank: usize, elem: DType) -> Check {
    boundary_of(cx, boundary, rank)?;
    cx.attribute(padding == Padding::Zero || elem.is_float(), || format!("{elem} has no NaN to pad with"))
}

pub(super) fn load_view(cx: &OpCx, boundary: &[usize], padding: Padding) -> Check {
    let (block, elem) = view(cx)?;
    check_padding(cx, boundary, padding, block.len(), elem)?;
    cx.result_is_ignoring_layout(0, &Type::tensor(block, elem))
}

pub(super) fn prefetch_view(cx: &OpCx, boundary: &[usize]) -> Check {
    boundary_of(cx, boundary, view(cx)?.0.len())?;
    super::barriers::predicate(cx, 1)
}

pub(super) fn store_view(cx: &OpCx, boundary: &[usize]) -> Check {
    let (block, elem) = view(cx)?;
    boundary_of(cx, boundary, block.len())?;
    let expected = Type::tensor(block, elem);
    cx.operand_where(1, "the tile", &expected.to_string(), |ty| ty.with_layout(None) == expected)
}

pub(super) fn atomic_view(cx: &OpCx, op: AtomicOp, boundary: &[usize]) -> Check {
    store_view(cx, boundary)?;
    atomic(op, view(cx)?.1)
}

pub(super) fn tma_store(cx: &OpCx, boundary: &[usize], op: Option<AtomicOp>) -> Check {
    store_view(cx, boundary)?;
    let elem = view(cx)?.1;
    let fine = op.is_none() || (op, elem) == (Some(AtomicOp::Add), DType::F32);
    require(fine, Rule::OperandTypes, || format!("TMA adds f32, found {} of {elem}", op.map_or("", AtomicOp::name)))
}

/// Requires an element type that an atomic supports, by an instruction of the target or by a compare-and-swap loop.
fn atomic(op: AtomicOp, elem: DType) -> Check {
    let wide = elem.bits() >= 16;
    let (fine, supported) = match op {
        AtomicOp::Add | AtomicOp::Min | AtomicOp::Max | AtomicOp::Xchg => (wide, "numbers of 16, 32 and 64 bits"),
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => (wide && elem.is_int(), "integers of 16, 32 and 64 bits"),
    };
    require(fine, Rule::OperandTypes, || format!("atomic {} supports {supported}, found {elem}", op.name()))
}

/// Requires that operand 0 is a pointer or a tile of pointers; returns the type that they point to.
pub(super) fn pointers(cx: &OpCx) -> Result<DType, super::Violation> {
    let ty = cx.operand(0);
    ty.elem().and_then(Elem::pointee).ok_or_else(|| super::Violation {
        rule: Rule::OperandTypes,
        message: format!("operand 0 should be a pointer or a tile of pointers, found {ty}"),
    })
}

pub(super) fn ptr_add(cx: &OpCx) -> Check {
    pointers(cx)?;
    cx.operand_where(1, "the offset", "integers", |ty| ty.dtype().is_some_and(DType::is_int))?;
    let dtype = cx.operand(1).dtype().unwrap_or(DType::I64);
    cx.operand_is(1, "the offset", &cx.operand(0).with_elem(dtype))?;
    cx.result_is(0, cx.operand(0))
}

/// Requires that operand `i`, if there is one, is a mask for the pointers.
pub(super) fn mask(cx: &OpCx, i: usize) -> Check {
    if cx.data.operands.len() <= i {
        return Ok(());
    }
    cx.operand_is(i, "the mask", &cx.operand(0).with_elem(DType::Bool))
}

pub(super) fn load(cx: &OpCx) -> Check {
    let value = cx.operand(0).with_elem(pointers(cx)?);
    mask(cx, 1)?;
    if cx.data.operands.len() > 2 {
        cx.operand_is(2, "the value where the mask is false", &value)?;
    }
    cx.result_is(0, &value)
}

pub(super) fn store(cx: &OpCx) -> Check {
    let value = cx.operand(0).with_elem(pointers(cx)?);
    cx.operand_is(1, "the value", &value)?;
    mask(cx, 2)
}

pub(super) fn atomic_rmw(cx: &OpCx, op: AtomicOp) -> Check {
    let elem = pointers(cx)?;
    atomic(op, elem)?;
    let value = cx.operand(0).with_elem(elem);
    cx.operand_is(1, "the value", &value)?;
    mask(cx, 2)?;
    cx.result_is(0, &value)
}

pub(super) fn semaphore_wait(cx: &OpCx) -> Check {
    let counter = Type::Scalar(Elem::Ptr(DType::I32));
    cx.operand_is(0, "the counter", &counter)?;
    cx.operand_is(1, "the value", &counter.with_elem(DType::I32))
}

pub(super) fn atomic_cas(cx: &OpCx) -> Check {
    let elem = pointers(cx)?;
    atomic(AtomicOp::Xchg, elem)?;
    let value = cx.operand(0).with_elem(elem);
    cx.operand_is(1, "the expected value", &value)?;
    cx.operand_is(2, "the new value", &value)?;
    mask(cx, 3)?;
    cx.result_is(0, &value)
}
