//! Range assumptions: lower bounds that the compiler assumes of integers (`at_least` of a `hint`), because launches
//! usually meet them and accesses become wider (`assume_ranges` in [`crate::passes`]).
//!
//! Unlike a precondition, an assumption that does not hold is no mistake: the launch then uses code that is compiled
//! without assumptions.

use super::build::{Axes, Builder};
use super::{Footprint, Interval, Launch, Node, NodeId, evaluate};
use crate::ir::{Func, Loc, Op, OpId, Value};
use serde::{Deserialize, Serialize};

/// A value that is at least `at_least` unless one of `when` is empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Assumption {
    pub value: NodeId,
    at_least: i64,
    pub when: Vec<NodeId>,
    loc: Loc,
}

/// An assumption that may not hold in a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssumptionViolation {
    /// The smallest value that an element may have.
    pub found: i128,
    /// The smallest value that the code assumes.
    pub at_least: i64,
    pub loc: Loc,
}

impl Builder<'_> {
    /// Adds the lower bound that a hint states.
    pub fn assume_at_least(&mut self, id: OpId) {
        let func = self.func;
        let data = func.op(id);
        if let Op::Hint { at_least: Some(at_least), .. } = data.op {
            let value = self.elements(data.operands[0]);
            let when = self.conditions();
            self.assumptions.push(Assumption { value, at_least, when, loc: data.loc.clone() });
        }
    }

    /// The interval of all elements of an integer tile or scalar.
    fn elements(&mut self, v: Value) -> NodeId {
        let axes: Axes = (0..self.func.ty(v).shape().len()).collect();
        self.node(v, &axes)
    }
}

/// For each integer, whether its interval follows from arguments and grid, so that a launch can check its bounds.
pub fn are_known_at_launch(func: &Func, values: &[Value]) -> Vec<bool> {
    let mut builder = Builder::new(func, false);
    let nodes: Vec<NodeId> = values.iter().map(|&v| builder.elements(v)).collect();
    let mut known: Vec<bool> = Vec::new();
    for node in &builder.nodes {
        let all = |ids: &[NodeId]| ids.iter().all(|&id| known[id as usize]);
        known.push(match node {
            Node::Opaque(_) => false,
            // Its value is one of both, whatever the tests say.
            &Node::If { then, otherwise, .. } => all(&[then, otherwise]),
            other => all(&other.operands()),
        });
    }
    nodes.into_iter().map(|id| known[id as usize]).collect()
}

impl Footprint {
    /// Whether the code relies on assumptions about the ranges of integers.
    pub fn has_assumptions(&self) -> bool {
        !self.intervals.assumptions.is_empty()
    }

    /// The first assumption that may not hold in a launch.
    pub fn violated_assumption(&self, launch: &impl Launch, grid: [u32; 3]) -> Option<AssumptionViolation> {
        let assumptions = &self.intervals.assumptions;
        let last = assumptions.iter().flat_map(|a| a.when.iter().chain([&a.value])).max()?;
        if grid.contains(&0) {
            return None;
        }
        let mut values: Vec<Interval> = Vec::new();
        for node in &self.intervals.nodes[..=*last as usize] {
            values.push(evaluate(node, &values, launch, grid));
        }
        let at = |id: NodeId| values[id as usize];
        assumptions.iter().find_map(|&Assumption { value, at_least, ref when, ref loc }| {
            let found = at(value).low;
            let holds = at(value).is_empty() || found >= at_least.into() || when.iter().any(|&id| at(id).is_empty());
            (!holds).then(|| AssumptionViolation { found, at_least, loc: loc.clone() })
        })
    }
}
