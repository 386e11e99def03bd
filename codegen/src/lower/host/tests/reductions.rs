//! Reductions and scans along every axis.

use super::*;
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Literal, Type, UnaryOp, Value};

use super::kernels::{Kernel, i64_of};

/// A kernel that stores each of `make`'s tiles, computed from the dense tile `x`, to one output.
fn kernel(
    elem: DType,
    shape: &[usize],
    outputs: &[DType],
    make: impl FnOnce(&mut Builder, Value) -> Vec<Value>,
) -> Func {
    let mut k = Kernel::new("reduction");
    let x = k.ptr("x", elem);
    let ys: Vec<Value> = outputs.iter().enumerate().map(|(i, &d)| k.ptr(&format!("y{i}"), d)).collect();
    k.build(|b| {
        let view = |b: &mut Builder, base: Value, shape: &[usize]| {
            let extents: Vec<Value> = shape.iter().map(|&n| i64_of(b, n as i64)).collect();
            let strides: Vec<Value> =
                crate::lower::host::loop_nest::row_major(shape).iter().map(|&s| i64_of(b, s as i64)).collect();
            let offsets: Vec<Value> = shape.iter().map(|_| i64_of(b, 0)).collect();
            let order: Vec<usize> = (0..shape.len()).rev().collect();
            b.make_view(base, &extents, &strides, &offsets, shape, &order)
        };
        let v = view(b, x, shape);
        let tile = b.load_view(v, &[], crate::ir::Padding::Zero, crate::ir::Eviction::Normal);
        let results = make(b, tile);
        for (r, y) in results.into_iter().zip(ys) {
            let shape = b.func.ty(r).shape().to_vec();
            if shape.is_empty() {
                b.store(y, r, None, crate::ir::Eviction::Normal);
            } else {
                let v = view(b, y, &shape);
                b.store_view(v, r, &[], crate::ir::Eviction::Normal);
            }
        }
    })
}

fn run(func: &Func, input: Data, outputs: &[(DType, usize)], tolerance: Tolerance) -> Vec<Data> {
    let mut buffers = vec![input];
    buffers.extend(outputs.iter().map(|&(d, n)| Data::poison(d, n)));
    let inputs: Vec<Input> = (0..buffers.len()).map(Input::Buffer).collect();
    check_func(func, &inputs, &buffers, [1; 3], tolerance)
}

const SHAPES: &[&[usize]] = &[&[1], &[2], &[64], &[4, 64], &[64, 4], &[32, 1], &[8, 2, 16]];

#[test]
fn reductions_agree_on_every_axis_and_type() {
    let ops = [BinaryOp::Add, BinaryOp::Mul, BinaryOp::Min, BinaryOp::Max, BinaryOp::And, BinaryOp::Xor, BinaryOp::Or];
    let types = [DType::I8, DType::U16, DType::I32, DType::U64, DType::F32, DType::F64, DType::BF16, DType::F16];
    for shape in SHAPES {
        for axis in 0..shape.len() {
            let (op_count, n): (usize, usize) = (ops.len(), shape.iter().product());
            for (i, &d) in types.iter().enumerate() {
                let op = ops[(i + axis + n) % if d.is_float() { 4 } else { op_count }];
                let func = kernel(d, shape, &[d], |b, x| vec![b.reduce_with(op, x, axis)]);
                let exact = !d.is_float() || matches!(op, BinaryOp::Min | BinaryOp::Max);
                let tolerance = if exact { Tolerance::Exact } else { near(d) };
                let input = Data::random(d, n, 5);
                run(&func, input, &[(d, n / shape[axis])], tolerance);
            }
        }
    }
}

