//! Number formats: the storage of every [`DType`], and conversion between storage and values.
//!
//! An element is stored in a `u64`: its low [`DType::bits`] bits are the element, the other bits are zero; a `bool` is
//! stored as 0 or 1. Float elements are decoded to `f64` exactly and encoded from `f64` with one rounding, to nearest
//! with ties to even.

use crate::ir::DType;

/// Parameters of an IEEE-754-style binary format.
struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// Whether the largest exponent encodes infinities and NaNs; without it (e4m3) only the largest magnitude is NaN.
    has_infinity: bool,
}

/// The format of a float type; `None` for bool and integers.
fn format(dtype: DType) -> Option<Format> {
    let (exponent_bits, mantissa_bits, has_infinity) = match dtype {
        DType::F8E4M3 => (4, 3, false),
        DType::F8E5M2 => (5, 2, true),
        DType::F16 => (5, 10, true),
        DType::BF16 => (8, 7, true),
        DType::F32 => (8, 23, true),
        DType::F64 => (11, 52, true),
        DType::Bool
        | DType::I8
        | DType::I16
        | DType::I32
        | DType::I64
        | DType::U8
        | DType::U16
        | DType::U32
        | DType::U64 => return None,
    };
    Some(Format { exponent_bits, mantissa_bits, has_infinity })
}

impl Format {
    fn bias(&self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    fn sign_bit(&self) -> u64 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    /// Magnitude bits of the first non-finite value: infinity, or e4m3's NaN.
    fn first_non_finite(&self) -> u64 {
        if self.has_infinity { ((1 << self.exponent_bits) - 1) << self.mantissa_bits } else { self.sign_bit() - 1 }
    }

    /// Whether values beyond the finite range are encoded as the largest finite number: in the 8-bit formats, as in
    /// `cvt.rn.satfinite` of PTX, which Triton uses too. Wider formats encode them as infinity.
    fn saturates(&self) -> bool {
        self.exponent_bits + self.mantissa_bits < 8
    }

    /// Magnitude bits of the largest number that encoding produces.
    fn limit(&self) -> u64 {
        self.first_non_finite() - u64::from(self.saturates())
    }

    /// Magnitude bits of the NaN that encoding produces: 0x7f in the 8-bit formats, as in PTX; else the quiet NaN.
    fn nan(&self) -> u64 {
        if self.saturates() { self.sign_bit() - 1 } else { self.first_non_finite() | 1 << (self.mantissa_bits - 1) }
    }
}

/// 2^exponent, for exponents of normal f64 numbers.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

fn float_format(dtype: DType) -> Format {
    format(dtype).unwrap_or_else(|| panic!("internal compiler error: {dtype} is not a float type; please report this"))
}

/// The value of a float element. Panics if `dtype` is not a float type.
pub fn decode(dtype: DType, bits: u64) -> f64 {
    let f = match dtype {
        DType::F64 => return f64::from_bits(bits),
        DType::F32 => return f32::from_bits(bits as u32) as f64,
        other => float_format(other),
    };
    let magnitude = bits & (f.sign_bit() - 1);
    let value = if magnitude >= f.first_non_finite() {
        if f.has_infinity && magnitude == f.first_non_finite() { f64::INFINITY } else { f64::NAN }
    } else {
        let field = (magnitude >> f.mantissa_bits) as i32;
        let fraction = magnitude & ((1 << f.mantissa_bits) - 1);
        // Exponent field 0 encodes subnormals: the exponent of field 1, without a hidden bit.
        let significand = if field == 0 { fraction } else { fraction | 1 << f.mantissa_bits };
        significand as f64 * power_of_two(field.max(1) - f.bias() - f.mantissa_bits as i32)
    };
    if bits & f.sign_bit() != 0 { -value } else { value }
}

/// The float element nearest to `value` (ties to even). Values beyond the finite range, infinity included, give
/// infinity, or the largest finite number in 8-bit formats. NaN gives the quiet NaN of the format. Panics if `dtype` is
/// not a float type.
pub fn encode(dtype: DType, value: f64) -> u64 {
    let f = match dtype {
        DType::F64 if value.is_nan() => return f64::NAN.to_bits(),
        DType::F64 => return value.to_bits(),
        DType::F32 if value.is_nan() => return f32::NAN.to_bits() as u64,
        DType::F32 => return (value as f32).to_bits() as u64,
        other => float_format(other),
    };
    if value.is_nan() {
        return f.nan();
    }
    let sign = if value.is_sign_negative() { f.sign_bit() } else { 0 };
    let magnitude = value.abs();
    if magnitude == f64::INFINITY {
        return sign | f.limit();
    }
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - f.bias());
    // The spacing of numbers in this binade, and the value in units of it: exact, so that only one rounding follows.
    let quantum = exponent - f.mantissa_bits as i32;
    let count = (magnitude * power_of_two(-quantum)).round_ties_even() as u64;
    // A carry out of the significand correctly increments the exponent field; subnormals have none.
    let field = (exponent + f.bias()) as u64;
    let bits = (field << f.mantissa_bits) + count - (1 << f.mantissa_bits);
    sign | bits.min(f.limit())
}

