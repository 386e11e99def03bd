//! Linear layers y = x·Wᵀ, whose weight gradient accumulates directly into the flat gradient.

use candle_core::{Result, Tensor};

use super::graph::record2;
use super::matmul::{matmul, matmul_alloc, matmul_into};
use super::memory::for_float_type;
use crate::params::Param;
use crate::profile::span;

/// Returns y [.., n] = x·Wᵀ for x [.., k] of any float dtype and a weight W [n, k], which is used in the dtype of x.
///
/// Backward computes the weight gradient (∂L/∂y)ᵀ·x in f32, accumulates it into the flat gradient, and finishes the use
/// of the weight.
///
/// # Errors
/// A weight whose number of columns is not the last dimension of x.
pub fn linear(x: &Tensor, weight: &Param) -> Result<Tensor> {
    let _span = span("linear");
    let (rows, shape) = rows_and_shape(x, weight)?;
    let w = weight.compute(x.dtype())?;
    let param_use = weight.begin_use();
    for_float_type!(x.dtype(), "a linear layer", T => {
        let y = matmul_alloc::<T>(&rows, &w.t()?)?;
        let backward = move |[x, _]: [&Tensor; 2], _: &Tensor, grad: &Tensor| {
            let (x_rows, grad_rows) = (as_rows(x)?, as_rows(grad)?);
            if let Some(param_use) = &param_use {
                weight_gradient(param_use.param(), &x_rows, &grad_rows)?;
                param_use.finish()?;
            }
            let grad_x = if x.track_op() { Some(matmul(&grad_rows, &w)?.reshape(x.shape())?) } else { None };
            Ok([grad_x, None])
        };
        if weight.requires_grad() {
            record2("linear", [x, weight.anchor()], y, shape, backward)
        } else {
            record2("linear", [x, &x.detach()], y, shape, backward)
        }
    })
}

/// Accumulates gradᵀ·x into the gradient of W, for x [rows, k] and grad [rows, n].
pub(crate) fn weight_gradient(weight: &Param, x: &Tensor, grad: &Tensor) -> Result<()> {
    let (target, accumulate) = weight.grad_to_write()?;
    matmul_into(&target, &grad.t()?, x, accumulate)
}

/// Flattens all dimensions but the last.
pub(crate) fn as_rows(x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    match x.rank() {
        2 => Ok(x),
        0 => Err(candle_core::Error::Msg("expected a tensor with at least one dimension, found a scalar".into())),
        rank => {
            let d = x.dims()[rank - 1];
            x.reshape((x.elem_count() / d.max(1), d))
        }
    }
}

fn rows_and_shape(x: &Tensor, weight: &Param) -> Result<(Tensor, Vec<usize>)> {
    let [n, k] = weight.shape() else {
        let message =
            format!("expected a matrix as the weight of a linear layer: `{}` is {:?}", weight.name(), weight.shape());
        return Err(candle_core::Error::Msg(message));
    };
    let mut shape = x.dims().to_vec();
    match shape.last_mut() {
        Some(last) if *last == *k => *last = *n,
        _ => {
            let message = format!(
                "`{}` {:?} expects rows of {k} elements: found a tensor of shape {:?}",
                weight.name(),
                weight.shape(),
                x.dims()
            );
            return Err(candle_core::Error::Msg(message));
        }
    }
    Ok((as_rows(x)?, shape))
}
