//! Type rules of ops that create and reshape tiles.

use super::{Check, OpCx, Rule, require};
use crate::ir::attr::AttrValue;
use crate::ir::{DType, Literal, Type, parts};
use crate::num;

pub(super) fn program(cx: &OpCx, axis: u32) -> Check {
    cx.attribute(axis < 3, || format!("`axis` should be 0, 1 or 2, found {axis}"))?;
    cx.result_is(0, &Type::scalar(DType::I32))
}

pub(super) fn constant(cx: &OpCx, value: Literal) -> Check {
    let ty = cx.result(0);
    let Some(dtype) = ty.dtype() else {
        return require(false, Rule::ResultTypes, || format!("a constant should be a number or a tile, found {ty}"));
    };
    let fits = match value {
        Literal::Bool(_) => dtype == DType::Bool,
        Literal::Float(_) => dtype.is_float(),
        Literal::Int(i) => is_value(i, dtype),
    };
    cx.attribute(fits, || format!("{} is not a value of {dtype}", value.to_attr()))
}

/// Whether an integer type has this value. Of a u64, `n` has the bits.
pub(super) fn is_value(n: i64, dtype: DType) -> bool {
    let (low, high) = num::int_range(dtype);
    dtype == DType::U64 || dtype.is_int() && (low..=high).contains(&i128::from(n))
}

pub(super) fn arange(cx: &OpCx, start: i64, end: i64) -> Check {
    let in_range = start >= i32::MIN as i64 && start < end && end - 1 <= i32::MAX as i64;
    cx.attribute(in_range, || {
        format!("`arange` should have start < end and elements in the range of i32, found {start} to {end}")
    })?;
    cx.result_is_ignoring_layout(0, &Type::tensor(&[(end - start) as usize], DType::I32))
}

/// Requires that the operand is a tile; returns its shape.
fn tile<'f>(cx: &OpCx<'f>) -> Result<&'f [usize], super::Violation> {
    cx.operand_where(0, "the operand", "a tile", Type::is_tensor)?;
    Ok(cx.operand(0).shape())
}

/// Requires that result `i` has this shape and the operand's element type.
fn reshaped(cx: &OpCx, i: usize, shape: &[usize]) -> Check {
    match cx.operand(0).elem() {
        Some(elem) => cx.result_is_ignoring_layout(i, &Type::tensor(shape, elem)),
        None => require(false, Rule::OperandTypes, || format!("expected a scalar or tile, found {}", cx.operand(0))),
    }
}

fn result_is_tile(cx: &OpCx) -> Check {
    require(cx.result(0).is_tensor(), Rule::ResultTypes, || {
        format!("the result should be a tile, found {}", cx.result(0))
    })
}

pub(super) fn splat(cx: &OpCx) -> Check {
    cx.operand_where(0, "the operand", "a scalar", Type::is_scalar)?;
    result_is_tile(cx)?;
    reshaped(cx, 0, cx.result(0).shape())
}

pub(super) fn expand_dims(cx: &OpCx, axis: usize) -> Check {
    let mut shape = tile(cx)?.to_vec();
    cx.attribute(axis <= shape.len(), || format!("`axis` should be at most the rank {}, found {axis}", shape.len()))?;
    shape.insert(axis, 1);
    reshaped(cx, 0, &shape)
}

pub(super) fn broadcast(cx: &OpCx) -> Check {
    let from = tile(cx)?;
    result_is_tile(cx)?;
    let to = cx.result(0).shape();
    let fits = from.len() == to.len() && from.iter().zip(to).all(|(&f, &t)| f == t || f == 1);
    require(fits, Rule::ResultTypes, || format!("{from:?} does not broadcast to {to:?}: only extents of 1 do"))?;
    reshaped(cx, 0, to)
}

/// Requires that `perm` contains every number below `rank` once.
pub(super) fn permutation(cx: &OpCx, what: &str, perm: &[usize], rank: usize) -> Check {
    let complete = perm.len() == rank && (0..rank).all(|d| perm.contains(&d));
    cx.attribute(complete, || format!("`{what}` should contain each of the {rank} dimensions once, found {perm:?}"))
}

pub(super) fn trans(cx: &OpCx, perm: &[usize]) -> Check {
    let from = tile(cx)?;
    permutation(cx, "perm", perm, from.len())?;
    let shape: Vec<usize> = perm.iter().map(|&d| from[d]).collect();
    reshaped(cx, 0, &shape)
}

pub(super) fn reshape(cx: &OpCx) -> Check {
    let from = tile(cx)?;
    result_is_tile(cx)?;
    let (old, new): (usize, usize) = (from.iter().product(), cx.result(0).numel());
    require(old == new, Rule::ResultTypes, || format!("the result should have {old} elements, found {new}"))?;
    let to = cx.result(0).shape();
    require(parts::reshapes(from, to), Rule::Extents, || {
        format!("a reshape from {from:?} to {to:?} takes extents apart that are not powers of two")
    })?;
    reshaped(cx, 0, cx.result(0).shape())
}

pub(super) fn join(cx: &OpCx) -> Check {
    cx.operand_is(1, "the second operand", cx.operand(0))?;
    let mut shape = cx.operand(0).shape().to_vec();
    shape.push(2);
    reshaped(cx, 0, &shape)
}

pub(super) fn split(cx: &OpCx) -> Check {
    let from = tile(cx)?;
    let Some((&2, shape)) = from.split_last() else {
        return require(false, Rule::OperandTypes, || format!("the last extent should be 2, found {from:?}"));
    };
    reshaped(cx, 0, shape)?;
    reshaped(cx, 1, shape)?;
    cx.result_is(1, cx.result(0))
}

pub(super) fn gather(cx: &OpCx, axis: usize) -> Check {
    let from = tile(cx)?;
    cx.attribute(axis < from.len(), || format!("`axis` should be below the rank {}, found {axis}", from.len()))?;
    cx.operand_where(1, "the index", "an i32 tile of the same shape in the other dimensions", |ty| {
        let others = |shape: &[usize]| -> Vec<usize> {
            shape.iter().enumerate().filter(|&(d, _)| d != axis).map(|(_, &n)| n).collect()
        };
        ty.is_tensor()
            && ty.dtype() == Some(DType::I32)
            && ty.shape().len() == from.len()
            && others(ty.shape()) == others(from)
    })?;
    match cx.operand(0).elem() {
        Some(elem) => cx.result_is(0, &cx.operand(1).with_elem(elem)),
        None => require(false, Rule::OperandTypes, || format!("expected a tile, found {}", cx.operand(0))),
    }
}
