//! Sharded optimizer state (ZeRO-1): each rank updates a partition of the parameters, which is then sent to all ranks.
//!
//! | mode | gradients | a rank's partition | after the step |
//! |---|---|---|---|
//! | broadcast | all of them, averaged, on every rank | whole parameters, about 1/world of all elements | every rank broadcasts its partition |
//! | ZeRO-1 | each rank's shards only ([`Exchange::ReduceScatter`](super::ddp::Exchange)) | 1/world of every bucket | an all-gather for each bucket |
//!
//! Broadcast mode sends the parameters in addition to what data-parallel training without sharding sends. ZeRO-1 sends
//! as many bytes as without sharding, since an all-reduce is a reduce-scatter and an all-gather (Rajbhandari et al.,
//! "ZeRO", 2020, section 7.1).
//!
//! Updates are element-wise, so that the result does not depend on the rank that computes them: in broadcast mode
//! parameters are bit for bit those of an optimizer without sharding, for the same learning rate and gradient scale.
//! ([`ShardedOptimizer::gradient_norm`] sums in another order; with the whole gradient use
//! [`grad_norm`](crate::optim::step_control::grad_norm).)

mod partition;

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tilewright::{Buffer, Device, View, ViewMut};

use super::buckets::Bucket;
use super::comm::handle::wait_all;
use super::comm::{Call, Communicator, Dtype, Handle, Op, Reduce};
use super::ddp::{Ddp, SyncStats};
use super::error::{Error, Result};
use crate::optim::{AdamW, AdamWOptions, ComputeWeights, ParamGroup, total_sum_of_squares};
use partition::{Partition, assign_by_size, intersection, merge_adjacent, split_by_steps};

/// Arguments of an optimizer step, as in [`AdamW::step`], without compute weights: refresh them afterwards.
pub struct StepArguments<'a> {
    /// The flat tensor of all parameters.
    pub values: ViewMut<'a, f32>,
    /// The flat gradient, of the same length.
    pub gradients: View<'a, f32>,
    pub groups: &'a [ParamGroup],
    /// Learning rate, before the factors of the groups.
    pub rate: f64,
    /// Factor on the gradient, from clipping and loss scaling.
    pub gradient_scale: f64,
}

impl StepArguments<'_> {
    fn reborrow(&mut self) -> StepArguments<'_> {
        let StepArguments { values, gradients, groups, rate, gradient_scale } = self;
        let values = values.reborrow();
        StepArguments { values, gradients: *gradients, groups, rate: *rate, gradient_scale: *gradient_scale }
    }
}

/// An optimizer with element-wise state for a range of the flat tensors.
pub trait FlatOptimizer: Sized {
    type Options;
    /// Names of the state tensors; each has an element per parameter element.
    const STATE: &'static [&'static str];

    /// State for `range` before the first step.
    ///
    /// # Errors
    /// The device is out of memory.
    fn new(device: &Device, range: Range<usize>, options: &Self::Options) -> tilewright::Result<Self>;

    fn range(&self) -> Range<usize>;

    /// Number of steps.
    fn steps(&self) -> u64;

    /// Bytes of state.
    fn bytes(&self) -> usize;

    /// One step of its range.
    ///
    /// # Errors
    /// Errors of the launches.
    fn step(&mut self, arguments: StepArguments<'_>) -> tilewright::Result<()>;

    /// The state tensors, in the order of [`FlatOptimizer::STATE`].
    fn state(&self) -> Vec<View<'_, f32>>;

    /// Restores the state: `read` fills the tensor of each name.
    ///
    /// # Errors
    /// Errors of `read`.
    fn restore(
        &mut self,
        steps: u64,
        read: impl FnMut(&'static str, ViewMut<'_, f32>) -> tilewright::Result<()>,
    ) -> tilewright::Result<()>;
}

impl FlatOptimizer for AdamW {
    type Options = AdamWOptions;
    const STATE: &'static [&'static str] = &["first", "second"];

    fn new(device: &Device, range: Range<usize>, options: &AdamWOptions) -> tilewright::Result<AdamW> {
        AdamW::new(device, range, *options)
    }

    fn range(&self) -> Range<usize> {
        AdamW::range(self)
    }

    fn steps(&self) -> u64 {
        AdamW::steps(self)
    }

    fn bytes(&self) -> usize {
        AdamW::bytes(self)
    }

    fn step(&mut self, arguments: StepArguments<'_>) -> tilewright::Result<()> {
        let StepArguments { values, gradients, groups, rate, gradient_scale } = arguments;
        AdamW::step(self, values, gradients, ComputeWeights::None, groups, rate, gradient_scale)
    }

    fn state(&self) -> Vec<View<'_, f32>> {
        let (first, second) = self.moments();
        vec![first, second]
    }

    fn restore(
        &mut self,
        steps: u64,
        mut read: impl FnMut(&'static str, ViewMut<'_, f32>) -> tilewright::Result<()>,
    ) -> tilewright::Result<()> {
        AdamW::restore(self, steps, |first, second| {
            read("first", first)?;
            read("second", second)
        })
    }
}

