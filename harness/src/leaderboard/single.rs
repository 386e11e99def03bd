//! Measures and reports one case.

use std::io::Write;

use tilewright::Device;

use super::Arguments;
use super::measure::{Measured, PASSES, Plan};
use super::peak::{Peak, matmul_peak};
use super::peers::Peers;
use crate::cli::bench::record::{BenchError, Recorder, Row, Work};
use crate::cli::{CliError, Result};
use crate::report::{Cell, Column, Machine, Report, Table};

/// Measures and reports one case.
///
/// # Errors
/// A wrong result, or an error of the device or a file.
pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let (device, plans) = arguments.plans()?;
    let plan = &plans[0];
    let peers = arguments.compare.as_deref().map(Peers::read).transpose()?;
    let machine = Machine::probe(arguments.outputs.commit.as_deref());
    let mut recorder = Recorder::new(&device, machine.commit.as_deref(), arguments.record.as_deref())?;
    let peak = matmul_peak(&device)?;
    let measured = plan.measure(&device, arguments.times(&device)).map_err(to_cli_error)?;
    for row in rows(plan, &measured, &peak).into_iter().chain(peers.iter().flat_map(|peers| peer_rows(plan, peers))) {
        recorder.push(row)?;
    }
    arguments.outputs.write(report(&device, plan, &measured, &peak, peers.as_ref()), out)?;
    Ok(())
}

/// Converts the error of a case to a command's error.
pub fn to_cli_error(error: BenchError) -> CliError {
    match error {
        BenchError::WrongResult(why) => CliError::Failure(format!("no time is reported: {why}")),
        BenchError::Unsupported(why) => CliError::Failure(why),
    }
}

/// Formats the case as the title of its table.
fn title(plan: &Plan) -> String {
    let p = &plan.problem;
    let mask = if p.causal { "causal" } else { "full" };
    let plural = if p.heads_q == 1 { "head" } else { "heads" };
    format!(
        "FlashAttention-2, {}, {mask}, batch {}, {} {plural}, {} tokens, head dimension {}",
        plan.dtype_text(),
        p.batch,
        p.heads_q,
        p.n_q,
        p.d
    )
}

/// Returns the note about times on the CPU; `None` for a GPU.
pub fn cpu_note(device: &Device) -> Option<String> {
    (!device.is_cuda()).then(|| {
        format!(
            "Measured on the CPU ({}), with warm caches: this shows that the program works, and is not a valid entry \
             of the leaderboard, which is about GPUs.",
            device.info().name
        )
    })
}

/// Returns the report of a case, with a comparison if there are peers.
pub(super) fn report(device: &Device, plan: &Plan, measured: &Measured, peak: &Peak, peers: Option<&Peers>) -> Report {
    let ms = |name: &str| Column::number(name).unit("ms").significant(5);
    let columns = [
        Column::text("pass"),
        ms("mean"),
        ms("median"),
        ms("p20"),
        ms("p80"),
        ms("min"),
        Column::integer("runs"),
        Column::number("rate").unit("TFLOP/s"),
        Column::number("of the peak").unit("%").decimals(1),
        Column::text("tiles"),
    ];
    let mut table = Table::new("leaderboard", &title(plan), columns);
    for (pass, timing) in measured.times.iter().enumerate() {
        let rate = timing.tflops(plan.flop()[pass]);
        table.push([
            Cell::from(PASSES[pass]),
            Cell::from(timing.mean),
            Cell::from(timing.median),
            Cell::from(timing.p20),
            Cell::from(timing.p80),
            Cell::from(timing.min),
            Cell::from(timing.n),
            Cell::from(rate),
            Cell::from(100.0 * rate / peak.tflops),
            Cell::from(measured.tiles_text(pass)),
        ]);
    }
    let checked = format!(
        "Checked before timing: {}; the largest relative error is {:.1e}.",
        measured.checked.how, measured.checked.error
    );
    let ceiling = format!(
        "The peak is {:.4} TFLOP/s, a {} matmul of {}³ by our own kernel in this run.",
        peak.tflops, peak.dtype, peak.size
    );
    let cache = match device.is_cuda() {
        true => {
            "Times are the GPU's own, with the L2 cache cleared before each run. Tiles: q_tile,k_tile,warps,stages."
        }
        false => "Tiles: q_tile,k_tile,warps,stages.",
    };
    let mut table = table.note(checked).note(ceiling).note(cache);
    if let Some(note) = cpu_note(device) {
        table = table.note(note);
    }
    let report = Report::new("leaderboard", "Leaderboard").table(table);
    match peers {
        Some(peers) => report.table(comparison(plan, measured, peers)),
        None => report,
    }
}

