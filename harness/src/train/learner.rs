//! One training step, in pieces.

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use tilewright::{View, ViewMut};

use super::{Error, LossScale, Result};
use crate::dist::sharded::ShardedOptimizer;
use crate::ops::memory::{self, Read, kernel_device, kernel_error};
use crate::optim::{AdamW, AdamWOptions, Copy, Group, Schedule, clip, first_not_finite, merge_groups, norm};
use crate::params::{Param, Params};
use crate::profile::{Phase, phase};

/// How parameters are updated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearnerOptions {
    pub adamw: AdamWOptions,
    pub schedule: Schedule,
    /// λ of parameters that decay.
    #[serde(with = "super::exact")]
    pub weight_decay: f64,
    /// Whether embeddings decay too, as matrices do. Norms never do.
    pub decay_embeddings: bool,
    /// Largest norm of the whole gradient; larger ones are shrunk to it.
    #[serde(with = "super::exact::option")]
    pub clip: Option<f64>,
}

/// What an update found and did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// The number of the step, from 1.
    pub step: u64,
    /// Learning rate.
    pub rate: f64,
    /// Norm of the gradient before clipping.
    pub norm: f64,
    /// False where an f16 gradient overflowed, and the parameters stayed as they were.
    pub applied: bool,
}

/// Parameters that learn.
///
/// ```text
/// learner.begin()?;
/// for each micro-batch { learner.backward(&loss, share)?; }
/// // here gradients of other processes would be added
/// let update = learner.update()?;
/// ```
pub struct Learner {
    params: Params,
    options: LearnerOptions,
    groups: Vec<Group>,
    engine: Engine,
    scale: LossScale,
    step: u64,
}

/// Who has the optimizer's state.
enum Engine {
    /// This process, all of it.
    Whole(AdamW),
    /// Each rank a part.
    Shared(Box<ShardedOptimizer<AdamW>>),
}

/// First and second moments of all parameters.
pub enum Moments<'a> {
    /// Where the optimizer keeps them.
    Here(View<'a, f32>, View<'a, f32>),
    /// On the host, collected from all ranks.
    Collected(Vec<f32>, Vec<f32>),
}

impl Moments<'_> {
    /// Both, an element for each element of the flat tensors.
    ///
    /// # Errors
    /// Those of the device.
    pub fn views(&self) -> Result<(View<'_, f32>, View<'_, f32>)> {
        let host = kernel_device(&candle_core::Device::Cpu)?;
        match self {
            Moments::Here(first, second) => Ok((*first, *second)),
            Moments::Collected(first, second) => Ok((View::of_slice(host, first)?, View::of_slice(host, second)?)),
        }
    }
}

impl Learner {
    /// # Errors
    /// No memory for the moments on the parameters' device.
    pub fn new(params: &Params, options: LearnerOptions) -> Result<Learner> {
        let device = kernel_device(params.device())?;
        let adamw = AdamW::new(device, 0..params.flat_len(), options.adamw)?;
        Ok(Learner::with_engine(params, options, Engine::Whole(adamw)))
    }

    /// As [`Learner::new`], with an optimizer of which every rank has a part.
    pub fn shared(params: &Params, options: LearnerOptions, optimizer: ShardedOptimizer<AdamW>) -> Learner {
        Learner::with_engine(params, options, Engine::Shared(Box::new(optimizer)))
    }

    fn with_engine(params: &Params, options: LearnerOptions, engine: Engine) -> Learner {
        let f16 = params.copy().is_some_and(|copy| copy.dtype() == DType::F16);
        Learner {
            groups: groups(params, &options),
            engine,
            scale: if f16 { LossScale::dynamic() } else { LossScale::NONE },
            params: params.clone(),
            options,
            step: 0,
        }
    }

    pub fn params(&self) -> &Params {
        &self.params
    }

    pub fn options(&self) -> &LearnerOptions {
        &self.options
    }

