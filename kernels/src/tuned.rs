//! The tables of configurations that ship with the kernels.

/// What was measured on GPUs: a table each, in `kernels/tuned/`.
pub const TABLES: &[&str] = &[include_str!("../tuned/nvidia-h200.json")];
