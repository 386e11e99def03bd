//! Operators between tiles, scalars, numbers and pointers.

use crate::support::{Arg, run, run_as, text};
use tilewright::codegen::ir::DType;
use tilewright::prelude::*;

#[kernel]
fn int_operators(out: Out<i32>, a: i32, b: i32) {
    let x = arange(0, 1) + a;
    store(out, x.scalar() + b);
    store(out + 1, 10 - a);
    store(out + 2, a * b - 1);
    store(out + 3, a / b);
    store(out + 4, a % b);
    store(out + 5, a & b | 8 ^ b);
    store(out + 6, (a << 2) >> 1);
    store(out + 7, -a);
    store(out + 8, !a);
    store(out + 9, minimum(a, b) - maximum(a, 3));
    store(out + 10, cdiv(a, b));
    store(out + 11, (a >= b).to::<i32>() + (a != b && !(a < 2)).to::<i32>());
    store(out + 12, clamp(a, 5, 6));
    store(out + 13, abs(-a));
}

#[test]
fn integers_follow_rust() {
    for (a, b) in [(17, 5), (3, 4), (8, 8)] {
        let flag = |x: bool| x as i32;
        let expected = [
            a + b,
            10 - a,
            a * b - 1,
            a / b,
            a % b,
            a & b | 8 ^ b,
            (a << 2) >> 1,
            -a,
            !a,
            a.min(b) - a.max(3),
            (a + b - 1) / b,
            flag(a >= b) + flag(a != b && a >= 2),
            a.clamp(5, 6),
            a,
        ];
        let ran = run(&INT_OPERATORS, &vec![], &[Arg::OutI32(14), Arg::Int(a.into()), Arg::Int(b.into())], 1);
        assert_eq!(ran.i32(0), expected, "{a}, {b}");
    }
}

#[kernel]
fn ceilings(out: Out<i32>, a: i32, b: i32) {
    store(out, cdiv(a, b));
    store(out + 1, cdiv(a, 16));
    store(out + 2, cdiv(a, 12));
    store(out + 3, cdiv(a.to::<u32>(), 16).to::<i32>());
    store(out + 4, cdiv(a.to::<i64>() << 32, 64).to::<i32>());
    store(out + 5, cdiv(100, b));
    let known = maximum(a, 0);
    store(out + 6, cdiv(known, 16));
    store(out + 7, cdiv(known, 12));
    store(out + 8, cdiv(known, maximum(b, 1)));
}

#[test]
fn ceilings_of_quotients_do_not_wrap() {
    let up = |a: i64, b: i64| match b {
        0 => 0,
        // Exact: f64 holds both numbers, and their quotient rounds to an integer only if it is that integer.
        _ => (a as f64 / b as f64).ceil() as i64,
    };
    for a in [0, 1, 11, 12, 13, 16, 17, 2_147_483_600, i32::MAX - 1, i32::MAX, -1, -5, -16, -17, i32::MIN] {
        for b in [1, 2, 3, 7, 128, i32::MAX, 0, -1, -2, -7, i32::MIN] {
            let ran = run(&CEILINGS, &vec![], &[Arg::OutI32(9), Arg::Int(a.into()), Arg::Int(b.into())], 1);
            let (wide, known) = (i64::from(a), i64::from(a.max(0)));
            let exact = [
                up(wide, b.into()),
                up(wide, 16),
                up(wide, 12),
                up((a as u32).into(), 16),
                up(wide << 32, 64),
                up(100, b.into()),
                up(known, 16),
                up(known, 12),
                up(known, b.max(1).into()),
            ];
            assert_eq!(ran.i32(0), exact.map(|x| x as i32), "{a}, {b}");
        }
    }
}

#[kernel]
fn ceilings_of_constants(out: Out<i32>) {
    store(out, cdiv(i32::MAX, 16));
    store(out + 1, cdiv(-17, 16));
    store(out + 2, cdiv(17usize, 16) as i32);
}

