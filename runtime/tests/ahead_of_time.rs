//! Assumptions of code that is compiled without arguments: the facts in `docs/ahead-of-time.md`.

use tilewright_codegen::ir::{Func, Stage};
use tilewright_codegen::lang::kernel::{ArgSpec, Specialization};
use tilewright_codegen::pipeline::{self, Observer};
use tilewright_codegen::target::{CompileOptions, GpuArch, HostCpu, Target};
use tilewright_runtime::prelude::*;
use tilewright_runtime::{LaunchArg, kernel as host};

/// z = a · x + y, y += 1
#[kernel]
fn kinds(
    x: In<f32>,
    #[no_specialize] y: InOut<f32>,
    z: Out<f32>,
    a: f32,
    n: i32,
    stride: i64,
    #[no_specialize] first: i32,
    #[constexpr = 64] tile: usize,
) {
    let i = program_id(0) * tile + arange(0, tile);
    let mask = i < n;
    let before = load(y + i, mask = mask);
    let at = (i + first).to::<i64>() * stride;
    store(z + i, load(x + at, mask = mask) * a + before, mask = mask);
    store(y + i, before + 1.0, mask = mask);
}

/// By default, memory is assumed to be aligned and nothing is assumed about numbers: such code is correct for every
/// extent and stride.
#[test]
fn memory_is_aligned_and_numbers_are_any() {
    let specialization = Specialization::aligned_memory(&KINDS);
    let (aligned, any) = (ArgSpec { divisible_by: 16, equal_to: None }, ArgSpec::default());
    assert_eq!(specialization.args, [aligned, any, aligned, any, any, any, any], "x, y, z, a, n, stride, first");

    let device = Device::cpu();
    let target = Target::Host(HostCpu::native());
    let artifact = host::compile(&KINDS, &[], &[], &specialization, &target, &CompileOptions::default()).unwrap();
    let assumed: Vec<(u64, Option<i64>)> =
        artifact.manifest.args.iter().map(|arg| (arg.divisible_by, arg.equal_to)).collect();
    assert_eq!(assumed, specialization.args.iter().map(|arg| (arg.divisible_by, arg.equal_to)).collect::<Vec<_>>());

    let kernel = device.load(&artifact).unwrap();
    for (n, stride, first) in [(37, 3, 1), (64, 1, 0), (1, 16, 5), (100, 2, 7)] {
        let x: Vec<f32> = (0..(n + first) * stride + 1).map(|i| i as f32).collect();
        let y: Vec<f32> = (0..n + 1).map(|i| (i % 7) as f32).collect();
        let z = Buffer::<f32>::poisoned(&device, n).unwrap();
        let (x_buffer, y_buffer) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &y).unwrap());
        let memory = |address: u64, len: usize| LaunchArg::Ptr { addr: address, bytes: 4 * len as u64 };
        let args = [
            memory(x_buffer.address(), x.len()),
            // Offset by one element: y is only aligned to 4 bytes.
            memory(y_buffer.address() + 4, n),
            memory(z.address(), n),
            LaunchArg::F32(0.5),
            LaunchArg::I32(n as i32),
            LaunchArg::I64(stride as i64),
            LaunchArg::I32(first as i32),
        ];
        // SAFETY: the buffers are live and as large as the kernel accesses them; no two overlap.
        unsafe { kernel.launch([n.div_ceil(64) as u32, 1, 1], &args) }.unwrap();
        let want: Vec<f32> = (0..n).map(|i| x[(i + first) * stride] * 0.5 + y[i + 1]).collect();
        assert_eq!(z.to_vec().unwrap(), want, "n = {n}, stride = {stride}, first = {first}");
        let want: Vec<f32> = y[..1].iter().copied().chain(y[1..].iter().map(|v| v + 1.0)).collect();
        assert_eq!(y_buffer.to_vec().unwrap(), want);
    }
}

/// Captures the input of LLVM.
struct Llvm(String);
impl Observer for Llvm {
    fn after(&mut self, _: &'static str, _: Stage, _: &Func) {}
    fn llvm_ir(&mut self, text: &str) {
        self.0 = text.to_string();
    }
}

/// The rule about overlapping memory in `docs/ahead-of-time.md` matches the attributes passed to LLVM: memory accessed
/// through one argument is not written through another, and read-only memory is never written.
#[test]
fn gpu_code_assumes_that_memory_does_not_overlap() {
    let func = KINDS.record(&[], &[], &Specialization::aligned_memory(&KINDS)).unwrap();
    let mut llvm = Llvm(String::new());
    pipeline::compile(&func, &Target::Nvptx(GpuArch::Sm80), &CompileOptions::default(), &mut llvm).unwrap();
    let define = llvm.0.lines().find(|line| line.starts_with("define")).expect("a kernel");
    let parameter = |i: usize| define.split(", ").find(|part| part.ends_with(&format!("%a{i}"))).expect("a parameter");
    // Threads may communicate through y, which is read and written: `noalias` on x and z separates it from them.
    for (i, name, written, alone) in [(0, "x", false, true), (1, "y", true, false), (2, "z", true, true)] {
        assert_eq!(parameter(i).contains("noalias"), alone, "{name}: {}", parameter(i));
        assert_eq!(!parameter(i).contains("readonly"), written, "{name}: {}", parameter(i));
    }
}
