//! The forward kernel of FlashAttention-2.

use super::backward_rows::row_block;
use super::config::{Keys, Pass, default_config, is_sub_wave, keep, rows_of_sequences};
use super::eight_bit::in_fragment_order;
use super::loops::{
    BlockScales, CachedRows, KeyLoop, PackedRows, PackedSequences, SCALED_ROWS, Sequence, assume_entries,
    batch_and_split, descaled, not_negative, parts_of_keys,
};
use super::modifiers::{DENSE, MaskArgs, MaskMod, PLAIN, ScoreArgs, ScoreMod, Site};
use crate::blocks::boundary_dims;
use tilewright_runtime::autotune::KeyValue;
use tilewright_runtime::prelude::*;

/// Attention forward with an online softmax: FlashAttention-2 (Dao, 2023), Algorithm 1.
///
/// For each batch entry and head, with S = scale · Q Kᵀ:
///
/// - O = softmax(S) V;
/// - L = log Σⱼ exp Sⱼ for each row, natural logarithm, f32.
///
/// | tensor | shape |
/// |---|---|
/// | q | [batch, heads, n_q, d] |
/// | k | [batch, heads / group, n_k, d]; with `table` [pages, heads / group, n_k, d] |
/// | v | as k, with d_v; for q of 8 bits [batch, heads / group, v_rows, d_v], its rows in the order of [`in_fragment_order`] and zeros beyond n_k |
/// | o | [batch, heads, n_q, d_v] |
/// | lse (L) | [batch, heads, n_q], dense |
/// | sinks | [heads] |
/// | lengths | [batch], the number of keys of each batch entry; without it n_k |
/// | table | [batch, most], the pages of each entry |
/// | row_starts | [sequences + 1], beside `lengths`, where entries are sequences: the first row of each, and the end of the last |
/// | q_descale | [batch, heads, ⌈n_q / 128⌉], dequantization scales of blocks of 128 rows, or one for all rows: queries are the elements of q times them |
/// | k_descale, v_descale | [batch, heads / group, ⌈n_k / 128⌉], the same of keys and values: blocks beside q of 8 bits only; for blocks of values their binary logarithms, where those of −∞ are zeros |
///
/// All but `lse` may have any strides. With `causal`, query row i sees the keys j ≤ i + (n_k − n_q): the diagonal ends
/// in the bottom right corner. A row that sees no key gets O = 0 and L = −∞.
///
/// An attention sink is a score that a row has in addition to those of its keys, with a value of 0: O is the smaller for it, and L
/// includes it.
///
/// Key j of an entry with a `table` is row j mod n_k of page `table`[b, ⌊j / n_k⌋] (paged attention: Kwon and others, 2023). Rows of
/// pages that are not there are zeros.
///
/// `C` is the element type of k and v: that of q, or in a cache 8-bit floats, which are converted to it. `R` is that of O: that of
/// q, or f32 for split results. With q of 8-bit floats, so is P. With `split_rows` above 0, each loop
/// over keys is split into P = ⌈n_k / split_rows⌉ splits, one program each: entry b · P + p of o and lse is the result
/// of split p for batch entry b, and [`flash_attention_fwd_combine`](super::split_kv) combines them.
///
/// With `row_starts`, q has one batch entry, whose rows are those of several sequences, one after the other: k, `lengths` and `table` have
/// an entry for each sequence. Rows after the last one see no key.
///
/// With `pack` above 1, which is then `group`, the query heads of a group are rows of one head, [`PackedRows`]: they read the same keys
/// once. The modifiers ignore the head, and n_q · pack is at most 2³⁰.
///
/// Grid: (⌈n_q · pack / (q_tile · replicas)⌉ · replicas, heads / pack, batch · P), with `row_starts` one tile more for each sequence and for
/// the rows after them. With `persistent`, at most `programs` blocks, of `replicas`
/// programs each, which take tiles by the counter `tiles_taken`: one element, 0 before and after. `d_tile` is at least `d`: a power of two, or 192. `even_keys` promises that n_k is a
/// multiple of `k_tile`. `scale` is positive.
///
/// With `replicas` above 1, this many consecutive programs share a block on Hopper, with warp specialization: a producer
/// warp loads each tile of keys once for all of them (FlashAttention-3 has three warpgroups for d = 64).
///
/// `score` and `mask` are modifiers ([`super::modifiers`]) with their arguments.
///
/// Only tiles of keys on the diagonal, or at the end of the keys, need a mask: the compiler peels them into a separate
/// loop (index-set splitting, pass `split_loops`).
#[autotune(
    configs = [
        Config(q_tile = 16..=256, k_tile = 16..=128, num_warps = [4, 8], num_stages = 2..=3),
        Config(q_tile = 64..=128, k_tile = 64..=128, num_warps = [4, 8], num_stages = 2..=3, warp_specialize = true),
        Config(q_tile = 128, k_tile = 64..=128, num_warps = 8, num_stages = 2..=3, warp_specialize = true,
               pingpong = true),
        Config(q_tile = 64, k_tile = 64..=128, replicas = [2, 3, 4], persistent = [false, true], num_warps = 4,
               num_stages = 2..=3, warp_specialize = true, pingpong = true, overlap = true),
        Config(q_tile = 64..=128, k_tile = 64..=128, num_warps = [4, 8], num_stages = 2, overlap = false),
        Config(q_tile = 64..=128, k_tile = 16..=64, num_warps = [4, 8], num_stages = 2, wgmma_f32 = true),
        Config(q_tile = 64, k_tile = 32..=64, num_warps = 4, num_stages = 2, wgmma_f32 = true, warp_specialize = true),
    ],
    keep = |problem, config| keep(Pass::Forward, problem, config),
    key = [d, d_v, causal, mask, score, keys = Keys::of(lengths_given, page), precision,
           rows = KeyValue::size(rows_of_sequences(n_q, num_starts).saturating_mul(pack)),
           few_rows = rows_of_sequences(n_q, num_starts).saturating_mul(pack) <= 16,
           most_keys = KeyValue::size(if table_given { most.saturating_mul(n_k) } else { n_k }),
           sub_wave = is_sub_wave([batch, heads / pack.max(1)], n_q.saturating_mul(pack))],
    default = |problem| default_config(Pass::Forward, problem),
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = grid([cdiv(n_q * pack, q_tile * replicas) + num_starts, heads / pack.max(1), entries], persistent, programs, replicas))]
#[alias(part_rows = split_rows)]
pub fn flash_attention_fwd<T: Dtype, R: Float, C: Dtype>(
    q: Tensor<T, (batch, heads, n_q, d)>,
    k: Tensor<C, (entries_kv, heads_kv, n_k, d)>,
    v: Tensor<C, (entries_kv, heads_kv, v_rows, d_v)>,
    o: TensorMut<R, (entries, heads, n_q, d_v)>,
    lse: Out<f32>,
    #[given = false] sinks: Option<In<f32>>,
    #[given = false] lengths: Option<In<i32>>,
    #[given = false] table: Option<Tensor<i32, (sequences, most)>>,
    #[given = false] row_starts: Option<Tensor<i32, (num_starts,)>>,
    #[given = false] q_descale: Option<Tensor<f32, (batch, heads, q_blocks)>>,
    #[given = false] k_descale: Option<Tensor<f32, (sequences_kv, heads_kv, k_blocks)>>,
    #[given = false] v_descale: Option<Tensor<f32, (sequences_kv, heads_kv, k_blocks)>>,
    tiles_taken: InOut<i32>,
    mask_data: In<i32>,
    score_data: In<f32>,
    #[no_specialize] n_q: i32,
    #[no_specialize] n_k: i32,
    scale: f32,
    #[no_specialize] mask_number: i32,
    score_number: f32,
    #[no_specialize] programs: i32,
    #[constexpr] d: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
    #[heuristic(d)] d_v: usize,
    #[heuristic(super::config::d_tile(d_v))] d_v_tile: usize,
    #[constexpr] q_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 1] replicas: usize,
    #[constexpr = false] persistent: bool,
    #[constexpr = 1] pack: usize,
    #[constexpr = 1]
    #[heuristic((heads / heads_kv.max(1)).max(1))]
    group: usize,
    #[constexpr = false] causal: bool,
    #[constexpr = false]
    #[heuristic(!lengths_given && n_k.is_multiple_of(k_tile))]
    even_keys: bool,
    #[constexpr = 0]
    #[heuristic(if table_given { n_k } else { 0 })]
    page: usize,
    #[constexpr = false]
    #[heuristic(k_descale_given && k_blocks > 1)]
    block_scales: bool,
    #[constexpr = ieee] precision: Precision,
    #[constexpr = 0] split_rows: usize,
    #[constexpr = DENSE] mask: &'static MaskMod,
    #[constexpr = PLAIN] score: &'static ScoreMod,
) {
    static_assert(
        1 <= d && d <= d_tile && group >= 1 && pack >= 1,
        "d, group and pack must be at least 1, and d_tile at least d",
    );
    static_assert(1 <= d_v && d_v <= d_v_tile, "d_v must be at least 1, and d_v_tile at least d_v");
    static_assert(table.is_none() || lengths.is_some(), "a table takes lengths");
    static_assert(
        C::dtype() == T::dtype() || lengths.is_some() && C::dtype().is_f8(),
        "C is T, or beside `lengths` (a cache) an 8-bit float",
    );
    static_assert(lengths.is_none() || !even_keys, "lengths are no multiples of k_tile");
    let is_8_bit = T::dtype().is_f8();
    static_assert(!is_8_bit || lengths.is_none(), "8-bit queries take no cache");
    static_assert(is_8_bit || !block_scales, "blocks of rows have scales of their own beside 8-bit queries");
    static_assert(q_descale.is_none() || pack == 1, "queries of packed heads have no scales");
    static_assert(k_descale.is_some() == v_descale.is_some(), "keys and values both have scales, or neither has");
    static_assert(
        pack == 1 || pack == group && mask.ignores_head() && score.ignores_head(),
        "pack is 1 or group, with modifiers that ignore the head",
    );
    if pack > 1 {
        assume(n_q <= (1 << 30) / pack as i32);
    }
    let sequences = if let Some(starts) = row_starts {
        static_assert(lengths.is_some(), "row_starts takes lengths: a cache");
        static_assert(
            replicas == 1 && !persistent,
            "tiles of sequences share no block: replicas is 1, and persistent false",
        );
        assume(q.dim(0) == 1);
        starts.dim(0) - 1
    } else {
        q.dim(0)
    };
    assume(sequences == if let Some(table) = table { table.dim(0) } else { k.dim(0) });
    if is_8_bit {
        assume(v.dim(2) >= k.dim(2));
    } else {
        assume(v.dim(2) == k.dim(2));
    }
    let most_keys = if let Some(table) = table { table.dim(1) * n_k } else { n_k };
    if let Some(scales) = k_descale {
        assume(scales.dim(0) == sequences);
        if block_scales {
            assume(scales.dim(2) == cdiv(most_keys, SCALED_ROWS));
        }
    }
    assume_entries(o.dim(0), q.dim(0), most_keys, split_rows);
    assume_group(q.dim(1), k.dim(1), group);
    let (rows_of_all, replica) = (q_tile * replicas, program_id(0) % replicas);
    let compute = |tile: Scalar<i32>, head: Scalar<i32>, entry: Scalar<i32>| {
        let (batch, split) = batch_and_split(entry, most_keys, split_rows);
        let kv_head = if pack == group { head } else { head / group };
        let head = head * pack;
        let sequence = match row_starts {
            None => Sequence { index: batch, tile, first: scalar::<i32>(0), n_q, is_there: scalar::<bool>(true) },
            Some(starts) => PackedSequences { starts, n_q }.sequence_of(tile, q_tile, pack),
        };
        let Sequence { index: batch_kv, tile, n_q: own_rows, .. } = sequence;
        let n_k = if let Some(lengths) = lengths {
            where_(sequence.is_there, clamp(load(lengths + batch_kv), 0, most_keys), 0)
        } else {
            n_k
        };
        let row_of_all = tile * rows_of_all;
        let first_row = row_of_all + replica * q_tile;
        let (padded, v_padded) = (d != d_tile, d_v != d_v_tile);
        let q_block = q.index([batch, head]).block([first_row, 0], [q_tile, d_tile]);
        let k_block = k.index([batch_kv, kv_head]).block([0, 0], [k_tile, d_tile]);
        let v_block = v.index([batch_kv, kv_head]).block([0, 0], [k_tile, d_v_tile]);
        // Of pages without rows, none is read.
        let pages = table.map(|table| (table.index([batch_kv]), page.max(1)));
        let cached =
            |x: TensorPtr<C>, d_tile: usize| CachedRows { x, batch: batch_kv, head: kv_head, pages, n_k, d_tile };
        let cached = lengths.map(|_| [cached(k, d_tile), cached(v, d_v_tile)]);

        let packed = (pack > 1 || row_starts.is_some()).then(|| {
            let rows = first_row + arange(0, q_tile);
            PackedRows { head, rows, pack, first: sequence.first, end: sequence.first + own_rows, n_q }
        });
        let qt = match packed {
            None => load(q_block, boundary_check = boundary_dims(true, padded), padding = zero),
            Some(rows) => {
                let zero = scalar::<f32>(0.0).to::<T>();
                load(rows.of(q.index([batch]), d_tile), mask = rows.mask(d, d_tile), other = zero)
            }
        };
        let site = Site { batch: batch_kv, head, n_q: own_rows, n_k, most_keys, causal };
        let (rows, all_rows) = match packed {
            Some(rows) if pack > 1 => (rows.positions(), (row_of_all / pack, (rows_of_all - 1) / pack + 2)),
            _ => (first_row + arange(0, q_tile), (row_of_all, rows_of_all)),
        };
        let of_head = |scales: TensorPtr<f32>| BlockScales(scales.index([batch_kv, kv_head]));
        let [k_scales, v_scales] = [k_descale, v_descale].map(|scales| scales.map(of_head));
        let of_q = match q_descale {
            Some(scales) => {
                let scales = BlockScales(scales.index([batch, head]));
                not_negative(scales.of_tile(first_row / q_tile, q_tile))
            }
            None => scalar::<f32>(1.0),
        };
        let mut scale = scale;
        let (descale, v_descale) = if block_scales {
            (k_scales.zip(v_scales).map(|(k, v)| ([k, v], of_q)), None)
        } else {
            if let Some(k) = k_scales {
                scale = descaled(scale, of_q * not_negative(k.of_all()));
            }
            (None, v_scales)
        };
        let keys = KeyLoop {
            q: qt,
            rows: rows.expand_dims(1),
            k: k_block,
            v: v_block,
            k_tile,
            k_boundary: boundary_dims(!even_keys, padded),
            v_boundary: boundary_dims(!even_keys, v_padded),
            cached,
            precision,
            scale,
            descale,
            replicas,
        };
        let modify = score.bound(ScoreArgs { number: score_number, data: score_data, site });
        let args = MaskArgs { number: mask_number, data: mask_data, site };
        let parts = parts_of_keys(mask, args, rows, all_rows, k_tile, even_keys, lengths.is_some(), split);
        let sinks = sinks.map(|sinks| match packed {
            None => load(sinks + head).broadcast_to([q_tile]),
            Some(rows) => load(sinks + rows.heads()),
        });
        // The maximum starts at a finite number: −∞ − (−∞) would be NaN, while a score of −∞ minus a finite maximum is the
        // exponent −∞.
        let (no_max, no_total) = (full::<f32>([q_tile], f32::MIN), zeros::<f32>([q_tile]));
        let units = (scalar::<f32>(0.0), scalar::<f32>(-126.0));
        let state = (zeros::<f32>([q_tile, d_v_tile]), no_max, no_total, units);
        let state = keys.run(parts, modify.as_ref(), state, |state, tiles| {
            let scores = tiles.scores.keep(tiles.scores.modified().scores, f32::NEG_INFINITY);
            online_softmax(state, scores, tiles.v, tiles.v_scale, tiles.scale2, precision)
        });
        let (mut acc, mut row_max, mut total, (unit, _)) = state;
        if let Some(sinks) = sinks {
            // After the keys: weights of narrow types, relative to a sink that is much larger than the scores, would be 0. Finite, as
            // the maximum is: above 2^127 the product may be infinite.
            let sink = minimum(sinks * std::f32::consts::LOG2_E, f32::MAX, propagate_nan = true);
            let is_first = split.is_first();
            let with_sink = where_(is_first, maximum(sink, row_max), row_max);
            let factor = exp2(row_max - with_sink);
            acc = acc * factor.expand_dims(1);
            total = total * factor + where_(is_first, exp2(sink - with_sink), 0.0);
            row_max = with_sink;
        }

        // A row that saw no key has a sum of 0: O = 0 · 1, L = log₂ 0 = −∞.
        let divisor = where_(total == 0.0, 1.0, total);
        let o_block = o.index([entry, head]).block([first_row, 0], [q_tile, d_v_tile]);
        let unit = match v_descale {
            // Without keys O is 0, whatever the scale is.
            Some(scales) => where_(n_k > 0, not_negative(scales.of_all()), 0.0),
            None => exp2(unit),
        };
        let factor = unit / divisor;
        let o_tile = (acc * factor.expand_dims(1)).to::<R>();
        let lse_tile = (row_max + log2(total)) * std::f32::consts::LN_2;
        let first_lse = (entry * q.dim(1) + head).to::<i64>() * n_q;
        if let Some(rows) = packed {
            store(rows.of(o.index([entry]), d_v_tile), o_tile, mask = rows.mask(d_v, d_v_tile));
            store(lse + first_lse + rows.in_order(), lse_tile, mask = rows.are_there());
        } else {
            store(o_block, o_tile, boundary_check = boundary_dims(true, v_padded));
            store(row_block(lse + first_lse, first_row, n_q, q_tile), lse_tile, boundary_check = [0]);
        }
    };
    let compute_in_order = |id: Scalar<i32>, extents: (Scalar<i32>, Scalar<i32>, Scalar<i32>)| {
        let (tiles, heads, entries) = extents;
        if causal {
            let (place, head, entry) =
                longest_first_at_end(id, extents, heads_in_l2(most_keys, 2 * (d_tile + d_v_tile), group));
            // The last query tiles have the most work.
            compute(tiles - 1 - place, head, entry);
        } else {
            // Programs that run at a time read the same keys.
            let head = within(id / tiles, heads * entries);
            compute(id % tiles, head % heads, within(head / heads, entries));
        }
    };
    if persistent {
        let extents = (cdiv(n_q * pack, rows_of_all), q.dim(1) / pack, o.dim(0));
        let (first, blocks) = (program_id(0) / replicas, num_programs(0) / replicas);
        assume_i32(extents);
        let all = extents.0 * extents.1 * extents.2;
        for id in range(first, all, blocks, replicas = replicas, dynamic = tiles_taken) {
            compute_in_order(id, extents);
        }
    } else if causal {
        let extents = (num_programs(0) / replicas, num_programs(1), num_programs(2));
        compute_in_order(program_in_order(program_id(0) / replicas, extents), extents);
    } else {
        compute(program_id(0) / replicas, program_id(1), program_id(2));
    }
}

