//! Identifies this build of the harness by a hash of its sources, so that ranks of one job can check that they run the
//! same program.

#[path = "../codegen/source_hash.rs"]
mod source_hash;

use std::env;
use std::path::PathBuf;

/// Sources that affect training results, in addition to the compiler, which has its own version.
const SOURCES: [&str; 3] = ["src", "../runtime/src", "../kernels/src"];

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let folders = SOURCES.map(|folder| root.join(folder));
    println!("cargo::rustc-env=TILEWRIGHT_HARNESS_HASH={}", source_hash::of(&folders));
}
