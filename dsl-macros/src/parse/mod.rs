//! What the user wrote.

pub mod assigned;
pub mod autotune;
pub mod calls;
pub mod kernel;
pub mod literal;
