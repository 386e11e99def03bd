//! What training asks of a model.

use candle_core::{Result, Tensor};
use serde_json::Value;

use crate::params::Params;

/// A model that gives each place of a window a distribution over the token that follows.
pub trait LanguageModel {
    fn params(&self) -> &Params;

    /// Hyperparameters, for checkpoints.
    fn hyperparameters(&self) -> Value;

    /// Number of tokens that there are.
    fn vocabulary(&self) -> usize;

    /// Longest window.
    fn context(&self) -> usize;

    /// Scores of the next token: u32 [windows, n] to float [windows, n, vocabulary].
    fn logits(&self, tokens: &Tensor) -> Result<Tensor>;

    /// Mean of −log p(target) over all places, in nats: u32 [windows, n] twice to an f32 scalar on the tape.
    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor>;

    /// Floating-point operations of the matrix products of forward and backward, for each token of windows of this length.
    fn flop_per_token(&self, context: usize) -> f64;

    /// Runs forward, and shows what each part of the model made of `tokens`, in order.
    fn trace(&self, tokens: &Tensor, observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>) -> Result<()> {
        observe("logits", &self.logits(tokens)?)
    }
}
