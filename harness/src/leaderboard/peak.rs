//! Measures the matmul peak of the device in the same run.

use half::bf16;
use tilewright::bench::do_bench;
use tilewright::kernels::matmul::{self, Options};
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::{Buffer, Device, Result};

use crate::cli::bench::data::{Number, normal};

/// The rate of a large matmul by our own kernel.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// m, n and k of the matmul.
    pub size: usize,
    pub dtype: &'static str,
    pub tflops: f64,
}

/// Measures the peak with a square matmul: bf16 of size 8192 on a GPU; f32 of size 512 on the CPU, where bf16 matmuls
/// are computed in f32.
pub fn matmul_peak(device: &Device) -> Result<Peak> {
    match device.is_cuda() {
        true => peak::<bf16>(device, 8192, [100.0, 400.0]),
        false => peak::<f32>(device, 512, [20.0, 100.0]),
    }
}

fn peak<T: Number>(device: &Device, n: usize, [warmup_ms, rep_ms]: [f64; 2]) -> Result<Peak> {
    let (a, b) = (normal::<T>(device, n * n, 1)?, normal::<T>(device, n * n, 2)?);
    let mut c = Buffer::<T>::poisoned(device, n * n)?;
    let timing = do_bench(device, warmup_ms, rep_ms, || {
        let (a, b) = (Tensor::dense(a.view(), [n, n])?, Tensor::dense(b.view(), [n, n])?);
        matmul::multiply(device, a, b, TensorMut::dense(c.view_mut(), [n, n])?, Options::default())
    })?;
    Ok(Peak { size: n, dtype: T::dtype().name(), tflops: timing.tflops(2.0 * (n as f64).powi(3)) })
}
