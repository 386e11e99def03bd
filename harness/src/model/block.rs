//! A block as one op, with a backward pass written out.
//!
//! Candle's walk adds every gradient to a zeroed one, keeps every intermediate until the end, and has a dozen nodes per block.
//! Here gradients of the residual stream are made once, what a block kept is freed as soon as backward has used it, and the
//! tape has one node per block. The ops are those of [`super::layers`], in the same order.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, Tensor};
use tilewright::kernels::FloatElement;

use super::{Block, NormWeights};
use crate::ops::attention::{Kept, packed_backward, packed_forward};
use crate::ops::elementwise::{swiglu_backward, swiglu_forward};
use crate::ops::linear::{as_rows, weight_gradient};
use crate::ops::memory::{Elem, Fresh, for_float_type};
use crate::ops::norm::{layer_backward, layer_forward, rms_backward, rms_forward};
use crate::ops::product::{fresh_product, fresh_product_plus, product};
use crate::ops::tape::record2;
use crate::params::{Param, Use, grad_enabled};
use crate::profile::span;

/// What a norm keeps of each row.
pub(super) enum Moments {
    Rms(Tensor),
    Layer([Tensor; 2]),
}

/// What backward reads, beside the block's input.
struct Saved {
    moments: Moments,
    normed: Tensor,
    qkv: Tensor,
    o: Tensor,
    kept: Kept,
    /// The stream between attention and feed-forward.
    middle: Tensor,
    middle_moments: Moments,
    middle_normed: Tensor,
    gate_up: Tensor,
    inner: Tensor,
}

/// The block's result. With `keep_input_only` backward computes the rest again.
pub(super) fn apply(block: &Arc<Block>, x: &Tensor, keep_input_only: bool) -> Result<Tensor> {
    let uses: Vec<Use> = block.params().filter_map(|param| param.begin_use()).collect();
    let anchor = block.qkv.anchor().as_tensor();
    for_float_type!(x.dtype(), "a block", T => {
        let (y, saved) = forward::<T>(block, &x.detach())?;
        let keep = grad_enabled() && !keep_input_only;
        // Taken by backward, so that the next blocks can use the memory.
        let saved = Mutex::new(keep.then_some(saved));
        let block = block.clone();
        record2("block", [x, anchor], y, x.shape(), move |[x, _], _, grad| {
            let saved = saved.lock().unwrap_or_else(PoisonError::into_inner).take();
            let x = x.detach();
            let saved = match saved {
                Some(saved) => saved,
                None => forward::<T>(&block, &x)?.1,
            };
            let grad_x = backward::<T>(&block, &x, saved, grad, &uses)?;
            Ok([Some(grad_x), None])
        })
    })
}

impl NormWeights {
    /// The norm off the tape.
    pub(super) fn fresh<T: Elem + FloatElement>(&self, x: &Tensor, eps: f64) -> Result<(Tensor, Moments)> {
        let w = self.weight.compute(x.dtype())?;
        match &self.bias {
            None => {
                let (y, rstd) = rms_forward::<T>(x, &w, eps)?;
                Ok((y.into_tensor(x.shape()), Moments::Rms(rstd)))
            }
            Some(bias) => {
                let (y, moments) = layer_forward::<T>(x, &w, &bias.compute(x.dtype())?, eps)?;
                Ok((y.into_tensor(x.shape()), Moments::Layer(moments)))
            }
        }
    }

    /// ∂L/∂x, given ∂L/∂y; the gradients of the weights are added.
    pub(super) fn backward<T: Elem + FloatElement>(
        &self,
        x: &Tensor,
        moments: &Moments,
        grad: &Tensor,
        uses: &[Use],
    ) -> Result<Tensor> {
        let w = self.weight.compute(x.dtype())?;
        match moments {
            Moments::Rms(rstd) => {
                let (grad_x, grad_w) = rms_backward::<T>(x, &w, rstd, grad)?;
                add(&self.weight, &grad_w, uses)?;
                Ok(grad_x)
            }
            Moments::Layer(moments) => {
                let (grad_x, [grad_w, grad_b]) = layer_backward::<T>(x, &w, moments, grad)?;
                add(&self.weight, &grad_w, uses)?;
                if let Some(bias) = &self.bias {
                    add(bias, &grad_b, uses)?;
                }
                Ok(grad_x)
            }
        }
    }
}

