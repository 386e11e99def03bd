//! Names this build of the harness by its sources, so that ranks of one job can tell whether they are the same program.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs};

/// What decides about the numbers of a training, beside the compiler, which names itself.
const SOURCES: [&str; 3] = ["src", "../runtime/src", "../kernels/src"];

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    // `DefaultHasher::new` always starts from the same state, so equal sources give equal names.
    let mut hasher = DefaultHasher::new();
    for folder in SOURCES {
        let folder = root.join(folder);
        let mut files = Vec::new();
        collect(&folder, &mut files);
        files.sort();
        for file in &files {
            let name = file.strip_prefix(&folder).expect("the file was found below the folder");
            name.to_string_lossy().replace('\\', "/").hash(&mut hasher);
            fs::read(file).expect("the file was just listed").hash(&mut hasher);
        }
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    println!("cargo::rustc-env=TILEWRIGHT_HARNESS_HASH={:016x}", hasher.finish());
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("the folder is readable").flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => collect(&path, files),
            false if path.extension().is_some_and(|extension| extension == "rs") => files.push(path),
            false => {}
        }
    }
}
