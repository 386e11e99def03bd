//! Elementwise functions on single elements, in the storage format of [`crate::num`].

use crate::ir::{AtomicOp, BinaryOp, CmpOp, DType, UnaryOp};
use crate::num::{decode, decode_int, encode, encode_int, maximum_number, minimum_number};
use std::cmp::Ordering;

/// `op(x)`. Panics if the verifier does not allow the type.
pub fn unary(op: UnaryOp, dtype: DType, x: u64) -> u64 {
    if !dtype.is_float() {
        let v = decode_int(dtype, x);
        return match op {
            UnaryOp::Neg => encode_int(dtype, -v),
            UnaryOp::Abs => encode_int(dtype, v.abs()),
            UnaryOp::Not if dtype == DType::Bool => x ^ 1,
            UnaryOp::Not => encode_int(dtype, !v),
            UnaryOp::Exp
            | UnaryOp::Exp2
            | UnaryOp::Log
            | UnaryOp::Log2
            | UnaryOp::Sqrt
            | UnaryOp::Rsqrt
            | UnaryOp::Sin
            | UnaryOp::Cos
            | UnaryOp::Tanh
            | UnaryOp::Erf
            | UnaryOp::Floor
            | UnaryOp::Ceil
            | UnaryOp::Trunc
            | UnaryOp::Rint => panic!("internal compiler error: {} of {dtype}; please report this", op.name()),
        };
    }
    let v = decode(dtype, x);
    let y = match op {
        UnaryOp::Neg => -v,
        UnaryOp::Abs => v.abs(),
        UnaryOp::Not => panic!("internal compiler error: {} of {dtype}; please report this", op.name()),
        UnaryOp::Exp => libm::exp(v),
        UnaryOp::Exp2 => libm::exp2(v),
        UnaryOp::Log => libm::log(v),
        UnaryOp::Log2 => libm::log2(v),
        UnaryOp::Sqrt => libm::sqrt(v),
        UnaryOp::Rsqrt => 1.0 / libm::sqrt(v),
        UnaryOp::Sin => libm::sin(v),
        UnaryOp::Cos => libm::cos(v),
        UnaryOp::Tanh => libm::tanh(v),
        UnaryOp::Erf => libm::erf(v),
        UnaryOp::Floor => v.floor(),
        UnaryOp::Ceil => v.ceil(),
        UnaryOp::Trunc => v.trunc(),
        UnaryOp::Rint => v.round_ties_even(),
    };
    encode(dtype, y)
}

/// `op(a, b)`. Panics if the verifier does not allow the type.
pub fn binary(op: BinaryOp, dtype: DType, a: u64, b: u64) -> u64 {
    if dtype.is_float() {
        // f64 has more than twice f32's precision plus two bits: for these ops, rounding to f64 and then to a narrower
        // type equals one rounding.
        return encode(dtype, float_binary(op, dtype, decode(dtype, a), decode(dtype, b)));
    }
    let (x, y) = (decode_int(dtype, a), decode_int(dtype, b));
    let width = dtype.bits() as i128;
    let value = match op {
        BinaryOp::Add => x + y,
        BinaryOp::Sub => x - y,
        // May wrap in i128 for u64; the low half is correct.
        BinaryOp::Mul => x.wrapping_mul(y),
        // Division by zero gives zero.
        BinaryOp::Div => x.checked_div(y).unwrap_or(0),
        BinaryOp::CeilDiv => match x.checked_div_euclid(y) {
            Some(quotient) => quotient + i128::from(x % y != 0 && y > 0),
            None => 0,
        },
        BinaryOp::Rem => x.checked_rem(y).unwrap_or(0),
        BinaryOp::Min => x.min(y),
        BinaryOp::Max => x.max(y),
        BinaryOp::And => x & y,
        BinaryOp::Or => x | y,
        BinaryOp::Xor => x ^ y,
        // Shifts by the width or more act as repeated shifts by one bit.
        BinaryOp::Shl if (0..width).contains(&y) => x << y,
        BinaryOp::Shl => 0,
        BinaryOp::Shr if (0..width).contains(&y) => x >> y,
        BinaryOp::Shr => x >> 127,
        BinaryOp::MulHi if dtype == DType::U64 => ((x as u128 * y as u128) >> 64) as i128,
        BinaryOp::MulHi => (x * y) >> width,
        BinaryOp::Rescale => panic!("internal compiler error: {} of {dtype}; please report this", op.name()),
    };
    encode_int(dtype, value)
}

fn float_binary(op: BinaryOp, dtype: DType, x: f64, y: f64) -> f64 {
    match op {
        BinaryOp::Add => x + y,
        BinaryOp::Sub => x - y,
        BinaryOp::Mul | BinaryOp::Rescale => x * y,
        BinaryOp::Div => x / y,
        BinaryOp::Rem => x % y,
        BinaryOp::Min => minimum_number(x, y),
        BinaryOp::Max => maximum_number(x, y),
        BinaryOp::CeilDiv
        | BinaryOp::And
        | BinaryOp::Or
        | BinaryOp::Xor
        | BinaryOp::Shl
        | BinaryOp::Shr
        | BinaryOp::MulHi => {
            panic!("internal compiler error: {} of {dtype}; please report this", op.name())
        }
    }
}

/// `op(a, b)`; without a type, compares addresses.
pub fn compare(op: CmpOp, dtype: Option<DType>, a: u64, b: u64) -> bool {
    let order = match dtype {
        Some(d) if d.is_float() => decode(d, a).partial_cmp(&decode(d, b)),
        Some(d) => Some(decode_int(d, a).cmp(&decode_int(d, b))),
        None => Some(a.cmp(&b)),
    };
    match op {
        CmpOp::Eq => order == Some(Ordering::Equal),
        CmpOp::Ne => order != Some(Ordering::Equal),
        CmpOp::Lt => order == Some(Ordering::Less),
        CmpOp::Le => matches!(order, Some(Ordering::Less | Ordering::Equal)),
        CmpOp::Gt => order == Some(Ordering::Greater),
        CmpOp::Ge => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
    }
}

/// The value that an atomic read-modify-write stores.
pub fn atomic(op: AtomicOp, dtype: DType, old: u64, value: u64) -> u64 {
    match op {
        AtomicOp::Add => binary(BinaryOp::Add, dtype, old, value),
        AtomicOp::Min => binary(BinaryOp::Min, dtype, old, value),
        AtomicOp::Max => binary(BinaryOp::Max, dtype, old, value),
        AtomicOp::And => binary(BinaryOp::And, dtype, old, value),
        AtomicOp::Or => binary(BinaryOp::Or, dtype, old, value),
        AtomicOp::Xor => binary(BinaryOp::Xor, dtype, old, value),
        AtomicOp::Xchg => value,
    }
}
