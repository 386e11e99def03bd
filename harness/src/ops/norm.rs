//! RMSNorm and LayerNorm over the last dimension, by Tilewright kernels.

use candle_core::{Result, Tensor};
use tilewright::kernels::{FloatElement, layer_norm as layer, rms_norm as rms};

use super::graph::record2;
use super::memory::{Elem, OutputAlloc, Read, for_float_type, kernel_error};
use crate::params::Param;
use crate::profile::span;

/// RMSNorm: y = x / √(mean(x²) + ε) · w over the last dimension of x, for a weight w [d].
///
/// # Errors
/// A weight of another length, or an x that is neither contiguous nor a matrix.
pub fn rms_norm(x: &Tensor, weight: &Param, eps: f64) -> Result<Tensor> {
    let w = weight.compute(x.dtype())?;
    let param_use = weight.begin_use();
    for_float_type!(x.dtype(), "rms_norm", T => {
        let (y, rstd) = rms_forward::<T>(x, &w, eps)?;
        record2("rms_norm", [x, weight.anchor()], y, x.shape(), move |[x, _], _, grad| {
            let (grad_x, grad_w) = rms_backward::<T>(x, &w, &rstd, grad)?;
            if let Some(param_use) = &param_use {
                param_use.param().add_grad(&grad_w)?;
                param_use.finish()?;
            }
            Ok([Some(grad_x), None])
        })
    })
}

/// Returns (y, rstd [rows]) for x and w.
pub(crate) fn rms_forward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    eps: f64,
) -> Result<(OutputAlloc<T>, Tensor)> {
    let _span = span("rms_norm");
    let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let (x, w) = (Read::<T>::new(x)?, Read::<T>::new(w)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let mut rstd = OutputAlloc::<f32>::new(x.candle_device(), rows)?;
    rms::forward(x.device(), x_rows, w.strided()?, y.dense([rows, d])?, rstd.dense([rows])?, eps as f32)
        .map_err(kernel_error)?;
    Ok((y, rstd.into_tensor(rows)))
}

/// Returns (∂L/∂x in the shape of x, ∂L/∂w [d] in f32), given the rstd of [`rms_forward`].
pub(crate) fn rms_backward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    rstd: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let shape = x.shape();
    let (x, w, rstd, grad) = (Read::<T>::new(x)?, Read::<T>::new(w)?, Read::<f32>::new(rstd)?, Read::<T>::new(grad)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let mut grad_w = OutputAlloc::<f32>::new(x.candle_device(), d)?;
    rms::backward(
        x.device(),
        x_rows,
        w.strided()?,
        rstd.strided()?,
        grad.rows()?,
        grad_x.dense([rows, d])?,
        grad_w.dense([d])?,
    )
    .map_err(kernel_error)?;
    Ok((grad_x.into_tensor(shape), grad_w.into_tensor(d)))
}

/// LayerNorm: y = (x − mean(x)) / √(var(x) + ε) · w + b over the last dimension of x, for w and b [d].
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm(x: &Tensor, weight: &Param, bias: &Param, eps: f64) -> Result<Tensor> {
    let (w, b) = (weight.compute(x.dtype())?, bias.compute(x.dtype())?);
    let uses = [weight.begin_use(), bias.begin_use()];
    for_float_type!(x.dtype(), "layer_norm", T => {
        let (y, stats) = layer_forward::<T>(x, &w, &b, eps)?;
        record2("layer_norm", [x, weight.anchor()], y, x.shape(), move |[x, _], _, grad| {
            let (grad_x, gradients) = layer_backward::<T>(x, &w, &stats, grad)?;
            for (param_use, gradient) in uses.iter().zip(&gradients) {
                if let Some(param_use) = param_use {
                    param_use.param().add_grad(gradient)?;
                    param_use.finish()?;
                }
            }
            Ok([Some(grad_x), None])
        })
    })
}

/// Returns (y, [mean, rstd], both [rows]) for x, w and b.
pub(crate) fn layer_forward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    b: &Tensor,
    eps: f64,
) -> Result<(OutputAlloc<T>, [Tensor; 2])> {
    let _span = span("layer_norm");
    let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let (x, w, b) = (Read::<T>::new(x)?, Read::<T>::new(w)?, Read::<T>::new(b)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let [mut mean, mut rstd] =
        [OutputAlloc::<f32>::new(x.candle_device(), rows)?, OutputAlloc::new(x.candle_device(), rows)?];
    layer::forward(
        x.device(),
        x_rows,
        w.strided()?,
        b.strided()?,
        y.dense([rows, d])?,
        mean.dense([rows])?,
        rstd.dense([rows])?,
        eps as f32,
    )
    .map_err(kernel_error)?;
    Ok((y, [mean.into_tensor(rows), rstd.into_tensor(rows)]))
}

/// Returns (∂L/∂x in the shape of x, [∂L/∂w, ∂L/∂b], both [d] in f32), given the mean and rstd of [`layer_forward`].
pub(crate) fn layer_backward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    [mean, rstd]: &[Tensor; 2],
    grad: &Tensor,
) -> Result<(Tensor, [Tensor; 2])> {
    let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let shape = x.shape();
    let (x, w, grad) = (Read::<T>::new(x)?, Read::<T>::new(w)?, Read::<T>::new(grad)?);
    let (mean, rstd) = (Read::<f32>::new(mean)?, Read::<f32>::new(rstd)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let [mut grad_w, mut grad_b] =
        [OutputAlloc::<f32>::new(x.candle_device(), d)?, OutputAlloc::new(x.candle_device(), d)?];
    layer::backward(
        x.device(),
        x_rows,
        w.strided()?,
        mean.strided()?,
        rstd.strided()?,
        grad.rows()?,
        grad_x.dense([rows, d])?,
        grad_w.dense([d])?,
        grad_b.dense([d])?,
    )
    .map_err(kernel_error)?;
    Ok((grad_x.into_tensor(shape), [grad_w.into_tensor(d), grad_b.into_tensor(d)]))
}
