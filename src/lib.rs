//! Tilewright: GPU tile kernels written in Rust.
//!
//! One `#[kernel]` function compiles to PTX for the GPU and to native code for the CPU. `use tilewright::prelude::*` brings
//! the language and the launch side; `docs/language.md` is the reference.

pub use tilewright_runtime::*;

/// The compiler underneath: Tile IR, passes, targets.
pub use tilewright_codegen as codegen;
/// The kernels that ship with Tilewright.
pub use tilewright_kernels as kernels;

// `#[kernel]` names this crate from inside it too.
extern crate self as tilewright;

/// The examples of the language reference compile and run.
#[cfg(doctest)]
#[doc = include_str!("../docs/language.md")]
struct LanguageReference;

/// So does the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// And that of the page on kernels.
#[cfg(doctest)]
#[doc = include_str!("../docs/adding-a-kernel.md")]
struct AddingAKernel;
