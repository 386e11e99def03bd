//! Decoding with a paged key/value cache: attention of one new token per sequence (FlashDecoding over pages).
//!
//! The cache of a sequence is a list of pages anywhere in one pool, as in vLLM, so that sequences grow without copies.
//! The query heads that share a key/value head are the rows of one tile, which reads each key once. The keys of a
//! sequence are split between programs, because a batch of tokens alone does not fill a GPU; a second kernel combines
//! their results.
//!
//! The library's attention takes such a cache too (`attention::Options::cache`); this is how to write the kernel.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::prelude::*;

#[autotune(configs = [Config(tile = [64, 128], num_warps = [4, 8], num_stages = [3, 2, 4])], key = [d, page])]
// ANCHOR: kernel
/// The attention of each split of the keys: o, and the base-2 log-sum-exp of its scores.
///
/// Page `table[b, i]` holds the keys i · page … of sequence b, of which there are `lengths[b]`. A page outside of the
/// pool holds no keys. `scale` is for exponentials to base 2. `rows` ≥ group is at least 16, as tensor cores need.
#[kernel(grid = (splits, heads, batch))]
pub fn paged_decode<T: Float>(
    q: Tensor<T, (batch, heads, group, d)>,
    k: Tensor<T, (pages, page, heads, d)>,
    v: Tensor<T, (pages, page, heads, d)>,
    table: Tensor<i32, (batch, most)>,
    lengths: Tensor<i32, (batch,)>,
    o: TensorMut<f32, (splits, batch, heads, group, d)>,
    lse: TensorMut<f32, (splits, batch, heads, group)>,
    scale: f32,
    #[constexpr] rows: usize,
    #[constexpr] page: usize,
    #[constexpr] d: usize,
    #[constexpr] tile: usize,
) {
    assume(group <= rows);
    let (split, head, entry) = (program_id(0), program_id(1), program_id(2));
    // A launch proves that accesses are in bounds, whatever is in memory: so lengths and pages are limited.
    let length = clamp(load(lengths.ptr() + entry), 0, most * page);
    // Whole pages, so that the splits are the same for every tile.
    let each = cdiv(cdiv(length, splits), page) * page;
    let last = minimum(split * each + each, length);
    let qt = load(q.index([entry, head]).block([0, 0], [rows, d]), boundary_check = [0]);
    let mut peak = full::<f32>([rows], f32::MIN);
    let mut total = zeros::<f32>([rows]);
    let mut acc = zeros::<f32>([rows, d]);
    for first in range(split * each, last, tile) {
        let key = first + arange(0, tile);
        let id = load(table.index([entry]).ptr() + key / page, mask = key < last, other = -1);
        let seen = id >= 0 && id < pages;
        let row = (id * page + key % page).to::<i64>() * k.stride(1) + head * k.stride(2);
        let at = row.expand_dims(1) + arange(0, d).expand_dims(0);
        let kt = load(k.ptr() + at, mask = seen.expand_dims(1));
        let vt = load(v.ptr() + at, mask = seen.expand_dims(1));
        let s = where_(seen.expand_dims(0), dot(qt, kt.t()) * scale, f32::NEG_INFINITY);
        let next = maximum(peak, max(s, axis = 1));
        let p = exp2(s - next.expand_dims(1));
        let decay = exp2(peak - next);
        total = total * decay + sum(p, axis = 1);
        acc = dot(p.to::<T>(), vt, acc * decay.expand_dims(1));
        peak = next;
    }
    let divisor = where_(total == 0.0, 1.0, total).expand_dims(1);
    store(o.index([split, entry, head]).block([0, 0], [rows, d]), acc / divisor, boundary_check = [0]);
    store(lse.index([split, entry, head]).block([0], [rows]), peak + log2(total), boundary_check = [0]);
}

/// The attention over all keys, from that of `splits` ≤ `most` splits; a program per row. Without keys it is 0.
#[kernel(grid = rows)]
pub fn combine_splits<T: Float>(
    partial: Tensor<f32, (splits, rows, d)>,
    lse: Tensor<f32, (splits, rows)>,
    o: TensorMut<T, (rows, d)>,
    #[constexpr] most: usize,
    #[constexpr] d: usize,
) {
    assume(splits <= most);
    let (row, split) = (program_id(0), arange(0, most));
    let weight = load(lse.ptr() + split * lse.stride(0) + row, mask = split < splits, other = f32::NEG_INFINITY);
    let weight = exp2(weight - maximum(max(weight), f32::MIN));
    let total = sum(weight);
    let all = load(partial.block([0, row, 0], [most, 1, d]), boundary_check = [0]).reshape([most, d]);
    let ot = sum(all * weight.expand_dims(1), axis = 0) / where_(total == 0.0, 1.0, total);
    store(o.index([row]).block([0], [d]), ot.to::<T>());
}
// ANCHOR_END: kernel