    /// The groups of [`AdamW::step`].
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Steps that the optimizer made: without those that an f16 overflow left out.
    pub fn optimizer_steps(&self) -> u64 {
        match &self.engine {
            Engine::Whole(adamw) => adamw.steps(),
            Engine::Shared(shared) => shared.steps(),
        }
    }

    /// Bytes of the optimizer's state in this process.
    pub fn optimizer_bytes(&self) -> usize {
        match &self.engine {
            Engine::Whole(adamw) => adamw.bytes(),
            Engine::Shared(shared) => shared.bytes(),
        }
    }

    /// Whether every rank has a part of the optimizer's state, so that [`Learner::moments`] is for all ranks to call.
    pub fn is_shared(&self) -> bool {
        matches!(self.engine, Engine::Shared(_))
    }

    /// The moments of all parameters.
    ///
    /// # Errors
    /// Those of communication, where they are on many ranks.
    pub fn moments(&self) -> Result<Moments<'_>> {
        match &self.engine {
            Engine::Whole(adamw) => {
                let (first, second) = adamw.moments();
                Ok(Moments::Here(first, second))
            }
            Engine::Shared(shared) => {
                let mut state = shared.gather_state()?.into_iter();
                Ok(Moments::Collected(state.next().unwrap_or_default(), state.next().unwrap_or_default()))
            }
        }
    }

    /// Steps made, those included that an f16 overflow left out.
    pub fn step(&self) -> u64 {
        self.step
    }

    pub fn scale(&self) -> LossScale {
        self.scale
    }

    /// Sets what a checkpoint has: `read` fills the first and the second moments of all parameters.
    pub(super) fn restore(
        &mut self,
        step: u64,
        scale: LossScale,
        optimizer_steps: u64,
        read: impl FnOnce(ViewMut<'_, f32>, ViewMut<'_, f32>) -> tilewright::Result<()>,
    ) -> Result<()> {
        (self.step, self.scale) = (step, scale);
        match &mut self.engine {
            Engine::Whole(adamw) => Ok(adamw.restore(optimizer_steps, read)?),
            Engine::Shared(shared) => {
                let host = kernel_device(&candle_core::Device::Cpu)?;
                let mut state = vec![vec![0.0_f32; self.params.flat_len()]; 2];
                if let [first, second] = state.as_mut_slice() {
                    read(ViewMut::of_slice(host, first)?, ViewMut::of_slice(host, second)?)?;
                }
                Ok(shared.load_state(optimizer_steps, &state)?)
            }
        }
    }

    /// Begins a step: all gradients are zero.
    ///
    /// # Errors
    /// Those of earlier work on the device.
    pub fn begin(&self) -> Result<()> {
        let _phase = phase(Phase::Optimizer);
        Ok(self.params.zero_grads()?)
    }

    /// Adds `share` times the gradient of `loss`, a scalar. The shares of a step's micro-batches add up to 1.
    ///
    /// # Errors
    /// Those of the model's ops, lack of memory above all.
    pub fn backward(&self, loss: &Tensor, share: f64) -> Result<()> {
        let _phase = phase(Phase::Backward);
        let factor = share * self.scale.factor();
        match factor == 1.0 {
            true => loss.backward()?,
            false => (loss * factor)?.backward()?,
        };
        Ok(())
    }

    /// Clips the gradient and makes a step of AdamW. Waits for the device.
    ///
    /// # Errors
    /// A gradient that is not finite, with the first parameter whose gradient it is; the parameters are as before.
    pub fn update(&mut self) -> Result<Update> {
        let norm = self.gradient_norm()?;
        self.update_with_norm(norm)
    }

    /// The norm of the whole gradient, without loss scaling. Waits for the device.
    ///
    /// # Errors
    /// Those of earlier work on the device.
    pub fn gradient_norm(&self) -> Result<f64> {
        let _phase = phase(Phase::Optimizer);
        let device = kernel_device(self.params.device())?;
        let gradients = Read::<f32>::new(self.params.grads())?;
        let norm = match &self.engine {
            Engine::Whole(_) => norm(device, gradients.view()?)?,
            Engine::Shared(shared) => shared.gradient_norm(gradients.view()?)?,
        };
        Ok(norm / self.scale.factor())
    }

    /// As [`Learner::update`], for a gradient whose norm is known already, as it is where each process has a share of it.
    ///
    /// # Errors
    /// As [`Learner::update`].
    pub fn update_with_norm(&mut self, norm: f64) -> Result<Update> {
        let step = self.step + 1;
        let rate = self.options.schedule.rate(step);
        let factor = self.scale.factor();
        match self.scale.learn(norm.is_finite()) {
            Some(true) => self.apply(rate, clip(norm, self.options.clip) / factor)?,
            Some(false) => {}
            None => return Err(self.not_finite(step)),
        }
        let applied = norm.is_finite();
        self.step = step;
        Ok(Update { step, rate, norm, applied })
    }

    fn apply(&mut self, rate: f64, gradient_scale: f64) -> Result<()> {
        let _phase = phase(Phase::Optimizer);
        let (engine, groups) = (&mut self.engine, &self.groups);
        let gradients = Read::<f32>::new(self.params.grads())?;
        let copy = self.params.copy();
        let copy_dtype = copy.as_ref().map(Tensor::dtype);
        let adamw = match engine {
            Engine::Whole(adamw) => adamw,
            Engine::Shared(shared) => {
                memory::write::<f32, _>(self.params.values(), |_, values| {
                    Ok(shared.step(values, gradients.view()?, groups, rate, gradient_scale)?)
                })?;
                return Ok(self.params.refresh_copy()?);
            }
        };
        memory::write::<f32, _>(self.params.values(), |_, values| {
            let gradients = gradients.view()?;
            let go = |copy: Copy<'_>| {
                adamw.step(values, gradients, copy, groups, rate, gradient_scale).map_err(kernel_error)
            };
            match (&copy, copy_dtype) {
                (Some(copy), Some(DType::BF16)) => memory::write::<bf16, _>(copy, |_, copy| go(Copy::Bf16(copy))),
                (Some(copy), Some(DType::F16)) => memory::write::<f16, _>(copy, |_, copy| go(Copy::F16(copy))),
                _ => go(Copy::None),
            }
        })?;
        Ok(())
    }

    fn not_finite(&self, step: u64) -> Error {
        let first = match first_in(self.params.grads(), &self.params) {
            Ok(Some(name)) => format!("that of `{name}`"),
            Ok(None) => "none: its elements are finite, and the sum of their squares is not".to_string(),
            Err(error) => format!("unknown: {error}"),
        };
        Error::NotFinite { step, what: "the gradient", first, saved: None }
    }
}

