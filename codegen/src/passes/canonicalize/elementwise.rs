//! Rewrite rules of elementwise ops.

use super::constants::{constant_bits, literal};
use super::{Change, Pass};
use crate::interp::arith;
use crate::ir::{BinaryOp, CmpOp, DType, Func, Literal, Op, OpId, UnaryOp, Value};
use crate::num;

/// The op that defines a value, with its operands.
fn defining_op(func: &Func, v: Value) -> Option<(&Op, &[Value])> {
    let data = func.op(func.def_op(v)?);
    Some((&data.op, &data.operands))
}

/// Removes `−−x` and `!!x`.
pub(super) fn unary(func: &Func, id: OpId, op: UnaryOp) -> Option<Change> {
    let is_involution = matches!(op, UnaryOp::Neg | UnaryOp::Not);
    match defining_op(func, func.op(id).operands[0])? {
        (Op::Unary(inner), operands) if is_involution && *inner == op => Change::replace_with(operands[0]),
        _ => None,
    }
}

fn is_commutative(op: BinaryOp) -> bool {
    match op {
        BinaryOp::Add
        | BinaryOp::Mul
        | BinaryOp::Min
        | BinaryOp::Max
        | BinaryOp::And
        | BinaryOp::Or
        | BinaryOp::Xor
        | BinaryOp::MulHi => true,
        BinaryOp::Sub
        | BinaryOp::Div
        | BinaryOp::CeilDiv
        | BinaryOp::Rem
        | BinaryOp::Shl
        | BinaryOp::Shr
        | BinaryOp::Rescale => false,
    }
}

pub(super) fn binary(pass: &mut Pass, id: OpId, op: BinaryOp) -> Option<Change> {
    let func = &*pass.func;
    let (a, b) = (func.op(id).operands[0], func.op(id).operands[1]);
    let dtype = func.ty(a).dtype()?;
    if is_commutative(op) && func.constant(a).is_some() && func.constant(b).is_none() {
        return Some(Change::Into(Op::Binary(op), vec![b, a]));
    }
    if a == b && !dtype.is_float() {
        match op {
            BinaryOp::Min | BinaryOp::Max | BinaryOp::And | BinaryOp::Or => return Change::replace_with(a),
            BinaryOp::Sub | BinaryOp::Xor => return Change::constant(literal(dtype, 0)),
            _ => {}
        }
    }
    let right = constant_bits(func, b)?;
    if is_right_identity(op, dtype, right) {
        return Change::replace_with(a);
    }
    if is_right_absorber(op, dtype, right) {
        return Change::replace_with(b);
    }
    reassociate(pass, id, op, dtype, right)
}

/// Whether `op(x, c)` is x for every x: c is a right identity.
fn is_right_identity(op: BinaryOp, dtype: DType, c: u64) -> bool {
    if dtype.is_float() {
        let c = num::decode(dtype, c);
        let zero_with = |negative: bool| c == 0.0 && c.is_sign_negative() == negative;
        return match op {
            // −0 + 0 is +0: the only identity of addition is −0.
            BinaryOp::Add => zero_with(true),
            BinaryOp::Sub => zero_with(false),
            BinaryOp::Mul | BinaryOp::Rescale | BinaryOp::Div => c == 1.0,
            _ => false,
        };
    }
    let value = num::decode_int(dtype, c);
    match op {
        BinaryOp::Add | BinaryOp::Sub | BinaryOp::Or | BinaryOp::Xor | BinaryOp::Shl | BinaryOp::Shr => value == 0,
        BinaryOp::Mul | BinaryOp::Div | BinaryOp::CeilDiv => value == 1,
        BinaryOp::And => c == ones(dtype),
        BinaryOp::Min => value == num::int_range(dtype).1,
        BinaryOp::Max => value == num::int_range(dtype).0,
        BinaryOp::Rem | BinaryOp::MulHi | BinaryOp::Rescale => false,
    }
}

/// Whether `op(x, c)` is c for every x: c is a right absorber.
fn is_right_absorber(op: BinaryOp, dtype: DType, c: u64) -> bool {
    if dtype.is_float() {
        return false;
    }
    let value = num::decode_int(dtype, c);
    match op {
        BinaryOp::Mul | BinaryOp::And | BinaryOp::MulHi => value == 0,
        BinaryOp::Or => c == ones(dtype),
        BinaryOp::Min => value == num::int_range(dtype).0,
        BinaryOp::Max => value == num::int_range(dtype).1,
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Div
        | BinaryOp::CeilDiv
        | BinaryOp::Rem
        | BinaryOp::Rescale
        | BinaryOp::Xor
        | BinaryOp::Shl
        | BinaryOp::Shr => false,
    }
}

/// Storage with every bit set (`true` for bool).
fn ones(dtype: DType) -> u64 {
    num::encode_int(dtype, -1)
}

