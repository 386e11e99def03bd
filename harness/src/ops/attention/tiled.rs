//! FlashAttention-2 (Dao, 2023, algorithms 1 and 2) in candle ops: tiles of queries and keys, an online softmax, and a
//! backward pass that recomputes the scores. Uses no Tilewright kernel: it shows the effect of the algorithm alone, and
//! is the second step of the assignment.

use candle_core::{D, Result, Tensor};
use tilewright_candle::graph::record3;
use tilewright_candle::memory::{OutputAlloc, for_float_type};

use super::naive::{TileRange, batched_matmul, causal_mask, score_type, zero_masked_rows};
use crate::profile::span;

/// Rows per tile of queries and of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Tiling {
    pub queries: usize,
    pub keys: usize,
}

impl Default for Tiling {
    fn default() -> Tiling {
        Tiling { queries: 128, keys: 128 }
    }
}

/// Parameters of one attention, apart from its tensors.
#[derive(Clone, Copy)]
struct TiledAttention {
    tiling: Tiling,
    causal: bool,
    scale: f64,
    n_q: usize,
    n_k: usize,
}

/// Softmax of a tile of queries over the keys so far, without the division by the sum.
struct OnlineSoftmax {
    /// Maximum of each row.
    row_max: Tensor,
    /// Σ exp(score − maximum).
    sum: Tensor,
    /// Σ exp(score − maximum) · v.
    values: Tensor,
}

/// Returns O = softmax(scale · Q Kᵀ) V for q [batch, heads, n_q, d], k and v [batch, heads, n_k, d], tile by tile.
/// `causal` and `scale` are those of [`naive_attention`](super::naive_attention).
///
/// # Errors
/// Shapes that do not match, or tiles without rows.
pub fn tiled_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    causal: bool,
    scale: Option<f64>,
    tiling: Tiling,
) -> Result<Tensor> {
    let _span = span("attention");
    if tiling.queries == 0 || tiling.keys == 0 {
        return Err(candle_core::Error::Msg(format!(
            "expected attention tiles of at least one query and one key, found {} and {}",
            tiling.queries, tiling.keys
        )));
    }
    let scale = scale.unwrap_or(1.0 / (q.dim(3)? as f64).sqrt());
    let attention = TiledAttention { tiling, causal, scale, n_q: q.dim(2)?, n_k: k.dim(2)? };
    let [q_off, k_off, v_off] = [q, k, v].map(Tensor::detach);
    let (o, lse) = attention.forward(&q_off, &k_off, &v_off)?;
    for_float_type!(q.dtype(), "tiled_attention", T => {
        record3("tiled_attention", [q, k, v], OutputAlloc::<T>::copy_of(&o)?, q.shape(), move |[q, k, v], o, grad| {
            let [q, k, v, o] = [q, k, v, o].map(Tensor::detach);
            Ok(attention.backward([&q, &k, &v, &o, grad], &lse)?.map(Some))
        })
    })
}

impl TiledAttention {
    fn query_tiles(&self) -> impl Iterator<Item = TileRange> + use<> {
        tiles(self.n_q, self.tiling.queries)
    }

    /// The tiles of keys that at least one row of a tile of queries attends to.
    fn key_tiles(&self, rows: TileRange) -> impl Iterator<Item = TileRange> + use<> {
        let visible = match self.causal {
            true => (rows.first + rows.len + self.n_k).saturating_sub(self.n_q).min(self.n_k),
            false => self.n_k,
        };
        tiles(self.n_k, self.tiling.keys).take_while(move |keys| keys.first < visible)
    }

    /// scale · Q Kᵀ of two tiles, masked.
    fn scores(&self, q: &Tensor, k: &Tensor, rows: TileRange, keys: TileRange) -> Result<Tensor> {
        let scores = (batched_matmul(q, &k.t()?)?.to_dtype(score_type(q))? * self.scale)?;
        // Only tiles on the diagonal are masked: the first row attends to all keys of the others.
        if !self.causal || rows.first + self.n_k >= keys.first + keys.len - 1 + self.n_q {
            return Ok(scores);
        }
        let mask = causal_mask(rows, keys, [self.n_q, self.n_k], &scores)?;
        scores.broadcast_add(&mask)
    }

