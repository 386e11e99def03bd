//! `tilewright train`: trains a Transformer on a text, from scratch or from a checkpoint.

mod plan;
mod progress;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use candle_core::Device;
use clap::Args;

use self::plan::Plan;
use self::progress::Progress;
use super::device::{self, DeviceArg};
use super::model_options::{ModelOptions, device_info, model_device, peak_flops};
use super::ranks::RankOptions;
use super::step::{options_for_less, words};
use super::value_parsers;
use super::{CliError, Result};
use crate::dist::comm::{Communicator, Dtype};
use crate::dist::sharded::Mode;
use crate::escape::printable;
use crate::model::{Config, StepBytes, StepKind, Transformer};
use crate::signals::{self, StopSignal};
use crate::train::run::{CHECKPOINT, CURVE, LOG};
use crate::train::{self, DataParallelOptions, Ending, LanguageModel, Run, RunFolder, RunSetup, keep};

#[derive(Args)]
pub struct Arguments {
    /// Training text, a UTF-8 file. Default: the book that ships
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Maximum vocabulary size of the BPE tokenizer that is trained on the text. Default: 1024, or 10000 with --size
    #[arg(long, alias = "vocab", value_name = "N")]
    vocab_size: Option<usize>,
    /// Folder of the run, for checkpoints, log and loss curve
    #[arg(long, value_name = "DIR", default_value = "tilewright-run")]
    out: PathBuf,
    /// Resume from the checkpoint in the folder. Options that are not given keep their values, except --device,
    /// --minutes and the machine-dependent rank options (--nccl-ctas, --copy-engines, --reserve-sms)
    #[arg(long)]
    resume: bool,
    /// Write the initial state and all batches to this folder, so that another implementation can reproduce the steps
    #[arg(long, value_name = "DIR")]
    export: Option<PathBuf>,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    steps: StepArgs,
    #[command(flatten)]
    rates: OptimizerArgs,
    #[command(flatten)]
    ranks: RankOptions,
}

/// Options of the training loop.
#[derive(Args)]
#[command(next_help_heading = "Steps")]
struct StepArgs {
    /// Context length: tokens per sequence. Default: 128
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Batch size: sequences per step. Default: 16
    #[arg(long, value_name = "SEQUENCES")]
    batch: Option<usize>,
    /// Micro-batch size for gradient accumulation: sequences that run at a time, if a whole batch does not fit into
    /// memory
    #[arg(long, value_name = "SEQUENCES")]
    micro_batch: Option<usize>,
    /// Total number of steps. Default: 500
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Time limit in minutes, at most 10⁷; the run saves its state and stops
    #[arg(long, value_name = "MINUTES", value_parser = value_parsers::minutes)]
    minutes: Option<Duration>,
    /// Steps between evaluations on the last tenth of the text; 0 evaluates at the end only. Default: 100
    #[arg(long, value_name = "STEPS")]
    evaluate_every: Option<u64>,
    /// Maximum number of sequences per evaluation. Default: 64
    #[arg(long, alias = "evaluate-windows", value_name = "SEQUENCES")]
    evaluate_sequences: Option<usize>,
    /// Steps between checkpoints; 0 saves at the end only. Default: 100, or more if saving would take over 5 % of the
    /// time
    #[arg(long, value_name = "STEPS")]
    save_every: Option<u64>,
    /// Number of newest checkpoints to keep; 0 for all. Default: 2
    #[arg(long, value_name = "N")]
    keep_last: Option<usize>,
    /// Number of checkpoints with the lowest validation loss to keep in addition. Default: 1
    #[arg(long, value_name = "N")]
    keep_best: Option<usize>,
    /// Seed of the initialization and of the order of sequences. Default: 0
    #[arg(long)]
    seed: Option<u64>,
}