/// Assumes that the number of tiles fits an i32. `extents`: tiles of a head, heads, and entries.
#[device_fn]
fn assume_i32(extents: (Scalar<i32>, Scalar<i32>, Scalar<i32>)) {
    assume(extents.0.to::<i64>() * extents.1 * extents.2 <= i32::MAX as i64);
}

/// The number of this program among those of a grid of `extents`, of which the first axis counts as the tile `tile`.
#[device_fn]
pub(super) fn program_in_order(tile: Scalar<i32>, extents: (Scalar<i32>, Scalar<i32>, Scalar<i32>)) -> Scalar<i32> {
    assume_i32(extents);
    (program_id(2) * extents.1 + program_id(1)) * extents.0 + tile
}

/// The tile, the head and the entry of this program of a grid of tiles, heads and entries. `by_length`: in the order of
/// [`longest_first_at_end`], for loops that access `row_bytes` for each of `rows` rows, the same for `group` heads.
#[device_fn]
pub(super) fn this_program(
    by_length: bool,
    rows: Scalar<i32>,
    row_bytes: usize,
    group: usize,
) -> (Scalar<i32>, Scalar<i32>, Scalar<i32>) {
    if by_length {
        let extents = (num_programs(0), num_programs(1), num_programs(2));
        let id = program_in_order(program_id(0), extents);
        longest_first_at_end(id, extents, heads_in_l2(rows, row_bytes, group))
    } else {
        (program_id(0), program_id(1), program_id(2))
    }
}

