//! Why training stopped, in words for whoever started it.

use std::path::{Path, PathBuf};

use crate::escape::printable;
use crate::optim::step_control::MAX_LOSSES;

/// Result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why training stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error(transparent)]
    Data(#[from] crate::data::Error),

    #[error(transparent)]
    Kernel(#[from] tilewright::Error),

    #[error("{0}")]
    Candle(#[from] candle_core::Error),

    #[error(transparent)]
    Ranks(#[from] crate::dist::error::Error),

    /// `what` reads as in "the loss", `first` as in "the parameter `x`".
    #[error("step {step}: {what} is not finite; the first that has NaN or infinity is {first}{}", hint(saved.as_deref()))]
    NotFinite { step: u64, what: &'static str, first: String, saved: Option<PathBuf> },

    #[error(
        "the score of token {token} is NaN\n  help: the weights give no text: they are too large or too small for the model's precision; the \
         log shows where training went wrong, and an older checkpoint may be better"
    )]
    NoScore { token: usize },

    #[error(
        "a step has {found} micro-batches, expected at most {MAX_LOSSES}\n  help: --micro-batch {} or more", batch.div_ceil(MAX_LOSSES)
    )]
    MicroBatches { found: usize, batch: usize },

    #[error(
        "validation after step {step}: the loss is not finite\n  help: training went wrong before; lower --lr, or go on from an older checkpoint"
    )]
    Validation { step: u64 },

    #[error("cannot {doing} {}: {source}{}", printable(&path.display().to_string()), disk_full_help(source))]
    File { doing: &'static str, path: PathBuf, source: std::io::Error },

    /// Of a checkpoint, the log or the curve; `last` is the step of the newest checkpoint that is on the disk.
    #[error("cannot write {}: {source}{}{}", printable(&path.display().to_string()), disk_full_help(source), last_checkpoint_note(*last))]
    Save { path: PathBuf, source: std::io::Error, last: Option<u64> },

    #[error("{0}\n  a checkpoint is copied to host memory before it is written, so that training goes on meanwhile")]
    SaveMemory(tilewright::Error),

    #[error(
        "{} is not locked by this run any more: the folder or the file {} in it was removed, renamed or replaced, and another run may write \
         there\n  help: what is on the disk stays as it is; begin again with --resume", printable(&folder.display().to_string()), super::folder::LOCK
    )]
    LockLost { folder: PathBuf },

    #[error(
        "another run writes into {}: {}\n  help: wait for its end, or name another folder with --out",
        folder.display(), printable(holder)
    )]
    Locked { folder: PathBuf, holder: String },

    /// `reason` may have words of the file in it.
    #[error("{} is no checkpoint that can be used: {}", path.display(), printable(reason))]
    Damaged { path: PathBuf, reason: String },

    #[error("{} is a checkpoint of another model: {}", path.display(), printable(difference))]
    OtherModel { path: PathBuf, difference: String },
}

fn hint(saved: Option<&Path>) -> String {
    let help = "\n  help: a lower --lr, a longer --warmup or --clip 1 keep training stable";
    match saved {
        Some(path) => format!("\n  the state before this step is in {}{help}", path.display()),
        None => help.to_string(),
    }
}

fn disk_full_help(source: &std::io::Error) -> &'static str {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    match source.kind() {
        StorageFull | QuotaExceeded => "\n  help: there is no room for it; make some, or name another place with --out",
        FileTooLarge => {
            "\n  help: a file may not be so large here; raise the limit (`ulimit -f`), or name another place with --out"
        }
        _ => "",
    }
}

fn last_checkpoint_note(last: Option<u64>) -> String {
    match last {
        Some(step) => format!("\n  the last checkpoint, of step {step}, is still whole: --resume goes on from it"),
        None => "\n  no checkpoint of this run is on the disk".to_string(),
    }
}

impl Error {
    pub(crate) fn file(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::File { doing, path, source }
    }

    /// The message, which begins with "out of memory" whoever found that.
    pub(crate) fn out_of_memory_text(&self) -> String {
        let text = self.to_string();
        if text.starts_with("out of memory") { text } else { format!("out of memory: {text}") }
    }

    /// Whether a checkpoint, or one of its files, cannot be used.
    pub fn is_checkpoint_error(&self) -> bool {
        matches!(self, Error::Damaged { .. } | Error::File { doing: "read", .. })
    }

    /// Whether the device had no memory left.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::Kernel(error) => kernel_is_out_of_memory(error),
            Error::Candle(error) => is_out_of_memory(error),
            _ => false,
        }
    }
}

fn kernel_is_out_of_memory(error: &tilewright::Error) -> bool {
    match error {
        tilewright::Error::OutOfMemory { .. }
        | tilewright::Error::HostMemory { .. }
        | tilewright::Error::HostMemoryShort { .. }
        | tilewright::Error::TooLarge { .. } => true,
        tilewright::Error::Cuda { failure, .. } => failure.code == 2,
        _ => false,
    }
}

/// Whether this is about a device that had no memory left.
///
/// Candle carries the errors of the driver and of our kernels wrapped in its own; what is left of them everywhere is their words.
pub fn is_out_of_memory(error: &candle_core::Error) -> bool {
    let text = error.to_string();
    ["OUT_OF_MEMORY", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"].iter().any(|words| text.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_is_recognized_through_candle() {
        let ours = tilewright::Error::OutOfMemory { device: "GPU 0".into(), requested: 8, free: 4, total: 16 };
        assert!(Error::Kernel(ours.clone()).is_out_of_memory());
        assert!(Error::Candle(candle_core::Error::wrap(ours).bt()).is_out_of_memory());
        let driver = candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into());
        assert!(is_out_of_memory(&driver.context("in a product")));
        assert!(!is_out_of_memory(&candle_core::Error::Msg("shape mismatch".into())));
    }

    #[test]
    fn a_full_disk_says_which_checkpoint_is_whole() {
        let error = |last| {
            let source = std::io::ErrorKind::StorageFull.into();
            Error::Save { path: "a/b".into(), source, last }.to_string()
        };
        let (first, later) = (error(None), error(Some(40)));
        assert!(later.contains("--resume") && !first.contains("--resume"), "{first} {later}");
        assert!(first.contains("a/b") && first.contains("no checkpoint of this run"), "{first}");
        assert!(later.contains("no room") && later.contains("of step 40, is still whole"), "{later}");
    }
}
