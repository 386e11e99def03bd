//! LayerNorm: y[r, j] = (x[r, j] − μᵣ) · sᵣ · w[j] + b[j] with μᵣ = meanⱼ x[r, j] and sᵣ = 1/√(meanⱼ (x[r, j] − μᵣ)² +
//! ε) (Ba, Kiros and Hinton, "Layer Normalization", 2016), and its gradients.
//!
//! The forward pass saves μ (`mean`) and s (`rstd`). With g = ∂L/∂y and x̂ = (x − μ)·s
//!
//! - ∂L/∂x = s · (g·w − meanⱼ(g·w) − x̂ · meanⱼ(g·w·x̂)),
//! - ∂L/∂w[j] = Σᵣ g[r, j] · x̂[r, j] and ∂L/∂b[j] = Σᵣ g[r, j]: each program sums over its own rows and writes one row
//!   of partial sums of both, which [`column_sum`] reduces.
//!
//! Rows that fit into a tile (`whole_rows`) are read once, wider rows twice. For these, the mean and the sum of squares
//! of one tile are merged with those of the tiles before it (Chan, Golub and LeVeque, "Updating formulae and a pairwise
//! algorithm for computing sample variances", 1979), which avoids the cancellation of E[x²] − μ².

use crate::column_sum;
use crate::row_loop::{RowLoop, default_row_loop};
use crate::tensor::{FloatElement, RowTiles, Tensor, TensorMut, default_row_tiles, expect_shape, extent};
use tilewright_runtime::prelude::*;

/// y = (x − mean) · rstd · w + b, mean, and rstd = 1/√(variance + eps), computed in f32.
///
/// One program per tile of rows. `whole_rows` says that `d_tile` ≥ d.
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
pub fn layer_norm_fwd<T: Float>(
    x: Tensor<T, (rows, d)>,
    w: Tensor<T, (d,)>,
    b: Tensor<T, (d,)>,
    y: TensorMut<T, (rows, d)>,
    mean: TensorMut<f32, (rows,)>,
    rstd: TensorMut<f32, (rows,)>,
    eps: f32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = true]
    #[heuristic(d <= d_tile)]
    whole_rows: bool,
) {
    let first_row = program_id(0) * rows_tile;
    let first_block = x.block([first_row, 0], [rows_tile, d_tile]);
    let mut y_block = y.block([first_row, 0], [rows_tile, d_tile]);
    let mut w_block = w.block([0], [d_tile]);
    let mut b_block = b.block([0], [d_tile]);
    let mean_block = mean.block([first_row], [rows_tile]);
    let rstd_block = rstd.block([first_row], [rows_tile]);
    if whole_rows {
        assume(d <= d_tile);
        let xt = load(first_block, boundary_check = [0, 1], padding = zero).to::<f32>();
        let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>();
        let bt = load(b_block, boundary_check = [0], padding = zero).to::<f32>();
        let mu = sum(xt, axis = 1) / d.to::<f32>();
        let inside = (arange(0, d_tile) < d).expand_dims(0);
        let centered = where_(inside, xt - mu.expand_dims(1), 0.0);
        let s = rsqrt(sum(centered * centered, axis = 1) / d.to::<f32>() + eps);
        store(mean_block, mu, boundary_check = [0]);
        store(rstd_block, s, boundary_check = [0]);
        let yt = centered * s.expand_dims(1) * wt.expand_dims(0) + bt.expand_dims(0);
        store(y_block, yt.to::<T>(), boundary_check = [0, 1]);
    } else {
        let mut x_block = first_block;
        let mut mu = zeros::<f32>([rows_tile]);
        let mut squares = zeros::<f32>([rows_tile]);
        for start in range(0, d, d_tile) {
            let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let before = start.to::<f32>();
            let count = minimum(d - start, d_tile).to::<f32>();
            let tile_mu = sum(xt, axis = 1) / count;
            let inside = (arange(0, d_tile) + start < d).expand_dims(0);
            let centered = where_(inside, xt - tile_mu.expand_dims(1), 0.0);
            let shift = tile_mu - mu;
            let fraction = count / (before + count);
            mu += shift * fraction;
            squares += sum(centered * centered, axis = 1) + shift * shift * (before * fraction);
            x_block = x_block.advance([0, d_tile]);
        }
        let s = rsqrt(squares / d.to::<f32>() + eps);
        store(mean_block, mu, boundary_check = [0]);
        store(rstd_block, s, boundary_check = [0]);
        x_block = first_block;
        for _ in range(0, d, d_tile) {
            let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>();
            let bt = load(b_block, boundary_check = [0], padding = zero).to::<f32>();
            let yt = (xt - mu.expand_dims(1)) * s.expand_dims(1) * wt.expand_dims(0) + bt.expand_dims(0);
            store(y_block, yt.to::<T>(), boundary_check = [0, 1]);
            x_block = x_block.advance([0, d_tile]);
            w_block = w_block.advance([d_tile]);
            b_block = b_block.advance([d_tile]);
            y_block = y_block.advance([0, d_tile]);
        }
    }
}

