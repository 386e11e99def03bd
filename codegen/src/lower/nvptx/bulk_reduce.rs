//! Adds tiles to global memory by bulk async reductions (`cp.reduce.async.bulk`, Hopper): the tile goes to shared
//! memory, and TMA adds it row by row in the L2 cache. Atomics of threads would add at most 16 bytes per instruction,
//! and wait until the cache accepts them.
//!
//! TMA reads shared memory asynchronously. The memory must not be overwritten until it has been read, so it is reserved
//! for these ops for the whole kernel. Only the end of the kernel guarantees that the sums are in global memory.
//!
//! Rows that follow each other without gaps are one reduction per warp. TMA takes about 30 cycles per reduction, so that
//! one per row of 256 bytes would take longer than the dots of attention's backward pass.

use super::Lowering;
use super::thread_dependencies::ThreadDependencies;
use super::threads::coordinates;
use crate::analysis::access_layout::{view_operands, view_vector_width};
use crate::analysis::axis::AxisAnalysis;
use crate::ir::{AtomicOp, DType, Func, Op, OpId, Type};
use crate::layout::Dim;
use crate::target::GpuArch;
use std::collections::HashMap;

/// Padding of each row with gaps in global memory, in bytes of shared memory, which avoids bank conflicts between the
/// rows that one store of a warp writes.
const PAD: u32 = 32;
/// Minimum tile size in bytes: smaller tiles do not pay for two barriers.
const MIN_BYTES: u32 = 4096;

/// A tile of f32 rows, each contiguous in global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BulkReduce {
    rows: u32,
    row_bytes: u32,
    /// Rows follow each other in global memory, and all of them are inside of the tensor.
    dense: bool,
}

impl BulkReduce {
    fn pitch(self) -> u32 {
        if self.dense { self.row_bytes } else { self.row_bytes + PAD }
    }

    /// Size in shared memory, in bytes.
    pub fn bytes(self) -> u32 {
        self.rows * self.pitch()
    }
}

/// The atomic adds of a function that can be bulk async reductions.
pub fn find(
    func: &Func,
    axis: &AxisAnalysis,
    dependencies: &ThreadDependencies,
    arch: GpuArch,
) -> HashMap<OpId, BulkReduce> {
    let ops = func.walk();
    // Other programs may use the result of these atomics as a release flag for everything before it; inline assembly
    // has unknown effects.
    let has_release_flags = ops
        .iter()
        .any(|&id| matches!(func.op(id).op, Op::AtomicRmw { .. } | Op::AtomicCas | Op::InlineAsm { pure: false, .. }));
    if arch != GpuArch::Sm90a || has_release_flags {
        return HashMap::new();
    }
    let candidates = ops.into_iter().filter(|&id| dependencies.only_adds(func, id));
    candidates.filter_map(|id| Some((id, bulk_reduce(func, axis, id)?))).collect()
}

fn bulk_reduce(func: &Func, axis: &AxisAnalysis, id: OpId) -> Option<BulkReduce> {
    let data = func.op(id);
    let Op::AtomicView { op: AtomicOp::Add, boundary } = &data.op else { return None };
    let (view, tile) = (data.operands[0], data.operands[1]);
    let Type::View { elem: DType::F32, block } = func.ty(view) else { return None };
    let layout = func.layout(func.ty(tile).layout()?);
    let copies = [Dim::Register, Dim::Lane, Dim::Warp].iter().any(|&dim| layout.free_mask(dim) != 0);
    let &[rows, columns] = &block[..] else { return None };
    let dense =
        !boundary.contains(&0) && func.constant_int(view_operands(func, view).strides[0]) == Some(columns as i64);
    let add = BulkReduce { rows: rows as u32, row_bytes: (columns * DType::F32.bytes()) as u32, dense };
    let warps = 1 << layout.bits(Dim::Warp);
    let fits = !copies
        && view_operands(func, view).order[0] == 1
        && !boundary.contains(&1)
        // TMA requires row addresses and row sizes that are multiples of 16 bytes.
        && view_vector_width(func, axis, view, boundary) == 4
        && add.row_bytes.is_multiple_of(16)
        && add.rows.is_multiple_of(warps)
        && add.rows <= 32 * warps
        && add.rows * add.row_bytes >= MIN_BYTES;
    fits.then_some(add)
}

