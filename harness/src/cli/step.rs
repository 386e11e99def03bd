//! A training step on random tokens, for `profile` and `memory`.

use candle_core::{Device, Tensor};
use clap::{Args, ValueEnum};
use tilewright_candle::memory::kernel_device;

use super::device::{self, DeviceArg};
use super::model_options::{ModelOptions, model_device};
use super::{CliError, Result};
use crate::memory::residual::Sizes;
use crate::model::{Attention, Config, StepKind, Transformer};
use crate::numerics::autocast::uniform;
use crate::optim::{AdamWOptions, LrSchedule};
use crate::params::no_grad;
use crate::profile::{Phase, phase, span};
use crate::train::{DataParallel, DataParallelOptions, Trainer, TrainerOptions, gradient_dtype};

/// Command-line arguments of the model and its batch.
#[derive(Args, Clone, Debug)]
pub struct StepOptions {
    #[command(flatten)]
    pub model: ModelOptions,
    /// Global batch size: sequences per step, over all ranks (the default of `train` is 16)
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Vocabulary size. Default: 1024, or 10000 with --size
    #[arg(long, alias = "vocab", value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub vocab_size: Option<u32>,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    pub device: Option<DeviceArg>,
}

/// The part of a training step to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Work {
    /// Forward pass only, with nothing saved for a backward pass
    Forward,
    /// Forward and backward pass
    ForwardBackward,
    /// Forward pass, backward pass, gradient clipping and AdamW
    TrainStep,
}

impl Work {
    pub fn name(self) -> &'static str {
        match self {
            Work::Forward => "forward",
            Work::ForwardBackward => "forward-backward",
            Work::TrainStep => "train-step",
        }
    }
}

impl StepOptions {
    /// Returns the model's configuration for sequences of `context` tokens.
    ///
    /// # Errors
    /// An unknown size, or hyperparameters that contradict each other.
    pub fn config(&self, context: usize) -> Result<Config> {
        let vocabulary = self.vocab_size.map_or(self.model.default_vocabulary(), |size| size as usize);
        self.model.config(Config { context, vocabulary, ..Config::default() })
    }

    /// Opens the device of the step.
    ///
    /// # Errors
    /// As [`model_device`].
    pub fn device(&self) -> Result<Device> {
        model_device(self.device)
    }

    /// Returns a lower bound on the memory of `work`, in bytes.
    pub fn least_bytes(&self, config: &Config, work: Work) -> f64 {
        let kind = match work {
            Work::Forward => StepKind::Forward,
            Work::ForwardBackward => StepKind::ForwardBackward,
            Work::TrainStep => StepKind::TrainStep,
        };
        config.step_bytes(self.batch as usize, 1, kind).total()
    }

    /// Returns the dimensions from which tensor sizes are computed.
    pub fn sizes(&self, config: &Config) -> Sizes {
        Sizes {
            batch: self.batch as usize,
            context: config.context,
            d_model: config.d_model,
            d_ff: config.d_ff,
            heads: config.heads,
            layers: config.layers,
            vocabulary: config.vocabulary,
            bytes: config.precision.dtype().size_in_bytes(),
        }
    }
}

/// A model with its inputs, and an optimizer if the work needs one.
pub struct Step {
    model: Transformer,
    trainer: Option<Trainer>,
    data_parallel: Option<DataParallel>,
    tokens: Tensor,
    targets: Tensor,
    work: Work,
}

