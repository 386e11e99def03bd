//! Software-pipelines loads: prefetches the operands of dots into multi-buffered shared memory.
//!
//! Does: selects the loads whose addresses depend only on scalars, in loops that contain a dot of loaded tiles and in
//! loops with their own `num_stages`. Replaces them by `async_copy` into a ring of as many buffers as the loop has
//! stages. The copies of the first iterations come before the loop (prologue); each iteration then issues the copies of
//! the iteration `stages − 1` ahead and waits for its own. Dots read the ring directly; other users read it by
//! `local_load`. With the option `tma`, TMA copies what a tensor map describes, with one mbarrier per stage.
//! Buffers that a `wgmma` of stage 1 or one with a deferred wait reads have to live one iteration longer: their rings
//! have one more buffer.
//! Requires: stage *layout*.
//! Keeps: results. Barriers other than those of the rings are placed later.
//! Does not: pipeline loads whose address comes from memory, loads that `cp.async` cannot express (accesses below four
//! bytes, padding other than zero), or loads of memory that the kernel writes, because an iteration may need what the
//! previous one wrote.

use crate::analysis::access_layout::{async_copy_layout, async_copy_width, view_operands};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::{memory_effects, scratch, tensor_map};
use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, DType, Def, Effects, Func, Op, OpId, Padding, Type, Value};
use crate::layout::LinearLayout;
use crate::target::{CompileOptions, GpuArch};
use std::collections::HashMap;

/// The minimum size of one `cp.async`, in bytes.
const MIN_COPY_BYTES: usize = 4;

/// A load to prefetch.
pub(super) struct Candidate {
    pub load: OpId,
    /// The `local_alloc` from which dots read the tile.
    pub alloc: Option<OpId>,
    /// The tile has users in registers too.
    pub in_registers: bool,
    /// The type of one buffer of the ring.
    pub buffer: Type,
    /// A `wgmma` in flight still reads the buffer in the next iteration.
    read_next_iteration: bool,
    /// Loaded by TMA.
    tma: bool,
}

impl Candidate {
    /// The number of buffers of the ring.
    fn depth(&self, stages: u32) -> u32 {
        stages + u32::from(self.read_next_iteration)
    }
}

/// Runs the pass.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) {
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    for id in loops {
        pipeline_loop(func, id, arch, options);
    }
}

fn pipeline_loop(func: &mut Func, id: OpId, arch: GpuArch, options: &CompileOptions) {
    let Op::For { num_stages, .. } = func.op(id).op else { return };
    let mut candidates = find_candidates(func, id);
    if candidates.is_empty() {
        return;
    }
    if arch >= GpuArch::Sm90a && options.schedule.tma == Some(true) {
        let axis = AxisAnalysis::new(func);
        candidates.iter_mut().for_each(|c| c.tma = tma_can_load(func, &axis, c));
    }
    let wanted = num_stages.unwrap_or(options.num_stages);
    let stages = stages_that_fit(func, id, &candidates, wanted, arch);
    if stages < 2 {
        return;
    }
    Pipeline::new(func, id, stages).build(&candidates);
}

/// Whether TMA can perform the load.
fn tma_can_load(func: &Func, axis: &AxisAnalysis, c: &Candidate) -> bool {
    let data = func.op(c.load);
    let Op::LoadView { boundary, .. } = &data.op else { return false };
    tensor_map::plan(func, axis, data.operands[0], boundary, &c.buffer).is_some()
}

