//! Float arithmetic, and conversions between all types.

use super::rounding::{Rounding, compare_exact};
use super::{Kind, Name, Pattern};
use crate::ir::DType;
use crate::num;
use crate::sim::value::{mask, signed};

fn compare(comparison: &str, x: f64, y: f64) -> Option<bool> {
    let unordered = x.is_nan() || y.is_nan();
    Some(match comparison {
        "eq" => x == y,
        "ne" => !unordered && x != y,
        "lt" => x < y,
        "le" => x <= y,
        "gt" => x > y,
        "ge" => x >= y,
        "equ" => unordered || x == y,
        "neu" => unordered || x != y,
        "ltu" => unordered || x < y,
        "leu" => unordered || x <= y,
        "gtu" => unordered || x > y,
        "geu" => unordered || x >= y,
        "num" => !unordered,
        "nan" => unordered,
        _ => return None,
    })
}

/// Flushes subnormal values to zero if the name has `.ftz`.
fn flush(name: &Name, dtype: DType, bits: u64) -> u64 {
    let exponent = match dtype {
        DType::F32 => 0x7F80_0000,
        DType::F16 => 0x7C00,
        DType::BF16 => 0x7F80,
        _ => return bits,
    };
    let sign = 1 << (dtype.bits() - 1);
    if name.has("ftz") && bits & exponent == 0 { bits & sign } else { bits }
}

/// The supported instructions.
pub const PATTERNS: &[Pattern] = &[
    Pattern { ops: "add sub mul", types: "f32", modifiers: "rn|rz|rm|rp? ftz? sat?" },
    Pattern { ops: "add sub mul", types: "f64", modifiers: "rn|rz|rm|rp?" },
    Pattern { ops: "add sub mul", types: "f16 f16x2", modifiers: "rn? ftz? sat?" },
    Pattern { ops: "add sub mul", types: "bf16 bf16x2", modifiers: "rn?" },
    Pattern { ops: "fma mad", types: "f32", modifiers: "rn|rz|rm|rp ftz? sat?" },
    Pattern { ops: "fma mad", types: "f64", modifiers: "rn|rz|rm|rp" },
    Pattern { ops: "fma", types: "f16 f16x2", modifiers: "rn ftz? sat|relu?" },
    Pattern { ops: "fma", types: "bf16 bf16x2", modifiers: "rn relu?" },
    Pattern { ops: "div", types: "f32", modifiers: "approx|full|rn|rz|rm|rp ftz?" },
    Pattern { ops: "sqrt rcp", types: "f32", modifiers: "approx|rn|rz|rm|rp ftz?" },
    Pattern { ops: "div sqrt rcp", types: "f64", modifiers: "rn|rz|rm|rp" },
    Pattern { ops: "rsqrt ex2 lg2 sin cos", types: "f32", modifiers: "approx ftz?" },
    Pattern { ops: "rsqrt", types: "f64", modifiers: "approx" },
    Pattern { ops: "ex2", types: "f16 f16x2", modifiers: "approx" },
    Pattern { ops: "ex2", types: "bf16 bf16x2", modifiers: "approx ftz" },
    Pattern { ops: "tanh", types: "f32 f16 f16x2 bf16 bf16x2", modifiers: "approx" },
    Pattern { ops: "min max", types: "f32 f16 f16x2", modifiers: "ftz? NaN?" },
    Pattern { ops: "min max", types: "bf16 bf16x2", modifiers: "NaN?" },
    Pattern { ops: "abs neg", types: "f32 f16 f16x2", modifiers: "ftz?" },
    Pattern { ops: "abs neg", types: "f64 bf16 bf16x2", modifiers: "" },
    Pattern { ops: "min max", types: "f64", modifiers: "" },
    Pattern { ops: "copysign", types: "f32 f64", modifiers: "" },
];

