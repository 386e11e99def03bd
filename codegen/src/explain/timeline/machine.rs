//! List scheduling of the steps of all groups of warps on the pipes of one SM.

use std::collections::HashMap;

use super::steps::{Step, count_by_barrier, flatten, lag, steps};
use super::{Bar, Group, SHOWN, Settings, Timeline, in_picture};
use crate::analysis::costs::{self, Cost, cost};
use crate::analysis::pipes::{Pipe, pipe as pipe_of};
use crate::explain::Partition;
use crate::ir::{Def, Func, Op, OpId, Type, Value};

/// Iterations until the loop counts as in its steady state: rings that were filled ahead have drained. Then those over
/// which the interval is measured, then some that let the others go on while the first group ends.
const WARM_UP: usize = 48;
const MEASURED: usize = 8;
const ITERATIONS: usize = WARM_UP + MEASURED + SHOWN + 5;

/// When the first and the last element of a value are ready.
#[derive(Clone, Copy, Debug, Default)]
struct Ready {
    first: f64,
    last: f64,
}

impl Ready {
    fn at(time: f64) -> Ready {
        Ready { first: time, last: time }
    }

    fn and(self, other: Ready) -> Ready {
        Ready { first: self.first.max(other.first), last: self.last.max(other.last) }
    }
}

/// A group of warps on its way through its loop.
struct Runner {
    group: Group,
    steps: Vec<Step>,
    position: usize,
    iteration: usize,
    /// When the last synchronization was passed.
    clock: f64,
    /// When the last op so far is issued.
    issued: f64,
    values: HashMap<Value, Ready>,
    /// Completion of each `wgmma`, in the order of their issue.
    wgmmas: Vec<f64>,
    /// Completion of the groups of `cp.async`, and of the copies after the last group.
    copies: Vec<f64>,
    open_copies: f64,
    /// How often each step of synchronization was passed.
    passed: HashMap<OpId, usize>,
    /// When each iteration began.
    starts: Vec<f64>,
    /// Of an mbarrier: fills per iteration, and copies per fill, by this group.
    fills: HashMap<Value, usize>,
    copies_per_fill: HashMap<Value, usize>,
}

/// What the groups of a block share, by the number of the block.
#[derive(Default)]
struct Shared {
    /// Completion of the copies that an mbarrier tracks.
    filled: HashMap<Value, Vec<f64>>,
    /// Arrivals at an mbarrier by warpgroup.
    released: HashMap<Value, HashMap<usize, Vec<f64>>>,
    /// Arrivals at a barrier of the partition by warpgroup.
    arrived: HashMap<OpId, HashMap<usize, Vec<f64>>>,
    /// Arrivals for ping-pong scheduling by warpgroup.
    pingpong: HashMap<usize, Vec<f64>>,
}

struct Machine<'a> {
    func: &'a Func,
    settings: &'a Settings,
    runners: Vec<Runner>,
    shared: Vec<Shared>,
    /// The spans in which each pipe is busy, sorted.
    pipes: HashMap<Pipe, Vec<(f64, f64)>>,
    bars: Vec<Bar>,
    /// Iterations that an mbarrier's copies run ahead of the waits in the same loop.
    copies_ahead: HashMap<Value, usize>,
}

/// The timeline of the groups of an SM; `None` if the loop keeps no pipe busy, or waits for what it does not contain.
pub fn run(func: &Func, groups: &[Group], settings: &Settings) -> Option<Timeline> {
    let blocks = groups.iter().map(|group| group.block + 1).max().unwrap_or(0);
    let mut machine = Machine {
        func,
        settings,
        runners: groups.iter().map(|&group| Runner::new(func, group, settings)).collect(),
        shared: (0..blocks).map(|_| Shared::default()).collect(),
        pipes: HashMap::new(),
        bars: Vec::new(),
        copies_ahead: copies_ahead(func),
    };
    // The step that can run first runs first; of two, that of the group which is behind.
    let is_main = |runner: &Runner| runner.group.partition != Partition::Producer;
    while machine.runners.iter().any(|runner| is_main(runner) && runner.iteration < ITERATIONS) {
        let times = (0..machine.runners.len()).filter_map(|i| Some((i, machine.time(i)?)));
        let key = |of: &(usize, f64)| machine.runners[of.0].iteration;
        let (next, time) = times.min_by(|a, b| a.1.total_cmp(&b.1).then(key(a).cmp(&key(b))))?;
        machine.advance(next, time);
    }
    machine.timeline(groups)
}

