//! The backward kernels with dots (MMA); the row-wise kernels before and after them are in [`super::backward_rows`].
//!
//! FlashAttention-2 (Dao, 2023), Algorithm 2, in one of two forms:
//!
//! - Two passes over the scores: one program per tile of keys computes dK and dV, one per tile of queries computes dQ.
//!   There are no atomic additions, so results have the same bits in every run.
//! - One pass: the programs that compute dK and dV also add their contributions to dQ, atomically and in f32. This
//!   takes five dots instead of seven, and each exponential once. The order of the additions, and so the last bits of
//!   dQ, change from run to run, unless the programs add in a fixed order ([`super::ordered`]).
//!
//! With S = scale · Q Kᵀ, P = exp(S − L) recomputed from the L of the forward pass, and D = rowsum(dO ∘ O):
//! dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − D), dQ = scale · dS K, dK = scale · dSᵀ Q.
//!
//! Shapes, strides, causal mask and `d_tile` are those of [`flash_attention_fwd`](super::forward). Gradients have the shapes of
//! what they are the gradients of. `lse2` and `delta` are the outputs of the preprocessing kernel in
//! [`super::backward_rows`].

use super::backward_rows::{dq_sum_block, dq_sum_group, fragments, row_block};
use super::config::{Pass, default_config, is_sub_wave, keep};
use super::forward::{assume_group, row_offset, this_program};
use super::loops::{
    KeyLoop, LoopMask, Part, Rules, Scores, assume_entries, batch_and_split, parts_of_keys, tile_bounds,
};
use super::modifiers::{DENSE, MaskArgs, MaskMod, PLAIN, ScoreArgs, ScoreMod, Site};
use super::ordered::{number_of, ordered_parts, ordered_program};
use crate::blocks::boundary_dims;
use tilewright_runtime::prelude::*;

