//! Constructors against formulas written out per element.

use super::*;

fn covers(layout: &LinearLayout) -> bool {
    let mut reached: Vec<Vec<u32>> = places(layout).map(|at| layout.apply(at)).collect();
    reached.sort();
    reached.dedup();
    reached == coordinates(layout.shape())
}

/// Blocked coordinates in plain arithmetic: the position of the thread's box, plus the position inside the box, plus
/// the repetition, modulo the shape.
#[test]
fn blocked_agrees_with_arithmetic() {
    // Each thread holds 2×4; 8×4 threads; 2×2 warps: a box of 32×32 elements on a tensor of 64×16.
    let layout = LinearLayout::blocked(&[64, 16], &[2, 4], &[8, 4], &[2, 2], &[1, 0]);
    assert_eq!(layout.num_registers(), 16, "8 per box, two boxes along the rows");
    for at @ Index { register: r, lane: l, warp: w, .. } in places(&layout) {
        let row = r / 4 % 2 + 2 * (l / 4) + 16 * (w / 2) + 32 * (r / 8);
        let column = r % 4 + 4 * (l % 4) + 16 * (w % 2);
        assert_eq!(layout.apply(at), [row % 64, column % 16], "register {r} lane {l} warp {w}");
    }
}

#[test]
fn small_tensors_are_replicated() {
    let layout = LinearLayout::blocked(&[16], &[4], &[32], &[4], &[0]);
    assert_eq!(layout.num_registers(), 4);
    assert_eq!(layout.free_mask(Dim::Lane), 0b11100);
    assert_eq!(layout.free_mask(Dim::Warp), 0b11);
    for at in places(&layout) {
        assert_eq!(layout.apply(at), [(at.register + 4 * at.lane) % 16]);
    }
    let tiny = LinearLayout::blocked(&[2], &[4], &[32], &[4], &[0]);
    assert_eq!(tiny.num_registers(), 2, "a thread does not hold copies of its own values");
}

#[test]
fn filling_spreads_lanes_and_warps_along_the_order() {
    let layout = LinearLayout::blocked_filling(&[64, 32], &[1, 8], 4, &[1, 0]);
    assert_eq!(layout, LinearLayout::blocked(&[64, 32], &[1, 8], &[8, 4], &[4, 1], &[1, 0]));
    let scalar = LinearLayout::blocked_filling(&[], &[], 4, &[]);
    assert_eq!((scalar.num_registers(), scalar.bits(Dim::Lane), scalar.bits(Dim::Warp)), (1, 5, 2));
    let short = LinearLayout::blocked_filling(&[8], &[1], 4, &[0]);
    assert_eq!((short.bits(Dim::Lane), short.bits(Dim::Warp)), (5, 2));
}

proptest! {
    #[test]
    fn blocked_covers_every_element(layout in shapes().prop_flat_map(blocked_of)) {
        prop_assert!(covers(&layout));
        prop_assert!(layout.is_surjective());
        prop_assert_eq!(layout.free_mask(Dim::Register), 0);
        prop_assert_eq!((layout.bits(Dim::Lane), layout.bits(Dim::Warp)), (5, 2));
    }
}

/// PTX ISA, fragments of `mma.m16n8k…`: accumulator element `i` of a lane, with 32-bit elements.
fn accumulator(i: u32, lane: u32) -> [u32; 2] {
    let (group, in_group) = (lane >> 2, lane % 4);
    [if i < 2 { group } else { group + 8 }, in_group * 2 + (i & 1)]
}

/// PTX ISA, A fragments of `mma.m16n8k16` (16 bit), `k8` (tf32), `k32` (8 bit).
fn a_operand(bits: u32, i: u32, lane: u32) -> [u32; 2] {
    let (group, in_group) = (lane >> 2, lane % 4);
    match bits {
        16 => {
            let row = if matches!(i, 0 | 1 | 4 | 5) { group } else { group + 8 };
            [row, in_group * 2 + (i & 1) + if i < 4 { 0 } else { 8 }]
        }
        32 => [if matches!(i, 0 | 2) { group } else { group + 8 }, if i < 2 { in_group } else { in_group + 4 }],
        _ => {
            let row = if matches!(i, 0..4 | 8..12) { group } else { group + 8 };
            [row, in_group * 4 + (i & 3) + if i < 8 { 0 } else { 16 }]
        }
    }
}

/// PTX ISA, B fragments of the same instructions: (k, n).
fn b_operand(bits: u32, i: u32, lane: u32) -> [u32; 2] {
    let (group, in_group) = (lane >> 2, lane % 4);
    match bits {
        16 => [in_group * 2 + (i & 1) + if i < 2 { 0 } else { 8 }, group],
        32 => [in_group + if i == 0 { 0 } else { 4 }, group],
        _ => [in_group * 4 + (i & 3) + if i < 4 { 0 } else { 16 }, group],
    }
}

