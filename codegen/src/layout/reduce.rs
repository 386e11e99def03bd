//! Reductions over a layout: inside each thread, across lanes, across warps.

use super::gf2::{self, Span};
use super::linear::{Dim, LinearLayout};

/// The steps of a reduction along one axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reduction {
    /// The layout of the result: `slice(axis)`.
    pub layout: LinearLayout,
    /// Step 1: result register `r` of each thread combines these registers of the operand.
    pub registers: Vec<Vec<usize>>,
    /// Step 2: for each mask, in order, each lane combines with the same register of lane `lane ^ mask`.
    pub lanes: Vec<u32>,
    /// Step 3: the partial results of warps that differ by these masks (and their XORs) are combined through shared
    /// memory. Empty if no warp splits the axis.
    pub warps: Vec<u32>,
}

impl Reduction {
    /// Number of warps that contribute to each result.
    pub fn warps_per_result(&self) -> usize {
        1 << self.warps.len()
    }
}

impl LinearLayout {
    /// The steps of a reduction along `axis` that count each element once, however often it is replicated. `None` if
    /// bases of lanes or warps mix the axis with others, so that the operand must be converted first; never for blocked
    /// layouts and fragments.
    pub fn reduction(&self, axis: usize) -> Option<Reduction> {
        let layout = self.slice(axis).layout;
        let along = |dim| -> Vec<u64> { self.bases(dim).iter().map(|basis| u64::from(basis[axis])).collect() };
        // Coordinates of the axis that the steps so far have combined.
        let mut combined = Span::default();
        let mut steps = |dim: Dim| -> Vec<u64> {
            // Steps that change only the coordinate along the axis.
            let others: Vec<u64> = self.bases(dim).iter().map(|basis| layout.flatten(&without(basis, axis))).collect();
            let images = along(dim);
            gf2::kernel(&others).into_iter().filter(|&step| combined.insert(gf2::image(&images, step), 0)).collect()
        };
        steps(Dim::Register);
        let masks = |steps: Vec<u64>| steps.into_iter().map(|step| step as u32).collect();
        let lanes = masks(steps(Dim::Lane));
        let warps = masks(steps(Dim::Warp));
        let complete = 1 << combined.rank() == self.shape()[axis];
        complete.then(|| Reduction { layout, registers: self.reduction_registers(axis), lanes, warps })
    }
}

fn without(basis: &[u32], axis: usize) -> Vec<u32> {
    let mut basis = basis.to_vec();
    basis.remove(axis);
    basis
}
