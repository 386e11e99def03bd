//! Split-KV for sub-wave grids (fewer programs than SMs).
//!
//! One head of a few thousand rows gives a program for every fourth SM, each with a long loop over the other rows. With
//! splits, one program per split of the loop writes its own f32 result (FlashDecoding, Dao and others, 2023, for the
//! forward pass). [`flash_attention_fwd_join`](FlashAttentionFwdJoin) combines those of the forward pass,
//! [`backward_rows`](super::backward_rows) sums the gradients, both in a fixed order: the same inputs give the same
//! bits.

use super::backward_rows::{row_block, sum_block};
use super::config::{Pass, d_tile};
use super::forward::row_offset;
use crate::blocks::checked;
use tilewright_runtime::prelude::*;

/// The split of each program's loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub count: usize,
    /// Rows of every split but the last: a power of two, at least [`UNIT`]; 0 where the loop is not split.
    pub rows: usize,
}

/// Fewest rows of a split: a multiple of every tile size that tuning uses.
pub(super) const UNIT: usize = 256;

impl Parts {
    pub const WHOLE: Parts = Parts { count: 1, rows: 0 };

    /// Chooses the splits of the loops over `walked` rows, one loop for each of `heads` heads (of all batch entries)
    /// and each tile of the `rows` rows, with `d` elements of `bytes` bytes per row. `wanted` is the largest number of
    /// splits, where the caller gives one.
    pub fn new(
        (pass, causal): (Pass, bool),
        (d, bytes): (usize, usize),
        heads: usize,
        rows: usize,
        walked: usize,
        wanted: Option<usize>,
    ) -> Parts {
        let programs = (heads * rows.div_ceil(64)).max(1);
        let count = wanted.unwrap_or_else(|| match bytes {
            2 => usual_of_two_bytes(causal, d, programs, walked),
            _ => usual(pass, d, programs),
        });
        let count = count.max(1);
        // A power of two keeps the number of kernel variants small: `rows` is a constexpr.
        let rows = walked.div_ceil(count).next_power_of_two().max(UNIT);
        match walked.div_ceil(rows.max(1)) {
            0 | 1 => Parts::WHOLE,
            count => Parts { count, rows },
        }
    }

    pub fn split(self) -> bool {
        self.count > 1
    }
}

/// The default number of splits of f32 for `programs` programs with a tile of 64 rows each. Measured on an H200,
/// causal, with tf32x3.
fn usual(pass: Pass, d: usize, programs: usize) -> usize {
    match (pass, programs) {
        // Each program has an SM to itself, and writes results for all of its rows: one head of 4096 rows takes 0.35 ms
        // in two splits, 0.43 in four and 0.45 in eight (d = 128); one of 8192 rows takes 0.61 in two and 0.71 unsplit
        // (d = 64).
        (Pass::Keys | Pass::Queries, ..=128) if d_tile(d) >= 64 => (128 / programs).max(2),
        // This many programs keep a large GPU busy until the longest loop ends. With twice as many, 8192 rows of one
        // head are 5 to 20 % slower when split.
        (_, ..=64) => 512 / programs,
        _ => 1,
    }
}

/// Combines O and L of the splits. With mᵣ = maxₚ L[p, r] and weights w[p, r] = exp(L[p, r] − mᵣ):
/// L[r] = mᵣ + ln Σₚ w[p, r] and O[r] = Σₚ w[p, r] · O[p, r] / Σₚ w[p, r]. A row that saw no key gets O = 0 and L = −∞.
///
/// `part_o` is dense f32 [batch · parts, heads, n_q, d], `part_lse` dense [batch · parts, heads, n_q].
///
/// Grid: (⌈n_q / q_tile⌉, heads, batch).
#[kernel]
pub fn flash_attention_fwd_join<T: Float>(
    part_o: In<f32>,
    part_lse: In<f32>,
    o: Out<T>,
    lse: Out<f32>,
    o_stride_batch: i64,
    o_stride_head: i64,
    o_stride_row: i64,
    o_stride_dim: i64,
    #[no_specialize] n_q: i32,
    #[no_specialize] parts: i32,
    #[constexpr] d: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] q_tile: usize,
) {
    let (head, batch) = (program_id(1), program_id(2));
    let first_row = program_id(0) * q_tile;
    let padded = d != d_tile;
    // The maximum starts at a finite number, as in the forward pass: weights of splits that saw no key are 0.
    let mut highest = full::<f32>([q_tile], f32::MIN);
    for part in range(0, parts) {
        let rows = row_offset(head, batch * parts + part, n_q);
        let lt = load(row_block(part_lse + rows, first_row, n_q, q_tile), boundary_check = [0], padding = zero);
        highest = maximum(highest, lt);
    }
    let mut total = zeros::<f32>([q_tile]);
    let mut acc = zeros::<f32>([q_tile, d_tile]);
    for part in range(0, parts) {
        let rows = row_offset(head, batch * parts + part, n_q);
        let lt = load(row_block(part_lse + rows, first_row, n_q, q_tile), boundary_check = [0], padding = zero);
        let ot = load(
            sum_block(part_o + rows * d, first_row, n_q, d, q_tile, d_tile),
            boundary_check = checked(true, padded),
            padding = zero,
        );
        let weight = exp(lt - highest);
        total += weight;
        acc += ot * weight.expand_dims(1);
    }
    let divisor = where_(total == 0.0, 1.0, total);
    let o_block = make_block_ptr(
        o + (batch * o_stride_batch + head * o_stride_head),
        shape = [n_q, d],
        strides = [o_stride_row, o_stride_dim],
        offsets = [first_row, 0],
        block_shape = [q_tile, d_tile],
        order = [1, 0],
    );
    store(o_block, (acc / divisor.expand_dims(1)).to::<T>(), boundary_check = checked(true, padded));
    let lse_block = row_block(lse + row_offset(head, batch, n_q), first_row, n_q, q_tile);
    store(lse_block, highest + log(total), boundary_check = [0]);
}

