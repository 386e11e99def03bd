//! Measures candidates: compiles them, drops those that cannot fit, compares outputs, and times them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef, ParamKind, Specialization};

use super::compare;
use super::config::Config;
use super::journal::{Event, Journal};
use super::load::{CompileTask, LoadGate, check_resources, elements_per_warp, spawn, steps_between};
use crate::bench::{L2Flush, Timing};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{Grid, KernelArg, LaunchConfig, specialization};
use crate::launch::{CompiledKernel, LaunchArg};

/// What a launch with one configuration needs.
#[derive(Clone, Debug)]
pub struct CandidateLaunch {
    pub grid: Grid,
    /// All constants of the kernel.
    pub constants: Vec<(&'static str, ConstValue)>,
    pub specialization: Specialization,
    pub args: Vec<LaunchArg>,
}

impl CandidateLaunch {
    /// Built from the fields of the argument struct: constants and arguments in the kernel's order.
    #[doc(hidden)]
    pub fn new(def: &'static KernelDef, grid: Grid, constants: Vec<ConstValue>, args: &[KernelArg]) -> CandidateLaunch {
        let names = def.params.iter().filter(|p| matches!(p.kind, ParamKind::Constexpr { .. })).map(|p| p.name);
        CandidateLaunch {
            grid,
            constants: names.zip(constants).collect(),
            specialization: specialization(def, args),
            args: args.iter().map(KernelArg::launch_arg).collect(),
        }
    }
}

/// Outcome of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Timed {
        median_ms: f64,
        runs: usize,
    },
    /// The candidate does not fit, does not run, or computes a different result; the reason.
    Dropped(String),
    /// The time limit was reached before the candidate was timed.
    Unfinished,
}

/// One candidate of a finished run.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub config: Config,
    pub outcome: Outcome,
}

/// Result of a tuning run.
#[derive(Clone, Debug)]
pub struct Report {
    pub kernel: &'static str,
    pub key: String,
    pub candidates: Vec<Candidate>,
    /// The best configuration, and its median in milliseconds.
    pub chosen: (Config, f64),
    /// Duration of the tuning run.
    pub seconds: f64,
}

/// The problem, and the options of the run.
pub(super) struct Job<'a> {
    pub def: &'static KernelDef,
    pub device: &'a Device,
    pub base: &'a LaunchConfig,
    pub dtypes: &'a [DType],
    pub key: String,
    pub budget: Duration,
    pub limit: Duration,
}

/// The fraction of the time limit for compiling and loading, once something is loaded: the rest is for timing.
const LOADING_SHARE: f64 = 0.7;
/// Rounds of timing; in each, every remaining candidate runs for [`ROUND_MS`].
const ROUNDS: usize = 5;
const ROUND_MS: f64 = 20.0;
/// Minimum and maximum number of runs of one candidate in one round.
const RUNS_PER_ROUND: (usize, usize) = (3, 200);
/// A candidate slower than the best one by this factor is dropped.
const MAX_SLOWDOWN: f64 = 1.25;
/// A candidate and its state.
struct Trial {
    config: Config,
    name: String,
    attempt: Option<CandidateLaunch>,
    kernel: Option<CompiledKernel>,
    /// Why it was dropped.
    dropped: Option<String>,
    matches_reference: bool,
}

/// Why a run failed.
enum RunError {
    /// The candidate caused it, and the next one can run.
    Failed(String),
    /// Nothing can run in this process any more.
    DeviceLost(String),
}

impl From<Error> for RunError {
    fn from(error: Error) -> RunError {
        match &error {
            Error::Cuda { failure, .. } if failure.is_sticky() => RunError::DeviceLost(error.to_string()),
            _ => RunError::Failed(error.to_string()),
        }
    }
}

/// Measures the candidates, the default first.
///
/// # Errors
/// No candidate runs; the first one disagrees with others that agree with each other; the device is lost to this
/// process.
pub(super) fn tune(
    job: &Job,
    candidates: Vec<(Config, Result<CandidateLaunch>)>,
    journal: &mut Journal,
) -> Result<Report> {
    let start = Instant::now();
    let mut run = Run { job, journal, trials: Vec::new(), start, scratch: None };
    for (config, attempt) in candidates {
        let (name, threads) = (config.to_string(), 32 * config.num_warps);
        let dropped = run.journal.dropped(&name).map(str::to_string);
        run.trials.push(Trial { config, name, attempt: None, kernel: None, dropped, matches_reference: false });
        let last = run.trials.len() - 1;
        match attempt {
            Err(error) => run.drop_trial(last, error.to_string()),
            Ok(_) if threads > 1024 => run.drop_trial(last, format!("{threads} threads per block: the limit is 1024")),
            Ok(attempt) => run.trials[last].attempt = Some(attempt),
        }
    }
    tracing::info!(
        "{} for {}: {} candidates, {:.0} s",
        job.def.name,
        job.key,
        run.trials.len(),
        job.budget.as_secs_f64()
    );
    run.synchronize_caller()?;
    run.compile();
    run.check()?;
    run.time()?;
    run.finish(start.elapsed())
}

