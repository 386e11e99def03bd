//! Type rules of layouts, shared memory, asynchronous copies and MMA.

use super::shape::permutation;
use super::{Check, OpCx, Rule, dot_and_reduce, memory, require};
use crate::ir::{DType, Padding, Type};
use crate::mma::shared::Matrix;
use crate::mma::{Family, Instruction, MmaShape};

/// Requires that operand `i` is a shared buffer; returns its shape and element type.
pub(super) fn buffer<'f>(cx: &OpCx<'f>, i: usize) -> Result<(&'f [usize], DType), super::Violation> {
    shared(cx.operand(i)).ok_or_else(|| super::Violation {
        rule: Rule::OperandTypes,
        message: format!("operand {i} should be a shared buffer, found {}", cx.operand(i)),
    })
}

fn shared(ty: &Type) -> Option<(&[usize], DType)> {
    match ty {
        Type::Shared { shape, elem, layout: _ } => Some((shape, *elem)),
        _ => None,
    }
}

/// Requires that the result is a shared buffer of this shape and element type.
fn result_is_buffer(cx: &OpCx, shape: &[usize], elem: DType) -> Check {
    require(shared(cx.result(0)) == Some((shape, elem)), Rule::ResultTypes, || {
        format!("the result should be a shared buffer of {shape:?} {elem}, found {}", cx.result(0))
    })
}

pub(super) fn convert_layout(cx: &OpCx) -> Check {
    cx.operand_where(0, "the operand", "a tile", Type::is_tensor)?;
    cx.result_is_ignoring_layout(0, cx.operand(0))
}

pub(super) fn local_alloc(cx: &OpCx) -> Check {
    let Some((shape, elem)) = shared(cx.result(0)) else {
        return require(false, Rule::ResultTypes, || format!("the result should be shared, found {}", cx.result(0)));
    };
    let fits = |ty: &Type| ty.with_layout(None) == Type::tensor(shape, elem);
    match cx.data.operands.len() {
        0 => Ok(()),
        _ => cx.operand_where(0, "the initial tile", "a tile of the buffer's shape and element", fits),
    }
}

pub(super) fn local_load(cx: &OpCx) -> Check {
    let (shape, elem) = buffer(cx, 0)?;
    cx.result_is_ignoring_layout(0, &Type::tensor(shape, elem))
}

pub(super) fn local_store(cx: &OpCx) -> Check {
    let (shape, elem) = buffer(cx, 0)?;
    let expected = Type::tensor(shape, elem);
    cx.operand_where(1, "the tile", &expected.to_string(), |ty| ty.with_layout(None) == expected)
}

pub(super) fn local_slot(cx: &OpCx) -> Check {
    let (shape, elem) = buffer(cx, 0)?;
    require(shape.len() >= 2, Rule::OperandTypes, || format!("{} is not a ring of buffers", cx.operand(0)))?;
    cx.operand_is(1, "the index", &Type::scalar(DType::I32))?;
    result_is_buffer(cx, &shape[1..], elem)
}

pub(super) fn local_trans(cx: &OpCx, perm: &[usize]) -> Check {
    let (from, elem) = buffer(cx, 0)?;
    permutation(cx, "perm", perm, from.len())?;
    let shape: Vec<usize> = perm.iter().map(|&d| from[d]).collect();
    result_is_buffer(cx, &shape, elem)
}

pub(super) fn async_copy(cx: &OpCx, boundary: &[usize], padding: Padding) -> Check {
    let (block, elem) = memory::view(cx)?;
    memory::check_padding(cx, boundary, padding, block.len(), elem)?;
    require(buffer(cx, 1)? == (block, elem), Rule::OperandTypes, || {
        format!("the buffer should have the view's block and element, found {} and {}", cx.operand(0), cx.operand(1))
    })?;
    match cx.data.operands.len() {
        2 => Ok(()),
        _ => cx.operand_is(2, "the predicate", &Type::scalar(DType::Bool)),
    }
}

pub(super) fn async_load(cx: &OpCx, vector: usize) -> Check {
    let elem = memory::pointers(cx)?;
    let shape = cx.operand(0).shape();
    require(!shape.is_empty() && buffer(cx, 1)? == (shape, elem), Rule::OperandTypes, || {
        format!(
            "the buffer should have the shape and element of the pointers, found {} and {}",
            cx.operand(0),
            cx.operand(1)
        )
    })?;
    cx.attribute(matches!(vector.checked_mul(elem.bytes()), Some(4 | 8 | 16)), || {
        format!("`vector` should be 4, 8 or 16 bytes, found {vector} elements of {elem}")
    })?;
    cx.operand_is(2, "the predicate", &Type::scalar(DType::Bool))?;
    memory::mask(cx, 3)
}

