//! `dot`, and the order in which `reduce` and `scan` combine elements along their axis.

use super::value::{Tile, indices, position};
use crate::ir::{DType, Precision};
use crate::num;

/// `acc + a × b`.
pub(super) fn dot(a: &Tile, b: &Tile, acc: &Tile, precision: Precision) -> Tile {
    let (m, k, n) = (a.shape[0], a.shape[1], b.shape[1]);
    let mut out = acc.clone();
    // Sums in f16 are rounded once.
    let narrow = acc.dtype() == DType::F16;
    for i in 0..m {
        for j in 0..n {
            let cell = &mut out.bits[i * n + j];
            if narrow {
                *cell = num::encode(DType::F32, num::decode(DType::F16, *cell));
            }
            for p in 0..k {
                *cell = multiply_add(a, a.bits[i * k + p], b, b.bits[p * n + j], *cell, precision);
            }
            if narrow {
                *cell = num::encode(DType::F16, num::decode(DType::F32, *cell));
            }
        }
    }
    out
}

/// `acc + x·y` for elements x of `a` and y of `b`.
fn multiply_add(a: &Tile, x: u64, b: &Tile, y: u64, acc: u64, precision: Precision) -> u64 {
    let (da, db) = (a.dtype(), b.dtype());
    if !da.is_float() {
        let sum = num::decode_int(DType::I32, acc) + num::decode_int(da, x) * num::decode_int(db, y);
        return num::encode_int(DType::I32, sum);
    }
    if da == DType::F64 {
        return num::fused_multiply_add(DType::F64, x, y, acc);
    }
    let (x, y) = (num::decode(da, x) as f32, num::decode(db, y) as f32);
    let acc = f32::from_bits(acc as u32);
    let split = |v: f32| {
        let high = num::round_to_tf32(v);
        (high, num::round_to_tf32(v - high))
    };
    let sum = match precision {
        // `precision` applies to f32; narrower operands are exact in f32.
        _ if da != DType::F32 => x.mul_add(y, acc),
        Precision::Ieee => x.mul_add(y, acc),
        Precision::Tf32 => split(x).0.mul_add(split(y).0, acc),
        Precision::Tf32x3 => {
            let ((xh, xl), (yh, yl)) = (split(x), split(y));
            // The small products first, to lose less of them to rounding.
            xh.mul_add(yh, xh.mul_add(yl, xl.mul_add(yh, acc)))
        }
    };
    num::encode(DType::F32, sum as f64)
}

/// The elements at one position: one of each operand.
pub(super) type Elements = Vec<u64>;

/// Flat offsets of the elements along `axis`: one list for each index of the other dimensions, which are in row-major
/// order.
pub(super) fn slices_along_axis(shape: &[usize], axis: usize) -> Vec<Vec<usize>> {
    let mut others = shape.to_vec();
    let extent = others.remove(axis);
    let slice = |index: Vec<usize>| {
        let at = |i: usize| {
            let mut full = index.clone();
            full.insert(axis, i);
            position(&full, shape)
        };
        (0..extent).map(at).collect()
    };
    indices(&others).map(slice).collect()
}

/// Tree reduction: combines the upper half of a slice with the lower half until one position is left.
pub(super) fn tree_reduce<E>(
    mut slice: Vec<Elements>,
    mut combine: impl FnMut(&Elements, &Elements) -> Result<Elements, E>,
) -> Result<Elements, E> {
    while slice.len() > 1 {
        let upper = slice.split_off(slice.len().div_ceil(2));
        for (low, high) in slice.iter_mut().zip(&upper) {
            *low = combine(low, high)?;
        }
    }
    Ok(slice.swap_remove(0))
}

/// Inclusive scan: replaces each position of a slice by the combination of all positions up to it.
pub(super) fn inclusive_scan<E>(
    slice: &mut [Elements],
    mut combine: impl FnMut(&Elements, &Elements) -> Result<Elements, E>,
) -> Result<(), E> {
    for i in 1..slice.len() {
        slice[i] = combine(&slice[i - 1], &slice[i])?;
    }
    Ok(())
}
