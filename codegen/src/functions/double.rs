//! f64 forms of the elementary functions.

use super::E;
use crate::ir::{BinaryOp, DType, UnaryOp};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, FRAC_PI_2, LN_2, LOG2_E};

/// The sum of two f64, the second of which is at most half a unit in the last place of the first.
#[derive(Clone, Copy)]
pub struct Pair<'c> {
    pub high: E<'c>,
    pub low: E<'c>,
}

/// π/2 − the f64 next to it, and the same of ln 2 and of log₂ e.
const PI_2_LOW: f64 = 6.123_233_995_736_766e-17;
const LN_2_LOW: f64 = 2.319_046_813_846_299_6e-17;
const LOG2_E_LOW: f64 = 2.035_527_374_093_103_3e-17;

/// a · b (Dekker, with a fused multiply-add).
fn product<'c>(a: E<'c>, b: E<'c>) -> Pair<'c> {
    let high = a.times(b);
    Pair { high, low: a.fma(b, -high) }
}

/// a + b for |a| ≥ |b| or a = 0 (Dekker).
fn sum<'c>(a: E<'c>, b: E<'c>) -> Pair<'c> {
    let high = a + b;
    Pair { high, low: b - (high - a) }
}

/// The function `op` of f64, if it has no instruction.
pub fn unary<'c>(op: UnaryOp, x: E<'c>) -> Option<E<'c>> {
    Some(match op {
        UnaryOp::Exp => exp(x),
        UnaryOp::Exp2 => exp2(x),
        UnaryOp::Log => {
            let log = logarithm(x);
            log_specials(x, log.high + log.low)
        }
        UnaryOp::Log2 => log2(x),
        UnaryOp::Sin => sin_cos(x, false),
        UnaryOp::Cos => sin_cos(x, true),
        UnaryOp::Tanh => super::composed::tanh(x),
        UnaryOp::Erf => erf(x),
        UnaryOp::Neg
        | UnaryOp::Not
        | UnaryOp::Abs
        | UnaryOp::Sqrt
        | UnaryOp::Rsqrt
        | UnaryOp::Floor
        | UnaryOp::Ceil
        | UnaryOp::Trunc
        | UnaryOp::Rint => return None,
    })
}

/// e^(high − low) − 1 for |high − low| ≤ ½ ln 2: fdlibm's rational approximation (`e_exp.c`).
pub fn exp_m1_reduced<'c>(high: E<'c>, low: E<'c>) -> E<'c> {
    let r = high - low;
    let t = r * r;
    let coefficients: &[f64] = if r.dtype() == DType::F32 {
        &[-2.766_733_290_6e-3, 1.666_662_544e-1]
    } else {
        &[
            4.138_136_797_057_238_5e-8,
            -1.653_390_220_546_525_2e-6,
            6.613_756_321_437_934e-5,
            -2.777_777_777_701_559_3e-3,
            1.666_666_666_666_660_2e-1,
        ]
    };
    let c = r - t * t.polynomial(coefficients);
    high - (low - (r * c) / (-c + 2.0))
}

/// x limited to [low, high]; NaN stays NaN.
pub fn limited(x: E, low: f64, high: f64) -> E {
    let x = x.lt(low).select(low, x);
    x.gt(high).select(high, x)
}

/// 2ⁿ · (p + 1) for an integer-valued n.
fn scaled<'c>(p: E<'c>, n: E<'c>) -> E<'c> {
    (p + 1.0).scale(n.cast(DType::I64))
}

fn exp(x: E) -> E {
    let x = limited(x, -746.0, 710.0);
    let n = (x * LOG2_E).rint();
    let high = n.fma(-6.931_471_803_691_238e-1, x);
    scaled(exp_m1_reduced(high, n * 1.908_214_929_270_587_7e-10), n)
}

fn exp2(x: E) -> E {
    let x = limited(x, -1076.0, 1025.0);
    let n = x.rint();
    let f = x - n;
    let r = product(f, f.number(LN_2));
    scaled(exp_m1_reduced(r.high, -(r.low + f * LN_2_LOW)), n)
}

