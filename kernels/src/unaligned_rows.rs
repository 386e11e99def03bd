//! Rows whose start is not aligned to 16 bytes, such as those of a matrix with an odd row stride.
//!
//! A block of such rows would be loaded element by element, since vector accesses must be aligned. Head and tail are
//! peeled instead: a row is processed as its aligned vectors and, separately, the elements before and after them, fewer
//! than one vector on each side.
//!
//! ```text
//!            ┌───────┬───────┬───────┬───────┬───────┐  multiples of 16 bytes
//!     row        ▒▒▒▒│███████│███████│███████│▒▒
//!                head └──────── inner ──────┘ tail
//! ```
//!
//! No access touches an element of another row.

use crate::tensor::{FloatElement, Tensor, TensorMut};
use tilewright_runtime::prelude::*;

/// Bytes of the widest access of a thread.
const VECTOR_BYTES: usize = 16;

/// The alignment of the rows of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnalignedRows {
    /// Elements per vector for kernels that peel head and tail; 0 where plain blocks are as good or better.
    pub vector: usize,
    /// Elements between the last multiple of 16 bytes and the tensor's first element.
    pub misalignment: i32,
}

impl UnalignedRows {
    /// The alignment of the rows of `x`. On a CPU vectors need no alignment: always the default.
    pub fn of<T: FloatElement>(device: &Device, x: &Tensor<'_, T, 2>) -> UnalignedRows {
        UnalignedRows::new::<T>(device.is_cuda(), x.view().address(), x.shape()[1], x.strides())
    }

    /// The alignment that the rows of `x` and those of `y`, of the same shape, have in common; the default where an
    /// element of `x` and the same element of `y` lie at different offsets within a vector.
    pub fn common<T: FloatElement>(device: &Device, x: &Tensor<'_, T, 2>, y: &TensorMut<'_, T, 2>) -> UnalignedRows {
        let of_x = UnalignedRows::of(device, x);
        let of_y = UnalignedRows::new::<T>(device.is_cuda(), y.as_view().address(), y.shape()[1], y.strides());
        let vector = (VECTOR_BYTES / size_of::<T>()) as i64;
        let same_alignment = of_x.misalignment == of_y.misalignment && (x.strides()[0] - y.strides()[0]) % vector == 0;
        let unaligned = if of_x.vector > 0 { of_x } else { of_y };
        if same_alignment && x.strides()[1] == 1 && y.strides()[1] == 1 { unaligned } else { UnalignedRows::default() }
    }

    fn new<T: FloatElement>(gpu: bool, address: u64, d: usize, strides: [i64; 2]) -> UnalignedRows {
        /// Divisibility by which a launch specializes addresses, extents and strides.
        const DIVISIBILITY: u64 = 16;
        let aligned = [address, d as u64, strides[0] as u64].iter().all(|n| n % DIVISIBILITY == 0);
        if !gpu || aligned || strides[1] != 1 {
            return UnalignedRows::default();
        }
        let misalignment = (address % VECTOR_BYTES as u64) as usize / size_of::<T>();
        UnalignedRows { vector: VECTOR_BYTES / size_of::<T>(), misalignment: misalignment as i32 }
    }
}

/// For each row, the number of elements before its first aligned vector, and the number of elements in its aligned
/// vectors; the second is negative where not even one vector fits.
///
/// Row i has `d` contiguous elements and begins at element `first[i]` of the tensor, whose first element lies
/// `misalignment` elements after a multiple of 16 bytes. A vector has `vector` elements.
#[device_fn]
pub(crate) fn aligned_span(
    first: Tile<i64>,
    d: Scalar<i32>,
    misalignment: Scalar<i32>,
    vector: usize,
) -> (Tile<i64>, Tile<i64>) {
    let from = first + misalignment;
    let begin = cdiv(from, vector) * vector;
    (begin - from, (from + d) / vector * vector - begin)
}

/// Pointers [rows, d_tile] into the aligned vectors of rows, from element `tile.0` after the first vector's start, and
/// the mask of those that exist. `rows` are the elements at which rows begin, and the mask of rows that exist; `tile`
/// is (offset, d_tile).
#[device_fn]
pub(crate) fn vector_tile<T: Dtype>(
    base: Ptr<T>,
    rows: (Tile<i64>, Tile<bool>),
    d: Scalar<i32>,
    misalignment: Scalar<i32>,
    vector: usize,
    tile: (Scalar<i32>, usize),
) -> (PtrTile<T>, Tile<bool>) {
    let (head, inner) = aligned_span(rows.0, d, misalignment, vector);
    let begin = multiple_of((base + (rows.0 + head)).expand_dims(1), 16);
    let i = (tile.0 + arange(0, tile.1)).expand_dims(0);
    (begin + i, rows.1.expand_dims(1) && (i < inner.expand_dims(1)))
}

/// The columns [rows, 2 · vector] of the peeled heads and tails of rows, and the mask of those that exist.
#[device_fn]
pub(crate) fn head_tail_columns(
    rows: (Tile<i64>, Tile<bool>),
    d: Scalar<i32>,
    misalignment: Scalar<i32>,
    vector: usize,
) -> (Tile<i64>, Tile<bool>) {
    let (head, inner) = aligned_span(rows.0, d, misalignment, vector);
    let i = arange(0, 2 * vector).expand_dims(0);
    let columns = i + where_(i < head.expand_dims(1), 0, maximum(inner, 0).expand_dims(1));
    (columns, rows.1.expand_dims(1) && (columns < d))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_contiguous_unaligned_rows_are_peeled() {
        let of = |address, d, strides| UnalignedRows::new::<bf16>(true, address, d, strides);
        assert_eq!(of(256, 50257, [50257, 1]), UnalignedRows { vector: 8, misalignment: 0 });
        assert_eq!(of(262, 50257, [50257, 1]), UnalignedRows { vector: 8, misalignment: 3 });
        assert_eq!(of(262, 64, [64, 1]), UnalignedRows { vector: 8, misalignment: 3 });
        // Padded rows; and a multiple of a vector that is below the divisibility that launches specialize on.
        assert_eq!(of(256, 50257, [50304, 1]).vector, 8);
        assert_eq!(of(256, 1000, [1000, 1]).vector, 8);
        for (address, d, strides) in [(256, 64, [64, 1]), (256, 50257, [1, 50257]), (256, 50257, [100_514, 2])] {
            assert_eq!(of(address, d, strides), UnalignedRows::default());
        }
        assert_eq!(UnalignedRows::new::<bf16>(false, 256, 50257, [50257, 1]), UnalignedRows::default());
        assert_eq!(UnalignedRows::new::<f32>(true, 268, 7, [7, 1]), UnalignedRows { vector: 4, misalignment: 3 });
    }
}
