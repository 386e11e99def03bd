//! Llama as in candle-transformers 0.11 (`models/llama.rs`): the same formulas and names of variables, with the ops of
//! one of three libraries. It is rebuilt here because candle-transformers' returns the logits of the last position only,
//! keeps its layers private, and calls ops that have no gradient.

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder, embedding, linear_no_bias, rotary_emb};
use tilewright_candle::{self as tw, AttentionOptions, Rope};

/// Whose ops compute norms, rotary embedding, attention and activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ops {
    /// Those of candle-transformers: fused where candle-nn fuses, without gradients.
    CandleFused,
    /// Candle's ops that have gradients.
    Candle,
    Tilewright,
}

#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub vocabulary: usize,
    pub d_model: usize,
    pub d_ff: usize,
    pub layers: usize,
    pub heads: usize,
    pub heads_kv: usize,
    pub max_length: usize,
}

const EPS: f64 = 1e-5;
const THETA: f64 = 10_000.0;

impl Config {
    fn head_dim(&self) -> usize {
        self.d_model / self.heads
    }
}

struct Norm(Tensor);

impl Norm {
    fn new(d: usize, vb: VarBuilder) -> Result<Norm> {
        Ok(Norm(vb.get_with_hints(d, "weight", candle_nn::Init::Const(1.0))?))
    }

    fn forward(&self, x: &Tensor, ops: Ops) -> Result<Tensor> {
        match ops {
            Ops::CandleFused => candle_nn::ops::rms_norm(x, &self.0, EPS as f32),
            Ops::Candle => candle_nn::RmsNorm::new(self.0.clone(), EPS).forward_diff(x),
            Ops::Tilewright => tw::rms_norm(x, &self.0, EPS),
        }
    }
}

struct Block {
    norms: [Norm; 2],
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

pub struct Llama {
    config: Config,
    ops: Ops,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    head: Linear,
    rope: Rope,
    /// cos and sin [max_length, head_dim / 2], and the causal mask [max_length, max_length], for candle's ops.
    tables: [Tensor; 2],
    mask: Tensor,
}

impl Llama {
    pub fn new(config: Config, ops: Ops, vb: VarBuilder) -> Result<Llama> {
        let Config { vocabulary, d_model, d_ff, layers, heads_kv, max_length, .. } = config;
        let (device, head_dim) = (vb.device().clone(), config.head_dim());
        let block = |i: usize| {
            let vb = vb.pp(format!("model.layers.{i}"));
            let (attention, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
            Ok(Block {
                norms: [
                    Norm::new(d_model, vb.pp("input_layernorm"))?,
                    Norm::new(d_model, vb.pp("post_attention_layernorm"))?,
                ],
                q: linear_no_bias(d_model, d_model, attention.pp("q_proj"))?,
                k: linear_no_bias(d_model, heads_kv * head_dim, attention.pp("k_proj"))?,
                v: linear_no_bias(d_model, heads_kv * head_dim, attention.pp("v_proj"))?,
                o: linear_no_bias(d_model, d_model, attention.pp("o_proj"))?,
                gate: linear_no_bias(d_model, d_ff, mlp.pp("gate_proj"))?,
                up: linear_no_bias(d_model, d_ff, mlp.pp("up_proj"))?,
                down: linear_no_bias(d_ff, d_model, mlp.pp("down_proj"))?,
            })
        };
        let rope = Rope::new(head_dim, THETA, max_length, &device)?.with_halves();
        Ok(Llama {
            config,
            ops,
            embedding: embedding(vocabulary, d_model, vb.pp("model.embed_tokens"))?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            norm: Norm::new(d_model, vb.pp("model.norm"))?,
            head: linear_no_bias(d_model, vocabulary, vb.pp("lm_head"))?,
            rope,
            tables: tables(head_dim, max_length, vb.dtype(), &device)?,
            mask: causal_mask(max_length, &device)?,
        })
    }

    /// The stream after the last norm, for tokens [batch, length].
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = match self.ops {
            Ops::Tilewright => tw::embedding(tokens, self.embedding.embeddings(), self.embedding.embeddings().dtype())?,
            _ => self.embedding.forward(tokens)?,
        };
        for block in &self.blocks {
            x = (self.attention(block, &block.norms[0].forward(&x, self.ops)?)? + x)?;
            let normed = block.norms[1].forward(&x, self.ops)?;
            let (gate, up) = (self.linear(&block.gate, &normed)?, self.linear(&block.up, &normed)?);
            let inner = match self.ops {
                Ops::Tilewright => tw::swiglu_pair(&gate, &up)?,
                _ => (candle_nn::ops::silu(&gate)? * up)?,
            };
            x = (self.linear(&block.down, &inner)? + x)?;
        }
        self.norm.forward(&x, self.ops)
    }

