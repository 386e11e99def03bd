//! TMA loads, barriers and warp-specialized partitions: their results, and the errors reported if one of them is
//! missing.

use super::{Global, Launch, run};
use crate::interp::{self, ArgValue, Memory};
use crate::lower::nvptx::lower;
use crate::target::{CompileOptions, GpuArch};
use crate::text::{parse, print};

/// Copies a matrix of 64 columns through a ring of two buffers: one partition loads, the other stores.
const COPY: &str = include_str!("programs/warp_specialized_copy.tile");
const ROWS: usize = 300;
/// Row stride in elements.
const STRIDE: usize = 80;

fn input() -> Vec<u8> {
    (0..ROWS * STRIDE).flat_map(|i| (i as u16).to_le_bytes()).collect()
}

/// The expected output: the copied columns, and 0xff bytes elsewhere.
fn expected() -> Vec<u8> {
    let mut out = vec![0xFF; ROWS * STRIDE * 2];
    for row in 0..ROWS {
        let at = row * STRIDE * 2..row * STRIDE * 2 + 128;
        out[at.clone()].copy_from_slice(&input()[at]);
    }
    out
}

fn interpret(text: &str) -> Result<Vec<u8>, String> {
    let func = parse(text).map_err(|e| e.to_string())?;
    assert_eq!(print(&parse(&print(&func)).unwrap()), print(&func));
    let mut memory = Memory::new();
    let (x, y) = (memory.add(input()), memory.add(vec![0xFF; ROWS * STRIDE * 2]));
    let args = [x.into(), y.into(), ArgValue::Int(STRIDE as i64), ArgValue::Int(ROWS as i64)];
    interp::run(&func, &args, [1, 1, 1], &mut memory).map_err(|e| e.to_string())?;
    Ok(memory.bytes(y).to_vec())
}

fn simulate(text: &str, seed: u64) -> Result<Vec<u8>, String> {
    let func = parse(text).map_err(|e| e.to_string())?;
    let options = CompileOptions { num_warps: 4, ..CompileOptions::default() };
    let module = lower(&func, GpuArch::Sm90a, &options).map_err(|e| e.to_string())?;
    let mut global = Global::default();
    let (x, y) = (global.add(input()), global.add(vec![0xFF; ROWS * STRIDE * 2]));
    let launch = Launch {
        llvm_ir: &module.llvm_ir,
        grid: [1, 1, 1],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &[x, y, STRIDE as u64, ROWS as u64],
        tensor_maps: &module.tensor_maps,
        seed,
    };
    run(&launch, &mut global)?;
    Ok(global.bytes(y).to_vec())
}

#[test]
fn partitions_copy_through_a_ring() {
    assert_eq!(interpret(COPY).unwrap_or_else(|e| panic!("{e}")), expected());
    for seed in 0..4 {
        assert_eq!(simulate(COPY, seed).unwrap_or_else(|e| panic!("{e}")), expected(), "seed {seed}");
    }
}

/// If threads copy instead of TMA, each producer thread arrives, and each consumer thread releases the buffer.
#[test]
fn ring_filled_by_cp_async_needs_every_thread_to_arrive() {
    let mut text = COPY.to_string();
    for (bulk, threads) in [
        ("%full = mbarrier_alloc {arrivals = 1}", "%full = mbarrier_alloc {arrivals = 32}"),
        ("%empty = mbarrier_alloc {arrivals = 4}", "%empty = mbarrier_alloc {arrivals = 128}"),
        ("{warps = 4, lanes = 1}", "{warps = 4, lanes = 32}"),
        ("      mbarrier_expect %full, %slot2 {bytes = 8192}\n", ""),
        (
            "tma_load %v, %buffer2, %full, %slot2 {boundary = [0]}",
            "async_copy %v, %buffer2 {boundary = [0], padding = zero}\n      async_arrive %full, %slot2 {threads = 32}",
        ),
    ] {
        assert!(text.contains(bulk), "{bulk}");
        text = text.replace(bulk, threads);
    }
    assert_eq!(interpret(&text).unwrap_or_else(|e| panic!("{e}")), expected());
    for seed in 0..4 {
        assert_eq!(simulate(&text, seed).unwrap_or_else(|e| panic!("{e}")), expected(), "seed {seed}");
    }
    // One arriving thread per warp is too few for this barrier, and a missing wait is an error.
    let few = text.replace("lanes = 32", "lanes = 1");
    assert!(simulate(&few, 0).is_err_and(|e| e.contains("forever")));
    let wait = "      mbarrier_wait %empty, %slot2, %parity2\n";
    assert!(text.contains(wait) && simulate(&text.replace(wait, ""), 0).is_err());
}

