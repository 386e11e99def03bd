//! Measures the assignment's table: times over sequence lengths, head dimensions and types.

use std::io::Write;

use indicatif::{ProgressBar, ProgressStyle};

use super::Arguments;
use super::measure::{Measured, PASSES, Plan};
use super::peak::matmul_peak;
use super::peers::Peers;
use super::single::{cpu_note, rows};
use crate::cli::bench::record::{BenchError, Recorder};
use crate::cli::{CliError, Result};
use crate::report::{Axis, Cell, Column, Machine, Plot, Point, Report, Series, Table};

/// Why a cell has no time.
#[derive(Clone, Debug, PartialEq)]
enum NoTime {
    OutOfMemory,
    WrongResult(String),
    Unsupported(String),
}

impl From<BenchError> for NoTime {
    fn from(error: BenchError) -> NoTime {
        match error {
            BenchError::WrongResult(why) => NoTime::WrongResult(why),
            // All out-of-memory errors of the runtime begin with these words.
            BenchError::Unsupported(why) if why.starts_with("out of memory") => NoTime::OutOfMemory,
            BenchError::Unsupported(why) => NoTime::Unsupported(why),
        }
    }
}

type CaseResult = (Plan, Result<Measured, NoTime>);

/// Measures and reports the table.
///
/// # Errors
/// A wrong result, or a file that cannot be written. Cells that run out of memory are not errors.
pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let (device, plans) = arguments.plans()?;
    let peers = arguments.compare.as_deref().map(Peers::read).transpose()?;
    let machine = Machine::probe(arguments.outputs.commit.as_deref());
    let mut recorder = Recorder::new(&device, machine.commit.as_deref(), arguments.record.as_deref())?;
    let peak = matmul_peak(&device)?;
    let times = arguments.times(&device);
    // Hidden if standard error is not a terminal.
    let bar = ProgressBar::new(plans.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("{pos}/{len} {wide_bar} {msg}") {
        bar.set_style(style);
    }
    let mut found: Vec<CaseResult> = Vec::new();
    for plan in plans {
        bar.set_message(format!("{} {} × {}", plan.dtype_text(), plan.problem.n_q, plan.problem.d));
        // If a length runs out of memory, longer ones do too.
        let is_oom = found.iter().any(|(before, result)| {
            result.as_ref().is_err_and(|why| *why == NoTime::OutOfMemory)
                && (&before.dtype, before.precision, before.problem.d) == (&plan.dtype, plan.precision, plan.problem.d)
                && before.problem.n_q <= plan.problem.n_q
        });
        let result = match is_oom {
            true => Err(NoTime::OutOfMemory),
            false => plan.measure(&device, times).map_err(NoTime::from),
        };
        if let Ok(measured) = &result {
            for row in rows(&plan, measured, &peak) {
                recorder.push(row)?;
            }
        }
        found.push((plan, result));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mut table = table(&found, peers.as_ref());
    table = table.note(format!(
        "Every case is checked against f64 before it is timed. A matmul of {}³ in {} reaches {:.4} TFLOP/s in this run.",
        peak.size, peak.dtype, peak.tflops
    ));
    if let Some(note) = cpu_note(&device) {
        table = table.note(note);
    }
    let report = Report::new("flash-benchmarking", "FlashAttention-2 by sequence length and head dimension");
    arguments.outputs.write(report.table(table).plot(plot(&found)), out)?;
    let wrong = found.iter().filter(|(_, result)| matches!(result, Err(NoTime::WrongResult(_)))).count();
    match wrong {
        0 => Ok(()),
        _ => Err(CliError::Failure(format!("{wrong} of {} cases have wrong results and no time", found.len()))),
    }
}

fn table(found: &[CaseResult], peers: Option<&Peers>) -> Table {
    let mut columns = vec![Column::text("type"), Column::integer("d"), Column::integer("seq_len")];
    columns.extend(PASSES.map(|pass| Column::number(pass).unit("ms").significant(4)));
    columns.push(Column::number("rate").unit("TFLOP/s"));
    columns.push(Column::number("error").significant(2));
    columns.push(Column::number("best peer").unit("ms"));
    columns.push(Column::text("peer"));
    columns.push(Column::number("ours / peer").decimals(3));
    let mut table = Table::new("flash-benchmarking", "Medians; the rate is that of all three passes together", columns);
    let mut notes = Vec::new();
    for (plan, result) in found {
        let mut row = vec![Cell::from(plan.dtype_text()), Cell::from(plan.problem.d), Cell::from(plan.problem.n_q)];
        let best = peers.and_then(|peers| peers.best(plan, 2));
        let mut ours = None;
        match result {
            Ok(measured) => {
                row.extend(measured.times.iter().map(|timing| Cell::from(timing.median)));
                row.push(Cell::from(measured.times[2].tflops(plan.flop()[2])));
                row.push(Cell::from(measured.checked.error));
                ours = Some(measured.times[2].median);
            }
            Err(why) => {
                let cell = if *why == NoTime::OutOfMemory { Cell::OutOfMemory } else { Cell::NotApplicable };
                row.extend([cell.clone(), cell.clone(), cell, Cell::Empty, Cell::Empty]);
                if let NoTime::WrongResult(text) | NoTime::Unsupported(text) = why {
                    let first = text.lines().next().unwrap_or_default();
                    notes.push(format!("{} {} × {}: {first}", plan.dtype_text(), plan.problem.n_q, plan.problem.d));
                }
            }
        }
        row.push(Cell::from(best.map(|(_, ms)| ms)));
        row.push(best.map_or(Cell::Empty, |(name, _)| Cell::from(name)));
        row.push(Cell::from(best.zip(ours).map(|((_, theirs), ours)| ours / theirs)));
        table.push(row);
    }
    notes.into_iter().fold(table.without_empty_columns(), Table::note)
}

/// Plots a line for each type and head dimension.
fn plot(found: &[CaseResult]) -> Plot {
    let mut series: Vec<Series> = Vec::new();
    for (plan, result) in found {
        let Ok(measured) = result else { continue };
        let name = format!("{}, d {}", plan.dtype_text(), plan.problem.d);
        let point = Point::from((plan.problem.n_q as f64, measured.times[2].median));
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series::new(&name, [point])),
        }
    }
    let (x, y) = (Axis::log2("sequence length"), Axis::log10("forward + sum + backward (ms)"));
    Plot::lines("flash-benchmarking", "FlashAttention-2", x, y, series)
}
