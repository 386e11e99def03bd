//! Tests of the layout algebra, by brute force over all places and all coordinates.

mod construct;
mod convert;
mod gather;
mod laws;
mod matrix_move;
mod reduce;
mod shared;
mod text;

use proptest::prelude::*;

use super::*;

/// Every place of a distributed layout.
fn places(layout: &LinearLayout) -> impl Iterator<Item = Index> + use<> {
    let [registers, lanes, warps, blocks] =
        [Dim::Register, Dim::Lane, Dim::Warp, Dim::Block].map(|dim| layout.size(dim) as u32);
    (0..blocks).flat_map(move |block| {
        (0..warps).flat_map(move |warp| {
            (0..lanes).flat_map(move |lane| {
                (0..registers).map(move |register| Index { register, lane, warp, block, offset: 0 })
            })
        })
    })
}

/// Every coordinate of a shape, row-major.
fn coordinates(shape: &[u32]) -> Vec<Vec<u32>> {
    shape.iter().fold(vec![vec![]], |prefixes, &extent| {
        prefixes.into_iter().flat_map(|prefix| (0..extent).map(move |i| [prefix.as_slice(), &[i]].concat())).collect()
    })
}

/// Small shapes: rank 1 to 3, at most 1024 elements.
fn shapes() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0u32..6, 1..4)
        .prop_filter("small", |logs| logs.iter().sum::<u32>() <= 10)
        .prop_map(|logs| logs.into_iter().map(|log| 1 << log).collect())
}

/// Splits `bits` among `parts` factors, as powers of two.
fn factors(bits: u32, parts: usize) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..parts, bits as usize).prop_map(move |choice| {
        let mut sizes = vec![1; parts];
        choice.into_iter().for_each(|part| sizes[part] *= 2);
        sizes
    })
}

/// A blocked layout of a given shape with 32 lanes and four warps.
fn blocked_of(shape: Vec<u32>) -> impl Strategy<Value = LinearLayout> {
    let rank = shape.len();
    let order = Just((0..rank).collect::<Vec<_>>()).prop_shuffle();
    (factors(3, rank), factors(5, rank), factors(2, rank), order)
        .prop_map(move |(size, threads, warps, order)| LinearLayout::blocked(&shape, &size, &threads, &warps, &order))
}

/// A layout with arbitrary bases: swizzled, dependent, partly zero, possibly not surjective.
fn arbitrary_layout(shape: Vec<u32>) -> impl Strategy<Value = LinearLayout> {
    let basis = shape.iter().map(|&extent| 0..extent).collect::<Vec<_>>();
    let list = |bits: std::ops::Range<usize>| prop::collection::vec(basis.clone(), bits);
    (list(0..5), list(5..6), list(2..3))
        .prop_map(|(register, lane, warp)| ThreadBases { register, lane, warp, block: vec![] })
        .prop_map(move |bases| LinearLayout::distributed(&shape, bases))
}

/// An arbitrary layout, extended by registers until it covers the tensor.
fn surjective_layout(shape: Vec<u32>) -> impl Strategy<Value = LinearLayout> {
    arbitrary_layout(shape).prop_map(|layout| {
        let build = |registers: &[Basis]| {
            let [lane, warp] = [Dim::Lane, Dim::Warp].map(|dim| layout.bases(dim).to_vec());
            let bases = ThreadBases { register: registers.to_vec(), lane, warp, block: vec![] };
            LinearLayout::distributed(layout.shape(), bases)
        };
        let mut registers = layout.bases(Dim::Register).to_vec();
        for (axis, &extent) in layout.shape().iter().enumerate() {
            for bit in 0..extent.ilog2() {
                let mut basis = vec![0; layout.rank()];
                basis[axis] = 1 << bit;
                let so_far = build(&registers);
                if !places(&so_far).any(|at| so_far.apply(at) == basis) {
                    registers.push(basis);
                }
            }
        }
        build(&registers)
    })
}

fn any_layout() -> impl Strategy<Value = LinearLayout> {
    shapes().prop_flat_map(|shape| prop_oneof![blocked_of(shape.clone()), surjective_layout(shape)])
}

/// Two layouts of one shape.
fn any_pair() -> impl Strategy<Value = (LinearLayout, LinearLayout)> {
    shapes().prop_flat_map(|shape| {
        let one = |shape: &Vec<u32>| prop_oneof![blocked_of(shape.clone()), surjective_layout(shape.clone())];
        (one(&shape), one(&shape))
    })
}
