//! Builds the formulas of a function.

use super::affine::{self, BoundedSum};
use super::assumptions::Assumption;
use super::linear::Linear;
use super::preconditions::{Precondition, checked_hint};
use super::{Access, Footprint, Formulas, Interval, LoopRange, Node, NodeId};
use crate::ir::{self, BinaryOp, BlockId, CmpOp, DType, Def, Effects, Func, Literal, Op, OpData, OpId, UnaryOp, Value};
use std::collections::{HashMap, HashSet};

/// For each dimension of a value, the dimension of the access that it is indexed by. Two uses refer to the same element
/// of a value if their axes are equal.
pub(super) type Axes = Vec<usize>;

/// Maximum nesting of selects whose conditions are used.
const MAX_SELECTIONS: usize = 4;

/// Axis of a dimension of extent 1.
const NO_AXIS: usize = usize::MAX;

pub(super) fn build(func: &Func) -> Footprint {
    let elem_bytes = func.block(func.body).params.iter().map(|&v| {
        let pointee = func.ty(v).elem().and_then(|e| e.pointee());
        pointee.map(|d| d.bytes() as u64)
    });
    let sums = formulas(func, true);
    let useful = sums.accesses.iter().any(|access| access.sum.is_some());
    Footprint { elem_bytes: elem_bytes.collect(), intervals: formulas(func, false), sums: useful.then_some(sums) }
}

/// Drops hints that no launch can check (such as `max_contiguous`), and clamps extents of block pointers to at least 0
/// if no launch can check their sign.
pub(super) fn drop_unchecked_assumptions(func: &mut Func) {
    let mut builder = Builder::new(func, false);
    let mut kept: HashMap<OpId, bool> = HashMap::new();
    let mut unchecked: Vec<(OpId, usize)> = Vec::new();
    for id in func.walk() {
        let data = func.op(id);
        match &data.op {
            Op::Hint { .. } => {
                kept.insert(id, checked_hint(&mut builder, id).is_some());
            }
            Op::MakeView { order } => {
                let extents = (1..=order.len()).filter(|&at| !builder.is_launch_invariant(data.operands[at]));
                unchecked.extend(extents.map(|at| (id, at)));
            }
            _ => {}
        }
    }
    for (id, kept) in kept {
        if let Op::Hint { divisible, contiguous, .. } = func.op_mut(id) {
            *contiguous = None;
            *divisible = divisible.filter(|_| kept);
        }
    }
    for (id, at) in unchecked {
        let (extent, loc) = (func.op(id).operands[at], func.op(id).loc.clone());
        let ty = func.ty(extent).clone();
        let mut b = ir::Builder::before(func, id, loc);
        let zero = b.constant(Literal::Int(0), ty);
        let max = b.binary(BinaryOp::Max, extent, zero);
        func.set_operand(id, at, max);
    }
}

pub(super) fn checks_assumption(func: &Func, id: OpId) -> bool {
    Builder::new(func, false).truth(func.op(id).operands[0]).is_some()
}

fn formulas(func: &Func, sums: bool) -> Formulas {
    let mut builder = Builder::new(func, sums);
    builder.block(func.body);
    Formulas {
        nodes: builder.nodes,
        accesses: builder.accesses,
        preconditions: builder.preconditions,
        assumptions: builder.assumptions,
    }
}

/// A bound of a value from a comparison.
#[derive(Clone)]
pub(super) struct Fact {
    pub value: Value,
    pub axes: Axes,
    pub bound: Bound,
}

#[derive(Clone, Copy)]
pub(super) enum Bound {
    /// At most the node plus a number; likewise `AtLeast`.
    AtMost(NodeId, i8),
    AtLeast(NodeId, i8),
    Not(NodeId),
    /// The value plus a number is at most another value, along the same axes; used for affine sums.
    Below(Value, i8),
    /// The access does not execute.
    Never,
}

