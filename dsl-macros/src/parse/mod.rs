//! Parses the user's code.

pub mod assigned;
pub mod autotune;
pub mod calls;
pub mod item;
pub mod kernel;
pub mod literal;
mod schedule_names;
pub mod triton;
pub mod tuples;
