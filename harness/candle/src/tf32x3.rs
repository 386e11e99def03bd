//! 3xTF32 matmuls: f32 matmuls as three tf32 matmuls, by a Tilewright kernel. About as accurate as f32, on tensor
//! cores, which cuBLAS does not offer on Hopper.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{CudaDevice, Device, Result};
use tilewright::kernels::matmul::{self, Options};
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::prelude::Precision;
use tilewright::{View, ViewMut};

use crate::cublas::Addend;
use crate::memory::{Elem, kernel_device, kernel_error};

static ENABLED: AtomicBool = AtomicBool::new(false);

/// Selects 3xTF32 for f32 matmuls on GPUs, for this process.
pub fn set_tf32x3(enabled: bool) {
    ENABLED.store(enabled, Ordering::Relaxed);
}

/// Whether [`set_tf32x3`] selected 3xTF32.
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// As [`crate::cublas::multiply`], for T and C = f32.
///
/// # Errors
/// Those of the launch.
pub fn multiply<T: Elem, C: Elem>(
    device: &CudaDevice,
    a: &Tensor<'_, T, 2>,
    b: &Tensor<'_, T, 2>,
    base: Addend<'_, C>,
    d: &mut ViewMut<'_, C>,
    shape: [usize; 2],
) -> Result<()> {
    let device = kernel_device(&Device::Cuda(device.clone()))?;
    let (a, b) = (as_f32(a).map_err(kernel_error)?, as_f32(b).map_err(kernel_error)?);
    // SAFETY: C is f32, and `d` is borrowed exclusively.
    let d = unsafe { ViewMut::<f32>::from_address(device, d.address(), d.len()) };
    let d = TensorMut::dense(d, shape).map_err(kernel_error)?;
    let options = Options { precision: Precision::Tf32x3, ..Options::default() };
    let done = match base {
        Addend::Zero => matmul::multiply(device, a, b, d, options),
        Addend::InPlace => matmul::accumulate(device, a, b, d, options),
        Addend::Other(other) => {
            // SAFETY: C is f32, and `other` is borrowed until the launch is queued; later uses of its memory are
            // ordered by the stream.
            let other = unsafe { View::<f32>::from_address(device, other.address(), other.len()) };
            Tensor::dense(other, shape).and_then(|other| matmul::multiply_add(device, a, b, other, d, options))
        }
    };
    done.map_err(kernel_error)
}

/// Casts a matrix whose element type T is f32.
fn as_f32<'a, T: Elem>(x: &Tensor<'a, T, 2>) -> tilewright::Result<Tensor<'a, f32, 2>> {
    let view = x.view();
    // SAFETY: T is f32, and the result borrows the memory as long as `x` does.
    let same = unsafe { View::<f32>::from_address(view.device(), view.address(), view.len()) };
    Tensor::strided(same, x.shape(), x.strides())
}
