//! Records of clocks ([`clocks`](crate::target::clocks)).
//!
//! Each thread holds the offset of its next event; the offsets of threads that record nothing are past the end. Events
//! are asm volatile, as are the ops that they belong to, so that neither LLVM nor `ptxas` changes their order. Arithmetic
//! may move across them. Barriers within an op, as of a layout conversion, have no events of their own.

use super::Lowering;
use super::emit::Val;
use crate::analysis::pipes::{Pipe, pipe};
use crate::ir::{BlockId, Func, Op, OpId};
use crate::target::clocks::{BYTES, EVENT, Moment, WARPGROUPS, tag};

/// Stores a tag and the clock, where a predicate holds: address, tag, predicate. The simulated GPU knows this text.
pub(crate) const RECORD: &str = "{ .reg .b32 t; mov.u32 t, %clock; @$2 st.global.v2.b32 [$0], {$1, t}; }";

/// Name of the parameter with the address of the record.
pub(super) const PARAMETER: &str = "clocks";

/// Whether the events of an op are recorded: it waits, or starts a matrix product or a copy.
fn is_recorded(func: &Func, id: OpId) -> bool {
    match &func.op(id).op {
        Op::MbarrierWait
        | Op::WgmmaWait { .. }
        | Op::AsyncWait { .. }
        | Op::PingpongWait
        | Op::BlockBarrier { .. }
        | Op::ClusterBarrier
        | Op::SemaphoreWait
        | Op::TakeIndex
        | Op::TakenIndex => true,
        _ => matches!(pipe(func, id), Some(Pipe::Mma | Pipe::Copy)),
    }
}

impl Lowering<'_> {
    /// Emits the offset of this thread's first event, in block `block` of the grid.
    pub(super) fn start_clocks(&mut self, block: u32) {
        let [x, y, z] = [0, 1, 2].map(|axis| self.of_grid("ctaid", axis));
        let [nx, ny] = [0, 1].map(|axis| self.of_grid("nctaid", axis));
        let plane = self.e.hoist(format!("mul i32 {ny}, {z}"));
        let row = self.e.hoist(format!("add i32 {plane}, {y}"));
        let before = self.e.hoist(format!("mul i32 {row}, {nx}"));
        let number = self.e.hoist(format!("add i32 {before}, {x}"));
        let chosen = self.e.hoist(format!("icmp eq i32 {number}, {block}"));
        let group = self.e.hoist(format!("lshr i32 {}, 2", self.threads.warp));
        let others = self.e.hoist(format!("and i32 {}, 3", self.threads.warp));
        let others = self.e.hoist(format!("or i32 {others}, {}", self.threads.lane));
        let is_first = self.e.hoist(format!("icmp eq i32 {others}, 0"));
        let records = self.e.hoist(format!("and i1 {chosen}, {is_first}"));
        let first = self.e.hoist(format!("mul i32 {group}, {EVENT}"));
        let offset = self.e.hoist(format!("select i1 {records}, i32 {first}, i32 {BYTES}"));
        // LLVM keeps it in a register.
        let slot = self.e.hoist("alloca i32, align 4");
        self.e.void(format!("store i32 {offset}, ptr {slot}, align 4"));
        self.clocks = Some(slot);
    }

    /// Records an event of an op.
    fn record(&mut self, id: OpId, moment: Moment) {
        let Some(slot) = self.clocks.clone() else { return };
        let offset: Val = self.e.inst(format!("load i32, ptr {slot}, align 4"));
        let records = self.e.inst(format!("icmp ult i32 {offset}, {BYTES}"));
        let at = self.e.inst(format!("getelementptr i8, ptr addrspace(1) %{PARAMETER}, i32 {offset}"));
        let tag = tag(id.0, moment);
        self.e.void(format!(
            "call void asm sideeffect \"{RECORD}\", \"l,r,b\"(ptr addrspace(1) {at}, i32 {tag}, i1 {records}) #1"
        ));
        let next = self.e.inst(format!("add i32 {offset}, {}", EVENT * WARPGROUPS));
        let next = self.e.inst(format!("select i1 {records}, i32 {next}, i32 {offset}"));
        self.e.void(format!("store i32 {next}, ptr {slot}, align 4"));
    }

    /// Records the beginning of an iteration, if the block is the body of a loop.
    pub(super) fn record_iteration(&mut self, block: BlockId) {
        let Some(id) = self.clocks.as_ref().and_then(|_| self.func.owner(block)) else { return };
        if self.func.op(id).op.is_loop() && self.func.op(id).regions.last() == Some(&block) {
            self.record(id, Moment::Begin);
        }
    }

    /// Emits a barrier of the lowering before an op, with its events.
    pub(super) fn recorded_barrier(&mut self, id: OpId) {
        self.record(id, Moment::Barrier);
        self.barrier();
        self.record(id, Moment::BarrierEnd);
    }

    /// Emits an op, with its events.
    pub(super) fn recorded_op(&mut self, id: OpId) -> super::Result<()> {
        let own = self.clocks.is_some() && is_recorded(self.func, id);
        if own {
            self.record(id, Moment::Begin);
        }
        self.op(id)?;
        if own || self.func.op(id).op.is_loop() {
            self.record(id, Moment::End);
        }
        Ok(())
    }
}
