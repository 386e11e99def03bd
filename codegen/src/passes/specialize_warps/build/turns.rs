//! Programs of a block that take turns: the persistent loop in both partitions.

use super::{Partitioner, State};
use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, DType, Elem, Op, OpId, Type, Value};
use std::collections::HashMap;

/// The buffers of a ring that other programs use between two turns of one.
pub(super) struct OthersTurns {
    group: usize,
    /// Before the first turn of a program, and before each later one: i64.
    first: Value,
    later: Value,
}

impl Partitioner<'_> {
    /// Whether an op is the loop in which programs take turns.
    pub(super) fn has_turns(&self, id: OpId) -> bool {
        self.plan.turns.as_ref().is_some_and(|turns| turns.outer == id)
    }

    /// Clones the body of the persistent loop into `to` for each program of the block that has this iteration: `index`,
    /// and the bound of the loop, are those of the first.
    pub(super) fn produce_turns(
        &mut self,
        id: OpId,
        to: BlockId,
        [index, end]: [Value; 2],
        states: &mut [State],
        map: &HashMap<Value, Value>,
    ) {
        let turns = self.plan.turns.as_ref().expect("internal compiler error: programs without turns");
        let i32 = Type::scalar(DType::I32);
        let (from, groups) = (self.func.op(id).regions[0], self.groups_in(id));
        let own_index = self.func.block(from).params[0];
        let replicas = self.plan.replicas;
        let mut b = self.builder(to);
        let bounds = [0, replicas, 1].map(|n| b.int(i64::from(n), DType::I32));
        let mut operands = bounds.to_vec();
        operands.extend(states_of(&groups, states));
        let region = self.func.add_block();
        let number = self.func.add_param(region, i32.clone());
        let params: Vec<Value> =
            groups.iter().flat_map(|_| [(); 2]).map(|()| self.func.add_param(region, i32.clone())).collect();
        let mut before = states.to_vec();
        set_states(&groups, &mut before, &params);

        let ty = self.func.ty(index).clone();
        let mut b = self.builder(region);
        let blocks = blocks(&mut b, replicas);
        let apart = b.binary(BinaryOp::Mul, number, blocks);
        let offset = match ty.elem() {
            Some(Elem::Num(dtype)) => b.cast(apart, dtype),
            _ => apart,
        };
        let index = b.binary(BinaryOp::Add, index, offset);
        let exists = b.cmp(CmpOp::Lt, index, end);
        let mut own = map.clone();
        own.insert(own_index, index);
        let mut copies = HashMap::new();
        for &v in &turns.outside {
            let copy = self.copy_for(region, v, apart, map, &mut copies);
            own.insert(v, copy);
        }
        let [turn, skip] = [0, 1].map(|_| self.func.add_block());
        let mut after = before.clone();
        self.apart = Some(apart);
        self.produce(from, turn, &mut after, &mut own);
        self.apart = None;
        for (block, states) in [(turn, &after), (skip, &before)] {
            let values: Vec<Value> = states_of(&groups, states).collect();
            self.builder(block).op(Op::Yield, &values, &[]);
        }
        let types = vec![i32; params.len()];
        let loc = self.loc.clone();
        let branch = self.func.append(region, Op::If, vec![exists], types.clone(), vec![turn, skip], loc.clone());
        let results = self.func.op(branch).results.clone();
        self.builder(region).op(Op::Yield, &results, &[]);
        let all = self.func.append(to, Op::PLAIN_FOR, operands, types, vec![region], loc);
        let results = self.func.op(all).results.clone();
        set_states(&groups, states, &results);
    }

    /// Computes, before the persistent loop, how many buffers the other programs use between two turns of a consumer.
    pub(super) fn others_turns(&mut self, id: OpId, groups: &[usize]) -> Vec<OthersTurns> {
        let turns = self.plan.turns.as_ref().expect("internal compiler error: programs without turns");
        let mut loads: Vec<(BlockId, usize)> =
            self.plan.blocks.iter().map(|(&block, (group, _))| (block, *group)).collect();
        loads.sort();
        let (loc, replicas) = (self.loc.clone(), self.plan.replicas);
        let mut b = Builder::before(self.func, id, loc);
        let (program, in_grid) = (b.program_id(0), blocks(&mut b, replicas));
        let number = b.binary(BinaryOp::Div, program, in_grid);
        let number = b.cast(number, DType::I64);
        let others = b.int(i64::from(replicas) - 1, DType::I64);
        let of_group = |b: &mut Builder, group: usize| {
            let mut fills = b.int(0, DType::I64);
            for (block, _) in loads.iter().filter(|(_, other)| *other == group) {
                let mut product = b.int(1, DType::I64);
                for &inner in &turns.loops[block] {
                    let iterations = iterations(b, inner);
                    product = b.binary(BinaryOp::Mul, product, iterations);
                }
                fills = b.binary(BinaryOp::Add, fills, product);
            }
            fills
        };
        let of_groups = groups.iter().map(|&group| {
            let fills = of_group(&mut b, group);
            let first = b.binary(BinaryOp::Mul, number, fills);
            OthersTurns { group, first, later: b.binary(BinaryOp::Mul, others, fills) }
        });
        of_groups.collect()
    }

    /// Makes a consumer wait for its turn at the start of the persistent loop's body, and skip the buffers of the
    /// others; after the last loop with loads, the next program has its turn. Returns what the body yields for the turns
    /// of others.
    pub(super) fn consume_turns(&mut self, id: OpId, others: &[OthersTurns], states: &mut [State]) -> Vec<Value> {
        let region = self.func.op(id).regions[0];
        let ops = self.func.block(region).ops.clone();
        let last = ops.iter().rev().find(|&&op| !self.groups_in(op).is_empty()).copied();
        let mut wait = Vec::new();
        let mut skipped = Vec::new();
        for OthersTurns { group, first, .. } in others {
            self.func.add_operands(id, &[*first]);
            let count = self.func.add_param(region, Type::scalar(DType::I64));
            self.func.add_result(id, Type::scalar(DType::I64));
            let State { slot, parity } = states[*group];
            for (number, ring) in self.plan.groups[*group].rings.iter().enumerate() {
                let values = &self.rings[*group][number];
                if let Some(empty) = values.empty.filter(|_| ring.tracker == number) {
                    wait.extend([values.full, empty, slot, parity, count]);
                }
            }
            skipped.push((*group, count));
        }
        let loc = self.loc.clone();
        let mut b = Builder::before(self.func, ops[0], loc.clone());
        b.op(Op::PingpongWait, &wait, &[]);
        for (group, count) in skipped {
            let State { slot, parity } = states[group];
            let depth = b.int(i64::from(self.plan.depth(group)), DType::I64);
            let (slot, two) = (b.cast(slot, DType::I64), b.int(2, DType::I64));
            let position = b.binary(BinaryOp::Add, slot, count);
            let (next, rounds) = (b.binary(BinaryOp::Rem, position, depth), b.binary(BinaryOp::Div, position, depth));
            let flip = b.binary(BinaryOp::Rem, rounds, two);
            let (slot, flip) = (b.cast(next, DType::I32), b.cast(flip, DType::I32));
            states[group] = State { slot, parity: b.binary(BinaryOp::Xor, parity, flip) };
        }
        let last = last.expect("internal compiler error: turns without loads");
        Builder::after(self.func, last, loc).op(Op::PingpongArrive, &[], &[]);
        others.iter().map(|others| others.later).collect()
    }
}

