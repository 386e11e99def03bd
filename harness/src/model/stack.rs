//! The model as one op of the autograd graph: embedding, blocks, head and loss with hand-written forward and backward
//! passes.
//!
//! Candle's backward pass adds every gradient to a zeroed tensor and keeps every intermediate until its end. This
//! module performs only the additions of the formulas and frees each tensor after its last use. One launch at the end
//! sums the gradients of all norm weights.

use std::sync::{Mutex, PoisonError};

use candle_core::{Error, Result, Tensor};
use tilewright::kernels::FloatElement;

use super::block::{self, Pass, rounded};
use super::{Block, Norm, Transformer, head};
use crate::ops::embedding::add_gradient;
use crate::ops::memory::{Elem, Fresh, for_float_type};
use crate::ops::stream_norm::{self, Gradient};
use crate::ops::tape::record1;
use crate::params::{Param, Use, grad_enabled};
use crate::profile::span;

/// What a block saves for backward.
enum Kept {
    All(Box<block::Saved>),
    /// The residual stream before it (activation checkpointing): the rest is recomputed.
    Input(Tensor),
}

/// The parameter uses of one pass. A table that is both embedding and head has two.
struct Uses {
    embedding: Option<Use>,
    /// Of the blocks and the last norm.
    inner: Vec<Use>,
    head: Option<Use>,
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
        let (x, kept) = forward::<T>(model, tokens, &ids, &mut |_, _| Ok(()))?;
        let (mean, of_head) = head::forward::<T>(model, &x, targets)?;
        // Backward takes these, and frees them as it goes.
        let saved = Mutex::new(grad_enabled().then_some((kept, of_head)));
        let model = model.clone();
        record1("model", &model.embedding.anchor().clone(), Fresh::<f32>::copy_of(&mean)?, (), move |_, _, grad| {
            let (kept, of_head) = take(&saved)?;
            let pass = pass_of(&model, &ids, &uses, 1)?;
            let grad = head::backward::<T>(&model, of_head, grad, (&pass, uses.head.as_ref()))?;
            backward::<T>(&model, &ids, kept, grad, (&pass, uses.embedding.as_ref()))?;
            Ok([None])
        })
    })
}

/// The residual stream after the blocks for tokens [batch, length]: f32 [batch, length, width], before the last norm.
pub(super) fn stream(
    model: &Transformer,
    tokens: &Tensor,
    see: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
) -> Result<Tensor> {
    for_float_type!(model.config.precision.dtype(), "a model", T => {
        let uses = Uses::begin(model, false);
        let ids = tokens.flatten_all()?.contiguous()?;
        let (x, kept) = forward::<T>(model, tokens, &ids, see)?;
        if !grad_enabled() {
            return Ok(x);
        }
        let saved = Mutex::new(Some(kept));
        let model = model.clone();
        let shape = x.shape().clone();
        record1("blocks", &model.embedding.anchor().clone(), Fresh::<f32>::copy_of(&x)?, shape, move |_, _, grad| {
            let kept = take(&saved)?;
            let pass = pass_of(&model, &ids, &uses, 0)?;
            let grad = Gradient { stream: grad.clone(), rounded: rounded::<T>(grad)? };
            backward::<T>(&model, &ids, kept, grad, (&pass, uses.embedding.as_ref()))?;
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
    see: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
) -> Result<(Tensor, Vec<Kept>)> {
    let (batch, length) = tokens.dims2()?;
    let mut x = {
        let _span = span("embedding");
        model.embedding.value()?.index_select(ids, 0)?.reshape((batch, length, model.config.width))?
    };
    see("embedding", &x)?;
    let mut kept = Vec::with_capacity(model.blocks.len());
    for (i, block) in model.blocks.iter().enumerate() {
        let (y, saved) = block::forward::<T>(block, &x, before(model, i))?;
        if grad_enabled() {
            kept.push(if model.config.checkpoint { Kept::Input(x) } else { Kept::All(Box::new(saved)) });
        }
        x = y;
        see(&format!("blocks.{i}"), &x)?;
    }
    Ok((x, kept))
}

/// The previous block.
fn before(model: &Transformer, index: usize) -> Option<&Block> {
    model.blocks.get(index.checked_sub(1)?).map(|block| &**block)
}

/// Creates the backward pass for `ids`, with `more` norms in addition to those of the blocks.
fn pass_of<'a>(model: &Transformer, ids: &Tensor, uses: &'a Uses, more: usize) -> Result<Pass<'a>> {
    let norm_sums = match model.config.norm {
        Norm::Layer => None,
        Norm::Rms => {
            let (norms, width) = (2 * model.blocks.len() + more, model.config.width);
            let sums = stream_norm::sums([ids.elem_count(), width])?;
            Some(Fresh::<f32>::new(ids.device(), norms * sums * width)?.into_tensor((norms, sums, width)))
        }
    };
    Ok(Pass { uses: &uses.inner, norm_sums })
}

/// Propagates the gradient of the residual stream after the blocks to all blocks and the embedding.
fn backward<T: Elem + FloatElement>(
    model: &Transformer,
    ids: &Tensor,
    mut kept: Vec<Kept>,
    mut grad: Gradient,
    (pass, embedding): (&Pass<'_>, Option<&Use>),
) -> Result<()> {
    for block in model.blocks.iter().rev() {
        let saved = match kept.pop() {
            Some(Kept::All(saved)) => *saved,
            Some(Kept::Input(x)) => block::forward::<T>(block, &x, before(model, block.index))?.1,
            None => return Err(Error::Msg("internal error: a block saved nothing for backward, please report".into())),
        };
        grad = block::backward::<T>(block, saved, grad, pass)?;
    }
    if let Some(sums) = &pass.norm_sums {
        add_norm_gradients(model, sums, pass)?;
    }
    if let Some(using) = embedding {
        let _span = span("embedding");
        add_gradient::<f32>(ids, &grad.stream.reshape((ids.elem_count(), model.config.width))?, using.param())?;
        using.finish()?;
    }
    Ok(())
}

/// Sums the partial sums of the RMSNorm weight gradients. The weights have equal distances in the flat tensor.
fn add_norm_gradients(model: &Transformer, sums: &Tensor, pass: &Pass<'_>) -> Result<()> {
    let _span = span("norm");
    let weights = model.blocks.iter().flat_map(|block| [&block.attention_norm.weight, &block.mlp_norm.weight]);
    let weights: Vec<&Param> = weights.chain([&model.norm.weight]).take(sums.dim(0)?).collect();
    let starts: Vec<usize> = weights.iter().map(|weight| weight.range().start).collect();
    let apart = if starts.len() < 2 { 0 } else { starts[1] - starts[0] };
    if starts.windows(2).any(|pair| pair[1] - pair[0] != apart) {
        return Err(Error::Msg("internal error: norm weights are not equally spaced, please report".into()));
    }
    // All of them are lazily zeroed, or none is: one launch writes them together.
    let mut adds = false;
    for weight in &weights {
        adds |= weight.grad_to_write()?.1;
    }
    stream_norm::add_weight_gradients(sums, &model.params.grads(), [starts[0], apart], adds)?;
    weights.iter().filter_map(|weight| pass.use_of(weight)).try_for_each(Use::finish)
}
