//! LLVM: from the textual IR of our lowerings to PTX, native objects and running code.
//!
//! The lowerings write LLVM IR as *text*; this room parses it, verifies it, optimises it for one machine and emits
//! code. Nothing here knows about tiles.
//!
//! - [`ptx`], [`object`], [`asm`] and [`optimised_ir`] are pure functions of their arguments. They may run on any
//!   number of threads at once: every call has an LLVM context and a thread of its own, so that a fatal error of LLVM is an
//!   [`LlvmError`] and not the end of the process.
//! - [`JitModule`] links one object into this process and hands out its entry point.
//! - [`HostCpu::native`](crate::target::HostCpu::native) asks LLVM which CPU this is.
//!
//! An error here is always a bug of the compiler, not of the person who wrote the kernel; [`LlvmError`] says so.

mod builtins;
mod emit;
mod host_cpu;
mod jit;
mod module;
#[cfg(test)]
mod tests;

pub use emit::{asm, object, optimised_ir, ptx};
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

/// Knobs of LLVM's middle end. [`Opt::gpu`] and [`Opt::host`] are what the pipelines use.
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
    /// O3 for a GPU: threads are the vector lanes, so loops stay scalar.
    pub fn gpu() -> Opt {
        Opt { level: 3, vectorize_loops: false, vectorize_slp: true, unroll_loops: true }
    }

    /// O3 for a CPU, with both vectorisers.
    pub fn host() -> Opt {
        Opt { level: 3, vectorize_loops: true, vectorize_slp: true, unroll_loops: true }
    }
}

/// Time spent in each phase of one emission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Reading and verifying the text.
    pub parse: Duration,
    /// Running the optimisation pipeline.
    pub opt: Duration,
    /// Instruction selection, register allocation and printing.
    pub codegen: Duration,
}

/// What an emission returns: the code and what it cost.
#[derive(Clone, Debug)]
pub struct Emitted<T> {
    pub code: T,
    pub timings: Timings,
}

/// Where in an emission LLVM refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Parse,
    Verify,
    Target,
    Optimise,
    Codegen,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Parse => "reading",
            Phase::Verify => "verifying",
            Phase::Target => "preparing the target for",
            Phase::Optimise => "optimising",
            Phase::Codegen => "generating code for",
        })
    }
}

/// LLVM refused IR that our own lowering wrote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.render())]
pub struct LlvmError {
    pub phase: Phase,
    /// LLVM's own words.
    pub message: String,
    /// Line of the IR text, from 1, where LLVM names one or quotes an instruction that is found in the text.
    pub line: Option<usize>,
    /// That line's text.
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

/// Version of the LLVM that is linked in: major, minor, patch.
pub fn version() -> (u32, u32, u32) {
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: the three pointers are valid for one write each.
    unsafe { inkwell::llvm_sys::core::LLVMGetVersion(&mut major, &mut minor, &mut patch) };
    (major, minor, patch)
}
