//! For the build script: finds LLVM 22 and has cargo link its static libraries, or with `TILEWRIGHT_LLVM_LINK=shared` its
//! shared library, which the loader must then find: for tests, whose executables would each hold about 90 MB of LLVM.
//!
//! The crates inkwell and llvm-sys only declare LLVM's functions (their features turn linking off), because the message
//! of llvm-sys about a missing LLVM does not say what to install or how to build without LLVM.
//!
//! The archives are passed like shared libraries (`dylib`), by file name (`+verbatim`): rustc puts those behind all Rust
//! crates, whatever their order is, and does not copy LLVM into this crate's `rlib`.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the folder that contains `bin/llvm-config`; the name is that of llvm-sys.
const VARIABLE: &str = "LLVM_SYS_221_PREFIX";

/// `static` (the default) or `shared`.
const LINK: &str = "TILEWRIGHT_LLVM_LINK";

/// Where the packages of Debian and of the LLVM project install LLVM 22.
const PACKAGED: &str = "/usr/lib/llvm-22";

/// The parts of LLVM that the compiler uses, in the terms of `llvm-config`.
const COMPONENTS: [&str; 6] = ["irreader", "passes", "orcjit", "nvptx", "x86", "native"];

/// Finds LLVM and prints cargo's instructions to link it.
///
/// # Errors
/// Why there is no LLVM to link, and what to do.
pub fn link() -> Result<(), String> {
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    println!("cargo::rerun-if-env-changed={LINK}");
    let config = find()?;
    match config.is_absolute() {
        true => println!("cargo::rerun-if-changed={}", config.display()),
        false => println!("cargo::rerun-if-env-changed=PATH"),
    }
    let kind = match env::var(LINK).as_deref() {
        Ok("static") | Err(env::VarError::NotPresent) => "--link-static",
        Ok("shared") => "--link-shared",
        Ok(other) => return Err(format!("{LINK}: expected `static` or `shared`, found `{other}`")),
        Err(error) => return Err(format!("{LINK}: expected `static` or `shared`, found {error}")),
    };
    let ask = |arguments: &[&str]| ask(&config, arguments).map_err(|found| missing(&[found]));
    let folder = PathBuf::from(ask(&["--libdir"])?.trim());
    let names = ask(&[&[kind, "--libnames"], &COMPONENTS[..]].concat())?;
    let lacking: Vec<&str> = names.split_whitespace().filter(|name| !folder.join(name).is_file()).collect();
    if !lacking.is_empty() {
        return Err(missing(&[format!("{}: no {}", folder.display(), lacking.join(", "))]));
    }
    println!("cargo::rustc-link-search=native={}", folder.display());
    for name in names.split_whitespace() {
        println!("cargo::rustc-link-lib=dylib:+verbatim={name}");
    }
    for library in ask(&[&[kind, "--system-libs"], &COMPONENTS[..]].concat())?.split_whitespace() {
        link_system_library(library);
    }
    println!("cargo::rerun-if-env-changed=CXXSTDLIB");
    println!("cargo::rustc-link-lib=dylib={}", env::var("CXXSTDLIB").unwrap_or_else(|_| "stdc++".into()));
    Ok(())
}

/// A library of the system, as `llvm-config` names it: `-lz` or `/usr/lib/x86_64-linux-gnu/libz3.so`.
fn link_system_library(library: &str) {
    if let Some(name) = library.strip_prefix("-l") {
        println!("cargo::rustc-link-lib=dylib={name}");
        return;
    }
    let path = Path::new(library);
    if let (Some(folder), Some(name)) = (path.parent(), path.file_name()) {
        println!("cargo::rustc-link-search=native={}", folder.display());
        println!("cargo::rustc-link-lib=dylib:+verbatim={}", name.display());
    }
}

/// The `llvm-config` of LLVM 22: only that of the variable if it is set, else the packaged one, else one on `PATH`.
fn find() -> Result<PathBuf, String> {
    let in_folder = |folder: &Path| ["llvm-config-22", "llvm-config"].map(|name| folder.join("bin").join(name));
    let candidates = match env::var_os(VARIABLE) {
        Some(prefix) => in_folder(Path::new(&prefix)).to_vec(),
        None => {
            let on_path = ["llvm-config-22", "llvm-config"].map(PathBuf::from);
            [in_folder(Path::new(PACKAGED)), on_path].concat()
        }
    };
    let mut tried = Vec::new();
    for config in candidates {
        match ask(&config, &["--version"]) {
            Ok(version) if version.starts_with("22.") => return Ok(config),
            Ok(version) => tried.push(format!("{}: LLVM {}", config.display(), version.trim())),
            Err(found) => tried.push(found),
        }
    }
    Err(missing(&tried))
}

/// The output of `llvm-config`.
fn ask(config: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(config).args(arguments).output();
    let output = output.map_err(|error| format!("{}: {error}", config.display()))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{}: {}", config.display(), String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// The message: what was looked for and found, and three ways to go on.
fn missing(found: &[String]) -> String {
    let variable = match env::var_os(VARIABLE) {
        Some(prefix) => format!("{VARIABLE} is `{}`", prefix.display()),
        None => format!("{VARIABLE} is not set"),
    };
    format!(
        "the feature `llvm` needs LLVM 22 with its static libraries, which were not found ({variable}):\n  {}\n\
         Do one of these:\n\
         - install it. On Debian 12 and later, and on Ubuntu with the packages of https://apt.llvm.org:\n    \
         apt-get install llvm-22-dev g++ zlib1g-dev libzstd-dev\n\
         - set {VARIABLE} to the folder of an LLVM 22 that contains bin/llvm-config, for example\n    \
         export {VARIABLE}=/opt/llvm-22\n\
         - build without LLVM, to run kernels that were compiled ahead of time, or kernels on a simulated GPU:\n    \
         tilewright = {{ version = \"{}\", default-features = false }}",
        found.join("\n  "),
        env::var("CARGO_PKG_VERSION").unwrap_or_default(),
    )
}
