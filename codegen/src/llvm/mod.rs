//! LLVM: compiles the textual IR of the lowerings to PTX, native objects and executable code.
//!
//! The lowerings emit LLVM IR as *text*. This module parses it, verifies it, optimizes it for a machine and emits code.
//! It knows nothing about tiles.
//!
//! - [`ptx`], [`object`], [`asm`] and [`optimized_ir`] are pure functions of their arguments, and may run on any number
//!   of threads concurrently. Each call has its own LLVM context and thread, so that a fatal error of LLVM becomes an
//!   [`LlvmError`] instead of ending the process.
//! - [`JitModule`] links an object into this process and returns its entry point.
//! - [`HostCpu::native`](crate::target::HostCpu::native) asks LLVM which CPU this is.
//!
//! An error here is always a bug of the compiler, never of the kernel's author; the message of [`LlvmError`] says so.

mod builtins;
mod emit;
mod host_cpu;
mod jit;
mod module;
#[cfg(test)]
mod tests;

pub use emit::{asm, object, optimized_ir, ptx};
pub use jit::{JitError, JitModule};

use std::fmt;
use std::time::Duration;

use crate::target::{GpuArch, HostCpu};

/// The machine that LLVM generates code for.
#[derive(Clone, Copy, Debug)]
pub enum Machine<'a> {
    /// An NVIDIA GPU; `ptx_version` is major × 10 + minor, as in [`ptx`].
    Gpu { arch: GpuArch, ptx_version: u32 },
    /// A CPU.
    Host(&'a HostCpu),
}

/// Options of LLVM's middle end. The pipelines use [`Opt::gpu`] and [`Opt::host`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opt {
    /// 0 to 3, as in `default<O3>`. Code generation uses the same level.
    pub level: u8,
    /// Turn scalar loops into vector loops.
    pub vectorize_loops: bool,
    /// Pack independent scalar operations into vector operations.
    pub vectorize_slp: bool,
    /// Unroll loops whose bodies are small.
    pub unroll_loops: bool,
}

impl Opt {
    /// O3 for a GPU. Loops stay scalar, since threads are the vector lanes.
    pub fn gpu() -> Opt {
        Opt { level: 3, vectorize_loops: false, vectorize_slp: true, unroll_loops: true }
    }

    /// O3 for a CPU, with both vectorizers.
    pub fn host() -> Opt {
        Opt { level: 3, vectorize_loops: true, vectorize_slp: true, unroll_loops: true }
    }
}

/// Time spent in each phase of one emission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Reading and verifying the text.
    pub parse: Duration,
    /// Running the optimization pipeline.
    pub opt: Duration,
    /// Instruction selection, register allocation and printing.
    pub codegen: Duration,
}

/// The result of an emission: the code, and the time of each phase.
#[derive(Clone, Debug)]
pub struct Emitted<T> {
    pub code: T,
    pub timings: Timings,
}

/// The phase of an emission in which LLVM failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Parse,
    Verify,
    Target,
    Optimize,
    Codegen,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Parse => "reading",
            Phase::Verify => "verifying",
            Phase::Target => "creating the target machine for",
            Phase::Optimize => "optimizing",
            Phase::Codegen => "generating code for",
        })
    }
}

/// LLVM rejected IR that a lowering emitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.render())]
pub struct LlvmError {
    pub phase: Phase,
    /// LLVM's message.
    pub message: String,
    /// The line of the IR text, from 1, if LLVM names one or quotes an instruction that is found in the text.
    pub line: Option<usize>,
    /// The text of that line.
    pub excerpt: Option<String>,
}

impl LlvmError {
    fn render(&self) -> String {
        let mut text = format!(
            "internal compiler error: LLVM failed while {} generated code: {}",
            self.phase,
            self.message.trim_end()
        );
        if let (Some(line), Some(excerpt)) = (self.line, &self.excerpt) {
            text.push_str(&format!("\n  at line {line} of the LLVM IR: `{}`", excerpt.trim()));
        }
        text.push_str(
            "\n  this is a bug in Tilewright, not in the kernel: please report it together with the kernel's source",
        );
        text
    }
}

/// A version of LLVM; its text is `MAJOR.MINOR.PATCH`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LlvmVersion {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl fmt::Display for LlvmVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The version of the linked LLVM.
pub fn version() -> LlvmVersion {
    let mut version = LlvmVersion::default();
    // SAFETY: the three pointers are valid for one write each.
    unsafe {
        inkwell::llvm_sys::core::LLVMGetVersion(&mut version.major, &mut version.minor, &mut version.patch);
    }
    version
}