impl Step {
    /// Initializes a model, random tokens, and an optimizer if `work` needs one. With data parallelism, they are those
    /// of one rank.
    ///
    /// # Errors
    /// Out of memory, or a batch that the number of ranks does not divide.
    pub fn new(
        options: &StepOptions,
        config: &Config,
        device: &Device,
        work: Work,
        data_parallel: Option<&DataParallelOptions>,
    ) -> Result<Step> {
        let needed = options.least_bytes(config, work);
        let training_failure = |error: crate::train::Error| training_failure(config, &error);
        kernel_device(device)?.check_memory(needed).map_err(|error| training_failure(error.into()))?;
        let model = {
            let _span = span("model");
            let model = match work {
                Work::Forward => Transformer::for_inference(config, device, 0),
                Work::ForwardBackward | Work::TrainStep => Transformer::new(config, device, 0),
            };
            model.map_err(|error| training_failure(error.into()))?
        };
        let trainer_options = TrainerOptions {
            adamw: AdamWOptions::default(),
            schedule: LrSchedule::constant(1e-4),
            weight_decay: 0.1,
            decay_embeddings: false,
            // As in `bench ddp`, ranks update parameters while other gradients are in flight. Clipping would need all
            // gradients first.
            clip: if data_parallel.is_none() { Some(1.0) } else { None },
        };
        let batch = options.batch as usize;
        let (data_parallel, trainer) = match (work, data_parallel) {
            (Work::Forward, _) => (None, None),
            (Work::ForwardBackward | Work::TrainStep, None) => {
                model.params().set_grad_dtype(gradient_dtype(model.params(), 1))?;
                let _span = span("optimizer state");
                (None, Some(Trainer::new(model.params(), trainer_options).map_err(training_failure)?))
            }
            (Work::ForwardBackward | Work::TrainStep, Some(data_parallel)) => {
                let (data_parallel, trainer) =
                    DataParallel::new(data_parallel, model.params(), trainer_options, batch, 1)
                        .map_err(training_failure)?;
                (Some(data_parallel), Some(trainer))
            }
        };
        let (rank, world) = data_parallel.as_ref().map_or((0, 1), |data_parallel| {
            (data_parallel.communicator().rank(), data_parallel.communicator().world())
        });
        let shape = (batch / world, config.context);
        let tokens = |seed: u64| -> Result<Tensor> {
            let last = config.vocabulary as f32 - 1.0;
            let draw = uniform(seed).map(|v| (0.5 * (v + 1.0) * last) as u32);
            Ok(Tensor::from_vec(draw.take(shape.0 * shape.1).collect(), shape, device)?)
        };
        let seed = 2 * rank as u64;
        Ok(Step { tokens: tokens(seed + 1)?, targets: tokens(seed + 2)?, model, trainer, data_parallel, work })
    }

    /// Runs the step once, with a span for each phase, and synchronizes the device. Gradients are zeroed lazily, in the
    /// backward phase.
    ///
    /// # Errors
    /// Out of memory, or the error of a kernel.
    pub fn run(&mut self) -> Result<()> {
        let config = self.model.config().clone();
        let training_failure = |error: crate::train::Error| training_failure(&config, &error);
        if let Some(trainer) = &self.trainer {
            trainer.begin();
        }
        let loss = {
            let _phase = phase(Phase::Forward);
            match self.work {
                Work::Forward => no_grad(|| self.model.loss(&self.tokens, &self.targets)),
                Work::ForwardBackward | Work::TrainStep => self.model.loss(&self.tokens, &self.targets),
            }
            .map_err(|error| training_failure(error.into()))?
        };
        if let Some(trainer) = &mut self.trainer {
            {
                // The graph is dropped inside of the phase, so that no time of the step is outside of its phases.
                let _phase = phase(Phase::Backward);
                trainer.backward(&loss, 1.0).map_err(training_failure)?;
                drop(loss);
            }
            match (&self.data_parallel, self.work) {
                (Some(data_parallel), Work::TrainStep) => {
                    drop(data_parallel.finish_step(trainer).map_err(training_failure)?)
                }
                (None, Work::TrainStep) => drop(trainer.update().map_err(training_failure)?),
                (Some(data_parallel), _) => {
                    data_parallel
                        .ddp()
                        .finish_gradient_synchronization()
                        .map_err(|error| training_failure(error.into()))?;
                }
                (None, _) => {}
            }
        }
        Ok(self.tokens.device().synchronize()?)
    }
}

/// Converts a training error to a command's error; an out-of-memory error gets a hint on what to reduce.
fn training_failure(config: &Config, error: &crate::train::Error) -> CliError {
    if !error.is_out_of_memory() {
        return CliError::Failure(error.to_string());
    }
    let smaller = ["a smaller --batch", "a smaller --context", "a smaller model"].map(str::to_string);
    let remedies = words(&[options_for_less(config), smaller.to_vec()].concat());
    CliError::Failure(format!("{}\n  help: use {remedies}", error.out_of_memory_text()))
}

/// Returns the options that reduce the memory of a step and that this model does not use yet.
pub fn options_for_less(config: &Config) -> Vec<String> {
    let naive = config.attention == Attention::Naive;
    let wide = config.precision.dtype().size_in_bytes() > 2;
    let options = [(!config.checkpoint, "--recompute"), (naive, "--attention flash"), (wide, "--precision bf16")];
    options.iter().filter(|(helps, _)| *helps).map(|(_, option)| option.to_string()).collect()
}

/// Joins alternatives: `a`, `a or b`, `a, b or c`.
pub fn words(parts: &[String]) -> String {
    match parts.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => parts.concat(),
    }
}
