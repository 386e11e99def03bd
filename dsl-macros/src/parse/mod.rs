//! Parses the user's code.

pub mod assigned;
pub mod autotune;
pub mod calls;
pub mod item;
pub mod kernel;
pub mod literal;
pub mod triton;
