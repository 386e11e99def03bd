//! `tilewright bench model`: forward, backward and optimizer of whole Transformers.

use std::io::Write;

use candle_core::{Device, Tensor};
use clap::{Args, ValueEnum};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use super::wall::{Fitted, Times, check_room, fitted, release};
use crate::cli::model_options::{ModelOptions, device_info, model_device, peak};
use crate::cli::run::{Choice, device};
use crate::cli::{CliError, Result};
use crate::model::{Attention, Config, Fusion, Precision, Replay, Transformer};
use crate::optim::{AdamWOptions, Schedule};
use crate::params::no_grad;
use crate::report::{Axis, Bar, Cell, Column, Outputs, Plot, Report, Table};
use crate::train::{self, Learner, LearnerOptions, WholeStep};

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
    /// f32, tf32, bf16 or f16
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

/// A measurement, on its way to a table.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    size: String,
    context: usize,
    batch: usize,
    precision: Precision,
    attention: Attention,
    fusion: Fusion,
    mode: Mode,
    replay: bool,
    /// Why nothing was replayed, where it should have been.
    why_not: Option<String>,
    warmup: usize,
    /// Milliseconds of each measured step; none where it did not fit.
    step: Vec<f64>,
    forward: Vec<f64>,
    backward: Vec<f64>,
    optimizer: Vec<f64>,
    /// Most bytes that were allocated at once on a GPU.
    memory: Option<f64>,
    mfu: Option<f64>,
    failed: Option<String>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.check()?;
    let device = model_device(arguments.device)?;
    let cases = cases(arguments, &device)?;
    let rows = match (arguments.rows_of_warmup, arguments.warmup.as_slice()) {
        (Some(warmup), _) => {
            for row in measure_all(arguments, &device, &cases, warmup)? {
                let line = serde_json::to_string(&row).map_err(|error| CliError::Failure(error.to_string()))?;
                writeln!(out, "{line}")?;
            }
            return Ok(());
        }
        (None, []) => Vec::new(),
        (None, [warmup]) => measure_all(arguments, &device, &cases, *warmup)?,
        (None, several) => {
            let rows = several.iter().map(|&warmup| in_a_process_of_its_own(warmup));
            rows.collect::<Result<Vec<_>>>()?.concat()
        }
    };
    let name = device_info(&device)?.name;
    Ok(arguments.outputs.write(report(&rows, &name, arguments.steps.into()), out)?)
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