/// The default number of splits of bf16 and f16. One head of 4096 rows takes 0.116 ms in the backward pass unsplit,
/// 0.084 in two splits and 0.105 in eight (d = 128); with d = 64 it takes 0.082 unsplit, 0.060 in two and 0.056 in
/// four. The forward pass prefers the same numbers: 0.045, 0.032 and 0.039 ms.
fn usual_of_two_bytes(causal: bool, d: usize, programs: usize, walked: usize) -> usize {
    let few = match (causal, d_tile(d)) {
        // All loops have the same length, and each program has an SM.
        (false, _) if programs > 64 => 1,
        (_, 128..) => 2,
        _ => 4,
    };
    // Short loops end before the combine kernel would begin, and more programs keep a large GPU busy without splits.
    if walked < 2048 || programs > 128 { 1 } else { (128 / programs).max(few) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_long_walks_are_cut() {
        let cut = |heads, rows, walked, wanted| {
            let Parts { count, rows } = Parts::new((Pass::Forward, true), (64, 4), heads, rows, walked, wanted);
            (count, rows)
        };
        let gradients =
            |d, n| [Pass::Keys, Pass::Queries].map(|pass| Parts::new((pass, true), (d, 4), 1, n, n, None).count);
        assert_eq!([512, 2048, 4096, 8192, 8193].map(|n| gradients(128, n)), [[2; 2], [4; 2], [2; 2], [2; 2], [1; 2]]);
        assert_eq!([512, 2048, 4096, 8192].map(|n| gradients(32, n)), [[2; 2], [8; 2], [8; 2], [1; 2]]);
        assert_eq!([512, 2048, 4096].map(|n| cut(1, n, n, None)), [(2, 256), (8, 256), (8, 512)]);
        let shorter = |causal, d, n| Parts::new((Pass::Keys, causal), (d, 2), 1, n, n, None).count;
        assert_eq!([1024, 2048, 4096, 8192, 8193].map(|n| shorter(true, 128, n)), [1, 4, 2, 2, 1]);
        assert_eq!([1024, 2048, 4096, 8192, 8193].map(|n| shorter(true, 64, n)), [1, 4, 4, 4, 1]);
        assert_eq!([2048, 4096, 8192].map(|n| shorter(false, 64, n)), [4, 4, 1]);
        // Enough programs; loops of one split; and empty loops.
        assert_eq!([4097, 256, 0].map(|n| cut(1, n, n, None)), [(1, 0); 3]);
        assert_eq!((cut(3, 2048, 2048, None), cut(1, 0, 0, None), cut(0, 64, 600, None)), ((1, 0), (1, 0), (3, 256)));
        assert_eq!(
            [1, 2, 3, 100].map(|wanted| cut(64, 1024, 1024, Some(wanted))),
            [(1, 0), (2, 512), (2, 512), (4, 256)]
        );
        for walked in [1, 255, 257, 1000, 100_000] {
            let Parts { count, rows } = Parts::new((Pass::Forward, true), (64, 4), 1, 64, walked, None);
            assert!(count == 1 || (count - 1) * rows < walked && walked <= count * rows, "{walked}: {count} × {rows}");
        }
    }
}
