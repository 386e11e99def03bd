//! Any generated program: every pass keeps what the interpreter gives.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tilewright_codegen::passes::PASSES;
use tilewright_codegen::testgen::{Options, difference, program};

fuzz_target!(|seed: u64| {
    let p = program(seed, &Options::default());
    let expected = p.interpret().expect("generated programs are defined");
    let mut func = p.func.clone();
    for pass in PASSES {
        (pass.run)(&mut func);
        let found = p.interpret_as(&func).unwrap_or_else(|e| panic!("seed {seed}, after {}: {e}", pass.name));
        let difference = difference(&p.output_dtypes(), &expected, &found);
        assert!(difference.is_none(), "seed {seed}, after {}: {}", pass.name, difference.unwrap_or_default());
    }
});
