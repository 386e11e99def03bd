//! Product of matrices of 8-bit floats with a scale per row and column: the library's kernel.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, wave};
use tilewright::kernels::scaled_matmul::{self, Scales};
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::prelude::*;

// ANCHOR: kernel
/// c [m, n] = a [m, k] · wᵀ for w [n, k], each row of a and of w times its scale; tensor cores sum.
fn fp8_matmul(
    device: &Device,
    [a, w]: [Tensor<'_, F8E4M3, 2>; 2],
    [a_scale, w_scale]: [Tensor<'_, f32, 1>; 2],
    c: TensorMut<'_, bf16, 2>,
) -> Result<()> {
    scaled_matmul::multiply(device, a, w.transposed(0, 1), Scales::Rowwise(a_scale, w_scale), true, c)
}
// ANCHOR_END: kernel

fn case(device: &Device, [m, n, k]: [usize; 3], bench: bool) -> Outcome<Row> {
    let narrow = |x: &[f32]| x.iter().map(|x| F8E4M3::from_f32(*x)).collect::<Vec<_>>();
    let (a, w) = (narrow(&wave(m * k, 0.7)), narrow(&wave(n * k, 0.3)));
    let scales = |len, frequency| wave(len, frequency).iter().map(|x| 1.0 + 0.5 * x).collect::<Vec<f32>>();
    let (a_scale, w_scale) = (scales(m, 1.1), scales(n, 0.9));
    let (a_buffer, w_buffer) = (Buffer::from_slice(device, &a)?, Buffer::from_slice(device, &w)?);
    let (sa, sw) = (Buffer::from_slice(device, &a_scale)?, Buffer::from_slice(device, &w_scale)?);
    let mut c = Buffer::<bf16>::poisoned(device, m * n)?;
    let time = common::time(device, bench, || {
        let matrices = [Tensor::dense(a_buffer.view(), [m, k])?, Tensor::dense(w_buffer.view(), [n, k])?];
        let scales = [Tensor::dense(sa.view(), [m])?, Tensor::dense(sw.view(), [n])?];
        fp8_matmul(device, matrices, scales, TensorMut::dense(c.view_mut(), [m, n])?)
    })?;
    let wide = |x: F8E4M3| f64::from(x.to_f32());
    let want = |at: usize| {
        let (i, j) = (at / n, at % n);
        let sum = (0..k).map(|l| wide(a[i * k + l]) * wide(w[j * k + l])).sum::<f64>();
        sum * f64::from(a_scale[i]) * f64::from(w_scale[j])
    };
    // Sums have about 14 bits, c has 8.
    let error = check("c", &c.to_vec()?, 2000, 2e-2, want)?;
    let flop = (2 * m * n * k) as f64;
    Ok(Row { kernel: "fp8_matmul", case: format!("{m} × {n} × {k}"), work: Work::Flop(flop), error, time })
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    let shape = if bench { [8192, 8192, 8192] } else { [70, 48, 96] };
    Ok(vec![case(device, shape, bench)?])
}

fn main() -> Outcome {
    common::main(cases)
}