/// How parameters are partitioned and synchronized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Each rank updates whole parameters, balanced by size, and broadcasts them
    Broadcast,
    /// Each rank updates a shard of every bucket; gradients are reduce-scattered, parameters all-gathered
    Zero1,
}

/// An optimizer whose state is sharded over ranks.
pub struct ShardedOptimizer<O: FlatOptimizer> {
    comm: Arc<Communicator>,
    device: Device,
    options: O::Options,
    partitions: Vec<Partition>,
    /// Number of elements that each rank owns.
    load: Vec<usize>,
    /// This rank's optimizers, each with the index of its partition.
    own: Vec<(usize, O)>,
    /// Ranges that are updated, on any rank, with their step counts; sorted.
    step_counts: Vec<(Range<usize>, u64)>,
    mode: Mode,
    flat_len: usize,
}

/// A partition that is being sent to all ranks.
struct Sent {
    part: usize,
    handles: Vec<Handle>,
}

fn all_handles(sent: &[Sent]) -> impl Iterator<Item = &Handle> {
    sent.iter().flat_map(|sent| &sent.handles)
}

/// The gathered state of all ranks, independent of the world size.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Step count of each range: parameters that were added later have fewer. Sorted and disjoint.
    pub steps: Vec<(Range<usize>, u64)>,
    /// Values of all elements of the flat tensors, for each name in [`FlatOptimizer::STATE`]; zero without state.
    pub flats: Vec<Vec<f32>>,
}

impl State {
    /// State of elements that all have the same step count.
    pub fn uniform(steps: u64, flats: Vec<Vec<f32>>) -> State {
        let len = flats.first().map_or(0, Vec::len);
        State { steps: vec![(0..len, steps)], flats }
    }
}

impl<O: FlatOptimizer> ShardedOptimizer<O> {
    /// Assigns whole parameters by size: `params` are their ranges in a flat tensor of `flat_len` elements. Each rank's
    /// partition is contiguous in the flat tensor, and its size differs from the others' by at most one parameter.
    ///
    /// # Errors
    /// No memory for this rank's state.
    pub fn by_parameters(
        device: &Device,
        comm: Arc<Communicator>,
        params: &[Range<usize>],
        flat_len: usize,
        options: O::Options,
    ) -> Result<ShardedOptimizer<O>> {
        let mut optimizer = ShardedOptimizer::empty(device, comm, options, Mode::Broadcast, flat_len);
        optimizer.add_param_group(params)?;
        Ok(optimizer)
    }

    /// Shards every bucket of the [`Ddp`] that reduce-scatters the gradients.
    ///
    /// # Errors
    /// No memory for this rank's state.
    pub fn by_buckets(
        device: &Device,
        comm: Arc<Communicator>,
        buckets: &[Bucket],
        flat_len: usize,
        options: O::Options,
    ) -> Result<ShardedOptimizer<O>> {
        let mut optimizer = ShardedOptimizer::with_buckets(device, comm, buckets, flat_len, options);
        let all: Vec<Range<usize>> = buckets.iter().map(|bucket| bucket.range.clone()).collect();
        optimizer.add_param_group(&all)?;
        Ok(optimizer)
    }

    /// Same as [`ShardedOptimizer::by_buckets`], without parameters: [`ShardedOptimizer::add_param_group`] adds them.
    pub fn with_buckets(
        device: &Device,
        comm: Arc<Communicator>,
        buckets: &[Bucket],
        flat_len: usize,
        options: O::Options,
    ) -> ShardedOptimizer<O> {
        let mut optimizer = ShardedOptimizer::empty(device, comm, options, Mode::Zero1, flat_len);
        let world = optimizer.comm.world();
        for bucket in buckets {
            let shards = bucket.shards(world);
            if shards.shard_len > 0 {
                optimizer.partitions.push(Partition::Sharded { shard_len: shards.shard_len, range: shards.sharded });
            }
            if !shards.remainder.is_empty() {
                optimizer.partitions.push(Partition::Replicated { range: shards.remainder });
            }
        }
        optimizer
    }

