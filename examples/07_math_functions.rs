//! Elementwise functions: those of the language, and a user-defined one.
//!
//! Kernels call no library: each function is compiled to instructions of the device. A function that the language lacks
//! is a few lines with `#[device_fn]`, which are inlined.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

/// Number of functions that the kernel computes.
const FUNCTIONS: usize = 18;

/// out[f, i] = the f-th function of x[i]. One program per `tile` elements.
#[kernel]
pub fn math_functions(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let mask = i < n;
    let v = load(x + i, mask = mask, other = 1.0);
    // An array of tiles is a Rust array: it exists only at compile time.
    let results = [
        exp(v),
        exp2(v),
        log(v),
        log2(v),
        sqrt(v),
        rsqrt(v),
        sin(v),
        cos(v),
        tanh(v),
        erf(v),
        floor(v * 10.0),
        ceil(v * 10.0),
        sigmoid(v),
        fma(v, v, 1.0),
        minimum(abs(v - 0.5), 0.25),
        asin(v),
        pow(v, 1.5),
        erfc(v),
    ];
    // Unrolled, so that `f` is a constant that can index an array.
    for f in static_range(0, FUNCTIONS) {
        store(out + (i + n * f), results[f], mask = mask);
    }
}

/// The error function's complement, 1 − erf x for x ≥ 0, by formula 7.1.26 of Abramowitz and Stegun, "Handbook of
/// Mathematical Functions": within 1.5e-7.
#[device_fn]
fn erfc(x: Tile<f32>) -> Tile<f32> {
    let t = 1.0 / (x * 0.327_591_1 + 1.0);
    let mut series = full_like(x, ERFC[0]);
    // Unrolled, so that `k` is a constant that can index an array.
    for k in static_range(1, ERFC.len()) {
        series = fma(series, t, ERFC[k]);
    }
    series * t * exp(-x * x)
}

/// The coefficients of the series, from the highest power down.
const ERFC: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];

/// A function in f64, with its name.
type Named = (&'static str, fn(f64) -> f64);

/// Evaluates every function on (0, 1] and compares it with f64.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (n, tile) = (10_000, 1024);
    let x: Vec<f32> = (1..=n).map(|i| i as f32 / n as f32).collect();
    let place = Buffer::from_slice(device, &x)?;
    let mut out = Buffer::<f32>::poisoned(device, FUNCTIONS * n)?;
    let mut kernel = MathFunctions { x: &place, out: &mut out, n: n as i32, tile };
    kernel.launch(device, n.div_ceil(tile))?;
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, n.div_ceil(tile)))?;

    let references: [Named; FUNCTIONS] = [
        ("exp", f64::exp),
        ("exp2", f64::exp2),
        ("log", f64::ln),
        ("log2", f64::log2),
        ("sqrt", f64::sqrt),
        ("rsqrt", |x| 1.0 / x.sqrt()),
        ("sin", f64::sin),
        ("cos", f64::cos),
        ("tanh", f64::tanh),
        ("erf", reference_erf),
        // The product is rounded to f32 before it is rounded to an integer.
        ("floor", |x| f64::from((x as f32 * 10.0).floor())),
        ("ceil", |x| f64::from((x as f32 * 10.0).ceil())),
        ("sigmoid", |x| 1.0 / (1.0 + (-x).exp())),
        ("fma", |x| x * x + 1.0),
        ("minimum", |x| (x - 0.5).abs().min(0.25)),
        ("asin", f64::asin),
        ("pow", |x| x.powf(1.5)),
        ("erfc", |x| 1.0 - reference_erf(x)),
    ];
    let out = out.to_vec()?;
    let (mut worst, mut of) = (0.0, "");
    for ((name, reference), got) in references.into_iter().zip(out.chunks(n)) {
        let want: Vec<f64> = x.iter().map(|x| reference(f64::from(*x))).collect();
        let error = check(name, got, &want)?;
        if error >= worst {
            (worst, of) = (error, name);
        }
    }
    let shape = format!("{FUNCTIONS} × {n}, worst: {of}");
    println!("math_functions    {shape:<28} error {worst:<7.1e} {:9.3} ms {:17} {device}", time.median, "");
    Ok(())
}

/// erf x = 2/√π Σₖ (−1)ᵏ x²ᵏ⁺¹ / (k! (2k + 1)), which converges quickly for |x| ≤ 1.
fn reference_erf(x: f64) -> f64 {
    let (mut power, mut sum) = (x, 0.0);
    for k in 0..30 {
        sum += power / f64::from(2 * k + 1);
        power *= -x * x / f64::from(k + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

/// Fails unless all elements are correct to 1e-6, relative to values above 1; returns the largest error.
fn check(what: &str, got: &[f32], want: &[f64]) -> Result<f64, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs() / want.abs().max(1.0);
        // Also true for NaN.
        if !(error <= 1e-6) {
            return Err(format!("{what}[{i}] is {got}, expected {want}"));
        }
        worst = error.max(worst);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