#[test]
fn maximum_of_nans_and_infinities() {
    let values = [f64::NAN, f64::NEG_INFINITY, f64::NAN, 1.0];
    for (fill, want) in [(f64::NAN, f64::NAN), (f64::NEG_INFINITY, f64::NEG_INFINITY)] {
        let func = kernel(DType::F32, &[4, 32], &[DType::F32], |b, x| vec![b.reduce_with(BinaryOp::Max, x, 1)]);
        let mut all = vec![fill; 128];
        all[32..36].copy_from_slice(&values);
        let out = run(&func, Data::floats(DType::F32, all), &[(DType::F32, 4)], Tolerance::Exact);
        let got = out[1].values();
        assert_eq!(got[1], 1.0);
        assert!(got[0] == want || (got[0].is_nan() && want.is_nan()));
    }
}

/// The maximum and its lowest index.
fn argmax(b: &mut Builder, x: Value, axis: usize) -> Vec<Value> {
    let shape = b.func.ty(x).shape().to_vec();
    let mut index = b.arange(0, shape[axis] as i64);
    for d in 0..shape.len() {
        if d != axis {
            index = b.expand_dims(index, d);
        }
    }
    let index = b.broadcast(index, &shape);
    b.reduce(&[x, index], axis, |b, l, r| {
        let greater = b.cmp(CmpOp::Gt, r[0], l[0]);
        let equal = b.cmp(CmpOp::Eq, r[0], l[0]);
        let earlier = b.cmp(CmpOp::Lt, r[1], l[1]);
        let tie = b.binary(BinaryOp::And, equal, earlier);
        let take = b.binary(BinaryOp::Or, greater, tie);
        vec![b.select(take, r[0], l[0]), b.select(take, r[1], l[1])]
    })
}

#[test]
fn argmax_finds_the_first_of_equals() {
    for shape in SHAPES {
        for axis in 0..shape.len() {
            for d in [DType::F32, DType::BF16] {
                let n: usize = shape.iter().product();
                let func = kernel(d, shape, &[d, DType::I32], |b, x| argmax(b, x, axis));
                let mut random = Random(6);
                let input = Data::floats(d, (0..n).map(|_| (random.next() % 5) as f64));
                run(&func, input, &[(d, n / shape[axis]), (DType::I32, n / shape[axis])], Tolerance::Exact);
            }
        }
    }
}

/// Pairs (a, b) represent x ↦ a·x + b. Their composition is associative but not commutative, so that it detects a wrong
/// order or direction.
#[test]
fn scans_go_in_order_both_ways() {
    for shape in SHAPES {
        for axis in 0..shape.len() {
            for (reverse, d) in [(false, DType::I32), (true, DType::I32), (false, DType::U8), (true, DType::I64)] {
                let n: usize = shape.iter().product();
                let func = kernel(d, shape, &[d, d], |b, x| {
                    let three = b.number(3.0, Type::tensor(shape, d));
                    let y = b.binary(BinaryOp::Xor, x, three);
                    b.scan(&[x, y], axis, reverse, |b, l, r| {
                        let factor = b.binary(BinaryOp::Mul, l[0], r[0]);
                        let moved = b.binary(BinaryOp::Mul, l[1], r[0]);
                        vec![factor, b.binary(BinaryOp::Add, moved, r[1])]
                    })
                });
                run(&func, Data::random(d, n, 7), &[(d, n), (d, n)], Tolerance::Exact);
            }
        }
    }
}

#[test]
fn running_sums_and_maxima_of_floats() {
    for shape in SHAPES {
        for axis in 0..shape.len() {
            for (reverse, d) in [(false, DType::F32), (true, DType::F64), (true, DType::F16)] {
                let n: usize = shape.iter().product();
                let (op, tolerance) =
                    if d == DType::F16 { (BinaryOp::Max, Tolerance::Exact) } else { (BinaryOp::Add, near(d)) };
                let func = kernel(d, shape, &[d], |b, x| {
                    b.scan(&[x], axis, reverse, |b, l, r| vec![b.binary(op, l[0], r[0])])
                });
                run(&func, Data::random(d, n, 9), &[(d, n)], tolerance);
            }
        }
    }
}

