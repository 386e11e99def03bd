//! Modules over `VarBuilder` in place of those of candle-nn, with the same names of variables and the same initial
//! values. Functions named as candle-nn's create them. What differs: `LayerNorm` does not fuse into `RmsNorm`
//! (`remove_mean`), `Embedding::new` takes the table alone, and ids of an embedding are u32.

use candle_core::{Module, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::{Init, LayerNormConfig, VarBuilder, init};

use crate::activation::Epilogue;
use crate::attention_options::AttentionOptions;
use crate::check::bad_argument;
use crate::rope::Rope;

/// A linear layer y = x·Wᵀ + b.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// For a weight [out, in] and a bias [out].
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Linear {
        Linear { weight, bias }
    }

    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        crate::linear_with(x, &self.weight, &Epilogue { bias: self.bias.as_ref(), ..Epilogue::default() })
    }
}

/// A linear layer with a bias: `weight` [out, in] and `bias` [out].
///
/// # Errors
/// Those of the builder.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let bound = 1.0 / (in_dim as f64).sqrt();
    let bias = vb.get_with_hints(out_dim, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Linear { bias: Some(bias), ..linear_no_bias(in_dim, out_dim, vb)? })
}

/// A linear layer without a bias: `weight` [out, in].
///
/// # Errors
/// Those of the builder.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    Ok(Linear::new(vb.get_with_hints((out_dim, in_dim), "weight", init::DEFAULT_KAIMING_NORMAL)?, None))
}

/// RMSNorm over the last dimension.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    pub fn new(weight: Tensor, eps: f64) -> RmsNorm {
        RmsNorm { weight, eps }
    }

    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub fn eps(&self) -> f64 {
        self.eps
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        crate::rms_norm(x, &self.weight, self.eps)
    }
}

/// RMSNorm of rows of `size` elements: `weight` [size].
///
/// # Errors
/// Those of the builder.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm::new(vb.get_with_hints(size, "weight", Init::Const(1.0))?, eps))
}

/// LayerNorm over the last dimension, with weight and bias.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> LayerNorm {
        LayerNorm { weight, bias, eps }
    }

    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub fn bias(&self) -> &Tensor {
        &self.bias
    }

    pub fn eps(&self) -> f64 {
        self.eps
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        crate::layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}

/// LayerNorm of rows of `size` elements: `weight` and, unless the configuration is not affine, `bias` [size]. An ε is a
/// configuration.
///
/// # Errors
/// Those of the builder; a configuration that does not remove the mean.
pub fn layer_norm<C: Into<LayerNormConfig>>(size: usize, config: C, vb: VarBuilder) -> Result<LayerNorm> {
    let LayerNormConfig { eps, remove_mean, affine } = config.into();
    if !remove_mean {
        return Err(bad_argument("layer_norm", "remove_mean", "true", "false: use rms_norm"));
    }
    let weight = vb.get_with_hints(size, "weight", Init::Const(1.0))?;
    let bias = if affine { vb.get_with_hints(size, "bias", Init::Const(0.0))? } else { weight.zeros_like()?.detach() };
    Ok(LayerNorm::new(weight, bias, eps))
}

/// LayerNorm of rows of `size` elements without a bias: `weight` [size].
///
/// # Errors
/// Those of the builder.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    layer_norm(size, LayerNormConfig { eps, affine: false, ..LayerNormConfig::default() }, vb)
}

/// A table of vectors, of which u32 ids select rows.
#[derive(Clone, Debug)]
pub struct Embedding {
    embeddings: Tensor,
}

impl Embedding {
    /// For a table [vocabulary, d].
    pub fn new(embeddings: Tensor) -> Embedding {
        Embedding { embeddings }
    }

    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        crate::embedding(ids, &self.embeddings, self.embeddings.dtype())
    }
}

/// An embedding: `weight` [vocabulary, d].
///
/// # Errors
/// Those of the builder.
pub fn embedding(vocabulary: usize, d: usize, vb: VarBuilder) -> Result<Embedding> {
    Ok(Embedding::new(vb.get_with_hints((vocabulary, d), "weight", Init::Randn { mean: 0.0, stdev: 1.0 })?))
}

