//! What has to hold of a launch's numbers besides that accesses stay inside memory: extents are not negative, loops go up and
//! end before their indices overflow, `assume` and `multiple_of` tell the truth.
//!
//! Code is made in the belief that these hold, so a launch whose numbers break one is refused. Only numbers of the launch are
//! looked at: an `assume` about anything else is not believed by anybody, a hint about anything else is taken out before the
//! kernel is compiled ([`super::distrust_unchecked`]), and an extent from memory that is negative is the extent 0.

use super::affine::{Multiple, multiple};
use super::build::{Builder, peel};
use super::{Formulas, Interval, Launch, Node, NodeId, Refused};
use crate::ir::{BinaryOp, DType, Def, Func, Literal, Loc, Op, OpData, OpId, UnaryOp, Value};
use crate::lang::control::STEPS_AHEAD;

/// One thing that has to hold, if none of `when` is empty.
#[derive(Clone, Debug)]
pub(super) struct Promise {
    what: What,
    when: Vec<NodeId>,
    loc: Loc,
}

#[derive(Clone, Debug)]
enum What {
    /// The extent of a block pointer's dimension is not negative. `arg`: the argument that it is.
    Extent { extent: NodeId, dim: usize, arg: Option<usize> },
    /// The step of a loop is positive, and the index does not overflow.
    Loop { bounds: [NodeId; 3], dtype: DType, numbers: bool },
    /// A condition is true.
    Assume { condition: NodeId },
    /// `multiple_of` tells the truth; `None` where no launch can tell.
    Multiple { of: Option<Multiple>, by: i64 },
}

impl Builder<'_> {
    /// Adds what a block pointer's extents have to be.
    pub fn promise_extents(&mut self, view: &OpData, rank: usize, loc: &Loc) {
        for dim in 0..rank {
            let v = view.operands[1 + dim];
            if self.func.constant_int(v).is_some_and(|n| n >= 0) || !self.is_number_of_launch(v) {
                continue;
            }
            let (extent, arg) = (self.node(v, &[]), argument(self.func, v));
            self.promise(What::Extent { extent, dim, arg }, loc);
        }
    }

    /// Adds what the bounds of a `for` have to be.
    pub fn promise_loop(&mut self, data: &OpData) {
        let func = self.func;
        let index = func.block(data.regions[0]).params[0];
        let Some(dtype) = func.ty(index).dtype() else { return };
        let bounds = [0, 1, 2].map(|k| self.node(data.operands[k], &[]));
        let numbers = self.is_number_of_launch(data.operands[2]);
        self.promise(What::Loop { bounds, dtype, numbers }, &data.loc);
    }

    /// Adds the condition of an `assume`, if it is about numbers of the launch.
    pub fn promise_assumption(&mut self, data: &OpData) {
        if let Some(condition) = self.truth(data.operands[0]) {
            self.promise(What::Assume { condition }, &data.loc);
        }
    }

    /// Adds that the operand of a hint is a multiple.
    pub fn promise_multiple(&mut self, id: OpId) {
        let func = self.func;
        let data = func.op(id);
        if let Op::Hint { divisible: Some(by), .. } = data.op {
            let of = checked_hint(self, id);
            self.promise(What::Multiple { of, by }, &data.loc);
        }
    }

    fn promise(&mut self, what: What, loc: &Loc) {
        let when = self.conditions();
        self.promises.push(Promise { what, when, loc: loc.clone() });
    }

    /// A condition of numbers of the launch alone, as 0 or 1.
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
            (Op::Cmp(op), &[a, b]) if self.is_number_of_launch(a) && self.is_number_of_launch(b) => {
                let (a, b) = (self.node(a, &[]), self.node(b, &[]));
                Some(self.push(Node::Compare(*op, a, b)))
            }
            (Op::Unary(UnaryOp::Not), &[a]) => {
                let (one, a) = (self.number(1), self.truth(a)?);
                Some(self.exact(BinaryOp::Sub, one, a))
            }
            (Op::Binary(op @ (BinaryOp::And | BinaryOp::Or)), &[a, b]) => {
                let (a, b) = (self.truth(a)?, self.truth(b)?);
                // Of 0 and 1 these are minimum and maximum.
                let op = if *op == BinaryOp::And { BinaryOp::Min } else { BinaryOp::Max };
                Some(self.exact(op, a, b))
            }
            _ => None,
        }
    }
}

/// The argument that a value is, perhaps widened. Launches refuse a negative one that is an extent of a block pointer.
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

/// The sum that a hint is about, if a launch can tell whether it is a multiple.
pub(super) fn checked_hint(b: &mut Builder, id: OpId) -> Option<Multiple> {
    let data = b.func.op(id);
    let Op::Hint { divisible: Some(by), .. } = data.op else { return None };
    multiple(b, data.operands[0], by)
}

impl Formulas {
    /// The first promise that the numbers of a launch break.
    pub fn first_broken(&self, values: &[Interval], launch: &impl Launch) -> Option<Refused> {
        let at = |id: NodeId| values[id as usize];
        self.promises.iter().find_map(|Promise { what, when, loc }| {
            if when.iter().any(|&id| at(id).is_empty()) {
                return None;
            }
            let loc = loc.clone();
            match what {
                &What::Extent { extent, dim, arg } => {
                    let found = at(extent).low;
                    (!at(extent).is_empty() && found < 0).then_some(Refused::Extent { arg, dim, found, loc })
                }
                &What::Loop { bounds, dtype, numbers } => self.broken_loop(values, bounds, (dtype, numbers), loc),
                &What::Assume { condition } => {
                    (at(condition) != Interval::point(1)).then_some(Refused::Assumption { loc })
                }
                What::Multiple { of, by } => {
                    let holds = of.as_ref().is_some_and(|of| of.holds(*by, values, launch));
                    (!holds).then_some(Refused::Multiple { by: *by, loc })
                }
            }
        })
    }

    fn broken_loop(
        &self,
        values: &[Interval],
        bounds: [NodeId; 3],
        (dtype, numbers): (DType, bool),
        loc: Loc,
    ) -> Option<Refused> {
        let [start, end, step] = bounds.map(|id| values[id as usize]);
        if [start, end, step].iter().any(|bound| bound.is_empty()) || start.low >= end.high {
            return None;
        }
        if numbers && step.low <= 0 {
            return Some(Refused::Step { found: step.low, loc });
        }
        // Ends from memory have been cut to this when they were recorded.
        let overflows = end.high + STEPS_AHEAD * step.high > Interval::of_type(dtype).high;
        overflows.then_some(Refused::LoopEnd { found: end.high, step: step.high, dtype, loc })
    }
}
