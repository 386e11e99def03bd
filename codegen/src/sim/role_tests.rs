//! Warp specialization on the simulator: attention whose loads are executed by producer warps.

use super::tests::{Attention, relative_error};
use crate::target::{CompileOptions, GpuArch, Schedule};

/// Attention with a length that the host passes as i32, and a single head: a tensor map can describe its tensors.
fn attention64_in_bulk() -> Attention {
    in_bulk(include_str!("programs/attention64.tile"), 112)
}

fn in_bulk(text: &str, queries: usize) -> Attention {
    let text = text.replace("%n: i64 {divisible_by = 16}", "%length: i32 {divisible_by = 16}");
    let text = text.replace("%ho = mul %head64, %nd : i64", "%ho = constant {value = 0} : i64");
    let (head, body) = text.split_once(") {\n").expect("a kernel");
    Attention::new(&format!("{head}) {{\n  %n = cast %length : i64\n{body}"), queries, 64, 64)
}

/// Options for warp specialization with this many consumer warps.
fn roles(num_warps: u32, take_turns: bool) -> CompileOptions {
    let schedule = Schedule { warp_specialize: Some(true), take_turns: Some(take_turns), ..Schedule::default() };
    CompileOptions { num_warps, num_stages: 2, schedule, ..CompileOptions::default() }
}

#[test]
fn attention_in_roles_gives_what_the_interpreter_gives() {
    let case = attention64_in_bulk();
    for (seed, (num_warps, turns)) in [(4, false), (8, false), (8, true)].into_iter().enumerate() {
        let module = case.llvm_ir(GpuArch::Sm90a, &roles(num_warps, turns));
        assert_eq!((module.threads, module.tensor_maps.len()), (32 * num_warps + 128, 2));
        assert_eq!(module.llvm_ir.contains("bar.arrive"), turns);
        let found = case.simulate(&module.llvm_ir, &module, seed as u64).unwrap_or_else(|e| panic!("case {seed}: {e}"));
        let error = relative_error(&case.interpret(), &found);
        assert!(error < 4e-3, "case {seed}: relative error {error}");
    }
}

/// Ping-pong scheduling must not apply if threads synchronize for a shared buffer: one warpgroup would wait for the
/// other forever.
#[test]
fn nobody_takes_a_turn_whose_products_read_what_all_have_computed() {
    let text = include_str!("programs/attention64.tile");
    let doubled = ["a", "b"].into_iter().fold(text.to_string(), |text, i| {
        let trans = format!("%{i}ktt = trans %{i}kt {{");
        assert!(text.contains(&trans));
        let sum = format!("%{i}kd = add %{i}kt, %{i}kt : tensor<64x64xbf16>\n    %{i}ktt = trans %{i}kd {{");
        text.replace(&trans, &sum)
    });
    // Enough queries that loops run more than once.
    let case = in_bulk(&doubled, 240);
    let module = case.llvm_ir(GpuArch::Sm90a, &roles(8, true));
    assert_eq!(module.threads, 384);
    let found = case.simulate(&module.llvm_ir, &module, 1).unwrap_or_else(|e| panic!("{e}"));
    let error = relative_error(&case.interpret(), &found);
    assert!(error < 4e-3, "relative error {error}");
}

#[test]
fn missing_synchronisation_between_roles_is_noticed() {
    let case = attention64_in_bulk();
    // One buffer for several tiles, so that it must be released.
    let options = CompileOptions { num_stages: 1, ..roles(8, true) };
    let module = case.llvm_ir(GpuArch::Sm90a, &options);
    let mut unnoticed = Vec::new();
    for (gone, complaint) in [
        ("mbarrier.try_wait", "or a missing wait"),
        ("mbarrier.arrive.shared", "forever"),
        ("mbarrier.arrive.expect_tx", "expect_tx"),
        ("cp.async.bulk.tensor", "bytes"),
        ("fence.proxy.async", "without a proxy fence"),
        ("fence.mbarrier_init", "without a fence"),
        ("bar.sync 0;", "no mbarrier is initialized"),
        ("bar.arrive", "forever"),
    ] {
        let broken: Vec<&str> = module.llvm_ir.lines().filter(|l| !l.contains(gone)).collect();
        assert!(broken.len() < module.llvm_ir.lines().count(), "{gone} is not there");
        match case.simulate(&broken.join("\n"), &module, 1) {
            Err(e) if e.contains(complaint) => {}
            other => unnoticed.push(format!("without {gone}: {:?}", other.err())),
        }
    }
    assert!(unnoticed.is_empty(), "{}", unnoticed.join("\n"));
}
