//! Training: steps, checkpoints, and the training loop.
//!
//! - [`Learner`] is a training step in separate calls: zero gradients, backward of micro-batches, optimizer update. It
//!   knows parameters and losses, but no model, so that data-parallel training can run collectives between the calls.
//! - [`WholeStep`] enqueues complete steps asynchronously, and runs them as a CUDA graph on a GPU.
//! - [`checkpoint`] saves and loads the state of a run.
//! - [`RunFolder`] is the locked folder of a run.
//! - [`Run`] is the training loop: batches, steps, evaluations, checkpoints, the log. It trains any [`LanguageModel`].
//! - [`Team`] is data-parallel training of a run on several ranks.
//! - [`generate`] samples text from a model.

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
