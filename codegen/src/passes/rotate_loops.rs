//! Runs the ops that a schedule places behind the main stage of a loop one iteration later.
//!
//! Does: the main stage of the first iteration moves before the loop (prologue); the loop runs the main stage of its own
//! iteration and the ops behind of the previous one, in the order of the schedule; the ops behind of the last iteration
//! move after the loop (epilogue). Values of the main stage that ops behind use become loop-carried. An `if` guards all
//! of it, since the loop may have no iterations. Where waits are deferred, only the releases of the buffers that their
//! `wgmma` read are behind.
//! Requires: stage *schedule*, with rings that keep each buffer of an op behind for one more iteration.
//! Keeps: results. Placements of deferred waits stay, for `delay_waits`; others are gone afterwards.
//! Does not: choose. [`crate::schedule`] does.

use crate::ir::nested::{copy_op, replace_in};
use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, Func, Op, OpId, Type, Value};
use crate::schedule::stages;
use std::collections::{HashMap, HashSet};

/// Runs the pass.
pub fn run(func: &mut Func) {
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    for id in loops {
        let region = func.op(id).regions[0];
        stages::undefer_unsafe_waits(func, region);
        let behind = stages::behind_ops(func, region);
        let deferred = stages::deferred_dots(func, region);
        let waited: Vec<Value> = deferred
            .iter()
            .map(|&dot| {
                let (wait, _) = stages::accumulator_of(func, region, dot)
                    .expect("internal compiler error: a deferred wgmma without an accumulator; please report this");
                func.result(wait)
            })
            .collect();
        if !behind.is_empty() {
            let releases: Vec<OpId> = func
                .block(region)
                .ops
                .iter()
                .copied()
                .filter(|op| behind.contains(op) && is_release(func, *op))
                .collect();
            releases.iter().for_each(|&op| drop_main_operands(func, op, &behind));
            let cross_stage = stages::cross_stage_values(func, region, &behind);
            let mut ordered = stages::orders(func, region);
            ordered.sort_by_key(|(_, order)| *order);
            let order = ordered.into_iter().map(|(op, _)| op).collect();
            Rotation { id, region, behind, cross_stage, order }.build(func);
            // Deferred waits leave the `wgmma` of this iteration in flight: those of the previous one, whose buffers
            // are released here, are complete.
            releases.into_iter().for_each(|op| func.add_operands(op, &waited));
        }
        let end = func.terminator(region);
        for op in func.block(region).ops.clone() {
            let waits = func.op(op).results.first().is_some_and(|v| waited.contains(v));
            let keeps = waits || deferred.contains(&op) || op == end && !deferred.is_empty();
            if !keeps {
                func.set_place(op, None);
            }
        }
    }
}

fn is_release(func: &Func, id: OpId) -> bool {
    matches!(func.op(id).op, Op::MbarrierArrive { .. })
}

/// Drops the operands of a release behind that the main stage computes: it ran one iteration earlier.
fn drop_main_operands(func: &mut Func, release: OpId, behind: &HashSet<OpId>) {
    let operands = func.op(release).operands.clone();
    let is_behind = |v: &Value| func.def_op(*v).is_some_and(|id| behind.contains(&id));
    let kept = operands[2..].iter().copied().filter(is_behind);
    let kept: Vec<Value> = operands[..2].iter().copied().chain(kept).collect();
    func.set_operands(release, &kept);
}

struct Rotation {
    id: OpId,
    region: BlockId,
    /// The ops that run one iteration later.
    behind: HashSet<OpId>,
    /// The values of the main stage that they use.
    cross_stage: Vec<Value>,
    /// All ops of the body, without the terminator, as the loop runs them.
    order: Vec<OpId>,
}

