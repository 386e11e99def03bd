//! Tests of runs, with a table of bigram logits as the model.

use std::sync::Arc;

use candle_core::{D, DType};
use serde_json::json;

use super::*;
use crate::data::{Text, prepare};
use crate::dist::comm::Communicator;
use crate::dist::comm::threads::threads;
use crate::dist::ddp::{DdpOptions, GradSync};
use crate::dist::sharded::Mode;
use crate::optim::{AdamWOptions, LrSchedule};
use crate::params::{Init, ParamSpec, Params};
use crate::train::{Sampling, generate};

#[path = "run_save_tests.rs"]
mod saves;
#[path = "run_shard_tests.rs"]
mod shards;

struct Bigrams {
    params: Params,
    vocabulary: usize,
    /// Makes the logits NaN after this number of calls.
    nan_after: Option<std::cell::Cell<usize>>,
}

impl Bigrams {
    fn new(vocabulary: usize) -> Bigrams {
        let spec = ParamSpec { init: Init::Zeros, ..ParamSpec::matrix("table", &[vocabulary, vocabulary], 0.0) };
        let params = Params::new(vec![spec], &Device::Cpu, 0).unwrap();
        Bigrams { params, vocabulary, nan_after: None }
    }

    fn of(data: &Dataset) -> Bigrams {
        Bigrams::new(data.tokenizer.vocabulary())
    }
}

impl LanguageModel for Bigrams {
    fn params(&self) -> &Params {
        &self.params
    }

    fn hyperparameters(&self) -> Value {
        json!({ "vocabulary": self.vocabulary })
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        16
    }

    fn logits(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        let (sequences, n) = tokens.dims2()?;
        let rows = self.params.get("table")?.leaf(DType::F32)?.index_select(&tokens.flatten_all()?, 0)?;
        let rows = match &self.nan_after {
            Some(left) if left.get() == 0 => (rows * f64::NAN)?,
            Some(left) => {
                left.set(left.get() - 1);
                rows
            }
            None => rows,
        };
        rows.reshape((sequences, n, self.vocabulary))
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        let logits = self.logits(tokens)?.flatten_to(1)?;
        let right = logits.gather(&targets.flatten_all()?.unsqueeze(1)?, 1)?.squeeze(1)?;
        (logits.exp()?.sum(D::Minus1)?.log()? - right)?.mean_all()
    }

    fn flop_per_token(&self, _context: usize) -> f64 {
        1.0
    }
}

fn options(steps: u64) -> RunOptions {
    RunOptions {
        trainer: TrainerOptions {
            adamw: AdamWOptions::default(),
            schedule: LrSchedule { max_lr: 0.3, min_lr: 0.3 * 0.1, warmup_steps: 2, total_steps: steps },
            weight_decay: 0.0,
            decay_embeddings: false,
            clip: Some(1.0),
        },
        steps,
        batch: 6,
        micro_batch: 4,
        context: 8,
        evaluate_every: 10,
        evaluate_sequences: 4,
        save_every: Some(5),
        keep: Retention::default(),
        seed: 1,
    }
}

/// A temporary folder, and a data set whose files are in it.
fn set_up() -> (tempfile::TempDir, Dataset) {
    let dir = tempfile::tempdir().unwrap();
    let text = Text::of("cats", "the cat sat on the mat. the dog sat on the cat. ".repeat(60)).unwrap();
    let data = prepare(&text, 270, &dir.path().join("data")).unwrap();
    (dir, data)
}

/// Default options of data-parallel training.
fn data_parallel(comm: impl Into<Arc<Communicator>>, shard: Option<Mode>) -> DataParallelOptions {
    DataParallelOptions { comm: comm.into(), ddp: DdpOptions::default(), shard }
}

