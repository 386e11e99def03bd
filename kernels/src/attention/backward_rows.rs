//! The backward pass before and after its products: what it needs of each query row, and dQ from the sums of one pass.

use super::forward::{checked, row_offset};
use tilewright_runtime::prelude::*;

/// What both passes need of each query row: `delta` = D = rowsum(dO ∘ O), and `lse2` = L · log₂ e, so that P is
/// 2^(scale · log₂ e · (q · k) − lse2). Both are dense f32 [batch, heads, n_q].
///
/// With `one_pass`, also zeros `dq_sum`, dense f32 [batch, heads, n_q, d], for the programs that add to it.
///
/// Grid: (⌈n_q / q_tile⌉, heads, batch).
#[kernel]
pub fn flash_attention_bwd_preprocess<T: Float>(
    o: In<T>,
    d_o: In<T>,
    lse: In<f32>,
    delta: Out<f32>,
    lse2: Out<f32>,
    dq_sum: Out<f32>,
    o_stride_batch: i64,
    o_stride_head: i64,
    o_stride_row: i64,
    o_stride_dim: i64,
    do_stride_batch: i64,
    do_stride_head: i64,
    do_stride_row: i64,
    do_stride_dim: i64,
    #[no_specialize] n_q: i32,
    #[constexpr] d: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] q_tile: usize,
    #[constexpr = false] one_pass: bool,
) {
    let (head, batch) = (program_id(1), program_id(2));
    let first_row = program_id(0) * q_tile;
    let padded = d != d_tile;
    let o_block = make_block_ptr(
        o + (batch * o_stride_batch + head * o_stride_head),
        shape = [n_q, d],
        strides = [o_stride_row, o_stride_dim],
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
    let ot = load(o_block, boundary_check = checked(true, padded), padding = zero).to::<f32>();
    let dot_ = load(do_block, boundary_check = checked(true, padded), padding = zero).to::<f32>();
    let rows = row_offset(head, batch, n_q);
    let lt = load(row_block(lse + rows, first_row, n_q, q_tile), boundary_check = [0], padding = zero);
    store(row_block(delta + rows, first_row, n_q, q_tile), sum(ot * dot_, axis = 1), boundary_check = [0]);
    store(row_block(lse2 + rows, first_row, n_q, q_tile), lt * std::f32::consts::LOG2_E, boundary_check = [0]);
    if one_pass {
        let sum_block = sum_block(dq_sum + rows * d, first_row, n_q, d, q_tile, d_tile);
        store(sum_block, zeros::<f32>([q_tile, d_tile]), boundary_check = checked(true, padded));
    }
}

/// dQ of one pass, from the f32 sums: dq = scale · dq_sum, in dQ's type and strides.
///
/// Grid: (⌈n_q / q_tile⌉, heads, batch).
#[kernel]
pub fn flash_attention_bwd_postprocess<T: Float>(
    dq_sum: In<f32>,
    dq: Out<T>,
    dq_stride_batch: i64,
    dq_stride_head: i64,
    dq_stride_row: i64,
    dq_stride_dim: i64,
    #[no_specialize] n_q: i32,
    scale: f32,
    #[constexpr] d: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] q_tile: usize,
) {
    let (head, batch) = (program_id(1), program_id(2));
    let first_row = program_id(0) * q_tile;
    let padded = d != d_tile;
    let sums = sum_block(dq_sum + row_offset(head, batch, n_q) * d, first_row, n_q, d, q_tile, d_tile);
    let dq_block = make_block_ptr(
        dq + (batch * dq_stride_batch + head * dq_stride_head),
        shape = [n_q, d],
        strides = [dq_stride_row, dq_stride_dim],
        offsets = [first_row, 0],
        block_shape = [q_tile, d_tile],
        order = [1, 0],
    );
    let sum = load(sums, boundary_check = checked(true, padded), padding = zero);
    store(dq_block, (sum * scale).to::<T>(), boundary_check = checked(true, padded));
}

/// `len` numbers of a dense vector, from `first` on.
#[device_fn]
pub(super) fn row_block(base: Ptr<f32>, first: Scalar<i32>, n: Scalar<i32>, len: usize) -> BlockPtr<f32> {
    make_block_ptr(base, shape = [n], strides = [1], offsets = [first], block_shape = [len], order = [0])
}

/// A tile of queries in the f32 sums of one pass, from row `first` on.
#[device_fn]
pub(super) fn sum_block(
    base: Ptr<f32>,
    first: Scalar<i32>,
    n: Scalar<i32>,
    d: usize,
    q_tile: usize,
    d_tile: usize,
) -> BlockPtr<f32> {
    make_block_ptr(
        base,
        shape = [n, d],
        strides = [d, 1],
        offsets = [first, 0],
        block_shape = [q_tile, d_tile],
        order = [1, 0],
    )
}