/// The use of this parameter, if it is trained.
fn use_of<'a>(param: &Param, uses: &'a [Use]) -> Option<&'a Use> {
    uses.iter().find(|using| using.param().id() == param.id())
}

fn add(param: &Param, gradient: &Tensor, uses: &[Use]) -> Result<()> {
    match use_of(param, uses) {
        None => Ok(()),
        Some(using) => {
            param.add_grad(gradient)?;
            using.finish()
        }
    }
}

/// x·Wᵀ off the tape.
fn linear<T: Elem>(x: &Tensor, weight: &Param) -> Result<Tensor> {
    let (rows, w) = (as_rows(x)?, weight.compute(x.dtype())?);
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = w.dim(0)?;
    }
    Ok(fresh_product::<T>(&rows, &w.t()?)?.into_tensor(shape))
}

/// base + x·Wᵀ off the tape.
fn linear_plus<T: Elem>(base: &Tensor, x: &Tensor, weight: &Param) -> Result<Fresh<T>> {
    let w = weight.compute(x.dtype())?;
    fresh_product_plus::<T>(base, &as_rows(x)?, &w.t()?)
}

/// ∂L/∂x of x·Wᵀ, given ∂L/∂y; W's gradient is added.
pub(super) fn linear_backward(x: &Tensor, weight: &Param, grad: &Tensor, uses: &[Use]) -> Result<Tensor> {
    let grad_rows = as_rows(grad)?;
    if let Some(using) = use_of(weight, uses) {
        weight_gradient(weight, &as_rows(x)?, &grad_rows)?;
        using.finish()?;
    }
    product(&grad_rows, &weight.compute(x.dtype())?)?.reshape(x.shape())
}

fn forward<T: Elem + FloatElement>(block: &Block, x: &Tensor) -> Result<(Fresh<T>, Saved)> {
    let _span = span("block");
    let (batch, length, width) = x.dims3()?;
    let eps = block.config.eps;
    let (normed, moments) = block.attention_norm.fresh::<T>(x, eps)?;
    let qkv = linear::<T>(&normed, &block.qkv)?;
    let (o, kept) = packed_forward::<T>(&qkv, block.config.head_columns(), &block.rope)?;
    let o = o.into_tensor((batch, length, width));
    let middle = linear_plus::<T>(x, &o, &block.out)?.into_tensor(x.shape());
    let (middle_normed, middle_moments) = block.mlp_norm.fresh::<T>(&middle, eps)?;
    let gate_up = linear::<T>(&middle_normed, &block.gate_up)?;
    let inner = swiglu_forward::<T>(&gate_up)?.into_tensor((batch, length, block.config.hidden));
    let y = linear_plus::<T>(&middle, &inner, &block.down)?;
    let saved = Saved { moments, normed, qkv, o, kept, middle, middle_moments, middle_normed, gate_up, inner };
    Ok((y, saved))
}

fn backward<T: Elem + FloatElement>(
    block: &Block,
    x: &Tensor,
    saved: Saved,
    grad: &Tensor,
    uses: &[Use],
) -> Result<Tensor> {
    let Saved { moments, normed, qkv, o, kept, middle, middle_moments, middle_normed, gate_up, inner } = saved;
    let grad_inner = linear_backward(&inner, &block.down, grad, uses)?;
    drop(inner);
    let grad_gate_up = swiglu_backward::<T>(&gate_up, &grad_inner)?;
    drop((gate_up, grad_inner));
    let grad_normed = linear_backward(&middle_normed, &block.gate_up, &grad_gate_up, uses)?;
    drop((middle_normed, grad_gate_up));
    let grad_middle = (grad + block.mlp_norm.backward::<T>(&middle, &middle_moments, &grad_normed, uses)?)?;
    drop((middle, middle_moments, grad_normed));

    let grad_o = linear_backward(&o, &block.out, &grad_middle, uses)?;
    let grad_qkv = packed_backward::<T>(&qkv, &o, &grad_o, &kept, block.config.head_columns(), &block.rope)?;
    drop((qkv, o, kept, grad_o));
    let grad_normed = linear_backward(&normed, &block.qkv, &grad_qkv, uses)?;
    drop((normed, grad_qkv));
    grad_middle + block.attention_norm.backward::<T>(x, &moments, &grad_normed, uses)?
}
