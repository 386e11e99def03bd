//! `tilewright train`: a Transformer on a text, from nothing or from a checkpoint.

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
use super::model_options::{ModelOptions, device_info, model_device, peak};
use super::numbers;
use super::ranks::RankOptions;
use super::run::{Choice, device};
use super::step::{options_for_less, words};
use super::{CliError, Result};
use crate::dist::comm::{Communicator, Dtype};
use crate::dist::sharded::Mode;
use crate::escape::printable;
use crate::model::{Config, Kind, StepBytes, Transformer};
use crate::signals::{self, Heard};
use crate::train::run::{CHECKPOINT, CURVE, LOG};
use crate::train::{self, Ending, LanguageModel, Run, RunFolder, TeamOptions, keep};

#[derive(Args)]
pub struct Arguments {
    /// Text to learn from, a UTF-8 file; without it, the book that ships
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Most entries of the vocabulary that is made from the text; 1024, and 10000 with --size
    #[arg(long, value_name = "N")]
    vocab: Option<usize>,
    /// Folder of the run: checkpoint, log and loss curve
    #[arg(long, value_name = "DIR", default_value = "tilewright-run")]
    out: PathBuf,
    /// Go on from the checkpoint in the folder; what is not said again is as it was, but for --device, --minutes, and what of ranks depends
    /// on the machines (--nccl-ctas, --copy-engines, --leave-sms)
    #[arg(long)]
    resume: bool,
    /// Write the starting state and all batches into this folder, for another implementation to make the same steps
    #[arg(long, value_name = "DIR")]
    export: Option<PathBuf>,
    /// Where to train: cpu, cuda or cuda:N; without it, where TILEWRIGHT_DEVICE says, else on a GPU if there is one
    #[arg(long, value_parser = device)]
    device: Option<Choice>,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    steps: Steps,
    #[command(flatten)]
    rates: Rates,
    #[command(flatten)]
    ranks: RankOptions,
}

/// What the steps are.
#[derive(Args)]
#[command(next_help_heading = "Steps")]
struct Steps {
    /// Tokens of a window; 128
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Windows of a step; 16
    #[arg(long, value_name = "WINDOWS")]
    batch: Option<usize>,
    /// Windows that run at a time, where a whole batch does not fit into memory: gradients are added up
    #[arg(long, value_name = "WINDOWS")]
    micro_batch: Option<usize>,
    /// Steps in all; 500
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Stop after so many minutes, at most 10⁷, with the state saved
    #[arg(long, value_name = "MINUTES", value_parser = numbers::minutes)]
    minutes: Option<Duration>,
    /// Steps between evaluations on the last tenth of the text, 0 for one at the end only; 100
    #[arg(long, value_name = "STEPS")]
    evaluate_every: Option<u64>,
    /// Windows of an evaluation, at most; 64
    #[arg(long, value_name = "WINDOWS")]
    evaluate_windows: Option<usize>,
    /// Steps between checkpoints, 0 for one at the end only; without it 100, more where saving would take over a twentieth of the
    /// time
    #[arg(long, value_name = "STEPS")]
    save_every: Option<u64>,
    /// Checkpoints to keep: the newest ones, 0 for all; 2
    #[arg(long, value_name = "N")]
    keep_last: Option<usize>,
    /// Checkpoints to keep beside them: those with the lowest validation loss; 1
    #[arg(long, value_name = "N")]
    keep_best: Option<usize>,
    /// Seed of starting values and of the order of windows; 0
    #[arg(long)]
    seed: Option<u64>,
}

/// How parameters change.
#[derive(Args)]
#[command(next_help_heading = "Optimizer (AdamW)")]
struct Rates {
    /// Highest learning rate; 0.003, and 0.0006 with --size
    #[arg(long, value_name = "RATE", value_parser = numbers::not_negative)]
    lr: Option<f64>,
    /// Learning rate at the end; a tenth of the highest
    #[arg(long, value_name = "RATE", value_parser = numbers::not_negative)]
    min_lr: Option<f64>,
    /// Steps in which the learning rate rises; a twentieth of all, at most 2000
    #[arg(long, value_name = "STEPS")]
    warmup: Option<u64>,
    /// What a run that goes on with other --steps does with the learning rate, which falls until the last step that was planned
    #[arg(long, value_enum, value_name = "PLAN")]
    schedule: Option<SchedulePlan>,
    /// Weight decay of matrices; 0.1
    #[arg(long, value_name = "LAMBDA", value_parser = numbers::not_negative)]
    weight_decay: Option<f64>,
    /// Let embeddings decay too
    #[arg(long)]
    decay_embeddings: bool,
    /// 0.9
    #[arg(long, value_parser = numbers::decay)]
    beta1: Option<f64>,
    /// 0.95
    #[arg(long, value_parser = numbers::decay)]
    beta2: Option<f64>,
    /// 1e-8
    #[arg(long, value_parser = numbers::not_negative)]
    eps: Option<f64>,
    /// Largest norm of the gradient, 0 for no limit; 1
    #[arg(long, value_name = "NORM", value_parser = numbers::not_negative)]
    clip: Option<f64>,
}

