//! Runs the ops that a schedule places behind the main stage of a loop one iteration later.
//!
//! Does: the main stage of the first iteration moves before the loop (prologue); the loop runs the main stage of its own
//! iteration and the ops behind of the previous one, in the order of the schedule; the ops behind of the last iteration
//! move after the loop (epilogue). Values of the main stage that ops behind use become loop-carried. An `if` guards all
//! of it, since the loop may have no iterations. Where waits are deferred, only the releases of the buffers that their
//! `wgmma` read are behind.
//!
//! Consecutive loops with the same ops behind, as `split_loops` makes them, are one pipeline: what is behind in the last
//! iteration of one loop runs in the first iteration of the next. Each loop then has its prologue for the case that no
//! loop before it had an iteration, and the last one has the epilogue.
//! Requires: stage *schedule*, with rings that keep each buffer of an op behind for one more iteration.
//! Keeps: results. Placements of deferred waits stay, for `delay_waits`; others are gone afterwards.
//! Does not: choose. [`crate::schedule`] does.

use crate::ir::nested::{copy_op, replace_in};
use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, Effects, Func, Op, OpData, OpId, Type, UnaryOp, Value};
use crate::schedule::stages;
use std::collections::{HashMap, HashSet};

/// ptxas 13.0 serializes two `wgmma` whose accumulators go from one loop of a chain into the next.
const MAX_DOTS_IN_CHAIN: usize = 1;

