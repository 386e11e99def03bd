//! Addresses as affine sums of unknowns, bounded by comparisons of sums of the same unknowns.
//!
//! Example: the matmul of Triton's tutorial advances its pointers by `block · stride` per iteration and loads where
//! `i < k − n · block`, with n the number of the iteration. In interval arithmetic, i is small, n · block is not, and
//! nothing bounds their sum. As sums, the address is row + stride · i + stride · block · n, and the comparison states
//! i + block · n − k ≤ −1. Subtracting `stride` times the comparison from the address leaves row + stride · (k − 1).
//!
//! Unknowns are the elements of ranges, program ids, iteration numbers, and every value that is not a sum. Coefficients
//! are launch-invariant numbers. Wherever arithmetic could wrap, a *test* requires that it does not. If a test fails,
//! or a coefficient is not a single number, the result is the interval of the address.

use super::build::{Axes, Bound, Builder, Step, loop_of, peel, step, widened};
use super::{Interval, Launch, Node, NodeId};
use crate::ir::{BinaryOp, Def, Op, OpId, Value};
use serde::{Deserialize, Serialize};

/// An interval that must lie inside another one.
type Test = (NodeId, Interval);

/// Maximum number of values that are visited for one address and its comparisons: more than hand-written kernels need,
/// and a bound for generated ones.
const BUDGET: usize = 400;
/// Maximum number of comparisons that are used for one address.
const MAX_LIMITS: usize = 16;
/// Maximum magnitude of unknowns and coefficients: no address is that large. Sums that may exceed it are not used.
const MAX_UNKNOWN: i128 = 1 << 64;

/// Σ coefficient · unknown, valid if the tests hold. Unknowns are indices into [`BoundedSum::unknowns`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sum {
    pub terms: Vec<(usize, NodeId)>,
    pub tests: Vec<Test>,
}

/// A sum under conditions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BoundedSum {
    pub unknowns: Vec<NodeId>,
    pub sum: Sum,
    /// Each of these sums is at most 0.
    pub limits: Vec<Sum>,
}

impl BoundedSum {
    /// Tightens those ends of the interval `plain` of the sum that lie outside `memory`, by the conditions.
    pub fn tighten(&self, plain: Interval, memory: Interval, values: &[Interval]) -> Interval {
        self.tightened(plain, memory, values).unwrap_or(plain)
    }

    fn tightened(&self, plain: Interval, memory: Interval, values: &[Interval]) -> Option<Interval> {
        let sum = self.coefficients(&self.sum, values)?;
        let ranges: Vec<Interval> = self.unknowns.iter().map(|&id| values[id as usize]).collect();
        if ranges.iter().any(|range| range.is_empty()) {
            return Some(Interval::EMPTY);
        }
        if ranges.iter().any(|range| range.low < -MAX_UNKNOWN || range.high > MAX_UNKNOWN) {
            return None;
        }
        let limits: Vec<Vec<i128>> = self.limits.iter().filter_map(|limit| self.coefficients(limit, values)).collect();
        let mut ends = plain;
        if plain.low < memory.low {
            let negative = sum.iter().map(|&c| -c).collect();
            ends.low = plain.low.max(-upper_bound(negative, &limits, &ranges)?);
        }
        if plain.high > memory.high {
            ends.high = plain.high.min(upper_bound(sum, &limits, &ranges)?);
        }
        Some(ends)
    }

    /// Coefficients by unknown; `None` if a test fails or a coefficient is not a single number.
    fn coefficients(&self, sum: &Sum, values: &[Interval]) -> Option<Vec<i128>> {
        if !sum.tests.iter().all(|&(test, inside)| inside.contains(values[test as usize])) {
            return None;
        }
        let mut all = vec![0; self.unknowns.len()];
        for &(unknown, coefficient) in &sum.terms {
            let Interval { low, high } = values[coefficient as usize];
            if low != high || low.abs() > MAX_UNKNOWN {
                return None;
            }
            all[unknown] = low;
        }
        Some(all)
    }

