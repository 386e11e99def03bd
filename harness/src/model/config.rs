//! What a model is: sizes, parts, precision.

use std::fmt;
use std::str::FromStr;

use candle_core::{DType, Error, Result};
use serde::{Deserialize, Serialize};

use crate::ops::attention::{Heads, Tiling};

/// Everything that a model's shape and arithmetic depend on, beside its weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Number of tokens.
    pub vocabulary: usize,
    /// Largest number of tokens in a sequence.
    pub context: usize,
    /// Elements of the residual stream.
    pub width: usize,
    /// Elements inside a feed-forward layer.
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    /// Heads of keys and values: a divisor of `heads`, and equal to it by default.
    pub heads_kv: usize,
    /// Base of the positions' angles.
    pub rope_base: f64,
    /// ε of the norms.
    pub eps: f64,
    pub norm: Norm,
    pub attention: Attention,
    /// Tiles of [`Attention::Tiled`].
    pub tiling: Tiling,
    pub fusion: Fusion,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// Whether blocks keep only their input, and compute the rest again backward.
    pub checkpoint: bool,
    pub precision: Precision,
}

/// How much of a step runs, for [`Config::step_bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Forward,
    ForwardBackward,
    TrainStep,
}

/// Bytes that a step takes at least, by what they are for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepBytes {
    /// Parameters in f32, and beside them in the type of products where that is a shorter one.
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

/// Which norm stands before attention, feed-forward and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Norm {
    Rms,
    Layer,
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// The whole matrix of scores, in candle's ops.
    Naive,
    /// FlashAttention-2 in candle's ops.
    Tiled,
    /// FlashAttention-2 by our kernels.
    Flash,
}

/// How much is computed by our kernels at once, beside attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fusion {
    /// Norms, positions, activations and loss in candle's own ops.
    None,
    /// A kernel for each of them.
    Ops,
    /// These kernels, and a whole block as one op with a backward pass of its own: nothing is added or kept needlessly. Needs
    /// [`Attention::Flash`].
    Blocks,
}

/// What products, and what is kept between them, are in. Parameters, their gradients, sums, and the insides of norms, softmax
/// and loss are f32 in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    F32,
    /// f32 whose products are three products of tf32 each on a GPU (<https://arxiv.org/abs/2203.03341>): about as exact as f32, on
    /// tensor cores, by our own kernel. The CPU multiplies exactly.
    Tf32x3,
    /// f32 whose products round their operands to 10 bits on a GPU. The CPU multiplies exactly.
    Tf32,
    Bf16,
    /// Needs a scaled loss: see [`crate::train::LossScale`].
    F16,
}

