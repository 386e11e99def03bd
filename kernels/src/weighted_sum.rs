//! Weighted sum: the inner product of each row with a vector of weights, and its gradients.
//!
//! y = x·w for x [rows, d] and w [d]. With g = ∂L/∂y the chain rule gives
//!
//! - ∂L/∂x[r, j] = g[r] · w[j], an outer product, and
//! - ∂L/∂w[j] = Σᵣ g[r] · x[r, j], a sum over rows: each program sums over its own rows and writes one row of partial
//!   sums, which [`column_sum`] reduces.
//!
//! This is the introductory kernel of Stanford CS336, assignment 2, section 1.3.1 (equations 2 and 3 there).

use crate::column_sum;
use crate::row_loop::{RowLoop, default_row_loop};
use crate::tensor::{FloatElement, RowTiles, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

/// y[r] = Σⱼ x[r, j] · w[j], multiplied and accumulated in f32.
///
/// One program per tile of rows, which loops over the columns. With `x_evict_first` x is loaded with the eviction
/// policy evict_first, so that data already in L2 stays there: faster for an x of up to a few times the size of the L2
/// cache, on an H200 at least up to 200 MB. With `single_tile`, one tile holds a whole row, and
/// the loop and the column mask vanish.
#[autotune(
    configs = [
        Config(rows_tile = 1, d_tile = [1024, 2048], num_warps = [1, 2, 4], x_evict_first = false),
        Config(rows_tile = [2, 4, 8], d_tile = [1024, 2048], num_warps = 4, x_evict_first = false),
        Config(rows_tile = [8, 16], d_tile = [512, 1024], num_warps = 8, x_evict_first = false),
        Config(rows_tile = [1, 2], d_tile = [4096, 8192], num_warps = 4, x_evict_first = false),
        Config(rows_tile = 1, d_tile = 2048, num_warps = 8, x_evict_first = false),
        Config(rows_tile = [2, 4], d_tile = [1024, 2048], num_warps = 8, x_evict_first = false),
        Config(rows_tile = 1, d_tile = [1024, 2048], num_warps = [4, 8], x_evict_first = true),
        Config(rows_tile = [2, 4], d_tile = 2048, num_warps = [4, 8], x_evict_first = true),
        Config(rows_tile = 1, d_tile = 4096, num_warps = 4, x_evict_first = true),
        Config(rows_tile = 2, d_tile = [1024, 4096], num_warps = [8, 16], x_evict_first = true),
        Config(rows_tile = 2, d_tile = 2048, num_warps = 16, x_evict_first = [true, false]),
        Config(rows_tile = 4, d_tile = [2048, 4096], num_warps = 16, x_evict_first = true),
        Config(rows_tile = [1, 2], d_tile = 4096, num_warps = 16, x_evict_first = false),
        Config(rows_tile = 1, d_tile = 8192, num_warps = [8, 16], x_evict_first = [true, false]),
    ],
    key = [d, rows],
    default = default_forward,
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = cdiv(rows, rows_tile))]
#[alias(first_out = x_evict_first, whole = single_tile)]
pub fn weighted_sum_fwd<T: Float>(
    x: Tensor<T, (rows, d)>,
    w: Tensor<T, (d,)>,
    y: TensorMut<f32, (rows,)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = false] x_evict_first: bool,
    #[constexpr = false]
    #[heuristic(d == d_tile)]
    single_tile: bool,
) {
    if single_tile {
        assume(d == d_tile);
    }
    let d = if single_tile { scalar::<i32>(d_tile) } else { d };
    let first_row = program_id(0) * rows_tile;
    let mut x_block = x.block([first_row, 0], [rows_tile, d_tile]);
    let mut w_block = w.block([0], [d_tile]);
    let y_block = y.block([first_row], [rows_tile]);
    let mut total = zeros::<f32>([rows_tile]);
    for _ in range(0, cdiv(d, d_tile)) {
        let xt = if x_evict_first {
            load(x_block, boundary_check = [0, 1], padding = zero, eviction = evict_first)
        } else {
            load(x_block, boundary_check = [0, 1], padding = zero)
        };
        let xt = xt.to::<f32>();
        let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>();
        total += sum(xt * wt.expand_dims(0), axis = 1);
        x_block = x_block.advance([0, d_tile]);
        w_block = w_block.advance([d_tile]);
    }
    store(y_block, total, boundary_check = [0]);
}

