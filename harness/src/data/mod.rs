//! Text to batches: what a model learns from.
//!
//! ```text
//! text ──▶ tokenizer (byte-pair encoding) ──▶ token file ──▶ sampler ──▶ batches
//! ```
//!
//! [`prepare`] does all of it up to the token file, and keeps tokenizer and token file in a folder for the next run.
//! A [`Sampler`] is a function of its seed and of how many windows were drawn: that is all its state, so that a run which is resumed goes
//! on with the windows that it would have drawn.

mod error;
mod prepare;
mod sampler;
mod text;
mod tokenizer;
mod tokens;

pub use error::{Error, Result};
pub use prepare::{Dataset, Part, prepare, read_or_make};
pub use sampler::{Batch, Sampler, SamplerState, Shard, consecutive};
pub use text::{SHIPPED_NAME, Text};
pub use tokenizer::Bpe;
pub use tokens::{TokenFile, write_tokens};
