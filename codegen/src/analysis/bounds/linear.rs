//! Loop-carried values as linear functions of other values (scalar evolution).
//!
//! Example: a block pointer that advances by one tile per iteration of `for i in range(first, last)` starts at first ·
//! tile, and so is at i · tile. Interval arithmetic misses this: first may be large, and the number of iterations may
//! be large, but not both. In a linear function, first cancels.
//!
//! Wrapping arithmetic is linear only modulo 2ⁿ. Each sum that must be in the range of its type for the result to hold
//! is a *test*, which is evaluated with the other intervals of the launch.

use super::build::{Builder, Step, loop_of, step, widened};
use super::{Interval, NodeId};
use crate::ir::{BinaryOp, DType, Def, Op, Value};

/// An interval that must lie inside another one.
type Test = (NodeId, Interval);

/// Σ coefficient · value + constant, valid if the tests hold.
#[derive(Clone, Default)]
pub(super) struct Linear {
    terms: Vec<(Value, i128)>,
    constant: i128,
    pub tests: Vec<Test>,
}

/// Recursion limit; each level may double the work. The two consecutive loops of attention's backward pass need more
/// than nine levels.
const MAX_DEPTH: usize = 12;
/// Larger coefficients are not tracked: they could overflow.
const MAX_COEFFICIENT: i128 = 1 << 40;

impl Linear {
    /// The sum of a value that a `for` carries: a parameter of its body, or its result.
    pub fn of_carried(b: &mut Builder, v: Value) -> Option<Linear> {
        carried(b, v, MAX_DEPTH)
    }

    /// The interval of the sum.
    pub fn sum(&self, b: &mut Builder) -> NodeId {
        let mut sum = b.number(self.constant);
        for &(v, coefficient) in &self.terms {
            let (value, factor) = (b.node(v, &[]), b.number(coefficient));
            let term = b.non_wrapping(BinaryOp::Mul, value, factor);
            sum = b.non_wrapping(BinaryOp::Add, sum, term);
        }
        sum
    }

    fn plus(mut self, other: Linear, factor: i128) -> Option<Linear> {
        for (v, coefficient) in other.terms {
            match self.terms.iter_mut().find(|(w, _)| *w == v) {
                Some((_, own)) => *own += factor * coefficient,
                None => self.terms.push((v, factor * coefficient)),
            }
        }
        self.terms.retain(|&(_, coefficient)| coefficient != 0);
        self.constant += factor * other.constant;
        self.tests.extend(other.tests);
        let fits = |n: i128| n.abs() <= MAX_COEFFICIENT;
        (fits(self.constant) && self.terms.iter().all(|&(_, c)| fits(c))).then_some(self)
    }

    /// The same sum, with the test that it is in the range of a type.
    fn in_type(mut self, b: &mut Builder, dtype: DType) -> Linear {
        if let (1, 0, [(_, 1)]) | (0, _, []) = (self.terms.len(), self.constant, &self.terms[..]) {
            return self;
        }
        let sum = self.sum(b);
        self.tests.push((sum, Interval::of_type(dtype)));
        self
    }
}

/// An integer scalar as a sum.
fn linear(b: &mut Builder, v: Value, depth: usize) -> Option<Linear> {
    let func = b.func;
    if let Some(n) = func.constant_int(v) {
        return Some(Linear { constant: n.into(), ..Linear::default() });
    }
    let atom = Linear { terms: vec![(v, 1)], ..Linear::default() };
    let Some(deeper) = depth.checked_sub(1) else { return Some(atom) };
    if let Some(narrow) = widened(func, v) {
        let dtype = func.ty(narrow).dtype()?;
        return Some(linear(b, narrow, deeper)?.in_type(b, dtype));
    }
    let Some(id) = func.def_op(v) else { return Some(carried(b, v, deeper).unwrap_or(atom)) };
    let data = func.op(id);
    match (&data.op, &data.operands[..]) {
        (Op::Hint { .. }, &[a]) => linear(b, a, deeper),
        (Op::Binary(BinaryOp::Add), &[x, y]) => linear(b, x, deeper)?.plus(linear(b, y, deeper)?, 1),
        (Op::Binary(BinaryOp::Sub), &[x, y]) => linear(b, x, deeper)?.plus(linear(b, y, deeper)?, -1),
        (Op::Binary(BinaryOp::Mul), &[x, y]) => match (func.constant_int(x), func.constant_int(y)) {
            (_, Some(n)) => Linear::default().plus(linear(b, x, deeper)?, n.into()),
            (Some(n), _) => Linear::default().plus(linear(b, y, deeper)?, n.into()),
            (None, None) => Some(atom),
        },
        (Op::For { .. }, _) => Some(carried(b, v, deeper).unwrap_or(atom)),
        _ => Some(atom),
    }
}

