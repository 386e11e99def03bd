//! The Tilewright compiler: from typed tile programs to PTX and native code.
//!
//! This crate accesses no file, environment variable or device. Its input is text and values, its output an
//! [`Artifact`](target::Artifact).

pub mod analysis;
pub mod diag;
pub mod explain;
pub mod functions;
pub mod interp;
pub mod ir;
pub mod lang;
pub mod layout;
pub mod llvm;
pub mod lower;
pub mod mma;
pub mod num;
pub mod passes;
pub mod pipeline;
pub mod reduce;
pub mod schedule;
pub mod sim;
pub mod target;
#[cfg(any(test, feature = "testgen"))]
pub mod testgen;
pub mod text;
pub mod verify;

/// Version of the compiler: the package version, and a hash of the sources of this build.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "+", env!("TILEWRIGHT_SOURCE_HASH"));

/// Identifies everything in this build that decides the generated code: [`VERSION`] and the version that the linked
/// LLVM reports. Part of every cache key.
pub fn compiler_id() -> &'static str {
    static ID: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| match llvm::version() {
        Some(llvm) => format!("{VERSION}, LLVM {llvm}"),
        None => format!("{VERSION}, without LLVM"),
    });
    &ID
}
