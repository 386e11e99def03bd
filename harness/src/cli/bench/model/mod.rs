//! `tilewright bench model`: forward, backward and optimizer of whole Transformers.
//!
//! Files in reading order: this one (what is asked for, and the order of measurements), `subject.rs` (what is timed), `report.rs`
//! (tables).

mod report;
mod subject;

use std::io::Write;

use candle_core::Device;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::wall::release;
use crate::cli::model_options::{ModelOptions, device_info, model_device, peak};
use crate::cli::run::{Choice, device};
use crate::cli::trial::{Fitted, fitted};
use crate::cli::{CliError, Result};
use crate::model::{Attention, Config, Fusion, Precision};
use crate::report::{Machine, Outputs, Report};
use report::{Row, report};
pub(super) use subject::{Kept, Parts, Plan, measure};

#[derive(Args)]
pub struct Arguments {
    /// Sizes of the assignment: small, medium, large, xl, 2.7B; without one, all of them on a GPU, and on the CPU a model that
    /// fits it
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    sizes: Vec<String>,
    /// Tokens of a window
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "128")]
    contexts: Vec<usize>,
    /// Windows of a step
    #[arg(long, value_name = "WINDOWS", value_delimiter = ',', default_value = "4")]
    batches: Vec<usize>,
    /// f32, tf32x3, tf32, bf16 or f16
    #[arg(long, value_delimiter = ',', default_value = "f32")]
    precisions: Vec<Precision>,
    /// naive, tiled or flash
    #[arg(long, value_delimiter = ',', default_value = "flash")]
    attentions: Vec<Attention>,
    /// none, ops or blocks; without it, blocks where attention is flash, else ops
    #[arg(long, value_delimiter = ',')]
    fusions: Vec<Fusion>,
    /// What is timed
    #[arg(long, value_enum, value_delimiter = ',', default_value = "train-step")]
    modes: Vec<Mode>,
    /// Whether steps are replayed as CUDA graphs: on, off, or both with a comma; on a GPU they are, as in training
    #[arg(long, value_enum, value_delimiter = ',')]
    replay: Vec<Switch>,
    /// Steps before the measured ones. Several, as in 0,1,2,5, are measured in a process of their own each, so that each begins cold
    #[arg(long, value_name = "STEPS", value_delimiter = ',', default_value = "5")]
    warmup: Vec<usize>,
    /// Steps that are measured
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// End warm-up, measured steps and steps in parts after so many seconds each, at most 86400, if there were three
    #[arg(long, value_name = "SECONDS", value_parser = crate::cli::numbers::seconds)]
    seconds: Option<f64>,
    /// Where to run: cpu, cuda or cuda:N; without it, where TILEWRIGHT_DEVICE says, else on a GPU if there is one
    #[arg(long, value_parser = device)]
    device: Option<Choice>,
    #[command(flatten)]
    model: Shape,
    #[command(flatten)]
    outputs: Outputs,
    /// Measure this warm-up only, and print rows for the process that started this one
    #[arg(long, hide = true, value_name = "STEPS")]
    rows_of_warmup: Option<usize>,
}

/// What differs from the named sizes in all models.
#[derive(Args)]
#[command(next_help_heading = "Model")]
struct Shape {
    #[arg(long)]
    layers: Option<usize>,
    #[arg(long)]
    width: Option<usize>,
    #[arg(long)]
    hidden: Option<usize>,
    #[arg(long)]
    heads: Option<usize>,
    /// Number of tokens that there are
    #[arg(long, default_value_t = 10_000)]
    vocab: usize,
    /// rms or layer
    #[arg(long)]
    norm: Option<crate::model::Norm>,
    /// Use the embedding as output head
    #[arg(long)]
    tied: bool,
    /// Keep only the inputs of blocks, and compute the rest again backward
    #[arg(long)]
    recompute: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    Off,
    On,
}

/// How much of a step is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// From tokens to the loss, keeping nothing for backward
    Forward,
    /// Forward, and back to all gradients
    ForwardBackward,
    /// Both, clipping and AdamW
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
    let machine = Machine::ask(arguments.outputs.commit.as_deref());
    let report = |rows: &[Row]| Report { machine: Some(machine.clone()), ..report(rows, &name) };
    let rows = match arguments.warmup.as_slice() {
        [] => Vec::new(),
        // Whoever ends a long measurement keeps what it has found by then.
        [warmup] => measure_all(arguments, &device, &cases, *warmup, &mut |rows| {
            if let Some(last) = rows.last().filter(|_| cases.len() > 1) {
                writeln!(out, "{}", last.in_words())?;
                out.flush()?;
            }
            arguments.outputs.write_files(&report(rows))?;
            Ok(())
        })?,
        several => {
            let rows = several.iter().map(|&warmup| in_a_process_of_its_own(warmup));
            rows.collect::<Result<Vec<_>>>()?.concat()
        }
    };
    Ok(arguments.outputs.write(report(&rows), out)?)
}

