//! Software-pipelined loops without dots (`range(…, num_stages = …)`), against sums in f64. The simulated GPU reports
//! races, reads of buffers that were not filled, and accesses out of bounds.

use tilewright::prelude::*;
use tilewright_codegen::ir::{DType, Func, Op};
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_codegen::lower;
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::consts;
use tilewright_tests::interpret::{Arg, Form, interpret, on_devices, record};
use tilewright_tests::loops::{self, NESTED, ROW_LOOP, RUNNING_ATOMIC, RUNNING_SUM};
use tilewright_tests::numerics::{HostTensor, Random, tolerance};

/// Odd bounds and steps, rows beyond the matrix, and columns that no vector width divides.
#[test]
fn loops_of_any_length_and_step() {
    let mut random = Random::new(1);
    for (dtype, d, stride) in [
        (DType::BF16, 48, 48),
        (DType::BF16, 136, 144),
        (DType::F16, 64, 64),
        (DType::F32, 37, 41),
        (DType::F32, 64, 80),
        (DType::F64, 5, 5),
    ] {
        let rows = 7;
        let x = HostTensor::random(dtype, &[rows, d], &[stride, 1], &mut random);
        let w = HostTensor::random(DType::F32, &[rows], &[1], &mut random);
        for (first, end, by) in
            [(0, 0, 1), (3, 1, 1), (0, 1, 1), (0, 2, 1), (1, 4, 1), (0, 7, 1), (0, 7, 3), (2, 11, 2)]
        {
            let mut want = vec![0.0; d];
            for i in (first..end).step_by(by) {
                for (j, sum) in want.iter_mut().enumerate().filter(|_| i < rows) {
                    *sum += i as f64 * x.values()[i * d + j] + w.values()[i];
                }
            }
            for (stages, form) in [
                (2usize, simulated(GpuArch::Sm80, 1)),
                (2, simulated(GpuArch::Sm90a, 4)),
                (3, simulated(GpuArch::Sm80, 2)),
                (4, simulated(GpuArch::Sm90a, 4)),
                (5, simulated(GpuArch::Sm80, 8)),
                (2, Form::Tma { num_warps: 4, num_stages: 1 }),
                (3, Form::WarpSpecialized { num_warps: 4, num_stages: 1 }),
            ]
            .into_iter()
            .chain(on_devices().into_iter().map(|form| (3, form)))
            {
                let mut y = HostTensor::poisoned(DType::F32, &[d], &[1]);
                let numbers = [stride, rows, d, first, end, by].map(Arg::from);
                let args =
                    &mut [Arg::In(&x), Arg::In(&w), Arg::Out(&mut y)].into_iter().chain(numbers).collect::<Vec<_>>();
                let consts = consts! { d_tile = d.next_power_of_two(), stages = stages };
                interpret(form, &ROW_LOOP, &[dtype], consts, [1, 1, 1], args);
                y.check(&format!("{dtype} {d}: {first}..{end} by {by}, {stages} stages, {form:?}"), &want, 1e-5);
            }
        }
        // Two copies per iteration, and two for each of the two iterations of the prologue.
        let func = gpu_func(&ROW_LOOP, &[dtype], consts! { d_tile = 64usize, stages = 3usize });
        assert_eq!(copies(&func), 6, "{dtype}");
    }
}

#[test]
fn nested_and_consecutive_loops() {
    const D: usize = 64;
    let mut random = Random::new(2);
    for (dtype, rows, second_rows) in
        [(DType::BF16, 1usize, 0usize), (DType::BF16, 5, 9), (DType::F32, 4, 1), (DType::F32, 6, 2)]
    {
        let x = HostTensor::random(dtype, &[rows, D], &[D, 1], &mut random);
        let w = HostTensor::random(dtype, &[rows, D], &[D, 1], &mut random);
        let at = |t: &HostTensor, i: usize, j: usize| t.values()[i * D + j];
        let want: Vec<f64> = (0..D)
            .map(|j| {
                let products: f64 = (0..rows).map(|i| at(&x, i, j) * (0..i).map(|k| at(&w, k, j)).sum::<f64>()).sum();
                products + (0..second_rows.min(rows)).map(|i| at(&x, i, j)).sum::<f64>()
            })
            .collect();
        for (stages, form) in [
            (2usize, simulated(GpuArch::Sm90a, 4)),
            (3, simulated(GpuArch::Sm80, 2)),
            (4, simulated(GpuArch::Sm80, 1)),
            (2, Form::WarpSpecialized { num_warps: 4, num_stages: 1 }),
        ]
        .into_iter()
        .chain(on_devices().into_iter().map(|form| (3, form)))
        {
            let mut y = HostTensor::poisoned(DType::F32, &[D], &[1]);
            let args = &mut [Arg::In(&x), Arg::In(&w), Arg::Out(&mut y), rows.into(), second_rows.into()];
            interpret(form, &NESTED, &[dtype], consts! { d = D, stages = stages }, [1, 1, 1], args);
            y.check(&format!("{dtype} {rows} {second_rows}, {stages} stages"), &want, tolerance(DType::F32));
        }
    }
}

