//! The last norm, the head and the loss as one op: the largest tensors of a small model, logits and their gradient, are made
//! once each and not added to zeros.

use std::sync::{Mutex, PoisonError};

use candle_core::{Result, Tensor};

use super::block::linear_backward;
use super::{Config, NormWeights};
use crate::ops::linear::as_rows;
use crate::ops::loss;
use crate::ops::memory::{Fresh, for_float_type};
use crate::ops::product::product;
use crate::ops::tape::record2;
use crate::params::{Param, Use, grad_enabled};
use crate::profile::span;

/// The mean cross-entropy of head(norm(x)) for x [batch, length, width] and targets [batch · length].
pub(super) fn loss(config: &Config, x: &Tensor, targets: &Tensor, norm: &NormWeights, head: &Param) -> Result<Tensor> {
    let _span = span("head and loss");
    let uses: Vec<Use> = norm.params().chain([head]).filter_map(|param| param.begin_use()).collect();
    let (targets, norm, head, eps) = (targets.clone(), norm.clone(), head.clone(), config.eps);
    let anchor = head.anchor().as_tensor().clone();
    let rows = as_rows(x)?;
    for_float_type!(x.dtype(), "a loss", T => {
        let (normed, moments) = norm.fresh::<T>(&rows, eps)?;
        let logits = product(&normed, &head.compute(x.dtype())?.t()?)?;
        let (losses, lse) = loss::forward::<T>(&logits, &targets)?;
        let mean = losses.into_tensor(targets.elem_count()).mean_all()?;
        // Taken by backward: logits are the largest thing that a small model keeps.
        let saved = Mutex::new(grad_enabled().then_some((normed, moments, logits, lse)));
        record2("loss", [x, &anchor], Fresh::<f32>::copy_of(&mean)?, (), move |[x, _], _, grad| {
            let saved = saved.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some((normed, moments, logits, lse)) = saved else {
                return Err(candle_core::Error::Msg("backward ran twice through one loss: compute the loss again".into()));
            };
            let grad_logits = loss::backward::<T>(&logits, &targets, &lse, &grad.reshape(1)?, true)?;
            drop(logits);
            let grad_normed = linear_backward(&normed, &head, &grad_logits, &uses)?;
            drop((normed, grad_logits));
            let grad_x = norm.backward::<T>(&as_rows(x)?, &moments, &grad_normed, &uses)?;
            Ok([Some(grad_x.reshape(x.shape())?), None])
        })
    })
}