    /// All nodes that the interval depends on.
    pub fn inputs(&self) -> impl Iterator<Item = NodeId> {
        let of_terms = |sum: &Sum| sum.terms.iter().map(|&(_, coefficient)| coefficient).collect::<Vec<_>>();
        let coefficients = std::iter::once(&self.sum).chain(&self.limits).flat_map(of_terms);
        self.unknowns.iter().copied().chain(coefficients)
    }
}

/// An upper bound of Σ sum · unknown, given that the sum of each limit is at most 0.
///
/// For every λ ≥ 0, Σ sum · unknown ≤ Σ (sum − λ · limit) · unknown, whose maximum over the ranges of the unknowns is
/// easy to compute. The best λ eliminates an unknown. Limits are applied one after the other, each with an integer λ:
/// the bound is sound, and tight if each limit has unknowns that no other one has.
fn upper_bound(mut sum: Vec<i128>, limits: &[Vec<i128>], ranges: &[Interval]) -> Option<i128> {
    let mut best = max_over_ranges(&sum, ranges)?;
    for limit in limits {
        let before = sum.clone();
        for (&c, &l) in before.iter().zip(limit) {
            if c.signum() * l.signum() <= 0 {
                continue;
            }
            for lambda in [c / l, c / l + 1] {
                let less = |(&c, &l): (&i128, &i128)| c.checked_sub(l.checked_mul(lambda)?);
                let rest: Vec<i128> = before.iter().zip(limit).map(less).collect::<Option<_>>()?;
                let high = max_over_ranges(&rest, ranges)?;
                if high < best {
                    (best, sum) = (high, rest);
                }
            }
        }
    }
    Some(best)
}

/// The maximum over ranges; `None` on overflow.
fn max_over_ranges(sum: &[i128], ranges: &[Interval]) -> Option<i128> {
    sum.iter().zip(ranges).try_fold(0i128, |all, (&c, range)| {
        let end = if c < 0 { range.low } else { range.high };
        all.checked_add(c.checked_mul(end)?)
    })
}

/// A sum, reduced to what decides whether it is a multiple of a number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Multiple {
    /// The argument whose address is added.
    pub base: Option<usize>,
    /// Factor of all other terms: the size of an element in bytes; 1 for integers.
    unit: i128,
    /// Launch-invariant terms, as two factors each.
    pub numbers: Vec<[NodeId; 2]>,
    /// Coefficients of unknowns.
    pub factors: Vec<NodeId>,
    /// Arithmetic that must not wrap.
    pub tests: Vec<Test>,
}

impl Multiple {
    /// Whether the sum is a multiple of `by` in this launch for all values of the unknowns.
    pub fn holds(&self, by: i64, values: &[Interval], launch: &impl Launch) -> bool {
        let by = i128::from(by);
        let known = |id: NodeId| Some(values[id as usize]).filter(|i| i.low == i.high && i.low.abs() <= MAX_UNKNOWN);
        let part = |id: NodeId| known(id).map(|i| i.low % by * (self.unit % by) % by);
        let sum = self.numbers.iter().try_fold(0, |sum, &[number, factor]| {
            let product = part(factor)? * (known(number)?.low % by);
            Some((sum + product) % by)
        });
        let address = self.base.map_or(0, |arg| i128::from(launch.address(arg)));
        self.tests.iter().all(|&(test, inside)| inside.contains(values[test as usize]))
            && sum.is_some_and(|sum| (sum + address) % by == 0)
            && self.factors.iter().all(|&factor| part(factor) == Some(0))
    }
}

