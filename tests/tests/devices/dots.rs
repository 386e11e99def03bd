//! Batched dots, as native code and on simulated GPUs, against sums in f64.

use tilewright::kernels::matmul::Options;
use tilewright::prelude::*;
use tilewright_tests::numerics::{Random, integers};
use tilewright_tests::on_device::{ALIGNED_GAPS, ColumnMajor, DENSE, GAPS, check_matmul, check_scaled_matmul, devices};

/// a [batch, m, k] × b [batch, k, n], row-major, from the elements with these indices.
fn product([batch, m, n, k]: [usize; 4], a: impl Fn(usize) -> f64, b: impl Fn(usize) -> f64) -> Vec<f64> {
    let element = |at: usize| {
        let (z, i, j) = (at / (m * n), at / n % m, at % n);
        (0..k).map(|l| a((z * m + i) * k + l) * b((z * k + l) * n + j)).sum()
    };
    (0..batch * m * n).map(element).collect()
}

/// `c = c + a b` for each matrix of the batch; in steps of `k` along K, with b as [batch, n, depth] in memory
/// (`transposed`) or [batch, depth, n].
#[kernel]
fn batched<T: Dtype, A: Num>(
    a: Tensor<T, (batch, m, depth)>,
    b: Tensor<T, (batch, rows, columns)>,
    c: TensorInOut<A, (batch, m, n)>,
    #[constexpr] batch: usize,
    #[constexpr] m: usize,
    #[constexpr] n: usize,
    #[constexpr] k: usize,
    #[constexpr] transposed: bool,
) {
    let out = c.block([0, 0, 0], [batch, m, n]);
    let mut acc = load(out);
    for l in range(0, depth, k) {
        let left = load(a.block([0, 0, l], [batch, m, k]), boundary_check = [2], padding = zero);
        let right = if transposed {
            load(b.block([0, 0, l], [batch, n, k]), boundary_check = [2], padding = zero).t()
        } else {
            load(b.block([0, l, 0], [batch, k, n]), boundary_check = [1], padding = zero)
        };
        acc = dot(left, right, acc);
    }
    store(out, acc);
}

fn check_batched<T: Element + Dtype, A: Element + Num>(
    [batch, m, n, k]: [usize; 4],
    transposed: bool,
    operand: fn(f64) -> T,
    acc: fn(f64) -> A,
    value: fn(A) -> f64,
) {
    let depth = 2 * k - 3;
    let (a, b): (Vec<f64>, Vec<f64>) = (integers(batch * m * depth, 1), integers(batch * n * depth, 2));
    let c: Vec<f64> = integers(batch * m * n, 3);
    let at =
        |z: usize, l: usize, j: usize| b[if transposed { (z * n + j) * depth + l } else { (z * depth + l) * n + j }];
    let products =
        product([batch, m, n, depth], |at_a| a[at_a], |at_b| at(at_b / n / depth, at_b / n % depth, at_b % n));
    let want: Vec<f64> = products.iter().zip(&c).map(|(product, c)| product + c).collect();
    let shape = if transposed { [batch, n, depth] } else { [batch, depth, n] };
    for device in devices() {
        for num_warps in [1, 4] {
            let of = |values: &[f64]| {
                let values: Vec<T> = values.iter().map(|&v| operand(v)).collect();
                Buffer::from_slice(&device, &values).unwrap()
            };
            let (a, b) = (of(&a), of(&b));
            let start: Vec<A> = c.iter().map(|&v| acc(v)).collect();
            let mut out = Buffer::from_slice(&device, &start).unwrap();
            Batched {
                a: &a.tensor([batch, m, depth]).unwrap(),
                b: &b.tensor(shape).unwrap(),
                c: &mut out.tensor_mut([batch, m, n]).unwrap(),
                k,
                transposed,
            }
            .launch_with(&device, &LaunchConfig::new(1).num_warps(num_warps))
            .unwrap_or_else(|error| panic!("{device}: {error}"));
            let found: Vec<f64> = out.to_vec().unwrap().into_iter().map(value).collect();
            assert_eq!(found, want, "{device}: {batch} x {m} x {n} x {k}, {transposed}, {num_warps} warps");
        }
    }
}

#[test]
fn batches_of_matrices_are_multiplied() {
    for (size, transposed) in [([1, 32, 32, 16], false), ([4, 16, 32, 32], true), ([2, 64, 16, 16], false)] {
        check_batched(size, transposed, |v| f16::from_f32(v as f32), |v| v as f32, f64::from);
    }
    for (size, transposed) in [([1, 64, 32, 16], false), ([2, 32, 64, 32], true)] {
        check_batched(size, transposed, |v| f16::from_f32(v as f32), |v| f16::from_f32(v as f32), f64::from);
        check_batched(size, transposed, |v| F8E4M3::from_f32(v as f32), |v| f16::from_f32(v as f32), f64::from);
    }
    check_batched([2, 16, 16, 32], true, |v| v as i8, |v| v as i32, f64::from);
    check_batched([8, 4, 8, 16], false, |v| v as f32, |v| v as f32, f64::from);
    check_batched([2, 8, 8, 8], true, |v| v, |v| v, |v| v);
}

