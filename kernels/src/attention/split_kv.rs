//! Split-KV for sub-wave grids (fewer programs than SMs).
//!
//! One head of a few thousand rows gives programs for only a quarter of the SMs, each with a long loop over the keys
//! (or the queries, for dK and dV). Here the loop is split: one program per split writes its own f32 result
//! (FlashDecoding, Dao and others, 2023, for the forward pass).
//! [`flash_attention_fwd_combine`](FlashAttentionFwdCombine) combines the results of the forward pass, and
//! [`backward_rows`](super::backward_rows) sums the gradients, both in a fixed order: the same inputs give the same
//! bits.

use super::backward_rows::row_block;
use super::config::{Pass, d_tile};
use super::forward::row_offset;
use super::launch::{MAX_ROWS, Options};
use super::passes::ROW_TILE;
use crate::blocks::boundary_dims;
use tilewright_runtime::prelude::*;

/// The split of each program's loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvSplit {
    pub count: usize,
    /// Rows of every split but the last: a power of two, at least [`MIN_SPLIT_ROWS`]; 0 where the loop is not split.
    pub rows: usize,
}

/// Fewest rows of a split: a multiple of every tile size that tuning uses.
pub(super) const MIN_SPLIT_ROWS: usize = 256;

impl KvSplit {
    pub const UNSPLIT: KvSplit = KvSplit { count: 1, rows: 0 };

    /// The split of the loops of a pass, for q and k of these shapes.
    pub fn new<T: Element>(
        pass: Pass,
        device: &Device,
        q: [usize; 4],
        k: [usize; 4],
        causal: bool,
        options: &Options,
    ) -> KvSplit {
        // A launch refuses more. Here the limits keep products in range; more heads give the same splits.
        let of = |[batch, heads, rows, _]: [usize; 4]| (batch.saturating_mul(heads).min(MAX_ROWS), rows.min(MAX_ROWS));
        let ((heads, rows), (_, loop_rows)) = if pass == Pass::Dkdv { (of(k), of(q)) } else { (of(q), of(k)) };
        let default = || {
            // The ranges of other masks are short, or of different lengths.
            let may_split = options.mask.function.is_dense() && device.is_cuda();
            let programs = heads * rows.div_ceil(64);
            let is_decoding = pass == Pass::Forward && rows <= 16 && T::DTYPE.size() <= 2;
            match may_split {
                true if is_decoding => decoding_splits(q[3], programs, loop_rows),
                true => default_splits(pass, causal, T::DTYPE.size(), q[3], programs, loop_rows),
                false => 1,
            }
        };
        KvSplit::at_most(options.num_splits.unwrap_or_else(default), loop_rows)
    }

    fn at_most(count: usize, loop_rows: usize) -> KvSplit {
        // A power of two keeps the number of kernel variants small: `rows` is a constexpr.
        let rows = loop_rows.div_ceil(count.max(1)).next_power_of_two().max(MIN_SPLIT_ROWS);
        match loop_rows.div_ceil(rows) {
            0 | 1 => KvSplit::UNSPLIT,
            count => KvSplit { count, rows },
        }
    }

    pub fn is_split(self) -> bool {
        self.count > 1
    }
}

/// The default number of splits of few queries: as many programs as keep all loads of an H200 in flight, of which an SM runs two with
/// d = 64 (`harness/records/2026-11-30-h200-decode-splits.jsonl`).
fn decoding_splits(d: usize, programs: usize, loop_rows: usize) -> usize {
    let wanted = if d_tile(d) > 64 { 128 } else { 256 };
    if loop_rows < 2048 { 1 } else { (wanted / programs.max(1)).max(1) }
}

/// The default number of splits for `programs` programs with a tile of 64 rows each, and a loop over `loop_rows` rows.
/// Measured on an H200.
fn default_splits(
    pass: Pass,
    causal: bool,
    element_bytes: usize,
    d: usize,
    programs: usize,
    loop_rows: usize,
) -> usize {
    let (d_tile, programs) = (d_tile(d), programs.max(1));
    if element_bytes <= 2 {
        // One head of 4096 rows takes 0.116 ms in the backward pass unsplit, 0.084 in two splits and 0.105 in eight (d = 128);
        // with d = 64 it takes 0.082 unsplit, 0.060 in two and 0.056 in four. The forward pass is fastest with the same
        // numbers of splits: 0.045, 0.032 and 0.039 ms.
        let min_splits = match causal {
            // All loops have the same length, and each program has an SM.
            false if programs > 64 => 1,
            _ if d_tile >= 128 => 2,
            _ => 4,
        };
        // Short loops end before the combine kernel would begin, and more than 128 programs keep a large GPU busy unsplit.
        return if loop_rows < 2048 || programs > 128 { 1 } else { (128 / programs).max(min_splits) };
    }
    // f32, causal, with tf32x3.
    match (pass, programs) {
        // Each program has an SM to itself and writes results for all of its rows, so few splits are best: one head of
        // 4096 rows takes 0.35 ms in two splits, 0.43 in four and 0.45 in eight (d = 128); one of 8192 rows takes 0.61
        // in two and 0.71 unsplit (d = 64).
        (Pass::Dkdv | Pass::Dq, ..=128) if d_tile >= 64 => (128 / programs).max(2),
        // 512 programs keep a large GPU busy until the longest loop ends. One head of 8192 rows, which has 128 programs
        // unsplit, is 5 to 20 % slower when split.
        (_, ..=64) => 512 / programs,
        _ => 1,
    }
}

