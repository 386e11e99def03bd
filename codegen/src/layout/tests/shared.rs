//! Shared layouts and accesses to them.

use super::*;

/// Byte address at which TMA stores an element: boxes one span wide follow each other; the index of the 16-byte chunk
/// is XORed with as many low bits of the index of the 128-byte line as the mode swizzles.
fn tma_address(row: u32, column: u32, rows: u32, element_bytes: u32, span: u32) -> u32 {
    let byte = column * element_bytes;
    let address = byte / span * rows * span + row * span + byte % span;
    let line = address / 128 % (span / 16);
    address ^ (line * 16)
}

#[test]
fn swizzles_agree_with_tma_addresses() {
    for (rows, columns, element_bytes) in [(64, 64, 2), (128, 128, 2), (16, 128, 4), (8, 256, 1), (2, 256, 2)] {
        for span in [32, 64, 128] {
            let layout = LinearLayout::shared_swizzled(&[rows, columns], &[1, 0], element_bytes, span);
            for offset in 0..rows * columns {
                let at = layout.apply_offset(offset);
                assert_eq!(tma_address(at[0], at[1], rows, element_bytes, span), offset * element_bytes);
            }
        }
    }
}

/// The common formulation for full 128-byte rows: chunk XOR row modulo 8. With narrower spans, the chunk changes with
/// every second or fourth row.
#[test]
fn swizzle_xors_the_chunk_with_the_row() {
    for (span, rows_per_step) in [(128, 1), (64, 2), (32, 4)] {
        let columns = span / 2;
        let layout = LinearLayout::shared_swizzled(&[64, columns], &[1, 0], 2, span);
        for offset in 0..64 * columns {
            let (row, chunk) = (offset / columns, offset % columns / 8);
            let logical = (chunk ^ (row / rows_per_step % (span / 16))) * 8 + offset % 8;
            assert_eq!(layout.apply_offset(offset), [row, logical]);
        }
    }
}

#[test]
fn a_column_major_tile_swizzles_its_rows() {
    let layout = LinearLayout::shared_swizzled(&[64, 16], &[0, 1], 2, 128);
    let mirrored = LinearLayout::shared_swizzled(&[16, 64], &[1, 0], 2, 128).transpose(&[1, 0]).layout;
    assert_eq!(layout, mirrored);
    assert_eq!(Swizzle::widest_for(96), Swizzle::Bytes64);
    assert_eq!(Swizzle::widest_for(8), Swizzle::None);
}

/// Maximum ratio of the cycles of a warp's vector accesses to the minimum: lanes are processed in groups that move 128
/// bytes, and a four-byte bank serves one word per cycle.
fn worst_conflict(layout: &LinearLayout, memory: &LinearLayout, element_bytes: u32) -> usize {
    let map = layout.locate_in(memory);
    let access = layout.vector_access(memory, (16 / element_bytes) as usize);
    let bytes = access.elements as u32 * element_bytes;
    let served = (128 / bytes).min(32);
    let mut worst = 0;
    for warp in 0..layout.num_warps() as u32 {
        for group in &access.groups {
            for first in (0..32).step_by(served as usize) {
                let mut words: Vec<u32> = (first..first + served)
                    .flat_map(|lane| {
                        let place = Index { register: group[0] as u32, lane, warp, ..Index::default() };
                        let start = map.apply(place).offset * element_bytes;
                        start / 4..(start + bytes).div_ceil(4)
                    })
                    .collect();
                words.sort_unstable();
                words.dedup();
                let bank = |bank| words.iter().filter(|&&word| word % 32 == bank).count();
                worst = worst.max((0..32).map(bank).max().unwrap_or(0));
            }
        }
    }
    worst
}

#[test]
fn conversion_scratch_has_no_bank_conflicts() {
    let row = LinearLayout::blocked(&[128, 64], &[1, 8], &[4, 8], &[4, 1], &[1, 0]);
    let column = LinearLayout::blocked(&[128, 64], &[8, 1], &[16, 2], &[1, 4], &[0, 1]);
    let mma = LinearLayout::mma_m16n8(&[128, 64], [2, 2]);
    let wgmma = LinearLayout::wgmma_acc(&[128, 64], 64, [4, 1]);
    let layouts = [row, column, mma, wgmma];
    for src in &layouts {
        for dst in &layouts {
            for element_bytes in [1, 2, 4, 8] {
                let scratch = LinearLayout::conversion_scratch(src, dst, element_bytes, false);
                assert!(scratch.is_injective() && scratch.is_surjective());
                let found = [src, dst].map(|side| worst_conflict(side, &scratch, element_bytes));
                assert_eq!(found, [1, 1], "{src} to {dst} with {element_bytes} bytes: {scratch}");
            }
        }
    }
}

/// The maximum number of rows of one matrix that share a bank.
fn worst_matrix_conflict(layout: &LinearLayout, memory: &LinearLayout) -> usize {
    let plan =
        layout.matrix_move(memory, 2, NEXT_WORDS).unwrap_or_else(|| panic!("no moves between {layout} and {memory}"));
    let row = |number: u32| (0..3).filter(|bit| number >> bit & 1 == 1).fold(0, |sum, bit| sum ^ plan.lane[bit]);
    // A row of 16 bytes takes four of the 32 banks.
    let banks: Vec<u32> = (0..8).map(|number| row(number) / 8 % 8).collect();
    (0..8).map(|bank| banks.iter().filter(|&&other| other == bank).count()).max().unwrap_or(0)
}

