//! Integers in a loop as affine functions of the index and of scalars from before the loop.

use crate::ir::nested::defined_inside;
use crate::ir::{BinaryOp, BlockId, DType, Def, Func, Op, OpId, Value};
use std::collections::HashSet;

/// Limit of factors. Within this and the next two limits, 64-bit evaluation cannot wrap, since all scalars are 32-bit.
const MAX_FACTOR: i64 = 1 << 20;
/// Limit of constants.
const MAX_CONSTANT: i64 = 1 << 40;
/// Limit of the number of terms.
const MAX_TERMS: usize = 8;

/// Σ factor · scalar + `index` · (the loop's index) + a number in [`low`, `high`] that differs between elements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Affine {
    /// Distinct i32 scalars from before the loop, with their factors.
    pub terms: Vec<(Value, i64)>,
    pub index: i64,
    pub low: i64,
    pub high: i64,
}

impl Affine {
    fn number(low: i64, high: i64) -> Option<Affine> {
        Affine { low, high, ..Affine::default() }.bounded()
    }

    fn scalar(v: Value) -> Affine {
        Affine { terms: vec![(v, 1)], ..Affine::default() }
    }

    /// `self + factor · other`. The ranges of the two elements are treated as independent. `None` beyond the limits.
    pub fn plus(mut self, other: &Affine, factor: i64) -> Option<Affine> {
        for &(v, f) in &other.terms {
            match self.terms.iter_mut().find(|(w, _)| *w == v) {
                Some((_, own)) => *own += factor * f,
                None => self.terms.push((v, factor * f)),
            }
        }
        self.terms.retain(|&(_, f)| f != 0);
        self.index += factor * other.index;
        let ends = [factor * other.low, factor * other.high];
        self.low += ends[0].min(ends[1]);
        self.high += ends[0].max(ends[1]);
        self.bounded()
    }

    fn bounded(self) -> Option<Affine> {
        let factors = self.terms.iter().map(|&(_, f)| f).chain([self.index]);
        let small = factors.map(i64::abs).all(|f| f <= MAX_FACTOR) && self.terms.len() <= MAX_TERMS;
        (small && self.low.abs() <= MAX_CONSTANT && self.high.abs() <= MAX_CONSTANT).then_some(self)
    }

    /// Whether the sum is a single scalar, the index itself, or a number within i32, so that it needs no run-time test.
    fn is_i32(&self) -> bool {
        let range = i64::from(i32::MIN)..=i64::from(i32::MAX);
        match (&self.terms[..], self.index) {
            ([], 0) => range.contains(&self.low) && range.contains(&self.high),
            ([(_, 1)], 0) | ([], 1) => self.low == 0 && self.high == 0,
            _ => false,
        }
    }
}

/// Adds a test that a sum is an i32; tests of the same scalars merge.
pub fn add_test(tests: &mut Vec<Affine>, sum: Affine) {
    match tests.iter_mut().find(|test| test.index == sum.index && test.terms == sum.terms) {
        Some(test) => (test.low, test.high) = (test.low.min(sum.low), test.high.max(sum.high)),
        None => tests.push(sum),
    }
}

/// A `for` over an i32 index with a constant step.
pub struct Loop {
    pub id: OpId,
    pub region: BlockId,
    pub lower: Value,
    pub upper: Value,
    pub step: i64,
    inside: HashSet<Value>,
}

impl Loop {
    pub fn of(func: &Func, id: OpId) -> Option<Loop> {
        let data = func.op(id);
        let (lower, upper) = (data.operands[0], data.operands[1]);
        let step = func.constant_int(data.operands[2]).filter(|&s| (1..=MAX_FACTOR).contains(&s))?;
        let i32s = func.ty(lower).dtype() == Some(DType::I32);
        i32s.then(|| Loop { id, region: data.regions[0], lower, upper, step, inside: defined_inside(func, id) })
    }

    /// The affine form of an i32 or i64 of the loop, scalar or tile. 32-bit arithmetic wraps, and the affine form does
    /// not: the form of an i64 is exact if the sums that this adds to `tests` are i32s, that of an i32 holds modulo
    /// 2³².
    pub fn affine(&self, func: &Func, v: Value, tests: &mut Vec<Affine>) -> Option<Affine> {
        let dtype = func.ty(v).dtype().filter(|d| matches!(d, DType::I32 | DType::I64))?;
        if let Some(n) = func.constant_int(v) {
            return Affine::number(n, n);
        }
        if let Def::Param(block, i) = func.value(v).def
            && block == self.region
        {
            return self.parameter(func, i, tests);
        }
        if !self.inside.contains(&v) && !func.ty(v).is_tensor() && dtype == DType::I32 {
            return Some(Affine::scalar(v));
        }
        let data = func.op(func.def_op(v)?);
        match (&data.op, &data.operands[..]) {
            (
                Op::Splat | Op::ExpandDims { .. } | Op::Broadcast | Op::Trans { .. } | Op::Reshape | Op::Hint { .. },
                &[x],
            ) => self.affine(func, x, tests),
            (&Op::Arange { start, end }, _) => Affine::number(start, end - 1),
            (Op::Binary(BinaryOp::Add), &[x, y]) => self.affine(func, x, tests)?.plus(&self.affine(func, y, tests)?, 1),
            (Op::Binary(BinaryOp::Sub), &[x, y]) => {
                self.affine(func, x, tests)?.plus(&self.affine(func, y, tests)?, -1)
            }
            (Op::Binary(BinaryOp::Mul), &[x, y]) => {
                let (x, factor) = match (func.constant_int(x), func.constant_int(y)) {
                    (_, Some(n)) => (x, n),
                    (Some(n), None) => (y, n),
                    (None, None) => return None,
                };
                let small = factor.abs() <= MAX_FACTOR;
                Affine::default().plus(&self.affine(func, x, tests)?, small.then_some(factor)?)
            }
            (Op::Cast, &[x]) => {
                let inner = self.affine(func, x, tests)?;
                if dtype == DType::I64 {
                    self.test(func, x, &inner, tests);
                }
                Some(inner)
            }
            _ => None,
        }
    }

    /// Adds the test that the sum for `v` stays within i32, if `v` is an i32 and the sum is not trivially one.
    pub fn test(&self, func: &Func, v: Value, sum: &Affine, tests: &mut Vec<Affine>) {
        if func.ty(v).dtype() == Some(DType::I32) && !sum.is_i32() {
            add_test(tests, sum.clone());
        }
    }

    /// A parameter of the loop body: the index, or a value that grows by a constant in each iteration.
    fn parameter(&self, func: &Func, i: usize, tests: &mut Vec<Affine>) -> Option<Affine> {
        let index = Affine { index: 1, ..Affine::default() };
        let Some(place) = i.checked_sub(1) else { return Some(index) };
        let param = func.block(self.region).params[i];
        let next = func.op(func.def_op(func.op(func.terminator(self.region)).operands[place])?);
        let by = match (&next.op, &next.operands[..]) {
            (Op::Binary(BinaryOp::Add), &[x, y]) if x == param => func.constant_int(y)?,
            (Op::Binary(BinaryOp::Add), &[x, y]) if y == param => func.constant_int(x)?,
            (Op::Binary(BinaryOp::Sub), &[x, y]) if x == param => -func.constant_int(y)?,
            _ => return None,
        };
        if by % self.step != 0 || by.abs() > MAX_FACTOR {
            return None;
        }
        let index_offset = index.plus(&self.affine(func, self.lower, tests)?, -1)?;
        self.affine(func, func.op(self.id).operands[3 + place], tests)?.plus(&index_offset, by / self.step)
    }
}
