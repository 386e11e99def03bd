//! Optimizer state shared out over ranks: each rank updates a part of the parameters, then all get all.
//!
//! | mode | gradients | a rank's part | after the step |
//! |---|---|---|---|
//! | broadcast | all of them, averaged, on every rank | whole parameters, about 1/world of all elements | every rank broadcasts its part |
//! | ZeRO-1 | each rank's shards only ([`Exchange::ReduceScatter`](super::ddp::Exchange)) | 1/world of every bucket | an all-gather for each bucket |
//!
//! Broadcast sends n bytes more than data-parallel training without sharding; ZeRO-1 sends the same bytes, since an all-reduce is a
//! reduce-scatter and an all-gather (Rajbhandari et al., "ZeRO", 2020, section 7.1).
//!
//! Elements are updated one by one, so that who does it does not change the result: in broadcast mode parameters are bit for bit those
//! of an optimizer that is not shared out, if the step's rate and scale are. ([`ShardedOptimizer::gradient_norm`] adds up in another order;
//! who has the whole gradient takes [`grad_norm`](crate::optim::step_control::grad_norm).)

mod partition;

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tilewright::{Buffer, Device, View, ViewMut};

use super::buckets::Bucket;
use super::comm::handle::wait_all;
use super::comm::{Call, Communicator, Dtype, Handle, Op, Reduce};
use super::ddp::{Ddp, Synchronized};
use super::error::{Error, Result};
use crate::optim::{AdamW, AdamWOptions, ComputeWeights, Group, total_sum_of_squares};
use partition::{Partition, assign_by_size, intersection, merge_adjacent, split_by_steps};

/// An optimizer whose state belongs to a range of the flat tensors, element by element.
pub trait FlatOptimizer: Sized {
    type Options;
    /// Names of what it keeps for each element.
    const STATE: &'static [&'static str];

    /// State for `range` before the first step.
    ///
    /// # Errors
    /// The device is out of memory.
    fn new(device: &Device, range: Range<usize>, options: &Self::Options) -> tilewright::Result<Self>;

    fn range(&self) -> Range<usize>;

    /// Steps made.
    fn steps(&self) -> u64;

    /// Bytes of state.
    fn bytes(&self) -> usize;

    /// One step of its range; arguments as [`AdamW::step`]'s.
    ///
    /// # Errors
    /// Those of the launches.
    fn step(
        &mut self,
        values: ViewMut<'_, f32>,
        gradients: View<'_, f32>,
        compute_weights: ComputeWeights<'_>,
        groups: &[Group],
        rate: f64,
        gradient_scale: f64,
    ) -> tilewright::Result<()>;

    /// What it keeps, in the order of [`FlatOptimizer::STATE`].
    fn state(&self) -> Vec<View<'_, f32>>;

    /// Sets what it keeps: `read` fills the memory of each name.
    ///
    /// # Errors
    /// Those of `read`.
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

    fn step(
        &mut self,
        values: ViewMut<'_, f32>,
        gradients: View<'_, f32>,
        compute_weights: ComputeWeights<'_>,
        groups: &[Group],
        rate: f64,
        gradient_scale: f64,
    ) -> tilewright::Result<()> {
        AdamW::step(self, values, gradients, compute_weights, groups, rate, gradient_scale)
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

/// How parameters are shared out, and how they come together again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Whole parameters are distributed by size; every rank updates and broadcasts its own
    Broadcast,
    /// ZeRO-1: every rank owns a shard of every bucket; gradients are reduce-scattered, parameters all-gathered
    Zero1,
}

/// An optimizer of which every rank has a part.
pub struct ShardedOptimizer<O: FlatOptimizer> {
    comm: Arc<Communicator>,
    device: Device,
    options: O::Options,
    parts: Vec<Partition>,
    /// Elements that each rank owns.
    load: Vec<usize>,
    /// This rank's own, each with the part that it belongs to.
    own: Vec<(usize, O)>,
    /// The elements that are updated, by all ranks together, with the steps that each range has been in: sorted.
    step_counts: Vec<(Range<usize>, u64)>,
    mode: Mode,
    flat_len: usize,
}

/// A part on its way to everybody.
struct Sent {
    part: usize,
    handles: Vec<Handle>,
}

