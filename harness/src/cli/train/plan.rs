//! Plans a run from the command line and, with `--resume`, a checkpoint: model, options and data.

use std::path::{Path, PathBuf};

use tilewright::Cache;

use super::{Arguments, OptimizerArgs, SchedulePlan, StepArgs};
use crate::cli::{CliError, Result};
use crate::data::{self, Bpe, Dataset, SHIPPED_NAME, Text};
use crate::escape::printable;
use crate::model::Config;
use crate::optim::{AdamWOptions, LrSchedule};
use crate::train::checkpoint::{Checkpoint, hex};
use crate::train::keep;
use crate::train::run::{CHECKPOINT, CURVE, EXPORTED, LOG, NOT_FINITE};
use crate::train::{Retention, RunOptions, TrainerOptions};

/// Everything that a run starts from.
pub struct Plan {
    pub config: Config,
    pub options: RunOptions,
    pub data: Dataset,
    pub checkpoint: Option<Checkpoint>,
}

/// Plans a new run, or with `--resume` the rest of a run.
///
/// # Errors
/// Options that contradict each other or the checkpoint, a folder with the checkpoint of another run, or a text or
/// checkpoint that cannot be read.
pub fn plan(arguments: &Arguments) -> Result<Plan> {
    let path = arguments.out.join(CHECKPOINT);
    if let Some(text) = &arguments.data {
        let in_run = [CHECKPOINT, LOG, CURVE, NOT_FINITE].map(|name| arguments.out.join(name));
        let exported = EXPORTED.map(|name| arguments.export.as_ref().map(|folder| folder.join(name)));
        let written: Vec<&Path> = in_run.iter().chain(exported.iter().flatten()).map(PathBuf::as_path).collect();
        crate::files::check_distinct(&written, &[text])?;
    }
    if arguments.resume {
        let opened = Checkpoint::open(&path).map_err(|error| unusable(&arguments.out, error));
        return resumed(arguments, opened?);
    }
    // Also refuse older checkpoints without a current one: the new run would treat them as its own and remove them.
    match keep::any_name(&arguments.out) {
        None => fresh(arguments),
        Some(name) => {
            let from = match keep::fallback_help(&arguments.out).filter(|_| name != CHECKPOINT) {
                Some(copy) => format!("{copy} (--resume)"),
                None => "--resume continues from it".to_string(),
            };
            Err(CliError::usage(
                format!("{} already contains a checkpoint of another run: {name}", arguments.out.display()),
                format!("{from}; or choose another folder with --out"),
            ))
        }
    }
}

fn failure(error: impl std::fmt::Display) -> CliError {
    CliError::Failure(error.to_string())
}

/// Converts an error of a folder's newest checkpoint to a command's error, with a hint at the newest older checkpoint
/// if there is one.
pub fn unusable(folder: &Path, error: impl std::fmt::Display) -> CliError {
    let help = keep::fallback_help(folder).map(|help| format!("\n  help: {help}"));
    failure(format!("{error}{}", help.unwrap_or_default()))
}

/// Returns the folder of tokenizers and token files: in the cache that all runs share, or without a cache in the run's
/// folder.
fn token_cache_folder(arguments: &Arguments) -> Result<PathBuf> {
    Ok(Cache::from_env()?.folder(&["data"]).unwrap_or_else(|| arguments.out.join("data")))
}

fn text(arguments: &Arguments, name: Option<&str>) -> Result<Text> {
    match (&arguments.data, name) {
        (Some(path), _) => Text::open(path).map_err(failure),
        (None, Some(name)) if name != SHIPPED_NAME => Text::open(name.as_ref()).map_err(failure),
        (None, _) => Ok(Text::shipped()),
    }
}

fn fresh(arguments: &Arguments) -> Result<Plan> {
    if arguments.rates.schedule.is_some() {
        return Err(CliError::usage(
            "--schedule applies to resumed runs only",
            "omit it, or add --resume; the schedule of a new run follows from --lr, --min-lr, --warmup and --steps",
        ));
    }
    let sized = arguments.model.size.is_some();
    let base = Config { context: arguments.steps.context.unwrap_or(128), ..Config::default() };
    // Check everything but the vocabulary before the text is read.
    arguments.model.config(base.clone())?;
    let options = options(arguments, &defaults(arguments, sized))?;
    let vocabulary = arguments.vocab_size.unwrap_or(arguments.model.default_vocabulary());
    let data = data::prepare(&text(arguments, None)?, vocabulary, &token_cache_folder(arguments)?).map_err(failure)?;
    data.check_context(options.context).map_err(failure)?;
    let config = arguments.model.config(Config { vocabulary: data.tokenizer.vocabulary(), ..base })?;
    Ok(Plan { config, options, data, checkpoint: None })
}