/// Returns the medians of all implementations, and the ratio of ours to theirs.
fn comparison(plan: &Plan, measured: &Measured, peers: &Peers) -> Table {
    let mut columns = vec![Column::text("implementation")];
    for pass in PASSES {
        columns.push(Column::number(pass).unit("ms").significant(5));
        columns.push(
            Column::number("ours / peer").key(&format!("ours_over_peer_{}", pass.replace([' ', '+'], ""))).decimals(3),
        );
    }
    columns.push(Column::text("remark"));
    let mut table = Table::new("comparison", "Comparison with other implementations, medians", columns);
    let ours = [0, 1, 2].map(|pass| measured.times[pass].median);
    let mut push = |name: &str, times: [Option<f64>; 3], remark: Option<&String>| {
        let mut row = vec![Cell::from(name)];
        for (time, ours) in times.into_iter().zip(ours) {
            row.push(time.map_or(Cell::NotApplicable, Cell::from));
            row.push(Cell::from(time.map(|time| ours / time)));
        }
        row.push(remark.map_or(Cell::Empty, |text| Cell::from(text.as_str())));
        table.push(row);
    };
    push("tilewright", ours.map(Some), None);
    for peer in peers.of(plan) {
        push(&peer.name, peer.times(), peer.error.as_ref());
    }
    let mut table = table.note(
        "Rows of other implementations are comparable only if measured on the same machine within the same \
                    hour: clocks differ.",
    );
    if peers.of(plan).is_empty() {
        table = table.note("The file has no row of this case.");
    }
    for (name, value) in &peers.ceilings {
        table = table.note(format!("Peak rate measured by the other program: {name} {value}."));
    }
    table.without_empty_columns()
}

const KERNELS: [&str; 3] = ["attention_fwd", "attention_bwd", "attention_fwd_sum_bwd"];

/// Creates the record row of a pass without a measurement.
fn row(plan: &Plan, pass: usize) -> Row {
    let p = &plan.problem;
    let mask = if p.causal { "causal" } else { "full" };
    let case = match plan.precision {
        Some(precision) => format!("{mask} {}", precision.name()),
        None => mask.to_string(),
    };
    Row::new(KERNELS[pass], &[p.batch, p.heads_q, p.n_q, p.d], &plan.dtype).case(&case)
}

/// Returns a record row for each pass.
pub fn rows(plan: &Plan, measured: &Measured, peak: &Peak) -> Vec<Row> {
    let of = |pass: usize| {
        let timed = row(plan, pass)
            .tiles(measured.tiles_text(pass))
            .timed(&measured.times[pass], Work::Flop(plan.flop()[pass]));
        let fraction = timed.tflops.map(|rate| rate / peak.tflops);
        Row { fraction, error: Some(measured.checked.error), ..timed }
    };
    (0..PASSES.len()).map(of).collect()
}

/// Returns record rows of the other implementations.
fn peer_rows(plan: &Plan, peers: &Peers) -> Vec<Row> {
    let mut rows = Vec::new();
    for peer in peers.of(plan) {
        for (pass, ms) in peer.times().into_iter().enumerate().filter_map(|(pass, ms)| ms.map(|ms| (pass, ms))) {
            let tflops = Some(plan.flop()[pass] / (ms * 1e-3) / 1e12);
            rows.push(Row { peer: Some(peer.name.clone()), median_ms: Some(ms), tflops, ..row(plan, pass) });
        }
    }
    rows
}