/// Combines O and L of the splits. With mᵣ = maxₚ L[p, r] and weights w[p, r] = exp(L[p, r] − mᵣ):
/// L[r] = mᵣ + ln Σₚ w[p, r] and O[r] = Σₚ w[p, r] · O[p, r] / Σₚ w[p, r]. A row that saw no key gets O = 0 and L = −∞.
///
/// `partial_o` is dense f32 [batch · num_splits, heads, n_q, d], `partial_lse` dense [batch · num_splits, heads, n_q]. A program
/// loads `split_tile` splits of its rows at a time.
///
/// Grid: (⌈n_q / q_tile⌉, heads, batch).
#[kernel(grid = (cdiv(n_q, q_tile), heads, batch))]
#[alias(flash_attention_fwd_join, part_o = partial_o, part_lse = partial_lse, parts = num_splits)]
pub fn flash_attention_fwd_combine<T: Float>(
    partial_o: In<f32>,
    partial_lse: In<f32>,
    o: TensorMut<T, (batch, heads, n_q, d)>,
    lse: Out<f32>,
    #[no_specialize] n_q: i32,
    #[no_specialize] num_splits: i32,
    #[constexpr] d: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
    #[constexpr] q_tile: usize,
    #[constexpr] split_tile: usize,
) {
    let (head, batch) = (program_id(1), program_id(2));
    let first_row = program_id(0) * q_tile;
    let padded = d != d_tile;
    let first = row_offset(head, batch * num_splits, n_q);
    let rows_of_split = num_programs(1).to::<i64>() * n_q;
    let lse_block = make_block_ptr(
        partial_lse + first,
        shape = [num_splits, n_q],
        strides = [rows_of_split, 1],
        offsets = [0, first_row],
        block_shape = [split_tile, q_tile],
    );
    let o_block = make_block_ptr(
        partial_o + first * d,
        shape = [num_splits, n_q, d],
        strides = [rows_of_split * d, d, 1],
        offsets = [0, first_row, 0],
        block_shape = [split_tile, q_tile, d_tile],
    );
    // The maximum starts at a finite number, as in the forward pass: weights of splits that saw no key are 0.
    let mut row_max = full::<f32>([q_tile], f32::MIN);
    let mut total = zeros::<f32>([q_tile]);
    let mut acc = zeros::<f32>([q_tile, d_tile]);
    for split in range(0, num_splits, split_tile) {
        let lt = load(lse_block.advance([split, 0]), boundary_check = [0, 1], padding = zero);
        let ot = load(o_block.advance([split, 0, 0]), boundary_check = splits_boundary(padded), padding = zero);
        let is_there = (split + arange(0, split_tile)).expand_dims(1) < num_splits;
        let lt = where_(is_there, lt, f32::NEG_INFINITY);
        let next_max = maximum(row_max, max(lt, axis = 0));
        let (weight, factor) = (exp(lt - next_max.expand_dims(0)), exp(row_max - next_max));
        total = total * factor + sum(weight, axis = 0);
        acc = acc * factor.expand_dims(1) + sum(ot * weight.expand_dims(2), axis = 0);
        row_max = next_max;
    }
    let divisor = where_(total == 0.0, 1.0, total);
    let o_block = o.index([batch, head]).block([first_row, 0], [q_tile, d_tile]);
    store(o_block, (acc * (1.0 / divisor).expand_dims(1)).to::<T>(), boundary_check = boundary_dims(true, padded));
    let lse_block = row_block(lse + row_offset(head, batch, n_q), first_row, n_q, q_tile);
    store(lse_block, row_max + log(total), boundary_check = [0]);
}

/// The dimensions of tiles of partial O that need a boundary check.
fn splits_boundary(padded: bool) -> &'static [usize] {
    if padded { &[0, 1, 2] } else { &[0, 1] }
}

