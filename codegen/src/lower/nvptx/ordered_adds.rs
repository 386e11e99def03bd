//! Ordered additions by a warp of their own.
//!
//! Programs that add tiles to the same memory in an order that semaphores give ([`Op::SemaphoreWait`]) get the same sums in
//! every run. In a warp-specialized kernel on Hopper, the consumers leave all of that to a warp beside the producer: it waits for
//! the counter, adds the tile by bulk reductions ([`BulkReduce::Parts`]), waits until the sums are in memory, and sets the
//! counter, while the consumers compute. FlashAttention-3 has such a warp for dQ (`hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp`).
//!
//! Two named barriers order the shared memory of the tile: *empty* lets the consumers fill it, *full* lets the warp read it.

use super::Lowering;
use super::bulk_reduce::{BulkReduce, bulk_reduce};
use super::emit::Val;
use super::thread_dependencies::ThreadDependencies;
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::memory_effects::{underlying_arguments, written_pointers};
use crate::ir::{AtomicOp, Effects, Func, MemSem, Op, OpId};
use crate::target::GpuArch;
use std::collections::{HashMap, HashSet};

/// Bytes of the request, which follows the tile in shared memory: the counter, its values before and after the addition, whether there
/// is a tile, and its address in global memory (i64, i32, i32, i32, i64).
pub(super) const REQUEST_BYTES: u32 = 32;
const VALUE: u32 = 8;
const NEXT: u32 = 12;
const IS_TILE: u32 = 16;
const ADDRESS: u32 = 24;

/// The ops around an addition that wait for its counter, and set it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Semaphore {
    wait: OpId,
    release: OpId,
}

/// The additions of a function that a warp of their own does.
#[derive(Default)]
pub(super) struct OrderedAdds {
    of: HashMap<OpId, Semaphore>,
}

impl OrderedAdds {
    /// All ordered additions of a function, or none: where semaphores order anything else, consumers have to wait.
    /// Other GPUs have no bulk reductions.
    pub fn find(func: &Func, axis: &AxisAnalysis, dependencies: &ThreadDependencies, arch: GpuArch) -> OrderedAdds {
        let found = (arch == GpuArch::Sm90a).then(|| OrderedAdds::all(func, axis, dependencies)).flatten();
        found.unwrap_or_default()
    }