/// The name of the first parameter that has NaN or infinity in `flat`, the parameters' values or their gradients.
pub(super) fn first_in(flat: &Tensor, params: &Params) -> Result<Option<String>> {
    let device = kernel_device(params.device())?;
    let list: Vec<Param> = params.iter().collect();
    let flat = Read::<f32>::new(flat)?;
    let parts = list.iter().map(|param| (param.name(), param.range()));
    Ok(first_not_finite(device, flat.view()?, parts)?.map(str::to_string))
}

/// The parameters that are trained, in groups of neighbours with the same options. Gaps between neighbours go with them: they are zeros,
/// and their gradients are.
fn groups(params: &Params, options: &LearnerOptions) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for param in params.iter().filter(Param::requires_grad) {
        let decays = param.decay() && (options.decay_embeddings || !param.name().contains("embed"));
        let group = Group {
            range: param.range(),
            weight_decay: if decays { options.weight_decay } else { 0.0 },
            rate_factor: param.lr_scale(),
        };
        groups.push(group);
    }
    for i in 1..groups.len() {
        let gap = groups[i].range.start - groups[i - 1].range.end;
        if gap < crate::params::ALIGNMENT {
            groups[i - 1].range.end = groups[i].range.start;
        }
    }
    merge_groups(groups)
}
