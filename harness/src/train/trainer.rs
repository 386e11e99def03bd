//! The trainer: one training step in separate calls, with loss scaling, gradient clipping and AdamW.

use std::ops::Range;

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use tilewright::kernels::FloatElement;
use tilewright::{View, ViewMut};
use tilewright_candle::convert::convert;
use tilewright_candle::memory::{self, Elem, Read, kernel_device, kernel_error};

use super::{Error, LossScale, Result};
use crate::dist::ddp::{Ddp, SyncStats};
use crate::dist::sharded::{Mode, ShardedOptimizer, StepArguments};
use crate::optim::step_control::{self, BucketedStepControl, step_inputs, step_outputs};
use crate::optim::{
    AdamW, AdamWOptions, ComputeWeights, LrSchedule, ParamGroup, StepControlViews, clip_factor, first_non_finite,
    merge_groups,
};
use crate::params::{Param, Params};
use crate::profile::{Phase, phase};

/// Options of the optimizer update.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerOptions {
    pub adamw: AdamWOptions,
    pub schedule: LrSchedule,
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
/// trainer.begin();
/// for each micro-batch { trainer.backward(&loss, share)?; }
/// // all-reduce of gradients goes here
/// let update = trainer.update()?;
/// ```
///
/// [`Trainer::update`] synchronizes with the device. With a replicated optimizer it consists of three calls that do
/// not: [`Trainer::register`] registers the step, [`Trainer::enqueue`] enqueues the update, and [`Trainer::commit`]
/// commits the step when its outputs are read back.
pub struct Trainer {
    params: Params,
    options: TrainerOptions,
    groups: Vec<ParamGroup>,
    optimizer: OptimizerState,
    scale: LossScale,
    step: u64,
    /// Inputs and outputs of step control on the device: f64, see [`step_control`].
    step_inputs: Tensor,
    step_outputs: Tensor,
}

/// A registered step whose outcome is not known yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Registered {
    /// Number of the step, from 1.
    pub step: u64,
    /// Learning rate.
    pub rate: f64,
    /// Step count of the optimizer before this step.
    optimizer_steps: u64,
}

/// Where the optimizer's state is stored.
enum OptimizerState {
    /// All of it in this process.
    Replicated(AdamW),
    /// One shard per rank.
    Sharded(Box<ShardedOptimizer<AdamW>>),
}

