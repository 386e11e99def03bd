//! One training step, in pieces.

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
///
/// [`Learner::update`] waits for the device. Its three parts do not, where the whole optimizer is here: [`Learner::announce`] before
/// the step, [`Learner::decide`] in the place of `update`, and [`Learner::settle`] when what was found is read.
pub struct Learner {
    params: Params,
    options: LearnerOptions,
    groups: Vec<Group>,
    engine: Engine,
    scale: LossScale,
    step: u64,
    /// What the device is told of a step, and what it finds: f64, see [`judge`].
    told: Tensor,
    found: Tensor,
}

/// A step that was announced, and whose end is not known yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Announced {
    /// The number of the step, from 1.
    pub step: u64,
    /// Learning rate.
    pub rate: f64,
    /// Steps that the optimizer had made before.
    optimizer_steps: u64,
}

/// Who has the optimizer's state.
enum Engine {
    /// This process, all of it.
    Whole(AdamW),
    /// Each rank a part.
    Shared(Box<ShardedOptimizer<AdamW>>),
}

impl Engine {
    /// The optimizer where it is whole, for steps that are made in pieces.
    fn whole(&mut self) -> Result<&mut AdamW> {
        match self {
            Engine::Whole(adamw) => Ok(adamw),
            Engine::Shared(_) => {
                let message = "an optimizer that ranks share makes its steps with `update`";
                Err(candle_core::Error::Msg(message.into()).into())
            }
        }
    }
}

/// First and second moments of consecutive elements of the flat tensors, where the optimizer keeps them.
pub struct Moments<'a> {
    pub range: Range<usize>,
    pub first: View<'a, f32>,
    pub second: View<'a, f32>,
}

impl Learner {
    /// For gradients of the type that the parameters keep them in: see [`gradient_dtype`].
    ///
    /// # Errors
    /// No memory for the moments on the parameters' device.
    pub fn new(params: &Params, options: LearnerOptions) -> Result<Learner> {
        let device = kernel_device(params.device())?;
        let adamw = AdamW::new(device, 0..params.flat_len(), options.adamw)?;
        Learner::with_engine(params, options, Engine::Whole(adamw))
    }

    /// As [`Learner::new`], with an optimizer of which every rank has a part.
    ///
    /// # Errors
    /// As [`Learner::new`].
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

    /// Whether every rank has a part of the optimizer's state.
    pub fn is_shared(&self) -> bool {
        matches!(self.engine, Engine::Shared(_))
    }

    /// The moments that this rank keeps; of those that every rank keeps, the first rank gives them alone. Those of all ranks together are the
    /// moments of all parameters that are trained.
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

    /// Steps made, those included that an f16 overflow left out.
    pub fn step(&self) -> u64 {
        self.step
    }

    pub fn scale(&self) -> LossScale {
        self.scale
    }

    /// Sets what a checkpoint has: `read` fills elements of the first moments (0) or the second (1) that this rank keeps.
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

    /// Begins a step: all gradients are zero.
    ///
    /// # Errors
    /// Those of earlier work on the device.
    pub fn begin(&self) -> Result<()> {
        self.params.blank_grads();
        Ok(())
    }

    /// Adds `share` times the gradient of `loss`, a scalar. The shares of a step's micro-batches add up to 1.
    ///
    /// # Errors
    /// A share of a step whose gradients are not kept in f32, and those of the model's ops, lack of memory above all.
    pub fn backward(&self, loss: &Tensor, share: f64) -> Result<()> {
        let _phase = phase(Phase::Backward);
        let kept = self.params.grads().dtype();
        if share != 1.0 && kept != DType::F32 {
            let message = format!("gradients of several micro-batches add up in f32, not in {}", kept.as_str());
            return Err(candle_core::Error::Msg(message).into());
        }
        let factor = share * self.scale.factor();
        match factor == 1.0 {
            true => loss.backward()?,
            false => (loss * factor)?.backward()?,
        };
        // Parameters that the loss does not depend on.
        Ok(self.params.settle_grads()?)
    }

    /// Clips the gradient and makes a step of AdamW. Waits for the device.
    ///
    /// # Errors
    /// A gradient that is not finite, with the first parameter whose gradient it is; the parameters are as before.
    pub fn update(&mut self) -> Result<Update> {
        if self.is_shared() {
            return self.update_shared();
        }
        let announced = self.announce()?;
        self.decide(&Tensor::zeros(1, DType::F32, self.params.device())?)?;
        let found = self.found.to_vec1::<f64>()?;
        self.settle(announced, &found)
    }

    /// Tells the device what the next step needs, and counts the step as made. It does not wait.
    ///
    /// # Errors
    /// An optimizer of which every rank has a part, and those of the launches.
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

    /// Queues the end of a step on the device: the gradient's norm, clipping and AdamW, or nothing of it if the gradient or one of
    /// `losses`, f32 [n], is not finite. It does not wait, and depends on nothing but memory: a recording of it can be replayed,
    /// if `decide` has run before with as many losses.
    ///
    /// # Errors
    /// As [`Learner::announce`].
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

