//! The problem of a loop from the IR.

use super::{Cause, Edge, Node, Problem, Task, Tile};
use crate::analysis::costs::{self, Cost, Executors, SHARED_LATENCY, copy_cost, cost, read_cost};
use crate::analysis::pipes::{Pipe, pipe};
use crate::analysis::registers::tile_registers;
use crate::ir::nested::uses;
use crate::ir::{BlockId, Def, Effects, Func, Op, OpId, Partition, Type, Value};
use crate::schedule::candidates::{Candidate, scheduled_loads};
use crate::schedule::partitions::Plan;
use crate::schedule::{overlap, stages};
use crate::target::{CompileOptions, GpuArch};
use std::collections::{BTreeMap, HashMap};

/// Warps of a warpgroup.
const WARPGROUP: u32 = 4;

impl Problem {
    /// The problem of a loop of a scheduled function.
    ///
    /// # Errors
    /// The op of the loop that has a body of its own, and its line; a schedule that cannot be carried out, and why.
    pub fn of(func: &Func, id: OpId, arch: GpuArch, options: &CompileOptions) -> Result<Problem, String> {
        let mut func = func.clone();
        let region = func.op(id).regions[0];
        require_single_block(&func, id)?;
        let loads = scheduled_loads(&mut func, region, arch)?;
        let plan = Plan::scheduled(&mut func, arch, options)?;
        let main = stages::main_stage(&func, region).unwrap_or(0);
        let is_produced = |c: &Candidate| func.op(c.load).place.is_some_and(|p| p.partition == Partition::Producer);
        let producer = loads.iter().any(is_produced);
        let (groups, warps) = match producer {
            true => {
                // Programs that take turns run their loops one after the other, each with loads of its own.
                let together = plan.as_ref().filter(|plan| plan.turns.is_none());
                let replicas = together.map_or(1, |plan| plan.replicas);
                ((options.num_warps / WARPGROUP).max(1) * replicas, WARPGROUP)
            }
            false => (1, options.num_warps),
        };
        let depth = loads.iter().map(|c| c.depth).max().unwrap_or(0);
        let plan = plan.filter(|_| producer);
        let stages_ahead =
            loads.iter().filter_map(|c| func.op(c.load).place).map(|p| main.saturating_sub(p.stage)).max();
        let mut problem = Problem {
            op: id,
            loc: func.op(id).loc.clone(),
            groups,
            warps,
            blocks: plan.as_ref().map_or(1, Plan::blocks_per_sm),
            producer,
            nodes: Vec::new(),
            edges: Vec::new(),
            stages_ahead: if producer { 0 } else { stages_ahead.unwrap_or(0) },
            depth,
            // Loops that share rings keep their depth: the schedule of one would change that of the others.
            depth_limit: match &plan {
                Some(plan) if plan.num_loops() == 1 => plan.stage_limit(&func, arch).max(depth),
                Some(_) | None => depth,
            },
            ring_bytes: loads.iter().map(|c| func.shared_bytes(&c.buffer) as u32).sum(),
            registers: overlap::register_limit(&func, id, options),
            register_floor: overlap::register_floor(&func, region),
            tiles: Vec::new(),
        };
        // Programs that share a block have tiles of their own.
        let sharing = if producer { (options.num_warps / WARPGROUP).max(1) } else { 1 };
        let executors = Executors { warps, groups: sharing };
        let build = Build { func: &func, region, main, arch, executors, loads: &loads, of_op: HashMap::new() };
        build.fill(&mut problem, options);
        Ok(problem)
    }
}

/// # Errors
/// An op with control flow of its own.
fn require_single_block(func: &Func, id: OpId) -> Result<(), String> {
    let loc = &func.op(id).loc;
    if !matches!(func.op(id).op, Op::For { .. }) {
        return Err(format!("the `{}` at {loc} is not a `for`: only these have a schedule", func.op(id).op.mnemonic()));
    }
    let has_body = |op: &&OpId| matches!(func.op(**op).op, Op::For { .. } | Op::While | Op::If);
    match func.block(func.op(id).regions[0]).ops.iter().find(has_body) {
        None => Ok(()),
        Some(&op) => Err(format!(
            "the loop at {loc} is not a single block: the `{}` at {} has a body of its own",
            func.op(op).op.mnemonic(),
            func.op(op).loc
        )),
    }
}

