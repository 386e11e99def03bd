//! Compiles and loads candidates, in parallel with the thread that measures them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{Code, Target};

use super::config::Config;
use super::tuner::CandidateLaunch;
use crate::device::Device;
use crate::error::Error;
use crate::kernel::{LaunchConfig, compile_error, compile_func, for_launches, record};
use crate::launch::{CompiledKernel, Values};

/// Maximum scratch memory of a program on the CPU: the tiles of larger ones do not fit into the caches.
const MAX_ARENA_BYTES: u64 = 4 << 20;

/// Estimates the code size of a candidate relative to the kernel's others: the elements of its tiles per warp, as the
/// product of its positive integer constants over `num_warps` and `num_ctas`.
pub(super) fn elements_per_warp(config: &Config) -> u64 {
    let extents = config.constants.iter().filter_map(|(_, value)| match value {
        ConstValue::Int(n) => u64::try_from(*n).ok().filter(|&n| n > 0),
        ConstValue::Float(_) | ConstValue::Bool(_) | ConstValue::Variant(_) | ConstValue::Item(_) => None,
    });
    extents.fold(1, u64::saturating_mul) / u64::from((config.num_warps * config.num_ctas).max(1))
}

/// How many steps a configuration is from another one: factors of two of integers and warps, stages, and other constants
/// and options that differ.
pub(super) fn steps_between(config: &Config, other: &Config) -> u32 {
    let log = |n: i64| n.max(1).ilog2();
    let constants = config.constants.iter().map(|(name, value)| match (value, other.constant(name)) {
        (ConstValue::Int(a), Some(ConstValue::Int(b))) => log(*a).abs_diff(log(*b)).max(u32::from(a != b)),
        (value, there) => u32::from(Some(value) != there),
    });
    let options = config.schedule.named().into_iter().zip(other.schedule.named());
    let options =
        options.filter(|(a, b)| a != b).count() as u32 + u32::from(config.max_registers != other.max_registers);
    let warps = config.num_warps.max(1).ilog2().abs_diff(other.num_warps.max(1).ilog2());
    let ctas = config.num_ctas.max(1).ilog2().abs_diff(other.num_ctas.max(1).ilog2());
    constants.sum::<u32>() + options + warps + ctas + config.num_stages.abs_diff(other.num_stages)
}

/// Serializes the loading of compiled candidates, as the driver does anyway, and skips loads that would end after the
/// deadline: at most one load is in progress when it passes.
pub(super) struct LoadGate {
    pub deadline: Instant,
    /// Whether any candidate is loaded; before that, the deadline does not apply.
    pub any_loaded: AtomicBool,
    /// Locked during a load. The slowest load so far, in seconds per byte of code: an estimate for the next one.
    pub slowest_load: Mutex<f64>,
}

impl LoadGate {
    /// Whether the deadline has passed for a candidate: never for the default, which a launch of the kernel loads
    /// anyway.
    fn is_past_deadline(&self, index: usize) -> bool {
        self.would_miss_deadline(index, 0.0)
    }

    /// Whether a load of this many seconds would end after the deadline.
    fn would_miss_deadline(&self, index: usize, seconds: f64) -> bool {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        index != 0 && self.any_loaded.load(Ordering::Relaxed) && end >= self.deadline
    }
}

/// One compilation. It owns its inputs, because it may outlive the tuning run.
pub(super) struct CompileTask {
    pub index: usize,
    pub name: String,
    pub def: &'static KernelDef,
    pub device: Device,
    pub dtypes: Vec<DType>,
    pub candidate: CandidateLaunch,
    pub config: LaunchConfig,
    pub gate: Arc<LoadGate>,
}

impl CompileTask {
    /// Compiles and loads the kernel; returns `None` past the deadline.
    fn run(&self) -> Result<Option<CompiledKernel>, String> {
        if self.gate.is_past_deadline(self.index) {
            return Ok(None);
        }
        let message = |error: Error| error.to_string();
        let CandidateLaunch { grid, constants, specialization, args } = &self.candidate;
        let grid = grid.extents(self.def).map_err(message)?;
        let options = self.device.limit_ptx_version(&self.config.options());
        let recorded = record(self.def, &self.dtypes, constants, specialization).map_err(message)?;
        let (mut func, mut footprint) = for_launches(recorded.clone(), &self.device.target(), true);
        if footprint.violated_assumption(&Values(args), grid).is_some() {
            (func, footprint) = for_launches(recorded, &self.device.target(), false);
        }
        if let Target::Nvptx(arch) = self.device.target() {
            // If the code needs more registers than a thread has, the driver takes minutes, during which it loads
            // nothing else.
            let estimate = pipeline::estimate_resources(&func, arch, &options);
            let estimate = estimate.map_err(|error| compile_error(&func, error).to_string())?;
            if let Some(why) = estimate.over_limit() {
                return Err(why);
            }
        }
        let artifact = compile_func(&func, &self.device.target(), &options).map_err(message)?;
        let available = self.device.info().max_shared_bytes;
        if self.device.is_cuda() && artifact.manifest.shared_bytes > available {
            let needed = artifact.manifest.shared_bytes;
            return Err(message(Error::SharedMemory {
                kernel: format!("`{}`", self.def.name),
                device: self.device.to_string(),
                needed,
                available,
            }));
        }
        let bytes = match &artifact.code {
            Code::Ptx(text) => text.len(),
            Code::Object(object) => object.len(),
        } as f64;
        let mut slowest = self.gate.slowest_load.lock().unwrap_or_else(|e| e.into_inner());
        if self.gate.would_miss_deadline(self.index, bytes * *slowest) {
            return Ok(None);
        }
        tracing::info!("{}: loading {}", self.def.name, self.name);
        let start = Instant::now();
        // The flag is for clocks, which tuning does not record.
        let kernel = self.device.load(&artifact).map_err(message)?.with_footprint(footprint, true);
        let seconds = start.elapsed().as_secs_f64();
        // As a launch: each candidate has other accesses.
        if self.config.bounds_check.is_enabled() {
            kernel.check_bounds(grid, args).map_err(message)?;
        }
        *slowest = slowest.max(seconds / bytes);
        tracing::info!("{}: loaded in {seconds:.1} s", self.def.name);
        Ok(Some(kernel))
    }
}