struct Run<'a> {
    job: &'a Job<'a>,
    journal: &'a mut Journal,
    trials: Vec<Trial>,
    start: Instant,
    scratch: Option<Scratch>,
}

impl Run<'_> {
    fn drop_trial(&mut self, index: usize, why: String) {
        let trial = &mut self.trials[index];
        if trial.dropped.is_some() {
            return;
        }
        tracing::info!("{}: {} is dropped: {why}", self.job.def.name, trial.name);
        self.journal.add(Event::Dropped { config: trial.name.clone(), why: why.clone() });
        trial.dropped = Some(why);
        trial.kernel = None;
    }

    fn past_deadline(&self) -> bool {
        self.start.elapsed() >= self.job.budget
    }

    fn error(&self, message: String) -> Error {
        Error::Tuning {
            kernel: format!("`{}` ({}:{})", self.job.def.name, self.job.def.file, self.job.def.line),
            message,
        }
    }

    /// Waits for the work that the caller queued, whose results may be copied to scratch memory.
    fn synchronize_caller(&self) -> Result<()> {
        if let Some(stream) = &self.job.base.stream {
            stream.synchronize()?;
        }
        self.job.device.synchronize()
    }

    /// Compiles all candidates on all CPUs and loads them, the default first, then those that are the fewest steps from
    /// it, small ones first: if the time does not suffice, distant ones are left out. Ends when
    /// [`LOADING_SHARE`] of the time limit is used, the default is compiled and any candidate is loaded: then no
    /// further load begins, and this does not wait for the load in progress. A load that would end after that time,
    /// estimated from earlier loads, does not begin either.
    fn compile(&mut self) {
        let mut order: Vec<usize> = (0..self.trials.len()).collect();
        // The first one is the default. The sort is stable.
        let config = |index: usize| &self.trials[index].config;
        order.sort_by_key(|&index| (steps_between(config(index), config(0)), elements_per_warp(config(index))));
        let deadline = self.start + self.job.budget.mul_f64(LOADING_SHARE);
        let gate = Arc::new(LoadGate { deadline, any_loaded: AtomicBool::new(false), slowest_load: Mutex::new(0.0) });
        let tasks: VecDeque<CompileTask> = order.into_iter().filter_map(|index| self.task(index, &gate)).collect();
        let mut open = tasks.len();
        let mut default_is_open = tasks.iter().any(|task| task.index == 0);
        let results = spawn(tasks);
        while open > 0 {
            let timeout = match default_is_open || !gate.any_loaded.load(Ordering::Relaxed) {
                true => Duration::from_secs(3600),
                false => deadline.saturating_duration_since(Instant::now()),
            };
            let (index, result) = match results.recv_timeout(timeout) {
                Ok(result) => result,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            };
            open -= 1;
            default_is_open &= index != 0;
            let fitting = |kernel| check_resources(&kernel, index == 0).map(|()| kernel);
            match result.and_then(|kernel| kernel.map(fitting).transpose()) {
                Ok(Some(kernel)) => {
                    gate.any_loaded.store(true, Ordering::Relaxed);
                    self.trials[index].kernel = Some(kernel);
                }
                Ok(None) => {}
                Err(why) => self.drop_trial(index, why),
            }
        }
        let count = |is: fn(&Trial) -> bool| self.trials.iter().filter(|trial| is(trial)).count();
        tracing::info!(
            "{}: after {:.1} s {} candidates are loaded, {} dropped, {} not loaded in time",
            self.job.def.name,
            self.start.elapsed().as_secs_f64(),
            count(|trial| trial.kernel.is_some()),
            count(|trial| trial.dropped.is_some()),
            count(|trial| trial.kernel.is_none() && trial.dropped.is_none()),
        );
    }

    fn task(&self, index: usize, gate: &Arc<LoadGate>) -> Option<CompileTask> {
        let trial = &self.trials[index];
        let candidate = trial.attempt.clone().filter(|_| trial.dropped.is_none())?;
        let config = trial.config.launch_config(self.job.base, 0);
        Some(CompileTask {
            index,
            name: trial.name.clone(),
            def: self.job.def,
            device: self.job.device.clone(),
            dtypes: self.job.dtypes.to_vec(),
            candidate,
            config,
            gate: gate.clone(),
        })
    }

    /// Runs every candidate once on fresh scratch memory and compares its outputs with the first one's.
    fn check(&mut self) -> Result<()> {
        let types = memory_types(self.job);
        let tolerance = compare::tolerance(types.iter().flatten().map(|memory| memory.dtype));
        let mut first: Option<(usize, Vec<Output>)> = None;
        let mut other: Option<(usize, Vec<Output>)> = None;
        for index in 0..self.trials.len() {
            if self.trials[index].kernel.is_none() || self.trials[index].dropped.is_some() {
                continue;
            }
            if first.is_some() && self.past_deadline() {
                return Ok(());
            }
            tracing::info!("{}: checking {}", self.job.def.name, self.trials[index].name);
            self.journal.add(Event::Start(self.trials[index].name.clone()));
            let outputs = match self.run_once(index, &types) {
                Ok(outputs) => outputs,
                Err(stop) => {
                    self.handle_run_error(index, stop)?;
                    continue;
                }
            };
            let Some((reference, want)) = &first else {
                self.matches_reference(index, 0.0);
                first = Some((index, outputs));
                continue;
            };
            let (error, name) = max_error(want, &outputs, self.job.def);
            if error <= tolerance {
                self.matches_reference(index, error);
                continue;
            }
            if let Some((earlier, found)) = &other
                && max_error(found, &outputs, self.job.def).0 <= tolerance
            {
                let names = [*reference, *earlier, index].map(|i| self.trials[i].name.clone());
                return Err(self.error(format!(
                    "`{name}` of the first configuration, {}, differs by {error:.1e} (above {tolerance:.0e}) from that of {} and of {}, which agree with each other: no configuration is selected",
                    names[0], names[1], names[2],
                )));
            }
            let than = self.trials[*reference].name.clone();
            self.drop_trial(
                index,
                format!("`{name}` differs from that of {than} by {error:.1e}, above {tolerance:.0e}"),
            );
            other.get_or_insert((index, outputs));
        }
        match first {
            Some(_) => Ok(()),
            None => Err(self.error(self.all_failed())),
        }
    }

    fn all_failed(&self) -> String {
        let why =
            self.trials.iter().map(|t| format!("\n  {}: {}", t.name, t.dropped.as_deref().unwrap_or("not tried")));
        format!("no configuration runs:{}", why.collect::<String>())
    }

    fn matches_reference(&mut self, index: usize, error: f64) {
        self.trials[index].matches_reference = true;
        self.journal.add(Event::Agrees { config: self.trials[index].name.clone(), error });
    }

    /// Drops a candidate that failed; returns an error if nothing else can run.
    fn handle_run_error(&mut self, index: usize, stop: RunError) -> Result<()> {
        match stop {
            RunError::Failed(why) => {
                self.drop_trial(index, why);
                Ok(())
            }
            RunError::DeviceLost(why) => {
                let name = self.trials[index].name.clone();
                self.drop_trial(index, why.clone());
                Err(self.error(format!(
                    "the device was lost while {name} ran: {why}\n  help: restart the program, which continues without that configuration"
                )))
            }
        }
    }

    fn scratch(&mut self, index: usize, types: &[Option<MemoryType>]) -> Result<&mut Scratch> {
        if self.scratch.is_none() {
            let args = self.trials[index].attempt.as_ref().map(|attempt| &attempt.args[..]).unwrap_or_default();
            self.scratch = Some(Scratch::new(self.job.device, args, types)?);
        }
        // Allocated above; every attempt uses the same memory.
        self.scratch
            .as_mut()
            .ok_or_else(|| unreachable!("internal error: the scratch memory was freed; please report this"))
    }

    fn run_once(&mut self, index: usize, types: &[Option<MemoryType>]) -> Result<Vec<Output>, RunError> {
        self.scratch(index, types)?.fill()?;
        self.launch(index)?;
        self.wait()?;
        match &self.scratch {
            Some(scratch) => Ok(scratch.download()?),
            None => Ok(Vec::new()),
        }
    }

    /// Starts a candidate on scratch memory.
    fn launch(&self, index: usize) -> Result<(), RunError> {
        let trial = &self.trials[index];
        let (Some(kernel), Some(attempt), Some(scratch)) = (&trial.kernel, &trial.attempt, &self.scratch) else {
            return Err(RunError::Failed("it was not compiled".into()));
        };
        let grid = attempt.grid.extents(self.job.def)?;
        // SAFETY: outputs point at scratch memory of the same size, inputs at memory that the caller of the launch
        // borrows for as long as tuning takes; all of it is of this device, and only this thread queues work on its
        // stream.
        unsafe { kernel.launch(grid, &scratch.redirect(&attempt.args)) }.map_err(RunError::from)
    }

    /// Waits for the queued work, up to the time limit.
    fn wait(&self) -> Result<(), RunError> {
        let event = self.job.device.stream().record()?;
        let start = Instant::now();
        while !event.is_done()? {
            if start.elapsed() > self.job.limit {
                return Err(RunError::DeviceLost(format!("it timed out after {:.0} s", self.job.limit.as_secs_f64())));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        self.job.device.synchronize().map_err(RunError::from)
    }

    /// Times the candidates that agree, in rounds.
    fn time(&mut self) -> Result<()> {
        let mut remaining: Vec<usize> = (0..self.trials.len()).filter(|&i| self.trials[i].matches_reference).collect();
        let mut l2 = L2Flush::new(self.job.device)?;
        for round in 0..ROUNDS {
            for &index in &remaining {
                if self.trials[index].dropped.is_some() || self.journal.rounds(&self.trials[index].name) > round {
                    continue;
                }
                if self.past_deadline() && self.best().is_some() {
                    return Ok(());
                }
                match self.time_round(index, &mut l2) {
                    Ok(ms) => self.journal.add(Event::Times { config: self.trials[index].name.clone(), ms }),
                    Err(stop) => self.handle_run_error(index, stop)?,
                }
            }
            if let Some((index, best)) = self.best() {
                let (kernel, name, count) = (self.job.def.name, &self.trials[index].name, remaining.len());
                tracing::info!("{kernel}, round {} of {ROUNDS}, {count} candidates: {best:.4} ms by {name}", round + 1);
                remaining.retain(|&index| self.median(index).is_some_and(|ms| ms <= MAX_SLOWDOWN * best));
            }
        }
        Ok(())
    }

    fn time_round(&mut self, index: usize, l2: &mut L2Flush) -> Result<Vec<f64>, RunError> {
        if let Some(scratch) = &mut self.scratch {
            scratch.fill()?;
        }
        // The first run determines the number of runs per round, and warms up caches and clocks.
        let once = self.time_runs(index, l2, 1)?[0];
        let runs = ((ROUND_MS / once.max(1e-3)) as usize).clamp(RUNS_PER_ROUND.0, RUNS_PER_ROUND.1);
        self.time_runs(index, l2, runs)
    }

    fn time_runs(&self, index: usize, l2: &mut L2Flush, runs: usize) -> Result<Vec<f64>, RunError> {
        let stream = self.job.device.stream();
        let mut events = Vec::with_capacity(runs);
        for _ in 0..runs {
            l2.flush()?;
            let start = stream.record()?;
            self.launch(index)?;
            events.push((start, stream.record()?));
        }
        self.wait()?;
        let ms = |(start, end): (crate::Event, crate::Event)| Ok(end.elapsed_since(&start)?.as_secs_f64() * 1e3);
        events.into_iter().map(ms).collect::<Result<_>>().map_err(RunError::from)
    }

    fn median(&self, index: usize) -> Option<f64> {
        let times = self.journal.times(&self.trials[index].name);
        (self.trials[index].dropped.is_none() && !times.is_empty()).then(|| Timing::from_samples(times).median)
    }

    /// The best candidate so far, and its median.
    fn best(&self) -> Option<(usize, f64)> {
        let medians = (0..self.trials.len()).filter_map(|index| self.median(index).map(|ms| (index, ms)));
        medians.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    fn finish(self, took: Duration) -> Result<Report> {
        let Some((best, median_ms)) = self.best() else { return Err(self.error(self.all_failed())) };
        let outcome = |index: usize| match (&self.trials[index].dropped, self.median(index)) {
            (Some(why), _) => Outcome::Dropped(why.clone()),
            (None, Some(median_ms)) => {
                Outcome::Timed { median_ms, runs: self.journal.times(&self.trials[index].name).len() }
            }
            (None, None) => Outcome::Unfinished,
        };
        let candidates: Vec<Candidate> = (0..self.trials.len())
            .map(|index| Candidate { config: self.trials[index].config.clone(), outcome: outcome(index) })
            .collect();
        let chosen = self.trials[best].config.clone();
        // If candidates remain, a later run resumes this log.
        if candidates.iter().all(|candidate| candidate.outcome != Outcome::Unfinished) {
            self.journal.add(Event::Chosen { config: chosen.to_string(), median_ms });
        }
        let (kernel, key) = (self.job.def.name, self.job.key.clone());
        Ok(Report { kernel, key, candidates, chosen: (chosen, median_ms), seconds: took.as_secs_f64() })
    }
}

/// Element type and access of one memory argument.
#[derive(Clone, Copy)]
struct MemoryType {
    dtype: DType,
    reads: bool,
    writes: bool,
}

/// Types of the passed arguments, one entry each; `None` for numbers.
fn memory_types(job: &Job) -> Vec<Option<MemoryType>> {
    let of = |kind: ParamKind| {
        let (elem, reads, writes) = match kind {
            ParamKind::In(elem) => (elem, true, false),
            ParamKind::Out(elem) => (elem, false, true),
            ParamKind::InOut(elem) => (elem, true, true),
            ParamKind::Scalar(_) => return Some(None),
            ParamKind::Constexpr { .. } => return None,
        };
        Some(elem.resolve(job.dtypes).map(|dtype| MemoryType { dtype, reads, writes }))
    };
    job.def.params.iter().filter_map(|p| of(p.kind)).collect()
}

/// The compared bytes of one output of a run.
struct Output {
    /// Index among the passed arguments.
    arg: usize,
    dtype: DType,
    bytes: Vec<u8>,
}

/// The largest error of any output, and that output's name.
fn max_error(want: &[Output], found: &[Output], def: &KernelDef) -> (f64, &'static str) {
    let names: Vec<&'static str> =
        def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. })).map(|p| p.name).collect();
    let errors = want.iter().zip(found).map(|(want, found)| {
        let error = compare::relative_error(want.dtype, &want.bytes, &found.bytes);
        (error, names.get(want.arg).copied().unwrap_or("output"))
    });
    errors.max_by(|(a, _), (b, _)| a.total_cmp(b)).unwrap_or((0.0, "output"))
}

