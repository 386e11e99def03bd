//! SwiGLU and casts, by Tilewright kernels.

use candle_core::{D, DType, Result, Tensor};
use tilewright::kernels::{self, FloatElement, swiglu as kernel};
use tilewright::trace::span;

use crate::check::{bad_argument, expect_shape, same_kind};
use crate::for_float_type;
use crate::graph::{record1, record2};
use crate::memory::{Elem, OutputAlloc, Read, kernel_error, with_rows};

/// SwiGLU: y [.., d] = silu(a) · b, where a (gate) and b (value) are the halves of x [.., 2d], as one projection
/// computes them.
///
/// # Errors
/// An odd last dimension; an x of another dtype than f32, bf16 and f16.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    match shape.last_mut() {
        Some(last) if last.is_multiple_of(2) => *last /= 2,
        _ => {
            let message =
                format!("swiglu expects an even last dimension (gate and value), found the shape {:?}", x.dims());
            return Err(candle_core::Error::Msg(message));
        }
    }
    for_float_type!(x.dtype(), "swiglu", T => {
        let y = swiglu_forward::<T>(x)?;
        record1("swiglu", x, y, shape, |[x], _, grad| Ok([Some(swiglu_backward::<T>(x, grad)?)]))
    })
}

fn halves(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let x = crate::linear::as_rows(x)?;
    if !x.dim(1)?.is_multiple_of(2) {
        return Err(bad_argument("swiglu", "x", "an even number of columns", format!("the shape {:?}", x.dims())));
    }
    let d = x.dim(1)? / 2;
    Ok((x.narrow(1, 0, d)?, x.narrow(1, d, d)?))
}

/// silu(a) · b of the halves of x [.., 2d].
pub fn swiglu_forward<T: Elem + FloatElement>(x: &Tensor) -> Result<OutputAlloc<T>> {
    let _span = span("swiglu");
    let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count() / 2)?;
    let (a, b) = halves(x)?;
    let (a, b) = (Read::<T>::new(&a)?, Read::<T>::new(&b)?);
    let rows = a.strided()?;
    kernel::forward(a.device(), rows, b.strided()?, y.dense(rows.shape())?).map_err(kernel_error)?;
    Ok(y)
}

/// ∂L/∂x in the shape of x.
pub fn swiglu_backward<T: Elem + FloatElement>(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let shape = x.shape();
    let (a, b) = halves(x)?;
    let (a, b, grad) = (Read::<T>::new(&a)?, Read::<T>::new(&b)?, Read::<T>::new(grad)?);
    let a_rows = a.strided()?;
    let [rows, d] = a_rows.shape();
    if grad.rows()?.shape() != [rows, d] {
        let (expected, found) = (format!("{rows} rows of {d} elements"), format!("{:?}", grad.rows()?.shape()));
        return Err(bad_argument("swiglu", "the gradient", expected, found));
    }
    let [grad_a, grad_b] = grad_x.columns([rows, 2 * d], [0..d, d..2 * d])?;
    kernel::backward(a.device(), a_rows, b.strided()?, grad.rows()?, grad_a, grad_b).map_err(kernel_error)?;
    Ok(grad_x.into_tensor(shape))
}

/// SwiGLU of two tensors of the same shape: y = silu(a) · b.
///
/// # Errors
/// Shapes or types that differ.
pub fn swiglu_pair(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    same_kind("swiglu", a, "b", b)?;
    expect_shape("swiglu", "b", b, a.dims())?;
    let (a, b) = (&with_rows(a)?, &with_rows(b)?);
    for_float_type!(a.dtype(), "swiglu", T => {
        let mut y = OutputAlloc::<T>::new(a.device(), a.elem_count())?;
        {
            let (a, b) = (Read::<T>::new(a)?, Read::<T>::new(b)?);
            let rows = a.rows()?;
            kernel::forward(a.device(), rows, b.rows()?, y.dense(rows.shape())?).map_err(kernel_error)?;
        }
        record2("swiglu", [a, b], y, a.shape(), |[a, b], _, grad| {
            let shape = a.shape();
            let [mut grad_a, mut grad_b] = [OutputAlloc::<T>::new(a.device(), a.elem_count())?, OutputAlloc::new(a.device(), b.elem_count())?];
            let (a, b, grad) = (Read::<T>::new(a)?, Read::<T>::new(b)?, Read::<T>::new(grad)?);
            let rows = a.rows()?;
            let targets = (grad_a.dense(rows.shape())?, grad_b.dense(rows.shape())?);
            kernel::backward(a.device(), rows, b.rows()?, grad.rows()?, targets.0, targets.1).map_err(kernel_error)?;
            Ok([Some(grad_a.into_tensor(shape)), Some(grad_b.into_tensor(shape))])
        })
    })
}

/// Converts x to another float dtype, with round-to-nearest. The gradient is converted to the dtype of x.
///
/// # Errors
/// Another dtype than f32, bf16 and f16.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let x = &with_rows(x)?;
    for_float_type!(x.dtype(), "cast", T => for_float_type!(dtype, "cast", U => {
        let y = cast_to::<T, U>(x)?;
        record1("cast", x, y, x.shape(), |[x], _, grad| {
            Ok([Some(cast_to::<U, T>(grad)?.into_tensor(x.shape()))])
        })
    }))
}

pub fn cast_to<T: Elem + FloatElement, U: Elem + FloatElement>(x: &Tensor) -> Result<OutputAlloc<U>> {
    let mut y = OutputAlloc::<U>::new(x.device(), x.elem_count())?;
    let x = Read::<T>::new(x)?;
    let rows = x.rows()?;
    kernels::cast::forward(x.device(), rows, y.dense(rows.shape())?).map_err(kernel_error)?;
    Ok(y)
}

/// x · σ(x) in candle ops: the baseline for [`silu`](crate::silu()).
pub fn silu_unfused(x: &Tensor) -> Result<Tensor> {
    x.silu()
}

/// silu(a) · b of the halves of x in candle ops: the baseline for [`swiglu`].
pub fn swiglu_unfused(x: &Tensor) -> Result<Tensor> {
    let _span = span("swiglu");
    let d = x.dim(D::Minus1)? / 2;
    x.narrow(D::Minus1, 0, d)?.silu()? * x.narrow(D::Minus1, d, d)?
}