/// A value with a constant increment per iteration: initial value + by / step · (index − start). After the loop, the
/// end replaces the index.
fn carried(b: &mut Builder, v: Value, depth: usize) -> Option<Linear> {
    let func = b.func;
    let (id, place, after) = match func.value(v).def {
        Def::Param(block, i) => (loop_of(func, block)?.0, i.checked_sub(1)?, false),
        Def::Result(id, i) => (id, i, true),
    };
    let (init, by) = step(func, id, place)?;
    let by = match by {
        Step::Plus(by) => i128::from(func.constant_int(by)?),
        Step::Minus(by) => -i128::from(func.constant_int(by)?),
    };
    let data = func.op(id);
    let stride = i128::from(func.constant_int(data.operands[2])?);
    // With a step above 1, the index after the last iteration may exceed the end.
    if by % stride != 0 || (after && stride != 1) {
        return None;
    }
    let index = func.block(data.regions[0]).params[0];
    let dtype = func.ty(index).dtype()?;
    let start = linear(b, data.operands[0], depth)?.in_type(b, dtype);
    let last = match after {
        false => Linear { terms: vec![(index, 1)], ..Linear::default() },
        true => linear(b, data.operands[1], depth)?.in_type(b, dtype),
    };
    let mut iterations = last.plus(start, -1)?;
    if after {
        // A loop whose end is below its start does not execute.
        match prove_at_least(b, data.operands[1], data.operands[0], depth) {
            Some(tests) => iterations.tests.extend(tests),
            None => {
                let sum = iterations.sum(b);
                iterations.tests.push((sum, Interval { low: 0, ..Interval::ANY }));
            }
        }
    }
    linear(b, init, depth)?.plus(iterations, by / stride)
}

/// Tests under which `x` ≥ `y` follows from their definitions: by rules for minimum, maximum and division by a
/// constant, down to sums that differ by a constant.
fn prove_at_least(b: &mut Builder, x: Value, y: Value, depth: usize) -> Option<Vec<Test>> {
    let deeper = depth.checked_sub(1)?;
    let func = b.func;
    let dtype = func.ty(x).dtype()?;
    let binary_operands = |v: Value| {
        let data = func.op(func.def_op(v)?);
        match (&data.op, &data.operands[..]) {
            (Op::Binary(op), &[a, b]) => Some((*op, a, b)),
            _ => None,
        }
    };
    let both = |first: Option<Vec<Test>>, second: Option<Vec<Test>>| Some([first?, second?].concat());
    if let Some((BinaryOp::Max, p, q)) = binary_operands(y) {
        let first = prove_at_least(b, x, p, deeper);
        return both(first, prove_at_least(b, x, q, deeper));
    }
    if let Some((BinaryOp::Min, p, q)) = binary_operands(x) {
        let first = prove_at_least(b, p, y, deeper);
        return both(first, prove_at_least(b, q, y, deeper));
    }
    let (left, right) = (linear(b, x, deeper)?.in_type(b, dtype), linear(b, y, deeper)?.in_type(b, dtype));
    let difference = left.clone().plus(right, -1)?;
    if difference.terms.is_empty() && difference.constant >= 0 {
        return Some(difference.tests);
    }
    match (binary_operands(x), binary_operands(y)) {
        (_, Some((BinaryOp::Min, p, q))) => prove_at_least(b, x, p, deeper).or_else(|| prove_at_least(b, x, q, deeper)),
        (Some((BinaryOp::Max, p, q)), _) => prove_at_least(b, p, y, deeper).or_else(|| prove_at_least(b, q, y, deeper)),
        (Some((BinaryOp::Div | BinaryOp::CeilDiv, p, m)), Some((BinaryOp::Div, q, n)))
        | (Some((BinaryOp::CeilDiv, p, m)), Some((BinaryOp::CeilDiv, q, n))) => {
            let divisor = func.constant_int(m).filter(|&d| d > 0 && func.constant_int(n) == Some(d));
            divisor.and_then(|_| prove_at_least(b, p, q, deeper))
        }
        _ => match left.terms[..] {
            // A sum with a non-negative constant.
            [(term, 1)] if left.constant >= 0 && term != x => {
                both(prove_at_least(b, term, y, deeper), Some(left.tests))
            }
            _ => None,
        },
    }
}