    /// Algorithm 1: O, and the log-sum-exp of each row.
    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (mut outputs, mut sums) = (Vec::new(), Vec::new());
        for q_rows in self.query_tiles() {
            let q_tile = part(q, q_rows)?;
            let mut state: Option<OnlineSoftmax> = None;
            for k_rows in self.key_tiles(q_rows) {
                let scores = self.scores(&q_tile, &part(k, k_rows)?, q_rows, k_rows)?;
                let tile_max = scores.max_keepdim(D::Minus1)?;
                let row_max = match &state {
                    None => tile_max,
                    Some(before) => before.row_max.maximum(&tile_max)?,
                };
                let weights = scores.broadcast_sub(&row_max)?.exp()?;
                let values =
                    batched_matmul(&weights.to_dtype(v.dtype())?, &part(v, k_rows)?)?.to_dtype(weights.dtype())?;
                let sum = weights.sum_keepdim(D::Minus1)?;
                state = Some(match state {
                    None => OnlineSoftmax { row_max, sum, values },
                    Some(before) => {
                        let rescale = (before.row_max - &row_max)?.exp()?;
                        let values = (before.values.broadcast_mul(&rescale)? + values)?;
                        OnlineSoftmax { row_max, sum: ((before.sum * rescale)? + sum)?, values }
                    }
                });
            }
            match state {
                Some(OnlineSoftmax { row_max, sum, values }) => {
                    outputs.push(values.broadcast_div(&sum)?.to_dtype(q.dtype())?);
                    sums.push((row_max + sum.log()?)?);
                }
                // With fewer keys than queries the first rows attend to none.
                None => {
                    outputs.push(q_tile.zeros_like()?);
                    sums.push(q_tile.narrow(3, 0, 1)?.to_dtype(score_type(q))?.zeros_like()?);
                }
            }
        }
        let (o, lse) = (Tensor::cat(&outputs, 2)?, Tensor::cat(&sums, 2)?);
        let masked_rows = if self.causal { self.n_q.saturating_sub(self.n_k) } else { 0 };
        if masked_rows == 0 {
            return Ok((o, lse));
        }
        // The first rows attend to no key, even if their tile has keys. An lse of 1e30 makes backward recompute their
        // weights as 0.
        let rest = lse.narrow(2, masked_rows, self.n_q - masked_rows)?;
        let unseen = (lse.narrow(2, 0, masked_rows)?.zeros_like()? + 1e30)?;
        Ok((zero_masked_rows(&o, masked_rows)?, Tensor::cat(&[unseen, rest], 2)?))
    }

    /// Algorithm 2: dQ, dK, dV, with D = rowsum(dO ∘ O) and the weights P = exp(S − L) of recomputed scores S.
    fn backward(&self, [q, k, v, o, grad]: [&Tensor; 5], lse: &Tensor) -> Result<[Tensor; 3]> {
        let wide = score_type(q);
        let delta = (grad.to_dtype(wide)? * o.to_dtype(wide)?)?.sum_keepdim(D::Minus1)?;
        let mut dq_tiles = Vec::new();
        let mut dkv_tiles: Vec<Option<[Tensor; 2]>> = vec![None; self.n_k.div_ceil(self.tiling.keys)];
        for q_rows in self.query_tiles() {
            let (q_tile, grad_tile) = (part(q, q_rows)?, part(grad, q_rows)?);
            let (lse_tile, delta_tile) = (part(lse, q_rows)?, part(&delta, q_rows)?);
            let mut dq: Option<Tensor> = None;
            for k_rows in self.key_tiles(q_rows) {
                let (k_tile, v_tile) = (part(k, k_rows)?, part(v, k_rows)?);
                let weights = self.scores(&q_tile, &k_tile, q_rows, k_rows)?.broadcast_sub(&lse_tile)?.exp()?;
                let dv = batched_matmul(&weights.to_dtype(q.dtype())?.t()?, &grad_tile)?.to_dtype(wide)?;
                let d_weights = batched_matmul(&grad_tile, &v_tile.t()?)?.to_dtype(wide)?;
                let d_scores =
                    ((weights * d_weights.broadcast_sub(&delta_tile)?)? * self.scale)?.to_dtype(q.dtype())?;
                let dk = batched_matmul(&d_scores.t()?, &q_tile)?.to_dtype(wide)?;
                let more = batched_matmul(&d_scores, &k_tile)?.to_dtype(wide)?;
                dq = Some(match dq {
                    None => more,
                    Some(before) => (before + more)?,
                });
                let sums = &mut dkv_tiles[k_rows.first / self.tiling.keys];
                *sums = Some(match sums.take() {
                    None => [dk, dv],
                    Some([dk_before, dv_before]) => [(dk_before + dk)?, (dv_before + dv)?],
                });
            }
            dq_tiles.push(dq.map_or_else(|| q_tile.zeros_like(), |dq| dq.to_dtype(q.dtype()))?);
        }
        let (mut dk_tiles, mut dv_tiles) = (Vec::new(), Vec::new());
        for (sums, rows) in dkv_tiles.into_iter().zip(tiles(self.n_k, self.tiling.keys)) {
            let [dk, dv] = match sums {
                Some(sums) => sums,
                None => [part(k, rows)?.zeros_like()?, part(v, rows)?.zeros_like()?],
            };
            dk_tiles.push(dk.to_dtype(q.dtype())?);
            dv_tiles.push(dv.to_dtype(q.dtype())?);
        }
        Ok([Tensor::cat(&dq_tiles, 2)?, Tensor::cat(&dk_tiles, 2)?, Tensor::cat(&dv_tiles, 2)?])
    }
}

fn tiles(n: usize, tile: usize) -> impl Iterator<Item = TileRange> {
    (0..n).step_by(tile).map(move |first| TileRange { first, len: tile.min(n - first) })
}

fn part(x: &Tensor, rows: TileRange) -> Result<Tensor> {
    x.narrow(2, rows.first, rows.len)?.contiguous()
}
