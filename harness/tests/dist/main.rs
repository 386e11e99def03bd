//! Ranks that work together, and ranks that do not: collectives, faults, training.

mod collectives;
mod faults;
mod model;
mod processes;
mod training;
mod world;
