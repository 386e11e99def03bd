//! Software-pipelines loops in two stages, so that `wgmma` of stage 1 overlap with the arithmetic of the next
//! iteration.
//!
//! Does: in a loop with `wgmma` marked for stage 1, splits each iteration in two stages. Stage 1 consists of these
//! `wgmma` and all ops that depend on them, stage 0 of the other ops. Stage 0 of the first iteration moves before the
//! loop (prologue); the loop runs stage 0 of its own iteration and stage 1 of the previous one; stage 1 of the last
//! iteration moves after the loop (epilogue). Values that stage 1 uses of stage 0 become loop-carried. An `if` guards
//! all of it, since the loop may have no iterations. In the loop, stage 1 precedes the first wait of stage 0, so that
//! the `wgmma` of both are in flight together. Where buffers are released after a `wgmma` with a deferred wait, stage 1
//! consists of these releases only, at the end of the body.
//! Requires: rings that keep each buffer of such a `wgmma` for one more iteration (`pipeline_loads` allocates them), or
//! whose buffers are released by arrivals (`specialize_warps`).
//! Keeps: results.
//! Does not: rotate where a `wgmma` of stage 1 reads a buffer that the loop itself fills, or where a ring of one buffer
//! would have to hold two; it drops the mark.

use super::edit::{copy_op, replace_in};
use super::stage_one;
use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, Func, Op, OpId, Type, Value};
use std::collections::{HashMap, HashSet};

/// Runs the pass.
pub fn run(func: &mut Func) {
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    for id in loops {
        let region = func.op(id).regions[0];
        let dots = stage_one::marked_dots(func, region);
        if dots.is_empty() {
            rotate_releases(func, id);
            continue;
        }
        for &dot in &dots {
            if let Op::Wgmma { stage_one, .. } = func.op_mut(dot) {
                *stage_one = None;
            }
        }
        let Some(mut ops) = stage_one::dependent_ops(func, region, &dots) else { continue };
        if !has_spare_buffer(func, &ops) {
            continue;
        }
        stage_one::sink(func, region, &mut ops);
        drop_stage_zero_operands(func, &ops);
        let cross_stage = stage_one::cross_stage_values(func, region, &ops);
        if cross_stage.iter().all(|&v| matches!(func.ty(v), Type::Scalar(_) | Type::Tensor { .. })) {
            let wait = |op: &OpId| matches!(func.op(*op).op, Op::WgmmaWait { .. }) && !ops.contains(op);
            let before = func.block(region).ops.iter().copied().find(wait);
            let before = before.expect("internal compiler error: stage 1 without a wait in stage 0");
            Rotation { id, region, stage_one: ops, cross_stage, before }.build(func);
        }
    }
}

/// Moves the releases of the buffers of deferred `wgmma` to the next iteration.
fn rotate_releases(func: &mut Func, id: OpId) {
    let region = func.op(id).regions[0];
    stage_one::drop_unsafe_marks(func, region);
    let dots = stage_one::deferred_dots(func, region);
    let wait = |&dot: &OpId| {
        stage_one::accumulator_of(func, region, dot)
            .expect("internal compiler error: a deferred wgmma without an accumulator")
            .0
    };
    let waited: Vec<Value> = dots.iter().map(|dot| func.result(wait(dot))).collect();
    let after = |op: &OpId| {
        let data = func.op(*op);
        matches!(data.op, Op::MbarrierArrive { .. }) && data.operands.iter().any(|v| waited.contains(v))
    };
    let releases: HashSet<OpId> = func.block(region).ops.iter().copied().filter(after).collect();
    if releases.is_empty() {
        return;
    }
    if !has_spare_buffer(func, &releases) {
        dots.into_iter().for_each(|dot| stage_one::wait_in_iteration(func, dot));
        return;
    }
    for &op in &releases {
        let ring = func.op(op).operands[..2].to_vec();
        func.set_operands(op, &ring);
    }
    let cross_stage = stage_one::cross_stage_values(func, region, &releases);
    let before = func.terminator(region);
    Rotation { id, region, stage_one: releases.clone(), cross_stage, before }.build(func);
    // The waits leave the `wgmma` of this iteration in flight: those whose buffers are released here are complete.
    for op in releases {
        func.add_operands(op, &waited);
    }
}

/// Whether each ring whose buffers stage 1 releases has a second buffer, which can be filled before the release.
fn has_spare_buffer(func: &Func, stage_one: &HashSet<OpId>) -> bool {
    let releases = stage_one.iter().filter(|&&op| matches!(func.op(op).op, Op::MbarrierArrive { .. }));
    releases.map(|&op| func.ty(func.op(op).operands[0])).all(|ty| !matches!(ty, Type::Barrier { count: 1 }))
}