/// The blocks of the grid. Program `i` shares its block with those that are multiples of this number apart.
fn blocks(b: &mut Builder, replicas: u32) -> Value {
    let (programs, replicas) = (b.num_programs(0), b.int(replicas.into(), DType::I32));
    b.binary(BinaryOp::Div, programs, replicas)
}

/// The iterations of a loop, whose bounds are constants or values from before `b`, in i64.
fn iterations(b: &mut Builder, id: OpId) -> Value {
    let bounds: Vec<Value> = b.func.op(id).operands[..3].to_vec();
    let [start, end, step] = [0, 1, 2].map(|i| match b.func.constant_int(bounds[i]) {
        Some(n) => b.int(n, DType::I64),
        None => b.cast(bounds[i], DType::I64),
    });
    let (zero, one) = (b.int(0, DType::I64), b.int(1, DType::I64));
    let length = b.binary(BinaryOp::Sub, end, start);
    let length = b.binary(BinaryOp::Max, length, zero);
    let last = b.binary(BinaryOp::Sub, step, one);
    let rounded = b.binary(BinaryOp::Add, length, last);
    b.binary(BinaryOp::Div, rounded, step)
}

/// Slots and parities of ring groups.
fn states_of(groups: &[usize], states: &[State]) -> impl Iterator<Item = Value> {
    groups.iter().flat_map(|&g| [states[g].slot, states[g].parity])
}

fn set_states(groups: &[usize], states: &mut [State], values: &[Value]) {
    for (&g, pair) in groups.iter().zip(values.chunks(2)) {
        states[g] = State { slot: pair[0], parity: pair[1] };
    }
}
