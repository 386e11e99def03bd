//! Schedules of the loops of a kernel as a word, for configurations, tables and command lines.
//!
//! `0@1056/1056x2:-.0w297.-.313.+87.209d`: loop 0 (in the order of the text, counting `for` loops) has an interval of 1056
//! cycles, none shorter than 1056 exists, and rings have two buffers. Then the nodes of its [`Problem`] in order: `-` for
//! a load with a ring, else the cycles from the beginning of the loop's body, after `+` for an op behind the main stage. A
//! `wgmma` has its wait after `w`, or `d` if the wait is left to the next iteration. `;` separates loops.

use super::{Cause, Order, Point, Problem, Slot, Solution, Task, apply};
use crate::ir::{Func, Op, OpId, Stage};
use crate::target::{CompileOptions, GpuArch};
use crate::verify::verify;
use std::fmt;
use std::str::FromStr;

/// The schedule of one loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopSchedule {
    /// The number of the `for` in the text of the function, from 0.
    pub number: usize,
    pub solution: Solution,
    /// No schedule has a shorter interval, in cycles.
    pub bound: u32,
}

/// The schedules of some loops of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoopSchedules(pub Vec<LoopSchedule>);

impl fmt::Display for LoopSchedules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, LoopSchedule { number, solution, bound }) in self.0.iter().enumerate() {
            let Solution { interval, depth, slots } = solution;
            write!(f, "{}{number}@{interval}/{bound}x{depth}:", if i == 0 { "" } else { ";" })?;
            let slots: Vec<String> = slots.iter().map(|slot| slot.as_ref().map_or("-".into(), word)).collect();
            f.write_str(&slots.join("."))?;
        }
        Ok(())
    }
}

fn word(slot: &Slot) -> String {
    let behind = if slot.behind { "+" } else { "" };
    let wait = match (slot.deferred, slot.wait) {
        (true, _) => "d".into(),
        (false, Some(wait)) => format!("w{wait}"),
        (false, None) => String::new(),
    };
    format!("{behind}{}{wait}", slot.at)
}

impl FromStr for LoopSchedules {
    type Err = String;

    /// # Errors
    /// The part that is not of the form that the page of this module describes.
    fn from_str(text: &str) -> Result<LoopSchedules, String> {
        // As `tilewright solve` prints it.
        let text = text.strip_prefix("loops=").unwrap_or(text);
        text.split(';').map(parse_loop).collect::<Result<_, _>>().map(LoopSchedules)
    }
}

fn parse_loop(text: &str) -> Result<LoopSchedule, String> {
    let wrong = || format!("`{text}` is not the schedule of a loop: expected LOOP@INTERVAL/BOUNDxDEPTH:TIMES");
    let number = |text: &str| text.parse::<u32>().ok().filter(|&n| n <= i32::MAX as u32);
    let (head, slots) = text.split_once(':').ok_or_else(wrong)?;
    let (index, head) = head.split_once('@').ok_or_else(wrong)?;
    let (interval, head) = head.split_once('/').ok_or_else(wrong)?;
    let (bound, depth) = head.split_once('x').ok_or_else(wrong)?;
    let [index, interval, bound, depth] = [index, interval, bound, depth].map(number);
    let (Some(index), Some(interval), Some(bound), Some(depth)) = (index, interval, bound, depth) else {
        return Err(wrong());
    };
    let slots = slots.split('.').map(|slot| {
        if slot == "-" {
            return Ok(None);
        }
        let wrong = || format!("`{slot}` is not the time of an op: expected `-`, CYCLES, CYCLESwCYCLES or CYCLESd, after `+` for an op behind");
        let (behind, rest) = slot.strip_prefix('+').map_or((false, slot), |rest| (true, rest));
        let (at, wait, deferred) = match (rest.split_once('w'), rest.strip_suffix('d')) {
            (Some((at, wait)), _) => (at, Some(number(wait).ok_or_else(wrong)?), false),
            (None, Some(at)) => (at, None, true),
            (None, None) => (rest, None, false),
        };
        Ok(Some(Slot { behind, deferred, at: number(at).ok_or_else(wrong)?, wait }))
    });
    let slots = slots.collect::<Result<_, String>>()?;
    Ok(LoopSchedule { number: index as usize, solution: Solution { interval, slots, depth }, bound })
}

/// The `for` loops of a function in the order of the text: a schedule names its loop by the number.
pub fn loops(func: &Func) -> Vec<OpId> {
    func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect()
}

