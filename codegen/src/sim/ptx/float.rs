//! Floats, and conversions between all types.

use super::{Kind, Name};
use crate::ir::DType;
use crate::num;
use crate::sim::value::{mask, signed};

pub fn compare(comparison: &str, x: f64, y: f64) -> Option<bool> {
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

/// Zero for a subnormal f32 where the name has `.ftz`.
fn flush(name: &Name, dtype: DType, bits: u64) -> u64 {
    let exponent = match dtype {
        DType::F32 => 0x7F80_0000,
        DType::F16 => 0x7C00,
        _ => return bits,
    };
    let sign = 1 << (dtype.bits() - 1);
    if name.has("ftz") && bits & exponent == 0 { bits & sign } else { bits }
}

/// The result; `None` where the instruction is not known.
pub fn execute(name: &Name, dtype: DType, values: &[u64]) -> Option<u64> {
    // Other directions need the rest of a rounding, which nobody has asked for yet.
    if ["rz", "rm", "rp", "rna"].iter().any(|r| name.has(r)) {
        return None;
    }
    let bits: Vec<u64> = values.iter().map(|&v| flush(name, dtype, v & mask(dtype.bits() as u32))).collect();
    let x = |i: usize| num::decode(dtype, bits[i]);
    let sign = 1u64 << (dtype.bits() - 1);
    let exact = |x: f64| num::encode(dtype, x);
    let approximate = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let pick = |least: bool| {
        let (a, b) = (x(0), x(1));
        match (a.is_nan(), b.is_nan()) {
            (true, true) => f64::NAN,
            (true, false) | (false, true) if name.has("NaN") => f64::NAN,
            (true, false) => b,
            (false, true) => a,
            // Of zeros, -0 is the lesser.
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
    let mut result = match (name.op, bits.len()) {
        // f64 holds what two narrower numbers give exactly enough for one more rounding to be the only one.
        ("add", 2) => exact(x(0) + x(1)),
        ("sub", 2) => exact(x(0) - x(1)),
        ("mul", 2) => exact(x(0) * x(1)),
        ("div", 2) => exact(x(0) / x(1)),
        ("fma" | "mad", 3) => num::fused_multiply_add(dtype, bits[0], bits[1], bits[2]),
        ("min", 2) => exact(pick(true)),
        ("max", 2) => exact(pick(false)),
        ("abs", 1) => bits[0] & !sign,
        ("neg", 1) => bits[0] ^ sign,
        ("copysign", 2) => bits[1] & !sign | bits[0] & sign,
        ("sqrt", 1) => exact(x(0).sqrt()),
        ("rcp", 1) => exact(1.0 / x(0)),
        ("rsqrt", 1) => exact(1.0 / x(0).sqrt()),
        ("ex2", 1) if approximate => exact(libm::exp2(x(0))),
        ("lg2", 1) if approximate => exact(libm::log2(x(0))),
        ("sin", 1) if approximate => exact(libm::sin(x(0))),
        ("cos", 1) if approximate => exact(libm::cos(x(0))),
        ("tanh", 1) if approximate => exact(libm::tanh(x(0))),
        _ => return None,
    };
    let value = num::decode(dtype, result);
    if name.has("sat") {
        result = exact(if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) });
    }
    if name.has("relu") && !value.is_nan() {
        result = exact(value.max(0.0));
    }
    Some(flush(name, dtype, result))
}

/// Of both halves.
pub fn execute_pair(name: &Name, dtype: DType, values: &[u64]) -> Option<u64> {
    let half = |shift: u32| {
        let values: Vec<u64> = values.iter().map(|v| v >> shift & 0xFFFF).collect();
        execute(name, dtype, &values)
    };
    Some(half(0)? | half(16)? << 16)
}

/// How a conversion rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

impl Rounding {
    fn of(name: &Name) -> Option<Rounding> {
        name.modifiers.iter().find_map(|m| match *m {
            "rn" | "rni" => Some(Rounding::Nearest),
            "rz" | "rzi" => Some(Rounding::Zero),
            "rm" | "rmi" => Some(Rounding::Down),
            "rp" | "rpi" => Some(Rounding::Up),
            _ => None,
        })
    }

    fn to_integer(self, x: f64) -> f64 {
        match self {
            Rounding::Nearest => x.round_ties_even(),
            Rounding::Zero => x.trunc(),
            Rounding::Down => x.floor(),
            Rounding::Up => x.ceil(),
        }
    }

    /// A number as an element of the type, rounded once.
    fn encode(self, dtype: DType, x: f64) -> u64 {
        let nearest = num::encode(dtype, x);
        let found = num::decode(dtype, nearest);
        let toward_zero = |bits: u64| bits - 1;
        let away = |bits: u64| bits + 1;
        if found == x || x.is_nan() {
            return nearest;
        }
        match self {
            Rounding::Nearest => nearest,
            Rounding::Zero if found.abs() > x.abs() => toward_zero(nearest),
            Rounding::Down if found > x => {
                if x > 0.0 {
                    toward_zero(nearest)
                } else {
                    away(nearest)
                }
            }
            Rounding::Up if found < x => {
                if x > 0.0 {
                    away(nearest)
                } else {
                    toward_zero(nearest)
                }
            }
            _ => nearest,
        }
    }
}

/// An 8-bit float with its neighbour.
fn f8(name: &Name) -> Option<DType> {
    name.modifiers.iter().find_map(|m| match *m {
        "e4m3x2" => Some(DType::F8E4M3),
        "e5m2x2" => Some(DType::F8E5M2),
        _ => None,
    })
}

/// Within the finite numbers of a type.
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

/// `cvt`.
pub fn convert(name: &Name, values: &[u64]) -> Option<u64> {
    let rounding = Rounding::of(name);
    let narrow = |dtype: DType, x: f64| {
        let x = if name.has("relu") && !x.is_nan() { x.max(0.0) } else { x };
        let x = if name.has("satfinite") { saturated(dtype, x) } else { x };
        rounding.unwrap_or(Rounding::Nearest).encode(dtype, x)
    };
    match (f8(name), &name.kinds[..], values) {
        // The first operand goes to the high half.
        (Some(to), [Kind::Float(from)], &[high, low]) => {
            Some(narrow(to, num::decode(*from, high)) << 8 | narrow(to, num::decode(*from, low)))
        }
        (Some(to), [Kind::Pair(from)], &[both]) if name.has("satfinite") => {
            let half = |shift: u32| narrow(to, num::decode(*from, both >> shift & 0xFFFF));
            Some(half(16) << 8 | half(0))
        }
        (Some(from), [Kind::Pair(to)], &[both]) => {
            let half = |shift: u32| narrow(*to, num::decode(from, both >> shift & 0xFF));
            Some(half(8) << 16 | half(0))
        }
        (None, [Kind::Pair(to), Kind::Float(from)], &[high, low]) => {
            Some(narrow(*to, num::decode(*from, high)) << 16 | narrow(*to, num::decode(*from, low)))
        }
        (None, [Kind::Float(DType::F32)], &[x]) if name.has("tf32") && name.has("rna") => {
            Some(u64::from(num::round_to_tf32(f32::from_bits(x as u32)).to_bits()))
        }
        (None, [to, from], &[x]) => convert_one(name, rounding, *to, *from, x),
        _ => None,
    }
}

fn convert_one(name: &Name, rounding: Option<Rounding>, to: Kind, from: Kind, x: u64) -> Option<u64> {
    let x = x & mask(from.bits());
    let integer = |kind: Kind| match kind {
        Kind::Signed(n) => Some((-(1i128 << (n - 1)), (1i128 << (n - 1)) - 1)),
        Kind::Unsigned(n) | Kind::Bits(n) => Some((0, (1i128 << n) - 1)),
        _ => None,
    };
    match (from, to) {
        (Kind::Float(f), Kind::Float(t)) => {
            let value = num::decode(f, flush(name, f, x));
            let integral = ["rni", "rzi", "rmi", "rpi"].iter().any(|r| name.has(r));
            let value = if integral { rounding?.to_integer(value) } else { value };
            let value = if name.has("sat") { if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) } } else { value };
            let value = if name.has("relu") && !value.is_nan() { value.max(0.0) } else { value };
            Some(flush(name, t, rounding.unwrap_or(Rounding::Nearest).encode(t, value)))
        }
        (Kind::Float(f), to) => {
            let (low, high) = integer(to)?;
            let value = rounding?.to_integer(num::decode(f, flush(name, f, x)));
            // NaN gives zero; the cast saturates at i128's ends.
            Some((value as i128).clamp(low, high) as u64 & mask(to.bits()))
        }
        (from, Kind::Float(t)) => {
            let dtype = if matches!(from, Kind::Signed(_)) { DType::I64 } else { DType::U64 };
            let wide = if matches!(from, Kind::Signed(_)) { signed(x, from.bits()) as u64 } else { x };
            match rounding {
                None | Some(Rounding::Nearest) => Some(num::convert(dtype, t, wide)),
                // 53 bits hold it.
                Some(other) if from.bits() <= 32 => Some(other.encode(t, num::decode_int(dtype, wide) as f64)),
                Some(_) => None,
            }
        }
        (from, to) => {
            let value =
                if matches!(from, Kind::Signed(_)) { i128::from(signed(x, from.bits())) } else { i128::from(x) };
            let (low, high) = integer(to)?;
            let value = if name.has("sat") { value.clamp(low, high) } else { value };
            Some(value as u64 & mask(to.bits()))
        }
    }
}
