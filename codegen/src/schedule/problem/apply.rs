//! A schedule that was found for a problem, as placements in the function.

use super::{Problem, Task};
use crate::ir::nested::uses;
use crate::ir::{Effects, Func, Op, OpId, Partition, Placement};
use crate::schedule::overlap;
use crate::schedule::stages::{self, order};
use std::collections::{HashMap, HashSet};

/// When a node runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// One iteration later than the main stage.
    pub behind: bool,
    /// The wait of this `wgmma` is left to the next iteration.
    pub deferred: bool,
    /// Cycles from the beginning of the loop's body to the beginning of the op; of a `wgmma`, to its issue.
    pub at: u32,
    /// Of a `wgmma` whose wait is not deferred: cycles from the beginning of the body to the wait.
    pub wait: Option<u32>,
}

/// A schedule of a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    /// Cycles from one iteration to the next.
    pub interval: u32,
    /// One per node; `None` for a load with a ring, which runs ahead.
    pub slots: Vec<Option<Slot>>,
    /// Buffers per ring.
    pub depth: u32,
}

/// The maximum number of registers per thread that tiles take if these nodes run behind, as the compiler's own scheduler
/// estimates it.
pub fn register_pressure(func: &Func, problem: &Problem, behind: &[bool]) -> u32 {
    let region = func.op(problem.op).regions[0];
    let nodes = problem.nodes.iter().zip(behind).filter(|(_, behind)| **behind).map(|(node, _)| node.op);
    let late = with_free_ops(func, problem, nodes.collect());
    overlap::register_pressure(func, region, &late)
}

/// Adds the waits of `wgmma` behind, and the ops without cost that only ops behind use.
fn with_free_ops(func: &Func, problem: &Problem, mut behind: HashSet<OpId>) -> HashSet<OpId> {
    let region = func.op(problem.op).regions[0];
    let end = func.terminator(region);
    let ops = func.block(region).ops.clone();
    for &id in &ops {
        if matches!(func.op(id).op, Op::WgmmaWait { .. })
            && func.op(id).operands.iter().any(|&v| func.def_op(v).is_some_and(|dot| behind.contains(&dot)))
        {
            behind.insert(id);
        }
    }
    for &id in ops.iter().rev() {
        let results = &func.op(id).results;
        let mut users = ops.iter().filter(|&&op| results.iter().any(|v| uses(func, op).contains(v)));
        let is_used = results.iter().any(|&v| !func.uses(v).is_empty());
        let is_free = func.effects(id) == Effects::Pure && !problem.nodes.iter().any(|node| node.op == id);
        if is_free && is_used && users.all(|op| *op != end && behind.contains(op)) {
            behind.insert(id);
        }
    }
    behind
}

/// Writes a schedule into the function: the ops of the loop in their order, with placements.
///
/// The order of the text is that of the main stage, then that of the ops behind. Orders of main ops are even and those of
/// ops behind odd, so that ops that the expander adds come before their users.
pub fn apply(func: &mut Func, problem: &Problem, solution: &Solution) {
    let region = func.op(problem.op).regions[0];
    let end = func.terminator(region);
    let main = stages::main_stage(func, region).unwrap_or(0);
    let ops: Vec<OpId> = func.block(region).ops.iter().copied().filter(|&id| id != end).collect();
    let times = Times::of(func, problem, solution, &ops, main);
    let mut sorted: Vec<(usize, OpId)> = ops.into_iter().enumerate().collect();
    sorted.sort_by_key(|&(at, id)| (times.key(id), at));
    let text: Vec<OpId> = sorted.iter().map(|(_, id)| *id).collect();
    func.set_ops(region, &[&text[..], &[end]].concat());

    // In the order in which the loop runs them.
    let mut running: Vec<OpId> = text.iter().copied().filter(|id| !times.ahead.contains(id)).collect();
    running.sort_by_key(|&id| times.key(id).1);
    let mut number = 0;
    for id in running {
        let behind = times.behind.contains(&id);
        // Even numbers for the main stage, odd ones for ops behind.
        number += u32::from(u32::from(behind) != number % 2);
        // Buffers through which warps exchange tiles keep their slots.
        let depth = func.op(id).place.and_then(|place| place.depth);
        let place = Placement { stage: main + u32::from(behind), order: number, depth, ..Placement::default() };
        func.set_place(id, Some(place));
    }
    for &wait in &times.deferred {
        let place = Placement { stage: main + 1, order: order::LAST, ..Placement::default() };
        func.set_place(wait, Some(place));
    }
    let last = Placement { stage: main, order: (number + 1).next_multiple_of(2), ..Placement::default() };
    func.set_place(end, Some(last));
    for &id in &times.ahead {
        // First, so that what the expander adds after them comes before its users too.
        let place = func.op(id).place.unwrap_or_default();
        let depth = place.depth.map(|_| solution.depth);
        func.set_place(id, Some(Placement { order: order::FIRST, depth, ..place }));
    }
}