/// dK and dV: a program per tile of keys loops over the queries that see it. With `one_pass`, it also adds dS K to
/// `dq_sum` ([`dq_sum_block`]), in the order that `lanes_first` says. With `ordered`, programs do so in a fixed order,
/// by the semaphores `counters`: one for each 16 rows of `dq_sum`, 0 before and after. The mask is then dense.
///
/// Scores and dP are computed transposed, [k_tile, q_tile]: Pᵀ and dSᵀ are then left operands of the dots that
/// accumulate dV and dK. Query heads of a group share keys, so the program loops over all of them.
///
/// `split_rows` is as in the forward pass: entry b · P + p of dk and dv, P = ⌈n_q / split_rows⌉, is the
/// contribution of split p of the queries.
///
/// Grid: (⌈n_k / k_tile⌉, heads / group, batch · P). `even_queries` promises that n_q is a multiple of `q_tile`, and
/// `even_keys`, which only `one_pass` uses, that n_k is a multiple of `k_tile`. Queries beyond n_q are loaded as zeros,
/// which add nothing; gradients of keys beyond n_k are not stored. So only the diagonal needs a mask.
#[autotune(
    configs = [
        Config(q_tile = 16..=128, k_tile = 16..=128, num_warps = [4, 8], num_stages = 2..=3),
        Config(q_tile = 64..=128, k_tile = 64..=128, num_warps = [4, 8], num_stages = 2..=4, warp_specialize = true),
        Config(q_tile = 64..=128, k_tile = 128, num_warps = 8, num_stages = 2..=3, warp_specialize = true,
               overlap = false),
        Config(q_tile = 64, k_tile = 128, num_warps = 8, num_stages = 3, warp_specialize = true, pingpong = true),
        Config(q_tile = 32..=64, k_tile = 64..=128, num_warps = [4, 8], num_stages = 2, overlap = false),
        Config(q_tile = 16..=64, k_tile = 64..=128, num_warps = [4, 8], num_stages = 2, wgmma_f32 = true),
        Config(q_tile = 16..=32, k_tile = 64..=128, num_warps = 8, num_stages = 2, wgmma_f32 = true, overlap = false),
    ],
    keep = |problem, config| keep(Pass::Dkdv, problem, config),
    key = [d, d_v, causal, mask, score, one_pass, precision, n_q, n_k, sub_wave = is_sub_wave([batch, heads_kv], n_k)],
    default = |problem| default_config(Pass::Dkdv, problem),
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = (cdiv(n_k, k_tile), heads_kv, entries))]
#[alias(part_rows = split_rows)]
pub fn flash_attention_bwd_dkdv<T: Float, R: Float>(
    q: Tensor<T, (batch, heads, n_q, d)>,
    k: Tensor<T, (batch, heads_kv, n_k, d)>,
    v: Tensor<T, (batch, heads_kv, n_k, d_v)>,
    d_o: Tensor<T, (batch, heads, n_q, d_v)>,
    lse2: In<f32>,
    delta: In<f32>,
    mask_data: In<i32>,
    score_data: In<f32>,
    dk: TensorMut<R, (entries, heads_kv, n_k, d)>,
    dv: TensorMut<R, (entries, heads_kv, n_k, d_v)>,
    dq_sum: InOut<f32>,
    counters: InOut<i32>,
    #[no_specialize] n_q: i32,
    #[no_specialize] n_k: i32,
    scale: f32,
    #[no_specialize] mask_number: i32,
    score_number: f32,
    #[constexpr] d: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
    #[heuristic(d)] d_v: usize,
    #[heuristic(super::config::d_tile(d_v))] d_v_tile: usize,
    #[constexpr] q_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 1]
    #[heuristic((heads / heads_kv.max(1)).max(1))]
    group: usize,
    #[constexpr = false] causal: bool,
    #[constexpr = false]
    #[heuristic(n_q.is_multiple_of(q_tile))]
    even_queries: bool,
    #[constexpr = false]
    #[heuristic(n_k.is_multiple_of(k_tile))]
    even_keys: bool,
    #[constexpr = false] one_pass: bool,
    #[constexpr = false] ordered: bool,
    #[constexpr = false] lanes_first: bool,
    #[constexpr = ieee] precision: Precision,
    #[constexpr = 0] split_rows: usize,
    #[constexpr = DENSE] mask: &'static MaskMod,
    #[constexpr = PLAIN] score: &'static ScoreMod,
) {
    static_assert(1 <= d && d <= d_tile && group >= 1, "d and group must be at least 1, and d_tile at least d");
    static_assert(1 <= d_v && d_v <= d_v_tile, "d_v must be at least 1, and d_v_tile at least d_v");
    static_assert(!ordered || one_pass && mask.is_dense(), "ordered takes one_pass and the mask `dense`");
    assume_entries(dk.dim(0), q.dim(0), n_q, split_rows);
    assume_group(q.dim(1), k.dim(1), group);
    // Under a causal mask, the first keys are seen by the most queries.
    // Rows of Q and dO of 16 bits, and of dQ in f32; without `one_pass`, an upper bound.
    let row_bytes = (6 * d_tile + 2 * d_v_tile) * group;
    let ((place, kv_head, entry), is_last) = if ordered {
        ordered_program(causal, n_q, row_bytes)
    } else {
        (this_program(causal, n_q, row_bytes, 1), scalar::<bool>(false))
    };
    let (batch, split) = batch_and_split(entry, n_q, split_rows);
    let first_key = place * k_tile;
    let (padded, v_padded) = (d != d_tile, d_v != d_v_tile);
    let k_block = k.index([batch, kv_head]).block([first_key, 0], [k_tile, d_tile]);
    let v_block = v.index([batch, kv_head]).block([first_key, 0], [k_tile, d_v_tile]);
    let kt = load(k_block, boundary_check = boundary_dims(true, padded), padding = zero);
    let vt = load(v_block, boundary_check = boundary_dims(true, v_padded), padding = zero);
    let keys = first_key + arange(0, k_tile);
    let mut dk_sum = zeros::<f32>([k_tile, d_tile]);
    let mut dv_sum = zeros::<f32>([k_tile, d_v_tile]);

    // `cdiv` would cause spills in f32: 8 to 56 bytes in 64 bits, and with the causal mask 8 bytes in 32 bits (which
    // `assume(n_q >= 0)` allows).
    let tiles = (n_q + (q_tile - 1)) / q_tile;
    let mut first_tile = scalar::<i32>(0);
    if causal {
        first_tile = minimum(maximum(first_key - (n_k - n_q), 0) / q_tile, tiles);
    }
    let seen = split.tiles(first_tile, tiles, q_tile);
    // With `even_queries`, rows of L and D start at multiples of 16 bytes, as bulk async copies require.
    let n_q = if even_queries { multiple_of(n_q, q_tile) } else { n_q };
    for member in range(0, group) {
        let head = kv_head * group + member;
        // `row_offset` does not apply: axis 1 of this grid has the key/value heads.
        // TMA takes no index below 0.
        let index = maximum((batch * num_programs(1) + kv_head) * group + member, 0).to::<i64>();
        let q_block = q.index([batch, head]).block([0, 0], [q_tile, d_tile]);
        let do_block = d_o.index([batch, head]).block([0, 0], [q_tile, d_v_tile]);
        let site = Site { batch, head, n_q, n_k, most_keys: n_k, causal };
        let lse2_block = row_block(lse2 + index * n_q, scalar::<i32>(0), n_q, q_tile);
        let delta_block = row_block(delta + index * n_q, scalar::<i32>(0), n_q, q_tile);
        let dq_block = dq_sum_block(dq_sum, index, scalar::<i32>(0), n_q, q_tile, d_tile);
        // The keys of scores, which are [k_tile, q_tile].
        let column = keys.expand_dims(1);
        let modify = score.bound(ScoreArgs { number: score_number, data: score_data, site });
        // Keys beyond n_k are zeros, but their probabilities may be infinite, and dQ sums over them.
        let excludes_end = one_pass && !even_keys;
        let parts = if ordered && causal {
            ordered_parts(seen, (first_key, k_tile), q_tile, site, is_last)
        } else if mask.is_dense() {
            // Rows of q see no key beyond n_k under the causal mask.
            let diagonal = if causal || excludes_end { LoopMask::Dense(site) } else { LoopMask::None };
            Vec::from([Part { tiles: seen, mask: diagonal, down: None }])
        } else {
            let args = MaskArgs { number: mask_number, data: mask_data, site };
            let last_key = minimum(first_key + k_tile, n_k) - 1;
            let bounds = tile_bounds(mask.rows, (first_key, last_key), args, n_q, q_tile);
            let (start, end) = (mask.rows)(keys, args);
            // As above: no row sees a key beyond n_k.
            let end = where_(keys < n_k, end, 0);
            let edges = LoopMask::Rows(start.expand_dims(1), end.expand_dims(1));
            split.parts(bounds, q_tile, edges, if excludes_end { edges } else { LoopMask::None })
        };
        (dk_sum, dv_sum) = parts.into_iter().fold((dk_sum, dv_sum), |sums, part| {
            let (first, end) = part.tiles;
            let (mut dk_sum, mut dv_sum) = sums;
            let mut next_q = q_block.advance([first * q_tile, 0]);
            let mut next_do = do_block.advance([first * q_tile, 0]);
            let mut next_lse2 = lse2_block.advance([first * q_tile]);
            let mut next_delta = delta_block.advance([first * q_tile]);
            let mut next_dq = dq_block.advance([first * (q_tile / 16), 0]);
            let rules = Rules { mask: part.mask, modify: modify.as_ref(), scale };
            // Those of ordered programs are split already.
            let hint = if part.down.is_some() { Some(false) } else { rules.split_hint() };
            let scale2 = rules.exponent_scale();
            // With dQ between them, ptxas serializes dots that run one iteration later.
            let overlap = one_pass.then_some(false);
            let (boundary, v_boundary) = (boundary_dims(!even_queries, padded), boundary_dims(!even_queries, v_padded));
            let row_boundary = boundary_dims(!even_queries, false);
            for i in range(first, end, split = hint, overlap = overlap) {
                let i = part.tile(i);
                let (q_block, do_block, lse2_block, delta_block, dq_block) = if part.down.is_some() {
                    let row = i * q_tile;
                    (
                        q_block.advance([row, 0]),
                        do_block.advance([row, 0]),
                        lse2_block.advance([row]),
                        delta_block.advance([row]),
                        dq_block.advance([i * (q_tile / 16), 0]),
                    )
                } else {
                    (next_q, next_do, next_lse2, next_delta, next_dq)
                };
                let qt = load(q_block, boundary_check = boundary, padding = zero);
                let grad_o = load(do_block, boundary_check = v_boundary, padding = zero);
                let lt = load(lse2_block, boundary_check = row_boundary, padding = zero).expand_dims(0);
                let dt = load(delta_block, boundary_check = row_boundary, padding = zero).expand_dims(0);
                let product = dot(kt, qt.trans(), input_precision = precision);
                let rows = (i * q_tile + arange(0, q_tile)).expand_dims(0);
                let scores = Scores { dot: product, rows, keys: column, rules };
                let dp = dot(vt, grad_o.trans(), input_precision = precision);
                let modified = scores.modified();
                let mut p = scores.keep(exp2(modified.scores * scale2 - lt), 0.0);
                if modify.is_some() && !even_queries {
                    // A score function may give rows beyond n_q, which are zeros, any score.
                    p = where_(rows < n_q, p, 0.0);
                }
                let ds = modified.chain(p * (dp - dt)).to::<T>();
                // With 128 queries, the dot of P runs during the barrier between dS and dQ (FlashAttention-3,
                // `hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp`). With fewer, dQ is first, so that the other two run while
                // it is added.
                let dv_first = !one_pass || q_tile >= 128;
                if dv_first {
                    dv_sum = dot(p.to::<T>(), grad_o, acc = dv_sum, input_precision = precision);
                }
                if one_pass {
                    let partial_dq = dot(ds.trans(), kt, input_precision = precision);
                    if !dv_first {
                        dv_sum = dot(p.to::<T>(), grad_o, acc = dv_sum, input_precision = precision);
                    }
                    dk_sum = dot(ds, qt, acc = dk_sum, input_precision = precision);
                    if ordered {
                        let counter = counters + dq_sum_group(index, i * (q_tile / 16), n_q);
                        let (number, all) = number_of(causal, place, i, [n_q, n_k], [q_tile, k_tile], is_last);
                        semaphore_wait(counter, number);
                        atomic_add(dq_block, fragments(partial_dq, lanes_first));
                        semaphore_release(counter, where_(number + 1 == all, 0, number + 1));
                    } else {
                        atomic_add(dq_block, fragments(partial_dq, lanes_first));
                    }
                    next_dq = next_dq.advance([q_tile / 16, 0]);
                } else {
                    dk_sum = dot(ds, qt, acc = dk_sum, input_precision = precision);
                }
                next_q = next_q.advance([q_tile, 0]);
                next_do = next_do.advance([q_tile, 0]);
                next_lse2 = next_lse2.advance([q_tile]);
                next_delta = next_delta.advance([q_tile]);
            }
            (dk_sum, dv_sum)
        });
    }

    let dk_block = dk.index([entry, kv_head]).block([first_key, 0], [k_tile, d_tile]);
    let dv_block = dv.index([entry, kv_head]).block([first_key, 0], [k_tile, d_v_tile]);
    store(dk_block, (dk_sum * scale).to::<R>(), boundary_check = boundary_dims(true, padded));
    store(dv_block, dv_sum.to::<R>(), boundary_check = boundary_dims(true, v_padded));
}

