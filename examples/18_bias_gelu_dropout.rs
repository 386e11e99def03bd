//! Bias, GELU and dropout of a feed-forward layer in one kernel, forward and backward.
//!
//! The backward pass saves neither the dropout mask nor the activation: it draws the same random numbers again and
//! computes GELU's derivative from x and the bias. Beyond 2³² elements the random numbers repeat.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::kernels::{self, column_sum};
use tilewright::prelude::*;

// ANCHOR: kernel
/// Φ(x), the distribution function of the normal distribution: GELU(x) = x · Φ(x).
#[device_fn]
fn normal_cdf(x: Tile<f32>) -> Tile<f32> {
    erf(x * 0.7071067811865476) * 0.5 + 0.5
}

/// y = dropout(GELU(x + bias)) with probability `p` of a zero; a program per tile of a row.
#[kernel(grid = (cdiv(n, tile), rows))]
pub fn bias_gelu_dropout_fwd<T: Float>(
    x: Tensor<T, (rows, n)>,
    bias: Tensor<T, (n,)>,
    y: TensorMut<T, (rows, n)>,
    p: f32,
    #[no_specialize] seed: i64,
    #[constexpr] tile: usize,
) {
    let (row, first) = (program_id(1), program_id(0) * tile);
    let at = row * n.to::<i32>() + first + arange(0, tile);
    let shift = load(bias.block([first], [tile]), boundary_check = [0]).to::<f32>();
    let v = load(x.index([row]).block([first], [tile]), boundary_check = [0]).to::<f32>() + shift;
    let kept = where_(rand(seed, at) >= p, v * normal_cdf(v) / (1.0 - p), 0.0);
    store(y.index([row]).block([first], [tile]), kept.to::<T>(), boundary_check = [0]);
}

/// grad_x = ∂L/∂x from grad_y = ∂L/∂y; the gradient of the bias is the sum of its rows.
#[kernel(grid = (cdiv(n, tile), rows))]
pub fn bias_gelu_dropout_bwd<T: Float>(
    x: Tensor<T, (rows, n)>,
    bias: Tensor<T, (n,)>,
    grad_y: Tensor<T, (rows, n)>,
    grad_x: TensorMut<T, (rows, n)>,
    p: f32,
    #[no_specialize] seed: i64,
    #[constexpr] tile: usize,
) {
    let (row, first) = (program_id(1), program_id(0) * tile);
    let at = row * n.to::<i32>() + first + arange(0, tile);
    let shift = load(bias.block([first], [tile]), boundary_check = [0]).to::<f32>();
    let v = load(x.index([row]).block([first], [tile]), boundary_check = [0]).to::<f32>() + shift;
    let g = load(grad_y.index([row]).block([first], [tile]), boundary_check = [0]).to::<f32>();
    let slope = normal_cdf(v) + v * exp(v * v * -0.5) * 0.3989422804014327;
    let grad = where_(rand(seed, at) >= p, g * slope / (1.0 - p), 0.0);
    store(grad_x.index([row]).block([first], [tile]), grad.to::<T>(), boundary_check = [0]);
}
// ANCHOR_END: kernel

fn case(device: &Device, [rows, n]: [usize; 2], bench: bool) -> Outcome<[Row; 2]> {
    let (p, seed, tile) = (0.1_f32, 1234, 1024);
    let [x, bias, grad_y]: [Vec<bf16>; 3] =
        [(rows * n, 0.7), (n, 0.3), (rows * n, 1.1)].map(|(len, f)| to(&wave(len, f), bf16::from_f32));
    let place = |x: &[bf16]| Buffer::from_slice(device, x);
    let (xd, bd, gd) = (place(&x)?, place(&bias)?, place(&grad_y)?);
    let output = |len: usize| Buffer::<bf16>::poisoned(device, len);
    let (mut y, mut grad_x, mut grad_bias) = (output(rows * n)?, output(rows * n)?, output(n)?);
    let forward = common::time(device, bench, || {
        BiasGeluDropoutFwd { x: &xd.tensor([rows, n])?, bias: &bd, y: &mut y.tensor_mut([rows, n])?, p, seed, tile }
            .launch(device)
    })?;
    let backward = common::time(device, bench, || {
        BiasGeluDropoutBwd {
            x: &xd.tensor([rows, n])?,
            bias: &bd,
            grad_y: &gd.tensor([rows, n])?,
            grad_x: &mut grad_x.tensor_mut([rows, n])?,
            p,
            seed,
            tile,
        }
        .launch(device)?;
        let columns = kernels::TensorMut::dense(grad_bias.view_mut(), [n])?;
        column_sum::forward(device, kernels::Tensor::dense(grad_x.view(), [rows, n])?, columns)
    })?;
    let (y, grad_x) = (y.to_vec()?, grad_x.to_vec()?);
    // An element is kept in both passes or in none. About a tenth of them is dropped.
    let dropped: Vec<bool> = y.iter().zip(&grad_x).map(|(y, g)| y.to_f64() == 0.0 && g.to_f64() == 0.0).collect();
    let share = dropped.iter().filter(|dropped| **dropped).count() as f64 / dropped.len() as f64;
    if (share - f64::from(p)).abs() > 0.02 {
        return Err(format!("{share} of the elements are zero, expected about {p}").into());
    }
    let keep = |at: usize| if dropped[at] { 0.0 } else { 1.0 / (1.0 - f64::from(p)) };
    let shifted = |at: usize| x[at].to_f64() + bias[at % n].to_f64();
    let density = |v: f64| (-0.5 * v * v).exp() / (2.0 * std::f64::consts::PI).sqrt();
    // Φ by Simpson's rule from 0.
    let cdf = |v: f64| {
        let h = v / 200.0;
        let ends =
            |i: usize| density(h * i as f64) + 4.0 * density(h * (i as f64 + 0.5)) + density(h * (i as f64 + 1.0));
        0.5 + (0..200).map(ends).sum::<f64>() * h / 6.0
    };
    let error = check("y", &y, 4000, 1e-2, |at| keep(at) * shifted(at) * cdf(shifted(at)))?;
    let slope = |at: usize| cdf(shifted(at)) + shifted(at) * density(shifted(at));
    let mut backward_error = check("grad_x", &grad_x, 4000, 1e-2, |at| keep(at) * grad_y[at].to_f64() * slope(at))?;
    // The sum of the gradients as they were stored.
    let column = |j: usize| (0..rows).map(|i| grad_x[i * n + j].to_f64()).sum::<f64>();
    backward_error = backward_error.max(check("grad_bias", &grad_bias.to_vec()?, 500, 1e-2, column)?);
    let row = |kernel, matrices: usize, error, time| Row {
        kernel,
        case: format!("{rows} × {n}"),
        work: Work::Bytes((matrices * rows * n * 2) as f64),
        error,
        time,
    };
    // The backward pass reads x and grad_y and writes grad_x, which the sum reads again.
    Ok([row("bias_gelu_dropout_fwd", 2, error, forward), row("bias_gelu_dropout_bwd", 4, backward_error, backward)])
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    let shape = if bench { [8192, 8192] } else { [13, 1100] };
    Ok(case(device, shape, bench)?.into())
}

fn main() -> Outcome {
    common::main(cases)
}
