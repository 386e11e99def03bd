//! Training: steps, checkpoints, and the loop around them.
//!
//! - [`Learner`] is one training step in pieces: gradients to zero, backward of micro-batches, update. It knows parameters and
//!   losses, and no model, so that whoever trains on several devices can put work between the pieces.
//! - [`checkpoint`] keeps all that a run is on disk.

pub mod checkpoint;
mod error;
mod learner;
mod scale;

pub use error::{Error, Result, is_out_of_memory};
pub use learner::{Learner, LearnerOptions, Update};
pub use scale::LossScale;
