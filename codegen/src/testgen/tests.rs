//! Properties of all programs: text, verifier, interpreter and passes agree.

use super::check::{Checks, Counts, check};
use super::{Options, Program, case, difference, program};
use crate::ir::{Func, Stage};
use crate::passes::{PASSES, split_tiles};
use crate::target::{GpuArch, HostCpu};
use crate::text::{parse, print};
use crate::verify::verify;
use proptest::prelude::*;

/// A possible order of the passes of a pipeline; each runs on the result of the previous ones.
const PIPELINE: &[&str] =
    &["split_tiles", "canonicalize", "cse", "licm", "resolve_views", "canonicalize", "cse", "fold_carried", "dce"];

proptest! {

    #[test]
    fn programs_verify_and_round_trip_through_text(seed in any::<u64>()) {
        let p = program(seed, &Options::default());
        let text = print(&p.func);
        verify(&p.func, Stage::Tile).map_err(|e| TestCaseError::fail(format!("{}\n{text}", e[0])))?;
        let again = parse(&text).map_err(|e| TestCaseError::fail(format!("{e}\n{text}")))?;
        prop_assert_eq!(print(&again), text);
    }

    #[test]
    fn pipeline_preserves_results(seed in any::<u64>(), exact in any::<bool>()) {
        let p = program(seed, &Options { exact, ..Options::default() });
        let fail = |what: String| TestCaseError::fail(format!("seed {seed}: {what}\n{}", print(&p.func)));
        let mut func = reference(&p, exact);
        let expected = p.interpret_as(&func).map_err(|e| fail(e.to_string()))?;
        for name in PIPELINE {
            let pass = PASSES.iter().find(|pass| pass.name == *name).ok_or_else(|| fail(format!("no pass {name}")))?;
            (pass.run)(&mut func);
            let after = |what: String| fail(format!("after {name}: {what}\n{}", print(&func)));
            verify(&func, Stage::Tile).map_err(|e| after(e[0].to_string()))?;
            let found = p.interpret_as(&func).map_err(|e| after(e.to_string()))?;
            if let Some(d) = difference(&p.output_dtypes(), &expected, &found) {
                return Err(after(d));
            }
        }
        let views_left = func.walk().iter().any(|&id| func.op(id).op == crate::ir::Op::Advance);
        prop_assert!(!views_left, "resolve_views leaves an advance\n{}", print(&func));
    }

    #[test]
    fn every_pass_preserves_results(seed in any::<u64>(), which in 0..PASSES.len(), exact in any::<bool>()) {
        let p = program(seed, &Options { exact, ..Options::default() });
        let fail = |what: String| TestCaseError::fail(format!("seed {seed}: {what}\n{}", print(&p.func)));
        let mut func = reference(&p, exact);
        let expected = p.interpret_as(&func).map_err(|e| fail(e.to_string()))?;
        split_tiles::run(&mut func);
        (PASSES[which].run)(&mut func);
        verify(&func, Stage::Tile).map_err(|e| fail(format!("{}: {}", PASSES[which].name, e[0])))?;
        let found = p.interpret_as(&func).map_err(|e| fail(format!("{}: {e}", PASSES[which].name)))?;
        if let Some(d) = difference(&p.output_dtypes(), &expected, &found) {
            return Err(fail(format!("{}: {d}\n{}", PASSES[which].name, print(&func))));
        }
    }
}

/// The function whose results passes preserve bit by bit. `split_tiles` reduces part by part, which changes the rounding of sums:
/// programs that are not exact start from its result.
fn reference(p: &Program, exact: bool) -> Func {
    let mut func = p.func.clone();
    if !exact {
        split_tiles::run(&mut func);
    }
    func
}

/// The generator must cover every op.
#[test]
fn programs_have_every_kind_of_op() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..400 {
        let p = program(seed, &Options::default());
        seen.extend(p.func.walk().into_iter().map(|id| p.func.op(id).op.mnemonic()));
    }
    let wanted = [
        "load",
        "load_view",
        "store",
        "store_view",
        "atomic_rmw",
        "atomic_cas",
        "device_print",
        "device_assert",
        "assume",
        "erf",
        "advance",
        "dot",
        "reduce",
        "scan",
        "gather",
        "for",
        "if",
        "while",
        "select",
        "fma",
        "cast",
        "bitcast",
        "trans",
        "reshape",
        "join",
        "split",
        "broadcast",
        "expand_dims",
        "splat",
        "exp2",
        "mulhi",
        "rescale",
        "shl",
        "cmp_ne",
        "num_programs",
    ];
    for mnemonic in wanted {
        assert!(seen.contains(mnemonic), "400 programs without `{mnemonic}`");
    }
}

/// Checks that outputs are not empty: empty outputs would always agree.
#[test]
fn most_programs_write_something() {
    let wrote = |seed| {
        let p = program(seed, &Options::default());
        let outputs = p.interpret().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        outputs[..4].iter().any(|bytes| bytes.iter().any(|&b| b != 0))
    };
    assert!((0..100).filter(|&seed| wrote(seed)).count() > 80);
}