pub(super) struct Builder<'f> {
    pub func: &'f Func,
    /// Whether addresses are also followed as affine sums.
    sums: bool,
    pub nodes: Vec<Node>,
    /// Node of each known formula (hash-consing).
    interned: HashMap<Node, NodeId>,
    /// Nodes of values under the present facts.
    cached: HashMap<(Value, Axes), NodeId>,
    /// Whether a value is launch-invariant.
    launch_invariant: HashMap<Value, bool>,
    /// Values whose nodes are under construction: loop-carried values may depend on themselves.
    in_progress: HashSet<Value>,
    pub facts: Vec<Fact>,
    /// Nesting depth of the selects whose operands are being visited.
    selections: usize,
    when: Vec<NodeId>,
    accesses: Vec<Access>,
    pub preconditions: Vec<Precondition>,
    pub assumptions: Vec<Assumption>,
}

impl<'f> Builder<'f> {
    pub fn new(func: &'f Func, sums: bool) -> Builder<'f> {
        Builder {
            func,
            sums,
            nodes: Vec::new(),
            interned: HashMap::new(),
            cached: HashMap::new(),
            launch_invariant: HashMap::new(),
            in_progress: HashSet::new(),
            facts: Vec::new(),
            selections: 0,
            when: Vec::new(),
            accesses: Vec::new(),
            preconditions: Vec::new(),
            assumptions: Vec::new(),
        }
    }
}

impl Builder<'_> {
    pub fn push(&mut self, node: Node) -> NodeId {
        if let Some(&id) = self.interned.get(&node) {
            return id;
        }
        let id = self.nodes.len() as NodeId;
        self.nodes.push(node.clone());
        self.interned.insert(node, id);
        id
    }

    pub fn number(&mut self, n: i128) -> NodeId {
        self.push(Node::Known(Interval::point(n)))
    }

    /// The interval of a node that is the same in every launch.
    pub fn constant(&self, id: NodeId) -> Option<Interval> {
        match self.nodes[id as usize] {
            Node::Known(interval) => Some(interval),
            _ => None,
        }
    }

    /// Whether a value is computed only from integer arguments, grid extents and constants, and is therefore the same
    /// throughout a launch.
    pub fn is_launch_invariant(&mut self, v: Value) -> bool {
        let func = self.func;
        let (v, _) = peel(func, v, &vec![NO_AXIS; func.ty(v).shape().len()]);
        if let Some(&known) = self.launch_invariant.get(&v) {
            return known;
        }
        let data = match func.value(v).def {
            Def::Param(block, _) => return block == func.body && is_int(func, v),
            Def::Result(id, _) => func.op(id),
        };
        let launch_invariant = match data.op {
            _ if !is_int(func, v) => false,
            Op::Constant { .. } | Op::NumPrograms { .. } => true,
            Op::Binary(_) | Op::Cast | Op::Unary(UnaryOp::Neg) => {
                data.operands.iter().all(|&part| self.is_launch_invariant(part))
            }
            _ => false,
        };
        self.launch_invariant.insert(v, launch_invariant);
        launch_invariant
    }

    /// A sum or product without wrapping.
    pub fn non_wrapping(&mut self, op: BinaryOp, a: NodeId, b: NodeId) -> NodeId {
        self.push(Node::Binary(op, a, b, None))
    }