impl LoopSchedules {
    /// Writes the schedules into a scheduled function.
    ///
    /// # Errors
    /// A schedule that is for another loop, breaks a dependence or exceeds shared memory; the function is unchanged.
    pub fn apply(&self, func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Result<(), String> {
        let all = loops(func);
        let mut scheduled = func.clone();
        for LoopSchedule { number, solution, .. } in &self.0 {
            let id =
                *all.get(*number).ok_or_else(|| format!("there is no loop {number}: the kernel has {}", all.len()))?;
            let problem = Problem::of(&scheduled, id, arch, options)?;
            problem.check(solution).map_err(|why| format!("the schedule of loop {number}: {why}"))?;
            apply(&mut scheduled, &problem, solution);
        }
        match verify(&scheduled, Stage::Schedule) {
            Ok(()) => *func = scheduled,
            Err(errors) => return Err(errors.first().map(ToString::to_string).unwrap_or_default()),
        }
        Ok(())
    }
}

impl Problem {
    /// Checks that a schedule is one of this problem: it has a time for every node, keeps dependences within a group of
    /// warps, and fits into shared memory.
    ///
    /// # Errors
    /// The op whose time is missing, or two ops and the dependence between them that the schedule breaks.
    pub fn check(&self, solution: &Solution) -> Result<(), String> {
        let Solution { interval, slots, depth } = solution;
        if slots.len() != self.nodes.len() {
            return Err(format!("it has times for {} ops, and the loop has {}", slots.len(), self.nodes.len()));
        }
        if *interval == 0 || *depth > self.depth_limit || *depth < self.depth.min(1) {
            let (limit, bytes) = (self.depth_limit, self.ring_bytes);
            return Err(format!(
                "it has rings of {depth} buffers and an interval of {interval} cycles: expected 1 to {limit} buffers of {bytes} \
                 bytes, and at least a cycle"
            ));
        }
        for (number, (node, slot)) in self.nodes.iter().zip(slots).enumerate() {
            let wrong = |what: &str| Err(format!("{}: {what}", self.describe(number)));
            match (node.task, slot) {
                (Task::Copy, None) => {}
                (Task::Copy, Some(_)) => return wrong("it is a load with a ring, and has no time"),
                (_, None) => return wrong("it has no time"),
                (Task::Mma, Some(slot)) if slot.deferred == slot.wait.is_some() => return wrong("it needs one wait"),
                (Task::Read | Task::Compute, Some(slot)) if slot.deferred || slot.wait.is_some() => {
                    return wrong("only a `wgmma` has a wait");
                }
                (_, Some(slot)) if slot.behind && !node.can_be_behind => {
                    return wrong("it cannot run behind the main stage");
                }
                (_, Some(slot)) if slot.deferred && !node.can_defer => return wrong("its wait cannot be deferred"),
                (_, Some(slot)) if slot.at.max(slot.wait.unwrap_or(0)) > *interval => {
                    return wrong("its time is after the end of the interval");
                }
                (_, Some(_)) => {}
            }
        }
        self.check_stages(slots)?;
        match self.orders(*depth).iter().find(|order| self.is_broken(order, solution)) {
            None => Ok(()),
            Some(order) => Err(format!(
                "{} runs too early: it depends on {}{}",
                self.describe(order.to.node),
                self.describe(order.from.node),
                if order.distance > 0 { " of an iteration before" } else { "" }
            )),
        }
    }

    /// Whether a schedule breaks a dependence between two moments whose times it says.
    fn is_broken(&self, order: &Order, solution: &Solution) -> bool {
        let interval = i64::from(solution.interval);
        let time = |node: usize, point: Point| {
            let slot = solution.slots[node]?;
            let at = match point {
                Point::Issue => slot.at,
                Point::Begin if self.nodes[node].task == Task::Mma => return None,
                Point::Begin => slot.at,
                Point::Wait => slot.wait?,
            };
            Some(i64::from(at) + i64::from(slot.behind) * interval)
        };
        match (time(order.from.node, order.from.point), time(order.to.node, order.to.point)) {
            (Some(from), Some(to)) => to + i64::from(order.distance) * interval < from + i64::from(order.delay),
            _ => false,
        }
    }

    /// What uses the result of an op behind is behind.
    fn check_stages(&self, slots: &[Option<Slot>]) -> Result<(), String> {
        let is_behind = |node: usize| slots[node].is_some_and(|slot| slot.behind);
        let has_behind = slots.iter().flatten().any(|slot| slot.behind);
        if has_behind && let Some(node) = (0..slots.len()).find(|&i| slots[i].is_some_and(|slot| slot.deferred)) {
            return Err(format!("{}: its wait can be deferred only where no op runs behind", self.describe(node)));
        }
        let breaks = |edge: &&super::Edge| {
            matches!(edge.cause, Cause::Value | Cause::Accumulate)
                && slots[edge.to].is_some()
                && is_behind(edge.from)
                && !is_behind(edge.to)
        };
        match self.edges.iter().find(breaks) {
            None => Ok(()),
            Some(edge) => {
                let [from, to] = [edge.from, edge.to].map(|node| self.describe(node));
                Err(format!("{to} is in the main stage, and depends on {from}, which runs behind it"))
            }
        }
    }
}
