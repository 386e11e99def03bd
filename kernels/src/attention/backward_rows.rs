//! The row-wise kernels of the backward pass: preprocessing of each query row, and postprocessing of f32 sums into
//! gradients.

use super::forward::row_offset;
use crate::blocks::boundary_dims;
use tilewright_runtime::prelude::*;

/// Preprocesses each query row for both passes: `delta` = D = rowsum(dO ∘ O), and `lse2` = L · log₂ e (+∞ where
/// L = −∞), so that P is 2^(scale · log₂ e · (q · k) − lse2). Both are dense f32 [batch, heads, n_q].
///
/// With `one_pass`, also zeros `dq_sum`, to which programs add atomically ([`dq_sum_block`] has its shape; `d` is the head
/// dimension of q).
///
/// Grid: (⌈n_q / q_tile⌉, heads, batch); with `one_pass`, of all rows of `dq_sum`.
#[kernel(grid = (cdiv(padded_rows(n_q, one_pass), q_tile), heads, batch))]
pub fn flash_attention_bwd_preprocess<T: Float>(
    o: Tensor<T, (batch, heads, n_q, d_v)>,
    d_o: Tensor<T, (batch, heads, n_q, d_v)>,
    lse: In<f32>,
    delta: Out<f32>,
    lse2: Out<f32>,
    dq_sum: Out<f32>,
    #[no_specialize] n_q: i32,
    #[constexpr] d: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
    #[heuristic(d)] d_v: usize,
    #[heuristic(super::config::d_tile(d_v))] d_v_tile: usize,
    #[constexpr] q_tile: usize,
    #[constexpr = false] one_pass: bool,
) {
    let (head, batch) = (program_id(1), program_id(2));
    let first_row = program_id(0) * q_tile;
    let padded = d_v != d_v_tile;
    let o_block = o.index([batch, head]).block([first_row, 0], [q_tile, d_v_tile]);
    let do_block = d_o.index([batch, head]).block([first_row, 0], [q_tile, d_v_tile]);
    let ot = load(o_block, boundary_check = boundary_dims(true, padded), padding = zero).to::<f32>();
    let dot_ = load(do_block, boundary_check = boundary_dims(true, padded), padding = zero).to::<f32>();
    let rows = row_offset(head, batch, n_q);
    let lt = load(row_block(lse + rows, first_row, n_q, q_tile), boundary_check = [0], padding = zero);
    store(row_block(delta + rows, first_row, n_q, q_tile), sum(ot * dot_, axis = 1), boundary_check = [0]);
    // A row that sees no key has L = −∞; with +∞ its probabilities are 0.
    let exponent = where_(lt == f32::NEG_INFINITY, f32::INFINITY, lt * std::f32::consts::LOG2_E);
    store(row_block(lse2 + rows, first_row, n_q, q_tile), exponent, boundary_check = [0]);
    if one_pass {
        let index = (batch * num_programs(1) + head).to::<i64>();
        store(
            dq_sum_block(dq_sum, index, program_id(0) * (q_tile / 16), n_q, q_tile, d_tile),
            zeros::<f32>([q_tile / 16, 16 * d_tile]),
        );
    }
}

/// Converts f32 sums to a gradient in its type and strides: grad[b] = scale · Σₚ sums[b · num_splits + p], added in the
/// order of p.
///
/// `num_splits` is the number of splits of the loop ([`split_kv`](super::split_kv)), and 1 for dQ of one pass. `sums`
/// is dense f32 [batch · num_splits, heads, n, d], `grad` [batch, heads, n, d]. With `fragments`, `sums` is `dq_sum` of
/// one pass ([`dq_sum_block`]), in the order that `lanes_first` says.
///
/// Grid: (⌈n / row_tile⌉, heads, batch).
#[kernel(grid = (cdiv(n, row_tile), heads, batch))]
#[alias(parts = num_splits)]
pub fn flash_attention_bwd_postprocess<T: Float>(
    sums: In<f32>,
    grad: TensorMut<T, (batch, heads, n, d)>,
    #[no_specialize] n: i32,
    #[no_specialize] num_splits: i32,
    scale: f32,
    #[constexpr] d: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
    #[constexpr] row_tile: usize,
    #[constexpr = false] fragments: bool,
    #[constexpr = false] lanes_first: bool,
) {
    let (head, batch) = (program_id(1), program_id(2));
    let first_row = program_id(0) * row_tile;
    let padded = d != d_tile;
    let mut total = zeros::<f32>([row_tile, d_tile]);
    for split in range(0, num_splits) {
        if fragments {
            let index = (batch * num_programs(1) + head).to::<i64>();
            let block = dq_sum_block(sums, index, program_id(0) * (row_tile / 16), n, row_tile, d_tile);
            total += rows_of_fragments(load(block), lanes_first);
        } else {
            let rows = row_offset(head, batch * num_splits + split, n);
            total += load(
                sum_block(sums + rows * d, first_row, n, d, (row_tile, d_tile)),
                boundary_check = boundary_dims(true, padded),
                padding = zero,
            );
        }
    }
    let grad_block = grad.index([batch, head]).block([first_row, 0], [row_tile, d_tile]);
    store(grad_block, (total * scale).to::<T>(), boundary_check = boundary_dims(true, padded));
}

