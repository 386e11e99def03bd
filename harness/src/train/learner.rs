//! The trainer: one training step in separate calls, with loss scaling, gradient clipping and AdamW.

use std::ops::Range;

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use tilewright::kernels::FloatElement;
use tilewright::{View, ViewMut};

use super::{Error, LossScale, Result};
use crate::dist::ddp::{Ddp, Synchronized};
use crate::dist::sharded::{Mode, ShardedOptimizer};
use crate::ops::convert;
use crate::ops::memory::{self, Elem, Read, kernel_device, kernel_error};
use crate::optim::judge::{self, Pieces, found, told};
use crate::optim::{AdamW, AdamWOptions, Copy, Group, Schedule, clip, first_not_finite, merge_groups};
use crate::params::{Param, Params};
use crate::profile::{Phase, phase};

/// Options of the optimizer update.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearnerOptions {
    pub adamw: AdamWOptions,
    pub schedule: Schedule,
    /// Weight decay λ.
    #[serde(with = "super::exact")]
    pub weight_decay: f64,
    /// Whether weight decay applies to embeddings as to other matrices. It never applies to norms.
    pub decay_embeddings: bool,
    /// Maximum norm of the whole gradient (gradient clipping).
    #[serde(with = "super::exact::option")]
    pub clip: Option<f64>,
}

/// Result of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Number of the step, from 1.
    pub step: u64,
    /// Learning rate.
    pub rate: f64,
    /// Gradient norm before clipping.
    pub norm: f64,
    /// False if an f16 gradient overflowed (found_inf) and the step was skipped.
    pub applied: bool,
}

/// Trainer state: parameters, optimizer, loss scale.
///
/// ```text
/// learner.begin()?;
/// for each micro-batch { learner.backward(&loss, share)?; }
/// // all-reduce of gradients goes here
/// let update = learner.update()?;
/// ```
///
/// [`Learner::update`] synchronizes with the device. With a replicated optimizer it consists of three calls that do
/// not: [`Learner::announce`] registers the step, [`Learner::decide`] enqueues the update, and [`Learner::settle`]
/// commits the step when its outputs are read back.
pub struct Learner {
    params: Params,
    options: LearnerOptions,
    groups: Vec<Group>,
    engine: Engine,
    scale: LossScale,
    step: u64,
    /// Inputs and outputs of step control on the device: f64, see [`judge`].
    told: Tensor,
    found: Tensor,
}

/// A registered step whose outcome is not known yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Announced {
    /// Number of the step, from 1.
    pub step: u64,
    /// Learning rate.
    pub rate: f64,
    /// Step count of the optimizer before this step.
    optimizer_steps: u64,
}

/// Where the optimizer's state is stored.
enum Engine {
    /// All of it in this process.
    Whole(AdamW),
    /// One shard per rank.
    Shared(Box<ShardedOptimizer<AdamW>>),
}

impl Engine {
    /// The replicated optimizer, for steps that are enqueued.
    fn whole(&mut self) -> Result<&mut AdamW> {
        match self {
            Engine::Whole(adamw) => Ok(adamw),
            Engine::Shared(_) => {
                let message = "a sharded optimizer runs its steps with `update`";
                Err(candle_core::Error::Msg(message.into()).into())
            }
        }
    }
}

/// First and second moments of a range of the flat tensors.
pub struct Moments<'a> {
    pub range: Range<usize>,
    pub first: View<'a, f32>,
    pub second: View<'a, f32>,
}

impl Learner {
    /// Creates a trainer for gradients of the parameters' gradient dtype: see [`gradient_dtype`].
    ///
    /// # Errors
    /// No memory for the moments on the parameters' device.
    pub fn new(params: &Params, options: LearnerOptions) -> Result<Learner> {
        let device = kernel_device(params.device())?;
        let adamw = AdamW::new(device, 0..params.flat_len(), options.adamw)?;
        Learner::with_engine(params, options, Engine::Whole(adamw))
    }

