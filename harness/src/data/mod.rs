//! Turns text into batches of tokens.
//!
//! ```text
//! text ──▶ tokenizer (byte-pair encoding) ──▶ token file ──▶ sampler ──▶ batches
//! ```
//!
//! [`prepare`] runs the pipeline up to the token file, and caches tokenizer and token file in a folder. A [`Sampler`]
//! is a function of its seed and of the number of sequences drawn so far. That is its whole state, so a resumed run
//! continues with the sequences that an uninterrupted run would draw.

mod error;
mod prepare;
mod sampler;
mod text;
mod tokenizer;
mod tokens;

pub use error::{Error, Result};
pub use prepare::{Dataset, TokenSlice, load_or_tokenize, prepare};
pub use sampler::{Batch, Sampler, SamplerState, Shard, non_overlapping_sequences};
pub use text::{SHIPPED_NAME, Text};
pub use tokenizer::Bpe;
pub use tokens::{TokenFile, write_tokens};
