//! Autoregressive sampling of text from a model.

use candle_core::{DType, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::{Error, LanguageModel, Result};
use crate::params::no_grad;

/// Sampling parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits: below 1 likely tokens become likelier; 0 is greedy decoding.
    pub temperature: f64,
    /// Samples only among this many likeliest tokens; 0 means all.
    pub top_k: usize,
    /// Nucleus sampling: only the likeliest tokens that together have this probability (Holtzman et al., "The curious
    /// case of neural text degeneration", 2020, section 3.1); 1 means all.
    pub top_p: f64,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.8, top_k: 0, top_p: 0.95, seed: 0 }
    }
}

/// Samples `count` tokens after `prompt`, and passes each to `on_token` immediately. If the text becomes longer than
/// the context length, the model gets its last tokens. The same seed gives the same tokens.
///
/// # Errors
/// Errors of the model and of the callback; logits that are NaN.
///
/// # Panics
/// An empty prompt.
pub fn generate<E: From<super::Error>>(
    model: &dyn LanguageModel,
    prompt: &[u32],
    count: usize,
    sampling: &Sampling,
    mut on_token: impl FnMut(u32) -> Result<(), E>,
) -> Result<(), E> {
    assert!(!prompt.is_empty(), "internal error: generation from an empty prompt");
    let mut random = StdRng::seed_from_u64(sampling.seed);
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let context = &tokens[tokens.len().saturating_sub(model.context())..];
        let mut logits = last_logits(model, context)?;
        let token = sample_token(&mut logits, sampling, random.random_range(0.0..1.0));
        tokens.push(token);
        on_token(token)?;
    }
    Ok(())
}

fn last_logits(model: &dyn LanguageModel, context: &[u32]) -> Result<Vec<f32>> {
    let logits = no_grad(|| {
        let tokens = Tensor::new(context, model.params().device())?.unsqueeze(0)?;
        let logits = model.logits(&tokens)?;
        logits.narrow(1, context.len() - 1, 1)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
    });
    let logits: Vec<f32> = logits?;
    match logits.iter().position(|logit| logit.is_nan()) {
        Some(token) => Err(Error::NanLogit { token }),
        None => Ok(logits),
    }
}

/// The token whose interval of the cumulative distribution contains `uniform`, in [0, 1).
fn sample_token(logits: &mut [f32], sampling: &Sampling, uniform: f64) -> u32 {
    // Likeliest first; equal logits in token order.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let Some(&best) = order.first() else { return 0 };
    if sampling.temperature <= 0.0 {
        return best as u32;
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let weight = |token: usize| (f64::from(logits[token] - logits[best]) / sampling.temperature).exp();
    let weights: Vec<f64> = order.iter().map(|&token| weight(token)).collect();
    let total: f64 = weights.iter().sum();
    let (mut kept, mut sum) = (0, 0.0);
    while kept < weights.len() && (kept == 0 || sum < sampling.top_p * total) {
        sum += weights[kept];
        kept += 1;
    }
    let mut left = uniform * sum;
    for (&token, weight) in order.iter().zip(&weights[..kept]) {
        left -= weight;
        if left < 0.0 {
            return token as u32;
        }
    }
    order[kept - 1] as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each of three tokens with probabilities 0.2, 0.5, 0.3 is sampled, in per mille.
    fn frequencies(sampling: Sampling) -> [usize; 3] {
        let mut counts = [0; 3];
        for i in 0..1000 {
            let mut logits = [0.2_f32.ln(), 0.5_f32.ln(), 0.3_f32.ln()];
            counts[sample_token(&mut logits, &sampling, (f64::from(i) + 0.5) / 1000.0) as usize] += 1;
        }
        counts
    }

    #[test]
    fn tokens_follow_the_distribution() {
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 };
        assert_eq!(frequencies(all), [200, 500, 300]);
        assert_eq!(frequencies(Sampling { temperature: 0.0, ..all }), [0, 1000, 0]);
        assert_eq!(frequencies(Sampling { top_k: 2, ..all }), [0, 625, 375]);
        assert_eq!(frequencies(Sampling { top_k: 99, ..all }), [200, 500, 300]);
        // 0.5 + 0.3 reaches 0.7; 0.5 alone reaches 0.4.
        assert_eq!(frequencies(Sampling { top_p: 0.7, ..all }), [0, 625, 375]);
        assert_eq!(frequencies(Sampling { top_p: 0.4, ..all }), [0, 1000, 0]);
        // Squares of the probabilities: 4, 25, 9 of 38.
        assert_eq!(frequencies(Sampling { temperature: 0.5, ..all }), [105, 658, 237]);
    }
}
