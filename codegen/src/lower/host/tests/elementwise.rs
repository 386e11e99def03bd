//! Elementwise ops and casts over every type, on edge values.

use super::*;
use crate::ir::{BinaryOp, CmpOp, UnaryOp};

/// `len` edge values and random values.
fn samples(elem: DType, len: usize, seed: u64) -> Data {
    let mut data = Data::random(elem, len, seed);
    let edges: Vec<u64> = if elem.is_float() {
        [0.0, -0.0, 1.0, -1.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e-3, 3.5, -2.5, 0.1, 1e30, 65504.0, 1e-40]
            .into_iter()
            .map(|x| num::encode(elem, x))
            .collect()
    } else {
        let (low, high) = num::int_range(elem);
        [0, 1, -1, 2, 7, -8, low, high, high - 1].into_iter().map(|x| num::encode_int(elem, x)).collect()
    };
    // The positions of edge values depend on the seed, so that edges of different operands coincide.
    let mut random = Random(seed ^ 0xabcd);
    for i in 0..len {
        if random.next().is_multiple_of(2) {
            data.bits[i] = edges[random.next() as usize % edges.len()];
        }
    }
    data
}

fn binary_kernel(name: &str, elem: DType, result: DType, n: usize) -> String {
    let ty = |d: DType| format!("tensor<{n}x{d}>");
    format!(
        "kernel @{name}(%a: ptr<{elem}>, %b: ptr<{elem}>, %y: ptr<{result}>) {{\n{}{}  %r = {name} %a_t, %b_t : {}\n{}\
         return\n}}",
        load_dense("a", &[n], elem),
        load_dense("b", &[n], elem),
        ty(result),
        store_dense("y", &[n], result, "%r"),
    )
}

fn allowed(op: BinaryOp, d: DType) -> bool {
    match op {
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Mul
        | BinaryOp::Div
        | BinaryOp::Rem
        | BinaryOp::Min
        | BinaryOp::Max => d != DType::Bool,
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => !d.is_float(),
        BinaryOp::CeilDiv | BinaryOp::Shl | BinaryOp::Shr | BinaryOp::MulHi => d.is_int(),
        BinaryOp::Rescale => d.is_float(),
    }
}

#[test]
fn binary_functions_agree_on_every_type() {
    let n = 128;
    for &op in BinaryOp::ALL {
        for d in DType::ALL.into_iter().filter(|&d| allowed(op, d)) {
            let buffers = [samples(d, n, 1), samples(d, n, 2), Data::poison(d, n)];
            let inputs = [Input::Buffer(0), Input::Buffer(1), Input::Buffer(2)];
            check(&binary_kernel(op.name(), d, d, n), &inputs, &buffers, [1; 3], Tolerance::Exact);
        }
    }
}

/// Of numbers of every size, down to the least and up to the largest.
#[test]
fn remainders_are_exact() {
    for d in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let (n, mut random) = (512, Random(31));
        let (least, most) = match d {
            DType::F64 => (-1074, 1023),
            DType::F16 => (-24, 15),
            _ => (-149, 127),
        };
        let mut numbers = || {
            let number = |_| {
                let exponent = least + (random.next() % (most - least + 1) as u64) as i32;
                let sign = if random.next().is_multiple_of(2) { 1.0 } else { -1.0 };
                // Two factors: the least powers of two are not normal.
                sign * (1.0 + random.float()) * 2f64.powi(exponent / 2) * 2f64.powi(exponent - exponent / 2)
            };
            Data::floats(d, (0..n).map(number).collect::<Vec<f64>>())
        };
        let buffers = [numbers(), numbers(), Data::poison(d, n)];
        let inputs = [Input::Buffer(0), Input::Buffer(1), Input::Buffer(2)];
        let results = check(&binary_kernel("rem", d, d, n), &inputs, &buffers, [1; 3], Tolerance::Exact);
        for ((x, y), found) in buffers[0].values().into_iter().zip(buffers[1].values()).zip(results[2].values()) {
            let same = found == x % y || (found.is_nan() && (x % y).is_nan());
            assert!(same, "{d}: {x:e} % {y:e}: {found:e}");
        }
    }
}

#[test]
fn comparisons_agree_on_every_type() {
    let n = 64;
    for &op in CmpOp::ALL {
        for d in DType::ALL {
            if d == DType::Bool && !matches!(op, CmpOp::Eq | CmpOp::Ne) {
                continue;
            }
            let buffers = [samples(d, n, 3), samples(d, n, 4), Data::poison(DType::Bool, n)];
            let inputs = [Input::Buffer(0), Input::Buffer(1), Input::Buffer(2)];
            check(&binary_kernel(op.name(), d, DType::Bool, n), &inputs, &buffers, [1; 3], Tolerance::Exact);
        }
    }
}