    /// Adds the accesses of a block and of its nested regions.
    fn block(&mut self, block: BlockId) {
        let func = self.func;
        let outside = self.facts.len();
        for &id in &func.block(block).ops {
            let data = func.op(id);
            match &data.op {
                Op::LoadView { boundary, .. } => self.view(data, boundary),
                Op::StoreView { boundary, .. } | Op::AtomicView { boundary, .. } => self.view(data, boundary),
                Op::Load { .. } => self.pointers(data, data.operands.get(1)),
                Op::Store { .. } | Op::AtomicRmw { .. } => self.pointers(data, data.operands.get(2)),
                Op::AtomicCas { .. } => self.pointers(data, data.operands.get(3)),
                Op::SemaphoreWait => self.pointers(data, None),
                Op::DynamicIndex => {
                    self.pointers(data, None);
                    let (value, before_end) = (data.results[0], Bound::Below(data.operands[3], 1));
                    self.facts.extend(self.sums.then_some(Fact { value, axes: Vec::new(), bound: before_end }));
                }
                Op::For { .. } => {
                    self.require_loop_bounds(data);
                    let value = func.block(data.regions[0]).params[0];
                    let index = self.node(value, &[]);
                    self.when.push(index);
                    let before_end = Bound::Below(data.operands[1], 1);
                    self.facts.extend(self.sums.then_some(Fact { value, axes: Vec::new(), bound: before_end }));
                    self.block(data.regions[0]);
                    self.facts.truncate(self.facts.len() - usize::from(self.sums));
                    self.when.pop();
                }
                Op::If => {
                    for (&region, truth) in data.regions.iter().zip([true, false]) {
                        self.under_condition(data.operands[0], &[], truth, |b| b.block(region));
                    }
                }
                Op::While => {
                    self.block(data.regions[0]);
                    self.while_body(data);
                }
                Op::Assume => self.require_assumption(data),
                Op::Hint { .. } => {
                    self.require_multiple(id);
                    self.assume_at_least(id);
                }
                _ if self.may_access_memory(data) => {
                    self.unknown_access(data);
                }
                // Combine regions contain only arithmetic.
                _ => {}
            }
        }
        if self.facts.len() > outside {
            self.facts.truncate(outside);
            self.cached.clear();
        }
    }

    /// Whether an op may access memory in a way that is not modeled.
    fn may_access_memory(&self, data: &OpData) -> bool {
        let pointer = |&v: &Value| self.func.ty(v).elem().is_some_and(|e| e.pointee().is_some());
        let by_assembly = matches!(data.op, Op::InlineAsm { .. }) && data.operands.iter().any(pointer);
        by_assembly || matches!(data.op.effects(), Effects::Read | Effects::Write)
    }

    /// Adds the accesses of the second region of a `while`. The bounds that follow from its condition hold there for the
    /// forwarded values too.
    fn while_body(&mut self, data: &OpData) {
        let [before, after] = data.regions[..] else { return };
        let func = self.func;
        let end = &func.op(func.terminator(before)).operands;
        let outside = self.facts.len();
        self.add_facts(end[0], &[], true);
        for (&forwarded, &param) in end[1..].iter().zip(&func.block(after).params) {
            let same = self.facts[outside..].iter().filter(|fact| fact.value == forwarded);
            let same: Vec<Fact> = same.map(|fact| Fact { value: param, ..fact.clone() }).collect();
            self.facts.extend(same);
        }
        self.cached.clear();
        self.block(after);
        self.facts.truncate(outside);
        self.cached.clear();
    }

    /// Runs `f` under the fact that a condition is true or false.
    fn under_condition<R>(
        &mut self,
        condition: Value,
        axes: &[usize],
        truth: bool,
        f: impl FnOnce(&mut Self) -> R,
    ) -> R {
        let outside = self.facts.len();
        let mut found = Vec::new();
        self.find_facts(condition, axes, truth, &mut found);
        if found.is_empty() {
            return f(self);
        }
        self.facts.extend(found);
        let cached = std::mem::take(&mut self.cached);
        let result = f(self);
        self.facts.truncate(outside);
        self.cached = cached;
        result
    }

    /// Nodes of the two operands of a select, each under the select's condition.
    fn select_sides(&mut self, data: &OpData, axes: &[usize]) -> [NodeId; 2] {
        // Deeply nested conditions are ignored: each level would double the work.
        if self.selections == MAX_SELECTIONS {
            return [1, 2].map(|side| self.node(data.operands[side], axes));
        }
        self.selections += 1;
        let nodes = [(1, true), (2, false)].map(|(side, truth)| {
            self.under_condition(data.operands[0], axes, truth, |b| b.node(data.operands[side], axes))
        });
        self.selections -= 1;
        nodes
    }

