//! Trait of models that can be trained.

use candle_core::{Result, Tensor};
use serde_json::Value;

use crate::params::Params;

/// A language model: gives a distribution over the next token at every position of a sequence.
pub trait LanguageModel {
    fn params(&self) -> &Params;

    /// Hyperparameters, for checkpoints.
    fn hyperparameters(&self) -> Value;

    /// Vocabulary size.
    fn vocabulary(&self) -> usize;

    /// Context length: maximum length of a sequence.
    fn context(&self) -> usize;

    /// Logits of the next token, float [sequences, n, vocabulary size], for `tokens`, u32 [sequences, n].
    fn logits(&self, tokens: &Tensor) -> Result<Tensor>;

    /// Cross-entropy loss: mean of −log p(target) over all positions, in nats. `tokens` and `targets` are u32
    /// [sequences, n]; the result is an f32 scalar in the autograd graph.
    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor>;

    /// Floating-point operations of the matmuls of forward and backward, per token of sequences of this length.
    fn flop_per_token(&self, context: usize) -> f64;

    /// Runs forward and passes the outputs of the model's layers for `tokens` to the callback, in order.
    fn trace(&self, tokens: &Tensor, observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>) -> Result<()> {
        observe("logits", &self.logits(tokens)?)
    }
}
