//! Programs in Tile IR on a GPU, whose results must be those of the interpreter: random programs, bit for bit; and the programs
//! of the tests of native code.
//!
//! TILEWRIGHT_TEST_SEEDS=A..B chooses the random programs. The driver assembles PTX on one thread per process, about ten
//! programs per second, so that several processes with parts of a range are faster.

use rayon::prelude::*;
use tilewright::{Buffer, Device, LaunchArg};
use tilewright_codegen::ir::Elem;
use tilewright_codegen::pipeline::{CompileError, compile_gpu};
use tilewright_codegen::target::{Artifact, CompileOptions, GpuArch};
use tilewright_codegen::testgen::{self, Argument, Case, Program, saved::Saved};

/// The range of seeds, without its end, where TILEWRIGHT_TEST_SEEDS gives none.
const SEEDS: &str = "0..2000";
/// Programs that are compiled in parallel, on all cores, before they run one after the other.
const BATCH: u64 = 128;
const ARCHS: [GpuArch; 2] = [GpuArch::Sm80, GpuArch::Sm90a];

/// An integer argument of the width of its parameter.
fn scalar(program: &Program, index: usize, value: i64) -> LaunchArg {
    let func = &program.func;
    match func.ty(func.block(func.body).params[index]).elem() {
        Some(Elem::Num(d)) => match d.bits() {
            8 => LaunchArg::I8(value as i8),
            16 => LaunchArg::I16(value as i16),
            32 => LaunchArg::I32(value as i32),
            _ => LaunchArg::I64(value),
        },
        _ => panic!("a number for a pointer parameter"),
    }
}

/// A case with its code for both architectures, and its expected output.
struct Compiled {
    seed: u64,
    case: Case,
    expected: Result<Vec<Vec<u8>>, String>,
    code: Vec<(GpuArch, Result<Artifact, CompileError>)>,
}

/// Compiles a case, for a driver that supports PTX up to `ptx_version`.
fn compile(seed: u64, ptx_version: u32) -> Compiled {
    let case = testgen::case(seed);
    let options = |arch| {
        let options: CompileOptions = case.options_for(arch);
        CompileOptions { ptx_version: options.ptx_version.min(ptx_version), ..options }
    };
    let code = ARCHS.map(|arch| (arch, compile_gpu(&case.gpu_func(), arch, &options(arch), &mut ()))).into();
    let expected = case.program.interpret().map_err(|e| e.to_string());
    Compiled { seed, case, expected, code }
}

fn run(device: &Device, program: &Program, artifact: &Artifact) -> Result<Vec<Vec<u8>>, String> {
    let kernel = device.load(artifact).map_err(|e| e.to_string())?;
    let mut buffers: Vec<Option<Buffer<u8>>> = Vec::new();
    let mut args = Vec::new();
    for (i, arg) in program.args.iter().enumerate() {
        let buffer = match arg {
            Argument::Input { bytes, .. } | Argument::Output { bytes, .. } => {
                Some(Buffer::from_slice(device, bytes).map_err(|e| e.to_string())?)
            }
            Argument::Int(_) | Argument::Float(_) => None,
        };
        args.push(match (arg, &buffer) {
            (_, Some(buffer)) => LaunchArg::from(buffer),
            (Argument::Int(n), None) => scalar(program, i, *n),
            (Argument::Float(x), None) => LaunchArg::F32(*x as f32),
            (Argument::Input { .. } | Argument::Output { .. }, None) => panic!("a buffer was made for it"),
        });
        buffers.push(buffer);
    }
    // SAFETY: the buffers live until after the synchronization below, and the generator keeps accesses inside them.
    unsafe { kernel.launch(program.grid, &args) }.map_err(|e| e.to_string())?;
    device.synchronize().map_err(|e| e.to_string())?;
    let outputs = program.args.iter().zip(&buffers).filter(|(arg, _)| matches!(arg, Argument::Output { .. }));
    outputs.filter_map(|(_, b)| b.as_ref()).map(|b| b.to_vec().map_err(|e| e.to_string())).collect()
}

#[test]
fn random_programs_agree_with_the_interpreter() {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(e) => {
            println!("skipped: no CUDA device ({e})");
            return;
        }
    };
    let ptx_version = device.limit_ptx_version(&CompileOptions::default()).ptx_version;
    let (mut failures, mut ran, mut refused) = (Vec::new(), 0, 0);
    let range = std::env::var("TILEWRIGHT_TEST_SEEDS").unwrap_or_else(|_| SEEDS.into());
    let (start, end) = range.split_once("..").expect("TILEWRIGHT_TEST_SEEDS=A..B");
    let (start, end): (u64, u64) = (start.parse().unwrap(), end.parse().unwrap());
    for first in (start..end).step_by(BATCH as usize) {
        let seeds: Vec<u64> = (first..(first + BATCH).min(end)).collect();
        let batch: Vec<Compiled> = seeds.into_par_iter().map(|seed| compile(seed, ptx_version)).collect();
        for Compiled { seed, case, expected, code } in batch {
            for (arch, artifact) in code {
                let result = match (&expected, artifact) {
                    (_, Err(CompileError::Unsupported(_))) => {
                        refused += 1;
                        continue;
                    }
                    (Err(e), _) => Err(e.clone()),
                    (_, Err(e)) => Err(e.to_string()),
                    (Ok(expected), Ok(artifact)) => run(&device, &case.program, &artifact).and_then(|found| {
                        testgen::difference(&case.program.output_dtypes(), expected, &found).map_or(Ok(()), Err)
                    }),
                };
                match result {
                    Ok(()) => ran += 1,
                    Err(e) => {
                        let failure = format!("seed {seed}, {}: {e}", arch.name());
                        println!("{failure}"); // at once, for a run that is interrupted
                        failures.push(failure);
                    }
                }
            }
        }
        // Progress, for a run that is interrupted.
        println!("programs {first} and following: {ran} ran so far, {} failed, {refused} refused", failures.len());
    }
    println!("{ran} programs ran, {} failed, {refused} refused", failures.len());
    assert!(ran > 0 && failures.is_empty(), "{}", failures.join("\n"));
}

/// The programs in the folder TILEWRIGHT_TEST_CASES: those of the tests of native code (`codegen/src/lower/host/tests`), which write them
/// there if it is set.
#[test]
fn programs_of_the_tests_of_native_code_agree() {
    let (Ok(device), Some(folder)) = (Device::cuda(0), std::env::var_os("TILEWRIGHT_TEST_CASES")) else {
        println!("skipped: no CUDA device, or TILEWRIGHT_TEST_CASES is not set");
        return;
    };
    let options = device.limit_ptx_version(&CompileOptions::default());
    let programs = Saved::read_all(folder.as_ref()).unwrap();
    let compiled: Vec<_> =
        programs.par_iter().map(|(_, saved)| compile_gpu(&saved.program.func, ARCHS[1], &options, &mut ())).collect();
    let mut failures = Vec::new();
    for ((name, saved), artifact) in programs.iter().zip(compiled) {
        let result = artifact.map_err(|e| e.to_string()).and_then(|artifact| run(&device, &saved.program, &artifact));
        if let Some(difference) = result.map_or_else(Some, |found| saved.difference(&found)) {
            failures.push(format!("{name}, `{}`: {difference}", saved.program.func.name));
        }
    }
    println!("{} programs ran, {} failed", programs.len(), failures.len());
    assert!(!programs.is_empty(), "{} has no programs", folder.display());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
