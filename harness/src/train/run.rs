//! A training run: steps, evaluations and checkpoints until it is done.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::checkpoint::{self, Checkpoint, Header, OptimizerShards, Staged};
use super::data_parallel::StepStatus;
use super::keep::Retention;
use super::log::{self, Line, Log, StepLine};
use super::queued_step::{QueuedStep, StepHandle};
use super::saver::{self, CheckpointFiles, Saver};
use super::staged::check_host_memory;
use super::trainer::Update;
use super::trainer::{first_non_finite_param, gradient_dtype};
use super::{
    DataParallel, DataParallelOptions, Error, LanguageModel, RankSettings, Result, RunFolder, Trainer, TrainerOptions,
};
use crate::data::{Batch, Dataset, Sampler, SamplerState, Shard, TokenSlice, non_overlapping_sequences};
use crate::dist::{self, lifeline};
use crate::files;
use crate::optim::step_control::MAX_LOSSES;
use crate::params::no_grad;
use crate::profile::{Phase, phase};

/// Files in a run's folder.
pub const CHECKPOINT: &str = "checkpoint.safetensors";
pub const LOG: &str = "log.jsonl";
pub const CURVE: &str = "loss.svg";
pub const NOT_FINITE: &str = "not-finite.safetensors";
/// Files that [`Run::export`] writes.
pub const EXPORTED: [&str; 2] = ["start.safetensors", "batches.safetensors"];

/// Options of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunOptions {
    #[serde(alias = "learner")]
    pub trainer: TrainerOptions,
    /// Total number of steps, including those before a checkpoint.
    pub steps: u64,
    /// Sequences per step.
    pub batch: usize,
    /// Sequences per forward and backward; gradients of micro-batches are accumulated.
    pub micro_batch: usize,
    /// Tokens per sequence.
    pub context: usize,
    /// Steps between evaluations; 0 evaluates only at the end.
    pub evaluate_every: u64,
    /// Maximum number of sequences of an evaluation.
    #[serde(alias = "evaluate_windows")]
    pub evaluate_sequences: usize,
    /// Steps between checkpoints; 0 saves only at the end. `None` means every 100 steps, or less often if saves would
    /// take more than a twentieth of the time.
    pub save_every: Option<u64>,
    #[serde(default)]
    pub keep: Retention,
    pub seed: u64,
}

/// Callbacks for progress output.
pub trait Observer {
    /// Called after every step.
    fn step(&mut self, line: &StepLine);
    /// Called after every evaluation on the validation set.
    fn evaluated(&mut self, step: u64, loss: f64);
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done.
    Done,
    /// The run was asked to stop, and saved its state.
    Stopped,
    /// The time limit was reached, and the run saved its state.
    OutOfTime,
}

/// A model in training.
pub struct Run<'a> {
    model: &'a dyn LanguageModel,
    data: &'a Dataset,
    options: RunOptions,
    trainer: Trainer,
    queued_step: QueuedStep,
    /// Time at which the last step finished.
    finished: Option<Instant>,
    sampler: Sampler,
    folder: PathBuf,
    /// Declared before the lock: when a run is dropped, its files are complete before another run starts.
    saver: Saver,
    /// On rank 0 only.
    lock: Option<RunFolder>,
    /// The last evaluated step, with the loss.
    evaluated: Option<(u64, f64)>,
    /// On rank 0 only.
    log: Option<Log>,
    data_parallel: Option<DataParallel>,
    /// Stored in checkpoints.
    ranks: Option<RankSettings>,
    /// Peak rate of the device in FLOP/s, if it is known.
    pub peak: Option<f64>,
    /// The run stops when this time has passed.
    pub time_limit: Option<Duration>,
}

/// Arguments of [`Run::begin_with`].
pub struct RunSetup<'a, 's> {
    pub model: &'a dyn LanguageModel,
    pub data: &'a Dataset,
    pub options: RunOptions,
    /// The folder of the run.
    pub folder: &'s Path,
    /// The checkpoint to resume from.
    pub from: Option<&'s Checkpoint>,
    /// Of a run on several ranks, which share the batch and the folder; rank 0 writes into it.
    pub data_parallel: Option<&'s DataParallelOptions>,
    /// Rank 0's lock of the folder, taken before it read the checkpoint; with `None` the folder is locked by
    /// [`Run::begin_with`].
    pub lock: Option<RunFolder>,
}

