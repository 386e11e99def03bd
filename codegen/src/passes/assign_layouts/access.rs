//! The layouts of tiles on the way from and to global memory: coalesced, or those in which they are computed.

use super::anchors::{Assignments, Priority, is_elementwise};
use crate::analysis::access_layout::view_operands;
use crate::ir::nested::{dot_loop_before, is_in_loop};
use crate::ir::{Elem, Op, OpId, Value};
use crate::layout::LinearLayout;

/// Bytes per thread of an access that is worth a conversion of the layout.
const WIDE: usize = 16;
/// The unit in which memory is read and written, in bytes.
const SECTOR: usize = 32;

impl Assignments<'_> {
    /// The layout from which to store a tile: its assigned layout if threads then write enough of each row, or if the tile
    /// has one dimension and at most 4 elements per thread; else the coalesced layout.
    pub fn store_layout(&self, id: OpId) -> LinearLayout {
        let tile = self.func.op(id).operands[1];
        let memory = self.memory_layout(id).expect("internal compiler error: a store without a layout");
        let Some(assignment) = self.assignment(tile) else { return memory };
        let assigned = (*assignment.layout).clone();
        let ty = self.func.ty(tile);
        let is_short = ty.shape().len() == 1 && ty.numel() <= 32 * 32 * self.num_warps as usize / 8;
        // In a loop, TMA takes it from there, or others compute meanwhile. Elsewhere, the addresses of a dot's rows cost
        // registers while its sums are live.
        let in_loop = self.func.block_of(id).is_some_and(|block| is_in_loop(self.func, block));
        let of_dot = in_loop && assignment.priority == Priority::Dot;
        let fills_sectors = || of_dot && self.fills_sectors(id, tile, &assigned);
        let suffices = is_short || self.is_as_wide(id, tile, &assigned, &memory) || fills_sectors();
        if suffices { assigned } else { memory }
    }

    /// In a loop, loads tiles that follow a loop of products in the layout of the elementwise op that uses them, if that is
    /// of a dot and lanes fill sectors. Rings, or other programs of the block, then use the memory that a conversion of the
    /// layout would take.
    pub(super) fn load_in_place(&mut self) {
        for id in self.func.walk() {
            let data = self.func.op(id);
            let Op::LoadView { .. } = data.op else { continue };
            let follows = is_in_loop(self.func, self.func.parent_block(id)) && dot_loop_before(self.func, id).is_some();
            let Some(layout) = self.layout_of_user(data.results[0]).filter(|_| follows) else { continue };
            if self.fills_sectors(id, data.results[0], &layout) {
                self.set_layout(data.results[0], layout, Priority::Memory);
            }
        }
    }

    /// The layout of the only user of a value, if that is elementwise and has that of a dot.
    fn layout_of_user(&self, v: Value) -> Option<LinearLayout> {
        let [used] = self.func.uses(v) else { return None };
        let user = Some(self.func.op(used.op)).filter(|user| is_elementwise(&user.op))?;
        let assignment = self.assignment(user.results[0]).filter(|wanted| wanted.priority == Priority::Dot)?;
        Some((*assignment.layout).clone())
    }

    /// Whether each thread writes as many consecutive bytes as in the coalesced layout, or enough: for an atomic 8, where a
    /// group of lanes fills a sector. For an atomic whose instructions add one element per lane, whether
    /// lanes of one instruction fill half a sector, as those of a dot's sums do.
    fn is_as_wide(&self, id: OpId, tile: Value, layout: &LinearLayout, memory: &LinearLayout) -> bool {
        let (inner, bytes) = self.row_of(id, tile);
        let is_atomic = matches!(self.func.op(id).op, Op::AtomicView { .. });
        if is_atomic && self.atomic_vector(id) == 1 {
            let run = |layout: &LinearLayout| layout.lane_run(inner) / layout.contiguous_run(inner) * bytes;
            return run(layout) >= run(memory).min(SECTOR / 2);
        }
        let enough = if is_atomic { SECTOR / 4 } else { WIDE };
        let run = |layout: &LinearLayout| layout.contiguous_run(inner) * bytes;
        run(layout) >= run(memory).min(enough)
    }

    /// Whether lanes write whole sectors, as those of a dot's f32 sums do.
    fn fills_sectors(&self, id: OpId, tile: Value, layout: &LinearLayout) -> bool {
        let (inner, bytes) = self.row_of(id, tile);
        layout.contiguous_run(inner) * bytes >= SECTOR / 4 && layout.lane_run(inner) * bytes >= SECTOR
    }

    /// The contiguous dimension of the memory that an op accesses, and the bytes of an element of its tile.
    fn row_of(&self, id: OpId, tile: Value) -> (usize, usize) {
        let bytes = self.func.ty(tile).elem().map_or(8, Elem::bits) / 8;
        (view_operands(self.func, self.func.op(id).operands[0]).order[0], bytes)
    }
}
