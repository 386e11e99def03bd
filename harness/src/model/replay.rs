//! Forward and backward of a model again and again, by replay where that is possible.

use candle_core::{DType, Result, Tensor};

use super::Transformer;
use crate::ops::replay::Replay as Recorded;

/// Runs forward and backward of a model, on a GPU as a CUDA graph. Whole training steps are those of
/// [`WholeStep`](crate::train::WholeStep).
pub struct Replay {
    model: Transformer,
    recorded: Recorded,
    /// f32 [1].
    loss: Option<Tensor>,
}

impl Replay {
    /// For this model. Nothing runs yet.
    pub fn new(model: &Transformer) -> Replay {
        Replay { model: model.clone(), recorded: Recorded::new(model.params().device()), loss: None }
    }

    /// Why passes are not replayed, if they are not: on the CPU, and where recording has failed.
    pub fn why_not(&self) -> Option<&str> {
        self.recorded.why_not()
    }

    /// Adds the gradient of factor · loss to the model's gradients, and returns the loss: see [`Transformer::loss`].
    ///
    /// While someone listens for finished gradients ([`crate::params::Params::on_grad_ready`]), nothing is replayed: a
    /// recording calls nobody.
    ///
    /// # Errors
    /// As [`Transformer::loss`].
    pub fn forward_backward(&mut self, tokens: &Tensor, targets: &Tensor, factor: f64) -> Result<Tensor> {
        if self.model.params().has_listeners() {
            return pass(&self.model, tokens, targets, factor);
        }
        let kept = match &self.loss {
            Some(kept) => kept.clone(),
            None => self.loss.insert(Tensor::zeros(1, DType::F32, tokens.device())?).clone(),
        };
        let model = &self.model;
        // A pass writes over blank gradients and adds to others: a recording does always the same, which is to add.
        model.params().settle_grads()?;
        self.recorded.run(&[factor.to_bits(), model.params.generation()], &[tokens, targets], |inputs| {
            kept.slice_set(&pass(model, &inputs[0], &inputs[1], factor)?.reshape(1)?, 0, 0)
        })?;
        // The next replay writes over it.
        kept.force_contiguous()?.reshape(())
    }
}

/// One pass as it always runs.
fn pass(model: &Transformer, tokens: &Tensor, targets: &Tensor, factor: f64) -> Result<Tensor> {
    let loss = model.loss(tokens, targets)?;
    let scaled = if factor == 1.0 { loss.clone() } else { (&loss * factor)? };
    scaled.backward()?;
    Ok(loss.detach())
}
