//! Softmax along rows: y[r, j] = exp(x[r, j] − mᵣ) / Σₖ exp(x[r, k] − mᵣ) with mᵣ = maxₖ x[r, k].
//!
//! Rows that fit into a tile are read once. Wider rows are read twice: once for the maximum and the sum, which is
//! rescaled whenever the maximum grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and
//! once to write y. A row of −∞ gives NaN, as in PyTorch.
//!
//! With g = ∂L/∂y, the gradient is ∂L/∂x[r, j] = y[r, j] · (g[r, j] − Σₖ g[r, k] · y[r, k]).

use crate::blocks::{fast_exp, row_block};
use crate::tensor::{FloatElement, RowTiles, Tensor, TensorMut, default_row_tiles, expect_shape, extent};
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
#[kernel]
pub fn softmax_rows<T: Float>(
    x: In<T>,
    y: Out<T>,
    x_stride_row: i64,
    x_stride_d: i64,
    y_stride_row: i64,
    y_stride_d: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    assume(d <= d_tile);
    let first_row = program_id(0) * rows_tile;
    let x_block = make_block_ptr(
        x,
        shape = [rows, d],
        strides = [x_stride_row, x_stride_d],
        offsets = [first_row, 0],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let y_block = make_block_ptr(
        y,
        shape = [rows, d],
        strides = [y_stride_row, y_stride_d],
        offsets = [first_row, 0],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let inside = (arange(0, d_tile) < d).expand_dims(0);
    let xt = where_(inside, load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>(), f32::NEG_INFINITY);
    let e = fast_exp(xt - max(xt, axis = 1, keep_dims = true));
    let scale = 1.0 / sum(e, axis = 1, keep_dims = true);
    store(y_block, (e * scale).to::<T>(), boundary_check = [0, 1]);
}

/// Softmax of rows of any width.
///
/// One program per tile of rows, which loops over the columns twice.
#[kernel]
pub fn softmax_wide_rows<T: Float>(
    x: In<T>,
    y: Out<T>,
    x_stride_row: i64,
    x_stride_d: i64,
    y_stride_row: i64,
    y_stride_d: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let first_row = program_id(0) * rows_tile;
    let first_block = make_block_ptr(
        x,
        shape = [rows, d],
        strides = [x_stride_row, x_stride_d],
        offsets = [first_row, 0],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let mut y_block = make_block_ptr(
        y,
        shape = [rows, d],
        strides = [y_stride_row, y_stride_d],
        offsets = [first_row, 0],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
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
#[kernel]
pub fn softmax_bwd<T: Float>(
    y: In<T>,
    grad_y: In<T>,
    grad_x: Out<T>,
    y_stride_row: i64,
    y_stride_d: i64,
    grad_y_stride_row: i64,
    grad_y_stride_d: i64,
    grad_x_stride_row: i64,
    grad_x_stride_d: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let first_row = program_id(0) * rows_tile;
    let (shape, tile) = ((rows, d), (rows_tile, d_tile));
    let first_y = row_block(y, shape, (y_stride_row, y_stride_d), first_row, tile);
    let first_g = row_block(grad_y, shape, (grad_y_stride_row, grad_y_stride_d), first_row, tile);
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
    let mut grad_block = row_block(grad_x, shape, (grad_x_stride_row, grad_x_stride_d), first_row, tile);
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
    const NAME: &str = "softmax";
    let [rows, d] = x.shape();
    expect_shape(NAME, "y", y.shape(), [rows, d])?;
    let tiles = RowTiles::new(rows, d, if d <= MAX_SINGLE_TILE_D { MAX_SINGLE_TILE_D } else { WIDE_TILE });
    let RowTiles { rows_tile, d_tile, .. } = tiles;
    let ([x_stride_row, x_stride_d], [y_stride_row, y_stride_d]) = (x.strides(), y.strides());
    let (config, rows, d) = (tiles.config(rows), extent(NAME, "x", rows)?, extent(NAME, "x", d)?);
    let (x, y) = (&x, &mut y);
    if d_tile >= d as usize {
        let rows_tile = tuned();
        SoftmaxRows { x, y, x_stride_row, x_stride_d, y_stride_row, y_stride_d, rows, d, rows_tile, d_tile }
            .launch_tuned(device, |args| (rows as usize).div_ceil(args.rows_tile))
    } else {
        SoftmaxWideRows { x, y, x_stride_row, x_stride_d, y_stride_row, y_stride_d, rows, d, rows_tile, d_tile }
            .launch_with(device, &config)
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
    const NAME: &str = "softmax_bwd";
    let [rows, d] = y.shape();
    expect_shape(NAME, "grad_y", grad_y.shape(), [rows, d])?;
    expect_shape(NAME, "grad_x", grad_x.shape(), [rows, d])?;
    let tiles = RowTiles::new(rows, d, WIDE_TILE);
    SoftmaxBwd {
        y_stride_row: y.strides()[0],
        y_stride_d: y.strides()[1],
        grad_y_stride_row: grad_y.strides()[0],
        grad_y_stride_d: grad_y.strides()[1],
        grad_x_stride_row: grad_x.strides()[0],
        grad_x_stride_d: grad_x.strides()[1],
        rows: extent(NAME, "y", rows)?,
        d: extent(NAME, "y", d)?,
        y: &y,
        grad_y: &grad_y,
        grad_x: &mut grad_x,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
    }
    .launch_with(device, &tiles.config(rows))
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
