//! Elementary functions, and ops with side effects: atomics whose old values are used, prints, assertions, assumptions.

use super::generate::{Gen, literal};
use crate::ir::{AtomicOp, BinaryOp, Builder, CmpOp, DType, Eviction, MemScope, MemSem, Op, Type, UnaryOp, Value};

impl Gen<'_> {
    /// An elementary function of multiples of 1/4, in f32, rounded down to multiples of 1/8. Implementations differ in
    /// their last bits; the test in this file shows that these do not change the rounded result.
    pub(super) fn function(&mut self, b: &mut Builder) -> Value {
        let v = self.rng.pick(&self.pool);
        let op = self.rng.pick(FUNCTIONS);
        // GPUs implement elementary functions for f32 only.
        let ty = b.func.ty(v).with_elem(DType::F32);
        let x = b.cast(v, DType::F32);
        // Half of the arguments end with a division, which hides their bound from `analysis::magnitude`.
        let hidden = self.rng.one_in(2);
        rounded_function(b, op, x, &ty, hidden)
    }

    /// Elements that no other program and no other op accesses, before or after a masked store to them.
    fn private_store(&mut self, b: &mut Builder, pointers: Value, value: Value) -> Value {
        let ty = b.func.ty(value).clone();
        let shape = ty.shape().to_vec();
        let (mask, other) = (self.value(b, &shape, DType::Bool), self.value(b, &shape, ty.dtype().expect("a number")));
        let load =
            |b: &mut Builder| b.one(Op::Load { eviction: Eviction::Normal }, &[pointers, mask, other], ty.clone());
        let before = load(b);
        b.op(Op::Store { eviction: Eviction::Normal }, &[pointers, value, mask], &[]);
        let after = load(b);
        let choice = self.value(b, &shape, DType::Bool);
        b.select(choice, before, after)
    }

    /// A read-modify-write of elements that no other program and no other op accesses; returns the old values.
    pub(super) fn private_atomic(&mut self, b: &mut Builder) -> Value {
        let (pointer, dtype) = self.private_buffers.pop().expect("there is one");
        let shape = self.rng.pick(&[&[][..], &[8], &[32], &[4, 8], &[8, 2]]).to_vec();
        let pointers = self.program_pointers(b, pointer, &shape);
        let value = self.value(b, &shape, dtype);
        if self.rng.one_in(3) {
            return self.private_store(b, pointers, value);
        }
        use AtomicOp::*;
        let ops: &[AtomicOp] = match dtype {
            d if d.bits() < 16 => &[],
            d if d.is_float() => &[Add, Min, Max, Xchg],
            _ => &[Add, Min, Max, And, Or, Xor, Xchg],
        };
        if dtype.is_int() && dtype.bits() >= 16 && self.rng.one_in(3) {
            let expected = self.value(b, &shape, dtype);
            return b.atomic_cas(pointers, expected, value);
        }
        if ops.is_empty() {
            // The IR has no atomics of this type.
            return value;
        }
        let op = self.rng.pick(ops);
        let mask = self.rng.one_in(2).then(|| self.value(b, &shape, DType::Bool));
        let sem = self.rng.one_in(2).then(|| self.rng.pick(MemSem::ALL));
        let scope = self.rng.one_in(3).then(|| self.rng.pick(MemScope::ALL));
        let operands: Vec<Value> = [Some(pointers), Some(value), mask].into_iter().flatten().collect();
        let ty = b.func.ty(value).clone();
        b.one(Op::AtomicRmw { op, sem, scope }, &operands, ty)
    }

    /// A print, an assertion or an assumption that holds. Adds no value.
    pub(super) fn debug(&mut self, b: &mut Builder) {
        let v = self.rng.pick(&self.pool);
        let dtype = self.dtype(b, v);
        if self.rng.one_in(3) {
            let values: Vec<Value> = if b.func.ty(v).numel() <= 8 { vec![v] } else { Vec::new() };
            b.op(Op::DevicePrint { prefix: "100% \"v\" ".into() }, &values, &[]);
            return;
        }
        // The value is not both below and not below the constant; a NaN is not below anything.
        let least = self.one_number(b, v);
        let holds = if dtype == DType::Bool {
            let yes = b.constant(literal(dtype, 1), Type::scalar(dtype));
            b.binary(BinaryOp::Or, least, yes)
        } else {
            let ty = b.func.ty(least).clone();
            let other = b.constant(literal(dtype, 3), ty);
            let (below, above) = (b.cmp(CmpOp::Lt, least, other), b.cmp(CmpOp::Ge, least, other));
            let both = b.binary(BinaryOp::And, below, above);
            b.unary(UnaryOp::Not, both)
        };
        if self.rng.one_in(2) {
            b.op(Op::Assume, &[holds], &[]);
        } else {
            let shape = b.func.ty(v).shape().to_vec();
            let holds = if shape.is_empty() { holds } else { b.splat(holds, &shape) };
            b.op(Op::DeviceAssert { message: "never: \"both\"".into() }, &[holds], &[]);
        }
    }
}

