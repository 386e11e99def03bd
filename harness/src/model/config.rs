//! Model configuration: sizes, architecture, precision.

use std::fmt;
use std::str::FromStr;

use candle_core::{DType, Error, Result};
use serde::{Deserialize, Serialize};

use crate::ops::attention::{QkvLayout, Tiling};

/// Hyperparameters that determine the shape and the arithmetic of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Vocabulary size.
    pub vocabulary: usize,
    /// Context length: largest number of tokens in a sequence.
    pub context: usize,
    /// Size of the residual stream.
    #[serde(alias = "width")]
    pub d_model: usize,
    /// Inner size of the feed-forward layers.
    #[serde(alias = "hidden")]
    pub d_ff: usize,
    pub layers: usize,
    pub heads: usize,
    /// Number of key/value heads (grouped-query attention): a divisor of `heads`, equal to it by default.
    pub heads_kv: usize,
    /// θ base of the rotary position embedding.
    pub rope_base: f64,
    /// ε of the norms.
    pub eps: f64,
    pub norm: Norm,
    pub attention: Attention,
    /// Tile sizes of [`Attention::Tiled`].
    pub tiling: Tiling,
    pub fusion: Fusion,
    /// Whether the output head shares the weights of the embedding.
    pub tied: bool,
    /// Activation checkpointing: blocks save only their input, and recompute the rest in the backward pass.
    pub checkpoint: bool,
    pub precision: Precision,
}

/// Which parts of a training step run, for [`Config::step_bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    Forward,
    ForwardBackward,
    TrainStep,
}

/// Lower bound in bytes of the memory of a step, by purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepBytes {
    /// f32 parameters, and the compute weights where matmuls take a shorter type.
    pub weights: f64,
    pub gradients: f64,
    pub moments: f64,
    pub activations: f64,
}

impl StepBytes {
    pub fn total(&self) -> f64 {
        self.weights + self.gradients + self.moments + self.activations
    }
}

/// The norm before attention, feed-forward and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Norm {
    Rms,
    Layer,
}

/// Implementation of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Materializes the matrix of scores, in candle ops.
    Naive,
    /// FlashAttention-2 in candle ops.
    Tiled,
    /// FlashAttention-2 by Tilewright kernels.
    Flash,
}

/// How much of the model, apart from attention, Tilewright kernels compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fusion {
    /// Norms, rotary embedding, activations and loss in candle ops.
    None,
    /// One kernel for each of them.
    Ops,
    /// The same kernels, and each block as one op with a hand-written backward pass, without redundant additions and
    /// saved tensors. Requires [`Attention::Flash`].
    Blocks,
}

/// The dtype of matmuls and of activations between them. In every precision parameters, their gradients, sums, and the
/// internals of norms, softmax and loss are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    F32,
    /// f32; on a GPU each matmul is three tf32 matmuls (3xTF32, <https://arxiv.org/abs/2203.03341>) on tensor cores, by
    /// a Tilewright kernel, about as accurate as f32. The CPU multiplies in f32.
    Tf32x3,
    /// f32; on a GPU matmuls round their operands to tf32 (10 bits of mantissa). The CPU multiplies in f32.
    Tf32,
    Bf16,
    /// Requires loss scaling: see [`crate::train::LossScale`].
    F16,
}

/// Implements `ALL`, `Display` and `FromStr` of an enum from the names of its variants on the command line.
macro_rules! string_enum {
    ($ty:ident, $what:literal, $($word:literal => $variant:ident),*) => {
        impl $ty {
            /// All values.
            pub const ALL: &'static [$ty] = &[$($ty::$variant),*];
        }

        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $($ty::$variant => $word),*
                })
            }
        }

        impl FromStr for $ty {
            type Err = String;

            fn from_str(word: &str) -> std::result::Result<Self, String> {
                match word {
                    $($word => Ok($ty::$variant),)*
                    _ => Err(format!("unknown {} `{word}`: expected one of {}", $what, [$($word),*].join(", "))),
                }
            }
        }
    };
}
string_enum!(Norm, "norm", "rms" => Rms, "layer" => Layer);
string_enum!(Attention, "attention", "naive" => Naive, "tiled" => Tiled, "flash" => Flash);
string_enum!(Fusion, "fusion", "none" => None, "ops" => Ops, "blocks" => Blocks);
string_enum!(Precision, "precision", "f32" => F32, "tf32x3" => Tf32x3, "tf32" => Tf32, "bf16" => Bf16, "f16" => F16);

