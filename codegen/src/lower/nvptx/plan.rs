//! Shared memory of one block: where buffers and scratch lie, and where barriers are needed.
//!
//! Buffers live from their `local_alloc` to the last use of anything made from them (through a loop's end, if they were
//! made before the loop); scratch lives for one op. Barriers come from a walk that keeps the accesses since the last one:
//! an access that overlaps an earlier one, of which at least one writes, needs a barrier in between. Loops are walked
//! again with what their end leaves open, until nothing changes; what is open only from before a loop is settled there.
//!
//! Global memory counts too, where one thread may read what another one writes ([`exchange`](super::exchange)).
//!
//! Of rings (buffers that asynchronous copies fill) the pass that made them placed the barriers; here they only wait for
//! what used their memory before, with a proxy fence where that were ordinary stores and the engine fills them.

use super::bulk_add::BulkAdd;
use super::exchange::Exchange;
use crate::analysis::buffers::buffer_of;
use crate::analysis::scratch;
use crate::ir::{BlockId, Func, Op, OpId, Type, Value};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// Alignment of buffers: the period of the widest swizzle.
const BUFFER_ALIGN: u32 = 1024;
const SCRATCH_ALIGN: u32 = 16;

#[derive(Clone, Debug, Default)]
pub struct SharedPlan {
    /// Dynamic shared memory of a block.
    pub bytes: u32,
    offsets: HashMap<OpId, u32>,
    scratch: HashMap<OpId, u32>,
    barriers: HashSet<OpId>,
    fences: HashSet<OpId>,
    exchange: Rc<Exchange>,
    /// Additions by the bulk copy engine.
    additions: Rc<HashMap<OpId, BulkAdd>>,
    /// Something reads shared memory through the async proxy (`wgmma`, TMA): only then do ordinary stores need proxy fences, which
    /// architectures before Hopper do not have.
    async_proxy: bool,
}

/// Bytes from `start` up to `end`, needed from op number `first` to `last`.
struct Need {
    op: OpId,
    bytes: u32,
    align: u32,
    first: usize,
    last: usize,
    scratch: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Range {
    start: u32,
    end: u32,
}

impl Range {
    fn overlaps(self, other: Range) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// Accesses since the last barrier.
#[derive(Clone, Debug, Default, PartialEq)]
struct Pending {
    reads: HashSet<Range>,
    writes: HashSet<Range>,
    /// Written by ordinary stores and not yet fenced for `wgmma` and the bulk copy engine.
    unfenced: HashSet<Range>,
    /// What products in flight read, barriers or not, until they have been waited for.
    in_flight: HashSet<Range>,
    /// Accesses of global memory.
    global: HashSet<OpId>,
    /// The bulk copy engine may still be reading what it is to add: threads wait for it before they meet.
    adding: bool,
}

impl Pending {
    /// Threads have met.
    fn settled(&mut self) {
        self.reads.clear();
        self.writes.clear();
        self.global.clear();
        self.adding = false;
    }
}

impl SharedPlan {
    pub fn new(func: &Func, exchange: Rc<Exchange>, additions: HashMap<OpId, BulkAdd>) -> SharedPlan {
        let by_async_proxy = |&id: &OpId| matches!(func.op(id).op, Op::Wgmma { .. } | Op::TmaLoad { .. });
        let async_proxy = !additions.is_empty() || func.walk().iter().any(by_async_proxy);
        let mut plan = SharedPlan { exchange, additions: Rc::new(additions), async_proxy, ..SharedPlan::default() };
        plan.allocate(func);
        let mut pending = Pending::default();
        plan.walk(func, func.body, &mut pending);
        plan
    }

    /// Byte offset of a buffer.
    pub fn offset(&self, id: OpId) -> u32 {
        self.offsets[&id]
    }

    /// Byte offset of an op's scratch.
    pub fn scratch(&self, id: OpId) -> u32 {
        self.scratch[&id]
    }

    pub fn addition(&self, id: OpId) -> Option<BulkAdd> {
        self.additions.get(&id).copied()
    }

    pub fn has_additions(&self) -> bool {
        !self.additions.is_empty()
    }

    pub fn barrier_before(&self, id: OpId) -> bool {
        self.barriers.contains(&id)
    }

    pub fn fence_before(&self, id: OpId) -> bool {
        self.fences.contains(&id)
    }