#[test]
fn loop_carried_stores_are_not_prefetched() {
    const D: usize = 32;
    let rows = 6;
    let mut random = Random::new(3);
    let x = HostTensor::random(DType::F32, &[rows, D], &[D, 1], &mut random);
    let add = HostTensor::random(DType::F32, &[rows, D], &[D, 1], &mut random);
    let mut want = x.values();
    for at in D..rows * D {
        want[at] += want[at - D] + add.values()[at];
    }
    for def in [&RUNNING_SUM, &RUNNING_ATOMIC] {
        for (stages, form) in [
            (2usize, simulated(GpuArch::Sm80, 1)),
            (3, simulated(GpuArch::Sm90a, 1)),
            (2, Form::WarpSpecialized { num_warps: 4, num_stages: 1 }),
        ] {
            let mut found = x.clone();
            let args = &mut [Arg::Out(&mut found), Arg::In(&add), rows.into()];
            interpret(form, def, &[], consts! { d = D, stages = stages }, [1, 1, 1], args);
            found.check(&format!("{}, {stages} stages", def.name), &want, 1e-6);
        }
        // Operands that the loop does not write are prefetched.
        let func = gpu_func(def, &[], consts! { d = D, stages = 3usize });
        assert_eq!(copies(&func), 3, "{}: two in the prologue, one in the loop", def.name);
    }
}

/// y = Σ of x + xᵀ over matrices x of n × n.
#[kernel]
fn symmetric(x: In<f32>, y: Out<f32>, count: i32, #[constexpr] n: usize, #[constexpr] stages: usize) {
    let mut total = zeros::<f32>([n, n]);
    for i in range(0, count, num_stages = stages) {
        let block = make_block_ptr(
            x,
            shape = [count * n, n],
            strides = [n, 1],
            offsets = [i * n, 0],
            block_shape = [n, n],
            order = [1, 0],
        );
        let doubled = load(block) * 2.0;
        total += (doubled + doubled.trans()) * 0.5;
    }
    let y_block =
        make_block_ptr(y, shape = [n, n], strides = [n, 1], offsets = [0, 0], block_shape = [n, n], order = [1, 0]);
    store(y_block, total);
}

/// A matrix takes 64 KB, and so does the layout conversion for its transpose: of the three requested stages, two fit on
/// Hopper; on Ampere not even two fit, and the loop is not pipelined.
#[test]
fn ring_buffers_leave_shared_memory_for_layout_conversions() {
    for (arch, expected) in [(GpuArch::Sm80, 0), (GpuArch::Sm90a, 2)] {
        let options = CompileOptions { num_warps: 8, ..CompileOptions::default() };
        let func = record(&SYMMETRIC, &[], consts! { n = 128usize, stages = 3usize }, &well_aligned(&SYMMETRIC));
        let gpu_func = pipeline::gpu_ir(&func, arch, &options, &mut ());
        assert_eq!(copies(&gpu_func), expected, "{arch:?}");
        let module = lower::nvptx::lower(&gpu_func, arch, &options).unwrap_or_else(|e| panic!("{arch:?}: {e}"));
        assert!(module.shared_bytes >= 64 << 10, "{arch:?}: {} bytes", module.shared_bytes);
    }
}

/// The loops set their own number of stages, which overrides that of the launch.
fn simulated(arch: GpuArch, num_warps: u32) -> Form {
    Form::Simulated { arch, num_warps, num_stages: 1 }
}

/// The last stage of a kernel's Tile IR, for well-aligned arguments.
fn gpu_func(def: &KernelDef, dtypes: &[DType], consts: &[(&str, ConstValue)]) -> Func {
    let func = record(def, dtypes, consts, &well_aligned(def));
    pipeline::gpu_ir(&func, GpuArch::Sm90a, &CompileOptions::default(), &mut ())
}

/// The number of asynchronous copies in a function.
fn copies(func: &Func) -> usize {
    func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::AsyncCopy { .. })).count()
}

#[test]
fn loops_on_the_cpu() {
    loops::check_pipelined_loops(&Device::cpu());
}
