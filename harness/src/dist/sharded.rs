//! Optimizer state shared out over ranks: each rank updates a part of the parameters, then all get all.
//!
//! | mode | gradients | a rank's part | after the step |
//! |---|---|---|---|
//! | broadcast | all of them, averaged, on every rank | whole parameters, about 1/world of all elements | every rank broadcasts its part |
//! | ZeRO-1 | each rank's shares only ([`Exchange::ReduceScatter`](super::ddp::Exchange)) | 1/world of every bucket | an all-gather for each bucket |
//!
//! Broadcast sends n bytes more than data-parallel training without sharding; ZeRO-1 sends the same bytes, since an all-reduce is a
//! reduce-scatter and an all-gather (Rajbhandari et al., "ZeRO", 2020, section 7.1).
//!
//! Elements are updated one by one, so that who does it does not change the result: in broadcast mode parameters are bit for bit those
//! of an optimizer that is not shared out.

use std::ops::Range;
use std::sync::Arc;

use tilewright::{Buffer, Device, View, ViewMut};

use super::buckets::Bucket;
use super::comm::handle::wait_all;
use super::comm::{Call, Communicator, Dtype, Handle, Op, Reduce};
use super::error::{Error, Result};
use crate::optim::{AdamW, AdamWOptions, Copy, Group, sum_of_squares};

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
        copy: Copy<'_>,
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
        copy: Copy<'_>,
        groups: &[Group],
        rate: f64,
        gradient_scale: f64,
    ) -> tilewright::Result<()> {
        AdamW::step(self, values, gradients, copy, groups, rate, gradient_scale)
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Whole parameters by size; every rank broadcasts its own
    Broadcast,
    /// A share of every bucket; gradients are reduce-scattered, parameters all-gathered
    Zero1,
}

/// What travels together after a step.
#[derive(Clone, Debug, PartialEq)]
enum Part {
    /// Elements that one rank updates.
    Owned { by: usize, range: Range<usize> },
    /// Elements of which each rank updates as many.
    Shared { each: usize, range: Range<usize> },
    /// Elements that every rank updates.
    Common { range: Range<usize> },
}

/// An optimizer of which every rank has a part.
pub struct ShardedOptimizer<O: FlatOptimizer> {
    comm: Arc<Communicator>,
    device: Device,
    options: O::Options,
    parts: Vec<Part>,
    /// Elements that each rank owns.
    load: Vec<usize>,
    /// This rank's own, one for each part that it has something of.
    own: Vec<O>,
    mode: Mode,
    flat_len: usize,
}

impl<O: FlatOptimizer> ShardedOptimizer<O> {
    /// Shares whole parameters out by size: `params` are their ranges in a flat tensor of `flat_len` elements. Each rank's part is one
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