fn measure_all(arguments: &Arguments, device: &Device, cases: &[Case], warmup: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let ways = ways(arguments, device);
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
            let measured = measure(case, device, (mode, replay, apart), warmup, arguments.steps.into());
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

/// The times of a case.
pub(super) struct Parts {
    pub step: Times,
    pub forward: Times,
    pub backward: Times,
    pub optimizer: Times,
    pub memory: Option<f64>,
    pub why_not: Option<String>,
}

/// Bytes that a case takes at least: parameters with what training keeps for each, the logits, and what the blocks keep for backward.
/// Activations follow Korthikanti et al., "Reducing activation recomputation in large transformer models" (2023), section 4.1.
fn bytes_needed(config: &Config, batch: usize, mode: Mode) -> f64 {
    let element = config.precision.dtype().size_in_bytes() as f64;
    let tokens = (batch * config.context) as f64;
    let logits = 2.0 * 4.0 * tokens * config.vocabulary as f64;
    let scores = match config.attention {
        Attention::Naive => 2.0 * element * tokens * (config.context * config.heads) as f64,
        Attention::Tiled | Attention::Flash => 0.0,
    };
    let block = element * tokens * (5 * config.width + 3 * config.hidden) as f64 + scores;
    let kept = match (mode, config.checkpoint) {
        (Mode::Forward, _) | (_, true) => 2.0 * block,
        (_, false) => config.layers as f64 * block,
    };
    let state = if mode == Mode::TrainStep { 16.0 } else { 8.0 };
    state * config.parameters() as f64 + logits + kept
}

/// Times a case in one mode, replayed as a CUDA graph or not, and its parts by themselves or not.
///
/// # Errors
/// Lack of memory above all.
pub(super) fn measure(
    case: &Case,
    device: &Device,
    (mode, replay, apart): (Mode, bool, bool),
    warmup: usize,
    steps: usize,
) -> train::Result<Parts> {
    check_room(device, bytes_needed(&case.config, case.batch, mode))?;
    let on = crate::ops::memory::kernel_device(device)?;
    on.restart_peak_memory()?;
    let mut subject = Subject::new(case, device, mode, replay)?;
    device.synchronize()?;
    let mut unkept = Times::default();
    for _ in 0..warmup {
        unkept.take(device, || subject.step())?;
    }
    let mut step = Times::default();
    for _ in 0..steps {
        step.take(device, || subject.step())?;
    }
    let memory = on.peak_memory()?.map(|bytes| bytes as f64);
    let (mut forward, mut backward, mut optimizer) = Default::default();
    // Waiting between them costs time, which the whole step must not have.
    for _ in 0..if apart { steps } else { 0 } {
        subject.parts(device, [&mut forward, &mut backward, &mut optimizer])?;
    }
    Ok(Parts { step, forward, backward, optimizer, memory, why_not: subject.why_not().map(str::to_string) })
}

/// What is timed, with all that it needs.
struct Subject {
    model: Transformer,
    inputs: Tensor,
    targets: Tensor,
    steps: Steps,
}

/// What a step is.
enum Steps {
    Forward,
    ForwardBackward(Option<Replay>),
    Train(Box<Learner>, WholeStep),
}

impl Subject {
    fn new(case: &Case, device: &Device, mode: Mode, replay: bool) -> train::Result<Subject> {
        let model = Transformer::new(&case.config, device, 0)?;
        let (inputs, targets) = random_batch(&case.config, case.batch, device)?;
        let steps = match mode {
            Mode::Forward => Steps::Forward,
            Mode::ForwardBackward => Steps::ForwardBackward(replay.then(|| Replay::new(&model))),
            Mode::TrainStep => {
                let learner = Learner::new(model.params(), options())?;
                let whole = if replay { WholeStep::new(&learner) } else { WholeStep::one_by_one() };
                Steps::Train(Box::new(learner), whole)
            }
        };
        Ok(Subject { model, inputs, targets, steps })
    }

    /// Why nothing was replayed that should have been.
    fn why_not(&self) -> Option<&str> {
        match &self.steps {
            Steps::Forward | Steps::ForwardBackward(None) => None,
            Steps::ForwardBackward(Some(replay)) => replay.why_not(),
            Steps::Train(_, whole) => whole.why_not(),
        }
    }

    fn step(&mut self) -> train::Result<()> {
        let Subject { model, inputs, targets, steps } = self;
        match steps {
            Steps::Forward => drop(no_grad(|| model.loss(inputs, targets))?),
            Steps::ForwardBackward(replay) => {
                model.params().zero_grads()?;
                match replay {
                    Some(replay) => drop(replay.forward_backward(inputs, targets, 1.0)?),
                    None => drop(model.loss(inputs, targets)?.backward()?),
                }
            }
            Steps::Train(learner, whole) => {
                let windows = inputs.dim(0)?;
                let (announced, found) = whole.queue(model, learner, [inputs, targets], windows)?.wait()?;
                learner.settle(announced, found.numbers())?;
            }
        }
        Ok(())
    }

    /// A step with a wait after forward, backward and optimizer.
    fn parts(&mut self, device: &Device, [forward, backward, optimizer]: [&mut Times; 3]) -> train::Result<()> {
        let Subject { model, inputs, targets, steps } = self;
        model.params().zero_grads()?;
        let loss = forward.take(device, || Ok(model.loss(inputs, targets)?))?;
        backward.take(device, || Ok(loss.backward().map(drop)?))?;
        if let Steps::Train(learner, _) = steps {
            optimizer.take(device, || learner.update())?;
        }
        Ok(())
    }
}

fn options() -> LearnerOptions {
    LearnerOptions {
        adamw: AdamWOptions::default(),
        schedule: Schedule::constant(1e-4),
        weight_decay: 0.1,
        decay_embeddings: true,
        clip: Some(1.0),
    }
}

fn random_batch(config: &Config, batch: usize, device: &Device) -> train::Result<(Tensor, Tensor)> {
    let mut random = StdRng::seed_from_u64(0);
    let mut tokens = || -> candle_core::Result<Tensor> {
        let count = batch * config.context;
        let tokens: Vec<u32> = (0..count).map(|_| random.random_range(0..config.vocabulary as u32)).collect();
        Tensor::from_vec(tokens, (batch, config.context), device)
    };
    Ok((tokens()?, tokens()?))
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

fn report(rows: &[Row], device: &str, steps: usize) -> Report {
    let columns = [
        Column::text("size"),
        Column::integer("context"),
        Column::integer("batch"),
        Column::text("precision"),
        Column::text("attention"),
        Column::text("fusion"),
        Column::text("mode"),
        Column::text("replay"),
        Column::integer("warm-up"),
        Column::number("forward").unit("ms"),
        Column::number("backward").unit("ms"),
        Column::number("optimizer").unit("ms"),
        Column::number("step").unit("ms"),
        Column::number("median").unit("ms"),
        Column::number("rate").unit("tokens/s"),
        Column::number("MFU").unit("%").decimals(1),
        Column::number("peak memory").unit("GiB").decimals(2),
    ];
    let mut table = Table::new("model", "Time of a step", columns);
    for row in rows {
        let names = [row.size.clone(), row.precision.to_string(), row.attention.to_string(), row.fusion.to_string()];
        let [size, precision, attention, fusion] = names.map(Cell::from);
        let mut cells = vec![size, row.context.into(), row.batch.into(), precision, attention, fusion];
        let replay = match (row.replay, &row.why_not) {
            (false, _) => "no",
            (true, None) => "yes",
            (true, Some(_)) => "failed",
        };
        cells.extend([Cell::from(row.mode.name()), replay.into(), row.warmup.into()]);
        cells.extend(numbers(row));
        table.push(cells);
        if let Some(why) = &row.failed {
            table.notes.push(format!("{}, context {}, batch {}: {why}", row.size, row.context, row.batch));
        }
        if let Some(why) = row.why_not.as_ref().filter(|_| row.replay) {
            table
                .notes
                .push(format!("{}, context {}, batch {}: not replayed: {why}", row.size, row.context, row.batch));
        }
    }
    table.notes.push(format!(
        "On {device}. Mean ± standard deviation of {steps} steps, each waited for. Forward, backward and optimizer are \
         steps of their own, with a wait after each part; their kernels are started one by one. Forward goes from tokens to the loss; the \
         optimizer is clipping and AdamW."
    ));
    let mut report = Report::new("model", "Transformers, end to end").table(table);
    let bars: Vec<Bar> = rows.iter().filter_map(bar).collect();
    if bars.len() > 1 {
        report = report.plot(Plot::bars("model-step", "Time of a step", Axis::linear("ms"), bars));
    }
    report
}

fn numbers(row: &Row) -> [Cell; 8] {
    if row.failed.is_some() {
        let no = || Cell::OutOfMemory;
        return [no(), no(), no(), no(), no(), Cell::Empty, Cell::Empty, Cell::Empty];
    }
    let times = |samples: &[f64]| Times(samples.to_vec());
    let step = times(&row.step);
    let rate = step.mean_std().value().map(|ms| (row.batch * row.context) as f64 / (1e-3 * ms));
    let or_empty = |value: Option<f64>| value.map_or(Cell::Empty, Cell::Number);
    // Forward alone is the whole step.
    let forward = if row.mode == Mode::Forward { step.mean_std() } else { times(&row.forward).mean_std() };
    [
        forward,
        times(&row.backward).mean_std(),
        times(&row.optimizer).mean_std(),
        step.mean_std(),
        step.median(),
        or_empty(rate),
        or_empty(row.mfu.map(|mfu| 100.0 * mfu)),
        or_empty(row.memory.map(|bytes| bytes / (1u64 << 30) as f64)),
    ]
}

fn bar(row: &Row) -> Option<Bar> {
    let cell = Times(row.step.clone()).mean_std();
    let name = format!(
        "{} {} {} {} {} {} w{}",
        row.size,
        row.context,
        row.precision,
        row.attention,
        row.fusion,
        row.mode.name(),
        row.warmup
    ) + if row.replay { " replay" } else { "" };
    Some(Bar { name, group: row.mode.name().to_string(), value: cell.value()?, error: cell.deviation() })
}
