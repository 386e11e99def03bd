//! Predicted timelines of loops: when each op of a few iterations would run, by partition and pipe; and measured ones.
//!
//! What runs is the function after the last pass, so the prediction has its order, rings and waits, and nothing of its
//! own. In reading order: this file (the loops, and the data of a picture), [`steps`] (the body of a loop as steps of a
//! group of warps), [`machine`] (list scheduling of the steps of all groups on the pipes of one SM), [`measured`] (from clocks
//! that a GPU recorded).
//!
//! The model, with the costs of [`analysis::costs`](crate::analysis::costs):
//! - An op has its pipe of the SM for itself while it is busy. The groups of warps of all blocks of the SM share the
//!   pipes: each step takes the first gap that is long enough once its dependences are ready.
//! - Elementwise ops stream: one can run beside the one that computes its operand, on another pipe, and ends after it.
//! - A group passes synchronizations (waits, barriers, issue of `wgmma`) and the end of an iteration in order; between
//!   them, only dependences and pipes order its ops.
//! - Wait number `k` at an mbarrier of a ring is for fill `k` of the ring, or for the fill `depth` before it to be
//!   released, with the offset that the loop's carried slots have.
//! - Of a branch in a loop, the first region runs.
//!
//! Not in the model: the issue slots of schedulers, bank conflicts, DRAM, instruction caches, and what `ptxas` reorders.

mod machine;
mod measured;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fmt;

pub use self::measured::{Measured, measured};
use super::{Partition, Scheduled, loops};
use crate::analysis::costs::Executors;
use crate::analysis::pipes::Pipe;
use crate::ir::nested::takes_turns;
use crate::ir::{Func, Op, OpId};
use crate::target::GpuArch;

/// Iterations that a timeline shows, of the steady state.
pub const SHOWN: usize = 3;

/// What a prediction depends on besides the function.
#[derive(Clone, Debug)]
pub struct Settings {
    pub arch: GpuArch,
    /// Warps of a block that is not specialized.
    pub warps: u32,
    /// Blocks that run on an SM at the same time, at least 1.
    pub blocks: u32,
    /// Ops before which the lowering inserts a barrier
    /// ([`SharedMemory::barriers`](crate::lower::nvptx::SharedMemory::barriers)).
    pub barriers: HashSet<OpId>,
    /// Tells which iteration's data an op processes ([`Trace::schedule`](super::Trace::schedule)).
    pub schedule: HashMap<OpId, Scheduled>,
}

/// A group of warps that run the same iterations together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    pub partition: Partition,
    /// The number of the block on its SM, and of the warpgroup in the partition, from 0.
    pub block: usize,
    pub warpgroup: usize,
    pub warps: u32,
    /// Groups of the same program, this one included, each of which has its part of a tile.
    pub sharing: u32,
    /// The loop that the group runs.
    pub op: OpId,
}

impl Settings {
    /// The iteration whose data an op processes, in an iteration of a group.
    fn iteration(&self, group: &Group, op: OpId, iteration: usize) -> usize {
        let ahead = match group.partition {
            Partition::Producer => 0,
            Partition::All | Partition::Consumer => self.schedule.get(&op).map_or(0, |scheduled| scheduled.ahead),
        };
        usize::try_from(iteration as i64 + ahead).unwrap_or(0)
    }
}

impl Group {
    /// The warps that execute an op of the group.
    fn executors(&self) -> Executors {
        Executors { warps: self.warps, groups: self.sharing }
    }
}

/// A span in which a group has a pipe, or waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    /// Index of [`Timeline::groups`].
    pub group: usize,
    pub pipe: Pipe,
    pub op: OpId,
    /// The iteration whose data the op processes: of the loop's iteration, or of an earlier one for ops behind. Of a
    /// copy, the iteration that uses it.
    pub iteration: usize,
    /// Cycles from the beginning of the picture; may begin before it or end after it.
    pub begin: f64,
    pub end: f64,
}

/// The bars with a length that are seen in a picture of `length` cycles which begins at `from`, in their order.
fn in_picture(mut bars: Vec<Bar>, from: f64, length: f64) -> Vec<Bar> {
    bars.iter_mut().for_each(|bar| (bar.begin, bar.end) = (bar.begin - from, bar.end - from));
    bars.retain(|bar| bar.end > 0.0 && bar.begin < length && bar.end > bar.begin);
    bars.sort_by(|a, b| (a.group, a.pipe).cmp(&(b.group, b.pipe)).then(a.begin.total_cmp(&b.begin)));
    bars
}

/// The steady state of a loop.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The loop of the consumers, or of all warps.
    pub op: OpId,
    pub groups: Vec<Group>,
    /// Cycles from one iteration of a group to the next (initiation interval).
    pub interval: f64,
    /// Cycles of an interval in which each pipe of the SM is busy.
    pub busy: Vec<(Pipe, f64)>,
    /// By group, pipe and time; [`Timeline::length`] cycles.
    pub bars: Vec<Bar>,
    /// The first iteration that is shown.
    pub first: usize,
}

/// The share of the interval from which a pipe counts as what bounds a loop.
const SATURATED: f64 = 0.9;

impl Timeline {
    pub fn length(&self) -> f64 {
        self.interval * SHOWN as f64
    }

    /// The pipe that is busy for the largest part of the interval, and that part.
    pub fn busiest(&self) -> (Pipe, f64) {
        let most = self.busy.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        most.map_or((Pipe::Control, 0.0), |(pipe, cycles)| (*pipe, cycles / self.interval))
    }

