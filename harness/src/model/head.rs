//! Final norm, head and loss with a hand-written backward pass, outside of the autograd graph: see [`super::stack`].
//! The largest tensors of a small model, the logits and their gradient, are allocated once each.

use candle_core::{Result, Tensor};
use tilewright::kernels::FloatElement;
use tilewright_candle::linear::as_rows;
use tilewright_candle::loss;
use tilewright_candle::matmul::multiply;
use tilewright_candle::memory::Elem;

use super::Transformer;
use super::block::{BackwardPass, NormBackward, NormStats, add_weight_gradient, input_gradient};
use crate::ops::residual_rms_norm::ResidualGrad;
use crate::params::ParamUse;
use crate::profile::span;

/// Tensors saved for backward.
pub(super) struct Saved {
    x: Tensor,
    targets: Tensor,
    stats: NormStats,
    normed: Tensor,
    logits: Tensor,
    lse: Tensor,
}

/// The mean cross-entropy, f32, of head(norm(x)) for a residual stream x [batch, length, d_model] and targets
/// [batch · length].
pub(super) fn forward<T: Elem + FloatElement>(
    model: &Transformer,
    x: &Tensor,
    targets: &Tensor,
) -> Result<(Tensor, Saved)> {
    let _span = span("head and loss");
    let (normed, stats) = model.norm.forward::<T>(x, model.config.eps)?;
    let normed = as_rows(&normed)?;
    let logits = multiply(&normed, &model.head.compute(normed.dtype())?.t()?)?;
    let (losses, lse) = loss::forward::<T>(&logits, targets)?;
    let mean = losses.into_tensor(targets.elem_count()).mean_all()?;
    Ok((mean, Saved { x: x.clone(), targets: targets.clone(), stats, normed, logits, lse }))
}

/// The gradient of the residual stream, given that of the loss, a scalar.
pub(super) fn backward<T: Elem + FloatElement>(
    model: &Transformer,
    saved: Saved,
    grad: &Tensor,
    (pass, head): (&BackwardPass<'_>, Option<&ParamUse>),
) -> Result<ResidualGrad> {
    let _span = span("head and loss");
    let Saved { x, targets, stats, normed, logits, lse } = saved;
    let grad_logits = loss::backward::<T>(&logits, &targets, &lse, &grad.reshape(1)?, true)?;
    drop(logits);
    let grad_normed = input_gradient(&model.head, &grad_logits)?.reshape(x.shape())?;
    add_weight_gradient(&normed, &model.head, &grad_logits, head)?;
    drop((normed, grad_logits));
    let (grad_x, _) = model.norm.backward::<T>(NormBackward {
        x: &x,
        eps: model.config.eps,
        stats: &stats,
        grad: &grad_normed,
        residual_grad: None,
        pass,
        index: 2 * model.blocks.len(),
        recompute: false,
    })?;
    Ok(grad_x)
}
