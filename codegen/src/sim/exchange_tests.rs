//! Buffers through which warps exchange tiles in a loop: with two slots in turn, one barrier per iteration suffices.

use super::{Global, Launch, run};
use crate::lower::nvptx::lower;
use crate::target::{CompileOptions, GpuArch};

const ITERATIONS: usize = 5;

/// Two warps store a tile each iteration, and load it in a layout that takes half of it from the other warp. `next` is the
/// slot of the next iteration.
fn kernel(next: &str) -> String {
    format!(
        "#l0 = linear<reg=[], lane=[[1],[2],[4],[8],[16]], warp=[[32]], block=[], shape=[64]>
#l1 = linear<reg=[], lane=[[2],[4],[8],[16],[32]], warp=[[1]], block=[], shape=[64]>
#l2 = shared<offset=[[1],[2],[4],[8],[16],[32]], shape=[64]>
kernel @exchange(%x: ptr<f32>, %y: ptr<f32>) {{
  %zero = constant {{value = 0}} : i32
  %one = constant {{value = 1}} : i32
  %n = constant {{value = {ITERATIONS}}} : i32
  %columns = constant {{value = 64}} : i32
  %none = constant {{value = 0.0}} : tensor<64xf32, #l1>
  %ring = local_alloc : shared<2x64xf32, #l2>
  %sum, %last = for %zero, %n, %one, %none, %zero : tensor<64xf32, #l1>, i32 (%i: i32, %acc: tensor<64xf32, #l1>, %slot: i32) {{
    %first = mul %i, %columns : i32
    %row = ptr_add %x, %first : ptr<f32>
    %rows = splat %row : tensor<64xptr<f32>, #l0>
    %at = arange {{start = 0, end = 64}} : tensor<64xi32, #l0>
    %p = ptr_add %rows, %at : tensor<64xptr<f32>, #l0>
    %v = load %p {{eviction = normal}} : tensor<64xf32, #l0>
    %part = local_slot %ring, %slot : shared<64xf32, #l2>
    local_store %part, %v
    %w = local_load %part : tensor<64xf32, #l1>
    %next = add %acc, %w : tensor<64xf32, #l1>
    %twice = add %next, %next : tensor<64xf32, #l1>
    %other = {next} : i32
    yield %twice, %other
  }}
  %out = splat %y : tensor<64xptr<f32>, #l1>
  %to = arange {{start = 0, end = 64}} : tensor<64xi32, #l1>
  %q = ptr_add %out, %to : tensor<64xptr<f32>, #l1>
  store %q, %sum {{eviction = normal}}
  return
}}"
    )
}

/// The output, and the number of barriers in the code.
fn simulate(next: &str, seed: u64) -> (Vec<f32>, usize) {
    let func = crate::text::parse(&kernel(next)).unwrap_or_else(|e| panic!("{e}"));
    let options = CompileOptions { num_warps: 2, ..CompileOptions::default() };
    let module = lower(&func, GpuArch::Sm90a, &options).unwrap_or_else(|e| panic!("{e}"));
    let mut global = Global::default();
    let x = global.add((0..ITERATIONS * 64).flat_map(|i| ((i * 7 % 31) as f32).to_le_bytes()).collect());
    let y = global.add(vec![0xFF; 64 * 4]);
    let launch = Launch {
        llvm_ir: &module.llvm_ir,
        grid: [1, 1, 1],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &[x, y],
        tensor_maps: &module.tensor_maps,
        seed,
    };
    run(&launch, &mut global).unwrap_or_else(|e| panic!("{e}"));
    let found = global.bytes(y).chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    (found, module.llvm_ir.lines().filter(|line| line.contains("\"bar.sync")).count())
}

#[test]
fn slots_in_turn_need_one_barrier_per_iteration() {
    let expected: Vec<f32> = (0..64)
        .map(|column| (0..ITERATIONS).fold(0.0, |acc, i| 2.0 * (acc + ((i * 64 + column) * 7 % 31) as f32)))
        .collect();
    for (next, barriers) in [("xor %slot, %one", 1), ("add %slot, %zero", 2)] {
        for seed in 0..8 {
            let (found, count) = simulate(next, seed);
            assert_eq!(found, expected, "{next}, seed {seed}");
            assert_eq!(count, barriers, "{next}");
        }
    }
}
