//! Errors of training.

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

    /// `what` is for example "the loss", `cause` "the first non-finite value is in the parameter `x`".
    #[error("step {step}: {what} is not finite; {cause}{}", non_finite_help(saved.as_deref()))]
    NotFinite { step: u64, what: &'static str, cause: String, saved: Option<PathBuf> },

    #[error(
        "the logit of token {token} is NaN\n  help: the weights are too large or too small for the model's precision; the \
         log shows where training diverged, and an older checkpoint may work"
    )]
    NanLogit { token: usize },

    #[error(
        "a step has {found} micro-batches, expected at most {MAX_LOSSES}\n  help: use --micro-batch {} or more", batch.div_ceil(MAX_LOSSES)
    )]
    MicroBatches { found: usize, batch: usize },

    #[error(
        "validation after step {step}: the loss is not finite\n  help: training has diverged; lower --lr, or resume from an older checkpoint"
    )]
    Validation { step: u64 },

    #[error("cannot {doing} {}: {source}{}", printable(&path.display().to_string()), disk_full_help(source))]
    File { doing: &'static str, path: PathBuf, source: std::io::Error },

    /// A checkpoint, the log or the plot cannot be written; `last` is the step of the newest checkpoint on the disk.
    #[error("cannot write {}: {source}{}{}", printable(&path.display().to_string()), disk_full_help(source), last_checkpoint_note(*last))]
    Save { path: PathBuf, source: std::io::Error, last: Option<u64> },

    #[error("{0}\n  a checkpoint is copied to host memory before it is written, so that training can continue")]
    SaveMemory(tilewright::Error),

    #[error(
        "{} is no longer locked by this run: the folder or the file {} in it was removed, renamed or replaced; another run may be \
         writing there\n  help: this run stopped without saving its state; restart with --resume", printable(&folder.display().to_string()), super::folder::LOCK
    )]
    LockLost { folder: PathBuf },

    #[error(
        "another run writes into {}: {}\n  help: wait until it ends, or choose another folder with --out",
        folder.display(), printable(holder)
    )]
    Locked { folder: PathBuf, holder: String },

    /// `reason` may contain text of the file.
    #[error("{} is not a usable checkpoint: {}", path.display(), printable(reason))]
    Damaged { path: PathBuf, reason: String },

    #[error("{} is a checkpoint of another model: {}", path.display(), printable(difference))]
    OtherModel { path: PathBuf, difference: String },
}

fn non_finite_help(saved: Option<&Path>) -> String {
    let help = "\n  help: use a lower --lr, a longer --warmup, or --clip 1";
    match saved {
        Some(path) => format!("\n  the state before this step was saved to {}{help}", path.display()),
        None => help.to_string(),
    }
}

fn disk_full_help(source: &std::io::Error) -> &'static str {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    match source.kind() {
        StorageFull | QuotaExceeded => "\n  help: the disk is full; free some space, or choose another --out",
        FileTooLarge => {
            "\n  help: the file is larger than allowed here; raise the limit (`ulimit -f`), or choose another --out"
        }
        _ => "",
    }
}

fn last_checkpoint_note(last: Option<u64>) -> String {
    match last {
        Some(step) => format!("\n  the last checkpoint, of step {step}, is intact: --resume continues from it"),
        None => "\n  no checkpoint of this run is on the disk".to_string(),
    }
}

impl Error {
    pub(crate) fn file(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::File { doing, path, source }
    }

    /// The message, with the prefix "out of memory" in any case.
    pub(crate) fn out_of_memory_text(&self) -> String {
        let text = self.to_string();
        if text.starts_with("out of memory") { text } else { format!("out of memory: {text}") }
    }

    /// Whether a checkpoint, or one of its shards, cannot be used.
    pub fn is_checkpoint_error(&self) -> bool {
        matches!(self, Error::Damaged { .. } | Error::File { doing: "read", .. })
    }

    /// Whether the device ran out of memory.
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

/// Whether the device ran out of memory.
///
/// Candle wraps errors of the driver and of Tilewright kernels; only their text is always preserved.
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
        assert!(is_out_of_memory(&driver.context("in a matmul")));
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
        assert!(later.contains("the disk is full") && later.contains("of step 40, is intact"), "{later}");
    }
}
