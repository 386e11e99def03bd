//! What goes wrong in training on many ranks: between ranks, in candle's ops, in our kernels.

use super::comm::CommError;

/// Result of what many ranks do to one model.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    #[error(transparent)]
    Kernel(#[from] tilewright::Error),
    /// Ranks that do not train the same, or a call out of turn.
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