/// By mbarrier: the copies that it tracks outside of loops, which fill the ring before the loop.
fn copies_ahead(func: &Func) -> HashMap<Value, usize> {
    let in_loop =
        |id: OpId| std::iter::successors(Some(id), |&id| func.parent_op(id)).any(|id| func.op(id).op.is_loop());
    let before: Vec<OpId> = func.walk().into_iter().filter(|&id| !in_loop(id)).collect();
    count_by_barrier(func, &before, |op| matches!(op, Op::TmaLoad { .. }).then_some(2))
}

impl Runner {
    fn new(func: &Func, group: Group, settings: &Settings) -> Runner {
        let ops = flatten(func, group.op);
        let count = |of: &dyn Fn(&Op) -> Option<usize>| count_by_barrier(func, &ops, of);
        let copies = count(&|op| match op {
            Op::TmaLoad { .. } => Some(2),
            Op::AsyncArrive { .. } => Some(0),
            _ => None,
        });
        let mut fills = count(&|op| matches!(op, Op::MbarrierExpect { .. } | Op::AsyncArrive { .. }).then_some(0));
        fills.retain(|_, n| *n > 0);
        let copies_per_fill = copies.iter().map(|(v, n)| (*v, n / fills.get(v).copied().unwrap_or(1).max(1))).collect();
        Runner {
            group,
            steps: steps(func, group.op, &|id| settings.barriers.contains(&id)),
            position: 0,
            iteration: 0,
            clock: 0.0,
            issued: 0.0,
            values: HashMap::new(),
            wgmmas: Vec::new(),
            copies: Vec::new(),
            open_copies: 0.0,
            passed: HashMap::new(),
            starts: vec![0.0],
            fills,
            copies_per_fill,
        }
    }

    fn passed(&self, id: OpId) -> usize {
        self.passed.get(&id).copied().unwrap_or(0)
    }

    /// The earliest time of a synchronization.
    fn now(&self) -> f64 {
        self.clock.max(self.issued)
    }
}

/// Whether an op takes effect in the order of a group's synchronizations.
fn is_ordered(op: &Op) -> bool {
    matches!(op, Op::Wgmma { .. } | Op::TmaLoad { .. } | Op::AsyncCopy { .. } | Op::AsyncLoad { .. })
}

