//! The backward kernels with dots (MMA); the row-wise kernels before and after them are in [`super::backward_rows`].
//!
//! FlashAttention-2 (Dao, 2023), Algorithm 2, in one of two forms:
//!
//! - Two passes over the scores: one program per tile of keys computes dK and dV, one per tile of queries computes dQ.
//!   There are no atomic additions, so results have the same bits in every run.
//! - One pass: the programs that compute dK and dV also add their contributions to dQ, atomically and in f32. This
//!   takes five dots instead of seven, and each exponential once. The order of the additions, and so the last bits of
//!   dQ, change from run to run.
//!
//! With S = scale · Q Kᵀ, P = exp(S − L) recomputed from the L of the forward pass, and D = rowsum(dO ∘ O):
//! dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − D), dQ = scale · dS K, dK = scale · dSᵀ Q.
//!
//! Shapes, strides, causal mask and `d_tile` are those of [`flash_attention_fwd`](super::forward). dO and dQ have the
//! shape of q, dK and dV that of k. `lse2` and `delta` are the outputs of the preprocessing kernel in
//! [`super::backward_rows`].

use super::backward_rows::{dq_sum_block, fragments, row_block};
use super::forward::{batch_and_split, num_k_tiles, row_offset, tiles_of_split, visible};
use crate::blocks::boundary_dims;
use tilewright_runtime::prelude::*;