/// Operand types of the generated dots: all rows of the instruction table, and mixed pairs.
#[test]
fn cases_multiply_every_pair_of_types() {
    use crate::ir::{DType, Op};
    let mut seen = std::collections::BTreeSet::new();
    for seed in (1..600).step_by(2) {
        let func = case(seed).program.func;
        let dots = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::Dot { .. }));
        seen.extend(dots.map(|id| [0, 1].map(|i| func.ty(func.op(id).operands[i]).dtype().map(DType::name))));
    }
    let rows = crate::mma::TABLE.iter().map(|row| row.operands);
    let mixed = [[DType::I8, DType::U8], [DType::F8E5M2, DType::F8E4M3]];
    for pair in rows.chain(mixed) {
        assert!(seen.contains(&pair.map(|d| Some(d.name()))), "no dot of {pair:?} in {seen:?}");
    }
}

/// Launches meet the assumptions of some cases.
#[test]
fn cases_have_assumptions() {
    let assumes = |case: &super::Case| {
        print(&super::facts::as_launched(&case.program, &case.program.func)) != print(&case.program.func)
    };
    let found = (1..400).step_by(2).map(case).filter(assumes).count();
    assert!(found > 3, "{found}");
}

/// Number of cases of the test below.
const CASES: u64 = 96;

/// A sample of what `tile-fuzz` checks: results of the analyses, native code and two simulated GPUs against the
/// interpreter.
#[test]
fn cases_agree_on_every_target() {
    let hosts = [HostCpu::native()];
    let simulated = [GpuArch::Sm80, GpuArch::Sm90a];
    let checks = Checks { analyses: true, hosts: &hosts, simulated: &simulated, ..Checks::default() };
    let seeds = std::sync::Mutex::new(0..CASES);
    let results = std::sync::Mutex::new((Counts::default(), Vec::new()));
    let work = || {
        loop {
            let Some(seed) = seeds.lock().unwrap().next() else { return };
            // `each_pass` is slow, so it is on for some of the seeds only.
            let result = check(&case(seed), &Checks { each_pass: seed % 8 < 2, ..checks });
            let mut results = results.lock().unwrap();
            match result {
                Ok(counts) => results.0 += counts,
                Err(failure) => results.1.push(format!("seed {seed}: {failure}")),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let (counts, failures) = results.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {CASES} failed\n{}", failures.len(), failures.join("\n"));
    assert!(counts.simulated + counts.refused >= 2 * CASES && counts.refused < CASES / 4, "{counts:?}");
}

/// The generated dots cover every MMA instruction.
#[test]
fn cases_cover_every_matrix_instruction() {
    use crate::ir::{Func, Op, OpId, Type};
    use crate::mma::{Family, Instruction, TABLE};
    let row = |func: &Func, id: OpId| {
        let data = func.op(id);
        let family = match data.op {
            Op::Wgmma { .. } => Family::Wgmma,
            Op::MmaSync { .. } => Family::MmaSync,
            _ => return None,
        };
        Some(Instruction::of(func, data, family).unwrap())
    };
    let mut rows = std::collections::BTreeSet::new();
    let mut seen = std::collections::BTreeSet::new();
    for seed in (1..2400).step_by(2) {
        let case = case(seed);
        if crate::pipeline::check(&case.program.func, &case.options).is_err() {
            continue;
        }
        // A CTA has a part of a tile, for which fewer instructions are large enough.
        let case = if seed % 4 == 1 { case } else { case.of_one_cta() };
        for arch in [GpuArch::Sm80, GpuArch::Sm89, GpuArch::Sm90a] {
            let func = crate::pipeline::gpu_ir(&case.gpu_func(), arch, &case.options_for(arch), &mut ());
            for id in func.walk() {
                let data = func.op(id);
                rows.extend(row(&func, id).map(|row| row.mnemonic(row.n[0])));
                if matches!(data.op, Op::Wgmma { .. } | Op::MmaSync { .. } | Op::FmaDot) {
                    let place = match func.ty(data.operands[0]) {
                        Type::Shared { .. } => "shared memory",
                        _ => "registers",
                    };
                    seen.insert(format!("{} from {place}", data.op.mnemonic()));
                } else {
                    seen.insert(data.op.mnemonic().to_string());
                }
            }
        }
    }
    let wanted = [
        "wgmma from shared memory",
        "wgmma from registers",
        "mma_sync from shared memory",
        "mma_sync from registers",
        "fma_dot from shared memory",
        "async_copy",
        "async_load",
        "tma_load",
        "cta_rank",
        "cluster_barrier",
        "warp_specialize",
        "while",
        "atomic_view",
        "atomic_rmw",
        "scan",
        "reduce",
        "local_trans",
        "load",
        "pingpong_wait",
        "hint",
        "inline_asm",
    ];
    for what in wanted {
        assert!(seen.contains(what), "no {what} in {seen:?}");
    }
    for instruction in TABLE {
        let mnemonic = instruction.mnemonic(instruction.n[0]);
        assert!(rows.contains(&mnemonic), "no {mnemonic} in {rows:?}");
    }
}