/// m in [√½, √2) and k with x = m · 2ᵏ, for finite x > 0; k is integer-valued.
fn split_exponent(x: E) -> (E, E) {
    let tiny = x.lt(f64::MIN_POSITIVE);
    let x = tiny.select(x * 2f64.powi(54), x);
    let bits = x.bits();
    // After subtracting the bits of √½, the exponent field counts powers of two from there.
    let root_half = FRAC_1_SQRT_2.to_bits() as i64;
    let offset = bits - root_half;
    let exponent = offset.binary(BinaryOp::Shr, 52i64).cast(DType::F64);
    let m = (offset.and(offset.integer((1 << 52) - 1)) + root_half).bitcast(DType::F64);
    (m, tiny.select(exponent - 54.0, exponent))
}

/// ln x to about 2⁻⁶⁴, for finite x > 0: ln x = k ln 2 + 2 atanh s with s = (m − 1)/(m + 1), where the first two terms
/// of the series in s are computed in pairs.
pub fn logarithm(x: E) -> Pair {
    let (m, k) = split_exponent(x);
    let (numerator, denominator) = (m - 1.0, m + 1.0);
    let lost = m - (denominator - 1.0);
    let reciprocal = m.number(1.0) / denominator;
    let s = numerator.times(reciprocal);
    let s_low = ((-s).fma(denominator, numerator) - s.times(lost)).times(reciprocal);
    let s = sum(s, s_low);
    let square = product(s.high, s.high);
    let square_low = square.low + s.high.times(s.low) * 2.0;
    // 2/5 + 2/7 z + … with z = s² < 0.0295.
    let coefficients: Vec<f64> = (2..15).rev().map(|i| 2.0 / f64::from(2 * i + 1)).collect();
    let rest = square.high.times(square.high.polynomial(&coefficients));
    let inner = sum(rest.number(2.0 / 3.0), rest);
    let inner_low = inner.low + 3.700_743_415_417_188e-17;
    let t = product(square.high, inner.high);
    let t_low = t.low + (square.high.times(inner_low) + square_low.times(inner.high));
    let u = product(s.high, t.high);
    let u_low = u.low + (s.high.times(t_low) + s.low.times(t.high));
    let mantissa = sum(s.high * 2.0, u.high);
    let mantissa_low = mantissa.low + (s.low * 2.0 + u_low);
    // k times the first part of ln 2 is exact.
    let exponent = k.times(6.931_471_803_691_238e-1);
    let total = sum(exponent, mantissa.high);
    let low = total.low + k.fma(1.908_214_929_270_587_7e-10, mantissa_low);
    sum(total.high, low)
}

/// `result` for finite x > 0, and what every logarithm gives elsewhere.
pub fn log_specials<'c>(x: E<'c>, result: E<'c>) -> E<'c> {
    let result = x.eq(f64::INFINITY).select(x, result);
    let result = x.eq(0.0).select(f64::NEG_INFINITY, result);
    x.lt(0.0).or(x.is_nan()).select(f64::NAN, result)
}

fn log2(x: E) -> E {
    let log = logarithm(x);
    let y = product(log.high, x.number(LOG2_E));
    log_specials(x, y.high + (y.low + (log.low * LOG2_E + log.high * LOG2_E_LOW)))
}

/// 2/π in binary, after a word of zeros.
const TWO_OVER_PI: [u64; 20] = [
    0,
    0xA2F9_836E_4E44_1529,
    0xFC27_57D1_F534_DDC0,
    0xDB62_9599_3C43_9041,
    0xFE51_63AB_DEBB_C561,
    0xB724_6E3A_424D_D2E0,
    0x0649_2EEA_09D1_921C,
    0xFE1D_EB1C_B129_A73E,
    0xE882_35F5_2EBB_4484,
    0xE99C_7026_B45F_7E41,
    0x3991_D639_8353_39F4,
    0x9C84_5F8B_BDF9_283B,
    0x1FF8_97FF_DE05_980F,
    0xEF2F_118B_5A0A_6D1F,
    0x6D36_7ECF_27CB_09B7,
    0x4F46_3F66_9E5F_EA2D,
    0x7527_BAC7_EBE5_F17B,
    0x3D07_39F7_8A52_92EA,
    0x6BFB_5FB1_1F8D_5D08,
    0x5603_3046_FC7B_6BAB,
];

