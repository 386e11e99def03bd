//! Names this build of the compiler by its source, so that a cache never gives a changed compiler the old one's code.

mod source_hash;

use std::env;
use std::path::PathBuf;

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    println!("cargo::rustc-env=TILEWRIGHT_SOURCE_HASH={}", source_hash::of(&[root.join("src")]));
}
