//! Block pointers to matrices and vectors, and tiles for elementwise kernels.

use tilewright_runtime::prelude::*;

/// A block pointer to the `tile` = (rows, columns) at (`first_row`, 0) of a matrix of `shape` = (rows, columns).
#[device_fn]
pub(crate) fn row_block<T: Dtype>(
    base: Ptr<T>,
    shape: (Scalar<i32>, Scalar<i32>),
    strides: (Scalar<i64>, Scalar<i64>),
    first_row: Scalar<i32>,
    tile: (usize, usize),
) -> BlockPtr<T> {
    make_block_ptr(
        base,
        shape = [shape.0, shape.1],
        strides = [strides.0, strides.1],
        offsets = [first_row, 0],
        block_shape = [tile.0, tile.1],
        order = [1, 0],
    )
}

/// A block pointer to the `tile` elements at `first` of a vector of `n`.
#[device_fn]
pub(crate) fn vector_block<T: Dtype>(
    base: Ptr<T>,
    n: Scalar<i32>,
    stride: Scalar<i64>,
    first: Scalar<i32>,
    tile: usize,
) -> BlockPtr<T> {
    make_block_ptr(base, shape = [n], strides = [stride], offsets = [first], block_shape = [tile], order = [0])
}

/// The dimensions of a [rows, d] block that need a boundary check.
pub(crate) fn boundary_dims(rows: bool, dim: bool) -> &'static [usize] {
    match (rows, dim) {
        (false, false) => &[],
        (true, false) => &[0],
        (false, true) => &[1],
        (true, true) => &[0, 1],
    }
}

/// The first row and the first column of this program's tile, in a grid of [`ElementwiseTiles`] over rows of `d`
/// elements.
#[device_fn]
pub(crate) fn tile_start(d: Scalar<i32>, tile: (usize, usize)) -> (Scalar<i32>, Scalar<i32>) {
    assume(d > 0);
    let tiles_per_row = cdiv(d, tile.1);
    (program_id(0) / tiles_per_row * tile.0, program_id(0) % tiles_per_row * tile.1)
}

/// exp(x) as 2^(x · log₂ e), for x ≤ 0 or slightly above: softmax terms after subtraction of the maximum or of the
/// log-sum-exp.
///
/// Two instructions. The rounding of the multiplication gives a relative error of 2⁻²⁴ per unit of |x|, where exp(x) is
/// small.
#[device_fn]
pub(crate) fn fast_exp(x: Tile<f32>) -> Tile<f32> {
    exp2(x * std::f32::consts::LOG2_E)
}

/// Tiles that cover a matrix, one program each: for elementwise kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ElementwiseTiles {
    pub rows_tile: usize,
    pub d_tile: usize,
    programs: usize,
}

impl ElementwiseTiles {
    /// Chooses tiles of about 2048 elements, 16 per thread: several vector loads of each operand are in flight.
    pub fn new(rows: usize, d: usize) -> ElementwiseTiles {
        const ELEMENTS: usize = 2048;
        let d_tile = d.max(1).next_power_of_two().clamp(16, ELEMENTS);
        let rows_tile = (ELEMENTS / d_tile).min(rows.max(1).next_power_of_two());
        ElementwiseTiles { rows_tile, d_tile, programs: rows.div_ceil(rows_tile) * d.div_ceil(d_tile) }
    }

    pub fn config(&self) -> LaunchConfig {
        LaunchConfig::new(self.programs).num_warps(4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_matrix() {
        assert_eq!(ElementwiseTiles::new(3, 5000), ElementwiseTiles { rows_tile: 1, d_tile: 2048, programs: 9 });
        assert_eq!(ElementwiseTiles::new(1000, 100), ElementwiseTiles { rows_tile: 16, d_tile: 128, programs: 63 });
        assert_eq!(ElementwiseTiles::new(3, 1), ElementwiseTiles { rows_tile: 4, d_tile: 16, programs: 1 });
        assert_eq!(ElementwiseTiles::new(0, 7).programs, 0);
        assert_eq!(ElementwiseTiles::new(7, 0).programs, 0);
    }
}