    fn allocate(&mut self, func: &Func) {
        let mut needs = Vec::new();
        let order = func.walk();
        let number: HashMap<OpId, usize> = order.iter().enumerate().map(|(i, &id)| (id, i)).collect();
        let spans = loop_spans(func, &number);
        for (i, &id) in order.iter().enumerate() {
            let data = func.op(id);
            if data.op == Op::LocalAlloc {
                let ty = func.ty(data.results[0]);
                let Type::Shared { elem, .. } = ty else { panic!("internal compiler error: an untyped buffer") };
                let mut last = i;
                for user in users(func, &order, data.results[0]) {
                    last = last.max(number[&user]);
                }
                // Made before a loop and used in it: needed until the loop ends.
                for &(first, end) in &spans {
                    if i < first && last >= first && last <= end {
                        last = end;
                    }
                }
                let bytes = (ty.numel() * elem.bytes()) as u32;
                needs.push(Need { op: id, bytes, align: BUFFER_ALIGN, first: i, last, scratch: false });
            }
            if let (Op::MbarrierAlloc { .. }, Some(&v)) = (&data.op, data.results.first())
                && let Type::Barrier { count } = func.ty(v)
            {
                // Never shared: whoever came next would have to wait for the end of the last waits.
                let bytes = *count as u32 * super::tma::MBARRIER_BYTES;
                let align = super::tma::MBARRIER_BYTES;
                needs.push(Need { op: id, bytes, align, first: 0, last: usize::MAX, scratch: false });
            }
            let bytes = scratch::bytes(func, id);
            if bytes > 0 {
                needs.push(Need { op: id, bytes, align: SCRATCH_ALIGN, first: i, last: i, scratch: true });
            }
        }
        if let Some((&op, largest)) = self.additions.iter().max_by_key(|(op, add)| (add.bytes(), **op)) {
            // All use the same, each when the engine has read what the one before left there.
            let bytes = largest.bytes();
            needs.push(Need { op, bytes, align: SCRATCH_ALIGN, first: 0, last: usize::MAX, scratch: true });
        }
        // Largest first, each at the lowest offset that is free while it is needed.
        needs.sort_by_key(|n| (n.scratch, std::cmp::Reverse(n.bytes), n.first));
        let mut placed: Vec<(u32, &Need)> = Vec::new();
        for need in &needs {
            let mut at = 0u32;
            loop {
                let end = at + need.bytes;
                let clash = placed
                    .iter()
                    .filter(|(start, p)| {
                        *start < end && at < start + p.bytes && p.first <= need.last && need.first <= p.last
                    })
                    .map(|(start, p)| start + p.bytes)
                    .max();
                match clash {
                    Some(next) => at = next.next_multiple_of(need.align),
                    None => break,
                }
            }
            placed.push((at, need));
            self.bytes = self.bytes.max(at + need.bytes);
            if need.scratch {
                self.scratch.insert(need.op, at);
            } else {
                self.offsets.insert(need.op, at);
            }
        }
        if let Some(at) = self.additions.keys().find_map(|id| self.scratch.get(id).copied()) {
            self.scratch.extend(self.additions.keys().map(|&id| (id, at)));
        }
    }

    fn walk(&mut self, func: &Func, block: BlockId, pending: &mut Pending) {
        for &id in &func.block(block).ops {
            let data = func.op(id);
            match &data.op {
                Op::For { .. } | Op::While => self.walk_loop(func, id, pending),
                // Each role has its own barriers; what they share, mbarriers order.
                Op::If | Op::Roles { .. } => {
                    let mut merged = Pending::default();
                    for &r in &data.regions {
                        let mut arm = pending.clone();
                        self.walk(func, r, &mut arm);
                        merged.reads.extend(&arm.reads);
                        merged.writes.extend(&arm.writes);
                        merged.unfenced.extend(&arm.unfenced);
                        merged.in_flight.extend(&arm.in_flight);
                        merged.global.extend(&arm.global);
                        merged.adding |= arm.adding;
                    }
                    *pending = merged;
                }
                _ => self.access(func, id, pending),
            }
        }
    }

    /// What was open before a loop and would cost a barrier in each of its iterations gets it once, before the loop.
    fn walk_loop(&mut self, func: &Func, id: OpId, pending: &mut Pending) {
        let (mut alone, mut with) = (self.clone(), self.clone());
        alone.settle(func, id, &mut Pending::default());
        let mut open = pending.clone();
        with.settle(func, id, &mut open);
        if (&with.barriers, &with.fences) == (&alone.barriers, &alone.fences) {
            *self = with;
            *pending = open;
            return;
        }
        if !pending.unfenced.is_empty() {
            self.fences.insert(id);
        }
        self.barriers.insert(id);
        *pending = Pending { in_flight: std::mem::take(&mut pending.in_flight), ..Pending::default() };
        self.settle(func, id, pending);
    }

