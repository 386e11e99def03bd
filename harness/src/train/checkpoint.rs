//! All that a run is, in one safetensors file.
//!
//! | tensor | what |
//! |---|---|
//! | `NAME` | value of the parameter NAME, f32 |
//! | `optimizer.first.NAME`, `optimizer.second.NAME` | its moments, f32 |
//!
//! The metadata has two entries: `tilewright`, a JSON object ([`Header`]), and `tokenizer`, the `tokenizer.json` that made the
//! text into tokens. The file is replaced as a whole: while a new one is written, and if that fails, the last one stays.
//!
//! A run that goes on from a checkpoint on the same device does bit for bit what it would have done: parameters, moments, step, loss
//! scale and the sampler's state are all that a step depends on.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tilewright::{View, ViewMut};

use super::{Error, Learner, LossScale, Moments, Result};
use crate::data::SamplerState;
use crate::ops::memory::{self, Read, kernel_error};
use crate::params::{Param, Params};

/// What the file's format is called.
const FORMAT: &str = "tilewright checkpoint 1";
const FIRST: &str = "optimizer.first.";
const SECOND: &str = "optimizer.second.";

/// What a checkpoint says beside its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub format: String,
    /// The model's hyperparameters, as its room writes them.
    pub model: Value,
    /// How the run trains: what the command line said.
    pub training: Value,
    /// Steps that the learner made, and steps that the optimizer made of them.
    pub step: u64,
    pub optimizer_steps: u64,
    pub scale: LossScale,
    pub sampler: SamplerState,
    /// What the text is called, and its hash.
    pub data: String,
    pub data_hash: String,
}

impl Header {
    /// For a run in its present state.
    pub fn new(
        model: Value,
        training: Value,
        learner: &Learner,
        sampler: SamplerState,
        data: (&str, [u8; 32]),
    ) -> Header {
        Header {
            format: FORMAT.to_string(),
            model,
            training,
            step: learner.step(),
            optimizer_steps: learner.optimizer_steps(),
            scale: learner.scale(),
            sampler,
            data: data.0.to_string(),
            data_hash: hex(&data.1),
        }
    }
}

/// A hash as digits.
pub fn hex(hash: &[u8; 32]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a checkpoint. `learner` has the state of all parameters.
///
/// # Errors
/// What the file system says (the checkpoint that was there before then stays), and errors of the device.
pub fn save(path: &Path, header: &Header, tokenizer: &str, learner: &Learner) -> Result<()> {
    save_with(path, header, tokenizer, learner.params(), &learner.moments()?)
}

/// As [`save`], with moments that have been collected: by one rank of many.
///
/// # Errors
/// As [`save`].
pub fn save_with(path: &Path, header: &Header, tokenizer: &str, params: &Params, moments: &Moments<'_>) -> Result<()> {
    let values = Read::<f32>::new(params.values())?;
    let params: Vec<Param> = params.iter().collect();
    let (first, second) = moments.views()?;
    let values = values.view()?;
    let mut entries = Vec::new();
    for (prefix, flat) in [("", values), (FIRST, first), (SECOND, second)] {
        entries.extend(params.iter().map(|param| Entry {
            name: format!("{prefix}{}", param.name()),
            shape: param.shape().to_vec(),
            range: param.range(),
            flat,
        }));
    }
    let text = serde_json::to_string(header).map_err(|error| Error::file("write", path)(error.into()))?;
    let metadata = BTreeMap::from([("tilewright", text), ("tokenizer", tokenizer.to_string())]);
    crate::files::replace(path, |file| write(file, &metadata, &entries)).map_err(Error::file("write", path))
}

/// A tensor to be written: part of a flat slice.
struct Entry<'a> {
    name: String,
    shape: Vec<usize>,
    range: Range<usize>,
    flat: View<'a, f32>,
}