/// An integer or an address as a sum, from which a launch can decide whether all elements are multiples of `by`; `None`
/// if no launch can.
pub(super) fn multiple(b: &mut Builder, v: Value, by: i64) -> Option<Multiple> {
    let mut budget = BUDGET;
    let axes: Axes = (0..b.func.ty(v).shape().len()).collect();
    let pointee = b.func.ty(v).elem()?.pointee();
    let (base, form) = match pointee {
        Some(_) => (Some(b.pointer(v, &axes)?.0), address(b, v, &axes, &mut budget)?),
        None if b.func.ty(v).dtype()?.is_int() => (None, form(b, v, &axes, &mut budget)),
        None => return None,
    };
    let unit = pointee.map_or(1, |d| d.bytes() as i128);
    let mut all = Multiple { base, unit, numbers: Vec::new(), factors: Vec::new(), tests: form.tests };
    // Wrapping changes a sum by multiples of 2⁸ at least, which these numbers divide.
    if by.count_ones() == 1 && by <= 1 << 8 {
        all.tests.clear();
    }
    for (unknown, factor) in form.terms {
        match unknown {
            Unknown::One => {
                let one = b.number(1);
                all.numbers.push([one, factor]);
            }
            Unknown::Value(v, _) if b.is_launch_invariant(v) => {
                let number = b.node(v, &[]);
                all.numbers.push([number, factor]);
            }
            Unknown::Value(..) | Unknown::IterationNumber(_) | Unknown::TripCount(_) => {
                let never = |factor: Interval| factor.low * unit % i128::from(by) != 0;
                if b.constant(factor).is_some_and(never) {
                    return None;
                }
                all.factors.push(factor);
            }
        }
    }
    Some(all)
}

/// A term of a sum.
#[derive(Clone, PartialEq, Eq)]
enum Unknown {
    /// Always 1: its coefficient is the constant term.
    One,
    Value(Value, Axes),
    /// Number of iterations of a `for` before the present one.
    IterationNumber(OpId),
    /// Trip count of a `for`.
    TripCount(OpId),
}

/// A sum under construction.
#[derive(Clone, Default)]
struct AffineForm {
    terms: Vec<(Unknown, NodeId)>,
    tests: Vec<Test>,
}

impl AffineForm {
    fn of(unknown: Unknown, coefficient: NodeId) -> AffineForm {
        AffineForm { terms: vec![(unknown, coefficient)], tests: Vec::new() }
    }

    fn plus(mut self, b: &mut Builder, other: AffineForm) -> AffineForm {
        for (unknown, coefficient) in other.terms {
            match self.terms.iter().position(|(own, _)| *own == unknown) {
                Some(i) => self.terms[i].1 = fold_constants(b, BinaryOp::Add, self.terms[i].1, coefficient),
                None => self.terms.push((unknown, coefficient)),
            }
        }
        self.tests.extend(other.tests);
        self
    }

    fn times(mut self, b: &mut Builder, factor: NodeId) -> AffineForm {
        for (_, coefficient) in &mut self.terms {
            *coefficient = fold_constants(b, BinaryOp::Mul, *coefficient, factor);
        }
        self
    }

    fn minus(self, b: &mut Builder, other: AffineForm) -> AffineForm {
        let less = b.number(-1);
        let other = other.times(b, less);
        self.plus(b, other)
    }

    fn to_sum(&self, unknowns: &mut Vec<Unknown>) -> Sum {
        let mut place = |unknown: &Unknown| {
            unknowns.iter().position(|own| own == unknown).unwrap_or_else(|| {
                unknowns.push(unknown.clone());
                unknowns.len() - 1
            })
        };
        let terms = self.terms.iter().map(|(unknown, coefficient)| (place(unknown), *coefficient)).collect();
        Sum { terms, tests: self.tests.clone() }
    }
}

/// A sum or product of nodes, evaluated if both are constant.
fn fold_constants(b: &mut Builder, op: BinaryOp, x: NodeId, y: NodeId) -> NodeId {
    match (b.constant(x), b.constant(y)) {
        (Some(x), Some(y)) => b.push(Node::Known(x.binary(op, y))),
        (Some(one), None) if op == BinaryOp::Mul && one == Interval::point(1) => y,
        (None, Some(one)) if op == BinaryOp::Mul && one == Interval::point(1) => x,
        _ => b.non_wrapping(op, x, y),
    }
}

