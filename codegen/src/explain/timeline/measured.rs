//! Measured timelines of loops, from clocks that a GPU recorded ([`clocks`](crate::target::clocks)).
//!
//! A loop is shown in the middle of its longest run. What is between two events of a warpgroup is one bar of arithmetic,
//! with the op in between that would take longest, also one of a branch that did not run. A `wgmma` has its bar from its
//! issue until the wait that waits for it has ended: it may have completed before.

use std::collections::HashMap;

use super::{Bar, Group, SHOWN, Settings, Timeline, groups_of_programs, in_picture, loops_with_timelines};
use crate::analysis::costs::cost;
use crate::analysis::pipes::{Pipe, pipe};
use crate::explain::Partition;
use crate::ir::{Func, Op, OpId};
use crate::target::clocks::{Event, Moment};

/// A loop of which clocks were recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Its bars; those of arithmetic have [`Pipe::Alu`]. `busy` has the cycles of an iteration that a warpgroup waits, on
    /// average over the warpgroups that ran the loop meanwhile, and are no producers.
    pub timeline: Timeline,
    /// Iterations of the run that is shown.
    pub iterations: usize,
    /// Cycles from one iteration to the next, on average over that run.
    pub mean: f64,
}

/// The loops of [`timelines`](super::timelines) of which more than [`SHOWN`] iterations were recorded in one run. The
/// events name ops of `func`.
pub fn measured(func: &Func, settings: &Settings, clocks: &[Vec<Event>]) -> Vec<Measured> {
    let one_block = Settings { blocks: 1, ..settings.clone() };
    let of_loop = |(op, partition)| {
        of_groups(func, &groups_of_programs(func, op, partition, &one_block, u32::MAX), settings, clocks)
    };
    loops_with_timelines(func).into_iter().filter_map(of_loop).collect()
}

/// The runs of a loop in the events of a warpgroup, each from its first iteration until the loop is left: the indices of
/// the events that begin its iterations.
fn runs(events: &[Event], op: OpId) -> Vec<Vec<usize>> {
    let mut runs: Vec<Vec<usize>> = Vec::new();
    let mut is_open = false;
    for (index, event) in events.iter().enumerate().filter(|(_, event)| event.op == op.0) {
        match (event.moment, runs.last_mut()) {
            (Moment::Begin, Some(run)) if is_open => run.push(index),
            (Moment::Begin, _) => runs.push(vec![index]),
            (Moment::End | Moment::Barrier | Moment::BarrierEnd, _) => {}
        }
        is_open = event.moment == Moment::Begin;
    }
    runs
}

fn of_groups(func: &Func, groups: &[Group], settings: &Settings, clocks: &[Vec<Event>]) -> Option<Measured> {
    let events = |group: usize| clocks.get(group).map_or(&[][..], |events| events);
    let own = runs(events(0), groups[0].op);
    // Of runs that are equally long, the first one.
    let (number, run) = own.iter().enumerate().rev().max_by_key(|(_, run)| run.len())?;
    let begin = |iteration: usize| events(0)[run[iteration]].clock as f64;
    let last = run.len() - 1;
    if last < SHOWN {
        return None;
    }
    let first = (last - SHOWN) / 2;
    let from = begin(first);
    let length = begin(first + SHOWN) - from;
    if length <= 0.0 {
        return None;
    }
    let mut bars = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        if let Some(run) = runs(events(index), group.op).get(number) {
            bars.extend(bars_of(func, index, group, events(index), run, settings));
        }
    }
    let bars = in_picture(bars, from, length);
    let busy = vec![(Pipe::Barrier, waits(&bars, groups, length))];
    let interval = length / SHOWN as f64;
    let timeline = Timeline { op: groups[0].op, groups: groups.to_vec(), interval, busy, bars, first };
    Some(Measured { timeline, iterations: run.len(), mean: (begin(last) - begin(0)) / last as f64 })
}

/// The pipe whose row has an op with events: that of waits, for those that wait for other blocks.
fn row_of(func: &Func, id: OpId) -> Option<Pipe> {
    match func.op(id).op {
        Op::SemaphoreWait | Op::TakeIndex | Op::TakenIndex => Some(Pipe::Barrier),
        _ => pipe(func, id),
    }
}

