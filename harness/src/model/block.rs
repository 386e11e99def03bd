//! A transformer block with a hand-written backward pass, outside of the autograd graph: see [`super::stack`].
//!
//! The backward kernel of an RMSNorm also adds the gradient of the residual stream. Backward frees each saved tensor
//! after its last use. The ops and their order are those of [`super::layers`]; matmuls with a residual accumulate into
//! the residual stream in f32.

use candle_core::{Result, Tensor};
use tilewright::kernels::FloatElement;
use tilewright_candle::Weight;
use tilewright_candle::attention::{PackedSaved, packed_backward, packed_forward};
use tilewright_candle::elementwise::cast_to;
use tilewright_candle::linear::as_rows;
use tilewright_candle::matmul::{matmul_add, matmul_into, matmul_swiglu, multiply};
use tilewright_candle::memory::{Elem, OutputAlloc};
use tilewright_candle::norm::{layer_backward, layer_forward};

use super::{Block, NormWeights};
use crate::ops::residual_rms_norm::{self, ResidualGrad};
use crate::ops::swiglu_recompute::swiglu_backward_recompute;
use crate::params::{Param, ParamUse, SavedActivation};
use crate::profile::span;

/// Row statistics that a norm saves.
pub(super) enum NormStats {
    Rms(Tensor),
    Layer([Tensor; 2]),
}

/// Tensors saved for backward. The outputs of the norms and of SwiGLU are recomputed: by the kernel that computes the
/// gradient, or for a LayerNorm by its forward kernel.
pub(super) struct Saved {
    x: Tensor,
    stats: NormStats,
    qkv: SavedActivation,
    o: Tensor,
    attention: PackedSaved,
    /// The residual stream between attention and feed-forward.
    middle: Tensor,
    mid_stats: NormStats,
    gate_up: SavedActivation,
}

/// State of a backward pass that all blocks share.
pub(super) struct BackwardPass<'a> {
    /// Uses of the parameters of all blocks and of the last norm.
    pub uses: &'a [ParamUse],
    /// Partial sums of the gradients of the RMSNorm weights: f32 [norms, sums, d_model].
    pub norm_partials: Option<Tensor>,
}

impl BackwardPass<'_> {
    /// The use of this parameter, if it is trained.
    pub(super) fn use_of(&self, param: &Param) -> Option<&ParamUse> {
        self.uses.iter().find(|param_use| param_use.param().id() == param.id())
    }

    fn add(&self, param: &Param, gradient: &Tensor) -> Result<()> {
        match self.use_of(param) {
            None => Ok(()),
            Some(param_use) => {
                param.add_grad(gradient)?;
                param_use.finish()
            }
        }
    }
}

/// Arguments of [`NormWeights::backward`].
pub(super) struct NormBackward<'a> {
    /// The residual stream before the norm.
    pub x: &'a Tensor,
    pub eps: f64,
    pub stats: &'a NormStats,
    /// Gradient of the output of the norm.
    pub grad: &'a Tensor,
    /// Gradient of the residual stream after the branch of the norm.
    pub residual_grad: Option<&'a Tensor>,
    pub pass: &'a BackwardPass<'a>,
    /// Row of [`BackwardPass::norm_partials`].
    pub index: usize,
    /// Whether to recompute the output of the norm.
    pub recompute: bool,
}

impl NormWeights {
    /// Returns the norm of the f32 residual stream x, in the compute dtype, and the row statistics.
    pub(super) fn forward<T: Elem + FloatElement>(&self, x: &Tensor, eps: f64) -> Result<(Tensor, NormStats)> {
        let _span = span("norm");
        let w = self.weight.value()?;
        match &self.bias {
            None => {
                let (y, rstd) = residual_rms_norm::forward::<T>(x, &w, eps)?;
                Ok((y, NormStats::Rms(rstd)))
            }
            Some(bias) => {
                let (y, stats) = layer_forward::<f32>(x, &w, &bias.value()?, eps)?;
                Ok((to_compute_dtype::<T>(&y.into_tensor(x.shape()))?, NormStats::Layer(stats)))
            }
        }
    }