/// Options of the optimizer.
#[derive(Args)]
#[command(next_help_heading = "Optimizer (AdamW)")]
struct OptimizerArgs {
    /// Peak learning rate. Default: 0.003, or 0.0006 with --size
    #[arg(long, value_name = "RATE", value_parser = value_parsers::non_negative)]
    lr: Option<f64>,
    /// Final learning rate. Default: a tenth of the peak
    #[arg(long, value_name = "RATE", value_parser = value_parsers::non_negative)]
    min_lr: Option<f64>,
    /// Warm-up steps of the learning rate. Default: 5 % of all steps, at most 2000
    #[arg(long, value_name = "STEPS")]
    warmup: Option<u64>,
    /// Learning-rate schedule of a resumed run with another number of --steps
    #[arg(long, value_enum, value_name = "PLAN")]
    schedule: Option<SchedulePlan>,
    /// Weight decay of matrices. Default: 0.1
    #[arg(long, value_name = "LAMBDA", value_parser = value_parsers::non_negative)]
    weight_decay: Option<f64>,
    /// Apply weight decay to embeddings too
    #[arg(long)]
    decay_embeddings: bool,
    /// AdamW β₁. Default: 0.9
    #[arg(long, value_parser = value_parsers::decay)]
    beta1: Option<f64>,
    /// AdamW β₂. Default: 0.95
    #[arg(long, value_parser = value_parsers::decay)]
    beta2: Option<f64>,
    /// AdamW ε. Default: 1e-8
    #[arg(long, value_parser = value_parsers::non_negative)]
    eps: Option<f64>,
    /// Gradient clipping: maximum global norm of the gradients; 0 disables it. Default: 1
    #[arg(long, value_name = "NORM", value_parser = value_parsers::non_negative)]
    clip: Option<f64>,
}

/// The learning-rate schedule of a resumed run with another number of `--steps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SchedulePlan {
    /// The original schedule: the rate decays until the original last step, and stays at --min-lr afterwards
    Keep,
    /// The schedule for the new --steps: the rate decays until the new last step
    Extend,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let device = model_device(arguments.device)?;
    let Some(comm) = arguments.ranks.connect(&device)? else { return train(arguments, device, None, out) };
    let mut sink = std::io::sink();
    let outcome = train(arguments, device, Some(&comm), if comm.rank() == 0 { out } else { &mut sink });
    if let Err(error) = &outcome
        && !matches!(error, CliError::Stopped(_))
    {
        // Abort the other ranks, so that they do not wait for this one.
        comm.abort(&error.to_string());
    }
    outcome
}

