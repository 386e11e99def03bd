//! Dynamic loops: a `while` in both partitions, whose next index the producer takes from the counter and stores in shared
//! memory.

use super::{Partitioner, State};
use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, DType, Op, OpId, Type, Value};
use crate::layout::LinearLayout;
use std::collections::HashMap;

/// The index of the next iteration, with the mbarriers of its buffer.
#[derive(Clone, Copy)]
pub(super) struct Taken {
    buffer: Value,
    full: Value,
    empty: Value,
    zero: Value,
    one: Value,
}

impl Partitioner<'_> {
    pub(super) fn is_dynamic(&self, id: OpId) -> bool {
        self.plan.dynamic.is_some_and(|(outer, _)| outer == id)
    }

    pub(super) fn allocate_taken(&mut self, block: BlockId) -> Taken {
        let layout = self.func.intern_layout(LinearLayout::shared_row_major(&[1], &[0]));
        let readers = self.plan.warps * self.plan.replicas;
        let barrier = Type::Barrier { count: 1 };
        let mut b = self.builder(block);
        Taken {
            buffer: b.one(Op::LocalAlloc, &[], Type::Shared { shape: vec![1], elem: DType::I32, layout }),
            full: b.one(Op::MbarrierAlloc { arrivals: 1 }, &[], barrier.clone()),
            empty: b.one(Op::MbarrierAlloc { arrivals: readers }, &[], barrier),
            zero: b.int(0, DType::I32),
            one: b.int(1, DType::I32),
        }
    }

    /// The states of some groups as values.
    fn flat(groups: &[usize], states: &[State]) -> Vec<Value> {
        groups.iter().flat_map(|&g| [states[g].slot, states[g].parity]).collect()
    }

    fn set_states(groups: &[usize], states: &mut [State], values: &[Value]) {
        for (&g, pair) in groups.iter().zip(values.chunks(2)) {
            states[g] = State { slot: pair[0], parity: pair[1] };
        }
    }

    /// The first region of the `while`: whether the index, the first of the carried values, is below `end`.
    fn is_below_end(&mut self, end: Value, types: &[Type]) -> BlockId {
        let block = self.func.add_block();
        let params: Vec<Value> = types.iter().map(|ty| self.func.add_param(block, ty.clone())).collect();
        let mut b = self.builder(block);
        let below = b.cmp(CmpOp::Lt, params[0], end);
        b.op(Op::Condition, &[vec![below], params].concat(), &[]);
        block
    }

    /// Waits for the index of the next iteration, and reads it. The parity is that of the mbarrier `full`.
    fn read_taken(b: &mut Builder, taken: Taken, parity: Value) -> Value {
        b.op(Op::MbarrierWait, &[taken.full, taken.zero, parity], &[]);
        b.one(Op::TakenIndex, &[taken.buffer], Type::scalar(DType::I32))
    }

    pub(super) fn produce_dynamic(
        &mut self,
        id: OpId,
        to: BlockId,
        states: &mut [State],
        map: &mut HashMap<Value, Value>,
    ) {
        let (Some(taken), Some((_, of_index))) = (self.taken, self.plan.dynamic) else { return };
        let data = self.func.op(id).clone();
        let groups = self.groups_in(id);
        let at = |map: &HashMap<Value, Value>, v: Value| *map.get(&v).unwrap_or(&v);
        let [start, end, step] = [0, 1, 2].map(|i| at(map, data.operands[i]));
        let counter = self.func.op(of_index).operands[0];
        let operands = [vec![start, taken.zero], Self::flat(&groups, states)].concat();
        let types = vec![Type::scalar(DType::I32); operands.len()];
        let before = self.is_below_end(end, &types);

        let after = self.func.add_block();
        let params: Vec<Value> = types.iter().map(|ty| self.func.add_param(after, ty.clone())).collect();
        let (index, parity) = (params[0], params[1]);
        map.insert(self.func.result(of_index), index);
        let mut inner = states.to_vec();
        Self::set_states(&groups, &mut inner, &params[2..]);
        self.produce(data.regions[0], after, &mut inner, map);
        let mut b = self.builder(after);
        let flipped = b.binary(BinaryOp::Xor, parity, taken.one);
        b.op(Op::MbarrierWait, &[taken.empty, taken.zero, flipped], &[]);
        b.op(Op::TakeIndex, &[counter, index, step, end, taken.buffer, taken.full, taken.zero], &[]);
        let next = Self::read_taken(&mut b, taken, parity);
        b.op(Op::Yield, &[vec![next, flipped], Self::flat(&groups, &inner)].concat(), &[]);

        let copy = self.func.append(to, Op::While, operands, types, vec![before, after], data.loc);
        let results = self.func.op(copy).results.clone();
        Self::set_states(&groups, states, &results[2..]);
    }

    pub(super) fn consume_dynamic(&mut self, id: OpId, groups: &[usize], states: &mut [State]) {
        let (Some(taken), Some((_, of_index))) = (self.taken, self.plan.dynamic) else { return };
        let data = self.func.op(id).clone();
        let operands = [vec![data.operands[0], taken.zero], Self::flat(groups, states)].concat();
        let types = vec![Type::scalar(DType::I32); operands.len()];
        let before = self.is_below_end(data.operands[1], &types);

        let after = self.func.take_regions(id)[0];
        let index = self.func.block(after).params[0];
        let carried: Vec<Value> = types[1..].iter().map(|ty| self.func.add_param(after, ty.clone())).collect();
        let parity = carried[0];
        let result = self.func.result(of_index);
        self.func.replace_uses(result, index);
        self.func.erase(of_index);
        let copy = self.func.create_op(Op::While, operands, types, vec![before, after], data.loc);
        let block = self.func.parent_block(id);
        let position = self.func.position(id);
        self.func.insert(block, position, &[copy]);
        self.func.erase(id);

        let mut inner = states.to_vec();
        Self::set_states(groups, &mut inner, &carried[1..]);
        let last = self.func.terminator(after);
        self.func.erase(last);
        self.consume(after, data.regions[0], None, &mut inner);
        let warps = self.plan.warps * self.plan.replicas;
        let mut b = self.builder(after);
        let next = Self::read_taken(&mut b, taken, parity);
        b.op(Op::MbarrierArrive { warps, lanes: 1, ctas: None }, &[taken.empty, taken.zero, next], &[]);
        let flipped = b.binary(BinaryOp::Xor, parity, taken.one);
        b.op(Op::Yield, &[vec![next, flipped], Self::flat(groups, &inner)].concat(), &[]);
        let results = self.func.op(copy).results.clone();
        Self::set_states(groups, states, &results[2..]);
    }
}
