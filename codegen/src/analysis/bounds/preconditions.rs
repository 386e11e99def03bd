//! Preconditions of a launch other than accesses in bounds: extents are not negative, loops count up and end before
//! their index overflows, and `assume` and `multiple_of` hold.
//!
//! The generated code relies on them, so a launch that violates one is rejected. Only launch-invariant values are
//! checked: an `assume` about other values has no effect, a hint about other values is dropped before compilation
//! ([`super::drop_unchecked_assumptions`]), and a negative extent loaded from memory counts as 0.

use super::affine::{Multiple, multiple};
use super::build::{Builder, peel};
use super::{FailedCondition, Formulas, Interval, Launch, LaunchViolation, LoopRange, Node, NodeId};
use crate::ir::{BinaryOp, CmpOp, DType, Def, Func, Literal, Loc, Op, OpData, OpId, UnaryOp, Value};
use crate::lang::control::PREFETCH_MARGIN_STEPS;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashSet};

/// A condition that must hold unless one of `when` is empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Precondition {
    pub kind: PreconditionKind,
    pub when: Vec<NodeId>,
    pub loc: Loc,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PreconditionKind {
    /// The extent of a dimension of a block pointer is not negative. `arg`: the argument that holds it.
    Extent { extent: NodeId, dim: usize, arg: Option<usize> },
    /// The step of a loop is positive, and the index does not overflow.
    Loop(LoopBounds),
    /// A condition is true.
    Assume { condition: NodeId },
    /// The operand of a `multiple_of` is a multiple; `None` if no launch can decide it.
    Multiple { of: Option<Multiple>, by: i64 },
}

/// Bounds of a loop with an index of type `dtype`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LoopBounds {
    pub range: LoopRange<NodeId>,
    dtype: DType,
    /// Whether the step is launch-invariant, so that its sign is checked.
    step_is_invariant: bool,
}

impl LoopBounds {
    /// The step, where a launch decides it.
    pub fn launch_step(&self) -> Option<NodeId> {
        self.step_is_invariant.then_some(self.range.step)
    }
}

impl Builder<'_> {
    /// Requires that the extents of a block pointer are not negative.
    pub fn require_extents(&mut self, view: &OpData, rank: usize, loc: &Loc) {
        for dim in 0..rank {
            let v = view.operands[1 + dim];
            if self.func.constant_int(v).is_some_and(|n| n >= 0) || !self.is_launch_invariant(v) {
                continue;
            }
            let (extent, arg) = (self.node(v, &[]), argument(self.func, v));
            self.require(PreconditionKind::Extent { extent, dim, arg }, loc);
        }
    }

    /// Requires that a `for` has a positive step and that its index does not overflow.
    pub fn require_loop_bounds(&mut self, data: &OpData) {
        let func = self.func;
        let index = func.block(data.regions[0]).params[0];
        let Some(dtype) = func.ty(index).dtype() else { return };
        let range = self.loop_range(data);
        let step_is_invariant = self.is_launch_invariant(data.operands[2]);
        self.require(PreconditionKind::Loop(LoopBounds { range, dtype, step_is_invariant }), &data.loc);
    }

    /// Requires the condition of an `assume`, if it is launch-invariant.
    pub fn require_assumption(&mut self, data: &OpData) {
        if let Some(condition) = self.truth(data.operands[0]) {
            self.require(PreconditionKind::Assume { condition }, &data.loc);
        }
    }

    /// Requires that the operand of a hint is a multiple of its `divisible`.
    pub fn require_multiple(&mut self, id: OpId) {
        let func = self.func;
        let data = func.op(id);
        if let Op::Hint { divisible: Some(by), .. } = data.op {
            let of = checked_hint(self, id);
            self.require(PreconditionKind::Multiple { of, by }, &data.loc);
        }
    }

    fn require(&mut self, kind: PreconditionKind, loc: &Loc) {
        let when = self.conditions();
        self.preconditions.push(Precondition { kind, when, loc: loc.clone() });
    }

    /// A launch-invariant condition, as 0 or 1.
    pub fn truth(&mut self, v: Value) -> Option<NodeId> {
        let func = self.func;
        let (v, _) = peel(func, v, &[]);
        if let Some(Literal::Bool(b)) = func.constant(v) {
            return Some(self.number(b.into()));
        }
        let data = match func.value(v).def {
            Def::Param(block, i) => return (block == func.body).then(|| self.push(Node::Arg(i, DType::Bool))),
            Def::Result(id, _) => func.op(id),
        };
        match (&data.op, &data.operands[..]) {
            (Op::Cmp(op), &[a, b]) if self.is_launch_invariant(a) && self.is_launch_invariant(b) => {
                let (a, b) = (self.node(a, &[]), self.node(b, &[]));
                Some(self.push(Node::Compare(*op, a, b)))
            }
            (Op::Unary(UnaryOp::Not), &[a]) => {
                let (one, a) = (self.number(1), self.truth(a)?);
                Some(self.non_wrapping(BinaryOp::Sub, one, a))
            }
            (Op::Binary(op @ (BinaryOp::And | BinaryOp::Or)), &[a, b]) => {
                let (a, b) = (self.truth(a)?, self.truth(b)?);
                // On 0 and 1, and/or are minimum and maximum.
                let op = if *op == BinaryOp::And { BinaryOp::Min } else { BinaryOp::Max };
                Some(self.non_wrapping(op, a, b))
            }
            _ => None,
        }
    }
}

