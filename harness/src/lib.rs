//! What a person runs: the command line, models and training.
//!
//! - [`account`] computes what training on many devices costs.
//! - [`cli`] is the program `tilewright`: one file per command, and what commands share.
//! - [`data`] makes batches out of text.
//! - [`dist`] lets many ranks train one model.
//! - [`escape`] makes text of files fit for messages.
//! - [`files`] reads and writes the files that a command line names: outputs are there whole or not at all.
//! - [`leaderboard`] is the program of that name: FlashAttention-2 as the assignment times it.
//! - [`memory`] says what a step's memory is for.
//! - [`model`] is the assignment's Transformer.
//! - [`numerics`] are experiments with precision.
//! - [`ops`] are our kernels as differentiable operations on candle tensors.
//! - [`optim`] makes new parameters out of gradients.
//! - [`params`] holds a model's parameters and their gradients.
//! - [`profile`] names what a step spends its time on.
//! - [`report`] makes tables, plots and pages of what commands measure.
//! - [`signals`] are those that ask a run to stop.
//! - [`tensor_file`] reads and writes tensors with checksums.
//! - [`train`] is training: steps, checkpoints, and the loop around them.

// They panic where the stream is full: see `terminal::say`.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]
#![allow(rustdoc::broken_intra_doc_links, reason = "shapes are full of brackets: x [rows, d]")]

pub mod account;
pub mod cli;
pub mod data;
pub mod dist;
pub mod escape;
pub mod files;
pub mod leaderboard;
pub mod memory;
pub mod model;
pub mod numerics;
pub mod ops;
pub mod optim;
pub mod params;
pub mod profile;
pub mod report;
pub mod signals;
pub mod tensor_file;
pub mod train;