    /// Same as [`Learner::new`], with a sharded optimizer.
    ///
    /// # Errors
    /// See [`Learner::new`].
    pub fn shared(params: &Params, options: LearnerOptions, optimizer: ShardedOptimizer<AdamW>) -> Result<Learner> {
        Learner::with_engine(params, options, Engine::Shared(Box::new(optimizer)))
    }

    fn with_engine(params: &Params, options: LearnerOptions, engine: Engine) -> Result<Learner> {
        let f16 = params.copy().is_some_and(|copy| copy.dtype() == DType::F16);
        let groups = groups(params, &options);
        let numbers = (told::RATES + told::PER_GROUP * groups.len()).next_multiple_of(judge::AT_ONCE);
        Ok(Learner {
            told: Tensor::zeros(numbers, DType::F64, params.device())?,
            found: Tensor::zeros(found::LOSSES + 1, DType::F64, params.device())?,
            groups,
            engine,
            scale: if f16 { LossScale::dynamic() } else { LossScale::NONE },
            params: params.clone(),
            options,
            step: 0,
        })
    }

    pub fn params(&self) -> &Params {
        &self.params
    }

    pub fn options(&self) -> &LearnerOptions {
        &self.options
    }

    /// The parameter groups of [`AdamW::step`].
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Steps that the optimizer applied, without those that an f16 overflow skipped.
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

    /// Whether the optimizer's state is sharded over ranks.
    pub fn is_shared(&self) -> bool {
        matches!(self.engine, Engine::Shared(_))
    }