fn train(arguments: &Arguments, device: Device, comm: Option<&Arc<Communicator>>, out: &mut dyn Write) -> Result<()> {
    let is_rank0 = comm.is_none_or(|comm| comm.rank() == 0);
    // Locked before the checkpoint is read, because another run might replace it.
    let lock = is_rank0.then(|| RunFolder::lock(&arguments.out)).transpose();
    let lock = lock.map_err(|error| CliError::Failure(error.to_string()))?;
    let Plan { config, options, data, checkpoint } = plan::plan(arguments)?;
    let before = checkpoint.as_ref().and_then(|checkpoint| checkpoint.header.ranks);
    let data_parallel = comm.map(|comm| arguments.ranks.data_parallel_options(comm.clone(), before));
    let data_parallel = data_parallel.as_ref();
    let name = device_info(&device)?.name;
    let millions = config.parameters() as f64 / 1e6;
    writeln!(out, "text: {}, {} tokens of {}", printable(&data.name), data.tokens.len(), config.vocabulary)?;
    writeln!(out, "model: {millions:.2} M parameters, {}, on {name}", config.precision)?;
    if let Some(DataParallelOptions { comm, ddp, shard }) = data_parallel {
        let state = shard.map_or("replicated", |mode| if mode == Mode::Zero1 { "ZeRO-1" } else { "sharded" });
        let (world, name) = (comm.world(), comm.backend());
        writeln!(out, "ranks: {world} over {name}, gradients {}, optimizer state {state}", ddp.form.name())?;
    }
    out.flush()?;

    let needs = Needs::of(&config, &options, data_parallel);
    let fail = |error: train::Error| needs.explain(error, &device, &options, &config);
    needs.expect(&device).map_err(fail)?;
    let model = Transformer::new(&config, &device, options.seed).map_err(|error| fail(error.into()))?;
    let (folder, from) = (arguments.out.as_path(), checkpoint.as_ref());
    let run = Run::begin_with(RunSetup { model: &model, data: &data, options, folder, from, data_parallel, lock });
    let mut run = run.map_err(|error| match error.is_checkpoint_error() && arguments.resume {
        true => plan::unusable(&arguments.out, error),
        false => fail(error),
    })?;
    // The checkpoint may be large and is not needed any more.
    drop(checkpoint);
    let completed = run.trainer().step();
    if completed >= options.steps {
        return Err(CliError::usage(
            format!("the run has completed {completed} of {} steps", options.steps),
            "give a larger total with --steps",
        ));
    }
    if let Some(folder) = &arguments.export {
        if data_parallel.is_some() {
            return Err(CliError::usage(
                "--export does not support several ranks",
                "omit --export, or start one process",
            ));
        }
        run.export(folder).map_err(fail)?;
        writeln!(out, "wrote {}", folder.display())?;
    }
    run.peak = Some(peak_flops(&device, config.precision)?);
    run.time_limit = arguments.steps.minutes;
    let stop = stop_on_signals(is_rank0)?;
    let uniform = (model.vocabulary() as f64).ln();
    match completed {
        0 => writeln!(out, "the loss of uniform predictions is ln({}) = {uniform:.3}", model.vocabulary())?,
        step => {
            let schedule = options.trainer.schedule;
            let (rate, end) = (schedule.rate(step + 1), schedule.rate(options.steps));
            writeln!(
                out,
                "resuming after step {step}, with a learning rate of {rate:.3e}; {end:.3e} in step {}",
                options.steps
            )?;
            print_best(&arguments.out, out)?;
        }
    }
    out.flush()?;
    let mut progress = Progress::new(completed, options.steps, is_rank0);
    let ending = run.train(&stop.asked, &mut progress);
    progress.finish();
    let ending = ending.map_err(fail)?;
    let step = run.trainer().step();
    writeln!(out, "step {step}: {}", progress.summary())?;
    // A failure to draw the loss curve does not prevent a stopped run from being resumed.
    let drawn = run.plot_loss().map_err(fail);
    for file in [CHECKPOINT, LOG, CURVE].iter().take(if drawn.is_ok() { 3 } else { 2 }) {
        writeln!(out, "wrote {}", arguments.out.join(file).display())?;
    }
    print_best(&arguments.out, out)?;
    match ending {
        Ending::Done => {
            writeln!(out, "`tilewright generate {}` generates text from this checkpoint", arguments.out.display())?
        }
        Ending::OutOfTime => writeln!(out, "time limit reached; --resume continues the run")?,
        Ending::Stopped => {
            // The signal may have reached another rank only.
            let by = match stop.signal.load(Ordering::Relaxed) {
                0 => String::new(),
                signal => format!(" by {}", signals::name(signal)),
            };
            let undrawn = drawn.err().map_or_else(String::new, |error| format!("{error}\n"));
            return Err(CliError::Stopped(format!(
                "{undrawn}stopped{by} after step {step}, with the state saved; --resume continues the run"
            )));
        }
    }
    drawn
}

/// Lower bound of the memory of a step of this rank, in bytes.
struct Needs {
    step: StepBytes,
    /// In host memory: inputs and targets of the batch, four bytes per token each, held twice.
    tokens: f64,
    /// Sequences per micro-batch of this rank.
    sequences: usize,
}

impl Needs {
    /// Computes the bound for this rank's share of the batch.
    fn of(config: &Config, options: &train::RunOptions, data_parallel: Option<&DataParallelOptions>) -> Needs {
        let world = data_parallel.map_or(1, |data_parallel| data_parallel.comm.world());
        let batch = options.batch.div_ceil(world);
        let sequences = options.micro_batch.min(batch);
        let config = Config { context: options.context, ..config.clone() };
        // Among several ranks, gradients are kept in bf16 only if they are communicated in bf16 and nothing is sharded.
        let grads_stay_bf16 = data_parallel.is_none_or(|data_parallel| {
            data_parallel.ddp.comm_dtype == Some(Dtype::Bf16) && data_parallel.shard.is_none()
        });
        let micro_batches = batch.div_ceil(sequences.max(1)).max(if grads_stay_bf16 { 1 } else { 2 });
        let mut step = config.step_bytes(sequences, micro_batches, StepKind::TrainStep);
        if data_parallel.is_some_and(|data_parallel| data_parallel.shard.is_some()) {
            step.moments /= world as f64;
        }
        Needs { step, tokens: 16.0 * batch as f64 * options.context as f64, sequences }
    }