/// The value of an integer or bool element. Panics for floats.
pub fn decode_int(dtype: DType, bits: u64) -> i128 {
    match dtype {
        DType::Bool | DType::U8 | DType::U16 | DType::U32 | DType::U64 => bits as i128,
        DType::I8 => bits as i8 as i128,
        DType::I16 => bits as i16 as i128,
        DType::I32 => bits as i32 as i128,
        DType::I64 => bits as i64 as i128,
        DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16 | DType::F32 | DType::F64 => {
            panic!("internal compiler error: {dtype} is not an integer type; please report this")
        }
    }
}

/// The low bits of `value`; for bool, whether it is nonzero. Panics for floats.
pub fn encode_int(dtype: DType, value: i128) -> u64 {
    match dtype {
        DType::Bool => (value != 0) as u64,
        DType::I8 | DType::U8 => value as u8 as u64,
        DType::I16 | DType::U16 => value as u16 as u64,
        DType::I32 | DType::U32 => value as u32 as u64,
        DType::I64 | DType::U64 => value as u64,
        DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16 | DType::F32 | DType::F64 => {
            panic!("internal compiler error: {dtype} is not an integer type; please report this")
        }
    }
}

/// Smallest and largest value of an integer type (0 and 1 for bool). Panics for floats.
pub fn int_range(dtype: DType) -> (i128, i128) {
    let bits = dtype.bits() as u32;
    if dtype == DType::Bool {
        (0, 1)
    } else if dtype.is_signed_int() {
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    } else {
        (0, (1 << bits) - 1)
    }
}

/// An integer as f64, rounded to odd: encoding the result rounds as if from the integer.
fn round_to_odd(value: i128) -> f64 {
    let magnitude = value.unsigned_abs();
    let excess = (128 - magnitude.leading_zeros()).saturating_sub(53);
    let kept = magnitude >> excess;
    let lost = (kept << excess != magnitude) as u128;
    let m = (kept | lost) as f64 * power_of_two(excess as i32);
    if value < 0 { -m } else { m }
}

/// Numeric conversion, the semantics of the op `cast`. Floats round to nearest even; only 8-bit floats saturate. Float
/// to integer truncates and saturates, with 0 for NaN. Integers wrap, bool gives 0 or 1, and any nonzero value is
/// `true`.
pub fn convert(from: DType, to: DType, bits: u64) -> u64 {
    match (from.is_float(), to.is_float()) {
        (true, true) => encode(to, decode(from, bits)),
        (true, false) => {
            let x = decode(from, bits);
            let (low, high) = int_range(to);
            if to == DType::Bool { (x != 0.0) as u64 } else { encode_int(to, (x as i128).clamp(low, high)) }
        }
        (false, true) => {
            let value = decode_int(from, bits);
            // Conversion to f64 rounds once; every other format is narrow enough for the rounding to odd to suffice.
            if to == DType::F64 { (value as f64).to_bits() } else { encode(to, round_to_odd(value)) }
        }
        (false, false) => encode_int(to, decode_int(from, bits)),
    }
}

/// Mask of the bits of an f32 that TF32 keeps: all but the low 13 bits of the mantissa.
pub const TF32_KEPT: u32 = !0x1fff;
/// Half a unit in the last place of TF32.
pub const TF32_HALF: u32 = 0x1000;

/// f32 rounded to TF32 as `cvt.rna.tf32.f32` does: 10 mantissa bits, to nearest, ties away from zero.
pub fn round_to_tf32(x: f32) -> f32 {
    if x.is_finite() { f32::from_bits((x.to_bits() + TF32_HALF) & TF32_KEPT) } else { x }
}