#[test]
fn conversion_scratch_of_matrices_has_no_bank_conflicts() {
    let row = LinearLayout::blocked(&[128, 64], &[1, 8], &[4, 8], &[4, 1], &[1, 0]);
    for fragments in [LinearLayout::mma_m16n8(&[128, 64], [2, 2]), LinearLayout::wgmma_acc(&[128, 64], 64, [4, 1])] {
        for (src, dst) in [(&row, &fragments), (&fragments, &row)] {
            let scratch = LinearLayout::conversion_scratch(src, dst, 2, true);
            assert!(scratch.is_injective() && scratch.is_surjective());
            assert_eq!(worst_matrix_conflict(&fragments, &scratch), 1, "{fragments}: {scratch}");
            assert_eq!(worst_conflict(&row, &scratch, 2), 1, "{scratch}");
            assert_eq!(row.vector_access(&scratch, 8).elements, 8);
        }
    }
    // A column of matrices is no row of a thread: as without matrices.
    let column = LinearLayout::blocked(&[128, 64], &[1, 1], &[32, 1], &[1, 4], &[0, 1]);
    let mma = LinearLayout::mma_m16n8(&[128, 64], [2, 2]);
    let [with, without] = [true, false].map(|matrices| LinearLayout::conversion_scratch(&mma, &column, 2, matrices));
    assert_eq!(with, without);
}

#[test]
fn row_major_scratch_would_conflict() {
    // Checks `worst_conflict` itself: a thread reads its row four 4-byte elements at a time, and the eight lanes of a
    // wavefront all read from the same four banks.
    let column = LinearLayout::blocked(&[32, 32], &[1, 1], &[32, 1], &[1, 1], &[0, 1]);
    let memory = LinearLayout::shared_row_major(&[32, 32], &[1, 0]);
    assert_eq!(worst_conflict(&column, &memory, 4), 8);
    let scratch = LinearLayout::conversion_scratch(&column, &column.transpose(&[1, 0]).layout, 4, false);
    assert_eq!(worst_conflict(&column, &scratch, 4), 1);
}

#[test]
fn contiguous_runs_of_known_layouts() {
    let layout = LinearLayout::blocked(&[16, 64], &[2, 8], &[4, 8], &[1, 1], &[1, 0]);
    assert_eq!((layout.contiguous_run(1), layout.contiguous_run(0)), (8, 1));
    let acc = LinearLayout::mma_m16n8(&[16, 64], [1, 1]);
    assert_eq!(acc.contiguous_run(1), 2);
    // A 128-byte swizzle keeps 16-byte chunks contiguous.
    let swizzled = LinearLayout::shared_swizzled(&[16, 64], &[1, 0], 2, 128);
    assert_eq!(layout.contiguous_offsets(&swizzled), 8);
    assert_eq!(acc.contiguous_offsets(&swizzled), 2);
    // A thread holds a whole row, but only the elements of a chunk are contiguous.
    let rows = LinearLayout::blocked(&[16, 64], &[1, 64], &[16, 1], &[1, 1], &[1, 0]);
    assert_eq!((rows.contiguous_run(1), rows.contiguous_offsets(&swizzled)), (64, 8));
}

proptest! {
    #[test]
    fn contiguous_runs_are_sound(layout in any_layout()) {
        for axis in 0..layout.rank() {
            let run = layout.contiguous_run(axis) as u32;
            for at in places(&layout) {
                let in_run = at.register % run;
                let mut first = layout.apply(Index { register: at.register - in_run, ..at });
                prop_assert_eq!(first[axis] % run, 0);
                first[axis] += in_run;
                prop_assert_eq!(layout.apply(at), first);
            }
        }
    }

    #[test]
    fn vector_accesses_are_contiguous_in_memory((layout, other) in any_pair(), most in 0u32..5) {
        let scratch = LinearLayout::conversion_scratch(&layout, &other, 4, false);
        let order: Vec<usize> = (0..layout.rank()).rev().collect();
        for memory in [scratch, LinearLayout::shared_row_major(layout.shape(), &order)] {
            let access = layout.vector_access(&memory, 1 << most);
            prop_assert!(access.elements <= 1 << most);
            let map = layout.locate_in(&memory);
            let mut seen: Vec<usize> = access.groups.concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..layout.num_registers()).collect::<Vec<_>>());
            for thread in places(&layout).filter(|at| at.register == 0) {
                for group in &access.groups {
                    let start = map.apply(Index { register: group[0] as u32, ..thread }).offset;
                    prop_assert_eq!(start as usize % access.elements, 0);
                    for (i, &register) in group.iter().enumerate() {
                        let at = Index { register: register as u32, ..thread };
                        let offset = map.apply(at).offset;
                        prop_assert_eq!(offset, start + i as u32);
                        prop_assert_eq!(memory.apply_offset(offset), layout.apply(at));
                    }
                }
            }
            prop_assert!(access.elements >= layout.contiguous_offsets(&memory).min(1 << most));
        }
    }
}