/// Begins a new run on one of several ranks.
fn begin_on_rank<'a>(
    model: &'a dyn LanguageModel,
    data: &'a Dataset,
    options: RunOptions,
    folder: &Path,
    data_parallel: &DataParallelOptions,
) -> Result<Run<'a>> {
    let setup = RunSetup::new(model, data, options, folder);
    Run::begin_with(RunSetup { data_parallel: Some(data_parallel), ..setup })
}

/// A communicator with a world size of 1.
fn alone() -> Communicator {
    threads(1, Default::default()).unwrap().remove(0)
}

#[derive(Default)]
struct TestObserver<'a> {
    losses: Vec<f64>,
    evaluations: Vec<(u64, f64)>,
    /// Called with the number of steps so far.
    then: Option<Box<dyn FnMut(usize) + 'a>>,
    stop_after: Option<(usize, Arc<AtomicBool>)>,
}

impl Observer for TestObserver<'_> {
    fn step(&mut self, line: &StepLine) {
        self.losses.push(line.loss);
        if let Some(then) = &mut self.then {
            then(self.losses.len());
        }
        if let Some((steps, stop)) = &self.stop_after {
            stop.store(self.losses.len() >= *steps, Ordering::Relaxed);
        }
    }

    fn evaluated(&mut self, step: u64, loss: f64) {
        self.evaluations.push((step, loss));
    }
}

fn go(run: &mut Run<'_>) -> (Ending, TestObserver<'static>) {
    let mut observer = TestObserver::default();
    let ending = run.train(&AtomicBool::new(false), &mut observer).unwrap();
    (ending, observer)
}

#[test]
fn the_loss_falls_and_generation_matches_the_text() {
    let (dir, data) = set_up();
    let model = Bigrams::of(&data);
    let folder = dir.path().join("run");
    let mut run = Run::begin(&model, &data, options(60), &folder, None).unwrap();
    let (ending, observer) = go(&mut run);
    assert_eq!((ending, observer.losses.len()), (Ending::Done, 60));
    let uniform = (data.tokenizer.vocabulary() as f64).ln();
    assert!((observer.losses[0] - uniform).abs() < 1e-3, "{} for {uniform}", observer.losses[0]);
    assert_eq!(observer.evaluations.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [10, 20, 30, 40, 50, 60]);
    assert!(observer.evaluations[5].1 < 1.5, "{:?}", observer.evaluations);

    let lines = log::read(&folder.join(LOG)).unwrap();
    assert_eq!(lines.len(), 66);
    let text = std::fs::read_to_string(folder.join(LOG)).unwrap();
    for (loss, line) in observer.losses.iter().zip(text.lines().filter(|line| line.contains("rate"))) {
        let loss = serde_json::to_string(loss).unwrap();
        assert!(line.contains(&format!("\"loss\":{loss},")), "{line} has all digits of {loss}");
    }
    run.plot_loss().unwrap();
    assert!(std::fs::read_to_string(folder.join(CURVE)).unwrap().contains("</svg>"));

    let prompt = data.tokenizer.encode(" the").unwrap();
    let mut text = Vec::new();
    let likeliest = Sampling { temperature: 0.0, ..Sampling::default() };
    generate(&model, &prompt, 3, &likeliest, |token| -> Result<()> {
        text.push(token);
        Ok(())
    })
    .unwrap();
    let text = data.tokenizer.decode(&text).unwrap();
    assert!([" cat", " dog", " mat"].iter().any(|word| text.starts_with(word)), "{text:?}");
}

