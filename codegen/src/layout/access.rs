//! Vector widths: how many elements a thread reads or writes per access.

use super::gf2::{self, Span};
use super::linear::{Dim, Index, LinearLayout};

/// The registers of a thread, partitioned into vectors of neighboring memory elements.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VectorAccess {
    /// Elements of each vector, a power of two.
    pub elements: usize,
    /// Registers of each access in memory order. Every register occurs once. The memory offset of the first one is a
    /// multiple of `elements` in every thread.
    pub groups: Vec<Vec<usize>>,
}

impl LinearLayout {
    /// The largest power-of-two `n` such that registers `0..n` of every thread are consecutive, aligned
    /// coordinates along `axis`: the vector width in a memory where that axis is contiguous.
    pub fn contiguous_run(&self, axis: usize) -> usize {
        let places: Vec<Vec<u32>> =
            Dim::ALL.map(|dim| self.bases(dim).iter().map(|basis| basis[axis]).collect()).to_vec();
        let alone = |bit: usize| {
            let basis = &self.bases(Dim::Register)[bit];
            basis.iter().enumerate().all(|(other, &image)| other == axis || image == 0)
        };
        leading_run(&places, alone)
    }

    /// The number of consecutive coordinates along `axis` that a group of lanes covers with the registers of
    /// [`contiguous_run`](Self::contiguous_run).
    pub fn lane_run(&self, axis: usize) -> usize {
        let lanes = self.bases(Dim::Lane);
        let continues = |n: u32| {
            let next = |basis: &[u32]| basis.iter().enumerate().all(|(i, &x)| x == if i == axis { n } else { 0 });
            lanes.iter().any(|basis| next(basis))
        };
        let mut n = self.contiguous_run(axis) as u32;
        while continues(n) {
            n *= 2;
        }
        n as usize
    }

    /// The largest power-of-two `n` such that registers `0..n` of every thread lie at consecutive, aligned
    /// offsets of the shared layout `memory`.
    pub fn contiguous_offsets(&self, memory: &LinearLayout) -> usize {
        let map = self.locate_in(memory);
        let places: Vec<Vec<u32>> =
            Dim::ALL.map(|dim| map.images(dim).iter().map(|image| image.offset).collect()).to_vec();
        leading_run(&places, |_| true)
    }

    /// The widest accesses, of at most `max_elements`, between the registers of all threads and `memory` (a shared
    /// layout, or global memory described by [`LinearLayout::shared_row_major`]). An access may combine any registers.
    pub fn vector_access(&self, memory: &LinearLayout, max_elements: usize) -> VectorAccess {
        let map = self.locate_in(memory);
        let offsets =
            |dim| -> Vec<u64> { map.images(dim).iter().map(|image: &Index| u64::from(image.offset)).collect() };
        let registers = offsets(Dim::Register);
        let span = Span::of_columns(&registers);
        let threads = [Dim::Lane, Dim::Warp, Dim::Block].iter().flat_map(|&dim| offsets(dim));
        let moved_by_threads = threads.fold(0, |sum, offset| sum | offset);
        // steps[i]: the register bits that advance the offset by exactly 1 << i.
        let mut steps: Vec<u64> = Vec::new();
        while 2 << steps.len() <= max_elements && moved_by_threads >> steps.len() & 1 == 0 {
            match span.solve(1 << steps.len()) {
                Some(step) => steps.push(step),
                None => break,
            }
        }
        let elements = 1usize << steps.len();
        let mut groups = Vec::new();
        for register in 0..self.num_registers() as u64 {
            let within = gf2::image(&registers, register) & (elements as u64 - 1);
            // Each group is listed once, by its member at the aligned offset.
            if within == 0 {
                let member = |step| (register ^ gf2::image(&steps, step)) as usize;
                groups.push((0..elements as u64).map(member).collect());
            }
        }
        VectorAccess { elements, groups }
    }
}

/// Length of the run of leading register bits that advance `places` by 1, 2, 4, …, where no other bit changes the same
/// place bit. `places` has one list per dim.
fn leading_run(places: &[Vec<u32>], holds: impl Fn(usize) -> bool) -> usize {
    let register = Dim::Register as usize;
    let alone = |bit: usize| {
        let mut movers = places.iter().enumerate().flat_map(|(dim, list)| {
            list.iter().enumerate().map(move |(index, &place)| (dim == register && index == bit, place))
        });
        movers.all(|(own, place)| if own { place == 1 << bit } else { place >> bit & 1 == 0 })
    };
    1 << (0..places[register].len()).take_while(|&bit| holds(bit) && alone(bit)).count()
}
