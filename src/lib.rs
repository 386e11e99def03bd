//! Tilewright: GPU tile kernels written in Rust.
//!
//! One `#[kernel]` function compiles to PTX for the GPU and to native code for the CPU. `use tilewright::prelude::*`
//! imports the language and the launch API; `docs/language.md` is the reference.
//!
//! The feature `llvm`, on by default, compiles kernels; the build then needs LLVM 22 with its static libraries, in
//! `/usr/lib/llvm-22`, on `PATH`, or in the folder that `LLVM_SYS_221_PREFIX` names. Without it (`default-features =
//! false`) a launch that has to compile is an error; kernels run on a simulated GPU ([`Device::simulated`]).

pub use tilewright_runtime::*;

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