/// The format of safetensors: the length of the header, the header (JSON, filled up with spaces), the tensors.
fn write(file: &mut dyn Write, metadata: &BTreeMap<&str, String>, entries: &[Entry<'_>]) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_string(), json!(metadata));
    let mut end = 0;
    for entry in entries {
        let start = end;
        end += entry.range.len() * size_of::<f32>();
        let info = json!({ "dtype": "F32", "shape": entry.shape, "data_offsets": [start, end] });
        header.insert(entry.name.clone(), info);
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for entry in entries {
        let values = entry.flat.slice(entry.range.clone()).and_then(|part| part.to_vec()).map_err(io::Error::other)?;
        match cfg!(target_endian = "little") {
            true => file.write_all(bytemuck::cast_slice(&values))?,
            false => values.iter().try_for_each(|value| file.write_all(&value.to_le_bytes()))?,
        }
    }
    Ok(())
}

/// A checkpoint that was found whole.
pub struct Checkpoint {
    path: PathBuf,
    map: memmap2::Mmap,
    pub header: Header,
    /// The `tokenizer.json` of the run.
    pub tokenizer: String,
}

impl Checkpoint {
    /// Opens a file and checks that it is a whole checkpoint.
    ///
    /// # Errors
    /// A file that cannot be read, was cut short, or is something else.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let damaged = |reason: String| Error::Damaged { path: path.to_path_buf(), reason };
        let file = crate::files::open_to_map(path).map_err(Error::file("read", path))?;
        // SAFETY: the map is only read, as bytes; a checkpoint is replaced by renaming, which leaves this file as it is.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(Error::file("read", path))?;
        if let Some((expected, found)) = cut_short(&map) {
            return Err(damaged(format!("it was cut short: expected {expected} bytes, found {found}")));
        }
        let (_, metadata) = SafeTensors::read_metadata(&map).map_err(|error| damaged(error.to_string()))?;
        let no_run = || damaged("it has tensors, and nothing about the run that made them".to_string());
        let entries = metadata.metadata().as_ref().ok_or_else(no_run)?;
        let text = entries.get("tilewright").ok_or_else(no_run)?;
        let header: Header = serde_json::from_str(text).map_err(|error| damaged(error.to_string()))?;
        if header.format != FORMAT {
            return Err(damaged(format!("expected the format `{FORMAT}`, found `{}`", header.format)));
        }
        if header.optimizer_steps > header.step {
            let (made, all) = (header.optimizer_steps, header.step);
            return Err(damaged(format!("its optimizer has made {made} of {all} steps")));
        }
        let tokenizer = entries.get("tokenizer").ok_or_else(no_run)?.clone();
        SafeTensors::deserialize(&map).map_err(|error| damaged(error.to_string()))?;
        Ok(Checkpoint { path: path.to_path_buf(), map, header, tokenizer })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fails unless the checkpoint's hyperparameters are those of `model`.
    ///
    /// # Errors
    /// Names each that differs, with both values.
    pub fn check_model(&self, model: &Value) -> Result<()> {
        let (expected, found) = (flat_object(model), flat_object(&self.header.model));
        let mut differences = Vec::new();
        for name in expected.keys().chain(found.keys().filter(|name| !expected.contains_key(*name))) {
            if expected.get(name) != found.get(name) {
                let say = |value: Option<&String>| value.map_or("nothing".to_string(), String::clone);
                differences.push(format!(
                    "`{name}` is expected to be {}, found {}",
                    say(expected.get(name)),
                    say(found.get(name))
                ));
            }
        }
        match differences.is_empty() {
            true => Ok(()),
            false => Err(Error::OtherModel { path: self.path.clone(), difference: differences.join("; ") }),
        }
    }

    /// Sets the parameters to the checkpoint's.
    ///
    /// # Errors
    /// Parameters of other names or shapes: then nothing is set.
    pub fn load_params(&self, params: &Params) -> Result<()> {
        self.check_tensors(params, &[""])?;
        memory::write::<f32, _>(params.values(), |_, values| self.fill("", params, values).map_err(kernel_error))?;
        Ok(params.refresh_copy()?)
    }

    /// Sets parameters and the learner's state to the checkpoint's.
    ///
    /// # Errors
    /// As [`Checkpoint::load_params`].
    pub fn load(&self, learner: &mut Learner) -> Result<()> {
        let params = learner.params().clone();
        self.check_tensors(&params, &["", FIRST, SECOND])?;
        self.load_params(&params)?;
        let Header { step, scale, optimizer_steps, .. } = self.header;
        learner.restore(step, scale, optimizer_steps, |first, second| {
            self.fill(FIRST, &params, first)?;
            self.fill(SECOND, &params, second)
        })
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.map)
            .map_err(|error| Error::Damaged { path: self.path.clone(), reason: error.to_string() })
    }

    /// Fails unless there is a tensor of each parameter's name and shape behind each prefix, and no other value.
    fn check_tensors(&self, params: &Params, prefixes: &[&str]) -> Result<()> {
        let tensors = self.tensors()?;
        let other = |difference: String| Err(Error::OtherModel { path: self.path.clone(), difference });
        for prefix in prefixes {
            for param in params.iter() {
                let name = format!("{prefix}{}", param.name());
                match tensors.tensor(&name) {
                    Err(_) => return other(format!("expected a tensor `{name}` {:?}, found none", param.shape())),
                    Ok(found) if found.shape() != param.shape() || found.dtype() != safetensors::Dtype::F32 => {
                        let (shape, dtype) = (found.shape(), found.dtype());
                        let expected = param.shape();
                        return other(format!(
                            "`{name}` is expected to be F32 {expected:?}, found {dtype:?} {shape:?}"
                        ));
                    }
                    Ok(_) => {}
                }
            }
        }
        let names = tensors.names();
        let is_value = |name: &&&str| !name.starts_with(FIRST) && !name.starts_with(SECOND);
        match names.iter().filter(is_value).find(|name| params.get(name).is_err()) {
            Some(name) => other(format!("it has a tensor `{name}`, which the model does not have")),
            None => Ok(()),
        }
    }

    /// Writes the tensors behind `prefix` into a flat slice. They were checked before.
    fn fill(&self, prefix: &str, params: &Params, mut flat: ViewMut<'_, f32>) -> tilewright::Result<()> {
        let tensors = self.tensors().expect("the file was read before");
        for param in params.iter() {
            let tensor = tensors.tensor(&format!("{prefix}{}", param.name())).expect("the tensors were checked");
            let values: Vec<f32> =
                tensor.data().as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
            flat.reborrow().slice(param.range())?.copy_from_slice(&values)?;
        }
        Ok(())
    }
}

/// What the file's own header says of its length, and the length, if that is less.
fn cut_short(bytes: &[u8]) -> Option<(usize, usize)> {
    let header = bytes.get(..8).map(|n| u64::from_le_bytes(n.try_into().expect("8 bytes")));
    let found = bytes.len();
    match header {
        None => Some((8, found)),
        // A file of another kind has any number here; only a plausible one is a length.
        Some(len) if len > 100_000_000 => None,
        Some(len) if found < 8 + len as usize => Some((8 + len as usize, found)),
        Some(len) => {
            let header: Value = serde_json::from_slice(&bytes[8..8 + len as usize]).ok()?;
            let end_of = |tensor: &Value| tensor["data_offsets"][1].as_u64().unwrap_or(0);
            let end = header.as_object()?.values().map(end_of).max().unwrap_or(0);
            let expected = (8 + len).saturating_add(end) as usize;
            (found < expected).then_some((expected, found))
        }
    }
}

/// The entries of a JSON object by name; those of objects inside it with a dot.
fn flat_object(value: &Value) -> BTreeMap<String, String> {
    fn walk(prefix: &str, value: &Value, to: &mut BTreeMap<String, String>) {
        match value.as_object() {
            Some(object) => {
                for (name, value) in object {
                    let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                    walk(&name, value, to);
                }
            }
            None => drop(to.insert(prefix.to_string(), value.to_string())),
        }
    }
    let mut entries = BTreeMap::new();
    walk("", value, &mut entries);
    entries
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