    fn add_facts(&mut self, condition: Value, axes: &[usize], truth: bool) {
        let mut found = Vec::new();
        self.find_facts(condition, axes, truth, &mut found);
        self.facts.extend(found);
        self.cached.clear();
    }

    /// Bounds of the compared values that follow from the condition being `truth`.
    fn find_facts(&mut self, condition: Value, axes: &[usize], truth: bool, found: &mut Vec<Fact>) {
        let func = self.func;
        let (condition, axes) = peel(func, condition, axes);
        if let Some(Literal::Bool(b)) = func.constant(condition) {
            if b != truth {
                found.push(Fact { value: condition, axes, bound: Bound::Never });
            }
            return;
        }
        let Some(id) = func.def_op(condition) else { return };
        let data = func.op(id);
        match data.op {
            Op::Unary(UnaryOp::Not) => self.find_facts(data.operands[0], &axes, !truth, found),
            Op::Binary(BinaryOp::And) if truth => {
                data.operands.iter().for_each(|&part| self.find_facts(part, &axes, true, found));
            }
            Op::Binary(BinaryOp::Or) if !truth => {
                data.operands.iter().for_each(|&part| self.find_facts(part, &axes, false, found));
            }
            Op::Cmp(cmp) if is_int(func, data.operands[0]) => {
                let [a, b] = data.operands[..] else { return };
                self.compare(cmp, truth, (a, b), &axes, found);
            }
            _ => {}
        }
    }

    fn compare(&mut self, cmp: CmpOp, truth: bool, (a, b): (Value, Value), axes: &[usize], found: &mut Vec<Fact>) {
        let (low, high) = (self.node(a, axes), self.node(b, axes));
        let cmp = match (cmp, truth) {
            (cmp, true) => cmp,
            (CmpOp::Eq, false) => CmpOp::Ne,
            (CmpOp::Ne, false) => CmpOp::Eq,
            (CmpOp::Lt, false) => CmpOp::Ge,
            (CmpOp::Le, false) => CmpOp::Gt,
            (CmpOp::Gt, false) => CmpOp::Le,
            (CmpOp::Ge, false) => CmpOp::Lt,
        };
        let (of_a, of_b): (&[Bound], &[Bound]) = match cmp {
            CmpOp::Lt => (&[Bound::AtMost(high, -1)], &[Bound::AtLeast(low, 1)]),
            CmpOp::Le => (&[Bound::AtMost(high, 0)], &[Bound::AtLeast(low, 0)]),
            CmpOp::Gt => (&[Bound::AtLeast(high, 1)], &[Bound::AtMost(low, -1)]),
            CmpOp::Ge => (&[Bound::AtLeast(high, 0)], &[Bound::AtMost(low, 0)]),
            CmpOp::Eq => {
                (&[Bound::AtMost(high, 0), Bound::AtLeast(high, 0)], &[Bound::AtMost(low, 0), Bound::AtLeast(low, 0)])
            }
            CmpOp::Ne => (&[Bound::Not(high)], &[Bound::Not(low)]),
        };
        let below = |value, than, more| Fact { value, axes: axes.to_vec(), bound: Bound::Below(than, more) };
        if self.sums {
            match cmp {
                CmpOp::Lt => found.push(below(a, b, 1)),
                CmpOp::Le => found.push(below(a, b, 0)),
                CmpOp::Gt => found.push(below(b, a, 1)),
                CmpOp::Ge => found.push(below(b, a, 0)),
                CmpOp::Eq => found.extend([below(a, b, 0), below(b, a, 0)]),
                CmpOp::Ne => {}
            }
        }
        for (value, bounds) in [(a, of_a), (b, of_b)] {
            // A constant needs no bounds; the comparison bounds the other side.
            if self.func.constant_int(value).is_some() {
                continue;
            }
            let (mut value, mut axes) = peel(self.func, value, axes);
            loop {
                for &bound in bounds {
                    found.push(Fact { value, axes: axes.clone(), bound });
                }
                // Bounds of a widened value apply to the value before its widening.
                let Some(narrow) = widened(self.func, value) else { break };
                (value, axes) = peel(self.func, narrow, &axes);
            }
        }
    }

