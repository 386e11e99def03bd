//! Programs with their results, in files: those that tests here run in the interpreter run on a GPU from these.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Argument, Program, storage};
use crate::ir::DType;
use crate::num;
use crate::text;

/// A program, the contents of its outputs after a run, and how near to them they must be.
#[derive(Clone, Debug)]
pub struct Saved {
    pub program: Program,
    pub expected: Vec<Vec<u8>>,
    /// `[relative, floor]`: |difference| ≤ relative · max(|expected|, floor); exact if there is none.
    pub near: Option<[f64; 2]>,
}

#[derive(Serialize, Deserialize)]
enum Arg {
    Buffer(DType, Vec<u8>),
    Int(i64),
    /// The bits of an f64.
    Float(u64),
}

/// A line of a file.
#[derive(Serialize, Deserialize)]
struct Line {
    text: String,
    grid: [u32; 3],
    args: Vec<Arg>,
    expected: Vec<Vec<u8>>,
    near: Option<[f64; 2]>,
}

impl Saved {
    /// Appends the program to the file `name` of a folder. Its buffers are outputs.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn append(&self, folder: &Path, name: &str) -> std::io::Result<()> {
        let arg = |arg: &Argument| match arg {
            Argument::Input { dtype, bytes } | Argument::Output { dtype, bytes } => Arg::Buffer(*dtype, bytes.clone()),
            Argument::Int(n) => Arg::Int(*n),
            Argument::Float(x) => Arg::Float(x.to_bits()),
        };
        let line = Line {
            text: text::print(&self.program.func),
            grid: self.program.grid,
            args: self.program.args.iter().map(arg).collect(),
            expected: self.expected.clone(),
            near: self.near,
        };
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(folder.join(name))?;
        file.write_all((serde_json::to_string(&line)? + "\n").as_bytes())
    }

    /// The programs of all files in a folder, each with the name of its file, in the order of names.
    ///
    /// # Errors
    /// A file that cannot be read, or is none of these.
    pub fn read_all(folder: &Path) -> Result<Vec<(String, Saved)>, String> {
        let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.sort();
        let mut all = Vec::new();
        for path in files {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&path).map_err(|e| format!("{name}: {e}"))?;
            for line in text.lines() {
                all.push((name.clone(), Saved::parse(line).map_err(|e| format!("{name}: {e}"))?));
            }
        }
        Ok(all)
    }

    fn parse(line: &str) -> Result<Saved, String> {
        let line: Line = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let arg = |arg: Arg| match arg {
            Arg::Buffer(dtype, bytes) => Argument::Output { dtype, bytes },
            Arg::Int(n) => Argument::Int(n),
            Arg::Float(bits) => Argument::Float(f64::from_bits(bits)),
        };
        let func = text::parse(&line.text).map_err(|e| e.to_string())?;
        let program = Program { func, args: line.args.into_iter().map(arg).collect(), grid: line.grid };
        Ok(Saved { program, expected: line.expected, near: line.near })
    }

    /// Describes the first element of the outputs that is too far from what is expected. NaNs are equal to each other.
    pub fn difference(&self, found: &[Vec<u8>]) -> Option<String> {
        let dtypes = self.program.output_dtypes();
        let Some([relative, floor]) = self.near else { return super::difference(&dtypes, &self.expected, found) };
        let value = |dtype: DType, bytes: &[u8]| match dtype.is_float() {
            true => num::decode(dtype, storage(bytes)),
            false => num::decode_int(dtype, storage(bytes)) as f64,
        };
        for (k, (dtype, (expected, found))) in dtypes.iter().zip(self.expected.iter().zip(found)).enumerate() {
            let n = dtype.bytes();
            for (i, (e, f)) in expected.chunks(n).zip(found.chunks(n)).enumerate() {
                let (e, f) = (value(*dtype, e), value(*dtype, f));
                let same = e == f || (e.is_nan() && f.is_nan());
                let near = e.is_finite() && (e - f).abs() <= relative * e.abs().max(floor);
                if !same && !near {
                    return Some(format!(
                        "output {k}, element {i} ({dtype}): expected {e:e}, found {f:e}, relative {relative:e}"
                    ));
                }
            }
        }
        None
    }
}
