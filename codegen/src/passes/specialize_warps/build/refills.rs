//! Order of the producer's loads in a persistent loop.
//!
//! A load around the inner loops fills the same buffer in each iteration, so it waits until all consumers have read that.
//! The first load of the inner loops has a free buffer earlier, so the producer issues it first (FlashAttention-3 loads the
//! first tile of K before Q).

use super::{Partitioner, State};
use crate::ir::{BinaryOp, BlockId, CmpOp, DType, Literal, Op, OpId, Type, Value};
use std::collections::HashMap;

/// Loads that wait for the first iteration of a loop that follows.
#[derive(Clone)]
pub(super) struct Refills {
    /// The block of the loads.
    block: BlockId,
    loads: Vec<OpId>,
    /// Whether no loop has had an iteration yet: bool.
    pending: Value,
    /// Whether a loop that may have issued them lies behind: later loads of the block wait for the loops after them.
    left: bool,
    /// Inside of a loop: its body, and whether this is the iteration that issues them: bool.
    inside: Option<(BlockId, Value)>,
}

impl Partitioner<'_> {
    /// Whether a load fills the only buffer of a ring again and again.
    pub(super) fn is_refill(&self, load: OpId) -> bool {
        let (group, _) = self.ring_of(load);
        self.plan.groups[group].once && self.plan.groups[group].is_refilled
    }

    pub(super) fn defer_refill(&mut self, to: BlockId, load: OpId, states: &[State], map: &HashMap<Value, Value>) {
        let block = self.func.parent_block(load);
        if self.refills.as_ref().is_some_and(|refills| refills.left) {
            self.refill_after_loops(block, to, states, map);
        }
        match &mut self.refills {
            Some(refills) => refills.loads.push(load),
            None => {
                let literal = Op::Constant { value: Literal::Bool(true) };
                let pending = self.builder(to).one(literal, &[], Type::scalar(DType::Bool));
                self.refills = Some(Refills { block, loads: vec![load], pending, left: false, inside: None });
            }
        }
    }

    /// Whether a block is the body of a loop with loads, and has no other such block inside.
    fn is_innermost(&self, body: BlockId) -> bool {
        self.plan.blocks.get(&body).is_some_and(|(group, _)| !self.plan.groups[*group].once)
    }

    /// Enters a loop of the producer: with a body that has loads itself, its first iteration issues what waits.
    pub(super) fn enter_loop(&mut self, body: BlockId, region: BlockId, index: Value, lower: Value) {
        if !self.is_innermost(body) {
            return;
        }
        let Some(Refills { pending, .. }) = self.refills else { return };
        let mut b = self.builder(region);
        let is_first = b.cmp(CmpOp::Eq, index, lower);
        let issues = b.binary(BinaryOp::And, is_first, pending);
        if let Some(refills) = &mut self.refills {
            refills.inside = Some((body, issues));
        }
    }

    /// After a load in a loop that [`enter_loop`](Self::enter_loop) has entered.
    pub(super) fn refill_in_loop(&mut self, from: BlockId, to: BlockId, states: &[State], map: &HashMap<Value, Value>) {
        let Some(refills) = &mut self.refills else { return };
        if let Some((body, issues)) = refills.inside
            && body == from
        {
            refills.inside = None;
            let loads = refills.loads.clone();
            self.issue_refills(to, loads, issues, states, map);
        }
    }

    /// Leaves a loop with these bounds.
    pub(super) fn leave_loop(&mut self, body: BlockId, to: BlockId, [lower, upper]: [Value; 2]) {
        if !self.is_innermost(body) {
            return;
        }
        let Some(Refills { pending, .. }) = self.refills else { return };
        let mut b = self.builder(to);
        let is_empty = b.cmp(CmpOp::Ge, lower, upper);
        let still = b.binary(BinaryOp::And, pending, is_empty);
        if let Some(refills) = &mut self.refills {
            (refills.pending, refills.left) = (still, true);
        }
    }

    /// Issues what waits before a branch, or a loop around others.
    pub(super) fn refill_before(&mut self, id: OpId, to: BlockId, states: &[State], map: &HashMap<Value, Value>) {
        let data = self.func.op(id);
        if !matches!(data.op, Op::For { .. }) || !self.is_innermost(data.regions[0]) {
            let block = self.func.parent_block(id);
            self.refill_after_loops(block, to, states, map);
        }
    }

    /// At the end of a block: loads of it that no loop has issued.
    pub(super) fn refill_after_loops(
        &mut self,
        from: BlockId,
        to: BlockId,
        states: &[State],
        map: &HashMap<Value, Value>,
    ) {
        if let Some(refills) = self.refills.take_if(|refills| refills.block == from) {
            self.issue_refills(to, refills.loads, refills.pending, states, map);
        }
    }

    fn issue_refills(
        &mut self,
        to: BlockId,
        loads: Vec<OpId>,
        condition: Value,
        states: &[State],
        map: &HashMap<Value, Value>,
    ) {
        let [issue, skip] = [0, 1].map(|_| self.func.add_block());
        for load in loads {
            self.produce_loads(issue, load, states, map);
        }
        self.end(issue);
        self.end(skip);
        let loc = self.loc.clone();
        self.func.append(to, Op::If, vec![condition], vec![], vec![issue, skip], loc);
    }
}
