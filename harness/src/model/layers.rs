//! A block as separate ops of the autograd graph ([`Fusion::None`] and [`Fusion::Ops`]).

use candle_core::{D, DType, Result, Tensor};

use super::{Attention, Block, Config, Fusion, NormWeights};
use crate::ops::attention::{
    AttentionOptions, flash_attention, flash_attention_packed, naive_attention, tiled_attention,
};
use crate::ops::{self};
use crate::profile::span;

impl NormWeights {
    /// The norm of the residual stream x, f32, over its last dimension, in the dtype of the precision.
    pub(super) fn apply(&self, config: &Config, x: &Tensor) -> Result<Tensor> {
        let _span = span("norm");
        let dtype = config.precision.dtype();
        match (&self.bias, config.fusion) {
            (bias, Fusion::None) => {
                let centered = match bias {
                    None => x.clone(),
                    Some(_) => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
                };
                let spread = (centered.sqr()?.mean_keepdim(D::Minus1)? + config.eps)?.sqrt()?;
                let y = centered.broadcast_div(&spread)?.broadcast_mul(&self.weight.leaf(DType::F32)?)?;
                let y = match bias {
                    None => y,
                    Some(bias) => y.broadcast_add(&bias.leaf(DType::F32)?)?,
                };
                y.to_dtype(dtype)
            }
            (None, _) => ops::cast(&ops::rms_norm(x, &self.weight, config.eps)?, dtype),
            (Some(bias), _) => ops::cast(&ops::layer_norm(x, &self.weight, bias, config.eps)?, dtype),
        }
    }
}

impl Block {
    /// Adds attention and feed-forward to the residual stream x, f32 [batch, length, d_model].
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _span = span("block");
        let qkv = ops::linear(&self.attention_norm.apply(&self.config, x)?, &self.qkv)?;
        let x = (x + self.to_f32(ops::linear(&self.attention(&qkv)?, &self.out)?)?)?;
        let gate_up = ops::linear(&self.mlp_norm.apply(&self.config, &x)?, &self.gate_up)?;
        let inner = match self.config.fusion {
            Fusion::None => ops::swiglu_unfused(&gate_up)?,
            Fusion::Ops | Fusion::Blocks => ops::swiglu(&gate_up)?,
        };
        x + self.to_f32(ops::linear(&inner, &self.down)?)?
    }

    /// Converts a branch output to f32, the dtype of the residual stream.
    fn to_f32(&self, x: Tensor) -> Result<Tensor> {
        match self.config.fusion {
            Fusion::None => x.to_dtype(DType::F32),
            Fusion::Ops | Fusion::Blocks => ops::cast(&x, DType::F32),
        }
    }

    /// Computes O [batch, length, d_model] from qkv [batch, length, columns].
    fn attention(&self, qkv: &Tensor) -> Result<Tensor> {
        let heads = self.config.qkv_layout();
        if (self.config.attention, self.config.fusion) == (Attention::Flash, Fusion::Ops) {
            return flash_attention_packed(qkv, heads, &self.rope);
        }
        let (batch, length, _) = qkv.dims3()?;
        let part = |first: usize, count: usize| {
            qkv.narrow(2, first * heads.d, count * heads.d)?.reshape((batch, length, count, heads.d))
        };
        let rotated = |x: Tensor| match self.config.fusion {
            Fusion::None => self.rope.apply_unfused(&x, 0),
            Fusion::Ops | Fusion::Blocks => self.rope.apply(&x, 0),
        };
        let q = rotated(part(0, heads.heads)?)?.transpose(1, 2)?;
        let k = rotated(part(heads.heads, heads.heads_kv)?)?.transpose(1, 2)?;
        let v = part(heads.heads + heads.heads_kv, heads.heads_kv)?.transpose(1, 2)?;
        let o = match self.config.attention {
            Attention::Flash => flash_attention(&q, &k, &v, &AttentionOptions::new(true))?,
            Attention::Naive => naive_attention(&q, &self.repeat(&k)?, &self.repeat(&v)?, true, None)?,
            Attention::Tiled => {
                tiled_attention(&q, &self.repeat(&k)?, &self.repeat(&v)?, true, None, self.config.tiling)?
            }
        };
        o.transpose(1, 2)?.reshape((batch, length, heads.heads * heads.d))
    }

    /// Repeats the key or value heads [batch, heads_kv, length, d] to one per query head.
    fn repeat(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, heads_kv, length, d) = x.dims4()?;
        let group = self.config.heads / heads_kv;
        if group == 1 {
            return Ok(x.clone());
        }
        let shape = (batch, heads_kv, group, length, d);
        x.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, heads_kv * group, length, d))
    }
}
