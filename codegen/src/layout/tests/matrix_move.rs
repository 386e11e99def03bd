//! Moves of matrices, element by element, as the PTX ISA places them.

use super::*;

/// Fails unless each element of a tile is where the moves say, once.
fn check(layout: &LinearLayout, memory: &LinearLayout, transposed: bool) {
    let plan = layout.matrix_move(memory).unwrap_or_else(|| panic!("no moves between {layout} and {memory}"));
    assert_eq!(plan.transposed, transposed, "{layout}, {memory}");
    let map = layout.locate_in(memory);
    let image = |bits: &[u32], number: u32| {
        bits.iter().enumerate().filter(|(i, _)| number >> i & 1 == 1).fold(0, |sum, (_, at)| sum ^ at)
    };
    let mut moved = vec![0; layout.num_registers()];
    for warp in 0..layout.num_warps() as u32 {
        for (offset, firsts) in &plan.moves {
            for (m, &first) in firsts.iter().enumerate() {
                for lane in 0..32 {
                    for e in 0..2 {
                        let (row, column) = match transposed {
                            false => (lane / 4, 2 * (lane % 4) + e),
                            true => (2 * (lane % 4) + e, lane / 4),
                        };
                        let address = image(&plan.lane, 8 * m as u32 + row) ^ image(&plan.warp, warp) ^ offset;
                        assert_eq!(address % 8, 0);
                        let register = first as u32 + e;
                        let place = Index { register, lane, warp, block: 0, offset: 0 };
                        assert_eq!(map.apply(place).offset, address + column, "{layout}, {memory}: {place:?}");
                        moved[register as usize] += usize::from(warp == 0 && lane == 0);
                    }
                }
            }
        }
    }
    assert!(moved.iter().all(|&times| times == 1), "{layout}: {moved:?}");
}

#[test]
fn accumulators_move_as_matrices() {
    for (shape, warps) in [([64, 128], [4, 1]), ([16, 16], [1, 1]), ([16, 8], [1, 1]), ([64, 64], [4, 2])] {
        let layout = LinearLayout::mma_m16n8(&shape, warps);
        check(&layout, &LinearLayout::shared_row_major(&shape, &[1, 0]), false);
        for swizzle in [32, 64, 128].into_iter().filter(|bytes| bytes / 2 <= shape[1]) {
            check(&layout, &LinearLayout::shared_swizzled(&shape, &[1, 0], 2, swizzle), false);
        }
        for swizzle in [32, 128].into_iter().filter(|bytes| bytes / 2 <= shape[0]) {
            check(&layout, &LinearLayout::shared_swizzled(&shape, &[0, 1], 2, swizzle), true);
        }
    }
}

#[test]
fn operands_of_dots_move_as_matrices() {
    let row_major = LinearLayout::shared_swizzled(&[64, 64], &[1, 0], 2, 128);
    let column_major = LinearLayout::shared_swizzled(&[64, 64], &[0, 1], 2, 128);
    let [a, b] = [LinearLayout::mma_m16n8_a, LinearLayout::mma_m16n8_b].map(|of| of(&[64, 64], 16, [4, 1]));
    check(&a, &row_major, false);
    check(&a, &column_major, true);
    check(&b, &column_major, false);
    check(&b, &row_major, true);
}

#[test]
fn other_layouts_do_not() {
    let memory = LinearLayout::shared_swizzled(&[64, 64], &[1, 0], 2, 128);
    // Eight columns per thread: one store of 16 bytes is better.
    let rows = LinearLayout::blocked(&[64, 64], &[1, 8], &[4, 8], &[4, 1], &[1, 0]);
    assert_eq!(rows.matrix_move(&memory), None);
    // A row of the tensor for each lane.
    let lanes = LinearLayout::blocked(&[64, 64], &[1, 2], &[32, 1], &[2, 2], &[1, 0]);
    assert_eq!(lanes.matrix_move(&memory), None);
}
