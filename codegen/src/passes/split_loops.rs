//! Splits loops at mask boundaries (index-set splitting), so that most iterations run without masks.
//!
//! Does: where a `for` with dots (or a scan, or `split = true`) selects by an integer comparison that has the same outcome
//! for all elements up to some iteration, or from some iteration on (a causal mask away from the diagonal, the end of a
//! sequence before its last tile), splits the loop into two consecutive loops. In the loop where the outcome is known, the
//! comparison becomes a constant, the `select` disappears, and so do boundary checks of loads that are always in bounds
//! there. In loops with a scan or `split = true`, such loads alone suffice. The split index is computed before the loops.
//! Both loops keep the carried values and hints of the original.
//! Requires: stage *tile*, views rebuilt at their uses (`resolve_views`), invariant ops outside of loops (`licm`).
//! Keeps: every value, bit for bit, and the order of effects. 32-bit arithmetic may wrap, and so may comparisons with
//! it; the 64-bit sums of this pass cannot. Where a wrap would make a difference, all iterations run in the loop with
//! the mask.
//! Does not: split a loop without a dot or a scan directly in its body, unless it has `split = true`: other loops are
//! memory-bound, and the code would only grow. Nor split a loop twice, nor follow comparisons of values other than
//! `factor · index + scalars + arange`, nor loops with `split = false` or, without `split = true`, with `replicas`, nor
//! remove dead ops (`dce` does).

mod affine;
mod bound;
#[cfg(test)]
mod tests;

use super::canonicalize;
use crate::ir::nested::copy_op;
use crate::ir::{BinaryOp, Builder, CmpOp, Func, Literal, Op, OpId, UnaryOp, Value};
use affine::{Affine, Loop, add_test};
use bound::{Conditions, Side};
use std::collections::HashMap;

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut changed = false;
    // Inner loops first: splitting an outer loop with its own dot copies the inner loops after they have been split.
    for id in func.walk().into_iter().rev() {
        if let Some(plan) = plan(func, id) {
            split(func, &plan);
            changed = true;
        }
    }
    if changed {
        canonicalize::run(func);
    }
    changed
}

/// A comparison whose outcome is the same for all elements in the iterations of one side.
struct MaskComparison {
    comparison: Value,
    outcome: bool,
}

/// The plan for one loop.
struct Plan {
    range: Loop,
    conditions: Conditions,
    comparisons: Vec<MaskComparison>,
    /// Loads, by their results, with the dimensions whose bounds check is redundant.
    loads: Vec<(Value, Vec<usize>)>,
}

fn plan(func: &Func, id: OpId) -> Option<Plan> {
    let Op::For { split: split @ (None | Some(true)), replicas, .. } = func.op(id).op else { return None };
    // Programs that share loads run the same iterations, and a mask differs between them.
    if split.is_none() && replicas.is_some_and(|count| count > 1) {
        return None;
    }
    let ops = &func.block(func.op(id).regions[0]).ops;
    let has = |wanted: fn(&Op) -> bool| ops.iter().any(|&op| wanted(&func.op(op).op));
    let computes = split == Some(true) || has(|op| matches!(op, Op::Scan { .. }));
    if !computes && !has(|op| matches!(op, Op::Dot { .. })) {
        return None;
    }
    let range = Loop::of(func, id)?;
    let mut plan = Plan {
        conditions: Conditions { side: Side::First, sums: Vec::new(), at_start: Vec::new(), tests: Vec::new() },
        comparisons: Vec::new(),
        loads: Vec::new(),
        range,
    };
    for leaf in comparisons(func, &plan.range) {
        let mut tests = Vec::new();
        let Some(sum) = slack(func, &plan.range, &leaf, &mut tests) else { continue };
        let side = if sum.index < 0 { Side::First } else { Side::Last };
        // The first comparison determines which end of the loop runs without masks.
        if plan.comparisons.is_empty() || side == plan.conditions.side {
            plan.conditions.side = side;
            add(&mut plan.conditions.sums, sum);
            tests.into_iter().for_each(|test| add_test(&mut plan.conditions.tests, test));
            plan.comparisons.push(leaf);
        }
    }
    // Copies load tiles for dots: their checks alone cost nothing.
    if plan.comparisons.is_empty() && !computes {
        return None;
    }
    for &op in ops {
        drop_bounds_checks(func, op, &mut plan);
    }
    (!plan.comparisons.is_empty() || !plan.loads.is_empty()).then_some(plan)
}

fn add(sums: &mut Vec<Affine>, sum: Affine) {
    if !sums.contains(&sum) {
        sums.push(sum);
    }
}

/// The tile comparisons that determine the conditions of `select` in a loop, with the outcomes for which they do.
fn comparisons(func: &Func, range: &Loop) -> Vec<MaskComparison> {
    let mut found = Vec::new();
    for &op in &func.block(range.region).ops {
        let data = func.op(op);
        if data.op == Op::Select && func.ty(data.operands[0]).is_tensor() {
            // A mask replaces elements by a constant: the wanted outcome keeps the elements.
            let [then, otherwise] = [1, 2].map(|i| func.constant(data.operands[i]).is_some());
            collect_comparisons(func, range, data.operands[0], !then || otherwise, &mut found);
        }
    }
    found
}

