//! Tables and plots of `bench model`.

use serde::{Deserialize, Serialize};

use super::super::wall_time::Times;
use super::Mode;
use crate::model::{Attention, Fusion, Precision};
use crate::report::{Axis, Bar, Cell, Column, Plot, Report, Table};

/// One measurement. Subprocesses send rows to their parent as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub size: String,
    pub context: usize,
    pub batch: usize,
    pub precision: Precision,
    pub attention: Attention,
    pub fusion: Fusion,
    pub mode: Mode,
    /// Whether steps are replayed as a CUDA graph.
    pub cuda_graph: bool,
    /// The fallback reason, if steps could not be replayed as a CUDA graph.
    pub fallback_reason: Option<String>,
    pub warmup: usize,
    /// Milliseconds of each measured step; empty if the case ran out of memory.
    pub step: Vec<f64>,
    pub forward: Vec<f64>,
    pub backward: Vec<f64>,
    pub optimizer: Vec<f64>,
    /// Peak memory on a GPU, in bytes.
    pub memory: Option<f64>,
    pub mfu: Option<f64>,
    pub failed: Option<String>,
}

impl Row {
    /// Formats the row as one line of progress.
    pub fn summary_line(&self) -> String {
        let Row { size, context, batch, precision, attention, fusion, mode, warmup, .. } = self;
        let graph = if self.cuda_graph { ", CUDA graph" } else { "" };
        let found = match (&self.failed, Times(self.step.clone()).median().value()) {
            (Some(why), _) => why.clone(),
            (None, median) => format!("{:.3} ms", median.unwrap_or(f64::NAN)),
        };
        let memory = self.memory.map(|bytes| format!(", {:.2} GiB", bytes / GIB)).unwrap_or_default();
        let what =
            format!("{size}, context {context}, batch {batch}, {precision}, {attention}, {fusion}, {}", mode.name());
        format!("{what}{graph}, warm-up {warmup}: {found}{memory}")
    }
}

const GIB: f64 = (1_u64 << 30) as f64;

/// Returns the report of all rows; `device` is the name of the device, for the notes.
pub fn report(rows: &[Row], device: &str) -> Report {
    let columns = [
        Column::text("size"),
        Column::integer("context"),
        Column::integer("batch"),
        Column::text("precision"),
        Column::text("attention"),
        Column::text("fusion"),
        Column::text("mode"),
        Column::text("CUDA graph"),
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
        let graph = match (row.cuda_graph, &row.fallback_reason) {
            (false, _) => "no",
            (true, None) => "yes",
            (true, Some(_)) => "failed",
        };
        cells.extend([Cell::from(row.mode.name()), graph.into(), row.warmup.into()]);
        cells.extend(numbers(row));
        table.push(cells);
        if let Some(why) = &row.failed {
            table.notes.push(format!("{}, context {}, batch {}: {why}", row.size, row.context, row.batch));
        }
        if let Some(why) = row.fallback_reason.as_ref().filter(|_| row.cuda_graph) {
            table
                .notes
                .push(format!("{}, context {}, batch {}: not replayed: {why}", row.size, row.context, row.batch));
        }
    }
    table.notes.push(format!(
        "On {device}. Mean ± standard deviation of {} steps, with a synchronization after each. Forward, backward and \
         optimizer are measured in separate steps, with eager launches and a synchronization after each phase. Forward \
         goes from tokens to the loss; the optimizer phase is gradient clipping and AdamW.",
        counts(rows)
    ));
    let mut report = Report::new("model", "Transformers, end to end").table(table);
    let bars: Vec<Bar> = rows.iter().filter_map(bar).collect();
    if bars.len() > 1 {
        report = report.plot(Plot::bars("model-step", "Time of a step", Axis::linear("ms"), bars));
    }
    report
}

/// Formats the number of steps per row: `10`, or `3 to 10`.
fn counts(rows: &[Row]) -> String {
    let counts = || rows.iter().map(|row| row.step.len()).filter(|&count| count > 0);
    match (counts().min(), counts().max()) {
        (Some(fewest), Some(most)) if fewest < most => format!("{fewest} to {most}"),
        (_, most) => most.unwrap_or(0).to_string(),
    }
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
    // In mode forward, the step is the forward pass.
    let forward = if row.mode == Mode::Forward { step.mean_std() } else { times(&row.forward).mean_std() };
    [
        forward,
        times(&row.backward).mean_std(),
        times(&row.optimizer).mean_std(),
        step.mean_std(),
        step.median(),
        or_empty(rate),
        or_empty(row.mfu.map(|mfu| 100.0 * mfu)),
        or_empty(row.memory.map(|bytes| bytes / GIB)),
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
    ) + if row.cuda_graph { " graph" } else { "" };
    Some(Bar { name, group: row.mode.name().to_string(), value: cell.value()?, error: cell.deviation() })
}
