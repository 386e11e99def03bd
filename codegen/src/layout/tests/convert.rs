//! Conversions, checked by executing their plans.

use super::*;

/// The coordinates of the registers of a thread.
fn held(layout: &LinearLayout, lane: u32, warp: u32) -> Vec<Vec<u32>> {
    let place = |register| Index { register, lane, warp, ..Index::default() };
    (0..layout.num_registers() as u32).map(|r| layout.apply(place(r))).collect()
}

fn masks(lane_masks: &[u32], warp_masks: &[u32], lane: u32, warp: u32) -> u32 {
    let sum = |masks: &[u32], number: u32| {
        masks.iter().enumerate().filter(|&(bit, _)| number >> bit & 1 == 1).fold(0, |sum, (_, mask)| sum ^ mask)
    };
    sum(lane_masks, lane) ^ sum(warp_masks, warp)
}

/// Executes the three documented steps of a plan for one warp; values are the coordinates of their elements.
fn simulate(plan: &LanePlan, src: &LinearLayout, warp: u32) -> Vec<Vec<Vec<u32>>> {
    let lanes = src.size(Dim::Lane) as u32;
    let offers: Vec<Vec<Vec<u32>>> = (0..lanes)
        .map(|lane| {
            let source = held(src, lane, warp);
            let mask = masks(&plan.rotate_in_lane, &plan.rotate_in_warp, lane, warp) as usize;
            (0..source.len()).map(|s| source[s ^ mask].clone()).collect()
        })
        .collect();
    (0..lanes)
        .map(|lane| {
            let from = masks(&plan.from_lane, &plan.from_warp, lane, warp);
            if let SourceLane::Segment { kept } = plan.source_lane() {
                // As `shfl.idx` finds the lane from a segment mask.
                assert!(plan.shuffles.iter().all(|s| from ^ s.lane == (lane & kept | s.lane & !kept)), "{plan:?}");
            }
            let taken: Vec<&Vec<u32>> =
                plan.shuffles.iter().map(|shuffle| &offers[(from ^ shuffle.lane) as usize][shuffle.register]).collect();
            let mask = masks(&plan.rotate_out_lane, &[], lane, warp) as usize;
            plan.registers.iter().map(|&k| taken[k ^ mask].clone()).collect()
        })
        .collect()
}

fn check_plan(plan: &LanePlan, src: &LinearLayout, dst: &LinearLayout) {
    for warp in 0..src.num_warps() as u32 {
        let got = simulate(plan, src, warp);
        for lane in 0..src.size(Dim::Lane) as u32 {
            assert_eq!(got[lane as usize], held(dst, lane, warp), "{src} to {dst}: {plan:?}");
        }
    }
}

/// Whether every thread already holds the values that it needs.
fn threads_suffice(src: &LinearLayout, dst: &LinearLayout) -> bool {
    places(dst).all(|at| held(src, at.lane, at.warp).contains(&dst.apply(at)))
}

fn warps_suffice(src: &LinearLayout, dst: &LinearLayout) -> bool {
    let in_warp: Vec<Vec<Vec<u32>>> = (0..src.num_warps() as u32)
        .map(|w| (0..src.size(Dim::Lane) as u32).flat_map(|l| held(src, l, w)).collect())
        .collect();
    places(dst).all(|at| in_warp[at.warp as usize].contains(&dst.apply(at)))
}

