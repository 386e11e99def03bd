//! Matmuls on a GPU: of bf16 and f16 on Hopper, and f32 as three tf32 matmuls (3xTF32), by Tilewright's kernel. cuBLAS
//! computes f32 and tf32, at which it is faster, and products of GPUs before Hopper, where the two have not been compared.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{CudaDevice, DType, Device, Result, Tensor as CandleTensor, WithDType};
use tilewright::codegen::target::{GpuArch, Target};
use tilewright::kernels::matmul::{self, Options};
use tilewright::kernels::matmul_swiglu;
use tilewright::kernels::{FloatElement, Tensor, TensorMut};
use tilewright::prelude::Precision;
use tilewright::{Device as KernelDevice, View, ViewMut};

use crate::cublas;
use crate::matmul::{GemmShape, reserved_sms};
use crate::memory::{Elem, OutputAlloc, Read, StridedColumns, kernel_device, kernel_error, split_columns, write};

static TF32X3: AtomicBool = AtomicBool::new(false);

/// Selects 3xTF32 for f32 matmuls on GPUs, for this process: about as accurate as f32, on tensor cores, which cuBLAS does
/// not offer on Hopper.
pub fn set_tf32x3(enabled: bool) {
    TF32X3.store(enabled, Ordering::Relaxed);
}

/// The matrix that is added to a product.
#[derive(Clone, Copy)]
pub enum Addend<'a, C: Elem> {
    /// None: the product overwrites the result.
    Zero,
    /// The previous content of the result.
    Itself,
    /// Another matrix, row-major as the result.
    Other(View<'a, C>),
}

/// The precision at which Tilewright's kernel multiplies T on this device: `None` where cuBLAS multiplies.
pub fn precision_of_kernel<T: Elem>(device: &KernelDevice) -> Option<Precision> {
    match <T as WithDType>::DTYPE {
        DType::F32 if TF32X3.load(Ordering::Relaxed) => Some(Precision::Tf32x3),
        DType::BF16 | DType::F16 if matches!(device.target(), Target::Nvptx(GpuArch::Sm90a)) => Some(Precision::Ieee),
        _ => None,
    }
}

/// Computes d [m, n] = a·b + addend, row-major, for a [m, k] and b [k, n] that are row-major or column-major.
///
/// Equal inputs give equal bits in every run, for the same number of reserved SMs.
///
/// # Errors
/// A matrix that is neither row-major nor column-major, one with 2³¹ rows or columns, an addend of another length, and
/// those of launches and of cuBLAS.
pub fn multiply<T: Elem + FloatElement, C: Elem + FloatElement>(
    cuda: &CudaDevice,
    a: Tensor<'_, T, 2>,
    b: Tensor<'_, T, 2>,
    addend: Addend<'_, C>,
    mut d: ViewMut<'_, C>,
    shape: GemmShape,
) -> Result<()> {
    let GemmShape { m, n, .. } = shape;
    let device = kernel_device(&Device::Cuda(cuda.clone()))?;
    let Some(precision) = precision_of_kernel::<T>(device) else {
        return cublas::multiply(cuda, &a, &b, addend, &mut d, shape);
    };
    let options = Options { precision, reserved_sms: reserved_sms(), ..Options::default() };
    let d = TensorMut::dense(d, [m, n]).map_err(kernel_error)?;
    let done = match addend {
        Addend::Zero => matmul::multiply(device, a, b, d, options),
        Addend::Itself => matmul::accumulate(device, a, b, d, options),
        Addend::Other(other) => {
            Tensor::dense(other, [m, n]).and_then(|other| matmul::multiply_add(device, a, b, other, d, options))
        }
    };
    done.map_err(kernel_error)
}

/// y [m, d] = silu(gate) · value for the halves of a·b [m, 2d], which is written to `products`, contiguous, in other memory
/// than a and b [k, 2d]; both are row-major or column-major.
///
/// # Errors
/// `products` of another layout or dtype; no memory for y; those of the launch.
pub fn multiply_swiglu<T: Elem + FloatElement>(
    a: &CandleTensor,
    b: &CandleTensor,
    products: &CandleTensor,
    [m, d]: [usize; 2],
) -> Result<OutputAlloc<T>> {
    let mut y = OutputAlloc::<T>::new(a.device(), m * d)?;
    let (a, b) = (Read::<T>::new(a)?, Read::<T>::new(b)?);
    let both = b.strided::<2>()?;
    let ([k, _], strides) = (both.shape(), both.strides());
    let half = |first: usize| {
        let begin = (first * strides[1] as usize).min(both.view().len());
        Tensor::strided(both.view().slice(begin..)?, [k, d], strides)
    };
    let operands = (a.strided::<2>()?, [half(0).map_err(kernel_error)?, half(d).map_err(kernel_error)?]);
    write::<T, ()>(products, |device, target| {
        let half = |first| StridedColumns { shape: [m, d], strides: [2 * d as i64, 1], columns: first..first + d };
        let halves = split_columns(device, target, [m, 2 * d], [half(0), half(d)])?;
        let (a, b) = operands;
        matmul_swiglu::multiply(device, a, b, Some(halves), y.dense([m, d])?, reserved_sms()).map_err(kernel_error)
    })?;
    Ok(y)
}