/// Executes an instruction; `None` if it is not supported.
pub fn execute(name: &Name, dtype: DType, values: &[u64]) -> Option<u64> {
    let bits: Vec<u64> = values.iter().map(|&v| flush(name, dtype, v & mask(dtype.bits() as u32))).collect();
    let x: Vec<f64> = bits.iter().map(|&bits| num::decode(dtype, bits)).collect();
    let sign = 1u64 << (dtype.bits() - 1);
    let nearest = |x: f64| num::encode(dtype, x);
    let pick = |least: bool| {
        let (a, b) = (x[0], x[1]);
        match (a.is_nan(), b.is_nan()) {
            (true, true) => f64::NAN,
            (true, false) | (false, true) if name.has("NaN") => f64::NAN,
            (true, false) => b,
            (false, true) => a,
            // -0 is less than +0.
            _ if a == b => {
                if (a.is_sign_negative()) == least {
                    a
                } else {
                    b
                }
            }
            _ if (a < b) == least => a,
            _ => b,
        }
    };
    let mut result = match (name.op.as_str(), &x[..]) {
        // For narrower operands, the f64 result has enough bits that rounding it again gives the correctly rounded
        // result.
        ("add", &[a, b]) => directed(name, dtype, "add", &[a, b], nearest(a + b)),
        ("sub", &[a, b]) => directed(name, dtype, "add", &[a, -b], nearest(a - b)),
        ("mul", &[a, b]) => directed(name, dtype, "mul", &[a, b], nearest(a * b)),
        // PTX ISA, `div`: for such divisors, the reciprocal is taken as zero.
        ("div", &[a, b]) if name.has("approx") && b.is_finite() && b.abs() > 2f64.powi(126) => {
            nearest(a * 0f64.copysign(b))
        }
        ("div", &[a, b]) => directed(name, dtype, "div", &[a, b], nearest(a / b)),
        ("rcp", &[a]) => directed(name, dtype, "div", &[1.0, a], nearest(1.0 / a)),
        ("sqrt", &[a]) => directed(name, dtype, "sqrt", &[a], nearest(a.sqrt())),
        ("fma" | "mad", [_, _, _]) => {
            directed(name, dtype, "fma", &x, num::fused_multiply_add(dtype, bits[0], bits[1], bits[2]))
        }
        ("min", [_, _]) => nearest(pick(true)),
        ("max", [_, _]) => nearest(pick(false)),
        ("abs", [_]) => bits[0] & !sign,
        ("neg", [_]) => bits[0] ^ sign,
        ("copysign", [_, _]) => bits[1] & !sign | bits[0] & sign,
        ("rsqrt", &[a]) => nearest(1.0 / a.sqrt()),
        ("ex2", &[a]) => nearest(libm::exp2(a)),
        ("lg2", &[a]) => nearest(libm::log2(a)),
        ("sin", &[a]) => nearest(libm::sin(a)),
        ("cos", &[a]) => nearest(libm::cos(a)),
        ("tanh", &[a]) => nearest(libm::tanh(a)),
        _ => return None,
    };
    let value = num::decode(dtype, result);
    if name.has("sat") {
        result = nearest(saturate_to_one(value));
    }
    if name.has("relu") && value <= 0.0 {
        result = 0;
    }
    Some(flush(name, dtype, result))
}

/// The correctly rounded result: `nearest`, or its neighbor if the name has a directed rounding mode and the exact
/// result differs from `nearest`.
fn directed(name: &Name, dtype: DType, op: &str, x: &[f64], nearest: u64) -> u64 {
    let rounding = Rounding::of(name).unwrap_or(Rounding::Nearest);
    if rounding == Rounding::Nearest {
        return nearest;
    }
    let order = compare_exact(op, x, num::decode(dtype, nearest));
    // IEEE 754: an exact zero sum is -0 when rounding down, else +0.
    let cancels = order.is_eq() && num::decode(dtype, nearest) == 0.0 && rounding == Rounding::Down;
    let addends = match (op, x) {
        ("add", &[a, b]) => Some([a, b].map(f64::is_sign_negative)),
        ("fma", &[a, b, c]) => Some([a.is_sign_negative() != b.is_sign_negative(), c.is_sign_negative()]),
        _ => None,
    };
    if cancels && addends.is_some_and(|[a, b]| a || b) {
        return 1 << (dtype.bits() - 1);
    }
    rounding.step(dtype, nearest, order)
}

