//! The subject of `bench model`: a model with its batch, its optimizer, and the CUDA graph of its step.

use std::time::Instant;

use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::wall::Times;
use super::{Case, Mode};
use crate::cli::trial::expect_memory;
use crate::model::{Config, Kind, Replay, Transformer};
use crate::optim::{AdamWOptions, Schedule};
use crate::params::{Params, no_grad};
use crate::train::{self, Learner, LearnerOptions, WholeStep};

/// The results of a case.
pub struct Parts {
    pub step: Times,
    pub forward: Times,
    pub backward: Times,
    pub optimizer: Times,
    pub memory: Option<f64>,
    pub why_not: Option<String>,
}

/// How many steps of a case are run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Number of warm-up steps.
    pub warmup: usize,
    /// Number of measured steps.
    pub steps: usize,
    /// Time limit in seconds for the steps of one kind, after at least [`FEWEST`] of them.
    pub seconds: Option<f64>,
}

/// Enough for a replay: the first step runs eagerly, the second one is captured.
const FEWEST: usize = 3;

impl Plan {
    /// Runs `step` up to `count` times, within the time limit.
    fn repeat(&self, count: usize, mut step: impl FnMut() -> train::Result<()>) -> train::Result<()> {
        let began = Instant::now();
        for i in 0..count {
            let late = self.seconds.is_some_and(|seconds| began.elapsed().as_secs_f64() > seconds);
            if i >= FEWEST && late {
                break;
            }
            step()?;
        }
        Ok(())
    }
}

/// Parameters of the previous case, reused if the shapes match: step times do not depend on values, and initializing
/// billions of them takes seconds.
#[derive(Default)]
pub struct Kept(Option<Params>);

impl Kept {
    fn model(&mut self, config: &Config, device: &Device) -> train::Result<Transformer> {
        let specs = config.specs();
        let fits = |params: &Params| {
            let shapes = params.iter().map(|param| (param.name().to_string(), param.shape().to_vec()));
            shapes.eq(specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())))
        };
        // Parameters of other shapes are dropped before new ones are allocated. The caller puts them back on success
        // only: after an error their use counts may be wrong.
        let known = self.0.take().filter(fits);
        Ok(match known {
            Some(params) => Transformer::with_params(config, params)?,
            None => Transformer::new(config, device, 0)?,
        })
    }
}

/// Times a case in one mode, optionally replayed as a CUDA graph, and optionally its phases separately.
///
/// # Errors
/// Out of memory, or an error of the model.
pub fn measure(
    case: &Case,
    device: &Device,
    (mode, replay, apart): (Mode, bool, bool),
    plan: &Plan,
    kept: &mut Kept,
) -> train::Result<Parts> {
    let kind = match mode {
        Mode::Forward => Kind::Forward,
        Mode::ForwardBackward => Kind::ForwardBackward,
        Mode::TrainStep => Kind::TrainStep,
    };
    expect_memory(device, case.config.step_bytes(case.batch, 1, kind).total())?;
    let on = crate::ops::memory::kernel_device(device)?;
    on.restart_peak_memory()?;
    let mut subject = Subject::new(case, device, mode, replay, kept)?;
    device.synchronize()?;
    let mut unkept = Times::default();
    plan.repeat(plan.warmup, || unkept.take(device, || subject.step()))?;
    let mut step = Times::default();
    plan.repeat(plan.steps, || step.take(device, || subject.step()))?;
    let memory = on.peak_memory()?.map(|bytes| bytes as f64);
    let (mut forward, mut backward, mut optimizer) = Default::default();
    // Phases are timed in separate steps, because synchronizing between them slows the step down.
    plan.repeat(if apart { plan.steps } else { 0 }, || {
        subject.parts(device, [&mut forward, &mut backward, &mut optimizer])
    })?;
    // On the CPU, the next case checks the available memory before it allocates: keep nothing.
    kept.0 = device.is_cuda().then(|| subject.model.params().clone());
    Ok(Parts { step, forward, backward, optimizer, memory, why_not: subject.why_not().map(str::to_string) })
}

/// A model, its batch, and what a step runs.
struct Subject {
    model: Transformer,
    inputs: Tensor,
    targets: Tensor,
    steps: Steps,
}

/// What a step runs.
enum Steps {
    Forward,
    ForwardBackward(Option<Replay>),
    Train(Box<Learner>, WholeStep),
}

impl Subject {
    fn new(case: &Case, device: &Device, mode: Mode, replay: bool, kept: &mut Kept) -> train::Result<Subject> {
        let model = kept.model(&case.config, device)?;
        let (inputs, targets) = random_batch(&case.config, case.batch, device)?;
        model.params().keep_grads(train::gradient_dtype(model.params(), 1))?;
        let steps = match mode {
            Mode::Forward => Steps::Forward,
            Mode::ForwardBackward => Steps::ForwardBackward(replay.then(|| Replay::new(&model))),
            Mode::TrainStep => {
                let learner = Learner::new(model.params(), options())?;
                let whole = if replay { WholeStep::new(&learner) } else { WholeStep::one_by_one() };
                Steps::Train(Box::new(learner), whole)
            }
        };
        Ok(Subject { model, inputs, targets, steps })
    }

    /// Returns the fallback reason, if steps could not be replayed.
    fn why_not(&self) -> Option<&str> {
        match &self.steps {
            Steps::Forward | Steps::ForwardBackward(None) => None,
            Steps::ForwardBackward(Some(replay)) => replay.why_not(),
            Steps::Train(_, whole) => whole.why_not(),
        }
    }

    fn step(&mut self) -> train::Result<()> {
        let Subject { model, inputs, targets, steps } = self;
        match steps {
            Steps::Forward => drop(no_grad(|| model.loss(inputs, targets))?),
            Steps::ForwardBackward(replay) => {
                model.params().zero_grads()?;
                match replay {
                    Some(replay) => drop(replay.forward_backward(inputs, targets, 1.0)?),
                    None => drop(model.loss(inputs, targets)?.backward()?),
                }
            }
            Steps::Train(learner, whole) => {
                let windows = inputs.dim(0)?;
                let (announced, found) = whole.queue(model, learner, [inputs, targets], windows)?.wait()?;
                learner.settle(announced, found.numbers())?;
            }
        }
        Ok(())
    }

    /// Runs a step with a synchronization after forward, backward and optimizer, and times each.
    fn parts(&mut self, device: &Device, [forward, backward, optimizer]: [&mut Times; 3]) -> train::Result<()> {
        let Subject { model, inputs, targets, steps } = self;
        model.params().zero_grads()?;
        let loss = forward.take(device, || Ok(model.loss(inputs, targets)?))?;
        backward.take(device, || Ok(loss.backward().map(drop)?))?;
        if let Steps::Train(learner, _) = steps {
            optimizer.take(device, || learner.update())?;
        }
        Ok(())
    }
}

fn options() -> LearnerOptions {
    LearnerOptions {
        adamw: AdamWOptions::default(),
        schedule: Schedule::constant(1e-4),
        weight_decay: 0.1,
        decay_embeddings: true,
        clip: Some(1.0),
    }
}

fn random_batch(config: &Config, batch: usize, device: &Device) -> train::Result<(Tensor, Tensor)> {
    let mut random = StdRng::seed_from_u64(0);
    let mut tokens = || -> candle_core::Result<Tensor> {
        let count = batch * config.context;
        let tokens: Vec<u32> = (0..count).map(|_| random.random_range(0..config.vocabulary as u32)).collect();
        Tensor::from_vec(tokens, (batch, config.context), device)
    };
    Ok((tokens()?, tokens()?))
}
