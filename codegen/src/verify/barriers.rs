//! Type rules of mbarriers, TMA copies and warp specialization.

use super::shared::buffer;
use super::{Check, OpCx, Rule, memory, require, same_types};
use crate::ir::{DType, Padding, Type};

pub(super) fn alloc(cx: &OpCx, arrivals: u32) -> Check {
    cx.attribute(arrivals >= 1, || "`arrivals` should be at least 1".into())?;
    let found = cx.result(0);
    require(matches!(found, Type::Barrier { .. }), Rule::ResultTypes, || {
        format!("the result should be mbarriers, found {found}")
    })
}

/// Requires that operand `i` is mbarriers, and that the next operand, if there is one, is an index into them.
pub(super) fn barrier(cx: &OpCx, i: usize) -> Check {
    cx.operand_where(i, &format!("operand {i}"), "mbarriers", |ty| matches!(ty, Type::Barrier { .. }))?;
    match cx.data.operands.len() > i + 1 {
        true => cx.operand_is(i + 1, "the index", &Type::scalar(DType::I32)),
        false => Ok(()),
    }
}

/// Requires that operand `i`, if there is one, is a predicate.
pub(super) fn predicate(cx: &OpCx, i: usize) -> Check {
    match cx.data.operands.len() > i {
        true => cx.operand_is(i, "the predicate", &Type::scalar(DType::Bool)),
        false => Ok(()),
    }
}

pub(super) fn expect(cx: &OpCx, bytes: u32) -> Check {
    // PTX ISA, "mbarrier": at most 2^20 - 1 expected bytes.
    cx.attribute((1..1 << 20).contains(&bytes), || format!("`bytes` should be 1 to 2^20 - 1, found {bytes}"))?;
    barrier(cx, 0)?;
    predicate(cx, 2)
}

/// A number of CTAs of a cluster: a portable size (CUDA C Programming Guide, "Thread Block Clusters").
pub(super) fn ctas(cx: &OpCx, ctas: Option<u32>) -> Check {
    cx.attribute(ctas.is_none_or(|n| matches!(n, 2 | 4 | 8)), || {
        format!("`ctas` should be 2, 4 or 8, found {}", ctas.unwrap_or(1))
    })
}

pub(super) fn arrive_warps(cx: &OpCx, warps: u32, lanes: u32, ctas: Option<u32>) -> Check {
    self::ctas(cx, ctas)?;
    cx.attribute(matches!(lanes, 1 | 32), || format!("`lanes` should be 1 or 32, found {lanes}"))?;
    arrive(cx, "warps", warps)
}

/// Type rules of an arrival of `count` warps or threads; `what` is the name of the attribute.
pub(super) fn arrive(cx: &OpCx, what: &str, count: u32) -> Check {
    cx.attribute((1..=1024).contains(&count), || format!("`{what}` should be 1 to 1024, found {count}"))?;
    barrier(cx, 0)
}

pub(super) fn wait(cx: &OpCx) -> Check {
    barrier(cx, 0)?;
    cx.operand_is(2, "the parity", &Type::scalar(DType::I32))?;
    predicate(cx, 3)
}

pub(super) fn pingpong_wait(cx: &OpCx) -> Check {
    let count = cx.data.operands.len();
    require(count.is_multiple_of(5), Rule::OperandTypes, || {
        format!("expected five operands for each pair of mbarriers, found {count}")
    })?;
    for first in (0..count).step_by(5) {
        for i in [first, first + 1] {
            cx.operand_where(i, &format!("operand {i}"), "mbarriers", |ty| matches!(ty, Type::Barrier { .. }))?;
        }
        cx.operand_is(first + 2, "the slot", &Type::scalar(DType::I32))?;
        cx.operand_is(first + 3, "the parity", &Type::scalar(DType::I32))?;
        cx.operand_is(first + 4, "the count", &Type::scalar(DType::I64))?;
    }
    Ok(())
}

pub(super) fn tma_load(cx: &OpCx, boundary: &[usize], ctas: Option<u32>) -> Check {
    self::ctas(cx, ctas)?;
    let (block, elem) = memory::view(cx)?;
    memory::check_padding(cx, boundary, Padding::Zero, block.len(), elem)?;
    require(buffer(cx, 1)? == (block, elem), Rule::OperandTypes, || {
        format!("the buffer should have the view's block and element, found {} and {}", cx.operand(0), cx.operand(1))
    })?;
    barrier(cx, 2)?;
    predicate(cx, 4)
}

pub(super) fn warp_specialize(
    cx: &OpCx,
    warps: u32,
    producers: u32,
    registers: &[u32],
    replicas: Option<u32>,
) -> Check {
    let count = replicas.unwrap_or(2);
    cx.attribute(count >= 2, || format!("`replicas` should be at least 2, found {count}"))?;
    let all = warps.saturating_mul(replicas.unwrap_or(1));
    cx.attribute(all <= 28, || format!("a block has at most 28 consumer warps, found {all}"))?;
    cx.attribute(warps >= 4 && warps.is_multiple_of(4), || {
        format!("`warps` should be a multiple of four, found {warps}")
    })?;
    cx.attribute((1..=4).contains(&producers), || format!("`producers` should be 1 to 4, found {producers}"))?;
    // PTX ISA, "setmaxnreg".
    let legal = |n: &u32| (24..=256).contains(n) && n.is_multiple_of(8);
    let fine = registers.is_empty() || registers.len() == 2 && registers.iter().all(legal);
    cx.attribute(fine, || {
        format!("`registers` should be two multiples of 8 from 24 to 256, or empty, found {registers:?}")
    })?;
    for i in 0..2 {
        same_types(Rule::RegionParams, "the parameters of a partition", &[], &cx.params(i))?;
        same_types(Rule::RegionResults, "the values that a partition yields", &[], &cx.terminator_types(i))?;
    }
    Ok(())
}