/// What is measured: a name for people, the model, and the windows of a step.
pub(super) struct Case {
    pub size: String,
    pub config: Config,
    pub batch: usize,
}

fn cases(arguments: &Arguments, device: &Device) -> Result<Vec<Case>> {
    let Shape { layers, width, hidden, heads, vocab, norm, tied, recompute } = arguments.model;
    let sizes: Vec<Option<String>> = match arguments.sizes.as_slice() {
        [] if device.is_cpu() || layers.or(width).or(hidden).or(heads).is_some() => vec![None],
        [] => crate::model::SIZES.iter().map(|(name, ..)| Some((*name).to_string())).collect(),
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
                                width,
                                hidden,
                                heads,
                                heads_kv: None,
                                norm,
                                attention: Some(attention),
                                fusion,
                                precision: Some(precision),
                                tied,
                                recompute,
                            };
                            let base = Config { context, vocabulary: vocab, ..Config::default() };
                            let config = options.config(base)?;
                            let size = config
                                .size_name()
                                .map_or_else(|| format!("{}×{}", config.layers, config.width), str::to_string);
                            cases.push(Case { size, config, batch });
                        }
                    }
                }
            }
        }
    }
    match arguments.batches.contains(&0) {
        true => Err(CliError::usage("a batch of 0 windows", "numbers from 1")),
        false => Ok(cases),
    }
}

/// Measures all cases, and shows after each one what there is by then.
fn measure_all(
    arguments: &Arguments,
    device: &Device,
    cases: &[Case],
    warmup: usize,
    show: &mut dyn FnMut(&[Row]) -> Result<()>,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut kept = Kept::default();
    let (ways, plan) =
        (ways(arguments, device), Plan { warmup, steps: arguments.steps.into(), seconds: arguments.seconds });
    for case in cases {
        let peak = peak(device, case.config.precision)?;
        for &(mode, replay, apart) in &ways {
            let row = Row {
                size: case.size.clone(),
                context: case.config.context,
                batch: case.batch,
                precision: case.config.precision,
                attention: case.config.attention,
                fusion: case.config.fusion,
                mode,
                replay,
                why_not: None,
                warmup,
                step: Vec::new(),
                forward: Vec::new(),
                backward: Vec::new(),
                optimizer: Vec::new(),
                memory: None,
                mfu: None,
                failed: None,
            };
            let measured = measure(case, device, (mode, replay, apart), &plan, &mut kept);
            rows.push(match fitted(measured)? {
                Fitted::No(why) => Row { failed: Some(why), ..row },
                Fitted::Yes(Parts { step, forward, backward, optimizer, memory, why_not }) => {
                    let seconds = 1e-3 * step.0.iter().sum::<f64>() / step.0.len() as f64;
                    let tokens = (case.batch * case.config.context) as f64;
                    // Backward has two products for each of forward's.
                    let share = if mode == Mode::Forward { 1.0 / 3.0 } else { 1.0 };
                    let flop = share * tokens * case.config.flops_per_token(case.config.context);
                    Row {
                        step: step.0,
                        forward: forward.0,
                        backward: backward.0,
                        optimizer: optimizer.0,
                        memory,
                        why_not,
                        mfu: Some(flop / seconds / peak),
                        ..row
                    }
                }
            });
            release(device);
            show(&rows)?;
        }
    }
    Ok(rows)
}

/// How each case is measured: mode, whether it is replayed, and whether its parts are timed, once for each mode.
fn ways(arguments: &Arguments, device: &Device) -> Vec<(Mode, bool, bool)> {
    let replay = match (arguments.replay.as_slice(), device.is_cpu()) {
        ([], true) => vec![false],
        ([], false) => vec![true],
        (given, _) => given.iter().map(|&switch| switch == Switch::On).collect(),
    };
    let mut ways = Vec::new();
    for &mode in &arguments.modes {
        match mode {
            // No graph is made of it, and it has no parts.
            Mode::Forward => ways.push((mode, false, false)),
            Mode::ForwardBackward | Mode::TrainStep => {
                ways.extend(replay.iter().enumerate().map(|(i, &replay)| (mode, replay, i == 0)));
            }
        }
    }
    ways
}

/// Starts this program again for one number of warm-up steps, and reads its rows.
fn in_a_process_of_its_own(warmup: usize) -> Result<Vec<Row>> {
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
