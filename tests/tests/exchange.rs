//! Programs whose threads tell each other something through global memory: on the simulated GPU, whose threads run one after the other
//! wherever nothing makes them meet, against what the interpreter makes of the kernel.

use tilewright::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_codegen::lower;
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_tests::configurations::{configurations, well_aligned};
use tilewright_tests::consts;
use tilewright_tests::interpret::{Arg, Form, interpret, record};
use tilewright_tests::numerics::{HostTensor, Random};

/// The elements in the other order, in place.
#[kernel]
fn turned(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    store(x + (n as i32 - 1 - i), load(x + i));
    store(y + i, 0.0);
}

/// What one thread stores, another one loads; twice.
#[kernel]
fn passed_on(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    let other = (i * 5 + 3) % (n as i32);
    store(y + i, load(x + i) * 2.0);
    store(x + i, load(y + other) + load(x + other));
}

/// A number that all threads need and one of them replaces.
#[kernel]
fn counted(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    let count = load(x);
    store(x, count + 1.0);
    store(y + i, count + i.to::<f32>());
    let next = load(x);
    store(x + (i + 1), next, mask = i < n as i32 - 1);
}

/// Sums of atomics to what has just been made zero, and read at once.
#[kernel]
fn gathered(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    store(y + i, 0.0);
    atomic_add(y + i % 8, load(x + i));
    store(x + i, load(y + i % 8));
}

/// The sum of all elements in the first one, by halves.
#[kernel]
fn halved(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    let mut half = scalar::<i32>(n as i32 / 2);
    while half > 0 {
        let mask = i < half;
        store(x + i, load(x + i, mask = mask) + load(x + (i + half), mask = mask), mask = mask);
        half = half / 2;
    }
    let total = load(x);
    for row in range(0, 3) {
        store(y + (i + row) % (n as i32), total + load(y + i));
    }
}

/// Blocks of rows: a matrix is transposed in place, and then its rows are summed up from above.
#[kernel]
fn blocks(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let rows: usize = 16;
    let columns = n / rows;
    let at = make_block_ptr(
        x,
        shape = [rows, columns],
        strides = [columns, 1],
        offsets = [0, 0],
        block_shape = [rows, columns],
        order = [1, 0],
    );
    let turned = make_block_ptr(
        x,
        shape = [columns, rows],
        strides = [rows, 1],
        offsets = [0, 0],
        block_shape = [columns, rows],
        order = [1, 0],
    );
    store(turned, load(at).trans());
    store(y + arange(0, columns), sum(load(at), axis = 0));
}

const N: usize = 256;

#[test]
fn a_program_reads_what_it_has_written() {
    let run = |def: &KernelDef, form: Form| {
        let mut random = Random::new(9);
        let mut x = HostTensor::random(DType::F32, &[N], &[1], &mut random);
        let mut y = HostTensor::random(DType::F32, &[N], &[1], &mut random);
        let args = &mut [Arg::Out(&mut x), Arg::Out(&mut y)];
        interpret(form, def, &[], consts! { n = N }, [1, 1, 1], args);
        [x.values(), y.values()].concat()
    };
    // (Where several elements are stored to one place, which one stays is open: none of these does.)
    for def in [&TURNED, &PASSED_ON, &COUNTED, &GATHERED, &HALVED, &BLOCKS] {
        let want = run(def, Form::Recorded);
        for (arch, num_warps) in [(GpuArch::Sm80, 1), (GpuArch::Sm80, 4), (GpuArch::Sm90a, 8), (GpuArch::Sm90a, 16)] {
            let found = run(def, Form::Simulated { arch, num_warps, num_stages: 2 });
            for (at, (found, want)) in found.iter().zip(&want).enumerate() {
                let near = (found - want).abs() <= 1e-5 * want.abs().max(1.0);
                assert!(near, "{}, {num_warps} warps: {found} for {want} in place {at}", def.name);
            }
        }
    }
}

/// Blocks and pointers of one value in one layout: threads come back to their own elements, and do not wait.
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
fn threads_do_not_wait_for_themselves() {
    let barriers = |def: &KernelDef, options: CompileOptions, dtypes: &[DType], consts: &[_]| {
        let laid =
            pipeline::gpu_ir(&record(def, dtypes, consts, &well_aligned(def)), GpuArch::Sm90a, &options, &mut ());
        let module = lower::nvptx::lower(&laid, GpuArch::Sm90a, &options).unwrap_or_else(|e| panic!("{e}"));
        module.llvm_ir.matches("bar.sync").count()
    };
    let warps = |num_warps| CompileOptions { num_warps, ..CompileOptions::default() };
    assert_eq!(barriers(&UPDATED, warps(4), &[], consts! { n = 1024usize }), 0);
    // Of 64 elements there are copies: whoever is late must not load what has been stored.
    assert_ne!(barriers(&UPDATED, warps(4), &[], consts! { n = 64usize }), 0);
    for kernel in configurations(DType::BF16).into_iter().filter(|c| c.def.name == "adamw") {
        assert_eq!(barriers(kernel.def, kernel.options, &kernel.dtypes, &kernel.consts), 0, "{}", kernel.def.name);
    }
}
