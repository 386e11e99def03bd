//! `tilewright memory`: profiles the memory of a training step from a trace of its allocations.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use tilewright::trace::{Options, Phase, Recording, Trace};
use tilewright_candle::memory::kernel_device;

use super::oom_probe::{MemoryOutcome, catch_oom, expect_memory};
use super::profile::described;
use super::step::{Step, StepOptions, Work};
use super::{CliError, Result};
use crate::files;
use crate::memory::residual::STREAM_BYTES;
use crate::memory::snapshot::Snapshot;
use crate::memory::{Timeline, by_phase, largest, timeline_plot};
use crate::model::Config;
use crate::profile::{STEP, span};
use crate::report::{Cell, Column, Outputs, Part, Report, Table};

#[derive(Args)]
pub struct Arguments {
    /// Context lengths (tokens per sequence), separated by commas; details are reported for the last one that fits
    #[arg(long, value_delimiter = ',', default_value = "128", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Vec<u32>,
    /// Parts of a step to run, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "forward,train-step")]
    pub work: Vec<Work>,
    /// Smallest allocation, in bytes, that is recorded as a separate event
    #[arg(long, alias = "from-bytes", value_name = "BYTES", default_value_t = 1024)]
    pub min_bytes: usize,
    /// Number of rows in the table of largest allocations
    #[arg(long, default_value_t = 12)]
    pub top: usize,
    /// Write a snapshot of the last part of a step for PyTorch's memory viewer (pytorch.org/memory_viz)
    #[arg(long, value_name = "FILE")]
    pub snapshot: Option<PathBuf>,
    #[command(flatten)]
    pub step: StepOptions,
    #[command(flatten)]
    pub outputs: Outputs,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.check_with(arguments.snapshot.iter().map(|path| ("--snapshot", path)))?;
    let (report, snapshots) = memory(arguments)?;
    arguments.outputs.write(report, out)?;
    let folder = arguments.outputs.out.as_ref();
    let mut files: Vec<(PathBuf, &[u8])> = Vec::new();
    for (work, pickle) in &snapshots {
        files.extend(folder.map(|folder| (folder.join(format!("memory-{}.pickle", work.name())), pickle.as_slice())));
    }
    if let (Some(path), Some((_, pickle))) = (&arguments.snapshot, snapshots.last()) {
        files.push((path.clone(), pickle));
    }
    for (path, bytes) in files {
        files::replace(&path, |file| file.write_all(bytes)).map_err(|error| CliError::file("write", &path, error))?;
        writeln!(out, "wrote {}", path.display())?;
    }
    Ok(())
}

/// A part of a step that fits into memory, with the trace of its allocations.
struct Recorded {
    work: Work,
    config: Config,
    trace: Trace,
}

/// A pickled snapshot of each measured part of a step.
type Snapshots = Vec<(Work, Vec<u8>)>;