impl Precision {
    /// The dtype of matmuls and of activations.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 | Precision::Tf32x3 | Precision::Tf32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }

    /// Sets how f32 matmuls round on a GPU, for this process. Has no effect on the CPU.
    pub fn apply(self) {
        #[cfg(feature = "cuda")]
        {
            candle_core::cuda::set_gemm_reduced_precision_f32(self == Precision::Tf32);
            crate::ops::set_tf32x3(self == Precision::Tf32x3);
        }
    }
}

/// A named model size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSize {
    pub name: &'static str,
    pub d_model: usize,
    pub d_ff: usize,
    pub layers: usize,
    pub heads: usize,
}

/// The model sizes of table 1 of the assignment.
pub const SIZES: [ModelSize; 5] = [
    ModelSize { name: "small", d_model: 768, d_ff: 3072, layers: 12, heads: 12 },
    ModelSize { name: "medium", d_model: 1024, d_ff: 4096, layers: 24, heads: 16 },
    ModelSize { name: "large", d_model: 1280, d_ff: 5120, layers: 36, heads: 20 },
    ModelSize { name: "xl", d_model: 1600, d_ff: 6400, layers: 48, heads: 25 },
    ModelSize { name: "2.7B", d_model: 2560, d_ff: 10240, layers: 32, heads: 32 },
];

impl Default for Config {
    /// A model that trains on a CPU in minutes: 4 layers, d_model 128, a context of 128 tokens.
    fn default() -> Config {
        Config {
            vocabulary: 10_000,
            context: 128,
            d_model: 128,
            d_ff: 512,
            layers: 4,
            heads: 4,
            heads_kv: 4,
            rope_base: 10_000.0,
            eps: 1e-5,
            norm: Norm::Rms,
            attention: Attention::Flash,
            tiling: Tiling::default(),
            fusion: Fusion::Blocks,
            tied: false,
            checkpoint: false,
            precision: Precision::F32,
        }
    }
}

impl Config {
    /// Fields that do not change any bit of losses or gradients: a resumed run may change them.
    pub const BITWISE_NEUTRAL: [&str; 1] = ["checkpoint"];

    /// Renames the fields of a JSON configuration that an earlier version wrote to their current names.
    pub fn rename_old_keys(config: &mut serde_json::Value) {
        let Some(fields) = config.as_object_mut() else { return };
        for (old, name) in [("width", "d_model"), ("hidden", "d_ff")] {
            if let Some(value) = fields.remove(old) {
                fields.insert(name.to_string(), value);
            }
        }
    }

    /// Returns a size of [`SIZES`], with a vocabulary of 10 000.
    ///
    /// # Errors
    /// An unknown name; the message suggests the nearest one.
    pub fn named(size: &str, context: usize) -> Result<Config> {
        let wanted = size.to_lowercase();
        let found = SIZES.iter().find(|size| size.name.to_lowercase() == wanted);
        let Some(&ModelSize { d_model, d_ff, layers, heads, .. }) = found else {
            let names = SIZES.map(|size| size.name);
            let nearest = names.iter().min_by_key(|name| strsim::levenshtein(&wanted, &name.to_lowercase()));
            let hint = match nearest {
                Some(nearest) if strsim::levenshtein(&wanted, &nearest.to_lowercase()) <= 2 => {
                    format!("did you mean `{nearest}`?")
                }
                _ => format!("the sizes are {}", names.join(", ")),
            };
            return Err(Error::Msg(format!("unknown model size `{size}`: {hint}")));
        };
        Ok(Config { context, d_model, d_ff, layers, heads, heads_kv: heads, ..Config::default() })
    }

