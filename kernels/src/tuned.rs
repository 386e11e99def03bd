//! The tuning tables that ship with the kernels.

/// Tuning tables as JSON, one per GPU model, from `kernels/tuned/`.
pub const TABLES: &[&str] = &[include_str!("../tuned/nvidia-h200.json")];
