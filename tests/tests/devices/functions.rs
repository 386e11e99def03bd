//! Accuracy of the elementwise functions that are composed of ops, and of the f64 functions of a GPU: every
//! device against the functions of the system's math library in f64.

use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

constexpr_enum! {
    enum F {
        Exp, Exp2, Log, Log2, Sin, Cos, Tanh, Erf, Sigmoid,
        Round, Trunc, Rint, Expm1, Log1p, Log10, Exp10, Tan, Asin, Acos, Atan, Sinh, Cosh, Asinh, Acosh, Atanh, Cbrt
    }
}

#[kernel]
fn one_operand<T: Float>(x: In<T>, y: Out<T>, #[constexpr] f: F, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let v = load(x + i);
    let r = match f {
        F::Exp => exp(v),
        F::Exp2 => exp2(v),
        F::Log => log(v),
        F::Log2 => log2(v),
        F::Sin => sin(v),
        F::Cos => cos(v),
        F::Tanh => tanh(v),
        F::Erf => erf(v),
        F::Sigmoid => sigmoid(v),
        F::Round => round(v),
        F::Trunc => trunc(v),
        F::Rint => rint(v),
        F::Expm1 => expm1(v),
        F::Log1p => log1p(v),
        F::Log10 => log10(v),
        F::Exp10 => exp10(v),
        F::Tan => tan(v),
        F::Asin => asin(v),
        F::Acos => acos(v),
        F::Atan => atan(v),
        F::Sinh => sinh(v),
        F::Cosh => cosh(v),
        F::Asinh => asinh(v),
        F::Acosh => acosh(v),
        F::Atanh => atanh(v),
        F::Cbrt => cbrt(v),
    };
    store(y + i, r);
}

constexpr_enum! {
    enum G { Pow, Atan2, Hypot, Copysign, Fmod, DivRn, Ldexp }
}

#[kernel]
fn two_operands<T: Float>(x: In<T>, y: In<T>, z: Out<T>, #[constexpr] f: G, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let (a, b) = (load(x + i), load(y + i));
    let r = match f {
        G::Pow => pow(a, b),
        G::Atan2 => atan2(a, b),
        G::Hypot => hypot(a, b),
        G::Copysign => copysign(a, b),
        G::Fmod => fmod(a, b),
        G::DivRn => div_rn(a, b),
        G::Ldexp => ldexp(a, b.to::<i32>()),
    };
    store(z + i, r);
}

const TILE: usize = 256;

/// The float types of the tests.
trait Number: tilewright::Element + tilewright::codegen::lang::Float {
    const NAME: &'static str;
    /// The smallest normal number, and the distance from 1 to the next number.
    const SMALLEST: f64;
    const EPSILON: f64;
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    /// A number of any bit pattern.
    fn any(bits: u64) -> Self;
}

impl Number for f32 {
    const NAME: &'static str = "f32";
    const SMALLEST: f64 = f32::MIN_POSITIVE as f64;
    const EPSILON: f64 = f32::EPSILON as f64;
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn any(bits: u64) -> f32 {
        f32::from_bits(bits as u32)
    }
}

impl Number for f64 {
    const NAME: &'static str = "f64";
    const SMALLEST: f64 = f64::MIN_POSITIVE;
    const EPSILON: f64 = f64::EPSILON;
    fn of(x: f64) -> f64 {
        x
    }
    fn wide(self) -> f64 {
        self
    }
    fn any(bits: u64) -> f64 {
        f64::from_bits(bits)
    }
}

