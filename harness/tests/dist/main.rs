//! Tests of distributed training: collectives, faults, training.

mod buffer_reuse;
mod collectives;
mod commands;
mod faults;
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
#[path = "../support/tensors.rs"]
mod tensors;
mod training;
mod unauthenticated_peers;
mod update;
mod world;
