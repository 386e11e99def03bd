//! Distributed training: the ranks, collectives and data parallelism of [`tilewright_candle::dist`], and what a program
//! adds to them.
//!
//! - [`launch`] starts the processes of a job; [`lifeline`] is the socket between a rank and its launcher.
//! - [`sharded`] shards the optimizer state (ZeRO-1).

pub mod launch;
pub mod lifeline;
pub mod sharded;

pub use tilewright_candle::dist::*;