#[test]
fn unary_functions_agree_on_every_type() {
    let n = 64;
    for &op in UnaryOp::ALL {
        for d in DType::ALL {
            let fits = match op {
                UnaryOp::Neg | UnaryOp::Abs => d != DType::Bool,
                UnaryOp::Not => !d.is_float(),
                _ => d.is_float(),
            };
            if !fits {
                continue;
            }
            let text = format!(
                "kernel @k(%a: ptr<{d}>, %y: ptr<{d}>) {{\n{}  %r = {} %a_t : tensor<{n}x{d}>\n{}return\n}}",
                load_dense("a", &[n], d),
                op.name(),
                store_dense("y", &[n], d, "%r"),
            );
            let buffers = [samples(d, n, 5), Data::poison(d, n)];
            // About one unit in the last place: the polynomials are not correctly rounded.
            let tolerance = match d {
                DType::F64 => Tolerance::Near { relative: 1e-15, floor: 1e-300 },
                DType::F32 => Tolerance::Near { relative: 4e-7, floor: 1e-37 },
                DType::F16 => Tolerance::Near { relative: 1.1e-3, floor: 1e-4 },
                DType::BF16 => Tolerance::Near { relative: 8e-3, floor: 1e-37 },
                DType::F8E4M3 | DType::F8E5M2 => Tolerance::Near { relative: 0.26, floor: 1e-2 },
                _ => Tolerance::Exact,
            };
            check(&text, &[Input::Buffer(0), Input::Buffer(1)], &buffers, [1; 3], tolerance);
        }
    }
}

#[test]
fn casts_agree_between_all_types() {
    let n = 128;
    for from in DType::ALL {
        for to in DType::ALL.into_iter().filter(|&to| to != from) {
            let text = format!(
                "kernel @k(%a: ptr<{from}>, %y: ptr<{to}>) {{\n{}  %r = cast %a_t : tensor<{n}x{to}>\n{}return\n}}",
                load_dense("a", &[n], from),
                store_dense("y", &[n], to, "%r"),
            );
            let buffers = [samples(from, n, 6), Data::poison(to, n)];
            check(&text, &[Input::Buffer(0), Input::Buffer(1)], &buffers, [1; 3], Tolerance::Exact);
        }
    }
}

#[test]
fn narrow_floats_round_to_nearest_even() {
    // Random f32 with few significant bits, many of them ties of each format.
    for to in [DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
        let n = 4096;
        let mut random = Random(9);
        let values = (0..n).map(|_| {
            let exponent = (random.next() % 44) as i32 - 26;
            let mantissa = 1.0 + (random.next() % 4096) as f64 / 4096.0;
            let sign = if random.next().is_multiple_of(2) { 1.0 } else { -1.0 };
            sign * mantissa * 2f64.powi(exponent)
        });
        let text = format!(
            "kernel @k(%a: ptr<f32>, %y: ptr<{to}>) {{\n{}  %r = cast %a_t : tensor<{n}x{to}>\n{}return\n}}",
            load_dense("a", &[n], DType::F32),
            store_dense("y", &[n], to, "%r"),
        );
        let buffers = [Data::floats(DType::F32, values), Data::poison(to, n)];
        check(&text, &[Input::Buffer(0), Input::Buffer(1)], &buffers, [1; 3], Tolerance::Exact);
    }
}

#[test]
fn select_fma_bitcast_and_constants() {
    let n = 32;
    for d in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let text = format!(
            "kernel @k(%a: ptr<{d}>, %b: ptr<{d}>, %y: ptr<{d}>, %s: f32) {{\n{}{}  %c = constant {{value = 0.3}} : tensor<{n}x{d}>
  %f = fma %a_t, %b_t, %c : tensor<{n}x{d}>
  %m = cmp_lt %a_t, %b_t : tensor<{n}xbool>
  %r = select %m, %f, %a_t : tensor<{n}x{d}>
  %t = cast %s : {d}
  %u = splat %t : tensor<{n}x{d}>
  %v = add %r, %u : tensor<{n}x{d}>
{}return\n}}",
            load_dense("a", &[n], d),
            load_dense("b", &[n], d),
            store_dense("y", &[n], d, "%v"),
        );
        let buffers = [Data::random(d, n, 7), Data::random(d, n, 8), Data::poison(d, n)];
        let inputs = [Input::Buffer(0), Input::Buffer(1), Input::Buffer(2), Input::Float(0.7)];
        let tolerance = if d == DType::F16 || d == DType::BF16 { near(d) } else { Tolerance::Exact };
        check(&text, &inputs, &buffers, [1; 3], tolerance);
    }
    for (from, to) in
        [(DType::F32, DType::U32), (DType::I16, DType::BF16), (DType::F16, DType::U16), (DType::F64, DType::I64)]
    {
        let text = format!(
            "kernel @k(%a: ptr<{from}>, %y: ptr<{to}>) {{\n{}  %r = bitcast %a_t : tensor<{n}x{to}>\n{}return\n}}",
            load_dense("a", &[n], from),
            store_dense("y", &[n], to, "%r"),
        );
        let buffers = [Data::random(from, n, 10), Data::poison(to, n)];
        check(&text, &[Input::Buffer(0), Input::Buffer(1)], &buffers, [1; 3], Tolerance::Exact);
    }
}