    fn all(func: &Func, axis: &AxisAnalysis, dependencies: &ThreadDependencies) -> Option<OrderedAdds> {
        let ops = func.walk();
        let specialize = ops.iter().find_map(|&id| match func.op(id).op {
            Op::WarpSpecialize { producers: ..4, replicas: None | Some(1), .. } => Some(id),
            _ => None,
        })?;
        let consumers = func.walk_from(func.op(specialize).regions[0]);
        let adds = consumers.iter().copied().filter(|&id| matches!(func.op(id).op, Op::AtomicView { .. }));
        let of: HashMap<OpId, Semaphore> = adds.filter_map(|id| Some((id, semaphore(func, id)?))).collect();
        let forms: HashSet<BulkReduce> = of.keys().map(|&id| bulk_reduce(func, axis, id)).collect::<Option<_>>()?;
        let is_one = matches!(&forms.iter().collect::<Vec<_>>()[..], [BulkReduce::Parts { .. }]);
        let around: HashSet<OpId> = of.values().flat_map(|around| [around.wait, around.release]).collect();
        let last_release = ops.iter().rposition(|id| around.contains(id))?;
        let written = written_pointers(func);
        let is_unordered = |(at, &id): (usize, &OpId)| match func.op(id).op {
            Op::SemaphoreWait | Op::AtomicRmw { .. } => around.contains(&id),
            Op::AtomicCas { .. } | Op::InlineAsm { pure: false, .. } => false,
            // Nothing that other programs may write is read.
            Op::Load { .. }
            | Op::LoadView { .. }
            | Op::AsyncCopy { .. }
            | Op::AsyncLoad { .. }
            | Op::TmaLoad { .. } => underlying_arguments(func, func.op(id).operands[0]).is_disjoint(&written),
            // No release comes after what is written, in any iteration.
            Op::Store { .. } | Op::StoreView { .. } | Op::TmaStore { .. } | Op::AtomicView { .. } => {
                of.contains_key(&id) || at > last_release && !repeats(func, id, &around)
            }
            _ => true,
        };
        let only_adds = of.keys().all(|&id| dependencies.only_adds(func, id));
        let fits = is_one && only_adds && ops.iter().enumerate().all(is_unordered);
        fits.then_some(OrderedAdds { of })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Whether an op is one of them.
    pub fn has(&self, add: OpId) -> bool {
        self.of.contains_key(&add)
    }

    /// Whether the warp does what this op does around an addition.
    pub fn covers(&self, id: OpId) -> bool {
        self.of.values().any(|around| [around.wait, around.release].contains(&id))
    }
}

/// Whether a loop around an op has some of these ops too.
fn repeats(func: &Func, id: OpId, others: &HashSet<OpId>) -> bool {
    let mut owners = std::iter::successors(func.parent_op(id), |&owner| func.parent_op(owner));
    owners.any(|owner| {
        func.op(owner).op.is_loop()
            && func.op(owner).regions.iter().any(|&r| func.walk_from(r).iter().any(|id| others.contains(id)))
    })
}

/// The wait and the release around an addition, with no other access of global memory between them.
fn semaphore(func: &Func, add: OpId) -> Option<Semaphore> {
    let (block, at) = (func.block_of(add)?, func.position(add));
    let accesses = |id: &OpId| {
        let data = func.op(*id);
        let is_shared = matches!(data.op, Op::LocalStore | Op::LocalLoad | Op::LocalAlloc);
        let has_effects = matches!(data.op.effects(), Effects::Read | Effects::Write);
        !data.regions.is_empty() || has_effects && !is_shared && !data.op.is_dot()
    };
    let ops = &func.block(block).ops;
    let wait = ops[..at].iter().copied().rev().find(accesses)?;
    let release = ops[at + 1..].iter().copied().find(accesses)?;
    let is_release =
        matches!(func.op(release).op, Op::AtomicRmw { op: AtomicOp::Xchg, sem: Some(MemSem::Release), scope: None });
    let fits = func.op(wait).op == Op::SemaphoreWait
        && is_release
        && func.op(release).operands.len() == 2
        && func.op(release).operands[0] == func.op(wait).operands[0]
        && func.uses(func.op(release).results[0]).is_empty();
    fits.then_some(Semaphore { wait, release })
}

impl Lowering<'_> {
    /// Waits until the consumers may fill the memory of a tile.
    pub(super) fn before_ordered_part(&mut self) {
        self.ordered_barrier("sync", Barrier::Empty);
    }

    /// Says where the tile is to be added.
    pub(super) fn request_tile(&mut self, to: &str, request: &str) {
        let leader = self.leader();
        let address = self.e.inst(format!("ptrtoint ptr addrspace(1) {to} to i64"));
        self.store_request(&leader, 64, &address, request, ADDRESS);
    }

    /// At a wait or a release around an addition: where the counter would be set, leaves the tile to the warp, and says for which
    /// value of the counter to wait.
    pub(super) fn around_ordered(&mut self, id: OpId) {
        let of_release = self.ordered_adds.of.values().find(|around| around.release == id);
        let Some(&Semaphore { wait, release }) = of_release else { return };
        let request = self.request();
        let leader = self.leader();
        let [counter, value] = [0, 1].map(|i| self.scalar(self.func.op(wait).operands[i]));
        let next = self.scalar(self.func.op(release).operands[1]);
        let counter = self.e.inst(format!("ptrtoint ptr addrspace(1) {counter} to i64"));
        self.store_request(&leader, 64, &counter, &request, 0);
        self.store_request(&leader, 32, &value, &request, VALUE);
        self.store_request(&leader, 32, &next, &request, NEXT);
        self.store_request(&leader, 32, "1", &request, IS_TILE);
        self.ordered_barrier("arrive", Barrier::Full);
    }

    /// At the end of the consumers: lets the warp end.
    pub(super) fn end_ordered(&mut self) {
        let request = self.request();
        self.ordered_barrier("sync", Barrier::Empty);
        let leader = self.leader();
        self.store_request(&leader, 32, "0", &request, IS_TILE);
        self.ordered_barrier("arrive", Barrier::Full);
    }

