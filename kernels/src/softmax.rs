//! Softmax along rows: y[r, j] = exp(x[r, j] − mᵣ) / Σₖ exp(x[r, k] − mᵣ) with mᵣ = maxₖ x[r, k].
//!
//! Rows that fit into a tile are read once. Wider rows are read twice: once for the maximum and the sum, which is
//! rescaled whenever the maximum grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and
//! once to write y. A row of −∞ gives NaN, as in PyTorch.
//!
//! With g = ∂L/∂y, the gradient is ∂L/∂x[r, j] = y[r, j] · (g[r, j] − Σₖ g[r, k] · y[r, k]).

use crate::blocks::fast_exp;
use crate::tensor::{FloatElement, RowTiles, Tensor, TensorMut, default_row_tiles};
use tilewright_runtime::prelude::*;

/// Softmax of rows that fit into a tile: `d_tile` ≥ d.
///
/// One program per tile of rows.
#[autotune(
    configs = [
        Config(rows_tile = 1, num_warps = [2, 4, 8, 16]),
        Config(rows_tile = [2, 4], num_warps = [4, 8]),
        Config(rows_tile = 8, num_warps = 8),
    ],
    key = [d_tile, rows],
    default = default_row_tiles,
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = cdiv(rows, rows_tile))]
pub fn softmax_rows<T: Float>(
    x: Tensor<T, (rows, d)>,
    y: TensorMut<T, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    assume(d <= d_tile);
    let first_row = program_id(0) * rows_tile;
    let x_block = x.block([first_row, 0], [rows_tile, d_tile]);
    let y_block = y.block([first_row, 0], [rows_tile, d_tile]);
    let inside = (arange(0, d_tile) < d).expand_dims(0);
    let xt = where_(inside, load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>(), f32::NEG_INFINITY);
    let e = fast_exp(xt - max(xt, axis = 1, keep_dims = true));
    let scale = 1.0 / sum(e, axis = 1, keep_dims = true);
    store(y_block, (e * scale).to::<T>(), boundary_check = [0, 1]);
}

/// Softmax of rows of any width.
///
/// One program per tile of rows, which loops over the columns twice.
#[kernel(grid = cdiv(rows, rows_tile))]
pub fn softmax_wide_rows<T: Float>(
    x: Tensor<T, (rows, d)>,
    y: TensorMut<T, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let first_row = program_id(0) * rows_tile;
    let first_block = x.block([first_row, 0], [rows_tile, d_tile]);
    let mut y_block = y.block([first_row, 0], [rows_tile, d_tile]);
    let mut x_block = first_block;
    let mut largest = full([rows_tile], f32::NEG_INFINITY);
    let mut total = zeros::<f32>([rows_tile]);
    for start in range(0, d, d_tile) {
        let inside = (arange(0, d_tile) + start < d).expand_dims(0);
        let xt = where_(inside, load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>(), f32::NEG_INFINITY);
        let new_largest = maximum(largest, max(xt, axis = 1));
        // For a row that is −∞ so far, the shift is 0: −∞ − −∞ would be NaN.
        let shift = where_(new_largest == f32::NEG_INFINITY, 0.0, new_largest);
        total = total * fast_exp(largest - shift) + sum(fast_exp(xt - shift.expand_dims(1)), axis = 1);
        largest = new_largest;
        x_block = x_block.advance([0, d_tile]);
    }
    let scale = (1.0 / total).expand_dims(1);
    x_block = first_block;
    for _ in range(0, d, d_tile) {
        let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        store(y_block, (fast_exp(xt - largest.expand_dims(1)) * scale).to::<T>(), boundary_check = [0, 1]);
        x_block = x_block.advance([0, d_tile]);
        y_block = y_block.advance([0, d_tile]);
    }
}

