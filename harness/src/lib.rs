//! What a person runs: the command line today, models and training beside it.
//!
//! [`cli`] is the program `tilewright`: one file per command, and what commands share. [`report`] makes tables, plots and
//! pages of what they measure.

pub mod cli;
pub mod report;
