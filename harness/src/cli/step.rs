//! A training step on tokens drawn at random, for the commands that look into one.

use candle_core::{Device, Tensor};
use clap::{Args, ValueEnum};

use super::model_options::{ModelOptions, model_device};
use super::run::{Choice, device};
use super::{CliError, Result};
use crate::memory::residual::Sizes;
use crate::model::{Config, Kind, Transformer};
use crate::numerics::autocast::uniform;
use crate::ops::memory::kernel_device;
use crate::optim::{AdamWOptions, Schedule};
use crate::params::no_grad;
use crate::profile::{Phase, phase, span};
use crate::train::{Learner, LearnerOptions, Team, TeamOptions, gradient_dtype};

/// Which step, and of which model.
#[derive(Args, Clone, Debug)]
pub struct StepOptions {
    #[command(flatten)]
    pub model: ModelOptions,
    /// Windows of a step, of all ranks together
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Number of tokens that there are
    #[arg(long, value_name = "TOKENS", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..))]
    pub vocabulary: u32,
    /// Where to run: cpu, cuda or cuda:N; without it, where TILEWRIGHT_DEVICE says, else on a GPU if there is one
    #[arg(long, value_parser = device)]
    pub device: Option<Choice>,
}

/// How much of a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Work {
    /// Inference: nothing is kept for a backward pass
    Forward,
    /// Loss and gradients
    ForwardBackward,
    /// Loss, gradients, clipping and AdamW
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
    /// The model for windows of `context` tokens.
    ///
    /// # Errors
    /// Sizes that do not exist or do not fit together.
    pub fn config(&self, context: usize) -> Result<Config> {
        self.model.config(Config { context, vocabulary: self.vocabulary as usize, ..Config::default() })
    }

    /// The device of the step.
    ///
    /// # Errors
    /// As [`model_device`].
    pub fn device(&self) -> Result<Device> {
        model_device(self.device)
    }

    /// Bytes that so much of a step takes at least.
    pub fn least_bytes(&self, config: &Config, work: Work) -> f64 {
        let kind = match work {
            Work::Forward => Kind::Forward,
            Work::ForwardBackward => Kind::ForwardBackward,
            Work::TrainStep => Kind::TrainStep,
        };
        config.step_bytes(self.batch as usize, kind)
    }

    /// What the arithmetic of tensors' sizes takes.
    pub fn sizes(&self, config: &Config) -> Sizes {
        Sizes {
            batch: self.batch as usize,
            context: config.context,
            width: config.width,
            hidden: config.hidden,
            heads: config.heads,
            layers: config.layers,
            vocabulary: config.vocabulary,
            bytes: config.precision.dtype().size_in_bytes(),
        }
    }
}

/// A model with what its steps need.
pub struct Step {
    model: Transformer,
    learner: Option<Learner>,
    team: Option<Team>,
    tokens: Tensor,
    targets: Tensor,
    work: Work,
}

impl Step {
    /// A model with starting values, tokens for it, and an optimizer where the work asks for one; in a team, one rank's.
    ///
    /// # Errors
    /// No memory for them, ranks that do not divide the batch.
    pub fn new(
        options: &StepOptions,
        config: &Config,
        device: &Device,
        work: Work,
        team: Option<&TeamOptions>,
    ) -> Result<Step> {
        let needed = options.least_bytes(config, work);
        kernel_device(device)?.expect_memory(needed).map_err(|error| stopped(error.into()))?;
        let model = {
            let _span = span("model");
            Transformer::new(config, device, 0).map_err(explained)?
        };
        let rates = LearnerOptions {
            adamw: AdamWOptions::default(),
            schedule: Schedule::constant(1e-4),
            weight_decay: 0.1,
            decay_embeddings: false,
            // Ranks update parameters while gradients travel, as in `bench ddp`: clipping would wait for all of them.
            clip: if team.is_none() { Some(1.0) } else { None },
        };
        let batch = options.batch as usize;
        let (team, learner) = match (work, team) {
            (Work::Forward, _) => (None, None),
            (Work::ForwardBackward | Work::TrainStep, None) => {
                model.params().keep_grads(gradient_dtype(model.params(), 1))?;
                let _span = span("optimizer state");
                (None, Some(Learner::new(model.params(), rates).map_err(stopped)?))
            }
            (Work::ForwardBackward | Work::TrainStep, Some(team)) => {
                let (team, learner) = Team::form(team, model.params(), rates, batch, 1).map_err(stopped)?;
                (Some(team), Some(learner))
            }
        };
        let (rank, world) =
            team.as_ref().map_or((0, 1), |team| (team.communicator().rank(), team.communicator().world()));
        let shape = (batch / world, config.context);
        let tokens = |seed: u64| -> Result<Tensor> {
            let last = config.vocabulary as f32 - 1.0;
            let draw = uniform(seed).map(|v| (0.5 * (v + 1.0) * last) as u32);
            Ok(Tensor::from_vec(draw.take(shape.0 * shape.1).collect(), shape, device)?)
        };
        let seed = 2 * rank as u64;
        Ok(Step { tokens: tokens(seed + 1)?, targets: tokens(seed + 2)?, model, learner, team, work })
    }

    /// Runs it once, in phases, and waits for the device. Setting gradients to zero counts as the optimizer's, since the
    /// learner says so.
    ///
    /// # Errors
    /// No memory, or whatever else a kernel says.
    pub fn run(&mut self) -> Result<()> {
        if let Some(learner) = &self.learner {
            learner.begin().map_err(stopped)?;
        }
        let loss = {
            let _phase = phase(Phase::Forward);
            match self.work {
                Work::Forward => no_grad(|| self.model.loss(&self.tokens, &self.targets)),
                Work::ForwardBackward | Work::TrainStep => self.model.loss(&self.tokens, &self.targets),
            }
            .map_err(explained)?
        };
        if let Some(learner) = &mut self.learner {
            {
                // What backward kept is given up in it: a measured step has no time outside of its phases.
                let _phase = phase(Phase::Backward);
                learner.backward(&loss, 1.0).map_err(stopped)?;
                drop(loss);
            }
            match (&self.team, self.work) {
                (Some(team), Work::TrainStep) => drop(team.finish(learner).map_err(stopped)?),
                (None, Work::TrainStep) => drop(learner.update().map_err(stopped)?),
                (Some(team), _) => {
                    team.ddp().finish_gradient_synchronization().map_err(|error| stopped(error.into()))?;
                }
                (None, _) => {}
            }
        }
        Ok(self.tokens.device().synchronize()?)
    }
}

fn stopped(error: crate::train::Error) -> CliError {
    match error.is_out_of_memory() {
        true => out_of_memory(&error),
        false => CliError::Failure(error.to_string()),
    }
}

fn explained(error: candle_core::Error) -> CliError {
    stopped(error.into())
}

fn out_of_memory(error: &crate::train::Error) -> CliError {
    CliError::Failure(format!(
        "out of memory: {error}\n  help: a smaller --batch, --context or --size needs less; --recompute keeps less between forward and \
         backward, --precision bf16 halves what is kept"
    ))
}
