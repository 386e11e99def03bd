//! Matmuls: the default tiles compile with every addend, for well-aligned and for arbitrary arguments; and narrow dots
//! give correct results.

use rayon::prelude::*;
use tilewright::autotune::{KeyPart, KeyValue, Problem};
use tilewright::kernels::matmul::{Addend, MATMUL, MATMUL_AUTOTUNE};
use tilewright::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, Constexpr, Specialization};
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{GpuArch, Target};
use tilewright_tests::configurations::{compile_options, well_aligned};
use tilewright_tests::consts;
use tilewright_tests::interpret::{Arg, Form, interpret, on_devices};
use tilewright_tests::numerics::{HostTensor, Random};

#[test]
fn defaults_fit_with_every_addend() {
    let mut cases = Vec::new();
    for arch in [GpuArch::Sm80, GpuArch::Sm86, GpuArch::Sm90a] {
        for dtype in [DType::BF16, DType::F32] {
            for precision in [Precision::Ieee, Precision::Tf32x3] {
                cases.extend([64, 256, 2048].map(|size| (arch, dtype, precision, size)));
            }
        }
    }
    cases.into_par_iter().for_each(|(arch, dtype, precision, size)| {
        compile_with_every_addend(arch, dtype, precision, size);
    });
}

fn compile_with_every_addend(arch: GpuArch, dtype: DType, precision: Precision, size: i64) {
    let target = Target::Nvptx(arch);
    let part = |name, value| KeyPart { name, value: KeyValue::Exact(value) };
    let mut parts: Vec<KeyPart> = ["m", "n", "k"].map(|name| part(name, ConstValue::Int(size))).into();
    parts.push(part("precision", precision.to_const()));
    let config =
        MATMUL_AUTOTUNE.default_config(&Problem { target: target.clone(), def: &MATMUL, dtypes: &[dtype; 2], parts });
    for addend in [Addend::None, Addend::Itself, Addend::Other] {
        for specialization in [well_aligned(&MATMUL), Specialization::default()] {
            let mut constants = config.constants.clone();
            constants.extend([("precision", precision.to_const()), ("addend", addend.to_const())]);
            let options = compile_options(&config);
            let func = MATMUL.record(&[dtype; 2], &constants, &specialization).unwrap_or_else(|e| panic!("{e}"));
            let compiled = pipeline::compile(&func, &target, &options, &mut ());
            let what = || format!("{arch:?} {dtype} {precision:?} {size} {addend:?} {config}");
            assert!(compiled.is_ok(), "{}: {}", what(), compiled.err().unwrap());
        }
    }
}

/// `c = a b`, in steps of `k` along K. b is row-major [depth, n], or row-major [n, depth] (`along_k`).
#[kernel]
pub fn narrow<T: Float>(
    a: In<T>,
    b: In<T>,
    c: Out<f32>,
    depth: i32,
    #[constexpr] m: usize,
    #[constexpr] n: usize,
    #[constexpr] k: usize,
    #[constexpr] along_k: bool,
) {
    let mut sum = zeros::<f32>([m, n]);
    for l in range(0, depth, k) {
        let left = make_block_ptr(
            a,
            shape = [m, depth],
            strides = [depth, 1],
            offsets = [0, l],
            block_shape = [m, k],
            order = [1, 0],
        );
        let left = load(left, boundary_check = [1], padding = zero);
        let right = if along_k {
            let block = make_block_ptr(
                b,
                shape = [n, depth],
                strides = [depth, 1],
                offsets = [0, l],
                block_shape = [n, k],
                order = [1, 0],
            );
            load(block, boundary_check = [1], padding = zero).t()
        } else {
            let block = make_block_ptr(
                b,
                shape = [depth, n],
                strides = [n, 1],
                offsets = [l, 0],
                block_shape = [k, n],
                order = [1, 0],
            );
            load(block, boundary_check = [0], padding = zero)
        };
        sum = dot(left, right, sum);
    }
    let out =
        make_block_ptr(c, shape = [m, n], strides = [n, 1], offsets = [0, 0], block_shape = [m, n], order = [1, 0]);
    store(out, sum);
}

/// N from 8 to 64: rows of b take one 16-byte chunk, or 32, 64 or 128 bytes (the swizzle modes).
#[test]
fn narrow_dots_are_correct_on_every_architecture() {
    let mut random = Random::new(3);
    for (dtype, n) in [(DType::BF16, 8usize), (DType::F16, 8), (DType::F16, 16), (DType::BF16, 32), (DType::BF16, 64)] {
        for (m, k, depth) in [(64usize, 16usize, 48usize), (128, 32, 32), (64, 64, 72)] {
            for along_k in [false, true] {
                let mut small = |shape: [usize; 2]| {
                    let values: Vec<f64> =
                        (0..shape[0] * shape[1]).map(|_| (random.number() * 8.0).round() / 4.0).collect();
                    (HostTensor::of(dtype, &shape, &[shape[1], 1], &values), values)
                };
                let (a, av) = small([m, depth]);
                let (b, bv) = small(if along_k { [n, depth] } else { [depth, n] });
                let at = |l: usize, j: usize| if along_k { bv[j * depth + l] } else { bv[l * n + j] };
                let want: Vec<f64> =
                    (0..m * n).map(|i| (0..depth).map(|l| av[i / n * depth + l] * at(l, i % n)).sum()).collect();
                let forms = [
                    Form::Simulated { arch: GpuArch::Sm80, num_warps: 4, num_stages: 2 },
                    Form::Simulated { arch: GpuArch::Sm90a, num_warps: 4, num_stages: 2 },
                    Form::Simulated { arch: GpuArch::Sm90a, num_warps: 8, num_stages: 1 },
                    Form::Tma { num_warps: 4, num_stages: 2 },
                    Form::WarpSpecialized { num_warps: 4, num_stages: 2 },
                ];
                forms.into_par_iter().chain(on_devices()).for_each(|form| {
                    let mut c = HostTensor::poisoned(DType::F32, &[m, n], &[n, 1]);
                    let args = &mut [Arg::In(&a), Arg::In(&b), Arg::Out(&mut c), depth.into()];
                    let consts = consts! { m = m, n = n, k = k, along_k = along_k };
                    interpret(form, &NARROW, &[dtype], consts, [1, 1, 1], args);
                    let what = format!("{dtype} {m} x {n} x {depth} by {k}, along K: {along_k}, {form:?}");
                    c.check(&what, &want, 1e-7);
                });
            }
        }
    }
}