/// The bars of a warpgroup in a run of its loop.
fn bars_of(func: &Func, index: usize, group: &Group, events: &[Event], run: &[usize], settings: &Settings) -> Vec<Bar> {
    let body = func.walk_from(func.op(group.op).regions[0]);
    let position: HashMap<u32, usize> = body.iter().enumerate().map(|(at, id)| (id.0, at)).collect();
    let cycles = |id: &OpId| match pipe(func, *id) {
        Some(Pipe::Alu | Pipe::Special | Pipe::LoadStore) => cost(func, *id, settings.arch, group.executors()).busy,
        _ => 0.0,
    };
    let heaviest = |from: usize, to: usize| {
        let most = body.get(from..to)?.iter().max_by(|a, b| cycles(a).total_cmp(&cycles(b)))?;
        (cycles(most) > 0.0).then_some(*most)
    };
    let (mut bars, mut in_flight) = (Vec::new(), Vec::new());
    // The event before, and the position of the op that the warps execute next.
    let mut before: Option<(usize, &Event)> = None;
    for (at, event) in events.iter().enumerate().skip(run[0]) {
        let is_iteration = event.op == group.op.0 && event.moment == Moment::Begin;
        let Some(&place) = position.get(&event.op).or(is_iteration.then_some(&body.len())) else { break };
        // What ends at the beginning of an iteration belongs to the one before.
        let iteration = run.partition_point(|&begin| begin < at + usize::from(!is_iteration)).saturating_sub(1);
        let bar = |op: OpId, pipe: Pipe, from: &Event, iteration: usize| {
            let iteration = settings.iteration(group, op, iteration);
            Bar { group: index, pipe, op, iteration, begin: from.clock as f64, end: event.clock as f64 }
        };
        let id = OpId(event.op);
        match (event.moment, before) {
            (_, None) => {}
            (Moment::Begin | Moment::Barrier, Some((next, from))) => match heaviest(next, place) {
                Some(op) => bars.push(bar(op, Pipe::Alu, from, iteration)),
                // A warp reads the clock before the barrier blocks it.
                None if from.moment == Moment::BarrierEnd && from.op == event.op => {
                    bars.last_mut().expect("internal error: the bar of a barrier").end = event.clock as f64;
                }
                None => {}
            },
            (Moment::BarrierEnd, Some((_, from))) => bars.push(bar(id, Pipe::Barrier, from, iteration)),
            (Moment::End, Some((_, from))) => match row_of(func, id) {
                Some(Pipe::Mma) if matches!(func.op(id).op, Op::Wgmma { .. }) => in_flight.push((id, from, iteration)),
                Some(pipe) => bars.push(bar(id, pipe, from, iteration)),
                None => {}
            },
        }
        if let (Moment::End, Op::WgmmaWait { pending }) = (event.moment, &func.op(id).op) {
            let done = in_flight.len().saturating_sub(*pending as usize);
            bars.extend(in_flight.drain(..done).map(|(op, from, iteration)| bar(op, Pipe::Mma, from, iteration)));
        }
        let next = match event.moment {
            Moment::Begin if is_iteration => 0,
            Moment::End => place + 1,
            Moment::Begin | Moment::Barrier | Moment::BarrierEnd => place,
        };
        before = Some((next, event));
    }
    bars
}

/// The cycles of an iteration that a warpgroup waits, on average over those with bars that are no producers.
fn waits(bars: &[Bar], groups: &[Group], length: f64) -> f64 {
    let is_main = |&group: &usize| groups[group].partition != Partition::Producer;
    let has_bars = |&group: &usize| bars.iter().any(|bar| bar.group == group);
    let mains: Vec<usize> = (0..groups.len()).filter(is_main).filter(has_bars).collect();
    let of_mains = bars.iter().filter(|bar| bar.pipe == Pipe::Barrier && mains.contains(&bar.group));
    let total: f64 = of_mains.map(|bar| bar.end.min(length) - bar.begin.max(0.0)).sum();
    total / mains.len().max(1) as f64 / SHOWN as f64
}
