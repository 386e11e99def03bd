//! Training: steps, checkpoints, and the loop around them.
//!
//! - [`Trainer`] is one training step in pieces: gradients to zero, backward of micro-batches, update. It knows parameters and
//!   losses, and no model, so that whoever trains on several devices can put work between the pieces.
//! - [`QueuedStep`] queues such steps without waiting for them, and replays them on a GPU.
//! - [`checkpoint`] keeps all that a run is on disk.
//! - [`RunFolder`] is where they are: one run at a time has it.
//! - [`Run`] is the loop: batches, steps, evaluations, checkpoints, the log. It asks [`LanguageModel`] of a model.
//! - [`DataParallel`] is a run's other ranks, where there are any.
//! - [`generate`] lets a model write.

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
pub use keep::Keep;
pub use model::LanguageModel;
pub use peak::peak_flops;
pub use queued_step::{QueuedStep, StepHandle, StepResult};
pub use run::{Ending, Observer, Run, RunOptions};
pub use scale::LossScale;
pub use trainer::{Moments, Registered, Trainer, TrainerOptions, Update, gradient_dtype};