#[test]
fn gradients_are_bf16_without_accumulation() {
    let (dir, data) = set_up();
    let model = Bigrams::of(&data);
    let ranks = || data_parallel(alone(), None);
    for (compute_weights, micro_batch, data_parallel, expected) in [
        (DType::F32, 6, None, DType::F32),
        (DType::BF16, 6, None, DType::BF16),
        (DType::BF16, 3, None, DType::F32),
        (DType::BF16, 8, None, DType::BF16),
        (DType::BF16, 6, Some(ranks()), DType::F32),
        (DType::F16, 6, None, DType::F32),
    ] {
        model.params().set_compute_dtype(compute_weights).unwrap();
        let options = RunOptions { micro_batch, ..options(2) };
        let folder = dir.path().join("run");
        let setup = RunSetup::new(&model, &data, options, &folder);
        let mut run = Run::begin_with(RunSetup { data_parallel: data_parallel.as_ref(), ..setup }).unwrap();
        assert_eq!(
            model.params().grads().dtype(),
            expected,
            "{compute_weights:?}, {micro_batch} of 6, data_parallel: {}",
            data_parallel.is_some()
        );
        assert_eq!(go(&mut run).1.losses.len(), 2);
    }
}

#[test]
fn accumulation_needs_f32_gradients() {
    let model = Bigrams::new(10);
    model.params().set_grad_dtype(DType::BF16).unwrap();
    let trainer = Trainer::new(model.params(), options(2).trainer).unwrap();
    let tokens = Tensor::zeros((1, 4), DType::U32, &Device::Cpu).unwrap();
    trainer.begin();
    let message = trainer.backward(&model.loss(&tokens, &tokens).unwrap(), 0.5).unwrap_err().to_string();
    assert!(message.contains("micro-batches") && message.contains("bf16"), "{message}");
}

#[test]
fn a_run_that_was_stopped_goes_on_bit_for_bit() {
    let (dir, data) = set_up();
    let whole = {
        let model = Bigrams::of(&data);
        go(&mut Run::begin(&model, &data, options(20), &dir.path().join("a"), None).unwrap()).1
    };
    // The uninterrupted run was evaluated after step 10.
    for steps in [7, 10] {
        let folder = dir.path().join(steps.to_string());
        let (ending, observer) = stopped_after(steps, &data, &folder);
        assert_eq!((ending, observer.losses.len()), (Ending::Stopped, steps));

        let model = Bigrams::of(&data);
        let checkpoint = Checkpoint::open(&folder.join(CHECKPOINT)).unwrap();
        checkpoint.check_model(&model.hyperparameters(), &[]).unwrap();
        let again: RunOptions = serde_json::from_value(checkpoint.header.training.clone()).unwrap();
        assert_eq!(again, options(20));
        let (_, rest) = go(&mut Run::begin(&model, &data, again, &folder, Some(&checkpoint)).unwrap());
        assert_eq!([observer.losses, rest.losses].concat(), whole.losses);
        assert_eq!([observer.evaluations, rest.evaluations].concat(), whole.evaluations);
    }
}

/// A run of 20 steps that is asked to stop after `steps` steps.
fn stopped_after(steps: usize, data: &Dataset, folder: &Path) -> (Ending, TestObserver<'static>) {
    let stop = Arc::new(AtomicBool::new(false));
    let mut observer = TestObserver { stop_after: Some((steps, stop.clone())), ..TestObserver::default() };
    let model = Bigrams::of(data);
    let ending = Run::begin(&model, data, options(20), folder, None).unwrap().train(&stop, &mut observer).unwrap();
    (ending, observer)
}

#[test]
fn a_stop_in_the_last_step_is_done() {
    let (dir, data) = set_up();
    let (ending, observer) = stopped_after(20, &data, &dir.path().join("run"));
    assert_eq!(ending, Ending::Done);
    assert_eq!(observer.evaluations.last().map(|(step, _)| *step), Some(20));
}

/// Only the evaluation sees the last step's weights.
#[test]
fn a_nan_validation_loss_is_an_error() {
    let (dir, data) = set_up();
    let model = Bigrams::of(&data);
    let mut options = options(1);
    options.trainer.schedule = LrSchedule { max_lr: 3e38, min_lr: 3e38, warmup_steps: 0, total_steps: 1 };
    options.trainer.clip = None;
    let folder = dir.path().join("run");
    let mut run = Run::begin(&model, &data, options, &folder, None).unwrap();
    let message = run.train(&AtomicBool::new(false), &mut TestObserver::default()).unwrap_err().to_string();
    assert!(message.contains("validation after step 1: the loss is not finite"), "{message}");
    assert!(!folder.join(CHECKPOINT).exists());
}

