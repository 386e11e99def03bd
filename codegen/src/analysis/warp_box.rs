//! Boxes of a tile that each warp holds by itself, as TMA stores them: the warp arranges one in shared memory, without the
//! others.

use super::access_layout::{extents, view_operands};
use super::axis::AxisAnalysis;
use super::tensor_map::{self, TmaPlan};
use crate::ir::{Func, Op, OpId, Type, Value};
use crate::layout::{Dim, Index, LinearLayout, Swizzle, ThreadBases};

/// The boxes of a tile of two dimensions.
#[derive(Clone, Debug)]
pub struct WarpBoxes {
    /// Extents of a box.
    pub shape: [u32; 2],
    /// The elements of one box in the registers and lanes of a warp.
    pub layout: LinearLayout,
    /// One box in shared memory.
    pub memory: LinearLayout,
    /// For each box of a warp: its registers, in the order of those of `layout`, and its start relative to the warp's
    /// first.
    pub boxes: Vec<(Vec<usize>, [u32; 2])>,
    /// The images of the bits of the warp's number in the start of its boxes, by dimension.
    pub warps: [Vec<u32>; 2],
    /// Bytes of one box.
    pub bytes: u32,
}

/// Bytes of a box, so that its buffers leave shared memory to others: 16 rows of 128.
const MAX_BYTES: u32 = 2048;

/// Buffers of a warp: it fills one while TMA reads the other.
pub const SLOTS: u32 = 2;

impl WarpBoxes {
    /// The boxes of a tile with this layout, whose dimension `inner` is contiguous in memory; `None` if warps hold none.
    pub fn of(layout: &LinearLayout, inner: usize, element_bytes: u32) -> Option<WarpBoxes> {
        let [rows, columns] = layout.shape() else { return None };
        let extents = [*rows, *columns];
        let is_free = [Dim::Register, Dim::Lane, Dim::Warp].iter().any(|&dim| layout.free_mask(dim) != 0);
        let bases = |dim: Dim| layout.bases(dim).iter().map(|basis| [basis[0], basis[1]]).collect::<Vec<_>>();
        let [registers, lanes, warps] = [Dim::Register, Dim::Lane, Dim::Warp].map(bases);
        let mut all = registers.iter().chain(&lanes).chain(&warps);
        let is_unit = |basis: &[u32; 2]| matches!(*basis, [0, n] | [n, 0] if n.is_power_of_two());
        if is_free || !all.all(is_unit) {
            return None;
        }
        let outer = 1 - inner;
        let of_warp = |axis: usize, bit: u32| registers.iter().chain(&lanes).any(|basis| basis[axis] == bit);
        let lanes_below = |axis: usize, extent: u32| lanes.iter().all(|basis| basis[axis] < extent);
        let row = |swizzle: &Swizzle| swizzle.bytes() / element_bytes;
        let holds_row = |swizzle: &Swizzle| {
            let row = row(swizzle);
            row > 1
                && row <= extents[inner]
                && (0..row.ilog2()).all(|bit| of_warp(inner, 1 << bit))
                && lanes_below(inner, row)
        };
        let swizzle = [Swizzle::Bytes128, Swizzle::Bytes64, Swizzle::Bytes32].into_iter().find(holds_row)?;
        // As many rows as the warp holds one after the other.
        let most = (0..).find(|&bit| 1 << bit == extents[outer] || !of_warp(outer, 1 << bit))?;
        let lanes_reach = lanes.iter().map(|basis| 2 * basis[outer]).max().unwrap_or(0).max(1).ilog2();
        let most = most.min((MAX_BYTES / swizzle.bytes()).ilog2().max(lanes_reach));
        let mut shape = [0; 2];
        (shape[inner], shape[outer]) = (row(&swizzle), 1 << most);
        let bytes = shape[0] * shape[1] * element_bytes;
        if !lanes_below(outer, shape[outer])
            || shape[outer] > tensor_map::MAX_BOX
            || !bytes.is_multiple_of(swizzle.alignment())
        {
            return None;
        }
        let is_inside = |basis: &[u32; 2]| basis[0] < shape[0] && basis[1] < shape[1];
        let inside: Vec<usize> = (0..registers.len()).filter(|&bit| is_inside(&registers[bit])).collect();
        let outside: Vec<usize> = (0..registers.len()).filter(|bit| !inside.contains(bit)).collect();
        let spread =
            |bits: &[usize], n: usize| bits.iter().enumerate().map(|(i, &bit)| (n >> i & 1) << bit).sum::<usize>();
        let boxes = (0..1 << outside.len()).map(|n| {
            let first = spread(&outside, n);
            let at = layout.apply(Index::register(first as u32));
            ((0..1 << inside.len()).map(|n| first | spread(&inside, n)).collect(), [at[0], at[1]])
        });
        let to_basis = |basis: &[u32; 2]| basis.to_vec();
        let own = ThreadBases {
            register: inside.iter().map(|&bit| to_basis(&registers[bit])).collect(),
            lane: lanes.iter().map(to_basis).collect(),
            ..ThreadBases::default()
        };
        Some(WarpBoxes {
            shape,
            layout: LinearLayout::distributed(&shape, own),
            memory: LinearLayout::shared_swizzled(&shape, &[inner, outer], element_bytes, swizzle.bytes()),
            boxes: boxes.collect(),
            warps: [0, 1].map(|axis| warps.iter().map(|basis| basis[axis]).collect()),
            bytes,
        })
    }

