//! Test-case reduction: shrinks a function that shows a failure to a smaller one that still shows it (delta debugging).

use crate::ir::{Func, Literal, Op, OpId, Type, Value};
use crate::passes::dce;
use crate::text;
use crate::verify::{stage_of, verify};

/// Removes ops from `func`, one at a time, as long as the function stays valid and `fails` returns true.
///
/// An op without uses is removed. The results of another op are replaced by values of the same types that are defined
/// before it: its operands, the initial values of a loop, or zeros. Returns `func` itself if nothing can be removed.
pub fn reduce(func: &Func, fails: &mut dyn FnMut(&Func) -> bool) -> Func {
    let mut best = func.clone();
    let mut smaller = true;
    while smaller {
        smaller = false;
        // Backward, so that the operands of a removed op lose their uses before they are tried.
        let mut at = best.walk().len();
        while at > 0 {
            at = (at - 1).min(best.walk().len().saturating_sub(1));
            if let Some(next) = without(&best, at).into_iter().find(|f| size(f) < size(&best) && still_fails(f, fails))
            {
                best = next;
                smaller = true;
            }
        }
    }
    best
}

/// A constant counts less than another op: replacing an op by a constant is progress.
fn size(func: &Func) -> usize {
    func.walk().iter().map(|&id| if matches!(func.op(id).op, Op::Constant { .. }) { 1 } else { 4 }).sum()
}

fn still_fails(func: &Func, fails: &mut dyn FnMut(&Func) -> bool) -> bool {
    verify(func, stage_of(func)).is_ok() && fails(func)
}

/// Candidates without the op at position `at` of the traversal.
fn without(func: &Func, at: usize) -> Vec<Func> {
    let Some(&id) = func.walk().get(at) else { return Vec::new() };
    let mut candidates = Vec::new();
    let mut add = |f: Func| {
        let mut swept = f.clone();
        dce::run(&mut swept);
        // Printing and parsing renumbers the values and drops ops that are in no block.
        candidates.extend([swept, f].iter().filter_map(|f| text::parse(&text::print(f)).ok()));
    };
    match func.op(id).op {
        Op::Yield | Op::Condition | Op::Return => return Vec::new(),
        Op::For { .. } => {
            add(inlined_region(func, id, 0, &[&func.op(id).operands[..1], &func.op(id).operands[3..]].concat()))
        }
        Op::While if func.block(func.op(id).regions[1]).params.len() == func.op(id).operands.len() => {
            add(inlined_region(func, id, 1, &func.op(id).operands))
        }
        Op::If => (0..2).for_each(|side| add(inlined_region(func, id, side, &[]))),
        _ => {}
    }
    for from_operands in [true, false] {
        let mut smaller = func.clone();
        let mut constants = Vec::new();
        if replace_results(&mut smaller, id, from_operands, &mut constants) {
            smaller.insert(smaller.parent_block(id), smaller.position(id), &constants);
            smaller.erase(id);
            add(smaller);
        }
    }
    candidates
}

/// Replaces an op by the ops of one of its regions, with `params` for the parameters of the region.
fn inlined_region(func: &Func, id: OpId, region: usize, params: &[Value]) -> Func {
    let mut f = func.clone();
    let data = f.op(id).clone();
    let region = data.regions[region];
    let mut ops = f.take_ops(region);
    let end = ops.pop();
    let yielded = end.map_or_else(Vec::new, |end| f.op(end).operands.clone());
    end.into_iter().for_each(|end| f.erase(end));
    for (param, &value) in f.block(region).params.clone().into_iter().zip(params) {
        f.replace_uses(param, value);
    }
    // The region may yield one of its parameters.
    let outside = |v: Value| func.block(region).params.iter().position(|&p| p == v).map_or(v, |i| params[i]);
    for (&result, value) in data.results.iter().zip(yielded) {
        f.replace_uses(result, outside(value));
    }
    f.insert(f.parent_block(id), f.position(id), &ops);
    f.erase(id);
    f
}

/// Replaces the uses of an op's results by other values. Returns whether such values exist.
fn replace_results(func: &mut Func, id: OpId, from_operands: bool, constants: &mut Vec<OpId>) -> bool {
    let data = func.op(id).clone();
    for &result in &data.results {
        if func.uses(result).is_empty() {
            continue;
        }
        let ty = func.ty(result).clone();
        let operand = data.operands.iter().copied().find(|&v| from_operands && *func.ty(v) == ty);
        // Replacing a constant by a zero would be no progress.
        let constant = matches!(data.op, Op::Constant { .. });
        let Some(value) = operand.or_else(|| if constant { None } else { zero(func, &ty, constants) }) else {
            return false;
        };
        func.replace_uses(result, value);
    }
    true
}

/// A zero of a scalar or tile type.
fn zero(func: &mut Func, ty: &Type, constants: &mut Vec<OpId>) -> Option<Value> {
    let value = Literal::number(0.0, Some(ty.dtype()?));
    let loc = func.loc.clone();
    let id = func.create_op(Op::Constant { value }, Vec::new(), vec![ty.clone()], Vec::new(), loc);
    constants.push(id);
    Some(func.result(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testgen::{Options, program};

    #[test]
    fn only_ops_that_the_failure_needs_remain() {
        // The function "fails" as long as it has a square root and a store.
        let has = |f: &Func, wanted: fn(&Op) -> bool| f.walk().iter().any(|&id| wanted(&f.op(id).op));
        let fails = |f: &Func| {
            has(f, |op| *op == Op::Unary(crate::ir::UnaryOp::Sqrt)) && has(f, |op| matches!(op, Op::Store { .. }))
        };
        let big = (0..200)
            .map(|seed| program(seed, &Options::default()).func)
            .find(|f| fails(f) && has(f, |op| matches!(op, Op::For { .. })))
            .expect("a program with a square root, a store and a loop");
        let small = reduce(&big, &mut |f| fails(f));
        assert!(fails(&small));
        // The store, the root, a constant for each, and the return; a pointer has no constant and may need one more op.
        assert!(
            small.walk().len() <= 7,
            "{} of {} ops:\n{}",
            small.walk().len(),
            big.walk().len(),
            text::print(&small)
        );
    }

    #[test]
    fn function_that_does_not_fail_is_unchanged() {
        let f = program(1, &Options::default()).func;
        assert_eq!(text::print(&reduce(&f, &mut |_| false)), text::print(&f));
    }
}