/// The learning rate of a run that goes on with other `--steps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SchedulePlan {
    /// As the run began: the rate falls until the step that was the last one, and stays at --min-lr after it
    Keep,
    /// As if the run had begun with these --steps: the rate falls until the new last step
    Extend,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let device = model_device(arguments.device)?;
    let Some(comm) = arguments.ranks.connect(&device)? else { return train(arguments, device, None, out) };
    let mut nobody = std::io::sink();
    let outcome = train(arguments, device, Some(&comm), if comm.rank() == 0 { out } else { &mut nobody });
    if let Err(error) = &outcome
        && !matches!(error, CliError::Stopped(_))
    {
        // The other ranks hear of it instead of waiting.
        comm.give_up(&error.to_string());
    }
    outcome
}

fn train(arguments: &Arguments, device: Device, comm: Option<&Arc<Communicator>>, out: &mut dyn Write) -> Result<()> {
    let leads = comm.is_none_or(|comm| comm.rank() == 0);
    // Before the checkpoint is read, which another run might replace.
    let lock = leads.then(|| RunFolder::lock(&arguments.out)).transpose();
    let lock = lock.map_err(|error| CliError::Failure(error.to_string()))?;
    let Plan { config, options, data, checkpoint } = plan::plan(arguments)?;
    let before = checkpoint.as_ref().and_then(|checkpoint| checkpoint.header.ranks);
    let team = comm.map(|comm| arguments.ranks.team_of(comm.clone(), before));
    let team = team.as_ref();
    let name = device_info(&device)?.name;
    let millions = config.parameters() as f64 / 1e6;
    writeln!(out, "text: {}, {} tokens of {}", printable(&data.name), data.tokens.len(), config.vocabulary)?;
    writeln!(out, "model: {millions:.2} M parameters, {}, on {name}", config.precision)?;
    if let Some(TeamOptions { comm, ddp, shard }) = team {
        let state = shard.map_or("whole", |mode| if mode == Mode::Zero1 { "ZeRO-1" } else { "shared out" });
        let (world, name) = (comm.world(), comm.back_end());
        writeln!(out, "ranks: {world} over {name}, gradients {}, optimizer state {state}", ddp.form.name())?;
    }
    out.flush()?;

    let needs = Needs::of(&config, &options, team);
    let fail = |error: train::Error| needs.explain(error, &device, &options, &config);
    needs.expect(&device).map_err(fail)?;
    let model = Transformer::new(&config, &device, options.seed).map_err(|error| fail(error.into()))?;
    let begun = Run::begin_with(&model, &data, options, &arguments.out, checkpoint.as_ref(), team, lock);
    let mut run = begun.map_err(|error| match error.is_of_a_checkpoint() && arguments.resume {
        true => plan::unusable(&arguments.out, error),
        false => fail(error),
    })?;
    // The file is not needed any more, and may be large.
    drop(checkpoint);
    let begun = run.learner().step();
    if begun >= options.steps {
        return Err(CliError::usage(
            format!("the run has made {begun} steps already, of {}", options.steps),
            "--steps says how many it makes in all",
        ));
    }
    if let Some(folder) = &arguments.export {
        if team.is_some() {
            return Err(CliError::usage("many ranks export nothing", "leave --export out, or start one process"));
        }
        run.export(folder).map_err(fail)?;
        writeln!(out, "wrote {}", folder.display())?;
    }
    run.peak = Some(peak(&device, config.precision)?);
    run.time_limit = arguments.steps.minutes;
    let stop = watch_for_signals(leads)?;
    let uniform = (model.vocabulary() as f64).ln();
    match begun {
        0 => writeln!(out, "a model that knows nothing has the loss ln({}) = {uniform:.3}", model.vocabulary())?,
        step => {
            let schedule = options.learner.schedule;
            let (rate, end) = (schedule.rate(step + 1), schedule.rate(options.steps));
            writeln!(
                out,
                "going on after step {step}, with a learning rate of {rate:.3e}; {end:.3e} in step {}",
                options.steps
            )?;
            say_best(&arguments.out, out)?;
        }
    }
    out.flush()?;
    let mut progress = Progress::new(begun, options.steps, leads);
    let ending = run.go(&stop.asked, &mut progress);
    progress.finish();
    let ending = ending.map_err(fail)?;
    let step = run.learner().step();
    writeln!(out, "step {step}: {}", progress.summary())?;
    // It can be drawn again: a run that was stopped has what it takes to go on.
    let drawn = run.draw().map_err(fail);
    for file in [CHECKPOINT, LOG, CURVE].iter().take(if drawn.is_ok() { 3 } else { 2 }) {
        writeln!(out, "wrote {}", arguments.out.join(file).display())?;
    }
    say_best(&arguments.out, out)?;
    match ending {
        Ending::Done => writeln!(out, "`tilewright generate {}` lets it write", arguments.out.display())?,
        Ending::OutOfTime => writeln!(out, "its time is over; --resume goes on")?,
        Ending::Stopped => {
            // Another rank may have been told alone.
            let by = match stop.signal.load(Ordering::Relaxed) {
                0 => String::new(),
                signal => format!(" by {}", signals::name(signal)),
            };
            let undrawn = drawn.err().map_or_else(String::new, |error| format!("{error}\n"));
            return Err(CliError::Stopped(format!(
                "{undrawn}stopped{by} after step {step}, with the state saved; --resume goes on"
            )));
        }
    }
    drawn
}