/// When the ops of a loop run.
struct Times {
    /// Ops ahead of the main stage, which keep their placement.
    ahead: HashSet<OpId>,
    behind: HashSet<OpId>,
    /// Waits that are left to the next iteration.
    deferred: HashSet<OpId>,
    /// Cycles from the beginning of the loop's body.
    at: HashMap<OpId, u32>,
}

impl Times {
    fn of(func: &Func, problem: &Problem, solution: &Solution, ops: &[OpId], main: u32) -> Times {
        let is_ahead = |&id: &OpId| {
            func.op(id).place.is_some_and(|place| place.stage < main || place.partition == Partition::Producer)
        };
        let ahead: HashSet<OpId> = ops.iter().copied().filter(is_ahead).collect();
        let mut at: HashMap<OpId, u32> = HashMap::new();
        let mut late = HashSet::new();
        let mut deferred = HashSet::new();
        let start_of = |id: OpId, behind: bool| {
            let mut slots = problem.nodes.iter().zip(&solution.slots).filter(|(node, _)| node.op == id);
            slots.find_map(|(_, slot)| slot.filter(|slot| slot.behind == behind).map(|slot| slot.at))
        };
        for (node, slot) in problem.nodes.iter().zip(&solution.slots) {
            // The expander reads the tile of a ring before its first use.
            let Some(slot) = slot.filter(|_| node.task != Task::Read) else { continue };
            at.insert(node.op, slot.at);
            if slot.behind {
                late.insert(node.op);
            }
            for wait in waits(func, node.op) {
                // In the text before a `wgmma` that continues the accumulator, which needs no wait.
                let users = func.op(wait).results.iter().flat_map(|&v| func.uses(v));
                let continued = users.filter_map(|used| start_of(used.op, slot.behind)).min();
                let time = slot.wait.unwrap_or(slot.at);
                at.insert(wait, continued.map_or(time, |start| start.min(time)));
                if slot.deferred {
                    deferred.insert(wait);
                }
            }
        }
        let behind = with_free_ops(func, problem, late);
        // Other ops run right before their first user of the same stage, or at the end.
        for &id in ops.iter().rev().filter(|id| !ahead.contains(id)) {
            if at.contains_key(&id) {
                continue;
            }
            let results = &func.op(id).results;
            let users = ops.iter().filter(|&&op| results.iter().any(|v| uses(func, op).contains(v)));
            let same = users.filter(|op| behind.contains(op) == behind.contains(&id) || ahead.contains(op));
            let first = same.map(|op| at.get(op).copied().unwrap_or(0)).min();
            at.insert(id, first.unwrap_or(solution.interval));
        }
        Times { ahead, behind, deferred, at }
    }

    /// Sorts the text of the body.
    fn key(&self, id: OpId) -> (u32, u32) {
        match self.ahead.contains(&id) {
            true => (0, 0),
            false => (u32::from(self.behind.contains(&id)), self.at[&id]),
        }
    }
}

/// The waits of a `wgmma`.
fn waits(func: &Func, dot: OpId) -> Vec<OpId> {
    let is_mma = matches!(func.op(dot).op, Op::Wgmma { .. });
    let users = func.op(dot).results.iter().filter(|_| is_mma).flat_map(|&v| func.uses(v));
    users.map(|used| used.op).filter(|&id| matches!(func.op(id).op, Op::WgmmaWait { .. })).collect()
}