    /// As [`Learner::update`], of gradients that are still on their way to other ranks: parameters are updated bucket by bucket, each as
    /// soon as its gradient is there, while later ones travel. It gives the same bits, where [`Learner::can_update_by_bucket`]. A
    /// gradient that is not finite stops the step where it is found: buckets before it have been updated. Where two ranks
    /// [have both](Ddp::has_both) gradients, all has been updated but what is near it.
    ///
    /// # Errors
    /// As [`Learner::update`], and those of communication.
    pub fn update_by_bucket(&mut self, ddp: &Ddp) -> Result<(Synchronized, Update)> {
        if self.is_shared() {
            return self.update_shared_by_bucket(ddp);
        }
        let announced = self.announce()?;
        let queued = self.queue_by_bucket(ddp).and_then(|sent| {
            let found = self.found.to_vec1::<f64>()?;
            if found[found::MADE] == 0.0 {
                // The error says where, of the averages.
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

    /// Whether steps can be made by [`Learner::update_by_bucket`]: where nothing needs the whole gradient before the first parameter is
    /// updated, as clipping does.
    pub fn can_update_by_bucket(&self) -> bool {
        self.options.clip.is_none() && !self.scale.is_dynamic()
    }

    /// The device's part of a step by buckets.
    fn queue_by_bucket(&mut self, ddp: &Ddp) -> Result<Synchronized> {
        let _phase = phase(Phase::Optimizer);
        let adamw = self.engine.whole()?;
        let of = (&self.params, self.groups.as_slice());
        match self.params.grads().dtype() {
            DType::BF16 => decide_by_bucket::<bf16>(of, adamw, ddp, [&self.told, &self.found]),
            _ => decide_by_bucket::<f32>(of, adamw, ddp, [&self.told, &self.found]),
        }
    }

    /// What the last [`Learner::decide`] found, f64, as [`judge`] lists it. The next one writes over it.
    pub fn found(&self) -> &Tensor {
        &self.found
    }

    /// Ends a step with what was found: learns from it, and takes the step back if it was not made. Steps are settled in their order.
    ///
    /// # Errors
    /// A gradient that is not finite, as [`Learner::update`] says it; steps that were announced later were not made either.
    pub fn settle(&mut self, announced: Announced, found: &[f64]) -> Result<Update> {
        let Announced { step, rate, optimizer_steps } = announced;
        let (norm, made) = (found[found::NORM], found[found::MADE] != 0.0);
        if made {
            self.scale.learn(true);
            return Ok(Update { step, rate, norm, applied: true });
        }
        self.take_back(announced)?;
        match self.scale.learn(norm.is_finite()) {
            // What is not finite is a loss.
            Some(true) | None => Err(self.not_finite(step)),
            Some(false) => {
                self.step = step;
                debug_assert_eq!(optimizer_steps, self.optimizer_steps());
                Ok(Update { step, rate, norm, applied: false })
            }
        }
    }

    /// Takes back a step that was announced and not made, and all later ones.
    ///
    /// # Errors
    /// Those of the device.
    pub fn take_back(&mut self, announced: Announced) -> Result<()> {
        self.step = announced.step - 1;
        if let Engine::Whole(adamw) = &mut self.engine {
            adamw.set_steps(announced.optimizer_steps);
        }
        Ok(self.found.zero_set()?)
    }

    /// Whether steps may be announced before earlier ones are settled: not where the next step depends on what was found.
    pub fn can_run_ahead(&self) -> bool {
        !self.is_shared() && !self.scale.is_dynamic()
    }

    /// As [`Learner::update`], with an optimizer of which every rank has a part.
    fn update_shared(&mut self) -> Result<Update> {
        let _phase = phase(Phase::Optimizer);
        let Engine::Shared(shared) = &mut self.engine else {
            return Err(candle_core::Error::Msg("this optimizer is not shared".into()).into());
        };
        let (step, factor) = (self.step + 1, self.scale.factor());
        let rate = self.options.schedule.rate(step);
        let gradients = self.params.grads();
        let gradients = Read::<f32>::new(&gradients)?;
        let norm = match shared.mode() {
            // All of the gradient is here: its norm, and so clipping, is that of an optimizer that is not shared out.
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

    /// As [`Learner::update_by_bucket`], with an optimizer of which every rank has a part: what a rank updates leaves at once.
    fn update_shared_by_bucket(&mut self, ddp: &Ddp) -> Result<(Synchronized, Update)> {
        let _phase = phase(Phase::Optimizer);
        let Engine::Shared(shared) = &mut self.engine else {
            return Err(candle_core::Error::Msg("this optimizer is not shared".into()).into());
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

    /// The error of a step whose gradient, which is there now, is not finite.
    pub(super) fn not_finite(&self, step: u64) -> Error {
        let first = match first_in(&self.params.grads(), &self.params) {
            Ok(Some(name)) => format!("that of `{name}`"),
            Ok(None) => "none: its elements are finite, and the sum of their squares is not".to_string(),
            Err(error) => format!("unknown: {error}"),
        };
        Error::NotFinite { step, what: "the gradient", first, saved: None }
    }
}

/// Brings the copy in a shorter type up to date with a range of the values.
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

/// The name of the first parameter that has NaN or infinity in `flat`, the parameters' values or their gradients.
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

/// The type in which the gradients of a step are kept that this process makes alone, of so many micro-batches: that of the products in
/// bf16, if each gradient is one product and nothing is added to it, else f32.
pub fn gradient_dtype(params: &Params, micro_batches: usize) -> DType {
    match params.copy().map(|copy| copy.dtype()) {
        Some(DType::BF16) if micro_batches <= 1 => DType::BF16,
        _ => DType::F32,
    }
}

/// [`Learner::decide`] for gradients of type G; the numbers are `told` and `found`.
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

/// As [`decide_on`], bucket by bucket as gradients come.
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

/// A step of the parameters in `part`, and of their copy in a shorter type.
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

/// Gives `go` the parameters, and their copy in a shorter type.
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
