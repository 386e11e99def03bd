//! What a person runs: the command line today, models and training beside it.
//!
//! - [`cli`] is the program `tilewright`: one file per command, and what commands share.
//! - [`data`] makes batches out of text.
//! - [`optim`] makes new parameters out of gradients.
//! - [`report`] makes tables, plots and pages of what commands measure.

pub mod cli;
pub mod data;
pub mod optim;
pub mod report;