    /// Returns the gradient of the residual stream before the norm, and, if `recompute`, the recomputed output of the
    /// norm. Accumulates the gradients of the weights, except those of an RMSNorm, whose partial sums become row
    /// `index` of [`BackwardPass::norm_partials`].
    pub(super) fn backward<T: Elem + FloatElement>(
        &self,
        arguments: NormBackward<'_>,
    ) -> Result<(ResidualGrad, Option<Tensor>)> {
        let _span = span("norm");
        let NormBackward { x, eps, stats, grad, residual_grad, pass, index, recompute } = arguments;
        let w = self.weight.value()?;
        match (stats, &pass.norm_partials) {
            (NormStats::Rms(rstd), Some(partials)) => {
                let (w, grad_y) = (&w, grad);
                let arguments =
                    residual_rms_norm::Backward { x, w, rstd, grad_y, residual_grad, partials, index, recompute };
                residual_rms_norm::backward::<T>(arguments)
            }
            (NormStats::Rms(_), None) => Err(candle_core::Error::Msg(
                "internal error: an RMSNorm has no partial sums; please report this".into(),
            )),
            (NormStats::Layer(stats), _) => {
                let grad = cast_to::<T, f32>(grad)?.into_tensor(grad.shape());
                let needs_grad = [true, self.bias.is_some()];
                let (grad_x, gradients) = layer_backward::<f32>(x, &w, stats, &grad, needs_grad)?;
                for (param, gradient) in [Some(&self.weight), self.bias.as_ref()].into_iter().zip(gradients) {
                    if let (Some(param), Some(gradient)) = (param, gradient) {
                        pass.add(param, &gradient)?;
                    }
                }
                let f32 = match residual_grad {
                    None => grad_x,
                    Some(residual_grad) => (grad_x + residual_grad)?,
                };
                let recomputed = if recompute { Some(self.forward::<T>(x, eps)?.0) } else { None };
                Ok((ResidualGrad { rounded: to_compute_dtype::<T>(&f32)?, f32 }, recomputed))
            }
        }
    }
}

/// Rounds x, f32, to the compute dtype.
pub(super) fn to_compute_dtype<T: Elem + FloatElement>(x: &Tensor) -> Result<Tensor> {
    match <T as candle_core::WithDType>::DTYPE {
        candle_core::DType::F32 => Ok(x.clone()),
        _ => Ok(cast_to::<f32, T>(x)?.into_tensor(x.shape())),
    }
}

/// Memory for x·Wᵀ: the gradient buffer of W if it fits there, else that of `later`, else memory of its own. Backward
/// writes these gradients only after its last read of the result.
fn output_memory<T: Elem>(x: &Tensor, weight: &Param, later: Option<&Param>) -> Result<SavedActivation> {
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = weight.dims()[0];
    }
    for owner in [weight].into_iter().chain(later) {
        if let Some(activation) = owner.alias_grad(x.dtype(), shape.as_slice())? {
            return Ok(activation);
        }
    }
    let memory = OutputAlloc::<T>::new(x.device(), shape.iter().product())?;
    Ok(SavedActivation::owned(memory.into_tensor(shape)))
}

/// x·Wᵀ in the memory of [`output_memory`].
fn linear<T: Elem>(x: &Tensor, weight: &Param, later: Option<&Param>) -> Result<SavedActivation> {
    let y = output_memory::<T>(x, weight, later)?;
    matmul_into(&as_rows(y.tensor())?, &as_rows(x)?, &weight.compute(x.dtype())?.t()?, false)?;
    Ok(y)
}

/// stream + x·Wᵀ in f32.
fn linear_residual(stream: &Tensor, x: &Tensor, weight: &Param) -> Result<Tensor> {
    matmul_add(stream, &as_rows(x)?, &weight.compute(x.dtype())?.t()?)
}

/// ∂L/∂x of y = x·Wᵀ, given ∂L/∂y, in the shape of x.
pub(super) fn input_gradient(weight: &Param, grad: &Tensor) -> Result<Tensor> {
    let w = weight.compute(grad.dtype())?;
    let mut shape = grad.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = w.dim(1)?;
    }
    multiply(&as_rows(grad)?, &w)?.reshape(shape)
}

/// Accumulates the gradient of W in y = x·Wᵀ, given ∂L/∂y, if W has a use.
pub(super) fn add_weight_gradient(
    x: &Tensor,
    weight: &Param,
    grad: &Tensor,
    param_use: Option<&ParamUse>,
) -> Result<()> {
    match param_use {
        None => Ok(()),
        Some(param_use) => {
            let (memory, accumulate) = weight.grad_to_write()?;
            matmul_into(&memory, &as_rows(grad)?.t()?, &as_rows(x)?, accumulate)?;
            param_use.finish()
        }
    }
}

