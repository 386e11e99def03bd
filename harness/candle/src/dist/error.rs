//! Errors of distributed training: of communication, of candle's ops, of Tilewright kernels.

use super::comm::CommError;

/// Result of operations of distributed training.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation of distributed training failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    #[error(transparent)]
    Kernel(#[from] tilewright::Error),
    /// Ranks with different models or settings, or a call in the wrong order.
    #[error("{0}")]
    Misuse(String),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> candle_core::Error {
        match error {
            Error::Tensor(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}
