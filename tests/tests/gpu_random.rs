//! Random programs on a GPU: each must give what the interpreter gives, to the bit.

use tilewright::{Buffer, Device, LaunchArg};
use tilewright_codegen::ir::{Elem, Value};
use tilewright_codegen::pipeline::{CompileError, compile_gpu};
use tilewright_codegen::target::{Code, CompileOptions, GpuArch};
use tilewright_codegen::testgen::{self, Argument, Options, Program};

const PROGRAMS: u64 = 300;

/// An integer argument in the width of its parameter.
fn scalar(program: &Program, index: usize, value: i64) -> LaunchArg {
    let func = &program.func;
    let v: Value = func.block(func.body).params[index];
    match func.ty(v).elem() {
        Some(Elem::Num(d)) => match d.bits() {
            8 => LaunchArg::I8(value as i8),
            16 => LaunchArg::I16(value as i16),
            32 => LaunchArg::I32(value as i32),
            _ => LaunchArg::I64(value),
        },
        _ => panic!("a number for a pointer parameter"),
    }
}

fn run(device: &Device, program: &Program, arch: GpuArch, options: &CompileOptions) -> Result<Option<String>, String> {
    let artifact = match compile_gpu(&program.func, arch, options, &mut ()) {
        Ok(artifact) => artifact,
        Err(CompileError::Unsupported(_)) => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    assert!(matches!(artifact.code, Code::Ptx(_)));
    let kernel = device.load(&artifact).map_err(|e| e.to_string())?;
    let mut buffers: Vec<Option<Buffer<u8>>> = Vec::new();
    let mut args = Vec::new();
    for (i, arg) in program.args.iter().enumerate() {
        match arg {
            Argument::Input { bytes, .. } | Argument::Output { bytes, .. } => {
                let buffer = Buffer::from_slice(device, bytes).map_err(|e| e.to_string())?;
                args.push(LaunchArg::from(&buffer));
                buffers.push(Some(buffer));
            }
            Argument::Int(n) => {
                args.push(scalar(program, i, *n));
                buffers.push(None);
            }
            Argument::Float(x) => {
                args.push(LaunchArg::F32(*x as f32));
                buffers.push(None);
            }
        }
    }
    // SAFETY: the buffers live until after the synchronisation below, and the generator keeps accesses inside them.
    unsafe { kernel.launch(program.grid, &args) }.map_err(|e| e.to_string())?;
    device.synchronize().map_err(|e| e.to_string())?;
    let mut found = Vec::new();
    for (arg, buffer) in program.args.iter().zip(&buffers) {
        if let (Argument::Output { .. }, Some(buffer)) = (arg, buffer) {
            found.push(buffer.to_vec().map_err(|e| e.to_string())?);
        }
    }
    let expected = program.interpret().map_err(|e| e.to_string())?;
    match testgen::difference(&program.output_dtypes(), &expected, &found) {
        Some(difference) => Err(difference),
        None => Ok(Some(String::new())),
    }
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
    let mut failures = Vec::new();
    let mut ran = 0;
    for seed in 0..PROGRAMS {
        let program = testgen::program(seed, &Options { exact: true, ..Options::default() });
        let options = device.fit_options(&CompileOptions {
            num_warps: 1 << (seed % 4),
            num_stages: 1 + (seed % 3) as u32,
            ..CompileOptions::default()
        });
        for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
            match run(&device, &program, arch, &options) {
                Ok(Some(_)) => ran += 1,
                Ok(None) => {}
                Err(e) => failures.push(format!("seed {seed}, {}: {e}", arch.name())),
            }
        }
    }
    println!("{ran} programs ran, {} failed", failures.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