impl<'a, 's> RunSetup<'a, 's> {
    /// A new run on a single rank.
    pub fn new(
        model: &'a dyn LanguageModel,
        data: &'a Dataset,
        options: RunOptions,
        folder: &'s Path,
    ) -> RunSetup<'a, 's> {
        RunSetup { model, data, options, folder, from: None, data_parallel: None, lock: None }
    }
}

/// A step that was started.
enum StartedStep {
    Finished(StepLine),
    Queued(InFlightStep),
}

/// A step in flight, and the data to explain its failure.
struct InFlightStep {
    queued: StepHandle,
    inputs: Tensor,
    targets: Tensor,
    /// State of the sampler before the step.
    before: SamplerState,
    began: Instant,
}

impl<'a> Run<'a> {
    /// Starts a run in `folder`, or resumes it from a checkpoint.
    ///
    /// # Errors
    /// A text that is too short for the context length, a folder that is not writable, a checkpoint that does not fit,
    /// no memory.
    pub fn begin(
        model: &'a dyn LanguageModel,
        data: &'a Dataset,
        options: RunOptions,
        folder: &Path,
        from: Option<&Checkpoint>,
    ) -> Result<Run<'a>> {
        Run::begin_with(RunSetup { from, ..RunSetup::new(model, data, options, folder) })
    }

    /// Same as [`Run::begin`], on any number of ranks.
    ///
    /// # Errors
    /// See [`Run::begin`] and [`DataParallel::new`]; also ranks that were started with different settings, named by
    /// rank and option.
    pub fn begin_with(setup: RunSetup<'a, '_>) -> Result<Run<'a>> {
        let RunSetup { model, data, options, folder, from, data_parallel, lock } = setup;
        if let Some(data_parallel) = data_parallel {
            super::settings_check::check(data_parallel, model.hyperparameters(), &options, data, from)?;
        }
        data.check_context(options.context)?;
        let ranks = data_parallel
            .map(DataParallelOptions::settings)
            .or_else(|| from.and_then(|checkpoint| checkpoint.header.ranks));
        let world = data_parallel.map_or(1, |data_parallel| data_parallel.comm.world());
        let micro_batches = (options.batch / world).div_ceil(options.micro_batch.max(1));
        let (data_parallel, mut trainer) = match data_parallel {
            None => {
                if micro_batches > MAX_LOSSES {
                    return Err(Error::MicroBatches { found: micro_batches, batch: options.batch });
                }
                model.params().set_grad_dtype(gradient_dtype(model.params(), micro_batches))?;
                (None, Trainer::new(model.params(), options.trainer)?)
            }
            Some(data_parallel) => {
                let (data_parallel, trainer) =
                    DataParallel::new(data_parallel, model.params(), options.trainer, options.batch, micro_batches)?;
                (Some(data_parallel), trainer)
            }
        };
        let mut sampler = Sampler::new(options.seed);
        if let Some(checkpoint) = from {
            checkpoint.load(&mut trainer)?;
            sampler = Sampler::from_state(checkpoint.header.sampler);
        }
        let is_rank0 = data_parallel.as_ref().is_none_or(DataParallel::is_rank0);
        let lock = match lock {
            None if is_rank0 => Some(RunFolder::lock(folder)?),
            given => given,
        };
        let saver = Saver::new(folder.to_path_buf(), options.keep, from.map(|checkpoint| checkpoint.header.step));
        check_space(&saver, &options, &trainer, data.tokenizer.json().len(), is_rank0)?;
        if let Some(data_parallel) = data_parallel.as_ref().filter(|_| trainer.is_sharded()) {
            check_folder(data_parallel, folder)?;
        }
        let log = is_rank0.then(|| Log::open_after(&folder.join(LOG), trainer.step())).transpose()?;
        let evaluated = from.and_then(|checkpoint| Some((checkpoint.header.step, checkpoint.header.validation?)));
        let folder = folder.to_path_buf();
        let queued_step = QueuedStep::new(&trainer);
        let (finished, peak, time_limit) = (None, None, None);
        Ok(Run {
            model,
            data,
            options,
            trainer,
            queued_step,
            finished,
            sampler,
            folder,
            lock,
            saver,
            evaluated,
            log,
            data_parallel,
            ranks,
            peak,
            time_limit,
        })
    }

    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// Runs the remaining steps. Stops after the step in which `stop` becomes true on any rank: no later step starts,
    /// steps in flight are finished, and all ranks save the state after the same step.
    ///
    /// # Errors
    /// A loss or gradient that is not finite (the state before that step is saved in a separate file), lack of memory,
    /// and files that cannot be written.
    pub fn train(&mut self, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<Ending> {
        let mut outcome = self.train_loop(stop, observer);
        // Files are complete before the lock is released.
        if outcome.is_err() && !self.trainer.is_sharded() {
            let _ = self.saver.finish(None, true);
        }
        if let Err(Error::Save { last, .. }) = &mut outcome {
            *last = self.saver.last();
        }
        if let (Err(error), Some(data_parallel)) = (&outcome, &self.data_parallel) {
            // The other ranks must not wait for this one.
            data_parallel.communicator().abort(&error.to_string());
        }
        outcome
    }

    fn train_loop(&mut self, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<Ending> {
        let start = Instant::now();
        let mut ending = Ending::Done;
        let mut in_flight = VecDeque::new();
        let RunOptions { steps, evaluate_every, save_every, .. } = self.options;
        let save_every = save_every.unwrap_or(saver::DEFAULT_INTERVAL);
        let due = |every: u64, step: u64| every > 0 && step > 0 && step.is_multiple_of(every) && step < steps;
        let begun = self.trainer.step();
        // The previous process stopped after this step, before its evaluation.
        if due(evaluate_every, begun) && self.evaluated.is_none() {
            self.evaluate(observer)?;
        }
        while ending == Ending::Done && self.trainer.step() < steps {
            in_flight.push_back(self.queue()?);
            let step = self.trainer.step();
            // Evaluations and saves need the state after all steps in flight.
            let needs_state = due(evaluate_every, step) || due(save_every, step) || step >= steps;
            let mut max_in_flight = if needs_state { 0 } else { self.queued_step.max_in_flight(&self.trainer) };
            while in_flight.len() > max_in_flight
                && let Some(queued) = in_flight.pop_front()
            {
                let line = self.finish(queued)?;
                let end = self.report_step(line, start, stop, observer)?;
                if let Some(end) = end.filter(|_| ending == Ending::Done) {
                    (ending, max_in_flight) = (end, 0);
                }
            }
            if ending == Ending::Done && due(evaluate_every, step) {
                self.evaluate(observer)?;
            }
            self.saver.finish(self.data_parallel.as_ref(), false)?;
            if ending == Ending::Done && due(save_every, step) && self.is_affordable()? {
                self.start_save()?;
            }
        }
        if self.trainer.step() >= steps {
            // All steps are done.
            ending = Ending::Done;
        }
        if ending != Ending::Stopped {
            self.evaluate(observer)?;
        }
        self.save()?;
        Ok(ending)
    }

    /// Reports and logs a step. Returns how the run ends if it is the last one.
    fn report_step(
        &mut self,
        line: StepLine,
        start: Instant,
        stop: &AtomicBool,
        observer: &mut dyn Observer,
    ) -> Result<Option<Ending>> {
        let out_of_time = self.time_limit.is_some_and(|limit| start.elapsed() >= limit);
        let own = StepStatus { loss: line.loss, stop: stop.load(Ordering::Relaxed), out_of_time };
        let status = self.data_parallel.as_ref().map_or(Ok(own), |data_parallel| data_parallel.reduce_status(own))?;
        let line = StepLine { loss: status.loss, ..line };
        if let Some(log) = &mut self.log {
            observer.step(&line);
            log.push(&Line::Step(line)).map_err(|error| self.saver.error_of(log.path(), error))?;
        }
        // A single rank also stops for a request made by the observer just now; with several ranks all have to agree
        // first.
        if status.stop || (self.data_parallel.is_none() && stop.load(Ordering::Relaxed)) {
            return Ok(Some(Ending::Stopped));
        }
        Ok(status.out_of_time.then_some(Ending::OutOfTime))
    }

    /// Runs one training step. The loss is that of this rank's sequences.
    ///
    /// # Errors
    /// See [`Run::train`].
    pub fn step(&mut self) -> Result<StepLine> {
        let queued = self.queue()?;
        self.finish(queued)
    }

    /// Starts a step: enqueues it on a single rank, runs it synchronously on several ranks.
    fn queue(&mut self) -> Result<StartedStep> {
        let began = Instant::now();
        let RunOptions { batch: sequences, micro_batch, context, .. } = self.options;
        let before = self.sampler.state();
        let batch = {
            let _phase = phase(Phase::Data);
            let shard = self.data_parallel.as_ref().map_or(Shard::SINGLE_PROCESS, DataParallel::shard);
            self.sampler.draw(&self.data.train(), sequences, context, shard)?
        };
        if self.data_parallel.is_some() {
            return self.data_parallel_step(&batch, before, began).map(StartedStep::Finished);
        }
        let (inputs, targets) = tensors(&batch, self.model.params().device())?;
        let queued = self.queued_step.queue(self.model, &mut self.trainer, [&inputs, &targets], micro_batch)?;
        Ok(StartedStep::Queued(InFlightStep { queued, inputs, targets, before, began }))
    }

    /// Waits for a step.
    fn finish(&mut self, step: StartedStep) -> Result<StepLine> {
        let InFlightStep { queued, inputs, targets, before, began } = match step {
            StartedStep::Finished(line) => return Ok(line),
            StartedStep::Queued(queued) => queued,
        };
        let micro_batch = self.options.micro_batch.max(1);
        let (registered, result) = queued.wait()?;
        let sequences = inputs.dim(0)?;
        let mut mean = 0.0;
        for (i, loss) in result.losses().iter().enumerate() {
            let (first, count) = (i * micro_batch, micro_batch.min(sequences - i * micro_batch));
            if !loss.is_finite() {
                self.trainer.roll_back(registered)?;
                let error = self.non_finite_error(&inputs.narrow(0, first, count)?)?;
                return Err(self.save_failed_step(error, before));
            }
            mean += count as f64 / sequences as f64 * loss;
        }
        let update = match self.trainer.commit(registered, result.values()) {
            Ok(update) => update,
            Err(Error::NotFinite { step, .. }) => {
                // Later steps may have overwritten the gradient of this step.
                self.trainer.begin();
                for first in (0..sequences).step_by(micro_batch) {
                    let part = |x: &Tensor| x.narrow(0, first, micro_batch.min(sequences - first));
                    self.trainer.backward(&self.model.loss(&part(&inputs)?, &part(&targets)?)?, 1.0)?;
                }
                let error = self.trainer.non_finite_error(step);
                return Err(self.save_failed_step(error, before));
            }
            Err(error) => return Err(error),
        };
        Ok(self.line(update, mean, began))
    }

    /// Runs a step on one of several ranks.
    fn data_parallel_step(&mut self, batch: &Batch, before: SamplerState, began: Instant) -> Result<StepLine> {
        self.trainer.begin();
        let mut mean = 0.0;
        let mut rest = batch.sequences;
        for micro in batch.micro_batches(self.options.micro_batch) {
            let (inputs, targets) = tensors(&micro, self.model.params().device())?;
            let share = micro.sequences as f64 / batch.sequences as f64;
            rest -= micro.sequences;
            let (loss, value) = {
                let _phase = phase(Phase::Forward);
                let loss = self.model.loss(&inputs, &targets)?;
                let value = f64::from(loss.to_scalar::<f32>()?);
                (loss, value)
            };
            if !value.is_finite() {
                let error = self.non_finite_error(&inputs)?;
                return Err(self.save_failed_step(error, before));
            }
            mean += share * value;
            match &self.data_parallel {
                Some(data_parallel) if rest > 0 => {
                    data_parallel.ddp().no_sync(|| self.trainer.backward(&loss, share))?
                }
                _ => self.trainer.backward(&loss, share)?,
            }
        }
        let update = match &self.data_parallel {
            Some(data_parallel) => data_parallel.finish_step(&mut self.trainer).map(|(_, update)| update),
            None => self.trainer.update(),
        };
        // Gradients are undefined if another rank failed to send its own.
        self.data_parallel.as_ref().map_or(Ok(()), DataParallel::check_comm)?;
        match update {
            Ok(update) => Ok(self.line(update, mean, began)),
            Err(error @ Error::NotFinite { .. }) => Err(self.save_failed_step(error, before)),
            Err(error) => Err(error),
        }
    }

    /// The log line of a finished step. If steps overlap, the time is that since the previous step.
    fn line(&mut self, update: Update, loss: f64, began: Instant) -> StepLine {
        let now = Instant::now();
        let since = self.finished.map_or(began, |finished| finished.max(began));
        self.finished = Some(now);
        let seconds = (now - since).as_secs_f64();
        let RunOptions { batch: sequences, context, .. } = self.options;
        let tokens = (sequences * context) as f64;
        let flop = tokens * self.model.flop_per_token(context);
        StepLine {
            step: update.step,
            loss,
            rate: update.rate,
            norm: update.applied.then_some(update.norm),
            seconds,
            tokens_per_second: tokens / seconds,
            mfu: self.peak.map(|peak| flop / seconds / (peak * self.world() as f64)),
        }
    }

    fn world(&self) -> usize {
        self.data_parallel.as_ref().map_or(1, |data_parallel| data_parallel.communicator().world())
    }

    /// Finds the first tensor that is not finite, after the loss of `inputs` was not.
    fn non_finite_error(&self, inputs: &Tensor) -> Result<Error> {
        let step = self.trainer.step() + 1;
        let params = self.model.params();
        if let Some(name) = first_non_finite_param(params.values(), params)? {
            return Ok(Error::NotFinite {
                step,
                what: "the loss",
                cause: format!("the first non-finite value is in the parameter `{name}`"),
                saved: None,
            });
        }
        let mut first = None;
        no_grad(|| {
            self.model.trace(inputs, &mut |name, tensor| {
                if first.is_none() && !is_finite(tensor)? {
                    first = Some(format!("the output of `{name}`"));
                }
                Ok(())
            })
        })?;
        let first = first.unwrap_or_else(|| "the loss itself: everything before it is finite".to_string());
        let cause = format!("the first non-finite value is in {first}");
        Ok(Error::NotFinite { step, what: "the loss", cause, saved: None })
    }

    /// Saves the state before a failed step, and adds the path to the error.
    fn save_failed_step(&self, error: Error, sampler: SamplerState) -> Error {
        let path = self.folder.join(NOT_FINITE);
        if self.trainer.is_sharded() {
            // The other ranks would have to take part in the save, and may not know of the error.
            return error;
        }
        let gradient = matches!(error, Error::NotFinite { what: "the gradient", .. });
        if gradient
            && self.data_parallel.as_ref().is_some_and(|data_parallel| data_parallel.updates_by_bucket(&self.trainer))
        {
            // Parameters of earlier buckets are already updated.
            return error;
        }
        let saved = match self.write(&path, sampler) {
            Ok(()) => Some(path),
            Err(error) => {
                tracing::warn!("the state before the failed step was not saved: {error}");
                None
            }
        };
        match error {
            Error::NotFinite { step, what, cause, .. } => Error::NotFinite { step, what, cause, saved },
            other => other,
        }
    }

    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let RunOptions { evaluate_sequences, micro_batch, context, .. } = self.options;
        let (model, split) = (self.model, self.data.validation());
        let loss = match &self.data_parallel {
            None => evaluate(model, &split, evaluate_sequences, micro_batch, context)?,
            Some(data_parallel) => data_parallel.all_reduce_sum(evaluate_shard(
                model,
                &split,
                evaluate_sequences,
                micro_batch,
                context,
                data_parallel.shard(),
            )?)?,
        };
        let step = self.trainer.step();
        if !loss.is_finite() {
            return Err(Error::Validation { step });
        }
        self.evaluated = Some((step, loss));
        match &mut self.log {
            None => Ok(()),
            Some(log) => {
                observer.evaluated(step, loss);
                log.push(&Line::Evaluation { step, loss }).map_err(|error| self.saver.error_of(log.path(), error))
            }
        }
    }

    /// Saves the run's state as its checkpoint; on return it is on the disk. All ranks call it.
    ///
    /// # Errors
    /// Errors of the file system; the last checkpoint then stays.
    pub fn save(&mut self) -> Result<()> {
        // Asks the launcher to wait for the save before it terminates this process.
        let _saving = lifeline::saving();
        self.start_save()?;
        self.saver.finish(self.data_parallel.as_ref(), true)
    }

    /// Copies the run's state to host memory, and starts to write it. All ranks call it.
    fn start_save(&mut self) -> Result<()> {
        self.saver.finish(self.data_parallel.as_ref(), true)?;
        self.lock.as_ref().map_or(Ok(()), RunFolder::check)?;
        let began = Instant::now();
        let mut header = self.header(self.sampler.state());
        let mut shard = None;
        if let (Some(data_parallel), true) = (&self.data_parallel, self.trainer.is_sharded()) {
            // Exactly representable in f64.
            let id = if data_parallel.is_rank0() { rand::random::<u64>() >> 11 } else { 0 };
            let shards = OptimizerShards { id: data_parallel.all_reduce_sum(id as f64)? as u64, world: self.world() };
            let rank = data_parallel.communicator().rank();
            shard = Some((Staged::shard(header.step, &shards, rank, &self.trainer)?, rank));
            header.shards = Some(shards);
        }
        let is_rank0 = self.log.is_some();
        if !is_rank0 && shard.is_none() {
            return Ok(());
        }
        let staged = || Staged::checkpoint(&header, self.data.tokenizer.json(), &self.trainer);
        let checkpoint = is_rank0.then(staged).transpose()?;
        self.saver.start(CheckpointFiles { header, checkpoint, shard }, self.data_parallel.as_ref(), began)
    }

    /// Whether a default save at this step leaves enough time for training; rank 0 decides.
    fn is_affordable(&self) -> Result<bool> {
        let own = self.options.save_every.is_some() || self.saver.is_affordable(Instant::now());
        match &self.data_parallel {
            Some(data_parallel) if self.options.save_every.is_none() => {
                Ok(data_parallel.all_reduce_sum(f64::from(u8::from(own && data_parallel.is_rank0())))? > 0.0)
            }
            _ => Ok(own),
        }
    }

    /// Header of a checkpoint of the current state; a resumed run continues at `sampler`.
    fn header(&self, sampler: SamplerState) -> Header {
        let training = serde_json::to_value(self.options).unwrap_or(Value::Null);
        let data = (self.data.name.as_str(), self.data.tokens.text_hash());
        let header = Header::new(self.model.hyperparameters(), training, &self.trainer, sampler, data);
        let validation = self.evaluated.filter(|(step, _)| *step == header.step).map(|(_, loss)| loss);
        Header { validation, ranks: self.ranks, ..header }
    }

    /// Writes the state to a separate file.
    fn write(&self, path: &Path, sampler: SamplerState) -> Result<()> {
        checkpoint::save(path, &self.header(sampler), self.data.tokenizer.json(), &self.trainer)
    }

    /// Exports the data for another implementation to run the same steps: the current state (`start.safetensors`, a
    /// checkpoint) and the batches of the remaining steps (`batches.safetensors`: `inputs` and `targets`, u32 [steps,
    /// sequences, context]). For a single rank.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn export(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
        let [start, batches] = EXPORTED.map(|name| folder.join(name));
        self.write(&start, self.sampler.state())?;
        let RunOptions { batch: sequences, context, steps, .. } = self.options;
        let steps = steps.saturating_sub(self.trainer.step()) as usize;
        let mut sampler = self.sampler.clone();
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for _ in 0..steps {
            let batch = sampler.draw(&self.data.train(), sequences, context, Shard::SINGLE_PROCESS)?;
            inputs.extend(batch.inputs.iter().flat_map(|token| token.to_le_bytes()));
            targets.extend(batch.targets.iter().flat_map(|token| token.to_le_bytes()));
        }
        let path = batches;
        let view = |bytes| TensorView::new(safetensors::Dtype::U32, vec![steps, sequences, context], bytes);
        let bytes = view(&inputs)
            .and_then(|inputs| Ok([("inputs", inputs), ("targets", view(&targets)?)]))
            .and_then(|tensors| safetensors::serialize(tensors, None))
            .map_err(|error| Error::file("write", &path)(std::io::Error::other(error)))?;
        files::replace(&path, |file| file.write_all(&bytes)).map_err(Error::file("write", &path))
    }

    /// Plots the log's losses, on rank 0.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn plot_loss(&self) -> Result<()> {
        if self.log.is_none() {
            return Ok(());
        }
        let svg = log::curve(&log::read(&self.folder.join(LOG))?).to_svg();
        let path = self.folder.join(CURVE);
        files::replace(&path, |file| file.write_all(svg.as_bytes())).map_err(|error| self.saver.error_of(&path, error))
    }
}

