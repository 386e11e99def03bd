//! Software-pipelines loads: prefetches tiles into multi-buffered shared memory.
//!
//! Does: replaces the loads to which a schedule gives rings, by asynchronous copies into the rings: `async_copy` for
//! views, `async_load` for tiles of pointers, `tma_load` where the schedule says so, with one mbarrier per stage. With
//! `n` stages from the loads to the main stage, the copies of the first `n − 1` iterations come before the loop
//! (prologue); each iteration then issues the copies of the iteration `n − 1` ahead and waits for its own. Where an
//! address depends on a loaded value (an index of a gather, an entry of a page table), that value is loaded one more
//! iteration ahead. Dots read the ring directly; other users read it by `local_load`.
//! Requires: stage *schedule*.
//! Keeps: results. Barriers other than those of the rings are placed later.
//! Does not: choose. [`crate::schedule`] does. Loops of a partition have no such loads.

use crate::ir::nested::copy_slice;
use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, DType, Def, Func, Op, OpId, Type, Value};
use crate::schedule::candidates::{Candidate, ahead_ops, scheduled_loads};
use crate::schedule::stages;
use crate::target::GpuArch;
use std::collections::HashMap;

/// Runs the pass.
///
/// # Errors
/// The load of a schedule that cannot be prefetched, and why; rings that exceed shared memory.
pub fn run(func: &mut Func, arch: GpuArch) -> Result<(), String> {
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    for id in loops {
        let region = func.op(id).regions[0];
        let Some(main) = stages::main_stage(func, region) else { continue };
        let loads = scheduled_loads(func, region, arch)?;
        let Some(first) = loads.first() else { continue };
        let stage_of = |c: &Candidate| func.op(c.load).place.map_or(main, |place| place.stage);
        let ahead = stage_of(first);
        if let Some(other) = loads.iter().find(|c| stage_of(c) != ahead) {
            let [a, b] = [first, other].map(|c| func.op(c.load).loc.clone());
            return Err(format!("the loads at {a} and {b} are of one loop, and should be in one stage"));
        }
        if ahead >= main {
            let loc = &func.op(first.load).loc;
            return Err(format!(
                "the load at {loc} fills a ring, and should be in a stage before the main stage {main}"
            ));
        }
        Pipeline::new(func, id, main, main - ahead + 1).build(&loads);
    }
    Ok(())
}

struct Pipeline<'f> {
    func: &'f mut Func,
    id: OpId,
    region: BlockId,
    /// The main stage of the loop.
    main: u32,
    /// From the stage of the loads to the main stage, both included.
    stages: u32,
    /// The carried values that addresses depend on, by index.
    address_values: Vec<usize>,
    /// The loads that addresses depend on, in the order of the body.
    index_loads: Vec<OpId>,
    /// The distinct depths of the rings: rings of the same depth share their slot counters.
    depths: Vec<u32>,
    /// The full mbarriers, which count the bytes of the TMA copies of an iteration, one per buffer of the shallowest
    /// ring.
    full: Option<Value>,
}

/// The values from which an iteration's addresses are computed.
#[derive(Clone)]
struct Iteration {
    index: Value,
    /// Of `Pipeline::address_values`.
    carried: Vec<Value>,
    /// Results of `Pipeline::index_loads`.
    loaded: Vec<Value>,
}

impl Iteration {
    fn values(&self) -> Vec<Value> {
        [vec![self.index], self.carried.clone(), self.loaded.clone()].concat()
    }
}

