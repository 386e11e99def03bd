//! Copies between tensors of any strides and element types: y = x, rounded to the nearest value of y's type.

use crate::blocks::{ElementwiseTiles, row_block, tile_start};
use crate::tensor::{FloatElement, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::prelude::*;

/// y = x, converted to y's type.
///
/// One program per tile.
#[kernel]
pub fn cast<T: Float, U: Float>(
    x: In<T>,
    y: Out<U>,
    x_stride_row: i64,
    x_stride_d: i64,
    y_stride_row: i64,
    y_stride_d: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (shape, tile) = ((rows, d), (rows_tile, d_tile));
    let (row, col) = tile_start(d, tile);
    let x_block = row_block(x, shape, (x_stride_row, x_stride_d), row, tile).advance([0, col]);
    let y_block = row_block(y, shape, (y_stride_row, y_stride_d), row, tile).advance([0, col]);
    store(y_block, load(x_block, boundary_check = [0, 1], padding = zero).to::<U>(), boundary_check = [0, 1]);
}

/// y = x, both [rows, d]; pass a dense tensor of another shape as one row.
///
/// # Errors
/// Shapes that differ; tensors on another device; launch errors.
pub fn forward<T: FloatElement, U: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    mut y: TensorMut<'_, U, 2>,
) -> Result<()> {
    const NAME: &str = "cast";
    let [rows, d] = x.shape();
    expect_shape(NAME, "y", y.shape(), [rows, d])?;
    let tiles = ElementwiseTiles::new(rows, d);
    Cast {
        x_stride_row: x.strides()[0],
        x_stride_d: x.strides()[1],
        y_stride_row: y.strides()[0],
        y_stride_d: y.strides()[1],
        rows: extent(NAME, "x", rows)?,
        d: extent(NAME, "x", d)?,
        x: &x,
        y: &mut y,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
    }
    .launch_with(device, &tiles.config())
}
