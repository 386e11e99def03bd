//! Ordered additions by a warp of their own: their sums, the errors reported if a barrier or a wait is missing, and kernels whose
//! semaphores order more than additions.

use super::{Global, Launch, run};
use crate::ir::Stage;
use crate::lower::nvptx::{GpuModule, lower};
use crate::target::{CompileOptions, GpuArch};
use crate::text::parse;
use crate::verify::verify;

/// Each program adds its number times x to y.
const ADD: &str = include_str!("programs/ordered_adds.tile");
const TILES: usize = 3;
const LEN: usize = TILES * 64 * 32;
const PROGRAMS: usize = 4;

fn module(text: &str, arch: GpuArch) -> GpuModule {
    let func = parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    verify(&func, Stage::Async).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
    lower(&func, arch, &CompileOptions { num_warps: 4, ..CompileOptions::default() }).unwrap()
}

fn number(i: usize) -> f32 {
    1.0 + (i as f32 * 0.37) * if i.is_multiple_of(3) { 1e4 } else { 1e-3 }
}

/// Gives y, which starts as ones.
fn simulate(llvm_ir: &str, module: &GpuModule, seed: u64) -> Result<Vec<f32>, String> {
    let bytes = |numbers: Vec<f32>| numbers.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
    let mut global = Global::default();
    let x = global.add(bytes((0..LEN).map(number).collect()));
    let y = global.add(bytes(vec![1.0; LEN]));
    let counters = global.add(vec![0; 4 * TILES]);
    let launch = Launch {
        llvm_ir,
        grid: [PROGRAMS as u32, 1, 1],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &[x, y, counters, TILES as u64],
        tensor_maps: &module.tensor_maps,
        seed,
    };
    run(&launch, &mut global)?;
    assert!(global.bytes(counters).chunks(4).all(|counter| counter == (PROGRAMS as i32).to_le_bytes()));
    Ok(global.bytes(y).chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
}

/// Whether a warp of its own adds.
fn has_warp(module: &GpuModule) -> bool {
    let is_served = module.llvm_ir.contains("load atomic i32");
    assert_eq!(module.llvm_ir.contains(".acquire."), !is_served);
    assert_eq!(module.llvm_ir.contains("cp.reduce.async.bulk"), is_served);
    is_served
}

#[test]
fn sums_are_those_of_the_order() {
    let sum = |order: &[usize], i: usize| order.iter().fold(1.0_f32, |sum, &p| sum + p as f32 * number(i));
    let expected: Vec<f32> = (0..LEN).map(|i| sum(&[0, 1, 2, 3], i)).collect();
    assert!((0..LEN).any(|i| sum(&[3, 2, 1, 0], i) != expected[i]), "the order does not matter");
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        // Only Hopper has warp specialization.
        let module = module(ADD, arch);
        assert_eq!(has_warp(&module), arch == GpuArch::Sm90a);
        for seed in 0..6 {
            assert_eq!(simulate(&module.llvm_ir, &module, seed).unwrap_or_else(|e| panic!("{e}")), expected);
        }
    }
}

#[test]
fn missing_synchronization_is_reported() {
    let module = module(ADD, GpuArch::Sm90a);
    let lines: Vec<&str> = module.llvm_ir.lines().collect();
    let kinds = ["\"bar.sync ", "\"bar.arrive ", "wait_group.read 0", "fence.proxy.async.shared_cta()"];
    let mut count = 0;
    for kind in kinds {
        let found = (0..lines.len()).filter(|&i| lines[i].contains("call") && lines[i].contains(kind));
        // The other wait for reads is that at the end of all kernels, where here nothing is read.
        let found = found.take(if kind.contains("wait_group") { 1 } else { usize::MAX });
        for removed in found {
            let broken: Vec<&str> = lines.iter().enumerate().filter(|(i, _)| *i != removed).map(|(_, &l)| l).collect();
            let outcome = simulate(&broken.join("\n"), &module, 1);
            assert!(outcome.is_err(), "without `{}` (line {removed}): no error", lines[removed]);
            count += 1;
        }
    }
    assert!(count >= 8, "{count} lines");
}

/// Semaphores that order other accesses: consumers wait, and release what they have written.
#[test]
fn semaphores_order_other_accesses() {
    let with = |from: &str, to: &str| {
        assert!(ADD.contains(from), "{from}");
        module(&ADD.replace(from, to), GpuArch::Sm90a)
    };
    let store = |at: &str| format!("store {at}, %factor {{eviction = normal}}");
    let release = "%old = atomic_rmw %counter, %next {op = xchg, sem = release} : i32\n";
    let (end, start) = ("      yield\n    }\n", "  warp_specialize {");
    let y = "%first = ptr_add %y, %zero : ptr<f32>\n";
    // A load of what is added, a store to it, and stores before the loop, in it, and after it.
    let load = "%loaded = load %y {eviction = normal} : f32\n";
    assert!(!has_warp(&with(start, &format!("{load}{start}"))));
    assert!(!has_warp(&with(
        "    }\n    yield\n  } () {",
        &format!("    }}\n{y}{}\n    yield\n  }} () {{", store("%first"))
    )));
    let other = |text: &str| text.replace("%counters:", "%z: ptr<f32> {divisible_by = 16}, %counters:");
    let with_other = |from: &str, to: &str| module(&other(&ADD.replace(from, to)), GpuArch::Sm90a);
    assert!(!has_warp(&with_other(start, &format!("{}\n{start}", store("%z")))));
    assert!(!has_warp(&with_other(end, &format!("{}\n{end}", store("%z")))));
    assert!(has_warp(&with_other(
        "    }\n    yield\n  } () {",
        &format!("    }}\n{}\n    yield\n  }} () {{", store("%z"))
    )));
    // A counter with another order, scope or value that is used.
    for wrong in ["{op = xchg}", "{op = xchg, sem = release, scope = sys}", "{op = add, sem = release}"] {
        assert!(!has_warp(&with("{op = xchg, sem = release}", wrong)), "{wrong}");
    }
    assert!(!has_warp(&with(
        release,
        &format!("{release}%used = ptr_add %counters, %old : ptr<i32>\nsemaphore_wait %used, %program\n")
    )));
    assert!(!has_warp(&with("semaphore_wait %counter, %program\n", "semaphore_wait %counters, %program\n")));
}