impl<'f> Pipeline<'f> {
    fn new(func: &'f mut Func, id: OpId, main: u32, stages: u32) -> Pipeline<'f> {
        let region = func.op(id).regions[0];
        let (address_values, index_loads, depths) = (Vec::new(), Vec::new(), Vec::new());
        Pipeline { func, id, region, main, stages, address_values, index_loads, depths, full: None }
    }

    /// Finds the carried values and the loads that addresses depend on.
    fn find_address_values(&mut self, candidates: &[Candidate]) {
        // The first operands of a load are its address and its mask.
        let addresses = candidates.iter().flat_map(|c| self.func.op(c.load).operands.iter().copied().take(2));
        let addresses: Vec<Value> = addresses.collect();
        let ops = ahead_ops(self.func, self.region, addresses.iter().copied());
        let used: Vec<Value> =
            ops.iter().flat_map(|&op| crate::ir::nested::uses(self.func, op)).chain(addresses).collect();
        let yields = self.yields().to_vec();
        let mut carried: Vec<usize> = Vec::new();
        // Carried values of carried values: `ahead_ops` has followed them through the yields.
        let mut values = used;
        while let Some(v) = values.pop() {
            if let Def::Param(block, index) = self.func.value(v).def
                && block == self.region
                && index > 0
                && !carried.contains(&(index - 1))
            {
                carried.push(index - 1);
                values.push(yields[index - 1]);
            }
        }
        carried.sort_unstable();
        self.address_values = carried;
        self.index_loads = ops.into_iter().filter(|&op| matches!(self.func.op(op).op, Op::Load { .. })).collect();
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
        self.find_address_values(candidates);
        self.depths = candidates.iter().map(|c| c.depth).collect();
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
        let lower = self.func.op(self.id).operands[0];
        let inits = self.address_values.iter().map(|&i| self.func.op(self.id).operands[3 + i]).collect();
        let mut ahead = self.load_indices(scratch, lower, inits, upper);
        for stage in 0..self.stages - 1 {
            let mut b = Builder::new(self.func, scratch, loc.clone());
            let slot = b.int(i64::from(stage), DType::I32);
            let slots = vec![slot; self.depths.len()];
            ahead = self.issue(scratch, candidates, &rings, &ahead, &slots, upper, step);
        }
        let mut b = Builder::new(self.func, scratch, loc.clone());
        let read = b.int(0, DType::I32);
        let write = b.int(i64::from(self.stages - 1), DType::I32);
        let prologue = self.func.take_ops(scratch);
        self.func.insert(self.func.parent_block(self.id), self.func.position(self.id), &prologue);

        // The loop carries the values of the prefetched iteration, the slots to read, and the slots to write.
        let mut inits = ahead.values();
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
        let (carried, rest) = params[1..].split_at(self.address_values.len());
        let (loaded, slots) = rest.split_at(self.index_loads.len());
        let ahead = Iteration { index: params[0], carried: carried.to_vec(), loaded: loaded.to_vec() };
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
        let next = self.issue(top, candidates, &rings, &ahead, writes, upper, step);
        let mut b = Builder::new(self.func, top, loc.clone());
        let depths = self.depths.iter().chain(&self.depths);
        let mut next_slots: Vec<Value> =
            slots.iter().zip(depths).map(|(&s, &depth)| next_slot(&mut b, s, depth)).collect();
        if let Some(&parity) = parity.first() {
            next_slots.push(next_parity(&mut b, parity, next_slots[0]));
        }
        let mut views = Vec::new();
        for (c, &ring) in candidates.iter().zip(&rings) {
            let read = reads[counter(&self.depths, c.depth)];
            let id = b.op(Op::LocalSlot, &[ring, read], std::slice::from_ref(&c.buffer));
            let slot = b.func.result(id);
            views.push(id);
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
        for view in views {
            stages::place_view(self.func, self.region, Some(self.main), view);
        }
        let last = *self.func.block(self.region).ops.last().expect("internal compiler error: an empty loop");
        self.func.add_operands(last, &[next.values(), next_slots].concat());

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
                let mut ring = vec![c.depth as usize];
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

    /// The values of an iteration, given its index and carried values: performs its index loads, if it exists.
    fn load_indices(&mut self, block: BlockId, index: Value, carried: Vec<Value>, upper: Value) -> Iteration {
        let mut iteration = Iteration { index, carried, loaded: Vec::new() };
        if self.index_loads.is_empty() {
            return iteration;
        }
        let loc = self.func.op(self.id).loc.clone();
        let exists = Builder::new(self.func, block, loc).cmp(CmpOp::Lt, index, upper);
        let mut map = self.values_at(&iteration);
        for load in self.index_loads.clone() {
            let data = self.func.op(load).clone();
            let mut operands: Vec<Value> =
                data.operands.iter().map(|&v| self.clone_slice(block, v, &mut map)).collect();
            let (pointers, tile) = (self.func.ty(operands[0]).clone(), self.func.ty(data.results[0]).clone());
            let mut b = Builder::new(self.func, block, data.loc);
            let exists = match pointers.is_tensor() {
                true => {
                    let id = b.op(Op::Splat, &[exists], &[pointers.with_elem(DType::Bool)]);
                    b.func.result(id)
                }
                false => exists,
            };
            match operands.get(1) {
                Some(&mask) => operands[1] = b.binary(BinaryOp::And, mask, exists),
                None => operands.push(exists),
            }
            let id = b.op(data.op, &operands, &[tile]);
            let loaded = b.func.result(id);
            map.insert(data.results[0], loaded);
            iteration.loaded.push(loaded);
        }
        iteration
    }

    /// What the index, the carried values and the index loads of the loop body are in an iteration.
    fn values_at(&self, iteration: &Iteration) -> HashMap<Value, Value> {
        let params = &self.func.block(self.region).params;
        let mut map = HashMap::from([(params[0], iteration.index)]);
        map.extend(self.address_values.iter().zip(&iteration.carried).map(|(&i, &v)| (params[1 + i], v)));
        let loads = self.index_loads.iter().map(|&load| self.func.result(load));
        map.extend(loads.zip(iteration.loaded.iter().copied()));
        map
    }

    /// Issues the copies of one iteration, predicated on its existence. Returns the next iteration.
    fn issue(
        &mut self,
        block: BlockId,
        candidates: &[Candidate],
        rings: &[Value],
        iteration: &Iteration,
        slots: &[Value],
        upper: Value,
        step: Value,
    ) -> Iteration {
        let loc = self.func.op(self.id).loc.clone();
        let mut map = self.values_at(iteration);
        let mut b = Builder::new(self.func, block, loc.clone());
        let exists = b.cmp(CmpOp::Lt, iteration.index, upper);
        if let Some(full) = self.full {
            let bytes = candidates.iter().filter(|c| c.tma).map(|c| c.buffer_bytes() as u32).sum();
            b.op(Op::MbarrierExpect { bytes }, &[full, slots[0], exists], &[]);
        }
        for (c, &ring) in candidates.iter().zip(rings) {
            let load = self.func.op(c.load).clone();
            // The view, or the pointers and their mask.
            let address: Vec<Value> =
                load.operands.iter().take(2).map(|&v| self.clone_slice(block, v, &mut map)).collect();
            let mut b = Builder::new(self.func, block, load.loc);
            let slot = slots[counter(&self.depths, c.depth)];
            let id = b.op(Op::LocalSlot, &[ring, slot], std::slice::from_ref(&c.buffer));
            let buffer = b.func.result(id);
            match (load.op, self.full.filter(|_| c.tma)) {
                (Op::LoadView { boundary, .. }, Some(full)) => {
                    b.op(Op::TmaLoad { boundary, ctas: None }, &[address[0], buffer, full, slots[0], exists], &[])
                }
                (Op::LoadView { boundary, padding, .. }, None) => {
                    b.op(Op::AsyncCopy { boundary, padding }, &[address[0], buffer, exists], &[])
                }
                _ => {
                    let operands = [&[address[0], buffer, exists], &address[1..]].concat();
                    b.op(Op::AsyncLoad { vector: c.vector }, &operands, &[])
                }
            };
        }
        let yields: Vec<Value> = self.address_values.iter().map(|&i| self.yields()[i]).collect();
        let carried = yields.into_iter().map(|y| self.clone_slice(block, y, &mut map)).collect();
        let mut b = Builder::new(self.func, block, loc);
        if candidates.iter().any(|c| !c.tma) {
            b.op(Op::AsyncCommit, &[], &[]);
        }
        let index = b.binary(BinaryOp::Add, iteration.index, step);
        self.load_indices(block, index, carried, upper)
    }

    /// Clones the computation of a value of the loop body, for the iteration that `map` describes.
    fn clone_slice(&mut self, block: BlockId, v: Value, map: &mut HashMap<Value, Value>) -> Value {
        let region = self.region;
        copy_slice(self.func, v, map, |func, id| func.is_in(id, region), |func, copy| func.push(block, copy))
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
