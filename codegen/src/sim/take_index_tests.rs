//! `take_index` at the end of the range of i32, in the interpreter and in the simulator.

use super::{Global, Launch, run};
use crate::interp::{self, Memory, RunOptions};
use crate::lower::nvptx::lower;
use crate::target::{CompileOptions, GpuArch};
use crate::text::parse;

/// Stores the index that is taken after `%index`; the counter holds the same number.
const TAKE: &str = "#l0 = shared<offset=[], shape=[1]>
kernel @take(%counter: ptr<i32>, %taken: ptr<i32>, %index: i32, %step: i32, %end: i32) {
  %zero = constant {value = 0} : i32
  %buffer = local_alloc : shared<1xi32, #l0>
  %full = mbarrier_alloc {arrivals = 1} : barrier<1>
  block_barrier {id = 0}
  take_index %counter, %index, %step, %end, %buffer, %full, %zero
  mbarrier_wait %full, %zero, %zero
  %next = taken_index %buffer : i32
  store %taken, %next {eviction = normal}
  return
}";

#[test]
fn no_taken_index_is_beyond_the_end() {
    let func = parse(TAKE).unwrap_or_else(|e| panic!("{e}"));
    let options = CompileOptions { num_warps: 1, ..CompileOptions::default() };
    let module = lower(&func, GpuArch::Sm90a, &options).unwrap();
    let most = i32::MAX;
    for (index, step, end, expected) in
        [(0, 3, 10, 3), (8, 3, 10, 10), (most - 1, 5, most, most), (most - 3, 2, most, most - 1)]
    {
        let numbers = [index, step, end];
        let mut memory = Memory::new();
        let ids = [index, 0].map(|n| memory.add(n.to_le_bytes().to_vec()));
        let args: Vec<_> =
            ids.map(Into::into).into_iter().chain(numbers.map(|n| interp::ArgValue::Int(n.into()))).collect();
        interp::run_traced(&func, &args, [1; 3], &mut memory, RunOptions::default(), &mut ()).unwrap();
        let interpreted = memory.bytes(ids[1]).to_vec();

        let mut global = Global::default();
        let [counter, taken] = [index, 0].map(|n: i32| global.add(n.to_le_bytes().to_vec()));
        let args: Vec<u64> = [counter, taken].into_iter().chain(numbers.map(|n| n as u64)).collect();
        let launch = Launch {
            llvm_ir: &module.llvm_ir,
            grid: [1; 3],
            threads: module.threads,
            shared_bytes: module.shared_bytes,
            args: &args,
            tensor_maps: &module.tensor_maps,
            seed: 1,
        };
        run(&launch, &mut global).unwrap_or_else(|e| panic!("{e}"));
        for found in [&interpreted[..], global.bytes(taken)] {
            assert_eq!(found, expected.to_le_bytes(), "after {index} by {step} to {end}");
        }
    }
}
