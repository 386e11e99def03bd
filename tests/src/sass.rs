//! GPU machine code (SASS), as `nvdisasm` prints it.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

/// One instruction without its predicate and address, for example `HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24`.
pub type Instruction = String;

/// The bodies of all loops of a kernel: from the target of a backward branch to the branch.
///
/// # Errors
/// `nvdisasm` does not start, or its message where it rejects the file.
pub fn loops(nvdisasm: &Path, cubin: &Path) -> Result<Vec<Vec<Instruction>>, String> {
    let output = Command::new(nvdisasm)
        .arg("-c")
        .arg(cubin)
        .output()
        .map_err(|e| format!("{} does not start: {e}", nvdisasm.display()))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let mut code: Vec<Instruction> = Vec::new();
    let mut labels: HashMap<String, usize> = HashMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines().map(str::trim) {
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label.to_string(), code.len());
        } else if let Some(instruction) =
            line.strip_prefix("/*").and_then(|l| l.split_once("*/")).map(|(_, i)| i.trim())
        {
            let instruction = instruction.trim_end_matches(';').trim();
            let plain = match instruction.strip_prefix('@') {
                Some(guarded) => guarded.split_once(' ').map_or("", |(_, rest)| rest).trim(),
                None => instruction,
            };
            code.push(plain.to_string());
        }
    }
    let back = |at: usize| {
        let target = code[at].strip_prefix("BRA `(")?.strip_suffix(')')?;
        labels.get(target).copied().filter(|&start| start <= at)
    };
    Ok((0..code.len()).filter_map(|at| Some(code[back(at)?..=at].to_vec())).collect())
}
