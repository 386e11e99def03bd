//! Tests of distributed training: collectives, faults, training.

mod collectives;
mod commands;
mod faults;
mod lend;
mod model;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod processes;
mod profile;
mod settings;
mod sharded;
mod stops;
mod strangers;
#[path = "../support/tensors.rs"]
mod tensors;
mod training;
mod update;
mod world;
