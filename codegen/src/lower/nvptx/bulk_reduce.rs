//! Adds tiles to global memory by bulk async reductions (`cp.reduce.async.bulk`, Hopper): the tile goes to shared
//! memory, and TMA adds it in the L2 cache. Atomics of threads would add at most 16 bytes per instruction, and wait until
//! the cache accepts them.
//!
//! TMA reads shared memory asynchronously. The memory must not be overwritten until it has been read, so it is reserved
//! for these ops for the whole kernel. Only the end of the kernel guarantees that the sums are in global memory.
//!
//! Where a tile has no gaps in global memory and each warp holds one contiguous part of it, a warp stores its part and
//! adds it by one reduction, without a barrier of the block ([`BulkReduce::Parts`]). Other tiles are added row by row,
//! between barriers ([`BulkReduce::Rows`]). TMA takes about 30 cycles per reduction, so that one per row of 256 bytes
//! takes longer than the dots of attention's backward pass.

use super::Lowering;
use super::emit::{Emitter, Val};
use super::ordered_adds::{self, OrderedAdds};
use super::thread_dependencies::ThreadDependencies;
use super::threads::{Coordinate, coordinates};
use crate::analysis::access_layout::{view_operands, view_vector_width};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::memory_effects::may_release_stores;
use crate::ir::{AtomicOp, DType, Func, Op, OpId, Type, Value};
use crate::layout::{Dim, LinearLayout};
use crate::target::GpuArch;
use std::collections::HashMap;

/// Padding of each row in shared memory, in bytes, which avoids bank conflicts between the rows that one store of a warp
/// writes.
const PAD: u32 = 32;
/// Minimum tile size in bytes: smaller tiles do not pay for two barriers.
const MIN_BYTES: u32 = 4096;

/// How a tile of f32 elements is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BulkReduce {
    /// One reduction per row; each row is contiguous in global memory.
    Rows { rows: u32, row_bytes: u32 },
    /// One reduction per warp; the tile is contiguous in global memory, and each warp holds a contiguous part. `ordered`: another
    /// warp issues them ([`super::ordered_adds`]).
    Parts { part_bytes: u32, warps: u32, ordered: bool },
}

impl BulkReduce {
    /// The same, by another warp.
    fn ordered(self) -> BulkReduce {
        match self {
            BulkReduce::Parts { part_bytes, warps, .. } => BulkReduce::Parts { part_bytes, warps, ordered: true },
            rows => rows,
        }
    }

    /// Size in shared memory, in bytes.
    pub fn bytes(self) -> u32 {
        match self {
            BulkReduce::Rows { rows, row_bytes } => rows * (row_bytes + PAD),
            BulkReduce::Parts { part_bytes, warps, ordered } => {
                part_bytes * warps + if ordered { ordered_adds::REQUEST_BYTES } else { 0 }
            }
        }
    }
}

/// The atomic adds of a function that can be bulk async reductions.
pub fn find(
    func: &Func,
    axis: &AxisAnalysis,
    dependencies: &ThreadDependencies,
    ordered_adds: &OrderedAdds,
    arch: GpuArch,
) -> HashMap<OpId, BulkReduce> {
    if arch != GpuArch::Sm90a {
        return HashMap::new();
    }
    // Only ordered ones are complete when another program waits for them.
    let may = |id: OpId| ordered_adds.has(id) || !may_release_stores(func);
    let candidates = func.walk().into_iter().filter(|&id| may(id) && dependencies.only_adds(func, id));
    let found = candidates.filter_map(|id| Some((id, bulk_reduce(func, axis, id)?)));
    found.map(|(id, add)| (id, if ordered_adds.has(id) { add.ordered() } else { add })).collect()
}

pub(super) fn bulk_reduce(func: &Func, axis: &AxisAnalysis, id: OpId) -> Option<BulkReduce> {
    let data = func.op(id);
    let Op::AtomicView { op: AtomicOp::Add, boundary } = &data.op else { return None };
    let (view, tile) = (data.operands[0], data.operands[1]);
    let Type::View { elem: DType::F32, block } = func.ty(view) else { return None };
    let layout = func.layout(func.ty(tile).layout()?);
    let copies = [Dim::Register, Dim::Lane, Dim::Warp].iter().any(|&dim| layout.free_mask(dim) != 0);
    let &[rows, columns] = &block[..] else { return None };
    let (rows, row_bytes) = (rows as u32, (columns * DType::F32.bytes()) as u32);
    let fits = !copies
        && view_operands(func, view).order[0] == 1
        && !boundary.contains(&1)
        // TMA requires addresses and sizes that are multiples of 16 bytes.
        && view_vector_width(func, axis, view, boundary) == 4
        && row_bytes.is_multiple_of(16)
        && rows * row_bytes >= MIN_BYTES;
    if !fits {
        return None;
    }
    let contiguous =
        !boundary.contains(&0) && func.constant_int(view_operands(func, view).strides[0]) == Some(columns as i64);
    if contiguous && let Some(part_bytes) = part_bytes(layout, columns as u32) {
        return Some(BulkReduce::Parts { part_bytes, warps: 1 << layout.bits(Dim::Warp), ordered: false });
    }
    let warps = 1 << layout.bits(Dim::Warp);
    (rows.is_multiple_of(warps) && rows <= 32 * warps).then_some(BulkReduce::Rows { rows, row_bytes })
}