fn resumed(arguments: &Arguments, mut checkpoint: Checkpoint) -> Result<Plan> {
    Config::rename_old_keys(&mut checkpoint.header.model);
    let unreadable = |error: serde_json::Error| {
        let reason = format!("its hyperparameters cannot be read: {}", printable(&error.to_string()));
        unusable(&arguments.out, CliError::file("use the checkpoint", checkpoint.path(), reason))
    };
    let trained: Config = serde_json::from_value(checkpoint.header.model.clone()).map_err(unreadable)?;
    let before: RunOptions = serde_json::from_value(checkpoint.header.training.clone()).map_err(unreadable)?;
    let context = arguments.steps.context.unwrap_or(trained.context);
    let config = arguments.model.config(Config { context, ..trained })?;
    let model = serde_json::to_value(&config).map_err(failure)?;
    checkpoint.check_model(&model, &Config::BITWISE_NEUTRAL).map_err(failure)?;
    if let Some(seed) = arguments.steps.seed.filter(|seed| *seed != before.seed) {
        return Err(CliError::usage(
            format!("--seed is {seed}, but the run started with {}", before.seed),
            "omit --seed to continue with the same order of sequences, or start a new run with another --out",
        ));
    }
    if arguments.vocab_size.is_some_and(|size| size < config.vocabulary) {
        return Err(CliError::usage(
            format!("the checkpoint's vocabulary has {} entries", config.vocabulary),
            "omit --vocab-size, or start a new run with another --out",
        ));
    }
    let mut options = options(arguments, &before)?;
    options.trainer.schedule = schedule(arguments, &before, &options, checkpoint.header.step)?;
    let text = text(arguments, Some(&checkpoint.header.data))?;
    let tokenizer = Bpe::from_json(checkpoint.tokenizer.clone())
        .map_err(|error| CliError::file("use the checkpoint", checkpoint.path(), error))
        .map_err(|error| unusable(&arguments.out, error))?;
    if tokenizer.vocabulary() > config.vocabulary {
        let (found, expected) = (tokenizer.vocabulary(), config.vocabulary);
        let reason = format!("its tokenizer has {found} entries, but its model has a vocabulary of {expected}");
        return Err(unusable(&arguments.out, CliError::file("use the checkpoint", checkpoint.path(), reason)));
    }
    let data = data::load_or_tokenize(&text, tokenizer, &token_cache_folder(arguments)?).map_err(failure)?;
    if hex(&data.tokens.text_hash()) != checkpoint.header.data_hash {
        return Err(CliError::Failure(format!(
            "the checkpoint was trained on another text: expected {}, found {}, whose contents differ\n  help: pass \
             the unchanged text with --data",
            printable(&checkpoint.header.data),
            printable(&data.name)
        )));
    }
    data.check_context(options.context).map_err(failure)?;
    Ok(Plan { config, options, data, checkpoint: Some(checkpoint) })
}

/// Returns the default options of a new run.
fn defaults(arguments: &Arguments, sized: bool) -> RunOptions {
    let steps = arguments.steps.steps.unwrap_or(500);
    let max_lr = arguments.rates.lr.unwrap_or(if sized { 6e-4 } else { 3e-3 });
    let batch = arguments.steps.batch.unwrap_or(16);
    RunOptions {
        trainer: TrainerOptions {
            adamw: AdamWOptions::default(),
            schedule: LrSchedule {
                max_lr,
                min_lr: 0.1 * max_lr,
                warmup_steps: (steps / 20).min(2000),
                total_steps: steps,
            },
            weight_decay: 0.1,
            decay_embeddings: false,
            clip: Some(1.0),
        },
        steps,
        batch,
        micro_batch: batch,
        context: arguments.steps.context.unwrap_or(128),
        evaluate_every: 100,
        evaluate_sequences: 64,
        save_every: None,
        keep: Retention::default(),
        seed: 0,
    }
}

/// Returns `base` with the given options applied.
fn options(arguments: &Arguments, base: &RunOptions) -> Result<RunOptions> {
    let StepArgs { context, batch, micro_batch, steps, evaluate_every, evaluate_sequences, save_every, .. } =
        arguments.steps;
    let StepArgs { keep_last, keep_best, seed, .. } = arguments.steps;
    let OptimizerArgs { lr, min_lr, warmup, weight_decay, decay_embeddings, beta1, beta2, eps, clip, .. } =
        arguments.rates;
    let mut options = *base;
    options.batch = batch.unwrap_or(options.batch);
    options.micro_batch = micro_batch.or(batch).unwrap_or(options.micro_batch).min(options.batch);
    options.context = context.unwrap_or(options.context);
    options.steps = steps.unwrap_or(options.steps);
    options.evaluate_every = evaluate_every.unwrap_or(options.evaluate_every);
    options.evaluate_sequences = evaluate_sequences.unwrap_or(options.evaluate_sequences);
    options.save_every = save_every.or(options.save_every);
    options.keep.last = keep_last.unwrap_or(options.keep.last);
    options.keep.best = keep_best.unwrap_or(options.keep.best);
    options.seed = seed.unwrap_or(options.seed);
    let trainer = &mut options.trainer;
    trainer.schedule.max_lr = lr.unwrap_or(trainer.schedule.max_lr);
    trainer.schedule.min_lr = min_lr.unwrap_or(trainer.schedule.min_lr);
    trainer.schedule.warmup_steps = warmup.unwrap_or(trainer.schedule.warmup_steps);
    trainer.weight_decay = weight_decay.unwrap_or(trainer.weight_decay);
    trainer.decay_embeddings |= decay_embeddings;
    trainer.adamw.beta1 = beta1.unwrap_or(trainer.adamw.beta1);
    trainer.adamw.beta2 = beta2.unwrap_or(trainer.adamw.beta2);
    trainer.adamw.eps = eps.unwrap_or(trainer.adamw.eps);
    trainer.clip = clip.map_or(trainer.clip, |clip| (clip != 0.0).then_some(clip));
    check(&options)?;
    Ok(options)
}

