//! RMSNorm: y[r, j] = x[r, j] · sᵣ · w[j] with sᵣ = 1/√(meanⱼ x[r, j]² + ε) (Zhang and Sennrich, "Root Mean Square
//! Layer Normalization", 2019), and its gradients.
//!
//! The forward pass saves s (`rstd`). With g = ∂L/∂y and x̂ = x·s
//!
//! - ∂L/∂x = s · (g·w − x̂ · meanⱼ(g·w·x̂)) and
//! - ∂L/∂w[j] = Σᵣ g[r, j] · x̂[r, j]: each program sums over its own rows and writes one row of partial sums, which
//!   [`column_sum`] reduces.
//!
//! Rows that fit into a tile (`whole_rows`) are read once, wider rows twice.

use crate::column_sum;
use crate::row_loop::{RowLoop, default_row_loop};
use crate::tensor::{FloatElement, RowTiles, Tensor, TensorMut, default_row_tiles, expect_shape, extent, warps};
use tilewright_codegen::target::Target;
use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

/// y = x · rstd · w and rstd = 1/√(mean(x²) + eps), computed in f32.
///
/// One program per tile of rows. `whole_rows` says that `d_tile` ≥ d. With `reread`, whole rows are loaded a second
/// time for the multiplication instead of kept in registers. The second load hits the L1 cache, as programs are small.
#[autotune(
    configs = [
        Config(rows_tile = 1, reread = false, num_warps = [2, 4, 8, 16]),
        Config(rows_tile = [2, 4], reread = false, num_warps = [4, 8]),
        Config(rows_tile = 8, reread = false, num_warps = 8),
        Config(rows_tile = 1, reread = true, num_warps = [4, 8, 16]),
    ],
    key = [d_tile, rows],
    default = default_forward,
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = cdiv(rows, rows_tile))]
pub fn rms_norm_fwd<T: Float>(
    x: Tensor<T, (rows, d)>,
    w: Tensor<T, (d,)>,
    y: TensorMut<T, (rows, d)>,
    rstd: TensorMut<f32, (rows,)>,
    eps: f32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = true]
    #[heuristic(d <= d_tile)]
    whole_rows: bool,
    #[constexpr = false] reread: bool,
) {
    let first_row = program_id(0) * rows_tile;
    let first_block = x.block([first_row, 0], [rows_tile, d_tile]);
    let mut w_block = w.block([0], [d_tile]);
    let mut y_block = y.block([first_row, 0], [rows_tile, d_tile]);
    let rstd_block = rstd.block([first_row], [rows_tile]);
    if whole_rows {
        assume(d <= d_tile);
        let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>();
        let (xt, s) = if reread {
            let xt = load(first_block, boundary_check = [0, 1], padding = zero, eviction = evict_last).to::<f32>();
            let s = rsqrt(sum(xt * xt, axis = 1) / d.to::<f32>() + eps);
            // x is not read again: evict_first leaves the L2 cache to the writes.
            (load(first_block, boundary_check = [0, 1], padding = zero, eviction = evict_first).to::<f32>(), s)
        } else {
            let xt = load(first_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            (xt, rsqrt(sum(xt * xt, axis = 1) / d.to::<f32>() + eps))
        };
        store(rstd_block, s, boundary_check = [0]);
        store(y_block, (xt * s.expand_dims(1) * wt.expand_dims(0)).to::<T>(), boundary_check = [0, 1]);
    } else {
        let mut x_block = first_block;
        let mut squares = zeros::<f32>([rows_tile]);
        for _ in range(0, d, d_tile) {
            let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            squares += sum(xt * xt, axis = 1);
            x_block = x_block.advance([0, d_tile]);
        }
        let s = rsqrt(squares / d.to::<f32>() + eps);
        store(rstd_block, s, boundary_check = [0]);
        x_block = first_block;
        for _ in range(0, d, d_tile) {
            let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>();
            store(y_block, (xt * s.expand_dims(1) * wt.expand_dims(0)).to::<T>(), boundary_check = [0, 1]);
            x_block = x_block.advance([0, d_tile]);
            w_block = w_block.advance([d_tile]);
            y_block = y_block.advance([0, d_tile]);
        }
    }
}

/// The configuration where no tuning entry applies: on a GPU, rows of 4 KB and more have one program each, which reads
/// 32 bytes per thread where possible.
fn default_forward(problem: &Problem) -> Config {
    let d_tile = problem.int("d_tile").map_or(0, |d| d.max(0) as usize);
    let bytes = d_tile * problem.dtypes.first().map_or(4, |dtype| dtype.bytes());
    if bytes < 4096 || matches!(problem.target, Target::Host(_)) {
        return default_row_tiles(problem).set("reread", false);
    }
    let num_warps = warps(bytes / 1024);
    Config::default().set("rows_tile", 1_usize).set("reread", true).num_warps(num_warps)
}

/// grad_x, and partial_grad_w[p, j] = Σ grad_y[r, j] · x[r, j] · rstd[r] over the rows r of program p.
///
/// partial_grad_w has one row per program. Where `d_tile` ≥ d (`whole_rows`), a program loops over its
/// `rows_per_program` rows, a multiple of `rows_tile`, and keeps its sums in registers. Wider rows have one program per
/// tile of rows.
#[autotune(
    configs = [
        // Shared by all kernels with a row loop. Configurations that were fast on an H200 come first: loads prefetched
        // into shared memory.
        Config(rows_tile = [1, 2], num_warps = [8, 16], stages = [2, 3]),
        Config(rows_tile = 4, num_warps = [8, 16], stages = [2, 3]),
        Config(rows_tile = 1, num_warps = 4, stages = [2, 3]),
        Config(rows_tile = 2, num_warps = 4, stages = 2),
        Config(rows_tile = [1, 2, 4], num_warps = 8, stages = 1),
        Config(rows_tile = 1, num_warps = 16, stages = 1),
        Config(rows_tile = 8, num_warps = 8, stages = [1, 2]),
        Config(rows_tile = 1, num_warps = 32, stages = 2),
    ],
    key = [d_tile, rows],
    default = default_row_loop,
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = programs)]
#[alias(rows_each = rows_per_program)]
pub fn rms_norm_bwd<T: Float>(
    x: Tensor<T, (rows, d)>,
    w: Tensor<T, (d,)>,
    rstd: Tensor<f32, (rows,)>,
    grad_y: Tensor<T, (rows, d)>,
    grad_x: TensorMut<T, (rows, d)>,
    partial_grad_w: TensorMut<f32, (programs, d)>,
    rows_per_program: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = true]
    #[heuristic(d <= d_tile)]
    whole_rows: bool,
    #[constexpr = 1] stages: usize,
) {
    let mut w_block = w.block([0], [d_tile]);
    let mut partial_block = partial_grad_w.block([program_id(0), 0], [1, d_tile]);
    if whole_rows {
        assume((d <= d_tile) && (rows_per_program > 0) && (rows_per_program % rows_tile == 0));
        let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
        let inv_d = 1.0 / d.to::<f32>();
        let mut total = zeros::<f32>([rows_tile, d_tile]);
        let first = program_id(0) * rows_per_program;
        for offset in range(0, minimum(rows_per_program, rows - first), rows_tile, num_stages = stages) {
            let row = first + offset;
            let x_block = x.block([row, 0], [rows_tile, d_tile]);
            let g_block = grad_y.block([row, 0], [rows_tile, d_tile]);
            let rstd_block = rstd.block([row], [rows_tile]);
            let s = load(rstd_block, boundary_check = [0], padding = zero).expand_dims(1);
            // Multiplying g by s first takes five operations per element: for v = s·g·w, ∂L/∂x = v − x · s² ·
            // mean(v·x).
            let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>() * s;
            total += g * xt;
            let v = g * wt;
            let c1 = sum(v * xt, axis = 1, keep_dims = true) * (s * s * inv_d);
            let grad_x_block = grad_x.block([row, 0], [rows_tile, d_tile]);
            store(grad_x_block, (v - xt * c1).to::<T>(), boundary_check = [0, 1]);
        }
        store(partial_block, sum(total, axis = 0, keep_dims = true), boundary_check = [1]);
    } else {
        let row = program_id(0) * rows_tile;
        let rstd_block = rstd.block([row], [rows_tile]);
        let s = load(rstd_block, boundary_check = [0], padding = zero).expand_dims(1);
        let mut x_block = x.block([row, 0], [rows_tile, d_tile]);
        let mut g_block = grad_y.block([row, 0], [rows_tile, d_tile]);
        let mut grad_x_block = grad_x.block([row, 0], [rows_tile, d_tile]);
        let (first_x, first_w, first_g) = (x_block, w_block, g_block);
        let mut dots = zeros::<f32>([rows_tile, 1]);
        for _ in range(0, d, d_tile) {
            let x_hat = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>() * s;
            let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let gw = g * load(w_block, boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
            dots += sum(gw * x_hat, axis = 1, keep_dims = true);
            store(partial_block, sum(g * x_hat, axis = 0, keep_dims = true), boundary_check = [1]);
            x_block = x_block.advance([0, d_tile]);
            w_block = w_block.advance([d_tile]);
            g_block = g_block.advance([0, d_tile]);
            partial_block = partial_block.advance([0, d_tile]);
        }
        let mean = dots / d.to::<f32>();
        x_block = first_x;
        w_block = first_w;
        g_block = first_g;
        for _ in range(0, d, d_tile) {
            let x_hat = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>() * s;
            let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let gw = g * load(w_block, boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
            store(grad_x_block, ((gw - x_hat * mean) * s).to::<T>(), boundary_check = [0, 1]);
            x_block = x_block.advance([0, d_tile]);
            w_block = w_block.advance([d_tile]);
            g_block = g_block.advance([0, d_tile]);
            grad_x_block = grad_x_block.advance([0, d_tile]);
        }
    }
}

/// Widest row that is kept in registers.
const MAX_SINGLE_TILE_D: usize = 8192;
/// Columns of a forward tile of wider rows.
const WIDE_TILE: usize = 4096;
/// Columns of a backward tile of wider rows: few, so that a tile has several rows and writes one partial sum for them.
const WIDE_BACKWARD_TILE: usize = 1024;

fn tiles(rows: usize, d: usize) -> RowTiles {
    RowTiles::new(rows, d, if d <= MAX_SINGLE_TILE_D { MAX_SINGLE_TILE_D } else { WIDE_TILE })
}

/// y [rows, d] and rstd [rows] of x [rows, d], weights w [d] and `eps`.
///
/// # Errors
/// Shapes that do not match; tensors on another device; launch errors.
pub fn forward<T: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    w: Tensor<'_, T, 1>,
    mut y: TensorMut<'_, T, 2>,
    mut rstd: TensorMut<'_, f32, 1>,
    eps: f32,
) -> Result<()> {
    let [rows, d] = x.shape();
    let tiles = tiles(rows, d);
    let (rows_tile, d_tile) = (tiles.rows_tile, tiles.d_tile);
    let mut kernel = RmsNormFwd { x: &x, w: &w, y: &mut y, rstd: &mut rstd, eps, rows_tile, d_tile, reread: false };
    if d_tile >= d { kernel.launch_tuned(device) } else { kernel.launch_with(device, &tiles.config(rows)) }
}

/// grad_x [rows, d] and grad_w [d], given the gradient grad_y [rows, d] of the result and the rstd [rows] of
/// [`forward`]. grad_w may be `None::<TensorMut<f32, 1>>`: then its partial sums are not added up.
///
/// # Errors
/// As [`forward`]; also out of memory for the partial sums, f32 [programs, d].
pub fn backward<'g, T: FloatElement, G: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    w: Tensor<'_, T, 1>,
    rstd: Tensor<'_, f32, 1>,
    grad_y: Tensor<'_, T, 2>,
    mut grad_x: TensorMut<'_, T, 2>,
    grad_w: impl Into<Option<TensorMut<'g, G, 1>>>,
) -> Result<()> {
    const NAME: &str = "rms_norm_bwd";
    let [rows, d] = x.shape();
    let grad_w = grad_w.into();
    if let Some(grad_w) = &grad_w {
        expect_shape(NAME, "grad_w", grad_w.shape(), [d])?;
    }
    let whole_rows = d <= MAX_SINGLE_TILE_D;
    let tiles = RowTiles::new(rows, d, if whole_rows { MAX_SINGLE_TILE_D } else { WIDE_BACKWARD_TILE });
    let row_loop = RowLoop::new(device, rows, tiles.d_tile, 1);
    let programs = if whole_rows { row_loop.programs } else { tiles.programs(rows) };
    let mut partial = Buffer::<f32>::uninit(device, programs * d)?;
    let mut kernel = RmsNormBwd {
        x: &x,
        w: &w,
        rstd: &rstd,
        grad_y: &grad_y,
        grad_x: &mut grad_x,
        partial_grad_w: &mut partial.tensor_mut([programs, d])?,
        rows_per_program: extent(NAME, "x", row_loop.rows_per_program)?,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
        stages: 1,
    };
    if whole_rows {
        kernel.launch_tuned(device)?;
    } else {
        kernel.launch_with(device, &tiles.config(rows))?;
    }
    match grad_w {
        Some(grad_w) => column_sum::forward(device, partial.tensor([programs, d])?, grad_w),
        None => Ok(()),
    }
}

