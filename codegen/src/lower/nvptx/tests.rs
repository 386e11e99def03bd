//! Random programs through the GPU pipeline: the passes preserve the interpreted results, and the result lowers.

use crate::ir::{DType, Stage};
use crate::pipeline::{self, Observer, gpu_ir};
use crate::target::{Code, CompileOptions, GpuArch};
use crate::testgen::{self, Options};

const PROGRAMS: u64 = 300;

fn options(seed: u64) -> CompileOptions {
    CompileOptions { num_warps: 1 << (seed % 4), num_stages: 1 + (seed % 3) as u32, ..CompileOptions::default() }
}

#[test]
fn gpu_passes_preserve_semantics() {
    for seed in 0..PROGRAMS {
        let exact = Options { exact: true, ..Options::default() };
        let program = testgen::program(seed, &exact);
        let expected = program.interpret().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
            let gpu_func = gpu_ir(&program.func, arch, &options(seed), &mut ());
            let found = program.interpret_as(&gpu_func).unwrap_or_else(|e| panic!("seed {seed}, {}: {e}", arch.name()));
            if let Some(difference) = testgen::difference(&program.output_dtypes(), &expected, &found) {
                panic!("seed {seed}, {}: {difference}\n{}", arch.name(), crate::text::print(&gpu_func));
            }
        }
    }
}

/// Keeps the LLVM IR for the failure message.
#[derive(Default)]
struct Keep(String);

impl Observer for Keep {
    fn after(&mut self, _: &'static str, _: Stage, _: &crate::ir::Func) {}
    fn llvm_ir(&mut self, text: &str) {
        self.0 = text.into();
    }
}

#[test]
fn random_programs_become_ptx() {
    let mut failures = Vec::new();
    for seed in 0..PROGRAMS {
        let program = testgen::program(seed, &Options::default());
        for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
            let mut keep = Keep::default();
            match pipeline::compile_gpu(&program.func, arch, &options(seed), &mut keep) {
                Ok(artifact) => {
                    let Code::Ptx(ptx) = artifact.code else { panic!("not PTX") };
                    assert!(ptx.contains(".visible .entry"), "{ptx}");
                    if let Ok(dir) = std::env::var("TILEWRIGHT_KEEP_PTX") {
                        std::fs::write(format!("{dir}/{seed}.{}.ptx", arch.name()), ptx).expect("a writable folder");
                    }
                }
                Err(pipeline::CompileError::Unsupported(u)) => {
                    assert!(!u.message.is_empty());
                }
                Err(e) => failures.push(format!("seed {seed}, {}: {e}", arch.name())),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn a_tile_larger_than_the_register_file_is_rejected() {
    let text = "kernel @wide(%x: ptr<f32>) {
  %i = arange {start = 0, end = 262144} : tensor<262144xi32>
  %p = splat %x : tensor<262144xptr<f32>>
  %q = ptr_add %p, %i : tensor<262144xptr<f32>>
  %v = load %q {eviction = normal} : tensor<262144xf32>
  store %q, %v {eviction = normal}
  return
}";
    let func = crate::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let compile = |num_warps| {
        let options = CompileOptions { num_warps, ..CompileOptions::default() };
        pipeline::compile_gpu(&func, GpuArch::Sm80, &options, &mut ())
    };
    let error = compile(4).expect_err("2048 elements a thread").to_string();
    assert!(
        error.contains("[262144] has 2048 elements per thread (128 threads): at most 1024 are supported"),
        "{error}"
    );
}

fn ptx(text: &str) -> String {
    ptx_for(GpuArch::Sm90a, text)
}

fn ptx_for(arch: GpuArch, text: &str) -> String {
    let func = crate::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let artifact = pipeline::compile_gpu(&func, arch, &CompileOptions::default(), &mut ());
    match artifact.unwrap_or_else(|e| panic!("{e}")).code {
        Code::Ptx(ptx) => ptx,
        Code::Object(_) => panic!("not PTX"),
    }
}

/// Masked loads are inline assembly, of which LLVM has to know that stores change what they read. Simulated GPUs execute the code
/// before LLVM's passes.
#[test]
fn llvm_keeps_masked_loads_after_stores() {
    let block = "kernel @k(%x: ptr<f32>, %n: i64) {
  %one = constant {value = 1} : i64
  %zero = constant {value = 0} : i64
  %v = make_view %x, %n, %one, %zero {order = [0]} : view<64xf32>
  %t = load_view %v {boundary = [0], padding = zero, eviction = normal} : tensor<64xf32>
  %u = add %t, %t : tensor<64xf32>
  store_view %v, %u {boundary = [0], eviction = normal}
  %t2 = load_view %v {boundary = [0], padding = zero, eviction = normal} : tensor<64xf32>
  %u2 = mul %t2, %t : tensor<64xf32>
  store_view %v, %u2 {boundary = [0], eviction = normal}
  return
}";
    let ptx_of_block = ptx(block);
    let loads = ptx_of_block.lines().filter(|line| line.contains("ld.global")).count();
    assert_eq!(loads, 2, "{ptx_of_block}");
    // A pointer that is advanced, and read and written in each iteration.
    let in_loop = "kernel @k(%x: ptr<f32>, %n: i32) {
  %zero = constant {value = 0} : i32
  %one = constant {value = 1} : i32
  %i = arange {start = 0, end = 128} : tensor<128xi32>
  %ns = splat %n : tensor<128xi32>
  %m = cmp_lt %i, %ns : tensor<128xbool>
  %xs = splat %x : tensor<128xptr<f32>>
  %p = ptr_add %xs, %i : tensor<128xptr<f32>>
  %other = constant {value = 0.0} : tensor<128xf32>
  for %zero, %n, %one (%j: i32) {
    %t = load %p, %m, %other {eviction = normal} : tensor<128xf32>
    %u = add %t, %t : tensor<128xf32>
    store %p, %u, %m {eviction = normal}
    yield
  }
  return
}";
    let ptx_of_loop = ptx(in_loop);
    let (before, inside) = ptx_of_loop.split_once("$L__BB0_").expect("a loop");
    assert!(!before.contains("ld.global") && inside.contains("ld.global"), "{ptx_of_loop}");
}

/// A kernel that multiplies a [m, k] and b [k, n] with four warps, both in shared memory. `a_order` and `b_order`: the
/// contiguous dimension first.
fn dot_of_loaded(elem: DType, acc: DType, [m, n, k]: [usize; 3], a_order: [usize; 2], b_order: [usize; 2]) -> String {
    let load = |name: &str, [rows, columns]: [usize; 2], order: [usize; 2]| {
        let strides = if order == [1, 0] { format!("%c{columns}, %one") } else { format!("%one, %c{rows}") };
        format!(
            "  %{name}v = make_view %{name}, %c{rows}, %c{columns}, {strides}, %zero, %zero {{order = {order:?}}} : view<{rows}x{columns}x{elem}>
  %{name}t = load_view %{name}v {{boundary = [], padding = zero, eviction = normal}} : tensor<{rows}x{columns}x{elem}>\n"
        )
    };
    let mut extents = vec![m, n, k];
    extents.sort_unstable();
    extents.dedup();
    let constants: String = extents.iter().map(|n| format!("  %c{n} = constant {{value = {n}}} : i64\n")).collect();
    format!(
        "kernel @k(%a: ptr<{elem}> {{divisible_by = 16}}, %b: ptr<{elem}> {{divisible_by = 16}}, %y: ptr<{acc}>) {{
  %zero = constant {{value = 0}} : i64
  %one = constant {{value = 1}} : i64
{constants}{}{}  %s = constant {{value = {}}} : tensor<{m}x{n}x{acc}>
  %r = dot %at, %bt, %s {{precision = ieee}} : tensor<{m}x{n}x{acc}>
  %yv = make_view %y, %c{m}, %c{n}, %c{n}, %one, %zero, %zero {{order = [1, 0]}} : view<{m}x{n}x{acc}>
  store_view %yv, %r {{boundary = [], eviction = normal}}
  return
}}",
        load("a", [m, k], a_order),
        load("b", [k, n], b_order),
        if acc.is_float() { "0.0" } else { "0" },
    )
}