    /// The boxes of a tile in registers, for a store to a view.
    pub fn of_tile(func: &Func, view: Value, tile: Value) -> Option<WarpBoxes> {
        let Type::View { block, elem } = func.ty(view) else { return None };
        let layout = func.layout(func.ty(tile).layout()?);
        let inner = *view_operands(func, view).order.first().filter(|_| block.len() == 2)?;
        WarpBoxes::of(layout, inner, elem.bytes() as u32).filter(|_| layout.shape() == extents(block))
    }

    /// The boxes of a tile in registers, as TMA can store them to a view, and the copy of the first; `None` if it cannot.
    pub fn of_store(
        func: &Func,
        axis: &AxisAnalysis,
        view: Value,
        tile: Value,
        boundary: &[usize],
    ) -> Option<(WarpBoxes, TmaPlan)> {
        tensor_map::stores_stay_inside(func, axis, view, boundary).then_some(())?;
        let boxes = WarpBoxes::of_tile(func, view, tile)?;
        let plan = tensor_map::plan_block(func, axis, view, boundary, &boxes.shape, &boxes.memory).ok()?;
        (plan.copies.len() == 1).then_some((boxes, plan))
    }

    /// Bytes of the buffers of all warps.
    pub fn buffer_bytes(&self) -> u32 {
        (SLOTS * self.bytes) << self.warps[0].len()
    }
}

/// Bytes of the largest box that a function stores, and of the buffers of all warps, which all of its stores share.
pub fn buffers(func: &Func) -> (u32, u32) {
    let store = |id: OpId| match &func.op(id).op {
        Op::TmaStore { .. } => WarpBoxes::of_tile(func, func.op(id).operands[0], func.op(id).operands[1]),
        _ => None,
    };
    let sizes = func.walk().into_iter().filter_map(store).map(|boxes| (boxes.bytes, boxes.buffer_bytes()));
    sizes.fold((0, 0), |(of_box, all), (own, own_all)| (of_box.max(own), all.max(own_all)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sums of a `wgmma` of 64 rows: 16 rows of each warp, 128 bytes of each.
    #[test]
    fn sums_of_a_wgmma() {
        let sums = LinearLayout::wgmma_acc(&[128, 64], 64, [4, 1]);
        for (bytes, shape, boxes) in [(4, [16, 32], 4), (2, [16, 64], 2)] {
            let found = WarpBoxes::of(&sums, 1, bytes).expect("boxes");
            assert_eq!((found.shape, found.boxes.len(), found.bytes), (shape, boxes, 2048));
            assert_eq!(found.warps, [vec![16, 32], vec![0, 0]]);
            let mut elements = vec![false; 128 * 64];
            for (registers, start) in &found.boxes {
                for (own, &register) in registers.iter().enumerate() {
                    for lane in 0..32 {
                        let place = |register| Index { lane, ..Index::register(register as u32) };
                        let (at, inside) = (sums.apply(place(register)), found.layout.apply(place(own)));
                        assert_eq!(at, [start[0] + inside[0], start[1] + inside[1]]);
                        elements[(at[0] * 64 + at[1]) as usize] = true;
                    }
                }
            }
            assert_eq!(elements.iter().filter(|&&held| held).count(), 128 * 64 / 4);
        }
        // Rows of a narrow tile, and columns: 16 elements.
        assert_eq!(
            WarpBoxes::of(&LinearLayout::wgmma_acc(&[64, 16], 16, [4, 1]), 1, 2).map(|b| b.shape),
            Some([16, 16])
        );
        assert_eq!(WarpBoxes::of(&sums, 0, 2).map(|b| b.shape), Some([16, 64]));
        // Boxes of columns have no more than 2 KB.
        let wide = WarpBoxes::of(&LinearLayout::wgmma_acc(&[128, 256], 256, [4, 1]), 0, 4).expect("boxes");
        assert_eq!((wide.shape, wide.bytes, wide.boxes.len()), ([16, 32], 2048, 16));
        // Each warp holds one row of 128 bytes, less than a pattern of the swizzle; and each holds a part of every row.
        let rows = LinearLayout::blocked(&[16, 32], &[1, 1], &[1, 32], &[4, 1], &[1, 0]);
        let parts = LinearLayout::blocked(&[16, 32], &[1, 1], &[4, 8], &[1, 4], &[1, 0]);
        assert!(WarpBoxes::of(&rows, 1, 4).is_none());
        assert_eq!(WarpBoxes::of(&parts, 1, 4).map(|b| b.shape), Some([16, 8]));
    }
}