/// Runs the pass.
pub fn run(func: &mut Func) {
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    let mut rotations = Vec::new();
    for id in loops {
        let region = func.op(id).regions[0];
        stages::undefer_unsafe_waits(func, region);
        rotations.push(Rotation::new(func, id));
    }
    // What loops that are built leave for the next of their chains.
    let mut pending: HashMap<OpId, Pending> = HashMap::new();
    for (at, rotation) in rotations.iter().enumerate() {
        let earlier = pending.remove(&rotation.id);
        let next = rotations[at + 1..].iter().find_map(|next| Some((next.id, rotation.continues_in(func, next)?)));
        if !rotation.behind.is_empty() {
            if earlier.is_none() && next.is_none() {
                rotation.build(func);
            } else {
                let left = rotation.build_in_chain(func, earlier, next.is_none());
                pending.extend(next.map(|(id, order)| (id, left.reordered(&order))));
            }
            // Deferred waits leave the `wgmma` of this iteration in flight: those of the previous one, whose buffers
            // are released here, are complete.
            rotation.releases.iter().for_each(|&op| func.add_operands(op, &rotation.waited));
        }
        rotation.clear_places(func);
    }
    assert!(pending.is_empty(), "internal compiler error: a chain of loops without an end; please report this");
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

/// What a loop of a chain leaves for the next one.
struct Pending {
    /// Whether some loop of the chain so far had an iteration.
    exists: Value,
    /// The values of the main stage of its last iteration that the ops behind use.
    values: Vec<Value>,
}

impl Pending {
    fn reordered(self, order: &[usize]) -> Pending {
        Pending { exists: self.exists, values: order.iter().map(|&i| self.values[i]).collect() }
    }
}

/// Which values of one loop are which of another: each is at most one, of the same type.
#[derive(Default)]
struct Correspondence {
    to: HashMap<Value, Value>,
    from: HashMap<Value, Value>,
}

impl Correspondence {
    fn get(&self, v: Value) -> Option<Value> {
        self.to.get(&v).copied()
    }

    /// Adds a pair; `None` if one of them has another counterpart, or another type.
    fn add(&mut self, func: &Func, v: Value, w: Value) -> Option<()> {
        let (to, from) = (*self.to.entry(v).or_insert(w), *self.from.entry(w).or_insert(v));
        (to == w && from == v && func.ty(v) == func.ty(w)).then_some(())
    }
}

struct Rotation {
    id: OpId,
    region: BlockId,
    /// The ops that run one iteration later.
    behind: HashSet<OpId>,
    /// Those that release buffers.
    releases: Vec<OpId>,
    /// The results of deferred waits.
    waited: Vec<Value>,
    /// The values of the main stage that the ops behind use.
    cross_stage: Vec<Value>,
    /// All ops of the body, without the terminator, as the loop runs them.
    order: Vec<OpId>,
}

impl Rotation {
    fn new(func: &mut Func, id: OpId) -> Rotation {
        let region = func.op(id).regions[0];
        let behind = stages::behind_ops(func, region);
        let accumulator = |&dot: &OpId| {
            let (wait, _) = stages::accumulator_of(func, region, dot)
                .expect("internal compiler error: a deferred wgmma without an accumulator; please report this");
            func.result(wait)
        };
        let waited: Vec<Value> = stages::deferred_dots(func, region).iter().map(accumulator).collect();
        let body = func.block(region).ops.iter().copied();
        let releases: Vec<OpId> = body.filter(|op| behind.contains(op) && is_release(func, *op)).collect();
        releases.iter().for_each(|&op| drop_main_operands(func, op, &behind));
        let cross_stage = stages::cross_stage_values(func, region, &behind);
        let mut ordered = stages::orders(func, region);
        ordered.sort_by_key(|(_, order)| *order);
        let order = ordered.into_iter().map(|(op, _)| op).collect();
        Rotation { id, region, behind, releases, waited, cross_stage, order }
    }

    /// Removes the placements, except those of deferred waits.
    fn clear_places(&self, func: &mut Func) {
        let deferred = stages::deferred_dots(func, self.region);
        let end = func.terminator(self.region);
        for op in func.block(self.region).ops.clone() {
            let waits = func.op(op).results.first().is_some_and(|v| self.waited.contains(v));
            let keeps = waits || deferred.contains(&op) || op == end && !deferred.is_empty();
            if !keeps {
                func.set_place(op, None);
            }
        }
    }

    /// The ops behind, in the order of the body.
    fn behind_in_order<'a>(&'a self, func: &'a Func) -> impl Iterator<Item = OpId> + 'a {
        func.block(self.region).ops.iter().copied().filter(|op| self.behind.contains(op))
    }

    /// The indices of the carried values that ops behind compute.
    fn carried_behind(&self, func: &Func) -> Vec<usize> {
        let yields = &func.op(func.terminator(self.region)).operands;
        let is_behind = |&i: &usize| func.def_op(yields[i]).is_some_and(|id| self.behind.contains(&id));
        (0..yields.len()).filter(is_behind).collect()
    }

    /// Whether what is behind in the last iteration of this loop can run in the first iteration of the next: the ops
    /// behind of both compute the same, the carried values that they compute go into the next loop and nowhere else, and
    /// what is between the loops is pure. If so, for each cross-stage value of the next loop the index of that of this.
    fn continues_in(&self, func: &Func, next: &Rotation) -> Option<Vec<usize>> {
        let (block, to) = (func.parent_block(self.id), func.parent_block(next.id));
        if self.behind.is_empty() || block != to || !self.waited.is_empty() || !next.waited.is_empty() {
            return None;
        }
        let dots = self.behind.iter().filter(|&&id| matches!(func.op(id).op, Op::Wgmma { .. })).count();
        if dots > MAX_DOTS_IN_CHAIN {
            return None;
        }
        let has_zero = |&v: &Value| matches!(func.ty(v), Type::Scalar(_) | Type::Tensor { .. });
        if !self.cross_stage.iter().chain(&next.cross_stage).all(has_zero) {
            return None;
        }
        let between = &func.block(block).ops[func.position(self.id) + 1..func.position(next.id)];
        if !between.iter().all(|&op| func.effects(op) == Effects::Pure) {
            return None;
        }
        let [these, those] = [self, next].map(|r| func.block(r.region).params.as_slice());
        let mut same = Correspondence::default();
        let next_carried = next.carried_behind(func);
        let carried = self.carried_behind(func);
        for &i in &carried {
            let [used] = func.uses(func.op(self.id).results[i]).to_vec()[..] else { return None };
            let j = used.index.checked_sub(3).filter(|j| used.op == next.id && next_carried.contains(j))?;
            same.add(func, these[1 + i], those[1 + j])?;
        }
        let (ops, next_ops): (Vec<OpId>, Vec<OpId>) =
            (self.behind_in_order(func).collect(), next.behind_in_order(func).collect());
        if ops.len() != next_ops.len() || carried.len() != next_carried.len() {
            return None;
        }
        for (&a, &b) in ops.iter().zip(&next_ops) {
            let (a, b) = (func.op(a), func.op(b));
            let counts = |data: &OpData| (data.operands.len(), data.results.len(), data.regions.len());
            if a.op != b.op || counts(a) != counts(b) || !a.regions.is_empty() {
                return None;
            }
            for (&v, &w) in a.operands.iter().zip(&b.operands) {
                // Other values than those of the loops are the same value.
                if same.get(v).is_none() && !self.cross_stage.contains(&v) && v != w {
                    return None;
                }
                if self.cross_stage.contains(&v) != next.cross_stage.contains(&w) {
                    return None;
                }
                same.add(func, v, w)?;
            }
            a.results.iter().zip(&b.results).try_for_each(|(&v, &w)| same.add(func, v, w))?;
        }
        let index = |w: &Value| self.cross_stage.iter().position(|&v| same.get(v) == Some(*w));
        next.cross_stage.iter().map(index).collect()
    }

    /// Builds a loop of a chain. `earlier` is what the loops before it left behind. The last loop has the epilogue.
    fn build_in_chain(&self, func: &mut Func, earlier: Option<Pending>, is_last: bool) -> Pending {
        let end = func.terminator(self.region);
        let yields = func.op(end).operands.clone();
        let [lower, upper, step] = [0, 1, 2].map(|i| func.op(self.id).operands[i]);
        let inits = func.op(self.id).operands[3..].to_vec();
        let loc = func.op(self.id).loc.clone();
        let carried_behind = self.carried_behind(func);

        // The first iteration of the chain is in this loop: its main stage is the prologue.
        let (starts, continues) = (func.add_block(), func.add_block());
        let mut map = self.main_stage_of_first(func, starts, end, lower, &inits);
        let mut at_first = |v: &Value| *map.entry(*v).or_insert(*v);
        let mut first: Vec<Value> = yields.iter().map(&mut at_first).collect();
        carried_behind.iter().for_each(|&i| first[i] = inits[i]);
        first.extend(self.cross_stage.iter().map(at_first));
        first.push(Builder::new(func, starts, loc.clone()).binary(BinaryOp::Add, lower, step));
        Builder::new(func, starts, loc.clone()).op(Op::Yield, &first, &[]);
        let types: Vec<Type> = first.iter().map(|&v| func.ty(v).clone()).collect();

        let mut b = Builder::before(func, self.id, loc.clone());
        let exists = b.cmp(CmpOp::Lt, lower, upper);
        let (is_start, any) = match &earlier {
            Some(earlier) => {
                let none = b.unary(UnaryOp::Not, earlier.exists);
                (b.binary(BinaryOp::And, exists, none), b.binary(BinaryOp::Or, exists, earlier.exists))
            }
            None => (exists, exists),
        };
        let nothing = |ty: &Type| Builder::new(func, continues, loc.clone()).zero(ty.clone());
        let values = match earlier {
            Some(Pending { values, .. }) => values,
            None => types[inits.len()..types.len() - 1].iter().map(nothing).collect(),
        };
        let passed = [&inits[..], &values, &[lower]].concat();
        Builder::new(func, continues, loc.clone()).op(Op::Yield, &passed, &[]);
        let entry = func.create_op(Op::If, vec![is_start], types, vec![starts, continues], loc.clone());
        func.move_before(entry, self.id);
        let mut operands = func.op(entry).results.clone();
        let start = operands.pop().expect("internal compiler error: an `if` without results; please report this");
        func.set_operands(self.id, &[&[start, upper, step], &operands[..]].concat());

        let before = self.rotate_body(func, end);
        if is_last {
            self.leave_chain(func, any, &yields, &before);
        }
        Pending { exists: any, values: func.op(self.id).results[inits.len()..].to_vec() }
    }

    /// Emits the epilogue of a chain after its last loop, where some loop had an iteration.
    fn leave_chain(&self, func: &mut Func, any: Value, yields: &[Value], before: &HashMap<Value, Value>) {
        let results = func.op(self.id).results[..yields.len()].to_vec();
        let types: Vec<Type> = results.iter().map(|&v| func.ty(v).clone()).collect();
        let loc = func.op(self.id).loc.clone();
        let (flush, empty) = (func.add_block(), func.add_block());
        let exit = func.create_op(Op::If, Vec::new(), types, vec![flush, empty], loc.clone());
        for (&old, &new) in results.iter().zip(&func.op(exit).results.clone()) {
            func.replace_uses(old, new);
        }
        func.add_operands(exit, &[any]);
        func.move_after(exit, self.id);
        self.epilogue(func, flush, yields, before);
        Builder::new(func, empty, loc).op(Op::Yield, &results, &[]);
    }

    /// Copies the main stage of the first iteration to a block. Returns what its values are there.
    fn main_stage_of_first(
        &self,
        func: &mut Func,
        block: BlockId,
        end: OpId,
        lower: Value,
        inits: &[Value],
    ) -> HashMap<Value, Value> {
        let params = func.block(self.region).params.clone();
        let mut map: HashMap<Value, Value> = HashMap::from([(params[0], lower)]);
        map.extend(params[1..].iter().copied().zip(inits.iter().copied()));
        for op in func.block(self.region).ops.clone() {
            if op != end && !self.behind.contains(&op) {
                let copy = copy_op(func, op, &mut map);
                func.push(block, copy);
            }
        }
        map
    }

    fn build(&self, func: &mut Func) {
        let end = func.terminator(self.region);
        let yields = func.op(end).operands.clone();
        let [lower, upper, step] = [0, 1, 2].map(|i| func.op(self.id).operands[i]);
        let inits = func.op(self.id).operands[3..].to_vec();
        let results = func.op(self.id).results.clone();
        let types: Vec<Type> = results.iter().map(|&v| func.ty(v).clone()).collect();
        let loc = func.op(self.id).loc.clone();
        let carried_behind = self.carried_behind(func);
        let nonempty = func.add_block();
        let empty = func.add_block();

        // Prologue: the main stage of the first iteration.
        let map = self.main_stage_of_first(func, nonempty, end, lower, &inits);
        let at_first = |v: &Value| map.get(v).copied().unwrap_or(*v);
        let next = Builder::new(func, nonempty, loc.clone()).binary(BinaryOp::Add, lower, step);
        let mut operands = vec![next, upper, step];
        operands.extend(yields.iter().map(at_first));
        carried_behind.iter().for_each(|&i| operands[3 + i] = inits[i]);
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