/// Rows and splits of a tile of [`flash_attention_fwd_combine`](FlashAttentionFwdCombine), of values of `d` columns: up to 16
/// splits of few rows, for which a program waits for memory once.
pub(super) fn combine_tiles(split: KvSplit, n_q: usize, d: usize) -> [usize; 2] {
    /// Elements of a tile: 64 for each thread.
    const ELEMENTS: usize = 8192;
    let split_tile = split.count.next_power_of_two().min(16);
    let q_tile = 1 << (ELEMENTS / (split_tile * d_tile(d))).clamp(1, ROW_TILE).ilog2();
    [q_tile.min(n_q.max(1).next_power_of_two()), split_tile]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_queries_are_split() {
        let splits = |d, programs, loop_rows| decoding_splits(d, programs, loop_rows);
        assert_eq!([0, 1, 8, 100, 300].map(|programs| splits(128, programs, 1 << 14)), [128, 128, 16, 1, 1]);
        assert_eq!([1, 8, 100, 300].map(|programs| splits(64, programs, 1 << 14)), [256, 32, 2, 1]);
        assert_eq!([0, 2047, 2048].map(|rows| splits(64, 8, rows)), [1, 1, 32]);
        for (count, n_q, d) in [(2, 1, 64), (3, 4096, 128), (16, 16, 256), (128, 0, 1), (5, 7, 200), (2, 4096, 192)] {
            let [q_tile, split_tile] = combine_tiles(KvSplit { count, rows: 256 }, n_q, d);
            assert!(q_tile.is_power_of_two() && split_tile.is_power_of_two(), "{count} {n_q} {d}");
            assert!(q_tile * split_tile * d_tile(d) <= 8192 && q_tile <= n_q.max(1).next_power_of_two());
            assert!(split_tile >= count.min(16));
        }
    }

    #[test]
    fn long_loops_of_sub_wave_grids_are_split() {
        // Of one head of n rows.
        let count = |pass, causal, element_bytes, d, n: usize| {
            KvSplit::at_most(default_splits(pass, causal, element_bytes, d, n.div_ceil(64), n), n).count
        };
        let split = |heads: usize, rows: usize, loop_rows, requested: Option<usize>| {
            let default = || default_splits(Pass::Forward, true, 4, 64, heads * rows.div_ceil(64), loop_rows);
            let KvSplit { count, rows } = KvSplit::at_most(requested.unwrap_or_else(default), loop_rows);
            (count, rows)
        };
        let splits_f32_bwd = |d, n| [Pass::Dkdv, Pass::Dq].map(|pass| count(pass, true, 4, d, n));
        assert_eq!(
            [512, 2048, 4096, 8192, 8193].map(|n| splits_f32_bwd(128, n)),
            [[2; 2], [4; 2], [2; 2], [2; 2], [1; 2]]
        );
        assert_eq!([512, 2048, 4096, 8192].map(|n| splits_f32_bwd(32, n)), [[2; 2], [8; 2], [8; 2], [1; 2]]);
        assert_eq!([512, 2048, 4096].map(|n| split(1, n, n, None)), [(2, 256), (8, 256), (8, 512)]);
        let splits_16bit = |causal, d, n| count(Pass::Dkdv, causal, 2, d, n);
        assert_eq!([1024, 2048, 4096, 8192, 8193].map(|n| splits_16bit(true, 128, n)), [1, 4, 2, 2, 1]);
        assert_eq!([1024, 2048, 4096, 8192, 8193].map(|n| splits_16bit(true, 64, n)), [1, 4, 4, 4, 1]);
        assert_eq!([2048, 4096, 8192].map(|n| splits_16bit(false, 64, n)), [4, 4, 1]);
        // Enough programs; loops of one split; and empty loops.
        assert_eq!([4097, 256, 0].map(|n| split(1, n, n, None)), [(1, 0); 3]);
        assert_eq!(
            (split(3, 2048, 2048, None), split(1, 0, 0, None), split(0, 64, 600, None)),
            ((1, 0), (1, 0), (3, 256))
        );
        assert_eq!(
            [1, 2, 3, 100].map(|requested| split(64, 1024, 1024, Some(requested))),
            [(1, 0), (2, 512), (2, 512), (4, 256)]
        );
        for loop_rows in [1, 255, 257, 1000, 100_000] {
            let (count, rows) = split(1, 64, loop_rows, None);
            assert!(
                count == 1 || (count - 1) * rows < loop_rows && loop_rows <= count * rows,
                "{loop_rows}: {count} × {rows}"
            );
        }
    }
}