    fn empty(device: &Device, comm: Arc<Communicator>, options: O::Options, mode: Mode, flat_len: usize) -> Self {
        let load = vec![0; comm.world()];
        ShardedOptimizer {
            comm,
            device: device.clone(),
            options,
            partitions: Vec::new(),
            load,
            own: Vec::new(),
            step_counts: Vec::new(),
            mode,
            flat_len,
        }
    }

    /// Adds parameters, before or during training, the same ones on every rank; their state starts at zero. In
    /// broadcast mode they go to the rank with the least load; with ZeRO-1 each element goes to the rank that has it in
    /// its shard.
    ///
    /// # Errors
    /// Parameters that were added before, or with ZeRO-1 are in no bucket; the device is out of memory.
    pub fn add_param_group(&mut self, params: &[Range<usize>]) -> Result<()> {
        let mut sorted: Vec<Range<usize>> = params.iter().filter(|range| !range.is_empty()).cloned().collect();
        sorted.sort_by_key(|range| range.start);
        let twice = sorted.windows(2).find(|pair| pair[0].end > pair[1].start).map(|pair| &pair[1]);
        let known = |range: &&Range<usize>| self.step_counts.iter().any(|(own, _)| intersection(own, range).is_some());
        if let Some(range) = twice {
            return Err(Error::Misuse(format!("parameters {range:?} are given twice")));
        }
        if let Some(range) = sorted.iter().find(|range| range.end > self.flat_len) {
            let len = self.flat_len;
            return Err(Error::Misuse(format!("parameters {range:?} exceed the flat tensor of {len} elements")));
        }
        if let Some(range) = sorted.iter().find(known) {
            return Err(Error::Misuse(format!("parameters {range:?} already belong to this optimizer")));
        }
        match self.mode {
            Mode::Broadcast => {
                for (by, range) in assign_by_size(&sorted, &mut self.load) {
                    if by == self.comm.rank() {
                        self.own.push((self.partitions.len(), O::new(&self.device, range.clone(), &self.options)?));
                    }
                    self.partitions.push(Partition::Owned { rank: by, range });
                }
            }
            Mode::Zero1 => self.add_shards(&sorted)?,
        }
        self.step_counts.extend(sorted.into_iter().map(|range| (range, 0)));
        self.step_counts.sort_by_key(|(range, _)| range.start);
        Ok(())
    }

    /// Adds state for this rank's shards of the parameters.
    fn add_shards(&mut self, params: &[Range<usize>]) -> Result<()> {
        let covered = |range: &Range<usize>| -> usize {
            self.partitions.iter().filter_map(|part| intersection(&part.range(), range)).map(|both| both.len()).sum()
        };
        if let Some(range) = params.iter().find(|range| covered(range) < range.len()) {
            let help = "gradients of parameters that were frozen when Ddp was created are not communicated: create both again, and load the state";
            return Err(Error::Misuse(format!("parameters {range:?} are in no bucket\n  help: {help}")));
        }
        let joined = merge_adjacent(params);
        for (index, part) in self.partitions.iter().enumerate() {
            let Some(mine) = part.range_of(self.comm.rank()) else { continue };
            for range in joined.iter().filter_map(|range| intersection(range, &mine)) {
                self.own.push((index, O::new(&self.device, range, &self.options)?));
            }
        }
        Ok(())
    }

    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Number of steps.
    pub fn steps(&self) -> u64 {
        self.step_counts.iter().map(|(_, steps)| *steps).max().unwrap_or(0)
    }

    /// Bytes of state on this rank.
    pub fn bytes(&self) -> usize {
        self.own.iter().map(|(_, own)| own.bytes()).sum()
    }

