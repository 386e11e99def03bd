//! Command line, models, training and measurement.
//!
//! - [`account`]: formulas for the cost of training on many devices.
//! - [`cli`]: the program `tilewright`, one file per command, and what commands share.
//! - [`data`]: text to batches.
//! - [`dist`]: data-parallel training on many ranks.
//! - [`leaderboard`]: the program of that name, which times FlashAttention-2 as the assignment does.
//! - [`memory`]: attributes the memory of a training step to its phases and spans.
//! - [`model`]: the assignment's Transformer.
//! - [`numerics`]: experiments with floating-point precision.
//! - [`ops`]: Tilewright kernels as differentiable operations on candle tensors.
//! - [`optim`]: AdamW, gradient clipping, step control and the learning-rate schedule.
//! - [`params`]: a model's parameters and gradients in flat tensors.
//! - [`profile`]: attributes the time of a training step to its phases, spans and kernels.
//! - [`tensor_file`]: reads and writes tensors with checksums.
//! - [`train`]: training steps, checkpoints and the training loop.
//!
//! What commands share, and the commands that work on any kernels, are in the crate [`tilewright_cli`].

// The print macros panic when a write fails: see `terminal::print_stderr`.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]
#![allow(rustdoc::broken_intra_doc_links, reason = "shapes are full of brackets: x [rows, d]")]

pub mod account;
pub mod cli;
pub mod data;
pub mod dist;
pub mod leaderboard;
pub mod memory;
pub mod model;
pub mod numerics;
pub mod ops;
pub mod optim;
pub mod params;
pub mod profile;
pub mod tensor_file;
pub mod train;

pub use tilewright::escape;
pub use tilewright_cli::{files, report, signals};
