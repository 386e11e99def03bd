//! The assignment's Transformer: pre-norm blocks of causal attention with rotary position embedding and a SwiGLU
//! feed-forward.
//!
//! ```text
//! x = embedding[tokens]
//! for each block:  x += out(attention(rope(q), rope(k), v)) of q, k, v = qkv(norm(x))
//!                  x += down(silu(gate) · value)            of gate, value = gate_up(norm(x))
//! logits = head(norm(x))
//! ```
//!
//! The same model has several implementations for comparison: see [`Attention`], [`Fusion`] and [`Config::checkpoint`].
//! All of them compute the same function.
//!
//! The residual stream x is f32 in every precision, because it sums many small terms; matmul operands have the dtype of
//! the precision.
//!
//! Files in reading order: `config.rs`, this one, `layers.rs` (a block as ops of the autograd graph), `stack.rs` (the
//! model as one op), `block.rs` and `head.rs` (its parts), `checkpoint.rs` (activation checkpointing of blocks in the
//! autograd graph), `graph_runner.rs` (forward and backward as a CUDA graph).

mod block;
mod checkpoint;
mod config;
mod graph_runner;
mod head;
mod layers;
mod stack;

use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Tensor};

pub use config::{Attention, Config, Fusion, ModelSize, Norm, Precision, SIZES, StepBytes, StepKind};
pub use graph_runner::ModelGraphRunner;

use crate::ops::{self, Rope};
use crate::params::{Init, Param, ParamSpec, Params};

/// A model on a device. Clones share parameters.
#[derive(Clone)]
pub struct Transformer {
    config: Config,
    params: Params,
    embedding: Param,
    blocks: Vec<Arc<Block>>,
    norm: NormWeights,
    head: Param,
}

/// The parameters of a block, and what all blocks share.
struct Block {
    index: usize,
    config: Config,
    rope: Rope,
    attention_norm: NormWeights,
    qkv: Param,
    out: Param,
    mlp_norm: NormWeights,
    gate_up: Param,
    down: Param,
}

/// A norm's weight, and its bias if it has one.
#[derive(Clone)]
struct NormWeights {
    weight: Param,
    bias: Option<Param>,
}

impl NormWeights {
    fn new(params: &Params, prefix: &str, norm: Norm) -> Result<NormWeights> {
        let weight = params.get(&format!("{prefix}.weight"))?;
        let bias = match norm {
            Norm::Rms => None,
            Norm::Layer => Some(params.get(&format!("{prefix}.bias"))?),
        };
        Ok(NormWeights { weight, bias })
    }

    fn params(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.weight).chain(&self.bias)
    }
}

impl Config {
    /// Describes the parameters of the model in memory order: matrices first, in order of use, then the vectors, which
    /// have no weight decay.
    ///
    /// Initialization: matrices normal with variance 2 / (inputs + outputs) (Glorot and Bengio, "Understanding the
    /// difficulty of training deep feedforward neural networks", 2010), where packed projections (q, k and v; gate and
    /// value) count the outputs of one part; embeddings with variance 1, or 1/d_model if they are the head too.
    pub fn specs(&self) -> Vec<ParamSpec> {
        let matrix = |name: String, outputs: usize, inputs: usize, fan_out: usize| {
            ParamSpec::matrix(name, &[outputs, inputs], (2.0 / (inputs + fan_out) as f64).sqrt())
        };
        let (d_model, d_ff) = (self.d_model, self.d_ff);
        let embedding_std = if self.tied { 1.0 / (d_model as f64).sqrt() } else { 1.0 };
        let mut specs = vec![ParamSpec::matrix("embedding.weight", &[self.vocabulary, d_model], embedding_std)];
        for i in 0..self.layers {
            let name = |part: &str| format!("blocks.{i}.{part}.weight");
            specs.push(matrix(name("attention.qkv"), self.qkv_layout().columns(), d_model, d_model));
            specs.push(matrix(name("attention.out"), d_model, d_model, d_model));
            specs.push(matrix(name("mlp.gate_up"), 2 * d_ff, d_model, d_ff));
            specs.push(matrix(name("mlp.down"), d_model, d_ff, d_model));
        }
        if !self.tied {
            specs.push(matrix("head.weight".into(), self.vocabulary, d_model, self.vocabulary));
        }
        let mut norm = |prefix: String| {
            specs.push(ParamSpec::vector(format!("{prefix}.weight"), d_model, Init::Ones));
            if self.norm == Norm::Layer {
                specs.push(ParamSpec::vector(format!("{prefix}.bias"), d_model, Init::Zeros));
            }
        };
        for i in 0..self.layers {
            norm(format!("blocks.{i}.attention.norm"));
            norm(format!("blocks.{i}.mlp.norm"));
        }
        norm("norm".into());
        specs
    }
}

