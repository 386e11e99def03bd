//! Layer normalization, forward and backward.
//!
//! y = x̂ · w + b with x̂ = (x − mean) · rstd, row by row (Ba, Kiros and Hinton, 2016). The gradients of w and b are
//! sums over all rows. With atomic additions they would depend on the order in which programs run; here each program
//! sums its own rows in registers and writes one row of partial sums, which a second kernel reduces.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

/// y, and the mean and rstd of each row, which the backward pass reads. One program per row; `tile` ≥ n.
#[kernel]
pub fn layer_norm_fwd(
    x: In<f32>,
    w: In<f32>,
    b: In<f32>,
    y: Out<f32>,
    mean: Out<f32>,
    rstd: Out<f32>,
    stride: i64,
    n: i32,
    eps: f32,
    #[constexpr] tile: usize,
) {
    // A launch with wider rows is refused.
    assume(n <= tile);
    let row = program_id(0);
    let col = arange(0, tile);
    let mask = col < n;
    let v = load(x + row * stride + col, mask = mask);
    let mu = sum(v) / n.to::<f32>();
    // Beyond the end of the row v is 0, but v − mu is not: mask it.
    let centered = where_(mask, v - mu, 0.0);
    let s = rsqrt(sum(centered * centered) / n.to::<f32>() + eps);
    store(mean + row, mu);
    store(rstd + row, s);
    let yt = centered * s * load(w + col, mask = mask) + load(b + col, mask = mask);
    store(y + row * stride + col, yt, mask = mask);
}

/// With g = ∂L/∂y: ∂L/∂x = rstd · (g·w − meanⱼ(g·w) − x̂ · meanⱼ(g·w·x̂)), and this program's partial sums of
/// ∂L/∂w = Σᵣ g·x̂ and ∂L/∂b = Σᵣ g, as row `program_id` of `partial_w` and `partial_b`.
#[kernel]
pub fn layer_norm_bwd(
    x: In<f32>,
    w: In<f32>,
    mean: In<f32>,
    rstd: In<f32>,
    grad_y: In<f32>,
    grad_x: Out<f32>,
    partial_w: Out<f32>,
    partial_b: Out<f32>,
    stride: i64,
    rows: i32,
    n: i32,
    #[constexpr] tile: usize,
) {
    assume(n <= tile);
    let col = arange(0, tile);
    let mask = col < n;
    let wt = load(w + col, mask = mask);
    let count = n.to::<f32>();
    // Variables that a loop assigns are loop-carried values: these stay in registers.
    let mut sum_w = zeros::<f32>([tile]);
    let mut sum_b = zeros::<f32>([tile]);
    for row in range(program_id(0), rows, num_programs(0)) {
        let at = row * stride + col;
        let g = load(grad_y + at, mask = mask);
        let s = load(rstd + row);
        let x_hat = where_(mask, (load(x + at, mask = mask) - load(mean + row)) * s, 0.0);
        let gw = g * wt;
        let grad = s * (gw - sum(gw) / count - x_hat * (sum(gw * x_hat) / count));
        store(grad_x + at, grad, mask = mask);
        sum_w += g * x_hat;
        sum_b += g;
    }
    let at = program_id(0) * stride + col;
    store(partial_w + at, sum_w, mask = mask);
    store(partial_b + at, sum_b, mask = mask);
}

/// out[j] = Σᵣ partial[r, j]. One program per `col_tile` columns.
#[kernel]
pub fn column_sum(
    partial: In<f32>,
    out: Out<f32>,
    stride: i64,
    rows: i32,
    n: i32,
    #[constexpr] row_tile: usize,
    #[constexpr] col_tile: usize,
) {
    let col = program_id(0) * col_tile + arange(0, col_tile);
    let mut acc = zeros::<f32>([row_tile, col_tile]);
    for first in range(0, rows, row_tile) {
        // [row_tile, 1] and [1, col_tile] broadcast to [row_tile, col_tile]; the dimensions of 1 are explicit.
        let row = (first + arange(0, row_tile)).expand_dims(1);
        let mask = row < rows && col.expand_dims(0) < n;
        acc += load(partial + row * stride + col.expand_dims(0), mask = mask);
    }
    store(out + col, sum(acc, axis = 0), mask = col < n);
}

