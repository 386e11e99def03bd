//! The model as one op of the autograd graph: embedding, blocks, head and loss with hand-written forward and backward
//! passes.
//!
//! Candle's backward pass adds every gradient to a zeroed tensor and keeps every intermediate until its end. This
//! module performs only the additions of the formulas and frees each tensor after its last use. One launch at the end
//! sums the gradients of all norm weights.

use std::sync::{Mutex, PoisonError};

use candle_core::{Error, Result, Tensor};
use tilewright::kernels::FloatElement;
use tilewright_candle::embedding::add_gradient;
use tilewright_candle::graph::record1;
use tilewright_candle::memory::{Elem, OutputAlloc, for_float_type};

use super::block::{self, BackwardPass, to_compute_dtype};
use super::{Block, Norm, Transformer, head};
use crate::ops::residual_rms_norm::{self, ResidualGrad};
use crate::params::{Param, ParamUse, grad_enabled};
use crate::profile::span;

/// What a block saves for backward.
enum SavedBlock {
    All(Box<block::Saved>),
    /// The residual stream before the block (activation checkpointing): the rest is recomputed.
    Input(Tensor),
}

/// The parameter uses of one pass. A table that is both embedding and head has two.
struct Uses {
    embedding: Option<ParamUse>,
    /// Of the blocks and the last norm.
    inner: Vec<ParamUse>,
    head: Option<ParamUse>,
}

impl Uses {
    fn begin(model: &Transformer, with_head: bool) -> Uses {
        let blocks = model.blocks.iter().flat_map(|block| block.params());
        let norm = model.norm.params().filter(|_| with_head);
        Uses {
            embedding: model.embedding.begin_use(),
            inner: blocks.chain(norm).filter_map(Param::begin_use).collect(),
            head: if with_head { model.head.begin_use() } else { None },
        }
    }
}

/// The mean cross-entropy of the logits of tokens [batch, length] with targets [batch · length].
pub(super) fn loss(model: &Transformer, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
    for_float_type!(model.config.precision.dtype(), "a model", T => {
        let uses = Uses::begin(model, true);
        let ids = tokens.flatten_all()?.contiguous()?;
        let (x, saved_blocks) = forward::<T>(model, tokens, &ids, &mut |_, _| Ok(()))?;
        let (mean, saved_head) = head::forward::<T>(model, &x, targets)?;
        // Backward takes these, and frees them as it goes.
        let saved = Mutex::new(grad_enabled().then_some((saved_blocks, saved_head)));
        let model = model.clone();
        record1("model", &model.embedding.anchor().clone(), OutputAlloc::<f32>::copy_of(&mean)?, (), move |_, _, grad| {
            let (saved_blocks, saved_head) = take(&saved)?;
            let pass = backward_pass(&model, &ids, &uses, 1)?;
            let grad = head::backward::<T>(&model, saved_head, grad, (&pass, uses.head.as_ref()))?;
            backward::<T>(&model, &ids, saved_blocks, grad, (&pass, uses.embedding.as_ref()))?;
            Ok([None])
        })
    })
}

/// The residual stream after the blocks for tokens [batch, length]: f32 [batch, length, d_model], before the last norm.
pub(super) fn residual_stream(
    model: &Transformer,
    tokens: &Tensor,
    observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
) -> Result<Tensor> {
    for_float_type!(model.config.precision.dtype(), "a model", T => {
        let uses = Uses::begin(model, false);
        let ids = tokens.flatten_all()?.contiguous()?;
        let (x, saved_blocks) = forward::<T>(model, tokens, &ids, observe)?;
        if !grad_enabled() {
            return Ok(x);
        }
        let saved = Mutex::new(Some(saved_blocks));
        let model = model.clone();
        let shape = x.shape().clone();
        record1("blocks", &model.embedding.anchor().clone(), OutputAlloc::<f32>::copy_of(&x)?, shape, move |_, _, grad| {
            let saved_blocks = take(&saved)?;
            let pass = backward_pass(&model, &ids, &uses, 0)?;
            let grad = ResidualGrad { f32: grad.clone(), rounded: to_compute_dtype::<T>(grad)? };
            backward::<T>(&model, &ids, saved_blocks, grad, (&pass, uses.embedding.as_ref()))?;
            Ok([None])
        })
    })
}

fn take<S>(saved: &Mutex<Option<S>>) -> Result<S> {
    let saved = saved.lock().unwrap_or_else(PoisonError::into_inner).take();
    saved.ok_or_else(|| Error::Msg("backward ran twice on one result: run forward again".into()))
}

