//! The lowering against the interpreter, without a GPU.

use super::{Global, Launch, run};
use crate::ir::{Elem, Func};
use crate::lower::nvptx::lower;
use crate::pipeline::gpu_ir;
use crate::target::{CompileOptions, GpuArch};
use crate::testgen::{self, Argument, Options, Program};

/// Outputs of a program on the simulated GPU.
fn simulate(
    program: &Program,
    arch: GpuArch,
    options: &CompileOptions,
    seed: u64,
) -> Result<Option<Vec<Vec<u8>>>, String> {
    let laid = gpu_ir(&program.func, arch, options, &mut ());
    let Ok(module) = lower(&laid, arch, options) else { return Ok(None) };
    let mut global = Global::default();
    let mut outputs = Vec::new();
    let mut args = Vec::new();
    for (i, arg) in program.args.iter().enumerate() {
        args.push(match arg {
            Argument::Input { bytes, .. } => global.add(bytes.clone()),
            Argument::Output { bytes, .. } => {
                let address = global.add(bytes.clone());
                outputs.push(address);
                address
            }
            Argument::Int(n) => *n as u64,
            Argument::Float(x) => float_bits(&program.func, i, *x),
        });
    }
    let launch = Launch {
        llvm_ir: &module.llvm_ir,
        grid: program.grid,
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &args,
        seed,
    };
    run(&launch, &mut global)?;
    Ok(Some(outputs.iter().map(|&a| global.bytes(a).to_vec()).collect()))
}

fn float_bits(func: &Func, index: usize, x: f64) -> u64 {
    let v = func.block(func.body).params[index];
    match func.ty(v).elem() {
        Some(Elem::Num(d)) => crate::num::encode(d, x),
        _ => panic!("a number for a pointer"),
    }
}

#[test]
fn random_programs_give_what_the_interpreter_gives() {
    let mut failures = Vec::new();
    let mut ran = 0;
    for seed in 0..60 {
        let program = testgen::program(seed, &Options { exact: true, ..Options::default() });
        let options = CompileOptions {
            num_warps: 1 << (seed % 4),
            num_stages: 1 + (seed % 3) as u32,
            ..CompileOptions::default()
        };
        let expected = program.interpret().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
            match simulate(&program, arch, &options, seed) {
                Ok(Some(found)) => {
                    ran += 1;
                    if let Some(d) = testgen::difference(&program.output_dtypes(), &expected, &found) {
                        failures.push(format!("seed {seed}, {}: {d}", arch.name()));
                    }
                }
                Ok(None) => {}
                Err(e) => failures.push(format!("seed {seed}, {}: {e}", arch.name())),
            }
        }
    }
    assert!(failures.is_empty(), "{} of {ran} failed\n{}", failures.len(), failures.join("\n"));
    assert!(ran > 60, "only {ran} programs ran");
}
