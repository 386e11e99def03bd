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
    for at in places(result) {
        let source = Index { register: renaming.registers[at.register as usize] as u32, ..at };
        prop_assert_eq!(coordinates(operand.apply(source)), result.apply(at));
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
        let all: Vec<(Vec<u32>, Index)> = places(&layout).map(|place| (layout.apply(place), place)).collect();
        for at in coordinates(layout.shape()).iter().step_by(7) {
            let place = inverse.apply(at);
            prop_assert_eq!(&layout.apply(place), at);
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
        for at in places(&from) {
            prop_assert_eq!(to.apply(map.apply(at)), from.apply(at));
        }
        if from.invert().is_some() {
            let identity = from.locate_in(&from);
            for at in places(&from) {
                prop_assert_eq!(identity.apply(at), at);
            }
        }
    }

    #[test]
    fn free_bits_repeat_and_the_others_do_not(layout in any_layout()) {
        let dims = [Dim::Register, Dim::Lane, Dim::Warp, Dim::Block];
        let free = dims.map(|dim| layout.free_mask(dim));
        let kept = |at: &Index| dims.iter().zip(free).all(|(&dim, free)| at.get(dim) & free == 0);
        let mut elements: Vec<Vec<u32>> = places(&layout).filter(kept).map(|at| layout.apply(at)).collect();
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
        for thread in places(&layout).filter(|at| at.register == 0) {
            let registers = 0..sliced.layout.num_registers() as u32;
            let mut own: Vec<Vec<u32>> =
                registers.map(|register| sliced.layout.apply(Index { register, ..thread })).collect();
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
        for at in places(&sliced.layout) {
            for &source in &groups[at.register as usize] {
                let source = Index { register: source as u32, ..at };
                prop_assert_eq!(drop(layout.apply(source)), sliced.layout.apply(at));
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
        for at in places(&layout) {
            let mut expected = layout.apply(at);
            expected[axis] = 0;
            let source = Index { register: operand.registers[at.register as usize] as u32, ..at };
            prop_assert_eq!(operand.layout.apply(source), expected);
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
        for at in places(&layout) {
            let (from, to) = (layout.apply(at), reshaped.layout.apply(at));
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
        for at in places(&joined.layout) {
            let (side, register) = joined.registers[at.register as usize];
            let mut expected = layout.apply(Index { register: register as u32, ..at });
            expected.push(side as u32);
            prop_assert_eq!(joined.layout.apply(at), expected);
        }
        let split = joined.layout.split().expect("a joined tensor splits");
        check_split(&joined.layout, &split)?;
        prop_assert_eq!(&split.layout, &layout.without_redundant_registers().layout);
    }

    #[test]
    fn splits_take_the_halves(
        layout in shapes().prop_flat_map(|mut shape| { shape.push(2); surjective_layout(shape) }),
    ) {
        if let Some(split) = layout.split() {
            check_split(&layout, &split)?;
        }
        let ready = layout.splittable();
        prop_assert_eq!(ready.shape(), layout.shape());
        prop_assert!(ready.is_surjective());
        check_split(&ready, &ready.split().expect("`splittable` gives a layout that `split` accepts"))?;
    }
}

fn check_split(joined: &LinearLayout, split: &Split) -> Result<(), TestCaseError> {
    for at in places(&split.layout) {
        for side in 0..2 {
            let mut expected = split.layout.apply(at);
            expected.push(side as u32);
            let source = Index { register: split.registers[side][at.register as usize] as u32, ..at };
            prop_assert_eq!(joined.apply(source), expected);
        }
    }
    Ok(())
}