    /// Adds an access through pointers.
    fn pointers(&mut self, data: &OpData, mask: Option<&Value>) {
        let func = self.func;
        let pointer = data.operands[0];
        let axes: Axes = (0..func.ty(pointer).shape().len()).collect();
        let access = |b: &mut Self| match b.pointer(pointer, &axes) {
            Some((arg, elements)) => {
                let sum = if b.sums { affine::bounded(b, pointer, &axes) } else { None };
                b.access(Some(arg), elements, sum, data);
            }
            None => b.unknown_access(data),
        };
        match mask {
            Some(&mask) => self.under_condition(mask, &axes, true, access),
            None => access(self),
        }
    }

    /// Adds an access through a view.
    fn view(&mut self, data: &OpData, boundary: &[usize]) {
        let func = self.func;
        let view = data.operands[0];
        let parts = func.def_op(view).map(|id| func.op(id)).filter(|made| matches!(made.op, Op::MakeView { .. }));
        let base = parts.and_then(|parts| self.pointer(parts.operands[0], &[]));
        let (Some(parts), Some((arg, mut elements))) = (parts, base) else {
            return self.unknown_access(data);
        };
        let block = func.ty(view).shape();
        let rank = block.len();
        self.require_extents(parts, rank, &data.loc);
        for (d, &block) in block.iter().enumerate() {
            let [shape, stride, offset] = [0, 1, 2].map(|part| self.node(parts.operands[1 + part * rank + d], &[]));
            let shape = boundary.contains(&d).then_some(shape);
            let touched = self.push(Node::Block { offset, block, shape });
            let along = self.non_wrapping(BinaryOp::Mul, touched, stride);
            elements = self.non_wrapping(BinaryOp::Add, elements, along);
        }
        self.access(Some(arg), elements, None, data);
    }

    /// Adds an access to an unknown address.
    fn unknown_access(&mut self, data: &OpData) {
        let anywhere = self.push(Node::Opaque(DType::I64));
        self.access(None, anywhere, None, data);
    }

    fn access(&mut self, arg: Option<usize>, elements: NodeId, sum: Option<BoundedSum>, data: &OpData) {
        let when = self.conditions();
        self.accesses.push(Access { arg, elements, sum, when, loc: data.loc.clone() });
    }

    /// Nodes of which at least one is empty if the present op does not execute.
    pub fn conditions(&mut self) -> Vec<NodeId> {
        let mut when = self.when.clone();
        for fact in self.facts.clone() {
            when.push(match fact.bound {
                Bound::Never => self.push(Node::Known(Interval::EMPTY)),
                _ => self.node(fact.value, &fact.axes),
            });
        }
        when.sort_unstable();
        when.dedup();
        when
    }

    /// The argument that a pointer is based on, and its offset from there in elements.
    pub fn pointer(&mut self, v: Value, axes: &[usize]) -> Option<(usize, NodeId)> {
        let func = self.func;
        let (v, axes) = peel(func, v, axes);
        match func.value(v).def {
            Def::Param(block, i) if block == func.body => Some((i, self.number(0))),
            Def::Param(block, i) => {
                let (id, _) = loop_of(func, block)?;
                self.pointer_induction(id, i.checked_sub(1)?, false)
            }
            Def::Result(id, i) => {
                let data = func.op(id);
                match data.op {
                    Op::PtrAdd => {
                        let (arg, from) = self.pointer(data.operands[0], &axes)?;
                        let offset = self.node(data.operands[1], &axes);
                        Some((arg, self.non_wrapping(BinaryOp::Add, from, offset)))
                    }
                    Op::Select => {
                        let sides = [(1, true), (2, false)].map(|(side, truth)| {
                            self.under_condition(data.operands[0], &axes, truth, |b| {
                                b.pointer(data.operands[side], &axes)
                            })
                        });
                        self.join_pointers(sides)
                    }
                    Op::If => {
                        let sides = [0, 1].map(|side| {
                            let end = func.terminator(data.regions[side]);
                            self.pointer(func.op(end).operands[i], &axes)
                        });
                        self.join_pointers(sides)
                    }
                    Op::For { .. } => self.pointer_induction(id, i, true),
                    _ => None,
                }
            }
        }
    }

