//! Plans the shared memory of a block: the offsets of buffers and scratch memory, and the positions of barriers.
//!
//! A buffer is live from its `local_alloc` to the last use of any value derived from it (to the end of a loop, if it
//! was allocated before the loop); scratch memory is live for one op. Buffers whose live ranges overlap do not overlap
//! in memory.
//!
//! A traversal of the ops tracks the accesses since the last barrier, and inserts a barrier before an access that
//! overlaps an earlier one if at least one of them writes. It repeats loops with the accesses pending at their end
//! until nothing changes. A hazard with an access from before a loop gets one barrier before the loop.
//!
//! Global memory is tracked too, where one thread may read what another writes
//! ([`thread_dependencies`](super::thread_dependencies)).
//!
//! For rings (buffers that asynchronous copies fill), the pass that allocated them placed the barriers. The plan
//! orders a ring that a producer fills before later uses of its memory by consumers, and any ring after previous
//! uses, with a proxy fence where these were ordinary stores and TMA fills the ring. A ring that threads store to is
//! a buffer; where a loop uses its two slots in turn ([`alternation`](crate::analysis::buffers::alternation)), the
//! first one stands for the slot of the current iteration, and at the end of an iteration the accesses of both change
//! places.

use super::bulk_reduce::BulkReduce;
use super::joined::{JoinedDots, slot_bytes};
use super::thread_dependencies::ThreadDependencies;
use crate::analysis::buffers::{alternation, buffer_of, users};
use crate::analysis::{scratch, warp_box};
use crate::ir::{BlockId, Func, Op, OpId, Type, Value};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::rc::Rc;

/// Alignment of buffers: the period of the widest swizzle.
const BUFFER_ALIGN: u32 = 1024;
const SCRATCH_ALIGN: u32 = 16;

/// What a part of shared memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contents {
    /// A tile that threads store.
    Buffer,
    /// The buffers that asynchronous copies fill.
    Ring,
    Mbarriers,
    /// Elements in transit between warps, during one op.
    Scratch,
    /// The operands of bulk async reductions and of TMA stores.
    BulkReduction,
}

/// A part of the shared memory of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The op that allocates it, or that uses it as scratch memory.
    pub op: OpId,
    pub contents: Contents,
    pub offset: u32,
    pub bytes: u32,
    /// The first and the last op during which it is live: positions in [`Func::walk`].
    pub first: usize,
    pub last: usize,
}

#[derive(Clone, Debug, Default)]
pub struct SharedPlan {
    /// Dynamic shared memory per block, in bytes.
    pub bytes: u32,
    /// Bytes of the memory of which each replica has its own: that of ops in the consumer partition. Offsets are those
    /// of the first replica.
    pub replica_bytes: u32,
    /// By offset.
    pub placed: Vec<Placed>,
    offsets: HashMap<OpId, u32>,
    scratch: HashMap<OpId, u32>,
    barriers: HashSet<OpId>,
    fences: HashSet<OpId>,
    has_tma_stores: bool,
    pub dependencies: Rc<ThreadDependencies>,
    /// Atomic adds performed by bulk async reductions.
    bulk_reductions: Rc<HashMap<OpId, BulkReduce>>,
    /// Rings that threads store to, with the loop that uses their two slots in turn.
    stored: Rc<HashMap<OpId, Option<OpId>>>,
    pub joined: Rc<JoinedDots>,
    /// Rings of a producer whose memory consumers may use after they have read the last buffer.
    reused: HashSet<OpId>,
    /// The memory that TMA fills.
    tma_filled: Vec<Range>,
    /// Whether an op accesses shared memory through the async proxy (`wgmma`, TMA). Only then do ordinary stores
    /// require proxy fences, which architectures before Hopper lack.
    async_proxy: bool,
}

/// A request for `bytes` of memory, live from op number `first` to `last`.
struct Allocation {
    op: OpId,
    bytes: u32,
    align: u32,
    first: usize,
    last: usize,
    contents: Contents,
}

impl Allocation {
    /// Largest first, each at the lowest offset that is free during its live range; at the end what lives as long as the
    /// kernel, which would divide the memory that others share.
    fn order(&self) -> (bool, bool, std::cmp::Reverse<u32>, usize) {
        let is_permanent = self.first == 0 && self.last == usize::MAX;
        (is_permanent, !is_permanent && self.is_scratch(), std::cmp::Reverse(self.bytes), self.first)
    }