/// Measures each part of a step at each context length, and returns the report and the snapshots.
///
/// # Errors
/// An unknown model. A model that does not fit into memory is a row of the table.
pub fn memory(arguments: &Arguments) -> Result<(Report, Snapshots)> {
    let device = arguments.step.device()?;
    let peaks = arguments.work.iter().map(|work| {
        let name = format!("peak of {}", work.name());
        Column::number(&name).unit("MiB").decimals(2)
    });
    let mut table = Table::new(
        "memory-contexts",
        "Peak memory",
        [Column::integer("context"), Column::number("parameters").unit("MiB").decimals(2)].into_iter().chain(peaks),
    )
    .note(
        "Peaks include everything: parameters, gradients if there is a backward pass, optimizer state if there is one, \
         and what a step allocates.",
    );
    let mut details: Vec<Recorded> = Vec::new();
    let mut oom_notes = Vec::new();
    for &context in &arguments.context {
        let config = arguments.step.config(context as usize)?;
        let mut row = vec![Cell::from(u64::from(context)), Cell::from(mib(4 * config.parameters() as u64))];
        let mut found = Vec::new();
        for &work in &arguments.work {
            let recorded = expect_memory(&device, arguments.step.least_bytes(&config, work))
                .and_then(|()| record(arguments, &config, &device, work).map_err(to_train_error));
            match catch_oom(recorded)? {
                MemoryOutcome::Fits(trace) => {
                    row.push(Cell::from(mib(Timeline::new(&trace).peak().bytes)));
                    found.push(Recorded { work, config: config.clone(), trace });
                }
                MemoryOutcome::OutOfMemory(why) => {
                    oom_notes.push(format!("context {context}, {}: {why}", work.name()));
                    row.push(Cell::OutOfMemory);
                }
            }
        }
        table.push(row);
        if !found.is_empty() {
            details = found;
        }
    }
    table = oom_notes.into_iter().fold(table, Table::note);
    let last = details.last().map(|recorded| recorded.config.clone());
    let Some(config) = last else {
        return Ok((Report::new("memory", "Memory").table(table), Vec::new()));
    };
    let batch = arguments.step.batch as usize;
    let sizes = arguments.step.sizes(&config);
    let mut report = Report::new("memory", &format!("Memory of {}", described(&config, batch)))
        .table(table)
        .text(format!(
            "The residual stream of this model has batch × context × d_model elements of {} bytes: {} · {} · {} · {} = \
             {:.3} MiB.",
            STREAM_BYTES,
            sizes.batch,
            sizes.context,
            sizes.d_model,
            STREAM_BYTES,
            sizes.residual_mib()
        ))
        .table(sizes.table());
    let mut snapshots = Vec::new();
    for Recorded { work, trace, .. } in &details {
        let timeline = Timeline::new(trace);
        report.parts.extend(parts(*work, &timeline, arguments.top));
        let pickle = Snapshot::new(&timeline).to_pickle();
        snapshots
            .push((*work, pickle.map_err(|error| CliError::Failure(format!("cannot create a snapshot: {error}")))?));
    }
    Ok((report, snapshots))
}

/// Returns the tables and the plot of one part of a step, with names that include that of the part.
fn parts(work: Work, timeline: &Timeline<'_>, top: usize) -> Vec<Part> {
    let named = |mut table: Table| {
        table.name = format!("{}-{}", table.name, work.name());
        table.title = format!("{}: {}", work.name(), table.title);
        Part::Table(table)
    };
    let mut plot = timeline_plot(timeline);
    plot.name = format!("{}-{}", plot.name, work.name());
    plot.title = format!("{}: {}", work.name(), plot.title);
    vec![named(by_phase(timeline)), named(largest(timeline, top)), Part::Plot(plot)]
}

/// Converts a command's error to a training error, for [`catch_oom`].
fn to_train_error(error: CliError) -> crate::train::Error {
    let text = if let CliError::Failure(text) = error { text } else { error.to_string() };
    candle_core::Error::Msg(text).into()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Records the construction of a model and one step. An earlier step, outside of the recording, compiles kernels and
/// fills memory pools.
fn record(arguments: &Arguments, config: &Config, device: &candle_core::Device, work: Work) -> Result<Trace> {
    Step::new(&arguments.step, config, device, work, None)?.run()?;
    device.synchronize()?;
    let gpu = if device.is_cuda() { Some(kernel_device(device)?.clone()) } else { None };
    let options = Options { spans: true, min_allocation_bytes: Some(arguments.min_bytes), gpu, nvtx: false };
    let recording = Recording::start(options)?;
    let mut step = Step::new(&arguments.step, config, device, work, None)?;
    {
        let _span = span(STEP);
        step.run()?;
    }
    let trace = recording.finish()?;
    check(&trace)?;
    Ok(trace)
}

/// Fails if the recording has no allocation in the forward pass.
fn check(trace: &Trace) -> Result<()> {
    let timeline = Timeline::new(trace);
    match timeline.peak_of(Phase::Forward) {
        Some(peak) if peak.bytes > 0 => Ok(()),
        _ => Err(CliError::Failure(
            "no allocation was recorded: this program does not use tilewright's counting allocator".to_string(),
        )),
    }
}