/// Inputs where only some elements are numbers, and zeros of both signs.
#[test]
fn extrema_order_zeros_and_pass_over_nans() {
    let rows = [
        vec![f64::NAN, -0.0, f64::NAN, 0.0],
        vec![-0.0, f64::NEG_INFINITY, f64::NAN, f64::NAN],
        vec![f64::INFINITY, 1e-42, -1e-42, f64::NAN],
    ];
    for d in [DType::F32, DType::F64, DType::BF16] {
        for (op, want) in
            [(BinaryOp::Max, [0.0, -0.0, f64::INFINITY]), (BinaryOp::Min, [-0.0, f64::NEG_INFINITY, -1e-42])]
        {
            let mut all: Vec<f64> = rows.iter().flat_map(|r| r.repeat(8)).collect();
            all.resize(4 * 32, f64::NAN);
            let func = kernel(d, &[4, 32], &[d], |b, x| vec![b.reduce_with(op, x, 1)]);
            for cpu in machines() {
                let buffers = [Data::floats(d, all.clone()), Data::poison(d, 4)];
                let got =
                    run_native(&compile(&func, &cpu), &func, &[Input::Buffer(0), Input::Buffer(1)], &buffers, [1; 3]);
                for (r, want) in want.iter().enumerate() {
                    let want = num::encode(d, *want);
                    assert_eq!(got[1].bits[r], want, "{d} {op:?} row {r}");
                }
                assert!(got[1].values()[3].is_nan(), "{d} {op:?} of NaNs");
            }
        }
    }
}

/// A combining function that is not a single operation, over several tiles together.
#[test]
fn closures_reduce_in_lanes() {
    for shape in SHAPES {
        for axis in 0..shape.len() {
            let n: usize = shape.iter().product();
            let func = kernel(DType::I32, shape, &[DType::I32, DType::I32], |b, x| {
                let two = b.number(2.0, Type::tensor(shape, DType::I32));
                let y = b.binary(BinaryOp::Mul, x, two);
                b.reduce(&[x, y], axis, |b, l, r| {
                    let sum = b.binary(BinaryOp::Add, l[0], r[0]);
                    // (1 + a)(1 + b) − 1
                    let product = b.binary(BinaryOp::Mul, l[1], r[1]);
                    let linear = b.binary(BinaryOp::Add, l[1], r[1]);
                    vec![sum, b.binary(BinaryOp::Add, product, linear)]
                })
            });
            let out = n / shape[axis];
            run(&func, Data::random(DType::I32, n, 10), &[(DType::I32, out), (DType::I32, out)], Tolerance::Exact);
        }
    }
}

/// Mean and variance: two reductions use one value, and the mean is broadcast over its rows.
#[test]
fn several_consumers_share_one_computation() {
    let shape = [16, 128];
    let func = kernel(DType::F32, &shape, &[DType::F32, DType::F32, DType::F32], |b, x| {
        let y = b.unary(UnaryOp::Exp, x);
        let sum = b.reduce_with(BinaryOp::Add, y, 1);
        let n = b.constant(Literal::Float(128.0), Type::tensor(&[16], DType::F32));
        let mean = b.binary(BinaryOp::Div, sum, n);
        let wide = b.expand_dims(mean, 1);
        let wide = b.broadcast(wide, &shape);
        let centred = b.binary(BinaryOp::Sub, y, wide);
        let square = b.binary(BinaryOp::Mul, centred, centred);
        let sum = b.reduce_with(BinaryOp::Add, square, 1);
        let variance = b.binary(BinaryOp::Div, sum, n);
        let deviation = b.unary(UnaryOp::Rsqrt, variance);
        let deviation = b.expand_dims(deviation, 1);
        let deviation = b.broadcast(deviation, &shape);
        vec![b.binary(BinaryOp::Mul, centred, deviation), mean, variance]
    });
    let input = Data::random(DType::F32, 16 * 128, 8);
    run(&func, input, &[(DType::F32, 2048), (DType::F32, 16), (DType::F32, 16)], near(DType::F32));
}