    fn is_scratch(&self) -> bool {
        match self.contents {
            Contents::Scratch | Contents::BulkReduction => true,
            Contents::Buffer | Contents::Ring | Contents::Mbarriers => false,
        }
    }
}

/// Places allocations in this order, each at the lowest offset from `start` on that is free during its live range.
fn place_from(start: u32, allocations: &[Allocation]) -> Vec<(u32, &Allocation)> {
    let mut placed: Vec<(u32, &Allocation)> = Vec::new();
    for allocation in allocations {
        let mut at = start;
        loop {
            let end = at + allocation.bytes;
            let clash = placed
                .iter()
                .filter(|(start, p)| {
                    *start < end && at < start + p.bytes && p.first <= allocation.last && allocation.first <= p.last
                })
                .map(|(start, p)| start + p.bytes)
                .max();
            match clash {
                Some(next) => at = next.next_multiple_of(allocation.align),
                None => break,
            }
        }
        placed.push((at, allocation));
    }
    placed
}

fn end_of(placed: &[(u32, &Allocation)]) -> u32 {
    placed.iter().map(|(at, allocation)| at + allocation.bytes).max().unwrap_or(0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Range {
    start: u32,
    end: u32,
}

impl Range {
    fn overlaps(self, other: Range) -> bool {
        self.start < other.end && other.start < self.end
    }

    fn halves(self) -> [Range; 2] {
        let middle = self.start.midpoint(self.end);
        [Range { end: middle, ..self }, Range { start: middle, ..self }]
    }
}

/// Accesses since the last barrier.
#[derive(Clone, Debug, Default, PartialEq)]
struct Pending {
    reads: HashSet<Range>,
    writes: HashSet<Range>,
    /// Ranges written by ordinary stores, without a later proxy fence for `wgmma` and TMA.
    unfenced: HashSet<Range>,
    /// Ranges that TMA fills, read by loads of threads (also those for `mma.sync`), without a later proxy fence. TMA may
    /// overtake such loads, although a barrier follows them.
    unfenced_reads: HashSet<Range>,
    /// For each `wgmma` in flight, from the oldest on, the operands that it reads, across barriers, until a wait
    /// completes it.
    in_flight: VecDeque<BTreeSet<Range>>,
    /// Accesses of global memory.
    global: HashSet<OpId>,
    /// Whether TMA may still read the operand of a bulk async reduction. Threads wait for it before they synchronize.
    bulk_reading: bool,
}

impl Pending {
    /// Clears the accesses that a barrier orders.
    fn clear_synchronized(&mut self) {
        self.reads.clear();
        self.writes.clear();
        self.global.clear();
        self.bulk_reading = false;
    }

    /// Clears the accesses that a proxy fence orders.
    fn clear_fenced(&mut self) {
        self.unfenced.clear();
        self.unfenced_reads.clear();
    }

    /// Adds the accesses of another path to the same point.
    fn merge(&mut self, other: &Pending) {
        self.reads.extend(&other.reads);
        self.writes.extend(&other.writes);
        self.unfenced.extend(&other.unfenced);
        self.unfenced_reads.extend(&other.unfenced_reads);
        self.global.extend(&other.global);
        self.bulk_reading |= other.bulk_reading;
        // Waits count from the newest `wgmma` back.
        for _ in self.in_flight.len()..other.in_flight.len() {
            self.in_flight.push_front(BTreeSet::new());
        }
        for (own, other) in self.in_flight.iter_mut().rev().zip(other.in_flight.iter().rev()) {
            own.extend(other);
        }
    }

    /// Adds a `wgmma` that reads these ranges.
    fn issue(&mut self, reads: &[Range]) {
        /// More are never waited for one by one; the oldest count as one.
        const MOST: usize = 16;
        if self.in_flight.len() == MOST
            && let Some(oldest) = self.in_flight.pop_front()
        {
            self.in_flight[0].extend(oldest);
        }
        self.in_flight.push_back(reads.iter().copied().collect());
    }

    /// Applies a function to all ranges.
    fn map(&mut self, f: impl Fn(Range) -> Range) {
        for ranges in [&mut self.reads, &mut self.writes, &mut self.unfenced, &mut self.unfenced_reads] {
            *ranges = ranges.iter().copied().map(&f).collect();
        }
        for ranges in &mut self.in_flight {
            *ranges = ranges.iter().copied().map(&f).collect();
        }
    }

    /// The accesses of the slots of a ring change places.
    fn switch(&mut self, ring: Range) {
        let [first, second] = ring.halves();
        self.map(|r| match r {
            _ if r == first => second,
            _ if r == second => first,
            _ => r,
        });
    }

    /// An access of a part of a ring becomes one of all of it.
    fn widen(&mut self, ring: Range) {
        self.map(|r| match r.overlaps(ring) {
            true => Range { start: r.start.min(ring.start), end: r.end.max(ring.end) },
            false => r,
        });
    }

    /// Completes all `wgmma` but the last `left`. A warp then knows only that its own part is complete: other warps may
    /// still read the operands until a barrier.
    fn complete(&mut self, left: usize) {
        let complete = self.in_flight.len().saturating_sub(left);
        self.reads.extend(self.in_flight.drain(..complete).flatten());
    }
}

impl SharedPlan {
    pub fn new(
        func: &Func,
        dependencies: Rc<ThreadDependencies>,
        bulk_reductions: HashMap<OpId, BulkReduce>,
    ) -> SharedPlan {
        let ops = func.walk();
        let has_tma_stores = ops.iter().any(|&id| matches!(func.op(id).op, Op::TmaStore { .. }));
        let by_async_proxy = |&id: &OpId| matches!(func.op(id).op, Op::Wgmma { .. } | Op::TmaLoad { .. });
        let async_proxy = has_tma_stores || !bulk_reductions.is_empty() || ops.iter().any(by_async_proxy);
        let stored = stored_rings(func);
        let joined = JoinedDots::find(func, |ring| stored.contains_key(&ring));
        let mut plan = SharedPlan {
            dependencies,
            bulk_reductions: Rc::new(bulk_reductions),
            stored: Rc::new(stored),
            joined: Rc::new(joined),
            has_tma_stores,
            async_proxy,
            ..SharedPlan::default()
        };
        plan.allocate(func);
        let filled = ops.iter().filter(|&&id| matches!(func.op(id).op, Op::TmaLoad { .. }));
        plan.tma_filled = filled.filter_map(|&id| plan.bytes_of(func, func.op(id).operands[1])).collect();
        let mut pending = Pending::default();
        plan.walk(func, func.body, &mut pending);
        plan
    }

    /// The byte offset of a buffer.
    pub fn offset(&self, id: OpId) -> u32 {
        self.offsets[&id]
    }

    /// The byte offset of an op's scratch memory.
    pub fn scratch(&self, id: OpId) -> u32 {
        self.scratch[&id]
    }

    pub fn bulk_reduction(&self, id: OpId) -> Option<BulkReduce> {
        self.bulk_reductions.get(&id).copied()
    }

    /// Whether TMA may read shared memory when a program ends.
    pub fn has_bulk_writes(&self) -> bool {
        self.has_tma_stores || !self.bulk_reductions.is_empty()
    }

    /// Whether TMA reads a tile whose memory other warps overwrite after the next barrier.
    pub fn has_row_reductions(&self) -> bool {
        self.bulk_reductions.values().any(|add| matches!(add, BulkReduce::Rows { .. }))
    }

    pub fn barrier_before(&self, id: OpId) -> bool {
        self.barriers.contains(&id)
    }

    pub fn fence_before(&self, id: OpId) -> bool {
        self.fences.contains(&id)
    }

    fn allocate(&mut self, func: &Func) {
        let mut allocations = Vec::new();
        let order = func.walk();
        let number: HashMap<OpId, usize> = order.iter().enumerate().map(|(i, &id)| (id, i)).collect();
        let spans = loop_spans(func, &number);
        let producer = self.producer_of_reused(func, &number);
        for (i, &id) in order.iter().enumerate() {
            let data = func.op(id);
            if data.op == Op::LocalAlloc {
                let ty = func.ty(data.results[0]);
                let mut uses: Vec<usize> = users(func, &order, data.results[0]).iter().map(|id| number[id]).collect();
                let [by_producer, by_others]: [Vec<usize>; 2] =
                    [true, false].map(|own| uses.iter().copied().filter(|n| producer.contains(n) == own).collect());
                if data.operands.is_empty() && !by_producer.is_empty() && !by_others.is_empty() {
                    uses = by_others;
                    self.reused.insert(id);
                }
                let mut last = uses.into_iter().max().unwrap_or(i).max(i);
                // Allocated before a loop and used in it: live until the end of the loop.
                for &(first, end) in &spans {
                    if i < first && last >= first && last <= end {
                        last = end;
                    }
                }
                let bytes = func.shared_bytes(ty) as u32;
                let is_read = |used: &crate::ir::Use| func.op(used.op).op == Op::TakenIndex;
                let holds_index = func.uses(func.result(id)).iter().any(is_read);
                let filled = data.operands.is_empty() && !self.stored.contains_key(&id) && !holds_index;
                let contents = if filled { Contents::Ring } else { Contents::Buffer };
                allocations.push(Allocation { op: id, bytes, align: BUFFER_ALIGN, first: i, last, contents });
            }
            if let (Op::MbarrierAlloc { .. }, Some(&v)) = (&data.op, data.results.first())
                && let Type::Barrier { count } = func.ty(v)
            {
                // An mbarrier never shares memory: a later buffer would have to wait for the last mbarrier waits.
                let bytes = *count as u32 * super::tma::MBARRIER_BYTES;
                let align = super::tma::MBARRIER_BYTES;
                let contents = Contents::Mbarriers;
                allocations.push(Allocation { op: id, bytes, align, first: 0, last: usize::MAX, contents });
            }
            let bytes = scratch::bytes(func, id);
            if bytes > 0 {
                let contents = Contents::Scratch;
                allocations.push(Allocation { op: id, bytes, align: SCRATCH_ALIGN, first: i, last: i, contents });
            }
        }
        self.join_rings(&mut allocations);
        // A bulk reduction by rows writes its operand after TMA has read the previous one of all warps, a reduction by
        // parts after TMA has read the previous part of the same warp: these share memory.
        let share = |a: BulkReduce, b: BulkReduce| match (a, b) {
            (BulkReduce::Rows { .. }, BulkReduce::Rows { .. }) => true,
            _ => a == b,
        };
        let mut reductions: Vec<(OpId, BulkReduce)> =
            self.bulk_reductions.iter().map(|(&op, &add)| (op, add)).collect();
        reductions.sort_by_key(|&(op, add)| (std::cmp::Reverse(add.bytes()), op));
        let first_of = |add: BulkReduce| reductions.iter().find(|&&(_, first)| share(first, add)).map(|first| first.0);
        for &(op, add) in &reductions {
            if first_of(add) == Some(op) {
                let (bytes, contents) = (add.bytes(), Contents::BulkReduction);
                allocations.push(Allocation { op, bytes, align: SCRATCH_ALIGN, first: 0, last: usize::MAX, contents });
            }
        }
        // Warps wait for their own TMA stores only, so nothing else may use the buffers of these.
        let stores: Vec<OpId> =
            order.iter().copied().filter(|&id| matches!(func.op(id).op, Op::TmaStore { .. })).collect();
        if let Some(&op) = stores.first() {
            let (bytes, contents) = (warp_box::buffers(func).1, Contents::BulkReduction);
            allocations.push(Allocation { op, bytes, align: BUFFER_ALIGN, first: 0, last: usize::MAX, contents });
        }
        allocations.sort_by_key(Allocation::order);
        let replicas = super::replicas(func);
        let (of_replica, of_block): (Vec<Allocation>, Vec<Allocation>) =
            allocations.into_iter().partition(|a| replicas > 1 && func.block_of(a.op) != Some(func.body));
        let mut placed = place_from(0, &of_block);
        let start = end_of(&placed).next_multiple_of(BUFFER_ALIGN);
        let own = place_from(start, &of_replica);
        self.replica_bytes = end_of(&own).saturating_sub(start).next_multiple_of(BUFFER_ALIGN);
        self.bytes = if own.is_empty() { end_of(&placed) } else { start + replicas * self.replica_bytes };
        placed.extend(own);
        for (at, allocation) in &placed {
            let offsets = if allocation.is_scratch() { &mut self.scratch } else { &mut self.offsets };
            offsets.insert(allocation.op, *at);
        }
        for rings in &self.joined.rings {
            let mut at = self.offsets[&rings[0]];
            for &ring in rings {
                self.offsets.insert(ring, at);
                at += slot_bytes(func, ring) as u32;
            }
        }
        let end = order.len().saturating_sub(1);
        let place = |(offset, a): &(u32, &Allocation)| {
            let Allocation { op, bytes, first, last, contents, .. } = **a;
            Placed { op, contents, offset: *offset, bytes, first, last: last.min(end) }
        };
        self.placed = placed.iter().map(place).collect();
        self.placed.sort_by_key(|placed| (placed.offset, placed.first));
        let firsts = reductions.iter().map(|&(op, add)| (op, first_of(add)));
        let firsts = firsts.chain(stores.iter().map(|&op| (op, stores.first().copied())));
        for (op, first) in firsts {
            if let Some(&at) = first.and_then(|first| self.scratch.get(&first)) {
                self.scratch.insert(op, at);
            }
        }
    }

    /// The numbers of the ops of a producer that accesses no shared memory but the rings that it fills: consumers have waited
    /// for all copies when they have read their last buffer, so they may then store something else there. Not if
    /// consumers of other programs may still read.
    fn producer_of_reused(&self, func: &Func, number: &HashMap<OpId, usize>) -> std::ops::Range<usize> {
        let specialize = number.keys().find(|&&id| matches!(func.op(id).op, Op::WarpSpecialize { .. }));
        let Some(&id) = specialize.filter(|_| super::replicas(func) == 1) else { return 0..0 };
        let ops = func.walk_from(func.op(id).regions[1]);
        let takes_memory =
            |&id: &OpId| matches!(func.op(id).op, Op::LocalAlloc | Op::TakeIndex) || scratch::bytes(func, id) > 0;
        if ops.iter().any(takes_memory) {
            return 0..0;
        }
        ops.first().map_or(0, |id| number[id])..ops.last().map_or(0, |id| number[id] + 1)
    }

    /// Makes one allocation, of the first, of rings whose slots follow each other.
    fn join_rings(&self, allocations: &mut Vec<Allocation>) {
        for rings in &self.joined.rings {
            let (own, others): (Vec<Allocation>, Vec<Allocation>) =
                allocations.drain(..).partition(|a| rings.contains(&a.op));
            *allocations = others;
            allocations.extend(own.into_iter().reduce(|a, b| Allocation {
                op: rings[0],
                bytes: a.bytes + b.bytes,
                first: a.first.min(b.first),
                last: a.last.max(b.last),
                ..a
            }));
        }
    }

    /// Bytes from a slot of a ring to the next one.
    pub fn pitch(&self, func: &Func, ring: OpId) -> usize {
        self.joined.pitch(func, ring).unwrap_or_else(|| slot_bytes(func, ring))
    }

    fn walk(&mut self, func: &Func, block: BlockId, pending: &mut Pending) {
        for &id in &func.block(block).ops {
            let data = func.op(id);
            match &data.op {
                Op::For { .. } | Op::While => self.walk_loop(func, id, pending),
                // Each partition has its own barriers; mbarriers order their communication.
                Op::If | Op::WarpSpecialize { .. } => {
                    let mut merged = Pending::default();
                    for &r in &data.regions {
                        let mut arm = pending.clone();
                        self.walk(func, r, &mut arm);
                        merged.merge(&arm);
                    }
                    *pending = merged;
                }
                _ => self.access(func, id, pending),
            }
        }
    }

    /// Visits a loop. A hazard between an access before the loop and one inside of it would cost a barrier in each
    /// iteration: it gets one barrier before the loop.
    fn walk_loop(&mut self, func: &Func, id: OpId, pending: &mut Pending) {
        let (mut alone, mut with) = (self.clone(), self.clone());
        alone.visit_to_fixpoint(func, id, &mut Pending::default());
        let mut open = pending.clone();
        with.visit_to_fixpoint(func, id, &mut open);
        let synchronization = |plan: &SharedPlan| (plan.barriers.clone(), plan.fences.clone());
        if synchronization(&with) == synchronization(&alone) {
            *self = with;
            *pending = open;
            return;
        }
        if !(pending.unfenced.is_empty() && pending.unfenced_reads.is_empty()) {
            self.fences.insert(id);
        }
        self.barriers.insert(id);
        *pending = Pending { in_flight: std::mem::take(&mut pending.in_flight), ..Pending::default() };
        self.visit_to_fixpoint(func, id, pending);
    }

    /// Visits a loop until the pending accesses at its end do not change.
    fn visit_to_fixpoint(&mut self, func: &Func, id: OpId, pending: &mut Pending) {
        let stored = self.stored.clone();
        let alternating = stored.iter().filter(|&(_, of)| *of == Some(id));
        let rings: Vec<Range> = alternating.filter_map(|(&ring, _)| self.bytes_of(func, func.result(ring))).collect();
        rings.iter().for_each(|&ring| pending.widen(ring));
        loop {
            let before = (self.barriers.len(), self.fences.len(), pending.clone());
            for &r in &func.op(id).regions {
                self.walk(func, r, pending);
            }
            rings.iter().for_each(|&ring| pending.switch(ring));
            // The loop may have no iterations: accesses from before it stay pending.
            pending.merge(&before.2);
            if (self.barriers.len(), self.fences.len(), pending.clone()) == before {
                break;
            }
        }
        rings.iter().for_each(|&ring| pending.widen(ring));
    }

    fn access(&mut self, func: &Func, id: OpId, pending: &mut Pending) {
        let data = func.op(id);
        let is_barrier = matches!(data.op, Op::BlockBarrier { id: 0, threads: None } | Op::ClusterBarrier);
        if (is_barrier || matches!(data.op, Op::MbarrierArrive { .. })) && !pending.unfenced_reads.is_empty() {
            // It may let TMA overwrite what has been read. A fence by the thread that issues the copy would come too late.
            self.fences.insert(id);
            pending.clear_fenced();
        }
        if is_barrier {
            pending.clear_synchronized();
            return;
        }
        if let Op::WgmmaWait { pending: left } = data.op {
            pending.complete(left as usize);
            return;
        }
        if matches!(self.bulk_reduction(id), Some(BulkReduce::Parts { .. })) || matches!(data.op, Op::TmaStore { .. }) {
            // Nothing else uses this memory, and each warp orders its own accesses.
            return;
        }
        if let Some(BulkReduce::Rows { .. }) = self.bulk_reduction(id) {
            // The op has its own barrier, and a fence by all threads, before TMA reads.
            if pending.bulk_reading {
                self.barriers.insert(id);
            }
            pending.clear_synchronized();
            pending.clear_fenced();
            pending.bulk_reading = true;
            return;
        }
        if data.op == Op::FenceAsyncShared {
            // The fenced writes stay pending: no barrier has ordered them yet.
            pending.clear_fenced();
            return;
        }
        if let Op::AsyncCopy { .. } | Op::AsyncLoad { .. } | Op::TmaLoad { .. } = data.op {
            let Some(ring) = self.bytes_of(func, data.operands[1]) else { return };
            let by_tma = matches!(data.op, Op::TmaLoad { .. });
            let unfenced = by_tma && pending.unfenced.iter().chain(&pending.unfenced_reads).any(|p| p.overlaps(ring));
            if unfenced {
                self.fences.insert(id);
                pending.clear_fenced();
            }
            if unfenced || pending.writes.iter().chain(&pending.reads).any(|p| p.overlaps(ring)) {
                self.barriers.insert(id);
                pending.clear_synchronized();
            }
            // For later TMA copies into the same memory, `cp.async` writes count as ordinary stores. The fences for
            // `wgmma` were placed by the pass that allocated the ring.
            if !by_tma && self.async_proxy {
                pending.unfenced.insert(ring);
            }
            return;
        }
        if matches!(data.op, Op::LocalLoad | Op::MmaSync { .. } | Op::FmaDot) {
            let buffers = data.operands.iter().filter(|&&v| matches!(func.ty(v), Type::Shared { .. }));
            let read = buffers.filter_map(|&v| self.bytes_of(func, v));
            pending.unfenced_reads.extend(read.filter(|r| self.tma_filled.iter().any(|filled| filled.overlaps(*r))));
        }
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        match &data.op {
            Op::LocalAlloc if !data.operands.is_empty() => writes.extend(self.range(func, data.results[0])),
            Op::LocalStore => writes.extend(self.range(func, data.operands[0])),
            Op::LocalLoad | Op::MmaSync { .. } | Op::FmaDot | Op::Wgmma { .. } => {
                reads.extend(data.operands.iter().filter_map(|&v| self.range(func, v)));
            }
            _ => {}
        }
        let scratch = self.scratch.get(&id).map(|&start| Range { start, end: start + scratch::bytes(func, id) });
        writes.extend(scratch);
        let by_wgmma = matches!(data.op, Op::Wgmma { .. });
        let unfenced = by_wgmma && reads.iter().any(|r| pending.unfenced.iter().any(|u| u.overlaps(*r)));
        let clash = reads.iter().any(|r| pending.writes.iter().any(|w| w.overlaps(*r)))
            || writes.iter().any(|w| pending.writes.iter().chain(&pending.reads).any(|p| p.overlaps(*w)))
            || pending.global.iter().any(|&first| self.dependencies.need_barrier(first, id));
        if clash || unfenced {
            self.barriers.insert(id);
            pending.clear_synchronized();
        }
        if unfenced {
            self.fences.insert(id);
            pending.clear_fenced();
        }
        if let Some(scratch) = scratch {
            // The op writes its scratch memory, synchronizes, and reads it.
            pending.clear_synchronized();
            pending.reads.insert(scratch);
            if self.async_proxy {
                pending.unfenced.insert(scratch);
            }
            return;
        }
        if by_wgmma {
            pending.issue(&reads);
        }
        if self.dependencies.tracks(id) {
            pending.global.insert(id);
        }
        pending.reads.extend(reads);
        if self.async_proxy {
            pending.unfenced.extend(&writes);
        }
        pending.writes.extend(writes);
    }

    /// The byte range of the buffer that contains a value; `None` for rings whose memory only copies fill, and for other
    /// values.
    fn range(&self, func: &Func, v: Value) -> Option<Range> {
        let Type::Shared { .. } = func.ty(v) else { return None };
        let id = buffer_of(func, v)?;
        match self.stored.get(&id) {
            Some(Some(_)) => self.bytes_of(func, v).map(|ring| ring.halves()[0]),
            Some(None) => self.bytes_of(func, v),
            None if func.op(id).operands.is_empty() && !self.reused.contains(&id) => None,
            None => self.bytes_of(func, v),
        }
    }

    /// The byte range of the buffer or ring that contains a value.
    fn bytes_of(&self, func: &Func, v: Value) -> Option<Range> {
        let id = buffer_of(func, v)?;
        let ty = func.ty(func.result(id));
        let (start, bytes) = (self.offsets[&id], func.shared_bytes(ty));
        let joined =
            self.joined.pitch(func, id).map(|pitch| (bytes / slot_bytes(func, id) - 1) * pitch + slot_bytes(func, id));
        Some(Range { start, end: start + joined.unwrap_or(bytes) as u32 })
    }
}

/// The rings that threads store to, with the loop that uses their two slots in turn, if there is one.
pub(super) fn stored_rings(func: &Func) -> HashMap<OpId, Option<OpId>> {
    let store = |&id: &OpId| func.op(id).op == Op::LocalStore;
    let buffers = func.walk().into_iter().filter(store).filter_map(|id| buffer_of(func, func.op(id).operands[0]));
    let rings = buffers.filter(|&buffer| func.op(buffer).operands.is_empty());
    rings.map(|ring| (ring, alternation(func, ring))).collect()
}

/// The numbers of the first and the last op inside of each loop.
fn loop_spans(func: &Func, number: &HashMap<OpId, usize>) -> Vec<(usize, usize)> {
    let mut spans: Vec<(usize, usize)> = func
        .walk()
        .into_iter()
        .filter(|&id| matches!(func.op(id).op, Op::For { .. } | Op::While))
        .filter_map(|id| {
            let inside: Vec<usize> =
                func.op(id).regions.iter().flat_map(|&r| func.walk_from(r)).map(|id| number[&id]).collect();
            Some((*inside.first()?, *inside.last()?))
        })
        .collect();
    // Inner loops first: a live range that is extended to the end of an inner loop ends inside of the outer one.
    spans.sort_by_key(|&(first, _)| std::cmp::Reverse(first));
    spans
}
