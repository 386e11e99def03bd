//! A training step on tokens drawn at random, for the commands that look into one.

use candle_core::{Device, Tensor};
use clap::{Args, ValueEnum};

use super::model_options::{ModelOptions, model_device};
use super::run::{Choice, device};
use super::{CliError, Result};
use crate::memory::residual::Sizes;
use crate::model::{Attention, Config, Kind, Transformer};
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
    /// Windows of a step, of all ranks together (of `train`: 16 without its --batch)
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Entries of the vocabulary; 1024, and 10000 with --size
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub vocab: Option<u32>,
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
        let vocabulary = self.vocab.map_or(self.model.usual_vocabulary(), |vocab| vocab as usize);
        self.model.config(Config { context, vocabulary, ..Config::default() })
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
        config.step_bytes(self.batch as usize, 1, kind).total()
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
        let stopped = |error: crate::train::Error| stopped(config, &error);
        kernel_device(device)?.expect_memory(needed).map_err(|error| stopped(error.into()))?;
        let model = {
            let _span = span("model");
            let made = match work {
                Work::Forward => Transformer::for_inference(config, device, 0),
                Work::ForwardBackward | Work::TrainStep => Transformer::new(config, device, 0),
            };
            made.map_err(|error| stopped(error.into()))?
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
        let config = self.model.config().clone();
        let stopped = |error: crate::train::Error| stopped(&config, &error);
        if let Some(learner) = &self.learner {
            learner.begin().map_err(stopped)?;
        }
        let loss = {
            let _phase = phase(Phase::Forward);
            match self.work {
                Work::Forward => no_grad(|| self.model.loss(&self.tokens, &self.targets)),
                Work::ForwardBackward | Work::TrainStep => self.model.loss(&self.tokens, &self.targets),
            }
            .map_err(|error| stopped(error.into()))?
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

fn stopped(config: &Config, error: &crate::train::Error) -> CliError {
    if !error.is_out_of_memory() {
        return CliError::Failure(error.to_string());
    }
    let less = ["a smaller --batch", "a smaller --context", "a smaller model"].map(str::to_string);
    let less = words(&[options_for_less(config), less.to_vec()].concat());
    CliError::Failure(format!("{}\n  help: {less} takes less", error.out_of_memory_text()))
}

/// Options that let a step of this model take less memory, of those that it does not have yet.
pub fn options_for_less(config: &Config) -> Vec<String> {
    let naive = config.attention == Attention::Naive;
    let long = config.precision.dtype().size_in_bytes() > 2;
    let options = [(!config.checkpoint, "--recompute"), (naive, "--attention flash"), (long, "--precision bf16")];
    options.iter().filter(|(helps, _)| *helps).map(|(_, option)| option.to_string()).collect()
}

/// `a`, `a or b`, `a, b or c`.
pub fn words(parts: &[String]) -> String {
    match parts.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => parts.concat(),
    }
}
