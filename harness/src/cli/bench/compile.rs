//! `tilewright bench compile`: times the phases of compiling FlashAttention-2's forward kernel, cache hits, and the
//! start of a process until its first launch (`startup.rs`).

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use tilewright::bench::Timing;
use tilewright::cache::Key;
use tilewright::codegen::ir::{DType, Func};
use tilewright::codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};
use tilewright::codegen::llvm::{self, Opt};
use tilewright::codegen::lower;
use tilewright::codegen::pipeline::{compile_gpu, gpu_ir};
use tilewright::codegen::target::{CompileOptions, GpuArch, Target};
use tilewright::kernel::{compile_error, render_with_source};
use tilewright::kernels::attention::config::{Pass, d_tile, default_tiles};
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright::{Cache, Device, Error};

use super::record::{Recorder, Row, Work};
use super::{Common, startup, tiles};
use crate::cli::demo::case::count;
use crate::cli::{CliError, Result};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Head dimensions, separated by commas
    #[arg(long, alias = "dim", value_delimiter = ',', default_value = "64,128", value_parser = clap::value_parser!(u16).range(1..=256))]
    head_dim: Vec<u16>,
    /// Target: sm_80, sm_86, sm_89 or sm_90a. Default: this machine's GPU, else sm_90a
    #[arg(long)]
    target: Option<GpuArch>,
    /// Number of compilations after the first one
    #[arg(long, default_value_t = 10)]
    runs: u32,
    /// Number of processes whose first launch is timed with a warm cache, after one with an empty cache; 0 for none
    #[arg(long, default_value_t = 5)]
    starts: u32,
    /// Run as such a process, which was started this many nanoseconds after the Unix epoch
    #[arg(long, hide = true, value_name = "NANOSECONDS")]
    first_launch_of: Option<u128>,
}

/// Constants, specialization and options of one variant.
struct Variant {
    arch: GpuArch,
    consts: Vec<(&'static str, ConstValue)>,
    assumed: Specialization,
    options: CompileOptions,
}

/// The phases of a compilation, in order.
const PHASES: [&str; 6] = ["record", "passes", "lower", "llvm parse", "llvm optimize", "llvm codegen"];
/// The time of each phase in one compilation.
type Phases = [Duration; PHASES.len()];

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let d = arguments.head_dim.first().map_or(64, |&d| usize::from(d));
    if let Some(since) = arguments.first_launch_of {
        let parts = startup::first_launch(arguments.common.device, d, since)?;
        return Ok(writeln!(out, "{}", serde_json::json!(parts))?);
    }
    arguments.common.expect_no_times("--runs and --starts")?;
    let (device, mut recorder) = arguments.common.open("compile")?;
    let arch = arguments.target.or(device.gpu_arch()).unwrap_or(GpuArch::Sm90a);
    let mut first_of_process = true;
    for &d in &arguments.head_dim {
        let d = usize::from(d);
        let tiles = default_tiles(Pass::Forward, d, DType::BF16.bytes(), &Target::Nvptx(arch));
        let variant = Variant::new(arch, d);
        let row = |kernel: &str, case: &str| {
            Row::new(kernel, &[d], "bf16").case(&format!("{} {case}", arch.name())).tiles(tiles::text(tiles))
        };
        // The first compilation of a process includes LLVM's one-time initialization.
        let case = if first_of_process { "first in process" } else { "first of this variant" };
        first_of_process = false;
        record(&mut recorder, &[variant.compile()?], |kernel| row(kernel, case))?;
        let repeated: Vec<Phases> = (0..arguments.runs).map(|_| variant.compile()).collect::<Result<_>>()?;
        record(&mut recorder, &repeated, |kernel| row(kernel, "repeated"))?;
        let hits = variant.cache_hits(&device)?;
        recorder.push(row("cache hit", "with recording").timed(&timing(&hits), Work::None))?;
        if device.is_cuda() {
            let load = variant.load(&device)?;
            recorder.push(row("driver load", "first").timed(&timing(&[load]), Work::None))?;
        }
    }
    if arguments.starts > 0 {
        startup::measure(&mut recorder, &device, d, arguments.starts)?;
    }
    recorder.finish(out)
}

fn timing(durations: &[Duration]) -> Timing {
    Timing::from_samples(durations.iter().map(|d| d.as_secs_f64() * 1e3).collect())
}

/// Records a row for each phase, and one for IR to PTX as a whole.
fn record(recorder: &mut Recorder, compilations: &[Phases], row: impl Fn(&str) -> Row) -> Result<()> {
    if compilations.is_empty() {
        return Ok(());
    }
    for (i, phase) in PHASES.iter().enumerate() {
        let times: Vec<Duration> = compilations.iter().map(|phases| phases[i]).collect();
        recorder.push(row(phase).timed(&timing(&times), Work::None))?;
    }
    let totals: Vec<Duration> = compilations.iter().map(|phases| phases[1..].iter().sum()).collect();
    recorder.push(row("IR to PTX").timed(&timing(&totals), Work::None))
}