fn forward<T: Elem + FloatElement>(
    model: &Transformer,
    tokens: &Tensor,
    ids: &Tensor,
    observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
) -> Result<(Tensor, Vec<SavedBlock>)> {
    let (batch, length) = tokens.dims2()?;
    let mut x = {
        let _span = span("embedding");
        model.embedding.value()?.index_select(ids, 0)?.reshape((batch, length, model.config.d_model))?
    };
    observe("embedding", &x)?;
    let mut saved_blocks = Vec::with_capacity(model.blocks.len());
    for (i, block) in model.blocks.iter().enumerate() {
        let (y, saved) = block::forward::<T>(block, &x, previous_block(model, i))?;
        if grad_enabled() {
            saved_blocks.push(if model.config.checkpoint {
                SavedBlock::Input(x)
            } else {
                SavedBlock::All(Box::new(saved))
            });
        }
        x = y;
        observe(&format!("blocks.{i}"), &x)?;
    }
    Ok((x, saved_blocks))
}

/// The block before block `index`, if any.
fn previous_block(model: &Transformer, index: usize) -> Option<&Block> {
    model.blocks.get(index.checked_sub(1)?).map(|block| &**block)
}

/// Creates the backward pass for `ids`, with `extra_norms` norms in addition to those of the blocks.
fn backward_pass<'a>(
    model: &Transformer,
    ids: &Tensor,
    uses: &'a Uses,
    extra_norms: usize,
) -> Result<BackwardPass<'a>> {
    let norm_partials = match model.config.norm {
        Norm::Layer => None,
        Norm::Rms => {
            let (norms, d_model) = (2 * model.blocks.len() + extra_norms, model.config.d_model);
            let partials = residual_rms_norm::num_partials([ids.elem_count(), d_model])?;
            Some(
                OutputAlloc::<f32>::new(ids.device(), norms * partials * d_model)?
                    .into_tensor((norms, partials, d_model)),
            )
        }
    };
    Ok(BackwardPass { uses: &uses.inner, norm_partials })
}

/// Propagates the gradient of the residual stream after the blocks to all blocks and the embedding.
fn backward<T: Elem + FloatElement>(
    model: &Transformer,
    ids: &Tensor,
    mut saved_blocks: Vec<SavedBlock>,
    mut grad: ResidualGrad,
    (pass, embedding): (&BackwardPass<'_>, Option<&ParamUse>),
) -> Result<()> {
    for block in model.blocks.iter().rev() {
        let saved = match saved_blocks.pop() {
            Some(SavedBlock::All(saved)) => *saved,
            Some(SavedBlock::Input(x)) => block::forward::<T>(block, &x, previous_block(model, block.index))?.1,
            None => {
                return Err(Error::Msg(
                    "internal error: a block saved nothing for backward; please report this".into(),
                ));
            }
        };
        grad = block::backward::<T>(block, saved, grad, pass)?;
    }
    if let Some(partials) = &pass.norm_partials {
        add_norm_gradients(model, partials, pass)?;
    }
    if let Some(param_use) = embedding {
        let _span = span("embedding");
        let (memory, accumulate) = param_use.param().grad_to_write()?;
        let grad = grad.f32.reshape((ids.elem_count(), model.config.d_model))?;
        add_gradient::<f32>(ids, &grad, &memory, accumulate)?;
        param_use.finish()?;
    }
    Ok(())
}

/// Reduces the partial sums of the RMSNorm weight gradients into the flat gradient, in which the weights are equally
/// spaced.
fn add_norm_gradients(model: &Transformer, partials: &Tensor, pass: &BackwardPass<'_>) -> Result<()> {
    let _span = span("norm");
    let weights = model.blocks.iter().flat_map(|block| [&block.attention_norm.weight, &block.mlp_norm.weight]);
    let weights: Vec<&Param> = weights.chain([&model.norm.weight]).take(partials.dim(0)?).collect();
    let starts: Vec<usize> = weights.iter().map(|weight| weight.range().start).collect();
    let norm_stride = if starts.len() < 2 { 0 } else { starts[1] - starts[0] };
    if starts.windows(2).any(|pair| pair[1] - pair[0] != norm_stride) {
        return Err(Error::Msg("internal error: norm weights are not equally spaced; please report this".into()));
    }
    // All of them are lazily zeroed, or none is: one launch writes them together.
    let mut accumulate = false;
    for weight in &weights {
        accumulate |= weight.grad_to_write()?.1;
    }
    residual_rms_norm::add_weight_gradients(partials, &model.params.grads(), [starts[0], norm_stride], accumulate)?;
    weights.iter().filter_map(|weight| pass.use_of(weight)).try_for_each(ParamUse::finish)
}