impl Transformer {
    /// Creates a model with initial values that depend on `seed`.
    ///
    /// # Errors
    /// An inconsistent config, or out of memory.
    pub fn new(config: &Config, device: &Device, seed: u64) -> Result<Transformer> {
        // `Params::new` allocates gradients in f32, as for two micro-batches, even if training converts them to bf16.
        let bytes = config.step_bytes(0, 2, StepKind::ForwardBackward).total();
        Transformer::create_checked(config, device, bytes, || Params::new(config.specs(), device, seed))
    }

    /// As [`Transformer::new`], without memory for gradients: for forward passes only.
    ///
    /// # Errors
    /// As [`Transformer::new`].
    pub fn for_inference(config: &Config, device: &Device, seed: u64) -> Result<Transformer> {
        Transformer::create_checked(config, device, config.model_bytes(), || {
            Params::without_grads(config.specs(), device, seed)
        })
    }

    /// Creates a model with the parameters that `make` returns, after a check of the config and, on the CPU, of the host
    /// memory: the model needs at least `bytes`.
    fn create_checked(
        config: &Config,
        device: &Device,
        bytes: f64,
        make: impl FnOnce() -> Result<Params>,
    ) -> Result<Transformer> {
        config.check()?;
        ops::memory::kernel_device(device)?.check_memory(bytes).map_err(ops::memory::kernel_error)?;
        Transformer::with_params(config, make()?)
    }

    /// Creates a model from existing parameters and their values. Creates the compute weights if they are missing.
    ///
    /// # Errors
    /// As [`Transformer::new`]; also parameters of another model.
    pub fn with_params(config: &Config, params: Params) -> Result<Transformer> {
        config.check()?;
        let specs = config.specs();
        if params.len() != specs.len() {
            let message = format!("the model has {} parameters, found {}", specs.len(), params.len());
            return Err(Error::Msg(message));
        }
        for spec in &specs {
            let param = params.get(&spec.name)?;
            if param.shape() != spec.shape {
                let (name, found) = (&spec.name, param.shape());
                return Err(Error::Msg(format!("the model's `{name}` is {:?}, found {found:?}", spec.shape)));
            }
        }
        config.precision.apply();
        let dtype = config.precision.dtype();
        if params.compute_weights().map(|weights| weights.dtype()) != Some(dtype) {
            params.set_compute_dtype(dtype)?;
        }
        let rope = Rope::new(config.d_model / config.heads, config.rope_base, config.context, params.device())?;
        let rope = if config.fusion == Fusion::None { rope.with_tables()? } else { rope };
        let blocks = (0..config.layers).map(|i| Block::new(config, &params, &rope, i).map(Arc::new));
        let blocks = blocks.collect::<Result<_>>()?;
        let embedding = params.get("embedding.weight")?;
        let head = if config.tied { embedding.clone() } else { params.get("head.weight")? };
        let norm = NormWeights::new(&params, "norm", config.norm)?;
        Ok(Transformer { config: config.clone(), params, embedding, blocks, norm, head })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Returns logits [batch, length, vocabulary] of tokens u32 [batch, length], in the dtype of the precision.
    ///
    /// # Errors
    /// More tokens than the context length, tokens outside of the vocabulary, and those of the launches.
    pub fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let x = self.residual_stream(tokens)?;
        ops::linear(&self.norm.apply(&self.config, &x)?, &self.head)
    }

