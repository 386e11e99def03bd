//! `ptxas`, the assembler of PTX, where it is installed.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The output of `ptxas -v` for one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of spill stores plus bytes of spill loads.
    pub spills: u32,
    /// Whether ptxas serialized wgmma, for lack of registers or because of their order.
    pub serialized: bool,
    /// Warnings about wgmma that cost performance: serialized, or waited for early.
    pub warnings: Vec<String>,
}

/// The `ptxas` that `TILEWRIGHT_PTXAS` names, or the first on `PATH`; `None`, with a line on standard error, where
/// there is none.
pub fn find() -> Option<PathBuf> {
    let named = std::env::var_os("TILEWRIGHT_PTXAS").filter(|v| !v.is_empty()).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = named.or_else(|| std::env::split_paths(&path).map(|dir| dir.join("ptxas")).find(|file| file.is_file()));
    if found.is_none() {
        // Not `println!`, which the test harness captures.
        let _ = writeln!(std::io::stderr(), "skipped: no ptxas found; `make cuda-tools` installs one");
    }
    found
}

/// Assembles PTX.
///
/// # Errors
/// The message of `ptxas`, where it rejects the text.
pub fn assemble(ptxas: &PathBuf, ptx: &str, arch: &str) -> Result<Resources, String> {
    assemble_to(ptxas, ptx, arch, Path::new("/dev/null"))
}

/// Assembles PTX into a file.
///
/// # Errors
/// The message of `ptxas`, where it rejects the text.
pub fn assemble_to(ptxas: &PathBuf, ptx: &str, arch: &str, cubin: &Path) -> Result<Resources, String> {
    let mut file = tempfile::Builder::new().suffix(".ptx").tempfile().map_err(|e| e.to_string())?;
    file.write_all(ptx.as_bytes()).map_err(|e| e.to_string())?;
    let ran = Command::new(ptxas)
        .args(["-v", "-arch", arch, "-o"])
        .arg(cubin)
        .arg(file.path())
        .output()
        .map_err(|e| format!("{} does not start: {e}", ptxas.display()))?;
    let output = String::from_utf8_lossy(&ran.stderr).into_owned() + &String::from_utf8_lossy(&ran.stdout);
    if !ran.status.success() {
        return Err(output);
    }
    let number = |after: &str, before: &str| {
        let start = output.find(after)? + after.len();
        let end = start + output[start..].find(before)?;
        output[start..end].trim().parse::<u32>().ok()
    };
    let resources = (|| {
        Some(Resources {
            registers: number(" Used ", " registers")?,
            spills: number("stack frame, ", " bytes spill stores")? + number("spill stores, ", " bytes spill loads")?,
            serialized: output.lines().any(|line| line.contains("wgmma") && line.contains("serialized")),
            warnings: output.lines().filter(|line| line.contains("(C75")).map(str::to_string).collect(),
        })
    })();
    resources.ok_or_else(|| format!("ptxas printed no register and spill counts:\n{output}"))
}