/// Offset of a pointer from its argument in elements, with the present facts as conditions.
pub(super) fn bounded(b: &mut Builder, pointer: Value, axes: &[usize]) -> Option<BoundedSum> {
    let mut budget = BUDGET;
    let sum = address(b, pointer, axes, &mut budget)?;
    let mut limits = Vec::new();
    for fact in b.facts.clone() {
        let Bound::Below(than, more) = fact.bound else { continue };
        let (small, large) = (form(b, fact.value, &fact.axes, &mut budget), form(b, than, &fact.axes, &mut budget));
        let one = b.number(more.into());
        let limit = small.minus(b, large).plus(b, AffineForm::of(Unknown::One, one));
        let shared = |(unknown, _): &(Unknown, NodeId)| {
            *unknown != Unknown::One && sum.terms.iter().any(|(own, _)| own == unknown)
        };
        if limits.len() < MAX_LIMITS && limit.terms.iter().any(shared) {
            limits.push(limit);
        }
    }
    let mut unknowns = Vec::new();
    let sum = sum.to_sum(&mut unknowns);
    let limits = limits.iter().map(|limit| limit.to_sum(&mut unknowns)).collect();
    let unknowns = unknowns.into_iter().map(|unknown| range(b, unknown)).collect();
    Some(BoundedSum { unknowns, sum, limits })
}

/// Interval of an unknown.
fn range(b: &mut Builder, unknown: Unknown) -> NodeId {
    let (id, after) = match unknown {
        Unknown::One => return b.number(1),
        Unknown::Value(v, axes) => return b.node(v, &axes),
        Unknown::IterationNumber(id) => (id, false),
        Unknown::TripCount(id) => (id, true),
    };
    let (from, by) = (b.number(0), b.number(1));
    let func = b.func;
    let range = b.loop_range(func.op(id));
    b.push(Node::Induction { from, by, range, after })
}

/// Offset of a pointer from its argument, in elements.
fn address(b: &mut Builder, v: Value, axes: &[usize], budget: &mut usize) -> Option<AffineForm> {
    let func = b.func;
    let (v, axes) = peel(func, v, axes);
    *budget = budget.checked_sub(1)?;
    let (id, carried, iterations) = match func.value(v).def {
        Def::Param(block, _) if block == func.body => return Some(AffineForm::default()),
        Def::Param(block, i) => {
            let id = loop_of(func, block)?.0;
            (id, i.checked_sub(1)?, Unknown::IterationNumber(id))
        }
        Def::Result(id, i) => match func.op(id).op {
            Op::PtrAdd => {
                let [base, offset] = func.op(id).operands[..] else { return None };
                let base = address(b, base, &axes, budget)?;
                let offset = form(b, offset, &axes, budget);
                return Some(base.plus(b, offset));
            }
            Op::For { .. } => (id, i, Unknown::TripCount(id)),
            _ => return None,
        },
    };
    let (init, by) = step(func, id, carried)?;
    let by = launch_invariant_step(b, by)?;
    let init = address(b, init, &[], budget)?;
    Some(init.plus(b, AffineForm::of(iterations, by)))
}

/// Increment per iteration, if it is launch-invariant.
fn launch_invariant_step(b: &mut Builder, by: Step) -> Option<NodeId> {
    let (Step::Plus(v) | Step::Minus(v)) = by;
    if !b.is_launch_invariant(v) {
        return None;
    }
    let node = b.node(v, &[]);
    Some(match by {
        Step::Plus(_) => node,
        Step::Minus(_) => {
            let less = b.number(-1);
            fold_constants(b, BinaryOp::Mul, node, less)
        }
    })
}

