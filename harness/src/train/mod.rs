//! Training: steps, checkpoints, and the training loop.
//!
//! - [`Trainer`] is a training step in separate calls: zero gradients, backward of micro-batches, optimizer update. It
//!   knows parameters and losses, but no model, so that data-parallel training can run collectives between the calls.
//! - [`QueuedStep`] enqueues complete steps asynchronously, and runs them as a CUDA graph on a GPU.
//! - [`checkpoint`] saves and loads the state of a run.
//! - [`RunFolder`] is the locked folder of a run.
//! - [`Run`] is the training loop: batches, steps, evaluations, checkpoints, the log. It trains any [`LanguageModel`].
//! - [`DataParallel`] is data-parallel training of a run on several ranks.
//! - [`generate`] samples text from a model.

pub mod checkpoint;
mod data_parallel;
mod error;
pub mod exact;
pub mod folder;
mod generate;
pub mod keep;
pub mod log;
mod model;
mod peak;
mod queued_step;
pub mod run;
mod saver;
mod scale;
mod settings_check;
mod staged;
mod trainer;
mod transformer;

pub use data_parallel::{DataParallel, DataParallelOptions, RankSettings, data_parallel_gradient_dtype};
pub use error::{Error, Result, is_out_of_memory};
pub use folder::RunFolder;
pub use generate::{Sampling, generate};
pub use keep::Retention;
pub use model::LanguageModel;
pub use peak::peak_flops;
pub use queued_step::{QueuedStep, StepHandle, StepResult};
pub use run::{Ending, Observer, Run, RunOptions, RunSetup};
pub use scale::LossScale;
pub use trainer::{Moments, Registered, Trainer, TrainerOptions, Update, gradient_dtype};