/// The images of the bits of a dimension in the row-major order of a tile with `columns` columns, in bytes.
fn byte_images(layout: &LinearLayout, columns: u32, dim: Dim) -> Vec<u32> {
    layout.bases(dim).iter().map(|basis| (basis[0] * columns + basis[1]) * DType::F32.bytes() as u32).collect()
}

/// The bytes of each warp's part, if each warp holds one contiguous part of the tile: the warp bits are the highest bits
/// of the row-major order, in any order.
fn part_bytes(layout: &LinearLayout, columns: u32) -> Option<u32> {
    let bytes = (DType::F32.bytes() as u32) << (layout.bits(Dim::Register) + layout.bits(Dim::Lane));
    let inside = |dim| byte_images(layout, columns, dim).iter().all(|&image| image < bytes);
    let outside = byte_images(layout, columns, Dim::Warp).iter().all(|&i| i.is_power_of_two() && i >= bytes);
    (inside(Dim::Register) && inside(Dim::Lane) && outside && bytes.is_multiple_of(16)).then_some(bytes)
}

impl Lowering<'_> {
    /// Waits until TMA has read the shared memory of this thread's reductions and stores. Needed before barriers, after
    /// which other threads overwrite it, and before the kernel ends and another block takes over its shared memory.
    pub(super) fn wait_for_bulk_reads(&mut self) {
        self.bulk_group("wait_group.read 0");
    }

    pub(super) fn emit_bulk_reduce(&mut self, id: OpId, add: BulkReduce) {
        match add {
            BulkReduce::Rows { rows, row_bytes } => self.reduce_rows(id, rows, row_bytes),
            BulkReduce::Parts { part_bytes, warps, ordered } => {
                let request = ordered.then(|| self.scratch_after(id, part_bytes * warps));
                self.reduce_parts(id, part_bytes, request);
            }
        }
    }

    fn reduce_rows(&mut self, id: OpId, rows: u32, row_bytes: u32) {
        let pitch = row_bytes + PAD;
        let data = self.func.op(id);
        let Op::AtomicView { boundary, .. } = &data.op else { panic!("internal compiler error: not an atomic add") };
        let layout = self.tile_layout(data.operands[1]);
        let base = self.scratch(id);
        let at = coordinates(&mut self.e, &self.threads, layout);
        let [row, column] = &at[..] else { panic!("internal compiler error: rows and columns were expected") };
        self.store_operand(data.operands[1], |e, r| {
            let y = row.at(e, row.register[r]);
            let x = column.at(e, column.register[r]);
            let y = e.inst(format!("mul i32 {y}, {pitch}"));
            let x = e.inst(format!("shl i32 {x}, 2"));
            let offset = e.inst(format!("add i32 {y}, {x}"));
            e.inst(format!("add i32 {offset}, {base}"))
        });
        self.barrier();

        // Every warp issues an equal part of the rows, one per lane. The lanes of a warp issue one after the other.
        let rows_per_warp = rows >> layout.bits(Dim::Warp);
        let (lane, warp) = (self.threads.lane.clone(), self.threads.warp.clone());
        let first = self.e.hoist(format!("mul i32 {warp}, {rows_per_warp}"));
        let own = self.e.hoist(format!("add i32 {first}, {lane}"));
        let issues = self.e.hoist(format!("icmp ult i32 {lane}, {rows_per_warp}"));
        let parts = view_operands(self.func, data.operands[0]);
        let index = self.index(parts.offsets[0], &own);
        let inside = boundary.contains(&0).then(|| {
            let extent = self.extent(parts.shape[0]);
            self.e.inst(format!("icmp ult i64 {index}, {extent}"))
        });
        let issues = self.and_predicates(Some(issues), inside);
        self.when(issues, |this| {
            let stride = this.scalar(parts.strides[0]);
            let row = this.e.inst(format!("mul i64 {index}, {stride}"));
            let from = this.e.inst(format!("mul i32 {own}, {pitch}"));
            let from = this.e.inst(format!("add i32 {from}, {base}"));
            let to = this.row_start(data.operands[0], &row);
            this.issue_reduction(&to, &from, row_bytes);
        });
        self.bulk_group("commit_group");
    }

    fn reduce_parts(&mut self, id: OpId, part_bytes: u32, request: Option<Val>) {
        let data = self.func.op(id);
        let view = data.operands[0];
        let layout = self.tile_layout(data.operands[1]);
        let columns = self.func.ty(view).shape()[1] as u32;
        let [registers, lanes, warps] = [Dim::Register, Dim::Lane, Dim::Warp].map(|d| byte_images(layout, columns, d));
        // In shared memory, the parts are in the order of the warps, whatever the layout: ops with parts of the same size
        // share the memory. A tile that another warp adds is as in global memory.
        let own = self.threads.linear(&mut self.e, &[], &warps.iter().map(|image| image / 4).collect::<Vec<_>>());
        let part = match request {
            None => self.e.hoist(format!("mul i32 {}, {part_bytes}", self.threads.warp)),
            Some(_) => self.e.hoist(format!("shl i32 {own}, 2")),
        };
        let base = self.scratch(id);
        let part = self.e.hoist(format!("add i32 {part}, {base}"));
        let lane = self.threads.linear(&mut self.e, &lanes, &[]);
        let mask = lanes.iter().fold(0, |m, i| m | i);
        let bits = |r: usize| registers.iter().enumerate().filter(move |(bit, _)| r >> bit & 1 == 1);
        let register = (0..layout.num_registers()).map(|r| bits(r).fold(0, |x, (_, image)| x ^ image)).collect();
        let offset = Coordinate { thread: lane, mask, register };

        match request {
            Some(_) => self.before_ordered_part(),
            None => {
                // The first lane issued the reductions that may still read this part.
                self.wait_for_bulk_reads();
                self.warp_barrier();
            }
        }
        self.store_operand(data.operands[1], |e, r| {
            let offset = offset.at(e, offset.register[r]);
            e.inst(format!("add i32 {part}, {offset}"))
        });
        let offset = |this: &mut Self| {
            let offset = this.index(view_operands(this.func, view).offsets[0], "0");
            this.e.inst(format!("mul i64 {offset}, {columns}"))
        };
        if let Some(request) = request {
            let offset = offset(self);
            let to = self.row_start(view, &offset);
            self.request_tile(&to, &request);
            return;
        }
        self.warp_barrier();
        let first = self.first_lane();
        self.when(Some(first), |this| {
            let offset = offset(this);
            let own = this.e.inst(format!("zext nneg i32 {own} to i64"));
            let offset = this.e.inst(format!("add i64 {offset}, {own}"));
            let to = this.row_start(view, &offset);
            this.issue_reduction(&to, &part, part_bytes);
            this.bulk_group("commit_group");
        });
    }

    /// Stores the registers of a tile to shared memory for TMA; `at` gives the byte address of a register.
    fn store_operand(&mut self, tile: Value, at: impl Fn(&mut Emitter, usize) -> Val) {
        let values = self.regs(tile);
        let vector = self.tile_layout(tile).contiguous_run(1).min(4);
        let ty = if vector == 1 { "float".to_string() } else { format!("<{vector} x float>") };
        for r in (0..values.len()).step_by(vector) {
            let address = at(&mut self.e, r);
            let pointer = self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {address}"));
            let value = self.pack_elements(&values[r..r + vector], "float", &ty);
            self.e.void(format!("store {ty} {value}, ptr addrspace(3) {pointer}, align {}", 4 * vector));
        }
        self.fence_async_shared();
    }

    /// The address of a view's first column, from `row` elements behind the start of its first row on.
    fn row_start(&mut self, view: Value, row: &str) -> Val {
        let parts = view_operands(self.func, view);
        let (base, column) = (self.scalar(parts.base), self.scalar(parts.offsets[1]));
        let offset = self.e.inst(format!("add i64 {row}, {column}"));
        self.e.inst(format!("getelementptr float, ptr addrspace(1) {base}, i64 {offset}"))
    }

    /// Adds `bytes` bytes at byte `from` of shared memory to the memory at `to`.
    pub(super) fn issue_reduction(&mut self, to: &str, from: &str, bytes: u32) {
        let from = self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {from}"));
        self.e.void(format!(
            "call void asm sideeffect \"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {bytes};\", \"l,r,~{{memory}}\"(ptr addrspace(1) {to}, ptr addrspace(3) {from}) #1"
        ));
    }
}