impl OptimizerState {
    /// The replicated optimizer, for steps that are enqueued.
    fn replicated(&mut self) -> Result<&mut AdamW> {
        match self {
            OptimizerState::Replicated(adamw) => Ok(adamw),
            OptimizerState::Sharded(_) => {
                let message = "steps of a sharded optimizer cannot be enqueued; call `Trainer::update`";
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

impl Trainer {
    /// Creates a trainer for gradients of the parameters' gradient dtype: see [`gradient_dtype`].
    ///
    /// # Errors
    /// No memory for the moments on the parameters' device.
    pub fn new(params: &Params, options: TrainerOptions) -> Result<Trainer> {
        let device = kernel_device(params.device())?;
        let adamw = AdamW::new(device, 0..params.flat_len(), options.adamw)?;
        Trainer::with_optimizer(params, options, OptimizerState::Replicated(adamw))
    }

    /// Same as [`Trainer::new`], with a sharded optimizer.
    ///
    /// # Errors
    /// See [`Trainer::new`].
    pub fn sharded(params: &Params, options: TrainerOptions, optimizer: ShardedOptimizer<AdamW>) -> Result<Trainer> {
        Trainer::with_optimizer(params, options, OptimizerState::Sharded(Box::new(optimizer)))
    }

    fn with_optimizer(params: &Params, options: TrainerOptions, optimizer: OptimizerState) -> Result<Trainer> {
        let f16 = params.compute_weights().is_some_and(|compute_weights| compute_weights.dtype() == DType::F16);
        let groups = groups(params, &options);
        let inputs = (step_inputs::GROUP_RATES + step_inputs::RATES_PER_GROUP * groups.len())
            .next_multiple_of(step_control::SCALARS_PER_LAUNCH);
        Ok(Trainer {
            step_inputs: Tensor::zeros(inputs, DType::F64, params.device())?,
            step_outputs: Tensor::zeros(step_outputs::LOSSES + 1, DType::F64, params.device())?,
            groups,
            optimizer,
            scale: if f16 { LossScale::dynamic() } else { LossScale::NONE },
            params: params.clone(),
            options,
            step: 0,
        })
    }

    pub fn params(&self) -> &Params {
        &self.params
    }

    pub fn options(&self) -> &TrainerOptions {
        &self.options
    }

    /// The parameter groups of [`AdamW::step`].
    pub fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// Steps that the optimizer applied, without those that an f16 overflow skipped.
    pub fn optimizer_steps(&self) -> u64 {
        match &self.optimizer {
            OptimizerState::Replicated(adamw) => adamw.steps(),
            OptimizerState::Sharded(sharded) => sharded.steps(),
        }
    }

    /// Bytes of the optimizer's state in this process.
    pub fn optimizer_bytes(&self) -> usize {
        match &self.optimizer {
            OptimizerState::Replicated(adamw) => adamw.bytes(),
            OptimizerState::Sharded(sharded) => sharded.bytes(),
        }
    }

    /// Whether the optimizer's state is sharded over ranks.
    pub fn is_sharded(&self) -> bool {
        matches!(self.optimizer, OptimizerState::Sharded(_))
    }

    /// The moments that this rank saves: its shard; rank 0 alone saves moments that are replicated. The union over all
    /// ranks covers all trained parameters.
    pub fn moments(&self) -> Vec<Moments<'_>> {
        let of = |adamw: &'_ AdamW| adamw.range();
        match &self.optimizer {
            OptimizerState::Replicated(adamw) => {
                let (first, second) = adamw.moments();
                vec![Moments { range: of(adamw), first, second }]
            }
            OptimizerState::Sharded(sharded) => sharded
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
        match &mut self.optimizer {
            OptimizerState::Replicated(adamw) => {
                let all = adamw.range();
                adamw.restore(optimizer_steps, |first, second| {
                    read(0, all.clone(), first)?;
                    read(1, all.clone(), second)
                })
            }
            OptimizerState::Sharded(sharded) => {
                let host = kernel_device(&candle_core::Device::Cpu)?;
                let steps = [(0..self.params.flat_len(), optimizer_steps)];
                sharded.load_with(&steps, |which, range, to| read(which, range, ViewMut::of_slice(host, to)?))
            }
        }
    }

    /// Starts a step: marks all gradients as zero, without writing memory ([`Params::lazy_zero_grads`]).
    pub fn begin(&self) {
        self.params.lazy_zero_grads();
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
        Ok(self.params.materialize_zero_grads()?)
    }

    /// Clips the gradient and applies one AdamW step. Synchronizes with the device.
    ///
    /// # Errors
    /// A non-finite gradient, with the first parameter that has one; the parameters are unchanged.
    pub fn update(&mut self) -> Result<Update> {
        if self.is_sharded() {
            return self.update_sharded();
        }
        let registered = self.register()?;
        self.enqueue(&Tensor::zeros(1, DType::F32, self.params.device())?)?;
        let step_outputs = self.step_outputs.to_vec1::<f64>()?;
        self.commit(registered, &step_outputs)
    }

    /// Uploads the inputs of the next step, and increments the step count. Does not synchronize.
    ///
    /// # Errors
    /// A sharded optimizer, and errors of the launches.
    pub fn register(&mut self) -> Result<Registered> {
        let adamw = self.optimizer.replicated()?;
        let _phase = phase(Phase::Optimizer);
        let (step, optimizer_steps) = (self.step + 1, adamw.steps());
        let rate = self.options.schedule.rate(step);
        let mut inputs = vec![0.0; step_inputs::GROUP_RATES];
        inputs[step_inputs::LOSS_SCALE] = self.scale.factor();
        inputs[step_inputs::MAX_NORM] = self.options.clip.unwrap_or(f64::INFINITY);
        inputs[step_inputs::HALT_IF_NON_FINITE] = if self.scale.can_decrease() { 0.0 } else { 1.0 };
        inputs.extend(adamw.group_rates(&self.groups, optimizer_steps + 1, rate)?.as_flattened());
        memory::write::<f64, ()>(&self.step_inputs, |device, step_inputs| {
            step_control::upload_step_inputs(device, step_inputs, &inputs).map_err(kernel_error)
        })?;
        adamw.set_steps(optimizer_steps + 1);
        self.step = step;
        Ok(Registered { step, rate, optimizer_steps })
    }

    /// Enqueues the end of a step on the device: gradient norm, clipping and AdamW. The device skips the update if the
    /// gradient or one of `losses`, f32 [n], is not finite. Does not synchronize, and depends only on device memory: it
    /// can be captured in a CUDA graph, if `enqueue` has run before with the same number of losses.
    ///
    /// # Errors
    /// See [`Trainer::register`].
    pub fn enqueue(&mut self, losses: &Tensor) -> Result<()> {
        let _phase = phase(Phase::Optimizer);
        let wanted = step_outputs::LOSSES + losses.elem_count();
        if self.step_outputs.elem_count() != wanted {
            self.step_outputs = Tensor::zeros(wanted, DType::F64, self.params.device())?;
        }
        match self.params.grads().dtype() {
            DType::BF16 => self.replicated_update()?.enqueue::<bf16>(losses),
            _ => self.replicated_update()?.enqueue::<f32>(losses),
        }
    }

    /// Same as [`Trainer::update`], for gradients that are still in flight: parameters are updated bucket by bucket,
    /// each as soon as its gradient has arrived, while later buckets are in flight. Gives the same bits; requires
    /// [`Trainer::can_update_by_bucket`]. A non-finite gradient stops the step at its bucket: earlier buckets are
    /// updated. With peer gradients ([`Ddp::has_peer_gradients`]) all elements are updated but those near it.
    ///
    /// # Errors
    /// See [`Trainer::update`]; also errors of communication.
    pub fn update_by_bucket(&mut self, ddp: &Ddp) -> Result<(SyncStats, Update)> {
        if self.is_sharded() {
            return self.update_sharded_by_bucket(ddp);
        }
        let registered = self.register()?;
        let queued = self.queue_by_bucket(ddp).and_then(|sent| {
            let step_outputs = self.step_outputs.to_vec1::<f64>()?;
            if step_outputs[step_outputs::APPLIED] == 0.0 {
                // The error names the first non-finite average.
                ddp.average_with_peer()?;
            }
            Ok((sent, step_outputs))
        });
        match queued {
            Ok((sent, step_outputs)) => Ok((sent, self.commit(registered, &step_outputs)?)),
            Err(error) => {
                self.roll_back(registered)?;
                Err(error)
            }
        }
    }

    /// Whether [`Trainer::update_by_bucket`] can be used: nothing may need the whole gradient before the first
    /// parameter is updated, as clipping does.
    pub fn can_update_by_bucket(&self) -> bool {
        self.options.clip.is_none() && !self.scale.is_dynamic()
    }

    /// The device work of a step by buckets.
    fn queue_by_bucket(&mut self, ddp: &Ddp) -> Result<SyncStats> {
        let _phase = phase(Phase::Optimizer);
        match self.params.grads().dtype() {
            DType::BF16 => self.replicated_update()?.enqueue_by_bucket::<bf16>(ddp),
            _ => self.replicated_update()?.enqueue_by_bucket::<f32>(ddp),
        }
    }

    /// The update of a replicated optimizer.
    fn replicated_update(&mut self) -> Result<ReplicatedUpdate<'_>> {
        Ok(ReplicatedUpdate {
            params: &self.params,
            groups: &self.groups,
            adamw: self.optimizer.replicated()?,
            step_inputs: &self.step_inputs,
            step_outputs: &self.step_outputs,
        })
    }

    /// The inputs of step control, the same tensor for all steps.
    pub(super) fn step_inputs(&self) -> &Tensor {
        &self.step_inputs
    }

    /// The outputs of the last [`Trainer::enqueue`], f64, as listed in [`step_control`]. The next call overwrites them.
    pub fn step_outputs(&self) -> &Tensor {
        &self.step_outputs
    }

    /// Ends a step with its outputs: updates the loss scale, and rolls the step back if it was not applied. Steps are
    /// committed in order.
    ///
    /// # Errors
    /// A non-finite gradient, see [`Trainer::update`]; steps that were registered later were not applied either.
    pub fn commit(&mut self, registered: Registered, step_outputs: &[f64]) -> Result<Update> {
        let Registered { step, rate, optimizer_steps } = registered;
        let (norm, applied) = (step_outputs[step_outputs::GRAD_NORM], step_outputs[step_outputs::APPLIED] != 0.0);
        if applied {
            self.scale.update(true);
            return Ok(Update { step, rate, norm, applied: true });
        }
        self.roll_back(registered)?;
        match self.scale.update(norm.is_finite()) {
            // `Some(true)`: the gradient is finite, so a loss is not.
            Some(true) | None => Err(self.non_finite_error(step)),
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
    pub fn roll_back(&mut self, registered: Registered) -> Result<()> {
        self.step = registered.step - 1;
        if let OptimizerState::Replicated(adamw) = &mut self.optimizer {
            adamw.set_steps(registered.optimizer_steps);
        }
        Ok(self.step_outputs.zero_set()?)
    }

    /// Whether steps may be registered before earlier ones are committed: not if the next step depends on their
    /// outputs.
    pub fn can_run_ahead(&self) -> bool {
        !self.is_sharded() && !self.scale.is_dynamic()
    }

    /// Same as [`Trainer::update`], for a sharded optimizer.
    fn update_sharded(&mut self) -> Result<Update> {
        let _phase = phase(Phase::Optimizer);
        let OptimizerState::Sharded(sharded) = &mut self.optimizer else {
            return Err(candle_core::Error::Msg("the optimizer is not sharded".into()).into());
        };
        let (step, factor) = (self.step + 1, self.scale.factor());
        let rate = self.options.schedule.rate(step);
        let gradients = self.params.grads();
        let gradients = Read::<f32>::new(&gradients)?;
        let norm = match sharded.mode() {
            // The whole gradient is on this rank: its norm, and so clipping, is the same as without sharding.
            Mode::Broadcast => step_control::grad_norm(kernel_device(self.params.device())?, gradients.view()?)?,
            Mode::Zero1 => sharded.gradient_norm(gradients.view()?)?,
        };
        let norm = norm / factor;
        match self.scale.update(norm.is_finite()) {
            Some(true) => {
                let (groups, gradient_scale) = (&self.groups, clip_factor(norm, self.options.clip) / factor);
                memory::write::<f32, _>(self.params.values(), |_, values| {
                    let gradients = gradients.view()?;
                    Ok(sharded.step(StepArguments { values, gradients, groups, rate, gradient_scale })?)
                })?;
                self.params.refresh_compute_weights()?;
            }
            Some(false) => {}
            None => return Err(self.non_finite_error(step)),
        }
        self.step = step;
        Ok(Update { step, rate, norm, applied: norm.is_finite() })
    }

    /// Same as [`Trainer::update_by_bucket`], for a sharded optimizer: updated partitions are sent immediately.
    fn update_sharded_by_bucket(&mut self, ddp: &Ddp) -> Result<(SyncStats, Update)> {
        let _phase = phase(Phase::Optimizer);
        let OptimizerState::Sharded(sharded) = &mut self.optimizer else {
            return Err(candle_core::Error::Msg("the optimizer is not sharded".into()).into());
        };
        let (step, factor) = (self.step + 1, self.scale.factor());
        let rate = self.options.schedule.rate(step);
        let (gradients, groups, compute_weights) = (self.params.grads(), &self.groups, self.params.compute_weights());
        let gradients = Read::<f32>::new(&gradients)?;
        let (sent, norm) = memory::write::<f32, _>(self.params.values(), |_, values| {
            let (gradients, gradient_scale) = (gradients.view()?, 1.0 / factor);
            let arguments = StepArguments { values, gradients, groups, rate, gradient_scale };
            Ok(sharded.step_by_bucket(ddp, arguments, |range, values| {
                Ok(compute_weights
                    .as_ref()
                    .map_or(Ok(()), |compute_weights| round_range(compute_weights, range, values))?)
            })?)
        })?;
        let norm = norm / factor;
        if self.scale.update(norm.is_finite()) != Some(true) {
            return Err(self.non_finite_error(step));
        }
        self.step = step;
        Ok((sent, Update { step, rate, norm, applied: true }))
    }

    /// The error of a step whose current gradient is not finite.
    pub(super) fn non_finite_error(&self, step: u64) -> Error {
        let cause = match first_non_finite_param(&self.params.grads(), &self.params) {
            Ok(Some(name)) => format!("the first non-finite value is in that of `{name}`"),
            Ok(None) => "all of its elements are finite, but the sum of their squares overflows".to_string(),
            Err(error) => format!("the first non-finite value is unknown: {error}"),
        };
        Error::NotFinite { step, what: "the gradient", cause, saved: None }
    }
}

/// Rounds a range of the master weights to the compute weights.
fn round_range(compute_weights: &Tensor, range: &Range<usize>, values: View<'_, f32>) -> candle_core::Result<()> {
    let values = values.slice(range.clone()).map_err(kernel_error)?;
    macro_rules! round {
        ($ty:ty) => {
            memory::write::<$ty, ()>(compute_weights, |device, compute_weights| {
                convert(device, values, compute_weights.slice(range.clone()).map_err(kernel_error)?)
                    .map_err(kernel_error)
            })
        };
    }
    match compute_weights.dtype() {
        DType::F16 => round!(f16),
        _ => round!(bf16),
    }
}

/// Name of the first parameter with NaN or infinity in `flat`, which holds the values or the gradients.
pub(super) fn first_non_finite_param(flat: &Tensor, params: &Params) -> Result<Option<String>> {
    let device = kernel_device(params.device())?;
    let list: Vec<Param> = params.iter().collect();
    let parts = list.iter().map(|param| (param.name(), param.range()));
    let first = match flat.dtype() {
        DType::BF16 => first_non_finite(device, Read::<bf16>::new(flat)?.view()?, parts)?,
        _ => first_non_finite(device, Read::<f32>::new(flat)?.view()?, parts)?,
    };
    Ok(first.map(str::to_string))
}

/// Dtype of the gradients of a step on this process alone: bf16 if the compute weights are bf16 and there is a single
/// micro-batch, so that nothing is accumulated; otherwise f32.
pub fn gradient_dtype(params: &Params, micro_batches: usize) -> DType {
    match params.compute_weights().map(|compute_weights| compute_weights.dtype()) {
        Some(DType::BF16) if micro_batches <= 1 => DType::BF16,
        _ => DType::F32,
    }
}

/// The update of a step with a replicated optimizer.
struct ReplicatedUpdate<'a> {
    params: &'a Params,
    groups: &'a [ParamGroup],
    adamw: &'a mut AdamW,
    /// Inputs and outputs of step control: f64, see [`step_control`].
    step_inputs: &'a Tensor,
    step_outputs: &'a Tensor,
}

impl ReplicatedUpdate<'_> {
    /// [`Trainer::enqueue`] for gradients of type G.
    fn enqueue<G: Elem + FloatElement>(mut self, losses: &Tensor) -> Result<()> {
        let gradients = self.params.grads();
        let gradients = Read::<G>::new(&gradients)?;
        let (losses, step_inputs) = (Read::<f32>::new(losses)?, Read::<f64>::new(self.step_inputs)?);
        memory::write::<f64, ()>(self.step_outputs, |device, step_outputs| {
            step_control::control_step(device, gradients.view()?, losses.view()?, step_inputs.view()?, step_outputs)
                .map_err(kernel_error)
        })?;
        let step_outputs = Read::<f64>::new(self.step_outputs)?;
        let all = self.adamw.range();
        let views = StepControlViews { inputs: step_inputs.view()?, outputs: step_outputs.view()? };
        self.step_range(&all, gradients.view()?, views)
    }

    /// Same as [`ReplicatedUpdate::enqueue`], bucket by bucket as gradients arrive.
    fn enqueue_by_bucket<G: Elem + FloatElement>(mut self, ddp: &Ddp) -> Result<SyncStats> {
        let (params, groups) = (self.params, self.groups);
        let (device, ranges) = (kernel_device(params.device())?, ddp.buckets().iter().map(|bucket| &bucket.range));
        let step_inputs = Read::<f64>::new(self.step_inputs)?;
        let mut step_control = match ddp.has_peer_gradients() {
            true => {
                let sums = ranges.map(|range| self.adamw.num_partials_two_peers(range, groups)).sum();
                BucketedStepControl::with_partials(device, sums, step_inputs.view()?)?
            }
            false => BucketedStepControl::new(device, ranges.map(Range::len))?,
        };
        let gradients = params.grads();
        let sent = ddp.finish_by_bucket_with_peer(|bucket, peer| -> Result<()> {
            let gradients = Read::<G>::new(&gradients)?;
            if let Some(peer) = peer {
                let gradient_pair = [gradients.view()?, peer.view::<G>(device, &(0..params.flat_len()))];
                return with_compute_weights(params, |values, compute_weights| {
                    self.adamw
                        .step_range_two_peers(
                            &bucket.range,
                            values,
                            gradient_pair,
                            compute_weights,
                            groups,
                            step_inputs.view()?,
                            &mut step_control,
                        )
                        .map_err(kernel_error)
                });
            }
            let piece = gradients.view()?.slice(bucket.range.clone())?;
            let inputs = step_inputs.view()?;
            let views = StepControlViews { inputs, outputs: step_control.check_bucket(piece, inputs)? };
            self.step_range(&bucket.range, gradients.view()?, views)
        })?;
        let losses = Tensor::zeros(1, DType::F32, params.device())?;
        let losses = Read::<f32>::new(&losses)?;
        memory::write::<f64, ()>(self.step_outputs, |_, step_outputs| {
            step_control.finish(losses.view()?, step_inputs.view()?, step_outputs).map_err(kernel_error)
        })?;
        Ok(sent)
    }

    /// One step of a range of the parameters and of their compute weights.
    fn step_range<G: Elem + FloatElement>(
        &mut self,
        range: &Range<usize>,
        gradients: View<'_, G>,
        step_control_views: StepControlViews<'_>,
    ) -> Result<()> {
        with_compute_weights(self.params, |values, compute_weights| {
            self.adamw
                .step_range_controlled(range, values, gradients, compute_weights, self.groups, step_control_views)
                .map_err(kernel_error)
        })
    }
}

/// Calls `go` with the parameters and their compute weights.
fn with_compute_weights(
    params: &Params,
    go: impl FnOnce(ViewMut<'_, f32>, ComputeWeights<'_>) -> candle_core::Result<()>,
) -> Result<()> {
    let compute_weights = params.compute_weights();
    memory::write::<f32, _>(params.values(), |_, values| match &compute_weights {
        Some(compute_weights) if compute_weights.dtype() == DType::BF16 => {
            memory::write::<bf16, _>(compute_weights, |_, compute_weights| {
                go(values, ComputeWeights::Bf16(compute_weights))
            })
        }
        Some(compute_weights) if compute_weights.dtype() == DType::F16 => {
            memory::write::<f16, _>(compute_weights, |_, compute_weights| {
                go(values, ComputeWeights::F16(compute_weights))
            })
        }
        _ => go(values, ComputeWeights::None),
    })?;
    Ok(())
}

/// The trained parameters in groups of adjacent parameters with equal options. Padding between them belongs to the
/// group: its values and gradients are zero.
fn groups(params: &Params, options: &TrainerOptions) -> Vec<ParamGroup> {
    let mut groups: Vec<ParamGroup> = Vec::new();
    for param in params.iter().filter(Param::requires_grad) {
        let decays = param.decay() && (options.decay_embeddings || !param.name().contains("embed"));
        let group = ParamGroup {
            range: param.range(),
            weight_decay: if decays { options.weight_decay } else { 0.0 },
            lr_scale: param.lr_scale(),
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