struct Build<'a> {
    func: &'a Func,
    region: BlockId,
    main: u32,
    arch: GpuArch,
    executors: Executors,
    loads: &'a [Candidate],
    /// The node of an op; of a load with a ring, that of its copy.
    of_op: HashMap<OpId, usize>,
}

/// A node that a value comes from, and how many iterations before.
type Source = (usize, u32);

impl Build<'_> {
    fn fill(mut self, problem: &mut Problem, options: &CompileOptions) {
        let mut reads = HashMap::new();
        for id in self.func.block(self.region).ops.clone() {
            if let Some(c) = self.loads.iter().find(|c| c.load == id) {
                let found = copy_cost(&c.buffer, c.tma, self.executors);
                self.add(problem, id, Task::Copy, Pipe::Copy, found);
                if c.in_registers {
                    let tile = self.func.result(id);
                    let found = read_cost(self.func, tile, self.arch, self.executors);
                    reads.insert(tile, self.add(problem, id, Task::Read, Pipe::LoadStore, found));
                }
            } else if self.takes_time(id) {
                let task = if matches!(self.func.op(id).op, Op::Wgmma { .. }) { Task::Mma } else { Task::Compute };
                let found = cost(self.func, id, self.arch, self.executors);
                self.add(problem, id, task, pipe(self.func, id).unwrap_or(Pipe::Control), found);
            }
        }
        for (number, node) in problem.nodes.iter().enumerate().filter(|(_, node)| node.task != Task::Read) {
            self.of_op.insert(node.op, number);
        }
        let mut orders = stages::orders(self.func, self.region);
        orders.sort_by_key(|(_, order)| *order);
        for node in &mut problem.nodes {
            node.position = orders.iter().position(|(id, _)| *id == node.op).unwrap_or(0);
        }
        let forbidden = !overlap::is_allowed(self.func, problem.op, options);
        let deferrable = overlap::accumulating_dots(self.func, self.region);
        for node in &mut problem.nodes {
            node.can_be_behind = !forbidden && self.can_be_behind(node);
            node.can_defer = !forbidden && deferrable.contains(&node.op);
        }
        let mut edges: BTreeMap<(usize, usize, Cause, u32, bool), u32> = BTreeMap::new();
        for edge in self.edges(&problem.nodes, &reads) {
            let key = (edge.from, edge.to, edge.cause, edge.distance, edge.all_groups);
            let delay = edges.entry(key).or_default();
            *delay = edge.delay.max(*delay);
        }
        let edge =
            |((from, to, cause, distance, all_groups), delay)| Edge { from, to, cause, delay, distance, all_groups };
        problem.edges = edges.into_iter().map(edge).collect();
        problem.tiles = self.tiles(problem);
    }

    fn add(&self, problem: &mut Problem, op: OpId, task: Task, pipe: Pipe, cost: Cost) -> usize {
        let data = self.func.op(op);
        let behind = task != Task::Copy && stages::is_behind(self.func, Some(self.main), op);
        problem.nodes.push(Node {
            op,
            mnemonic: data.op.mnemonic(),
            loc: data.loc.clone(),
            task,
            pipe,
            busy: cost.busy.ceil() as u32,
            latency: cost.latency.ceil() as u32,
            can_be_behind: false,
            can_defer: false,
            behind,
            position: 0,
            deferred: task == Task::Mma && !behind && stages::is_wait_deferred(self.func, op),
        });
        problem.nodes.len() - 1
    }

    /// Runs ahead of the main stage: a load with a ring, or a part of its address.
    fn is_ahead(&self, id: OpId) -> bool {
        let place = self.func.op(id).place;
        place.is_some_and(|place| place.stage < self.main || place.partition == Partition::Producer)
    }

    fn takes_time(&self, id: OpId) -> bool {
        let data = self.func.op(id);
        if self.is_ahead(id) || matches!(data.op, Op::Yield | Op::WgmmaWait { .. }) {
            return false;
        }
        self.func.effects(id) != Effects::Pure || cost(self.func, id, self.arch, self.executors) != Cost::default()
    }

    /// Whether the expander can run an op behind the main stage: arithmetic, and `wgmma` whose buffers live so long.
    fn can_be_behind(&self, node: &Node) -> bool {
        match node.task {
            Task::Copy | Task::Read => false,
            Task::Compute => self.func.effects(node.op) == Effects::Pure,
            Task::Mma => {
                let operands = &self.func.op(node.op).operands[..2];
                operands.iter().all(|&v| overlap::outlives_iteration(self.func, self.region, v))
            }
        }
    }

    /// The nodes that a value comes from, through ops that take no time and carried values.
    fn sources(&self, reads: &HashMap<Value, usize>, v: Value) -> Vec<Source> {
        let mut found = Vec::new();
        let mut seen = vec![(v, 0)];
        let mut next = 0;
        while let Some(&(v, distance)) = seen.get(next) {
            next += 1;
            let operands: Vec<(Value, u32)> = match self.func.value(v).def {
                Def::Param(block, index) if block == self.region && index > 0 => {
                    let end = self.func.terminator(self.region);
                    vec![(self.func.op(end).operands[index - 1], distance + 1)]
                }
                Def::Result(id, _) if self.func.is_in(id, self.region) => {
                    let node = reads.get(&v).or_else(|| self.of_op.get(&id));
                    let is_address = node.is_none() && self.is_ahead(id) && !self.is_ring(id);
                    match node {
                        Some(&node) => {
                            found.push((node, distance));
                            Vec::new()
                        }
                        None if is_address => Vec::new(),
                        None => {
                            // The buffer of a ring comes from the copy, not from the read of its tile.
                            let inner = uses(self.func, id).into_iter();
                            let copied = inner.filter_map(|v| {
                                let copy = self.func.def_op(v).filter(|_| self.is_ring(id));
                                match copy.and_then(|load| self.of_op.get(&load)) {
                                    Some(&copy) => {
                                        found.push((copy, distance));
                                        None
                                    }
                                    None => Some((v, distance)),
                                }
                            });
                            copied.collect()
                        }
                    }
                }
                Def::Result(..) | Def::Param(..) => Vec::new(),
            };
            // A value that is carried around twice comes from the same nodes.
            seen.extend(operands.into_iter().filter(|of| !seen.iter().any(|(v, _)| *v == of.0)).collect::<Vec<_>>());
        }
        found.sort();
        found.dedup();
        found
    }

    /// Whether an op is the buffer that a load with a ring fills.
    fn is_ring(&self, id: OpId) -> bool {
        self.loads.iter().any(|c| c.alloc == Some(id))
    }

    fn edges(&self, nodes: &[Node], reads: &HashMap<Value, usize>) -> Vec<Edge> {
        let mut edges = Vec::new();
        for (to, node) in nodes.iter().enumerate() {
            if node.task == Task::Read {
                let copy = self.of_op[&node.op];
                edges.extend(self.through_ring(nodes, copy, to));
                continue;
            }
            if node.task == Task::Copy {
                continue;
            }
            let mut used: Vec<Value> = uses(self.func, node.op).into_iter().collect();
            used.sort();
            for v in used {
                for (from, distance) in self.sources(reads, v) {
                    edges.extend(self.edge(nodes, v, (from, distance), to));
                }
            }
        }
        let memory: Vec<usize> = (0..nodes.len())
            .filter(|&i| nodes[i].task == Task::Compute && self.func.effects(nodes[i].op) != Effects::Pure)
            .filter(|&i| !matches!(self.func.op(nodes[i].op).op, Op::LocalAlloc))
            .collect();
        let effect =
            |from, to, distance| Edge { from, to, cause: Cause::Effect, delay: 0, distance, all_groups: false };
        edges.extend(memory.windows(2).map(|pair| effect(pair[0], pair[1], 0)));
        if let [first, .., last] = memory[..] {
            edges.push(effect(last, first, 1));
        }
        edges
    }

    /// The copy to a ring, a read of its buffer, and the next copy into that buffer.
    fn through_ring(&self, nodes: &[Node], copy: usize, reader: usize) -> [Edge; 2] {
        let filled = nodes[copy].busy + nodes[copy].latency;
        let read = match nodes[reader].task {
            // From the wait.
            Task::Mma => 0,
            Task::Copy | Task::Read | Task::Compute => nodes[reader].busy + nodes[reader].latency,
        };
        let delay = read + SHARED_LATENCY.ceil() as u32;
        [
            Edge { from: copy, to: reader, cause: Cause::Value, delay: filled, distance: 0, all_groups: true },
            Edge { from: reader, to: copy, cause: Cause::Ring, delay, distance: 0, all_groups: true },
        ]
    }

    /// The edges for an operand of `to` that comes from a node.
    fn edge(&self, nodes: &[Node], v: Value, (from, distance): Source, to: usize) -> Vec<Edge> {
        let (source, user) = (&nodes[from], &nodes[to]);
        let value = |delay| Edge { from, to, cause: Cause::Value, delay, distance, all_groups: false };
        let overwrite = Edge { cause: Cause::Overwrite, delay: 0, distance: 1, from: to, to: from, all_groups: false };
        let user_op = &self.func.op(user.op).op;
        let is_shared = matches!(self.func.ty(v), Type::Shared { .. });
        let several = self.executors.groups > 1;
        match source.task {
            Task::Copy => self.through_ring(nodes, from, to).into(),
            Task::Mma if user.task == Task::Mma && self.func.op(user.op).operands[2] == v && self.continues(v, to) => {
                vec![Edge { cause: Cause::Accumulate, ..value(source.busy) }]
            }
            Task::Mma => vec![value(0)],
            // A buffer that the loop fills itself: written after the last read of all groups, read after all have written.
            Task::Read | Task::Compute if is_shared => {
                let barrier = SHARED_LATENCY.ceil() as u32;
                let written = Edge { all_groups: several, ..value(source.busy + source.latency + barrier) };
                let read = if user.task == Task::Mma { barrier } else { barrier + user.busy + user.latency };
                let slots = self.func.op(source.op).place.and_then(|place| place.depth).unwrap_or(1);
                vec![written, Edge { delay: read, all_groups: several, distance: slots, ..overwrite }]
            }
            Task::Read | Task::Compute => {
                let cost = |node: &Node| Cost { busy: f64::from(node.busy), latency: f64::from(node.latency) };
                let source_op = match source.task {
                    Task::Read => &Op::LocalLoad,
                    _ => &self.func.op(source.op).op,
                };
                let delay = costs::delay((source_op, cost(source)), (user_op, cost(user))) as u32;
                let is_operand = user.task == Task::Mma && self.func.op(user.op).operands[2] != v && distance == 0;
                std::iter::once(value(delay)).chain(is_operand.then_some(overwrite)).collect()
            }
        }
    }

    /// Whether an accumulator has no other use than to be continued by this `wgmma`.
    fn continues(&self, v: Value, to: usize) -> bool {
        let dot = |id: OpId| self.of_op.get(&id) == Some(&to);
        match self.func.value(v).def {
            Def::Param(..) => {
                let users = self.func.uses(v);
                users.iter().all(|used| dot(used.op)) && self.carried_once(v)
            }
            Def::Result(..) => self.func.uses(v).len() == 1,
        }
    }

    /// Whether what a carried value becomes has no use in the iteration that computes it.
    fn carried_once(&self, param: Value) -> bool {
        let Def::Param(_, index) = self.func.value(param).def else { return false };
        let end = self.func.terminator(self.region);
        self.func.uses(self.func.op(end).operands[index - 1]).len() == 1
    }

    /// The tiles in registers that nodes define.
    fn tiles(&self, problem: &Problem) -> Vec<Tile> {
        let mut users: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for edge in problem.edges.iter().filter(|edge| edge.cause == Cause::Value && edge.distance == 0) {
            if problem.nodes[edge.to].can_be_behind {
                users.entry(edge.from).or_default().push(edge.to);
            }
        }
        let tile = |(from, users): (usize, Vec<usize>)| {
            let node = &problem.nodes[from];
            let registers = match node.task {
                Task::Copy => 0,
                Task::Read | Task::Mma | Task::Compute => {
                    self.func.op(node.op).results.iter().map(|&v| tile_registers(self.func, v)).sum()
                }
            };
            Tile { from, users, registers }
        };
        users.into_iter().map(tile).filter(|tile| tile.registers > 0).collect()
    }
}