/// Drops the operands of releases in stage 1 that stage 0 computes: stage 0 ran one iteration earlier.
fn drop_stage_zero_operands(func: &mut Func, stage_one: &HashSet<OpId>) {
    for &op in stage_one.iter().filter(|&&op| matches!(func.op(op).op, Op::MbarrierArrive { .. })).collect::<Vec<_>>() {
        let operands = func.op(op).operands.clone();
        let is_stage_one = |v: &Value| func.def_op(*v).is_some_and(|id| stage_one.contains(&id));
        let kept = operands[2..].iter().copied().filter(is_stage_one);
        let kept: Vec<Value> = operands[..2].iter().copied().chain(kept).collect();
        func.set_operands(op, &kept);
    }
}

struct Rotation {
    id: OpId,
    region: BlockId,
    /// The ops of stage 1.
    stage_one: HashSet<OpId>,
    /// The values of stage 0 that stage 1 uses.
    cross_stage: Vec<Value>,
    /// The op of stage 0 before which stage 1 is inserted.
    before: OpId,
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
        let is_stage_one: Vec<bool> =
            yields.iter().map(|&y| func.def_op(y).is_some_and(|id| self.stage_one.contains(&id))).collect();
        let nonempty = func.add_block();
        let empty = func.add_block();

        // Prologue: stage 0 of the first iteration.
        let params = func.block(self.region).params.clone();
        let mut map: HashMap<Value, Value> = HashMap::from([(params[0], lower)]);
        map.extend(params[1..].iter().copied().zip(inits.iter().copied()));
        for op in func.block(self.region).ops.clone() {
            if op != end && !self.stage_one.contains(&op) {
                let copy = copy_op(func, op, &mut map);
                func.push(nonempty, copy);
            }
        }
        let at_first = |v: &Value| map.get(v).copied().unwrap_or(*v);
        let next = Builder::new(func, nonempty, loc.clone()).binary(BinaryOp::Add, lower, step);
        let mut operands = vec![next, upper, step];
        let carried = yields.iter().zip(&inits).zip(&is_stage_one);
        operands.extend(carried.map(|((y, &init), &is_stage_one)| if is_stage_one { init } else { at_first(y) }));
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

    /// Rebuilds the loop body: stage 0, and stage 1 of the previous iteration, which takes its values from new carried
    /// values. Returns these, keyed by the value of stage 0 that they carry.
    fn rotate_body(&self, func: &mut Func, end: OpId) -> HashMap<Value, Value> {
        let mut before = HashMap::new();
        for &v in &self.cross_stage {
            let ty = func.ty(v).clone();
            before.insert(v, func.add_param(self.region, ty.clone()));
            func.add_result(self.id, ty);
        }
        func.add_operands(end, &self.cross_stage);
        let ops = func.block(self.region).ops.clone();
        let (stage_one_ops, mut stage_zero_ops): (Vec<OpId>, Vec<OpId>) =
            ops.into_iter().partition(|op| self.stage_one.contains(op));
        for &op in &stage_one_ops {
            replace_in(func, op, &before);
        }
        self.sink_carried_values(func, &mut stage_zero_ops);
        let at = stage_zero_ops.iter().position(|&op| op == self.before);
        let at = at.expect("internal compiler error: no insertion point for stage 1");
        stage_zero_ops.splice(at..at, stage_one_ops);
        func.set_ops(self.region, &stage_zero_ops);
        before
    }

    /// Moves the ops whose results only stage 1 of the next iteration uses to the end of the body: these results
    /// overwrite registers that a `wgmma` in flight still reads.
    fn sink_carried_values(&self, func: &Func, stage_zero_ops: &mut Vec<OpId>) {
        let only_carried = |&op: &OpId| {
            let data = func.op(op);
            let pure = data.op.effects() == crate::ir::Effects::Pure && data.results.len() == 1;
            pure && func.ty(data.results[0]).is_tensor()
                && self.cross_stage.contains(&data.results[0])
                && func.uses(data.results[0]).len() == 1
        };
        let moved: Vec<OpId> = stage_zero_ops.iter().copied().filter(only_carried).collect();
        stage_zero_ops.retain(|op| !moved.contains(op));
        let end = stage_zero_ops.len() - 1;
        stage_zero_ops.splice(end..end, moved);
    }

    /// Emits the epilogue: stage 1 of the last iteration, after the loop.
    fn epilogue(&self, func: &mut Func, block: BlockId, yields: &[Value], before: &HashMap<Value, Value>) {
        let params = func.block(self.region).params.clone();
        let results = func.op(self.id).results.clone();
        let mut map: HashMap<Value, Value> = params[1..].iter().copied().zip(results.iter().copied()).collect();
        debug_assert!(before.values().all(|v| map.contains_key(v)));
        for op in func.block(self.region).ops.clone() {
            if self.stage_one.contains(&op) {
                let copy = copy_op(func, op, &mut map);
                func.push(block, copy);
            }
        }
        let last = yields.iter().zip(&results).map(|(y, &result)| {
            let stage_one = func.def_op(*y).is_some_and(|id| self.stage_one.contains(&id));
            if stage_one { map[y] } else { result }
        });
        let operands: Vec<Value> = last.collect();
        let loc = func.op(self.id).loc.clone();
        func.append(block, Op::Yield, operands, Vec::new(), Vec::new(), loc);
    }
}
