//! A layer of a mixture of experts: gating, and a grouped GEMM over the tokens that each expert gets.
//!
//! Each token goes to the `top` experts with the largest probabilities. The rows of an expert are gathered where they
//! are loaded and scattered where they are stored, so that no sorted copy of the tokens is made.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::prelude::*;

// ANCHOR: kernel
/// The probabilities and numbers of the `top` experts of each token, which are normalized to a sum of 1.
#[kernel(grid = tokens)]
pub fn gate(
    logits: Tensor<f32, (tokens, experts)>,
    weight: TensorMut<f32, (tokens, top)>,
    chosen: TensorMut<i32, (tokens, top)>,
    #[constexpr] top: usize,
    #[constexpr] tile: usize,
) {
    assume(experts <= tile && top <= experts);
    let (token, expert) = (program_id(0), arange(0, tile));
    let row = load(logits.index([token]).ptr() + expert, mask = expert < experts, other = f32::NEG_INFINITY);
    let peak = max(row);
    let mut rest = row;
    let mut total = scalar::<f32>(0.0);
    for i in static_range(0, top) {
        let (value, index) = max_with_indices(rest, axis = 0);
        let p = exp(value - peak).scalar();
        total += p;
        store(weight.index([token]).ptr() + i, p);
        store(chosen.index([token]).ptr() + i, index);
        rest = where_(expert == index, f32::NEG_INFINITY, rest);
    }
    for i in static_range(0, top) {
        store(weight.index([token]).ptr() + i, load(weight.index([token]).ptr() + i) / total);
    }
}

/// The slots (token · top + i) of each expert in ascending order, and their number. A program per expert.
#[kernel(grid = experts)]
pub fn route(
    chosen: Tensor<i32, (slots,)>,
    routed: TensorMut<i32, (experts, slots)>,
    counts: TensorMut<i32, (experts,)>,
    #[constexpr] tile: usize,
) {
    let expert = program_id(0);
    let mut count = 0;
    for first in range(0, slots, tile) {
        let slot = first + arange(0, tile);
        let mine = load(chosen.ptr() + slot, mask = slot < slots, other = -1) == expert;
        let place = count + cumsum(mine.to::<i32>(), axis = 0) - 1;
        store(routed.index([expert]).ptr() + place, slot, mask = mine && place >= 0 && place < slots);
        count += sum(mine.to::<i32>());
    }
    store(counts.ptr() + expert, count);
}

/// `out[slot] = weight[slot] · a[slot / top] · w[its expert]`, for any number of programs.
#[kernel]
pub fn expert_matmul<T: Float>(
    a: Tensor<T, (tokens, k)>,
    w: Tensor<T, (experts, k, n)>,
    weight: Tensor<f32, (slots,)>,
    routed: Tensor<i32, (experts, slots)>,
    counts: Tensor<i32, (experts,)>,
    out: TensorMut<T, (slots, n)>,
    #[constexpr] top: usize,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
) {
    let mut tile = program_id(0);
    let mut first = 0;
    let n_tiles = cdiv(n, n_tile);
    for expert in range(0, experts) {
        let count = minimum(load(counts.ptr() + expert), slots);
        let end = first + cdiv(count, m_tile) * n_tiles;
        while tile < end {
            let place = (tile - first) / n_tiles * m_tile + arange(0, m_tile);
            let column = (tile - first) % n_tiles * n_tile;
            let inside = place >= 0 && place < count;
            let slot = load(routed.index([expert]).ptr() + place, mask = inside, other = -1);
            let valid = slot >= 0 && slot < slots;
            let rows = a.ptr() + (slot / top).to::<i64>().expand_dims(1) * a.stride(0);
            let mut acc = zeros::<f32>([m_tile, n_tile]);
            for l in range(0, k, k_tile) {
                let at = (l + arange(0, k_tile)).expand_dims(0);
                let x = load(rows + at, mask = valid.expand_dims(1) && at < k);
                let y = load(w.index([expert]).block([l, column], [k_tile, n_tile]), boundary_check = [0, 1]);
                acc = dot(x, y, acc);
            }
            let scaled = acc * load(weight.ptr() + slot, mask = valid).expand_dims(1);
            let columns = (column + arange(0, n_tile)).expand_dims(0);
            let to = out.ptr() + slot.to::<i64>().expand_dims(1) * out.stride(0) + columns;
            store(to, scaled.to::<T>(), mask = valid.expand_dims(1) && columns >= 0 && columns < n);
            tile += num_programs(0);
        }
        first = end;
    }
}
// ANCHOR_END: kernel

