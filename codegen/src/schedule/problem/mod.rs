//! The scheduling problem of a loop, as data: its ops with the time that they take of each pipe, their dependences, and
//! the limits of shared memory and registers.
//!
//! [`Problem::of`] takes a scheduled function (after [`choose`](super::choose())): loads keep the partition, the ring and
//! the copy instructions that the schedule gives them. What is open is the stage and the order of all other ops.
//! [`Problem::bounds`] says what no schedule can beat; a solver (the feature `solver` of `tilewright-runtime`) finds the
//! best schedule; [`apply`] writes it into the function as placements.
//!
//! Costs and delays are those of [`analysis::costs`](crate::analysis::costs), rounded up to cycles: predicted timelines
//! use the same. The model is that of [`explain::timeline`](crate::explain::timeline), in the steady state: groups of warps
//! of all blocks of an SM share its pipes, each runs the same schedule, and an op has its pipe for itself.
//!
//! In reading order: this file (the data and its text), [`build`] (from IR), [`bounds`], [`apply`](mod@apply) (to IR),
//! [`text`] (schedules as words of configurations).

mod apply;
mod bounds;
mod build;
#[cfg(test)]
mod tests;
mod text;

use crate::analysis::costs::SHARED_LATENCY;
use crate::analysis::pipes::Pipe;
use crate::ir::{Loc, OpId};
use std::fmt;

pub use apply::{Slot, Solution, apply, register_pressure};
pub use bounds::{Bounds, Event, Order, Point};
pub use text::{LoopSchedule, LoopSchedules, loops};

/// The problem of one loop.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// The `for`.
    pub op: OpId,
    pub loc: Loc,
    /// Groups of warps per block that run the loop, other than the producer, and the warps of each.
    pub groups: u32,
    pub warps: u32,
    /// Blocks that share the SM.
    pub blocks: u32,
    /// A producer warp performs the loads; otherwise all warps do, one iteration after another.
    pub producer: bool,
    pub nodes: Vec<Node>,
    pub edges: Vec<Edge>,
    /// Stages from the loads to the main stage, where all warps load.
    pub stages_ahead: u32,
    /// Buffers per ring, of the schedule and at most.
    pub depth: u32,
    pub depth_limit: u32,
    /// Bytes of one buffer of every ring.
    pub ring_bytes: u32,
    /// Registers per thread that tiles may take; `None` for no limit.
    pub registers: Option<u32>,
    /// Of these, what tiles take in every schedule: carried values and values from outside of the loop.
    pub register_floor: u32,
    pub tiles: Vec<Tile>,
}

/// What an op does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A load that fills a ring by asynchronous copies.
    Copy,
    /// Reads the tile of a ring into registers; the op is its load.
    Read,
    /// A `wgmma`: issued, executed later, and waited for.
    Mma,
    /// Executed when it is issued.
    Compute,
}

/// An op that takes time. Changes of shape, constants and scalars take none, and are not nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: OpId,
    pub mnemonic: &'static str,
    pub loc: Loc,
    pub task: Task,
    pub pipe: Pipe,
    /// Cycles for which the op of one group of warps has the pipe for itself.
    pub busy: u32,
    /// Cycles from then to the result.
    pub latency: u32,
    /// Can run behind the main stage, one iteration later.
    pub can_be_behind: bool,
    /// A `wgmma` whose wait can be deferred to the next iteration.
    pub can_defer: bool,
    /// What the schedule says that the function has: stage, wait, and position among the ops that run together.
    pub behind: bool,
    pub deferred: bool,
    pub position: usize,
}

/// Why one op comes after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// It uses the result.
    Value,
    /// A `wgmma` continues the accumulator of another, in order.
    Accumulate,
    /// It overwrites registers or a buffer that the other reads.
    Overwrite,
    /// It fills the buffer of a ring that the other reads.
    Ring,
    /// Both have effects on memory.
    Effect,
}

/// `to` of iteration `i + distance` comes after `from` of iteration `i`: it begins at least `delay` cycles after the
/// other begins or, for a `wgmma` that it waits for, after that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    pub from: usize,
    pub to: usize,
    pub cause: Cause,
    pub delay: u32,
    /// In iterations. Of a [`Cause::Ring`], the depth of the ring.
    pub distance: u32,
    /// Waits for all groups of the block, not only for its own.
    pub all_groups: bool,
}

/// A tile that the loop would carry to the next iteration if a user ran behind and its definition did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    pub from: usize,
    pub users: Vec<usize>,
    /// Per thread.
    pub registers: u32,
}

impl Problem {
    /// An op and its line, for messages.
    pub fn describe(&self, node: usize) -> String {
        let Node { mnemonic, loc, task, .. } = &self.nodes[node];
        let what = match task {
            Task::Read => format!("the read of the `{mnemonic}`"),
            Task::Copy | Task::Mma | Task::Compute => format!("the `{mnemonic}`"),
        };
        if loc.is_unknown() { what } else { format!("{what} at {loc}") }
    }

    /// Cycles of a barrier of all warps.
    pub fn barrier(&self) -> u32 {
        SHARED_LATENCY.ceil() as u32
    }

    /// How many times an SM runs a node per iteration: once per group of warps, and a copy of a producer per block.
    pub fn copies(&self, node: usize) -> u32 {
        match self.nodes[node].task {
            Task::Copy => self.blocks,
            Task::Read | Task::Mma | Task::Compute => self.blocks * self.groups,
        }
    }
}

/// The problem as text.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.loc.is_unknown() { String::new() } else { format!(" at {}", self.loc) };
        let loads = if self.producer { "a producer warp loads" } else { "all warps load" };
        let Problem { groups, warps, blocks, depth, depth_limit, ring_bytes, register_floor, .. } = self;
        writeln!(f, "loop{place}: {groups} groups of {warps} warps per block, {blocks} blocks per SM; {loads}")?;
        writeln!(f, "rings: {depth} of at most {depth_limit} buffers, {ring_bytes} bytes per iteration")?;
        match self.registers {
            Some(limit) => writeln!(f, "registers per thread: {register_floor} of {limit} in every schedule")?,
            None => writeln!(f, "registers per thread: no limit")?,
        }
        writeln!(f, "ops: pipe, cycles busy + latency")?;
        for (number, node) in self.nodes.iter().enumerate() {
            let Node { busy, latency, .. } = node;
            let marks = [(node.can_be_behind, "can run behind"), (node.can_defer, "its wait can be deferred")];
            let marks: String = marks.iter().filter(|(is, _)| *is).map(|(_, mark)| format!(", {mark}")).collect();
            let pipe = node.pipe.name();
            writeln!(f, "  {number}: {pipe} {busy} + {latency}: {}{marks}", self.describe(number))?;
        }
        writeln!(f, "dependences: cycles, iterations")?;
        for Edge { from, to, cause, delay, distance, all_groups } in &self.edges {
            let cause = match cause {
                Cause::Value => "",
                Cause::Accumulate => ", accumulates",
                Cause::Overwrite => ", overwrites",
                Cause::Ring => ", fills the buffer",
                Cause::Effect => ", memory",
            };
            let all = if *all_groups { ", all groups" } else { "" };
            writeln!(f, "  {to} after {from}: {delay}, {distance}{cause}{all}")?;
        }
        for Tile { from, users, registers } in &self.tiles {
            let users: Vec<String> = users.iter().map(usize::to_string).collect();
            writeln!(f, "tile of {from} for {}: {registers} registers", users.join(", "))?;
        }
        write!(f, "{}", self.bounds())
    }
}
