//! Accuracy of the elementary functions on f32, against f64.

use super::*;
use crate::ir::{DType, UnaryOp};

/// The maximum error over `values`, in units in the last place of the exact result.
fn max_ulp_error(op: UnaryOp, values: &[f32]) -> f64 {
    let n = values.len();
    let text = format!(
        "kernel @k(%a: ptr<f32>, %y: ptr<f32>) {{\n{}  %r = {} %a_t : tensor<{n}xf32>\n{}return\n}}",
        load_dense("a", &[n], DType::F32),
        op.name(),
        store_dense("y", &[n], DType::F32, "%r"),
    );
    let func = read(&text);
    let buffers = [Data::floats(DType::F32, values.iter().map(|&x| x as f64)), Data::poison(DType::F32, n)];
    let inputs = [Input::Buffer(0), Input::Buffer(1)];
    let mut worst = 0f64;
    for cpu in machines() {
        let got = run_native(&compile(&func, &cpu), &func, &inputs, &buffers, [1; 3]);
        for (&x, y) in values.iter().zip(got[1].values()) {
            let exact = reference_f64(op, x as f64);
            let rounded = exact as f32;
            if rounded.is_infinite() || rounded.is_nan() || rounded == 0.0 {
                let same = y == rounded as f64 || (y.is_nan() && rounded.is_nan());
                // Where the exact value rounds to 0, the smallest denormal (1.4e-45) is accepted too.
                assert!(same || (rounded == 0.0 && y.abs() < 2e-45), "{}({x:e}) = {rounded:e}, got {y:e}", op.name());
                continue;
            }
            let ulp = (rounded.abs().max(f32::MIN_POSITIVE).to_bits() & 0x7f80_0000) as f64;
            let ulp = f32::from_bits(ulp as u32) as f64 * f32::EPSILON as f64;
            worst = worst.max((y - exact).abs() / ulp);
        }
    }
    worst
}

fn reference_f64(op: UnaryOp, x: f64) -> f64 {
    match op {
        UnaryOp::Exp => x.exp(),
        UnaryOp::Exp2 => x.exp2(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Log2 => x.log2(),
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Erf => libm::erf(x),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Neg
        | UnaryOp::Not
        | UnaryOp::Abs
        | UnaryOp::Floor
        | UnaryOp::Ceil
        | UnaryOp::Trunc
        | UnaryOp::Rint => panic!("not tested here"),
    }
}

fn sweep(low: f32, high: f32) -> Vec<f32> {
    let mut random = Random(1);
    let mut values: Vec<f32> = (0..65_524).map(|_| low + (high - low) * random.float() as f32).collect();
    let special = [0.0, -0.0, low, high, 1.0, -1.0, 0.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-30, 1e-42];
    values.extend(special);
    values
}

/// Numbers of every exponent, both signs, and those nearest to multiples of π/2.
fn all_magnitudes() -> Vec<f32> {
    let mut random = Random(2);
    let mut values: Vec<f32> =
        (0..65_000).map(|_| f32::from_bits(random.next() as u32)).filter(|x| x.is_finite()).collect();
    // The last is the f32 for which the remainder is smallest (Muller, "Elementary Functions", 2nd ed., table 9.3).
    values.extend([1e18, -1e18, f32::MAX, f32::MIN, 1.073_741_8e9, 1.073_742e9, 16_367_173.0 * 2f32.powi(72)]);
    while values.len() < 65_536 {
        let multiple = (random.next() % (1 << 40)) as f64;
        values.push((multiple * std::f64::consts::FRAC_PI_2) as f32);
    }
    values.truncate(65_536);
    values
}

#[test]
fn sine_and_cosine_are_accurate_for_numbers_of_all_magnitudes() {
    for op in [UnaryOp::Sin, UnaryOp::Cos] {
        let error = max_ulp_error(op, &all_magnitudes());
        assert!(error <= 1.7, "{}: {error:.2} ulp", op.name());
    }
}

#[test]
fn elementary_functions_are_accurate() {
    for (op, low, high, ulps) in [
        (UnaryOp::Exp, -104.0, 89.0, 1.1),
        (UnaryOp::Exp, -1.0, 1.0, 1.1),
        (UnaryOp::Exp2, -150.0, 129.0, 1.1),
        (UnaryOp::Exp2, -1.0, 1.0, 1.1),
        (UnaryOp::Log, 0.0, 4.0, 1.1),
        (UnaryOp::Log, -1.0, 1e38, 1.1),
        (UnaryOp::Log2, 0.0, 4.0, 1.6),
        (UnaryOp::Log2, -1.0, 1e38, 1.6),
        (UnaryOp::Sin, -10.0, 10.0, 1.7),
        (UnaryOp::Sin, -1e9, 1e9, 1.7),
        (UnaryOp::Sin, -3e38, 3e38, 1.7),
        (UnaryOp::Cos, -10.0, 10.0, 1.7),
        (UnaryOp::Cos, -1e9, 1e9, 1.7),
        (UnaryOp::Tanh, -10.0, 10.0, 1.6),
        (UnaryOp::Tanh, -1.0, 1.0, 1.6),
        (UnaryOp::Erf, -5.0, 5.0, 1.2),
        (UnaryOp::Erf, -1.0, 1.0, 1.2),
        (UnaryOp::Sqrt, 0.0, 1e6, 0.51),
        (UnaryOp::Rsqrt, 0.0, 1e6, 1.6),
    ] {
        let error = max_ulp_error(op, &sweep(low, high));
        assert!(error <= ulps, "{} on [{low}, {high}]: {error:.2} ulp", op.name());
    }
}
