//! Attention by its definition, in candle's own ops.

use crate::profile::span;
use candle_core::{D, DType, Result, Tensor};

/// softmax(scale · Q Kᵀ) V with the whole matrix of scores in memory, for q [batch, heads, n_q, d], k and v
/// [batch, heads, n_k, d]. The softmax is in f32. `scale` is 1/√d by default.
///
/// # Errors
/// Shapes that do not fit each other.
pub fn naive_attention(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool, scale: Option<f64>) -> Result<Tensor> {
    let _span = span("attention");
    let (n_q, n_k, d) = (q.dim(2)?, k.dim(2)?, q.dim(3)?);
    let scale = scale.unwrap_or(1.0 / (d as f64).sqrt());
    let scores = {
        let _span = span("scores");
        let scores = (batched_product(q, &k.t()?)?.to_dtype(score_type(q))? * scale)?;
        if causal { scores.broadcast_add(&causal_mask((0, n_q), (0, n_k), [n_q, n_k], &scores)?)? } else { scores }
    };
    let weights = softmax(&scores)?.to_dtype(q.dtype())?;
    let o = {
        let _span = span("values");
        batched_product(&weights, v)?
    };
    match n_q.checked_sub(n_k) {
        Some(hidden) if causal && hidden > 0 => see_nothing(&o, hidden),
        _ => Ok(o),
    }
}

/// O with zeros in the first `hidden` rows, which see no key.
pub(super) fn see_nothing(o: &Tensor, hidden: usize) -> Result<Tensor> {
    o.narrow(2, hidden, o.dim(2)? - hidden)?.pad_with_zeros(2, hidden, 0)?.contiguous()
}

/// Softmax over the last dimension in differentiable ops: the maximum only keeps exp in range, so that it takes no gradient.
pub(super) fn softmax(x: &Tensor) -> Result<Tensor> {
    let _span = span("softmax");
    let weights = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)
}

/// The type of scores: f32 for anything shorter.
pub(super) fn score_type(x: &Tensor) -> DType {
    if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// What is added to the scores of `rows` and `keys`, each given by its first place and its number: 0 where row i sees key j,
/// i + n_k ≥ j + n_q, and a number that exp takes to 0 elsewhere. Made on the device: at 16384 rows it is 1 GiB.
pub(super) fn causal_mask(
    (first_row, rows): (usize, usize),
    (first_key, keys): (usize, usize),
    [n_q, n_k]: [usize; 2],
    like: &Tensor,
) -> Result<Tensor> {
    let places = |first: usize, n: usize| Tensor::arange(first as u32, (first + n) as u32, like.device());
    let reach = places(first_row + n_k, rows)?.unsqueeze(1)?;
    let place = places(first_key + n_q, keys)?.unsqueeze(0)?;
    let seen = reach.broadcast_ge(&place)?.to_dtype(like.dtype())?;
    seen.affine(1e30, -1e30)
}

/// a·b of batches of matrices. Candle's CPU does not multiply bf16: there the operands are widened, which changes no product,
/// and the result is rounded once.
pub(super) fn batched_product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let _span = span("matrix product");
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    if a.dtype() == DType::BF16 && a.device().is_cpu() {
        return a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?)?.to_dtype(DType::BF16);
    }
    a.matmul(&b)
}