/// The gradient of softmax for rows of any width, from y and grad_y = ∂L/∂y.
///
/// One program per tile of rows, which loops over the columns twice: the second loads of a row that fits into a tile
/// come from the cache.
#[kernel(grid = cdiv(rows, rows_tile))]
pub fn softmax_bwd<T: Float>(
    y: Tensor<T, (rows, d)>,
    grad_y: Tensor<T, (rows, d)>,
    grad_x: TensorMut<T, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let first_row = program_id(0) * rows_tile;
    let first_y = y.block([first_row, 0], [rows_tile, d_tile]);
    let first_g = grad_y.block([first_row, 0], [rows_tile, d_tile]);
    let mut y_block = first_y;
    let mut g_block = first_g;
    let mut total = zeros::<f32>([rows_tile]);
    for _ in range(0, d, d_tile) {
        let yt = load(y_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        total += sum(yt * g, axis = 1);
        y_block = y_block.advance([0, d_tile]);
        g_block = g_block.advance([0, d_tile]);
    }
    y_block = first_y;
    g_block = first_g;
    let mut grad_block = grad_x.block([first_row, 0], [rows_tile, d_tile]);
    for _ in range(0, d, d_tile) {
        let yt = load(y_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        store(grad_block, (yt * (g - total.expand_dims(1))).to::<T>(), boundary_check = [0, 1]);
        y_block = y_block.advance([0, d_tile]);
        g_block = g_block.advance([0, d_tile]);
        grad_block = grad_block.advance([0, d_tile]);
    }
}

/// Widest row that is kept in registers.
const MAX_SINGLE_TILE_D: usize = 16384;
/// Columns of a tile of wider rows.
const WIDE_TILE: usize = 4096;

/// y = softmax of x along the last dimension, both [rows, d].
///
/// # Errors
/// Shapes that differ; tensors on another device; launch errors.
pub fn forward<T: FloatElement>(device: &Device, x: Tensor<'_, T, 2>, mut y: TensorMut<'_, T, 2>) -> Result<()> {
    let [rows, d] = x.shape();
    let tiles = RowTiles::new(rows, d, if d <= MAX_SINGLE_TILE_D { MAX_SINGLE_TILE_D } else { WIDE_TILE });
    let RowTiles { rows_tile, d_tile, .. } = tiles;
    let (x, y) = (&x, &mut y);
    if d_tile >= d {
        SoftmaxRows { x, y, rows_tile: tuned(), d_tile }.launch_tuned(device)
    } else {
        SoftmaxWideRows { x, y, rows_tile, d_tile }.launch_with(device, &tiles.config(rows))
    }
}

/// grad_x = y · (grad_y − Σ grad_y · y) along rows: the gradient of x for y = softmax of x, all [rows, d].
///
/// # Errors
/// As [`forward`].
pub fn backward<T: FloatElement>(
    device: &Device,
    y: Tensor<'_, T, 2>,
    grad_y: Tensor<'_, T, 2>,
    mut grad_x: TensorMut<'_, T, 2>,
) -> Result<()> {
    let [rows, d] = y.shape();
    let tiles = RowTiles::new(rows, d, WIDE_TILE);
    let RowTiles { rows_tile, d_tile, .. } = tiles;
    let config = tiles.config(rows);
    SoftmaxBwd { y: &y, grad_y: &grad_y, grad_x: &mut grad_x, rows_tile, d_tile }.launch_with(device, &config)
}

/// The reference of the gradient in f64, on dense row-major slices with rows of `d` elements.
pub fn reference_backward(y: &[f64], grad_y: &[f64], d: usize) -> Vec<f64> {
    let rows = y.chunks_exact(d.max(1)).zip(grad_y.chunks_exact(d.max(1)));
    rows.flat_map(|(y, g)| {
        let total: f64 = y.iter().zip(g).map(|(y, g)| y * g).sum();
        y.iter().zip(g).map(move |(y, g)| y * (g - total))
    })
    .collect()
}

/// The reference in f64, on dense row-major slices with rows of `d` elements.
pub fn reference(x: &[f64], d: usize) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len());
    if d == 0 {
        return y;
    }
    for row in x.chunks_exact(d) {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = row.iter().map(|x| (x - largest).exp()).collect();
        let total: f64 = e.iter().sum();
        y.extend(e.iter().map(|e| e / total));
    }
    y
}
