//! Attention by its definition, in candle ops.

use crate::profile::span;
use candle_core::{D, DType, Result, Tensor};

/// Returns softmax(scale · Q Kᵀ) V with a materialized matrix of scores, for q [batch, heads, n_q, d], k and v
/// [batch, heads, n_k, d]. The softmax is f32 (f64 for f64 inputs). With `causal`, row i attends to keys
/// j ≤ i + (n_k − n_q); rows without keys are zero. `scale` defaults to 1/√d.
///
/// # Errors
/// Shapes that do not match.
pub fn naive_attention(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool, scale: Option<f64>) -> Result<Tensor> {
    let _span = span("attention");
    let (n_q, n_k, d) = (q.dim(2)?, k.dim(2)?, q.dim(3)?);
    let scale = scale.unwrap_or(1.0 / (d as f64).sqrt());
    let all = |len| TileRange { first: 0, len };
    let mask = |scores: &Tensor| causal_mask(all(n_q), all(n_k), [n_q, n_k], scores);
    let scores = {
        let _span = span("scores");
        let scores = (batched_matmul(q, &k.t()?)?.to_dtype(score_type(q))? * scale)?;
        if causal { scores.broadcast_add(&mask(&scores)?)? } else { scores }
    };
    let weights = softmax(&scores)?.to_dtype(q.dtype())?;
    let o = {
        let _span = span("values");
        batched_matmul(&weights, v)?
    };
    match n_q.checked_sub(n_k) {
        Some(masked_rows) if causal && masked_rows > 0 => zero_masked_rows(&o, masked_rows),
        _ => Ok(o),
    }
}

/// Sets the first `masked_rows` rows of O to zero: the causal mask leaves them no key.
pub(super) fn zero_masked_rows(o: &Tensor, masked_rows: usize) -> Result<Tensor> {
    o.narrow(2, masked_rows, o.dim(2)? - masked_rows)?.pad_with_zeros(2, masked_rows, 0)?.contiguous()
}

/// Softmax over the last dimension in differentiable ops. The maximum only keeps exp in range, so it is detached.
pub(super) fn softmax(x: &Tensor) -> Result<Tensor> {
    let _span = span("softmax");
    let weights = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)
}

/// The dtype of scores: f64 for f64, else f32.
pub(super) fn score_type(x: &Tensor) -> DType {
    if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The rows of a tile of queries, or the keys of a tile of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TileRange {
    pub first: usize,
    pub len: usize,
}

/// The additive causal mask for these rows and keys: 0 where row i attends to key j, i + n_k ≥ j + n_q, and elsewhere a
/// number that exp maps to 0. Created on the device: at 16384 rows it takes 1 GiB.
pub(super) fn causal_mask(rows: TileRange, keys: TileRange, [n_q, n_k]: [usize; 2], like: &Tensor) -> Result<Tensor> {
    let positions = |range: TileRange, offset: usize| {
        let first = range.first + offset;
        Tensor::arange(first as u32, (first + range.len) as u32, like.device())
    };
    let row_positions = positions(rows, n_k)?.unsqueeze(1)?;
    let key_positions = positions(keys, n_q)?.unsqueeze(0)?;
    let visible = row_positions.broadcast_ge(&key_positions)?.to_dtype(like.dtype())?;
    visible.affine(1e30, -1e30)
}

/// Batched matmul a·b. Candle's CPU back end has no bf16 matmul: there the operands are widened to f32, which is exact,
/// and the result is rounded once.
pub(super) fn batched_matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let _span = span("matmul");
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    if a.dtype() == DType::BF16 && a.device().is_cpu() {
        return a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?)?.to_dtype(DType::BF16);
    }
    a.matmul(&b)
}