/// Runs the tasks on as many threads as there are CPUs. The threads end when no task is left, or when the receiver is
/// dropped.
pub(super) fn spawn(tasks: VecDeque<CompileTask>) -> Receiver<(usize, Result<Option<CompiledKernel>, String>)> {
    let (sender, receiver) = channel();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(tasks.len());
    let tasks = Arc::new(Mutex::new(tasks));
    for running in 0..threads {
        let (tasks, sender) = (tasks.clone(), sender.clone());
        let work = move || {
            loop {
                let Some(task) = tasks.lock().unwrap_or_else(|e| e.into_inner()).pop_front() else { return };
                let outcome = catch_unwind(AssertUnwindSafe(|| task.run()));
                let result = outcome.unwrap_or_else(|_| Err("the compiler panicked: please report".into()));
                // The receiver is gone: the remaining tasks are not needed.
                if sender.send((task.index, result)).is_err() {
                    return;
                }
            }
        };
        let work = Arc::new(work);
        let on_thread = work.clone();
        if std::thread::Builder::new().spawn(move || on_thread()).is_err() {
            // The system has no more threads: this thread runs the tasks that no other thread takes.
            if running == 0 {
                work();
            }
            break;
        }
    }
    receiver
}

/// Rejects candidates that cannot run, or that spill registers or need too much scratch memory to be worth measuring.
/// The default may spill: it is the reference for the others.
pub(super) fn check_resources(kernel: &CompiledKernel, is_default: bool) -> Result<(), String> {
    let arena = kernel.manifest().arena_bytes;
    match kernel.resources() {
        Some(resources) if resources.blocks_per_sm == 0 => Err(format!(
            "no block fits on an SM: {} registers per thread, {} bytes of shared memory",
            resources.registers, resources.shared_bytes
        )),
        Some(resources) if resources.local_bytes > 0 && !is_default => {
            Err(format!("{} bytes of local memory per thread: spills or local arrays", resources.local_bytes))
        }
        None if arena > MAX_ARENA_BYTES => {
            Err(format!("a program needs {arena} bytes of scratch memory, above {MAX_ARENA_BYTES}"))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_past_the_deadline_are_skipped() {
        let deadline = Instant::now() + Duration::from_secs(1000);
        let gate = LoadGate { deadline, any_loaded: AtomicBool::new(false), slowest_load: Mutex::new(0.0) };
        assert!(!gate.would_miss_deadline(3, 2000.0), "nothing is loaded yet");
        gate.any_loaded.store(true, Ordering::Relaxed);
        assert!(gate.would_miss_deadline(3, 2000.0) && !gate.would_miss_deadline(3, 10.0) && !gate.is_past_deadline(3));
        assert!(!gate.would_miss_deadline(0, 2000.0), "the default has no deadline");
        let over = LoadGate { deadline: Instant::now(), ..gate };
        assert!(over.is_past_deadline(3) && !over.is_past_deadline(0));
    }

    #[test]
    fn steps_between_configurations_are_counted() {
        let config = Config::default().set("tile", 64usize).set("even", true);
        let other = config.clone().set("tile", 256usize).num_warps(8).num_stages(2);
        assert_eq!(
            (steps_between(&config, &config), steps_between(&config, &other), steps_between(&other, &config)),
            (0, 4, 4)
        );
        let mut scheduled = config.clone().set("even", false);
        scheduled.schedule.tma = Some(false);
        assert_eq!(steps_between(&scheduled, &config), 2);
    }

    #[test]
    fn candidates_are_ordered_by_tile_size() {
        let config = |tile: usize, warps| Config::default().set("tile", tile).set("even", true).num_warps(warps);
        assert!(elements_per_warp(&config(64, 4)) < elements_per_warp(&config(128, 4)));
        assert_eq!(elements_per_warp(&config(64, 4)), elements_per_warp(&config(128, 8)));
        assert_eq!(elements_per_warp(&Config::default().num_warps(1)), 1);
    }
}