/// dK and dV: a program per tile of keys loops over the queries that see it. With `one_pass`, it also adds dS K to
/// `dq_sum` ([`dq_sum_block`]).
///
/// Scores and dP are computed transposed, [k_tile, q_tile]: Pᵀ and dSᵀ are then left operands of the dots that
/// accumulate dV and dK. Query heads of a group share keys, so the program loops over all of them.
///
/// `sub_wave` and `split_rows` are as in the forward pass: entry b · P + p of dk and dv, P = ⌈n_q / split_rows⌉, is the
/// contribution of split p of the queries.
///
/// Grid: (⌈n_k / k_tile⌉, heads / group, batch · P). `even_queries` promises that n_q is a multiple of `q_tile`, and
/// `even_keys`, which only `one_pass` uses, that n_k is a multiple of `k_tile`. Queries beyond n_q are loaded as zeros,
/// which add nothing; gradients of keys beyond n_k are not stored. So only the diagonal needs a mask.
#[autotune(
    configs = [
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 2),
        Config(q_tile = 64, k_tile = 128, num_warps = 8, num_stages = 2, warp_specialize = true),
        Config(q_tile = 128, k_tile = 128, num_warps = 8, num_stages = 2, warp_specialize = true),
        Config(q_tile = 64, k_tile = 128, num_warps = 8, num_stages = 2, warp_specialize = true, overlap = false),
        Config(q_tile = 64, k_tile = 128, num_warps = 8, num_stages = 3, warp_specialize = true),
        Config(q_tile = 64, k_tile = 128, num_warps = 8, num_stages = 3, warp_specialize = true, pingpong = true),
        Config(q_tile = 64, k_tile = 128, num_warps = 8, num_stages = 4, warp_specialize = true),
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 3, warp_specialize = true),
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 2, overlap = false),
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 3),
        Config(q_tile = 64, k_tile = 64, num_warps = 8, num_stages = 2),
        Config(q_tile = 32, k_tile = 64, num_warps = 4, num_stages = 2),
        Config(q_tile = 64, k_tile = 32, num_warps = 4, num_stages = 2),
        Config(q_tile = 64, k_tile = 128, num_warps = 4, num_stages = 2),
        Config(q_tile = 64, k_tile = 128, num_warps = 8, num_stages = 2),
        Config(q_tile = 128, k_tile = 64, num_warps = 4, num_stages = 2),
        Config(q_tile = 128, k_tile = 64, num_warps = 8, num_stages = 2),
        Config(q_tile = 128, k_tile = 128, num_warps = 8, num_stages = 2),
        Config(q_tile = 32, k_tile = 128, num_warps = 8, num_stages = 2),
        Config(q_tile = 32, k_tile = 32, num_warps = [4, 8], num_stages = 2),
        Config(q_tile = 16, k_tile = 32, num_warps = 8, num_stages = 2),
        Config(q_tile = 32, k_tile = 64, num_warps = 8, num_stages = 2),
        Config(q_tile = 64, k_tile = 32, num_warps = 8, num_stages = 2),
        Config(q_tile = [16, 32], k_tile = 64, num_warps = 8, num_stages = 2, wgmma_f32 = true),
        Config(q_tile = [16, 32], k_tile = 64, num_warps = 8, num_stages = 2, wgmma_f32 = true, overlap = false),
        Config(q_tile = 32, k_tile = 128, num_warps = 8, num_stages = 2, wgmma_f32 = true, overlap = false),
        Config(q_tile = [16, 32, 64], k_tile = 64, num_warps = 4, num_stages = 2, wgmma_f32 = true),
        Config(q_tile = [16, 32], k_tile = 128, num_warps = 8, num_stages = 2, wgmma_f32 = true),
        Config(q_tile = 16, k_tile = 16, num_warps = 4, num_stages = 2),
    ],
    key = [d, causal, one_pass, precision, n_q, n_k, sub_wave],
    default = super::config::dkdv_default,
    tables = crate::tuned::TABLES,
)]
#[kernel]
#[alias(few = sub_wave, part_rows = split_rows)]
pub fn flash_attention_bwd_dkdv<T: Float, R: Float>(
    q: In<T>,
    k: In<T>,
    v: In<T>,
    d_o: In<T>,
    lse2: In<f32>,
    delta: In<f32>,
    dk: Out<R>,
    dv: Out<R>,
    dq_sum: InOut<f32>,
    q_stride_batch: i64,
    q_stride_head: i64,
    q_stride_row: i64,
    q_stride_dim: i64,
    k_stride_batch: i64,
    k_stride_head: i64,
    k_stride_row: i64,
    k_stride_dim: i64,
    v_stride_batch: i64,
    v_stride_head: i64,
    v_stride_row: i64,
    v_stride_dim: i64,
    do_stride_batch: i64,
    do_stride_head: i64,
    do_stride_row: i64,
    do_stride_dim: i64,
    dk_stride_batch: i64,
    dk_stride_head: i64,
    dk_stride_row: i64,
    dk_stride_dim: i64,
    dv_stride_batch: i64,
    dv_stride_head: i64,
    dv_stride_row: i64,
    dv_stride_dim: i64,
    #[no_specialize] n_q: i32,
    #[no_specialize] n_k: i32,
    scale: f32,
    #[constexpr] d: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] q_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 1] group: usize,
    #[constexpr = false] causal: bool,
    #[constexpr = false] even_queries: bool,
    #[constexpr = false] even_keys: bool,
    #[constexpr = false] one_pass: bool,
    #[constexpr = ieee] precision: Precision,
    #[constexpr = false] sub_wave: bool,
    #[constexpr = 0] split_rows: usize,
) {
    static_assert(d <= d_tile && group >= 1, "d_tile must be at least d, and group at least 1");
    let (kv_head, entry) = (program_id(1), program_id(2));
    let (batch, split) = batch_and_split(entry, n_q, split_rows);
    let first_key = program_id(0) * k_tile;
    let padded = d != d_tile;
    let scale2 = scale * std::f32::consts::LOG2_E;
    let k_block = make_block_ptr(
        k + (batch * k_stride_batch + kv_head * k_stride_head),
        shape = [n_k, d],
        strides = [k_stride_row, k_stride_dim],
        offsets = [first_key, 0],
        block_shape = [k_tile, d_tile],
        order = [1, 0],
    );
    let v_block = make_block_ptr(
        v + (batch * v_stride_batch + kv_head * v_stride_head),
        shape = [n_k, d],
        strides = [v_stride_row, v_stride_dim],
        offsets = [first_key, 0],
        block_shape = [k_tile, d_tile],
        order = [1, 0],
    );
    let kt = load(k_block, boundary_check = boundary_dims(true, padded), padding = zero);
    let vt = load(v_block, boundary_check = boundary_dims(true, padded), padding = zero);
    let keys = first_key + arange(0, k_tile);
    let mut dk_sum = zeros::<f32>([k_tile, d_tile]);
    let mut dv_sum = zeros::<f32>([k_tile, d_tile]);

    // Query tiles from `first_tile` on see some of the keys. `cdiv` would cause spills in f32: 8 to 56 bytes in 64
    // bits, and with the causal mask 8 bytes in 32 bits (which `assume(n_q >= 0)` allows).
    let tiles = (n_q + (q_tile - 1)) / q_tile;
    let mut first_tile = scalar::<i32>(0);
    if causal {
        first_tile = minimum(maximum(first_key - (n_k - n_q), 0) / q_tile, tiles);
    }
    let (first_tile, tiles) = tiles_of_split(split, split_rows, first_tile, tiles, q_tile);
    // With `even_queries`, rows of L and D start at multiples of 16 bytes, as bulk async copies require.
    let n_q = if even_queries { multiple_of(n_q, q_tile) } else { n_q };
    for member in range(0, group) {
        let head = kv_head * group + member;
        // `row_offset` does not apply: axis 1 of this grid has the key/value heads.
        let head_rows = ((batch * num_programs(1) + kv_head) * group + member).to::<i64>() * n_q;
        let mut q_block = make_block_ptr(
            q + (batch * q_stride_batch + head * q_stride_head),
            shape = [n_q, d],
            strides = [q_stride_row, q_stride_dim],
            offsets = [first_tile * q_tile, 0],
            block_shape = [q_tile, d_tile],
            order = [1, 0],
        );
        let mut do_block = make_block_ptr(
            d_o + (batch * do_stride_batch + head * do_stride_head),
            shape = [n_q, d],
            strides = [do_stride_row, do_stride_dim],
            offsets = [first_tile * q_tile, 0],
            block_shape = [q_tile, d_tile],
            order = [1, 0],
        );
        let mut lse2_block = row_block(lse2 + head_rows, first_tile * q_tile, n_q, q_tile);
        let mut delta_block = row_block(delta + head_rows, first_tile * q_tile, n_q, q_tile);
        let index = ((batch * num_programs(1) + kv_head) * group + member).to::<i64>();
        let mut dq_block = dq_sum_block(dq_sum, index, first_tile * (q_tile / 16), n_q, q_tile, d_tile);
        for i in range(first_tile, tiles) {
            let qt = load(q_block, boundary_check = boundary_dims(!even_queries, padded), padding = zero);
            let grad_o = load(do_block, boundary_check = boundary_dims(!even_queries, padded), padding = zero);
            let lt =
                load(lse2_block, boundary_check = boundary_dims(!even_queries, false), padding = zero).expand_dims(0);
            let dt =
                load(delta_block, boundary_check = boundary_dims(!even_queries, false), padding = zero).expand_dims(0);
            let scores = dot(kt, qt.trans(), input_precision = precision);
            let dp = dot(vt, grad_o.trans(), input_precision = precision);
            let mut p = exp2(scores * scale2 - lt);
            if causal {
                // Rows of q see no key beyond n_k.
                let rows = i * q_tile + arange(0, q_tile);
                p = where_(visible(rows.expand_dims(0), keys.expand_dims(1), n_q, n_k, true), p, 0.0);
            } else if one_pass && !even_keys {
                // Keys beyond n_k are zeros, but their probabilities may be infinite, and dQ sums over them.
                p = where_((keys < n_k).expand_dims(1), p, 0.0);
            }
            let ds = (p * (dp - dt)).to::<T>();
            dv_sum = dot(p.to::<T>(), grad_o, acc = dv_sum, input_precision = precision);
            if one_pass {
                // dK follows dQ, so that its dot runs while dQ is added.
                let partial_dq = dot(ds.trans(), kt, input_precision = precision);
                dk_sum = dot(ds, qt, acc = dk_sum, input_precision = precision);
                atomic_add(dq_block, fragments(partial_dq, d_tile));
                dq_block = dq_block.advance([q_tile / 16, 0]);
            } else {
                dk_sum = dot(ds, qt, acc = dk_sum, input_precision = precision);
            }
            q_block = q_block.advance([q_tile, 0]);
            do_block = do_block.advance([q_tile, 0]);
            lse2_block = lse2_block.advance([q_tile]);
            delta_block = delta_block.advance([q_tile]);
        }
    }

    let dk_block = make_block_ptr(
        dk + (entry * dk_stride_batch + kv_head * dk_stride_head),
        shape = [n_k, d],
        strides = [dk_stride_row, dk_stride_dim],
        offsets = [first_key, 0],
        block_shape = [k_tile, d_tile],
        order = [1, 0],
    );
    let dv_block = make_block_ptr(
        dv + (entry * dv_stride_batch + kv_head * dv_stride_head),
        shape = [n_k, d],
        strides = [dv_stride_row, dv_stride_dim],
        offsets = [first_key, 0],
        block_shape = [k_tile, d_tile],
        order = [1, 0],
    );
    store(dk_block, (dk_sum * scale).to::<R>(), boundary_check = boundary_dims(true, padded));
    store(dv_block, dv_sum.to::<R>(), boundary_check = boundary_dims(true, padded));
}