/// The loads of the loop body, without nested blocks, that can be prefetched. Empty if no dot reads any of them, unless
/// the loop sets its own `num_stages`: other loads may be used too soon after, or too rarely, to pay for the way
/// through shared memory.
pub(super) fn find_candidates(func: &mut Func, id: OpId) -> Vec<Candidate> {
    let region = func.op(id).regions[0];
    let axis = AxisAnalysis::new(func);
    let written = memory_effects::written_pointers(func);
    let ops = func.block(region).ops.clone();
    let mut found = Vec::new();
    for &load in &ops {
        let Op::LoadView { boundary, padding: Padding::Zero, .. } = &func.op(load).op else { continue };
        let tile = func.result(load);
        let view = func.op(load).operands[0];
        let Type::View { elem, .. } = func.ty(view) else { continue };
        let (elem, boundary) = (*elem, boundary.clone());
        if elem == DType::Bool || !depends_on_scalars(func, region, view) {
            continue;
        }
        if !written.is_disjoint(&memory_effects::underlying_pointers(func, view)) {
            continue;
        }
        let mut allocs = ops.iter().filter(|&&op| func.op(op).op == Op::LocalAlloc && func.op(op).operands == [tile]);
        let alloc = allocs.next().copied();
        let users = func.uses(tile).len() - usize::from(alloc.is_some());
        let buffer = match alloc {
            Some(alloc) => func.ty(func.result(alloc)).clone(),
            None => {
                let order = view_operands(func, view).order.to_vec();
                let shape = func.ty(tile).shape().to_vec();
                let extents: Vec<u32> = shape.iter().map(|&n| n as u32).collect();
                let layout = func.intern_layout(LinearLayout::shared_row_major(&extents, &order));
                Type::Shared { shape, elem, layout }
            }
        };
        let Type::Shared { layout, .. } = buffer else { continue };
        // The copied vectors do not depend on the number of warps.
        let copies = async_copy_layout(func, &axis, view, &boundary, 1);
        let inner = view_operands(func, view).order[0];
        if async_copy_width(&copies, inner, func.layout(layout)) * elem.bytes() < MIN_COPY_BYTES {
            continue;
        }
        let read_next_iteration = alloc.is_some_and(|alloc| is_read_next_iteration(func, region, func.result(alloc)));
        found.push(Candidate { load, alloc, in_registers: users > 0, buffer, read_next_iteration, tma: false });
    }
    let has_own_stages = matches!(func.op(id).op, Op::For { num_stages: Some(_), .. });
    if has_own_stages || found.iter().any(|c| c.alloc.is_some()) { found } else { Vec::new() }
}

/// Whether a buffer (or a view of it) is an operand of a `wgmma` that is issued or completes in the next iteration.
fn is_read_next_iteration(func: &Func, region: BlockId, buffer: Value) -> bool {
    let mut derived = vec![buffer];
    func.block(region).ops.iter().any(|&id| {
        let data = func.op(id);
        let uses = data.operands.iter().any(|o| derived.contains(o));
        if uses && matches!(data.op, Op::LocalTrans { .. }) {
            derived.extend(&data.results);
        }
        uses && matches!(data.op, Op::Wgmma { stage_one: Some(true), .. } | Op::Wgmma { defer_wait: Some(true), .. })
    })
}

/// Whether all ops in the loop that the value depends on, also through carried values, are pure and scalar.
fn depends_on_scalars(func: &Func, region: BlockId, v: Value) -> bool {
    let mut seen = vec![v];
    let mut next = 0;
    while next < seen.len() {
        let v = seen[next];
        next += 1;
        match func.value(v).def {
            Def::Param(block, index) if block == region && index > 0 => {
                let last = *func.block(region).ops.last().expect("internal compiler error: an empty loop");
                let carried = func.op(last).operands[index - 1];
                if !seen.contains(&carried) {
                    seen.push(carried);
                }
            }
            Def::Result(id, _) if func.is_in(id, region) => {
                let data = func.op(id);
                let scalar = matches!(func.ty(v), Type::Scalar(_) | Type::View { .. });
                if !scalar || data.op.effects() != Effects::Pure || !data.regions.is_empty() {
                    return false;
                }
                for &o in &data.operands {
                    if !seen.contains(&o) {
                        seen.push(o);
                    }
                }
            }
            Def::Param(..) | Def::Result(..) => {}
        }
    }
    true
}

