//! Copies between tensors of any strides and element types: y = x, or a factor times x, rounded to the nearest value of
//! y's type.

use crate::blocks::{ElementwiseTiles, tile_start};
use crate::tensor::{FloatElement, Tensor, TensorMut, expect_shape};
use tilewright_runtime::prelude::*;

/// y = x, converted to y's type.
///
/// One program per tile.
#[kernel(grid = cdiv(rows, rows_tile) * cdiv(d, d_tile))]
pub fn cast<T: Float, U: Float>(
    x: Tensor<T, (rows, d)>,
    y: TensorMut<U, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (row, col) = tile_start(d, (rows_tile, d_tile));
    let x_block = x.block([row, col], [rows_tile, d_tile]);
    let y_block = y.block([row, col], [rows_tile, d_tile]);
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
    let [rows, d] = x.shape();
    let tiles = ElementwiseTiles::new(rows, d);
    Cast { x: &x, y: &mut y, rows_tile: tiles.rows_tile, d_tile: tiles.d_tile }.launch_with(device, &tiles.config())
}

/// y = factor · x, computed in f32 and converted to y's type.
///
/// One program per tile.
#[kernel(grid = cdiv(rows, rows_tile) * cdiv(d, d_tile))]
pub fn scale<T: Float, U: Float>(
    x: Tensor<T, (rows, d)>,
    factor: In<f32>,
    y: TensorMut<U, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (row, col) = tile_start(d, (rows_tile, d_tile));
    let xt = load(x.block([row, col], [rows_tile, d_tile]), boundary_check = [0, 1], padding = zero);
    let scaled = xt.to::<f32>() * load(factor + 0);
    store(y.block([row, col], [rows_tile, d_tile]), scaled.to::<U>(), boundary_check = [0, 1]);
}

/// y = factor · x, both [rows, d], for a factor of one element in memory of the device.
///
/// # Errors
/// As [`forward`]; another number of factors.
pub fn scaled<T: FloatElement, U: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    factor: Tensor<'_, f32, 1>,
    mut y: TensorMut<'_, U, 2>,
) -> Result<()> {
    expect_shape("scale", "factor", factor.shape(), [1])?;
    let [rows, d] = x.shape();
    let tiles = ElementwiseTiles::new(rows, d);
    let (factor, rows_tile, d_tile) = (factor.view(), tiles.rows_tile, tiles.d_tile);
    Scale { x: &x, factor: &factor, y: &mut y, rows_tile, d_tile }.launch_with(device, &tiles.config())
}
