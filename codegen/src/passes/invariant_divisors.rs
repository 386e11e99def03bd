//! Divides by loop-invariant numbers with a multiplication.
//!
//! Does: in loops, replaces each `div` and `rem` of i32 scalars by a divisor that is defined outside of the loop: ⌊(2³² − 1) / |d|⌋,
//! computed before the loop, times |n| gives the quotient in its high half, or one less, which the remainder tells
//! (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994, say when one needs no such
//! correction). A GPU has no instruction for division; ptxas emits about 20, each of which needs the one before. Persistent
//! kernels, which find the tile of each iteration so, wait for it
//! (`harness/records/2026-11-28-h200-attention-tiles.jsonl`).
//! Requires: a verified function.
//! Keeps: results, those of division by zero (0) and of the one quotient that wraps included.
//! Does not: replace divisions by constants; divisions of other types; those whose result has a known divisor above 1,
//! which analyses would not find in the replacement. Of ranges, only that a result is not negative stays known.

use crate::analysis::axis::AxisAnalysis;
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Def, Func, Op, OpId, Type, UnaryOp, Value, nested};
use std::collections::HashMap;

/// Runs the pass.
pub fn run(func: &mut Func) {
    let axis = AxisAnalysis::new(func);
    let mut reciprocals: HashMap<(Value, OpId), Reciprocal> = HashMap::new();
    for id in func.walk() {
        let Op::Binary(op @ (BinaryOp::Div | BinaryOp::Rem)) = func.op(id).op else { continue };
        let (result, [n, d]) = (func.result(id), [0, 1].map(|i| func.op(id).operands[i]));
        let is_i32 = *func.ty(result) == Type::Scalar(DType::I32.into());
        let is_multiple = axis.get(func, result).divisibility[0] > 1;
        let is_constant = axis.scalar_constant(func, d).is_some();
        let replaces = is_i32 && !is_multiple && !is_constant && nested::is_in_code(func, id);
        let Some(around) = outermost_loop(func, id, d).filter(|_| replaces) else { continue };
        let [signed, signed_divisor] = [n, d].map(|v| axis.get(func, v).range.0 < 0);
        let reciprocal =
            *reciprocals.entry((d, around)).or_insert_with(|| Reciprocal::before(func, around, d, signed_divisor));
        let mut replacement = reciprocal.divide(func, id, op, [n, d], [signed, signed_divisor]);
        if !signed && !signed_divisor {
            let loc = func.op(id).loc.clone();
            replacement = Builder::before(func, id, loc).at_least(replacement, 0);
        }
        func.replace_uses(result, replacement);
        func.erase(id);
    }
}

/// The outermost of the loops around an op in which `v` is not defined.
fn outermost_loop(func: &Func, id: OpId, v: Value) -> Option<OpId> {
    let is_loop = |&around: &OpId| func.op(around).op.is_loop();
    let around = std::iter::successors(func.parent_op(id), |&op| func.parent_op(op));
    let defined_in = match func.value(v).def {
        Def::Result(op, _) => func.parent_op(op),
        Def::Param(block, _) => func.owner(block),
    };
    let contains: Vec<OpId> = std::iter::successors(defined_in, |&op| func.parent_op(op)).collect();
    around.take_while(|op| !contains.contains(op)).filter(is_loop).last()
}

/// What depends on the divisor alone, in u32.
#[derive(Clone, Copy)]
struct Reciprocal {
    /// |d|, or 1 for 0.
    divisor: Value,
    /// ⌊(2³² − 1) / divisor⌋.
    reciprocal: Value,
    is_zero: Value,
}

impl Reciprocal {
    fn before(func: &mut Func, around: OpId, d: Value, signed: bool) -> Reciprocal {
        let loc = func.op(around).loc.clone();
        let mut b = Builder::before(func, around, loc);
        let zero = b.int(0, DType::I32);
        let is_zero = b.cmp(CmpOp::Eq, d, zero);
        let magnitude = magnitude(&mut b, d, signed);
        let [one, most] = [1, i64::from(u32::MAX)].map(|n| b.int(n, DType::U32));
        let divisor = b.binary(BinaryOp::Max, magnitude, one);
        let reciprocal = b.binary(BinaryOp::Div, most, divisor);
        Reciprocal { divisor, reciprocal, is_zero }
    }

    /// n / d or n % d before the op `at`. `signed`: whether n and d may be negative.
    fn divide(self, func: &mut Func, at: OpId, op: BinaryOp, [n, d]: [Value; 2], signed: [bool; 2]) -> Value {
        let loc = func.op(at).loc.clone();
        let mut b = Builder::before(func, at, loc);
        let b = &mut b;
        let magnitude = magnitude(b, n, signed[0]);
        // For |n| ≤ 2³¹ the product is less than 1 below |n| / |d|, times 2³².
        let low = b.binary(BinaryOp::MulHi, magnitude, self.reciprocal);
        let product = b.binary(BinaryOp::Mul, low, self.divisor);
        let rest = b.binary(BinaryOp::Sub, magnitude, product);
        let is_low = b.cmp(CmpOp::Ge, rest, self.divisor);
        let zero = b.int(0, DType::I32);
        let negated = |b: &mut Builder, sign: Value, v: Value| {
            let is_negative = b.cmp(CmpOp::Lt, sign, zero);
            let negative = b.binary(BinaryOp::Sub, zero, v);
            b.select(is_negative, negative, v)
        };
        if op == BinaryOp::Rem {
            let less = b.binary(BinaryOp::Sub, rest, self.divisor);
            let rest = b.select(is_low, less, rest);
            let rest = b.bitcast(rest, DType::I32);
            // The remainder has the sign of n. By 0 it is that by 1.
            return if signed[0] { negated(b, n, rest) } else { rest };
        }
        let one = b.int(1, DType::U32);
        let more = b.binary(BinaryOp::Add, low, one);
        let quotient = b.select(is_low, more, low);
        let quotient = b.bitcast(quotient, DType::I32);
        let quotient = match signed {
            [false, false] => quotient,
            _ => {
                let sign = b.binary(BinaryOp::Xor, n, d);
                negated(b, sign, quotient)
            }
        };
        b.select(self.is_zero, zero, quotient)
    }
}

/// |v| as u32.
fn magnitude(b: &mut Builder, v: Value, signed: bool) -> Value {
    let magnitude = if signed { b.unary(UnaryOp::Abs, v) } else { v };
    b.bitcast(magnitude, DType::U32)
}
