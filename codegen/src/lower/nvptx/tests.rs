//! Random programs through the GPU pipeline: the passes preserve the interpreted results, and the result lowers.

use crate::ir::Stage;
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
    let func = crate::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let artifact = pipeline::compile_gpu(&func, GpuArch::Sm90a, &CompileOptions::default(), &mut ());
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