    /// The name of this size in [`SIZES`], if it has one.
    pub fn size_name(&self) -> Option<&'static str> {
        let size = (self.d_model, self.d_ff, self.layers, self.heads);
        SIZES.iter().find(|s| (s.d_model, s.d_ff, s.layers, s.heads) == size).map(|s| s.name)
    }

    /// Layout of the packed queries, keys and values.
    pub fn qkv_layout(&self) -> QkvLayout {
        QkvLayout { heads: self.heads, heads_kv: self.heads_kv, d: self.d_model / self.heads.max(1) }
    }

    /// Number of parameters of a config that [`Config::check`] accepts.
    pub fn parameters(&self) -> usize {
        self.count() as usize
    }

    /// Number of parameters of any config. Exact below 2⁵³.
    fn count(&self) -> f64 {
        let of = |n: usize| n as f64;
        let (d_model, d_ff, heads, heads_kv) = (of(self.d_model), of(self.d_ff), of(self.heads), of(self.heads_kv));
        let qkv = d_model * (heads + 2.0 * heads_kv) * of(self.d_model / self.heads.max(1));
        let norm = if self.norm == Norm::Layer { 2.0 * d_model } else { d_model };
        let block = qkv + d_model * d_model + 3.0 * d_ff * d_model + 2.0 * norm;
        let heads = if self.tied { 1.0 } else { 2.0 };
        of(self.layers) * block + heads * of(self.vocabulary) * d_model + norm
    }

    /// Lower bound in bytes of the host or device memory of a forward pass: the parameters, the compute weights, and
    /// 128 bytes of metadata for each of 6 parameters per layer.
    pub fn model_bytes(&self) -> f64 {
        let compute_weight_bytes = if self.precision.dtype().size_in_bytes() < 4 { 2.0 } else { 0.0 };
        (4.0 + compute_weight_bytes) * self.count() + 128.0 * 6.0 * self.layers as f64
    }

    /// Lower bound in bytes of the memory of a step of `micro_batches` micro-batches of `sequences` sequences:
    /// parameters with gradients and optimizer state, logits, and the activations that blocks save for backward.
    /// Activations follow Korthikanti et al., "Reducing activation recomputation in large transformer models" (2023),
    /// section 4.1. A step that this bound rejects would not fit.
    pub fn step_bytes(&self, sequences: usize, micro_batches: usize, kind: StepKind) -> StepBytes {
        let of = |n: usize| n as f64;
        let element = self.precision.dtype().size_in_bytes() as f64;
        let tokens = of(sequences) * of(self.context);
        let logits = element * tokens * of(self.vocabulary);
        let scores = match self.attention {
            Attention::Naive => element * tokens * of(self.context) * of(self.heads),
            Attention::Tiled | Attention::Flash => 0.0,
        };
        let stream = 4.0 * tokens * of(self.d_model);
        let block = element * tokens * (5.0 * of(self.d_model) + 3.0 * of(self.d_ff)) + 2.0 * scores;
        let activations = match (kind, self.checkpoint) {
            // The largest tensor of one block, or the logits.
            (StepKind::Forward, _) => stream + logits.max(scores).max(element * tokens * of(self.d_ff)),
            (_, true) => of(self.layers) * stream + logits,
            (_, false) => of(self.layers) * block + logits,
        };
        // Gradients accumulate over several micro-batches in f32.
        let gradient = if self.precision == Precision::Bf16 && micro_batches <= 1 { 2.0 } else { 4.0 };
        StepBytes {
            weights: self.model_bytes(),
            gradients: if kind == StepKind::Forward { 0.0 } else { gradient * self.count() },
            moments: if kind == StepKind::TrainStep { 8.0 * self.count() } else { 0.0 },
            activations,
        }
    }

    /// FLOP of a training step per token: 6 per weight of a matmul, plus three times the two matmuls of attention,
    /// whose rows attend to half of the `length` keys on average (Kaplan et al., "Scaling laws for neural language
    /// models", 2020, section 2.1).
    pub fn flops_per_token(&self, length: usize) -> f64 {
        let of = |n: usize| n as f64;
        let (d_model, layers) = (of(self.d_model), of(self.layers));
        let head = of(self.vocabulary) * d_model;
        let block = d_model * (of(self.qkv_layout().columns()) + d_model + 3.0 * of(self.d_ff));
        let attention = 2.0 * d_model * of(length);
        6.0 * (layers * block + head) + 3.0 * layers * attention
    }

    /// Checks that the sizes are consistent.
    ///
    /// # Errors
    /// Names the inconsistent sizes.
    pub fn check(&self) -> Result<()> {
        let fail = |message: String| Err(Error::Msg(message));
        for (name, n) in [
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("d_model", self.d_model),
            ("d_ff", self.d_ff),
            ("heads", self.heads),
            ("heads_kv", self.heads_kv),
        ] {
            if n == 0 {
                return fail(format!("expected a {name} of at least 1, found 0"));
            }
        }
        // The checks below compute with these sizes: none may overflow an integer.
        if self.count() > MAX_PARAMETERS {
            return fail(format!(
                "a model with layers {}, d_model {}, d_ff {}, heads {}, heads_kv {} and vocabulary {} has {:.1e} parameters: \
                 expected at most {MAX_PARAMETERS:.1e}",
                self.layers,
                self.d_model,
                self.d_ff,
                self.heads,
                self.heads_kv,
                self.vocabulary,
                self.count()
            ));
        }
        if self.context > MAX_TOKENS {
            return fail(format!("expected a context of at most {MAX_TOKENS} tokens, found {}", self.context));
        }
        if !self.d_model.is_multiple_of(self.heads) {
            let near = nearest_divisors(self.d_model, self.heads);
            return fail(format!("{} heads do not divide the d_model {}: {near}", self.heads, self.d_model));
        }
        if !self.heads.is_multiple_of(self.heads_kv) {
            let near = nearest_divisors(self.heads, self.heads_kv);
            return fail(format!("{} key/value heads do not divide {} heads: {near}", self.heads_kv, self.heads));
        }
        let d = self.d_model / self.heads;
        if d % 2 == 1 || d > 256 {
            return fail(format!(
                "{} heads of a d_model of {} have a head dimension of {d}: expected an even number up to 256, since \
                 RoPE rotates pairs and attention takes up to 256",
                self.heads, self.d_model
            ));
        }
        if !(self.eps > 0.0 && self.rope_base > 0.0) {
            return fail(format!("expected a positive eps and rope_base, found {} and {}", self.eps, self.rope_base));
        }
        if self.attention == Attention::Tiled && (self.tiling.queries == 0 || self.tiling.keys == 0) {
            return fail(format!(
                "expected attention tiles of at least one query and one key, found {} and {}",
                self.tiling.queries, self.tiling.keys
            ));
        }
        if self.fusion == Fusion::Blocks && self.attention != Attention::Flash {
            return fail(format!(
                "fusion `blocks` requires flash attention: choose fusion `ops` or `none` for {} attention",
                self.attention
            ));
        }
        Ok(())
    }
}