/// The words of an enum on a command line.
macro_rules! words {
    ($ty:ident, $what:literal, $($word:literal => $variant:ident),*) => {
        impl $ty {
            /// What can be chosen.
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
words!(Norm, "norm", "rms" => Rms, "layer" => Layer);
words!(Attention, "attention", "naive" => Naive, "tiled" => Tiled, "flash" => Flash);
words!(Fusion, "fusion", "none" => None, "ops" => Ops, "blocks" => Blocks);
words!(Precision, "precision", "f32" => F32, "tf32x3" => Tf32x3, "tf32" => Tf32, "bf16" => Bf16, "f16" => F16);

impl Precision {
    /// The type of products and of what is kept between them.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 | Precision::Tf32x3 | Precision::Tf32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }

    /// Sets how f32 products round on a GPU in this process from now on. Without meaning on the CPU.
    pub fn apply(self) {
        #[cfg(feature = "cuda")]
        {
            candle_core::cuda::set_gemm_reduced_precision_f32(self == Precision::Tf32);
            crate::ops::multiply_by_parts(self == Precision::Tf32x3);
        }
    }
}

/// The sizes of the assignment's table 1: name, width, hidden, layers, heads.
pub const SIZES: [(&str, usize, usize, usize, usize); 5] = [
    ("small", 768, 3072, 12, 12),
    ("medium", 1024, 4096, 24, 16),
    ("large", 1280, 5120, 36, 20),
    ("xl", 1600, 6400, 48, 25),
    ("2.7B", 2560, 10240, 32, 32),
];

impl Default for Config {
    /// A model that trains on a CPU in minutes: 4 layers of 128, for contexts of 128 tokens.
    fn default() -> Config {
        Config {
            vocabulary: 10_000,
            context: 128,
            width: 128,
            hidden: 512,
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
    /// Names of what changes no bit of a loss or a gradient: a run may go on with other values.
    pub const FREE: [&str; 1] = ["checkpoint"];

    /// A size of [`SIZES`], with its vocabulary of 10 000.
    ///
    /// # Errors
    /// An unknown name; says which one is nearest.
    pub fn named(size: &str, context: usize) -> Result<Config> {
        let wanted = size.to_lowercase();
        let found = SIZES.iter().find(|(name, ..)| name.to_lowercase() == wanted);
        let Some(&(_, width, hidden, layers, heads)) = found else {
            let names = SIZES.map(|(name, ..)| name);
            let nearest = names.iter().min_by_key(|name| strsim::levenshtein(&wanted, &name.to_lowercase()));
            let hint = match nearest {
                Some(nearest) if strsim::levenshtein(&wanted, &nearest.to_lowercase()) <= 2 => {
                    format!("did you mean `{nearest}`?")
                }
                _ => format!("the sizes are {}", names.join(", ")),
            };
            return Err(Error::Msg(format!("unknown model size `{size}`: {hint}")));
        };
        Ok(Config { context, width, hidden, layers, heads, heads_kv: heads, ..Config::default() })
    }

    /// The name of this size, if it is one of [`SIZES`].
    pub fn size_name(&self) -> Option<&'static str> {
        let size = (self.width, self.hidden, self.layers, self.heads);
        SIZES.iter().find(|&&(_, width, hidden, layers, heads)| (width, hidden, layers, heads) == size).map(|s| s.0)
    }

    /// How attention's columns are divided.
    pub fn head_columns(&self) -> Heads {
        Heads { heads: self.heads, heads_kv: self.heads_kv, d: self.width / self.heads.max(1) }
    }

    /// Number of parameters, as papers count them, of a config that [`Config::check`] accepts.
    pub fn parameters(&self) -> usize {
        self.count() as usize
    }

    /// The same of any numbers. Exact below 2⁵³.
    fn count(&self) -> f64 {
        let of = |n: usize| n as f64;
        let (width, hidden, heads, heads_kv) = (of(self.width), of(self.hidden), of(self.heads), of(self.heads_kv));
        let qkv = width * (heads + 2.0 * heads_kv) * of(self.width / self.heads.max(1));
        let norm = if self.norm == Norm::Layer { 2.0 * width } else { width };
        let block = qkv + width * width + 3.0 * hidden * width + 2.0 * norm;
        let heads = if self.tied { 1.0 } else { 2.0 };
        of(self.layers) * block + heads * of(self.vocabulary) * width + norm
    }

    /// Bytes of host or device memory that the model takes at least to run forward: its values, and what is known of each tensor.
    pub fn model_bytes(&self) -> f64 {
        let shorter = if self.precision.dtype().size_in_bytes() < 4 { 2.0 } else { 0.0 };
        (4.0 + shorter) * self.count() + 128.0 * 6.0 * self.layers as f64
    }

    /// Bytes that a step takes at least, of so many micro-batches of `windows` windows: the parameters with what training keeps for each,
    /// the logits, and what the blocks keep for backward. Activations follow Korthikanti et al., "Reducing activation recomputation in
    /// large transformer models" (2023), section 4.1. What is refused by it would not have fitted.
    pub fn step_bytes(&self, windows: usize, micro_batches: usize, kind: Kind) -> StepBytes {
        let of = |n: usize| n as f64;
        let element = self.precision.dtype().size_in_bytes() as f64;
        let tokens = of(windows) * of(self.context);
        let logits = element * tokens * of(self.vocabulary);
        let scores = match self.attention {
            Attention::Naive => element * tokens * of(self.context) * of(self.heads),
            Attention::Tiled | Attention::Flash => 0.0,
        };
        let stream = 4.0 * tokens * of(self.width);
        let block = element * tokens * (5.0 * of(self.width) + 3.0 * of(self.hidden)) + 2.0 * scores;
        let activations = match (kind, self.checkpoint) {
            // The largest tensor of one block, or the logits.
            (Kind::Forward, _) => stream + logits.max(scores).max(element * tokens * of(self.hidden)),
            (_, true) => of(self.layers) * stream + logits,
            (_, false) => of(self.layers) * block + logits,
        };
        // Those of several micro-batches are added up in f32.
        let gradient = if self.precision == Precision::Bf16 && micro_batches <= 1 { 2.0 } else { 4.0 };
        StepBytes {
            weights: self.model_bytes(),
            gradients: if kind == Kind::Forward { 0.0 } else { gradient * self.count() },
            moments: if kind == Kind::TrainStep { 8.0 * self.count() } else { 0.0 },
            activations,
        }
    }

    /// Multiplications and additions of a training step per token: 6 per weight of a product, and attention's two products of
    /// rows that see half of the `length` keys on average, three times (Kaplan et al., "Scaling laws for neural language
    /// models", 2020, section 2.1).
    pub fn flops_per_token(&self, length: usize) -> f64 {
        let of = |n: usize| n as f64;
        let (width, layers) = (of(self.width), of(self.layers));
        let head = of(self.vocabulary) * width;
        let block = width * (of(self.head_columns().columns()) + width + 3.0 * of(self.hidden));
        let attention = 2.0 * width * of(length);
        6.0 * (layers * block + head) + 3.0 * layers * attention
    }

    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Says which number does not, and to which.
    pub fn check(&self) -> Result<()> {
        let fail = |message: String| Err(Error::Msg(message));
        for (name, n) in [
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("width", self.width),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("heads_kv", self.heads_kv),
        ] {
            if n == 0 {
                return fail(format!("a model's {name} is at least 1, found 0"));
            }
        }
        // What follows computes with these numbers, and none of it may leave an integer.
        if self.count() > MOST_PARAMETERS {
            return fail(format!(
                "a model with layers {}, width {}, hidden {}, heads {}, heads_kv {} and vocabulary {} has {:.1e} parameters: \
                 expected at most {MOST_PARAMETERS:.1e}",
                self.layers,
                self.width,
                self.hidden,
                self.heads,
                self.heads_kv,
                self.vocabulary,
                self.count()
            ));
        }
        if self.context > MOST_TOKENS {
            return fail(format!("a model's context is at most {MOST_TOKENS} tokens, found {}", self.context));
        }
        if !self.width.is_multiple_of(self.heads) {
            let near = nearest_divisors(self.width, self.heads);
            return fail(format!("{} heads do not divide a width of {}: {near}", self.heads, self.width));
        }
        if !self.heads.is_multiple_of(self.heads_kv) {
            let near = nearest_divisors(self.heads, self.heads_kv);
            return fail(format!(
                "{} heads of keys and values do not divide {} heads: {near}",
                self.heads_kv, self.heads
            ));
        }
        let d = self.width / self.heads;
        if d % 2 == 1 || d > 256 {
            return fail(format!(
                "{} heads of a width of {} have {d} columns each: positions turn pairs, and attention takes up to 256, so \
                 expected an even number up to 256",
                self.heads, self.width
            ));
        }
        if !(self.eps > 0.0 && self.rope_base > 0.0) {
            return fail(format!("eps and rope_base are positive, found {} and {}", self.eps, self.rope_base));
        }
        if self.attention == Attention::Tiled && (self.tiling.queries == 0 || self.tiling.keys == 0) {
            return fail(format!("tiles of attention have at least one row, found {:?}", self.tiling));
        }
        if self.fusion == Fusion::Blocks && self.attention != Attention::Flash {
            return fail(format!(
                "whole blocks run with flash attention: choose fusion `ops` or `none` for {} attention",
                self.attention
            ));
        }
        Ok(())
    }
}

/// Far beyond any memory, and small enough that sums of sizes stay exact: 2⁴⁸.
const MOST_PARAMETERS: f64 = (1_u64 << 48) as f64;

/// Positions are 32-bit numbers.
const MOST_TOKENS: usize = i32::MAX as usize;

/// "8 and 16 do", for numbers of heads around `count` that divide `n`.
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
            // Without what is known of each tensor.
            [weights - 768.0 * config.layers as f64, gradients, moments].map(|bytes| bytes / config.parameters() as f64)
        };
        assert_eq!(of(Precision::F32, 1, Kind::TrainStep), [4.0, 4.0, 8.0]);
        assert_eq!(of(Precision::Bf16, 1, Kind::TrainStep), [6.0, 2.0, 8.0]);
        assert_eq!(of(Precision::Bf16, 2, Kind::TrainStep), [6.0, 4.0, 8.0], "micro-batches add up in f32");
        assert_eq!(of(Precision::F16, 1, Kind::ForwardBackward), [6.0, 4.0, 0.0]);
        assert_eq!(of(Precision::F32, 1, Kind::Forward), [4.0, 0.0, 0.0]);
    }
}
