//! Ranks that work together, and ranks that do not: collectives, faults, training.

mod collectives;
mod faults;
mod processes;
mod world;