/// Applies `.sat`: clamps to [0, 1]; NaN gives +0.
fn saturate_to_one(x: f64) -> f64 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// Executes the comparison of `setp`.
pub fn compare_bits(name: &Name, comparison: &str, dtype: DType, x: u64, y: u64) -> Option<bool> {
    let value = |bits: u64| num::decode(dtype, flush(name, dtype, bits));
    compare(comparison, value(x), value(y))
}

/// Executes an instruction on both halves.
pub fn execute_pair(name: &Name, dtype: DType, values: &[u64]) -> Option<u64> {
    let half = |shift: u32| {
        let values: Vec<u64> = values.iter().map(|v| v >> shift & 0xFFFF).collect();
        execute(name, dtype, &values)
    };
    Some(half(0)? | half(16)? << 16)
}

/// The 8-bit float type of a packed conversion.
fn f8(name: &Name) -> Option<DType> {
    name.modifiers.iter().find_map(|m| match m.as_str() {
        "e4m3x2" => Some(DType::F8E4M3),
        "e5m2x2" => Some(DType::F8E5M2),
        _ => None,
    })
}

/// Clamps to the finite range of a type.
fn saturated(dtype: DType, x: f64) -> f64 {
    let largest = match dtype {
        DType::F8E4M3 => 448.0,
        DType::F8E5M2 => 57344.0,
        DType::F16 => 65504.0,
        DType::BF16 => f64::from(f32::from_bits(0x7F7F_0000)),
        _ => f64::from(f32::MAX),
    };
    x.clamp(-largest, largest)
}

/// Executes `cvt`; `None` if its types or modifiers are not supported.
pub fn convert(name: &Name, values: &[u64]) -> Option<u64> {
    let rounding = Rounding::of(name);
    let narrow = |dtype: DType, x: f64| {
        let x = if name.has("relu") && x <= 0.0 { 0.0 } else { x };
        let x = if name.has("satfinite") { saturated(dtype, x) } else { x };
        rounding.unwrap_or(Rounding::Nearest).encode(dtype, x)
    };
    let matches_modifiers = |modifiers: &str| name.matches_modifiers(modifiers);
    match (f8(name), &name.kinds[..], values) {
        // The first operand goes to the high half.
        (Some(to), [Kind::Float(DType::F32)], &[high, low])
            if matches_modifiers("rn satfinite relu? e4m3x2|e5m2x2") =>
        {
            Some(narrow(to, num::decode(DType::F32, high)) << 8 | narrow(to, num::decode(DType::F32, low)))
        }
        (Some(to), [Kind::Pair(DType::F16)], &[both]) if matches_modifiers("rn satfinite relu? e4m3x2|e5m2x2") => {
            let half = |shift: u32| narrow(to, num::decode(DType::F16, both >> shift & 0xFFFF));
            Some(half(16) << 8 | half(0))
        }
        (Some(from), [Kind::Pair(DType::F16)], &[both]) if matches_modifiers("rn relu? e4m3x2|e5m2x2") => {
            let half = |shift: u32| narrow(DType::F16, num::decode(from, both >> shift & 0xFF));
            Some(half(8) << 16 | half(0))
        }
        (None, [Kind::Pair(to), Kind::Float(DType::F32)], &[high, low])
            if matches_modifiers("rn|rz relu? satfinite?") =>
        {
            Some(narrow(*to, num::decode(DType::F32, high)) << 16 | narrow(*to, num::decode(DType::F32, low)))
        }
        (None, [Kind::Float(DType::F32)], &[x]) if matches_modifiers("rna tf32") => {
            Some(u64::from(num::round_to_tf32(f32::from_bits(x as u32)).to_bits()))
        }
        (None, [to, from], &[x]) => convert_one(name, rounding.unwrap_or(Rounding::Nearest), *to, *from, x),
        _ => None,
    }
}