    /// The moments that this rank saves: its shard; rank 0 alone saves moments that are replicated. The union over all
    /// ranks covers all trained parameters.
    pub fn moments(&self) -> Vec<Moments<'_>> {
        let of = |adamw: &'_ AdamW| adamw.range();
        match &self.engine {
            Engine::Whole(adamw) => {
                let (first, second) = adamw.moments();
                vec![Moments { range: of(adamw), first, second }]
            }
            Engine::Shared(shared) => shared
                .own_state()
                .map(|adamw| {
                    let (first, second) = adamw.moments();
                    Moments { range: of(adamw), first, second }
                })
                .collect(),
        }
    }

    /// Number of steps, including those that an f16 overflow skipped.
    pub fn step(&self) -> u64 {
        self.step
    }

    pub fn scale(&self) -> LossScale {
        self.scale
    }

    /// Restores the state of a checkpoint: `read` fills elements of this rank's first (0) or second (1) moments.
    pub(super) fn restore(
        &mut self,
        step: u64,
        scale: LossScale,
        optimizer_steps: u64,
        mut read: impl FnMut(usize, Range<usize>, ViewMut<'_, f32>) -> Result<()>,
    ) -> Result<()> {
        (self.step, self.scale) = (step, scale);
        match &mut self.engine {
            Engine::Whole(adamw) => {
                let all = adamw.range();
                adamw.restore(optimizer_steps, |first, second| {
                    read(0, all.clone(), first)?;
                    read(1, all.clone(), second)
                })
            }
            Engine::Shared(shared) => {
                let host = kernel_device(&candle_core::Device::Cpu)?;
                let steps = [(0..self.params.flat_len(), optimizer_steps)];
                shared.load_with(&steps, |which, range, to| read(which, range, ViewMut::of_slice(host, to)?))
            }
        }
    }

    /// Starts a step: zeroes all gradients.
    ///
    /// # Errors
    /// Errors of earlier work on the device.
    pub fn begin(&self) -> Result<()> {
        self.params.blank_grads();
        Ok(())
    }

    /// Accumulates `share` times the gradient of `loss`, a scalar. The shares of a step's micro-batches sum to 1.
    ///
    /// # Errors
    /// A share other than 1 if gradients are not stored in f32; errors of the model's ops, mainly lack of memory.
    pub fn backward(&self, loss: &Tensor, share: f64) -> Result<()> {
        let _phase = phase(Phase::Backward);
        let kept = self.params.grads().dtype();
        if share != 1.0 && kept != DType::F32 {
            let message =
                format!("gradients of several micro-batches are accumulated in f32, not in {}", kept.as_str());
            return Err(candle_core::Error::Msg(message).into());
        }
        let factor = share * self.scale.factor();
        match factor == 1.0 {
            true => loss.backward()?,
            false => (loss * factor)?.backward()?,
        };
        // Gradients of parameters that the loss does not depend on.
        Ok(self.params.settle_grads()?)
    }

    /// Clips the gradient and applies one AdamW step. Synchronizes with the device.
    ///
    /// # Errors
    /// A non-finite gradient, with the first parameter that has one; the parameters are unchanged.
    pub fn update(&mut self) -> Result<Update> {
        if self.is_shared() {
            return self.update_shared();
        }
        let announced = self.announce()?;
        self.decide(&Tensor::zeros(1, DType::F32, self.params.device())?)?;
        let found = self.found.to_vec1::<f64>()?;
        self.settle(announced, &found)
    }

    /// Uploads the inputs of the next step, and increments the step count. Does not synchronize.
    ///
    /// # Errors
    /// A sharded optimizer, and errors of the launches.
    pub fn announce(&mut self) -> Result<Announced> {
        let adamw = self.engine.whole()?;
        let _phase = phase(Phase::Optimizer);
        let (step, optimizer_steps) = (self.step + 1, adamw.steps());
        let rate = self.options.schedule.rate(step);
        let mut numbers = vec![0.0; told::RATES];
        numbers[told::FACTOR] = self.scale.factor();
        numbers[told::LIMIT] = self.options.clip.unwrap_or(f64::INFINITY);
        numbers[told::STRICT] = if self.scale.can_shrink() { 0.0 } else { 1.0 };
        numbers.extend(adamw.rates(&self.groups, optimizer_steps + 1, rate)?.as_flattened());
        memory::write::<f64, ()>(&self.told, |device, told| judge::tell(device, told, &numbers).map_err(kernel_error))?;
        adamw.set_steps(optimizer_steps + 1);
        self.step = step;
        Ok(Announced { step, rate, optimizer_steps })
    }

    /// Enqueues the end of a step on the device: gradient norm, clipping and AdamW. The device skips the update if the
    /// gradient or one of `losses`, f32 [n], is not finite. Does not synchronize, and depends only on device memory: it
    /// can be captured in a CUDA graph, if `decide` has run before with the same number of losses.
    ///
    /// # Errors
    /// See [`Learner::announce`].
    pub fn decide(&mut self, losses: &Tensor) -> Result<()> {
        let _phase = phase(Phase::Optimizer);
        let wanted = found::LOSSES + losses.elem_count();
        if self.found.elem_count() != wanted {
            self.found = Tensor::zeros(wanted, DType::F64, self.params.device())?;
        }
        let adamw = self.engine.whole()?;
        let of = (&self.params, self.groups.as_slice());
        match self.params.grads().dtype() {
            DType::BF16 => decide_on::<bf16>(of, adamw, losses, [&self.told, &self.found]),
            _ => decide_on::<f32>(of, adamw, losses, [&self.told, &self.found]),
        }
    }

    /// Same as [`Learner::update`], for gradients that are still in flight: parameters are updated bucket by bucket,
    /// each as soon as its gradient has arrived, while later buckets are in flight. Gives the same bits; requires
    /// [`Learner::can_update_by_bucket`]. A non-finite gradient stops the step at its bucket: earlier buckets are
    /// updated. With peer gradients ([`Ddp::has_both`]) all elements are updated but those near it.
    ///
    /// # Errors
    /// See [`Learner::update`]; also errors of communication.
    pub fn update_by_bucket(&mut self, ddp: &Ddp) -> Result<(Synchronized, Update)> {
        if self.is_shared() {
            return self.update_shared_by_bucket(ddp);
        }
        let announced = self.announce()?;
        let queued = self.queue_by_bucket(ddp).and_then(|sent| {
            let found = self.found.to_vec1::<f64>()?;
            if found[found::MADE] == 0.0 {
                // The error names the first non-finite average.
                ddp.average_both()?;
            }
            Ok((sent, found))
        });
        match queued {
            Ok((sent, found)) => Ok((sent, self.settle(announced, &found)?)),
            Err(error) => {
                self.take_back(announced)?;
                Err(error)
            }
        }
    }

    /// Whether [`Learner::update_by_bucket`] can be used: nothing may need the whole gradient before the first
    /// parameter is updated, as clipping does.
    pub fn can_update_by_bucket(&self) -> bool {
        self.options.clip.is_none() && !self.scale.is_dynamic()
    }

    /// The device work of a step by buckets.
    fn queue_by_bucket(&mut self, ddp: &Ddp) -> Result<Synchronized> {
        let _phase = phase(Phase::Optimizer);
        let adamw = self.engine.whole()?;
        let of = (&self.params, self.groups.as_slice());
        match self.params.grads().dtype() {
            DType::BF16 => decide_by_bucket::<bf16>(of, adamw, ddp, [&self.told, &self.found]),
            _ => decide_by_bucket::<f32>(of, adamw, ddp, [&self.told, &self.found]),
        }
    }

    /// The outputs of the last [`Learner::decide`], f64, as listed in [`judge`]. The next call overwrites them.
    pub fn found(&self) -> &Tensor {
        &self.found
    }

    /// Ends a step with its outputs: updates the loss scale, and rolls the step back if it was not applied. Steps are
    /// committed in order.
    ///
    /// # Errors
    /// A non-finite gradient, see [`Learner::update`]; steps that were registered later were not applied either.
    pub fn settle(&mut self, announced: Announced, found: &[f64]) -> Result<Update> {
        let Announced { step, rate, optimizer_steps } = announced;
        let (norm, made) = (found[found::NORM], found[found::MADE] != 0.0);
        if made {
            self.scale.learn(true);
            return Ok(Update { step, rate, norm, applied: true });
        }
        self.take_back(announced)?;
        match self.scale.learn(norm.is_finite()) {
            // A loss is not finite.
            Some(true) | None => Err(self.not_finite(step)),
            Some(false) => {
                self.step = step;
                debug_assert_eq!(optimizer_steps, self.optimizer_steps());
                Ok(Update { step, rate, norm, applied: false })
            }
        }
    }

    /// Rolls back a registered step that was not applied, and all later ones.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn take_back(&mut self, announced: Announced) -> Result<()> {
        self.step = announced.step - 1;
        if let Engine::Whole(adamw) = &mut self.engine {
            adamw.set_steps(announced.optimizer_steps);
        }
        Ok(self.found.zero_set()?)
    }

    /// Whether steps may be registered before earlier ones are committed: not if the next step depends on their
    /// outputs.
    pub fn can_run_ahead(&self) -> bool {
        !self.is_shared() && !self.scale.is_dynamic()
    }

    /// Same as [`Learner::update`], for a sharded optimizer.
    fn update_shared(&mut self) -> Result<Update> {
        let _phase = phase(Phase::Optimizer);
        let Engine::Shared(shared) = &mut self.engine else {
            return Err(candle_core::Error::Msg("the optimizer is not sharded".into()).into());
        };
        let (step, factor) = (self.step + 1, self.scale.factor());
        let rate = self.options.schedule.rate(step);
        let gradients = self.params.grads();
        let gradients = Read::<f32>::new(&gradients)?;
        let norm = match shared.mode() {
            // The whole gradient is on this rank: its norm, and so clipping, is the same as without sharding.
            Mode::Broadcast => judge::norm_of(kernel_device(self.params.device())?, gradients.view()?)?,
            Mode::Zero1 => shared.gradient_norm(gradients.view()?)?,
        };
        let norm = norm / factor;
        match self.scale.learn(norm.is_finite()) {
            Some(true) => {
                let (groups, scale) = (&self.groups, clip(norm, self.options.clip) / factor);
                memory::write::<f32, _>(self.params.values(), |_, values| {
                    Ok(shared.step(values, gradients.view()?, groups, rate, scale)?)
                })?;
                self.params.refresh_copy()?;
            }
            Some(false) => {}
            None => return Err(self.not_finite(step)),
        }
        self.step = step;
        Ok(Update { step, rate, norm, applied: norm.is_finite() })
    }

    /// Same as [`Learner::update_by_bucket`], for a sharded optimizer: updated partitions are sent immediately.
    fn update_shared_by_bucket(&mut self, ddp: &Ddp) -> Result<(Synchronized, Update)> {
        let _phase = phase(Phase::Optimizer);
        let Engine::Shared(shared) = &mut self.engine else {
            return Err(candle_core::Error::Msg("the optimizer is not sharded".into()).into());
        };
        let (step, factor) = (self.step + 1, self.scale.factor());
        let rate = self.options.schedule.rate(step);
        let (gradients, groups, copy) = (self.params.grads(), &self.groups, self.params.copy());
        let gradients = Read::<f32>::new(&gradients)?;
        let (sent, norm) = memory::write::<f32, _>(self.params.values(), |_, values| {
            let tensors = (values, gradients.view()?);
            Ok(shared.step_by_bucket(ddp, tensors, groups, (rate, 1.0 / factor), |range, values| {
                Ok(copy.as_ref().map_or(Ok(()), |copy| round_part(copy, range, values))?)
            })?)
        })?;
        let norm = norm / factor;
        if self.scale.learn(norm.is_finite()) != Some(true) {
            return Err(self.not_finite(step));
        }
        self.step = step;
        Ok((sent, Update { step, rate, norm, applied: true }))
    }

    /// The error of a step whose current gradient is not finite.
    pub(super) fn not_finite(&self, step: u64) -> Error {
        let first = match first_in(&self.params.grads(), &self.params) {
            Ok(Some(name)) => format!("that of `{name}`"),
            Ok(None) => "none: its elements are finite, and the sum of their squares is not".to_string(),
            Err(error) => format!("unknown: {error}"),
        };
        Error::NotFinite { step, what: "the gradient", first, saved: None }
    }
}

