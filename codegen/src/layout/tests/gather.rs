//! Gathers within a warp, checked by looking up every element of every thread.

use super::*;

/// Whether each thread finds each element: that of its result coordinates, for every index.
fn check(from: &LinearLayout, to: &LinearLayout, axis: usize) -> bool {
    let Some(gather) = from.lane_gather(to, axis) else { return false };
    for place in places(to) {
        for index in 0..from.shape()[axis] {
            let bit = |b: u32| index >> b & 1;
            let choice =
                gather.register_bits.iter().enumerate().map(|(at, &(b, _))| (bit(b) as usize) << at).sum::<usize>();
            let lane = gather.lane_bits.iter().fold(place.lane & gather.kept_lanes, |l, &(b, to)| l | bit(b) << to);
            let register = gather.candidates(place.register as usize)[choice] as u32;
            let mut want = to.apply(place);
            want[axis] = index;
            assert_eq!(
                from.apply(Index { register, lane, ..place }),
                want,
                "{from} to {to} along {axis}, index {index}"
            );
        }
    }
    true
}

proptest! {
    #[test]
    fn gathered_layouts_stay_within_warps((layout, fewer) in (shapes().prop_flat_map(blocked_of), 0u32..4)) {
        for axis in 0..layout.rank() {
            let extent = (layout.shape()[axis] >> fewer).max(1);
            match layout.gathered(axis, extent) {
                Some(result) => {
                    prop_assert_eq!(result.shape()[axis], extent);
                    // Copies of an element along the axis would make its place ambiguous.
                    let copies = [Dim::Register, Dim::Lane].iter().any(|&dim| layout.free_mask(dim) != 0);
                    prop_assert!(check(&layout, &result, axis) || copies, "{} along {}", layout, axis);
                }
                None => prop_assert!(layout.bases(Dim::Warp).iter().any(|basis| basis[axis] != 0)),
            }
        }
    }

    #[test]
    fn every_plan_finds_its_elements((from, to) in shapes().prop_flat_map(|s| (arbitrary_layout(s.clone()), arbitrary_layout(s)))) {
        for axis in 0..from.rank() {
            check(&from, &to, axis);
            check(&from, &from, axis);
        }
    }
}

#[test]
fn a_larger_extent_and_an_axis_of_warps_do_not_stay_within_warps() {
    let layout = LinearLayout::blocked(&[16, 64], &[1, 2], &[1, 32], &[4, 1], &[1, 0]);
    assert!(layout.gathered(1, 128).is_none() && layout.gathered(0, 1).is_none());
    let last = layout.gathered(1, 1).unwrap();
    let gather = layout.lane_gather(&last, 1).unwrap();
    assert_eq!((gather.register_bits.len(), gather.lane_bits.len(), gather.kept_lanes), (1, 5, 0));
    assert_eq!((gather.registers.len(), last.num_registers()), (4, 4));
}
