//! TMA stores: their results, and the errors reported if their synchronization is missing.

use super::{Global, Launch, run};
use crate::interp::{self, Memory};
use crate::lower::nvptx::{GpuModule, lower};
use crate::target::{CompileOptions, GpuArch, HostExpr};
use crate::text::parse;

/// Stores x plus the tile's number: tiles of 64 rows that start 5 rows before every 32nd row, so that most rows belong to
/// two tiles, and the first and the last tile lie partly outside of y.
const STORE: &str = include_str!("programs/store_tiles.tile");
const ROWS: usize = 150;
const COLUMNS: usize = 128;

fn x() -> Vec<u8> {
    (0..ROWS * COLUMNS).flat_map(|i| ((i % 97) as f32).to_le_bytes()).collect()
}

/// The later of two tiles remains.
fn expected() -> Vec<f32> {
    (0..ROWS * COLUMNS).map(|i| (i % 97) as f32 + ((i / COLUMNS + 5) / 32).min(4) as f32).collect()
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn module(text: &str) -> GpuModule {
    let func = parse(text).unwrap_or_else(|e| panic!("{e}"));
    lower(&func, GpuArch::Sm90a, &CompileOptions { num_warps: 4, ..CompileOptions::default() }).unwrap()
}

/// Runs the module; gives `y`, which has no more bytes than the tensor.
fn simulate(llvm_ir: &str, module: &GpuModule, seed: u64) -> Result<Vec<f32>, String> {
    let mut global = Global::default();
    let x = global.add(x());
    let y = global.add(vec![0xAA; ROWS * COLUMNS * 4]);
    let launch = Launch {
        llvm_ir,
        grid: [1, 1, 1],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &[x, y, ROWS as u64],
        tensor_maps: &module.tensor_maps,
        seed,
    };
    run(&launch, &mut global)?;
    Ok(numbers(global.bytes(y)))
}

#[test]
fn tiles_are_stored_in_order_and_clipped() {
    let func = parse(STORE).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = Memory::new();
    let [input, output] = [x(), vec![0; ROWS * COLUMNS * 4]].map(|bytes| memory.add(bytes));
    let args = [input.into(), output.into(), interp::ArgValue::Int(ROWS as i64)];
    interp::run(&func, &args, [1, 1, 1], &mut memory).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(numbers(memory.bytes(output)), expected());

    let module = module(STORE);
    assert_eq!((module.tensor_maps.len(), module.tensor_maps[0].swizzle_bytes), (1, 128));
    for seed in 0..4 {
        assert_eq!(simulate(&module.llvm_ir, &module, seed).unwrap_or_else(|e| panic!("{e}")), expected());
    }
}

/// TMA writes whole chunks of 16 bytes: a `tma_store` of rows of 127 elements is not lowered, and the simulated GPU reports
/// a tensor map that has them.
#[test]
fn rows_end_at_multiples_of_16_bytes() {
    let of_columns = |count: &str| {
        STORE.replace("%columns = constant {value = 128}", count).replace("[0]}\n    yield", "[0, 1]}\n    yield")
    };
    let lowered = |count: &str| {
        let func = parse(&of_columns(count)).unwrap_or_else(|e| panic!("{e}"));
        lower(&func, GpuArch::Sm90a, &CompileOptions { num_warps: 4, ..CompileOptions::default() })
    };
    assert!(lowered("%columns = constant {value = 124}").is_ok());
    assert!(lowered("%columns = constant {value = 127}").is_err());

    let mut module = module(STORE);
    module.tensor_maps[0].shape[0] = HostExpr::Const(127);
    let error = simulate(&module.llvm_ir, &module, 0).unwrap_err();
    assert!(error.contains("a row that ends inside of 16 bytes"), "{error}");
}

/// Each of these bugs might go undetected on a GPU.
#[test]
fn missing_synchronization_is_reported() {
    let module = module(STORE);
    for (removed, expected_error) in [
        ("cp.async.bulk.commit_group", "asynchronous read of it"),
        ("cp.async.bulk.wait_group.read 0", "exits before its bulk writes have read"),
        ("cp.async.bulk.wait_group.read 1", "asynchronous read of it"),
        ("cp.async.bulk.wait_group 0", "asynchronous read of it"),
        ("fence.proxy.async.shared_cta()", "without a proxy fence"),
        ("bar.warp.sync(", "race"),
        ("bar.sync", "asynchronous read of it"),
    ] {
        let lines: Vec<&str> = module.llvm_ir.lines().collect();
        let found = lines.iter().position(|line| line.contains(removed) && line.contains("call"));
        let found = found.unwrap_or_else(|| panic!("no line contains `{removed}`"));
        let broken: Vec<&str> = lines.iter().enumerate().filter(|(i, _)| *i != found).map(|(_, &line)| line).collect();
        let errors: Vec<String> = (0..4).filter_map(|seed| simulate(&broken.join("\n"), &module, seed).err()).collect();
        assert!(errors.iter().any(|e| e.contains(expected_error)), "without {removed}: {errors:?}");
    }
}

/// Without a wait for what the previous iteration stored, its values may replace those of this one.
#[test]
fn stores_of_two_iterations_in_any_order_are_reported() {
    let module = module(STORE);
    let broken = module.llvm_ir.replace("cp.async.bulk.wait_group 0", "cp.async.bulk.wait_group.read 0");
    assert_ne!(broken, module.llvm_ir);
    let errors: Vec<String> = (0..4).filter_map(|seed| simulate(&broken, &module, seed).err()).collect();
    assert!(errors.iter().any(|e| e.contains("TMA store that it has not waited for")), "{errors:?}");
}

/// An addition needs no order, but a store after it does.
#[test]
fn stores_after_additions_are_ordered() {
    let added = "    %u = make_view %z, %extent, %columns, %columns, %unit, %offset, %none {order = [1, 0]} : view<64x128xf32>\n    \
                 tma_store %u, %sum {boundary = [0], op = add}\n    tma_store %w";
    let text = STORE.replace("%rows: i32)", "%z: ptr<f32> {divisible_by = 16}, %rows: i32)");
    let module = module(&text.replace("    tma_store %w", added));
    let waits = |text: &str| module.llvm_ir.matches(text).count();
    assert_eq!((waits("cp.reduce.async"), waits("cp.async.bulk.wait_group 0")), (4, 1));
}

/// The memory is written as late as the end of the kernel.
#[test]
fn reading_what_a_store_writes_is_a_race() {
    let read = "    %old = load_view %w {boundary = [0], padding = zero, eviction = normal} : tensor<64x128xf32, #l0>\n    yield";
    let text = STORE.replace("    yield", read);
    let module = module(&text);
    let errors: Vec<String> = (0..4).filter_map(|seed| simulate(&module.llvm_ir, &module, seed).err()).collect();
    assert!(errors.iter().any(|e| e.contains("data race")), "{errors:?}");
}
