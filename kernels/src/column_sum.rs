//! Sums over rows: the second half of every gradient that is summed over rows.
//!
//! A kernel that walks over tiles of rows can sum only inside its own tile. It writes one row of partial sums per tile, and
//! this kernel adds those rows up, always in the same order: the gradient has the same bits in every run, which atomics
//! would not give.

use crate::tensor::{FloatElement, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::prelude::*;

/// y[j] = Σᵢ x[i, j], summed in f32.
///
/// One program per tile of columns, which walks down the rows.
#[kernel]
pub fn column_sum<T: Float, U: Float>(
    x: In<T>,
    y: Out<U>,
    x_stride_row: i64,
    x_stride_d: i64,
    y_stride: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let start = program_id(0) * d_tile;
    let mut x_block = make_block_ptr(
        x,
        shape = [rows, d],
        strides = [x_stride_row, x_stride_d],
        offsets = [0, start],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let y_block =
        make_block_ptr(y, shape = [d], strides = [y_stride], offsets = [start], block_shape = [d_tile], order = [0]);
    let mut total = zeros::<f32>([rows_tile, d_tile]);
    for _ in range(0, cdiv(rows, rows_tile)) {
        total += load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        x_block = x_block.advance([rows_tile, 0]);
    }
    store(y_block, sum(total, axis = 0).to::<U>(), boundary_check = [0]);
}

/// Sums x [rows, d] over its rows into y [d].
///
/// # Errors
/// Shapes that do not fit each other, tensors on another device, and everything that a launch can say.
pub fn forward<T: FloatElement, U: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    mut y: TensorMut<'_, U, 1>,
) -> Result<()> {
    let [rows, d] = x.shape();
    expect_shape("column_sum", "y", y.shape(), [d])?;
    // On a GPU lines of 128 bytes, so that even few columns make many programs; on a CPU long runs.
    let (rows_tile, d_tile) = if device.is_cuda() { (64, 32) } else { (8, 256) };
    ColumnSum {
        x_stride_row: x.strides()[0],
        x_stride_d: x.strides()[1],
        y_stride: y.strides()[0],
        rows: extent("column_sum", "x", rows)?,
        d: extent("column_sum", "x", d)?,
        x: &x.data,
        y: &mut y.data,
        rows_tile,
        d_tile,
    }
    .launch(device, d.div_ceil(d_tile))
}

/// The same in f64: `x` is row-major with rows of `d` elements.
pub fn reference(x: &[f64], d: usize) -> Vec<f64> {
    (0..d).map(|j| x.iter().skip(j).step_by(d).sum()).collect()
}