/// The argument that a value equals, possibly widened. Launches reject a negative argument that is an extent of a block
/// pointer.
pub fn argument(func: &Func, v: Value) -> Option<usize> {
    let (v, _) = peel(func, v, &[]);
    match func.value(v).def {
        Def::Param(block, i) => (block == func.body).then_some(i),
        Def::Result(id, _) => match func.op(id).op {
            Op::Cast => argument(func, func.op(id).operands[0]),
            _ => None,
        },
    }
}

/// The operand of a hint as a sum, if a launch can decide whether it is a multiple.
pub(super) fn checked_hint(b: &mut Builder, id: OpId) -> Option<Multiple> {
    let data = b.func.op(id);
    let Op::Hint { divisible: Some(by), .. } = data.op else { return None };
    multiple(b, data.operands[0], by)
}

impl Formulas {
    /// The first precondition that a launch violates.
    pub fn first_violated(&self, values: &[Interval], launch: &impl Launch) -> Option<LaunchViolation> {
        let at = |id: NodeId| values[id as usize];
        self.preconditions.iter().find_map(|Precondition { kind, when, loc }| {
            if when.iter().any(|&id| at(id).is_empty()) {
                return None;
            }
            let loc = loc.clone();
            match kind {
                &PreconditionKind::Extent { extent, dim, arg } => {
                    let found = at(extent).low;
                    (!at(extent).is_empty() && found < 0).then_some(LaunchViolation::Extent { arg, dim, found, loc })
                }
                PreconditionKind::Loop(bounds) => bounds.violation(values, loc),
                &PreconditionKind::Assume { condition } => {
                    let fails = at(condition) != Interval::point(1);
                    fails.then(|| LaunchViolation::Assumption { failed: self.failed_condition(condition, values), loc })
                }
                PreconditionKind::Multiple { of, by } => {
                    let holds = of.as_ref().is_some_and(|of| of.holds(*by, values, launch));
                    (!holds).then_some(LaunchViolation::Multiple { by: *by, loc })
                }
            }
        })
    }

    /// Why a condition may be false.
    fn failed_condition(&self, condition: NodeId, values: &[Interval]) -> FailedCondition {
        let mut failed = condition;
        // Of conditions that must all hold, the first that may not.
        while let &Node::Binary(BinaryOp::Min, a, b, None) = &self.nodes[failed as usize] {
            failed = if values[a as usize] == Interval::point(1) { b } else { a };
        }
        let comparison = match self.nodes[failed as usize] {
            Node::Compare(op, a, b) => Some(format!("{} {} {}", values[a as usize], symbol(op), values[b as usize])),
            _ => None,
        };
        let (mut used, mut args, mut pending) = (HashSet::new(), BTreeSet::new(), vec![failed]);
        while let Some(id) = pending.pop() {
            if !used.insert(id) {
                continue;
            }
            match &self.nodes[id as usize] {
                &Node::Arg(arg, _) => _ = args.insert(arg),
                node => pending.extend(node.operands()),
            }
        }
        FailedCondition { comparison, args: args.into_iter().collect() }
    }
}

pub(super) fn symbol(op: CmpOp) -> &'static str {
    match op {
        CmpOp::Eq => "==",
        CmpOp::Ne => "!=",
        CmpOp::Lt => "<",
        CmpOp::Le => "<=",
        CmpOp::Gt => ">",
        CmpOp::Ge => ">=",
    }
}

impl LoopBounds {
    fn violation(&self, values: &[Interval], loc: Loc) -> Option<LaunchViolation> {
        let LoopBounds { range, dtype, step_is_invariant } = *self;
        let LoopRange { start, end, step } = range.intervals(values);
        if [start, end, step].iter().any(|bound| bound.is_empty()) {
            return None;
        }
        // A loop that counts down would not run, although its author means one that does.
        if step_is_invariant && step.low <= 0 && (start.low < end.high || start.high > end.low) {
            return Some(LaunchViolation::Step { found: step.low, loc });
        }
        if start.low >= end.high {
            return None;
        }
        // Recording has clamped ends that come from memory to this limit.
        let overflows = end.high + PREFETCH_MARGIN_STEPS * step.high > Interval::of_type(dtype).high;
        overflows.then_some(LaunchViolation::LoopEnd { found: end.high, step: step.high, dtype, loc })
    }
}