    /// Logits [batch, length, vocabulary], f32.
    pub fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        self.linear(&self.head, &self.hidden(tokens)?)?.to_dtype(DType::F32)
    }

    /// The mean cross-entropy of the logits of tokens [batch, length] with targets [batch, length].
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if self.ops == Ops::Tilewright {
            return tw::linear_cross_entropy(&self.hidden(tokens)?, self.head.weight(), targets);
        }
        candle_nn::loss::cross_entropy(&self.logits(tokens)?.flatten_to(1)?, &targets.flatten_all()?)
    }

    fn linear(&self, layer: &Linear, x: &Tensor) -> Result<Tensor> {
        match self.ops {
            Ops::Tilewright => tw::linear(x, layer.weight()),
            _ => layer.forward(x),
        }
    }

    fn attention(&self, block: &Block, x: &Tensor) -> Result<Tensor> {
        let ((batch, length, _), head_dim) = (x.dims3()?, self.config.head_dim());
        let heads = |layer: &Linear, heads: usize| {
            self.linear(layer, x)?.reshape((batch, length, heads, head_dim))?.transpose(1, 2)
        };
        let q = heads(&block.q, self.config.heads)?;
        let [k, v] = [heads(&block.k, self.config.heads_kv)?, heads(&block.v, self.config.heads_kv)?];
        let y = match self.ops {
            Ops::Tilewright => {
                let [q, k] = [tw::rope(&q, &self.rope, 0)?, tw::rope(&k, &self.rope, 0)?];
                tw::flash_attention(&q, &k, &v, &AttentionOptions::new(true))?
            }
            _ => self.candle_attention(q, k, v)?,
        };
        self.linear(&block.o, &y.transpose(1, 2)?.reshape(x.shape())?)
    }

    fn candle_attention(&self, q: Tensor, k: Tensor, v: Tensor) -> Result<Tensor> {
        let (_, _, length, head_dim) = q.dims4()?;
        let rotate = |x: &Tensor| {
            let [cos, sin] = [self.tables[0].narrow(0, 0, length)?, self.tables[1].narrow(0, 0, length)?];
            match self.ops {
                Ops::CandleFused => rotary_emb::rope(&x.contiguous()?, &cos, &sin),
                _ => rotary_emb::rope_slow(&x.contiguous()?, &cos, &sin),
            }
        };
        let group = self.config.heads / self.config.heads_kv;
        let (q, k, v) = (rotate(&q)?, repeat_kv(rotate(&k)?, group)?, repeat_kv(v, group)?);
        let dtype = q.dtype();
        let [q, k, v] = [q, k, v].map(|x| x.to_dtype(DType::F32));
        let scores = (q?.matmul(&k?.t()?)? / (head_dim as f64).sqrt())?;
        let mask = self.mask.narrow(0, 0, length)?.narrow(1, 0, length)?.broadcast_as(scores.shape())?;
        let scores = mask.where_cond(&Tensor::full(f32::NEG_INFINITY, scores.shape(), scores.device())?, &scores)?;
        let weights = match self.ops {
            Ops::CandleFused => candle_nn::ops::softmax_last_dim(&scores)?,
            _ => candle_nn::ops::softmax(&scores, D::Minus1)?,
        };
        weights.matmul(&v?.contiguous()?)?.to_dtype(dtype)
    }
}

/// As `candle_transformers::utils::repeat_kv`.
fn repeat_kv(x: Tensor, group: usize) -> Result<Tensor> {
    let (batch, heads, length, d) = x.dims4()?;
    Tensor::cat(&vec![&x; group], 2)?.reshape((batch, heads * group, length, d))
}

/// cos and sin of the angles of all positions, [max_length, head_dim / 2] each.
fn tables(head_dim: usize, max_length: usize, dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
    let frequencies: Vec<f32> =
        (0..head_dim).step_by(2).map(|i| 1.0 / (THETA as f32).powf(i as f32 / head_dim as f32)).collect();
    let frequencies = Tensor::from_vec(frequencies, (1, head_dim / 2), device)?;
    let positions = Tensor::arange(0, max_length as u32, device)?.to_dtype(DType::F32)?.reshape((max_length, 1))?;
    let angles = positions.matmul(&frequencies)?;
    Ok([angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?])
}

/// 1 where row i does not attend to key j: j > i.
fn causal_mask(length: usize, device: &Device) -> Result<Tensor> {
    let mask: Vec<u8> = (0..length * length).map(|at| u8::from(at % length > at / length)).collect();
    Tensor::from_vec(mask, (length, length), device)
}