/// `ldmatrix` loads the operands of `mma.sync`: four matrices at a time, as they are or transposed. Of 8-bit elements only
/// where K is contiguous.
#[test]
fn operands_of_mma_sync_are_loaded_as_matrices() {
    let (bf16, i8) = (DType::BF16, DType::I8);
    let (rows, columns) = ([1, 0], [0, 1]);
    // Four warps have 2 x 2 parts of 32 x 32; 4 x 1 parts of 16 x 8, with two steps along K, and with one
    // (where the small b is stored along N).
    for (elem, acc, shape, orders, expected) in [
        (bf16, DType::F32, [64, 64, 32], [rows, rows], [("x4.shared", 4), ("x4.trans", 4)]),
        (bf16, DType::F32, [64, 64, 32], [columns, columns], [("x4.shared", 4), ("x4.trans", 4)]),
        (bf16, DType::F32, [64, 8, 32], [rows, columns], [("x4.shared", 3), ("x4.trans", 0)]),
        (bf16, DType::F32, [64, 8, 16], [rows, columns], [("x4.shared", 1), ("x2.trans", 1)]),
        (DType::F16, DType::F16, [64, 64, 32], [rows, rows], [("x4.shared", 4), ("x4.trans", 4)]),
        (i8, DType::I32, [64, 64, 64], [rows, columns], [("x4.shared", 8), ("x4.trans", 0)]),
        (i8, DType::I32, [64, 64, 64], [columns, rows], [("x4.shared", 0), ("x4.trans", 0)]),
    ] {
        let text = dot_of_loaded(elem, acc, shape, orders[0], orders[1]);
        let ptx = ptx_for(GpuArch::Sm80, &text);
        let count = |part: &str| ptx.matches(&format!("ldmatrix.sync.aligned.m8n8.{part}")).count();
        for (part, times) in expected {
            assert_eq!(count(part), times, "{part} for {elem} {shape:?} {orders:?}:\n{ptx}");
        }
        let whole = expected.iter().map(|(_, times)| times).sum::<usize>();
        assert_eq!(ptx.matches("ldmatrix").count(), whole, "{elem} {shape:?} {orders:?}");
        assert_eq!(ptx.contains("ld.shared"), whole == 0, "{elem} {shape:?} {orders:?}:\n{ptx}");
    }
}
