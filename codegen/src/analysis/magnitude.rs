//! Upper bounds of the magnitude of float elements.

use crate::ir::{BinaryOp, DType, Def, Func, Literal, Op, UnaryOp, Value};
use crate::num;

/// Maximum depth of the recursion through defining ops; an op with two operands may double the work.
const MAX_DEPTH: usize = 8;
/// Rounding to f16, bf16, f32 or f64 increases a magnitude by at most this factor, or, for subnormal numbers, by at
/// most [`SUBNORMAL`].
const ROUNDING: f64 = 1.0 + 1.0 / 256.0;
/// Half of the smallest positive f16 number, 2^-25, rounded up.
const SUBNORMAL: f64 = 3e-8;

/// Upper bound of the magnitude of the finite elements of a scalar or tile: at most that of its type. `None` for
/// pointers, and for bf16, f32 and f64 if no bound is found.
pub fn upper_bound(func: &Func, v: Value) -> Option<f64> {
    bound_to_depth(func, v, MAX_DEPTH)
}

fn bound_to_depth(func: &Func, v: Value, depth: usize) -> Option<f64> {
    let dtype = func.ty(v).dtype()?;
    let of_type = match dtype {
        DType::F16 => Some(65504.0),
        DType::F8E4M3 => Some(448.0),
        DType::F8E5M2 => Some(57344.0),
        d if d.is_float() => None,
        d => {
            let (low, high) = num::int_range(d);
            return Some(low.unsigned_abs().max(high.unsigned_abs()) as f64);
        }
    };
    let Def::Result(id, _) = func.value(v).def else { return of_type };
    // A cast to an 8-bit float turns infinities into the largest number.
    if depth == 0 || dtype.bits() == 8 {
        return of_type;
    }
    let data = func.op(id);
    let operand = |i: usize| bound_to_depth(func, data.operands[i], depth - 1);
    let bound = match &data.op {
        Op::Constant { value: Literal::Float(x) } => Some(x.abs()).filter(|x| x.is_finite()),
        Op::Splat | Op::ExpandDims { .. } | Op::Broadcast | Op::Trans { .. } | Op::Reshape | Op::ConvertLayout => {
            operand(0)
        }
        Op::Binary(BinaryOp::Min | BinaryOp::Max) => {
            clamp_bound(func, v).or_else(|| operand(0).zip(operand(1)).map(|(x, y)| x.max(y)))
        }
        Op::Unary(UnaryOp::Neg | UnaryOp::Abs) | Op::Cast => operand(0),
        Op::Unary(UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Rint) => operand(0).map(|x| x + 1.0),
        Op::Binary(BinaryOp::Add | BinaryOp::Sub) => operand(0).zip(operand(1)).map(|(x, y)| x + y),
        Op::Binary(BinaryOp::Mul | BinaryOp::Rescale) => operand(0).zip(operand(1)).map(|(x, y)| x * y),
        Op::Select => operand(1).zip(operand(2)).map(|(x, y)| x.max(y)),
        _ => None,
    };
    match (bound.map(|x| x * ROUNDING + SUBNORMAL), of_type) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// The larger magnitude of the constants of `min(max(x, low), high)`, in either order. A NaN becomes one of the
/// constants too.
fn clamp_bound(func: &Func, v: Value) -> Option<f64> {
    // The non-constant operand of a min or max, and the constant.
    let clamp_operand = |v: Value, by: BinaryOp| -> Option<(Value, f64)> {
        let data = func.op(func.def_op(v)?);
        let [a, b] = data.operands[..] else { return None };
        let constant = |v: Value| match func.constant(v) {
            Some(Literal::Float(x)) if x.is_finite() => Some(x),
            _ => None,
        };
        if data.op != Op::Binary(by) {
            return None;
        }
        constant(b).map(|c| (a, c)).or_else(|| constant(a).map(|c| (b, c)))
    };
    let both = |outer, inner| {
        let (x, one) = clamp_operand(v, outer)?;
        let (_, other) = clamp_operand(x, inner)?;
        Some(f64::max(one.abs(), other.abs()))
    };
    both(BinaryOp::Min, BinaryOp::Max).or_else(|| both(BinaryOp::Max, BinaryOp::Min))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    /// The bound of %v, the value that `body` defines last.
    fn bound(body: &str) -> Option<f64> {
        let text = format!(
            "kernel @f(%x: f32, %h: f16, %n: i16) {{\n{body}\n  device_print %v {{prefix = \"\"}}\n  return\n}}"
        );
        let func = parse(&text).unwrap_or_else(|e| panic!("{e}"));
        let print = func.walk().into_iter().find(|&id| matches!(func.op(id).op, Op::DevicePrint { .. }));
        upper_bound(&func, func.op(print.expect("a print")).operands[0])
    }

    #[test]
    fn clamps_bound_magnitude() {
        let constants = "%a = constant {value = -2.0} : f32\n%b = constant {value = 4.0} : f32\n";
        let clamped = "%m = max %x, %a : f32\n%v = min %m, %b : f32";
        let rounded = |x: f64| Some(x * ROUNDING + SUBNORMAL);
        assert_eq!(bound(&format!("{constants}{clamped}")), rounded(4.0));
        let other_order = "%m = min %b, %x : f32\n%v = max %m, %a : f32";
        assert_eq!(bound(&format!("{constants}{other_order}")), rounded(4.0));
        // Only one side is bounded.
        assert_eq!(bound(&format!("{constants}%m = max %x, %a : f32\n%v = max %m, %b : f32")), None);
        assert_eq!(bound(&format!("{constants}%v = min %x, %b : f32")), None);
    }

    #[test]
    fn casts_bound_magnitude_by_source_type() {
        assert_eq!(bound("%v = cast %h : f32"), Some(65504.0 * ROUNDING + SUBNORMAL));
        assert_eq!(bound("%v = cast %n : f32"), Some(32768.0 * ROUNDING + SUBNORMAL));
        // An infinity gives 448.
        let small = "%c = constant {value = 0.0009765625} : f16\n%s = mul %h, %c : f16\n";
        assert_eq!(
            bound(&format!("{small}%e = cast %s : f8e4m3\n%v = cast %e : f32")),
            Some(448.0 * ROUNDING + SUBNORMAL)
        );
        assert_eq!(bound("%v = cast %x : f64"), None);
        assert_eq!(bound("%w = cast %h : f32\n%v = mul %w, %w : f32").map(|b| b >= 65504.0 * 65504.0), Some(true));
        assert_eq!(bound("%w = cast %h : f32\n%v = mul %w, %x : f32"), None);
    }
}
