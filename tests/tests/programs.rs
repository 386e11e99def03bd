//! Regression tests: reduced programs that once gave wrong results on a GPU. Each file of `tests/programs` runs in the
//! interpreter and, with its options, on a simulated sm_90a, which reports races, missing fences and waits that never
//! end. Memory must be the same afterwards, byte for byte.
//!
//! ```text
//! // What the file tests.
//! // options: num_warps=8 num_stages=2 warp_specialize=true
//! // args: rows=64
//! kernel @name(…) { … }
//! ```
//!
//! `tile-fuzz --reduce` prints such programs. Pointers get buffers of 256 KiB, filled with random multiples of 1/4 from
//! −1 to 1, so that dots of 16-bit and 32-bit floats are exact.

use std::path::Path;
use tilewright_codegen::interp::{self, ArgValue, Memory};
use tilewright_codegen::ir::{DType, Elem, Func, Type};
use tilewright_codegen::sim::{self, Global, Launch};
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_codegen::{lower, num, pipeline, text};
use tilewright_tests::numerics::Random;

const BYTES: usize = 256 << 10;

/// The settings after `// name:`, each `key=value`.
fn settings<'a>(file: &'a str, name: &str) -> Vec<(&'a str, &'a str)> {
    let lines = file.lines().filter_map(|line| line.strip_prefix("// ")?.strip_prefix(name)?.strip_prefix(':'));
    lines.flat_map(str::split_whitespace).map(|word| word.split_once('=').expect("key=value")).collect()
}

fn options(file: &str) -> CompileOptions {
    let mut options = CompileOptions::default();
    for (key, value) in settings(file, "options") {
        match key {
            "num_warps" => options.num_warps = value.parse().expect("a number"),
            "num_stages" => options.num_stages = value.parse().expect("a number"),
            _ => {
                *options.schedule.choice(key).expect("a choice of the schedule") = Some(value.parse().expect("a bool"))
            }
        }
    }
    options
}

/// Random elements of a type, as many as fill a buffer.
fn elements(dtype: DType, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BYTES);
    while bytes.len() < BYTES {
        let bits = num::encode(dtype, (random.number() * 4.0).round() / 4.0);
        bytes.extend_from_slice(&bits.to_le_bytes()[..dtype.bytes()]);
    }
    bytes
}

/// The memory after the interpreter, and after the simulated GPU.
fn run(func: &Func, file: &str) -> Result<[Vec<Vec<u8>>; 2], String> {
    let numbers = settings(file, "args");
    let number = |name: &str| {
        let found = numbers.iter().find(|(key, _)| *key == name);
        found.map_or(0, |(_, value)| value.parse::<i64>().expect("a number"))
    };
    let (mut memory, mut global, mut random) = (Memory::new(), Global::default(), Random::new(1));
    let (mut buffers, mut values, mut bits) = (Vec::new(), Vec::new(), Vec::new());
    for (&param, arg) in func.block(func.body).params.iter().zip(&func.args) {
        match *func.ty(param) {
            Type::Scalar(Elem::Ptr(dtype)) => {
                let bytes = elements(dtype, &mut random);
                let (id, address) = (memory.add(bytes.clone()), global.add(bytes));
                values.push(ArgValue::Address(memory.address(id)));
                bits.push(address);
                buffers.push((id, address));
            }
            _ => {
                let n = arg.equal_to.unwrap_or(number(&arg.name));
                values.push(ArgValue::Int(n));
                bits.push(n as u64);
            }
        }
    }
    interp::run(func, &values, [1, 1, 1], &mut memory).map_err(|e| format!("interpreter: {e}"))?;
    let options = options(file);
    let gpu_func = pipeline::gpu_ir(func, GpuArch::Sm90a, &options, &mut ());
    let module = lower::nvptx::lower(&gpu_func, GpuArch::Sm90a, &options).map_err(|e| e.to_string())?;
    let launch = Launch {
        llvm_ir: &module.llvm_ir,
        grid: [1, 1, 1],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &bits,
        tensor_maps: &module.tensor_maps,
        seed: 1,
    };
    sim::run(&launch, &mut global).map_err(|e| format!("simulated GPU: {e}"))?;
    let interpreted = buffers.iter().map(|&(id, _)| memory.bytes(id).to_vec()).collect();
    Ok([interpreted, buffers.iter().map(|&(_, address)| global.bytes(address).to_vec()).collect()])
}

#[test]
fn simulated_gpu_agrees_with_the_interpreter() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
    let mut failures = Vec::new();
    let mut files = 0;
    for entry in std::fs::read_dir(&folder).expect("the folder of programs") {
        let path = entry.expect("a readable folder").path();
        let file = std::fs::read_to_string(&path).expect("a text");
        let func = text::parse(&file).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        match run(&func, &file) {
            Ok([interpreted, simulated]) if interpreted == simulated => {}
            Ok(_) => failures.push(format!("{}: results differ", path.display())),
            Err(e) => failures.push(format!("{}: {e}", path.display())),
        }
        files += 1;
    }
    assert!(files > 0, "no files in {}", folder.display());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
