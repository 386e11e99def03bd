//! Candle's Llama with random weights, once with candle's ops and once with those of this crate: logits and gradients
//! of both against those of candle's ops in f32, and time and memory of forward and of a training step.
//!
//! Run: `cargo run --release -p tilewright-candle --example llama`, on a GPU with `--features cuda`.

mod model;

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Error, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use model::{Config, Llama, Ops};
use tilewright::trace::{CountingAllocator, Options, Recording};
use tilewright_candle::{FusedAdamW, no_grad};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A row of the table.
struct Row {
    name: &'static str,
    /// Milliseconds: median.
    forward: f64,
    /// Milliseconds: median; `None` for ops without gradients.
    step: Option<f64>,
    /// Peak memory in MiB of a step, or of forward, beyond weights and optimizer state.
    peak: Option<f64>,
    /// ‖logits − those of candle's ops in f32‖ / ‖those‖.
    logits: f64,
    /// The largest such error of the gradient of a variable.
    gradients: Option<f64>,
}

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    let (config, batch, length, dtypes, repeats) = if device.is_cuda() {
        let config = Config {
            vocabulary: 32_000,
            d_model: 2048,
            d_ff: 5632,
            layers: 4,
            heads: 32,
            heads_kv: 4,
            max_length: 2048,
        };
        (config, 1, 2048, &[DType::BF16][..], 10)
    } else {
        let config =
            Config { vocabulary: 1000, d_model: 128, d_ff: 344, layers: 2, heads: 4, heads_kv: 2, max_length: 128 };
        (config, 2, 128, &[DType::F32, DType::BF16][..], 3)
    };
    dtypes.iter().try_for_each(|dtype| compare(config, [batch, length], *dtype, repeats, &device))
}

/// Prints the table for one dtype.
fn compare(config: Config, [batch, length]: [usize; 2], dtype: DType, repeats: usize, device: &Device) -> Result<()> {
    println!("{config:?}, {batch} sequences of {length} tokens, {}, {:?}", dtype.as_str(), device.location());
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, dtype, device);
    let count = batch * length;
    let ids = |factor: usize| {
        let ids: Vec<u32> = (0..count).map(|i| ((i * factor + 13) % config.vocabulary) as u32).collect();
        Tensor::from_vec(ids, (batch, length), device)
    };
    let (tokens, targets) = (ids(7919)?, ids(104_729)?);

    let model = |ops| Llama::new(config, ops, vb.clone());
    model(Ops::Candle)?;
    let reference = Reference::new(config, &variables, &tokens, &targets)?;
    let mut rows = Vec::new();
    for (name, ops) in
        [("candle, fused", Ops::CandleFused), ("candle", Ops::Candle), ("tilewright-candle", Ops::Tilewright)]
    {
        rows.push(measure(name, &model(ops)?, ops, &reference, &variables, (&tokens, &targets), repeats)?);
    }
    print(&rows);
    // In bf16 each op rounds: two correct models differ in the third digit.
    let allowed = if dtype == DType::F32 { 1e-4 } else { 5e-2 };
    if let Some(row) = rows.iter().find(|row| !(row.logits.max(row.gradients.unwrap_or(0.0)) < allowed)) {
        return Err(Error::Msg(format!("the results of {} differ from those in f32", row.name)));
    }
    Ok(())
}

/// Results of candle's ops in f32, for the same weights.
struct Reference {
    logits: Tensor,
    variables: VarMap,
    gradients: GradStore,
}

impl Reference {
    fn new(config: Config, weights: &VarMap, tokens: &Tensor, targets: &Tensor) -> Result<Reference> {
        let variables = VarMap::new();
        for (name, var) in named(weights) {
            let exact = Var::from_tensor(&var.as_detached_tensor().to_dtype(DType::F32)?)?;
            variables.data().lock().unwrap_or_else(PoisonError::into_inner).insert(name, exact);
        }
        let vb = VarBuilder::from_varmap(&variables, DType::F32, tokens.device());
        let model = Llama::new(config, Ops::Candle, vb)?;
        let gradients = model.loss(tokens, targets)?.backward()?;
        Ok(Reference { logits: no_grad(|| model.logits(tokens))?.detach(), variables, gradients })
    }
}