    fn join_pointers(&mut self, sides: [Option<(usize, NodeId)>; 2]) -> Option<(usize, NodeId)> {
        let [Some((a, first)), Some((b, second))] = sides else { return None };
        (a == b).then(|| (a, self.push(Node::Hull(first, second))))
    }

    fn pointer_induction(&mut self, id: OpId, carried: usize, after: bool) -> Option<(usize, NodeId)> {
        let (init, by) = step(self.func, id, carried)?;
        let data = self.func.op(id);
        // The initial pointer is defined outside the loop, so it cannot depend on this access.
        let (arg, from) = self.pointer(init, &[])?;
        let by = self.step_node(by, id);
        let range = self.loop_range(data);
        Some((arg, self.push(Node::Induction { from, by, range, after })))
    }

    /// Start, end and step of a `for`.
    pub fn loop_range(&mut self, data: &OpData) -> LoopRange<NodeId> {
        let [start, end, step] = [0, 1, 2].map(|k| self.node(data.operands[k], &[]));
        LoopRange { start, end, step }
    }

    /// Increment per iteration of a `for`.
    fn step_node(&mut self, by: Step, id: OpId) -> NodeId {
        let (Step::Plus(v) | Step::Minus(v)) = by;
        let by_node = match self.is_defined_inside(v, id) {
            false => self.node(v, &[]),
            // Facts about this iteration need not hold in earlier ones.
            true => {
                let (facts, cached) = (std::mem::take(&mut self.facts), std::mem::take(&mut self.cached));
                let node = self.node(v, &[]);
                (self.facts, self.cached) = (facts, cached);
                node
            }
        };
        match by {
            Step::Plus(_) => by_node,
            Step::Minus(_) => {
                let zero = self.number(0);
                self.non_wrapping(BinaryOp::Sub, zero, by_node)
            }
        }
    }

    /// Whether a value is defined inside a loop.
    fn is_defined_inside(&self, v: Value, id: OpId) -> bool {
        let func = self.func;
        let inside = func.walk_from(func.op(id).regions[0]);
        match func.value(v).def {
            Def::Result(op, _) => inside.contains(&op),
            Def::Param(block, _) => {
                block == func.op(id).regions[0] || inside.iter().any(|&op| func.op(op).regions.contains(&block))
            }
        }
    }

    /// The interval of an integer under the present facts.
    pub fn node(&mut self, v: Value, axes: &[usize]) -> NodeId {
        let (v, axes) = peel(self.func, v, axes);
        if let Some(&id) = self.cached.get(&(v, axes.clone())) {
            return id;
        }
        let Some(dtype) = self.func.ty(v).dtype() else { return self.push(Node::Opaque(DType::I64)) };
        if !self.in_progress.insert(v) {
            return self.push(Node::Opaque(dtype));
        }
        let mut id = self.interval_of(v, &axes, dtype);
        self.in_progress.remove(&v);
        for fact in self.facts.clone() {
            if fact.value == v && fact.axes == axes {
                id = match fact.bound {
                    Bound::AtMost(than, more) => self.push(Node::AtMost(id, than, more)),
                    Bound::AtLeast(than, more) => self.push(Node::AtLeast(id, than, more)),
                    Bound::Not(than) => self.push(Node::Not(id, than)),
                    Bound::Below(..) | Bound::Never => id,
                };
            }
        }
        self.cached.insert((v, axes), id);
        id
    }

