//! Kernels whose threads communicate through global memory, on the simulated GPU, whose threads run one after the other
//! up to the next barrier: results agree with those of the interpreter.

use tilewright::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_codegen::lower;
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_tests::configurations::{configurations, well_aligned};
use tilewright_tests::consts;
use tilewright_tests::interpret::{Arg, Form, interpret, record};
use tilewright_tests::loops::{
    self, ATOMIC_SUMS, BROADCAST_COUNTER, N, PERMUTED, REVERSED, TRANSPOSED_IN_PLACE, TREE_SUM,
};
use tilewright_tests::numerics::{HostTensor, Random};

#[test]
fn threads_see_each_others_stores() {
    let run = |def: &'static KernelDef, form: Form| {
        let mut random = Random::new(9);
        let mut x = HostTensor::random(DType::F32, &[N], &[1], &mut random);
        let mut y = HostTensor::random(DType::F32, &[N], &[1], &mut random);
        let args = &mut [Arg::Out(&mut x), Arg::Out(&mut y)];
        interpret(form, def, &[], consts! { n = N }, [1, 1, 1], args);
        [x.values(), y.values()].concat()
    };
    // (None of these kernels stores several elements to one address, where the last writer would be undefined.)
    for def in [&REVERSED, &PERMUTED, &BROADCAST_COUNTER, &ATOMIC_SUMS, &TREE_SUM, &TRANSPOSED_IN_PLACE] {
        let want = run(def, Form::Recorded);
        for (arch, num_warps) in [(GpuArch::Sm80, 1), (GpuArch::Sm80, 4), (GpuArch::Sm90a, 8), (GpuArch::Sm90a, 16)] {
            let found = run(def, Form::Simulated { arch, num_warps, num_stages: 2 });
            for (at, (found, want)) in found.iter().zip(&want).enumerate() {
                let near = (found - want).abs() <= 1e-5 * want.abs().max(1.0);
                assert!(near, "{}, {num_warps} warps: element {at} is {found}, expected {want}", def.name);
            }
        }
    }
}

/// Accesses each element in one layout: each thread reloads its own elements, and no barrier is needed.
#[kernel]
fn updated(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    let (mut a, mut b) = (load(x + i), load(y + i));
    b = b * 0.9 + a;
    a = a - b;
    store(x + i, a);
    store(y + i, b);
    atomic_add(y + i, load(x + i));
}

#[test]
fn no_barrier_for_a_threads_own_elements() {
    let barriers = |def: &KernelDef, options: CompileOptions, dtypes: &[DType], consts: &[_]| {
        let gpu_func =
            pipeline::gpu_ir(&record(def, dtypes, consts, &well_aligned(def)), GpuArch::Sm90a, &options, &mut ());
        let module = lower::nvptx::lower(&gpu_func, GpuArch::Sm90a, &options).unwrap_or_else(|e| panic!("{e}"));
        module.llvm_ir.matches("bar.sync").count()
    };
    let warps = |num_warps| CompileOptions { num_warps, ..CompileOptions::default() };
    assert_eq!(barriers(&UPDATED, warps(4), &[], consts! { n = 1024usize }), 0);
    // A tile of 64 elements is replicated over threads: a late thread must not load what another has already stored.
    assert_ne!(barriers(&UPDATED, warps(4), &[], consts! { n = 64usize }), 0);
    for kernel in configurations(DType::BF16).into_iter().filter(|c| c.def.name == "adamw") {
        assert_eq!(barriers(kernel.def, kernel.options, &kernel.dtypes, &kernel.consts), 0, "{}", kernel.def.name);
    }
}

#[test]
fn thread_communication_on_the_cpu() {
    loops::check_thread_communication(&Device::cpu());
}
