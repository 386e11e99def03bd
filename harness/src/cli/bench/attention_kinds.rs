//! `tilewright bench attention --kinds`: times three implementations of attention under autograd, as models call them.

use std::io::Write;

use candle_core::{DType, Device, Tensor, Var};

use super::attention;
use super::wall_time::{Times, live_bytes_after, release_memory};
use crate::cli::model_options::{device_info, model_device};
use crate::cli::oom_probe::{MemoryOutcome, catch_oom, expect_memory};
use crate::cli::{CliError, Result, expect_used};
use crate::model::Attention;
use crate::ops::attention::{AttentionOptions, Tiling, flash_attention, naive_attention, tiled_attention};
use crate::report::{Axis, Cell, Column, Plot, Point, Report, Series, Table};
use crate::train;

#[derive(clap::Args)]
#[command(next_help_heading = "Attention under autograd")]
pub struct Kinds {
    /// Time these implementations instead, forward and backward under autograd: naive, tiled or flash
    #[arg(long, value_delimiter = ',', conflicts_with_all = WITHOUT_KINDS)]
    pub kinds: Vec<Attention>,
    /// With --kinds: sequence lengths of queries and keys. Default: 256 to 16384, or 256 to 1024 on the CPU
    #[arg(long, alias = "lengths", value_name = "TOKENS", value_delimiter = ',', requires = "kinds")]
    seq_lens: Vec<usize>,
    /// With --kinds: number of measured runs. Default: 100, or 5 on the CPU
    #[arg(long, value_name = "N", requires = "kinds", value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
}

/// Options of the kernels alone: attention under autograd has one head, the tiles of a launch, and no rows to record.
const WITHOUT_KINDS: [&str; 12] = [
    "modifiers",
    "heads",
    "fwd_tiles",
    "dkdv_tiles",
    "dq_tiles",
    "sweep",
    "forward_only",
    "one_pass",
    "deterministic",
    "record",
    "warmup_ms",
    "rep_ms",
];

impl Kinds {
    /// Refuses the options that need `--kinds`: clap does not require it beside options that conflict with it.
    pub fn expect_given(&self) -> Result<()> {
        let options = [("--seq-lens", !self.seq_lens.is_empty()), ("--runs", self.runs.is_some())];
        expect_used(options.map(|(option, is_given)| {
            let help = "omit it; --seq-len, --warmup-ms and --rep-ms are options of the kernels alone".to_string();
            (option, is_given && self.kinds.is_empty(), "it is an option of --kinds".to_string(), help)
        }))
    }
}

/// One single-head attention problem.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub kind: Attention,
    pub batch: usize,
    pub seq_len: usize,
    pub d: usize,
    pub causal: bool,
    pub dtype: DType,
}

/// Results of one case.
pub struct AttentionTimes {
    pub forward: Times,
    pub backward: Times,
    /// Bytes in use between forward and backward: inputs, output, and saved tensors.
    pub saved_bytes: Option<f64>,
}

impl Case {
    /// Bytes of one score matrix, in f32.
    pub fn score_bytes(&self) -> f64 {
        4.0 * self.batch as f64 * (self.seq_len as f64).powi(2)
    }

    /// Bytes of queries, keys, values and output.
    fn input_bytes(&self) -> f64 {
        4.0 * self.batch as f64 * self.seq_len as f64 * self.d as f64 * self.dtype.size_in_bytes() as f64
    }

    fn run(&self, [q, k, v]: &[Var; 3]) -> candle_core::Result<Tensor> {
        let [q, k, v] = [q, k, v].map(Var::as_tensor);
        match self.kind {
            Attention::Naive => naive_attention(q, k, v, self.causal, None),
            Attention::Tiled => tiled_attention(q, k, v, self.causal, None, Tiling::default()),
            Attention::Flash => flash_attention(q, k, v, &AttentionOptions::new(self.causal)),
        }
    }

    fn inputs(&self, device: &Device) -> candle_core::Result<[Var; 3]> {
        let one = || {
            let shape = (self.batch, 1, self.seq_len, self.d);
            Var::from_tensor(&Tensor::randn(0.0_f32, 1.0, shape, device)?.to_dtype(self.dtype)?)
        };
        Ok([one()?, one()?, one()?])
    }

