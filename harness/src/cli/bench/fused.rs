//! `tilewright bench fused`: compares fused kernels with tensor ops, for attention and for whole models.

use std::io::Write;

use candle_core::{DType, Device};
use clap::{Args, ValueEnum};

use super::attention_kinds::{self, AttentionTimes, CaseResult};
use super::model::{self, Mode};
use super::wall_time::{Times, release_memory};
use crate::cli::model_options::{device_info, model_device};
use crate::cli::oom_probe::{MemoryOutcome, catch_oom};
use crate::cli::{CliError, Result, expect_used};
use crate::model::{Attention, Config, Fusion, Precision, SIZES};
use crate::report::{Cell, Column, Outputs, Report, Table};
use tilewright_cli::device::{self, DeviceArg};

#[derive(Args)]
pub struct Arguments {
    /// What to compare: attention, model, or both
    #[arg(long, value_enum, value_delimiter = ',', default_value = "attention,model")]
    subjects: Vec<Subject>,
    /// Head dimensions of attention. Default: 16,32,64,128
    #[arg(long, alias = "dims", value_name = "DIMS", value_delimiter = ',')]
    head_dims: Vec<usize>,
    /// Sequence lengths of attention. Default: 256 to 16384, or 256 to 1024 on the CPU
    #[arg(long, alias = "lengths", value_name = "TOKENS", value_delimiter = ',')]
    seq_lens: Vec<usize>,
    /// Named model sizes: small, medium, large, xl, 2.7B. Default: all of them, or a small model on the CPU
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    sizes: Vec<String>,
    /// Context lengths of models: tokens per sequence. Default: 128
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    contexts: Vec<usize>,
    /// Precision of models. Default: f32
    #[arg(long)]
    precision: Option<Precision>,
    /// Number of warm-up steps
    #[arg(long, value_name = "STEPS", default_value_t = 5)]
    warmup: usize,
    /// Number of measured runs of attention. Default: 100, or 5 on the CPU
    #[arg(long, value_name = "N")]
    runs: Option<usize>,
    /// Number of measured steps of models. Default: 10
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Subject {
    /// Naive attention in tensor ops, against our FlashAttention-2 kernels
    Attention,
    /// Models in tensor ops, with one kernel per op, and with fused blocks
    Model,
}

impl Arguments {
    /// # Errors
    /// An option of a subject that is not measured.
    fn check_subjects(&self) -> Result<()> {
        let options = [
            (Subject::Attention, "attention", "--head-dims", !self.head_dims.is_empty()),
            (Subject::Attention, "attention", "--seq-lens", !self.seq_lens.is_empty()),
            (Subject::Attention, "attention", "--runs", self.runs.is_some()),
            (Subject::Model, "model", "--sizes", !self.sizes.is_empty()),
            (Subject::Model, "model", "--contexts", !self.contexts.is_empty()),
            (Subject::Model, "model", "--precision", self.precision.is_some()),
            (Subject::Model, "model", "--steps", self.steps.is_some()),
        ];
        expect_used(options.map(|(subject, name, option, is_given)| {
            let is_unused = is_given && !self.subjects.contains(&subject);
            let help = format!("omit it, or add {name} to --subjects");
            (option, is_unused, format!("it goes with `--subjects {name}`"), help)
        }))
    }

    fn precision(&self) -> Precision {
        self.precision.unwrap_or(Precision::F32)
    }