/// |x| = quadrant · π/2 + r with |r| ≤ π/4, by the reduction of Payne and Hanek ("Radian reduction for trigonometric
/// functions", SIGNUM Newsletter 18, 1983) for arguments of every size. |x| = m · 2ᵏ with m < 2⁵³; 192 bits of 2/π from
/// the bit on whose weight times 2ᵏ is 2 leave an error below 2⁻¹³⁵ quadrants, and no f64 is closer than 2⁻⁶² to a
/// whole quadrant. Returns r, and the quadrant modulo four as an i64.
fn reduce_angle<'c>(magnitude: E<'c>) -> (Pair<'c>, E<'c>) {
    let bits = magnitude.bits();
    let small = magnitude.lt(std::f64::consts::FRAC_PI_4);
    let m = bits.and(bits.integer((1 << 52) - 1)).or(bits.integer(1 << 52)).cast(DType::U64);
    // The first bit of the window in the table: k + 62 with k = exponent − 1075. Small arguments do not use it.
    let first = small.select(9i64, bits.binary(BinaryOp::Shr, 52i64) - (1075 - 62));
    let mut words: Vec<E> = TWO_OVER_PI.iter().map(|&w| m.integer(w as i64)).collect();
    for bit in [16usize, 8, 4, 2, 1] {
        let is_set = first.and(first.integer(64 * bit as i64)).cmp(crate::ir::CmpOp::Ne, 0i64);
        let needed = words.len().min(bit + 3);
        words =
            (0..needed).map(|i| words.get(i + bit).map_or(words[i], |&moved| is_set.select(moved, words[i]))).collect();
    }
    let shift = first.and(first.integer(63)).cast(DType::U64);
    let rest = shift.integer(63) - shift;
    let window = |i: usize| {
        let low = words[i + 1].binary(BinaryOp::Shr, 1i64).binary(BinaryOp::Shr, rest);
        words[i].binary(BinaryOp::Shl, shift).or(low)
    };
    let [high, middle, low] = [window(0), window(1), window(2)];
    // The lower 192 bits of m times the window, without the lowest word.
    let middle_product = m * middle;
    let second = middle_product + m.binary(BinaryOp::MulHi, low);
    let carry = second.lt(middle_product).select(1i64, second.integer(0));
    let top = m * high + m.binary(BinaryOp::MulHi, middle) + carry;
    // Two integer bits; the fraction as a signed number of 128 bits.
    let quadrant = (top + (1i64 << 61)).binary(BinaryOp::Shr, 62i64).cast(DType::I64);
    let upper = top.binary(BinaryOp::Shl, 2i64).or(second.binary(BinaryOp::Shr, 62i64)).cast(DType::I64);
    let lower = second.binary(BinaryOp::Shl, 2i64).cast(DType::F64) * 2f64.powi(-64);
    let rounded = upper.cast(DType::F64);
    let fraction = sum(rounded, (upper - rounded.cast(DType::I64)).cast(DType::F64) + lower);
    let unit = 2f64.powi(-64);
    let (f, f_low) = (fraction.high * unit, fraction.low * unit);
    let r = product(f, f.number(FRAC_PI_2));
    let r_low = r.low + (f.times(PI_2_LOW) + f_low.times(FRAC_PI_2));
    let r = sum(r.high, r_low);
    let zero = r.high.number(0.0);
    let r = Pair { high: small.select(magnitude, r.high), low: small.select(zero, r.low) };
    (r, small.select(0i64, quadrant))
}

/// Sine or cosine, by fdlibm's kernels (`k_sin.c`, `k_cos.c`).
fn sin_cos(x: E, cosine: bool) -> E {
    let magnitude = x.abs();
    let (r, quadrant) = reduce_angle(magnitude);
    let (y, tail) = (r.high, r.low);
    let z = y * y;
    let v = z * y;
    let p = z.polynomial(&[
        1.589_690_995_211_55e-10,
        -2.505_076_025_340_686_3e-8,
        2.755_731_370_707_006_8e-6,
        -1.984_126_982_985_795e-4,
        8.333_333_333_322_49e-3,
    ]);
    let sine = y - ((z * (tail * 0.5 - v * p) - tail) - v * -1.666_666_666_666_663_2e-1);
    let p = z.polynomial(&[
        -1.135_964_755_778_819_5e-11,
        2.087_572_321_298_175e-9,
        -2.755_731_435_139_066_3e-7,
        2.480_158_728_947_673e-5,
        -1.388_888_888_887_411e-3,
        4.166_666_666_666_66e-2,
    ]) * z;
    let half = z.times(0.5);
    let w = -half + 1.0;
    let cosine_value = w + (((-w + 1.0) - half) + (z * p - y * tail));
    let quadrant = if cosine { quadrant + 1i64 } else { quadrant };
    let odd = quadrant.and(quadrant.integer(1)).eq(1i64);
    let value = odd.select(cosine_value, sine);
    let negative = quadrant.and(quadrant.integer(2)).eq(2i64);
    let value = negative.select(-value, value);
    let value = if cosine { value } else { x.sign_bit().select(-value, value) };
    magnitude.lt(f64::INFINITY).select(value, value.number(f64::NAN))
}