/// A block pointer to `len` elements of a dense vector of `n`, from `first` on.
#[device_fn]
pub(super) fn row_block(base: Ptr<f32>, first: Scalar<i32>, n: Scalar<i32>, len: usize) -> BlockPtr<f32> {
    make_block_ptr(base, shape = [n], strides = [1], offsets = [first], block_shape = [len])
}

/// Rows of `dq_sum` are padded to a multiple of this: of every `q_tile`.
pub const DQ_SUM_ROWS: usize = 256;

/// The rows of a head that preprocessing covers: with `one_pass`, all rows of `dq_sum`.
fn padded_rows(n_q: usize, one_pass: bool) -> usize {
    if one_pass { n_q.next_multiple_of(DQ_SUM_ROWS) } else { n_q }
}

/// A block pointer to `q_tile` rows, from row 16 · `first` on, of head `index` of `dq_sum`. That is f32
/// [batch · heads, rows, d_tile] with rows = `n_q` rounded up to [`DQ_SUM_ROWS`], as [rows / 16, 16 · d_tile] with the
/// elements in the order of [`fragments`]: a tile has no gaps, and needs no boundary check.
#[device_fn]
pub(super) fn dq_sum_block(
    base: Ptr<f32>,
    index: Scalar<i64>,
    first: Scalar<i32>,
    n_q: Scalar<i32>,
    q_tile: usize,
    d_tile: usize,
) -> BlockPtr<f32> {
    let rows = dq_sum_groups(n_q);
    make_block_ptr(
        base + index * rows * (16 * d_tile),
        shape = [rows, 16 * d_tile],
        strides = [16 * d_tile, 1],
        offsets = [first, 0],
        block_shape = [q_tile / 16, 16 * d_tile],
    )
}

/// Groups of 16 rows of a head of `dq_sum`.
#[device_fn]
fn dq_sum_groups(n_q: Scalar<i32>) -> Scalar<i32> {
    (n_q + (DQ_SUM_ROWS - 1)) / DQ_SUM_ROWS * (DQ_SUM_ROWS / 16)
}

/// The number of the group of 16 rows that is group `first` of head `index`, among those of all heads.
#[device_fn]
pub(super) fn dq_sum_group(index: Scalar<i64>, first: Scalar<i32>, n_q: Scalar<i32>) -> Scalar<i64> {
    index * dq_sum_groups(n_q) + first
}

/// A tile [rows, d_tile] in the order of the accumulators of `mma.sync` and `wgmma`, as [rows / 16, 16 · d_tile]: each
/// lane of a warp holds four consecutive elements, and the warp 128, so that it writes them without bank conflicts. With
/// `lanes_first`, the lanes hold 32 consecutive elements four times, which suits GPUs whose instructions add one per lane.
/// (PTX ISA, accumulator fragments of `wgmma`: lane l has columns 2 · (l mod 4) and the next of rows ⌊l / 4⌋ and
/// ⌊l / 4⌋ + 8, in every group of 8 columns.)
#[device_fn]
pub(super) fn fragments(tile: Tile<f32>, lanes_first: bool) -> Tile<f32> {
    let (rows, d_tile) = (tile.shape()[0], tile.shape()[1]);
    let parts = tile.reshape([rows / 16, 2, 8, d_tile / 8, 4, 2]);
    let parts = parts.permute(if lanes_first { [0, 3, 1, 5, 2, 4] } else { [0, 3, 2, 4, 1, 5] });
    parts.reshape([rows / 16, 16 * d_tile])
}

/// The inverse of [`fragments`].
#[device_fn]
fn rows_of_fragments(tile: Tile<f32>, lanes_first: bool) -> Tile<f32> {
    let (blocks, d_tile) = (tile.shape()[0], tile.shape()[1] / 16);
    let parts = if lanes_first {
        tile.reshape([blocks, d_tile / 8, 2, 2, 8, 4]).permute([0, 2, 4, 1, 5, 3])
    } else {
        tile.reshape([blocks, d_tile / 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5])
    };
    parts.reshape([16 * blocks, d_tile])
}

/// A block pointer to the `tile` = (rows, columns) of dense f32 sums [n, d], from row `first` on.
#[device_fn]
pub(super) fn sum_block(
    base: Ptr<f32>,
    first: Scalar<i32>,
    n: Scalar<i32>,
    d: usize,
    tile: (usize, usize),
) -> BlockPtr<f32> {
    make_block_ptr(base, shape = [n, d], strides = [d, 1], offsets = [first, 0], block_shape = [tile.0, tile.1])
}
