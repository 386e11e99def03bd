//! `tilewright bench model`: times forward, backward and optimizer of whole Transformers.
//!
//! Files in reading order: this one (arguments, and the order of measurements), `subject.rs` (what is timed),
//! `report.rs` (tables).

mod report;
mod subject;

use std::io::Write;

use candle_core::Device;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::wall_time::release_memory;
use crate::cli::model_options::{ModelOptions, device_info, model_device, peak_flops};
use crate::cli::oom_probe::{MemoryOutcome, catch_oom};
use crate::cli::{CliError, Result};
use crate::model::{Attention, Config, Fusion, Precision};
use crate::report::{Machine, Outputs, Report};
use report::{Row, report};
pub(super) use subject::{ParamCache, Plan, StepTimes, measure};
use tilewright_cli::device::{self, DeviceArg};

#[derive(Args)]
pub struct Arguments {
    /// Named model sizes: small, medium, large, xl, 2.7B. Default: all of them, or a small model on the CPU
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    sizes: Vec<String>,
    /// Context lengths: tokens per sequence
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "128")]
    contexts: Vec<usize>,
    /// Batch sizes: sequences per step
    #[arg(long, value_name = "SEQUENCES", value_delimiter = ',', default_value = "4")]
    batches: Vec<usize>,
    /// Precisions of matmuls: f32, tf32x3, tf32, bf16 or f16
    #[arg(long, value_delimiter = ',', default_value = "f32")]
    precisions: Vec<Precision>,
    /// Attention implementations: naive, tiled or flash
    #[arg(long, value_delimiter = ',', default_value = "flash")]
    attentions: Vec<Attention>,
    /// Fusion levels: none, ops or blocks. Default: blocks with flash attention, else ops
    #[arg(long, value_delimiter = ',')]
    fusions: Vec<Fusion>,
    /// Which part of a step to time; several are separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "train-step")]
    modes: Vec<Mode>,
    /// Replay steps as CUDA graphs: on, off, or off,on for both. Default: on for a GPU, as in training
    #[arg(long, alias = "replay", value_enum, value_delimiter = ',')]
    cuda_graph: Vec<Switch>,
    /// Number of warm-up steps. Each of several values, as in 0,1,2,5, is measured in a separate process, so that each
    /// starts cold
    #[arg(long, value_name = "STEPS", value_delimiter = ',', default_value = "5")]
    warmup: Vec<usize>,
    /// Number of measured steps
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// Time limit of warm-up, of measured steps and of steps timed by phase, in seconds each, at most 86400; at least
    /// three steps run
    #[arg(long, value_name = "SECONDS", value_parser = crate::cli::value_parsers::seconds)]
    seconds: Option<f64>,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    #[command(flatten)]
    model: Shape,
    #[command(flatten)]
    outputs: Outputs,
    /// Measure with this number of warm-up steps only, and print the rows for the parent process
    #[arg(long, hide = true, value_name = "STEPS")]
    rows_of_warmup: Option<usize>,
}

/// Hyperparameters that override those of the named sizes.
#[derive(Args)]
#[command(next_help_heading = "Model")]
struct Shape {
    #[arg(long)]
    layers: Option<usize>,
    #[arg(long, alias = "width")]
    d_model: Option<usize>,
    #[arg(long, alias = "hidden")]
    d_ff: Option<usize>,
    #[arg(long)]
    heads: Option<usize>,
    /// Vocabulary size
    #[arg(long, alias = "vocab", default_value_t = 10_000)]
    vocab_size: usize,
    /// Normalization: rms or layer
    #[arg(long)]
    norm: Option<crate::model::Norm>,
    /// Tie the embedding and the output head
    #[arg(long)]
    tied: bool,
    /// Activation checkpointing: keep only the inputs of blocks, and recompute the rest in the backward pass
    #[arg(long)]
    recompute: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    Off,
    On,
}