fn convert_one(name: &Name, rounding: Rounding, to: Kind, from: Kind, x: u64) -> Option<u64> {
    let x = x & mask(from.bits());
    let range = |kind: Kind| match kind {
        Kind::Signed(n) => Some((-(1i128 << (n - 1)), (1i128 << (n - 1)) - 1)),
        Kind::Unsigned(n) => Some((0, (1i128 << n) - 1)),
        _ => None,
    };
    // `.ftz` applies to f32 only.
    let flush = |dtype: DType, bits: u64| if dtype == DType::F32 { flush(name, dtype, bits) } else { bits };
    if name.has("ftz") && ![to, from].contains(&Kind::Float(DType::F32)) {
        return None;
    }
    match (from, to) {
        (Kind::Float(f), Kind::Float(t)) => {
            let modifiers = match (f, t) {
                (f, t) if f == t => "rni|rzi|rmi|rpi? ftz? sat?",
                // Widening is exact.
                (DType::F16 | DType::BF16, DType::F32) | (_, DType::F64) => "ftz? sat?",
                _ => "rn|rz|rm|rp ftz? sat? relu? satfinite?",
            };
            if !name.matches_modifiers(modifiers) {
                return None;
            }
            let value = num::decode(f, flush(f, x));
            let value = if f == t && Rounding::of(name).is_some() { rounding.to_integer(value) } else { value };
            let value = if name.has("sat") { saturate_to_one(value) } else { value };
            let value = if name.has("relu") && value <= 0.0 { 0.0 } else { value };
            let value = if name.has("satfinite") { saturated(t, value) } else { value };
            Some(flush(t, rounding.encode(t, value)))
        }
        (Kind::Float(f), to) => {
            let (low, high) = range(to)?;
            if !name.matches_modifiers("rni|rzi|rmi|rpi ftz? sat?") {
                return None;
            }
            let value = rounding.to_integer(num::decode(f, flush(f, x)));
            // PTX ISA, `cvt`: NaN gives the highest bit if one of the two types has 64 bits, else zero.
            if value.is_nan() {
                let wide = f == DType::F64 || to.bits() == 64;
                return Some(if wide { 1 << (to.bits() - 1) } else { 0 });
            }
            // The cast to i128 saturates.
            Some((value as i128).clamp(low, high) as u64 & mask(to.bits()))
        }
        (from, Kind::Float(t)) => {
            range(from)?;
            if !name.matches_modifiers("rn|rz|rm|rp") {
                return None;
            }
            let signed_source = matches!(from, Kind::Signed(_));
            let dtype = if signed_source { DType::I64 } else { DType::U64 };
            let wide = if signed_source { signed(x, from.bits()) as u64 } else { x };
            let nearest = num::convert(dtype, t, wide);
            // `found` is an integer, or infinity, which the cast turns into a value larger than every integer.
            let found = num::decode(t, nearest) as i128;
            Some(rounding.step(t, nearest, num::decode_int(dtype, wide).cmp(&found)))
        }
        (from, to) => {
            let ((low, high), _) = (range(to)?, range(from)?);
            if !name.matches_modifiers("sat?") {
                return None;
            }
            let value =
                if matches!(from, Kind::Signed(_)) { i128::from(signed(x, from.bits())) } else { i128::from(x) };
            let value = if name.has("sat") { value.clamp(low, high) } else { value };
            Some(value as u64 & mask(to.bits()))
        }
    }
}
