//! Names this build of the harness by its sources, so that ranks of one job can tell whether they are the same program.

#[path = "../codegen/source_hash.rs"]
mod source_hash;

use std::env;
use std::path::PathBuf;

/// What decides about the numbers of a training, beside the compiler, which names itself.
const SOURCES: [&str; 3] = ["src", "../runtime/src", "../kernels/src"];

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let folders = SOURCES.map(|folder| root.join(folder));
    println!("cargo::rustc-env=TILEWRIGHT_HARNESS_HASH={}", source_hash::of(&folders));
}
