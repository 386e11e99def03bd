//! Optimizer: updates parameters from gradients, over flat slices of f32.
//!
//! A step consists of [`norm`] and [`clip_factor`] (gradient norm and clip factor), [`LrSchedule`] (learning rate) and
//! [`AdamW`] (update). This module knows no models: parameters are a flat slice, and each [`ParamGroup`] gives the
//! options of one range. One process can update all of the slice or a shard of it. [`step_control`] computes norm, clip
//! factor and the decision to apply or skip a step on the device, so that the host does not wait.

mod adamw;
mod norm;
mod schedule;
pub mod step_control;

pub use adamw::{AdamW, AdamWOptions, ComputeWeights, ParamGroup, StepControlViews, merge_groups};
pub use norm::{clip_factor, first_non_finite, norm, sum_of_squares, total_sum_of_squares};
pub use schedule::LrSchedule;
