//! Names this build of the compiler by its source, so that a cache never gives a changed compiler the old one's code.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    collect(&root.join("src"), &mut files);
    files.sort();
    // `DefaultHasher::new` always starts from the same state, so equal sources give equal names.
    let mut hasher = DefaultHasher::new();
    for file in &files {
        let name = file.strip_prefix(&root).expect("the file was found below the root");
        name.to_string_lossy().replace('\\', "/").hash(&mut hasher);
        fs::read(file).expect("the file was just listed").hash(&mut hasher);
    }
    println!("cargo::rustc-env=TILEWRIGHT_SOURCE_HASH={:016x}", hasher.finish());
    println!("cargo::rerun-if-changed=src");
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("src is readable").flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => collect(&path, files),
            false if path.extension().is_some_and(|extension| extension == "rs") => files.push(path),
            false => {}
        }
    }
}