/// The part of a training step that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Forward pass to the loss, with nothing saved for backward
    Forward,
    /// Forward and backward pass
    ForwardBackward,
    /// Forward pass, backward pass, gradient clipping and AdamW
    TrainStep,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Mode::Forward => "forward",
            Mode::ForwardBackward => "forward-backward",
            Mode::TrainStep => "train-step",
        }
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.check()?;
    let device = model_device(arguments.device)?;
    let cases = cases(arguments, &device)?;
    let failure = |error: serde_json::Error| CliError::Failure(error.to_string());
    if let Some(warmup) = arguments.rows_of_warmup {
        return measure_all(arguments, &device, &cases, warmup, &mut |rows| {
            let last = rows.last().map(serde_json::to_string).transpose().map_err(failure)?;
            writeln!(out, "{}", last.unwrap_or_default())?;
            Ok(out.flush()?)
        })
        .map(drop);
    }
    let name = device_info(&device)?.name;
    let machine = Machine::probe(arguments.outputs.commit.as_deref());
    let report = |rows: &[Row]| Report { machine: Some(machine.clone()), ..report(rows, &name) };
    let rows = match arguments.warmup.as_slice() {
        [] => Vec::new(),
        // Rows are printed and written as they are measured, so that an interrupted run keeps its rows.
        [warmup] => measure_all(arguments, &device, &cases, *warmup, &mut |rows| {
            if let Some(last) = rows.last().filter(|_| cases.len() > 1) {
                writeln!(out, "{}", last.summary_line())?;
                out.flush()?;
            }
            arguments.outputs.write_files(&report(rows))?;
            Ok(())
        })?,
        several => {
            let rows = several.iter().map(|&warmup| run_in_subprocess(warmup));
            rows.collect::<Result<Vec<_>>>()?.concat()
        }
    };
    Ok(arguments.outputs.write(report(&rows), out)?)
}

/// One measurement: the name of the model, its configuration, and the batch size.
pub(super) struct Case {
    pub size: String,
    pub config: Config,
    pub batch: usize,
}

fn cases(arguments: &Arguments, device: &Device) -> Result<Vec<Case>> {
    let Shape { layers, d_model, d_ff, heads, vocab_size, norm, tied, recompute } = arguments.model;
    let sizes: Vec<Option<String>> = match arguments.sizes.as_slice() {
        [] if device.is_cpu() || layers.or(d_model).or(d_ff).or(heads).is_some() => vec![None],
        [] => crate::model::SIZES.iter().map(|size| Some(size.name.to_string())).collect(),
        sizes => sizes.iter().cloned().map(Some).collect(),
    };
    let mut cases = Vec::new();
    for size in &sizes {
        for &batch in &arguments.batches {
            for &context in &arguments.contexts {
                for &precision in &arguments.precisions {
                    for &attention in &arguments.attentions {
                        let fusions: Vec<Option<Fusion>> = match arguments.fusions.as_slice() {
                            [] => vec![None],
                            fusions => fusions.iter().copied().map(Some).collect(),
                        };
                        for fusion in fusions {
                            let options = ModelOptions {
                                size: size.clone(),
                                layers,
                                d_model,
                                d_ff,
                                heads,
                                heads_kv: None,
                                norm,
                                attention: Some(attention),
                                fusion,
                                precision: Some(precision),
                                tied,
                                recompute,
                            };
                            let base = Config { context, vocabulary: vocab_size, ..Config::default() };
                            let config = options.config(base)?;
                            let size = config
                                .size_name()
                                .map_or_else(|| format!("{}×{}", config.layers, config.d_model), str::to_string);
                            cases.push(Case { size, config, batch });
                        }
                    }
                }
            }
        }
    }
    match arguments.batches.contains(&0) {
        true => Err(CliError::usage("--batches has a batch of 0 sequences", "batch sizes must be at least 1")),
        false => Ok(cases),
    }
}