    /// The code of the warp.
    ///
    /// The counter orders the reductions alone, which the L2 cache performs: it is set when they are complete, and the next ones are
    /// issued when it has been read. PTX would have a release and an acquire here, as FlashAttention-3 does, which make
    /// the kernel up to 13 % slower (`harness/records/2026-11-30-h200-ordered-tried.jsonl`). Without them, no sum could be wrong: if a GPU
    /// reordered the two, additions would have another order, and last bits would change.
    pub(super) fn serve_ordered(&mut self) {
        let ((bytes, _), request) = (self.ordered_tile(), self.request());
        let first = self.first_lane();
        let [again, tile, ended] = ["serve", "tile", "served"].map(|hint| self.e.new_label(hint));
        self.ordered_barrier("arrive", Barrier::Empty);
        self.e.branch(&again);
        self.e.start_block(&again);
        self.ordered_barrier("sync", Barrier::Full);
        let is_tile = self.load_request("i32", &request, IS_TILE);
        let is_tile = self.e.inst(format!("icmp ne i32 {is_tile}, 0"));
        self.e.branch_if(&is_tile, &tile, &ended);
        self.e.start_block(&tile);
        let [counter, to] = [0, ADDRESS].map(|at| {
            let address = self.load_request("i64", &request, at);
            self.e.inst(format!("inttoptr i64 {address} to ptr addrspace(1)"))
        });
        let [value, next] = [VALUE, NEXT].map(|at| self.load_request("i32", &request, at));
        self.when(Some(first.clone()), |this| {
            this.poll(&counter, &value);
            let from = this.e.inst(format!("sub i32 {request}, {bytes}"));
            this.issue_reduction(&to, &from, bytes);
            this.bulk_group("commit_group");
            this.wait_for_bulk_reads();
        });
        self.warp_barrier();
        self.ordered_barrier("arrive", Barrier::Empty);
        self.when(Some(first), |this| {
            this.bulk_group("wait_group 0");
            this.set_counter(&counter, &next);
        });
        self.e.branch(&again);
        self.e.start_block(&ended);
    }

    /// The bytes of the tile, and the number of consumer warps.
    fn ordered_tile(&self) -> (u32, u32) {
        let add = self.ordered_adds.of.keys().next().and_then(|&add| self.plan.bulk_reduction(add));
        let Some(BulkReduce::Parts { part_bytes, warps, .. }) = add else {
            panic!("internal compiler error: an ordered addition that is no bulk reduction")
        };
        (part_bytes * warps, warps)
    }

    /// Where the request is in shared memory.
    fn request(&mut self) -> Val {
        let add = *self.ordered_adds.of.keys().next().expect("internal compiler error: no ordered addition");
        self.scratch_after(add, self.ordered_tile().0)
    }

    /// A place in the scratch memory of an op.
    pub(super) fn scratch_after(&mut self, id: OpId, bytes: u32) -> Val {
        let base = self.scratch(id);
        self.e.hoist(format!("add i32 {base}, {bytes}"))
    }

    /// Stores a field by the threads of a predicate, without a branch: see [`Lowering::mbarrier_arrive`].
    fn store_request(&mut self, thread: &str, bits: u32, value: &str, request: &str, at: u32) {
        let p = self.request_field(request, at);
        let kind = if bits == 64 { "l" } else { "r" };
        self.e.void(format!(
            "call void asm sideeffect \"@$2 st.shared.b{bits} [$0], $1;\", \"r,{kind},b,~{{memory}}\"(ptr addrspace(3) {p}, i{bits} {value}, i1 {thread})"
        ));
    }

    fn load_request(&mut self, ty: &str, request: &str, at: u32) -> String {
        let p = self.request_field(request, at);
        self.e.inst(format!("load {ty}, ptr addrspace(3) {p}, align {}", if ty == "i64" { 8 } else { 4 }))
    }

    fn request_field(&mut self, request: &str, at: u32) -> String {
        let at = self.e.inst(format!("add i32 {request}, {at}"));
        self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {at}"))
    }

    /// Emits `bar.sync` or `bar.arrive` (`how`) of the consumers and the warp.
    fn ordered_barrier(&mut self, how: &str, which: Barrier) {
        let (_, warps) = self.ordered_tile();
        // The barriers before are those of the block, of its one program, and of ping-pong scheduling.
        let id = 2 + warps.div_ceil(4) + which as u32;
        let threads = 32 * (warps + 1);
        self.e.void(format!("call void asm sideeffect \"bar.{how} {id}, {threads};\", \"~{{memory}}\"() #1"));
    }
}

/// The named barriers of the shared memory of a tile.
#[derive(Clone, Copy)]
enum Barrier {
    Empty,
    Full,
}
