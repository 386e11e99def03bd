//! Random programs: interpreter against native code.

use super::*;
use crate::testgen::{Argument, Options, Program, difference, program};
use proptest::prelude::*;

fn run(p: &Program, artifact: &Artifact) -> Vec<Vec<u8>> {
    let mut memory: Vec<Vec<u8>> = Vec::new();
    let mut slots = Vec::new();
    for (arg, &v) in p.args.iter().zip(&p.func.block(p.func.body).params) {
        let number = || p.func.ty(v).dtype().expect("scalar arguments are numbers");
        slots.push(match arg {
            Argument::Input { bytes, .. } | Argument::Output { bytes, .. } => {
                let mut copy = bytes.clone();
                let address = copy.as_mut_ptr() as u64;
                memory.push(copy);
                address
            }
            Argument::Int(i) => num::encode_int(number(), *i as i128),
            Argument::Float(x) => num::encode(number(), *x),
        });
    }
    let status = Loaded::new(artifact).run(&slots, p.grid);
    assert_eq!(status, 0, "{:?}", output());
    let buffers = p.args.iter().filter(|a| matches!(a, Argument::Input { .. } | Argument::Output { .. }));
    buffers.zip(memory).filter(|(a, _)| matches!(a, Argument::Output { .. })).map(|(_, bytes)| bytes).collect()
}

fn check_seed(seed: u64, size: usize) -> Result<(), String> {
    let p = program(seed, &Options { exact: true, size, ..Options::default() });
    let expected = p.interpret().map_err(|e| e.to_string())?;
    let machines = machines();
    let (first, last) = (&machines[0], &machines[machines.len() - 1]);
    for artifact in [compile(&p.func, first), compile_plain(&p.func, last)] {
        if let Some(d) = difference(&p.output_dtypes(), &expected, &run(&p, &artifact)) {
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

/// Programs that have been wrong once, by masked vector loads on AVX2 and by minima of a NaN and a number.
#[test]
fn programs_of_old_faults_agree() {
    for (seed, size) in [(995, 39), (1785, 29), (2708, 32), (2882, 6)] {
        check_seed(seed, size).unwrap_or_else(|e| panic!("{e}"));
    }
}