struct Shape {
    batch: usize,
    heads: usize,
    group: usize,
    d: usize,
    page: usize,
    longest: usize,
    splits: usize,
}

fn case(device: &Device, shape: Shape, bench: bool) -> Outcome<Row> {
    let Shape { batch, heads, group, d, page, longest, splits } = shape;
    let mut lengths: Vec<i32> = (0..batch).map(|b| (longest - b * 37 % (longest / 2)) as i32).collect();
    let most = longest.div_ceil(page);
    let pages = batch * most;
    // Each page of the pool belongs to one sequence, in an order that is a permutation: 7919 is a prime that does not
    // divide `pages`.
    let mut table: Vec<i32> = (0..pages).map(|i| (i * 7919 % pages) as i32).collect();
    if !bench {
        // A sequence without keys, and pages outside of the pool.
        lengths[batch - 1] = 0;
        (table[1], table[most + 2]) = (-1, pages as i32);
    }
    let half = |len: usize, frequency: f32| to(&wave(len, frequency), bf16::from_f32);
    let q: Vec<bf16> = half(batch * heads * group * d, 0.7);
    let (k, v): (Vec<bf16>, Vec<bf16>) = (half(pages * page * heads * d, 0.3), half(pages * page * heads * d, 1.1));
    let scale = (d as f64).powf(-0.5);

    let (q_buffer, k_buffer, v_buffer) =
        (Buffer::from_slice(device, &q)?, Buffer::from_slice(device, &k)?, Buffer::from_slice(device, &v)?);
    let (table_buffer, lengths_buffer) = (Buffer::from_slice(device, &table)?, Buffer::from_slice(device, &lengths)?);
    let rows = batch * heads * group;
    let (mut partial, mut lse) =
        (Buffer::<f32>::poisoned(device, splits * rows * d)?, Buffer::<f32>::poisoned(device, splits * rows)?);
    let mut o = Buffer::<bf16>::poisoned(device, rows * d)?;
    let launch = || {
        PagedDecode {
            q: &q_buffer.tensor([batch, heads, group, d])?,
            k: &k_buffer.tensor([pages, page, heads, d])?,
            v: &v_buffer.tensor([pages, page, heads, d])?,
            table: &table_buffer.tensor([batch, most])?,
            lengths: &lengths_buffer,
            o: &mut partial.tensor_mut([splits, batch, heads, group, d])?,
            lse: &mut lse.tensor_mut([splits, batch, heads, group])?,
            scale: (scale * std::f64::consts::LOG2_E) as f32,
            rows: group.next_power_of_two().max(16),
            tile: tuned(),
        }
        .launch_tuned(device)?;
        CombineSplits {
            partial: &partial.tensor([splits, rows, d])?,
            lse: &lse.tensor([splits, rows])?,
            o: &mut o.tensor_mut([rows, d])?,
            most: splits.next_power_of_two(),
        }
        .launch(device)
    };
    let time = common::time(device, bench, launch)?;
    let want = |at: usize| {
        let (row, column) = (at / d, at % d);
        let (b, head) = (row / (heads * group), row / group % heads);
        let cached = |key: usize| {
            let id = usize::try_from(table[b * most + key / page]).ok().filter(|id| *id < pages)?;
            Some(((id * page + key % page) * heads + head) * d)
        };
        let dot = |at: usize| (0..d).map(|x| q[row * d + x].to_f64() * k[at + x].to_f64()).sum::<f64>();
        let (mut sum, mut total) = (0.0, 0.0);
        for at in (0..lengths[b] as usize).filter_map(cached) {
            let weight = (dot(at) * scale).exp();
            (sum, total) = (sum + weight * v[at + column].to_f64(), total + weight);
        }
        if total == 0.0 { 0.0 } else { sum / total }
    };
    let error = check("o", &o.to_vec()?, 1024, 5e-3, want)?;
    let keys: usize = lengths.iter().map(|n| *n as usize).sum();
    let case = format!("{batch} × {heads} × {group} × {d}, {longest} keys, page {page}");
    Ok(Row { kernel: "paged_decoding", case, work: Work::Bytes((keys * heads * d * 4) as f64), error, time })
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    let small = [Shape { batch: 3, heads: 2, group: 3, d: 32, page: 16, longest: 90, splits: 3 }];
    let large = [Shape { batch: 64, heads: 8, group: 4, d: 128, page: 16, longest: 4096, splits: 4 }];
    let shapes = if bench { large } else { small };
    shapes.into_iter().map(|shape| case(device, shape, bench)).collect()
}

fn main() -> Outcome {
    common::main(cases)
}