/// Rounds a range of the master weights to the compute weights.
fn round_part(copy: &Tensor, range: &Range<usize>, values: View<'_, f32>) -> candle_core::Result<()> {
    let values = values.slice(range.clone()).map_err(kernel_error)?;
    macro_rules! round {
        ($ty:ty) => {
            memory::write::<$ty, ()>(copy, |device, copy| {
                convert(device, values, copy.slice(range.clone()).map_err(kernel_error)?).map_err(kernel_error)
            })
        };
    }
    match copy.dtype() {
        DType::F16 => round!(f16),
        _ => round!(bf16),
    }
}

/// Name of the first parameter with NaN or infinity in `flat`, which holds the values or the gradients.
pub(super) fn first_in(flat: &Tensor, params: &Params) -> Result<Option<String>> {
    let device = kernel_device(params.device())?;
    let list: Vec<Param> = params.iter().collect();
    let parts = list.iter().map(|param| (param.name(), param.range()));
    let first = match flat.dtype() {
        DType::BF16 => first_not_finite(device, Read::<bf16>::new(flat)?.view()?, parts)?,
        _ => first_not_finite(device, Read::<f32>::new(flat)?.view()?, parts)?,
    };
    Ok(first.map(str::to_string))
}

/// Dtype of the gradients of a step on this process alone: bf16 if the compute weights are bf16 and there is a single
/// micro-batch, so that nothing is accumulated; otherwise f32.
pub fn gradient_dtype(params: &Params, micro_batches: usize) -> DType {
    match params.copy().map(|copy| copy.dtype()) {
        Some(DType::BF16) if micro_batches <= 1 => DType::BF16,
        _ => DType::F32,
    }
}