/// Measures all cases, and calls `show` with all rows after each one.
fn measure_all(
    arguments: &Arguments,
    device: &Device,
    cases: &[Case],
    warmup: usize,
    show: &mut dyn FnMut(&[Row]) -> Result<()>,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut param_cache = ParamCache::default();
    let (variants, plan) =
        (variants(arguments, device), Plan { warmup, steps: arguments.steps.into(), seconds: arguments.seconds });
    for case in cases {
        let peak = peak_flops(device, case.config.precision)?;
        for &variant in &variants {
            let Variant { mode, cuda_graph, .. } = variant;
            let row = Row {
                size: case.size.clone(),
                context: case.config.context,
                batch: case.batch,
                precision: case.config.precision,
                attention: case.config.attention,
                fusion: case.config.fusion,
                mode,
                cuda_graph,
                fallback_reason: None,
                warmup,
                step: Vec::new(),
                forward: Vec::new(),
                backward: Vec::new(),
                optimizer: Vec::new(),
                memory: None,
                mfu: None,
                failed: None,
            };
            let measured = measure(case, device, variant, &plan, &mut param_cache);
            rows.push(match catch_oom(measured)? {
                MemoryOutcome::OutOfMemory(why) => Row { failed: Some(why), ..row },
                MemoryOutcome::Fits(StepTimes { step, forward, backward, optimizer, memory, fallback_reason }) => {
                    let seconds = 1e-3 * step.0.iter().sum::<f64>() / step.0.len() as f64;
                    let tokens = (case.batch * case.config.context) as f64;
                    // Backward has two matmuls for each matmul of forward.
                    let share = if mode == Mode::Forward { 1.0 / 3.0 } else { 1.0 };
                    let flop = share * tokens * case.config.flops_per_token(case.config.context);
                    Row {
                        step: step.0,
                        forward: forward.0,
                        backward: backward.0,
                        optimizer: optimizer.0,
                        memory,
                        fallback_reason,
                        mfu: Some(flop / seconds / peak),
                        ..row
                    }
                }
            });
            release_memory(device);
            show(&rows)?;
        }
    }
    Ok(rows)
}

/// How a case is measured.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub mode: Mode,
    /// Whether steps are replayed as a CUDA graph.
    pub cuda_graph: bool,
    /// Whether phases are timed too, in separate steps.
    pub time_phases: bool,
}

/// Returns the variants of each case. Phases are timed once per mode.
fn variants(arguments: &Arguments, device: &Device) -> Vec<Variant> {
    let cuda_graph = match (arguments.cuda_graph.as_slice(), device.is_cpu()) {
        ([], true) => vec![false],
        ([], false) => vec![true],
        (given, _) => given.iter().map(|&switch| switch == Switch::On).collect(),
    };
    let mut variants = Vec::new();
    for &mode in &arguments.modes {
        match mode {
            // The forward pass is not captured as a graph, and has one phase.
            Mode::Forward => variants.push(Variant { mode, cuda_graph: false, time_phases: false }),
            Mode::ForwardBackward | Mode::TrainStep => {
                let variant = |(i, &cuda_graph)| Variant { mode, cuda_graph, time_phases: i == 0 };
                variants.extend(cuda_graph.iter().enumerate().map(variant));
            }
        }
    }
    variants
}

/// Runs this program in a subprocess for one number of warm-up steps, and reads its rows.
fn run_in_subprocess(warmup: usize) -> Result<Vec<Row>> {
    let failure = |error: &dyn std::fmt::Display| CliError::Failure(format!("cannot measure a cold start: {error}"));
    let program = std::env::current_exe().map_err(|error| failure(&error))?;
    let output = std::process::Command::new(program)
        .args(std::env::args_os().skip(1))
        .args(["--rows-of-warmup", &warmup.to_string()])
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|error| failure(&error))?;
    if !output.status.success() {
        return Err(CliError::Failure(format!("the measurement with {warmup} steps of warm-up failed")));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).map_err(|error| failure(&error))).collect()
}