#[test]
fn ceilings_of_rust_numbers_do_not_overflow() {
    assert_eq!(run(&CEILINGS_OF_CONSTANTS, &vec![], &[Arg::OutI32(3)], 1).i32(0), [1 << 27, -1, 2]);
}

#[kernel]
fn broadcasting(x: In<f32>, y: In<f32>, out: Out<f32>, scale: f32, #[constexpr = 0.5] half: f32) {
    let i = arange(0, 4);
    let j = arange(0, 2);
    let column = load(x + i).expand_dims(1);
    let row = load(y + j).expand_dims(0);
    let table = (column - row) * scale + 2.0 * half;
    let at = out + i.expand_dims(1) * 2 + j.expand_dims(0);
    store(at, where_(table > 0.0, table, 0.0));
}

#[test]
fn shapes_broadcast_as_in_numpy() {
    let (x, y) = ([1.0, 2.0, 3.0, 4.0], [0.5, 5.0]);
    let ran = run(&BROADCASTING, &vec![], &[Arg::F32(&x), Arg::F32(&y), Arg::OutF32(8), Arg::Float(3.0)], 1);
    let expected: Vec<f32> = x.iter().flat_map(|a| y.iter().map(move |b| ((a - b) * 3.0 + 1.0f32).max(0.0))).collect();
    assert_eq!(ran.f32(2), expected);
}

#[kernel]
fn wide_indices(out: Out<i32>, stride: i64, n: i32) {
    let i = program_id(0);
    let row = out + i * stride;
    let cols = arange(0, 4);
    store(row + cols, cols + n, mask = cols < n);
    store(row + cols * stride, 9, mask = cols.to::<i64>() == stride - 8);
}

#[test]
fn i32_and_i64_mix_in_positions() {
    let printed = text(&WIDE_INDICES, &[], &vec![]);
    assert!(printed.contains("mul %1, %stride : i64"), "{printed}");
    let ran = run(&WIDE_INDICES, &vec![], &[Arg::OutI32(16), Arg::Int(8), Arg::Int(3)], 2);
    assert_eq!(ran.i32(0), [9, 4, 5, 0, 0, 0, 0, 0, 9, 4, 5, 0, 0, 0, 0, 0]);
}

#[kernel]
fn generic<T: Float>(x: In<T>, out: Out<T>, bias: f32) {
    let i = arange(0, 4);
    let v = load(x + i);
    let doubled = v * 2 + 0.25;
    let y = doubled.to::<f32>() + bias;
    store(out + i, y.to::<T>());
}

#[test]
fn literals_take_the_element_type() {
    for (dtype, name) in [(DType::F16, "f16"), (DType::BF16, "bf16"), (DType::F64, "f64")] {
        let printed = text(&GENERIC, &[dtype], &vec![]);
        assert!(printed.contains(&format!("constant {{value = 2.0}} : tensor<4x{name}>")), "{printed}");
    }
    let args = [Arg::F32(&[1.0, 2.0, 3.0, 4.0]), Arg::OutF32(4), Arg::Float(1.5)];
    assert_eq!(run_as(&GENERIC, &[DType::F32], &vec![], &args, 1).f32(1), [3.75, 5.75, 7.75, 9.75]);
}

#[kernel]
fn specialized_arguments(out: Out<i32>, stride: i64, #[no_specialize] step: i32) {
    store(out + stride * 2, step);
}

#[test]
fn specialization_is_recorded_in_the_function() {
    use tilewright::codegen::lang::kernel::{ArgSpec, Specialization};
    let one = ArgSpec { divisible_by: 1, equal_to: Some(1) };
    let aligned = ArgSpec { divisible_by: 16, equal_to: None };
    let spec = Specialization { args: vec![aligned, one, ArgSpec::default()] };
    let func = SPECIALIZED_ARGUMENTS.record(&[], &[], &spec).unwrap();
    insta::assert_snapshot!(tilewright::codegen::text::print(&func));
}
