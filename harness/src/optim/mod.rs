//! Optimizer: updates parameters from gradients, over flat slices of f32.
//!
//! A step consists of [`norm`] and [`clip`] (gradient norm and clip factor), [`Schedule`] (learning rate) and [`AdamW`]
//! (update). This module knows no models: parameters are a flat slice, and each [`Group`] gives the options of one
//! range. One process can update all of the slice or a shard of it. [`judge`] computes norm, clip factor and the
//! decision to apply or skip a step on the device, so that the host does not wait.

mod adamw;
pub mod judge;
mod norm;
mod schedule;

pub use adamw::{AdamW, AdamWOptions, Copy, Group, merge_groups};
pub use norm::{clip, first_not_finite, norm, sum_of_squares, sum_of_squares_of};
pub use schedule::Schedule;