    /// Times forward and backward `runs` times after `warmup` runs.
    ///
    /// # Errors
    /// Out of memory, or an error of candle or a kernel.
    pub fn measure(&self, device: &Device, warmup: usize, runs: usize) -> train::Result<AttentionTimes> {
        // Naive attention has six live score matrices at the end of forward, and two more in backward.
        let scores = if self.kind == Attention::Naive { 8.0 * self.score_bytes() } else { 0.0 };
        expect_memory(device, scores + 2.0 * self.input_bytes())?;
        // Excludes one-time allocations, such as compiled kernels, from the saved bytes.
        drop(self.run(&self.inputs(device)?)?);
        let ((inputs, o), saved_bytes) = live_bytes_after(device, || {
            let inputs = self.inputs(device)?;
            let o = self.run(&inputs)?;
            Ok((inputs, o))
        })?;
        drop(o);
        let (mut forward, mut backward) = (Times::default(), Times::default());
        for _ in 0..warmup {
            self.run(&inputs)?.backward()?;
            device.synchronize()?;
        }
        for _ in 0..runs {
            let o = forward.time(device, || Ok(self.run(&inputs)?))?;
            backward.time(device, || Ok(o.backward().map(drop)?))?;
        }
        Ok(AttentionTimes { forward, backward, saved_bytes })
    }
}

/// The result of one case; `None` if it ran out of memory.
pub struct CaseResult {
    pub case: Case,
    pub times: Option<AttentionTimes>,
}

/// Results of all cases, and notes about cases that ran out of memory.
pub struct CaseResults {
    pub cases: Vec<CaseResult>,
    pub notes: Vec<String>,
}

/// Measures each case. A case that runs out of memory has no result and a note.
///
/// # Errors
/// Any error but out of memory.
pub fn measure_all(cases: Vec<Case>, device: &Device, warmup: usize, runs: usize) -> Result<CaseResults> {
    let mut rows = CaseResults { cases: Vec::new(), notes: Vec::new() };
    let mut reported = Vec::new();
    for case in cases {
        let times = match catch_oom(case.measure(device, warmup, runs))? {
            MemoryOutcome::Fits(times) => Some(times),
            MemoryOutcome::OutOfMemory(why) => {
                if !reported.contains(&case.kind) {
                    reported.push(case.kind);
                    rows.notes.push(memory_breakdown(&case, &why));
                }
                None
            }
        };
        release_memory(device);
        rows.cases.push(CaseResult { case, times });
    }
    Ok(rows)
}

/// Explains why a case does not fit: the sizes of its score matrices.
fn memory_breakdown(case: &Case, why: &str) -> String {
    let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
    let Case { kind, batch, seq_len, d, .. } = case;
    let scores = gib(case.score_bytes());
    let inputs = gib(case.input_bytes());
    format!(
        "First out of memory: {kind}, d {d}, seq_len {seq_len} ({why}). One score matrix takes {batch} · {seq_len}² · 4 B \
         = {scores:.2} GiB, and naive attention saves six of them between forward and backward (scores, scaled, \
         masked, minus maximum, exponentials, weights): {:.2} GiB, in addition to {inputs:.2} GiB of inputs and output.",
        6.0 * scores
    )
}

pub fn run(all: &attention::Arguments, out: &mut dyn Write) -> Result<()> {
    let arguments = &all.kinds;
    let outputs = &all.common.outputs;
    outputs.check()?;
    let device = model_device(all.common.device)?;
    let or = |given: &[usize], gpu: &[usize], cpu: &[usize]| match (given, device.is_cpu()) {
        ([], true) => cpu.to_vec(),
        ([], false) => gpu.to_vec(),
        (given, _) => given.to_vec(),
    };
    let dims = or(&all.head_dim, &[16, 32, 64, 128], &[16, 32, 64, 128]);
    let given: Vec<usize> = arguments.seq_lens.iter().copied().chain(all.seq_len).collect();
    let seq_lens = or(&given, &[256, 1024, 4096, 8192, 16384], &[256, 1024]);
    let batch = all.batch.unwrap_or(8);
    if batch == 0 || seq_lens.contains(&0) || dims.iter().any(|d| !(1..=256).contains(d)) {
        return Err(CliError::usage(
            "invalid shape of attention",
            "batch and sequence lengths must be at least 1, head dimensions from 1 to 256",
        ));
    }
    for (option, count) in [("--dtype", all.dtype.len()), ("--causal", all.causal.len())] {
        if count > 1 {
            let message = format!("{option} has {count} values with --kinds");
            return Err(CliError::usage(message, "kinds are measured with one: run the command once for each"));
        }
    }
    let dtype = match all.dtype.first().map(String::as_str) {
        Some(name) if name.starts_with("f8") => {
            return Err(CliError::usage("--dtype f8… with --kinds", "kinds are measured in bf16, f16 or f32"));
        }
        Some("bf16") => DType::BF16,
        Some("f16") => DType::F16,
        _ => DType::F32,
    };
    let causal = all.causal.first().copied().unwrap_or(true);
    let mut cases = Vec::new();
    for &kind in &arguments.kinds {
        for &d in &dims {
            cases.extend(seq_lens.iter().map(|&seq_len| Case { kind, batch, seq_len, d, causal, dtype }));
        }
    }
    let (warmup, default_runs) = if device.is_cpu() { (1, 5) } else { (5, 100) };
    let runs = arguments.runs.map_or(default_runs, |runs| runs as usize);
    let rows = measure_all(cases, &device, warmup, runs)?;
    Ok(outputs.write(report(&rows, &device_info(&device)?.name, runs), out)?)
}