#[test]
fn module_lists_launch_arguments() {
    let func = parse(COPY).unwrap();
    let module = lower(&func, GpuArch::Sm90a, &CompileOptions::default()).unwrap();
    assert_eq!((module.threads, module.args.len(), module.tensor_maps.len()), (256, 5, 1));
    assert_eq!((module.tensor_maps[0].arg, module.tensor_maps[0].swizzle_bytes), (4, 128));
}

/// The program without the `which`-th line that contains `text`; with `replacement` in place of `text` if it is not
/// empty.
fn without(text: &str, which: usize, replacement: &str) -> String {
    let mut seen = 0;
    let lines: Vec<String> = COPY
        .lines()
        .map(|line| {
            let found = line.contains(text);
            seen += usize::from(found);
            if found && seen == which + 1 { line.replace(text, replacement) } else { line.to_string() }
        })
        .filter(|line| !line.trim().is_empty())
        .collect();
    assert!(seen > which, "`{text}` is not there");
    lines.join("\n")
}

/// Each of these bugs might go undetected on a GPU, or hang it.
#[test]
fn simulator_reports_missing_synchronization() {
    for (text, which, replacement, expected_error) in [
        ("mbarrier_wait %full, %slot, %parity", 0, "", "which is uninitialized"),
        ("mbarrier_wait %empty, %slot2, %parity2", 0, "", "or a missing wait"),
        ("mbarrier_arrive %empty, %slot {warps = 4, lanes = 1}", 0, "", "wait for each other forever"),
        ("mbarrier_expect %full, %slot2 {bytes = 8192}", 0, "", "only 0 more are expected"),
        ("bytes = 8192", 0, "bytes = 8200", "and 8 bytes"),
        ("bytes = 8192", 0, "bytes = 4096", "only 4096 more are expected"),
        ("tma_load %v, %buffer2, %full, %slot2 {boundary = [0]}", 0, "", "8192 bytes"),
        ("block_barrier {id = 0}", 0, "", "no mbarrier is initialized"),
        ("arrivals = 4", 0, "arrivals = 5", "wait for each other forever"),
    ] {
        // A missing synchronization shows in most schedules, not in all.
        let broken = without(text, which, replacement);
        let found: Vec<String> = (0..4).filter_map(|seed| simulate(&broken, seed).err()).collect();
        assert!(found.iter().any(|e| e.contains(expected_error)), "without `{text}`: {found:?}");
    }
}

#[test]
fn interpreter_reports_missing_synchronization() {
    for (text, replacement, expected_error) in [
        ("mbarrier_wait %full, %slot, %parity", "", "uninitialized shared memory"),
        ("mbarrier_arrive %empty, %slot {warps = 4, lanes = 1}", "", "deadlock"),
        ("mbarrier_expect %full, %slot2 {bytes = 8192}", "", "only 0 more are expected"),
        ("bytes = 8192", "bytes = 8200", "deadlock"),
        ("bytes = 8192", "bytes = 4096", "only 4096 more are expected"),
        ("{warps = 4, lanes = 1}", "{warps = 5, lanes = 1}", "5 arrivals"),
    ] {
        let broken = without(text, 0, replacement);
        match interpret(&broken) {
            Err(e) => assert!(e.contains(expected_error), "without `{text}`: {e}"),
            Ok(_) => panic!("without `{text}` nothing was noticed"),
        }
    }
}