/// The reference in f64, on dense row-major slices.
pub mod reference {
    /// (y [rows, d], rstd [rows]) of x [rows, d] and w [d].
    pub fn forward(x: &[f64], w: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
        let d = w.len();
        let (mut y, mut rstd) = (Vec::with_capacity(x.len()), Vec::new());
        for row in x.chunks_exact(d.max(1)) {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / d as f64;
            let s = 1.0 / (mean + eps).sqrt();
            y.extend(row.iter().zip(w).map(|(x, w)| x * s * w));
            rstd.push(s);
        }
        (y, rstd)
    }

    /// (grad_x [rows, d], grad_w [d]) of x [rows, d], w [d] and grad_y [rows, d].
    pub fn backward(x: &[f64], w: &[f64], grad_y: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
        let d = w.len();
        let rstd = forward(x, w, eps).1;
        let (mut grad_x, mut grad_w) = (Vec::with_capacity(x.len()), vec![0.0; d]);
        for (r, s) in rstd.iter().enumerate() {
            let (x, g) = (&x[r * d..(r + 1) * d], &grad_y[r * d..(r + 1) * d]);
            let mean = (0..d).map(|j| g[j] * w[j] * x[j] * s).sum::<f64>() / d as f64;
            for j in 0..d {
                grad_x.push(s * (g[j] * w[j] - x[j] * s * mean));
                grad_w[j] += g[j] * x[j] * s;
            }
        }
        (grad_x, grad_w)
    }
}