fn report(rows: &CaseResults, device: &str, runs: usize) -> Report {
    let columns = [
        Column::text("attention"),
        Column::integer("batch"),
        Column::integer("d"),
        Column::integer("seq_len"),
        Column::text("dtype"),
        Column::text("mask"),
        Column::number("forward").unit("ms"),
        Column::number("backward").unit("ms"),
        Column::number("saved for backward").unit("MiB"),
        Column::number("score matrices").decimals(2),
    ];
    let mut table = Table::new("attention", "Attention, forward and backward", columns);
    for CaseResult { case, times } in &rows.cases {
        let mask = if case.causal { "causal" } else { "none" };
        let mut cells: Vec<Cell> = vec![case.kind.to_string().into(), case.batch.into(), case.d.into()];
        cells.extend([case.seq_len.into(), case.dtype.as_str().into(), mask.into()]);
        cells.extend(match times {
            None => [Cell::OutOfMemory, Cell::OutOfMemory, Cell::OutOfMemory, Cell::Empty],
            Some(times) => {
                let mib = times.saved_bytes.map_or(Cell::Empty, |bytes| Cell::Number(bytes / (1u64 << 20) as f64));
                let matrices = times.saved_bytes.map_or(Cell::Empty, |bytes| Cell::Number(bytes / case.score_bytes()));
                [times.forward.mean_std(), times.backward.mean_std(), mib, matrices]
            }
        });
        table.push(cells);
    }
    table.notes = rows.notes.clone();
    table.notes.push(format!(
        "On {device}, single head. Mean ± standard deviation of {runs} runs, with a synchronization after each. Saved \
         for backward is what forward leaves in memory, including inputs and output; the last column is the same in \
         score matrices (batch · seq_len², f32)."
    ));
    let mut report = Report::new("attention", "Attention under autograd").table(table);
    for (name, title, pick) in [
        ("forward", "Forward", (|times: &AttentionTimes| times.forward.mean_std()) as fn(&AttentionTimes) -> Cell),
        ("backward", "Backward", |times: &AttentionTimes| times.backward.mean_std()),
    ] {
        let series = series(rows, pick);
        let axes = (Axis::log2("sequence length"), Axis::log10("ms"));
        report = report.plot(Plot::lines(&format!("attention-{name}"), title, axes.0, axes.1, series));
    }
    report
}

/// Returns a plot series for each implementation and head dimension, over sequence lengths.
fn series(rows: &CaseResults, pick: fn(&AttentionTimes) -> Cell) -> Vec<Series> {
    let mut names: Vec<(Attention, usize)> = Vec::new();
    for CaseResult { case, .. } in &rows.cases {
        if !names.contains(&(case.kind, case.d)) {
            names.push((case.kind, case.d));
        }
    }
    let line = |(kind, d): (Attention, usize)| {
        let of_line = rows.cases.iter().filter(|result| (result.case.kind, result.case.d) == (kind, d));
        let points = of_line.filter_map(|result| {
            let cell = pick(result.times.as_ref()?);
            Some(Point { x: result.case.seq_len as f64, y: cell.value()?, error: cell.deviation() })
        });
        Series::new(&format!("{kind}, d {d}"), points)
    };
    names.into_iter().map(line).collect()
}
