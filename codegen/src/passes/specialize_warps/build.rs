//! Builds the consumer and the producer partition.

mod dynamic;
mod refills;
mod turns;

use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, DType, Func, Loc, Op, OpId, Type, Value};
use crate::schedule::Slice;
use crate::schedule::candidates::Candidate;
use crate::schedule::partitions::{Plan, RingGroup};
use crate::schedule::stages;
use std::collections::HashMap;

/// The state of a ring group: the next slot, and the parity of its phase, as two i32.
#[derive(Clone, Copy)]
struct State {
    slot: Value,
    parity: Value,
}

/// The values of a ring: its buffers and its mbarriers.
struct RingValues {
    ring: Value,
    full: Value,
    /// `None` for a buffer that is filled once.
    empty: Option<Value>,
}

struct Partitioner<'a> {
    func: &'a mut Func,
    plan: &'a Plan,
    slice: &'a Slice,
    /// The buffers and mbarriers of each ring, by group, then by ring.
    rings: Vec<Vec<RingValues>>,
    /// If programs take turns: by how much `program_id(0)` of the one for which the producer loads is above the first's.
    apart: Option<Value>,
    /// How the producer of a dynamic loop tells consumers which iteration follows.
    taken: Option<dynamic::Taken>,
    /// Loads that the producer issues after the first one of the loops that follow.
    refills: Option<refills::Refills>,
    loc: Loc,
}

/// Splits the body of the kernel into partitions.
pub(super) fn build(func: &mut Func, plan: &Plan, slice: &Slice) {
    let loc = func.loc.clone();
    let (consume, produce, head) = (func.add_block(), func.add_block(), func.add_block());
    let mut partitioner =
        Partitioner { func, plan, slice, rings: Vec::new(), apart: None, taken: None, refills: None, loc };
    partitioner.rings(head);

    let mut start = partitioner.states(produce, 1);
    let body = partitioner.func.body;
    partitioner.produce(body, produce, &mut start, &mut HashMap::new());
    partitioner.end(produce);

    // The original body becomes the consumer partition.
    let mut ops = partitioner.func.take_ops(body);
    let ret = ops.pop().expect("internal compiler error: a kernel without a terminator");
    let mut start = partitioner.states(consume, 0);
    partitioner.func.insert(consume, partitioner.func.block(consume).ops.len(), &ops);
    partitioner.consume(consume, body, None, &mut start);
    partitioner.end(consume);

    let (warps, registers, loc) = (plan.warps, plan.registers(), partitioner.loc.clone());
    let func = partitioner.func;
    let replicas = Some(plan.replicas).filter(|&count| count > 1);
    let op = Op::WarpSpecialize { warps, producers: 1, registers, replicas };
    let split = func.create_op(op, vec![], vec![], vec![consume, produce], loc.clone());
    let mut ops = func.take_ops(head);
    ops.push(split);
    if plan.multicasts() {
        // The shared memory of a CTA exists until no other arrives there.
        ops.push(func.create_op(Op::ClusterBarrier, vec![], vec![], vec![], loc));
    }
    ops.push(ret);
    func.set_ops(body, &ops);
}