/// The distance of `got` from `want` in units in the last place of `want`; infinite if only one of them is NaN or
/// infinite, or a zero has the wrong sign. `flushes`: results below the normal numbers may be zero.
fn ulps<T: Number>(got: T, want: f64, flushes: bool) -> f64 {
    let (got, rounded) = (got.wide(), T::of(want).wide());
    if want.is_nan() || got.is_nan() {
        return if want.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if rounded.is_infinite() || got.is_infinite() || (rounded == 0.0 && want == 0.0) {
        let same = got == rounded && got.is_sign_negative() == rounded.is_sign_negative();
        // The last number before infinity is accepted where the exact value is close to the limit.
        let edge =
            got.is_infinite() != rounded.is_infinite() && want.abs() > 0.999 * T::of(f64::MAX).wide().min(f64::MAX);
        return if same || edge { 0.0 } else { f64::INFINITY };
    }
    if flushes && want.abs() < T::SMALLEST && got == 0.0 {
        return 0.0;
    }
    let exponent = want.abs().max(T::SMALLEST).log2().floor();
    (got - want).abs() / (exponent.exp2() * T::EPSILON)
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = (self.0 ^ (self.0 >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^ (x >> 33)
    }
    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.next() >> 11) as f64 * 2f64.powi(-53))
    }
}

const SPECIAL: [f64; 24] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    2.0,
    3.0,
    10.0,
    100.0,
    1000.0,
    27.0,
    1e-30,
    -1e-30,
    1e30,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    1e-310,
    1e-42,
    0.999_999_94,
];

/// Special numbers, numbers of every exponent, and numbers in the range.
fn values<T: Number>(n: usize, (low, high): (f64, f64), seed: u64) -> Vec<T> {
    let mut random = Random(seed);
    let mut list: Vec<T> = SPECIAL.iter().map(|&x| T::of(x)).collect();
    while list.len() < n {
        list.push(match list.len() % 4 {
            0 => T::any(random.next()),
            1 => T::of(random.between(-1.0, 1.0)),
            _ => T::of(random.between(low, high)),
        });
    }
    list
}

/// The largest error over the values, with the operands and result that have it.
fn worst<T: Number>(x: &[T], y: &[T], got: &[T], reference: fn(f64, f64) -> f64, flushes: bool) -> (f64, String) {
    let mut worst = (-1.0, String::new());
    for ((&x, &y), &got) in x.iter().zip(y).zip(got) {
        let want = reference(x.wide(), y.wide());
        let error = ulps(got, want, flushes);
        if error > worst.0 {
            worst = (error, format!("f({:e}, {:e}) = {want:e}, got {:e}", x.wide(), y.wide(), got.wide()));
        }
    }
    worst
}

type Case = (F, fn(f64) -> f64, (f64, f64), f64, f64);

/// Function, reference, range, and the bounds in units in the last place for f32 and f64.
const CASES: &[Case] = &[
    (F::Exp, f64::exp, (-104.0, 89.0), 2.0, 1.5),
    (F::Exp2, f64::exp2, (-150.0, 129.0), 2.0, 1.5),
    (F::Log, f64::ln, (0.0, 4.0), 1.1, 1.1),
    (F::Log2, f64::log2, (0.0, 4.0), 1.6, 1.1),
    (F::Sin, f64::sin, (-100.0, 100.0), 1.7, 1.5),
    (F::Cos, f64::cos, (-100.0, 100.0), 1.7, 1.5),
    (F::Tanh, f64::tanh, (-10.0, 10.0), 1.6, 3.5),
    (F::Erf, libm::erf, (-6.0, 6.0), 1.2, 1.5),
    (F::Sigmoid, |x| 1.0 / (1.0 + (-x).exp()), (-30.0, 30.0), 3.5, 2.0),
    (F::Round, f64::round, (-9.0, 9.0), 0.0, 0.0),
    (F::Trunc, f64::trunc, (-9.0, 9.0), 0.0, 0.0),
    (F::Rint, f64::round_ties_even, (-9.0, 9.0), 0.0, 0.0),
    (F::Expm1, f64::exp_m1, (-20.0, 89.0), 1.5, 2.5),
    (F::Log1p, f64::ln_1p, (-1.0, 9.0), 2.5, 2.5),
    (F::Log10, f64::log10, (0.0, 1e4), 0.51, 1.5),
    (F::Exp10, |x| 10f64.powf(x), (-45.0, 39.0), 2.5, 2.5),
    (F::Tan, f64::tan, (-100.0, 100.0), 4.0, 3.0),
    (F::Asin, f64::asin, (-1.0, 1.0), 2.5, 2.5),
    (F::Acos, f64::acos, (-1.0, 1.0), 2.0, 2.0),
    (F::Atan, f64::atan, (-9.0, 9.0), 3.0, 2.0),
    (F::Sinh, f64::sinh, (-90.0, 90.0), 3.5, 3.0),
    (F::Cosh, f64::cosh, (-90.0, 90.0), 3.5, 3.0),
    (F::Asinh, libm::asinh, (-90.0, 90.0), 3.5, 3.0),
    (F::Acosh, |x| if x < 1.0 { f64::NAN } else { libm::acosh(x) }, (1.0, 90.0), 3.5, 3.0),
    (F::Atanh, libm::atanh, (-1.0, 1.0), 3.5, 3.0),
    (F::Cbrt, f64::cbrt, (-90.0, 90.0), 0.51, 1.5),
];

