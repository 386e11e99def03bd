//! Ranks that work together, and ranks that do not: collectives, faults, training.

mod collectives;
mod commands;
mod faults;
mod model;
#[cfg(feature = "mpi")]
mod mpi;
mod processes;
mod training;
mod world;