impl Partitioner<'_> {
    fn builder(&mut self, block: BlockId) -> Builder<'_> {
        Builder::new(self.func, block, self.loc.clone())
    }

    /// Allocates rings and mbarriers before the partitions.
    fn rings(&mut self, block: BlockId) {
        for (number, group) in self.plan.groups.iter().enumerate() {
            let count = self.plan.depth(number) as usize;
            let mut values: Vec<RingValues> = Vec::new();
            for ring in &group.rings {
                let Type::Shared { shape, elem, layout } = ring.buffer.clone() else {
                    panic!("internal compiler error: a buffer of another type")
                };
                let ty = Type::Shared { shape: [vec![count], shape].concat(), elem, layout };
                let one = |this: &mut Self, op: Op, ty: Type| {
                    let id = this.builder(block).op(op, &[], &[ty]);
                    this.func.result(id)
                };
                let barriers = Type::Barrier { count };
                // Arrivals per phase: of the thread that sets the expected bytes, or of each thread of the copying
                // warp.
                let arrivals = if ring.tma { 1 } else { 32 };
                let ctas = self.plan.releasing_ctas(number, values.len()).unwrap_or(1);
                let readers = self.plan.readers(number) * ring.arriving_lanes() * ctas;
                let buffers = one(self, Op::LocalAlloc, ty);
                if let Some(tracker) = values.get(ring.tracker) {
                    let RingValues { full, empty, .. } = *tracker;
                    values.push(RingValues { ring: buffers, full, empty });
                    continue;
                }
                values.push(RingValues {
                    ring: buffers,
                    full: one(self, Op::MbarrierAlloc { arrivals }, barriers.clone()),
                    empty: group.is_refilled.then(|| one(self, Op::MbarrierAlloc { arrivals: readers }, barriers)),
                });
            }
            self.rings.push(values);
        }
        self.taken = self.plan.dynamic.map(|_| self.allocate_taken(block));
        // Other CTAs of the cluster copy to the buffers, and arrive at the mbarriers.
        let barrier =
            if self.plan.multicasts() { Op::ClusterBarrier } else { Op::BlockBarrier { id: 0, threads: None } };
        self.builder(block).op(barrier, &[], &[]);
    }

    /// The initial state of each group, with the parity of a producer (1) or consumer (0).
    fn states(&mut self, block: BlockId, parity: i64) -> Vec<State> {
        (0..self.plan.groups.len())
            .map(|group| {
                let of_replica = self.plan.groups[group].replicated.then_some(i64::from(self.plan.replicas));
                let mut b = self.builder(block);
                let slot = match of_replica {
                    Some(count) => {
                        let (id, count) = (b.program_id(0), b.int(count, DType::I32));
                        b.binary(BinaryOp::Rem, id, count)
                    }
                    None => b.int(0, DType::I32),
                };
                State { slot, parity: b.int(parity, DType::I32) }
            })
            .collect()
    }

    fn end(&mut self, block: BlockId) {
        self.builder(block).op(Op::Yield, &[], &[]);
    }

    /// The groups that blocks inside of an op use.
    fn groups_in(&self, id: OpId) -> Vec<usize> {
        let inside = self.func.op(id).regions.iter().flat_map(|&r| self.func.walk_from(r)).chain([id]);
        let blocks = inside.flat_map(|op| &self.func.op(op).regions);
        let mut groups: Vec<usize> = blocks.filter_map(|block| Some(self.plan.blocks.get(block)?.0)).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// The state of a group after its block has run: the next slot, and the flipped parity where the ring wraps.
    fn advance(&mut self, block: BlockId, group: usize, state: State) -> State {
        let depth = i64::from(self.plan.depth(group));
        let replicated = self.plan.groups[group].replicated;
        let mut b = self.builder(block);
        if replicated {
            let one = b.int(1, DType::I32);
            return State { slot: state.slot, parity: b.binary(BinaryOp::Xor, state.parity, one) };
        }
        let (zero, one, end) = (b.int(0, DType::I32), b.int(1, DType::I32), b.int(depth, DType::I32));
        let next = b.binary(BinaryOp::Add, state.slot, one);
        let wraps = b.cmp(CmpOp::Eq, next, end);
        let slot = b.select(wraps, zero, next);
        let flip = b.select(wraps, one, zero);
        State { slot, parity: b.binary(BinaryOp::Xor, state.parity, flip) }
    }

    // The producer.

    /// Clones the slice of `from` into `to`.
    fn produce(&mut self, from: BlockId, to: BlockId, states: &mut [State], map: &mut HashMap<Value, Value>) {
        for id in self.func.block(from).ops.clone() {
            if self.slice.loads.contains(&id) {
                match self.is_refill(id) {
                    true => self.defer_refill(to, id, states, map),
                    false => self.produce_loads(to, id, states, map),
                }
                self.refill_in_loop(from, to, states, map);
            } else if self.slice.ops.contains(&id) && self.plan.dynamic.is_none_or(|(_, index)| index != id) {
                let data = self.func.op(id).clone();
                let operands = data.operands.iter().map(|v| *map.get(v).unwrap_or(v)).collect();
                let types = data.results.iter().map(|&v| self.func.ty(v).clone()).collect();
                let apart = self.apart.filter(|_| data.op == (Op::ProgramId { axis: 0 }));
                let copy = self.func.append(to, data.op, operands, types, vec![], data.loc);
                let mut results = self.func.op(copy).results.clone();
                if let Some(apart) = apart {
                    results[0] = self.builder(to).binary(BinaryOp::Add, results[0], apart);
                }
                map.extend(data.results.iter().copied().zip(results));
            } else if self.slice.control.contains(&id) {
                self.refill_before(id, to, states, map);
                match self.func.op(id).op {
                    Op::For { .. } if self.is_dynamic(id) => self.produce_dynamic(id, to, states, map),
                    Op::For { .. } => self.produce_loop(id, to, states, map),
                    _ => self.produce_if(id, to, states, map),
                }
            }
        }
        self.refill_after_loops(from, to, states, map);
        if let Some(&(group, _)) = self.plan.blocks.get(&from) {
            states[group] = self.advance(to, group, states[group]);
        }
    }

    /// A load, or one for each program of the block where these differ.
    fn produce_loads(&mut self, to: BlockId, id: OpId, states: &[State], map: &HashMap<Value, Value>) {
        let (group, _) = self.ring_of(id);
        match self.plan.groups[group].replicated {
            true => self.produce_for_each(to, id, states, map),
            false => self.produce_load(to, id, states, map),
        }
    }

    /// Indices of the carried values or results of an op that the producer keeps.
    fn kept(&self, id: OpId) -> Vec<usize> {
        self.slice.carried.get(&id).map_or(Vec::new(), |set| set.iter().copied().collect())
    }

    fn produce_loop(&mut self, id: OpId, to: BlockId, states: &mut [State], map: &mut HashMap<Value, Value>) {
        let data = self.func.op(id).clone();
        let (from, kept, groups) = (data.regions[0], self.kept(id), self.groups_in(id));
        let params = self.func.block(from).params.clone();
        let at = |map: &HashMap<Value, Value>, v: Value| *map.get(&v).unwrap_or(&v);
        let mut operands: Vec<Value> = data.operands[..3].iter().map(|&v| at(map, v)).collect();
        operands.extend(kept.iter().map(|&i| at(map, data.operands[3 + i])));
        operands.extend(groups.iter().flat_map(|&g| [states[g].slot, states[g].parity]));
        let types: Vec<Type> = operands[3..].iter().map(|&v| self.func.ty(v).clone()).collect();

        let region = self.func.add_block();
        let index = self.func.ty(params[0]).clone();
        let index = self.func.add_param(region, index);
        map.insert(params[0], index);
        let carried: Vec<Value> = types.iter().map(|ty| self.func.add_param(region, ty.clone())).collect();
        map.extend(kept.iter().zip(&carried).map(|(&i, &v)| (params[1 + i], v)));
        let mut inner = states.to_vec();
        for (&g, pair) in groups.iter().zip(carried[kept.len()..].chunks(2)) {
            inner[g] = State { slot: pair[0], parity: pair[1] };
        }
        self.enter_loop(from, region, index, operands[0]);
        match self.has_turns(id) {
            true => self.produce_turns(id, region, [index, operands[1]], &mut inner, map),
            false => self.produce(from, region, &mut inner, map),
        }
        self.leave_loop(from, to, [operands[0], operands[1]]);
        let last = *self.func.block(from).ops.last().expect("internal compiler error: an empty loop");
        let yields = self.func.op(last).operands.clone();
        let mut values: Vec<Value> = kept.iter().map(|&i| at(map, yields[i])).collect();
        values.extend(groups.iter().flat_map(|&g| [inner[g].slot, inner[g].parity]));
        self.builder(region).op(Op::Yield, &values, &[]);

        let copy = self.func.append(to, data.op, operands, types, vec![region], data.loc);
        let results = self.func.op(copy).results.clone();
        map.extend(kept.iter().zip(&results).map(|(&i, &v)| (data.results[i], v)));
        for (&g, pair) in groups.iter().zip(results[kept.len()..].chunks(2)) {
            states[g] = State { slot: pair[0], parity: pair[1] };
        }
    }

    fn produce_if(&mut self, id: OpId, to: BlockId, states: &mut [State], map: &mut HashMap<Value, Value>) {
        let data = self.func.op(id).clone();
        let (kept, groups) = (self.kept(id), self.groups_in(id));
        let mut types: Vec<Type> = kept.iter().map(|&i| self.func.ty(data.results[i]).clone()).collect();
        types.extend(vec![Type::scalar(DType::I32); 2 * groups.len()]);
        let mut regions = Vec::new();
        for &from in &data.regions {
            let region = self.func.add_block();
            let mut inner = states.to_vec();
            self.produce(from, region, &mut inner, map);
            let last = *self.func.block(from).ops.last().expect("internal compiler error: an empty branch");
            let yields = self.func.op(last).operands.clone();
            let mut values: Vec<Value> = kept.iter().map(|&i| *map.get(&yields[i]).unwrap_or(&yields[i])).collect();
            values.extend(groups.iter().flat_map(|&g| [inner[g].slot, inner[g].parity]));
            self.builder(region).op(Op::Yield, &values, &[]);
            regions.push(region);
        }
        let condition = *map.get(&data.operands[0]).unwrap_or(&data.operands[0]);
        let copy = self.func.append(to, data.op, vec![condition], types, regions, data.loc);
        let results = self.func.op(copy).results.clone();
        map.extend(kept.iter().zip(&results).map(|(&i, &v)| (data.results[i], v)));
        for (&g, pair) in groups.iter().zip(results[kept.len()..].chunks(2)) {
            states[g] = State { slot: pair[0], parity: pair[1] };
        }
    }

    /// A load for each program of the block.
    fn produce_for_each(&mut self, to: BlockId, load: OpId, states: &[State], map: &HashMap<Value, Value>) {
        let (group, _) = self.ring_of(load);
        let view = self.func.op(load).operands[0];
        for replica in 0..self.plan.replicas {
            let number = self.builder(to).int(i64::from(replica), DType::I32);
            let copy = self.copy_for(to, view, number, map, &mut HashMap::new());
            let mut own = map.clone();
            own.insert(view, copy);
            let mut states = states.to_vec();
            states[group].slot = number;
            self.produce_load(to, load, &states, &own);
        }
    }

    /// A value of the slice as another program of the block computes it, whose `program_id(0)` is by `apart` above that
    /// of the first.
    fn copy_for(
        &mut self,
        to: BlockId,
        v: Value,
        apart: Value,
        map: &HashMap<Value, Value>,
        copies: &mut HashMap<Value, Value>,
    ) -> Value {
        if let Some(&copy) = copies.get(&v) {
            return copy;
        }
        let first = *map.get(&v).unwrap_or(&v);
        // What a loop or branch gives is the same for all programs, or the plan has refused the load.
        let id = self.func.def_op(v).filter(|id| self.slice.differs(v) && self.slice.ops.contains(id));
        let copy = match id {
            Some(id) => {
                let data = self.func.op(id).clone();
                if data.op == (Op::ProgramId { axis: 0 }) {
                    self.builder(to).binary(BinaryOp::Add, first, apart)
                } else {
                    let operands: Vec<Value> =
                        data.operands.iter().map(|&v| self.copy_for(to, v, apart, map, copies)).collect();
                    let types: Vec<Type> = data.results.iter().map(|&v| self.func.ty(v).clone()).collect();
                    let op = self.func.append(to, data.op, operands, types, vec![], data.loc);
                    let at = data.results.iter().position(|&result| result == v);
                    self.func.op(op).results[at.expect("internal compiler error: a result of another op")]
                }
            }
            None => first,
        };
        copies.insert(v, copy);
        copy
    }

    /// One load: waits until its buffer is empty, and fills it.
    fn produce_load(&mut self, to: BlockId, load: OpId, states: &[State], map: &HashMap<Value, Value>) {
        let (group, number) = self.ring_of(load);
        let (state, ring) = (states[group], &self.plan.groups[group].rings[number]);
        let RingValues { ring: buffers, full, empty } = self.rings[group][number];
        let data = self.func.op(load).clone();
        let Op::LoadView { boundary, padding, .. } = data.op else {
            panic!("internal compiler error: a candidate that is not a load")
        };
        let view = map[&data.operands[0]];
        // One wait and one expected number of bytes for all rings that these mbarriers track.
        let RingGroup { rings, .. } = &self.plan.groups[group];
        let tracked: u32 = self.plan.groups[group].tracked_by(number).map(|i| rings[i].bytes).sum();
        let mut b = Builder::new(self.func, to, data.loc);
        if let Some(empty) = empty.filter(|_| ring.tracker == number) {
            b.op(Op::MbarrierWait, &[empty, state.slot, state.parity], &[]);
        }
        let slot = b.op(Op::LocalSlot, &[buffers, state.slot], std::slice::from_ref(&ring.buffer));
        let slot = b.func.result(slot);
        if ring.tma {
            if ring.tracker == number {
                b.op(Op::MbarrierExpect { bytes: tracked }, &[full, state.slot], &[]);
            }
            let ctas = ring.multicast.then_some(self.plan.ctas);
            b.op(Op::TmaLoad { boundary, ctas }, &[view, slot, full, state.slot], &[]);
        } else {
            b.op(Op::AsyncCopy { boundary, padding }, &[view, slot], &[]);
            b.op(Op::AsyncArrive { threads: 32 }, &[full, state.slot], &[]);
        }
    }

    /// The group of the ring that a load fills, and the index of the ring in it.
    fn ring_of(&self, load: OpId) -> (usize, usize) {
        let mut found = self.plan.blocks.values().filter_map(|(group, list)| {
            let number = list.iter().position(|c| c.load == load)?;
            Some((*group, number))
        });
        found.next().expect("internal compiler error: a load without a ring")
    }

    // The consumers.

    /// Replaces the loads of a block, which the plan knows as `planned`, by reads of their rings. `main` is the main stage
    /// of a loop's body.
    fn consume(&mut self, block: BlockId, planned: BlockId, main: Option<u32>, states: &mut [State]) {
        for id in self.func.block(block).ops.clone() {
            let groups = self.groups_in(id);
            if groups.is_empty() {
                continue;
            }
            match self.func.op(id).op {
                Op::For { .. } if self.is_dynamic(id) => self.consume_dynamic(id, &groups, states),
                Op::For { .. } => self.consume_loop(id, &groups, states),
                _ => self.consume_if(id, &groups, states),
            }
        }
        let plan = self.plan;
        let Some((group, candidates)) = plan.blocks.get(&planned) else { return };
        for number in 0..candidates.len() {
            self.consume_tracked(block, main, candidates, *group, number, states[*group]);
        }
        states[*group] = self.advance(block, *group, states[*group]);
    }

    fn consume_loop(&mut self, id: OpId, groups: &[usize], states: &mut [State]) {
        let region = self.func.op(id).regions[0];
        let i32 = Type::scalar(DType::I32);
        let others = if self.has_turns(id) { self.others_turns(id, groups) } else { Vec::new() };
        let mut inner = states.to_vec();
        let mut after = states.to_vec();
        for &g in groups {
            for v in [states[g].slot, states[g].parity] {
                self.func.add_operands(id, &[v]);
            }
            let [slot, parity] = [0, 1].map(|_| self.func.add_param(region, i32.clone()));
            inner[g] = State { slot, parity };
            let [slot, parity] = [0, 1].map(|_| self.func.add_result(id, i32.clone()));
            after[g] = State { slot, parity };
        }
        let later = if others.is_empty() { Vec::new() } else { self.consume_turns(id, &others, &mut inner) };
        let main = stages::main_stage(self.func, region);
        let last = self.func.terminator(region);
        self.func.detach(last);
        self.consume(region, region, main, &mut inner);
        self.func.push(region, last);
        for &g in groups {
            self.func.add_operands(last, &[inner[g].slot, inner[g].parity]);
        }
        self.func.add_operands(last, &later);
        states.copy_from_slice(&after);
    }

    fn consume_if(&mut self, id: OpId, groups: &[usize], states: &mut [State]) {
        for region in self.func.op(id).regions.clone() {
            let last = self.func.terminator(region);
            self.func.detach(last);
            let mut inner = states.to_vec();
            self.consume(region, region, None, &mut inner);
            self.func.push(region, last);
            for &g in groups {
                self.func.add_operands(last, &[inner[g].slot, inner[g].parity]);
            }
        }
        for &g in groups {
            let [slot, parity] = [0, 1].map(|_| self.func.add_result(id, Type::scalar(DType::I32)));
            states[g] = State { slot, parity };
        }
    }

    /// The loads that the mbarriers of one ring track: waits for their buffers before the first use, and releases them
    /// after the last.
    fn consume_tracked(
        &mut self,
        block: BlockId,
        main: Option<u32>,
        loads: &[Candidate],
        group: usize,
        tracker: usize,
        state: State,
    ) {
        let plan = self.plan;
        let tracked: Vec<usize> = plan.groups[group].tracked_by(tracker).collect();
        let Some(&first) = tracked.first() else { return };
        let tiles: Vec<Value> = tracked.iter().flat_map(|&number| self.tiles_of(&loads[number])).collect();
        let is_load = |op: &OpId| tracked.iter().any(|&i| loads[i].load == *op || loads[i].alloc == Some(*op));
        self.func.retain_ops(block, |op| !is_load(op));
        let loc = self.func.op(loads[first].load).loc.clone();
        let RingValues { full, empty, .. } = self.rings[group][tracker];
        let wait = self.func.create_op(
            Op::MbarrierWait,
            vec![full, state.slot, state.parity],
            Vec::new(),
            Vec::new(),
            loc.clone(),
        );
        let at = self.first_use(block, &tiles);
        self.func.insert(block, at, &[wait]);
        let (mut views, mut read_results) = (Vec::new(), Vec::new());
        for &number in &tracked {
            let (view, results) = self.consume_load(block, &loads[number], group, number, state);
            views.push(view);
            read_results.extend(results);
        }
        // Reads of ops behind come after those of the main stage.
        let places = read_results.iter().filter_map(|&v| self.func.op(self.func.def_op(v)?).place);
        let last_read =
            places.filter(|place| main.is_some_and(|main| place.stage > main)).max_by_key(|place| place.order);
        if let Some(empty) = empty {
            let (warps, lanes) = (plan.readers(group), plan.groups[group].rings[tracker].arriving_lanes());
            let operands = [vec![empty, state.slot], read_results].concat();
            let op = Op::MbarrierArrive { warps, lanes, ctas: plan.releasing_ctas(group, tracker) };
            let release = Builder::new(self.func, block, loc).op(op, &operands, &[]);
            self.func.set_place(release, last_read);
        }
        let behind: Vec<bool> = views.iter().map(|&view| stages::place_view(self.func, block, main, view)).collect();
        if behind.iter().all(|&behind| behind) {
            let place = self.func.op(views[0]).place;
            self.func.set_place(wait, place);
        }
    }

    /// The tile and the buffer that a load fills.
    fn tiles_of(&self, c: &Candidate) -> Vec<Value> {
        c.alloc.into_iter().chain([c.load]).map(|id| self.func.result(id)).collect()
    }

    /// Replaces a load by a view of its buffer, before the first use. Returns the view, and the values that are computed
    /// only after the buffer has been read.
    fn consume_load(
        &mut self,
        block: BlockId,
        c: &Candidate,
        group: usize,
        number: usize,
        state: State,
    ) -> (OpId, Vec<Value>) {
        let RingGroup { rings, .. } = &self.plan.groups[group];
        let buffers = self.rings[group][number].ring;
        let replaced = self.tiles_of(c);
        let loc = self.func.op(c.load).loc.clone();
        let scratch = self.func.add_block();
        let mut b = Builder::new(self.func, scratch, loc);
        let view = b.op(Op::LocalSlot, &[buffers, state.slot], std::slice::from_ref(&rings[number].buffer));
        let slot = b.func.result(view);
        let tile = b.func.result(c.load);
        let mut read_results = Vec::new();
        if c.in_registers {
            let ty = b.func.ty(tile).clone();
            let id = b.op(Op::LocalLoad, &[slot], &[ty]);
            read_results.push(b.func.result(id));
        }
        let at = self.first_use(block, &replaced);
        if let Some(alloc) = c.alloc {
            let buffer = self.func.result(alloc);
            self.func.replace_uses(buffer, slot);
        }
        if let Some(&loaded) = read_results.first() {
            self.func.replace_uses(tile, loaded);
        }
        let new = self.func.take_ops(scratch);
        self.func.insert(block, at, &new);
        read_results.extend(self.read_results(block, slot));
        (view, read_results)
    }

    /// The position in a block of the first op that uses one of these values, directly or in a region; the end of the
    /// block if none does.
    fn first_use(&self, block: BlockId, values: &[Value]) -> usize {
        let ops = &self.func.block(block).ops;
        let uses = |&id: &OpId| {
            let nested = self.func.op(id).regions.iter().flat_map(|&r| self.func.walk_from(r));
            std::iter::once(id).chain(nested).any(|op| self.func.op(op).operands.iter().any(|v| values.contains(v)))
        };
        ops.iter().position(uses).unwrap_or(ops.len())
    }

    /// The operands of the release of a buffer: values that are computed only after the buffer, or a view of it, has
    /// been read. Where regions of ops read it, these are the results of the last such op, and the buffer itself, because
    /// the op may have no results.
    fn read_results(&self, block: BlockId, buffer: Value) -> Vec<Value> {
        let mut derived = vec![buffer];
        let mut results = Vec::new();
        let mut of_regions = Vec::new();
        for &id in &self.func.block(block).ops {
            let data = self.func.op(id);
            let mut inside = data.regions.iter().flat_map(|&region| self.func.walk_from(region));
            if inside.any(|inner| self.func.op(inner).operands.iter().any(|v| derived.contains(v))) {
                of_regions = [&data.results[..], &[buffer]].concat();
                continue;
            }
            if !data.operands.iter().any(|v| derived.contains(v)) {
                continue;
            }
            match data.op {
                Op::LocalTrans { .. } | Op::Wgmma { .. } => derived.extend(&data.results),
                Op::WgmmaWait { .. } => {
                    let pairs = data.operands.iter().zip(&data.results);
                    results.extend(pairs.filter(|(v, _)| derived.contains(v)).map(|(_, &result)| result));
                }
                Op::MmaSync { .. } | Op::FmaDot | Op::LocalLoad => results.extend(&data.results),
                _ => {}
            }
        }
        results.extend(of_regions);
        results.sort();
        results.dedup();
        results
    }
}
