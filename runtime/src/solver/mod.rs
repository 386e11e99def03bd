//! The best schedule of a loop, by a constraint solver: software pipelining and the order of ops as one problem.
//!
//! [`solve`] takes the [`Problem`] of a loop and finds a schedule with the least initiation interval, and proves that none
//! is shorter, or says which bound it proved within the time. What is in the model is what
//! `tilewright_codegen::schedule::problem` says, with these constraints:
//! - Every dependence, through carried values too.
//! - A pipe runs one op at a time, of all groups of warps of the SM. Groups run the same schedule, one later than the other.
//! - The warps of a group run in order: no other op is running when a `wgmma` is issued or waited for; `wgmma` execute in
//!   the order of their issue.
//! - An op is in the main stage or one behind it; what uses the result of an op behind is behind too. Loads run ahead by the
//!   depth of their ring, which shared memory limits.
//! - Tiles do not take more registers than there are, by the estimate of the compiler's own scheduler.
//!
//! If a schedule of an interval exists, one of each longer interval does (an idle cycle fits between iterations), so that
//! a bisection finds the least one. The model is that of Soi and others ("Twill", arXiv 2512.18134), for ops of whole tiles.

mod model;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use model::{Answer, Demand};
use tilewright_codegen::schedule::problem::{Bounds, Problem, Solution};

/// Limits of a search.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { time: Duration::from_secs(60) }
    }
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best schedule.
    pub solution: Solution,
    /// No schedule has a shorter interval than this, in cycles. Equal to the solution's interval if that is optimal.
    pub bound: u32,
    /// What pipes and dependences alone say.
    pub bounds: Bounds,
    /// The interval of the schedule that the function had, in the same model; `None` if the time ran out.
    pub before: Option<u32>,
    pub time: Duration,
}

impl Found {
    /// Whether no schedule has a shorter interval.
    pub fn is_optimal(&self) -> bool {
        self.bound == self.solution.interval
    }
}

/// Finds the schedule of a loop with the least interval. `pressure` is the number of registers per thread that tiles take
/// if these nodes run behind the main stage.
///
/// # Errors
/// The constraint that no schedule can satisfy, or that none was found in the time.
pub fn solve(problem: &Problem, pressure: &dyn Fn(&[bool]) -> u32, limits: Limits) -> Result<Found, String> {
    check(problem)?;
    let start = Instant::now();
    let bounds = problem.bounds();
    let mut search = Search { problem, pressure, end: start + limits.time, depth: problem.depth, refused: Vec::new() };
    let before = search.least(bounds.interval(), true).filter(Best::is_optimal).map(|kept| kept.solution);
    let mut best = search.least(bounds.interval(), false);
    if problem.depth_limit > problem.depth
        && best.as_ref().is_none_or(|best| best.solution.interval > bounds.interval())
    {
        let deep = Search { depth: problem.depth_limit, refused: Vec::new(), ..search }.least(bounds.interval(), false);
        best = match (best, deep) {
            // What holds for deep rings holds for others.
            (Some(best), Some(deep)) if best.solution.interval <= deep.solution.interval => {
                Some(Best { bound: deep.bound, ..best })
            }
            (best, deep) => deep.or(best.map(|best| Best { bound: bounds.interval(), ..best })),
        };
    }
    let best = best.ok_or_else(|| {
        let seconds = limits.time.as_secs_f64();
        format!("no schedule was found in {seconds} s; none is shorter than {} cycles", bounds.interval())
    })?;
    let interval = before.as_ref().map(|kept| kept.interval);
    let solution = match before {
        Some(kept) if kept.interval == best.solution.interval => kept,
        _ => search.simplest(best.solution),
    };
    Ok(Found { solution, bound: best.bound, bounds, before: interval, time: start.elapsed() })
}