    /// Elements that this rank updates.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        self.own.iter().map(|(_, own)| own.range()).collect()
    }

    /// L2 norm of the gradient of all parameters of this optimizer, if at least this rank's partition of it is
    /// averaged. All ranks get the same bits. Synchronizes with the device.
    ///
    /// # Errors
    /// Errors of the device and of communication.
    pub fn gradient_norm(&self, gradients: View<'_, f32>) -> Result<f64> {
        // Replicated partitions are counted once.
        let counts = |part: &Partition| !matches!(part, Partition::Replicated { .. }) || self.comm.rank() == 0;
        let own = self.own.iter().filter(|(part, _)| counts(&self.partitions[*part]));
        let slices: Vec<View<'_, f32>> =
            own.map(|(_, own)| gradients.slice(own.range())).collect::<tilewright::Result<_>>()?;
        let mut sum = [total_sum_of_squares(&self.device, &slices)?];
        self.comm.all_reduce(&mut sum, Reduce::Sum)?;
        Ok(sum[0].sqrt())
    }

    /// One step: updates this rank's partitions, and sends each to all ranks as soon as it is updated, while the next
    /// ones are computed.
    ///
    /// # Errors
    /// Errors of the launches and of communication.
    pub fn step(&mut self, mut arguments: StepArguments<'_>) -> Result<()> {
        let mut sent = Vec::new();
        let outcome = (0..self.partitions.len()).try_for_each(|index| {
            // SAFETY: the parameters are borrowed exclusively until all handles have been waited for, below.
            unsafe { self.step_partition(index, arguments.reborrow(), &mut sent) }
        });
        let waited = wait_all(all_handles(&sent));
        outcome.and(waited.map_err(Error::from))?;
        self.step_counts.iter_mut().for_each(|(_, steps)| *steps += 1);
        Ok(())
    }

    /// Updates this rank's elements of a partition, and starts to send it to all ranks.
    ///
    /// # Safety
    /// See [`ShardedOptimizer::start`], for the handles added to `sent`.
    unsafe fn step_partition(
        &mut self,
        index: usize,
        mut arguments: StepArguments<'_>,
        sent: &mut Vec<Sent>,
    ) -> Result<()> {
        // Collectives in flight use elements of other partitions, which these steps neither read nor write.
        for (_, own) in self.own.iter_mut().filter(|(part, _)| *part == index) {
            own.step(arguments.reborrow())?;
        }
        let mut handles = Vec::new();
        // SAFETY: guaranteed by the caller.
        let started = unsafe { self.start(index, arguments.values.address(), &mut handles) };
        sent.push(Sent { part: index, handles });
        started
    }

    /// Same as [`ShardedOptimizer::step`], for gradients that are still in flight: each partition is updated when `ddp`
    /// has its gradients, and sent immediately, while other gradients are in flight. `on_arrival` is called for each
    /// range that is complete on this rank again, with all values. Returns the statistics of `ddp` and the gradient
    /// norm. The norm is not checked before the update: if it is not finite, neither are the parameters.
    ///
    /// # Errors
    /// See [`ShardedOptimizer::step`]; also errors of `on_arrival`.
    pub fn step_by_bucket(
        &mut self,
        ddp: &Ddp,
        mut arguments: StepArguments<'_>,
        mut on_arrival: impl FnMut(&Range<usize>, View<'_, f32>) -> Result<()>,
    ) -> Result<(SyncStats, f64)> {
        let touches = |bucket: &Bucket, part: &Partition| intersection(&bucket.range, &part.range()).is_some();
        // Number of buckets of each partition whose gradients are missing.
        let count = |part: &Partition| ddp.buckets().iter().filter(|bucket| touches(bucket, part)).count();
        let mut missing: Vec<usize> = self.partitions.iter().map(count).collect();
        let alone: Vec<usize> = (0..missing.len()).filter(|&index| missing[index] == 0).collect();
        let mut sent = Vec::new();
        let mut update = |optimizer: &mut Self, index: usize| {
            // SAFETY: the parameters are borrowed exclusively until all handles have been waited for, below.
            unsafe { optimizer.step_partition(index, arguments.reborrow(), &mut sent) }
        };
        let outcome = ddp.finish_by_bucket(|bucket| -> Result<()> {
            for index in 0..missing.len() {
                if touches(bucket, &self.partitions[index]) {
                    missing[index] -= 1;
                    if missing[index] == 0 {
                        update(self, index)?;
                    }
                }
            }
            Ok(())
        });
        let outcome = outcome.and_then(|synchronized| {
            // Partitions without gradients in flight.
            alone.into_iter().try_for_each(|index| update(self, index))?;
            Ok(synchronized)
        });
        // Device synchronization overlaps with the communication of parameters.
        let rest = outcome.and_then(|synchronized| {
            let norm = self.gradient_norm(arguments.gradients)?;
            sent.iter().try_for_each(|Sent { part, handles }| {
                wait_all(handles)?;
                on_arrival(&self.partitions[*part].range(), arguments.values.as_view())
            })?;
            Ok((synchronized, norm))
        });
        let waited = wait_all(all_handles(&sent));
        let done = rest.and_then(|done| waited.map(|()| done).map_err(Error::from))?;
        self.step_counts.iter_mut().for_each(|(_, steps)| *steps += 1);
        Ok(done)
    }

    /// Starts to send a partition of the flat tensor at `base` from its owners to all ranks, if any of it is updated.
    ///
    /// # Safety
    /// See [`Communicator::start`], for the partition's range.
    unsafe fn start(&self, index: usize, base: u64, handles: &mut Vec<Handle>) -> Result<()> {
        let part = &self.partitions[index];
        let range = part.range();
        let op = match part {
            Partition::Owned { rank: by, .. } => Op::Broadcast { root: *by },
            Partition::Sharded { .. } => Op::AllGather,
            Partition::Replicated { .. } => return Ok(()),
        };
        if !self.step_counts.iter().any(|(known, _)| intersection(known, &range).is_some()) {
            return Ok(());
        }
        let call = Call { op, dtype: Dtype::F32, count: range.len(), comm_dtype: None };
        let address = base + (range.start * size_of::<f32>()) as u64;
        // SAFETY: guaranteed by the caller.
        handles.push(unsafe { self.comm.start(call, address as *mut u8)? });
        Ok(())
    }

    /// Sends all partitions of a flat tensor from their owners to all ranks.
    fn synchronize(&self, flat: &mut ViewMut<'_, f32>) -> Result<()> {
        let base = flat.address();
        let mut handles = Vec::new();
        let outcome = (0..self.partitions.len()).try_for_each(|index| {
            // SAFETY: `flat` is borrowed exclusively until all handles have been waited for, below.
            unsafe { self.start(index, base, &mut handles) }
        });
        let waited = wait_all(&handles);
        outcome.and(waited.map_err(Error::from))
    }

    /// This rank's contribution to the gathered state; rank 0 alone contributes replicated partitions.
    pub fn own_state(&self) -> impl Iterator<Item = &O> {
        let gives =
            |part: usize| !matches!(self.partitions[part], Partition::Replicated { .. }) || self.comm.rank() == 0;
        self.own.iter().filter(move |(part, _)| gives(*part)).map(|(_, own)| own)
    }

    /// Gathers the state of all ranks, on every rank.
    ///
    /// # Errors
    /// Errors of the device and of communication.
    pub fn gather_state(&self) -> Result<State> {
        let mut flats = Vec::new();
        for index in 0..O::STATE.len() {
            let mut flat = Buffer::<f32>::zeros(&self.device, self.flat_len)?;
            for (_, own) in &self.own {
                flat.slice_mut(own.range())?.copy_from(own.state()[index])?;
            }
            self.synchronize(&mut flat.view_mut())?;
            flats.push(flat.to_vec()?);
        }
        Ok(State { steps: self.step_counts.clone(), flats })
    }

    /// Restores this rank's state from gathered state, saved with any world size. Parameters without saved state start
    /// at zero.
    ///
    /// # Errors
    /// State of another model; no memory.
    pub fn load_state(&mut self, state: &State) -> Result<()> {
        let State { steps, flats } = state;
        if flats.len() != O::STATE.len() || flats.iter().any(|flat| flat.len() != self.flat_len) {
            let found: Vec<usize> = flats.iter().map(Vec::len).collect();
            return Err(Error::Misuse(format!(
                "the state is of another optimizer or model: expected {} times {} elements, found {found:?}",
                O::STATE.len(),
                self.flat_len
            )));
        }
        self.load_with(steps, |index, range, to| {
            to.copy_from_slice(&flats[index][range]);
            Ok(())
        })
    }

    /// Same as [`ShardedOptimizer::load_state`], for state that is read in slices: `read` fills elements of the state
    /// tensor at an index of [`FlatOptimizer::STATE`], which are zero before. `steps` as in [`State`].
    ///
    /// # Errors
    /// Errors of `read`; no memory. Then part of the state is loaded: load another one before the next step.
    pub fn load_with<E: From<tilewright::Error>>(
        &mut self,
        steps: &[(Range<usize>, u64)],
        mut read: impl FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = 0;
        while let Some((part, own)) = self.own.get(at) {
            let (part, own) = (*part, own.range());
            let ranges = split_by_steps(&own, steps);
            if ranges.len() != 1 {
                let new =
                    |(range, _): &(Range<usize>, u64)| Ok((part, O::new(&self.device, range.clone(), &self.options)?));
                let split: Vec<_> = ranges.iter().map(new).collect::<tilewright::Result<_>>()?;
                self.own.splice(at..=at, split);
            }
            for (range, steps) in ranges {
                let mut pieces = Vec::new();
                for index in 0..O::STATE.len() {
                    let mut piece = vec![0.0_f32; range.len()];
                    read(index, range.clone(), &mut piece)?;
                    pieces.push(piece);
                }
                self.own[at].1.restore(steps, |name, mut memory| {
                    let index = O::STATE.iter().position(|known| *known == name).unwrap_or(0);
                    memory.copy_from_slice(&pieces[index])
                })?;
                at += 1;
            }
        }
        self.step_counts = self.step_counts.iter().flat_map(|(range, _)| split_by_steps(range, steps)).collect();
        Ok(())
    }
}