fn check_conversion(src: &LinearLayout, dst: &LinearLayout) {
    match Conversion::between(src, dst) {
        Conversion::Identity => {
            places(dst).for_each(|at| assert_eq!(src.apply(at), dst.apply(at)));
        }
        Conversion::Registers(map) => {
            assert_eq!(map.len(), dst.num_registers());
            places(dst).for_each(|at| {
                let source = Index { register: map[at.register as usize] as u32, ..at };
                assert_eq!(src.apply(source), dst.apply(at));
            });
        }
        Conversion::Lanes(plan) => {
            assert!(warps_suffice(src, dst));
            check_plan(&plan, src, dst);
        }
        Conversion::Shared => {
            assert!(LanePlan::find(src, dst).is_none_or(|plan| !plan.is_cheap()));
        }
        Conversion::Blocks => panic!("one block holds the tensor"),
    }
    // A plan that is not cheap must be correct too.
    if let Some(plan) = LanePlan::find(src, dst) {
        check_plan(&plan, src, dst);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn conversions_bring_every_value((src, dst) in any_pair()) {
        check_conversion(&src, &dst);
    }

    /// Two layouts of a tensor that differ inside warps: register and lane bits mixed at random.
    #[test]
    fn mixing_registers_and_lanes_needs_no_shared_memory(
        layout in shapes().prop_flat_map(blocked_of),
        mixing in prop::collection::vec((0usize..16, 0usize..16), 0..24),
    ) {
        // Swapping or adding bits does not change the set of values of a warp.
        let registers = layout.bits(Dim::Register);
        let mut bases = [layout.bases(Dim::Register), layout.bases(Dim::Lane)].concat();
        for (i, j) in mixing {
            let (i, j) = (i % bases.len(), j % bases.len());
            if i < j {
                bases.swap(i, j);
            } else if i > j {
                let add = bases[j].clone();
                bases[i].iter_mut().zip(add).for_each(|(sum, part)| *sum ^= part);
            }
        }
        let lane = bases.split_off(registers);
        let warp = layout.bases(Dim::Warp).to_vec();
        let bases = ThreadBases { register: bases, lane, warp, block: vec![] };
        let mixed = LinearLayout::distributed(layout.shape(), bases);
        for (src, dst) in [(&layout, &mixed), (&mixed, &layout)] {
            prop_assert!(warps_suffice(src, dst));
            check_conversion(src, dst);
            prop_assert!(LanePlan::find(src, dst).is_some(), "{src} to {dst}");
        }
    }
}

#[test]
fn replicated_values_need_no_shuffle() {
    // Four warps hold replicas of the same 128 values; the other layout has the same lanes, with two registers
    // exchanged.
    let src = LinearLayout::blocked(&[128], &[4], &[32], &[4], &[0]);
    let dst = src.permute_registers(&[1, 0]).layout;
    assert_eq!(Conversion::between(&src, &dst), Conversion::Registers(vec![0, 2, 1, 3]));
    assert!(threads_suffice(&src, &dst));
}

#[test]
fn replicated_values_convert_by_selects_alone() {
    // Source: each thread holds all four values. Result: lane bits 0 and 1 select one.
    let register = vec![vec![1], vec![2]];
    let bases = ThreadBases { register, lane: vec![vec![0]; 5], ..ThreadBases::default() };
    let src = LinearLayout::distributed(&[4], bases);
    let lane = vec![vec![1], vec![2], vec![0], vec![0], vec![0]];
    let dst = LinearLayout::distributed(&[4], ThreadBases { lane, ..ThreadBases::default() });
    match Conversion::between(&src, &dst) {
        Conversion::Lanes(plan) => {
            assert_eq!((plan.num_shuffles(), plan.num_selects()), (0, 8));
            check_plan(&plan, &src, &dst);
        }
        other => panic!("{other:?}"),
    }
    // The reverse: four broadcasts.
    match Conversion::between(&dst, &src) {
        Conversion::Lanes(plan) => {
            assert_eq!((plan.num_shuffles(), plan.num_selects()), (4, 0));
            check_plan(&plan, &dst, &src);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn lane_register_transpose_takes_one_shuffle_per_value() {
    let src = LinearLayout::blocked(&[4, 32], &[4, 1], &[1, 32], &[1, 1], &[0, 1]);
    let dst = LinearLayout::blocked(&[4, 32], &[1, 4], &[4, 8], &[1, 1], &[1, 0]);
    match Conversion::between(&src, &dst) {
        Conversion::Lanes(plan) => {
            assert_eq!(plan.num_shuffles(), 4, "one shuffle for each value");
            check_plan(&plan, &src, &dst);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn values_that_change_warps_go_through_shared_memory() {
    let src = LinearLayout::blocked(&[64, 64], &[1, 4], &[8, 4], &[4, 1], &[1, 0]);
    let dst = LinearLayout::blocked(&[64, 64], &[4, 1], &[4, 8], &[1, 4], &[0, 1]);
    assert_eq!(Conversion::between(&src, &dst), Conversion::Shared);
}

#[test]
fn values_of_another_block_need_a_cluster_exchange() {
    let blocks = |basis: u32| {
        let lane = (0..5).map(|bit| vec![1 << bit]).collect();
        let (register, block) = (vec![vec![96 - basis]], vec![vec![basis]]);
        LinearLayout::distributed(&[128], ThreadBases { register, lane, warp: vec![], block })
    };
    assert_eq!(Conversion::between(&blocks(32), &blocks(64)), Conversion::Blocks);
}
