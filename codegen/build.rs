//! Names this build of the compiler by its source, so that a cache never gives a changed compiler the old one's code,
//! and links LLVM.

mod find_llvm;
mod source_hash;

use std::env;
use std::path::PathBuf;

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    println!("cargo::rustc-env=TILEWRIGHT_SOURCE_HASH={}", source_hash::of(&[root.join("src")]));
    if env::var_os("CARGO_FEATURE_LLVM").is_some()
        && let Err(message) = find_llvm::link()
    {
        message.lines().for_each(|line| println!("cargo::error={line}"));
    }
}
