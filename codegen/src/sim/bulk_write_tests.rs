//! Bulk reductions: their results, and the errors reported if one of their waits is missing.

use super::{Global, Launch, run};
use crate::lower::nvptx::{GpuModule, lower};
use crate::target::{CompileOptions, GpuArch};
use crate::text::parse;

/// Adds tiles of 64 rows that each start 32 rows after the previous one: most rows belong to two tiles.
const ADD: &str = include_str!("programs/add_rows.tile");
const ROWS: usize = 150;
const COLUMNS: usize = 32;
const PROGRAMS: u32 = 2;
const INSTRUCTION: &str = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32";

/// The same, for whole tiles: a warp adds its rows at once.
fn add_whole_tiles() -> String {
    let text = ADD.replace("{op = add, boundary = [0]}", "{op = add, boundary = []}");
    let text = text.replace("%up = constant {value = 31}", "%up = constant {value = -32}");
    assert!(text.contains("boundary = []") && text.contains("value = -32"));
    text
}

fn number(i: usize) -> f32 {
    (i % 97) as f32
}

fn module(text: &str, arch: GpuArch) -> GpuModule {
    let func = parse(text).unwrap_or_else(|e| panic!("{e}"));
    lower(&func, arch, &CompileOptions { num_warps: 4, ..CompileOptions::default() }).unwrap()
}

/// Runs the module; gives `y`, which starts as ones.
fn simulate(llvm_ir: &str, module: &GpuModule, seed: u64) -> Result<Vec<f32>, String> {
    let bytes = |numbers: Vec<f32>| numbers.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
    let mut global = Global::default();
    let x = global.add(bytes((0..ROWS * COLUMNS).map(number).collect()));
    let y = global.add(bytes(vec![1.0; ROWS * COLUMNS]));
    let launch = Launch {
        llvm_ir,
        grid: [PROGRAMS, 1, 1],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &[x, y, ROWS as u64],
        tensor_maps: &module.tensor_maps,
        seed,
    };
    run(&launch, &mut global)?;
    Ok(global.bytes(y).chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
}

#[test]
fn overlapping_tiles_accumulate() {
    // The first 32 rows belong to one tile, all others to two; every program adds the same.
    let times = |i: usize| PROGRAMS as f32 * if i / COLUMNS < 32 { 1.0 } else { 2.0 };
    let expected: Vec<f32> = (0..ROWS * COLUMNS).map(|i| 1.0 + times(i) * number(i)).collect();
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let module = module(ADD, arch);
        assert_eq!(module.llvm_ir.contains(INSTRUCTION), arch == GpuArch::Sm90a);
        for seed in 0..3 {
            assert_eq!(simulate(&module.llvm_ir, &module, seed).unwrap_or_else(|e| panic!("{e}")), expected);
        }
    }
}

#[test]
fn rows_without_gaps_are_added_at_once() {
    // Three tiles, of the rows 0, 32 and 64 on.
    let times = |i: usize| [1, 2, 2, 1, 0][i / COLUMNS / 32] * PROGRAMS;
    let expected: Vec<f32> = (0..ROWS * COLUMNS).map(|i| 1.0 + times(i) as f32 * number(i)).collect();
    let module = module(&add_whole_tiles(), GpuArch::Sm90a);
    // 16 rows of 128 bytes per warp.
    assert!(module.llvm_ir.contains(&format!("{INSTRUCTION} [$0], [$1], 2048;")), "{}", module.llvm_ir);
    for seed in 0..3 {
        assert_eq!(simulate(&module.llvm_ir, &module, seed).unwrap_or_else(|e| panic!("{e}")), expected);
    }
}