    /// The interval, without facts about the value itself.
    fn interval_of(&mut self, v: Value, axes: &[usize], dtype: DType) -> NodeId {
        let func = self.func;
        if let Some(n) = func.constant_int(v) {
            return self.number(n.into());
        }
        let (id, i) = match func.value(v).def {
            Def::Param(block, i) if block == func.body && dtype.is_int() => return self.push(Node::Arg(i, dtype)),
            Def::Param(block, i) => return self.loop_param(v, block, i, dtype),
            Def::Result(id, i) => (id, i),
        };
        let data = func.op(id);
        match data.op {
            Op::ProgramId { axis } => self.push(Node::ProgramId(axis as usize)),
            Op::NumPrograms { axis } => self.push(Node::NumPrograms(axis as usize)),
            // The index of any iteration.
            Op::DynamicIndex => self.node(data.operands[1], axes),
            Op::CtaRank { ctas } => self.push(Node::Known(Interval { low: 0, high: i128::from(ctas) - 1 })),
            Op::Arange { start, end } => {
                self.push(Node::Known(Interval { low: start.into(), high: i128::from(end) - 1 }))
            }
            Op::Binary(op) if dtype.is_int() => {
                let [a, b] = [0, 1].map(|k| self.node(data.operands[k], axes));
                self.push(Node::Binary(op, a, b, Some(dtype)))
            }
            Op::Unary(UnaryOp::Neg) if dtype.is_int() => {
                let (zero, a) = (self.number(0), self.node(data.operands[0], axes));
                self.push(Node::Binary(BinaryOp::Sub, zero, a, Some(dtype)))
            }
            Op::Cast if dtype.is_int() && is_int(func, data.operands[0]) => {
                let a = self.node(data.operands[0], axes);
                self.push(Node::Cast(a, dtype))
            }
            Op::Select => {
                let [a, b] = self.select_sides(data, axes);
                self.push(Node::Hull(a, b))
            }
            Op::If => {
                let [a, b] = [0, 1].map(|side| {
                    let end = func.terminator(data.regions[side]);
                    self.node(func.op(end).operands[i], axes)
                });
                self.push(Node::Hull(a, b))
            }
            Op::For { .. } => self.induction(v, id, i, true, dtype),
            // Elements of the operand, at other positions.
            Op::Reshape | Op::Gather { .. } | Op::Split if dtype.is_int() => self.elements_of(data.operands[0]),
            Op::Join if dtype.is_int() => {
                let [a, b] = [0, 1].map(|k| self.elements_of(data.operands[k]));
                self.push(Node::Hull(a, b))
            }
            Op::Reduce { .. } if dtype.is_int() && picks_operand(func, data, i) => self.elements_of(data.operands[i]),
            _ => self.push(Node::Opaque(dtype)),
        }
    }

    /// The interval of all elements of a tile.
    fn elements_of(&mut self, v: Value) -> NodeId {
        self.node(v, &vec![NO_AXIS; self.func.ty(v).shape().len()])
    }

    /// Index of a loop, or a loop-carried value.
    fn loop_param(&mut self, v: Value, block: BlockId, i: usize, dtype: DType) -> NodeId {
        let Some((id, data)) = loop_of(self.func, block) else { return self.push(Node::Opaque(dtype)) };
        match i.checked_sub(1) {
            None => {
                let range = self.loop_range(data);
                self.push(Node::Index(range))
            }
            Some(carried) => self.induction(v, id, carried, false, dtype),
        }
    }

    /// A loop-carried value with an increment per iteration, inside or after the loop.
    fn induction(&mut self, v: Value, id: OpId, carried: usize, after: bool, dtype: DType) -> NodeId {
        let Some((init, by)) = step(self.func, id, carried) else { return self.push(Node::Opaque(dtype)) };
        let from = self.node(init, &[]);
        let by = self.step_node(by, id);
        let range = self.loop_range(self.func.op(id));
        let induction = self.push(Node::Induction { from, by, range, after });
        let otherwise = self.push(Node::Cast(induction, dtype));
        // An affine function of the index gives a tighter bound: a large start implies few iterations.
        match Linear::of_carried(self, v) {
            Some(linear) => {
                let then = linear.sum(self);
                let mut tests = linear.tests;
                tests.push((then, Interval::of_type(dtype)));
                self.push(Node::If { tests, then, otherwise })
            }
            None => otherwise,
        }
    }
}