/// dQ: a program per tile of queries loops over the keys that they see, as the forward pass does.
///
/// `sub_wave` and `split_rows` are as in the forward pass: entry b · P + p of dq, P = ⌈n_k / split_rows⌉, is the
/// contribution of split p of the keys.
///
/// Grid: (⌈n_q / q_tile⌉, heads, batch · P). `even_keys` promises that n_k is a multiple of `k_tile`.
#[autotune(
    configs = [
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 2),
        Config(q_tile = 128, k_tile = 64, num_warps = 8, num_stages = 2, warp_specialize = true),
        Config(q_tile = 128, k_tile = 128, num_warps = 8, num_stages = 2, warp_specialize = true),
        Config(q_tile = 128, k_tile = 128, num_warps = 8, num_stages = 2, warp_specialize = true, overlap = false),
        Config(q_tile = 128, k_tile = 64, num_warps = 8, num_stages = 2, warp_specialize = true, overlap = false),
        Config(q_tile = 128, k_tile = 64, num_warps = 8, num_stages = 3, warp_specialize = true),
        Config(q_tile = 128, k_tile = 64, num_warps = 8, num_stages = 4, warp_specialize = true),
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 3, warp_specialize = true),
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 2, overlap = false),
        Config(q_tile = 64, k_tile = 64, num_warps = 4, num_stages = 3),
        Config(q_tile = 64, k_tile = 64, num_warps = 8, num_stages = 2),
        Config(q_tile = 32, k_tile = 64, num_warps = 4, num_stages = 2),
        Config(q_tile = 64, k_tile = 32, num_warps = 4, num_stages = 2),
        Config(q_tile = 64, k_tile = 128, num_warps = 4, num_stages = 2),
        Config(q_tile = 64, k_tile = 128, num_warps = 8, num_stages = 2),
        Config(q_tile = 128, k_tile = 64, num_warps = 4, num_stages = 2),
        Config(q_tile = 128, k_tile = 64, num_warps = 8, num_stages = 2),
        Config(q_tile = 128, k_tile = 128, num_warps = 8, num_stages = 2),
        Config(q_tile = 32, k_tile = 128, num_warps = 8, num_stages = 2),
        Config(q_tile = 32, k_tile = 32, num_warps = [4, 8], num_stages = 2),
        Config(q_tile = 32, k_tile = 64, num_warps = 8, num_stages = 2),
        Config(q_tile = 64, k_tile = 32, num_warps = 8, num_stages = 2),
        Config(q_tile = 64, k_tile = [16, 32], num_warps = 8, num_stages = 2, wgmma_f32 = true),
        Config(q_tile = 64, k_tile = [16, 32, 64], num_warps = 4, num_stages = 2, wgmma_f32 = true),
        Config(q_tile = 128, k_tile = [16, 32], num_warps = 8, num_stages = 2, wgmma_f32 = true),
        Config(q_tile = 16, k_tile = 32, num_warps = 4, num_stages = 2),
        Config(q_tile = 16, k_tile = 64, num_warps = 4, num_stages = 2),
        Config(q_tile = 16, k_tile = 16, num_warps = 4, num_stages = 2),
    ],
    key = [d, causal, precision, n_q, n_k, sub_wave],
    default = super::config::dq_default,
    tables = crate::tuned::TABLES,
)]
#[kernel]
#[alias(few = sub_wave, part_rows = split_rows)]
pub fn flash_attention_bwd_dq<T: Float, R: Float>(
    q: In<T>,
    k: In<T>,
    v: In<T>,
    d_o: In<T>,
    lse2: In<f32>,
    delta: In<f32>,
    dq: Out<R>,
    q_stride_batch: i64,
    q_stride_head: i64,
    q_stride_row: i64,
    q_stride_dim: i64,
    k_stride_batch: i64,
    k_stride_head: i64,
    k_stride_row: i64,
    k_stride_dim: i64,
    v_stride_batch: i64,
    v_stride_head: i64,
    v_stride_row: i64,
    v_stride_dim: i64,
    do_stride_batch: i64,
    do_stride_head: i64,
    do_stride_row: i64,
    do_stride_dim: i64,
    dq_stride_batch: i64,
    dq_stride_head: i64,
    dq_stride_row: i64,
    dq_stride_dim: i64,
    #[no_specialize] n_q: i32,
    #[no_specialize] n_k: i32,
    scale: f32,
    #[constexpr] d: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] q_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 1] group: usize,
    #[constexpr = false] causal: bool,
    #[constexpr = false] even_keys: bool,
    #[constexpr = ieee] precision: Precision,
    #[constexpr = false] sub_wave: bool,
    #[constexpr = 0] split_rows: usize,
) {
    static_assert(d <= d_tile && group >= 1, "d_tile must be at least d, and group at least 1");
    let tile = if causal { num_programs(0) - 1 - program_id(0) } else { program_id(0) };
    let (head, entry) = (program_id(1), program_id(2));
    let (batch, split) = batch_and_split(entry, n_k, split_rows);
    let kv_head = head / group;
    let first_row = tile * q_tile;
    let padded = d != d_tile;
    let seen = num_k_tiles(first_row, n_q, n_k, q_tile, k_tile, causal);
    let (first_tile, tiles) = tiles_of_split(split, split_rows, scalar::<i32>(0), seen, k_tile);
    let scale2 = scale * std::f32::consts::LOG2_E;
    let q_block = make_block_ptr(
        q + (batch * q_stride_batch + head * q_stride_head),
        shape = [n_q, d],
        strides = [q_stride_row, q_stride_dim],
        offsets = [first_row, 0],
        block_shape = [q_tile, d_tile],
        order = [1, 0],
    );
    let do_block = make_block_ptr(
        d_o + (batch * do_stride_batch + head * do_stride_head),
        shape = [n_q, d],
        strides = [do_stride_row, do_stride_dim],
        offsets = [first_row, 0],
        block_shape = [q_tile, d_tile],
        order = [1, 0],
    );
    let mut k_block = make_block_ptr(
        k + (batch * k_stride_batch + kv_head * k_stride_head),
        shape = [n_k, d],
        strides = [k_stride_row, k_stride_dim],
        offsets = [first_tile * k_tile, 0],
        block_shape = [k_tile, d_tile],
        order = [1, 0],
    );
    let mut v_block = make_block_ptr(
        v + (batch * v_stride_batch + kv_head * v_stride_head),
        shape = [n_k, d],
        strides = [v_stride_row, v_stride_dim],
        offsets = [first_tile * k_tile, 0],
        block_shape = [k_tile, d_tile],
        order = [1, 0],
    );
    let qt = load(q_block, boundary_check = boundary_dims(true, padded), padding = zero);
    let grad_o = load(do_block, boundary_check = boundary_dims(true, padded), padding = zero);
    let head_rows = row_offset(head, batch, n_q);
    let lt = load(row_block(lse2 + head_rows, first_row, n_q, q_tile), boundary_check = [0], padding = zero);
    let dt = load(row_block(delta + head_rows, first_row, n_q, q_tile), boundary_check = [0], padding = zero);
    let (lt, dt) = (lt.expand_dims(1), dt.expand_dims(1));
    let mut sum = zeros::<f32>([q_tile, d_tile]);

    let rows = first_row + arange(0, q_tile);
    for i in range(first_tile, tiles) {
        let kt = load(k_block, boundary_check = boundary_dims(!even_keys, padded), padding = zero);
        let vt = load(v_block, boundary_check = boundary_dims(!even_keys, padded), padding = zero);
        let scores = dot(qt, kt.trans(), input_precision = precision);
        let dp = dot(grad_o, vt.trans(), input_precision = precision);
        let mut p = exp2(scores * scale2 - lt);
        if causal || !even_keys {
            let keys = i * k_tile + arange(0, k_tile);
            p = where_(visible(rows.expand_dims(1), keys.expand_dims(0), n_q, n_k, causal), p, 0.0);
        }
        let ds = p * (dp - dt);
        sum = dot(ds.to::<T>(), kt, acc = sum, input_precision = precision);
        k_block = k_block.advance([k_tile, 0]);
        v_block = v_block.advance([k_tile, 0]);
    }

    let dq_block = make_block_ptr(
        dq + (entry * dq_stride_batch + head * dq_stride_head),
        shape = [n_q, d],
        strides = [dq_stride_row, dq_stride_dim],
        offsets = [first_row, 0],
        block_shape = [q_tile, d_tile],
        order = [1, 0],
    );
    store(dq_block, (sum * scale).to::<R>(), boundary_check = boundary_dims(true, padded));
}
