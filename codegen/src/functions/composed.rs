//! The functions of libdevice that are no ops, for f32 and f64.

use super::double::{Pair, exp_m1_reduced, limited, log_specials, logarithm};
use super::{E, integer_of};
use crate::ir::{BinaryOp, CmpOp, DType, UnaryOp};
use std::f64::consts::{FRAC_PI_2, FRAC_PI_4, LN_2, LOG2_E, PI};

fn is_f32(x: E) -> bool {
    x.dtype() == DType::F32
}

fn exp(x: E) -> E {
    x.unary(UnaryOp::Exp)
}

fn log(x: E) -> E {
    x.unary(UnaryOp::Log)
}

/// Nearest integer, halves away from zero.
pub fn round(x: E) -> E {
    let whole = x.unary(UnaryOp::Trunc);
    let farther = whole + whole.number(1.0).copysign(x);
    (x - whole).abs().lt(0.5).select(whole, farther)
}

/// eˣ − 1 without cancellation, also near zero: 2ᵏ (eʳ − 1) + (2ᵏ − 1).
pub fn expm1(x: E) -> E {
    let (low, high) = if is_f32(x) { (-18.0, 89.0) } else { (-38.0, 710.0) };
    let size = limited(x, low, high);
    let n = (size * LOG2_E).rint();
    let (ln2_high, ln2_low) = if is_f32(x) {
        (6.931_457_519_5e-1, 1.428_606_765_3e-6)
    } else {
        (6.931_471_803_691_238e-1, 1.908_214_929_270_587_7e-10)
    };
    let p = exp_m1_reduced(n.fma(-ln2_high, size), n * ln2_low);
    // Half of 2ᵏ, which does not overflow.
    let power = super::power_of_two(n.cast(integer_of(x.dtype())) - 1i64, x.dtype());
    let result = power.fma(p, power - 0.5) * 2.0;
    // Small numbers, and −0, as they are.
    let tiny = if is_f32(x) { 1e-8 } else { 1e-17 };
    x.abs().lt(tiny).select(x, result)
}

/// ln(1 + x), accurate near zero: the logarithm of the rounded sum, plus what rounding lost.
pub fn log1p(x: E) -> E {
    let u = x + 1.0;
    let lost = x - (u - 1.0);
    let result = log(u) + lost / u;
    let result = x.abs().lt(if is_f32(x) { 1e-9 } else { 1e-18 }).select(x, result);
    // 0/0 or ∞ − ∞.
    x.gt(-1.0).and(x.lt(f64::INFINITY)).select(result, log(u))
}

/// log₁₀ x. f32 in f64, so that powers of ten are exact.
pub fn log10(x: E) -> E {
    const LOG10_E: f64 = std::f64::consts::LOG10_E;
    if is_f32(x) {
        let result = log2_light(x.cast(DType::F64)) * std::f64::consts::LOG10_2;
        return log_specials(x, result.cast(DType::F32));
    }
    let Pair { high, low } = logarithm(x);
    let y = high.times(LOG10_E);
    let y_low = high.fma(LOG10_E, -y) + (high * 1.098_319_650_216_765e-17 + low * LOG10_E);
    log_specials(x, y + y_low)
}

/// 10ˣ = 2^(x log₂ 10), with the product in two parts.
pub fn exp10(x: E) -> E {
    let (log, log_low) = if is_f32(x) {
        let high = std::f32::consts::LOG2_10;
        (f64::from(high), std::f64::consts::LOG2_10 - f64::from(high))
    } else {
        (std::f64::consts::LOG2_10, 1.661_617_516_973_592e-16)
    };
    let size = limited(x, -400.0, 400.0);
    let y = size.times(log);
    let low = size.fma(log, -y) + size * log_low;
    let n = y.rint();
    let power = ((y - n) + low).unary(UnaryOp::Exp2);
    let (smallest, largest) = if is_f32(x) { (-151.0, 129.0) } else { (-1076.0, 1025.0) };
    power.scale(limited(n, smallest, largest).cast(integer_of(x.dtype())))
}

/// log₂ x to 2⁻⁴⁰, for the f64 of an f32 x > 0.
fn log2_light(x: E) -> E {
    let offset = x.bits() - std::f64::consts::FRAC_1_SQRT_2.to_bits() as i64;
    let exponent = offset.binary(BinaryOp::Shr, 52i64);
    let m = (x.bits() - exponent.binary(BinaryOp::Shl, 52i64)).bitcast(DType::F64);
    let s = (m - 1.0) / (m + 1.0);
    let coefficients: Vec<f64> = (0..10).rev().map(|i| 2.0 * LOG2_E / f64::from(2 * i + 1)).collect();
    (s * s).polynomial(&coefficients).fma(s, exponent.cast(DType::F64))
}