/// a·b + c with one rounding to the float type `dtype`. Panics if it is not a float type.
pub fn fused_multiply_add(dtype: DType, a: u64, b: u64, c: u64) -> u64 {
    let (x, y, z) = (decode(dtype, a), decode(dtype, b), decode(dtype, c));
    match dtype {
        DType::F64 => encode(dtype, x.mul_add(y, z)),
        DType::F32 => encode(dtype, (x as f32).mul_add(y as f32, z as f32) as f64),
        _ => {
            // The product is exact in f64. Rounding the sum to odd preserves what the second rounding depends on.
            let product = x * y;
            let sum = product + z;
            let back = sum - product;
            let error = (product - (sum - back)) + (z - back);
            if !sum.is_finite() || error == 0.0 || sum.to_bits() & 1 == 1 {
                return encode(dtype, sum);
            }
            let away_from_zero = (error > 0.0) == (sum > 0.0);
            let odd = if away_from_zero { sum.to_bits() + 1 } else { sum.to_bits() - 1 };
            encode(dtype, f64::from_bits(odd))
        }
    }
}

/// The smaller number; of a number and NaN, the number. −0 is less than +0, as in IEEE 754-2019's minimumNumber and in
/// PTX.
pub fn minimum_number(x: f64, y: f64) -> f64 {
    if x.is_nan() || y.is_nan() { x.min(y) } else { std::cmp::min_by(x, y, f64::total_cmp) }
}