/// The maximum number of stages, up to `wanted`, whose rings fit into shared memory together with the buffers that are
/// live during the loop and the scratch memory of its ops.
fn stages_that_fit(func: &Func, id: OpId, candidates: &[Candidate], wanted: u32, arch: GpuArch) -> u32 {
    let size = |ty: &Type, depth: u32| match ty {
        Type::Shared { elem, .. } => (ty.numel() * elem.bytes() * depth as usize).next_multiple_of(1024) as u64,
        _ => 0,
    };
    let others: u64 = buffers_live_in_loop(func, id)
        .into_iter()
        .filter(|alloc| !candidates.iter().any(|c| c.alloc == Some(*alloc)))
        .map(|alloc| size(func.ty(func.result(alloc)), 1))
        .sum();
    // Space for the mbarriers.
    let barriers = if candidates.iter().any(|c| c.tma) { 1024 } else { 0 };
    let available = u64::from(arch.max_shared_bytes()).saturating_sub(others + barriers);
    let buffers = |stages| candidates.iter().map(|c| size(&c.buffer, 1) * u64::from(c.depth(stages))).sum::<u64>();
    let rings = |stages| candidates.iter().map(|c| size(&c.buffer, c.depth(stages))).sum::<u64>();
    let ops = func.walk_from(func.op(id).regions[0]).into_iter().filter(|&op| !reads_ring(func, op, candidates));
    let scratch = ops.map(|op| u64::from(scratch::bytes(func, op))).max().unwrap_or(0);
    let fits = |&stages: &u32| buffers(stages) <= available && rings(stages) + scratch <= available;
    (1..=wanted).rev().find(fits).unwrap_or(0)
}

/// Whether an op only converts the layout of a tile from a ring: the load will use that layout directly.
pub(super) fn reads_ring(func: &Func, id: OpId, candidates: &[Candidate]) -> bool {
    let mut at = Some(id).filter(|&id| func.op(id).op == Op::ConvertLayout);
    while let Some(id) = at {
        at = func.def_op(func.op(id).operands[0]);
        match at.map(|id| &func.op(id).op) {
            Some(Op::LoadView { .. }) => return candidates.iter().any(|c| Some(c.load) == at),
            Some(Op::ExpandDims { .. }) => {}
            _ => return false,
        }
    }
    false
}

/// The buffers that are live during the loop: all but those allocated after it and those last used before it.
fn buffers_live_in_loop(func: &Func, id: OpId) -> Vec<OpId> {
    let order = func.walk();
    let first = order.iter().position(|&op| op == id);
    let first = first.expect("internal compiler error: a loop is not in its block");
    let last = first + func.walk_from(func.op(id).regions[0]).len();
    let loops: Vec<(usize, usize)> = order
        .iter()
        .enumerate()
        .filter(|(_, op)| matches!(func.op(**op).op, Op::For { .. } | Op::While))
        .map(|(at, &op)| (at, at + func.op(op).regions.iter().map(|&r| func.walk_from(r).len()).sum::<usize>()))
        .collect();
    let needed = |&(allocated_at, alloc): &(usize, OpId)| {
        let mut derived = vec![func.result(alloc)];
        let mut end = allocated_at;
        for (at, &op) in order.iter().enumerate().skip(allocated_at) {
            if func.op(op).operands.iter().any(|o| derived.contains(o)) {
                if matches!(func.op(op).op, Op::LocalSlot | Op::LocalTrans { .. } | Op::Wgmma { .. }) {
                    derived.extend(&func.op(op).results);
                }
                end = at;
            }
        }
        // Allocated before a loop and used in it: live until the end of the loop.
        let end = loops
            .iter()
            .filter(|&&(from, to)| allocated_at < from && from <= end && end <= to)
            .map(|l| l.1)
            .fold(end, usize::max);
        allocated_at <= last && end >= first
    };
    let allocs = order.iter().copied().enumerate().filter(|(_, op)| func.op(*op).op == Op::LocalAlloc);
    allocs.filter(needed).map(|(_, alloc)| alloc).collect()
}

struct Pipeline<'f> {
    func: &'f mut Func,
    id: OpId,
    region: BlockId,
    stages: u32,
    /// The carried values that addresses depend on, by index.
    address_values: Vec<usize>,
    /// The distinct depths of the rings: rings of the same depth share their slot counters.
    depths: Vec<u32>,
    /// The full mbarriers, which count the bytes of the TMA copies of an iteration, one per buffer of the shallowest
    /// ring.
    full: Option<Value>,
}