/// What `ex2.approx` of an H100 adds to the bounds of f32: the simulated GPU rounds its results correctly. (The PTX ISA allows a
/// relative error of 2⁻²².)
const OF_EX2: f64 = 0.5;

fn check_one_operand<T: Number>(device: &Device, n: usize, flushes: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for &(f, reference, range, bound32, bound64) in CASES {
        let x = values::<T>(n, range, 1);
        let at = Buffer::from_slice(device, &x).unwrap();
        let mut y = Buffer::<T>::poisoned(device, n).unwrap();
        OneOperand { x: &at, y: &mut y, f, tile: TILE }.launch(device, n / TILE).unwrap();
        let got = y.to_vec().unwrap();
        let bound = if T::EPSILON == f64::EPSILON { bound64 } else { bound32 };
        let is_approximate = device.is_cuda()
            && T::EPSILON != f64::EPSILON
            && matches!(f, F::Exp | F::Exp2 | F::Tanh | F::Sigmoid | F::Sinh | F::Cosh);
        let bound = if is_approximate { bound + OF_EX2 } else { bound };
        let mut error = (0.0, String::new());
        for (&x, &got) in x.iter().zip(&got) {
            let want = reference(x.wide());
            // eˣ of the denominator is infinite there.
            let of = ulps(got, want, flushes || f == F::Sigmoid);
            if !(of <= error.0) {
                error = (of, format!("f({:e}) = {want:e}, got {:e}", x.wide(), got.wide()));
            }
        }
        println!("{f:?} of {}: {:.3} ulp, {}", T::NAME, error.0, error.1);
        if !(error.0 <= bound) {
            wrong.push(format!("{f:?} of {}: {:.2} ulp, at most {bound}: {}", T::NAME, error.0, error.1));
        }
    }
    wrong
}

type Case2 = (G, fn(f64, f64) -> f64, [(f64, f64); 2], f64, f64);

const CASES_2: &[Case2] = &[
    (G::Pow, f64::powf, [(0.0, 9.0), (-30.0, 30.0)], 0.51, 1.5),
    (G::Atan2, f64::atan2, [(-9.0, 9.0), (-9.0, 9.0)], 4.0, 3.0),
    (G::Hypot, f64::hypot, [(-9.0, 9.0), (-9.0, 9.0)], 0.51, 1.5),
    (G::Copysign, f64::copysign, [(-9.0, 9.0), (-9.0, 9.0)], 0.0, 0.0),
    (G::Fmod, |x, y| x % y, [(-30.0, 30.0), (-30.0, 30.0)], 0.0, 0.0),
    (G::DivRn, |x, y| x / y, [(-9.0, 9.0), (-9.0, 9.0)], 0.5, 0.5),
    (G::Ldexp, |x, n| libm::ldexp(x, n.clamp(-5000.0, 5000.0) as i32), [(-9.0, 9.0), (-300.0, 300.0)], 0.5, 0.5),
];

