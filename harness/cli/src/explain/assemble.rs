//! Runs NVIDIA's `ptxas` and `nvdisasm` on a kernel, if they are installed, and parses their output.

use std::path::{Path, PathBuf};
use std::process::Command;

use tilewright_runtime::env::Env;
use tilewright_runtime::probe::cuda_tool;

use super::code::Code;
use crate::{CliError, Result};

/// Output of `ptxas` and `nvdisasm`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Assembled {
    /// Registers per thread.
    pub registers: u32,
    /// Spilled bytes per thread: stores to and loads from local memory.
    pub spill_stores: u32,
    pub spill_loads: u32,
    /// ptxas's message, if it serialized asynchronous MMAs (wgmma).
    pub serialized: Option<String>,
    /// SASS instructions; `None` without `nvdisasm`.
    pub code: Option<Code>,
    /// Tools that are not installed.
    pub missing: Vec<&'static str>,
}

/// Assembles and disassembles PTX; `None` without `ptxas`.
///
/// # Errors
/// `ptxas` rejects the PTX, which is a bug in Tilewright, or a tool cannot be run.
pub fn assemble(ptx: &str, arch: &str) -> Result<Option<Assembled>> {
    let ptxas = Env::get()?.ptxas.clone().or_else(|| cuda_tool("ptxas"));
    let Some(ptxas) = ptxas else { return Ok(None) };
    let cannot = |error| CliError::Failure(format!("cannot pass PTX to {}: {error}", ptxas.display()));
    let dir = crate::files::temporary_folder().map_err(cannot)?;
    let (source, binary) = (dir.path().join("kernel.ptx"), dir.path().join("kernel.cubin"));
    std::fs::write(&source, ptx).map_err(cannot)?;
    let output =
        run(&ptxas, &[Path::new("-v"), Path::new("-arch"), Path::new(arch), Path::new("-o"), &binary, &source])?;
    let mut assembled = parse_ptxas_output(&output)
        .ok_or_else(|| CliError::Failure(format!("{} does not report registers:\n{output}", ptxas.display())))?;
    match cuda_tool("nvdisasm") {
        Some(nvdisasm) => assembled.code = Some(Code::from_sass(&run(&nvdisasm, &[Path::new("-c"), &binary])?)),
        None => assembled.missing.push("nvdisasm"),
    }
    Ok(Some(assembled))
}

/// Runs a tool and returns its standard output and standard error.
fn run(tool: &PathBuf, arguments: &[&Path]) -> Result<String> {
    let output = Command::new(tool).args(arguments).output().map_err(|error| CliError::file("run", tool, error))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(text),
        false => Err(CliError::Failure(format!("{} rejects the PTX; please report:\n{text}", tool.display()))),
    }
}

/// Parses the output of `ptxas -v`.
fn parse_ptxas_output(output: &str) -> Option<Assembled> {
    let number = |after: &str, before: &str| {
        let start = output.find(after)? + after.len();
        let end = start + output[start..].find(before)?;
        output[start..end].trim().parse::<u32>().ok()
    };
    let serialized = output.lines().find(|line| line.contains("wgmma") && line.contains("serialized"));
    Some(Assembled {
        registers: number(" Used ", " registers")?,
        spill_stores: number("stack frame, ", " bytes spill stores")?,
        spill_loads: number("spill stores, ", " bytes spill loads")?,
        serialized: serialized.map(|line| line.trim_start_matches("ptxas info    : ").to_string()),
        ..Assembled::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptxas_output_is_parsed() {
        let output = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized \
                    due to insufficient register resources for the function 'k'\nptxas info    : Function properties \
                    for k\n    96 bytes stack frame, 100 bytes spill stores, 104 bytes spill loads\nptxas info    : \
                    Used 255 registers, used 1 barriers";
        let assembled = parse_ptxas_output(output).unwrap();
        assert_eq!((assembled.registers, assembled.spill_stores, assembled.spill_loads), (255, 100, 104));
        assert!(assembled.serialized.is_some_and(|why| why.contains("insufficient register")));
        assert_eq!(parse_ptxas_output("nothing"), None);
    }
}
