//! Gathers along an axis that stay within a warp: each element that a thread needs is in a register of a lane of the same
//! warp, which the index determines.

use std::collections::HashMap;

use super::linear::{Dim, Index, LinearLayout};

/// Where a thread finds the source elements of its result elements. Bit `b` of an index changes the register or the lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaneGather {
    /// For each register of the result, the source register at index 0.
    pub registers: Vec<usize>,
    /// (bit of the index, what it flips in the number of the register).
    pub register_bits: Vec<(u32, usize)>,
    /// (bit of the index, bit of the lane).
    pub lane_bits: Vec<(u32, u32)>,
    /// The bits of the lane that are the same in the source: all others.
    pub kept_lanes: u32,
}

impl LaneGather {
    /// The registers that may hold the element of result register `register`, by the bits of
    /// [`register_bits`](Self::register_bits), the first one lowest.
    pub fn candidates(&self, register: usize) -> Vec<usize> {
        let flipped = |number: usize| {
            let set = self.register_bits.iter().enumerate().filter(|(place, _)| number >> place & 1 == 1);
            set.fold(self.registers[register], |r, (_, (_, flip))| r ^ flip)
        };
        (0..1 << self.register_bits.len()).map(flipped).collect()
    }
}

impl LinearLayout {
    /// The layout of a tensor with another extent along `axis` that a gather from this layout can have without moving
    /// elements between warps: threads keep their other coordinates. `None` if warps differ along the axis, or if the
    /// extent is larger.
    pub fn gathered(&self, axis: usize, extent: u32) -> Option<LinearLayout> {
        if extent > self.shape()[axis] || self.bases(Dim::Warp).iter().any(|basis| basis[axis] != 0) {
            return None;
        }
        let mut shape = self.shape().to_vec();
        shape[axis] = extent;
        let cut = self.map_bases(&shape, |basis| {
            let mut basis = basis.clone();
            basis[axis] %= extent;
            basis
        });
        Some(cut.without_redundant_registers().layout)
    }

    /// How a gather along `axis` from this layout to `result` stays within each warp; `None` where it does not, or where a
    /// bit of the index is not a bit of the register or of the lane alone.
    pub fn lane_gather(&self, result: &LinearLayout, axis: usize) -> Option<LaneGather> {
        let across = |basis: &[u32]| -> Vec<u32> {
            basis.iter().enumerate().map(|(d, &x)| if d == axis { 0 } else { x }).collect()
        };
        let is_across = |basis: &[u32]| basis[axis] == 0;
        let is_along = |basis: &[u32]| basis[axis].is_power_of_two() && across(basis).iter().all(|&x| x == 0);
        let of = |dim| self.bases(dim);
        if ![Dim::Register, Dim::Lane].iter().all(|&dim| of(dim).iter().all(|b| is_across(b) || is_along(b)))
            || !of(Dim::Warp).iter().all(|b| is_across(b))
            || !of(Dim::Block).is_empty()
        {
            return None;
        }
        // The other coordinates of a thread are the same in both layouts.
        for dim in [Dim::Lane, Dim::Warp] {
            let (here, there) = (of(dim).iter().map(|b| across(b)), result.bases(dim).iter().map(|b| across(b)));
            if !here.eq(there) {
                return None;
            }
        }
        let (mut register_bits, mut lane_bits) = (Vec::new(), Vec::new());
        for bit in 0..self.shape()[axis].trailing_zeros() {
            let places = |dim| -> Vec<usize> {
                let list = of(dim).iter().enumerate();
                list.filter(|(_, b)| is_along(b) && b[axis] == 1 << bit).map(|(place, _)| place).collect()
            };
            match (&places(Dim::Register)[..], &places(Dim::Lane)[..]) {
                (&[register], []) => register_bits.push((bit, 1 << register)),
                ([], &[lane]) => lane_bits.push((bit, lane as u32)),
                _ => return None,
            }
        }
        let mut at_zero = HashMap::new();
        for register in 0..self.num_registers() {
            let coordinates = self.apply(Index::register(register as u32));
            if coordinates[axis] == 0 {
                at_zero.entry(coordinates).or_insert(register);
            }
        }
        let registers = (0..result.num_registers())
            .map(|register| at_zero.get(&across(&result.apply(Index::register(register as u32)))).copied())
            .collect::<Option<Vec<usize>>>()?;
        let moved = lane_bits.iter().fold(0, |mask, (_, lane)| mask | 1 << lane);
        Some(LaneGather { registers, register_bits, lane_bits, kept_lanes: 31 & !moved })
    }
}