/// The larger number, as [`minimum_number`].
pub fn maximum_number(x: f64, y: f64) -> f64 {
    if x.is_nan() || y.is_nan() { x.max(y) } else { std::cmp::max_by(x, y, f64::total_cmp) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    #[test]
    fn every_narrow_float_decodes_and_encodes_to_itself() {
        for dtype in [DType::F8E4M3, DType::F8E5M2, DType::F16, DType::BF16] {
            for bits in 0..1u64 << dtype.bits() {
                let x = decode(dtype, bits);
                if x.is_infinite() && dtype == DType::F8E5M2 {
                    assert_eq!(encode(dtype, x), bits - 1, "infinity becomes the largest number");
                } else if !x.is_nan() {
                    assert_eq!(encode(dtype, x), bits, "{dtype} {bits:#x} {x}");
                }
            }
        }
        for bits in 0..=u16::MAX {
            assert!(same(decode(DType::F16, bits as u64), f16::from_bits(bits).to_f64()));
            assert!(same(decode(DType::BF16, bits as u64), bf16::from_bits(bits).to_f64()));
        }
    }

    fn same(a: f64, b: f64) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    /// Values from the OCP 8-bit floating point specification, tables 1 and 2.
    #[test]
    fn fp8_landmarks() {
        assert_eq!(decode(DType::F8E4M3, 0x7e), 448.0);
        assert_eq!(decode(DType::F8E4M3, 0x08), 2f64.powi(-6));
        assert_eq!(decode(DType::F8E4M3, 0x01), 2f64.powi(-9));
        assert!(decode(DType::F8E4M3, 0x7f).is_nan());
        assert_eq!(decode(DType::F8E5M2, 0x7b), 57344.0);
        assert_eq!(decode(DType::F8E5M2, 0x01), 2f64.powi(-16));
        assert_eq!(decode(DType::F8E5M2, 0xfc), f64::NEG_INFINITY);
        assert_eq!(encode(DType::F8E4M3, 1e9), 0x7e);
        assert_eq!(encode(DType::F8E4M3, f64::NEG_INFINITY), 0xfe);
        assert_eq!(encode(DType::F8E5M2, 1e9), 0x7b);
        assert_eq!(encode(DType::F8E5M2, f64::NEG_INFINITY), 0xfb);
        assert_eq!(encode(DType::F8E4M3, f64::NAN), 0x7f);
        assert_eq!(encode(DType::F8E5M2, f64::NAN), 0x7f);
    }

    /// `cvt.rn.satfinite` by definition: the nearest finite number, the even one of two, by exhaustive search.
    fn nearest_fp8(dtype: DType, x: f64) -> u64 {
        if x.is_nan() {
            return 0x7f;
        }
        let finite = (0..0x80).filter(|&bits| decode(dtype, bits).is_finite());
        let magnitude = x.abs();
        let largest = finite.clone().map(|bits| decode(dtype, bits)).fold(0.0, f64::max);
        let target = magnitude.min(largest);
        let nearest = finite.min_by(|&a, &b| {
            let distance = |bits: u64| (decode(dtype, bits) - target).abs();
            distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))
        });
        nearest.expect("finite numbers") | if x.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn fp8_conversions_saturate() {
        for to in [DType::F8E4M3, DType::F8E5M2] {
            for from in [DType::F16, DType::BF16] {
                for bits in 0..1 << 16 {
                    let x = decode(from, bits);
                    assert_eq!(convert(from, to, bits), nearest_fp8(to, x), "{from} {bits:#x} = {x} to {to}");
                }
            }
        }
    }

    #[test]
    fn halfway_values_round_to_even() {
        assert_eq!(encode(DType::F16, 2049.0), encode(DType::F16, 2048.0));
        assert_eq!(encode(DType::F16, 2051.0), encode(DType::F16, 2052.0));
        // Above the tie by less than f32 resolves: conversion through f32 would round twice.
        assert_eq!(encode(DType::F16, 2049.0 + 1e-10), encode(DType::F16, 2050.0));
        assert_eq!(encode(DType::F16, 65519.9), 0x7bff);
        assert_eq!(encode(DType::F16, 65520.0), 0x7c00);
        assert_eq!(
            convert(DType::I64, DType::F32, 0x0100_0001_0000_0001),
            (0x0100_0001_0000_0001_i64 as f32).to_bits() as u64
        );
    }

    #[test]
    fn tf32_keeps_ten_bits_and_ties_away() {
        let ulp = 2f32.powi(-10);
        assert_eq!(round_to_tf32(1.0 + ulp / 2.0), 1.0 + ulp);
        assert_eq!(round_to_tf32(-1.0 - ulp / 2.0), -1.0 - ulp);
        assert_eq!(round_to_tf32(1.0 + ulp / 2.0 - f32::EPSILON), 1.0);
        assert_eq!(round_to_tf32(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn casts_saturate_and_wrap() {
        let f = |x: f64| encode(DType::F32, x);
        assert_eq!(convert(DType::F32, DType::I8, f(300.0)), 127);
        assert_eq!(convert(DType::F32, DType::I8, f(-300.0)), 0x80);
        assert_eq!(convert(DType::F32, DType::U8, f(-1.5)), 0);
        assert_eq!(convert(DType::F32, DType::I32, f(-1.9)), -1i32 as u32 as u64);
        assert_eq!(convert(DType::F32, DType::I32, f(f64::NAN)), 0);
        assert_eq!(convert(DType::I32, DType::U8, 0x1ff), 0xff);
        assert_eq!(convert(DType::I8, DType::I32, 0x80), 0xffff_ff80);
        assert_eq!(convert(DType::F32, DType::Bool, f(0.25)), 1);
        assert_eq!(convert(DType::I32, DType::Bool, 256), 1);
        assert_eq!(convert(DType::Bool, DType::F16, 1), f16::ONE.to_bits() as u64);
    }

    /// a·b + c in exact integer arithmetic, for inputs that are multiples of 2^-24 (finite f16 numbers).
    fn exact_f16_fma(a: f16, b: f16, c: f16) -> f64 {
        let fixed = |x: f16| (x.to_f64() * 2f64.powi(24)) as i128;
        let sum = fixed(a) * fixed(b) + (fixed(c) << 24);
        round_to_odd(sum) * 2f64.powi(-48)
    }

    proptest! {
        #[test]
        fn fp8_encoding_rounds_to_nearest(bits in any::<u64>(), near in 0..0x100u64, off in -2i64..=2) {
            for to in [DType::F8E4M3, DType::F8E5M2] {
                let tie = (decode(to, near) + decode(to, near ^ 1)) / 2.0;
                let around = f64::from_bits(tie.to_bits().wrapping_add_signed(off));
                for x in [f64::from_bits(bits), f64::from(f32::from_bits(bits as u32)), around] {
                    prop_assert_eq!(encode(to, x), nearest_fp8(to, x), "{} to {}", x, to);
                }
            }
        }

        #[test]
        fn f32_to_half_agrees_with_the_half_crate(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assume!(!x.is_nan());
            prop_assert_eq!(encode(DType::F16, x as f64), f16::from_f32(x).to_bits() as u64);
            prop_assert_eq!(encode(DType::BF16, x as f64), bf16::from_f32(x).to_bits() as u64);
        }

        #[test]
        fn integers_round_once(x in any::<i64>(), shift in 0..63u32) {
            let x = x >> shift;
            prop_assert_eq!(convert(DType::I64, DType::F32, x as u64), (x as f32).to_bits() as u64);
            prop_assert_eq!(convert(DType::U64, DType::F32, x as u64), (x as u64 as f32).to_bits() as u64);
        }

        #[test]
        fn half_fma_rounds_once(a in 0..0x7c00u16, b in 0..0x7c00u16, c in 0..0x7c00u16, signs in 0..8u16) {
            let sign = |i: u16| (signs >> i & 1) << 15;
            let (a, b, c) = (f16::from_bits(a | sign(0)), f16::from_bits(b | sign(1)), f16::from_bits(c | sign(2)));
            let bits = |x: f16| x.to_bits() as u64;
            let got = decode(DType::F16, fused_multiply_add(DType::F16, bits(a), bits(b), bits(c)));
            let exact = exact_f16_fma(a, b, c);
            prop_assert_eq!(got, decode(DType::F16, encode(DType::F16, exact)));
        }
    }
}
