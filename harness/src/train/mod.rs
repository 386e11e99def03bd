//! Training: steps, checkpoints, and the loop around them.
//!
//! - [`Learner`] is one training step in pieces: gradients to zero, backward of micro-batches, update. It knows parameters and
//!   losses, and no model, so that whoever trains on several devices can put work between the pieces.
//! - [`WholeStep`] queues such steps without waiting for them, and replays them on a GPU.
//! - [`checkpoint`] keeps all that a run is on disk.
//! - [`RunFolder`] is where they are: one run at a time has it.
//! - [`Run`] is the loop: batches, steps, evaluations, checkpoints, the log. It asks [`LanguageModel`] of a model.
//! - [`Team`] is a run's other ranks, where there are any.
//! - [`generate`] lets a model write.

mod agree;
pub mod checkpoint;
mod error;
pub mod exact;
pub mod folder;
mod generate;
pub mod keep;
mod learner;
pub mod log;
mod model;
mod peak;
pub mod run;
mod saver;
mod scale;
mod staged;
mod team;
mod transformer;
mod whole;

pub use error::{Error, Result, is_out_of_memory};
pub use folder::RunFolder;
pub use generate::{Sampling, generate};
pub use keep::Keep;
pub use learner::{Announced, Learner, LearnerOptions, Moments, Update, gradient_dtype};
pub use model::LanguageModel;
pub use peak::peak;
pub use run::{Ending, Observer, Run, RunOptions};
pub use scale::LossScale;
pub use team::{RankSettings, Team, TeamOptions, team_gradient_dtype};
pub use whole::{Found, Queued, WholeStep};