/// Fails unless all ranks see the same folder and can write into it: each writes its shard of the moments there. All
/// ranks call it.
fn check_folder(data_parallel: &DataParallel, folder: &Path) -> Result<()> {
    let comm = data_parallel.communicator();
    // Exactly representable in f64. The name is new: clients of network file systems cache missing names.
    let number = if data_parallel.is_rank0() { rand::random::<u64>() >> 11 } else { 0 };
    let number = data_parallel.all_reduce_sum(number as f64)? as u64;
    let marker = data_parallel
        .is_rank0()
        .then(|| files::create_marker(folder, number))
        .transpose()
        .map_err(Error::file("write into", folder))?;
    // Synchronizes the ranks: the marker exists after this.
    data_parallel.all_reduce_sum(0.0)?;
    let mut seen = vec![0_u64; comm.world()];
    seen[comm.rank()] = u64::from(files::has_marker(folder, number));
    comm.all_gather(&mut seen).map_err(dist::error::Error::from)?;
    drop(marker);
    let without_marker: Vec<usize> = (0..seen.len()).filter(|rank| seen[*rank] == 0).collect();
    if !without_marker.is_empty() {
        return Err(dist::error::Error::Misuse(format!(
            "{} {} not see the folder {} of rank 0, into which each rank writes its moments\n  help: give all ranks the same --out, on a file \
             system that all their hosts share, or leave --shard out",
            dist::comm::error::ranks(&without_marker),
            if without_marker.len() == 1 { "does" } else { "do" },
            folder.display()
        ))
        .into());
    }
    files::check_writable(&folder.join("moments")).map_err(Error::file("write into", folder))
}

