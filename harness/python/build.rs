//! Links libffi and libzstd, which LLVM uses, from their static libraries where the system has them, so that the
//! extension module does not need them at run time.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let folder = Path::new(&std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("static");
    std::fs::create_dir_all(&folder).expect("the build folder can be written");
    for name in ["libffi.a", "libzstd.a"] {
        let Some(found) = static_library(name) else { continue };
        // The linker looks for each library in this folder first, which has no shared libraries.
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
