//! Plans fusion: decides, before any code is emitted, which tiles get a buffer and which are computed inside of their
//! consumers.
//!
//! An op is *fused* if each element of its result depends on one element of each operand: it needs no buffer, and
//! its consumer evaluates it inside of its own loops. The other ops with tile operands are *roots*, with their own
//! loops (stores, reductions, dots, loop-carried values, …). A fused value gets a buffer if
//!
//! - several roots would evaluate it, and it is not cheap ([`CHEAP`]): the first of them also stores it, or
//! - it is repeated along a dimension (`broadcast`), and it is not cheap: it gets its own loops, to be computed once
//!   per element of the smaller tile.

use crate::ir::{BinaryOp, BlockId, DType, Def, Effects, Func, Op, OpId, UnaryOp, Value};
use std::collections::BTreeSet;

/// The maximum cost of a value that each consumer recomputes. An integer operation costs 1.
const CHEAP: u32 = 10;
/// [`CHEAP`] for indices and pointers: most of their arithmetic depends on one dimension and is hoisted out of the
/// innermost loop, and address arithmetic must stay visible for contiguous accesses to be recognized.
const CHEAP_INDEX: u32 = 40;
const EXPENSIVE: u32 = 1000;

/// A point in a block where a root evaluates operands: the index of the op, and of the operand for ops that evaluate
/// each separately.
type Root = (usize, usize);

/// Facts about every value, by value number.
pub struct FusionPlan {
    /// Whether the value needs its own buffer.
    pub buffered: Vec<bool>,
    /// Whether the buffer is filled by its own loops, not by those of the first consumer.
    pub own_loops: Vec<bool>,
    /// The roots that evaluate the value in its block, in order (for parameters and root results too).
    pub roots: Vec<BTreeSet<Root>>,
    /// The block that defines the value.
    pub block: Vec<BlockId>,
    /// The index of each op in its block.
    pub position: Vec<usize>,
    cost: Vec<Option<u32>>,
}

/// Whether consumers can evaluate the op's result element by element.
pub fn is_fused(func: &Func, id: OpId) -> bool {
    let data = func.op(id);
    if data.results.len() != 1 || !func.ty(data.results[0]).is_tensor() {
        return false;
    }
    match &data.op {
        Op::Reshape => keeps_dimensions(func, id),
        Op::Unary(_)
        | Op::Binary(_)
        | Op::Cmp(_)
        | Op::Constant { .. }
        | Op::Arange { .. }
        | Op::LoadView { .. }
        | Op::Load { .. }
        | Op::PtrAdd
        | Op::Splat
        | Op::ExpandDims { .. }
        | Op::Broadcast
        | Op::Trans { .. }
        | Op::Fma
        | Op::Select
        | Op::Cast
        | Op::Bitcast
        | Op::Hint { .. } => true,
        _ => false,
    }
}

/// Whether each element of the op's result is an element of its operand, possibly at other coordinates.
pub fn is_map(func: &Func, id: OpId) -> bool {
    match func.op(id).op {
        Op::ExpandDims { .. } | Op::Broadcast | Op::Trans { .. } | Op::Hint { .. } => is_fused(func, id),
        Op::Reshape => is_fused(func, id),
        _ => false,
    }
}

/// Whether a reshape only adds or removes dimensions of extent 1.
fn keeps_dimensions(func: &Func, id: OpId) -> bool {
    let data = func.op(id);
    let extents = |v: Value| -> Vec<usize> { func.ty(v).shape().iter().copied().filter(|&n| n != 1).collect() };
    extents(data.operands[0]) == extents(data.results[0])
}

/// The value that a chain of maps reads.
pub fn map_source(func: &Func, mut v: Value) -> Value {
    while let Some(id) = func.def_op(v).filter(|&id| is_map(func, id)) {
        v = func.op(id).operands[0];
    }
    v
}

impl FusionPlan {
    pub fn new(func: &Func) -> FusionPlan {
        let n = func.num_values();
        let mut plan = FusionPlan {
            buffered: vec![false; n],
            own_loops: vec![false; n],
            roots: vec![BTreeSet::new(); n],
            block: vec![func.body; n],
            position: vec![0; func.num_ops()],
            cost: vec![None; n],
        };
        plan.place_block(func, func.body);
        plan.block(func, func.body);
        plan
    }