    /// Shares every bucket out: those of the [`Ddp`](super::ddp::Ddp) that reduce-scatters the gradients.
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
        let mut optimizer = ShardedOptimizer::empty(device, comm, options, Mode::Zero1, flat_len);
        let world = optimizer.comm.world();
        for bucket in buckets {
            let shares = bucket.shares(world);
            if shares.each > 0 {
                optimizer.add_part(Part::Shared { each: shares.each, range: shares.main })?;
            }
            if !shares.rest.is_empty() {
                optimizer.add_part(Part::Common { range: shares.rest })?;
            }
        }
        Ok(optimizer)
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
            mode,
            flat_len,
        }
    }

    /// Takes in more parameters, before or during training: their state starts at zero, and each goes to the rank that has least. For
    /// parameters that are shared out whole.
    ///
    /// # Errors
    /// ZeRO-1, whose shares are those of buckets that have everything from the start; parameters that are here already; no memory.
    pub fn add_param_group(&mut self, params: &[Range<usize>]) -> Result<()> {
        if self.mode == Mode::Zero1 {
            let help = "its buckets have every trained parameter; those in no group of a step stay as they are";
            return Err(Error::Misuse(format!("a ZeRO-1 optimizer takes no more parameters\n  help: {help}")));
        }
        let taken = |range: &&Range<usize>| {
            let overlap = |part: &Part| part.range().start < range.end && range.start < part.range().end;
            range.end > self.flat_len || self.parts.iter().any(overlap)
        };
        if let Some(range) = params.iter().find(taken) {
            return Err(Error::Misuse(format!(
                "parameters {range:?} are in this optimizer already, or in no flat tensor"
            )));
        }
        for (by, range) in share_out(params, &mut self.load) {
            self.add_part(Part::Owned { by, range })?;
        }
        Ok(())
    }

    fn add_part(&mut self, part: Part) -> Result<()> {
        if let Some(range) = part.of(self.comm.rank()) {
            self.own.push(O::new(&self.device, range, &self.options)?);
        }
        self.parts.push(part);
        Ok(())
    }

    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Steps made.
    pub fn steps(&self) -> u64 {
        self.own.iter().map(O::steps).max().unwrap_or(0)
    }

    /// Bytes of state on this rank.
    pub fn bytes(&self) -> usize {
        self.own.iter().map(O::bytes).sum()
    }

    /// Elements that this rank updates.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        self.own.iter().map(O::range).collect()
    }

    /// The norm of the whole gradient, of which this rank has at least its part averaged. All ranks get the same bits.
    ///
    /// # Errors
    /// Those of the device and of communication.
    pub fn gradient_norm(&self, gradients: View<'_, f32>) -> Result<f64> {
        let rank = self.comm.rank();
        let mut sum = 0.0;
        for part in &self.parts {
            // What all have is counted once.
            let counts = !matches!(part, Part::Common { .. }) || rank == 0;
            if let Some(range) = part.of(rank).filter(|_| counts) {
                sum += sum_of_squares(&self.device, gradients.slice(range)?)?;
            }
        }
        let mut sum = [sum];
        self.comm.all_reduce(&mut sum, Reduce::Sum)?;
        Ok(sum[0].sqrt())
    }

    /// One step: updates this rank's part, and gives everybody everything. `values` and `gradients` are the whole flat tensors, the other
    /// arguments as [`AdamW::step`]'s. A copy in a shorter type is written for this rank's part only: refresh it afterwards.
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
        for own in &mut self.own {
            own.step(values.reborrow(), gradients, Copy::None, groups, rate, gradient_scale)?;
        }
        self.synchronize(&mut values)
    }

    /// Gives every rank what the others own of a flat tensor.
    fn synchronize(&self, flat: &mut ViewMut<'_, f32>) -> Result<()> {
        let base = flat.address();
        let mut handles: Vec<Handle> = Vec::new();
        let mut outcome = Ok(());
        for part in &self.parts {
            let op = match part {
                Part::Owned { by, .. } => Op::Broadcast { root: *by },
                Part::Shared { .. } => Op::AllGather,
                Part::Common { .. } => continue,
            };
            let range = part.range();
            let call = Call { op, dtype: Dtype::F32, count: range.len(), wire: None };
            let address = base + (range.start * size_of::<f32>()) as u64;
            // SAFETY: `flat` is borrowed exclusively until all handles have been waited for, below.
            match unsafe { self.comm.start(call, address as *mut u8) } {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        let waited = wait_all(&handles);
        Ok(outcome.and(waited)?)
    }

    /// All ranks' state together, in the order of [`FlatOptimizer::STATE`]: for each name an element for every element of the flat tensors
    /// (zeros where there is no state). The same on every rank; does not depend on how many there are.
    ///
    /// # Errors
    /// Those of the device and of communication.
    pub fn gather_state(&self) -> Result<Vec<Vec<f32>>> {
        let mut all = Vec::new();
        for index in 0..O::STATE.len() {
            let mut flat = Buffer::<f32>::zeros(&self.device, self.flat_len)?;
            for own in &self.own {
                flat.slice_mut(own.range())?.copy_from(own.state()[index])?;
            }
            self.synchronize(&mut flat.view_mut())?;
            all.push(flat.to_vec()?);
        }
        Ok(all)
    }

    /// Sets this rank's part from the state of a whole optimizer, whatever its world was.
    ///
    /// # Errors
    /// State of another model.
    pub fn load_state(&mut self, steps: u64, state: &[Vec<f32>]) -> Result<()> {
        if state.len() != O::STATE.len() || state.iter().any(|flat| flat.len() != self.flat_len) {
            let found: Vec<usize> = state.iter().map(Vec::len).collect();
            return Err(Error::Misuse(format!(
                "the state is of another optimizer or model: expected {} times {} elements, found {found:?}",
                O::STATE.len(),
                self.flat_len
            )));
        }
        for own in &mut self.own {
            let range = own.range();
            own.restore(steps, |name, mut memory| {
                let index = O::STATE.iter().position(|known| *known == name).unwrap_or(0);
                memory.copy_from_slice(&state[index][range.clone()])
            })?;
        }
        Ok(())
    }
}

impl Part {
    fn range(&self) -> Range<usize> {
        match self {
            Part::Owned { range, .. } | Part::Shared { range, .. } | Part::Common { range } => range.clone(),
        }
    }

    /// What `rank` updates of it.
    fn of(&self, rank: usize) -> Option<Range<usize>> {
        match self {
            Part::Owned { by, range } => (*by == rank).then(|| range.clone()),
            Part::Shared { each, range } => {
                let start = range.start + rank * each;
                Some(start..start + each)
            }
            Part::Common { range } => Some(range.clone()),
        }
    }
}

/// Gives parameters to ranks that own `load` elements so far: in order, so that each comes up to its fair part of everything. What a
/// rank gets of neighbours is one range, gaps included.
fn share_out(params: &[Range<usize>], load: &mut [usize]) -> Vec<(usize, Range<usize>)> {
    let new: usize = params.iter().map(Range::len).sum();
    let fair = (load.iter().sum::<usize>() + new) as f64 / load.len() as f64;
    // Ranks above their fair part get nothing, so the others have a little more room than there is to share.
    let room: Vec<f64> = load.iter().map(|&load| (fair - load as f64).max(0.0)).collect();
    let shrink = new as f64 / room.iter().sum::<f64>();
    let (mut rank, mut end) = (0, room[0] * shrink);
    let mut position = 0;
    let mut shared: Vec<(usize, Range<usize>)> = Vec::new();
    for range in params {
        let middle = position as f64 + range.len() as f64 / 2.0;
        while rank + 1 < load.len() && middle >= end {
            rank += 1;
            end += room[rank] * shrink;
        }
        position += range.len();
        load[rank] += range.len();
        match shared.last_mut() {
            Some((last, before))
                if *last == rank && range.start.saturating_sub(before.end) < crate::params::ALIGNMENT =>
            {
                before.end = range.end;
            }
            _ => shared.push((rank, range.clone())),
        }
    }
    shared
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_shared_out_by_size() {
        let params: Vec<Range<usize>> = (0..10).map(|i| i * 64..(i + 1) * 64 - 4).collect();
        let mut load = vec![0; 4];
        let shared = share_out(&params, &mut load);
        assert_eq!(shared, [(0, 0..124), (1, 128..316), (2, 320..444), (3, 448..636)]);
        assert_eq!(load, [120, 180, 120, 180]);
        // More parameters go where least is.
        let more = share_out(&[1000..1060, 2000..2060], &mut load);
        assert_eq!((more, load), (vec![(0, 1000..1060), (2, 2000..2060)], vec![180; 4]));
    }

    #[test]
    fn every_rank_is_within_one_parameter_of_its_fair_part() {
        let sizes = [5000, 10, 700, 700, 10, 900, 2000, 10, 3000, 64, 1];
        let mut end = 0_usize;
        let mut params = Vec::new();
        for size in sizes {
            params.push(end..end + size);
            end = (end + size).next_multiple_of(64);
        }
        for world in 1..=5 {
            let mut load = vec![0; world];
            let shared = share_out(&params, &mut load);
            let fair = sizes.iter().sum::<usize>() as f64 / world as f64;
            assert!(load.iter().all(|&load| (load as f64 - fair).abs() <= 5000.0), "{load:?}");
            let covered =
                |range: &Range<usize>| shared.iter().any(|(_, s)| s.start <= range.start && range.end <= s.end);
            assert!(params.iter().all(covered));
            assert!(shared.windows(2).all(|pair| pair[0].1.end <= pair[1].1.start && pair[0].0 < pair[1].0));
        }
    }
}
