//! Checks a generated program on all targets. The interpreter defines the semantics; results of the analyses, passes,
//! native code and the simulator must agree with it, and PTX must assemble.

use super::{Argument, Case, Program, difference};
use crate::ir::{Elem, Func, Stage};
use crate::llvm::JitModule;
use crate::lower::{Unsupported, nvptx};
use crate::num;
use crate::passes::{PASSES, split_tiles};
use crate::pipeline::{self, CompileError, Observer, compile_gpu, compile_host};
use crate::sim;
use crate::target::{Artifact, Code, GpuArch, HostCpu, HostHooks};
use crate::text::print;
use crate::verify::verify;
use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Assembles PTX for an architecture; returns the error message of the assembler.
pub type Assembler<'a> = &'a (dyn Fn(&str, GpuArch) -> Result<(), String> + Sync);

/// What to check.
#[derive(Clone, Copy, Default)]
pub struct Checks<'a> {
    /// Results of the analyses, for the program and for the function after the passes of each architecture.
    pub analyses: bool,
    /// Each pass alone, and the function after each pass of the pipelines; otherwise only after the last pass.
    pub each_pass: bool,
    /// CPUs to compile native code for; this machine must be able to execute it.
    pub hosts: &'a [HostCpu],
    /// GPUs to simulate.
    pub simulated: &'a [GpuArch],
    /// GPUs to generate PTX for.
    pub compiled: &'a [GpuArch],
    pub assemble: Option<Assembler<'a>>,
}

/// Number of checks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub programs: u64,
    /// Runs of native code.
    pub host: u64,
    /// Runs on the simulator.
    pub simulated: u64,
    /// PTX files that were generated, and those that were assembled.
    pub compiled: u64,
    pub assembled: u64,
    /// Compilations that were refused because they exceed the target's resources.
    pub refused: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.programs += other.programs;
        self.host += other.host;
        self.simulated += other.simulated;
        self.compiled += other.compiled;
        self.assembled += other.assembled;
        self.refused += other.refused;
    }
}

/// A failed check.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The check that failed, such as `host` or `simulated sm_80`; the same for all programs that fail in the same way.
    pub check: String,
    pub message: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.check, self.message)
    }
}

/// Checks a case. A panic is a failure.
///
/// # Errors
/// The first check that fails.
pub fn check(case: &Case, checks: &Checks) -> Result<Counts, Failure> {
    check_function(case, &case.program.func, checks)
}

/// As [`check`], for another function with the case's arguments.
///
/// # Errors
/// The first check that fails.
pub fn check_function(case: &Case, func: &Func, checks: &Checks) -> Result<Counts, Failure> {
    let gpu_func = case.gpu_func_of(func);
    let mut run = Run { case, program: &case.program, func, gpu_func, expected: Vec::new(), counts: Counts::default() };
    run.counts.programs = 1;
    run.expected = catch_panics("interpreter", || run.program.interpret_as(func).map_err(|e| e.to_string()))?;
    if checks.analyses {
        // Analyses are of tiles whose extents are powers of two.
        let mut split = func.clone();
        catch_panics("split_tiles", || {
            split_tiles::run(&mut split);
            Ok(())
        })?;
        catch_panics("analyses", || super::check_analyses(run.program, &split))?;
    }
    if checks.each_pass {
        catch_panics("passes", || run.passes())?;
    }
    for cpu in checks.hosts {
        catch_panics("host", || run.host(cpu))?;
    }
    for &arch in checks.simulated {
        catch_panics(&format!("simulated {}", arch.name()), || run.simulated(arch, checks))?;
    }
    for &arch in checks.compiled {
        catch_panics(&format!("compiled {}", arch.name()), || run.compiled(arch, checks))?;
    }
    Ok(run.counts)
}

/// Runs a check; turns a panic into its failure.
fn catch_panics<T>(check: &str, run: impl FnOnce() -> Result<T, String>) -> Result<T, Failure> {
    let failure = |message| Failure { check: check.into(), message };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(failure),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(failure(format!("panic: {text}")))
        }
    }
}

struct Run<'c> {
    case: &'c Case,
    program: &'c Program,
    func: &'c Func,
    gpu_func: Func,
    expected: Vec<Vec<u8>>,
    counts: Counts,
}

