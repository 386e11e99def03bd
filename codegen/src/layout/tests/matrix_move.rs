//! Moves of matrices, element by element, as the PTX ISA places them.

use super::*;

/// Fails unless each element of a tile is where the moves say, once.
fn check(layout: &LinearLayout, memory: &LinearLayout, transposed: bool) {
    for words in [NEXT_WORDS, [0, 2], [1, 0], [3, 1]] {
        check_words(layout, memory, 2, words, transposed);
    }
}

/// Elements of `bytes` bytes. `words`: [`LinearLayout::matrix_move`].
fn check_words(layout: &LinearLayout, memory: &LinearLayout, bytes: usize, words: [usize; 2], transposed: bool) {
    let plan = layout.matrix_move(memory, bytes, words);
    let plan = plan.unwrap_or_else(|| panic!("no moves between {layout} and {memory}"));
    let per_word = 4 / bytes as u32;
    assert_eq!(plan.transposed, transposed, "{layout}, {memory}");
    let map = layout.locate_in(memory);
    let image = |bits: &[u32], number: u32| {
        bits.iter().enumerate().filter(|(i, _)| number >> i & 1 == 1).fold(0, |sum, (_, at)| sum ^ at)
    };
    let mut moved = vec![0; layout.num_registers()];
    for warp in 0..layout.num_warps() as u32 {
        for (offset, firsts) in &plan.moves {
            let differ: Vec<usize> = firsts.iter().map(|&first| (first ^ firsts[0]) / per_word as usize).collect();
            assert!(differ.iter().all(|word| word & !(1 << words[0] | 1 << words[1]) == 0), "{words:?}: {firsts:?}");
            for (m, &first) in firsts.iter().enumerate() {
                for lane in 0..32 {
                    for e in 0..per_word {
                        let (row, column) = match transposed {
                            false => (lane / 4, per_word * (lane % 4) + e),
                            true => (2 * (lane % 4) + e, lane / 4),
                        };
                        let address = image(&plan.lane, 8 * m as u32 + row) ^ image(&plan.warp, warp) ^ offset;
                        assert_eq!(address as usize * bytes % 16, 0);
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
    // Bytes move where K is contiguous.
    let [row_major, column_major] =
        [[1, 0], [0, 1]].map(|order| LinearLayout::shared_swizzled(&[64, 64], &order, 1, 64));
    let [a, b] = [LinearLayout::mma_m16n8_a, LinearLayout::mma_m16n8_b].map(|of| of(&[64, 64], 8, [4, 1]));
    for words in [NEXT_WORDS, [0, 2]] {
        check_words(&a, &row_major, 1, words, false);
        check_words(&b, &column_major, 1, words, false);
    }
    assert_eq!(a.matrix_move(&column_major, 1, NEXT_WORDS), None);
}

#[test]
fn other_layouts_do_not() {
    let memory = LinearLayout::shared_swizzled(&[64, 64], &[1, 0], 2, 128);
    // Eight columns per thread: one store of 16 bytes is better.
    let rows = LinearLayout::blocked(&[64, 64], &[1, 8], &[4, 8], &[4, 1], &[1, 0]);
    assert_eq!(rows.matrix_move(&memory, 2, NEXT_WORDS), None);
    // A row of the tensor for each lane.
    let lanes = LinearLayout::blocked(&[64, 64], &[1, 2], &[32, 1], &[2, 2], &[1, 0]);
    assert_eq!(lanes.matrix_move(&memory, 2, NEXT_WORDS), None);
}