/// Runs both passes and compares them with f64.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (rows, n, eps) = (301, 700, 1e-5);
    let wave = |len: usize, f: f32| -> Vec<f32> { (0..len).map(|i| (i as f32 * f).sin()).collect() };
    let (x, w, b, grad_y) = (wave(rows * n, 0.7), wave(n, 0.3), wave(n, 0.9), wave(rows * n, 1.1));
    let want = reference(&x, &w, &b, &grad_y, f64::from(eps));

    let place = |v: &[f32]| Buffer::from_slice(device, v);
    let (x, w, b, grad_y) = (place(&x)?, place(&w)?, place(&b)?, place(&grad_y)?);
    let output = |len: usize| Buffer::<f32>::poisoned(device, len);
    let (mut y, mut mean, mut rstd) = (output(rows * n)?, output(rows)?, output(rows)?);
    let (count, stride, tile) = (n as i32, n as i64, n.next_power_of_two());
    #[rustfmt::skip]
    let mut forward = LayerNormFwd {
        x: &x, w: &w, b: &b, y: &mut y, mean: &mut mean, rstd: &mut rstd, stride, n: count, eps, tile,
    };
    forward.launch(device, rows)?;
    let time = do_bench(device, 10.0, 50.0, || forward.launch(device, rows))?;
    let error = check("y", &y.to_vec()?, &want[0])?;
    println!("layer_norm_fwd    {rows} × {n:<22} error {error:<7.1e} {:9.3} ms {:17} {device}", time.median, "");

    let programs = rows.min(2 * device.info().compute_units as usize);
    let (mut grad_x, mut grad_w, mut grad_b) = (output(rows * n)?, output(n)?, output(n)?);
    let (mut partial_w, mut partial_b) = (output(programs * n)?, output(programs * n)?);
    let mut backward = || -> Result<()> {
        #[rustfmt::skip]
        LayerNormBwd {
            x: &x, w: &w, mean: &mean, rstd: &rstd, grad_y: &grad_y, grad_x: &mut grad_x, partial_w: &mut partial_w,
            partial_b: &mut partial_b, stride, rows: rows as i32, n: count, tile,
        }
        .launch(device, programs)?;
        // Launches on one device run in order, so this reads what the first kernel wrote.
        let (rows, row_tile, col_tile) = (programs as i32, 16, 64);
        for (partial, out) in [(&partial_w, &mut grad_w), (&partial_b, &mut grad_b)] {
            ColumnSum { partial, out, stride, rows, n: count, row_tile, col_tile }
                .launch(device, n.div_ceil(col_tile))?;
        }
        Ok(())
    };
    backward()?;
    let time = do_bench(device, 10.0, 50.0, &mut backward)?;
    let mut error = check("grad_x", &grad_x.to_vec()?, &want[1])?;
    error = error.max(check("grad_w", &grad_w.to_vec()?, &want[2])?);
    error = error.max(check("grad_b", &grad_b.to_vec()?, &want[3])?);
    println!("layer_norm_bwd    {rows} × {n:<22} error {error:<7.1e} {:9.3} ms {:17} {device}", time.median, "");
    Ok(())
}

/// y, grad_x, grad_w and grad_b in f64, by the formulas above.
fn reference(x: &[f32], w: &[f32], b: &[f32], grad_y: &[f32], eps: f64) -> [Vec<f64>; 4] {
    let n = w.len();
    let (mut y, mut grad_x, mut grad_w, mut grad_b) = (vec![], vec![], vec![0.0; n], vec![0.0; n]);
    for (row, g) in x.chunks(n).zip(grad_y.chunks(n)) {
        let average = |f: &dyn Fn(usize) -> f64| (0..n).map(f).sum::<f64>() / n as f64;
        let mean = average(&|j| f64::from(row[j]));
        let rstd = 1.0 / (average(&|j| (f64::from(row[j]) - mean).powi(2)) + eps).sqrt();
        let x_hat = |j: usize| (f64::from(row[j]) - mean) * rstd;
        let gw = |j: usize| f64::from(g[j]) * f64::from(w[j]);
        let (mean_gw, mean_gwx) = (average(&gw), average(&|j| gw(j) * x_hat(j)));
        for j in 0..n {
            y.push(x_hat(j) * f64::from(w[j]) + f64::from(b[j]));
            grad_x.push(rstd * (gw(j) - mean_gw - x_hat(j) * mean_gwx));
            grad_w[j] += f64::from(g[j]) * x_hat(j);
            grad_b[j] += f64::from(g[j]);
        }
    }
    [y, grad_x, grad_w, grad_b]
}

/// Fails unless all elements are correct to 1e-4; returns the largest error.
fn check(what: &str, got: &[f32], want: &[f64]) -> Result<f64, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        // Also true for NaN.
        if !(error <= 1e-4) {
            return Err(format!("{what}[{i}] is {got}, expected {want}"));
        }
        worst = error.max(worst);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
