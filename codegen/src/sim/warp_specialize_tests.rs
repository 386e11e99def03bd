//! Warp specialization on the simulator: attention whose loads are executed by producer warps.

use super::tests::{Attention, relative_error};
use crate::target::{CompileOptions, GpuArch, Schedule};

/// Attention with a length that the host passes as i32, and a single head: a tensor map can describe its tensors.
fn attention64_with_tma() -> Attention {
    with_tma(include_str!("programs/attention64.tile"), 112)
}

fn with_tma(text: &str, queries: usize) -> Attention {
    let text = text.replace("%n: i64 {divisible_by = 16}", "%length: i32 {divisible_by = 16}");
    let text = text.replace("%ho = mul %head64, %nd : i64", "%ho = constant {value = 0} : i64");
    let (head, body) = text.split_once(") {\n").expect("a kernel");
    Attention::new(&format!("{head}) {{\n  %n = cast %length : i64\n{body}"), queries, 64, 64)
}

/// Options for warp specialization with this many consumer warps.
fn warp_specialized(num_warps: u32, pingpong: bool) -> CompileOptions {
    let schedule = Schedule { warp_specialize: Some(true), pingpong: Some(pingpong), ..Schedule::default() };
    CompileOptions { num_warps, num_stages: 2, schedule, ..CompileOptions::default() }
}

#[test]
fn warp_specialized_attention_matches_interpreter() {
    let case = attention64_with_tma();
    for (seed, (num_warps, pingpong_on)) in [(4, false), (8, false), (8, true)].into_iter().enumerate() {
        let module = case.llvm_ir(GpuArch::Sm90a, &warp_specialized(num_warps, pingpong_on));
        assert_eq!((module.threads, module.tensor_maps.len()), (32 * num_warps + 128, 3));
        assert_eq!(module.llvm_ir.contains("bar.arrive"), pingpong_on);
        let found = case.simulate(&module.llvm_ir, &module, seed as u64).unwrap_or_else(|e| panic!("case {seed}: {e}"));
        let error = relative_error(&case.interpret(), &found);
        assert!(error < 4e-3, "case {seed}: relative error {error}");
    }
}

/// Ping-pong scheduling must not apply if the consumer warpgroups synchronize on a shared buffer: it would be a
/// deadlock.
#[test]
fn no_pingpong_around_mmas_that_read_values_of_all_warpgroups() {
    let text = include_str!("programs/attention64.tile");
    let doubled = ["a", "b"].into_iter().fold(text.to_string(), |text, i| {
        let trans = format!("%{i}ktt = trans %{i}kt {{");
        assert!(text.contains(&trans));
        let sum = format!("%{i}kd = add %{i}kt, %{i}kt : tensor<64x64xbf16>\n    %{i}ktt = trans %{i}kd {{");
        text.replace(&trans, &sum)
    });
    // Enough queries that loops run more than once.
    let case = with_tma(&doubled, 240);
    let module = case.llvm_ir(GpuArch::Sm90a, &warp_specialized(8, true));
    assert_eq!(module.threads, 384);
    let found = case.simulate(&module.llvm_ir, &module, 1).unwrap_or_else(|e| panic!("{e}"));
    let error = relative_error(&case.interpret(), &found);
    assert!(error < 4e-3, "relative error {error}");
}

#[test]
fn missing_synchronization_between_partitions_is_reported() {
    let case = attention64_with_tma();
    // One buffer for several tiles, so that it must be released.
    let options = CompileOptions { num_stages: 1, ..warp_specialized(8, true) };
    let module = case.llvm_ir(GpuArch::Sm90a, &options);
    let mut undetected = Vec::new();
    for (removed, expected_error) in [
        ("mbarrier.try_wait", "has not waited for"),
        ("mbarrier.arrive.shared", "forever"),
        ("mbarrier.arrive.expect_tx", "expect_tx"),
        ("cp.async.bulk.tensor", "bytes"),
        ("fence.mbarrier_init", "without a fence"),
        ("bar.sync 0;", "no mbarrier is initialized"),
        ("bar.arrive", "forever"),
    ] {
        let broken: Vec<&str> = module.llvm_ir.lines().filter(|l| !l.contains(removed)).collect();
        assert!(broken.len() < module.llvm_ir.lines().count(), "no line contains `{removed}`");
        match case.simulate(&broken.join("\n"), &module, 1) {
            Err(e) if e.contains(expected_error) => {}
            other => undetected.push(format!("without {removed}: {:?}", other.err())),
        }
    }
    assert!(undetected.is_empty(), "{}", undetected.join("\n"));
}
