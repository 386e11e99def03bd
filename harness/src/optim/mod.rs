//! From gradients to new parameters, over flat slices of f32.
//!
//! A step is [`norm`] and [`clip`] (how large the gradient is, and by what it is shrunk), [`Schedule`] (the learning rate), and
//! [`AdamW`] (the update). Nothing here knows of models: parameters are a flat slice, and [`Group`]s say what holds for which part of
//! it. So one process can update all of the slice, or a share of it. [`judge`] does the first part on the device, for steps that nobody
//! waits for.

mod adamw;
pub mod judge;
mod norm;
mod schedule;

pub use adamw::{AdamW, AdamWOptions, Copy, Group, merge_groups};
pub use norm::{clip, first_not_finite, norm, sum_of_squares, sum_of_squares_of};
pub use schedule::Schedule;
