//! Reductions, checked by executing their steps on lists of input elements.

use super::*;

fn check_reduction(layout: &LinearLayout, axis: usize, reduction: &Reduction) {
    let result = &reduction.layout;
    let (lanes, warps) = (layout.size(Dim::Lane) as u32, layout.num_warps() as u32);
    let registers = result.num_registers();
    // values[warp][lane][register]: the coordinates along the axis of the elements combined so far.
    let thread = |warp: u32, lane: u32| -> Vec<Vec<u32>> {
        let place = |register: usize| Index { register: register as u32, lane, warp, ..Index::default() };
        let group = |group: &Vec<usize>| group.iter().map(|&r| layout.apply(place(r))[axis]).collect();
        reduction.registers.iter().map(group).collect()
    };
    let mut values: Vec<Vec<Vec<Vec<u32>>>> =
        (0..warps).map(|warp| (0..lanes).map(|lane| thread(warp, lane)).collect()).collect();
    let steps = reduction.lanes.iter().map(|&mask| (0, mask as usize));
    for (warp_mask, lane_mask) in steps.chain(reduction.warps.iter().map(|&mask| (mask as usize, 0))) {
        let before = values.clone();
        for (warp, lane) in (0..warps as usize).flat_map(|warp| (0..lanes as usize).map(move |lane| (warp, lane))) {
            for register in 0..registers {
                let other = &before[warp ^ warp_mask][lane ^ lane_mask][register];
                values[warp][lane][register].extend(other);
            }
        }
    }
    let whole: Vec<u32> = (0..layout.shape()[axis]).collect();
    for Index { register: r, lane: l, warp: w, .. } in places(result) {
        let mut got = values[w as usize][l as usize][r as usize].clone();
        got.sort_unstable();
        assert_eq!(got, whole, "each element once: {layout} along {axis}, register {r} lane {l} warp {w}");
    }
}

proptest! {
    #[test]
    fn blocked_layouts_reduce(layout in shapes().prop_flat_map(blocked_of)) {
        for axis in 0..layout.rank() {
            let reduction = layout.reduction(axis).expect("a blocked layout reduces as it is");
            check_reduction(&layout, axis, &reduction);
        }
    }

    #[test]
    fn other_layouts_reduce_correctly_or_give_none(layout in any_layout()) {
        for axis in 0..layout.rank() {
            if let Some(reduction) = layout.reduction(axis) {
                check_reduction(&layout, axis, &reduction);
            }
        }
    }
}

/// Rows of a FlashAttention score tile: four lanes of one warp share a row.
#[test]
fn rows_of_an_accumulator_stay_in_their_warp() {
    let acc = LinearLayout::wgmma_acc(&[128, 64], 64, [8, 1]);
    let reduction = acc.reduction(1).expect("fragments reduce");
    assert_eq!((reduction.lanes.as_slice(), reduction.warps.as_slice()), ([1, 2].as_slice(), [].as_slice()));
    assert_eq!(reduction.layout.num_registers(), 2, "two rows per thread");
    check_reduction(&acc, 1, &reduction);
    let columns = acc.reduction(0).expect("fragments reduce");
    assert_eq!((columns.lanes.as_slice(), columns.warps_per_result()), ([4, 8, 16].as_slice(), 8));
    check_reduction(&acc, 0, &columns);
}