/// Rewrites `(x op c) op d` to `x op (c op d)`, for wrapping integer ops.
fn reassociate(pass: &mut Pass, id: OpId, op: BinaryOp, dtype: DType, d: u64) -> Option<Change> {
    let is_associative = matches!(op, BinaryOp::Add | BinaryOp::Mul | BinaryOp::And | BinaryOp::Or | BinaryOp::Xor);
    if dtype.is_float() || !is_associative {
        return None;
    }
    let func = &*pass.func;
    let (x, c) = match defining_op(func, func.op(id).operands[0])? {
        (Op::Binary(inner), operands) if *inner == op => (operands[0], constant_bits(func, operands[1])?),
        _ => return None,
    };
    let (ty, loc) = (func.ty(x).clone(), func.op(id).loc.clone());
    let both = pass.new_constant(literal(dtype, arith::binary(op, dtype, c, d)), ty, loc);
    Some(Change::Into(Op::Binary(op), vec![x, both]))
}

/// Folds a comparison of a value with itself, and moves constants to the right.
pub(super) fn cmp(func: &Func, id: OpId, op: CmpOp) -> Option<Change> {
    let operands = &func.op(id).operands;
    let ordered = func.ty(operands[0]).dtype().is_none_or(|d| !d.is_float());
    if operands[0] == operands[1] && ordered {
        return Change::constant(Literal::Bool(matches!(op, CmpOp::Eq | CmpOp::Le | CmpOp::Ge)));
    }
    let swapped = match op {
        CmpOp::Eq | CmpOp::Ne => op,
        CmpOp::Lt => CmpOp::Gt,
        CmpOp::Le => CmpOp::Ge,
        CmpOp::Gt => CmpOp::Lt,
        CmpOp::Ge => CmpOp::Le,
    };
    let constant_left = func.constant(operands[0]).is_some() && func.constant(operands[1]).is_none();
    constant_left.then(|| Change::Into(Op::Cmp(swapped), vec![operands[1], operands[0]]))
}

pub(super) fn select(func: &Func, id: OpId) -> Option<Change> {
    let operands = &func.op(id).operands;
    match func.constant(operands[0]) {
        _ if operands[1] == operands[2] => Change::replace_with(operands[1]),
        Some(Literal::Bool(true)) => Change::replace_with(operands[1]),
        Some(Literal::Bool(false)) => Change::replace_with(operands[2]),
        _ => None,
    }
}

/// Whether `to` represents every number of `from` exactly.
fn represents_exactly(from: DType, to: DType) -> bool {
    let float = |d: DType| match d {
        // Significant bits, and exponent bits.
        DType::F8E4M3 => Some((4, 4)),
        DType::F8E5M2 => Some((3, 5)),
        DType::F16 => Some((11, 5)),
        DType::BF16 => Some((8, 8)),
        DType::F32 => Some((24, 8)),
        DType::F64 => Some((53, 11)),
        _ => None,
    };
    match (float(from), float(to)) {
        // e4m3 has no infinity and one NaN, which every other format represents. Casting the infinity
        // of e5m2 to another format and back gives the largest finite number: casts to e5m2 saturate.
        (Some((p, e)), Some((q, f))) => {
            p <= q && e <= f && (to != DType::F8E4M3 && from != DType::F8E5M2 || from == to)
        }
        (Some(_), None) => false,
        (None, None) => {
            let ((a, b), (c, d)) = (num::int_range(from), num::int_range(to));
            c <= a && b <= d
        }
        (None, Some((q, f))) => {
            let (low, high) = num::int_range(from);
            // Integers within the significand; f16 and wider formats have enough exponent range for the scale.
            let limit = 1i128 << q;
            f >= 5 && -limit <= low && high <= limit
        }
    }
}

/// Removes a cast to the same type, and a pair of casts back to the original type if the intermediate type represents
/// every value exactly.
pub(super) fn cast(func: &Func, id: OpId) -> Option<Change> {
    let data = func.op(id);
    let (x, to) = (data.operands[0], func.ty(data.results[0]));
    if func.ty(x) == to {
        return Change::replace_with(x);
    }
    match defining_op(func, x)? {
        (Op::Cast, inner) => {
            let (from, between) = (func.ty(inner[0]).dtype()?, func.ty(x).dtype()?);
            (func.ty(inner[0]) == to && represents_exactly(from, between)).then(|| Change::Replace(vec![inner[0]]))
        }
        _ => None,
    }
}

pub(super) fn bitcast(func: &Func, id: OpId) -> Option<Change> {
    let data = func.op(id);
    let x = data.operands[0];
    if func.ty(x) == func.ty(data.results[0]) {
        return Change::replace_with(x);
    }
    match defining_op(func, x)? {
        (Op::Bitcast, inner) => Some(Change::Into(Op::Bitcast, inner.to_vec())),
        _ => None,
    }
}