/// Fails unless the disk and the host memory have space for the run's saves.
fn check_space(saver: &Saver, options: &RunOptions, trainer: &Trainer, tokenizer: usize, is_rank0: bool) -> Result<()> {
    let values = trainer.params().flat_len();
    let own: usize = trainer.moments().iter().map(|piece| 2 * piece.range.len()).sum();
    if is_rank0 || trainer.is_sharded() {
        check_host_memory(own + if is_rank0 { values } else { 0 })?;
    }
    if is_rank0 {
        let each = 3 * size_of::<f32>() * values + 2 * tokenizer;
        let saves = match options.save_every.unwrap_or(saver::DEFAULT_INTERVAL) {
            0 => 1,
            every => options.steps.saturating_sub(trainer.step()) / every + 1,
        };
        saver.check_space_for(each as u64, saves)?;
    }
    Ok(())
}

/// Mean loss in nats per token over the first sequences of `split`, at most this many.
///
/// # Errors
/// Errors of the model's ops.
pub fn evaluate(
    model: &dyn LanguageModel,
    split: &TokenSlice<'_>,
    sequences: usize,
    micro_batch: usize,
    context: usize,
) -> Result<f64> {
    evaluate_shard(model, split, sequences, micro_batch, context, Shard::SINGLE_PROCESS)
}