fn check_two_operands<T: Number>(device: &Device, n: usize, flushes: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for &(f, reference, [first, second], bound32, bound64) in CASES_2 {
        let mut x = values::<T>(n, first, 1);
        let mut y = values::<T>(n, second, 2);
        // All pairs of special numbers.
        for (i, a) in SPECIAL.iter().enumerate() {
            for (j, b) in SPECIAL.iter().enumerate() {
                let k = n - 1 - i * SPECIAL.len() - j;
                (x[k], y[k]) = (T::of(*a), T::of(*b));
            }
        }
        if f == G::Ldexp {
            y = y.iter().map(|y| T::of(y.wide().clamp(-4000.0, 4000.0).trunc())).collect();
        }
        let (at, by) = (Buffer::from_slice(device, &x).unwrap(), Buffer::from_slice(device, &y).unwrap());
        let mut z = Buffer::<T>::poisoned(device, n).unwrap();
        TwoOperands { x: &at, y: &by, z: &mut z, f, tile: TILE }.launch(device, n / TILE).unwrap();
        let error = worst(&x, &y, &z.to_vec().unwrap(), reference, flushes);
        let bound = if T::EPSILON == f64::EPSILON { bound64 } else { bound32 };
        println!("{f:?} of {}: {:.3} ulp, {}", T::NAME, error.0, error.1);
        if !(error.0 <= bound) {
            wrong.push(format!("{f:?} of {}: {:.2} ulp, at most {bound}: {}", T::NAME, error.0, error.1));
        }
    }
    wrong
}