    fn place_block(&mut self, func: &Func, block: BlockId) {
        for &p in &func.block(block).params {
            self.block[p.0 as usize] = block;
        }
        for (i, &id) in func.block(block).ops.iter().enumerate() {
            self.position[id.0 as usize] = i;
            for &r in &func.op(id).results {
                self.block[r.0 as usize] = block;
            }
            for &region in &func.op(id).regions {
                self.place_block(func, region);
            }
        }
    }

    fn block(&mut self, func: &Func, block: BlockId) {
        let ops = &func.block(block).ops;
        for (i, &id) in ops.iter().enumerate().rev() {
            let data = func.op(id);
            for &region in &data.regions {
                self.block(func, region);
                // Values that a region uses from outside must exist before it starts.
                for inner in func.walk_from(region) {
                    for &v in &func.op(inner).operands {
                        if self.block[v.0 as usize] == block {
                            self.roots[v.0 as usize].insert((i, usize::MAX));
                        }
                    }
                }
            }
            if is_fused(func, id) {
                self.fused(func, block, id);
            } else {
                let separately = matches!(data.op, Op::Yield | Op::Condition) || data.op.effects() == Effects::Regions;
                for (k, &v) in data.operands.iter().enumerate() {
                    if self.block[v.0 as usize] == block {
                        self.roots[v.0 as usize].insert((i, if separately { k } else { 0 }));
                    }
                }
            }
        }
    }

    /// Plans the result of a fused op, all of whose uses have been visited, and propagates its roots to the operands.
    fn fused(&mut self, func: &Func, block: BlockId, id: OpId) {
        let data = func.op(id);
        let result = data.results[0].0 as usize;
        let map = is_map(func, id);
        if !map && !self.is_cheap(func, data.results[0]) {
            self.buffered[result] = self.own_loops[result] || self.roots[result].len() > 1;
        }
        let roots = self.roots[result].clone();
        let passed: BTreeSet<Root> = if self.buffered[result] { roots.into_iter().take(1).collect() } else { roots };
        for &v in &data.operands {
            // The use of an outer value in a region counts as a use by the op that contains the region.
            if self.block[v.0 as usize] == block {
                self.roots[v.0 as usize].extend(&passed);
            }
        }
        if let Op::Broadcast = data.op {
            let source = map_source(func, data.operands[0]);
            let wider = func.ty(data.results[0]).numel() > func.ty(source).numel();
            let fused = func.def_op(source).is_some_and(|d| is_fused(func, d));
            if wider && fused && !self.is_cheap(func, source) {
                self.own_loops[source.0 as usize] = true;
            }
        }
    }

    /// The cost of recomputing one element of a fused value.
    pub fn cost(&mut self, func: &Func, v: Value) -> u32 {
        if let Some(cost) = self.cost[v.0 as usize] {
            return cost;
        }
        let cost = self.compute_cost(func, v);
        self.cost[v.0 as usize] = Some(cost);
        cost
    }

    fn compute_cost(&mut self, func: &Func, v: Value) -> u32 {
        let Def::Result(id, _) = func.value(v).def else { return 0 };
        if func.ty(v).is_scalar() || !is_fused(func, id) {
            return 0;
        }
        let data = func.op(id);
        if is_map(func, id) {
            return self.cost(func, data.operands[0]);
        }
        let own = match &data.op {
            Op::Constant { .. } | Op::Arange { .. } | Op::Splat => return 0,
            Op::Binary(op) => match op {
                BinaryOp::Div | BinaryOp::CeilDiv | BinaryOp::Rem | BinaryOp::MulHi => 5,
                _ => 1,
            },
            Op::Unary(UnaryOp::Neg | UnaryOp::Not | UnaryOp::Abs) | Op::Cmp(_) | Op::Select | Op::PtrAdd => 1,
            Op::Cast | Op::Bitcast | Op::Fma => 1,
            _ => EXPENSIVE,
        };
        let mut total = own;
        for &operand in &data.operands {
            // Arithmetic on a buffer would keep the buffer alive and read it again.
            let source = map_source(func, operand);
            let from_buffer = func.ty(source).is_tensor() && !func.def_op(source).is_some_and(|d| is_fused(func, d));
            total += if from_buffer { EXPENSIVE } else { self.cost(func, operand) };
        }
        total.min(EXPENSIVE)
    }

    pub fn is_cheap(&mut self, func: &Func, v: Value) -> bool {
        let index = func.ty(v).dtype().is_none_or(DType::is_int);
        self.cost(func, v) <= if index { CHEAP_INDEX } else { CHEAP }
    }
}
