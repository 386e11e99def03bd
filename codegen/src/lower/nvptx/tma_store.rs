//! Lowers stores and additions of tiles by TMA: each warp brings box after box to shared memory, and its first lane
//! starts the copies.
//!
//! A warp has two buffers, whose memory is reserved for the whole kernel. Before it fills one, the first lane waits until
//! TMA has read it. So stores need no barrier of the block, but for one: in a loop, the elements may be those that another
//! warp stored in the previous iteration.

use super::tma::TmaCopies;
use super::{Lowering, Result};
use crate::analysis::tensor_map::BoxCopy;
use crate::analysis::warp_box::{self, SLOTS, WarpBoxes};
use crate::ir::nested::is_in_loop;
use crate::ir::{BlockId, Op, OpId};

impl Lowering<'_> {
    pub(super) fn tma_store(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::TmaStore { boundary, op } = &data.op else { panic!("internal compiler error: not a TMA store") };
        let (view, tile) = (data.operands[0], data.operands[1]);
        let found = WarpBoxes::of_store(self.func, &self.axis, view, tile, boundary);
        let Some((boxes, plan)) = found else {
            return self.unsupported("TMA cannot store this tile: its warps hold no boxes of rows", None);
        };
        let elem = plan.elem;
        let order: Vec<usize> = crate::analysis::access_layout::view_operands(self.func, view).order.to_vec();
        let mut copies = self.planned_copies(plan);
        self.start_at_warp(&mut copies, &boxes, &order);
        let text = copies.store_text(op.is_some());
        let mut loads = self.deferred_loads(tile);
        let slot_bytes = warp_box::buffers(self.func).0;
        let own = self.e.hoist(format!("mul i32 {}, {}", self.threads.warp, SLOTS * slot_bytes));
        let base = self.scratch(id);
        let own = self.e.hoist(format!("add i32 {own}, {base}"));
        let first_lane = self.first_lane();
        let mut loaded = boxes.boxes.first().map(|(registers, _)| self.load_box(&mut loads, registers));
        self.before_first_box(id);
        for (number, (registers, start)) in boxes.boxes.iter().enumerate() {
            let next = boxes.boxes.get(number + 1).map(|(registers, _)| self.load_box(&mut loads, registers));
            let slot = number as u32 % SLOTS;
            let buffer = self.e.inst(format!("add i32 {own}, {}", slot * slot_bytes));
            if number as u32 >= SLOTS {
                self.bulk_group(&format!("wait_group.read {}", SLOTS - 1));
                self.warp_barrier();
            }
            let values = self.box_values(tile, registers, &loaded.unwrap_or_default())?;
            loaded = next;
            self.store_tile(&boxes.layout, &boxes.memory, buffer.clone(), elem, &values);
            self.fence_async_shared();
            self.warp_barrier();
            copies.buffer = buffer;
            let mut by = vec![0; copies.rank()];
            order.iter().enumerate().for_each(|(place, &dim)| by[place] = start[dim]);
            self.when(Some(first_lane.clone()), |this| {
                this.issue_store(&copies, &text, &BoxCopy { offset: 0, start: by.clone() });
                this.bulk_group("commit_group");
            });
        }
        Ok(())
    }

    /// Waits for earlier stores: for their reads of the buffers, and once per iteration of a loop for their writes.
    fn before_first_box(&mut self, id: OpId) {
        let block = self.func.parent_block(id);
        if is_in_loop(self.func, block) && self.is_first_store(block, id) {
            self.bulk_group("wait_group 0");
            self.barrier();
        } else {
            self.bulk_group("wait_group.read 0");
            self.warp_barrier();
        }
    }

    /// Whether an op is the first of a block that stores, and does not add.
    fn is_first_store(&self, block: BlockId, id: OpId) -> bool {
        let is_store = |other: &&OpId| matches!(self.func.op(**other).op, Op::TmaStore { op: None, .. });
        self.func.block(block).ops.iter().find(is_store) == Some(&id)
    }

    /// Moves the start of copies to that of a warp's first box.
    fn start_at_warp(&mut self, copies: &mut TmaCopies, boxes: &WarpBoxes, order: &[usize]) {
        for (place, &dim) in order.iter().enumerate() {
            if boxes.warps[dim].iter().any(|&image| image != 0) {
                let warp = self.threads.linear(&mut self.e, &[], &boxes.warps[dim]);
                copies.at[place] = self.e.inst(format!("add i32 {}, {warp}", copies.at[place]));
            }
        }
    }
}
