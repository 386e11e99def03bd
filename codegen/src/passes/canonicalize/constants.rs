//! Constant folding.

use super::Change;
use crate::interp::{arith, literal_bits};
use crate::ir::{BinaryOp, DType, Func, Literal, Op, OpId, Value};
use crate::num;

/// The literal of an element from its storage bits.
pub(super) fn literal(dtype: DType, bits: u64) -> Literal {
    match dtype {
        DType::Bool => Literal::Bool(bits != 0),
        d if d.is_float() => Literal::Float(num::decode(d, bits)),
        // A u64 keeps its bits.
        d => Literal::Int(num::decode_int(d, bits) as i64),
    }
}

/// Folds an op whose operands are all constant.
pub(super) fn fold(func: &Func, id: OpId) -> Option<Change> {
    let data = func.op(id);
    let bits = |i: usize| constant_bits(func, data.operands[i]);
    let dtype = |i: usize| func.ty(data.operands[i]).dtype();
    let value = match &data.op {
        Op::Unary(op) => {
            let d = dtype(0)?;
            literal(d, arith::unary(*op, d, bits(0)?))
        }
        Op::Binary(op) => {
            let (d, a, b) = (dtype(0)?, bits(0)?, bits(1)?);
            is_defined(*op, d, b).then(|| literal(d, arith::binary(*op, d, a, b)))?
        }
        Op::Cmp(op) => Literal::Bool(arith::compare(*op, Some(dtype(0)?), bits(0)?, bits(1)?)),
        Op::Fma => {
            let d = dtype(0)?;
            literal(d, num::fused_multiply_add(d, bits(0)?, bits(1)?, bits(2)?))
        }
        Op::Cast => {
            let to = func.ty(data.results[0]).dtype()?;
            literal(to, num::convert(dtype(0)?, to, bits(0)?))
        }
        Op::Bitcast => {
            let to = func.ty(data.results[0]).dtype()?;
            literal(to, canonical(to, bits(0)?)?)
        }
        // The result has the same number in every element.
        Op::Splat
        | Op::ExpandDims { .. }
        | Op::Broadcast
        | Op::Trans { .. }
        | Op::Reshape
        | Op::ConvertLayout
        | Op::Hint { .. } => func.constant(data.operands[0])?,
        _ => return None,
    };
    Change::constant(value)
}

/// The storage bits of a constant value.
pub(super) fn constant_bits(func: &Func, v: Value) -> Option<u64> {
    Some(literal_bits(func.constant(v)?, func.ty(v).dtype()?))
}

/// Whether the IR defines the result of the op for this right operand.
fn is_defined(op: BinaryOp, dtype: DType, b: u64) -> bool {
    if dtype.is_float() {
        return true;
    }
    match op {
        BinaryOp::Div | BinaryOp::CeilDiv | BinaryOp::Rem => b != 0,
        BinaryOp::Shl | BinaryOp::Shr => (0..dtype.bits() as i128).contains(&num::decode_int(dtype, b)),
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Mul
        | BinaryOp::Rescale
        | BinaryOp::Min
        | BinaryOp::Max
        | BinaryOp::And
        | BinaryOp::Or
        | BinaryOp::Xor
        | BinaryOp::MulHi => true,
    }
}

/// The bits, if a literal can represent them: a NaN with a payload has no literal.
fn canonical(dtype: DType, bits: u64) -> Option<u64> {
    (!dtype.is_float() || num::encode(dtype, num::decode(dtype, bits)) == bits).then_some(bits)
}
