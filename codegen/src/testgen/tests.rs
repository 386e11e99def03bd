//! Properties that hold for every program: text, verifier, interpreter and passes agree.

use super::{Options, difference, program};
use crate::ir::Stage;
use crate::passes::PASSES;
use crate::text::{parse, print};
use crate::verify::verify;
use proptest::prelude::*;

/// The passes in an order that a pipeline could have, each alone after the ones before.
const PIPELINE: &[&str] = &["canonicalize", "cse", "licm", "resolve_views", "canonicalize", "cse", "carried", "dce"];

proptest! {

    #[test]
    fn programs_are_valid_and_survive_text(seed in any::<u64>()) {
        let p = program(seed, &Options::default());
        let text = print(&p.func);
        verify(&p.func, Stage::Tile).map_err(|e| TestCaseError::fail(format!("{}\n{text}", e[0])))?;
        let again = parse(&text).map_err(|e| TestCaseError::fail(format!("{e}\n{text}")))?;
        prop_assert_eq!(print(&again), text);
    }

    #[test]
    fn passes_keep_every_result(seed in any::<u64>(), exact in any::<bool>()) {
        let p = program(seed, &Options { exact, ..Options::default() });
        let fail = |what: String| TestCaseError::fail(format!("seed {seed}: {what}\n{}", print(&p.func)));
        let expected = p.interpret().map_err(|e| fail(e.to_string()))?;
        let mut func = p.func.clone();
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
    fn each_pass_alone_keeps_every_result(seed in any::<u64>(), which in 0..PASSES.len()) {
        let p = program(seed, &Options::default());
        let fail = |what: String| TestCaseError::fail(format!("seed {seed}: {what}\n{}", print(&p.func)));
        let expected = p.interpret().map_err(|e| fail(e.to_string()))?;
        let mut func = p.func.clone();
        (PASSES[which].run)(&mut func);
        verify(&func, Stage::Tile).map_err(|e| fail(format!("{}: {}", PASSES[which].name, e[0])))?;
        let found = p.interpret_as(&func).map_err(|e| fail(format!("{}: {e}", PASSES[which].name)))?;
        if let Some(d) = difference(&p.output_dtypes(), &expected, &found) {
            return Err(fail(format!("{}: {d}\n{}", PASSES[which].name, print(&func))));
        }
    }
}

/// A generator that never makes an op tests nothing about it.
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
        "advance",
        "dot",
        "reduce",
        "scan",
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
        "shl",
        "cmp_ne",
        "num_programs",
    ];
    for mnemonic in wanted {
        assert!(seen.contains(mnemonic), "400 programs without `{mnemonic}`");
    }
}

/// Outputs would otherwise agree by saying nothing.
#[test]
fn most_programs_write_something() {
    let wrote = |seed| {
        let p = program(seed, &Options::default());
        let outputs = p.interpret().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        outputs[..4].iter().any(|bytes| bytes.iter().any(|&b| b != 0))
    };
    assert!((0..100).filter(|&seed| wrote(seed)).count() > 80);
}