/// The k index of the tile for a k index of the instruction, in this crate's `mma.sync` operand layouts: the tf32 words
/// of a lane are neighbors along k, in both operands.
fn tile_k(bits: u32, k: u32) -> u32 {
    match (bits, k) {
        (32, 0..4) => 2 * k,
        (32, 4..8) => 2 * (k - 4) + 1,
        _ => k,
    }
}

#[test]
fn mma_fragments_agree_with_the_ptx_manual() {
    for bits in [8, 16, 32] {
        let k = 256 / bits;
        let warps = [2, 2];
        // Two instructions along each axis of each operand; warps lie along m, then n.
        let acc = LinearLayout::mma_m16n8(&[64, 32], warps);
        let a = LinearLayout::mma_m16n8_a(&[64, 2 * k], bits, warps);
        let b = LinearLayout::mma_m16n8_b(&[2 * k, 32], bits, warps);
        assert!(covers(&acc) && covers(&a) && covers(&b));
        for at @ Index { register: r, lane: l, warp: w, .. } in places(&acc) {
            let [row, column] = accumulator(r % 4, l);
            let (n, m) = (r / 4 % 2, r / 8);
            let expected = [row + 16 * (w % 2) + 32 * m, column + 8 * (w / 2) + 16 * n];
            assert_eq!(acc.apply(at), expected);
        }
        let per_lane = 16 * k / 32;
        for at @ Index { register: r, lane: l, warp: w, .. } in places(&a) {
            // tf32 words that are neighbors along k come first.
            let word = if bits == 32 { [0, 2, 1, 3][r as usize % 4] } else { r % per_lane };
            let [row, column] = a_operand(bits, word, l);
            let (step, m) = (r / per_lane % 2, r / per_lane / 2);
            let expected = [row + 16 * (w % 2) + 32 * m, tile_k(bits, column) + k * step];
            assert_eq!(a.apply(at), expected, "{bits} bits");
        }
        let per_lane = 8 * k / 32;
        for at @ Index { register: r, lane: l, warp: w, .. } in places(&b) {
            let [row, column] = b_operand(bits, r % per_lane, l);
            let (step, n) = (r / per_lane % 2, r / per_lane / 2);
            let expected = [tile_k(bits, row) + k * step, column + 8 * (w / 2) + 16 * n];
            assert_eq!(b.apply(at), expected, "{bits} bits");
        }
    }
}

/// PTX ISA, register fragment D of `wgmma.m64nNk…`: d_i is in row (warp % 4)·16 + lane/4 + 8·(i/2 % 2) and column
/// 8·(i/4) + 2·(lane%4) + i%2.
#[test]
fn wgmma_fragments_agree_with_the_ptx_manual() {
    for n in [8, 64, 256] {
        let acc = LinearLayout::wgmma_acc(&[256, 2 * n], n, [8, 1]);
        assert!(covers(&acc));
        for at @ Index { register: r, lane: l, warp: w, .. } in places(&acc) {
            let (i, column_step, row_step) = (r % (n / 2), r / (n / 2) % 2, r / n);
            let row = 16 * (w % 4) + l / 4 + 8 * (i / 2 % 2) + 64 * (w / 4) + 128 * row_step;
            let column = 8 * (i / 4) + 2 * (l % 4) + i % 2 + n * column_step;
            assert_eq!(acc.apply(at), [row, column]);
        }
    }
    for bits in [8, 16, 32] {
        let k = 256 / bits;
        let a = LinearLayout::wgmma_a_operand(&[128, 2 * k], bits, [4, 2]);
        assert!(covers(&a));
        let per_lane = 64 * k / 128;
        for at @ Index { register: r, lane: l, warp: w, .. } in places(&a) {
            let [row, column] = a_operand(bits, r % per_lane, l);
            let (step, m) = (r / per_lane % 2, r / per_lane / 2);
            assert_eq!(a.apply(at), [row + 16 * (w % 4) + 64 * m, column + k * step]);
        }
    }
}

/// In FlashAttention, the scores are the A operand of the second dot without conversion: with all warps along the rows,
/// the accumulator layout equals the A operand layout.
#[test]
fn attention_scores_are_the_a_operand_of_the_second_dot() {
    let scores = LinearLayout::wgmma_acc(&[128, 128], 128, [8, 1]);
    let operand = LinearLayout::wgmma_a_operand(&[128, 128], 16, [8, 1]);
    assert_eq!(Conversion::between(&scores, &operand), Conversion::Identity);
    let scores = LinearLayout::mma_m16n8(&[64, 64], [4, 1]);
    for bits in [16, 32] {
        let operand = LinearLayout::mma_m16n8_a(&[64, 64], bits, [4, 1]);
        assert_eq!(Conversion::between(&scores, &operand), Conversion::Identity);
    }
}