/// Returns the learning-rate schedule of a run that is resumed after `step`.
///
/// # Errors
/// The number of steps changed, and `--schedule` does not resolve the ambiguity.
fn schedule(arguments: &Arguments, before: &RunOptions, options: &RunOptions, step: u64) -> Result<LrSchedule> {
    let (kept, steps) = (options.trainer.schedule, options.steps);
    let extended = LrSchedule { total_steps: steps, ..kept };
    match arguments.rates.schedule {
        Some(SchedulePlan::Keep) => return Ok(kept),
        Some(SchedulePlan::Extend) => return Ok(extended),
        // Nothing changed, an earlier choice applies, the rate is constant, or no step is left.
        None if steps == before.steps || kept.total_steps == steps || kept.max_lr == kept.min_lr || steps <= step => {
            return Ok(kept);
        }
        None => {}
    }
    let (next, total, min_lr) = (step + 1, kept.total_steps, kept.min_lr);
    let (rate_kept, rate_extended) = (kept.rate(next), extended.rate(next));
    Err(CliError::usage(
        format!(
            "the learning rate decays to {min_lr:.3e} until step {total}, but --steps is {steps} now: --schedule is \
             required"
        ),
        format!(
            "--schedule keep keeps the original schedule, with {rate_kept:.3e} in step {next} and {:.3e} in step \
             {steps}; --schedule extend decays the rate until step {steps}, with {rate_extended:.3e} in step {next} \
             and {:.3e} in step {steps}",
            kept.rate(steps),
            extended.rate(steps)
        ),
    ))
}

/// Checks the ranges of all options, including those from a checkpoint.
fn check(options: &RunOptions) -> Result<()> {
    let AdamWOptions { beta1, beta2, eps } = options.trainer.adamw;
    let LrSchedule { max_lr, min_lr, .. } = options.trainer.schedule;
    let counts = [
        ("--steps", options.steps > 0),
        ("--batch", options.batch > 0),
        ("--micro-batch", options.micro_batch > 0),
        ("--context", options.context > 0),
        ("--evaluate-sequences", options.evaluate_sequences > 0),
    ];
    if let Some((name, _)) = counts.iter().find(|(_, good)| !good) {
        return Err(CliError::usage(format!("{name} is 0"), "expected a number of at least 1"));
    }
    let most = isize::MAX as usize / 16;
    if options.batch.checked_mul(options.context).is_none_or(|tokens| tokens > most) {
        return Err(CliError::usage(
            format!("--batch {} with --context {} is more tokens than memory can hold", options.batch, options.context),
            format!("the batch times the context length must be at most {most}"),
        ));
    }
    for (name, beta) in [("--beta1", beta1), ("--beta2", beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return Err(CliError::usage(format!("{name} is {beta}"), "expected a number from 0 to below 1"));
        }
    }
    if min_lr > max_lr {
        return Err(CliError::usage(
            format!("--min-lr {min_lr} is above --lr {max_lr}"),
            "the learning rate decays from --lr to --min-lr",
        ));
    }
    let positive = |x: f64| x.is_finite() && x >= 0.0;
    // `None` disables clipping; infinity is accepted.
    if let Some(clip) = options.trainer.clip.filter(|clip| clip.is_nan() || *clip <= 0.0) {
        return Err(CliError::usage(
            format!("--clip is {clip}"),
            "expected a number above 0, or 0 to disable clipping",
        ));
    }
    let rest =
        [("--lr", max_lr), ("--min-lr", min_lr), ("--eps", eps), ("--weight-decay", options.trainer.weight_decay)];
    match rest.iter().find(|(_, value)| !positive(*value)) {
        Some((name, value)) => Err(CliError::usage(format!("{name} is {value}"), "expected a number of at least 0")),
        None => Ok(()),
    }
}
