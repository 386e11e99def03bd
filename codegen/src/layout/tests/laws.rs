//! Laws of the layout algebra.

use super::*;

/// Checks the result registers against a function of the operand's coordinates.
fn check_renaming(
    operand: &LinearLayout,
    renaming: &Renaming,
    coordinates: impl Fn(Vec<u32>) -> Vec<u32>,
) -> Result<(), TestCaseError> {
    let result = &renaming.layout;
    prop_assert_eq!(renaming.registers.len(), result.num_registers());
    for (r, l, w, b) in places(result) {
        let source = renaming.registers[r as usize] as u32;
        prop_assert_eq!(coordinates(operand.apply(source, l, w, b)), result.apply(r, l, w, b));
    }
    Ok(())
}

proptest! {
    #[test]
    fn pseudo_inverse_gives_the_smallest_preimage(layout in any_layout()) {
        prop_assert!(layout.is_surjective());
        let inverse = layout.pseudo_invert();
        // In the order of the dims: registers are the least significant.
        let rank = |i: &Index| (i.block, i.warp, i.lane, i.register);
        let all: Vec<(Vec<u32>, Index)> = places(&layout)
            .map(|(r, l, w, b)| (layout.apply(r, l, w, b), Index::thread(r, l, w, b)))
            .collect();
        for at in coordinates(layout.shape()).iter().step_by(7) {
            let place = inverse.apply(at);
            prop_assert_eq!(&layout.apply_index(place), at);
            let smallest = all.iter().filter(|(c, _)| c == at).map(|(_, i)| *i).min_by_key(rank);
            prop_assert_eq!(Some(place), smallest);
        }
        let elements = layout.num_elements();
        prop_assert_eq!(layout.invert().is_some(), all.len() == elements);
        prop_assert_eq!(layout.is_injective(), all.len() == elements);
    }

    #[test]
    fn composition_finds_the_same_element((from, to) in any_pair()) {
        let map = from.locate_in(&to);
        prop_assert_eq!(&map.then(&to), &from);
        for (r, l, w, b) in places(&from) {
            let there = map.apply(Index::thread(r, l, w, b));
            prop_assert_eq!(to.apply_index(there), from.apply(r, l, w, b));
        }
        if from.invert().is_some() {
            let identity = from.locate_in(&from);
            for (r, l, w, b) in places(&from) {
                prop_assert_eq!(identity.apply(Index::thread(r, l, w, b)), Index::thread(r, l, w, b));
            }
        }
    }

    #[test]
    fn free_bits_repeat_and_the_others_do_not(layout in any_layout()) {
        let dims = [Dim::Register, Dim::Lane, Dim::Warp, Dim::Block];
        let free = dims.map(|dim| layout.free_mask(dim));
        let kept = |(r, l, w, b): &(u32, u32, u32, u32)| {
            r & free[0] == 0 && l & free[1] == 0 && w & free[2] == 0 && b & free[3] == 0
        };
        let mut elements: Vec<Vec<u32>> =
            places(&layout).filter(kept).map(|(r, l, w, b)| layout.apply(r, l, w, b)).collect();
        elements.sort();
        prop_assert_eq!(elements, coordinates(layout.shape()), "each element once");
    }

    #[test]
    fn slice_projects_out_an_axis(layout in any_layout(), pick in 0usize..3) {
        let axis = pick % layout.rank();
        let drop = |mut at: Vec<u32>| { at.remove(axis); at };
        let sliced = layout.slice(axis);
        check_renaming(&layout, &sliced, drop)?;
        // The registers of a thread are distinct.
        for (_, l, w, b) in places(&layout).filter(|place| place.0 == 0) {
            let mut own: Vec<Vec<u32>> =
                (0..sliced.layout.num_registers() as u32).map(|r| sliced.layout.apply(r, l, w, b)).collect();
            own.sort();
            own.dedup();
            prop_assert_eq!(own.len(), sliced.layout.num_registers());
        }
        // Each distinct register of the operand is combined once, in the right result register.
        let groups = layout.reduction_registers(axis);
        let mut seen: Vec<usize> = groups.concat();
        seen.sort_unstable();
        let mut distinct = layout.without_redundant_registers().registers;
        distinct.sort_unstable();
        prop_assert_eq!(seen, distinct);
        for (r, l, w, b) in places(&sliced.layout) {
            for &source in &groups[r as usize] {
                prop_assert_eq!(drop(layout.apply(source as u32, l, w, b)), sliced.layout.apply(r, l, w, b));
            }
        }
        // Expanding undoes slicing except for the extent, and slicing undoes expanding.
        let expanded = sliced.layout.expand_dims(axis);
        check_renaming(&sliced.layout, &expanded, |mut at| { at.insert(axis, 0); at })?;
        prop_assert_eq!(&expanded.layout.slice(axis).layout, &sliced.layout);
        prop_assert_eq!(&expanded.layout, &layout.unbroadcast(axis).layout);
    }

    #[test]
    fn broadcasts_read_the_operand(layout in any_layout(), pick in 0usize..3) {
        let axis = pick % layout.rank();
        let operand = layout.unbroadcast(axis);
        prop_assert_eq!(operand.registers.len(), layout.num_registers());
        prop_assert_eq!(operand.layout.shape()[axis], 1);
        for (r, l, w, b) in places(&layout) {
            let mut at = layout.apply(r, l, w, b);
            at[axis] = 0;
            prop_assert_eq!(operand.layout.apply(operand.registers[r as usize] as u32, l, w, b), at);
        }
    }

    #[test]
    fn reshapes_keep_the_row_major_position(layout in any_layout(), cut in 0usize..4) {
        let position = |shape: &[u32], at: &[u32]| {
            shape.iter().zip(at).fold(0u64, |sum, (&extent, &i)| sum * u64::from(extent) + u64::from(i))
        };
        let elements = layout.num_elements() as u32;
        let first = 1 << (cut as u32).min(elements.ilog2());
        let shape = [first, elements / first];
        let reshaped = layout.reshape(&shape);
        for (r, l, w, b) in places(&layout) {
            let (from, to) = (layout.apply(r, l, w, b), reshaped.layout.apply(r, l, w, b));
            prop_assert_eq!(position(layout.shape(), &from), position(&shape, &to));
        }
        prop_assert_eq!(reshaped.layout.reshape(layout.shape()).layout, layout);
    }

    #[test]
    fn transposes_and_register_orders_permute(layout in any_layout(), seed in any::<u64>()) {
        let shuffled = |length: usize| {
            let mut order: Vec<usize> = (0..length).collect();
            order.sort_by_key(|&i| (i as u64 + 1).wrapping_mul(seed | 1).rotate_left(17));
            order
        };
        let axes = shuffled(layout.rank());
        let picked = |at: Vec<u32>| axes.iter().map(|&axis| at[axis]).collect();
        check_renaming(&layout, &layout.transpose(&axes), picked)?;
        let order = shuffled(layout.bits(Dim::Register));
        check_renaming(&layout, &layout.permute_registers(&order), |at| at)?;
        check_renaming(&layout, &layout.remove_zero_bases(Dim::Register), |at| at)?;
        check_renaming(&layout, &layout.without_redundant_registers(), |at| at)?;
    }

    #[test]
    fn split_undoes_join(layout in any_layout()) {
        let joined = layout.join();
        for (r, l, w, b) in places(&joined.layout) {
            let (side, register) = joined.registers[r as usize];
            let mut at = layout.apply(register as u32, l, w, b);
            at.push(side as u32);
            prop_assert_eq!(joined.layout.apply(r, l, w, b), at);
        }
        let split = joined.layout.split().expect("a joined tensor splits");
        check_split(&joined.layout, &split)?;
        prop_assert_eq!(&split.layout, &layout.without_redundant_registers().layout);
    }

    #[test]
    fn splits_take_the_halves(layout in shapes().prop_flat_map(|mut shape| { shape.push(2); covering_of(shape) })) {
        if let Some(split) = layout.split() {
            check_split(&layout, &split)?;
        }
        let ready = layout.splittable();
        prop_assert_eq!(ready.shape(), layout.shape());
        prop_assert!(ready.is_surjective());
        check_split(&ready, &ready.split().expect("it said so"))?;
    }
}

fn check_split(joined: &LinearLayout, split: &Split) -> Result<(), TestCaseError> {
    for (r, l, w, b) in places(&split.layout) {
        for side in 0..2 {
            let mut at = split.layout.apply(r, l, w, b);
            at.push(side as u32);
            let source = split.registers[side][r as usize] as u32;
            prop_assert_eq!(joined.apply(source, l, w, b), at);
        }
    }
    Ok(())
}
