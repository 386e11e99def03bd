//! All that a run is, in safetensors files.
//!
//! | tensor | what |
//! |---|---|
//! | `NAME` | value of the parameter NAME, f32 |
//! | `optimizer.first.NAME`, `optimizer.second.NAME` | its moments, f32 |
//! | `optimizer.first.NAME[A..B]` and the like | elements A to B of its moments, where ranks share a parameter |
//!
//! The metadata has two entries beside the checksums of [`tensor_file`]: `tilewright`, a JSON object ([`Header`]),
//! and `tokenizer`, the `tokenizer.json` that made the text into tokens.
//!
//! Where every rank has a shard of the optimizer's state, the moments are in one file for each rank ([`shard_file_name`]), and the checkpoint has the
//! parameters and the name of these files ([`OptimizerShards`]). They are written first: the rename of the checkpoint itself is the one commit of
//! all of them. Any number of ranks can load them.
//!
//! Format 2 has checksums; format 1, which had none and was otherwise the same, is read.
//!
//! A run that goes on from a checkpoint on the same device does bit for bit what it would have done: parameters, moments, step, loss
//! scale and the sampler's state are all that a step depends on.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use super::staged::Staged;
use super::{Error, LossScale, RankSettings, Result, Trainer};
use crate::data::SamplerState;
use crate::escape::printable;
use crate::ops::memory;
use crate::params::Params;
use crate::tensor_file::{self, TensorFile, TensorFileError};

/// What the file's format is called.
const FORMAT: &str = "tilewright checkpoint 2";
/// The format before it: without checksums.
const FORMAT_1: &str = "tilewright checkpoint 1";
pub(super) const SHARD_FORMAT: &str = "tilewright checkpoint part 2";
pub(super) const FIRST: &str = "optimizer.first.";
pub(super) const SECOND: &str = "optimizer.second.";
const MOMENTS: [&str; 2] = [FIRST, SECOND];

/// What a checkpoint says beside its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub format: String,
    /// The model's hyperparameters, as its room writes them.
    pub model: Value,
    /// How the run trains: what the command line said.
    pub training: Value,
    /// Steps that the trainer made, and steps that the optimizer made of them.
    pub step: u64,
    pub optimizer_steps: u64,
    pub scale: LossScale,
    pub sampler: SamplerState,
    /// What the text is called, and its hash.
    pub data: String,
    pub data_hash: String,
    /// Validation loss after this step in nats a token, if the run evaluated there.
    #[serde(default, with = "super::exact::option")]
    pub validation: Option<f64>,
    /// The files that have the moments, where they are not in the checkpoint itself.
    #[serde(default)]
    #[serde(rename = "parts")]
    pub shards: Option<OptimizerShards>,
    /// How ranks shared the work, if there ever were several.
    #[serde(default)]
    pub ranks: Option<RankSettings>,
}

/// The files of an optimizer's state that ranks wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptimizerShards {
    /// Told to all ranks by the first one, new for each checkpoint: files of two checkpoints are never taken for one.
    pub id: u64,
    /// How many there are.
    pub world: usize,
}

/// Most ranks whose shards are looked for.
const MAX_RANKS: usize = 1 << 20;

/// The name of rank `rank`'s shard of the checkpoint of `step`, in the folder of the checkpoint.
pub fn shard_file_name(step: u64, shards: &OptimizerShards, rank: usize) -> String {
    format!("moments-{step:08}-{:016x}-{rank}-of-{}.safetensors", shards.id, shards.world)
}

/// The step in a name that [`shard_file_name`] gives.
pub fn step_of_shard_file(name: &str) -> Option<u64> {
    let parsed = || {
        let (step, rest) = name.strip_prefix("moments-")?.split_once('-')?;
        let (id, rest) = rest.split_once('-')?;
        let (rank, world) = rest.strip_suffix(".safetensors")?.split_once("-of-")?;
        let shards = OptimizerShards { id: u64::from_str_radix(id, 16).ok()?, world: world.parse().ok()? };
        let step = step.parse().ok()?;
        Some((step, shard_file_name(step, &shards, rank.parse().ok()?)))
    };
    parsed().filter(|(_, parsed)| parsed == name).map(|(step, _)| step)
}

/// What a shard says beside its tensors.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ShardHeader {
    pub format: String,
    pub step: u64,
    #[serde(rename = "parts")]
    pub shards: OptimizerShards,
    pub rank: usize,
}

