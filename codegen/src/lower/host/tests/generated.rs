//! Random programs: compares native code with the interpreter.

use super::*;
use crate::testgen::check::run_native;
use crate::testgen::{Options, difference, program};
use proptest::prelude::*;

fn check_seed(seed: u64, size: usize) -> Result<(), String> {
    let p = program(seed, &Options { exact: true, size, ..Options::default() });
    let expected = p.interpret().map_err(|e| e.to_string())?;
    let machines = machines();
    let (first, last) = (&machines[0], &machines[machines.len() - 1]);
    for artifact in [compile(&p.func, first), compile_plain(&p.func, last)] {
        if let Some(d) = difference(&p.output_dtypes(), &expected, &run_native(&p, &p.func, &artifact)?) {
            return Err(format!("seed {seed}, size {size}: {d}\n{}", crate::text::print(&p.func)));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 0, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_agree_to_the_last_bit(seed in any::<u64>(), size in 4..48usize) {
        check_seed(seed, size).map_err(TestCaseError::fail)?;
    }
}

/// Regression tests: programs that were miscompiled once, by masked vector loads on AVX2 and by minima of a NaN and a
/// number.
#[test]
fn regression_programs_agree() {
    for (seed, size) in [(995, 39), (1785, 29), (2708, 32), (2882, 6)] {
        check_seed(seed, size).unwrap_or_else(|e| panic!("{e}"));
    }
}