/// Scratch memory in place of the memory that the kernel writes.
struct Scratch {
    device: Device,
    buffers: Vec<ScratchBuffer>,
}

/// Scratch memory of one written argument.
struct ScratchBuffer {
    /// Index among the passed arguments.
    arg: usize,
    memory: MemoryType,
    caller_address: u64,
    buffer: Buffer<u8>,
}

impl Scratch {
    fn new(device: &Device, args: &[LaunchArg], types: &[Option<MemoryType>]) -> Result<Scratch> {
        let mut buffers = Vec::new();
        for (arg, (value, memory)) in args.iter().zip(types).enumerate() {
            if let (&LaunchArg::Ptr { addr, bytes }, &Some(memory)) = (value, memory)
                && memory.writes
            {
                let buffer = Buffer::uninit(device, bytes as usize)?;
                buffers.push(ScratchBuffer { arg, memory, caller_address: addr, buffer });
            }
        }
        Ok(Scratch { device: device.clone(), buffers })
    }

    /// Copies the caller's memory where the kernel reads; fills memory that it only writes with 0xff bytes (NaN).
    fn fill(&mut self) -> Result<()> {
        for ScratchBuffer { memory, caller_address, buffer, .. } in &mut self.buffers {
            match memory.reads {
                // SAFETY: the caller of the launch borrows that memory during tuning, and scratch memory does not
                // overlap it.
                true => unsafe { self.device.copy(buffer.address(), *caller_address, buffer.len()) }?,
                false => buffer.poison()?,
            }
        }
        Ok(())
    }

    /// The arguments, with outputs in scratch memory.
    fn redirect(&self, args: &[LaunchArg]) -> Vec<LaunchArg> {
        let mut args = args.to_vec();
        for ScratchBuffer { arg, buffer, .. } in &self.buffers {
            args[*arg] = LaunchArg::Ptr { addr: buffer.address(), bytes: buffer.len() as u64 };
        }
        args
    }

    /// The compared bytes of the outputs.
    fn download(&self) -> Result<Vec<Output>> {
        let fetch = |buffer: &Buffer<u8>| -> Result<Vec<u8>> {
            let windows = compare::compared_windows(buffer.len());
            let fetched: Vec<Vec<u8>> =
                windows.into_iter().map(|window| buffer.slice(window)?.to_vec()).collect::<Result<_>>()?;
            Ok(fetched.concat())
        };
        let output = |scratch: &ScratchBuffer| {
            Ok(Output { arg: scratch.arg, dtype: scratch.memory.dtype, bytes: fetch(&scratch.buffer)? })
        };
        self.buffers.iter().map(output).collect()
    }
}