/// Collects the functions that passes leave.
#[derive(Default)]
struct AfterPasses {
    /// Whether all functions are collected, not only the last.
    each: bool,
    functions: Vec<(&'static str, Func)>,
}

impl Observer for AfterPasses {
    fn after(&mut self, pass: &'static str, _: Stage, func: &Func) {
        if !self.each {
            self.functions.clear();
        }
        if self.functions.last().is_none_or(|(_, last)| print(last) != print(func)) {
            self.functions.push((pass, func.clone()));
        }
    }
    fn llvm_ir(&mut self, _: &str) {}
}

impl Run<'_> {
    fn compare(&self, found: &[Vec<u8>]) -> Result<(), String> {
        difference(&self.program.output_dtypes(), &self.expected, found).map_or(Ok(()), Err)
    }

    fn same_in_interpreter(&self, func: &Func) -> Result<(), String> {
        self.compare(&self.program.interpret_as(func).map_err(|e| e.to_string())?)
    }

    /// Checks the passes of the table, one after the other.
    fn passes(&self) -> Result<(), String> {
        let mut func = self.func.clone();
        for pass in PASSES {
            (pass.run)(&mut func);
            let after = |e: String| format!("after {}: {e}", pass.name);
            verify(&func, Stage::Tile).map_err(|e| after(e[0].to_string()))?;
            self.same_in_interpreter(&func).map_err(after)?;
        }
        Ok(())
    }