/// grad_x, and over the rows r of program p, partial_grad_w[p, j] = Σ grad_y[r, j] · x̂[r, j] and partial_grad_b[p, j]
/// = Σ grad_y[r, j].
///
/// The partial sums have one row per program. Where `d_tile` ≥ d (`whole_rows`), a program loops over its
/// `rows_per_program` rows, a multiple of `rows_tile`, and keeps its sums in registers. Wider rows have one program per
/// tile of rows.
#[autotune(
    configs = crate::rms_norm::RMS_NORM_BWD_AUTOTUNE,
    key = [d_tile, rows],
    default = default_row_loop,
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = programs)]
#[alias(rows_each = rows_per_program)]
pub fn layer_norm_bwd<T: Float>(
    x: Tensor<T, (rows, d)>,
    w: Tensor<T, (d,)>,
    mean: Tensor<f32, (rows,)>,
    rstd: Tensor<f32, (rows,)>,
    grad_y: Tensor<T, (rows, d)>,
    grad_x: TensorMut<T, (rows, d)>,
    partial_grad_w: TensorMut<f32, (programs, d)>,
    partial_grad_b: TensorMut<f32, (programs, d)>,
    rows_per_program: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = true]
    #[heuristic(d <= d_tile)]
    whole_rows: bool,
    #[constexpr = 1] stages: usize,
) {
    let mut w_block = w.block([0], [d_tile]);
    let mut partial_w_block = partial_grad_w.block([program_id(0), 0], [1, d_tile]);
    let mut partial_b_block = partial_grad_b.block([program_id(0), 0], [1, d_tile]);
    // g is zero out of bounds, and so is every term below.
    if whole_rows {
        assume((d <= d_tile) && (rows_per_program > 0) && (rows_per_program % rows_tile == 0));
        let wt = load(w_block, boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
        let inv_d = 1.0 / d.to::<f32>();
        let mut total_w = zeros::<f32>([rows_tile, d_tile]);
        let mut total_b = zeros::<f32>([rows_tile, d_tile]);
        let first = program_id(0) * rows_per_program;
        for offset in range(0, minimum(rows_per_program, rows - first), rows_tile, num_stages = stages) {
            let row = first + offset;
            let x_block = x.block([row, 0], [rows_tile, d_tile]);
            let g_block = grad_y.block([row, 0], [rows_tile, d_tile]);
            let mean_block = mean.block([row], [rows_tile]);
            let rstd_block = rstd.block([row], [rows_tile]);
            let mu = load(mean_block, boundary_check = [0], padding = zero).expand_dims(1);
            let s = load(rstd_block, boundary_check = [0], padding = zero).expand_dims(1);
            // Multiplying g by s first takes fewer operations per element: for c = x − μ and v = s·g·w, ∂L/∂x = v −
            // mean(v) − c · s² · mean(v·c).
            let centered = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>() - mu;
            let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let scaled = g * s;
            total_w += scaled * centered;
            total_b += g;
            let v = scaled * wt;
            let c2 = sum(v, axis = 1, keep_dims = true) * inv_d;
            let c1 = sum(v * centered, axis = 1, keep_dims = true) * (s * s * inv_d);
            let grad_x_block = grad_x.block([row, 0], [rows_tile, d_tile]);
            store(grad_x_block, (v - c2 - centered * c1).to::<T>(), boundary_check = [0, 1]);
        }
        store(partial_w_block, sum(total_w, axis = 0, keep_dims = true), boundary_check = [1]);
        store(partial_b_block, sum(total_b, axis = 0, keep_dims = true), boundary_check = [1]);
    } else {
        let row = program_id(0) * rows_tile;
        let mean_block = mean.block([row], [rows_tile]);
        let rstd_block = rstd.block([row], [rows_tile]);
        let mu = load(mean_block, boundary_check = [0], padding = zero).expand_dims(1);
        let s = load(rstd_block, boundary_check = [0], padding = zero).expand_dims(1);
        let mut x_block = x.block([row, 0], [rows_tile, d_tile]);
        let mut g_block = grad_y.block([row, 0], [rows_tile, d_tile]);
        let mut grad_x_block = grad_x.block([row, 0], [rows_tile, d_tile]);
        let (first_x, first_w, first_g) = (x_block, w_block, g_block);
        let mut total = zeros::<f32>([rows_tile, 1]);
        let mut dots = zeros::<f32>([rows_tile, 1]);
        for _ in range(0, d, d_tile) {
            let x_hat = (load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>() - mu) * s;
            let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            store(partial_w_block, sum(g * x_hat, axis = 0, keep_dims = true), boundary_check = [1]);
            store(partial_b_block, sum(g, axis = 0, keep_dims = true), boundary_check = [1]);
            let gw = g * load(w_block, boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
            total += sum(gw, axis = 1, keep_dims = true);
            dots += sum(gw * x_hat, axis = 1, keep_dims = true);
            x_block = x_block.advance([0, d_tile]);
            w_block = w_block.advance([d_tile]);
            g_block = g_block.advance([0, d_tile]);
            partial_w_block = partial_w_block.advance([0, d_tile]);
            partial_b_block = partial_b_block.advance([0, d_tile]);
        }
        let (c2, c1) = (total / d.to::<f32>(), dots / d.to::<f32>());
        x_block = first_x;
        w_block = first_w;
        g_block = first_g;
        for _ in range(0, d, d_tile) {
            let x_hat = (load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>() - mu) * s;
            let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let gw = g * load(w_block, boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
            store(grad_x_block, ((gw - c2 - x_hat * c1) * s).to::<T>(), boundary_check = [0, 1]);
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

/// y [rows, d], mean [rows] and rstd [rows] of x [rows, d], weights w [d], biases b [d] and `eps`.
///
/// # Errors
/// Shapes that do not match; tensors on another device; launch errors.
pub fn forward<T: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    w: Tensor<'_, T, 1>,
    b: Tensor<'_, T, 1>,
    mut y: TensorMut<'_, T, 2>,
    mut mean: TensorMut<'_, f32, 1>,
    mut rstd: TensorMut<'_, f32, 1>,
    eps: f32,
) -> Result<()> {
    let [rows, d] = x.shape();
    let tiles = tiles(rows, d);
    let mut kernel = LayerNormFwd {
        x: &x,
        w: &w,
        b: &b,
        y: &mut y,
        mean: &mut mean,
        rstd: &mut rstd,
        eps,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
    };
    if tiles.d_tile >= d { kernel.launch_tuned(device) } else { kernel.launch_with(device, &tiles.config(rows)) }
}

/// grad_x [rows, d], grad_w [d] and grad_b [d], given the gradient grad_y [rows, d] of the result and the mean [rows]
/// and rstd [rows] of [`forward`].
///
/// # Errors
/// As [`forward`]; also out of memory for the partial sums, twice f32 [programs, d].
pub fn backward<'g, T: FloatElement, G: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    w: Tensor<'_, T, 1>,
    mean: Tensor<'_, f32, 1>,
    rstd: Tensor<'_, f32, 1>,
    grad_y: Tensor<'_, T, 2>,
    mut grad_x: TensorMut<'_, T, 2>,
    grad_w: impl Into<Option<TensorMut<'g, G, 1>>>,
    grad_b: impl Into<Option<TensorMut<'g, G, 1>>>,
) -> Result<()> {
    const NAME: &str = "layer_norm_bwd";
    let [rows, d] = x.shape();
    let (grad_w, grad_b) = (grad_w.into(), grad_b.into());
    for (name, grad) in [("grad_w", &grad_w), ("grad_b", &grad_b)] {
        if let Some(grad) = grad {
            expect_shape(NAME, name, grad.shape(), [d])?;
        }
    }
    let whole_rows = d <= MAX_SINGLE_TILE_D;
    let tiles = RowTiles::new(rows, d, if whole_rows { MAX_SINGLE_TILE_D } else { WIDE_BACKWARD_TILE });
    let row_loop = RowLoop::new(device, rows, tiles.d_tile, 1);
    let programs = if whole_rows { row_loop.programs } else { tiles.programs(rows) };
    let mut partial_w = Buffer::<f32>::uninit(device, programs * d)?;
    let mut partial_b = Buffer::<f32>::uninit(device, programs * d)?;
    let mut kernel = LayerNormBwd {
        x: &x,
        w: &w,
        mean: &mean,
        rstd: &rstd,
        grad_y: &grad_y,
        grad_x: &mut grad_x,
        partial_grad_w: &mut partial_w.tensor_mut([programs, d])?,
        partial_grad_b: &mut partial_b.tensor_mut([programs, d])?,
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
    for (partial, grad) in [(&partial_w, grad_w), (&partial_b, grad_b)] {
        if let Some(grad) = grad {
            column_sum::forward(device, partial.tensor([programs, d])?, grad)?;
        }
    }
    Ok(())
}

/// The reference in f64, on dense row-major slices.
pub mod reference {
    fn moments(row: &[f64], eps: f64) -> (f64, f64) {
        let n = row.len() as f64;
        let mean = row.iter().sum::<f64>() / n;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
        (mean, 1.0 / (variance + eps).sqrt())
    }

    /// Results of the forward pass.
    pub struct Forward {
        /// [rows, d]
        pub y: Vec<f64>,
        /// [rows]
        pub mean: Vec<f64>,
        /// [rows]
        pub rstd: Vec<f64>,
    }

    /// The results for x [rows, d], w [d] and b [d].
    pub fn forward(x: &[f64], w: &[f64], b: &[f64], eps: f64) -> Forward {
        let mut out = Forward { y: Vec::with_capacity(x.len()), mean: Vec::new(), rstd: Vec::new() };
        for row in x.chunks_exact(w.len().max(1)) {
            let (mean, rstd) = moments(row, eps);
            out.y.extend((0..row.len()).map(|j| (row[j] - mean) * rstd * w[j] + b[j]));
            out.mean.push(mean);
            out.rstd.push(rstd);
        }
        out
    }

    /// Gradients of the inputs of [`forward`], in their shapes.
    pub struct Gradients {
        pub x: Vec<f64>,
        pub w: Vec<f64>,
        pub b: Vec<f64>,
    }

    /// The gradients for x [rows, d], w [d] and grad_y [rows, d].
    pub fn backward(x: &[f64], w: &[f64], grad_y: &[f64], eps: f64) -> Gradients {
        let d = w.len();
        let mut grad = Gradients { x: Vec::with_capacity(x.len()), w: vec![0.0; d], b: vec![0.0; d] };
        for (x, g) in x.chunks_exact(d.max(1)).zip(grad_y.chunks_exact(d.max(1))) {
            let (mean, rstd) = moments(x, eps);
            let x_hat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
            let c2 = (0..d).map(|j| g[j] * w[j]).sum::<f64>() / d as f64;
            let c1 = (0..d).map(|j| g[j] * w[j] * x_hat[j]).sum::<f64>() / d as f64;
            for j in 0..d {
                grad.x.push(rstd * (g[j] * w[j] - c2 - x_hat[j] * c1));
                grad.w[j] += g[j] * x_hat[j];
                grad.b[j] += g[j];
            }
        }
        grad
    }
}
