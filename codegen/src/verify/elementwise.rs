//! Type rules of elementwise ops.

use super::{Check, OpCx, Rule, require};
use crate::ir::{BinaryOp, CmpOp, DType, Elem, Type, UnaryOp, parts};

/// Requires that operand `i` is a scalar or tile of a number type that `wanted` accepts.
fn numbers(cx: &OpCx, i: usize, described: &str, wanted: impl Fn(DType) -> bool) -> Check {
    cx.operand_where(i, &format!("operand {i}"), &format!("a scalar or tile of {described}"), |ty| {
        ty.dtype().is_some_and(wanted)
    })
}

/// Requires that all operands have the type of the first.
fn same_type_as_first(cx: &OpCx) -> Check {
    (1..cx.data.operands.len()).try_for_each(|i| cx.operand_is(i, &format!("operand {i}"), cx.operand(0)))
}

pub(super) fn unary(cx: &OpCx, op: UnaryOp) -> Check {
    match op {
        UnaryOp::Neg | UnaryOp::Abs => numbers(cx, 0, "integers or floats", |d| d != DType::Bool)?,
        UnaryOp::Not => numbers(cx, 0, "bool or integers", |d| !d.is_float())?,
        UnaryOp::Exp
        | UnaryOp::Exp2
        | UnaryOp::Log
        | UnaryOp::Log2
        | UnaryOp::Sqrt
        | UnaryOp::Rsqrt
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Tanh
        | UnaryOp::Erf
        | UnaryOp::Floor
        | UnaryOp::Ceil
        | UnaryOp::Trunc
        | UnaryOp::Rint => numbers(cx, 0, "floats", DType::is_float)?,
    }
    cx.result_is(0, cx.operand(0))
}

pub(super) fn binary(cx: &OpCx, op: BinaryOp) -> Check {
    match op {
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Mul
        | BinaryOp::Div
        | BinaryOp::Rem
        | BinaryOp::Min
        | BinaryOp::Max => numbers(cx, 0, "integers or floats", |d| d != DType::Bool)?,
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => numbers(cx, 0, "bool or integers", |d| !d.is_float())?,
        BinaryOp::CeilDiv | BinaryOp::Shl | BinaryOp::Shr | BinaryOp::MulHi => {
            numbers(cx, 0, "integers", DType::is_int)?;
        }
        BinaryOp::Rescale => numbers(cx, 0, "floats", DType::is_float)?,
    }
    same_type_as_first(cx)?;
    cx.result_is(0, cx.operand(0))
}

pub(super) fn cmp(cx: &OpCx, op: CmpOp) -> Check {
    match op {
        CmpOp::Eq | CmpOp::Ne => {
            cx.operand_where(0, "operand 0", "a scalar or tile", |ty| ty.elem().is_some())?;
        }
        CmpOp::Lt | CmpOp::Le | CmpOp::Gt | CmpOp::Ge => numbers(cx, 0, "integers or floats", |d| d != DType::Bool)?,
    }
    same_type_as_first(cx)?;
    cx.result_is(0, &cx.operand(0).with_elem(DType::Bool))
}

pub(super) fn fma(cx: &OpCx) -> Check {
    numbers(cx, 0, "floats", DType::is_float)?;
    same_type_as_first(cx)?;
    cx.result_is(0, cx.operand(0))
}

pub(super) fn select(cx: &OpCx) -> Check {
    cx.operand_where(1, "operand 1", "a scalar or tile", |ty| ty.elem().is_some())?;
    cx.operand_is(2, "operand 2", cx.operand(1))?;
    cx.operand_is(0, "the condition", &cx.operand(1).with_elem(DType::Bool))?;
    cx.result_is(0, cx.operand(1))
}

pub(super) fn cast(cx: &OpCx) -> Check {
    numbers(cx, 0, "numbers", |_| true)?;
    let Some(to) = cx.result(0).dtype() else {
        return require(false, Rule::ResultTypes, || {
            format!("the result should be a number or a tile of numbers, found {}", cx.result(0))
        });
    };
    cx.result_is(0, &cx.operand(0).with_elem(to))
}

pub(super) fn bitcast(cx: &OpCx) -> Check {
    let bits = |ty: &Type| ty.elem().filter(|e| *e != Elem::Num(DType::Bool)).map(Elem::bits);
    cx.operand_where(0, "the operand", "a scalar or tile, not of bool", |ty| bits(ty).is_some())?;
    let (from, to) = (cx.operand(0), cx.result(0));
    let Some(elem) = to.elem().filter(|_| bits(to) == bits(from)) else {
        return require(false, Rule::ResultTypes, || format!("the result should be as wide as {from}, found {to}"));
    };
    cx.result_is(0, &from.with_elem(elem))
}

pub(super) fn inline_asm(cx: &OpCx, pack: usize) -> Check {
    cx.attribute(pack.is_power_of_two(), || format!("`pack` should be a power of two, found {pack}"))?;
    let types: Vec<&Type> = cx.operands().into_iter().chain(cx.results()).collect();
    for ty in &types {
        let alike = ty.elem().is_some() && ty.shape() == types[0].shape();
        require(alike, Rule::OperandTypes, || {
            format!("operands and results should be scalars or tiles of one shape, found {} and {ty}", types[0])
        })?;
    }
    let whole = types.first().is_none_or(|ty| parts::count(ty.shape()) == 1);
    require(pack == 1 || whole, Rule::Extents, || {
        format!("`pack` = {pack} needs extents that are powers of two, found {}", types[0])
    })?;
    Ok(())
}

pub(super) fn hint(cx: &OpCx, divisible: Option<i64>, contiguous: Option<i64>, at_least: Option<i64>) -> Check {
    let integral = |e: Elem| e.num().is_none_or(DType::is_int);
    cx.operand_where(0, "the operand", "integers or pointers", |ty| ty.elem().is_some_and(integral))?;
    if at_least.is_some() {
        let int = |e: Elem| e.num().is_some_and(DType::is_int);
        cx.operand_where(0, "the operand of `at_least`", "integers", |ty| ty.elem().is_some_and(int))?;
    }
    for n in [divisible, contiguous].into_iter().flatten() {
        cx.attribute(n >= 1, || format!("`divisible` and `contiguous` should be at least 1, found {n}"))?;
    }
    cx.result_is(0, cx.operand(0))
}