/// Bytes that a step of this rank takes at least.
struct Needs {
    step: StepBytes,
    /// In host memory: the batch's inputs and targets, of four bytes each, twice.
    tokens: f64,
    /// Windows that run at a time.
    windows: usize,
}

impl Needs {
    fn of(config: &Config, options: &train::RunOptions, team: Option<&TeamOptions>) -> Needs {
        let world = team.map_or(1, |team| team.comm.world());
        let batch = options.batch.div_ceil(world);
        let windows = options.micro_batch.min(batch);
        let config = Config { context: options.context, ..config.clone() };
        // Of ranks, those that send them so alone keep gradients in bf16.
        let like_one = team.is_none_or(|team| team.ddp.wire == Some(Dtype::Bf16) && team.shard.is_none());
        let micro_batches = batch.div_ceil(windows.max(1)).max(if like_one { 1 } else { 2 });
        let mut step = config.step_bytes(windows, micro_batches, Kind::TrainStep);
        if team.is_some_and(|team| team.shard.is_some()) {
            step.moments /= world as f64;
        }
        Needs { step, tokens: 16.0 * batch as f64 * options.context as f64, windows }
    }

    /// Fails where the CPU has no memory for a step, or the host none for a batch of tokens.
    fn expect(&self, device: &Device) -> train::Result<()> {
        let on_host = if device.is_cpu() { self.step.total() } else { 0.0 };
        Ok(tilewright::expect_host_memory(on_host + self.tokens)?)
    }

    /// The error in the words of the command line: what a step takes, and what of it can be lowered where memory was short.
    fn explain(&self, error: train::Error, device: &Device, options: &train::RunOptions, config: &Config) -> CliError {
        if !error.is_out_of_memory() {
            return CliError::Failure(error.to_string());
        }
        let gib = |bytes: f64| format!("{:.2} GiB", bytes / (1u64 << 30) as f64);
        let on = crate::ops::memory::kernel_device(device).ok();
        let free = on.and_then(|device| device.memory_in_use().ok().flatten());
        let free = free.map(|(free, total)| {
            format!("\n  {} of {} on the device are free now", gib(free as f64), gib(total as f64))
        });
        let StepBytes { weights, gradients, moments, activations } = self.step;
        let mut less = Vec::new();
        if self.tokens > self.step.total() {
            less.push("a smaller --batch".to_string());
        }
        if self.windows > 1 {
            less.push(format!("--micro-batch {} (the batch stays as it is)", self.windows / 2));
        }
        less.extend(options_for_less(config));
        less.extend(["a smaller --context", "a smaller model"].map(str::to_string));
        CliError::Failure(format!(
            "{}{}\n  a step takes at least {}: parameters {}, gradients {}, moments {}, activations of {} × {} tokens {}, \
             and the batch's tokens {}\n  help: {} takes less",
            error.out_of_memory_text(),
            free.unwrap_or_default(),
            gib(self.step.total() + self.tokens),
            gib(weights),
            gib(gradients),
            gib(moments),
            self.windows,
            options.context,
            gib(activations),
            gib(self.tokens),
            words(&less),
        ))
    }
}

/// Says which of the checkpoints in the folder is the best, where one has a validation loss.
fn say_best(folder: &std::path::Path, out: &mut dyn Write) -> Result<()> {
    let Some((name, step, loss)) = keep::best(folder) else { return Ok(()) };
    writeln!(out, "the best checkpoint is {name}, of step {step}, with a validation loss of {loss:.3}")?;
    Ok(())
}

/// What signals asked for.
#[derive(Default)]
struct Stop {
    asked: AtomicBool,
    /// The first one.
    signal: AtomicI32,
}

/// Hears the first signal; the second one ends the program at once. Of many ranks one says so.
fn watch_for_signals(leads: bool) -> Result<Arc<Stop>> {
    let stop = Arc::new(Stop::default());
    let heard = stop.clone();
    crate::cli::on_signals(move |meaning| match meaning {
        Heard::Stop(signal) => {
            heard.signal.store(signal, Ordering::Relaxed);
            heard.asked.store(true, Ordering::Release);
            if leads {
                let name = signals::name(signal);
                tilewright::terminal::say(format_args!(
                    "{name}: stopping after this step; another signal ends at once"
                ));
            }
        }
        Heard::End(signal) => signals::end_by(signal),
    })?;
    Ok(stop)
}
