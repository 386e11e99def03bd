//! Functions that move elements within a tile by their positions or their values.

use super::dtype::{Dtype, Int, Num};
use super::handle::{Data, Tile};
use super::index::{AxisIndex, Extent, check_axis, check_power_of_two, check_powers_of_two, check_shape};
use super::memory::Mask;
use super::operand::{broadcast, materialize};
use super::record::{emit, error_here, fail, shape};
use crate::functions::integer_of;
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Literal, Type, Value};

/// The positions along `axis` in a tile of that shape, as i32.
fn positions(b: &mut Builder, shape: &[usize], axis: usize) -> Value {
    let mut line = vec![1; shape.len()];
    line[axis] = shape[axis];
    let numbers = b.arange(0, shape[axis] as i64);
    let numbers = b.reshape(numbers, &line);
    b.broadcast(numbers, shape)
}

/// An i32 in every element of a tile.
fn number(b: &mut Builder, n: usize, shape: &[usize]) -> Value {
    b.constant(Literal::Int(n as i64), Type::tensor(shape, DType::I32))
}

/// Picks elements along an axis: `gather(x, index, axis = 1)[i, j, k] = x[i, index[i, j, k], k]`. The shapes of `x` and
/// `index` differ only in the extent of the axis. An index counts modulo the extent of `x`.
#[track_caller]
pub fn gather<T: Dtype, I: Int>(x: Tile<T>, index: Tile<I>, axis: impl AxisIndex) -> Tile<T> {
    let (from, to) = (shape(x.value()), shape(index.value()));
    let axis = check_axis(axis.axis_index(), from.len(), "gather");
    let same = from.len() == to.len() && (0..from.len()).all(|d| d == axis || from[d] == to[d]);
    if !same {
        fail(
            error_here(format!("`gather` from a tile of shape {from:?} by indices of shape {to:?}"))
                .label(format!("the shapes may differ in dimension {axis} only"))
                .help("broadcast the indices: `.broadcast_to([…])`"),
        );
    }
    Tile::from_value(emit(|b| {
        let mut index = index.value();
        // A conversion to i32 is a remainder by 2³², which is one by the extent only where that is a power of two.
        let fits = matches!(I::dtype(), DType::I8 | DType::I16 | DType::I32 | DType::U8 | DType::U16);
        if !fits && !from[axis].is_power_of_two() {
            let extent = b.constant(Literal::Int(from[axis] as i64), Type::tensor(&to, I::dtype()));
            index = b.binary(BinaryOp::Rem, index, extent);
        }
        let index = b.cast(index, DType::I32);
        b.gather(x.value(), index, axis)
    }))
}

/// Reverses the elements along an axis (by default the last).
#[track_caller]
pub fn flip<T: Dtype>(x: Tile<T>, axis: impl AxisIndex) -> Tile<T> {
    let from = shape(x.value());
    let axis = check_axis(axis.axis_index(), from.len(), "flip");
    Tile::from_value(emit(|b| {
        let (places, last) = (positions(b, &from, axis), number(b, from[axis] - 1, &from));
        let index = b.binary(BinaryOp::Sub, last, places);
        b.gather(x.value(), index, axis)
    }))
}

/// Floats as integers with the same order, or back: the order of IEEE 754's `totalOrder`, in which −0 is below +0, and
/// NaNs are above infinity (those with a sign below −infinity). Integers are their own keys.
fn keys(b: &mut Builder, v: Value, dtype: DType, back: bool) -> Value {
    if !dtype.is_float() {
        return v;
    }
    let integer = integer_of(dtype);
    let bits = if back { v } else { b.bitcast(v, integer) };
    let ty = b.func.ty(bits).clone();
    let width = i64::from(dtype.bits() as u32);
    let shift = b.constant(Literal::Int(width - 1), ty.clone());
    let most = b.constant(Literal::Int(i64::MAX >> (64 - width)), ty);
    // All bits but the sign are complemented in negative numbers.
    let sign = b.binary(BinaryOp::Shr, bits, shift);
    let flipped = b.binary(BinaryOp::And, sign, most);
    let keys = b.binary(BinaryOp::Xor, bits, flipped);
    if back { b.bitcast(keys, dtype) } else { keys }
}

/// The elements at the positions along `axis` that differ in one bit.
fn partners(b: &mut Builder, v: Value, axis: usize, distance: usize) -> Value {
    let shape = b.func.ty(v).shape().to_vec();
    let inner: usize = distance * shape[axis + 1..].iter().product::<usize>();
    let outer = shape.iter().product::<usize>() / (2 * inner);
    let pairs = b.reshape(v, &[outer, 2, inner]);
    // The exclusive or of a pair, and with one of them the other one: no element moves to a thread of its own.
    let both = b.reduce_with(BinaryOp::Xor, pairs, 1);
    let both = b.expand_dims(both, 1);
    let both = b.broadcast(both, &[outer, 2, inner]);
    let both = b.reshape(both, &shape);
    b.binary(BinaryOp::Xor, v, both)
}

