//! Tilewright: GPU tile kernels written in Rust.
//!
//! One `#[kernel]` function compiles to PTX for the GPU and to native code for the CPU. `use tilewright::prelude::*`
//! imports the language and the launch API; `docs/language.md` is the reference.
//!
//! Features:
//!
//! - `llvm`, on by default: compiles kernels. The build needs LLVM 22 with its static libraries, in `/usr/lib/llvm-22`,
//!   on `PATH`, or in the folder that `LLVM_SYS_221_PREFIX` names. Without it (`default-features = false`) a launch that
//!   has to compile is an error; kernels run on a simulated GPU ([`Device::simulated`]), and kernels that were compiled
//!   ahead of time are launched as [`PrecompiledKernel`](precompiled::PrecompiledKernel)s.
//! - `cuda-13`, on by default, or `cuda-12`: the CUDA version of the driver's declarations (13.0 or 12.0), of which only
//!   one can be on. No feature needs a CUDA toolkit. `cuda-12` is for drivers before CUDA 12.8, and for programs that
//!   also link a CUDA 12 toolkit. Without either, it is the version of the `nvcc` on `PATH`, or the newest known.
//! - `cli`: `tilewright::cli::main(&[&MY_KERNEL])`, the command line of a program's own kernels.

pub use tilewright_runtime::*;

/// The command line of a program's own kernels.
#[cfg(feature = "cli")]
pub use tilewright_cli as cli;
/// The compiler: Tile IR, passes, targets.
pub use tilewright_codegen as codegen;
/// The kernels that ship with Tilewright.
pub use tilewright_kernels as kernels;

// `#[kernel]` refers to this crate by name, also from inside.
extern crate self as tilewright;

/// Compiles and runs the examples of the language reference.
#[cfg(doctest)]
#[doc = include_str!("../docs/language.md")]
struct LanguageReference;

/// Compiles the Rust example of the page on ahead-of-time compilation.
#[cfg(doctest)]
#[doc = include_str!("../docs/ahead-of-time.md")]
struct AheadOfTime;

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Compiles and runs the example of the page on kernels.
#[cfg(doctest)]
#[doc = include_str!("../docs/adding-a-kernel.md")]
struct AddingAKernel;