/// 2ˣ to 2⁻⁴⁰, for an f64 |x| ≤ 1000.
fn exp2_light(x: E) -> E {
    let n = x.rint();
    let mut coefficients = vec![1.0];
    (1..12).for_each(|i| coefficients.push(coefficients[i - 1] * LN_2 / i as f64));
    coefficients.reverse();
    (x - n).polynomial(&coefficients).scale(n.cast(DType::I64))
}

/// xʸ, with the special cases of IEEE 754 (and C). f32 in f64; f64 by a logarithm to 2⁻⁶⁴.
pub fn pow<'c>(x: E<'c>, y: E<'c>) -> E<'c> {
    let a = x.abs();
    let power = if is_f32(x) {
        let product = log2_light(a.cast(DType::F64)) * y.cast(DType::F64);
        exp2_light(limited(product, -300.0, 300.0)).cast(DType::F32)
    } else {
        let log = logarithm(a);
        let high = log.high.times(y);
        let low = log.high.fma(y, -high) + log.low.times(y);
        let e = exp(high);
        // The correction is 0 · ∞ or ∞ − ∞ beyond the range.
        high.abs().lt(745.0).select(e.fma(low, e), e)
    };
    let is_integer = y.rint().eq(y);
    let half = y * 0.5;
    // Infinity is even.
    let is_odd = is_integer.and(!half.rint().eq(half));
    let grows = a.gt(1.0).cmp(CmpOp::Eq, y.gt(0.0));
    let infinity = x.number(f64::INFINITY);
    let at_infinity = a.eq(1.0).select(1.0, grows.select(infinity, x.number(0.0)));
    let power = y.abs().eq(f64::INFINITY).select(at_infinity, power);
    let edge = a.eq(0.0).or(a.eq(f64::INFINITY));
    let power = edge.select(grows.select(infinity, x.number(0.0)), power);
    let power = x.sign_bit().and(is_odd).select(-power, power);
    let negative = x.lt(0.0).and(a.lt(f64::INFINITY)).and(!is_integer);
    let power = negative.or(x.is_nan()).or(y.is_nan()).select(f64::NAN, power);
    x.eq(1.0).or(y.eq(0.0)).select(1.0, power)
}

/// Sine by cosine.
pub fn tan(x: E) -> E {
    let quotient = x.unary(UnaryOp::Sin) / x.unary(UnaryOp::Cos);
    x.eq(0.0).select(x, quotient)
}

/// asin a / a − 1 for a² = z, a ≤ ½: Cephes's `asinf`, fdlibm's `e_asin.c`.
fn asin_series(z: E) -> E {
    if is_f32(z) {
        return z * z.polynomial(&[
            4.216_319_904_8e-2,
            2.418_131_104_9e-2,
            4.547_002_599_8e-2,
            7.495_300_268_6e-2,
            1.666_675_242_2e-1,
        ]);
    }
    let p = z.polynomial(&[
        3.479_331_075_960_212e-5,
        7.915_349_942_898_145e-4,
        -4.005_553_450_067_941e-2,
        2.012_125_321_348_629_3e-1,
        -3.255_658_186_224_009e-1,
        1.666_666_666_666_666_6e-1,
    ]);
    let q = z.polynomial(&[
        7.703_815_055_590_194e-2,
        -6.882_839_716_054_533e-1,
        2.020_945_760_233_505_7,
        -2.403_394_911_734_414,
        1.0,
    ]);
    z * p / q
}

/// What π/2 in the type of x lacks.
fn half_pi_low(x: E) -> f64 {
    if is_f32(x) { FRAC_PI_2 - f64::from(std::f32::consts::FRAC_PI_2) } else { 6.123_233_995_736_766e-17 }
}

/// By the series up to ½; beyond by asin a = π/2 − 2 asin √((1 − a)/2).
pub fn asin(x: E) -> E {
    let a = x.abs();
    let small = a.lt(0.5);
    let z = small.select(x * x, (-a + 1.0) * 0.5);
    let base = small.select(a, z.sqrt());
    let y = base.fma(asin_series(z), base);
    let far = -(y * 2.0 - half_pi_low(x)) + FRAC_PI_2;
    small.select(y, far).copysign(x)
}

/// As [`asin`], without the cancellation near 1.
pub fn acos(x: E) -> E {
    let a = x.abs();
    let small = a.lt(0.5);
    let z = small.select(x * x, (-a + 1.0) * 0.5);
    let base = small.select(x, z.sqrt());
    let y = base.fma(asin_series(z), base);
    let near = -(y - half_pi_low(x)) + FRAC_PI_2;
    let far = x.lt(0.0).select(-(y * 2.0 - 2.0 * half_pi_low(x)) + PI, y * 2.0);
    small.select(near, far)
}

