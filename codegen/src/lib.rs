//! The Tilewright compiler: from typed tile programs to PTX and native code.
//!
//! No file, environment variable or device is touched in this crate: text and values go in, an
//! [`Artifact`](target::Artifact) comes out.

pub mod analysis;
pub mod diag;
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
#[cfg(any(test, feature = "testgen"))]
pub mod sim;
pub mod target;
#[cfg(any(test, feature = "testgen"))]
pub mod testgen;
pub mod text;
pub mod verify;

/// Version of the compiler: the package's, and a hash of the sources that this build was made from.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "+", env!("TILEWRIGHT_SOURCE_HASH"));

/// Everything about this build that decides what code comes out of it, in words: [`VERSION`], and the version of the LLVM that
/// is linked in, as that says itself. Part of every cache key.
pub fn compiler_id() -> &'static str {
    static ID: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
        let (major, minor, patch) = llvm::version();
        format!("{VERSION}, LLVM {major}.{minor}.{patch}")
    });
    &ID
}