impl Lowering<'_> {
    /// Waits until TMA has read the shared memory of this thread's reductions. Needed before barriers, and before the
    /// kernel ends and another block takes over its shared memory.
    pub(super) fn wait_for_bulk_reductions(&mut self) {
        if !self.plan.has_bulk_reductions() {
            return;
        }
        self.e.void("call void asm sideeffect \"cp.async.bulk.wait_group.read 0;\", \"~{memory}\"() #1");
    }

    pub(super) fn emit_bulk_reduce(&mut self, id: OpId, add: BulkReduce) {
        let data = self.func.op(id);
        let Op::AtomicView { boundary, .. } = &data.op else { panic!("internal compiler error: not an atomic add") };
        let layout = self.tile_layout(data.operands[1]);
        let values = self.regs(data.operands[1]);
        let base = self.plan.scratch(id);
        let at = coordinates(&mut self.e, &self.threads, layout);
        let [row, column] = &at[..] else { panic!("internal compiler error: rows and columns were expected") };
        let vector = layout.contiguous_run(1).min(4);
        let ty = if vector == 1 { "float".to_string() } else { format!("<{vector} x float>") };
        for r in (0..values.len()).step_by(vector) {
            let y = row.at(&mut self.e, row.register[r]);
            let x = column.at(&mut self.e, column.register[r]);
            let y = self.e.inst(format!("mul i32 {y}, {}", add.pitch()));
            let x = self.e.inst(format!("shl i32 {x}, 2"));
            let offset = self.e.inst(format!("add i32 {y}, {x}"));
            let offset = self.e.inst(format!("add i32 {offset}, {base}"));
            let pointer = self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {offset}"));
            let value = self.pack_elements(&values[r..r + vector], "float", &ty);
            self.e.void(format!("store {ty} {value}, ptr addrspace(3) {pointer}, align {}", 4 * vector));
        }
        self.e.call("void", "llvm.nvvm.fence.proxy.async.shared_cta", &[]);
        self.barrier();

        // Every warp issues an equal part of the rows: all at once, or one per lane. The lanes of a warp issue one after
        // the other.
        let rows_per_warp = add.rows >> layout.bits(Dim::Warp);
        let (lanes, rows_per_lane) = if add.dense { (1, rows_per_warp) } else { (rows_per_warp, 1) };
        let (lane, warp) = (self.threads.lane.clone(), self.threads.warp.clone());
        let first = self.e.hoist(format!("mul i32 {warp}, {rows_per_warp}"));
        let own = self.e.hoist(format!("add i32 {first}, {lane}"));
        let issues = self.e.hoist(format!("icmp ult i32 {lane}, {lanes}"));
        let parts = view_operands(self.func, data.operands[0]);
        let index = self.index(parts.offsets[0], &own);
        let inside = boundary.contains(&0).then(|| {
            let extent = self.extent(parts.shape[0]);
            self.e.inst(format!("icmp ult i64 {index}, {extent}"))
        });
        let issues = self.and_predicates(Some(issues), inside);
        self.when(issues, |this| {
            let stride = this.scalar(parts.strides[0]);
            let column_offset = this.scalar(parts.offsets[1]);
            let to = this.scalar(parts.base);
            let offset = this.e.inst(format!("mul i64 {index}, {stride}"));
            let offset = this.e.inst(format!("add i64 {offset}, {column_offset}"));
            let to = this.e.inst(format!("getelementptr float, ptr addrspace(1) {to}, i64 {offset}"));
            let from = this.e.inst(format!("mul i32 {own}, {}", add.pitch()));
            let from = this.e.inst(format!("add i32 {from}, {base}"));
            let from = this.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {from}"));
            this.e.void(format!(
                "call void asm sideeffect \"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {};\", \"l,r,~{{memory}}\"(ptr addrspace(1) {to}, ptr addrspace(3) {from}) #1",
                rows_per_lane * add.row_bytes
            ));
        });
        self.e.void("call void asm sideeffect \"cp.async.bulk.commit_group;\", \"~{memory}\"() #1");
    }
}