    fn host(&mut self, cpu: &HostCpu) -> Result<(), String> {
        match compile_host(self.func, cpu, &self.case.options, &mut ()) {
            Ok(artifact) => {
                self.counts.host += 1;
                self.compare(&run_native(self.program, self.func, &artifact)?)
            }
            Err(CompileError::Unsupported(e)) => self.refused(&e),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Counts programs that exceed the resources of a target or of warp specialization. Any other refusal is a failure,
    /// because generated programs only use features that every target has.
    fn refused(&mut self, e: &Unsupported) -> Result<(), String> {
        let limits = ["shared memory", "registers per thread", "elements per thread (", "expected 4, 8 or 16"];
        if !limits.iter().any(|limit| e.message.contains(limit)) {
            return Err(format!("refused: {e}"));
        }
        self.counts.refused += 1;
        Ok(())
    }

    fn simulated(&mut self, arch: GpuArch, checks: &Checks) -> Result<(), String> {
        let mut after = AfterPasses { each: checks.each_pass, ..AfterPasses::default() };
        let options = self.case.options_for(arch);
        if let Err(e) = pipeline::check(&self.gpu_func, &options) {
            return self.refused(&e);
        }
        let gpu_func = pipeline::gpu_ir(&self.gpu_func, arch, &options, &mut after);
        // The interpreter does not support inline assembly.
        let interpreted = self.case.assembly.is_none();
        for (pass, func) in after.functions.iter().filter(|_| interpreted) {
            self.same_in_interpreter(func).map_err(|e| format!("after {pass}: {e}"))?;
        }
        if checks.analyses && interpreted {
            super::check_analyses(self.program, &gpu_func).map_err(|e| format!("analyses: {e}"))?;
        }
        match nvptx::lower(&gpu_func, arch, &options) {
            Ok(module) => {
                self.counts.simulated += 1;
                let seed = self.expected.iter().flatten().map(|&b| u64::from(b)).sum();
                self.compare(&simulate(self.program, self.func, &module, seed)?)
            }
            Err(e) => self.refused(&e),
        }
    }

    fn compiled(&mut self, arch: GpuArch, checks: &Checks) -> Result<(), String> {
        let options = self.case.options_for(arch);
        match compile_gpu(&self.gpu_func, arch, &options, &mut ()) {
            Ok(Artifact { code: Code::Ptx(ptx), .. }) => {
                self.counts.compiled += 1;
                let Some(assemble) = checks.assemble else { return Ok(()) };
                match assemble(&ptx, arch) {
                    // Operands of `wgmma` cannot be spilled: several at a time may need more than a limit that was given.
                    Err(e) if options.max_registers.is_some() && e.contains("Register allocation failed") => {
                        self.counts.refused += 1;
                        Ok(())
                    }
                    result => {
                        self.counts.assembled += 1;
                        result
                    }
                }
            }
            Ok(_) => Err("an object file instead of PTX".into()),
            Err(CompileError::Unsupported(e)) => self.refused(&e),
            Err(e) => Err(e.to_string()),
        }
    }
}

/// Bits of the arguments, by position; `buffer` gives those of the buffers.
fn argument_bits(program: &Program, func: &Func, mut buffer: impl FnMut(&[u8]) -> u64) -> Vec<u64> {
    let params = &func.block(func.body).params;
    let number = |i: usize| match func.ty(params[i]).elem() {
        Some(Elem::Num(d)) => d,
        _ => panic!("a number for a parameter that is none"),
    };
    let slot = |(i, arg): (usize, &Argument)| match arg {
        Argument::Input { bytes, .. } | Argument::Output { bytes, .. } => buffer(bytes),
        Argument::Int(n) => num::encode_int(number(i), (*n).into()),
        Argument::Float(x) => num::encode(number(i), *x),
    };
    program.args.iter().enumerate().map(slot).collect()
}

fn is_output(arg: &Argument) -> bool {
    matches!(arg, Argument::Output { .. })
}

/// Runs a lowered module on the simulator; returns the outputs. The seed determines the order of threads.
///
/// # Errors
/// Errors that the simulator reports: races, out-of-bounds accesses, deadlocks.
pub fn simulate(program: &Program, func: &Func, module: &nvptx::GpuModule, seed: u64) -> Result<Vec<Vec<u8>>, String> {
    let mut global = sim::Global::default();
    let args = argument_bits(program, func, |bytes| global.add(bytes.to_vec()));
    let [x, y, z] = program.grid;
    let launch = sim::Launch {
        llvm_ir: &module.llvm_ir,
        grid: [x * module.ctas_per_program, y, z],
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        args: &args,
        tensor_maps: &module.tensor_maps,
        seed,
    };
    sim::run(&launch, &mut global)?;
    let outputs = program.args.iter().zip(&args).filter(|(arg, _)| is_output(arg));
    Ok(outputs.map(|(_, &address)| global.bytes(address).to_vec()).collect())
}

unsafe extern "C" fn ignore_print(_: *const c_char, _: *const f64, _: u64, _: *const [i32; 3]) {}

unsafe extern "C" fn ignore_failure(_: *const c_char, _: *const [i32; 3]) {}

/// A cache line: native code expects an arena with this alignment.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

/// Runs native code for the whole grid; returns the outputs. The interpreter must have run the same program before,
/// without an out-of-bounds access.
///
/// # Errors
/// Code that does not link, a failed assertion, and a write past the arena.
pub fn run_native(program: &Program, func: &Func, artifact: &Artifact) -> Result<Vec<Vec<u8>>, String> {
    let Code::Object(object) = &artifact.code else { return Err("PTX instead of an object file".into()) };
    let module = JitModule::load(object, &artifact.manifest.entry).map_err(|e| e.to_string())?;
    // In words, so that every element is aligned.
    let mut memory: Vec<Vec<u64>> = Vec::new();
    let args = argument_bits(program, func, |bytes| {
        let mut words = vec![0u64; bytes.len().div_ceil(8) + 32];
        // Buffers start at multiples of 256 bytes, as in the interpreter: arguments promise this alignment.
        let first = (words.as_ptr() as usize).next_multiple_of(256) - words.as_ptr() as usize;
        for (i, &byte) in bytes.iter().enumerate() {
            let (word, shift) = ((first + i) / 8, 8 * (i % 8));
            words[word] |= u64::from(byte) << shift;
        }
        let address = words.as_mut_ptr() as u64 + first as u64;
        // The words do not move when the list of buffers grows.
        memory.push(words);
        address
    });
    let pointers: Vec<*const c_void> = args.iter().map(|a| std::ptr::from_ref(a).cast()).collect();
    let guard = Line([0xa5; 64]);
    let mut arena = vec![guard; artifact.manifest.arena_bytes.div_ceil(64) as usize + 1];
    let hooks = HostHooks { print: ignore_print, assert_failed: ignore_failure };
    let extents = program.grid.map(|n| n as i32);
    for z in 0..extents[2] {
        for y in 0..extents[1] {
            for x in 0..extents[0] {
                // SAFETY: arguments are those of the program, whose buffers live in `memory`; the interpreter has shown
                // that accesses stay inside them.
                let status = unsafe {
                    (module.entry())(pointers.as_ptr(), &[x, y, z], &extents, arena.as_mut_ptr().cast(), &hooks)
                };
                if status != 0 {
                    return Err(format!("program ({x}, {y}, {z}) gives status {status}"));
                }
            }
        }
    }
    if arena.last().is_some_and(|line| line.0 != guard.0) {
        return Err("the code wrote past its arena".into());
    }
    let of_output = |(arg, &address): (&Argument, &u64)| match arg {
        Argument::Output { bytes, .. } => {
            // SAFETY: the address and the length are those of a buffer in `memory`, which is alive.
            let written = unsafe { std::slice::from_raw_parts(address as *const u8, bytes.len()) };
            Some(written.to_vec())
        }
        _ => None,
    };
    let outputs = program.args.iter().zip(&args).filter_map(of_output).collect();
    drop(memory);
    Ok(outputs)
}
