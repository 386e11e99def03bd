//! `tilewright profile`: profiles the time of a training step, on one rank or on many.

mod ranks;

use std::io::Write;
use std::path::PathBuf;

use candle_core::Device;
use clap::Args;
use tilewright::trace::{Options, Recording, Trace};
use tilewright_candle::memory::kernel_device;

use super::bench::process_groups::CommBackend;
use super::ranks::RankOptions;
use super::step::{Step, StepOptions, Work};
use super::{CliError, Result};
use crate::files;
use crate::model::Config;
use crate::profile::tables::{self, AttentionFlop};
use crate::profile::{Profile, STEP, chrome, flame, span};
use crate::report::{Outputs, Report};

#[derive(Args)]
pub struct Arguments {
    /// Part of a step to run
    #[arg(long, value_enum, default_value_t = Work::TrainStep)]
    pub work: Work,
    /// Context length: tokens per sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub context: u32,
    /// Number of warm-up steps, which compile kernels and allocate memory
    #[arg(long, default_value_t = 2)]
    pub warmup: u32,
    /// Number of measured steps
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
    /// Number of kernels or operations shown per phase
    #[arg(long, default_value_t = 10)]
    pub top: usize,
    /// Write a trace for Perfetto (ui.perfetto.dev) and Chrome; --out also writes it, as trace.json
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write a flame graph as SVG; --out also writes it, as flame-graph.svg
    #[arg(long, value_name = "FILE")]
    pub flame_graph: Option<PathBuf>,
    /// Emit NVTX ranges for Nsight Systems or Nsight Compute, which must run this program
    #[arg(long)]
    pub nvtx: bool,
    #[command(flatten)]
    pub step: StepOptions,
    #[command(flatten)]
    pub how: RankOptions,
    /// Number of ranks to profile, as threads of this process. Default: 2 with --ddp or --shard
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub ranks: Option<u16>,
    /// Communication backend, if ranks are threads of this process. Default: threads
    #[arg(long, alias = "back-end", value_enum)]
    pub backend: Option<CommBackend>,
    #[command(flatten)]
    pub outputs: Outputs,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let files = [("--trace", &arguments.trace), ("--flame-graph", &arguments.flame_graph)];
    arguments.outputs.check_with(files.into_iter().filter_map(|(option, path)| Some((option, path.as_ref()?))))?;
    let (report, chrome, flame_graph) = if ranks::is_multi_rank(arguments)? {
        let Some(found) = ranks::profile(arguments)? else { return Ok(()) };
        (found.report, found.trace.to_string(), found.flame_graph)
    } else {
        let backend = arguments.backend.map(|_| "--backend");
        if let Some(option) = arguments.how.of_several_ranks().or(backend) {
            let message = format!("{option} is unused: it goes with --ddp, --shard or --ranks");
            return Err(CliError::usage(message, "omit it, or give one of them"));
        }
        let (report, trace) = profile(arguments)?;
        let flame_graph = flame::svg(&Profile::new(&trace));
        (report, chrome::trace(&trace).to_string(), flame_graph)
    };
    let in_folder = arguments.outputs.out.as_ref().map(|folder| folder.join("trace.json"));
    arguments.outputs.write(report, out)?;
    let mut files: Vec<(PathBuf, &str)> =
        [arguments.trace.clone(), in_folder].into_iter().flatten().map(|path| (path, chrome.as_str())).collect();
    if let (Some(path), Some(svg)) = (&arguments.flame_graph, &flame_graph) {
        files.push((path.clone(), svg));
    }
    for (path, text) in files {
        files::replace(&path, |file| file.write_all(text.as_bytes()))
            .map_err(|error| CliError::file("write", &path, error))?;
        writeln!(out, "wrote {}", path.display())?;
    }
    Ok(())
}

/// Profiles one rank, and returns the report and the trace.
///
/// # Errors
/// An unknown model, out of memory, or a missing library (CUPTI).
pub fn profile(arguments: &Arguments) -> Result<(Report, Trace)> {
    let config = arguments.step.config(arguments.context as usize)?;
    let trace = record(arguments, &config)?;
    let model = described(&config, arguments.step.batch as usize);
    let title = format!("Profile of {model} ({})", arguments.work.name());
    let report = add_tables(Report::new("profile", &title), arguments, &config, &Profile::new(&trace));
    Ok((report, trace))
}

/// Adds the tables and plots of a profile to a report.
fn add_tables(report: Report, arguments: &Arguments, config: &Config, profile: &Profile<'_>) -> Report {
    let batch = arguments.step.batch as usize;
    let flop = AttentionFlop::new(config.layers, batch, config.heads, config.context, config.d_model / config.heads);
    let mut report = report.table(tables::phases(profile)).table(tables::classes(profile));
    if let Some(table) = tables::attention(profile, flop) {
        report = report.table(table);
    }
    report = report.table(tables::names(profile, arguments.top)).plot(tables::plot(profile, 16));
    if let Some(svg) = flame::svg(profile) {
        report = report.image("flame-graph", "Flame graph", svg);
    }
    match profile.trace.dropped {
        0 => report,
        n => report
            .text(format!("CUPTI dropped {n} records for lack of buffer space: the times above do not include them.")),
    }
}

/// Describes a model in one line.
pub fn described(config: &Config, batch: usize) -> String {
    let size = match config.size_name() {
        Some(name) => name.to_string(),
        None => format!("{} layers of {}", config.layers, config.d_model),
    };
    format!(
        "{size}, batch {batch}, context {}, {}, attention {}, fusion {}",
        config.context, config.precision, config.attention, config.fusion
    )
}

fn record(arguments: &Arguments, config: &Config) -> Result<Trace> {
    let device = arguments.step.device()?;
    let mut step = Step::new(&arguments.step, config, &device, arguments.work, None)?;
    for _ in 0..arguments.warmup {
        step.run()?;
    }
    let recording = Recording::start(options(arguments, &device)?)?;
    for _ in 0..arguments.steps {
        let _span = span(STEP);
        step.run()?;
    }
    Ok(recording.finish()?)
}

/// Returns the recording options for steps on `device`.
fn options(arguments: &Arguments, device: &Device) -> Result<Options> {
    let gpu = if device.is_cuda() { Some(kernel_device(device)?.clone()) } else { None };
    Ok(Options { spans: true, min_allocation_bytes: None, gpu, nvtx: arguments.nvtx })
}