/// The number of heads that fit into the L2 cache, of loops that access `row_bytes` for each of `rows` rows, the same for
/// `group` heads.
#[device_fn]
pub(super) fn heads_in_l2(rows: Scalar<i32>, row_bytes: usize, group: usize) -> Scalar<i32> {
    // 40 of Hopper's 50 MB.
    let l2_bytes = 40 << 20;
    let fit = scalar::<i32>((l2_bytes / row_bytes) as i32) / maximum(rows, 1);
    maximum(minimum(fit, i32::MAX / group as i32), 1) * group
}

/// The tile, the head and the entry of program number `id`, where the tiles of a head are counted from the longest loop to
/// the shortest. One head comes after the other, so that programs that run at a time read the same tensors; but the longest
/// tiles of the last `last_heads` come before their shorter ones, so that all SMs end at about the same time. Compared with
/// other orders: `harness/records/2026-11-28-h200-attention-order.jsonl` and `…-attention-tried.jsonl` (thirteenth run).
#[device_fn]
fn longest_first_at_end(
    id: Scalar<i32>,
    extents: (Scalar<i32>, Scalar<i32>, Scalar<i32>),
    last_heads: Scalar<i32>,
) -> (Scalar<i32>, Scalar<i32>, Scalar<i32>) {
    let (tiles, heads, entries) = extents;
    let all_heads = heads * entries;
    let last_heads = minimum(last_heads, all_heads);
    let first_heads = all_heads - last_heads;
    let rest = id - first_heads * tiles;
    let (mut tile, mut head) = (id % tiles, id / tiles);
    if rest >= 0 {
        (tile, head) = (rest / last_heads, first_heads + rest % last_heads);
    }
    let head = within(head, all_heads);
    (within(tile, tiles), head % heads, within(head / heads, entries))
}