impl<'f> Pipeline<'f> {
    fn new(func: &'f mut Func, id: OpId, stages: u32) -> Pipeline<'f> {
        let region = func.op(id).regions[0];
        Pipeline { func, id, region, stages, address_values: Vec::new(), depths: Vec::new(), full: None }
    }

    /// The indices of the carried values that the views depend on.
    fn find_address_values(&self, candidates: &[Candidate]) -> Vec<usize> {
        let mut seen: Vec<Value> = candidates.iter().map(|c| self.func.op(c.load).operands[0]).collect();
        let mut carried = Vec::new();
        let mut next = 0;
        while next < seen.len() {
            let v = seen[next];
            next += 1;
            match self.func.value(v).def {
                Def::Param(block, index) if block == self.region && index > 0 => {
                    carried.push(index - 1);
                    let y = self.yields()[index - 1];
                    if !seen.contains(&y) {
                        seen.push(y);
                    }
                }
                Def::Result(id, _) if self.func.is_in(id, self.region) => {
                    for &o in &self.func.op(id).operands {
                        if !seen.contains(&o) {
                            seen.push(o);
                        }
                    }
                }
                Def::Param(..) | Def::Result(..) => {}
            }
        }
        carried.sort_unstable();
        carried
    }

    fn yields(&self) -> &[Value] {
        let last = *self.func.block(self.region).ops.last().expect("internal compiler error: an empty loop");
        &self.func.op(last).operands
    }

    /// Inserts a barrier after the loop, so that later buffers can reuse the memory of the rings after the last reads,
    /// and frees the mbarriers.
    fn release_rings(&mut self) {
        let loc = self.func.op(self.id).loc.clone();
        let mut b = Builder::after(self.func, self.id, loc);
        b.op(Op::BlockBarrier { id: 0, threads: None }, &[], &[]);
        if let Some(full) = self.full {
            b.op(Op::MbarrierFree, &[full], &[]);
        }
    }

    fn build(mut self, candidates: &[Candidate]) {
        self.address_values = self.find_address_values(candidates);
        self.depths = candidates.iter().map(|c| c.depth(self.stages)).collect();
        self.depths.sort_unstable();
        self.depths.dedup();
        let loc = self.func.op(self.id).loc.clone();
        let [_, upper, step] = [0, 1, 2].map(|i| self.func.op(self.id).operands[i]);
        let by_wgmma = self.feeds_wgmma(candidates);

        // The prologue: rings and the copies of the first iterations, built in a scratch block that is spliced before
        // the loop.
        let scratch = self.func.add_block();
        let rings = self.rings(scratch, candidates);
        let by_cp_async = candidates.iter().any(|c| !c.tma);
        if candidates.iter().any(|c| c.tma) {
            self.full = Some(self.barriers(scratch));
        }
        let mut index = self.func.op(self.id).operands[0];
        let mut carried: Vec<Value> =
            self.address_values.iter().map(|&i| self.func.op(self.id).operands[3 + i]).collect();
        for stage in 0..self.stages - 1 {
            let mut b = Builder::new(self.func, scratch, loc.clone());
            let slot = b.int(i64::from(stage), DType::I32);
            let slots = vec![slot; self.depths.len()];
            (index, carried) = self.issue(scratch, candidates, &rings, index, &carried, &slots, upper, step);
        }
        let mut b = Builder::new(self.func, scratch, loc.clone());
        let read = b.int(0, DType::I32);
        let write = b.int(i64::from(self.stages - 1), DType::I32);
        let prologue = self.func.take_ops(scratch);
        self.func.insert(self.func.parent_block(self.id), self.func.position(self.id), &prologue);

        // The loop carries the index and values of the prefetched iteration, the slots to read, and the slots to write.
        let mut inits = vec![index];
        inits.extend(carried);
        inits.extend(vec![read; self.depths.len()]);
        inits.extend(vec![write; self.depths.len()]);
        // The parity of the mbarrier phase to wait for: initially 0, as the slots to read are.
        inits.extend(self.full.map(|_| read));
        let params: Vec<Value> = inits
            .iter()
            .map(|&v| {
                let ty = self.func.ty(v).clone();
                self.func.add_operands(self.id, &[v]);
                self.func.add_result(self.id, ty.clone());
                self.func.add_param(self.region, ty)
            })
            .collect();
        let (ahead_index, rest) = (params[0], &params[1..]);
        let (ahead, slots) = rest.split_at(self.address_values.len());
        let (slots, parity) = slots.split_at(2 * self.depths.len());
        let (reads, writes) = slots.split_at(self.depths.len());

        // At the top of the body: waits for the copies of this iteration, and issues later ones.
        let top = self.func.add_block();
        let mut b = Builder::new(self.func, top, loc.clone());
        if by_cp_async {
            b.op(Op::AsyncWait { pending: self.stages - 2 }, &[], &[]);
        }
        if by_wgmma {
            b.op(Op::FenceAsyncShared, &[], &[]);
        }
        if let Some(full) = self.full {
            b.op(Op::MbarrierWait, &[full, reads[0], parity[0]], &[]);
        }
        b.op(Op::BlockBarrier { id: 0, threads: None }, &[], &[]);
        let (next_index, next_ahead) = self.issue(top, candidates, &rings, ahead_index, ahead, writes, upper, step);
        let mut b = Builder::new(self.func, top, loc.clone());
        let depths = self.depths.iter().chain(&self.depths);
        let mut next_slots: Vec<Value> =
            slots.iter().zip(depths).map(|(&s, &depth)| next_slot(&mut b, s, depth)).collect();
        if let Some(&parity) = parity.first() {
            next_slots.push(next_parity(&mut b, parity, next_slots[0]));
        }
        for (c, &ring) in candidates.iter().zip(&rings) {
            let read = reads[counter(&self.depths, c.depth(self.stages))];
            let id = b.op(Op::LocalSlot, &[ring, read], std::slice::from_ref(&c.buffer));
            let slot = b.func.result(id);
            if let Some(alloc) = c.alloc {
                let buffer = b.func.result(alloc);
                b.func.replace_uses(buffer, slot);
            }
            if c.in_registers {
                let tile = b.func.result(c.load);
                let ty = b.func.ty(tile).clone();
                let id = b.op(Op::LocalLoad, &[slot], &[ty]);
                let loaded = b.func.result(id);
                b.func.replace_uses(tile, loaded);
            }
        }
        let top_ops = self.func.take_ops(top);
        self.func.retain_ops(self.region, |op| !candidates.iter().any(|c| c.load == *op || c.alloc == Some(*op)));
        self.func.insert(self.region, 0, &top_ops);
        let last = *self.func.block(self.region).ops.last().expect("internal compiler error: an empty loop");
        self.func.add_operands(last, &[vec![next_index], next_ahead, next_slots].concat());

        self.release_rings();
    }

    /// Allocates a ring for each load.
    fn rings(&mut self, block: BlockId, candidates: &[Candidate]) -> Vec<Value> {
        let loc = self.func.op(self.id).loc.clone();
        let mut b = Builder::new(self.func, block, loc);
        candidates
            .iter()
            .map(|c| {
                let Type::Shared { shape, elem, layout } = c.buffer.clone() else {
                    panic!("internal compiler error: a buffer of another type")
                };
                let mut ring = vec![c.depth(self.stages) as usize];
                ring.extend(shape);
                let id = b.op(Op::LocalAlloc, &[], &[Type::Shared { shape: ring, elem, layout }]);
                b.func.result(id)
            })
            .collect()
    }

    /// Allocates and initializes the full mbarriers of the TMA copies.
    fn barriers(&mut self, block: BlockId) -> Value {
        let loc = self.func.op(self.id).loc.clone();
        let mut b = Builder::new(self.func, block, loc);
        let count = self.depths[0] as usize;
        let alloc = b.op(Op::MbarrierAlloc { arrivals: 1 }, &[], &[Type::Barrier { count }]);
        b.op(Op::BlockBarrier { id: 0, threads: None }, &[], &[]);
        b.func.result(alloc)
    }

    /// Issues the copies of one iteration, predicated on its existence. Returns the index and carried values of the
    /// next iteration.
    fn issue(
        &mut self,
        block: BlockId,
        candidates: &[Candidate],
        rings: &[Value],
        index: Value,
        carried: &[Value],
        slots: &[Value],
        upper: Value,
        step: Value,
    ) -> (Value, Vec<Value>) {
        let loc = self.func.op(self.id).loc.clone();
        let params = self.func.block(self.region).params.clone();
        let mut map: HashMap<Value, Value> = HashMap::from([(params[0], index)]);
        for (&i, &v) in self.address_values.iter().zip(carried) {
            map.insert(params[1 + i], v);
        }
        let mut b = Builder::new(self.func, block, loc.clone());
        let exists = b.cmp(CmpOp::Lt, index, upper);
        if let Some(full) = self.full {
            let size = |c: &&Candidate| match &c.buffer {
                Type::Shared { elem, .. } => (c.buffer.numel() * elem.bytes()) as u32,
                _ => 0,
            };
            let bytes = candidates.iter().filter(|c| c.tma).map(|c| size(&c)).sum();
            b.op(Op::MbarrierExpect { bytes }, &[full, slots[0], exists], &[]);
        }
        for (c, &ring) in candidates.iter().zip(rings) {
            let load = self.func.op(c.load).clone();
            let Op::LoadView { boundary, padding, .. } = load.op else {
                panic!("internal compiler error: a candidate that is not a load")
            };
            let view = self.clone_slice(block, load.operands[0], &mut map);
            let mut b = Builder::new(self.func, block, load.loc);
            let slot = slots[counter(&self.depths, c.depth(self.stages))];
            let id = b.op(Op::LocalSlot, &[ring, slot], std::slice::from_ref(&c.buffer));
            let buffer = b.func.result(id);
            match self.full.filter(|_| c.tma) {
                Some(full) => b.op(Op::TmaLoad { boundary }, &[view, buffer, full, slots[0], exists], &[]),
                None => b.op(Op::AsyncCopy { boundary, padding }, &[view, buffer, exists], &[]),
            };
        }
        let yields: Vec<Value> = self.address_values.iter().map(|&i| self.yields()[i]).collect();
        let next = yields.into_iter().map(|y| self.clone_slice(block, y, &mut map)).collect();
        let mut b = Builder::new(self.func, block, loc);
        if candidates.iter().any(|c| !c.tma) {
            b.op(Op::AsyncCommit, &[], &[]);
        }
        (b.binary(BinaryOp::Add, index, step), next)
    }

    /// Clones the computation of a value of the loop body, for the iteration that `map` describes.
    fn clone_slice(&mut self, block: BlockId, v: Value, map: &mut HashMap<Value, Value>) -> Value {
        if let Some(&known) = map.get(&v) {
            return known;
        }
        let Some(id) = self.func.def_op(v).filter(|&id| self.func.is_in(id, self.region)) else { return v };
        let data = self.func.op(id).clone();
        let operands = data.operands.iter().map(|&o| self.clone_slice(block, o, map)).collect();
        let types = data.results.iter().map(|&r| self.func.ty(r).clone()).collect();
        let copy = self.func.append(block, data.op, operands, types, vec![], data.loc);
        for (&old, &new) in data.results.iter().zip(&self.func.op(copy).results.clone()) {
            map.insert(old, new);
        }
        map[&v]
    }

    /// Whether a buffer (or a view of it) that `cp.async` fills is an operand of `wgmma`.
    fn feeds_wgmma(&self, candidates: &[Candidate]) -> bool {
        let mut derived: Vec<Value> =
            candidates.iter().filter(|c| !c.tma).filter_map(|c| c.alloc).map(|id| self.func.result(id)).collect();
        self.func.walk_from(self.region).into_iter().any(|id| {
            let data = self.func.op(id);
            let uses = data.operands.iter().any(|o| derived.contains(o));
            if uses && matches!(data.op, Op::LocalTrans { .. }) {
                derived.extend(&data.results);
            }
            uses && matches!(data.op, Op::Wgmma { .. })
        })
    }
}

/// The index of the slot counter of the rings of a depth.
fn counter(depths: &[u32], depth: u32) -> usize {
    depths.iter().position(|&d| d == depth).expect("internal compiler error: a ring of unknown depth")
}

/// `slot + 1`, wrapping to zero at the end of the ring.
fn next_slot(b: &mut Builder, slot: Value, depth: u32) -> Value {
    let (one, zero) = (b.int(1, DType::I32), b.int(0, DType::I32));
    let next = b.binary(BinaryOp::Add, slot, one);
    let end = b.int(i64::from(depth), DType::I32);
    let wraps = b.cmp(CmpOp::Eq, next, end);
    b.select(wraps, zero, next)
}

/// Flips the parity where the next slot is the first.
fn next_parity(b: &mut Builder, parity: Value, next_slot: Value) -> Value {
    let (zero, one) = (b.int(0, DType::I32), b.int(1, DType::I32));
    let over = b.cmp(CmpOp::Eq, next_slot, zero);
    let flip = b.select(over, one, zero);
    b.binary(BinaryOp::Xor, parity, flip)
}
