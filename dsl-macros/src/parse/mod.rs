//! What the user wrote.

pub mod assigned;
pub mod calls;
pub mod kernel;
pub mod literal;