    /// Returns the mean cross-entropy of the logits of `tokens` with `targets`, both u32 [batch, length]: an f32
    /// scalar.
    ///
    /// # Errors
    /// As [`Transformer::logits`]; also targets of another shape.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if tokens.dims() != targets.dims() {
            let message = format!("expected one target per token: found {:?} and {:?}", tokens.dims(), targets.dims());
            return Err(Error::Msg(message));
        }
        let targets = targets.flatten_all()?.contiguous()?;
        if self.config.fusion == Fusion::Blocks {
            self.check_length(tokens)?;
            return stack::loss(self, tokens, &targets);
        }
        let logits = self.logits(tokens)?.flatten_to(1)?;
        match self.config.fusion {
            Fusion::None => ops::cross_entropy_unfused(&logits, &targets),
            Fusion::Ops | Fusion::Blocks => ops::cross_entropy(&logits, &targets),
        }
    }

    /// Runs forward, and calls `observe` with the outputs of the embedding, each block, the last norm and the head, in
    /// order: for locating numerical errors.
    ///
    /// # Errors
    /// As [`Transformer::logits`], and those of `observe`.
    pub fn trace(&self, tokens: &Tensor, observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>) -> Result<()> {
        let x = self.residual_stream_observed(tokens, observe)?;
        let normed = self.norm.apply(&self.config, &x)?;
        observe("norm", &normed)?;
        observe("head", &ops::linear(&normed, &self.head)?)
    }

    /// Returns the residual stream after the blocks for tokens [batch, length]: [batch, length, d_model], before the
    /// last norm.
    fn residual_stream(&self, tokens: &Tensor) -> Result<Tensor> {
        self.residual_stream_observed(tokens, &mut |_, _| Ok(()))
    }

    fn residual_stream_observed(
        &self,
        tokens: &Tensor,
        observe: &mut dyn FnMut(&str, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        self.check_length(tokens)?;
        if self.config.fusion == Fusion::Blocks {
            return stack::residual_stream(self, tokens, observe);
        }
        let mut x = ops::embedding(tokens, &self.embedding, DType::F32)?;
        observe("embedding", &x)?;
        for (i, block) in self.blocks.iter().enumerate() {
            x = if self.config.checkpoint { checkpoint::apply(block, &x)? } else { block.forward(&x)? };
            observe(&format!("blocks.{i}"), &x)?;
        }
        Ok(x)
    }

    fn check_length(&self, tokens: &Tensor) -> Result<()> {
        let (_, length) = tokens.dims2()?;
        if length <= self.config.context {
            return Ok(());
        }
        let message = format!(
            "expected at most {} tokens, the context length of the model, found {length}: shorten the input, or use a \
             model with a larger context",
            self.config.context
        );
        Err(Error::Msg(message))
    }
}

impl Block {
    fn new(config: &Config, params: &Params, rope: &Rope, i: usize) -> Result<Block> {
        let get = |part: &str| params.get(&format!("blocks.{i}.{part}.weight"));
        let norm = |part: &str| NormWeights::new(params, &format!("blocks.{i}.{part}.norm"), config.norm);
        Ok(Block {
            index: i,
            config: config.clone(),
            rope: rope.clone(),
            attention_norm: norm("attention")?,
            qkv: get("attention.qkv")?,
            out: get("attention.out")?,
            mlp_norm: norm("mlp")?,
            gate_up: get("mlp.gate_up")?,
            down: get("mlp.down")?,
        })
    }

    /// All parameters of the block, in order of use.
    fn params(&self) -> impl Iterator<Item = &Param> {
        let attention = self.attention_norm.params().chain([&self.qkv, &self.out]);
        attention.chain(self.mlp_norm.params()).chain([&self.gate_up, &self.down])
    }
}