    /// Checks that the host has memory for the tokens of a batch, and on the CPU also for a step.
    ///
    /// # Errors
    /// Out of memory.
    fn expect(&self, device: &Device) -> train::Result<()> {
        let on_host = if device.is_cpu() { self.step.total() } else { 0.0 };
        Ok(tilewright::check_host_memory(on_host + self.tokens)?)
    }

    /// Converts a training error to a command's error. An out-of-memory error also lists the memory of a step, and the
    /// options that reduce it.
    fn explain(&self, error: train::Error, device: &Device, options: &train::RunOptions, config: &Config) -> CliError {
        if !error.is_out_of_memory() {
            return CliError::Failure(error.to_string());
        }
        let gib = |bytes: f64| format!("{:.2} GiB", bytes / (1u64 << 30) as f64);
        let on = tilewright_candle::memory::kernel_device(device).ok();
        let free = on.and_then(|device| device.free_and_total_memory().ok().flatten());
        let free = free.map(|(free, total)| {
            format!("\n  {} of {} on the device are free now", gib(free as f64), gib(total as f64))
        });
        let StepBytes { weights, gradients, moments, activations } = self.step;
        let mut remedies = Vec::new();
        if self.tokens > self.step.total() {
            remedies.push("a smaller --batch".to_string());
        }
        if self.sequences > 1 {
            remedies.push(format!("--micro-batch {} (the batch size does not change)", self.sequences / 2));
        }
        remedies.extend(options_for_less(config));
        remedies.extend(["a smaller --context", "a smaller model"].map(str::to_string));
        CliError::Failure(format!(
            "{}{}\n  a step needs at least {}: parameters {}, gradients {}, optimizer state {}, activations of \
             {} × {} tokens {}, and the tokens of the batch {}\n  help: use {}",
            error.out_of_memory_text(),
            free.unwrap_or_default(),
            gib(self.step.total() + self.tokens),
            gib(weights),
            gib(gradients),
            gib(moments),
            self.sequences,
            options.context,
            gib(activations),
            gib(self.tokens),
            words(&remedies),
        ))
    }
}

/// Prints which of the folder's checkpoints has the lowest validation loss, if any has been evaluated.
fn print_best(folder: &std::path::Path, out: &mut dyn Write) -> Result<()> {
    let Some(keep::BestCheckpoint { name, step, loss }) = keep::best(folder) else { return Ok(()) };
    writeln!(out, "the best checkpoint is {name}, of step {step}, with a validation loss of {loss:.3}")?;
    Ok(())
}

/// A request by a signal to stop the run.
#[derive(Default)]
struct Stop {
    asked: AtomicBool,
    /// The first signal; 0 for none.
    signal: AtomicI32,
}

/// Installs a handler: the first signal requests a stop, the second one terminates the program immediately. Only rank 0
/// prints a message.
fn stop_on_signals(is_rank0: bool) -> Result<Arc<Stop>> {
    let stop = Arc::new(Stop::default());
    let request = stop.clone();
    crate::cli::on_signals(move |meaning| match meaning {
        StopSignal::Stop(signal) => {
            request.signal.store(signal, Ordering::Relaxed);
            request.asked.store(true, Ordering::Release);
            if is_rank0 {
                let name = signals::name(signal);
                tilewright::terminal::print_stderr(format_args!(
                    "{name}: stopping after this step; a second signal terminates immediately"
                ));
            }
        }
        StopSignal::End(signal) => signals::exit_by_signal(signal),
    })?;
    Ok(stop)
}
