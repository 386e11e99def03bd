//! The subject of `bench model`: a model with its batch, its optimizer, and the CUDA graph of its step.

use std::time::Instant;

use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::wall_time::Times;
use super::{Case, Mode, Variant};
use crate::cli::oom_probe::expect_memory;
use crate::model::{Config, ModelGraphRunner, StepKind, Transformer};
use crate::optim::{AdamWOptions, LrSchedule};
use crate::params::{Params, no_grad};
use crate::train::{self, QueuedStep, Trainer, TrainerOptions};

/// Times of a case in one mode, and its peak memory on a GPU in bytes.
pub struct StepTimes {
    pub step: Times,
    pub forward: Times,
    pub backward: Times,
    pub optimizer: Times,
    pub memory: Option<f64>,
    pub fallback_reason: Option<String>,
}

/// How many steps of a case are run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Number of warm-up steps.
    pub warmup: usize,
    /// Number of measured steps.
    pub steps: usize,
    /// Time limit in seconds for the steps of one kind, after at least [`MIN_STEPS`] of them.
    pub seconds: Option<f64>,
}

/// Minimum number of steps, enough for a replay: the first step runs eagerly, the second one is captured.
const MIN_STEPS: usize = 3;

impl Plan {
    /// Runs `step` up to `count` times, within the time limit.
    fn repeat(&self, count: usize, mut step: impl FnMut() -> train::Result<()>) -> train::Result<()> {
        let began = Instant::now();
        for i in 0..count {
            let late = self.seconds.is_some_and(|seconds| began.elapsed().as_secs_f64() > seconds);
            if i >= MIN_STEPS && late {
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
pub struct ParamCache(Option<Params>);

impl ParamCache {
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
    Variant { mode, cuda_graph, time_phases }: Variant,
    plan: &Plan,
    param_cache: &mut ParamCache,
) -> train::Result<StepTimes> {
    let kind = match mode {
        Mode::Forward => StepKind::Forward,
        Mode::ForwardBackward => StepKind::ForwardBackward,
        Mode::TrainStep => StepKind::TrainStep,
    };
    expect_memory(device, case.config.step_bytes(case.batch, 1, kind).total())?;
    let on = tilewright_candle::memory::kernel_device(device)?;
    on.reset_peak_memory()?;
    let mut subject = Subject::new(case, device, mode, cuda_graph, param_cache)?;
    device.synchronize()?;
    let mut discarded = Times::default();
    plan.repeat(plan.warmup, || discarded.time(device, || subject.step()))?;
    let mut step = Times::default();
    plan.repeat(plan.steps, || step.time(device, || subject.step()))?;
    let memory = on.peak_memory()?.map(|bytes| bytes as f64);
    let (mut forward, mut backward, mut optimizer) = Default::default();
    // Phases are timed in separate steps, because synchronizing between them slows the step down.
    plan.repeat(if time_phases { plan.steps } else { 0 }, || {
        subject.time_phases(device, [&mut forward, &mut backward, &mut optimizer])
    })?;
    // On the CPU, keep nothing: the next case checks the available memory before it allocates.
    param_cache.0 = device.is_cuda().then(|| subject.model.params().clone());
    Ok(StepTimes {
        step,
        forward,
        backward,
        optimizer,
        memory,
        fallback_reason: subject.fallback_reason().map(str::to_string),
    })
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
    ForwardBackward(Option<ModelGraphRunner>),
    Train(Box<Trainer>, QueuedStep),
}

impl Subject {
    fn new(
        case: &Case,
        device: &Device,
        mode: Mode,
        cuda_graph: bool,
        param_cache: &mut ParamCache,
    ) -> train::Result<Subject> {
        let model = param_cache.model(&case.config, device)?;
        let (inputs, targets) = random_batch(&case.config, case.batch, device)?;
        model.params().set_grad_dtype(train::gradient_dtype(model.params(), 1))?;
        let steps = match mode {
            Mode::Forward => Steps::Forward,
            Mode::ForwardBackward => Steps::ForwardBackward(cuda_graph.then(|| ModelGraphRunner::new(&model))),
            Mode::TrainStep => {
                let trainer = Trainer::new(model.params(), options())?;
                let queued = if cuda_graph { QueuedStep::new(&trainer) } else { QueuedStep::eager() };
                Steps::Train(Box::new(trainer), queued)
            }
        };
        Ok(Subject { model, inputs, targets, steps })
    }

    /// Returns the fallback reason, if steps could not be replayed.
    fn fallback_reason(&self) -> Option<&str> {
        match &self.steps {
            Steps::Forward | Steps::ForwardBackward(None) => None,
            Steps::ForwardBackward(Some(graph)) => graph.fallback_reason(),
            Steps::Train(_, queued) => queued.fallback_reason(),
        }
    }

    fn step(&mut self) -> train::Result<()> {
        let Subject { model, inputs, targets, steps } = self;
        match steps {
            Steps::Forward => drop(no_grad(|| model.loss(inputs, targets))?),
            Steps::ForwardBackward(graph) => {
                model.params().zero_grads()?;
                match graph {
                    Some(graph) => drop(graph.forward_backward(inputs, targets, 1.0)?),
                    None => drop(model.loss(inputs, targets)?.backward()?),
                }
            }
            Steps::Train(trainer, queued) => {
                let sequences = inputs.dim(0)?;
                let (registered, result) = queued.queue(model, trainer, [inputs, targets], sequences)?.wait()?;
                trainer.commit(registered, result.values())?;
            }
        }
        Ok(())
    }

    /// Runs a step with a synchronization after forward, backward and optimizer, and times each.
    fn time_phases(&mut self, device: &Device, [forward, backward, optimizer]: [&mut Times; 3]) -> train::Result<()> {
        let Subject { model, inputs, targets, steps } = self;
        model.params().zero_grads()?;
        let loss = forward.time(device, || Ok(model.loss(inputs, targets)?))?;
        backward.time(device, || Ok(loss.backward().map(drop)?))?;
        if let Steps::Train(trainer, _) = steps {
            optimizer.time(device, || trainer.update())?;
        }
        Ok(())
    }
}

fn options() -> TrainerOptions {
    TrainerOptions {
        adamw: AdamWOptions::default(),
        schedule: LrSchedule::constant(1e-4),
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
