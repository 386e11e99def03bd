//! Type rules of `dot`, `reduce` and `scan`.

use super::{Check, OpCx, Rule, require, same_types};
use crate::ir::{DType, Effects, Elem, Op, Type, parts};
use crate::layout::MAX_RANK;

/// Element types of accumulators for operands of these types; none if `dot` does not support them.
fn accumulators(a: DType, b: DType) -> &'static [DType] {
    let byte = |d| matches!(d, DType::I8 | DType::U8);
    match (a, b) {
        (DType::F16, DType::F16) => &[DType::F32, DType::F16],
        (DType::BF16, DType::BF16) | (DType::F32, DType::F32) => &[DType::F32],
        (DType::F64, DType::F64) => &[DType::F64],
        (a, b) if a.is_f8() && b.is_f8() => &[DType::F32, DType::F16],
        (a, b) if byte(a) && byte(b) => &[DType::I32],
        _ => &[],
    }
}

pub(super) fn dot(cx: &OpCx, max_imprecise: Option<u32>) -> Check {
    dot_types(cx, cx.operand(0), cx.operand(1))?;
    let fp8 = cx.operand(0).dtype().is_some_and(|dtype| dtype.is_float() && dtype.bits() == 8);
    cx.attribute(max_imprecise.is_none() || fp8, || {
        format!("`max_imprecise` is for dots of 8-bit floats, found {}", cx.operand(0))
    })
}

/// Type rules of `dot`, `mma_sync`, `fma_dot` and `wgmma`: a [M, K] × b [K, N] + operand 2 [M, N], with a and b in
/// registers or shared memory.
pub(super) fn dot_types(cx: &OpCx, a: &Type, b: &Type) -> Check {
    let elem = |ty: &Type| match ty {
        Type::Shared { elem, .. } => Some(*elem),
        other => other.dtype(),
    };
    let (&[m, k], &[k2, n], Some(ea), Some(eb)) = (a.shape(), b.shape(), elem(a), elem(b)) else {
        return require(false, Rule::OperandTypes, || {
            format!("expected two matrices [M, K] and [K, N], found {a} and {b}")
        });
    };
    require(k == k2, Rule::OperandTypes, || format!("inner extents differ: {a} has {k} columns, {b} has {k2} rows"))?;
    let legal: Vec<Type> = accumulators(ea, eb).iter().map(|&acc| Type::tensor(&[m, n], acc)).collect();
    require(!legal.is_empty(), Rule::OperandTypes, || {
        format!("no dot of {ea} and {eb}: expected two of f16, bf16, f32 or f64, any 8-bit floats, or 8-bit integers")
    })?;
    let expected = legal.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
    cx.operand_where(2, "the accumulator", &expected, |ty| legal.contains(&ty.with_layout(None)))?;
    cx.result_is(0, cx.operand(2))
}

pub(super) fn reduce(cx: &OpCx, axis: usize) -> Check {
    let elems = check_combine(cx, axis)?;
    let mut shape = cx.operand(0).shape().to_vec();
    shape.remove(axis);
    for (i, &elem) in elems.iter().enumerate() {
        cx.result_is_ignoring_layout(i, &Type::tensor(&shape, elem))?;
    }
    Ok(())
}

pub(super) fn scan(cx: &OpCx, axis: usize) -> Check {
    check_combine(cx, axis)?;
    let shape = cx.operand(0).shape();
    require(shape.len() < MAX_RANK || parts::count(shape) == 1, Rule::Extents, || {
        format!("a scan of {MAX_RANK} dimensions needs extents that are powers of two, found {shape:?}")
    })?;
    same_types(Rule::ResultTypes, "the results of `scan`", &cx.operands(), &cx.results())
}

/// Checks what `reduce` and `scan` share: operands, axis, number of results, and region. Returns the element types of
/// the operands.
fn check_combine(cx: &OpCx, axis: usize) -> Result<Vec<Elem>, super::Violation> {
    let shape = cx.operand(0).shape();
    for (i, ty) in cx.operands().into_iter().enumerate() {
        cx.operand_where(i, &format!("operand {i}"), "a tile of the first one's shape", |_| {
            ty.is_tensor() && ty.shape() == shape && ty.layout() == cx.operand(0).layout()
        })?;
    }
    cx.attribute(axis < shape.len(), || format!("`axis` should be below the rank {}, found {axis}", shape.len()))?;
    let (n, found) = (cx.data.operands.len(), cx.data.results.len());
    require(n == found, Rule::ResultTypes, || format!("{n} operands should give {n} results, found {found}"))?;

    let elems: Vec<Elem> = cx.operands().into_iter().filter_map(Type::elem).collect();
    let scalars: Vec<Type> = elems.iter().map(|&e| Type::Scalar(e)).collect();
    let once: Vec<&Type> = scalars.iter().collect();
    let twice = [once.clone(), once.clone()].concat();
    same_types(Rule::RegionParams, "the region's parameters", &twice, &cx.params(0))?;
    same_types(Rule::RegionResults, "the values that the region yields", &once, &cx.terminator_types(0))?;
    pure_scalars(cx)?;
    Ok(elems)
}

fn pure_scalars(cx: &OpCx) -> Check {
    for &id in &cx.func.block(cx.data.regions[0]).ops {
        let data = cx.func.op(id);
        let scalars = data.operands.iter().chain(&data.results).all(|&v| cx.func.ty(v).is_scalar());
        let fine = scalars && (data.op == Op::Yield || data.op.effects() == Effects::Pure);
        require(fine, Rule::CombineRegion, || {
            format!("the region should contain only pure ops on scalars, found `{}`", data.op.mnemonic())
        })?;
    }
    Ok(())
}
