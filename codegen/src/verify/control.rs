//! Type rules of loops, branches and debugging ops.

use super::{Check, OpCx, Rule, barriers, same_types};
use crate::ir::{DType, Elem, Type};

/// Maximum number of pipeline stages.
pub(crate) const MAX_STAGES: u32 = 16;
/// Warpgroups of a block, without that of the producer.
pub(crate) const MAX_REPLICAS: u32 = 7;
/// Maximum unroll factor.
pub(crate) const MAX_UNROLL: u32 = 256;

pub(super) fn for_loop(cx: &OpCx, num_stages: Option<u32>, unroll: Option<u32>, replicas: Option<u32>) -> Check {
    // Both increase code size.
    for (what, most, n) in [("num_stages", MAX_STAGES, num_stages), ("unroll", MAX_UNROLL, unroll)] {
        let n = n.unwrap_or(1);
        cx.attribute((1..=most).contains(&n), || format!("`{what}` of a loop should be 1 to {most}, found {n}"))?;
    }
    let count = replicas.unwrap_or(2);
    cx.attribute((2..=MAX_REPLICAS).contains(&count), || {
        format!("`replicas` of a loop should be 2 to {MAX_REPLICAS}, found {count}")
    })?;
    cx.operand_where(0, "the lower bound", "a scalar integer", |ty| {
        ty.is_scalar() && ty.dtype().is_some_and(DType::is_int)
    })?;
    let index = cx.operand(0);
    cx.operand_is(1, "the upper bound", index)?;
    cx.operand_is(2, "the step", index)?;
    let carried = &cx.operands()[3..];
    let params = [&[index], carried].concat();
    same_types(Rule::ResultTypes, "the results of `for`", carried, &cx.results())?;
    same_types(Rule::RegionParams, "the parameters (index, then carried values)", &params, &cx.params(0))?;
    same_types(Rule::RegionResults, "the values that the loop yields", carried, &cx.terminator_types(0))
}

pub(super) fn dynamic_index(cx: &OpCx) -> Check {
    let i32 = Type::scalar(DType::I32);
    cx.operand_is(0, "the counter", &Type::Scalar(Elem::Ptr(DType::I32)))?;
    for (operand, what) in [(1, "the index"), (2, "the step"), (3, "the end")] {
        cx.operand_is(operand, what, &i32)?;
    }
    if cx.results().is_empty() { Ok(()) } else { cx.result_is(0, &i32) }
}

pub(super) fn take_index(cx: &OpCx) -> Check {
    dynamic_index(cx)?;
    index_buffer(cx, 4)?;
    barriers::barrier(cx, 5)
}

pub(super) fn taken_index(cx: &OpCx) -> Check {
    index_buffer(cx, 0)?;
    cx.result_is(0, &Type::scalar(DType::I32))
}

fn index_buffer(cx: &OpCx, operand: usize) -> Check {
    cx.operand_where(
        operand,
        "the buffer",
        "a shared buffer of one i32",
        |ty| matches!(ty, Type::Shared { shape, elem: DType::I32, .. } if *shape == [1]),
    )
}

pub(super) fn if_else(cx: &OpCx) -> Check {
    cx.operand_is(0, "the condition", &Type::scalar(DType::Bool))?;
    for (i, side) in ["then", "else"].into_iter().enumerate() {
        same_types(Rule::RegionParams, &format!("the parameters of the {side} side"), &[], &cx.params(i))?;
        let what = format!("the values that the {side} side yields");
        same_types(Rule::RegionResults, &what, &cx.results(), &cx.terminator_types(i))?;
    }
    Ok(())
}

pub(super) fn while_loop(cx: &OpCx) -> Check {
    let carried = cx.operands();
    same_types(Rule::RegionParams, "the parameters of the first region", &carried, &cx.params(0))?;
    let bool = Type::scalar(DType::Bool);
    let condition = [&[&bool], cx.results().as_slice()].concat();
    let what = "the operands of `condition` (a bool, then the results of `while`)";
    same_types(Rule::RegionResults, what, &condition, &cx.terminator_types(0))?;
    same_types(Rule::RegionParams, "the parameters of the second region", &cx.results(), &cx.params(1))?;
    same_types(Rule::RegionResults, "the values that the second region yields", &carried, &cx.terminator_types(1))
}

pub(super) fn device_print(cx: &OpCx) -> Check {
    (0..cx.data.operands.len())
        .try_for_each(|i| cx.operand_where(i, &format!("operand {i}"), "a scalar or tile", |ty| ty.elem().is_some()))
}

pub(super) fn device_assert(cx: &OpCx) -> Check {
    cx.operand_where(0, "the condition", "a bool or a tile of them", |ty| ty.dtype() == Some(DType::Bool))
}