/// Checks in f32 and in f64 with a number of operands, and whether the device may flush denormals to zero.
fn check_on_devices(f32: fn(&Device, usize, bool) -> Vec<String>, f64: fn(&Device, usize, bool) -> Vec<String>) {
    let mut wrong = Vec::new();
    for device in devices() {
        let count = if device.is_simulated() { 1024 } else { 16_384 };
        let flushes = device.is_simulated() || device.is_cuda();
        let found = [f32(&device, count, flushes), f64(&device, count, false)].concat();
        wrong.extend(found.into_iter().map(|w| format!("{device}: {w}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn functions_of_one_operand_are_accurate() {
    check_on_devices(check_one_operand::<f32>, check_one_operand::<f64>);
}

#[test]
fn functions_of_two_operands_are_accurate() {
    check_on_devices(check_two_operands::<f32>, check_two_operands::<f64>);
}

#[kernel]
fn of_sixteen_bits<T: Float>(x: In<T>, y: Out<T>, z: Out<T>) {
    let i = arange(0, 1024);
    let v = load(x + i);
    store(y + i, sigmoid(v));
    store(z + i, softmax(v));
}

/// Functions of 16-bit floats are computed in f32 and rounded once; the sum of 1024 exponentials of 0 to 8 as well.
#[test]
fn sigmoid_and_softmax_of_sixteen_bits_round_once() {
    let x: Vec<f16> = (0..1024).map(|i| f16::from_f64(8.0 - f64::from(i) / 48.0)).collect();
    let total: f64 = x.iter().map(|x| (x.to_f64() - 8.0).exp()).sum();
    for device in devices() {
        let at = Buffer::from_slice(&device, &x).unwrap();
        let [mut y, mut z] = [(); 2].map(|()| Buffer::<f16>::poisoned(&device, 1024).unwrap());
        OfSixteenBits { x: &at, y: &mut y, z: &mut z }.launch(&device, 1).unwrap();
        let (y, z) = (y.to_vec().unwrap(), z.to_vec().unwrap());
        for (i, x) in x.iter().map(|x| x.to_f64()).enumerate() {
            for (what, got, want) in
                [("sigmoid", y[i], 1.0 / (1.0 + (-x).exp())), ("softmax", z[i], (x - 8.0).exp() / total)]
            {
                // Half a unit in the last place, and the errors of f32; below 2⁻¹⁴ units no longer shrink.
                let unit = 2f64.powf(want.log2().floor().max(-14.0) - 10.0);
                let error = (got.to_f64() - want).abs() / unit;
                assert!(error < 0.51, "{device}: {what} of {x} is {got}, expected {want}: {error} ulp");
            }
        }
    }
}

#[kernel]
fn classify<T: Float>(x: In<T>, y: Out<i32>) {
    let i = arange(0, 32);
    let v = load(x + i, mask = i < 24);
    let bit = |b: Tile<bool>, n: i32| b.to::<i32>() << n;
    store(y + i, bit(isnan(v), 0) + bit(isinf(v), 1) + bit(isfinite(v), 2) + bit(signbit(v), 3), mask = i < 24);
}

#[test]
fn classes_of_floats_are_those_of_rust() {
    fn check<T: Number>(device: &Device) {
        let x: Vec<T> = SPECIAL.iter().map(|&x| T::of(x)).collect();
        let at = Buffer::from_slice(device, &x).unwrap();
        let mut y = Buffer::<i32>::zeros(device, 24).unwrap();
        Classify { x: &at, y: &mut y }.launch(device, 1).unwrap();
        for (x, got) in x.iter().zip(y.to_vec().unwrap()) {
            let x = x.wide();
            let want = i32::from(x.is_nan())
                + 2 * i32::from(x.is_infinite())
                + 4 * i32::from(x.is_finite())
                + 8 * i32::from(x.is_sign_negative());
            assert_eq!(got, want, "{x}");
        }
    }
    for device in devices() {
        check::<f32>(&device);
        check::<f64>(&device);
    }
}

/// Products with the factor of each row, in types whose warps may skip them and in others.
#[kernel]
fn rescaled(x: In<f32>, factors: In<f32>, y: Out<f32>, #[constexpr] width: usize) {
    let at = arange(0, 64).expand_dims(1) * width + arange(0, width).expand_dims(0);
    let (t, f) = (load(x + at), load(factors + arange(0, 64)).expand_dims(1));
    let mut scaled = t;
    // In a loop and behind a condition, as well as alone.
    for i in range(0, 2) {
        if i == 1 {
            scaled = rescale(scaled, f);
        }
    }
    store(y + at, scaled);
    let narrow = rescale(t.to::<f16>(), f.to::<f16>());
    store(y + 64 * width + at, narrow.to::<f32>());
}

/// `rescale` gives the bits of the product, for warps whose factors are all 1, mixed, or none.
#[test]
fn rescale_is_the_product() {
    let special = [0.0f32, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1.0 + f32::EPSILON, -1.0, f32::MIN_POSITIVE, 0.5];
    for width in [4, 64] {
        let mut random = Random(7);
        let mut x: Vec<f32> = (0..64 * width).map(|_| random.between(-1.0, 1.0) as f32).collect();
        special.iter().enumerate().for_each(|(i, &v)| x[i * 9 * width / 4] = v);
        for ones in [64, 48, 20, 0] {
            let factor = |row: usize| if row < ones { 1.0 } else { special[row % special.len()] };
            let factors: Vec<f32> = (0..64).map(factor).collect();
            let wide = |at: usize| x[at] * factors[at / width];
            let narrow = |at: usize| {
                let [x, f] = [x[at], factors[at / width]].map(|v| f64::from(f16::from_f32(v)));
                f16::from_f64(x * f).to_f32()
            };
            let want: Vec<f32> = (0..64 * width).map(wide).chain((0..64 * width).map(narrow)).collect();
            for device in devices() {
                let [x, factors] = [&x, &factors].map(|v| Buffer::from_slice(&device, v).unwrap());
                let mut y = Buffer::<f32>::poisoned(&device, 128 * width).unwrap();
                Rescaled { x: &x, factors: &factors, y: &mut y, width }.launch(&device, 1).unwrap();
                let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                let y = y.to_vec().unwrap();
                let wrong = (0..y.len()).find(|&i| !same(y[i], want[i]));
                assert_eq!(wrong.map(|i| (i, y[i], want[i])), None, "{device}, width {width}, {ones} rows of 1");
            }
        }
    }
}