/// Largest number of parameters: 2⁴⁸, beyond any memory, and small enough that f64 sums of sizes are exact.
const MAX_PARAMETERS: f64 = (1_u64 << 48) as f64;

/// Largest context length: positions are 32-bit integers.
const MAX_TOKENS: usize = i32::MAX as usize;

/// Names the numbers of heads around `count` that divide `n`, such as "8 and 16 do".
fn nearest_divisors(n: usize, count: usize) -> String {
    let below = (1..count.min(n)).rev().find(|h| n.is_multiple_of(*h));
    let above = (count.saturating_add(1)..=n).find(|h| n.is_multiple_of(*h));
    match (below, above) {
        (Some(a), Some(b)) => format!("{a} and {b} do"),
        (Some(a), None) | (None, Some(a)) => format!("{a} does"),
        (None, None) => "1 does".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_step_are_those_of_its_tensors() {
        let of = |precision, micro_batches, kind| {
            let config = Config { precision, ..Config::default() };
            let StepBytes { weights, gradients, moments, .. } = config.step_bytes(4, micro_batches, kind);
            // Without the metadata of the tensors.
            [weights - 768.0 * config.layers as f64, gradients, moments].map(|bytes| bytes / config.parameters() as f64)
        };
        assert_eq!(of(Precision::F32, 1, StepKind::TrainStep), [4.0, 4.0, 8.0]);
        assert_eq!(of(Precision::Bf16, 1, StepKind::TrainStep), [6.0, 2.0, 8.0]);
        assert_eq!(of(Precision::Bf16, 2, StepKind::TrainStep), [6.0, 4.0, 8.0], "micro-batches add up in f32");
        assert_eq!(of(Precision::F16, 1, StepKind::ForwardBackward), [6.0, 4.0, 0.0]);
        assert_eq!(of(Precision::F32, 1, StepKind::Forward), [4.0, 0.0, 0.0]);
    }
}
