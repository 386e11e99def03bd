//! The conditions of a kernel's `assume`s: as text for callers that check their arguments themselves, and whether one
//! is false for every launch, so that code compiled ahead of time could never be launched.

use super::preconditions::{Precondition, PreconditionKind, symbol};
use super::{Footprint, Formulas, Interval, Launch, Node, NodeId, evaluate};
use crate::ir::{BinaryOp, Loc};

/// Operators below this depth of a condition are not printed.
const MAX_DEPTH: usize = 8;

/// Stands for what is not printed.
const ELLIPSIS: &str = "…";

/// Arguments of which nothing is read: [`Formulas::of_any_launch`] knows only their types.
struct Unknown;

impl Launch for Unknown {
    fn integer(&self, _: usize) -> i128 {
        0
    }
    fn bytes(&self, _: usize) -> u64 {
        0
    }
    fn address(&self, _: usize) -> u64 {
        0
    }
}

impl Footprint {
    /// The first `assume` whose condition is false for every launch: its text with the `names` of the arguments, and its location.
    pub fn false_assumption(&self, names: &[&str]) -> Option<(String, &Loc)> {
        let values = self.intervals.of_any_launch();
        self.conditions().find_map(|(condition, is_always_reached, loc)| {
            let is_false = is_always_reached && values[condition as usize] == Interval::point(0);
            is_false.then(|| (self.intervals.condition(condition, names, MAX_DEPTH), loc))
        })
    }

    /// What the kernel's `assume`s and the steps of its loops require of a launch, with the `names` of its arguments, and where they
    /// are. Arithmetic wraps as in the kernel, and `/` and `%` round toward zero.
    pub fn assumed_conditions(&self, names: &[&str]) -> Vec<String> {
        let text = |text: String, is_always_reached: bool, loc: &Loc| {
            let only = if is_always_reached { "" } else { ", in launches that reach it" };
            format!("{text} ({loc}{only})")
        };
        let assumed = self.conditions().map(|(condition, is_always_reached, loc)| {
            text(self.intervals.condition(condition, names, MAX_DEPTH), is_always_reached, loc)
        });
        let loops = self.intervals.preconditions.iter().filter_map(|Precondition { kind, when, loc }| {
            let PreconditionKind::Loop(bounds) = kind else { return None };
            let step = bounds.launch_step()?;
            let is_known = matches!(self.intervals.nodes[step as usize], Node::Known(_));
            let condition = format!("{} > 0", self.intervals.number_text(step, names, MAX_DEPTH));
            (!is_known).then(|| text(condition, when.is_empty(), loc))
        });
        assumed.chain(loops).collect()
    }

    /// The condition of each `assume` that launches check, whether all launches reach it, and where it is.
    fn conditions(&self) -> impl Iterator<Item = (NodeId, bool, &Loc)> {
        self.intervals.preconditions.iter().filter_map(|Precondition { kind, when, loc }| match kind {
            PreconditionKind::Assume { condition } => Some((*condition, when.is_empty(), loc)),
            _ => None,
        })
    }
}

impl Formulas {
    /// The interval of each node over all launches.
    fn of_any_launch(&self) -> Vec<Interval> {
        let mut values = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let value = match *node {
                Node::Arg(_, dtype) => Interval::of_type(dtype),
                Node::ProgramId(_) | Node::NumPrograms(_) => Interval { low: 0, high: u32::MAX.into() },
                _ => evaluate(node, &values, &Unknown, [1; 3]),
            };
            values.push(value);
        }
        values
    }

    /// The text of a condition, a node that is 0 or 1.
    fn condition(&self, id: NodeId, names: &[&str], depth: usize) -> String {
        let of = |id: NodeId| self.condition(id, names, depth.saturating_sub(1));
        match self.nodes[id as usize] {
            _ if depth == 0 => ELLIPSIS.to_string(),
            Node::Known(value) => (value == Interval::point(1)).to_string(),
            Node::Compare(op, a, b) => {
                let [a, b] = [a, b].map(|id| self.number_text(id, names, depth - 1));
                format!("{a} {} {b}", symbol(op))
            }
            // On 0 and 1, minimum and maximum are and and or, and 1 - x is not.
            Node::Binary(BinaryOp::Min, a, b, None) => format!("({}) && ({})", of(a), of(b)),
            Node::Binary(BinaryOp::Max, a, b, None) => format!("({}) || ({})", of(a), of(b)),
            Node::Binary(BinaryOp::Sub, _, a, None) => format!("!({})", of(a)),
            _ => self.number_text(id, names, depth),
        }
    }

    fn number_text(&self, id: NodeId, names: &[&str], depth: usize) -> String {
        let of = |id: NodeId| self.number_text(id, names, depth.saturating_sub(1));
        match self.nodes[id as usize] {
            _ if depth == 0 => ELLIPSIS.to_string(),
            Node::Known(value) => value.to_string(),
            Node::Arg(arg, _) => names.get(arg).copied().unwrap_or(ELLIPSIS).to_string(),
            Node::NumPrograms(axis) => format!("num_programs({axis})"),
            Node::Cast(a, _) => of(a),
            Node::Binary(op, a, b, _) => {
                let (a, b) = (of(a), of(b));
                match op {
                    BinaryOp::Add => format!("({a} + {b})"),
                    BinaryOp::Sub => format!("({a} - {b})"),
                    BinaryOp::Mul => format!("({a} * {b})"),
                    BinaryOp::Div => format!("({a} / {b})"),
                    BinaryOp::Rem => format!("({a} % {b})"),
                    _ => format!("{}({a}, {b})", op.name()),
                }
            }
            _ => ELLIPSIS.to_string(),
        }
    }
}