/// The elementary functions.
const FUNCTIONS: &[UnaryOp] = &[
    UnaryOp::Exp,
    UnaryOp::Exp2,
    UnaryOp::Log,
    UnaryOp::Log2,
    UnaryOp::Rsqrt,
    UnaryOp::Sin,
    UnaryOp::Cos,
    UnaryOp::Tanh,
    UnaryOp::Erf,
];

/// `floor(8 · f(floor(4 · clamp(x)) / 4) + 0.37) / 8`, with x above zero for logarithms and roots.
fn rounded_function(b: &mut Builder, op: UnaryOp, x: Value, ty: &Type, hidden: bool) -> Value {
    let number = |b: &mut Builder, n: f64| b.number(n, ty.clone());
    let positive = matches!(op, UnaryOp::Log | UnaryOp::Log2 | UnaryOp::Rsqrt);
    let (low, high) = (number(b, if positive { 0.25 } else { -4.0 }), number(b, 4.0));
    let quarter = number(b, 0.25);
    let x = b.binary(BinaryOp::Max, x, low);
    let x = b.binary(BinaryOp::Min, x, high);
    let x = b.binary(BinaryOp::Mul, x, high);
    let x = b.unary(UnaryOp::Floor, x);
    let x = if hidden { b.binary(BinaryOp::Div, x, high) } else { b.binary(BinaryOp::Mul, x, quarter) };
    let y = b.unary(op, x);
    let (eight, off) = (number(b, 8.0), number(b, 0.37));
    let y = b.binary(BinaryOp::Mul, y, eight);
    let y = b.binary(BinaryOp::Add, y, off);
    let y = b.unary(UnaryOp::Floor, y);
    b.binary(BinaryOp::Div, y, eight)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exact values of the functions stay away from the points where rounding down would depend on the last bit.
    #[test]
    fn elementary_functions_stay_away_from_the_edges_of_eighths() {
        for &op in FUNCTIONS {
            for quarter in -16..=16 {
                let x = f64::from(quarter) / 4.0;
                let y = match op {
                    UnaryOp::Exp => x.exp(),
                    UnaryOp::Exp2 => x.exp2(),
                    UnaryOp::Log => x.ln(),
                    UnaryOp::Log2 => x.log2(),
                    UnaryOp::Rsqrt => 1.0 / x.sqrt(),
                    UnaryOp::Sin => x.sin(),
                    UnaryOp::Cos => x.cos(),
                    UnaryOp::Tanh => x.tanh(),
                    UnaryOp::Erf => libm::erf(x),
                    other => panic!("{}", other.name()),
                };
                if !y.is_finite() {
                    continue;
                }
                let scaled = 8.0 * y + 0.37;
                let away = (scaled - scaled.round()).abs();
                // A margin of 2^-18 of the value, and an absolute one for functions near 0.
                assert!(away > scaled.abs() / 262_144.0 + 1e-5, "{}({x}) = {y} is {away} from an edge", op.name());
            }
        }
    }
}
