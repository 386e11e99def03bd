//! Passes: each a function from one function to another, in a file of its own.

pub mod assign_layouts;
