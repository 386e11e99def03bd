//! Checkpoint files staged in host memory before they are written.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;

use rayon::prelude::*;
use tilewright::View;
use tilewright_candle::memory::Read;

use super::checkpoint::{FIRST_MOMENT, Header, OptimizerShards, SECOND_MOMENT, SHARD_FORMAT, ShardHeader};
use super::{Error, Result, Trainer};
use crate::params::Params;
use crate::tensor_file;

/// A checkpoint file in host memory: training continues while it is written.
pub struct Staged {
    metadata: BTreeMap<&'static str, String>,
    flats: Vec<Vec<f32>>,
    tensors: Vec<Tensor>,
}

/// A tensor: a range of one of the flat tensors.
struct Tensor {
    name: String,
    shape: Vec<usize>,
    flat: usize,
    range: Range<usize>,
}

impl Staged {
    /// Stages the checkpoint; without moments if `header` says that they are in other files.
    ///
    /// # Errors
    /// No host memory; errors of the device.
    pub fn checkpoint(header: &Header, tokenizer: &str, trainer: &Trainer) -> Result<Staged> {
        let params = trainer.params();
        let text = serde_json::to_string(header).map_err(candle_core::Error::wrap)?;
        let metadata = BTreeMap::from([
            ("tilewright", text),
            ("tokenizer", tokenizer.to_string()),
            ("tokenizer_blake3", tensor_file::checksum(tokenizer.as_bytes())),
        ]);
        let mut staged = Staged { metadata, flats: Vec::new(), tensors: Vec::new() };
        let values = Read::<f32>::new(params.values())?;
        staged.push("", params, 0, values.view()?)?;
        if header.shards.is_none() {
            staged.push_moments(trainer)?;
        }
        Ok(staged)
    }

    /// Stages this rank's shard of the moments.
    ///
    /// # Errors
    /// See [`Staged::checkpoint`].
    pub fn shard(step: u64, shards: &OptimizerShards, rank: usize, trainer: &Trainer) -> Result<Staged> {
        let header = ShardHeader { format: SHARD_FORMAT.to_string(), step, shards: shards.clone(), rank };
        let text = serde_json::to_string(&header).map_err(candle_core::Error::wrap)?;
        let metadata = BTreeMap::from([("tilewright", text)]);
        let mut staged = Staged { metadata, flats: Vec::new(), tensors: Vec::new() };
        staged.push_moments(trainer)?;
        Ok(staged)
    }

    fn push_moments(&mut self, trainer: &Trainer) -> Result<()> {
        for moments in trainer.moments() {
            let start = moments.range.start;
            self.push(FIRST_MOMENT, trainer.params(), start, moments.first)?;
            self.push(SECOND_MOMENT, trainer.params(), start, moments.second)?;
        }
        Ok(())
    }

    /// Copies a slice of a flat tensor, which starts at element `start`: its elements of each parameter become a
    /// tensor.
    fn push(&mut self, prefix: &str, params: &Params, start: usize, piece: View<'_, f32>) -> Result<()> {
        let (flat, all) = (self.flats.len(), start..start + piece.len());
        check_host_memory(piece.len())?;
        self.flats.push(piece.to_vec()?);
        for param in params.iter() {
            let whole = param.range();
            let range = whole.start.max(all.start)..whole.end.min(all.end);
            if range.is_empty() && !(whole.is_empty() && start == 0) {
                continue;
            }
            let (name, shape) = match range == whole {
                true => (format!("{prefix}{}", param.name()), param.shape().to_vec()),
                false => {
                    let (a, b) = (range.start - whole.start, range.end - whole.start);
                    (format!("{prefix}{}[{a}..{b}]", param.name()), vec![range.len()])
                }
            };
            self.tensors.push(Tensor { name, shape, flat, range: range.start - start..range.end - start });
        }
        Ok(())
    }

    /// Fails for an element that is NaN or infinite: such a checkpoint must not replace a finite one.
    ///
    /// # Errors
    /// Names the first such tensor.
    pub fn check_finite(&self) -> io::Result<()> {
        let values = |tensor: &Tensor| &self.flats[tensor.flat][tensor.range.clone()];
        let wrong = self.tensors.par_iter().find_first(|tensor| values(tensor).iter().any(|value| !value.is_finite()));
        match wrong {
            None => Ok(()),
            Some(tensor) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "`{}` is not finite after this step: use a lower --lr, a longer --warmup, or --clip 1",
                    tensor.name
                ),
            )),
        }
    }

    /// Approximate size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        let text: usize = self.metadata.values().map(String::len).sum();
        let names: usize = self.tensors.iter().map(|tensor| 200 + 2 * tensor.name.len()).sum();
        let elements: usize = self.tensors.iter().map(|tensor| tensor.range.len()).sum();
        (2 * text + names + size_of::<f32>() * elements) as u64
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Those of `file`.
    pub fn write(&self, file: &mut dyn Write) -> io::Result<()> {
        let entries = self.tensors.iter().map(|Tensor { name, shape, flat, range }| tensor_file::Entry {
            name: name.clone(),
            shape: shape.clone(),
            values: &self.flats[*flat][range.clone()],
        });
        tensor_file::write(file, &self.metadata, &entries.collect::<Vec<_>>())
    }
}

/// Fails unless the host has memory for a copy of `elements` f32.
///
/// # Errors
/// The required and the available memory.
pub fn check_host_memory(elements: usize) -> Result<()> {
    tilewright::check_host_memory(size_of::<f32>() as f64 * elements as f64).map_err(Error::SaveMemory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_without_host_memory_is_an_error() {
        check_host_memory(1000).unwrap();
        let message = check_host_memory(1 << 60).unwrap_err().to_string();
        for part in ["out of memory", "4.3e9 GiB", "copied to host memory before it is written"] {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
    }
}
