//! Moves sum reductions across lanes and warps out of loops.
//!
//! Does: where a `for` carries a value to which each iteration adds the sum of a tile, possibly after it has scaled the
//! value, and neither has another use, the loop carries a partial sum of each lane and warp instead. In the loop remains
//! the reduction of the elements that one thread holds; the shuffles between lanes and the barrier between warps follow
//! the loop. (Examples: an inner product of long rows, where all warps would wait at every tile, with no loads in
//! flight; the row sums of an online softmax, which each new maximum scales.)
//! Requires: stage *layout*.
//! Keeps: the set of summands and the order of effects. Floats are added in another order. An initial value that the
//! loop scales is divided among the partial sums, whose number is a power of two.
//! Does not: move sums of types below 32 bits, scaled sums of integers, or sums along an axis whose coordinates lanes
//! or warps mix with those of other axes.

use crate::analysis::combine::single_binary_op;
use crate::ir::{BinaryOp, Builder, Func, Op, OpId, Type, Value};
use crate::layout::{Dim, LinearLayout};

/// Runs the pass.
pub fn run(func: &mut Func) {
    // Inner loops first: a reduction that leaves an inner loop may be a sum of the outer one.
    for id in func.walk().into_iter().rev() {
        if matches!(func.op(id).op, Op::For { .. }) {
            for carried in 0..func.op(id).results.len() {
                if let Some(sum) = find(func, id, carried) {
                    defer(func, id, carried, &sum);
                }
            }
        }
    }
}

/// A sum over iterations: the carried value is `add` of itself, scaled by `scale` if there is one, and of `reduce`.
struct Accumulation {
    add: OpId,
    reduce: OpId,
    scale: Option<Scale>,
    parts: Parts,
}

/// A multiplication of the carried value by another value.
struct Scale {
    mul: OpId,
    by: Value,
}

/// How the elements along the reduced axis are distributed.
struct Parts {
    axis: usize,
    /// The shape of the tile with the axis split into runs of coordinate bits of one kind.
    split: Vec<u32>,
    /// Of each run, from the first: whether registers of one thread hold its elements.
    in_thread: Vec<bool>,
    /// The layout of the tile of partial sums: one element for each combination of lanes and warps along the axis.
    layout: LinearLayout,
}

fn find(func: &Func, id: OpId, carried: usize) -> Option<Accumulation> {
    let body = func.op(id).regions[0];
    let param = func.block(body).params[1 + carried];
    let next = func.op(func.terminator(body)).operands[carried];
    let add = func.def_op(next).filter(|&op| func.op(op).op == Op::Binary(BinaryOp::Add))?;
    let is_sum = |v: Value| func.def_op(v).filter(|&op| matches!(func.op(op).op, Op::Reduce { .. }));
    let (old, reduce) = match func.op(add).operands[..] {
        [a, b] => is_sum(b).map(|sum| (a, sum)).or_else(|| is_sum(a).map(|sum| (b, sum)))?,
        _ => return None,
    };
    let scale = match old == param {
        true => None,
        false => Some(scale_of(func, old, param)?),
    };
    let values = [param, func.op(reduce).results[0], next, old];
    let have_single_use = values.iter().all(|&v| func.uses(v).len() == 1) && func.op(reduce).results.len() == 1;
    let are_in_body = [add, reduce].into_iter().chain(scale.as_ref().map(|s| s.mul)).all(|op| func.is_in(op, body));
    let is_sum = single_binary_op(func, func.op(reduce).regions[0]) == Some(BinaryOp::Add);
    let dtype = func.ty(next).dtype()?;
    let parts = parts(func, reduce)?;
    let can_scale = scale.as_ref().is_none_or(|scale| dtype.is_float() && can_spread(func, scale.by, &parts));
    (have_single_use && are_in_body && is_sum && dtype.bits() >= 32 && can_scale).then_some(Accumulation {
        add,
        reduce,
        scale,
        parts,
    })
}

/// The product of `param` and another value, if `v` is one.
fn scale_of(func: &Func, v: Value, param: Value) -> Option<Scale> {
    let is_product = |&op: &OpId| matches!(func.op(op).op, Op::Binary(BinaryOp::Mul | BinaryOp::Rescale));
    let mul = func.def_op(v).filter(is_product)?;
    match func.op(mul).operands[..] {
        [a, by] | [by, a] if a == param && by != param => Some(Scale { mul, by }),
        _ => None,
    }
}

