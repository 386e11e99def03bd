//! Layer normalization of rows of any width, with Welford's statistics: mean and variance in one pass over the row.
//!
//! The sum of squares minus the square of the sum cancels where the mean is large; Welford's update and Chan's
//! combination of partial statistics do not. The backward pass is the library's, which reads mean and rstd.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::kernels::{self, layer_norm::reference};
use tilewright::prelude::*;

#[autotune(configs = [Config(tile = [1024, 2048, 4096], num_warps = [4, 8])], key = [n])]
// ANCHOR: kernel
/// y = (x − mean) · rstd · w + b for each row, and mean and rstd of the rows.
#[kernel(grid = rows)]
pub fn welford_layer_norm<T: Float>(
    x: Tensor<T, (rows, n)>,
    w: Tensor<T, (n,)>,
    b: Tensor<T, (n,)>,
    y: TensorMut<T, (rows, n)>,
    mean: TensorMut<f32, (rows,)>,
    rstd: TensorMut<f32, (rows,)>,
    eps: f32,
    #[constexpr] tile: usize,
) {
    let row = program_id(0);
    let (from, into) = (x.index([row]), y.index([row]));
    let mut means = zeros::<f32>([tile]);
    let mut squares = zeros::<f32>([tile]);
    let mut counts = zeros::<f32>([tile]);
    for first in range(0, n, tile) {
        let v = load(from.block([first], [tile]), boundary_check = [0]).to::<f32>();
        let inside = first + arange(0, tile) < n;
        counts += inside.to::<f32>();
        let difference = v - means;
        means += where_(inside, difference / counts, 0.0);
        squares += where_(inside, difference * (v - means), 0.0);
    }
    let (mu, square, count) = reduce((means, squares, counts), axis = 0, |(m1, s1, n1), (m2, s2, n2)| {
        let share = n2 / maximum(n1 + n2, 1.0);
        (m1 + (m2 - m1) * share, s1 + s2 + (m2 - m1) * (m2 - m1) * n1 * share, n1 + n2)
    });
    let rs = rsqrt(square / count + eps);
    store(mean.ptr() + row, mu);
    store(rstd.ptr() + row, rs);
    for first in range(0, n, tile) {
        let v = load(from.block([first], [tile]), boundary_check = [0]).to::<f32>();
        let scale = load(w.block([first], [tile]), boundary_check = [0]).to::<f32>();
        let shift = load(b.block([first], [tile]), boundary_check = [0]).to::<f32>();
        store(into.block([first], [tile]), ((v - mu) * rs * scale + shift).to::<T>(), boundary_check = [0]);
    }
}
// ANCHOR_END: kernel

fn case(device: &Device, [rows, n]: [usize; 2], bench: bool) -> Outcome<[Row; 2]> {
    let eps = 1e-5;
    // A mean that is large beside the deviation.
    let x: Vec<bf16> = wave(rows * n, 0.7).iter().map(|x| bf16::from_f32(8.0 + x)).collect();
    let [w, b, grad_y] = [(n, 0.3), (n, 0.9), (rows * n, 1.1)].map(|(len, f)| to(&wave(len, f), bf16::from_f32));
    let place = |x: &[bf16]| Buffer::from_slice(device, x);
    let (xd, wd, bd, gd) = (place(&x)?, place(&w)?, place(&b)?, place(&grad_y)?);
    let output = |len: usize| Buffer::<bf16>::poisoned(device, len);
    let (mut y, mut grad_x, mut grad_w, mut grad_b) = (output(rows * n)?, output(rows * n)?, output(n)?, output(n)?);
    let (mut mean, mut rstd) = (Buffer::<f32>::poisoned(device, rows)?, Buffer::<f32>::poisoned(device, rows)?);
    let forward = common::time(device, bench, || {
        WelfordLayerNorm {
            x: &xd.tensor([rows, n])?,
            w: &wd,
            b: &bd,
            y: &mut y.tensor_mut([rows, n])?,
            mean: &mut mean,
            rstd: &mut rstd,
            eps,
            tile: tuned(),
        }
        .launch_tuned(device)
    })?;
    let backward = common::time(device, bench, || {
        kernels::layer_norm::backward(
            device,
            kernels::Tensor::dense(xd.view(), [rows, n])?,
            kernels::Tensor::dense(wd.view(), [n])?,
            kernels::Tensor::dense(mean.view(), [rows])?,
            kernels::Tensor::dense(rstd.view(), [rows])?,
            kernels::Tensor::dense(gd.view(), [rows, n])?,
            kernels::TensorMut::dense(grad_x.view_mut(), [rows, n])?,
            kernels::TensorMut::dense(grad_w.view_mut(), [n])?,
            kernels::TensorMut::dense(grad_b.view_mut(), [n])?,
        )
    })?;
    // Some rows of large matrices: the library's tests compare all gradients.
    let compared = if bench { 64 } else { rows };
    let wide = |x: &[bf16]| x.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
    let (xs, ws, gs) = (wide(&x[..compared * n]), wide(&w), wide(&grad_y[..compared * n]));
    let want = reference::forward(&xs, &ws, &wide(&b), f64::from(eps));
    let error = check("y", &y.to_vec()?[..compared * n], usize::MAX, 1e-2, |i| want.y[i])?;
    check("mean", &mean.to_vec()?[..compared], usize::MAX, 1e-6, |i| want.mean[i])?;
    check("rstd", &rstd.to_vec()?[..compared], usize::MAX, 1e-5, |i| want.rstd[i])?;
    let gradients = reference::backward(&xs, &ws, &gs, f64::from(eps));
    let mut backward_error = check("grad_x", &grad_x.to_vec()?[..compared * n], usize::MAX, 2e-2, |i| gradients.x[i])?;
    if compared == rows {
        backward_error = backward_error.max(check("grad_w", &grad_w.to_vec()?, n, 2e-2, |i| gradients.w[i])?);
        backward_error = backward_error.max(check("grad_b", &grad_b.to_vec()?, n, 2e-2, |i| gradients.b[i])?);
    }
    let bytes = |matrices: usize| Work::Bytes((matrices * rows * n * 2) as f64);
    let row = |kernel, matrices, error, time| Row {
        kernel,
        case: format!("{rows} × {n}"),
        work: bytes(matrices),
        error,
        time,
    };
    Ok([row("welford_layer_norm", 2, error, forward), row("layer_norm_bwd", 3, backward_error, backward)])
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    let shape = if bench { [8192, 8192] } else { [9, 1300] };
    Ok(case(device, shape, bench)?.into())
}

fn main() -> Outcome {
    common::main(cases)
}