/// An integer as a sum; if nothing else applies, of itself alone.
fn form(b: &mut Builder, v: Value, axes: &[usize], budget: &mut usize) -> AffineForm {
    let func = b.func;
    let (v, axes) = peel(func, v, axes);
    if let Some(n) = func.constant_int(v) {
        let n = b.number(n.into());
        return AffineForm::of(Unknown::One, n);
    }
    decompose(b, v, &axes, budget).unwrap_or_else(|| {
        let one = b.number(1);
        AffineForm::of(Unknown::Value(v, axes), one)
    })
}

/// Decomposes a value into a sum, with the tests under which both are equal.
fn decompose(b: &mut Builder, v: Value, axes: &[usize], budget: &mut usize) -> Option<AffineForm> {
    let func = b.func;
    let dtype = func.ty(v).dtype().filter(|d| d.is_int())?;
    *budget = budget.checked_sub(1)?;
    let (id, i) = match func.value(v).def {
        Def::Param(block, _) if block == func.body => return None,
        Def::Param(block, i) => {
            let (id, data) = loop_of(func, block)?;
            let Some(carried) = i.checked_sub(1) else {
                let stride = launch_invariant_step(b, Step::Plus(data.operands[2]))?;
                let start = form(b, data.operands[0], &[], budget);
                return Some(start.plus(b, AffineForm::of(Unknown::IterationNumber(id), stride)));
            };
            return carried_sum(b, id, carried, Unknown::IterationNumber(id), budget);
        }
        Def::Result(id, i) => (id, i),
    };
    let data = func.op(id);
    let mut sum = match (&data.op, &data.operands[..]) {
        (Op::Binary(BinaryOp::Add), &[x, y]) => {
            let (x, y) = (form(b, x, axes, budget), form(b, y, axes, budget));
            x.plus(b, y)
        }
        (Op::Binary(BinaryOp::Sub), &[x, y]) => {
            let (x, y) = (form(b, x, axes, budget), form(b, y, axes, budget));
            x.minus(b, y)
        }
        (Op::Binary(BinaryOp::Mul), &[x, y]) => {
            let (x, y) = if b.is_launch_invariant(y) { (x, y) } else { (y, x) };
            if !b.is_launch_invariant(y) {
                return None;
            }
            let factor = b.node(y, axes);
            form(b, x, axes, budget).times(b, factor)
        }
        (Op::Cast, &[x]) if func.ty(x).dtype().is_some_and(|d| d.is_int()) => {
            let mut sum = form(b, x, axes, budget);
            if widened(func, v).is_none() {
                sum.tests.push((b.node(x, axes), Interval::of_type(dtype)));
            }
            return Some(sum);
        }
        (Op::For { .. }, _) => return carried_sum(b, id, i, Unknown::TripCount(id), budget),
        _ => return None,
    };
    if let (Op::Binary(op), &[x, y]) = (&data.op, &data.operands[..]) {
        let [x, y] = [x, y].map(|part| b.node(part, axes));
        sum.tests.push((b.non_wrapping(*op, x, y), Interval::of_type(dtype)));
    }
    Some(sum)
}

/// A value with a constant increment per iteration: initial value + increment · iterations.
fn carried_sum(
    b: &mut Builder,
    id: OpId,
    carried: usize,
    iterations: Unknown,
    budget: &mut usize,
) -> Option<AffineForm> {
    let func = b.func;
    let (init, by) = step(func, id, carried)?;
    let dtype = func.ty(init).dtype().filter(|d| d.is_int())?;
    let by = launch_invariant_step(b, by)?;
    let from = b.node(init, &[]);
    let range = b.loop_range(func.op(id));
    let after = matches!(iterations, Unknown::TripCount(_));
    let induction = b.push(Node::Induction { from, by, range, after });
    let mut sum = form(b, init, &[], budget).plus(b, AffineForm::of(iterations, by));
    sum.tests.push((induction, Interval::of_type(dtype)));
    Some(sum)
}