/// atan a for a ≥ 0: Cephes's `atanf` and `atan`.
fn atan_of(a: E) -> E {
    let (large, medium) = (a.gt(2.414_213_562_373_095), a.gt(if is_f32(a) { 4.142_135_623_730_95e-1 } else { 0.66 }));
    let numerator = large.select(-1.0, medium.select(a - 1.0, a));
    let denominator = large.select(a, medium.select(a + 1.0, a.number(1.0)));
    let t = numerator / denominator;
    let base = large.select(FRAC_PI_2, medium.select(FRAC_PI_4, a.number(0.0)));
    let z = t * t;
    let series = if is_f32(a) {
        z * z.polynomial(&[8.053_744_495_38e-2, -1.387_768_560_32e-1, 1.997_771_064_78e-1, -3.333_294_915_39e-1])
    } else {
        let p = z.polynomial(&[
            -8.750_608_600_031_904e-1,
            -16.157_537_187_333_652,
            -75.008_557_923_147_05,
            -122.886_668_449_013_61,
            -64.850_219_049_420_25,
        ]);
        let q = z.polynomial(&[
            1.0,
            24.858_464_901_423_062,
            165.027_009_831_698_85,
            432.881_060_491_290_27,
            485.390_399_635_913_7,
            194.550_657_148_261_4,
        ]);
        z * p / q
    };
    let low = large.select(half_pi_low(a), medium.select(0.5 * half_pi_low(a), a.number(0.0)));
    base + (t.fma(series, t) + low)
}

pub fn atan(x: E) -> E {
    atan_of(x.abs()).copysign(x)
}

/// The angle of the point (x, y), with the special cases of C.
pub fn atan2<'c>(y: E<'c>, x: E<'c>) -> E<'c> {
    let (ay, ax) = (y.abs(), x.abs());
    let steep = ay.gt(ax);
    let (low, high) = (steep.select(ax, ay), steep.select(ay, ax));
    let quotient = low / high;
    let quotient = low.eq(0.0).select(0.0, quotient);
    let quotient = low.eq(f64::INFINITY).select(1.0, quotient);
    let angle = atan_of(quotient);
    let angle = steep.select(-(angle - half_pi_low(x)) + FRAC_PI_2, angle);
    let angle = x.sign_bit().select(-(angle - 2.0 * half_pi_low(x)) + PI, angle);
    y.is_nan().or(x.is_nan()).select(f64::NAN, angle.copysign(y))
}

/// e^(a/2), whose square does not overflow before the result does.
fn half_exponential(a: E) -> E {
    exp(a * 0.5)
}

pub fn sinh(x: E) -> E {
    let a = x.abs();
    let t = expm1(a);
    let near = (t + t / (t + 1.0)) * 0.5;
    let root = half_exponential(a);
    let result = a.lt(if is_f32(x) { 80.0 } else { 700.0 }).select(near, root * 0.5 * root);
    result.copysign(x)
}

pub fn cosh(x: E) -> E {
    let a = x.abs();
    let e = exp(a);
    let near = e * 0.5 + x.number(0.5) / e;
    let root = half_exponential(a);
    a.lt(if is_f32(x) { 80.0 } else { 700.0 }).select(near, root * 0.5 * root)
}

/// 1 − 2 / (e²ᵃ + 1), near zero by expm1.
pub fn tanh(x: E) -> E {
    let a = x.abs();
    let t = expm1(limited(a * 2.0, 0.0, 80.0));
    let result = a.lt(0.5).select(t / (t + 2.0), -(x.number(2.0) / (t + 2.0)) + 1.0);
    let result = a.lt(if is_f32(x) { 1e-9 } else { 1e-18 }).select(a, result);
    x.is_nan().select(x, result.copysign(x))
}

/// ln(a + √(a² + 1)) = log1p(a + a² / (1 + √(a² + 1))).
pub fn asinh(x: E) -> E {
    let a = x.abs();
    let square = a * a;
    let near = log1p(a + square / ((square + 1.0).sqrt() + 1.0));
    let far = log(a) + LN_2;
    a.lt(if is_f32(x) { 1e9 } else { 1e18 }).select(near, far).copysign(x)
}

/// ln(x + √(x² − 1)) = log1p(t + √(2t + t²)) with t = x − 1; NaN below 1.
pub fn acosh(x: E) -> E {
    let t = x - 1.0;
    let near = log1p(t + t.fma(t, t * 2.0).sqrt());
    let far = log(x) + LN_2;
    let result = x.lt(if is_f32(x) { 1e9 } else { 1e18 }).select(near, far);
    x.lt(1.0).select(f64::NAN, result)
}

/// ½ log1p(2a / (1 − a)).
pub fn atanh(x: E) -> E {
    let a = x.abs();
    (log1p(a * 2.0 / (-a + 1.0)) * 0.5).copysign(x)
}