/// How lanes and warps share the sum; `None` if they do not, or mix the axis with others.
fn parts(func: &Func, reduce: OpId) -> Option<Parts> {
    let Op::Reduce { axis } = func.op(reduce).op else { return None };
    let layout = func.layout(func.ty(func.op(reduce).operands[0]).layout()?);
    let steps = layout.reduction(axis)?;
    if steps.lanes.is_empty() && steps.warps.is_empty() {
        return None;
    }
    let extent = layout.shape()[axis];
    let mut in_thread_bits = 0;
    for dim in [Dim::Register, Dim::Lane, Dim::Warp] {
        for basis in layout.bases(dim).iter().filter(|basis| basis[axis] != 0) {
            if !basis[axis].is_power_of_two() || basis.iter().filter(|&&c| c != 0).count() != 1 {
                return None;
            }
            if dim == Dim::Register {
                in_thread_bits |= basis[axis];
            }
        }
    }
    let (mut runs, mut in_thread): (Vec<u32>, Vec<bool>) = (Vec::new(), Vec::new());
    for bit in (0..extent.trailing_zeros()).rev() {
        let held = in_thread_bits >> bit & 1 == 1;
        match (runs.last_mut(), in_thread.last()) {
            (Some(run), Some(&kind)) if kind == held => *run *= 2,
            _ => {
                runs.push(2);
                in_thread.push(held);
            }
        }
    }
    let split = [&layout.shape()[..axis], &runs[..], &layout.shape()[axis + 1..]].concat();
    let mut partial = layout.reshape(&split).layout;
    for run in (0..runs.len()).rev().filter(|&run| in_thread[run]) {
        partial = partial.slice(axis + run).layout;
    }
    Some(Parts { axis, split, in_thread, layout: partial })
}

/// Whether a value of the type of the sum can be broadcast to the partial sums without moving data.
fn can_spread(func: &Func, v: Value, parts: &Parts) -> bool {
    // With several runs between those of registers, the sum is not a slice of the partial sums along one axis.
    let single = parts.in_thread.iter().filter(|&&held| !held).count() == 1;
    let layout = func.ty(v).layout().map(|id| func.layout(id).expand_dims(parts.axis).layout);
    single && layout.is_some_and(|layout| layout == parts.layout.unbroadcast(parts.axis).layout)
}

/// Broadcasts a value of the type of the sum to the partial sums.
fn spread(b: &mut Builder, v: Value, parts: &Parts, ty: &Type) -> Value {
    let expanded = b.expand_dims(v, parts.axis);
    set_layout(b.func, expanded, parts.layout.unbroadcast(parts.axis).layout);
    b.one(Op::Broadcast, &[expanded], ty.clone())
}

fn defer(func: &mut Func, id: OpId, carried: usize, sum: &Accumulation) {
    let Accumulation { add, reduce, ref scale, ref parts } = *sum;
    let body = func.op(id).regions[0];
    let (tile, part) = (func.op(reduce).operands[0], func.result(reduce));
    let (sum_ty, loc) = (func.ty(part).clone(), func.op(reduce).loc.clone());

    // In the loop: adds what each thread holds.
    let layout = func.layout_of(tile).reshape(&parts.split).layout;
    let split: Vec<usize> = parts.split.iter().map(|&extent| extent as usize).collect();
    let mut b = Builder::before(func, reduce, loc.clone());
    let mut partial = b.reshape(tile, &split);
    set_layout(b.func, partial, layout);
    for run in (0..parts.in_thread.len()).rev().filter(|&run| parts.in_thread[run]) {
        partial = sum_along(&mut b, partial, parts.axis + run);
    }
    let ty = func.ty(partial).clone();

    let first = func.op(id).operands[3 + carried];
    let (param, next) = (func.block(body).params[1 + carried], func.result(add));
    let total = func.op(id).results[carried];
    let mut old = param;
    if let Some(scale) = scale {
        let by = spread(&mut Builder::before(func, scale.mul, loc.clone()), scale.by, parts, &ty);
        func.rewrite(scale.mul, Op::Binary(BinaryOp::Mul), vec![param, by]);
        old = func.result(scale.mul);
        func.set_ty(old, ty.clone());
    }
    func.rewrite(add, Op::Binary(BinaryOp::Add), vec![old, partial]);
    for v in [param, next, total] {
        func.set_ty(v, ty.clone());
    }
    let mut b = Builder::before(func, id, loc.clone());
    let initial = match scale {
        None => b.zero(ty),
        Some(_) => {
            let count = parts.layout.shape()[parts.axis];
            let share = b.number(1.0 / f64::from(count), sum_ty.clone());
            let share = b.binary(BinaryOp::Mul, first, share);
            spread(&mut b, share, parts, &ty)
        }
    };
    func.set_operand(id, 3 + carried, initial);

    // After the loop: the sum of the partial sums, plus the initial value where the loop does not scale it.
    let users = func.uses(total).to_vec();
    let mut b = Builder::after(func, id, loc);
    let mut result = total;
    for run in (0..parts.in_thread.iter().filter(|&&held| !held).count()).rev() {
        result = sum_along(&mut b, result, parts.axis + run);
    }
    b.func.set_ty(result, sum_ty);
    if scale.is_none() {
        result = b.binary(BinaryOp::Add, first, result);
    }
    for used in users {
        func.set_operand(used.op, used.index, result);
    }
    func.erase(reduce);
}

/// The sum of a tile along an axis, in the slice of its layout.
fn sum_along(b: &mut Builder, tile: Value, axis: usize) -> Value {
    let layout = b.func.layout_of(tile).slice(axis).layout;
    let sum = b.reduce_with(BinaryOp::Add, tile, axis);
    if b.func.ty(sum).is_tensor() {
        set_layout(b.func, sum, layout);
    }
    sum
}

fn set_layout(func: &mut Func, tile: Value, layout: LinearLayout) {
    let layout = func.intern_layout(layout);
    let ty = func.ty(tile).with_layout(Some(layout));
    func.set_ty(tile, ty);
}