    fn steps(&self) -> usize {
        self.steps.unwrap_or(10)
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.check_subjects()?;
    arguments.outputs.expect_no_plot()?;
    arguments.outputs.check()?;
    if arguments.steps == Some(0) || arguments.runs == Some(0) {
        return Err(CliError::usage("--steps or --runs is 0", "both must be at least 1"));
    }
    let device = model_device(arguments.device)?;
    let name = device_info(&device)?.name;
    let mut report = Report::new("fused", "Fused and unfused");
    if arguments.subjects.contains(&Subject::Attention) {
        report = report.table(attention(arguments, &device, &name)?);
    }
    if arguments.subjects.contains(&Subject::Model) {
        report = report.table(models(arguments, &device, &name)?);
    }
    Ok(arguments.outputs.write(report, out)?)
}

/// Returns the speedup of `fast` over `slow`.
fn gain(slow: &Cell, fast: &Cell) -> Cell {
    match (slow.value(), fast.value()) {
        (Some(slow), Some(fast)) => Cell::Number(slow / fast),
        _ => Cell::Empty,
    }
}

fn attention(arguments: &Arguments, device: &Device, name: &str) -> Result<Table> {
    let seq_lens = match (arguments.seq_lens.as_slice(), device.is_cpu()) {
        ([], true) => vec![256, 1024],
        ([], false) => vec![256, 1024, 4096, 8192, 16384],
        (seq_lens, _) => seq_lens.to_vec(),
    };
    let head_dims: &[usize] = match arguments.head_dims.as_slice() {
        [] => &[16, 32, 64, 128],
        given => given,
    };
    if seq_lens.contains(&0) || head_dims.iter().any(|d| !(1..=256).contains(d)) {
        return Err(CliError::usage(
            "invalid shape of attention",
            "sequence lengths must be at least 1, head dimensions from 1 to 256",
        ));
    }
    let runs = arguments.runs.unwrap_or(if device.is_cpu() { 5 } else { 100 });
    let mut cases = Vec::new();
    for &d in head_dims {
        for &seq_len in &seq_lens {
            for kind in [Attention::Naive, Attention::Flash] {
                cases.push(attention_kinds::Case { kind, batch: 8, seq_len, d, causal: true, dtype: DType::F32 });
            }
        }
    }
    let rows = attention_kinds::measure_all(cases, device, arguments.warmup, runs)?;
    let columns = [
        Column::integer("d"),
        Column::integer("seq_len"),
        Column::number("unfused forward").unit("ms"),
        Column::number("fused forward").unit("ms"),
        Column::number("forward gain").decimals(2),
        Column::number("unfused backward").unit("ms"),
        Column::number("fused backward").unit("ms"),
        Column::number("backward gain").decimals(2),
    ];
    let mut table = Table::new("fused-attention", "Attention", columns);
    for pair in rows.cases.chunks(2) {
        let [unfused, fused] = pair else { continue };
        let times = |result: &CaseResult, pick: fn(&AttentionTimes) -> &Times| {
            result.times.as_ref().map_or(Cell::OutOfMemory, |times| pick(times).mean_std())
        };
        let mut cells: Vec<Cell> = vec![unfused.case.d.into(), unfused.case.seq_len.into()];
        for pick in
            [(|times: &AttentionTimes| &times.forward) as fn(&AttentionTimes) -> &Times, |times: &AttentionTimes| {
                &times.backward
            }]
        {
            let (slow, fast) = (times(unfused, pick), times(fused, pick));
            let gain = gain(&slow, &fast);
            cells.extend([slow, fast, gain]);
        }
        table.push(cells);
    }
    table.notes = rows.notes;
    table.notes.push(format!(
        "On {name}. Batch 8, single head, causal, f32. Unfused: naive attention in tensor ops. Fused: our \
         FlashAttention-2 kernels. Mean ± standard deviation of {runs} runs. A gain of 2 means twice as fast."
    ));
    Ok(table)
}

/// An implementation of a model.
struct Form {
    name: &'static str,
    attention: Attention,
    fusion: Fusion,
}

/// The implementations of a model that are compared, the least fused one first.
const FORMS: [Form; 3] = [
    Form { name: "tensor ops", attention: Attention::Naive, fusion: Fusion::None },
    Form { name: "one kernel per op", attention: Attention::Flash, fusion: Fusion::Ops },
    Form { name: "fused blocks", attention: Attention::Flash, fusion: Fusion::Blocks },
];

fn models(arguments: &Arguments, device: &Device, name: &str) -> Result<Table> {
    let sizes: Vec<Option<&str>> = match (arguments.sizes.as_slice(), device.is_cpu()) {
        ([], true) => vec![None],
        ([], false) => SIZES.iter().map(|size| Some(size.name)).collect(),
        (sizes, _) => sizes.iter().map(|size| Some(size.as_str())).collect(),
    };
    let columns = [
        Column::text("size"),
        Column::integer("context"),
        Column::text("form"),
        Column::number("forward").unit("ms"),
        Column::number("gain").key("forward_gain").decimals(2),
        Column::number("forward and backward").unit("ms"),
        Column::number("gain").key("forward_and_backward_gain").decimals(2),
        Column::number("train step").unit("ms").key("whole_step_ms"),
        Column::number("gain").key("whole_step_gain").decimals(2),
    ];
    let mut table = Table::new("fused-model", "Whole models", columns);
    let mut param_cache = model::ParamCache::default();
    let contexts: &[usize] = match arguments.contexts.as_slice() {
        [] => &[128],
        given => given,
    };
    for size in sizes {
        for &context in contexts {
            let base = match size {
                None => Config { context, ..Config::default() },
                Some(size) => Config::named(size, context).map_err(|error| CliError::Usage(error.to_string()))?,
            };
            let label = size.map_or_else(|| format!("{}×{}", base.layers, base.d_model), str::to_string);
            let mut unfused: Option<[Cell; 3]> = None;
            for Form { name: form, attention, fusion } in FORMS {
                let config = Config { attention, fusion, precision: arguments.precision(), ..base.clone() };
                let case = model::Case { size: label.clone(), config, batch: 4 };
                let times = form_times(&case, arguments, device, &mut param_cache, &mut table.notes)?;
                let slow = unfused.get_or_insert_with(|| times.clone());
                let mut cells: Vec<Cell> = vec![label.clone().into(), context.into(), form.into()];
                for (time, slow) in times.iter().zip(slow.iter()) {
                    cells.extend([time.clone(), gain(slow, time)]);
                }
                table.push(cells);
            }
        }
    }
    table.notes.push(format!(
        "On {name}. Batch 4, {}. Mean ± standard deviation of {} steps after {} warm-up steps; a train step is \
         forward, backward, gradient clipping and AdamW. Gains are relative to tensor ops.",
        arguments.precision(),
        arguments.steps(),
        arguments.warmup
    ));
    Ok(table)
}

/// Measures forward, forward and backward, and the train step of one implementation.
fn form_times(
    case: &model::Case,
    arguments: &Arguments,
    device: &Device,
    param_cache: &mut model::ParamCache,
    notes: &mut Vec<String>,
) -> Result<[Cell; 3]> {
    let plan = model::Plan { warmup: arguments.warmup, steps: arguments.steps(), seconds: None };
    let mut cells = [Cell::OutOfMemory, Cell::OutOfMemory, Cell::OutOfMemory];
    for (cell, mode) in cells.iter_mut().zip([Mode::Forward, Mode::ForwardBackward, Mode::TrainStep]) {
        let variant = model::Variant { mode, cuda_graph: !device.is_cpu(), time_phases: false };
        match catch_oom(model::measure(case, device, variant, &plan, param_cache))? {
            MemoryOutcome::Fits(parts) => *cell = parts.step.mean_std(),
            MemoryOutcome::OutOfMemory(why) => notes.push(format!("{}, {}: {why}", case.size, mode.name())),
        }
        release_memory(device);
    }
    Ok(cells)
}
