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
//! Without the feature `llvm` nothing of LLVM is compiled or linked: the functions exist (`absent.rs`), and return
//! [`WithoutLlvm`]. Any other error here is a bug of the compiler, never of the kernel's author; the message says so.

#[cfg(not(feature = "llvm"))]
mod absent;
#[cfg(feature = "llvm")]
mod builtins;
#[cfg(feature = "llvm")]
mod emit;
#[cfg(feature = "llvm")]
mod host_cpu;
#[cfg(feature = "llvm")]
mod jit;
#[cfg(feature = "llvm")]
mod module;
#[cfg(all(test, feature = "llvm"))]
mod tests;

#[cfg(not(feature = "llvm"))]
pub use absent::{JitModule, asm, object, optimized_ir, ptx, version};
#[cfg(feature = "llvm")]
pub use emit::{asm, object, optimized_ir, ptx};
#[cfg(feature = "llvm")]
pub use jit::JitModule;
#[cfg(feature = "llvm")]
pub use module::version;

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

/// The crate is built without LLVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this program is built without LLVM, which compiles kernels and links native code\n  \
     help: turn on the feature `llvm` of the crate `tilewright`: it is on by default, unless a dependency on it has \
     `default-features = false`. Without it, kernels run on a simulated GPU (`Device::simulated`), and kernels that were \
     compiled ahead of time run anywhere (`PrecompiledKernel`)"
)]
pub struct WithoutLlvm;

/// The reason why LLVM emitted no code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LlvmError {
    /// LLVM rejected IR that a lowering emitted.
    #[error("{0}")]
    Rejected(Rejection),
    /// There is no LLVM in this program.
    #[error("{0}")]
    Absent(#[from] WithoutLlvm),
}

/// How LLVM rejected IR that a lowering emitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    pub phase: Phase,
    /// LLVM's message.
    pub message: String,
    /// The line of the IR text, from 1, if LLVM names one or quotes an instruction that is found in the text.
    pub line: Option<usize>,
    /// The text of that line.
    pub excerpt: Option<String>,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = self.message.trim_end();
        write!(f, "internal compiler error: LLVM failed while {} generated code: {message}", self.phase)?;
        if let (Some(line), Some(excerpt)) = (self.line, &self.excerpt) {
            write!(f, "\n  at line {line} of the LLVM IR: `{}`", excerpt.trim())?;
        }
        f.write_str(
            "\n  this is a bug in Tilewright, not in the kernel: please report it together with the kernel's source",
        )
    }
}

/// The reason why native code is not linked into this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JitError {
    /// LLVM's linker failed.
    #[error(
        "internal compiler error: cannot link the compiled code of `{entry}` into this process: {message}\n  \
         this is a bug in Tilewright, not in the kernel: please report it together with the kernel's source"
    )]
    Failed {
        /// The symbol of the requested entry point.
        entry: String,
        /// LLVM's message.
        message: String,
    },
    /// There is no LLVM in this program.
    #[error("the native code of `{entry}` cannot be linked: {without}")]
    Absent {
        /// The symbol of the requested entry point.
        entry: String,
        without: WithoutLlvm,
    },
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