/// An index below `extent`, as it is. The check of a launch sees its bounds, and so does the choice of loads: TMA takes no index
/// below 0.
#[device_fn]
pub(super) fn within(index: Scalar<i32>, extent: Scalar<i32>) -> Scalar<i32> {
    maximum(minimum(index, extent - 1), 0)
}

/// The offset of a head's first row in a dense [batch, heads, n] tensor.
#[device_fn]
pub(super) fn row_offset(head: Scalar<i32>, batch: Scalar<i32>, n: Scalar<i32>) -> Scalar<i64> {
    (batch * num_programs(1) + head).to::<i64>() * n
}

/// Assumes that `group` query heads share each key/value head.
#[device_fn]
pub(super) fn assume_group(heads: Scalar<i32>, heads_kv: Scalar<i32>, group: usize) {
    assume(heads.to::<i64>() == heads_kv.to::<i64>() * group as i64);
}

/// One step of the online softmax, whose state is `acc` = Σ p V / 2^unit, the running maximum `row_max`, `total` = Σ p, and `units`, the unit
/// and the least one, where p = 2^(scale2 · score − row_max): adds a tile of scores and values, whose scale is 2^`v_scale`.
///
/// The unit is that of the last tile of values, but at least 2⁻⁸⁰ of the largest one so far: of smaller values nothing is left in the
/// sum, and a smaller unit would take `acc` beyond the range of f32.
///
/// Of 8 bits, p is at most 2⁸, so that smaller ones keep their bits (the largest number is 448, the smallest 2⁻⁹).
///
/// The maximum is kept in scaled units, so that each exponent is one FMA. It is never −∞, which scores may be. With values of up to
/// 64 columns, where arithmetic takes longer than the dots, it moves only if p would exceed 2⁸ otherwise (f16 reaches 2¹⁶), so that most
/// tiles of a warp leave `acc` as it is (FlashAttention-4, `flash_attn/cute/softmax.py`). Wider heads are slower with it
/// (`harness/records/2026-11-28-h200-attention-rescale.jsonl` and `…-tried.jsonl`).
#[device_fn]
fn online_softmax<T: Dtype>(
    state: (Tile<f32>, Tile<f32>, Tile<f32>, (Scalar<f32>, Scalar<f32>)),
    scores: Tile<f32>,
    v: Tile<T>,
    v_scale: Option<Scalar<f32>>,
    scale2: Scalar<f32>,
    precision: Precision,
) -> (Tile<f32>, Tile<f32>, Tile<f32>, (Scalar<f32>, Scalar<f32>)) {
    let (acc, prev_max, total, units) = state;
    let is_8_bit = T::dtype().is_f8();
    let is_lazy = acc.shape()[1] <= 64 && !is_8_bit;
    let tile_max = max(scores, axis = 1) * scale2;
    let tile_max = if is_8_bit { tile_max - 8.0 } else { tile_max };
    let row_max =
        if is_lazy { where_(tile_max - prev_max > 8.0, tile_max, prev_max) } else { maximum(prev_max, tile_max) };
    let p = exp2(scores * scale2 - row_max.expand_dims(1));
    let factor = exp2(prev_max - row_max);
    let (mut units, mut column) = (units, factor);
    if let Some(v_scale) = v_scale {
        let (prev_unit, least) = units;
        let least = maximum(least, minimum(v_scale, 128.0) - 80.0);
        let unit = maximum(v_scale, least, propagate_nan = true);
        column = factor * exp2(prev_unit - unit);
        units = (unit, least);
    }
    let column = column.expand_dims(1);
    let acc = if is_lazy { rescale(acc, column) } else { acc * column };
    let weights = if is_8_bit { in_fragment_order(p.to::<T>(), 1) } else { p.to::<T>() };
    let acc = dot(weights, v, acc = acc, input_precision = precision);
    (acc, row_max, total * factor + sum(p, axis = 1), units)
}

/// The grid of the forward kernel, for tiles of all programs that share a block.
fn grid(tiles: [usize; 3], persistent: bool, programs: i32, replicas: usize) -> (usize, usize, usize) {
    let [x, y, z] = tiles;
    match persistent {
        true => (x.saturating_mul(y).saturating_mul(z).min(programs.max(1) as usize) * replicas, 1, 1),
        false => (x * replicas, y, z),
    }
}