/// Forward pass: maps the residual stream x before the block to the one after it, both f32 [batch, length, d_model].
/// `earlier` is the previous block, whose gradients are computed after those of this block.
pub(super) fn forward<T: Elem + FloatElement>(
    block: &Block,
    x: &Tensor,
    earlier: Option<&Block>,
) -> Result<(Tensor, Saved)> {
    let _span = span("block");
    let (batch, length, d_model) = x.dims3()?;
    let eps = block.config.eps;
    let (normed, stats) = block.attention_norm.forward::<T>(x, eps)?;
    let qkv = linear::<T>(&normed, &block.qkv, earlier.map(|block| &block.gate_up))?;
    let (o, attention) = packed_forward::<T>(qkv.tensor(), block.config.qkv_layout(), &block.rope)?;
    let o = o.into_tensor((batch, length, d_model));
    let middle = linear_residual(x, &o, &block.out)?;
    let (middle_normed, mid_stats) = block.mlp_norm.forward::<T>(&middle, eps)?;
    let gate_up = output_memory::<T>(&middle_normed, &block.gate_up, None)?;
    let weight = block.gate_up.compute(middle_normed.dtype())?;
    let inner = matmul_swiglu::<T>(&as_rows(gate_up.tensor())?, &as_rows(&middle_normed)?, &weight.t()?)?;
    let inner = inner.into_tensor((batch, length, block.config.d_ff));
    let y = linear_residual(&middle, &inner, &block.down)?;
    let x = x.clone();
    Ok((y, Saved { x, stats, qkv, o, attention, middle, mid_stats, gate_up }))
}

/// Backward pass: maps the gradient of the residual stream after the block to the one before it.
pub(super) fn backward<T: Elem + FloatElement>(
    block: &Block,
    saved: Saved,
    grad: ResidualGrad,
    pass: &BackwardPass<'_>,
) -> Result<ResidualGrad> {
    let _span = span("block");
    let Saved { x, stats, qkv, o, attention, middle, mid_stats, gate_up } = saved;
    let eps = block.config.eps;
    let add = |x: &Tensor, weight: &Param, grad: &Tensor| add_weight_gradient(x, weight, grad, pass.use_of(weight));
    // Unwraps the norm output that was recomputed on request.
    let recomputed = |y: Option<Tensor>| {
        y.ok_or_else(|| candle_core::Error::Msg("internal error: a norm recomputed nothing; please report this".into()))
    };
    let [norm, middle_norm] = [2 * block.index, 2 * block.index + 1];

    let grad_inner = input_gradient(&block.down, &grad.rounded)?;
    let (grad_gate_up, inner) = swiglu_backward_recompute::<T>(gate_up.tensor(), &grad_inner)?;
    drop((gate_up, grad_inner));
    add(&inner, &block.down, &grad.rounded)?;
    drop(inner);
    let grad_normed = input_gradient(&block.gate_up, &grad_gate_up)?;
    let (grad_middle, normed) = block.mlp_norm.backward::<T>(NormBackward {
        x: &middle,
        eps,
        stats: &mid_stats,
        grad: &grad_normed,
        residual_grad: Some(&grad.f32),
        pass,
        index: middle_norm,
        recompute: true,
    })?;
    drop((grad, middle, mid_stats, grad_normed));
    add(&recomputed(normed)?, &block.gate_up, &grad_gate_up)?;
    drop(grad_gate_up);

    let grad_o = input_gradient(&block.out, &grad_middle.rounded)?;
    add(&o, &block.out, &grad_middle.rounded)?;
    let grad_qkv = packed_backward::<T>(qkv.tensor(), &o, &grad_o, &attention, block.config.qkv_layout(), &block.rope)?;
    drop((qkv, o, attention, grad_o));
    let grad_normed = input_gradient(&block.qkv, &grad_qkv)?;
    let (grad_x, normed) = block.attention_norm.backward::<T>(NormBackward {
        x: &x,
        eps,
        stats: &stats,
        grad: &grad_normed,
        residual_grad: Some(&grad_middle.f32),
        pass,
        index: norm,
        recompute: true,
    })?;
    drop((grad_middle, x, grad_normed));
    add(&recomputed(normed)?, &block.qkv, &grad_qkv)?;
    Ok(grad_x)
}