/// ∛x: fdlibm's estimate by the exponent (`s_cbrt.c`), and three steps of Halley's method in f64.
pub fn cbrt(x: E) -> E {
    if is_f32(x) {
        return cbrt(x.cast(DType::F64)).cast(DType::F32);
    }
    let a = x.abs();
    let (tiny, huge) = (a.lt(2f64.powi(-900)), a.gt(2f64.powi(900)));
    let scaled = tiny.select(a * 2f64.powi(300), huge.select(a * 2f64.powi(-300), a));
    let mut t = (scaled.bits().binary(BinaryOp::Div, 3i64) + (715_094_163i64 << 32)).bitcast(DType::F64);
    for _ in 0..3 {
        let cube = t * t * t;
        // Added to the estimate, so that only the first digits of the step matter.
        t = t + t * ((scaled - cube) / (cube * 2.0 + scaled));
    }
    let t = tiny.select(t * 2f64.powi(-100), huge.select(t * 2f64.powi(100), t));
    let as_it_is = a.eq(0.0).or(!a.lt(f64::INFINITY));
    as_it_is.select(x, t.copysign(x))
}

/// √(x² + y²) without intermediate overflow; ∞ if an operand is infinite.
pub fn hypot<'c>(x: E<'c>, y: E<'c>) -> E<'c> {
    let result = if is_f32(x) {
        let (x, y) = (x.cast(DType::F64), y.cast(DType::F64));
        x.fma(x, y * y).sqrt().cast(DType::F32)
    } else {
        let (a, b) = (x.abs(), y.abs());
        let (high, low) = (a.binary(BinaryOp::Max, b), a.binary(BinaryOp::Min, b));
        // Scaled by a power of two, which is exact.
        let (tiny, huge) = (high.lt(2f64.powi(-500)), high.gt(2f64.powi(500)));
        let factor = tiny.select(2f64.powi(600), huge.select(2f64.powi(-600), high.number(1.0)));
        let back = tiny.select(2f64.powi(-600), huge.select(2f64.powi(600), high.number(1.0)));
        let (high, low) = (high * factor, low * factor);
        high.fma(high, low * low).sqrt() * back
    };
    let nan = x.is_nan().or(y.is_nan()).select(f64::NAN, result);
    let infinite = x.abs().eq(f64::INFINITY).or(y.abs().eq(f64::INFINITY));
    infinite.select(f64::INFINITY, nan)
}

/// x · 2ⁿ with one rounding, for an i32 n.
pub fn ldexp<'c>(x: E<'c>, n: E<'c>) -> E<'c> {
    let most = if is_f32(x) { 300i64 } else { 2200 };
    exact_scale(x, n.cast(integer_of(x.dtype())).binary(BinaryOp::Max, -most).binary(BinaryOp::Min, most))
}

/// x · 2ⁿ by integer arithmetic where the result is normal, and by one rounded product where it is not.
fn exact_scale<'c>(x: E<'c>, n: E<'c>) -> E<'c> {
    let dtype = x.dtype();
    let (fraction, bias) = super::format_of(dtype);
    // Normal: denormals are scaled up first.
    let (smallest, up) = if is_f32(x) { (f64::from(f32::MIN_POSITIVE), 24) } else { (f64::MIN_POSITIVE, 54) };
    let is_tiny = x.abs().lt(smallest);
    let normal = is_tiny.select(x * 2f64.powi(up), x);
    let n = is_tiny.select(n - i64::from(up), n);
    let mask = 2 * bias + 1;
    let exponent = normal.bits().binary(BinaryOp::Shr, fraction);
    let exponent = exponent.and(exponent.integer(mask));
    let target = exponent + n;
    let with_exponent = |e: E<'c>| {
        let kept = normal.bits() - exponent.binary(BinaryOp::Shl, fraction);
        (kept + e.binary(BinaryOp::Shl, fraction)).bitcast(dtype)
    };
    // A number with exponent 1 to 60 above the target, times a power of two, is rounded once.
    let down = fraction + 10;
    let shifted = target.binary(BinaryOp::Max, -down + 1) + down;
    let small = with_exponent(shifted) * 2f64.powi(-(down as i32));
    let regular = with_exponent(target.binary(BinaryOp::Max, 1i64).binary(BinaryOp::Min, 2 * bias));
    let infinity = x.number(f64::INFINITY).copysign(x);
    let result = target.lt(1i64).select(small, target.gt(2 * bias).select(infinity, regular));
    // Zero, infinity and NaN.
    x.abs().gt(0.0).and(x.abs().lt(f64::INFINITY)).select(result, x)
}

/// The quotient, correctly rounded: that of f32 in f64, where a second rounding changes nothing.
pub fn div_rn<'c>(x: E<'c>, y: E<'c>) -> E<'c> {
    if is_f32(x) { (x.cast(DType::F64) / y.cast(DType::F64)).cast(DType::F32) } else { x / y }
}