/// The contribution of one rank's micro-batches to the mean of [`evaluate`].
fn evaluate_shard(
    model: &dyn LanguageModel,
    split: &TokenSlice<'_>,
    sequences: usize,
    micro_batch: usize,
    context: usize,
    shard: Shard,
) -> Result<f64> {
    let batch = non_overlapping_sequences(split, sequences, context)?;
    let mut mean = 0.0;
    let is_own = |(number, _): &(usize, Batch)| number % shard.world == shard.rank;
    for (_, micro) in batch.micro_batches(micro_batch).enumerate().filter(is_own) {
        let (inputs, targets) = tensors(&micro, model.params().device())?;
        let loss = no_grad(|| model.loss(&inputs, &targets))?.to_scalar::<f32>()?;
        mean += f64::from(loss) * micro.sequences as f64 / batch.sequences as f64;
    }
    Ok(mean)
}

/// Inputs and targets as tensors: u32 [sequences, context].
///
/// # Errors
/// No memory on the device.
pub fn tensors(batch: &Batch, device: &Device) -> Result<(Tensor, Tensor)> {
    let tensor = |tokens: &[u32]| Tensor::from_slice(tokens, (batch.sequences, batch.context), device);
    Ok((tensor(&batch.inputs)?, tensor(&batch.targets)?))
}

/// Whether all elements are finite.
fn is_finite(tensor: &Tensor) -> candle_core::Result<bool> {
    if !tensor.dtype().is_float() {
        return Ok(true);
    }
    let values = tensor.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.iter().all(|value| value.is_finite()))
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
