//! Runs of a model that is a table: for each token, scores of the next one.

use candle_core::{D, DType};
use serde_json::json;

use super::*;
use crate::data::{Text, prepare};
use crate::dist::comm::threads::threads;
use crate::dist::ddp::{DdpOptions, Form};
use crate::optim::{AdamWOptions, Schedule};
use crate::params::{Init, ParamSpec, Params};
use crate::train::{Sampling, generate};

struct Bigrams {
    params: Params,
    vocabulary: usize,
    /// Makes the loss infinite at the step after so many calls.
    poison: Option<std::cell::Cell<usize>>,
}

impl Bigrams {
    fn new(vocabulary: usize) -> Bigrams {
        let spec = ParamSpec { init: Init::Zeros, ..ParamSpec::matrix("table", &[vocabulary, vocabulary], 0.0) };
        let params = Params::new(vec![spec], &Device::Cpu, 0).unwrap();
        Bigrams { params, vocabulary, poison: None }
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
        let (windows, n) = tokens.dims2()?;
        let rows = self.params.get("table")?.leaf(DType::F32)?.index_select(&tokens.flatten_all()?, 0)?;
        let rows = match &self.poison {
            Some(left) if left.get() == 0 => (rows * f64::NAN)?,
            Some(left) => {
                left.set(left.get() - 1);
                rows
            }
            None => rows,
        };
        rows.reshape((windows, n, self.vocabulary))
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
        learner: LearnerOptions {
            adamw: AdamWOptions::default(),
            schedule: Schedule { peak: 0.3, floor: 0.3 * 0.1, warmup: 2, total: steps },
            weight_decay: 0.0,
            decay_embeddings: false,
            clip: Some(1.0),
        },
        steps,
        batch: 6,
        micro_batch: 4,
        context: 8,
        evaluate_every: 10,
        evaluate_windows: 4,
        save_every: 5,
        seed: 1,
    }
}

fn data(folder: &Path) -> Dataset {
    let text = Text::of("cats", "the cat sat on the mat. the dog sat on the cat. ".repeat(60)).unwrap();
    prepare(&text, 270, folder).unwrap()
}

#[derive(Default)]
struct Heard {
    losses: Vec<f64>,
    evaluations: Vec<(u64, f64)>,
    stop_after: Option<(usize, std::sync::Arc<AtomicBool>)>,
}

impl Observer for Heard {
    fn step(&mut self, line: &StepLine) {
        self.losses.push(line.loss);
        if let Some((steps, stop)) = &self.stop_after {
            stop.store(self.losses.len() >= *steps, Ordering::Relaxed);
        }
    }

    fn evaluated(&mut self, step: u64, loss: f64) {
        self.evaluations.push((step, loss));
    }
}

fn go(run: &mut Run<'_>) -> (Ending, Heard) {
    let mut heard = Heard::default();
    let ending = run.go(&AtomicBool::new(false), &mut heard).unwrap();
    (ending, heard)
}

#[test]
fn the_loss_falls_and_the_model_writes_what_it_read() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(&dir.path().join("data"));
    let model = Bigrams::new(data.tokenizer.vocabulary());
    let folder = dir.path().join("run");
    let (ending, heard) = go(&mut Run::begin(&model, &data, options(60), &folder, None).unwrap());
    assert_eq!((ending, heard.losses.len()), (Ending::Done, 60));
    let uniform = (data.tokenizer.vocabulary() as f64).ln();
    assert!((heard.losses[0] - uniform).abs() < 1e-3, "{} for {uniform}", heard.losses[0]);
    assert_eq!(heard.evaluations.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [10, 20, 30, 40, 50, 60]);
    assert!(heard.evaluations[5].1 < 1.5, "{:?}", heard.evaluations);

    let lines = log::read(&folder.join(LOG)).unwrap();
    assert_eq!(lines.len(), 66);
    let text = std::fs::read_to_string(folder.join(LOG)).unwrap();
    for (loss, line) in heard.losses.iter().zip(text.lines().filter(|line| line.contains("rate"))) {
        let loss = serde_json::to_string(loss).unwrap();
        assert!(line.contains(&format!("\"loss\":{loss},")), "{line} has all digits of {loss}");
    }
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
fn gradients_are_bf16_where_nothing_is_added_to_them() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(&dir.path().join("data"));
    let model = Bigrams::new(data.tokenizer.vocabulary());
    let ranks = || TeamOptions {
        comm: std::sync::Arc::new(threads(1, Default::default()).unwrap().remove(0)),
        ddp: DdpOptions::default(),
        shard: None,
    };
    for (copy, micro_batch, team, expected) in [
        (DType::F32, 6, None, DType::F32),
        (DType::BF16, 6, None, DType::BF16),
        (DType::BF16, 3, None, DType::F32),
        (DType::BF16, 8, None, DType::BF16),
        (DType::BF16, 6, Some(ranks()), DType::F32),
        (DType::F16, 6, None, DType::F32),
    ] {
        model.params().keep_copy(copy).unwrap();
        let options = RunOptions { micro_batch, ..options(2) };
        let folder = dir.path().join("run");
        let mut run = Run::begin_with(&model, &data, options, &folder, None, team.as_ref(), None).unwrap();
        assert_eq!(model.params().grads().dtype(), expected, "{copy:?}, {micro_batch} of 6, team: {}", team.is_some());
        assert_eq!(go(&mut run).1.losses.len(), 2);
    }
}