impl Variant {
    /// Returns the variant of a launch on dense tensors whose extents are multiples of the tiles, with a causal mask.
    fn new(arch: GpuArch, d: usize) -> Variant {
        let tiles = default_tiles(Pass::Forward, d, DType::BF16.bytes(), &Target::Nvptx(arch));
        let consts = vec![
            count("d", d),
            count("d_tile", d_tile(d)),
            count("d_v", d),
            count("d_v_tile", d_tile(d)),
            count("q_tile", tiles.q_tile),
            count("k_tile", tiles.k_tile),
            count("replicas", tiles.replicas),
            ("causal", ConstValue::Bool(true)),
            ("even_keys", ConstValue::Bool(true)),
        ];
        let options =
            CompileOptions { num_warps: tiles.num_warps, num_stages: tiles.num_stages, ..CompileOptions::default() };
        Variant { arch, consts, assumed: dense(&FLASH_ATTENTION_FWD), options }
    }

    fn record(&self) -> Result<Func> {
        let recording = FLASH_ATTENTION_FWD.record_full(&[DType::BF16; 3], &self.consts, &self.assumed);
        Ok(recording.map_err(|diagnostic| CliError::Failure(render_with_source(&diagnostic)))?.func)
    }

    /// Runs the steps of [`compile_gpu`] and times each.
    fn compile(&self) -> Result<Phases> {
        let start = Instant::now();
        let func = self.record()?;
        let recorded = start.elapsed();
        let fail = |error: Error| CliError::Failure(error.to_string());
        let gpu_func = gpu_ir(&func, self.arch, &self.options, &mut ());
        let passed = start.elapsed();
        let module = lower::nvptx::lower(&gpu_func, self.arch, &self.options)
            .map_err(|unsupported| fail(compile_error(&func, unsupported.into())))?;
        let lowered = start.elapsed();
        let ptx = llvm::ptx(&module.llvm_ir, self.arch, self.options.ptx_version, &Opt::gpu())
            .map_err(|error| fail(compile_error(&func, error.into())))?;
        // The time in LLVM outside of its optimize and codegen phases is parsing and setup.
        let outside = (start.elapsed() - lowered).saturating_sub(ptx.timings.opt + ptx.timings.codegen);
        Ok([recorded, passed - recorded, lowered - passed, outside, ptx.timings.opt, ptx.timings.codegen])
    }

    /// Times cache hits: from a kernel's arguments to its artifact in the cache on disk.
    fn cache_hits(&self, device: &Device) -> Result<Vec<Duration>> {
        const HITS: usize = 50;
        let folder = Scratch::new("hits");
        let cache = Cache::at(folder.path());
        let target = Target::Nvptx(self.arch);
        let func = self.record()?;
        let key = |func: &Func| Key::new(func, &target, &self.options);
        let artifact = compile_gpu(&func, self.arch, &self.options, &mut ())
            .map_err(|error| CliError::Failure(compile_error(&func, error).to_string()))?;
        cache.put(&key(&func), &artifact);
        let hit = |_| {
            let start = Instant::now();
            match cache.get(&key(&self.record()?)) {
                Some(found) if found == artifact => Ok(start.elapsed()),
                Some(_) | None => Err(CliError::Failure(format!(
                    "the cache in {} does not return the artifact that was stored for {device}",
                    folder.path().display()
                ))),
            }
        };
        (0..HITS).map(hit).collect()
    }

    /// Times the driver's compilation of the PTX to machine code, which is short if the driver's own cache has that
    /// code.
    fn load(&self, device: &Device) -> Result<Duration> {
        let func = self.record()?;
        let artifact = compile_gpu(&func, self.arch, &device.limit_ptx_version(&self.options), &mut ())
            .map_err(|error| CliError::Failure(compile_error(&func, error).to_string()))?;
        let start = Instant::now();
        device.load(&artifact)?;
        Ok(start.elapsed())
    }
}

/// Returns the specialization for dense, aligned tensors: multiples of 16, and stride 1 along the last dimension.
fn dense(def: &KernelDef) -> Specialization {
    let args = def.params.iter().filter_map(|p| match p.kind {
        ParamKind::Constexpr { .. } => None,
        _ if !p.specialize => Some(ArgSpec::default()),
        ParamKind::Scalar(elem) if elem.resolve(&[]).is_some_and(DType::is_float) => Some(ArgSpec::default()),
        ParamKind::Scalar(_) if p.name.ends_with("_stride_d") => Some(ArgSpec { divisible_by: 1, equal_to: Some(1) }),
        ParamKind::In(_) | ParamKind::Out(_) | ParamKind::InOut(_) | ParamKind::Scalar(_) => {
            Some(ArgSpec { divisible_by: 16, equal_to: None })
        }
    });
    Specialization { args: args.collect() }
}

/// The path of a temporary folder, which is removed on drop.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("tilewright-bench-{name}-{}", std::process::id())))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