    /// Walks a loop until what one iteration leaves open for the next does not change.
    fn settle(&mut self, func: &Func, id: OpId, pending: &mut Pending) {
        loop {
            let before = (self.barriers.len(), self.fences.len(), pending.clone());
            for &r in &func.op(id).regions {
                self.walk(func, r, pending);
            }
            // The loop may not run at all: what was open stays open.
            pending.reads.extend(&before.2.reads);
            pending.writes.extend(&before.2.writes);
            pending.unfenced.extend(&before.2.unfenced);
            pending.in_flight.extend(&before.2.in_flight);
            pending.global.extend(&before.2.global);
            pending.adding |= before.2.adding;
            if (self.barriers.len(), self.fences.len(), pending.clone()) == before {
                break;
            }
        }
    }

    fn access(&mut self, func: &Func, id: OpId, pending: &mut Pending) {
        let data = func.op(id);
        if let Op::BlockBarrier { id: 0, threads: None } = data.op {
            pending.settled();
            return;
        }
        if let Op::WgmmaWait { pending: left } = data.op {
            // A warp that has waited knows of its own part: others' may go on until a barrier.
            pending.reads.extend(&pending.in_flight);
            if left == 0 {
                pending.in_flight.clear();
            }
            return;
        }
        if self.additions.contains_key(&id) {
            // It has a barrier of its own, and a fence by all, before the engine reads.
            if pending.adding {
                self.barriers.insert(id);
            }
            pending.settled();
            pending.unfenced.clear();
            pending.adding = true;
            return;
        }
        if data.op == Op::FenceAsyncShared {
            // The barrier that orders these writes may still come: they stay pending.
            pending.unfenced.clear();
            return;
        }
        if let Op::AsyncCopy { .. } | Op::TmaLoad { .. } = data.op {
            let Some(ring) = self.bytes_of(func, data.operands[1]) else { return };
            let by_engine = matches!(data.op, Op::TmaLoad { .. });
            let unfenced = by_engine && pending.unfenced.iter().any(|p| p.overlaps(ring));
            if unfenced {
                self.fences.insert(id);
                pending.unfenced.clear();
            }
            if unfenced || pending.writes.iter().chain(&pending.reads).any(|p| p.overlaps(ring)) {
                self.barriers.insert(id);
                pending.settled();
            }
            // Threads' copies are ordinary stores to whatever the engine puts there later. Products wait for fences of their own:
            // the pass that made the ring placed them.
            if !by_engine && self.async_proxy {
                pending.unfenced.insert(ring);
            }
            return;
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
            || pending.global.iter().any(|&first| self.exchange.meet(first, id));
        if clash || unfenced {
            self.barriers.insert(id);
            pending.settled();
        }
        if unfenced {
            self.fences.insert(id);
            pending.unfenced.clear();
        }
        if let Some(scratch) = scratch {
            // The op writes its scratch, has a barrier of its own, and reads it.
            pending.settled();
            pending.reads.insert(scratch);
            if self.async_proxy {
                pending.unfenced.insert(scratch);
            }
            return;
        }
        if by_wgmma {
            pending.in_flight.extend(&reads);
        }
        if self.exchange.has(id) {
            pending.global.insert(id);
        }
        pending.reads.extend(reads);
        if self.async_proxy {
            pending.unfenced.extend(&writes);
        }
        pending.writes.extend(writes);
    }

    /// Bytes of the buffer that a value is (a part of); `None` for rings and for other values.
    fn range(&self, func: &Func, v: Value) -> Option<Range> {
        let Type::Shared { .. } = func.ty(v) else { return None };
        let id = buffer_of(func, v)?;
        if func.op(id).operands.is_empty() { None } else { self.bytes_of(func, v) }
    }

    /// Bytes of the buffer or ring that a value is (a part of).
    fn bytes_of(&self, func: &Func, v: Value) -> Option<Range> {
        let id = buffer_of(func, v)?;
        let ty = func.ty(func.result(id));
        let Type::Shared { elem, .. } = ty else { return None };
        let start = self.offsets[&id];
        Some(Range { start, end: start + (ty.numel() * elem.bytes()) as u32 })
    }
}

/// Ops that use a buffer or anything made from it. A product in flight uses its operands until it is waited for.
fn users(func: &Func, order: &[OpId], v: Value) -> Vec<OpId> {
    let mut derived = vec![v];
    let mut found = Vec::new();
    for &id in order {
        let data = func.op(id);
        if data.operands.iter().any(|o| derived.contains(o)) {
            found.push(id);
            match data.op {
                Op::LocalSlot | Op::LocalTrans { .. } | Op::Wgmma { .. } => derived.extend(&data.results),
                _ => {}
            }
        }
    }
    found
}

/// Numbers of the first and last op inside each loop.
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
    // Inner loops first: extending to the end of one may reach into the next outer one.
    spans.sort_by_key(|&(first, _)| std::cmp::Reverse(first));
    spans
}