#[test]
fn shares_of_a_step_need_gradients_in_f32() {
    let model = Bigrams::new(10);
    model.params().keep_grads(DType::BF16).unwrap();
    let learner = Learner::new(model.params(), options(2).learner).unwrap();
    let tokens = Tensor::zeros((1, 4), DType::U32, &Device::Cpu).unwrap();
    learner.begin().unwrap();
    let message = learner.backward(&model.loss(&tokens, &tokens).unwrap(), 0.5).unwrap_err().to_string();
    assert!(message.contains("micro-batches") && message.contains("bf16"), "{message}");
}

#[test]
fn a_run_that_was_stopped_goes_on_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(&dir.path().join("data"));
    let vocabulary = data.tokenizer.vocabulary();
    let whole = {
        let model = Bigrams::new(vocabulary);
        go(&mut Run::begin(&model, &data, options(20), &dir.path().join("a"), None).unwrap()).1
    };
    let folder = dir.path().join("b");
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let mut heard = Heard { stop_after: Some((7, stop.clone())), ..Heard::default() };
    let model = Bigrams::new(vocabulary);
    let ending = Run::begin(&model, &data, options(20), &folder, None).unwrap().go(&stop, &mut heard).unwrap();
    assert_eq!((ending, heard.losses.len()), (Ending::Stopped, 7));

    let model = Bigrams::new(vocabulary);
    let checkpoint = Checkpoint::open(&folder.join(CHECKPOINT)).unwrap();
    checkpoint.check_model(&model.hyperparameters()).unwrap();
    let again: RunOptions = serde_json::from_value(checkpoint.header.training.clone()).unwrap();
    assert_eq!(again, options(20));
    let (_, rest) = go(&mut Run::begin(&model, &data, again, &folder, Some(&checkpoint)).unwrap());
    assert_eq!([heard.losses, rest.losses].concat(), whole.losses);
    assert_eq!(rest.evaluations, whole.evaluations);
}

#[test]
fn exported_batches_are_those_that_the_run_sees() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(&dir.path().join("data"));
    let model = Bigrams::new(data.tokenizer.vocabulary());
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
        let batch = sampler.draw(&data.train(), 6, 8, Shard::WHOLE);
        for (name, expected) in [("inputs", &batch.inputs), ("targets", &batch.targets)] {
            let tensor = tensors.tensor(name).unwrap();
            let found = tensor.data().as_chunks::<4>().0.iter().map(|&token| u32::from_le_bytes(token));
            assert_eq!(found.skip(step * 48).take(48).collect::<Vec<_>>(), **expected, "{name} of step {step}");
        }
    }
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_with_its_state_saved() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(&dir.path().join("data"));
    // Two micro-batches a step: the first one of step 4 fails.
    let poison = Some(std::cell::Cell::new(6));
    let model = Bigrams { poison, ..Bigrams::new(data.tokenizer.vocabulary()) };
    let folder = dir.path().join("run");
    let mut run = Run::begin(&model, &data, options(20), &folder, None).unwrap();
    let message = run.go(&AtomicBool::new(false), &mut Heard::default()).unwrap_err().to_string();
    for part in ["step 4", "the loss", "output of `logits`", NOT_FINITE, "--lr"] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    let saved = Checkpoint::open(&folder.join(NOT_FINITE)).unwrap().header;
    assert_eq!((saved.step, saved.sampler.drawn), (3, 18));

    // Where a parameter is not finite, it is the first.
    let model = Bigrams::new(data.tokenizer.vocabulary());
    let table = model.params.get("table").unwrap();
    table.set_value(&(table.value().unwrap() + f64::INFINITY).unwrap()).unwrap();
    let message = Run::begin(&model, &data, options(20), &folder, None).unwrap().step().unwrap_err().to_string();
    assert!(message.contains("step 1") && message.contains("the parameter `table`"), "{message}");
}

/// A loss that is a number, of which the gradient is none.
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
        // All are zeros at the start.
        self.0.loss(tokens, targets)? + self.0.params.get("table")?.leaf(DType::F32)?.sum_all()?.sqrt()?
    }

    fn flop_per_token(&self, context: usize) -> f64 {
        self.0.flop_per_token(context)
    }
}

/// The state before a step is saved unless parameters may have had a part of it.
#[test]
fn a_gradient_that_is_no_number_stops_ranks_with_their_state_saved_where_it_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(&dir.path().join("data"));
    for (form, clip, saves) in [
        (Form::Naive, None, true),
        (Form::Flat, None, true),
        (Form::Bucketed, Some(1.0), true),
        (Form::Overlap, None, false),
        (Form::Bucketed, None, false),
    ] {
        let model = Steep(Bigrams::new(data.tokenizer.vocabulary()));
        let team = TeamOptions {
            comm: std::sync::Arc::new(threads(1, Default::default()).unwrap().remove(0)),
            ddp: DdpOptions { form, ..DdpOptions::default() },
            shard: None,
        };
        let options = RunOptions { learner: LearnerOptions { clip, ..options(2).learner }, ..options(2) };
        let folder = dir.path().join(format!("{form:?} {clip:?}"));
        let mut run = Run::begin_with(&model, &data, options, &folder, None, Some(&team), None).unwrap();
        let message = run.step().unwrap_err().to_string();
        assert!(message.contains("the gradient") && message.contains("`table`"), "{message}");
        assert_eq!(folder.join(NOT_FINITE).exists(), saves, "{form:?}, {clip:?}: {message}");
        assert_eq!(message.contains(NOT_FINITE), saves, "{message}");
    }
}
