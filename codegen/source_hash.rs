//! For build scripts: a name for the sources of a build, which the scripts of `codegen` and `harness` include.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

/// The hash of all Rust files below these folders, their names among it, as 16 hexadecimal digits; has cargo run the
/// script again when one changes. Equal sources have equal hashes, wherever the folders are.
pub fn of(folders: &[PathBuf]) -> String {
    // `DefaultHasher::new` always starts from the same state.
    let mut hasher = DefaultHasher::new();
    for folder in folders {
        let mut files = Vec::new();
        collect(folder, &mut files);
        files.sort();
        for file in &files {
            let name = file.strip_prefix(folder).expect("the file was found below the folder");
            name.to_string_lossy().replace('\\', "/").hash(&mut hasher);
            fs::read(file).expect("the file was just listed").hash(&mut hasher);
        }
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    format!("{:016x}", hasher.finish())
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