impl Machine<'_> {
    /// When the next step of a group runs; `None` if what it waits for has not been scheduled, or nothing is left.
    fn time(&self, i: usize) -> Option<f64> {
        let runner = &self.runners[i];
        // A producer runs ahead of the others.
        let last = if runner.group.partition == Partition::Producer { 2 * ITERATIONS } else { ITERATIONS };
        if runner.iteration >= last {
            return None;
        }
        match runner.steps.get(runner.position) {
            Some(&Step::Op(id)) => match pipe_of(self.func, id) {
                Some(Pipe::Barrier) => Some(runner.now().max(self.condition(i, id)?)),
                Some(of) => Some(self.earliest(i, id, of).0),
                None => Some(runner.clock),
            },
            Some(&Step::Sync(id)) => self.barrier(i, id),
            Some(Step::Arrive(_)) | None => Some(runner.now()),
            Some(Step::Forward { .. }) => Some(runner.clock),
        }
    }

    /// When the condition of a synchronization holds: 0 for those without one.
    fn condition(&self, i: usize, id: OpId) -> Option<f64> {
        let runner = &self.runners[i];
        let data = self.func.op(id);
        let operands = self.operands(runner, id).last;
        match data.op {
            Op::MbarrierWait => self.mbarrier(i, id),
            Op::WgmmaWait { pending } => {
                let complete = runner.wgmmas.len().saturating_sub(pending as usize);
                let done = runner.wgmmas[..complete].iter().copied().fold(0.0, f64::max);
                // MMA results are ready by the wait; other operands are computed before it.
                let others = data.operands.iter().filter(|&&v| !self.is_wgmma(v));
                Some(others.map(|&v| self.value(runner, v).last).fold(done, f64::max))
            }
            Op::AsyncWait { pending } => {
                let complete = runner.copies.len().saturating_sub(pending as usize);
                Some(runner.copies[..complete].iter().copied().fold(0.0, f64::max))
            }
            Op::PingpongWait => self.pingpong(i, id),
            Op::MbarrierArrive { .. } => Some(operands),
            _ => Some(0.0),
        }
    }

    fn is_wgmma(&self, v: Value) -> bool {
        self.func.def_op(v).is_some_and(|id| matches!(self.func.op(id).op, Op::Wgmma { .. }))
    }

    /// Whether a value is the result of a `wgmma` that may be in flight, also of the iteration before.
    fn is_accumulating(&self, runner: &Runner, v: Value) -> bool {
        let region = self.func.op(runner.group.op).regions[0];
        match self.func.value(v).def {
            Def::Param(block, n) if block == region && n > 0 => {
                self.is_wgmma(self.func.op(self.func.terminator(region)).operands[n - 1])
            }
            Def::Param(..) | Def::Result(..) => self.is_wgmma(v),
        }
    }

    /// When the phase of an mbarrier that a wait is for completes.
    fn mbarrier(&self, i: usize, id: OpId) -> Option<f64> {
        let runner = &self.runners[i];
        let data = self.func.op(id);
        let (barrier, slot) = (data.operands[0], data.operands[1]);
        let shared = &self.shared[runner.group.block];
        let region = self.func.op(runner.group.op).regions[0];
        let per_iteration = runner.steps.iter().filter(|step| self.waits_for(step, barrier)).count().max(1);
        let number = (runner.passed(id) * per_iteration) as i64 - lag(self.func, region, slot);
        let same_block = self.runners.iter().filter(|other| other.group.block == runner.group.block);
        if let Some(filler) = same_block.clone().find(|other| other.fills.contains_key(&barrier)) {
            let per_fill = filler.copies_per_fill.get(&barrier).copied().unwrap_or(1).max(1) as i64;
            let own = filler.group == runner.group;
            let ahead = if own { self.copies_ahead.get(&barrier).copied().unwrap_or(0) as i64 / per_fill } else { 0 };
            let copies = (number + 1 - ahead) * per_fill;
            return match usize::try_from(copies) {
                Err(_) | Ok(0) => Some(0.0),
                Ok(needed) => {
                    let filled = shared.filled.get(&barrier).filter(|filled| filled.len() >= needed)?;
                    Some(filled[..needed].iter().copied().fold(0.0, f64::max))
                }
            };
        }
        let Type::Barrier { count } = *self.func.ty(barrier) else { return Some(0.0) };
        let mut latest = 0.0f64;
        for other in same_block {
            let arrivals = self.arrivals_of(other, barrier);
            for &(arrive, lag) in &arrivals {
                let Ok(needed) = usize::try_from(number - count as i64 + lag) else { continue };
                let times = shared.released.get(&barrier).and_then(|by| by.get(&key(other, arrive)));
                latest = latest.max(*times.and_then(|times| times.get(needed))?);
            }
        }
        Some(latest)
    }

    fn waits_for(&self, step: &Step, barrier: Value) -> bool {
        matches!(step, Step::Op(id) if self.func.op(*id).op == Op::MbarrierWait && self.func.op(*id).operands[0] == barrier)
    }

    /// The arrivals of a group's iteration at an mbarrier, and how many iterations their slots lag behind.
    fn arrivals_of(&self, runner: &Runner, barrier: Value) -> Vec<(OpId, i64)> {
        let region = self.func.op(runner.group.op).regions[0];
        let arrives = runner.steps.iter().filter_map(|step| match step {
            Step::Op(id) if matches!(self.func.op(*id).op, Op::MbarrierArrive { .. }) => Some(*id),
            _ => None,
        });
        let ours = arrives.filter(|&id| self.func.op(id).operands[0] == barrier);
        ours.map(|id| (id, lag(self.func, region, self.func.op(id).operands[1]))).collect()
    }

    /// When the warpgroup before has arrived for ping-pong scheduling.
    fn pingpong(&self, i: usize, id: OpId) -> Option<f64> {
        let runner = &self.runners[i];
        let group = &runner.group;
        let consumers = self
            .runners
            .iter()
            .filter(|other| other.group.block == group.block && other.group.partition == group.partition);
        let count = consumers.count();
        let (before, needed) = match group.warpgroup {
            0 => (count - 1, runner.passed(id)),
            number => (number - 1, runner.passed(id) + 1),
        };
        match needed {
            0 => Some(0.0),
            _ => self.shared[group.block].pingpong.get(&before)?.get(needed - 1).copied(),
        }
    }

    /// When all groups of the partition have arrived at a barrier.
    fn barrier(&self, i: usize, id: OpId) -> Option<f64> {
        let runner = &self.runners[i];
        let number = runner.passed(id);
        let group = &runner.group;
        let all = self
            .runners
            .iter()
            .filter(|other| other.group.block == group.block && other.group.partition == group.partition);
        let arrived = self.shared[group.block].arrived.get(&id)?;
        let times = all.map(|other| arrived.get(&other.group.warpgroup)?.get(number).copied());
        times.collect::<Option<Vec<f64>>>().map(|times| times.into_iter().fold(runner.now(), f64::max))
    }

    fn value(&self, runner: &Runner, v: Value) -> Ready {
        runner.values.get(&v).copied().unwrap_or_default()
    }

    fn operands(&self, runner: &Runner, id: OpId) -> Ready {
        let operands = self.func.op(id).operands.iter();
        operands.fold(Ready::default(), |ready, &v| ready.and(self.value(runner, v)))
    }

    fn cost(&self, group: &Group, id: OpId) -> Cost {
        cost(self.func, id, self.settings.arch, group.executors())
    }

    /// When an op can have its pipe, and its cost.
    fn earliest(&self, i: usize, id: OpId, of: Pipe) -> (f64, Cost) {
        let runner = &self.runners[i];
        let found = self.cost(&runner.group, id);
        let operands = self.operands(runner, id);
        let ready = match &self.func.op(id).op {
            // An MMA needs all of its operands; one that continues an accumulator follows it without a gap.
            Op::Wgmma { .. } => {
                let acc = self.func.op(id).operands[2];
                let others = self.func.op(id).operands[..2].iter().map(|&v| self.value(runner, v).last);
                let continued = if self.is_accumulating(runner, acc) { found.latency } else { 0.0 };
                others.fold(self.value(runner, acc).last - continued, f64::max)
            }
            op if costs::needs_whole_operands(op) => operands.last,
            _ => operands.first.max(operands.last - found.busy),
        };
        let from = if is_ordered(&self.func.op(id).op) { runner.now() } else { runner.clock };
        (self.gap(of, ready.max(from), found.busy), found)
    }

    /// The first time from `from` on at which a pipe is free for so long.
    fn gap(&self, pipe: Pipe, from: f64, busy: f64) -> f64 {
        let mut at = from;
        if busy == 0.0 {
            return at;
        }
        let spans = self.pipes.get(&pipe).map_or(&[][..], |spans| spans);
        let first = spans.partition_point(|span| span.1 <= from);
        for &(begin, end) in &spans[first..] {
            if at + busy <= begin {
                break;
            }
            at = at.max(end);
        }
        at
    }

    fn advance(&mut self, i: usize, time: f64) {
        let Some(&step) = self.runners[i].steps.get(self.runners[i].position) else { return self.end_iteration(i) };
        match step {
            Step::Op(id) => match pipe_of(self.func, id) {
                Some(Pipe::Barrier) => self.synchronize(i, id, time),
                Some(of) => self.execute(i, id, of),
                None => {
                    let ready = self.operands(&self.runners[i], id);
                    self.define(i, id, ready);
                }
            },
            Step::Arrive(id) => {
                let runner = &mut self.runners[i];
                let at = runner.now();
                runner.clock = at;
                let arrived = self.shared[runner.group.block].arrived.entry(id).or_default();
                arrived.entry(runner.group.warpgroup).or_default().push(at);
            }
            Step::Sync(id) => {
                self.add_bar(i, id, Pipe::Barrier, self.runners[i].now(), time);
                let runner = &mut self.runners[i];
                runner.clock = time + costs::SHARED_LATENCY;
                *runner.passed.entry(id).or_insert(0) += 1;
            }
            Step::Forward { from, to } => {
                let runner = &mut self.runners[i];
                let ready = runner.values.get(&from).copied().unwrap_or_default();
                runner.values.insert(to, ready);
            }
        }
        self.runners[i].position += 1;
    }

    fn define(&mut self, i: usize, id: OpId, ready: Ready) {
        for &v in &self.func.op(id).results {
            self.runners[i].values.insert(v, ready);
        }
    }

    /// Runs an op on its pipe.
    fn execute(&mut self, i: usize, id: OpId, of: Pipe) {
        let (begin, cost) = self.earliest(i, id, of);
        let end = begin + cost.busy;
        let data = self.func.op(id);
        let group = self.runners[i].group;
        if cost.busy > 0.0 {
            let spans = self.pipes.entry(of).or_default();
            let at = spans.partition_point(|span| span.0 < begin);
            spans.insert(at, (begin, end));
            self.add_bar(i, id, of, begin, end);
        }
        let done = end + cost.latency;
        let (runner, shared) = (&mut self.runners[i], &mut self.shared[group.block]);
        match &data.op {
            Op::Wgmma { .. } => {
                runner.wgmmas.push(done);
                // Asynchronous: the next op follows at once.
                runner.clock = runner.now();
            }
            Op::TmaLoad { .. } => {
                runner.clock = runner.now();
                shared.filled.entry(data.operands[2]).or_default().push(done);
            }
            Op::AsyncCopy { .. } | Op::AsyncLoad { .. } => {
                runner.clock = runner.now();
                runner.open_copies = runner.open_copies.max(done);
            }
            _ if cost.busy > 0.0 => runner.issued = runner.issued.max(end),
            _ => {}
        }
        let first = if costs::gives_whole_result(&data.op) { done } else { begin + cost.latency };
        let ready = match cost == Cost::default() {
            true => self.operands(&self.runners[i], id),
            false => Ready { first, last: done },
        };
        self.define(i, id, ready);
    }

    /// Passes a synchronization.
    fn synchronize(&mut self, i: usize, id: OpId, time: f64) {
        let data = self.func.op(id);
        let waits =
            matches!(data.op, Op::MbarrierWait | Op::WgmmaWait { .. } | Op::AsyncWait { .. } | Op::PingpongWait);
        let now = self.runners[i].now();
        if waits {
            self.add_bar(i, id, Pipe::Barrier, now, time);
        }
        let arrives = matches!(data.op, Op::MbarrierArrive { .. } | Op::PingpongArrive | Op::AsyncArrive { .. });
        let runner = &mut self.runners[i];
        let shared = &mut self.shared[runner.group.block];
        runner.clock = time;
        *runner.passed.entry(id).or_insert(0) += 1;
        let visible = time + if arrives { costs::SHARED_LATENCY } else { 0.0 };
        match &data.op {
            Op::MbarrierArrive { .. } => {
                let key = key(runner, id);
                shared.released.entry(data.operands[0]).or_default().entry(key).or_default().push(visible);
            }
            Op::AsyncArrive { .. } => {
                shared.filled.entry(data.operands[0]).or_default().push(runner.open_copies.max(visible));
            }
            Op::PingpongArrive => shared.pingpong.entry(runner.group.warpgroup).or_default().push(visible),
            Op::AsyncCommit => runner.copies.push(std::mem::take(&mut runner.open_copies)),
            _ => {}
        }
        for (&from, &to) in data.operands.iter().zip(&data.results) {
            let ready = self.value(&self.runners[i], from).and(Ready::at(time));
            self.runners[i].values.insert(to, ready);
        }
    }

    /// Begins the next iteration with the carried values.
    fn end_iteration(&mut self, i: usize) {
        let runner = &self.runners[i];
        let region = self.func.op(runner.group.op).regions[0];
        let yields = &self.func.op(self.func.terminator(region)).operands;
        let carried: Vec<Ready> = yields.iter().map(|&v| self.value(runner, v)).collect();
        let params = &self.func.block(region).params;
        let runner = &mut self.runners[i];
        runner.values.extend(params.iter().skip(1).copied().zip(carried));
        runner.clock = runner.now();
        runner.starts.push(runner.clock);
        runner.iteration += 1;
        runner.position = 0;
    }

    fn add_bar(&mut self, i: usize, op: OpId, pipe: Pipe, begin: f64, end: f64) {
        let runner = &self.runners[i];
        let iteration = self.settings.iteration(&runner.group, op, runner.iteration);
        self.bars.push(Bar { group: i, pipe, op, iteration, begin, end });
    }

    fn timeline(self, groups: &[Group]) -> Option<Timeline> {
        // Until the last group has begun an iteration.
        let begun = |iteration: usize| {
            let mains = self.runners.iter().filter(|runner| runner.group.partition != Partition::Producer);
            mains.map(|runner| runner.starts[iteration]).fold(0.0, f64::max)
        };
        let interval = (begun(WARM_UP + MEASURED) - begun(WARM_UP)) / MEASURED as f64;
        if interval <= 0.0 {
            return None;
        }
        let first = WARM_UP + MEASURED;
        let (from, length) = (self.runners[0].starts[first], interval * SHOWN as f64);
        let busy = Pipe::ALL.into_iter().map(|pipe| (pipe, self.busy(pipe)));
        let busy = busy.filter(|(_, cycles)| *cycles > 0.0).collect();
        let bars = in_picture(self.bars, from, length);
        Some(Timeline { op: groups[0].op, groups: groups.to_vec(), interval, busy, bars, first })
    }

    /// Cycles of a pipe for an iteration of every group.
    fn busy(&self, pipe: Pipe) -> f64 {
        let of = |runner: &Runner| {
            let ops = flatten(self.func, runner.group.op);
            let ops = ops.into_iter().filter(|&id| pipe_of(self.func, id) == Some(pipe));
            ops.map(|id| self.cost(&runner.group, id).busy).sum::<f64>()
        };
        self.runners.iter().map(of).sum::<f64>()
    }
}

/// Identifies the arrivals of a warpgroup at one place of the code.
fn key(runner: &Runner, arrive: OpId) -> usize {
    runner.group.warpgroup << 32 | arrive.0 as usize
}
