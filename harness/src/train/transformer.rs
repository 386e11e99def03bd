//! Implements [`LanguageModel`] for the Transformer.

use candle_core::{Result, Tensor};
use serde_json::Value;

use super::LanguageModel;
use crate::model::Transformer;
use crate::params::Params;

impl LanguageModel for Transformer {
    fn params(&self) -> &Params {
        Transformer::params(self)
    }

    fn hyperparameters(&self) -> Value {
        serde_json::to_value(self.config()).unwrap_or(Value::Null)
    }

    fn vocabulary(&self) -> usize {
        self.config().vocabulary
    }

    fn context(&self) -> usize {
        self.config().context
    }

    fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        Transformer::logits(self, tokens)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        Transformer::loss(self, tokens, targets)
    }

    fn flop_per_token(&self, context: usize) -> f64 {
        self.config().flops_per_token(context)
    }

    fn trace(&self, tokens: &Tensor, observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>) -> Result<()> {
        Transformer::trace(self, tokens, observe)
    }
}
