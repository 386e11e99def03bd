//! Weighted sum: the inner product of each row with one vector of weights, and its gradients.
//!
//! y = x·w for x [rows, d] and w [d]. With g = ∂L/∂y the chain rule gives
//!
//! - ∂L/∂x[r, j] = g[r] · w[j], an outer product, and
//! - ∂L/∂w[j] = Σᵣ g[r] · x[r, j], a sum over rows: each program sums over its own rows and writes one row of partial sums
//!   ([`column_sum`] adds those).
//!
//! It is the introductory kernel of Stanford CS336, assignment 2, section 1.3.1 (equations 2 and 3 there).

use crate::column_sum;
use crate::tensor::{FloatElement, RowTiles, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::prelude::*;

/// y[r] = Σⱼ x[r, j] · w[j], multiplied and summed in f32.
///
/// One program per tile of rows, which walks along the row.
#[kernel]
pub fn weighted_sum_fwd<T: Float>(
    x: In<T>,
    w: In<T>,
    y: Out<f32>,
    x_stride_row: i64,
    x_stride_d: i64,
    w_stride: i64,
    y_stride: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let first_row = program_id(0) * rows_tile;
    let mut x_block = make_block_ptr(
        x,
        shape = [rows, d],
        strides = [x_stride_row, x_stride_d],
        offsets = [first_row, 0],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let mut w_block =
        make_block_ptr(w, shape = [d], strides = [w_stride], offsets = [0], block_shape = [d_tile], order = [0]);
    let y_block = make_block_ptr(
        y,
        shape = [rows],
        strides = [y_stride],
        offsets = [first_row],
        block_shape = [rows_tile],
        order = [0],
    );
    let mut total = zeros::<f32>([rows_tile]);
    for _ in range(0, cdiv(d, d_tile)) {
        let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>();
        total += sum(xt * wt.expand_dims(0), axis = 1);
        x_block = x_block.advance([0, d_tile]);
        w_block = w_block.advance([d_tile]);
    }
    store(y_block, total, boundary_check = [0]);
}

/// grad_x[r, j] = grad_y[r] · w[j], and partial_grad_w[t, j] = Σ grad_y[r] · x[r, j] over the rows r of tile t.
///
/// One program per tile of rows, which walks along the row; partial_grad_w has one row per program.
#[kernel]
pub fn weighted_sum_bwd<T: Float>(
    x: In<T>,
    w: In<T>,
    grad_y: In<f32>,
    grad_x: Out<T>,
    partial_grad_w: Out<f32>,
    x_stride_row: i64,
    x_stride_d: i64,
    w_stride: i64,
    grad_y_stride: i64,
    grad_x_stride_row: i64,
    grad_x_stride_d: i64,
    partial_stride_tile: i64,
    partial_stride_d: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let row_tile = program_id(0);
    let first_row = row_tile * rows_tile;
    let mut x_block = make_block_ptr(
        x,
        shape = [rows, d],
        strides = [x_stride_row, x_stride_d],
        offsets = [first_row, 0],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let mut w_block =
        make_block_ptr(w, shape = [d], strides = [w_stride], offsets = [0], block_shape = [d_tile], order = [0]);
    let grad_y_block = make_block_ptr(
        grad_y,
        shape = [rows],
        strides = [grad_y_stride],
        offsets = [first_row],
        block_shape = [rows_tile],
        order = [0],
    );
    let mut grad_x_block = make_block_ptr(
        grad_x,
        shape = [rows, d],
        strides = [grad_x_stride_row, grad_x_stride_d],
        offsets = [first_row, 0],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let mut partial_block = make_block_ptr(
        partial_grad_w,
        shape = [num_programs(0), d],
        strides = [partial_stride_tile, partial_stride_d],
        offsets = [row_tile, 0],
        block_shape = [1, d_tile],
        order = [1, 0],
    );
    let g = load(grad_y_block, boundary_check = [0], padding = zero).expand_dims(1);
    for _ in range(0, cdiv(d, d_tile)) {
        let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>();
        store(grad_x_block, (g * wt.expand_dims(0)).to::<T>(), boundary_check = [0, 1]);
        let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        store(partial_block, sum(xt * g, axis = 0, keep_dims = true), boundary_check = [1]);
        x_block = x_block.advance([0, d_tile]);
        w_block = w_block.advance([d_tile]);
        grad_x_block = grad_x_block.advance([0, d_tile]);
        partial_block = partial_block.advance([0, d_tile]);
    }
}

/// Widest tile: wider rows go through several.
const MAX_D_TILE: usize = 1024;
/// On a CPU: as wide as most rows. What is read lies in one piece then, which its prefetchers follow; several rows in short
/// pieces read at half the speed.
const MAX_D_TILE_CPU: usize = 8192;
/// Fewest rows of a tile of the backward pass on a CPU: it writes a row of partial sums for each tile.
const MIN_ROWS_TILE_CPU: usize = 8;

fn tiles(device: &Device, rows: usize, d: usize) -> RowTiles {
    RowTiles::new(rows, d, if device.is_cuda() { MAX_D_TILE } else { MAX_D_TILE_CPU })
}

/// y [rows] = x [rows, d] · w [d].
///
/// # Errors
/// Shapes that do not fit each other, tensors on another device, and everything that a launch can say.
pub fn forward<T: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    w: Tensor<'_, T, 1>,
    mut y: TensorMut<'_, f32, 1>,
) -> Result<()> {
    const NAME: &str = "weighted_sum_fwd";
    let [rows, d] = x.shape();
    expect_shape(NAME, "w", w.shape(), [d])?;
    expect_shape(NAME, "y", y.shape(), [rows])?;
    let tiles = tiles(device, rows, d);
    WeightedSumFwd {
        x_stride_row: x.strides()[0],
        x_stride_d: x.strides()[1],
        w_stride: w.strides()[0],
        y_stride: y.strides()[0],
        rows: extent(NAME, "x", rows)?,
        d: extent(NAME, "x", d)?,
        x: &x.data,
        w: &w.data,
        y: &mut y.data,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
    }
    .launch_with(device, &tiles.config(rows))
}

/// grad_x [rows, d] and grad_w [d], given the gradient grad_y [rows] of the result.
///
/// # Errors
/// As [`forward`]; also no memory for the partial sums, f32 [row tiles, d].
pub fn backward<T: FloatElement, G: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    w: Tensor<'_, T, 1>,
    grad_y: Tensor<'_, f32, 1>,
    mut grad_x: TensorMut<'_, T, 2>,
    grad_w: TensorMut<'_, G, 1>,
) -> Result<()> {
    const NAME: &str = "weighted_sum_bwd";
    let [rows, d] = x.shape();
    expect_shape(NAME, "w", w.shape(), [d])?;
    expect_shape(NAME, "grad_y", grad_y.shape(), [rows])?;
    expect_shape(NAME, "grad_x", grad_x.shape(), [rows, d])?;
    expect_shape(NAME, "grad_w", grad_w.shape(), [d])?;
    let mut tiles = tiles(device, rows, d);
    if !device.is_cuda() {
        tiles.rows_tile = tiles.rows_tile.max(MIN_ROWS_TILE_CPU.min(rows.max(1).next_power_of_two()));
    }
    let programs = tiles.programs(rows);
    let mut partial = Buffer::<f32>::uninit(device, programs * d)?;
    WeightedSumBwd {
        x_stride_row: x.strides()[0],
        x_stride_d: x.strides()[1],
        w_stride: w.strides()[0],
        grad_y_stride: grad_y.strides()[0],
        grad_x_stride_row: grad_x.strides()[0],
        grad_x_stride_d: grad_x.strides()[1],
        partial_stride_tile: d as i64,
        partial_stride_d: 1,
        rows: extent(NAME, "x", rows)?,
        d: extent(NAME, "x", d)?,
        x: &x.data,
        w: &w.data,
        grad_y: &grad_y.data,
        grad_x: &mut grad_x.data,
        partial_grad_w: &mut partial,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
    }
    .launch_with(device, &tiles.config(rows))?;
    column_sum::forward(device, Tensor::dense(partial.view(), [programs, d])?, grad_w)
}

/// The same in f64, on dense row-major slices.
pub mod reference {
    /// y [rows] of x [rows, d] and w [d].
    pub fn forward(x: &[f64], w: &[f64], rows: usize) -> Vec<f64> {
        let d = w.len();
        (0..rows).map(|r| (0..d).map(|j| x[r * d + j] * w[j]).sum()).collect()
    }

    /// (grad_x [rows, d], grad_w [d]) of x [rows, d], w [d] and grad_y [rows].
    pub fn backward(x: &[f64], w: &[f64], grad_y: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let grad_x = grad_y.iter().flat_map(|g| w.iter().map(move |w| g * w)).collect();
        let mut grad_w = vec![0.0; w.len()];
        for (r, g) in grad_y.iter().enumerate() {
            for (j, sum) in grad_w.iter_mut().enumerate() {
                *sum += g * x[r * w.len() + j];
            }
        }
        (grad_x, grad_w)
    }
}
