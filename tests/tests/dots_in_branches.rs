//! Loops with dots at the top level and inside of an `if` that read the same buffers, against sums in f64. The
//! simulated GPU reports buffers that are overwritten before they have been read, and reads that do not wait for the
//! copy.

use tilewright::prelude::*;
use tilewright_codegen::ir::{DType, Op};
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::consts;
use tilewright_tests::interpret::{self, Arg, Form, interpret, record};
use tilewright_tests::numerics::{HostTensor, Random, dense};

const M: usize = 64;
const N: usize = 16;
const D: usize = 32;

/// `o = Σ (a bⱼᵀ) bⱼ` over the even tiles of b. With `inside`, the odd tiles' `0.5 · (a bⱼᵀ) bⱼ` go to `p`, in an `if`
/// without results.
#[kernel]
pub fn even_tiles<T: Float>(
    a: In<T>,
    b: In<T>,
    o: Out<f32>,
    p: Out<f32>,
    rows: i32,
    #[constexpr] m: usize,
    #[constexpr] n: usize,
    #[constexpr] d: usize,
    #[constexpr] inside: bool,
) {
    let a_block =
        make_block_ptr(a, shape = [m, d], strides = [d, 1], offsets = [0, 0], block_shape = [m, d], order = [1, 0]);
    let a = load(a_block);
    let mut acc = zeros::<f32>([m, d]);
    for j in range(0, cdiv(rows, n)) {
        let b_block = make_block_ptr(
            b,
            shape = [rows, d],
            strides = [d, 1],
            offsets = [j * n, 0],
            block_shape = [n, d],
            order = [1, 0],
        );
        let tile = load(b_block, boundary_check = [0], padding = zero);
        let s = dot(a, tile.t());
        if j % 2 == 0 {
            acc = dot(s.to::<T>(), tile, acc);
        } else {
            if inside {
                let block = make_block_ptr(
                    p,
                    shape = [cdiv(rows, n) * m, d],
                    strides = [d, 1],
                    offsets = [j * m, 0],
                    block_shape = [m, d],
                    order = [1, 0],
                );
                store(block, dot((s * 0.5).to::<T>(), tile));
            }
        }
    }
    let out =
        make_block_ptr(o, shape = [m, d], strides = [d, 1], offsets = [0, 0], block_shape = [m, d], order = [1, 0]);
    store(out, acc);
}

/// All forms: loads by all threads, by TMA and by producer warps, with one to three stages.
fn forms() -> Vec<Form> {
    let mut forms = interpret::forms();
    for num_stages in [1, 2, 3] {
        let simulated = |arch, num_warps| Form::Simulated { arch, num_warps, num_stages };
        forms.push(simulated(GpuArch::Sm80, 4));
        forms.push(simulated(GpuArch::Sm90a, 4));
        forms.push(Form::Tma { num_warps: 4, num_stages });
        forms.push(Form::WarpSpecialized { num_warps: 4, num_stages });
    }
    forms
}

#[test]
fn buffers_are_released_after_branches_that_read_them() {
    let mut random = Random::new(7);
    for (tiles, inside) in [(0usize, false), (1, true), (5, false), (6, true)] {
        let rows = tiles * N;
        // Multiples of 1/4, so that all sums are exact.
        let mut small = |shape: &[usize]| {
            let values: Vec<f64> = (0..shape.iter().product()).map(|_| (random.number() * 4.0).round() / 4.0).collect();
            HostTensor::of(DType::F16, shape, &dense(shape), &values)
        };
        let (a, b) = (small(&[M, D]), small(&[rows.max(1), D]));
        let (av, bv) = (a.values(), b.values());
        let s = |i: usize, j: usize| (0..D).map(|k| av[i * D + k] * bv[j * D + k]).sum::<f64>();
        let mut want = vec![0.0; M * D];
        let mut want_inside = vec![0.0; tiles * M * D];
        for j in 0..rows {
            for i in 0..M {
                let s = half::f16::from_f64(s(i, j)).to_f64();
                for k in 0..D {
                    match j / N % 2 {
                        0 => want[i * D + k] += s * bv[j * D + k],
                        _ => want_inside[(j / N * M + i) * D + k] += s * 0.5 * bv[j * D + k],
                    }
                }
            }
        }
        for form in forms() {
            let mut o = HostTensor::poisoned(DType::F32, &[M, D], &[D, 1]);
            let zeros = vec![0.0; tiles.max(1) * M * D];
            let mut p = HostTensor::of(DType::F32, &[tiles.max(1) * M, D], &[D, 1], &zeros);
            let args = &mut [Arg::In(&a), Arg::In(&b), Arg::Out(&mut o), Arg::Out(&mut p), rows.into()];
            interpret(
                form,
                &EVEN_TILES,
                &[DType::F16],
                consts! { m = M, n = N, d = D, inside = inside },
                [1, 1, 1],
                args,
            );
            let what = format!("{tiles} tiles, inside: {inside}, {form:?}");
            o.check(&what, &want, 1e-6);
            if inside {
                p.check(&what, &want_inside, 1e-6);
            }
        }
    }
}

/// Checks that the kernels of the test above are warp-specialized.
#[test]
fn branches_are_specialized() {
    let schedule = Schedule { warp_specialize: Some(true), tma: Some(true), ..Schedule::default() };
    for inside in [false, true] {
        let consts = consts! { m = M, n = N, d = D, inside = inside };
        let func = record(&EVEN_TILES, &[DType::F16], consts, &well_aligned(&EVEN_TILES));
        let options = CompileOptions { schedule, ..CompileOptions::default() };
        let gpu_func = pipeline::gpu_ir(&func, GpuArch::Sm90a, &options, &mut ());
        assert!(
            gpu_func.walk().iter().any(|&id| matches!(gpu_func.op(id).op, Op::WarpSpecialize { .. })),
            "inside: {inside}"
        );
    }
}
