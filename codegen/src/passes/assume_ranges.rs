//! Assumes signs of dividends and divisors that a launch checks.
//!
//! `offsets % n` keeps runs of offsets contiguous only if the offsets are not negative and n is positive. A kernel alone
//! does not say so: n is an argument, and products of program ids wrap. A launch, which knows arguments and grid, does.
//!
//! Does: where an access through pointers becomes wider if a dividend is not negative and a divisor positive, replaces
//! them by hints that say so. [`Footprint::violated_assumption`](crate::analysis::bounds::Footprint) checks them with
//! the numbers of a launch.
//! Requires: a verified function of stage *tile*, and that every launch of the resulting code makes this check.
//! Keeps: every computed value in launches that pass the check.
//! Does not: assume anything that does not widen an access, nor anything about values that no launch knows, such as
//! numbers from memory.

use crate::analysis::access_layout::{pointer_order_and_width, pointers_and_mask};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::bounds;
use crate::ir::{BinaryOp, Builder, DType, Func, Op, OpId, Value};

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut assumed = candidates(func);
    if assumed.is_empty() {
        return false;
    }
    let widest = widths(&with_hints(func, &assumed));
    if widest == widths(func) {
        return false;
    }
    for candidate in assumed.clone() {
        let fewer: Vec<Candidate> = assumed.iter().copied().filter(|&c| c != candidate).collect();
        if widths(&with_hints(func, &fewer)) == widest {
            assumed = fewer;
        }
    }
    *func = with_hints(func, &assumed);
    true
}

/// An operand of a division whose range is to be limited.
#[derive(Clone, Copy, PartialEq)]
struct Candidate {
    op: OpId,
    operand: usize,
    at_least: i64,
}

/// Dividends that may be negative and divisors that may not be positive, where a launch knows their ranges.
fn candidates(func: &Func) -> Vec<Candidate> {
    let axis = AxisAnalysis::new(func);
    let mut found = Vec::new();
    for id in func.walk() {
        let data = func.op(id);
        let Op::Binary(BinaryOp::Rem | BinaryOp::Div) = data.op else { continue };
        if !func.ty(data.operands[0]).dtype().is_some_and(DType::is_int) || !is_in_code(func, id) {
            continue;
        }
        for (operand, at_least) in [(0, 0), (1, 1)] {
            if axis.get(func, data.operands[operand]).range.0 < at_least.into() {
                found.push(Candidate { op: id, operand, at_least });
            }
        }
    }
    let values: Vec<Value> = found.iter().map(|c| func.op(c.op).operands[c.operand]).collect();
    let known = bounds::are_known_at_launch(func, &values);
    found.into_iter().zip(known).filter_map(|(candidate, known)| known.then_some(candidate)).collect()
}

/// Whether an op is in the kernel's body, branches or loops: the bounds analysis does not visit combine functions.
fn is_in_code(func: &Func, id: OpId) -> bool {
    func.parent_op(id).is_none_or(|parent| {
        matches!(func.op(parent).op, Op::If | Op::For { .. } | Op::While) && is_in_code(func, parent)
    })
}

/// The function with a hint for each candidate.
fn with_hints(func: &Func, candidates: &[Candidate]) -> Func {
    let mut hinted = func.clone();
    for &Candidate { op, operand, at_least } in candidates {
        let data = func.op(op);
        let v = data.operands[operand];
        let hint = Op::Hint { divisible: None, contiguous: None, at_least: Some(at_least) };
        let mut b = Builder::before(&mut hinted, op, data.loc.clone());
        let made = b.op(hint, &[v], &[func.ty(v).clone()]);
        let v = hinted.result(made);
        hinted.set_operand(op, operand, v);
    }
    hinted
}

/// For each access through pointers, the number of consecutive elements that one access of a thread may cover.
fn widths(func: &Func) -> Vec<u64> {
    let axis = AxisAnalysis::new(func);
    let accesses = func.walk().into_iter().filter_map(|id| pointers_and_mask(func, func.op(id)));
    accesses.map(|(pointers, mask)| pointer_order_and_width(func, &axis, pointers, mask).1).collect()
}