/// Rotary position embedding of queries and keys.
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    rope: Rope,
}

impl RotaryEmbedding {
    pub fn new(rope: Rope) -> RotaryEmbedding {
        RotaryEmbedding { rope }
    }

    /// Rotates q [batch, heads, length, d] and k [batch, heads_kv, length, d], whose first position is `start`.
    ///
    /// # Errors
    /// As [`rope`](crate::rope()).
    pub fn forward(&self, q: &Tensor, k: &Tensor, start: usize) -> Result<(Tensor, Tensor)> {
        Ok((crate::rope(q, &self.rope, start)?, crate::rope(k, &self.rope, start)?))
    }
}

/// Sizes of an [`Attention`].
#[derive(Clone, Debug)]
pub struct AttentionConfig {
    pub d_model: usize,
    pub heads: usize,
    /// Heads of keys and values, which divide `heads`.
    pub heads_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    pub options: AttentionOptions,
}

/// Self-attention with projections: queries, keys and values by linear layers without bias, rotary embedding if there
/// is one, FlashAttention, and the projection of its result.
#[derive(Clone, Debug)]
pub struct Attention {
    config: AttentionConfig,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    rotary: Option<RotaryEmbedding>,
}

/// Attention with the variables `q_proj.weight`, `k_proj.weight`, `v_proj.weight` and `o_proj.weight`, as in Llama's
/// files.
///
/// # Errors
/// A number of key/value heads that does not divide that of query heads; those of the builder.
pub fn attention(config: AttentionConfig, rotary: Option<RotaryEmbedding>, vb: VarBuilder) -> Result<Attention> {
    let AttentionConfig { d_model, heads, heads_kv, head_dim, .. } = config;
    if heads_kv == 0 || !heads.is_multiple_of(heads_kv) {
        let expected = format!("a number of key/value heads that divides the {heads} query heads");
        return Err(bad_argument("attention", "heads_kv", expected, heads_kv));
    }
    let layer = |name: &str, from: usize, to: usize| linear_no_bias(from, to, vb.pp(name));
    Ok(Attention {
        config,
        q: layer("q_proj", d_model, heads * head_dim)?,
        k: layer("k_proj", d_model, heads_kv * head_dim)?,
        v: layer("v_proj", d_model, heads_kv * head_dim)?,
        o: layer("o_proj", heads * head_dim, d_model)?,
        rotary,
    })
}

impl Attention {
    /// Maps x [batch, length, d_model] to a tensor of that shape. With a cache, x continues the sequences whose keys and
    /// values it has, and those of x are appended.
    ///
    /// # Errors
    /// An x of another shape; more positions than the rotary embedding or the cache has.
    pub fn forward_cached(&self, x: &Tensor, cache: Option<&mut KvCache>) -> Result<Tensor> {
        let AttentionConfig { d_model, heads, heads_kv, head_dim, ref options } = self.config;
        let &[batch, length, columns] = x.dims() else {
            let found = format!("the shape {:?}", x.dims());
            return Err(bad_argument("attention", "x", format!("a tensor [batch, length, {d_model}]"), found));
        };
        if columns != d_model {
            return Err(bad_argument("attention", "x", format!("rows of {d_model} elements"), columns));
        }
        let split = |x: Tensor, heads: usize| x.reshape((batch, length, heads, head_dim))?.transpose(1, 2);
        let (mut q, mut k) = (split(self.q.forward(x)?, heads)?, split(self.k.forward(x)?, heads_kv)?);
        let mut v = split(self.v.forward(x)?, heads_kv)?;
        let start = cache.as_ref().map_or(0, |cache| cache.current_seq_len());
        if let Some(rotary) = &self.rotary {
            (q, k) = rotary.forward(&q, &k, start)?;
        }
        if let Some(cache) = cache {
            (k, v) = cache.append(&k.contiguous()?, &v.contiguous()?)?;
        }
        let y = crate::flash_attention(&q, &k, &v, options)?;
        self.o.forward(&y.transpose(1, 2)?.reshape((batch, length, heads * head_dim))?)
    }
}

impl Module for Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_cached(x, None)
    }
}