/// The error function: fdlibm's approximations (`s_erf.c`).
fn erf(x: E) -> E {
    let a = x.abs();
    let z = x * x;
    let p = z.polynomial(&[
        -2.376_301_665_665_016_3e-5,
        -5.770_270_296_489_442e-3,
        -2.848_174_957_559_851e-2,
        -3.250_421_072_470_015e-1,
        1.283_791_670_955_125_6e-1,
    ]);
    let q = z.polynomial(&[
        -3.960_228_278_775_368e-6,
        1.324_947_380_043_216_4e-4,
        5.081_306_281_875_766e-3,
        6.502_224_998_876_73e-2,
        3.979_172_239_591_553_5e-1,
        1.0,
    ]);
    let small = x.fma(p / q, x);
    let s = a - 1.0;
    let p = s.polynomial(&[
        -2.166_375_594_868_791e-3,
        3.547_830_432_561_823_6e-2,
        -1.108_946_942_823_966_8e-1,
        3.183_466_199_011_617_5e-1,
        -3.722_078_760_357_013e-1,
        4.148_561_186_837_483_3e-1,
        -2.362_118_560_752_659_4e-3,
    ]);
    let q = s.polynomial(&[
        1.198_449_984_679_910_7e-2,
        1.363_708_391_202_905e-2,
        1.261_712_198_087_616_4e-1,
        7.182_865_441_419_627e-2,
        5.403_979_177_021_71e-1,
        1.064_208_804_008_442_3e-1,
        1.0,
    ]);
    let middle = p / q + 8.450_629_115_104_675e-1;
    let large = -erfc_large(a) + 1.0;
    let result = a.lt(0.84375).select(small.abs(), a.lt(1.25).select(middle, large));
    let result = a.lt(6.0).select(result, result.number(1.0)).copysign(x);
    // Linear, so that denormals stay exact to a unit.
    let result = a.lt(1e-300).select(x * FRAC_2_SQRT_PI, result);
    x.is_nan().select(x, result)
}

/// 1 − erf a for 1.25 ≤ a < 6.
fn erfc_large(a: E) -> E {
    const NEAR: [[f64; 9]; 2] = [
        [
            0.0,
            -9.814_329_344_169_145,
            -81.287_435_506_306_6,
            -184.605_092_906_711_04,
            -162.396_669_462_573_47,
            -62.375_332_450_326_006,
            -10.558_626_225_323_291,
            -6.938_585_727_071_818e-1,
            -9.864_944_034_847_148e-3,
        ],
        [
            -6.042_441_521_485_81e-2,
            6.570_249_770_319_282,
            108.635_005_541_779_44,
            429.008_140_027_567_83,
            645.387_271_733_267_9,
            434.565_877_475_229_23,
            137.657_754_143_519_04,
            19.651_271_667_439_257,
            1.0,
        ],
    ];
    const FAR: [[f64; 9]; 2] = [
        [
            0.0,
            0.0,
            -483.519_191_608_651_4,
            -1_025.095_131_611_077_2,
            -637.566_443_368_389_6,
            -160.636_384_855_821_92,
            -17.757_954_917_754_752,
            -7.992_832_376_805_23e-1,
            -9.864_942_924_700_1e-3,
        ],
        [
            0.0,
            -22.440_952_446_585_82,
            474.528_541_206_955_37,
            2_553.050_406_433_164_4,
            3_199.858_219_508_595_5,
            1_536.729_586_084_437,
            325.792_512_996_573_9,
            30.338_060_743_482_46,
            1.0,
        ],
    ];
    let is_near = a.lt(1.0 / 0.35);
    let s = a.number(1.0) / (a * a);
    let [r, big_s] = [0, 1].map(|i| {
        let near_far = NEAR[i].iter().zip(FAR[i]);
        let mut pick = near_far.map(|(&near, far)| is_near.select(near, a.number(far)));
        let first = pick.next().unwrap_or(s);
        pick.fold(first, |sum, c| sum.fma(s, c))
    });
    exp((-a).fma(a, -0.5625) + r / big_s) / a
}