/// Increment per iteration of a loop-carried value.
#[derive(Clone, Copy)]
pub(super) enum Step {
    Plus(Value),
    Minus(Value),
}

/// Initial value, and increment per iteration, of a scalar that a `for` carries; `None` for other updates.
pub(super) fn step(func: &Func, id: OpId, carried: usize) -> Option<(Value, Step)> {
    let data = func.op(id);
    let Op::For { .. } = data.op else { return None };
    let body = data.regions[0];
    let param = func.block(body).params[1 + carried];
    let next = func.op(func.def_op(func.op(func.terminator(body)).operands[carried])?);
    let init = data.operands[3 + carried];
    let scalar = |v: Value| func.ty(v).is_scalar();
    let by = match (&next.op, &next.operands[..]) {
        (Op::Binary(BinaryOp::Add) | Op::PtrAdd, &[a, by]) if a == param => Step::Plus(by),
        (Op::Binary(BinaryOp::Add), &[by, b]) if b == param => Step::Plus(by),
        (Op::Binary(BinaryOp::Sub), &[a, by]) if a == param => Step::Minus(by),
        _ => return None,
    };
    scalar(param).then_some((init, by))
}

/// The `for` with this body.
pub(super) fn loop_of(func: &Func, block: BlockId) -> Option<(OpId, &OpData)> {
    let id = func.owner(block)?;
    Some((id, func.op(id))).filter(|(_, data)| matches!(data.op, Op::For { .. }))
}

/// The operand of a value that is a widening cast of an integer.
pub(super) fn widened(func: &Func, v: Value) -> Option<Value> {
    let data = func.op(func.def_op(v)?);
    let from = *data.operands.first()?;
    let (Op::Cast, true) = (&data.op, is_int(func, from) && is_int(func, v)) else { return None };
    let [source, target] = [func.ty(from).dtype()?, func.ty(v).dtype()?].map(Interval::of_type);
    target.contains(source).then_some(from)
}

/// Whether result `i` of a reduction is always one of the elements of operand `i`: the combine function selects, as that
/// of `argmax` does, or takes the smaller or the larger one.
fn picks_operand(func: &Func, data: &OpData, i: usize) -> bool {
    let (region, n) = (data.regions[0], data.operands.len());
    let end = func.terminator(region);
    let mut todo = vec![func.op(end).operands[i]];
    while let Some(v) = todo.pop() {
        match func.value(v).def {
            Def::Param(block, k) if block == region => {
                if k % n != i {
                    return false;
                }
            }
            Def::Param(..) => return false,
            Def::Result(id, _) => match (&func.op(id).op, &func.op(id).operands[..]) {
                (Op::Select, &[_, a, b]) | (Op::Binary(BinaryOp::Min | BinaryOp::Max), &[a, b]) => todo.extend([a, b]),
                _ => return false,
            },
        }
    }
    true
}

fn is_int(func: &Func, v: Value) -> bool {
    func.ty(v).dtype().is_some_and(DType::is_int)
}

/// The value behind ops that only rearrange elements, with the axes that it is indexed by.
pub(super) fn peel(func: &Func, mut v: Value, axes: &[usize]) -> (Value, Axes) {
    let mut axes = axes.to_vec();
    while let Some(id) = func.def_op(v) {
        let data = func.op(id);
        match &data.op {
            Op::Splat => axes.clear(),
            Op::Broadcast | Op::Hint { .. } => {}
            Op::ExpandDims { axis } => {
                axes.remove(*axis);
            }
            Op::Trans { perm } => {
                let mut before = vec![NO_AXIS; axes.len()];
                perm.iter().zip(&axes).for_each(|(&from, &axis)| before[from] = axis);
                axes = before;
            }
            _ => break,
        }
        v = data.operands[0];
    }
    for (axis, &extent) in axes.iter_mut().zip(func.ty(v).shape()) {
        if extent == 1 {
            *axis = NO_AXIS;
        }
    }
    (v, axes)
}
