//! The index at which to split a loop, computed from scalars before it.

use super::affine::{Affine, Loop};
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Type, UnaryOp, Value};
use std::collections::HashMap;

/// The side of the loop on which the conditions hold: the first or the last iterations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    First,
    Last,
}

/// Conditions for the iterations of one side: all elements of these sums are non-negative.
pub struct Conditions {
    pub side: Side,
    /// Sums that depend on the index: they fall (`First`) or rise (`Last`).
    pub sums: Vec<Affine>,
    /// Sums that are non-negative in every iteration if they are in the first.
    pub at_start: Vec<Affine>,
    /// Sums that have to stay within i32 in every iteration: otherwise 32-bit arithmetic wraps, and nothing is known.
    pub tests: Vec<Affine>,
}

/// The split index: the conditions hold before it (`First`) or from it on (`Last`). It is an index that the loop takes,
/// or its end.
pub fn split_index(b: &mut Builder, l: &Loop, conditions: &Conditions) -> Value {
    let mut n = Numbers { b, wide: HashMap::new() };
    let (lower, upper) = (n.wide(l.lower), n.wide(l.upper));
    let mut count: Option<Value> = None;
    for sum in &conditions.sums {
        let own = n.iterations(sum, conditions.side, lower, l.step);
        count = Some(match (count, conditions.side) {
            (None, _) => own,
            (Some(other), Side::First) => n.b.binary(BinaryOp::Min, other, own),
            (Some(other), Side::Last) => n.b.binary(BinaryOp::Max, other, own),
        });
    }
    let count = count.expect("internal compiler error: a loop split without a condition; please report this");
    let zero = n.b.int(0, DType::I64);
    let count = n.b.binary(BinaryOp::Max, count, zero);
    let distance = n.times(count, l.step);
    let end = n.b.binary(BinaryOp::Add, lower, distance);
    let end = n.b.binary(BinaryOp::Min, end, upper);
    let end = n.b.cast(end, DType::I32);
    let no_split = match conditions.side {
        Side::First => l.lower,
        Side::Last => l.upper,
    };
    match n.all_hold(conditions, lower, upper) {
        Some(holds) => n.b.select(holds, end, no_split),
        None => end,
    }
}

/// Emits 64-bit scalar arithmetic.
struct Numbers<'b, 'f> {
    b: &'b mut Builder<'f>,
    /// The i32 scalars, sign-extended.
    wide: HashMap<Value, Value>,
}

impl Numbers<'_, '_> {
    fn wide(&mut self, v: Value) -> Value {
        let b = &mut *self.b;
        *self.wide.entry(v).or_insert_with(|| b.cast(v, DType::I64))
    }

    fn times(&mut self, v: Value, factor: i64) -> Value {
        if factor == 1 {
            return v;
        }
        let factor = self.b.int(factor, DType::I64);
        self.b.binary(BinaryOp::Mul, v, factor)
    }

    fn plus(&mut self, v: Value, constant: i64) -> Value {
        if constant == 0 {
            return v;
        }
        let constant = self.b.int(constant, DType::I64);
        self.b.binary(BinaryOp::Add, v, constant)
    }

    /// The value of a sum at an index, with `constant` for its element-dependent part.
    fn sum(&mut self, sum: &Affine, index: Value, constant: i64) -> Value {
        let mut parts: Vec<(Value, i64)> = sum.terms.iter().map(|&(v, f)| (self.wide(v), f)).collect();
        if sum.index != 0 {
            parts.push((index, sum.index));
        }
        // Positive terms first: then the first need not be negated.
        parts.sort_by_key(|&(_, f)| f < 0);
        let mut total = None;
        for (v, f) in parts {
            let part = self.times(v, f.abs());
            total = Some(match total {
                None if f > 0 => part,
                None => self.b.unary(UnaryOp::Neg, part),
                Some(so_far) => self.b.binary(if f > 0 { BinaryOp::Add } else { BinaryOp::Sub }, so_far, part),
            });
        }
        match total {
            Some(total) => self.plus(total, constant),
            None => self.b.int(constant, DType::I64),
        }
    }

    /// The number of iterations before the sum becomes negative (`First`), or before it becomes non-negative (`Last`).
    ///
    /// With the sum E at the first iteration and a change of d per iteration: E − d·t ≥ 0 for t ≤ ⌊E / d⌋, which are
    /// ⌊(E + d) / d⌋ iterations. E + d·t ≥ 0 from t = ⌈−E / d⌉ = ⌊(d − 1 − E) / d⌋ on.
    fn iterations(&mut self, sum: &Affine, side: Side, lower: Value, step: i64) -> Value {
        let change = sum.index.abs() * step;
        let start = self.sum(sum, lower, sum.low);
        let dividend = match side {
            Side::First => self.plus(start, change),
            Side::Last => {
                let negated = self.b.unary(UnaryOp::Neg, start);
                self.plus(negated, change - 1)
            }
        };
        self.floor(dividend, change)
    }

    /// ⌊v / d⌋ for positive d; `div` truncates.
    fn floor(&mut self, v: Value, d: i64) -> Value {
        if d == 1 {
            return v;
        }
        if d.count_ones() == 1 {
            let bits = self.b.int(d.trailing_zeros().into(), DType::I64);
            return self.b.binary(BinaryOp::Shr, v, bits);
        }
        let divisor = self.b.int(d, DType::I64);
        let quotient = self.b.binary(BinaryOp::Div, v, divisor);
        let rest = self.b.binary(BinaryOp::Rem, v, divisor);
        let zero = self.b.int(0, DType::I64);
        let was_rounded_up = self.b.cmp(CmpOp::Lt, rest, zero);
        let lower = self.plus(quotient, -1);
        self.b.select(was_rounded_up, lower, quotient)
    }

    /// Whether the conditions at the start hold and no 32-bit arithmetic wraps; `None` where there is nothing to check.
    fn all_hold(&mut self, conditions: &Conditions, lower: Value, upper: Value) -> Option<Value> {
        let mut checks = Vec::new();
        for sum in &conditions.at_start {
            let (start, zero) = (self.sum(sum, lower, sum.low), self.b.int(0, DType::I64));
            checks.push(self.b.cmp(CmpOp::Ge, start, zero));
        }
        let last = self.plus(upper, -1);
        for sum in &conditions.tests {
            let (at_low, at_high) = if sum.index < 0 { (last, lower) } else { (lower, last) };
            for (at, constant) in [(at_low, sum.low), (at_high, sum.high)] {
                // A single scalar is an i32.
                let plain = matches!(sum.terms[..], [(_, 1)]) && sum.index == 0 && constant == 0;
                if !plain {
                    let value = self.sum(sum, at, constant);
                    checks.push(self.is_i32(value));
                }
            }
        }
        checks.into_iter().reduce(|a, b| self.b.binary(BinaryOp::And, a, b))
    }

    fn is_i32(&mut self, v: Value) -> Value {
        let narrow = self.b.cast(v, DType::I32);
        let widened = self.b.op(crate::ir::Op::Cast, &[narrow], &[Type::scalar(DType::I64)]);
        let widened = self.b.func.result(widened);
        self.b.cmp(CmpOp::Eq, widened, v)
    }
}