#[test]
fn missing_synchronization_is_reported() {
    let rows = [
        ("cp.async.bulk.wait_group.read", 0, "asynchronous read of it"),
        ("cp.async.bulk.wait_group.read", 2, "exits before"),
        ("cp.async.bulk.commit_group", 0, "asynchronous read of it"),
        ("bar.sync", 0, "race"),
        ("bar.sync", 1, "which is uninitialized"),
        ("fence.proxy.async.shared_cta()", 0, "without a proxy fence"),
    ];
    reports_missing_synchronization(&module(ADD, GpuArch::Sm90a), &rows);
    // Warps synchronize by themselves.
    let parts = [
        ("cp.async.bulk.wait_group.read", 0, "asynchronous read of it"),
        ("cp.async.bulk.wait_group.read", 1, "exits before"),
        ("cp.async.bulk.commit_group", 0, "asynchronous read of it"),
        ("bar.warp.sync", 0, "race"),
        ("bar.warp.sync", 1, "which is uninitialized"),
        ("fence.proxy.async.shared_cta()", 0, "without a proxy fence"),
    ];
    let module = module(&add_whole_tiles(), GpuArch::Sm90a);
    assert!(!module.llvm_ir.contains("bar.sync"), "{}", module.llvm_ir);
    reports_missing_synchronization(&module, &parts);
}

fn reports_missing_synchronization(module: &GpuModule, faults: &[(&str, usize, &str)]) {
    let lines: Vec<&str> = module.llvm_ir.lines().collect();
    for &(removed, which, expected_error) in faults {
        let found = (0..lines.len()).filter(|&i| lines[i].contains(removed) && lines[i].contains("call")).nth(which);
        let found = found.unwrap_or_else(|| panic!("no line contains `{removed}`"));
        let broken: Vec<&str> = lines.iter().enumerate().filter(|(i, _)| *i != found).map(|(_, &line)| line).collect();
        match simulate(&broken.join("\n"), module, 1) {
            Err(e) if e.contains(expected_error) => {}
            other => panic!("without {removed} {which}: {:?}", other.err()),
        }
    }
}

#[test]
fn unsuitable_memory_uses_thread_atomics() {
    let reads = ADD.replace("    atomic_view", "    %old = load_view %w {boundary = [0], padding = zero, eviction = normal} : tensor<64x32xf32, #l0>\n    atomic_view");
    assert!(reads != ADD && !module(&reads, GpuArch::Sm90a).llvm_ir.contains(INSTRUCTION));
    let columns = ADD.replace("{op = add, boundary = [0]}", "{op = add, boundary = [0, 1]}");
    assert!(columns != ADD && !module(&columns, GpuArch::Sm90a).llvm_ir.contains(INSTRUCTION));
    let sign = ADD.replace("  return", "  %old = atomic_rmw %y, %five {op = add} : f32\n  return");
    let sign = sign.replace("  %none =", "  %five = constant {value = 5.0} : f32\n  %none =");
    assert!(sign != ADD && !module(&sign, GpuArch::Sm90a).llvm_ir.contains(INSTRUCTION));
    // A row stride of 33 elements: rows do not start at multiples of 16 bytes.
    let stride = ADD.replace("%columns, %columns, %unit", "%columns, %up64, %unit");
    let stride = stride.replace("  %zero =", "  %up64 = constant {value = 33} : i64\n  %zero =");
    assert!(stride != ADD && !module(&stride, GpuArch::Sm90a).llvm_ir.contains(INSTRUCTION));
}

/// Rows of 8 bytes: the instruction takes multiples of 16 bytes.
#[test]
fn rows_below_16_bytes_use_thread_atomics() {
    let layout = "reg=[[0,1]], lane=[[1,0],[2,0],[4,0],[8,0],[16,0]], warp=[[32,0],[64,0],[128,0],[256,0]], block=[], shape=[512,2]";
    let narrow = ADD.replace("64x32xf32", "512x2xf32");
    let (head, body) = narrow.split_once('\n').expect("a layout in the first line");
    assert!(head.starts_with("#l0"));
    let func = parse(&format!("#l0 = linear<{layout}>\n{body}")).unwrap_or_else(|e| panic!("{e}"));
    let options = CompileOptions { num_warps: 16, ..CompileOptions::default() };
    assert!(!lower(&func, GpuArch::Sm90a, &options).unwrap().llvm_ir.contains(INSTRUCTION));
}