/// The variables of a map, sorted by name.
fn named(variables: &VarMap) -> BTreeMap<String, Var> {
    let variables = variables.data().lock().unwrap_or_else(PoisonError::into_inner);
    variables.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
}

fn measure(
    name: &'static str,
    model: &Llama,
    ops: Ops,
    reference: &Reference,
    variables: &VarMap,
    (tokens, targets): (&Tensor, &Tensor),
    repeats: usize,
) -> Result<Row> {
    let device = tokens.device();
    let logits = error(&model.logits(tokens)?, &reference.logits)?;
    let forward = || no_grad(|| model.logits(tokens)).map(drop);
    if ops == Ops::CandleFused {
        let peak = peak(device, forward)?;
        return Ok(Row { name, forward: median(device, repeats, forward)?, step: None, peak, logits, gradients: None });
    }
    let mut gradients: f64 = 0.0;
    let found = model.loss(tokens, targets)?.backward()?;
    let exact = named(&reference.variables);
    for (variable, var) in named(variables) {
        let expected = exact.get(&variable).and_then(|var| reference.gradients.get(var));
        match (found.get(&var), expected) {
            (Some(found), Some(expected)) => gradients = gradients.max(error(found, expected)?),
            _ => return Err(Error::Msg(format!("{name}: `{variable}` has no gradient"))),
        }
    }
    drop(found);
    // A learning rate of almost zero leaves the weights to the next model.
    let options = ParamsAdamW { lr: 1e-12, ..ParamsAdamW::default() };
    let mut step: Box<dyn FnMut() -> Result<()>> = match ops {
        Ops::Tilewright => {
            let mut optimizer = FusedAdamW::from_var_map(variables, options)?;
            Box::new(move || optimizer.backward_step(&model.loss(tokens, targets)?))
        }
        _ => {
            let mut optimizer = AdamW::new(variables.all_vars(), options)?;
            Box::new(move || optimizer.backward_step(&model.loss(tokens, targets)?))
        }
    };
    step()?;
    let peak = peak(device, &mut step)?;
    let (forward, step) = (median(device, repeats, forward)?, median(device, repeats, step)?);
    Ok(Row { name, forward, step: Some(step), peak, logits, gradients: Some(gradients) })
}

/// ‖found − expected‖ / ‖expected‖.
fn error(found: &Tensor, expected: &Tensor) -> Result<f64> {
    let norm = |x: Tensor| x.sqr()?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>().map(f64::sqrt);
    let (found, expected) = (found.to_dtype(DType::F32)?, expected.to_dtype(DType::F32)?);
    Ok(norm((found - &expected)?)? / norm(expected)?.max(1e-30))
}

/// Median milliseconds of `work`, which has run before.
fn median(device: &Device, repeats: usize, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(repeats);
    for _ in 0..repeats {
        device.synchronize()?;
        let start = Instant::now();
        work()?;
        device.synchronize()?;
        times.push(1e3 * start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[repeats / 2])
}

/// Peak MiB of what `work` allocates; `None` if a GPU's allocations cannot be recorded (CUPTI is missing).
fn peak(device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<Option<f64>> {
    let gpu = match device.is_cuda() {
        true => Some(tilewright_candle::memory::kernel_device(device)?.clone()),
        false => None,
    };
    let Ok(recording) = Recording::start(Options { min_allocation_bytes: Some(1), gpu, ..Options::default() }) else {
        work()?;
        return Ok(None);
    };
    work()?;
    device.synchronize()?;
    let trace = recording.finish().map_err(Error::wrap)?;
    Ok(Some(trace.peak_bytes as f64 / f64::from(1 << 20)))
}

fn print(rows: &[Row]) {
    let optional = |number: Option<f64>, digits: usize| match number {
        Some(number) => format!("{number:.digits$}"),
        None => "".into(),
    };
    println!("| ops | forward, ms | training step, ms | peak, MiB | logits | gradients |");
    println!("|---|---|---|---|---|---|");
    for row in rows {
        let gradients = row.gradients.map_or(String::new(), |error| format!("{error:.1e}"));
        let (step, peak) = (optional(row.step, 2), optional(row.peak, 1));
        println!("| {} | {:.2} | {step} | {peak} | {:.1e} | {gradients} |", row.name, row.forward, row.logits);
    }
    println!(
        "Logits and gradients: relative difference from candle's ops in f32. Peak: of a step, or of forward without one."
    );
}