    /// The pipe that bounds the interval; `None` if no pipe is busy nearly all the time: dependences bound it.
    pub fn bound(&self) -> Option<Pipe> {
        let (pipe, share) = self.busiest();
        (share >= SATURATED).then_some(pipe)
    }

    /// What bounds the interval, in words.
    pub fn bound_in_words(&self) -> String {
        let (pipe, share) = self.busiest();
        let percent = (100.0 * share).round().min(100.0);
        match self.bound() {
            Some(_) => format!("the {} pipe, which is busy {percent} % of the time", pipe.name()),
            None => {
                format!("dependences between ops: no pipe is busy more than {percent} % of the time ({})", pipe.name())
            }
        }
    }
}

/// Timelines of the innermost `for` loops with work on a pipe, in the order of the text. The loop of a producer is a
/// part of the timeline of its consumers' loop.
pub fn timelines(func: &Func, settings: &Settings) -> Vec<Timeline> {
    let of_loop = |(op, partition)| machine::run(func, &groups(func, op, partition, settings), settings);
    loops_with_timelines(func).into_iter().filter_map(of_loop).collect()
}

/// The innermost `for` loops, but those of producers.
fn loops_with_timelines(func: &Func) -> Vec<(OpId, Partition)> {
    innermost(func).into_iter().filter(|(_, partition)| *partition != Partition::Producer).collect()
}

fn innermost(func: &Func) -> Vec<(OpId, Partition)> {
    let found = loops(func).into_iter().filter(|of| {
        let inside = func.walk_from(func.op(of.op).regions[0]);
        matches!(func.op(of.op).op, Op::For { .. }) && !inside.iter().any(|&id| func.op(id).op.is_loop())
    });
    found.map(|of| (of.op, of.partition)).collect()
}

/// The groups of warps that run a loop at the same time, and the loop of the producer that fills its rings, in all blocks
/// of an SM.
fn groups(func: &Func, op: OpId, partition: Partition, settings: &Settings) -> Vec<Group> {
    // Of programs that take turns, one runs the loop.
    let programs = if takes_turns(func) { 1 } else { u32::MAX };
    groups_of_programs(func, op, partition, settings, programs)
}

/// The groups of warps of the first `programs` programs of each block.
fn groups_of_programs(func: &Func, op: OpId, partition: Partition, settings: &Settings, programs: u32) -> Vec<Group> {
    const WARPGROUP: u32 = 4;
    let consumer_warps = func.walk().into_iter().find_map(|id| match func.op(id).op {
        Op::WarpSpecialize { warps, replicas, .. } => Some((warps, replicas.unwrap_or(1).min(programs))),
        _ => None,
    });
    let mut block = Vec::new();
    match (partition, consumer_warps) {
        (Partition::Consumer, Some((warps, replicas))) => {
            let warpgroups = (warps / WARPGROUP).max(1);
            let group = |warpgroup| Group {
                partition,
                block: 0,
                warpgroup,
                warps: warps / warpgroups,
                sharing: warpgroups,
                op,
            };
            block.extend((0..(warpgroups * replicas) as usize).map(group));
            if let Some(producer) = producer_of(func, op, &innermost(func)) {
                let partition = Partition::Producer;
                block.push(Group { partition, block: 0, warpgroup: 0, warps: 1, sharing: 1, op: producer });
            }
        }
        _ => block.push(Group { partition, block: 0, warpgroup: 0, warps: settings.warps, sharing: 1, op }),
    }
    let blocks = 0..settings.blocks.max(1) as usize;
    blocks.flat_map(|number| block.iter().map(move |group| Group { block: number, ..*group })).collect()
}

/// The producer's loop for a loop of the consumers: with several, both partitions have them in the same order.
fn producer_of(func: &Func, op: OpId, innermost: &[(OpId, Partition)]) -> Option<OpId> {
    let synchronizes = |id: OpId| steps::flatten(func, id).iter().any(|&of| func.op(of).op == Op::MbarrierWait);
    let of =
        |partition| innermost.iter().filter(move |(id, p)| *p == partition && synchronizes(*id)).map(|(id, _)| *id);
    let number = of(Partition::Consumer).position(|id| id == op)?;
    of(Partition::Producer).nth(number)
}

impl Timeline {
    /// Whether several blocks are shown.
    fn has_blocks(&self) -> bool {
        self.groups.iter().any(|group| group.block > 0)
    }

    /// A group's name: `consumer 1`, with the block if there are several.
    pub fn group_name(&self, index: usize) -> String {
        let group = &self.groups[index];
        let several =
            self.groups.iter().filter(|g| g.partition == group.partition && g.block == group.block).count() > 1;
        let number = if several { format!(" {}", group.warpgroup) } else { String::new() };
        let block = if self.has_blocks() { format!("block {}, ", group.block) } else { String::new() };
        format!("{block}{}{number}", group.partition.name())
    }
}

/// The prediction as text: cycles are rounded.
impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "interval {:.0} cycles; bound: {}", self.interval, self.bound_in_words())?;
        for (pipe, cycles) in &self.busy {
            writeln!(f, "busy {}: {cycles:.0}", pipe.name())?;
        }
        let mut row = None;
        for bar in &self.bars {
            if row != Some((bar.group, bar.pipe)) {
                row = Some((bar.group, bar.pipe));
                writeln!(f, "{}, {}:", self.group_name(bar.group), bar.pipe.name())?;
            }
            let Bar { iteration, begin, end, .. } = bar;
            writeln!(f, "  {begin:.0} to {end:.0}: op {} of iteration {iteration}", bar.op.0)?;
        }
        Ok(())
    }
}