/// grad_x[r, j] = grad_y[r] · w[j], and partial_grad_w[p, j] = Σ grad_y[r] · x[r, j] over the rows r of program p.
///
/// One program per `rows_per_program` rows (axis 0), a multiple of `rows_tile`, and tile of columns (axis 1). A program
/// loops over its rows and keeps its sums in registers. partial_grad_w has one row per program of axis 0.
#[autotune(
    configs = crate::rms_norm::RMS_NORM_BWD_AUTOTUNE,
    key = [d_tile, rows],
    default = default_row_loop,
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = (programs, cdiv(d, d_tile)))]
#[alias(rows_each = rows_per_program)]
pub fn weighted_sum_bwd<T: Float>(
    x: Tensor<T, (rows, d)>,
    w: Tensor<T, (d,)>,
    grad_y: Tensor<f32, (rows,)>,
    grad_x: TensorMut<T, (rows, d)>,
    partial_grad_w: TensorMut<f32, (programs, d)>,
    rows_per_program: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = 1] stages: usize,
) {
    let column = program_id(1) * d_tile;
    let wt = load(w.block([column], [d_tile]), boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
    let mut total = zeros::<f32>([rows_tile, d_tile]);
    assume((rows_per_program > 0) && (rows_per_program % rows_tile == 0));
    let first = program_id(0) * rows_per_program;
    for offset in range(0, minimum(rows_per_program, rows - first), rows_tile, num_stages = stages) {
        let row = first + offset;
        let x_block = x.block([row, column], [rows_tile, d_tile]);
        let grad_x_block = grad_x.block([row, column], [rows_tile, d_tile]);
        let g = load(grad_y.block([row], [rows_tile]), boundary_check = [0], padding = zero).expand_dims(1);
        total += load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>() * g;
        store(grad_x_block, (g * wt).to::<T>(), boundary_check = [0, 1]);
    }
    let partial_block = partial_grad_w.block([program_id(0), column], [1, d_tile]);
    store(partial_block, sum(total, axis = 0, keep_dims = true), boundary_check = [1]);
}

/// Widest tile: wider rows are processed in several tiles.
const MAX_D_TILE: usize = 1024;
/// Widest tile on a CPU, as wide as most rows, so that reads are contiguous and hardware prefetchers follow them. Reads
/// of several rows in short pieces reach half the bandwidth.
const MAX_D_TILE_CPU: usize = 8192;

fn max_d_tile(gpu: bool) -> usize {
    if gpu { MAX_D_TILE } else { MAX_D_TILE_CPU }
}

/// Bytes of x up to which its loads are evict_first: on an H200, 205 MB take 5 to 14 % less time with evict_first, and
/// 820 MB take 3 % more.
const EVICT_FIRST_MAX_BYTES: usize = 300 << 20;

fn default_forward(problem: &Problem) -> Config {
    let size = |name: &str| problem.int(name).map_or(1, |n| n.max(1) as usize);
    let (rows, d) = (size("rows"), size("d"));
    let bytes = problem.dtypes.first().map_or(4, |dtype| dtype.bytes());
    let x_evict_first = problem.is_gpu() && rows.saturating_mul(d).saturating_mul(bytes) <= EVICT_FIRST_MAX_BYTES;
    let tiles = RowTiles::new(rows, d, max_d_tile(problem.is_gpu()));
    // Good for all long rows of f32 that were tuned on an H200.
    let (rows_tile, d_tile, num_warps) = match problem.is_gpu() && d >= 2048 && bytes == 4 {
        true => (4.min((rows / 512).max(1).next_power_of_two()), 2048, 8),
        false => (tiles.rows_tile, tiles.d_tile, tiles.num_warps),
    };
    let config = Config::default().set("rows_tile", rows_tile).set("d_tile", d_tile);
    config.set("x_evict_first", x_evict_first).num_warps(num_warps)
}

/// y [rows] = x [rows, d] · w [d].
///
/// # Errors
/// Shapes that do not match; tensors on another device; launch errors.
pub fn forward<T: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    w: Tensor<'_, T, 1>,
    mut y: TensorMut<'_, f32, 1>,
) -> Result<()> {
    let (rows_tile, d_tile, x_evict_first) = (tuned(), tuned(), tuned());
    WeightedSumFwd { x: &x, w: &w, y: &mut y, rows_tile, d_tile, x_evict_first }.launch_tuned(device)
}

/// grad_x [rows, d] and grad_w [d], given the gradient grad_y [rows] of the result.
///
/// # Errors
/// As [`forward`]; also out of memory for the partial sums, f32 [programs, d].
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
    expect_shape(NAME, "grad_w", grad_w.shape(), [d])?;
    let d_tile = d.next_power_of_two().clamp(16, max_d_tile(device.is_cuda()));
    let row_loop = RowLoop::new(device, rows, d_tile, d.div_ceil(d_tile));
    let shape = [row_loop.programs, d];
    let mut partial = Buffer::<f32>::uninit(device, shape.iter().product())?;
    WeightedSumBwd {
        x: &x,
        w: &w,
        grad_y: &grad_y,
        grad_x: &mut grad_x,
        partial_grad_w: &mut partial.tensor_mut(shape)?,
        rows_per_program: extent(NAME, "x", row_loop.rows_per_program)?,
        rows_tile: tuned(),
        d_tile,
        stages: tuned(),
    }
    .launch_tuned(device)?;
    column_sum::forward(device, partial.tensor(shape)?, grad_w)
}

/// The reference in f64, on dense row-major slices.
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