/// # Errors
/// The constraint that no schedule can satisfy.
fn check(problem: &Problem) -> Result<(), String> {
    if problem.nodes.is_empty() {
        return Err(format!("the loop at {} has no op that takes time: there is nothing to schedule", problem.loc));
    }
    if let Some(limit) = problem.registers.filter(|&limit| problem.register_floor > limit) {
        return Err(format!(
            "registers: the tiles that the loop at {} carries take {} registers per thread in every schedule, and {limit} \
             are available; use smaller tiles, more warps or a larger max_registers",
            problem.loc, problem.register_floor
        ));
    }
    if problem.depth_limit < problem.depth {
        return Err(format!(
            "shared memory: rings of {} buffers with {} bytes per iteration are asked for by the loop at {}, and {} fit",
            problem.depth, problem.ring_bytes, problem.loc, problem.depth_limit
        ));
    }
    Ok(())
}

struct Best {
    solution: Solution,
    bound: u32,
}

impl Best {
    fn is_optimal(&self) -> bool {
        self.bound == self.solution.interval
    }
}

struct Search<'a> {
    problem: &'a Problem,
    pressure: &'a dyn Fn(&[bool]) -> u32,
    end: Instant,
    /// Buffers per ring.
    depth: u32,
    /// Sets of nodes behind the main stage that take too many registers.
    refused: Vec<Vec<bool>>,
}

impl Search<'_> {
    /// A schedule of the same interval in which as few ops run behind the main stage as can be found in the time.
    fn simplest(&mut self, mut solution: Solution) -> Solution {
        self.depth = solution.depth;
        loop {
            let behind = solution.slots.iter().flatten().filter(|slot| slot.behind).count();
            let Some(fewer) = behind.checked_sub(1) else { return solution };
            match self.at(solution.interval, false, fewer) {
                Answer::Found(simpler) => solution = simpler,
                Answer::Impossible | Answer::Unknown => return solution,
            }
        }
    }

    /// The least interval from `bound` on; `None` if the time runs out before one is found.
    fn least(&mut self, mut bound: u32, keep: bool) -> Option<Best> {
        // One after another, the ops of all groups take no longer than this.
        let nodes = self.problem.nodes.iter().enumerate();
        let serial: u32 = nodes.map(|(number, node)| (node.busy + node.latency) * self.problem.copies(number)).sum();
        let all = self.problem.nodes.len();
        let edges: u32 = self.problem.edges.iter().map(|edge| edge.delay).sum();
        let mut solution = match self.at(bound, keep, all) {
            Answer::Found(solution) => return Some(Best { solution, bound }),
            Answer::Impossible => {
                bound += 1;
                // Doubles the distance to the bound until a schedule exists.
                let mut step = bound / 64 + 1;
                loop {
                    let interval = bound.saturating_add(step).min((serial + edges).max(bound));
                    match self.at(interval, keep, all) {
                        Answer::Found(solution) => break solution,
                        Answer::Impossible => {
                            bound = interval + 1;
                            step *= 2;
                        }
                        Answer::Unknown => return None,
                    }
                }
            }
            Answer::Unknown => return None,
        };
        while bound < solution.interval {
            let middle = bound + (solution.interval - bound) / 2;
            match self.at(middle, keep, all) {
                Answer::Found(better) => solution = better,
                Answer::Impossible => bound = middle + 1,
                Answer::Unknown => break,
            }
        }
        Some(Best { solution, bound })
    }

    /// A schedule of this interval whose tiles fit into registers.
    fn at(&mut self, interval: u32, keep: bool, behind: usize) -> Answer {
        loop {
            let demand = Demand { interval, depth: self.depth, behind, keep, refused: &self.refused };
            let solution = match model::schedule(self.problem, &demand, self.end) {
                Answer::Found(solution) => solution,
                other => return other,
            };
            let behind: Vec<bool> = solution.slots.iter().map(|slot| slot.is_some_and(|slot| slot.behind)).collect();
            let fits = self.problem.registers.is_none_or(|limit| (self.pressure)(&behind) <= limit);
            if keep || fits || !behind.contains(&true) {
                return Answer::Found(solution);
            }
            self.refused.push(behind);
        }
    }
}