/// [`Learner::decide`] for gradients of type G, with the inputs and outputs of step control.
fn decide_on<G: Elem + FloatElement>(
    (params, groups): (&Params, &[Group]),
    adamw: &mut AdamW,
    losses: &Tensor,
    [told, found]: [&Tensor; 2],
) -> Result<()> {
    let gradients = params.grads();
    let gradients = Read::<G>::new(&gradients)?;
    let (losses, told) = (Read::<f32>::new(losses)?, Read::<f64>::new(told)?);
    memory::write::<f64, ()>(found, |device, found| {
        judge::judge(device, gradients.view()?, losses.view()?, told.view()?, found).map_err(kernel_error)
    })?;
    let found = Read::<f64>::new(found)?;
    let (all, views) = (adamw.range(), [told.view()?, found.view()?]);
    step_part((params, groups), adamw, &all, gradients.view()?, views)
}

/// Same as [`decide_on`], bucket by bucket as gradients arrive.
fn decide_by_bucket<G: Elem + FloatElement>(
    (params, groups): (&Params, &[Group]),
    adamw: &mut AdamW,
    ddp: &Ddp,
    [told, found]: [&Tensor; 2],
) -> Result<Synchronized> {
    let (device, ranges) = (kernel_device(params.device())?, ddp.buckets().iter().map(|bucket| &bucket.range));
    let told = Read::<f64>::new(told)?;
    let mut pieces = match ddp.has_both() {
        true => {
            let sums = ranges.map(|range| adamw.sums_of_two(range, groups)).sum();
            Pieces::with_sums(device, sums, told.view()?)?
        }
        false => Pieces::new(device, ranges.map(Range::len))?,
    };
    let gradients = params.grads();
    let sent = ddp.finish_both_by_bucket(|bucket, other| -> Result<()> {
        let gradients = Read::<G>::new(&gradients)?;
        if let Some(other) = other {
            let both = [gradients.view()?, other.view::<G>(device, &(0..params.flat_len()))];
            return with_copy(params, |values, copy| {
                adamw
                    .step_part_of_two(&bucket.range, values, both, copy, groups, told.view()?, &mut pieces)
                    .map_err(kernel_error)
            });
        }
        let piece = gradients.view()?.slice(bucket.range.clone())?;
        let views = [told.view()?, pieces.judge(piece, told.view()?)?];
        step_part((params, groups), adamw, &bucket.range, gradients.view()?, views)
    })?;
    let losses = Tensor::zeros(1, DType::F32, params.device())?;
    let losses = Read::<f32>::new(&losses)?;
    memory::write::<f64, ()>(found, |_, found| pieces.end(losses.view()?, told.view()?, found).map_err(kernel_error))?;
    Ok(sent)
}