/// Adds the comparisons, with outcomes, that together make `condition` equal to `outcome`.
fn collect_comparisons(func: &Func, range: &Loop, condition: Value, outcome: bool, found: &mut Vec<MaskComparison>) {
    let Some(id) = func.def_op(condition) else { return };
    let data = func.op(id);
    match (&data.op, &data.operands[..]) {
        (Op::Splat | Op::ExpandDims { .. } | Op::Broadcast | Op::Trans { .. } | Op::Reshape, &[x]) => {
            collect_comparisons(func, range, x, outcome, found)
        }
        (Op::Unary(UnaryOp::Not), &[x]) => collect_comparisons(func, range, x, !outcome, found),
        (Op::Binary(op), &[x, y]) if *op == if outcome { BinaryOp::And } else { BinaryOp::Or } => {
            collect_comparisons(func, range, x, outcome, found);
            collect_comparisons(func, range, y, outcome, found);
        }
        (Op::Cmp(_), _) => {
            let known = found.iter().any(|leaf| leaf.comparison == condition);
            if !known && func.is_in(id, range.region) {
                found.push(MaskComparison { comparison: condition, outcome });
            }
        }
        _ => {}
    }
}

/// A sum that depends on the index, and whose elements are all non-negative exactly where all elements of the
/// comparison have the wanted outcome.
fn slack(func: &Func, range: &Loop, leaf: &MaskComparison, tests: &mut Vec<Affine>) -> Option<Affine> {
    let data = func.op(func.def_op(leaf.comparison)?);
    let Op::Cmp(op) = data.op else { return None };
    let [x, y] = [data.operands[0], data.operands[1]];
    // The condition is small + strict ≤ large.
    let (small, large, strict) = match (op, leaf.outcome) {
        (CmpOp::Lt, true) | (CmpOp::Ge, false) => (x, y, 1),
        (CmpOp::Le, true) | (CmpOp::Gt, false) => (x, y, 0),
        (CmpOp::Gt, true) | (CmpOp::Le, false) => (y, x, 1),
        (CmpOp::Ge, true) | (CmpOp::Lt, false) => (y, x, 0),
        (CmpOp::Eq | CmpOp::Ne, _) => return None,
    };
    let mut side = |v: Value| {
        let sum = range.affine(func, v, tests)?;
        range.test(func, v, &sum, tests);
        Some(sum)
    };
    let (small, large) = (side(small)?, side(large)?);
    let strict = Affine { low: strict, high: strict, ..Affine::default() };
    let sum = large.plus(&small, -1)?.plus(&strict, -1)?;
    (sum.index != 0).then_some(sum)
}

/// Adds the bounds checks of a load that are redundant in the loop without masks, with the conditions for that.
fn drop_bounds_checks(func: &Func, op: OpId, plan: &mut Plan) {
    let data = func.op(op);
    let Op::LoadView { boundary, .. } = &data.op else { return };
    let Some(view) = func.def_op(data.operands[0]).map(|id| func.op(id)) else { return };
    if !matches!(view.op, Op::MakeView { .. }) {
        return;
    }
    let block = func.ty(data.results[0]).shape();
    let mut free = Vec::new();
    for &d in boundary {
        let (shape, offset) = (view.operands[1 + d], view.operands[1 + 2 * block.len() + d]);
        let mut tests = Vec::new();
        let Some(offset) = plan.range.affine(func, offset, &mut tests) else { continue };
        let Some(shape) = plan.range.affine(func, shape, &mut tests) else { continue };
        let size = block[d] as i64;
        let size = Affine { low: size, high: size, ..Affine::default() };
        let slack = shape.plus(&offset, -1).and_then(|a| a.plus(&size, -1));
        // Offsets grow with the index: they stay in bounds up to some iteration, if the first is not negative.
        let Some(slack) = slack.filter(|slack| slack.index < 0 && offset.index > 0) else { continue };
        if plan.conditions.side == Side::First {
            free.push(d);
            add(&mut plan.conditions.sums, slack);
            add(&mut plan.conditions.at_start, offset);
            tests.into_iter().for_each(|test| add_test(&mut plan.conditions.tests, test));
        }
    }
    if !free.is_empty() {
        plan.loads.push((data.results[0], free));
    }
}

fn split(func: &mut Func, plan: &Plan) {
    let id = plan.range.id;
    let loc = func.op(id).loc.clone();
    let split_index = bound::split_index(&mut Builder::before(func, id, loc), &plan.range, &plan.conditions);
    let mut copies = HashMap::new();
    let first = copy_op(func, id, &mut copies);
    func.move_before(first, id);
    func.set_operand(first, 1, split_index);
    let bounds = &func.op(id).operands[1..3];
    let second = [&[split_index], bounds, &func.op(first).results].concat();
    func.set_operands(id, &second);

    let known = |v: Value| match plan.conditions.side {
        Side::First => copies[&v],
        Side::Last => v,
    };
    let op_of = |func: &Func, v: Value| func.def_op(v).expect("internal compiler error: an op without its result");
    for leaf in &plan.comparisons {
        let comparison = op_of(func, known(leaf.comparison));
        func.rewrite(comparison, Op::Constant { value: Literal::Bool(leaf.outcome) }, Vec::new());
    }
    for (load, free) in &plan.loads {
        let load = op_of(func, known(*load));
        if let Op::LoadView { boundary, .. } = func.op_mut(load) {
            boundary.retain(|d| !free.contains(d));
        }
    }
}