/// dQ: a program per tile of queries loops over the keys that they see, as the forward pass does.
///
/// `split_rows` is as in the forward pass: entry b · P + p of dq, P = ⌈n_k / split_rows⌉, is the
/// contribution of split p of the keys.
///
/// Grid: (⌈n_q / q_tile⌉, heads, batch · P). `even_keys` promises that n_k is a multiple of `k_tile`.
#[autotune(
    configs = [
        Config(q_tile = 16..=128, k_tile = 16..=128, num_warps = [4, 8], num_stages = 2..=3),
        Config(q_tile = 64..=128, k_tile = 64..=128, num_warps = [4, 8], num_stages = 2..=4, warp_specialize = true),
        Config(q_tile = 128, k_tile = 64..=128, num_warps = 8, num_stages = 2..=3, warp_specialize = true,
               overlap = false),
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 2, overlap = false),
        Config(q_tile = 64..=128, k_tile = 16..=64, num_warps = [4, 8], num_stages = 2, wgmma_f32 = true),
    ],
    keep = |problem, config| keep(Pass::Dq, problem, config),
    key = [d, d_v, causal, mask, score, precision, n_q, n_k, sub_wave = is_sub_wave([batch, heads], n_q)],
    default = |problem| default_config(Pass::Dq, problem),
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = (cdiv(n_q, q_tile), heads, entries))]
#[alias(part_rows = split_rows)]
pub fn flash_attention_bwd_dq<T: Float, R: Float>(
    q: Tensor<T, (batch, heads, n_q, d)>,
    k: Tensor<T, (batch, heads_kv, n_k, d)>,
    v: Tensor<T, (batch, heads_kv, n_k, d_v)>,
    d_o: Tensor<T, (batch, heads, n_q, d_v)>,
    lse2: In<f32>,
    delta: In<f32>,
    mask_data: In<i32>,
    score_data: In<f32>,
    dq: TensorMut<R, (entries, heads, n_q, d)>,
    #[no_specialize] n_q: i32,
    #[no_specialize] n_k: i32,
    scale: f32,
    #[no_specialize] mask_number: i32,
    score_number: f32,
    #[constexpr] d: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
    #[heuristic(d)] d_v: usize,
    #[heuristic(super::config::d_tile(d_v))] d_v_tile: usize,
    #[constexpr] q_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 1]
    #[heuristic((heads / heads_kv.max(1)).max(1))]
    group: usize,
    #[constexpr = false] causal: bool,
    #[constexpr = false]
    #[heuristic(n_k.is_multiple_of(k_tile))]
    even_keys: bool,
    #[constexpr = ieee] precision: Precision,
    #[constexpr = 0] split_rows: usize,
    #[constexpr = DENSE] mask: &'static MaskMod,
    #[constexpr = PLAIN] score: &'static ScoreMod,
) {
    static_assert(1 <= d && d <= d_tile && group >= 1, "d and group must be at least 1, and d_tile at least d");
    static_assert(1 <= d_v && d_v <= d_v_tile, "d_v must be at least 1, and d_v_tile at least d_v");
    assume_entries(dq.dim(0), q.dim(0), n_k, split_rows);
    assume_group(q.dim(1), k.dim(1), group);
    let (place, head, entry) = this_program(causal, n_k, 2 * (d_tile + d_v_tile), group);
    // The last query tiles have the most work.
    let tile = if causal { num_programs(0) - 1 - place } else { place };
    let (batch, split) = batch_and_split(entry, n_k, split_rows);
    let kv_head = head / group;
    let first_row = tile * q_tile;
    let (padded, v_padded) = (d != d_tile, d_v != d_v_tile);
    let q_block = q.index([batch, head]).block([first_row, 0], [q_tile, d_tile]);
    let do_block = d_o.index([batch, head]).block([first_row, 0], [q_tile, d_v_tile]);
    let k_block = k.index([batch, kv_head]).block([0, 0], [k_tile, d_tile]);
    let v_block = v.index([batch, kv_head]).block([0, 0], [k_tile, d_v_tile]);
    let qt = load(q_block, boundary_check = boundary_dims(true, padded), padding = zero);
    let grad_o = load(do_block, boundary_check = boundary_dims(true, v_padded), padding = zero);
    let head_rows = row_offset(head, batch, n_q);
    let lt = load(row_block(lse2 + head_rows, first_row, n_q, q_tile), boundary_check = [0], padding = zero);
    let dt = load(row_block(delta + head_rows, first_row, n_q, q_tile), boundary_check = [0], padding = zero);
    let (lt, dt) = (lt.expand_dims(1), dt.expand_dims(1));
    let site = Site { batch, head, n_q, n_k, most_keys: n_k, causal };
    let rows = first_row + arange(0, q_tile);
    let keys = KeyLoop {
        q: qt,
        rows: rows.expand_dims(1),
        k: k_block,
        v: v_block,
        k_tile,
        k_boundary: boundary_dims(!even_keys, padded),
        v_boundary: boundary_dims(!even_keys, v_padded),
        cached: None,
        precision,
        scale,
        descale: None,
        replicas: 1,
    };
    let modify = score.bound(ScoreArgs { number: score_number, data: score_data, site });
    let args = MaskArgs { number: mask_number, data: mask_data, site };
    let parts = parts_of_keys(mask, args, rows, (first_row, q_tile), k_tile, even_keys, false, split);
    let sum = keys.run(parts, modify.as_ref(), zeros::<f32>([q_tile, d_tile]), |sum, tiles| {
        let dp = dot(grad_o, tiles.v.trans(), input_precision = precision);
        let modified = tiles.scores.modified();
        let p = tiles.scores.keep(exp2(modified.scores * tiles.scale2 - lt), 0.0);
        let ds = modified.chain(p * (dp - dt));
        dot(ds.to::<T>(), tiles.k, acc = sum, input_precision = precision)
    });

    let dq_block = dq.index([entry, head]).block([first_row, 0], [q_tile, d_tile]);
    store(dq_block, (sum * scale).to::<R>(), boundary_check = boundary_dims(true, padded));
}