/// Type rules of dots whose operands a and b are tiles or shared buffers.
/// As [`dot`], for multiply-adds, whose sums have the precision of f32 at least.
pub(super) fn fma_dot(cx: &OpCx) -> Check {
    dot(cx)?;
    cx.operand_where(2, "the accumulator", "elements of at least 32 bits", |ty| ty.dtype() != Some(DType::F16))
}

pub(super) fn dot(cx: &OpCx) -> Check {
    for i in 0..2 {
        let what = format!("operand {i}");
        cx.operand_where(i, &what, "a tile or a shared buffer", |ty| ty.is_tensor() || shared(ty).is_some())?;
    }
    dot_and_reduce::dot_types(cx, cx.operand(0), cx.operand(1))
}

/// As [`dot`], for an MMA instruction of the table ([`crate::mma`]) and `warps` warps along M and N.
pub(super) fn mma(cx: &OpCx, family: Family, warps: &[u32], ends: [Option<u32>; 2]) -> Check {
    // A block has at most 32 warps.
    let fine = warps.len() == 2 && warps.iter().all(|n| n.is_power_of_two() && *n <= 32);
    cx.attribute(fine, || format!("`warps` should be two powers of two up to 32, along M and N, found {warps:?}"))?;
    dot(cx)?;
    let Some(instruction) = Instruction::of(cx.func, cx.data, family) else {
        return require(false, Rule::OperandTypes, || {
            let (op, [a, b, acc]) = (cx.data.op.mnemonic(), [0, 1, 2].map(|i| cx.operand(i)));
            format!("no `{op}` instruction multiplies {a} and {b} with an accumulator {acc}")
        });
    };
    let (m, [k, n]) = (cx.operand(0).shape()[0], [0, 1].map(|axis| cx.operand(1).shape()[axis]));
    let shape = MmaShape { m: m as u32, n: n as u32, k: k as u32 };
    let plan = instruction.on_warps(shape, [warps[0], warps[1]]);
    require(plan.is_some(), Rule::OperandTypes, || {
        let mnemonic = instruction.mnemonic(instruction.n[0]);
        let expected = match instruction.plan(shape, warps[0] * warps[1], None) {
            Some(plan) => format!("expected, for example, {:?}", plan.warps),
            None => "the instruction's shape or warps do not divide the dot".into(),
        };
        format!("{mnemonic} cannot compute [{m}, {k}] × [{k}, {n}] with {warps:?} warps along M and N: {expected}")
    })?;
    // The lowering takes the registers of the accumulator in the order of this layout.
    if let (Family::MmaSync, Some(plan), Type::Tensor { layout: Some(layout), .. }) = (family, plan, cx.operand(2)) {
        let (expected, layout) = (plan.acc_layout(&[m as u32, n as u32]), cx.func.layout(*layout));
        require(*layout == expected, Rule::OperandTypes, || {
            format!("with {warps:?} warps, the accumulator should have the layout {expected}, found {layout}")
        })?;
    }
    if family == Family::Wgmma {
        for (i, k_axis) in [(0, 1), (1, 0)] {
            let Type::Shared { layout, .. } = cx.operand(i) else {
                require(i == 0, Rule::OperandTypes, || format!("operand {i} should be in shared memory"))?;
                continue;
            };
            let layout = cx.func.layout(*layout);
            let readable = Matrix::of(cx.func, cx.operand(i), k_axis, instruction.allows_mn_major()).is_some();
            require(readable, Rule::OperandTypes, || format!("wgmma cannot read operand {i} of layout {layout}"))?;
        }
    }
    for (end, (name, &extent)) in ends.iter().zip(["k_end", "n_end"].iter().zip(cx.operand(1).shape())) {
        let inside = end.is_none_or(|end| (1..extent).contains(&(end as usize)));
        cx.attribute(inside, || {
            format!("`{name}` should be at least 1 and below the extent {extent} of the second operand, found {end:?}")
        })?;
    }
    Ok(())
}

pub(super) fn block_barrier(cx: &OpCx, id: u32, threads: Option<u32>) -> Check {
    cx.attribute(id < 16, || format!("`id` should be 0 to 15, found {id}"))?;
    let whole_warps = threads.is_none_or(|n| n > 0 && n % 32 == 0);
    cx.attribute(whole_warps, || format!("`threads` should be a multiple of 32, found {threads:?}"))
}
