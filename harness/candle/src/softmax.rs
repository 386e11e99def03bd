//! Softmax over the last dimension.

use candle_core::{Result, Tensor};
use tilewright::kernels::softmax as kernel;
use tilewright::trace::span;

use crate::check::bad_argument;
use crate::for_float_type;
use crate::graph::record1;
use crate::memory::{OutputAlloc, Read, kernel_error, with_rows};

/// y = exp(x) / Σ exp(x) over the last dimension of x. The arithmetic is f32.
///
/// # Errors
/// A scalar, or an x of another dtype than f32, bf16 and f16.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let _span = span("softmax");
    if x.rank() == 0 {
        return Err(bad_argument("softmax", "x", "a tensor with at least one dimension", "a scalar"));
    }
    let x = &with_rows(x)?;
    for_float_type!(x.dtype(), "softmax", T => {
        let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
        let source = Read::<T>::new(x)?;
        let rows = source.rows()?;
        kernel::forward(source.device(), rows, y.dense(rows.shape())?).map_err(kernel_error)?;
        drop(source);
        record1("softmax", x, y, x.shape(), |[x], y, grad| {
            let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
            let (y, grad) = (Read::<T>::new(y)?, Read::<T>::new(grad)?);
            let rows = y.rows()?;
            kernel::backward(y.device(), rows, grad.rows()?, grad_x.dense(rows.shape())?).map_err(kernel_error)?;
            Ok([Some(grad_x.into_tensor(x.shape()))])
        })
    })
}