impl Header {
    /// For a run in its present state.
    pub fn new(
        model: Value,
        training: Value,
        trainer: &Trainer,
        sampler: SamplerState,
        data: (&str, [u8; 32]),
    ) -> Header {
        Header {
            format: FORMAT.to_string(),
            model,
            training,
            step: trainer.step(),
            optimizer_steps: trainer.optimizer_steps(),
            scale: trainer.scale(),
            sampler,
            data: data.0.to_string(),
            data_hash: hex(&data.1),
            validation: None,
            shards: None,
            ranks: None,
        }
    }

    /// Fails where the numbers are those of no run.
    fn check(&self) -> Result<(), String> {
        let Header { format, step, optimizer_steps, sampler, shards, .. } = self;
        if format != FORMAT && format != FORMAT_1 {
            return Err(format!("expected the format `{FORMAT}` or `{FORMAT_1}`, found `{format}`"));
        }
        if optimizer_steps > step {
            return Err(format!("its optimizer has made {optimizer_steps} of {step} steps"));
        }
        // What follows adds to them.
        if step.max(&sampler.drawn) > &(u64::MAX >> 1) {
            return Err(format!("it has made {step} steps of {} windows, which no run has", sampler.drawn));
        }
        let factor = self.scale.factor();
        if !(factor.is_normal() && factor > 0.0) {
            return Err(format!("the factor of its loss is {factor}"));
        }
        match shards {
            Some(shards) if !(1..=MAX_RANKS).contains(&shards.world) => {
                Err(format!("its moments are in {} files", shards.world))
            }
            _ => Ok(()),
        }
    }
}

