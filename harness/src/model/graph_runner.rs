//! Repeats forward and backward of a model, as a CUDA graph if possible.

use candle_core::{DType, Result, Tensor};
use tilewright_candle::cuda_graph::GraphRunner;

use super::Transformer;

/// Runs forward and backward of a model, on a GPU as a CUDA graph. [`QueuedStep`](crate::train::QueuedStep) does so for
/// whole training steps.
pub struct ModelGraphRunner {
    model: Transformer,
    runner: GraphRunner,
    /// The loss of the last run, f32 [1]: the graph writes it to this memory.
    loss: Option<Tensor>,
}

impl ModelGraphRunner {
    /// Creates a runner for this model. Runs nothing yet.
    pub fn new(model: &Transformer) -> ModelGraphRunner {
        ModelGraphRunner { model: model.clone(), runner: GraphRunner::new(model.params().device()), loss: None }
    }

    /// Why passes run without a CUDA graph, if they do: on the CPU, and after a failed capture.
    pub fn fallback_reason(&self) -> Option<&str> {
        self.runner.fallback_reason()
    }

    /// Accumulates the gradient of factor · loss into the gradients of the model, and returns the loss: see
    /// [`Transformer::loss`].
    ///
    /// Does not use a graph while a callback of [`crate::params::Params::on_grad_ready`] is registered, because a graph
    /// launch does not run callbacks.
    ///
    /// # Errors
    /// As [`Transformer::loss`].
    pub fn forward_backward(&mut self, tokens: &Tensor, targets: &Tensor, factor: f64) -> Result<Tensor> {
        if self.model.params().has_grad_hooks() {
            return pass(&self.model, tokens, targets, factor);
        }
        let loss_buffer = match &self.loss {
            Some(loss_buffer) => loss_buffer.clone(),
            None => self.loss.insert(Tensor::zeros(1, DType::F32, tokens.device())?).clone(),
        };
        let model = &self.model;
        // A pass overwrites lazily zeroed gradients and accumulates into others. A captured graph must do the same each
        // time: it accumulates.
        model.params().materialize_zero_grads()?;
        let work =
            |inputs: &[Tensor]| loss_buffer.slice_set(&pass(model, &inputs[0], &inputs[1], factor)?.reshape(1)?, 0, 0);
        // SAFETY: `self` holds the loss and the model; a parameter or gradient that moves has another storage version.
        unsafe { self.runner.run(&[factor.to_bits(), model.params.storage_version()], &[tokens, targets], work)? };
        // The next launch of the graph overwrites `loss_buffer`, so return a copy.
        loss_buffer.force_contiguous()?.reshape(())
    }
}

/// Forward and backward without a graph.
fn pass(model: &Transformer, tokens: &Tensor, targets: &Tensor, factor: f64) -> Result<Tensor> {
    let loss = model.loss(tokens, targets)?;
    let scaled = if factor == 1.0 { loss.clone() } else { (&loss * factor)? };
    scaled.backward()?;
    Ok(loss.detach())
}