/// Bitonic sorting network (Batcher, "Sorting networks and their applications", 1968) along an axis.
fn bitonic(b: &mut Builder, mut v: Value, axis: usize, descending: bool) -> Value {
    let shape = b.func.ty(v).shape().to_vec();
    let stages = shape[axis].trailing_zeros() as usize;
    let places = positions(b, &shape, axis);
    let bit = |b: &mut Builder, n: usize| {
        let mask = number(b, 1 << n, &shape);
        let set = b.binary(BinaryOp::And, places, mask);
        let zero = number(b, 0, &shape);
        b.cmp(CmpOp::Ne, set, zero)
    };
    for stage in 1..=stages {
        // Runs of 2^stage elements ascend and descend in turn; the last one has the wanted order.
        let turn = (stage < stages).then(|| bit(b, stage));
        for step in (0..stage).rev() {
            let other = partners(b, v, axis, 1 << step);
            let (low, high) = (b.binary(BinaryOp::Min, v, other), b.binary(BinaryOp::Max, v, other));
            let mut upper = bit(b, step);
            if let Some(turn) = turn {
                upper = b.binary(BinaryOp::Xor, upper, turn);
            }
            v = if descending { b.select(upper, low, high) } else { b.select(upper, high, low) };
        }
    }
    v
}

#[track_caller]
fn sorted<T: Num>(x: Tile<T>, axis: usize, descending: bool) -> Value {
    let dtype = T::dtype();
    emit(|b| {
        let v = keys(b, x.value(), dtype, false);
        let v = bitonic(b, v, axis, descending);
        keys(b, v, dtype, true)
    })
}

/// Sorts along an axis (by default the last). NaNs count as larger than infinity (those with a sign as smaller than
/// −infinity), and −0 as smaller than 0.
#[track_caller]
pub fn sort<T: Num>(x: Tile<T>, axis: impl AxisIndex, descending: bool) -> Tile<T> {
    let axis = check_axis(axis.axis_index(), x.rank(), "sort");
    check_powers_of_two(&shape(x.value()), "`sort`");
    Tile::from_value(sorted(x, axis, descending))
}

/// The `k` largest elements along an axis (by default the last) in descending order; `k` is a power of two.
#[track_caller]
pub fn topk<T: Num>(x: Tile<T>, k: impl Extent, axis: impl AxisIndex) -> Tile<T> {
    let (from, k) = (shape(x.value()), k.extent());
    let axis = check_axis(axis.axis_index(), from.len(), "topk");
    check_powers_of_two(&from, "`topk`");
    if k > from[axis] {
        fail(
            error_here(format!("`topk` of {k} elements along an axis of {}", from[axis]))
                .label("more than there are")
                .help(format!("use at most {}", from[axis])),
        );
    }
    let mut to = from;
    to[axis] = k;
    check_power_of_two(k, "`k` of `topk`");
    let all = sorted(x, axis, true);
    Tile::from_value(emit(|b| {
        let index = positions(b, &to, axis);
        b.gather(all, index, axis)
    }))
}

/// Number of comparisons of elements with bins at a time.
const COMPARISONS: usize = 1 << 14;

/// How often each of 0, 1, … `num_bins` − 1 occurs among the elements, as i32; with `mask`, only where it is true.
/// Other elements are not counted. `num_bins` is a power of two.
#[track_caller]
pub fn histogram<I: Int>(x: Tile<I>, num_bins: impl Extent, mask: impl Mask) -> Tile<i32> {
    let bins = num_bins.extent();
    check_shape(&[bins]);
    check_power_of_two(bins, "`num_bins` of `histogram`");
    let from = shape(x.value());
    check_powers_of_two(&from, "`histogram`");
    let n: usize = from.iter().product();
    let x = match mask.mask() {
        None => emit(|b| b.cast(x.value(), DType::I32)),
        Some(mask) => {
            let mask = materialize(mask, DType::Bool);
            let found = shape(mask);
            if !found.is_empty() && found != from {
                fail(
                    error_here(format!("`histogram` of a tile of shape {from:?} with a mask of shape {found:?}"))
                        .label("expected equal shapes"),
                );
            }
            let mask = broadcast(mask, &from);
            emit(|b| {
                let x = b.cast(x.value(), DType::I32);
                // −1 is no bin.
                let none = b.constant(Literal::Int(-1), Type::tensor(&from, DType::I32));
                b.select(mask, x, none)
            })
        }
    };
    let chunk = (COMPARISONS / bins).clamp(1, n);
    Tile::from_value(emit(|b| {
        let flat = if from.is_empty() { b.splat(x, &[1]) } else { b.reshape(x, &[n]) };
        let zero = b.constant(Literal::Int(0), Type::tensor(&[bins], DType::I32));
        if chunk == n {
            return counts(b, flat, zero);
        }
        let [low, high, step] = [0, n, chunk].map(|i| b.int(i as i64, DType::I32));
        b.for_loop(low, high, step, &[zero], |b, first, carried| {
            let places = b.arange(0, chunk as i64);
            let first = b.splat(first, &[chunk]);
            let index = b.binary(BinaryOp::Add, first, places);
            let part = b.gather(flat, index, 0);
            vec![counts(b, part, carried[0])]
        })[0]
    }))
}

/// `before` plus the number of elements that equal each bin.
fn counts(b: &mut Builder, x: Value, before: Value) -> Value {
    let (n, bins) = (b.func.ty(x).shape()[0], b.func.ty(before).shape()[0]);
    let x = b.expand_dims(x, 1);
    let x = b.broadcast(x, &[n, bins]);
    let bin = positions(b, &[n, bins], 1);
    let hit = b.cmp(CmpOp::Eq, x, bin);
    let hit = b.cast(hit, DType::I32);
    let sum = b.reduce_with(BinaryOp::Add, hit, 0);
    b.binary(BinaryOp::Add, before, sum)
}