/// A hash as digits.
pub fn hex(hash: &[u8; 32]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a checkpoint. `trainer` has the state of all parameters.
///
/// # Errors
/// What the file system says (the checkpoint that was there before then stays), and errors of the device.
pub fn save(path: &Path, header: &Header, tokenizer: &str, trainer: &Trainer) -> Result<()> {
    let staged = Staged::checkpoint(header, tokenizer, trainer)?;
    crate::files::replace(path, |file| staged.write(file)).map_err(Error::file("write", path))
}

/// A checkpoint whose header was verified. Its tensors are verified when they are loaded.
pub struct Checkpoint {
    path: PathBuf,
    file: TensorFile,
    pub header: Header,
    /// The `tokenizer.json` of the run.
    pub tokenizer: String,
}

/// Where elements of one parameter's moments are.
struct TensorSlice {
    /// Index of the shard; none for the checkpoint itself.
    shard: Option<usize>,
    name: String,
    /// Elements of the flat tensor.
    range: Range<usize>,
}

impl Checkpoint {
    /// Opens a file and verifies its length, header and tokenizer.
    ///
    /// # Errors
    /// A file that cannot be read, was cut short or changed, or is something else.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let damaged = |reason: String| Error::Damaged { path: path.to_path_buf(), reason };
        let file = TensorFile::open(path).map_err(|problem| explain(path, problem))?;
        let no_header = || damaged("it has tensors, and nothing about the run that made them".to_string());
        let text = file.text("tilewright").ok_or_else(no_header)?;
        let header: Header = serde_json::from_str(text).map_err(|error| damaged(error.to_string()))?;
        header.check().map_err(damaged)?;
        if header.format == FORMAT && file.hash().is_none() {
            return Err(damaged("its checksums are missing".to_string()));
        }
        let tokenizer = file.text("tokenizer").ok_or_else(no_header)?.clone();
        let found = tensor_file::checksum(tokenizer.as_bytes());
        if file.text("tokenizer_blake3").is_some_and(|stated| *stated != found) {
            return Err(damaged(format!("its tokenizer was changed: its BLAKE3 hash is {found}")));
        }
        Ok(Checkpoint { path: path.to_path_buf(), file, header, tokenizer })
    }

    /// What tells it from others: in format 2 a hash of its header with the hashes of all its tensors, before that one of what it says of the
    /// run.
    ///
    /// # Errors
    /// The header cannot be written as text.
    pub fn hash(&self) -> Result<String> {
        match self.file.hash() {
            Some(hash) => Ok(hash.to_string()),
            None => {
                let header = serde_json::to_vec(&self.header);
                let unwritten =
                    |error: serde_json::Error| Error::Damaged { path: self.path.clone(), reason: error.to_string() };
                Ok(tensor_file::checksum(&header.map_err(unwritten)?))
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Elements of all parameters that the file has values of.
    pub fn elements(&self) -> usize {
        let values = self.file.names().into_iter().filter(|name| is_parameter(name));
        values.filter_map(|name| self.file.info(&name).map(|info| info.shape.iter().product::<usize>())).sum()
    }

    /// Fails unless the checkpoint's hyperparameters are those of `model`, but for those whose names are in `free`.
    ///
    /// # Errors
    /// Names each that differs, with both values.
    pub fn check_model(&self, model: &Value, free: &[&str]) -> Result<()> {
        let (expected, found) = (flat_object(model), flat_object(&self.header.model));
        let mut differences = Vec::new();
        for name in expected.keys().chain(found.keys().filter(|name| !expected.contains_key(*name))) {
            if expected.get(name) != found.get(name) && !free.contains(&name.as_str()) {
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
    /// Parameters of other names or shapes: then nothing is set. Tensors that are damaged, or have an element that is not finite.
    pub fn load_params(&self, params: &Params) -> Result<()> {
        self.check_tensors(params, &[""])?;
        let mut outcome: Result<()> = Ok(());
        memory::write::<f32, _>(params.values(), |_, mut values| {
            outcome = params.iter().try_for_each(|param| {
                let read = self.read(&self.path, &self.file, param.name())?;
                Ok(values.reborrow().slice(param.range())?.copy_from_slice(&read)?)
            });
            Ok::<_, candle_core::Error>(())
        })?;
        outcome?;
        Ok(params.refresh_compute_weights()?)
    }

    /// Sets parameters and the trainer's state to the checkpoint's. Where ranks share the optimizer, each reads the moments that it
    /// keeps, whoever wrote them.
    ///
    /// # Errors
    /// As [`Checkpoint::load_params`], of all files.
    pub fn load(&self, trainer: &mut Trainer) -> Result<()> {
        let params = trainer.params().clone();
        let shards = self.open_shards()?;
        let prefixes: &[&str] = if self.header.shards.is_none() { &["", FIRST, SECOND] } else { &[""] };
        self.check_tensors(&params, prefixes)?;
        let [first, second] = MOMENTS.map(|prefix| self.slices(&shards, &params, prefix));
        let slices = [first?, second?];
        self.load_params(&params)?;
        let Header { step, scale, optimizer_steps, .. } = self.header;
        trainer.restore(step, scale, optimizer_steps, |which, range, mut to| {
            let slices =
                slices[which].iter().filter(|slice| slice.range.start < range.end && range.start < slice.range.end);
            for TensorSlice { shard, name, range: have } in slices {
                let (path, file) = match shard {
                    None => (&self.path, &self.file),
                    Some(shard) => (&shards[*shard].0, &shards[*shard].1),
                };
                let values = self.read(path, file, name)?;
                let both = have.start.max(range.start)..have.end.min(range.end);
                to.reborrow()
                    .slice(both.start - range.start..both.end - range.start)?
                    .copy_from_slice(&values[both.start - have.start..both.end - have.start])?;
            }
            Ok(())
        })
    }

    /// Opens the files that have the moments.
    fn open_shards(&self) -> Result<Vec<(PathBuf, TensorFile)>> {
        let Some(shards) = &self.header.shards else { return Ok(Vec::new()) };
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let mut opened = Vec::new();
        for rank in 0..shards.world {
            let path = folder.join(shard_file_name(self.header.step, shards, rank));
            let damaged = |reason: String| Error::Damaged { path: path.clone(), reason };
            let file = TensorFile::open(&path).map_err(|problem| explain(&path, problem))?;
            let text = file.text("tilewright").filter(|_| file.hash().is_some());
            let text = text.ok_or_else(|| damaged("it is no shard of a checkpoint".to_string()))?;
            let found: ShardHeader = serde_json::from_str(text).map_err(|error| damaged(error.to_string()))?;
            let expected =
                ShardHeader { format: SHARD_FORMAT.to_string(), step: self.header.step, shards: shards.clone(), rank };
            if found != expected {
                return Err(damaged(format!(
                    "it is a shard of another checkpoint: expected rank {rank}'s of step {}, found rank {}'s of step {}",
                    expected.step, found.rank, found.step
                )));
            }
            opened.push((path, file));
        }
        Ok(opened)
    }

    /// Where the moments behind `prefix` are. All elements of a parameter have a slice, or none of them has: of those that were frozen.
    fn slices(&self, shards: &[(PathBuf, TensorFile)], params: &Params, prefix: &str) -> Result<Vec<TensorSlice>> {
        if self.header.shards.is_none() {
            let slice = |param: crate::params::Param| TensorSlice {
                shard: None,
                name: format!("{prefix}{}", param.name()),
                range: param.range(),
            };
            return Ok(params.iter().map(slice).collect());
        }
        let mut slices = Vec::new();
        for (shard, (path, file)) in shards.iter().enumerate() {
            for name in file.names() {
                let Some(rest) = name.strip_prefix(prefix) else { continue };
                let unknown = || Error::OtherModel {
                    path: path.clone(),
                    difference: format!("it has a tensor `{}`, which does not fit the model", printable(&name)),
                };
                let (param, piece) = parse_slice_name(rest).unwrap_or((rest, None));
                let whole = params.get(param).map_err(|_| unknown())?.range();
                let piece = piece.unwrap_or(0..whole.len());
                let elements = file.info(&name).map(|info| info.shape.iter().product::<usize>());
                if piece.end > whole.len() || elements != Some(piece.len()) {
                    return Err(unknown());
                }
                slices.push(TensorSlice {
                    shard: Some(shard),
                    range: whole.start + piece.start..whole.start + piece.end,
                    name,
                });
            }
        }
        slices.sort_by_key(|slice| slice.range.start);
        for param in params.iter() {
            let own = slices
                .iter()
                .filter(|slice| slice.range.start < param.range().end && param.range().start < slice.range.end);
            let mut end = param.range().start;
            let mut found = 0;
            for slice in own {
                if slice.range.start != end {
                    break;
                }
                (end, found) = (slice.range.end, found + 1);
            }
            let any = slices.iter().filter(|slice| param.range().contains(&slice.range.start)).count();
            if any > 0 && (end != param.range().end || found != any) {
                let reason = format!("the moments `{prefix}{}` are not in its shards once each", param.name());
                return Err(Error::Damaged { path: self.path.clone(), reason });
            }
        }
        Ok(slices)
    }

    /// The elements of a tensor, all of them finite.
    fn read(&self, path: &Path, file: &TensorFile, name: &str) -> Result<Vec<f32>> {
        let values = file.read(name).map_err(|problem| explain(path, problem))?;
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(slice) => Err(Error::Damaged {
                path: path.to_path_buf(),
                reason: format!(
                    "the tensor `{}` is not finite: its element {slice} is {}",
                    printable(name),
                    values[slice]
                ),
            }),
        }
    }

    /// Fails unless there is a tensor of each parameter's name and shape behind each prefix, and no other value.
    fn check_tensors(&self, params: &Params, prefixes: &[&str]) -> Result<()> {
        let other = |difference: String| Err(Error::OtherModel { path: self.path.clone(), difference });
        for prefix in prefixes {
            for param in params.iter() {
                let name = format!("{prefix}{}", param.name());
                match self.file.info(&name) {
                    None => return other(format!("expected a tensor `{name}` {:?}, found none", param.shape())),
                    Some(found) if found.shape != param.shape() || found.dtype != safetensors::Dtype::F32 => {
                        let (shape, dtype) = (&found.shape, found.dtype);
                        let expected = param.shape();
                        return other(format!(
                            "`{name}` is expected to be F32 {expected:?}, found {dtype:?} {shape:?}"
                        ));
                    }
                    Some(_) => {}
                }
            }
        }
        match self.file.names().iter().filter(|name| is_parameter(name)).find(|name| params.get(name).is_err()) {
            Some(name) => other(format!("it has a tensor `{}`, which the model does not have", printable(name))),
            None => Ok(()),
        }
    }
}

fn is_parameter(name: &str) -> bool {
    !name.starts_with(FIRST) && !name.starts_with(SECOND)
}

/// `NAME[A..B]` as a name and a range.
fn parse_slice_name(name: &str) -> Option<(&str, Option<Range<usize>>)> {
    let (param, range) = name.strip_suffix(']')?.rsplit_once('[')?;
    let (start, end) = range.split_once("..")?;
    let range = start.parse().ok()?..end.parse().ok()?;
    (range.start < range.end).then_some((param, Some(range)))
}

fn explain(path: &Path, problem: TensorFileError) -> Error {
    match problem {
        TensorFileError::File(error) => Error::file("read", path)(error),
        TensorFileError::Damaged(reason) => Error::Damaged { path: path.to_path_buf(), reason },
    }
}

/// The entries of a JSON object by name; those of objects inside it with a dot.
fn flat_object(value: &Value) -> BTreeMap<String, String> {
    fn flatten(prefix: &str, value: &Value, to: &mut BTreeMap<String, String>) {
        match value.as_object() {
            Some(object) => {
                for (name, value) in object {
                    let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                    flatten(&name, value, to);
                }
            }
            None => drop(to.insert(prefix.to_string(), value.to_string())),
        }
    }
    let mut entries = BTreeMap::new();
    flatten("", value, &mut entries);
    entries
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