fn all_handles(sent: &[Sent]) -> impl Iterator<Item = &Handle> {
    sent.iter().flat_map(|sent| &sent.handles)
}

/// All ranks' state together, which does not depend on how many there are.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Steps that elements have been in: parameters that came later have fewer. Sorted, and without overlap.
    pub steps: Vec<(Range<usize>, u64)>,
    /// For each name of [`FlatOptimizer::STATE`] an element for every element of the flat tensors; zeros where there is no state.
    pub flats: Vec<Vec<f32>>,
}

impl State {
    /// Of elements that have all been in the same steps.
    pub fn uniform(steps: u64, flats: Vec<Vec<f32>>) -> State {
        let len = flats.first().map_or(0, Vec::len);
        State { steps: vec![(0..len, steps)], flats }
    }
}

impl<O: FlatOptimizer> ShardedOptimizer<O> {
    /// BucketShards whole parameters out by size: `params` are their ranges in a flat tensor of `flat_len` elements. Each rank's part is one
    /// piece of the flat tensor, and within one parameter as large as the others'.
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

    /// BucketShards every bucket out: those of the [`Ddp`] that reduce-scatters the gradients.
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

    /// As [`ShardedOptimizer::by_buckets`], of no parameters yet: [`ShardedOptimizer::add_param_group`] says which.
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
                optimizer.parts.push(Partition::Sharded { shard_len: shards.shard_len, range: shards.sharded });
            }
            if !shards.remainder.is_empty() {
                optimizer.parts.push(Partition::Replicated { range: shards.remainder });
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
            parts: Vec::new(),
            load,
            own: Vec::new(),
            step_counts: Vec::new(),
            mode,
            flat_len,
        }
    }

    /// Takes in more parameters, before or during training, the same ones on every rank: their state starts at zero. Parameters that
    /// are shared out whole go to the rank that has least; with ZeRO-1 each element goes to the rank that has it in its share.
    ///
    /// # Errors
    /// Parameters that are here already, or with ZeRO-1 in no bucket; no memory.
    pub fn add_param_group(&mut self, params: &[Range<usize>]) -> Result<()> {
        let mut sorted: Vec<Range<usize>> = params.iter().filter(|range| !range.is_empty()).cloned().collect();
        sorted.sort_by_key(|range| range.start);
        let twice = sorted.windows(2).find(|pair| pair[0].end > pair[1].start).map(|pair| pair[1].clone());
        let taken = |range: &&Range<usize>| {
            range.end > self.flat_len || self.step_counts.iter().any(|(known, _)| intersection(known, range).is_some())
        };
        if let Some(range) = twice.or_else(|| sorted.iter().find(taken).cloned()) {
            return Err(Error::Misuse(format!(
                "parameters {range:?} are in this optimizer already, or in no flat tensor"
            )));
        }
        match self.mode {
            Mode::Broadcast => {
                for (by, range) in assign_by_size(&sorted, &mut self.load) {
                    if by == self.comm.rank() {
                        self.own.push((self.parts.len(), O::new(&self.device, range.clone(), &self.options)?));
                    }
                    self.parts.push(Partition::Owned { rank: by, range });
                }
            }
            Mode::Zero1 => self.add_shares(&sorted)?,
        }
        self.step_counts.extend(sorted.into_iter().map(|range| (range, 0)));
        self.step_counts.sort_by_key(|(range, _)| range.start);
        Ok(())
    }

    /// State for what this rank has in its shards of parameters.
    fn add_shares(&mut self, params: &[Range<usize>]) -> Result<()> {
        let covered = |range: &Range<usize>| -> usize {
            self.parts.iter().filter_map(|part| intersection(&part.range(), range)).map(|both| both.len()).sum()
        };
        if let Some(range) = params.iter().find(|range| covered(range) < range.len()) {
            let help = "gradients of parameters that were frozen when Ddp was made do not travel: make both anew, and load the state";
            return Err(Error::Misuse(format!("parameters {range:?} are in no bucket\n  help: {help}")));
        }
        let joined = merge_adjacent(params);
        for (index, part) in self.parts.iter().enumerate() {
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

    /// Steps made.
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

    /// The norm of the gradient of all parameters that this updates; this rank has at least its part of it averaged. All ranks get the
    /// same bits. Waits for the device.
    ///
    /// # Errors
    /// Those of the device and of communication.
    pub fn gradient_norm(&self, gradients: View<'_, f32>) -> Result<f64> {
        // What all have is counted once.
        let counts = |part: &Partition| !matches!(part, Partition::Replicated { .. }) || self.comm.rank() == 0;
        let own = self.own.iter().filter(|(part, _)| counts(&self.parts[*part]));
        let slices: Vec<View<'_, f32>> =
            own.map(|(_, own)| gradients.slice(own.range())).collect::<tilewright::Result<_>>()?;
        let mut sum = [total_sum_of_squares(&self.device, &slices)?];
        self.comm.all_reduce(&mut sum, Reduce::Sum)?;
        Ok(sum[0].sqrt())
    }

    /// One step: updates this rank's part, and gives everybody everything: each piece leaves when it is updated, while the next ones are.
    /// `values` and `gradients` are the whole flat tensors, the other arguments as [`AdamW::step`]'s. A copy in a shorter type is not
    /// written: refresh it afterwards.
    ///
    /// # Errors
    /// Those of the launches and of communication.
    pub fn step(
        &mut self,
        mut values: ViewMut<'_, f32>,
        gradients: View<'_, f32>,
        groups: &[Group],
        rate: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        let mut sent = Vec::new();
        let outcome = (0..self.parts.len()).try_for_each(|index| {
            // SAFETY: `values` is borrowed exclusively until all handles have been waited for, below.
            unsafe {
                self.step_partition(index, values.reborrow(), gradients, groups, (rate, gradient_scale), &mut sent)
            }
        });
        let waited = wait_all(all_handles(&sent));
        outcome.and(waited.map_err(Error::from))?;
        self.step_counts.iter_mut().for_each(|(_, steps)| *steps += 1);
        Ok(())
    }

    /// Updates what this rank has of a part, and starts to give it to everybody.
    ///
    /// # Safety
    /// As [`ShardedOptimizer::start`]'s, for the handles that come into `sent`.
    unsafe fn step_partition(
        &mut self,
        index: usize,
        mut values: ViewMut<'_, f32>,
        gradients: View<'_, f32>,
        groups: &[Group],
        (rate, gradient_scale): (f64, f64),
        sent: &mut Vec<Sent>,
    ) -> Result<()> {
        // What is under way is other parts' elements, which these steps neither read nor write.
        for (_, own) in self.own.iter_mut().filter(|(part, _)| *part == index) {
            own.step(values.reborrow(), gradients, ComputeWeights::None, groups, rate, gradient_scale)?;
        }
        let mut handles = Vec::new();
        // SAFETY: the caller's promise.
        let started = unsafe { self.start(index, values.address(), &mut handles) };
        sent.push(Sent { part: index, handles });
        started
    }

    /// As [`ShardedOptimizer::step`], of gradients that are still on their way to other ranks: each part is updated when `ddp` has its
    /// gradients, and leaves at once, while others travel. `arrived` is called for each range that is whole on this rank again, with
    /// all values. Gives what `ddp` sent, and the gradient's norm, at which nobody looked before: where it is not finite, parameters are
    /// not either.
    ///
    /// # Errors
    /// As [`ShardedOptimizer::step`], and those of `arrived`.
    pub fn step_by_bucket(
        &mut self,
        ddp: &Ddp,
        (mut values, gradients): (ViewMut<'_, f32>, View<'_, f32>),
        groups: &[Group],
        (rate, gradient_scale): (f64, f64),
        mut arrived: impl FnMut(&Range<usize>, View<'_, f32>) -> Result<()>,
    ) -> Result<(Synchronized, f64)> {
        let touches = |bucket: &Bucket, part: &Partition| intersection(&bucket.range, &part.range()).is_some();
        // Of how many buckets the gradients of each part are not here.
        let count = |part: &Partition| ddp.buckets().iter().filter(|bucket| touches(bucket, part)).count();
        let mut missing: Vec<usize> = self.parts.iter().map(count).collect();
        let alone: Vec<usize> = (0..missing.len()).filter(|&index| missing[index] == 0).collect();
        let mut sent = Vec::new();
        let mut update = |optimizer: &mut Self, index: usize| {
            let (values, scales) = (values.reborrow(), (rate, gradient_scale));
            // SAFETY: `values` is borrowed exclusively until all handles have been waited for, below.
            unsafe { optimizer.step_partition(index, values, gradients, groups, scales, &mut sent) }
        };
        let outcome = ddp.finish_by_bucket(|bucket| -> Result<()> {
            for index in 0..missing.len() {
                if touches(bucket, &self.parts[index]) {
                    missing[index] -= 1;
                    if missing[index] == 0 {
                        update(self, index)?;
                    }
                }
            }
            Ok(())
        });
        let outcome = outcome.and_then(|synchronized| {
            // Parts whose gradients do not travel.
            alone.into_iter().try_for_each(|index| update(self, index))?;
            Ok(synchronized)
        });
        // What waits for the device comes while parameters travel.
        let rest = outcome.and_then(|synchronized| {
            let norm = self.gradient_norm(gradients)?;
            sent.iter().try_for_each(|Sent { part, handles }| {
                wait_all(handles)?;
                arrived(&self.parts[*part].range(), values.as_view())
            })?;
            Ok((synchronized, norm))
        });
        let waited = wait_all(all_handles(&sent));
        let done = rest.and_then(|done| waited.map(|()| done).map_err(Error::from))?;
        self.step_counts.iter_mut().for_each(|(_, steps)| *steps += 1);
        Ok(done)
    }

    /// Starts to give every rank what the others own of a part of the flat tensor at `base`, if anything of it is updated at all.
    ///
    /// # Safety
    /// As [`Communicator::start`]'s, for the part's range.
    unsafe fn start(&self, index: usize, base: u64, handles: &mut Vec<Handle>) -> Result<()> {
        let part = &self.parts[index];
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
        // SAFETY: the caller's promise.
        handles.push(unsafe { self.comm.start(call, address as *mut u8)? });
        Ok(())
    }

    /// Gives every rank what the others own of a flat tensor.
    fn synchronize(&self, flat: &mut ViewMut<'_, f32>) -> Result<()> {
        let base = flat.address();
        let mut handles = Vec::new();
        let outcome = (0..self.parts.len()).try_for_each(|index| {
            // SAFETY: `flat` is borrowed exclusively until all handles have been waited for, below.
            unsafe { self.start(index, base, &mut handles) }
        });
        let waited = wait_all(&handles);
        outcome.and(waited.map_err(Error::from))
    }

    /// What this rank gives to the state of all: its own pieces, of those that every rank has the first rank's alone.
    pub fn own_state(&self) -> impl Iterator<Item = &O> {
        let gives = |part: usize| !matches!(self.parts[part], Partition::Replicated { .. }) || self.comm.rank() == 0;
        self.own.iter().filter(move |(part, _)| gives(*part)).map(|(_, own)| own)
    }

    /// All ranks' state, the same on every rank.
    ///
    /// # Errors
    /// Those of the device and of communication.
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

    /// Sets this rank's part from the state of a whole optimizer, whatever its world was. Parameters that the state does not know
    /// begin at zero.
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

    /// As [`ShardedOptimizer::load_state`], of state that is read piece by piece: `read` fills elements of what [`FlatOptimizer::STATE`] has at an
    /// index, which are zeros before. `steps` are those of [`State`].
    ///
    /// # Errors
    /// Those of `read`; no memory.
    pub fn load_with<E: From<tilewright::Error>>(
        &mut self,
        steps: &[(Range<usize>, u64)],
        mut read: impl FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut own = Vec::new();
        for (part, range) in std::mem::take(&mut self.own).into_iter().map(|(part, own)| (part, own.range())) {
            for (range, steps) in split_by_steps(&range, steps) {
                let mut pieces = Vec::new();
                for index in 0..O::STATE.len() {
                    let mut piece = vec![0.0_f32; range.len()];
                    read(index, range.clone(), &mut piece)?;
                    pieces.push(piece);
                }
                let mut loaded = O::new(&self.device, range, &self.options)?;
                loaded.restore(steps, |name, mut memory| {
                    let index = O::STATE.iter().position(|known| *known == name).unwrap_or(0);
                    memory.copy_from_slice(&pieces[index])
                })?;
                own.push((part, loaded));
            }
        }
        self.own = own;
        self.step_counts = self.step_counts.iter().flat_map(|(range, _)| split_by_steps(range, steps)).collect();
        Ok(())
    }
}
