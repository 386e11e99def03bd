//! Removes redundant loop-carried values and branch results.
//!
//! Does: replaces a carried value that a loop yields unchanged by its initial value; replaces one of two carried values
//! of a `for` that start equal and take the same step by the other; replaces a result of an `if` whose branches yield
//! the same value by that value. Visits inner ops first, so that values that pass through them become visible outside.
//! Requires: a verified function.
//! Keeps: every computed value.
//! Does not: compare more than one op for equal steps, nor find other equal values (`cse` does), nor remove unused
//! values (`dce` does).

use crate::ir::nested::defined_inside;
use crate::ir::{Effects, Func, Op, OpId, Value};

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut changed = false;
    // In a walk, an op precedes the ops of its regions: the reverse order visits inner ops first.
    for id in func.walk().into_iter().rev() {
        changed |= match func.op(id).op {
            Op::For { .. } => for_loop(func, id),
            Op::If => branch(func, id),
            Op::While => while_loop(func, id),
            _ => false,
        };
    }
    changed
}

fn for_loop(func: &mut Func, id: OpId) -> bool {
    let body = func.op(id).regions[0];
    let end = func.terminator(body);
    let carried = func.op(id).results.len();
    let mut keep = vec![true; carried];
    for (i, kept) in keep.iter_mut().enumerate() {
        let (init, param) = (func.op(id).operands[3 + i], func.block(body).params[1 + i]);
        let next = func.op(end).operands[i];
        if next == param || next == init {
            let result = func.op(id).results[i];
            func.replace_uses(param, init);
            func.replace_uses(result, init);
            *kept = false;
        }
    }
    for j in 0..carried {
        if let Some(i) = (0..j).find(|&i| keep[i] && keep[j] && have_equal_recurrences(func, id, i, j)) {
            let params = &func.block(body).params;
            let (first, second) = (params[1 + i], params[1 + j]);
            let results = &func.op(id).results;
            let (first_result, second_result) = (results[i], results[j]);
            func.replace_uses(second, first);
            func.replace_uses(second_result, first_result);
            keep[j] = false;
        }
    }
    drop_for(func, id, &keep)
}

/// Whether carried values `i` and `j` start equal and their next values are the same op on themselves and the same
/// other operands, for example the offsets of two views that advance together.
fn have_equal_recurrences(func: &Func, id: OpId, i: usize, j: usize) -> bool {
    let data = func.op(id);
    let body = data.regions[0];
    let (first, second) = (func.block(body).params[1 + i], func.block(body).params[1 + j]);
    let next = |k: usize| func.def_op(func.op(func.terminator(body)).operands[k]).map(|op| func.op(op));
    let (Some(a), Some(b)) = (next(i), next(j)) else { return false };
    let same_step = a.op == b.op
        && a.op.effects() == Effects::Pure
        && a.regions.is_empty()
        && (a.results.len(), b.results.len()) == (1, 1)
        && a.operands.len() == b.operands.len()
        && a.operands.iter().zip(&b.operands).all(|(&x, &y)| (x == first && y == second) || (x == y && x != second));
    data.operands[3 + i] == data.operands[3 + j] && func.ty(first) == func.ty(second) && same_step
}

/// Removes the carried values of a `for` that `keep` excludes. They must be unused. Returns whether there are any.
pub(super) fn drop_for(func: &mut Func, id: OpId, keep: &[bool]) -> bool {
    if !keep.contains(&false) {
        return false;
    }
    let body = func.op(id).regions[0];
    func.retain_operands(id, &[&[true; 3], keep].concat());
    func.retain_params(body, &[&[true], keep].concat());
    func.retain_operands(func.terminator(body), keep);
    func.retain_results(id, keep);
    true
}

fn branch(func: &mut Func, id: OpId) -> bool {
    let [yes, no] = [0, 1].map(|side| func.op(func.terminator(func.op(id).regions[side])).operands.clone());
    // The branches share only values from outside.
    let keep: Vec<bool> = yes.iter().zip(&no).map(|(a, b)| a != b).collect();
    for i in (0..keep.len()).filter(|&i| !keep[i]) {
        func.replace_uses(func.op(id).results[i], yes[i]);
    }
    drop_if(func, id, &keep)
}

/// Removes the results of an `if` that `keep` excludes. Returns whether there are any.
pub(super) fn drop_if(func: &mut Func, id: OpId, keep: &[bool]) -> bool {
    if !keep.contains(&false) {
        return false;
    }
    for region in func.op(id).regions.clone() {
        func.retain_operands(func.terminator(region), keep);
    }
    func.retain_results(id, keep);
    true
}

fn while_loop(func: &mut Func, id: OpId) -> bool {
    let (before, after) = (func.op(id).regions[0], func.op(id).regions[1]);
    let (condition, end) = (func.terminator(before), func.terminator(after));
    let mut keep_in = vec![true; func.op(id).operands.len()];
    for (i, kept) in keep_in.iter_mut().enumerate() {
        let (init, param) = (func.op(id).operands[i], func.block(before).params[i]);
        let next = func.op(end).operands[i];
        let forwarded_from = |v: Value| {
            let at = func.block(after).params.iter().position(|&p| p == v)?;
            Some(func.op(condition).operands[1 + at])
        };
        if next == init || forwarded_from(next).is_some_and(|v| v == param || v == init) {
            func.replace_uses(param, init);
            *kept = false;
        }
    }
    let inside = defined_inside(func, id);
    let mut keep_out = vec![true; func.op(id).results.len()];
    for (j, kept) in keep_out.iter_mut().enumerate() {
        let forwarded = func.op(condition).operands[1 + j];
        if !inside.contains(&forwarded) {
            func.replace_uses(func.block(after).params[j], forwarded);
            func.replace_uses(func.op(id).results[j], forwarded);
            *kept = false;
        }
    }
    drop_while(func, id, &keep_in, &keep_out)
}

/// Removes initial values (`keep_in`) and forwarded values (`keep_out`) of a `while`. Returns whether there are any.
pub(super) fn drop_while(func: &mut Func, id: OpId, keep_in: &[bool], keep_out: &[bool]) -> bool {
    if !keep_in.contains(&false) && !keep_out.contains(&false) {
        return false;
    }
    let (before, after) = (func.op(id).regions[0], func.op(id).regions[1]);
    let (condition, end) = (func.terminator(before), func.terminator(after));
    func.retain_operands(id, keep_in);
    func.retain_params(before, keep_in);
    func.retain_operands(end, keep_in);
    func.retain_operands(condition, &[&[true], keep_out].concat());
    func.retain_params(after, keep_out);
    func.retain_results(id, keep_out);
    true
}