#[test]
fn exported_batches_are_those_that_the_run_sees() {
    let (dir, data) = set_up();
    let model = Bigrams::of(&data);
    let run = Run::begin(&model, &data, options(3), &dir.path().join("run"), None).unwrap();
    let folder = dir.path().join("export");
    run.export(&folder).unwrap();
    assert_eq!(Checkpoint::open(&folder.join("start.safetensors")).unwrap().header.step, 0);
    let bytes = std::fs::read(folder.join("batches.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut sampler = Sampler::new(options(3).seed);
    for name in ["inputs", "targets"] {
        assert_eq!(tensors.tensor(name).unwrap().shape(), [3, 6, 8]);
    }
    for step in 0..3 {
        let batch = sampler.draw(&data.train(), 6, 8, Shard::SINGLE_PROCESS).unwrap();
        for (name, expected) in [("inputs", &batch.inputs), ("targets", &batch.targets)] {
            let tensor = tensors.tensor(name).unwrap();
            let found = tensor.data().as_chunks::<4>().0.iter().map(|&token| u32::from_le_bytes(token));
            assert_eq!(found.skip(step * 48).take(48).collect::<Vec<_>>(), **expected, "{name} of step {step}");
        }
    }
}

#[test]
fn a_nan_loss_stops_the_run_and_saves_the_state() {
    let (dir, data) = set_up();
    // Two micro-batches per step: the first one of step 4 fails.
    let nan_after = Some(std::cell::Cell::new(6));
    let model = Bigrams { nan_after, ..Bigrams::of(&data) };
    let folder = dir.path().join("run");
    let mut run = Run::begin(&model, &data, options(20), &folder, None).unwrap();
    let message = run.train(&AtomicBool::new(false), &mut TestObserver::default()).unwrap_err().to_string();
    for part in ["step 4", "the loss", "output of `logits`", NOT_FINITE, "--lr"] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    let saved = Checkpoint::open(&folder.join(NOT_FINITE)).unwrap().header;
    assert_eq!((saved.step, saved.sampler.drawn), (3, 18));
    drop(run);

    // A non-finite parameter is reported first.
    let model = Bigrams::of(&data);
    let table = model.params.get("table").unwrap();
    table.set_value(&(table.value().unwrap() + f64::INFINITY).unwrap()).unwrap();
    let message = Run::begin(&model, &data, options(20), &folder, None).unwrap().step().unwrap_err().to_string();
    assert!(message.contains("step 1") && message.contains("the parameter `table`"), "{message}");
}

/// A finite loss with a non-finite gradient.
struct Steep(Bigrams);

impl LanguageModel for Steep {
    fn params(&self) -> &Params {
        self.0.params()
    }

    fn hyperparameters(&self) -> Value {
        self.0.hyperparameters()
    }

    fn vocabulary(&self) -> usize {
        self.0.vocabulary
    }

    fn context(&self) -> usize {
        self.0.context()
    }

    fn logits(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        self.0.logits(tokens)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        // All parameters are zero at the start.
        self.0.loss(tokens, targets)? + self.0.params.get("table")?.leaf(DType::F32)?.sum_all()?.sqrt()?
    }

    fn flop_per_token(&self, context: usize) -> f64 {
        self.0.flop_per_token(context)
    }
}

/// The state before a failed step is saved unless some parameters may already be updated.
#[test]
fn a_nan_gradient_stops_all_ranks() {
    let (dir, data) = set_up();
    for (form, clip, saves) in [
        (GradSync::Naive, None, true),
        (GradSync::Flat, None, true),
        (GradSync::Bucketed, Some(1.0), true),
        (GradSync::Overlap, None, false),
        (GradSync::Bucketed, None, false),
    ] {
        let model = Steep(Bigrams::of(&data));
        let data_parallel =
            DataParallelOptions { ddp: DdpOptions { form, ..DdpOptions::default() }, ..data_parallel(alone(), None) };
        let options = RunOptions { trainer: TrainerOptions { clip, ..options(2).trainer }, ..options(2) };
        let folder = dir.path().join(format!("{form:?} {clip:?}"));
        let mut run = begin_on_rank(&model, &data, options, &folder, &data_parallel).unwrap();
        let message = run.step().unwrap_err().to_string();
        assert!(message.contains("the gradient") && message.contains("`table`"), "{message}");
        assert_eq!(folder.join(NOT_FINITE).exists(), saves, "{form:?}, {clip:?}: {message}");
        assert_eq!(message.contains(NOT_FINITE), saves, "{message}");
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.contains("safetensors") || name.starts_with(".tilewright"));
    names.sort();
    names
}

#[test]
fn steps_go_on_while_a_checkpoint_is_written() {
    let (dir, data) = set_up();
    let model = Bigrams::of(&data);
    let folder = dir.path().join("run");
    let options = RunOptions { save_every: Some(5), evaluate_every: 0, ..options(9) };
    let mut run = Run::begin(&model, &data, options, &folder, None).unwrap();
    let gate = run.saver.gate.clone();
    let mut closed = Some(gate.lock().unwrap());
    // The checkpoint of step 5 is written after step 8, with the state of step 5.
    let then = |steps: usize| {
        assert!(steps > 8 || !folder.join(CHECKPOINT).exists());
        if steps == 8 {
            closed.take();
        }
    };
    let mut observer = TestObserver { then: Some(Box::new(then)), ..TestObserver::default() };
    assert_eq!(run.train(&AtomicBool::new(false), &mut observer).unwrap(), Ending::Done);
    drop(observer);
    drop(run);
    assert_eq!(names(&folder), ["checkpoint-00000005.safetensors", CHECKPOINT]);
    let five = Checkpoint::open(&folder.join("checkpoint-00000005.safetensors")).unwrap();
    assert_eq!((five.header.step, Checkpoint::open(&folder.join(CHECKPOINT)).unwrap().header.step), (5, 9));

    let short = Bigrams::of(&data);
    let expected = dir.path().join("five");
    let options = RunOptions { steps: 5, ..options };
    go(&mut Run::begin(&short, &data, options, &expected, None).unwrap());
    five.load_params(model.params()).unwrap();
    let values = |model: &Bigrams| model.params.values().to_vec1::<f32>().unwrap();
    assert_eq!(values(&model), values(&short), "the state of step 5");
}

#[test]
fn an_error_of_a_save_comes_with_the_next_step() {
    let (dir, data) = set_up();
    let model = Bigrams::of(&data);
    let folder = dir.path().join("run");
    let options = RunOptions { save_every: Some(5), evaluate_every: 0, ..options(1_000_000) };
    let mut run = Run::begin(&model, &data, options, &folder, None).unwrap();
    // After the first checkpoint no file can be renamed to its name.
    let then = |steps: usize| {
        if steps == 9 {
            let start = Instant::now();
            while !folder.join(CHECKPOINT).exists() {
                assert!(start.elapsed() < Duration::from_secs(100), "the checkpoint of step 5 is not there");
                std::thread::yield_now();
            }
            std::fs::remove_file(folder.join(CHECKPOINT)).unwrap();
            std::fs::create_dir(folder.join(CHECKPOINT)).unwrap();
        }
    };
    let mut observer = TestObserver { then: Some(Box::new(then)), ..TestObserver::default() };
    let message = run.train(&AtomicBool::new(false), &mut observer).unwrap_err().to_string();
    for part in ["cannot write", CHECKPOINT, "of step 5"] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    assert!(observer.losses.len() < 1_000_000);
}

#[test]
fn non_finite_weights_do_not_replace_a_checkpoint() {
    let (dir, data) = set_up();
    let folder = dir.path().join("run");
    let model = Bigrams::of(&data);
    let mut run = Run::begin(&model, &data, options(9), &folder, None).unwrap();
    run.step().unwrap();
    run.save().unwrap();
    run.step().unwrap();
    let table = model.params.get("table").unwrap();
    table.set_value(&(table.value().unwrap() + f64::NAN).unwrap()).unwrap();
    let message = run.save().unwrap_err().to_string();
    for part in ["cannot write", "`table` is not finite", "--lr", "of step 1, is intact"] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    assert_eq!(names(&folder), [CHECKPOINT]);
    assert_eq!(Checkpoint::open(&folder.join(CHECKPOINT)).unwrap().header.step, 1);
}

/// Without --save-every: after step 100, and at the end.
#[test]
fn saves_are_due_by_default() {
    let (dir, data) = set_up();
    for world in [1, 2] {
        let folder = dir.path().join(format!("run {world}"));
        ranks(world, |comm| {
            let data_parallel = data_parallel(comm, None);
            let model = Bigrams::of(&data);
            let options = RunOptions { save_every: None, evaluate_every: 0, ..options(110) };
            let mut run = begin_on_rank(&model, &data, options, &folder, &data_parallel).unwrap();
            run.train(&AtomicBool::new(false), &mut TestObserver::default()).unwrap();
        });
        assert_eq!(names(&folder), ["checkpoint-00000100.safetensors", CHECKPOINT], "{world} ranks");
    }
}

#[test]
fn foreign_files_are_kept() {
    let (dir, data) = set_up();
    let folder = dir.path().join("run");
    let model = Bigrams::of(&data);
    let options = RunOptions { keep: Retention { last: 1, best: 0 }, ..options(9) };
    let mut run = Run::begin(&model, &data, options, &folder, None).unwrap();
    run.step().unwrap();
    run.save().unwrap();
    let own = [
        "checkpoint-1.safetensors",
        "checkpoint-00000000.safetensors",
        "moments-of-joy.safetensors",
        "moments-00000001-1-0-of-2.safetensors",
        // Moments of a checkpoint that cannot be read now, but possibly later.
        "moments-00000000-0123456789abcdef-0-of-2.safetensors",
    ];
    std::fs::copy(folder.join(CHECKPOINT), folder.join(own[0])).unwrap();
    own[1..].iter().for_each(|name| std::fs::write(folder.join(name), "no checkpoint").unwrap());
    for _ in 0..2 {
        run.step().unwrap();
        run.save().unwrap();
    }
    let mut expected = [own.as_slice(), &[CHECKPOINT]].concat();
    expected.sort();
    assert_eq!(names(&folder), expected);
}

/// Moments in a folder that other ranks do not see would be missing when the run resumes.
#[test]
fn ranks_that_write_moments_see_one_folder() {
    let (dir, data) = set_up();
    let folders = [0, 1, 0].map(|number| dir.path().join(number.to_string()));
    folders[..2].iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
    let begin = |comm: Communicator, folders: &[std::path::PathBuf]| {
        let folder = &folders[comm.rank()];
        let data_parallel = data_parallel(comm, Some(Mode::Zero1));
        let model = Bigrams::of(&data);
        let begun = begin_on_rank(&model, &data, options(3), folder, &data_parallel);
        begun.map(drop).map_err(|error| error.to_string())
    };
    for outcome in ranks(3, |comm| begin(comm, &folders)) {
        let message = outcome.unwrap_err();
        assert!(message.contains("rank 1 does not see the folder") && message.contains("--out"), "{message}");
    }
    assert_eq!(names(&folders[1]), [] as [&str; 0]);
    let same = [0; 3].map(|_| folders[0].clone());
    ranks(3, |comm| begin(comm, &same)).into_iter().for_each(|outcome| outcome.unwrap());
    assert_eq!(names(&folders[0]), [] as [&str; 0]);
}

/// The last two and the best one; a newer one is complete before an older one is removed.
#[test]
fn the_last_and_the_best_checkpoints_are_kept() {
    let (dir, data) = set_up();
    let folder = dir.path().join("run");
    let model = Bigrams::of(&data);
    let options = RunOptions { save_every: Some(0), ..options(100) };
    let mut run = Run::begin(&model, &data, options, &folder, None).unwrap();
    let mut kept = Vec::new();
    for (loss, keep) in [
        (3.0, (2, 1)),
        (1.0, (2, 1)),
        (2.0, (2, 1)),
        (4.0, (2, 1)),
        (5.0, (2, 1)),
        (6.0, (1, 0)),
        (1.5, (0, 1)),
        (1.7, (0, 1)),
    ] {
        run.step().unwrap();
        run.evaluated = Some((run.trainer.step(), loss));
        (run.saver.keep.last, run.saver.keep.best) = keep;
        let left = "moments-00000001-0123456789abcdef-0-of-2.safetensors";
        std::fs::write(folder.join(left), "of a run that was killed").unwrap();
        run.save().unwrap();
        let steps = names(&folder).into_iter().map(|name| Checkpoint::open(&folder.join(name)).unwrap().header.step);
        kept.push(steps.collect::<Vec<_>>());
    }
    let expected: [&[u64]; 8] = [&[1], &[1, 2], &[2, 3], &[2, 3, 4], &[2, 4, 5], &[6], &[6, 7], &[6, 7, 8]];
    assert_eq!(kept, expected);
    drop(run);

    // Resuming from an older checkpoint repeats the later steps.
    std::fs::copy(folder.join("checkpoint-00000006.safetensors"), folder.join(CHECKPOINT)).unwrap();
    let checkpoint = Checkpoint::open(&folder.join(CHECKPOINT)).unwrap();
    let mut run = Run::begin(&model, &data, options, &folder, Some(&checkpoint)).unwrap();
    run.step().unwrap();
    run.save().unwrap();
    let found = names(&folder);
    assert_eq!(found, ["checkpoint-00000006.safetensors", CHECKPOINT]);
    let step = |name: &str| Checkpoint::open(&folder.join(name)).unwrap().header.step;
    assert_eq!(step(CHECKPOINT), 7);

    // A link to the checkpoint is replaced, and its target stays under the older name.
    std::fs::rename(folder.join(CHECKPOINT), folder.join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", folder.join(CHECKPOINT)).unwrap();
    run.step().unwrap();
    run.save().unwrap();
    let steps = ["elsewhere", "checkpoint-00000007.safetensors", CHECKPOINT].map(step);
    assert_eq!(steps, [7, 7, 8]);
}

/// Runs `work` on every rank of a world.
fn ranks<R: Send>(world: usize, work: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    ranks_with(world, Default::default(), work)
}

fn ranks_with<R: Send>(
    world: usize,
    limits: crate::dist::comm::Options,
    work: impl Fn(Communicator) -> R + Sync,
) -> Vec<R> {
    let comms = threads(world, limits).unwrap();
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || work(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Begins a new run on two ranks that shard the optimizer, and calls `work` on each.
fn zero1_ranks<R: Send>(
    data: &Dataset,
    options: RunOptions,
    folder: &Path,
    work: impl Fn(&mut Run<'_>, &Communicator) -> R + Sync,
) -> Vec<R> {
    ranks(2, |comm| {
        let comm = Arc::new(comm);
        let data_parallel = data_parallel(comm.clone(), Some(Mode::Zero1));
        let model = Bigrams::of(data);
        work(&mut begin_on_rank(&model, data, options, folder, &data_parallel).unwrap(), &comm)
    })
}
