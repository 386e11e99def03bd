//! Links libzstd, which LLVM uses, from its static library where the system has it, so that the extension module does
//! not need it at run time.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let folder = Path::new(&std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("static");
    std::fs::create_dir_all(&folder).expect("the build folder can be written");
    let name = "libzstd.a";
    if let Some(found) = static_library(name) {
        // The linker looks for libraries in this folder first, which has no shared ones.
        let link = folder.join(name);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(found, link).expect("the build folder can be written");
    }
    println!("cargo:rustc-link-search=native={}", folder.display());
}

/// The path of a static library, from the C compiler.
fn static_library(name: &str) -> Option<PathBuf> {
    let output = Command::new("cc").arg(format!("-print-file-name={name}")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.is_absolute().then_some(path)
}