fn case(device: &Device, [tokens, experts, top, n, k]: [usize; 5], tiles: [usize; 3], bench: bool) -> Outcome<Row> {
    let slots = tokens * top;
    let logits = wave(tokens * experts, 0.37);
    let (a, w): (Vec<bf16>, Vec<bf16>) =
        (to(&wave(tokens * k, 0.7), bf16::from_f32), to(&wave(experts * k * n, 0.3), bf16::from_f32));
    let (logits_buffer, a_buffer, w_buffer) =
        (Buffer::from_slice(device, &logits)?, Buffer::from_slice(device, &a)?, Buffer::from_slice(device, &w)?);
    let (mut weight, mut chosen) = (Buffer::<f32>::poisoned(device, slots)?, Buffer::<i32>::poisoned(device, slots)?);
    let (mut routed, mut counts) = (Buffer::<i32>::zeros(device, experts * slots)?, Buffer::zeros(device, experts)?);
    let mut out = Buffer::<bf16>::poisoned(device, slots * n)?;
    let [m_tile, n_tile, k_tile] = tiles;
    let config = LaunchConfig::new(device.info().compute_units).num_warps(if bench { 8 } else { 4 }).num_stages(3);
    let time = common::time(device, bench, || {
        Gate {
            logits: &logits_buffer.tensor([tokens, experts])?,
            weight: &mut weight.tensor_mut([tokens, top])?,
            chosen: &mut chosen.tensor_mut([tokens, top])?,
            tile: experts.next_power_of_two(),
        }
        .launch_with(device, &LaunchConfig::new(tokens).num_warps(1))?;
        let mut routes = routed.tensor_mut([experts, slots])?;
        Route { chosen: &chosen, routed: &mut routes, counts: &mut counts, tile: 1024 }.launch(device)?;
        ExpertMatmul {
            a: &a_buffer.tensor([tokens, k])?,
            w: &w_buffer.tensor([experts, k, n])?,
            weight: &weight,
            routed: &routed.tensor([experts, slots])?,
            counts: &counts,
            out: &mut out.tensor_mut([slots, n])?,
            top,
            m_tile,
            n_tile,
            k_tile,
        }
        .launch_with(device, &config)
    })?;
    let want = |at: usize| {
        let (slot, column) = (at / n, at % n);
        let token = slot / top;
        let row = &logits[token * experts..(token + 1) * experts];
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|i, j| row[*j].total_cmp(&row[*i]));
        let p = |i: usize| f64::from(row[order[i]]).exp();
        let share = p(slot % top) / (0..top).map(p).sum::<f64>();
        let expert = order[slot % top];
        let product = |l: usize| a[token * k + l].to_f64() * w[(expert * k + l) * n + column].to_f64();
        share * (0..k).map(product).sum::<f64>()
    };
    let error = check("out", &out.to_vec()?, 2000, 1e-2, want)?;
    let case = format!("{tokens} tokens, {top} of {experts} experts, {n} × {k}");
    Ok(Row { kernel: "mixture_of_experts", case, work: Work::Flop((2 * slots * n * k) as f64), error, time })
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    Ok(vec![match bench {
        true => case(device, [4096, 8, 2, 4096, 4096], [128, 128, 64], true)?,
        false => case(device, [70, 5, 2, 72, 48], [32, 32, 32], false)?,
    }])
}

fn main() -> Outcome {
    common::main(cases)
}