/// Sums in f16 have one rounding in each step of the instruction, and overflow to infinity.
#[test]
fn sums_in_f16_are_rounded() {
    let (m, n, k) = (64, 32, 64);
    let depth = 2 * k - 3;
    let mut random = Random::new(7);
    let mut normal = |count: usize| (0..count).map(|_| f16::from_f64(random.number())).collect::<Vec<f16>>();
    let (mut a, b, c) = (normal(m * depth), normal(depth * n), normal(m * n));
    // The last row is so large that its sums are not numbers of f16.
    a[(m - 1) * depth..].fill(f16::from_f32(6e4));
    let b: Vec<f16> = b.iter().map(|x| f16::from_f32(x.to_f32().abs() + 0.1)).collect();
    let want = product([1, m, n, depth], |at| f64::from(a[at]), |at| f64::from(b[at]));
    for device in devices() {
        let mut out = Buffer::from_slice(&device, &c).unwrap();
        Batched {
            a: &Buffer::from_slice(&device, &a).unwrap().tensor([1, m, depth]).unwrap(),
            b: &Buffer::from_slice(&device, &b).unwrap().tensor([1, depth, n]).unwrap(),
            c: &mut out.tensor_mut([1, m, n]).unwrap(),
            k,
            transposed: false,
        }
        .launch(&device, 1)
        .unwrap_or_else(|error| panic!("{device}: {error}"));
        for (at, found) in out.to_vec().unwrap().into_iter().map(f64::from).enumerate() {
            if at / n == m - 1 {
                assert_eq!(found, f64::INFINITY, "{device}: {at}");
                continue;
            }
            let magnitude: f64 = (0..depth)
                .map(|l| (f64::from(a[at / n * depth + l]) * f64::from(b[l * n + at % n])).abs())
                .sum::<f64>()
                + f64::from(c[at]).abs();
            let (error, most) =
                ((found - want[at] - f64::from(c[at])).abs(), magnitude * f64::from(f16::EPSILON) / 2.0);
            // A rounding of at most half a unit for each 16 products; their sum is more precise.
            assert!(error <= most * (1.0 + depth as f64 / 16.0), "{device}: {at}: {found}, error {error}");
        }
    }
}

/// Blocks of `rank` dimensions, of which the first ones have extent 1, as operands and as result of a dot: of tiles of
/// all dimensions, and of two.
#[kernel]
fn leading(
    a: Tensor<f16, (z, p, m, k)>,
    b: Tensor<f16, (z, p, k, n)>,
    c: TensorMut<f32, (z, p, m, n)>,
    #[constexpr] tile: usize,
    #[constexpr] flat: bool,
) {
    let (i, j) = (program_id(0), program_id(1));
    let shape = [1, 1, tile, tile];
    let (a, b, c) = (a.descriptor(shape), b.descriptor(shape), c.descriptor(shape));
    let mut acc = zeros::<f32>([tile, tile]);
    for l in range(0, k, tile) {
        let (left, right) = (a.load([i, j, 0, l]), b.load([i, j, l, 0]));
        if flat {
            acc = dot(left.reshape([tile, tile]), right.reshape([tile, tile]), acc);
        } else {
            acc += dot(left, right).reshape([tile, tile]);
        }
    }
    c.store([i, j, 0, 0], acc.reshape(shape));
}

#[test]
fn leading_dimensions_of_one_are_no_obstacle() {
    let (z, p, m, n, k) = (2, 3, 30, 24, 40);
    let (a, b): (Vec<f64>, Vec<f64>) = (integers(z * p * m * k, 4), integers(z * p * k * n, 5));
    let want = product([z * p, m, n, k], |at| a[at], |at| b[at]);
    let half = |values: &[f64]| values.iter().map(|&v| f16::from_f32(v as f32)).collect::<Vec<_>>();
    for device in devices() {
        for flat in [false, true] {
            let (a, b) =
                (Buffer::from_slice(&device, &half(&a)).unwrap(), Buffer::from_slice(&device, &half(&b)).unwrap());
            let mut c = Buffer::<f32>::poisoned(&device, want.len()).unwrap();
            Leading {
                a: &a.tensor([z, p, m, k]).unwrap(),
                b: &b.tensor([z, p, k, n]).unwrap(),
                c: &mut c.tensor_mut([z, p, m, n]).unwrap(),
                tile: 32,
                flat,
            }
            .launch(&device, (z, p))
            .unwrap_or_else(|error| panic!("{device}: {error}"));
            let found: Vec<f64> = c.to_vec().unwrap().into_iter().map(f64::from).collect();
            assert_eq!(found, want, "{device}: {flat}");
        }
    }
}

/// The library's products of few rows, which Hopper computes transposed, of few columns, and of both.
#[test]
fn products_of_few_rows_match() {
    for device in devices() {
        let columns = |a, b, c| ColumnMajor { a, b, c };
        for (shape, spacing, columns) in [
            ([1, 136, 72], DENSE, columns(false, true, false)),
            ([5, 66, 40], GAPS, columns(false, false, true)),
            ([17, 72, 40], ALIGNED_GAPS, columns(true, true, false)),
            ([72, 8, 40], DENSE, columns(false, false, false)),
            ([8, 8, 40], DENSE, columns(false, true, true)),
            ([3, 40, 0], DENSE, columns(false, false, false)),
        ] {
            check_matmul::<bf16>(&device, shape, spacing, columns, Options::default());
            check_scaled_matmul::<F8E4M3, bf16>(&device, shape, spacing, columns, 0.0);
        }
    }
}