/// One step of a range of the parameters and of their compute weights.
fn step_part<G: Elem + FloatElement>(
    (params, groups): (&Params, &[Group]),
    adamw: &mut AdamW,
    part: &Range<usize>,
    gradients: View<'_, G>,
    told_and_found: [View<'_, f64>; 2],
) -> Result<()> {
    with_copy(params, |values, copy| {
        adamw.step_part_by(part, values, gradients, copy, groups, told_and_found).map_err(kernel_error)
    })
}

/// Calls `go` with the parameters and their compute weights.
fn with_copy(params: &Params, go: impl FnOnce(ViewMut<'_, f32>, Copy<'_>) -> candle_core::Result<()>) -> Result<()> {
    let copy = params.copy();
    memory::write::<f32, _>(params.values(), |_, values| match &copy {
        Some(copy) if copy.dtype() == DType::BF16 => {
            memory::write::<bf16, _>(copy, |_, copy| go(values, Copy::Bf16(copy)))
        }
        Some(copy) if copy.dtype() == DType::F16 => {
            memory::write::<f16, _>(copy, |_, copy| go(values, Copy::F16(copy)))
        }
        _ => go(values, Copy::None),
    })?;
    Ok(())
}

/// The trained parameters in groups of adjacent parameters with equal options. Padding between them belongs to the
/// group: its values and gradients are zero.
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