impl Rotation {
    fn build(&self, func: &mut Func) {
        let end = func.terminator(self.region);
        let yields = func.op(end).operands.clone();
        let [lower, upper, step] = [0, 1, 2].map(|i| func.op(self.id).operands[i]);
        let inits = func.op(self.id).operands[3..].to_vec();
        let results = func.op(self.id).results.clone();
        let types: Vec<Type> = results.iter().map(|&v| func.ty(v).clone()).collect();
        let loc = func.op(self.id).loc.clone();
        let is_behind: Vec<bool> =
            yields.iter().map(|&y| func.def_op(y).is_some_and(|id| self.behind.contains(&id))).collect();
        let nonempty = func.add_block();
        let empty = func.add_block();

        // Prologue: the main stage of the first iteration.
        let params = func.block(self.region).params.clone();
        let mut map: HashMap<Value, Value> = HashMap::from([(params[0], lower)]);
        map.extend(params[1..].iter().copied().zip(inits.iter().copied()));
        for op in func.block(self.region).ops.clone() {
            if op != end && !self.behind.contains(&op) {
                let copy = copy_op(func, op, &mut map);
                func.push(nonempty, copy);
            }
        }
        let at_first = |v: &Value| map.get(v).copied().unwrap_or(*v);
        let next = Builder::new(func, nonempty, loc.clone()).binary(BinaryOp::Add, lower, step);
        let mut operands = vec![next, upper, step];
        let carried = yields.iter().zip(&inits).zip(&is_behind);
        operands.extend(carried.map(|((y, &init), &is_behind)| if is_behind { init } else { at_first(y) }));
        operands.extend(self.cross_stage.iter().map(at_first));

        // Users of the loop's results now use those of the `if`.
        let branch = func.create_op(Op::If, Vec::new(), types, vec![nonempty, empty], loc.clone());
        for (&old, &new) in results.iter().zip(&func.op(branch).results.clone()) {
            func.replace_uses(old, new);
        }
        let exists = Builder::before(func, self.id, loc.clone()).cmp(CmpOp::Lt, lower, upper);
        func.add_operands(branch, &[exists]);
        func.move_before(branch, self.id);
        func.detach(self.id);
        func.push(nonempty, self.id);
        func.set_operands(self.id, &operands);

        let before = self.rotate_body(func, end);
        self.epilogue(func, nonempty, &yields, &before);
        let mut b = Builder::new(func, empty, loc);
        b.op(Op::Yield, &inits, &[]);
    }

    /// Rebuilds the loop body: the main stage, and the ops behind of the previous iteration, which take values from new
    /// carried ones. Returns these, keyed by the value of the main stage that they carry.
    fn rotate_body(&self, func: &mut Func, end: OpId) -> HashMap<Value, Value> {
        let mut before = HashMap::new();
        for &v in &self.cross_stage {
            let ty = func.ty(v).clone();
            before.insert(v, func.add_param(self.region, ty.clone()));
            func.add_result(self.id, ty);
        }
        func.add_operands(end, &self.cross_stage);
        // Ops of the main stage see what the ops behind of the previous iteration, which ran before them, computed.
        let computed: HashMap<Value, Value> = stages::carried_from(func, self.region, &self.behind).collect();
        for op in &self.order {
            replace_in(func, *op, if self.behind.contains(op) { &before } else { &computed });
        }
        func.set_ops(self.region, &[&self.order[..], &[end]].concat());
        before
    }

    /// Emits the epilogue: the ops behind of the last iteration, after the loop.
    fn epilogue(&self, func: &mut Func, block: BlockId, yields: &[Value], before: &HashMap<Value, Value>) {
        let params = func.block(self.region).params.clone();
        let results = func.op(self.id).results.clone();
        let mut map: HashMap<Value, Value> = params[1..].iter().copied().zip(results.iter().copied()).collect();
        debug_assert!(before.values().all(|v| map.contains_key(v)));
        for op in func.block(self.region).ops.clone() {
            if self.behind.contains(&op) {
                let copy = copy_op(func, op, &mut map);
                func.push(block, copy);
            }
        }
        let last = yields.iter().zip(&results).map(|(y, &result)| {
            let behind = func.def_op(*y).is_some_and(|id| self.behind.contains(&id));
            if behind { map[y] } else { result }
        });
        let operands: Vec<Value> = last.collect();
        let loc = func.op(self.id).loc.clone();
        func.append(block, Op::Yield, operands, Vec::new(), Vec::new(), loc);
    }
}
