//! `tilewright account`: estimates memory, communication and batch sizes of training on many devices from formulas.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::Value;

use super::value_parsers::{fraction, non_negative, positive};
use super::{CliError, Result};
use crate::account::ddp::Link;
use crate::account::fsdp::{Mesh, Sharding};
use crate::account::memory::{Bytes, Ffn, devices};
use crate::model::Config;
use crate::report::plot::Point;
use crate::report::{Axis, Cell, Column, Outputs, Plot, Report, Series, Table};

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Subcommand)]
enum Subject {
    /// Exposed communication of bucketed gradients after backward, and the best bucket size
    Ddp(Ddp),
    /// Memory of a model's weights, gradients, optimizer state and activations, and the number of devices that it needs
    Memory(Memory),
    /// Memory per device of a model sharded by FSDP, and the smallest batch whose forward pass is compute-bound
    Fsdp(Fsdp),
}

/// A stack of feed-forward layers. The defaults are the assignment's XXL model.
#[derive(Args)]
struct Model {
    /// Model dimension d_model: elements of the residual stream
    #[arg(long, alias = "width", default_value_t = Ffn::XXL.d_model, value_parser = positive)]
    d_model: f64,
    /// Feed-forward dimension d_ff: elements inside a feed-forward layer
    #[arg(long, alias = "hidden", default_value_t = Ffn::XXL.d_ff, value_parser = positive)]
    d_ff: f64,
    /// Number of blocks of two linear layers
    #[arg(long, default_value_t = Ffn::XXL.blocks, value_parser = positive)]
    blocks: f64,
    /// Bytes per activation element
    #[arg(long, value_name = "BYTES", default_value_t = 2.0, value_parser = positive)]
    activation_bytes: f64,
    /// Tokens per device
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = non_negative)]
    tokens: f64,
}

impl Model {
    fn ffn(&self) -> Ffn {
        Ffn { d_model: self.d_model, d_ff: self.d_ff, blocks: self.blocks }
    }

    fn sharding(&self, sharded_activations: f64) -> Sharding {
        Sharding { bytes: Bytes::F32, element: self.activation_bytes, sharded_activations }
    }
}

#[derive(Args)]
struct Memory {
    #[command(flatten)]
    model: Model,
    /// Memory of a device, in gigabytes (10⁹ bytes)
    #[arg(long, value_name = "GB", default_value_t = 80.0, value_parser = positive)]
    device_gb: f64,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Args)]
struct Fsdp {
    #[command(flatten)]
    model: Model,
    /// Memory limit of each device, in gigabytes (10⁹ bytes)
    #[arg(long, value_name = "GB", default_value_t = 95.0, value_parser = positive)]
    limit_gb: f64,
    /// Fraction of the activations that is sharded
    #[arg(long, alias = "shared-activations", value_name = "FRACTION", default_value_t = Sharding::ASSIGNMENT.sharded_activations, value_parser = fraction)]
    sharded_activations: f64,
    /// Devices along the FSDP axis of the mesh
    #[arg(long, default_value_t = Mesh::ASSIGNMENT.x, value_parser = positive)]
    x: f64,
    /// Devices along the tensor axis of the mesh
    #[arg(long, default_value_t = Mesh::ASSIGNMENT.y, value_parser = positive)]
    y: f64,
    /// Hardware axes that the FSDP axis uses
    #[arg(long, default_value_t = Mesh::ASSIGNMENT.m_x, value_parser = positive)]
    mx: f64,
    /// Hardware axes that the tensor axis uses
    #[arg(long, default_value_t = Mesh::ASSIGNMENT.m_y, value_parser = positive)]
    my: f64,
    /// FLOP/s of a device
    #[arg(long, default_value_t = Mesh::ASSIGNMENT.flops, value_parser = positive)]
    flops: f64,
    /// Bytes per second of one hardware axis
    #[arg(long, default_value_t = Mesh::ASSIGNMENT.bandwidth, value_parser = positive)]
    bandwidth: f64,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Args)]
struct Ddp {
    /// JSON file of `tilewright bench comm`, to which overhead and bandwidth are fitted
    #[arg(long, value_name = "FILE", conflicts_with_all = ["overhead_us", "bandwidth_gbps"])]
    records: Option<PathBuf>,
    /// Use only the records of this backend
    #[arg(long, alias = "back-end", value_name = "NAME", requires = "records")]
    backend: Option<String>,
    /// Use only the records with this number of ranks
    #[arg(long, value_name = "N", requires = "records")]
    ranks: Option<u64>,
    /// Overhead of a call in microseconds, instead of --records
    #[arg(long, value_name = "US", requires = "bandwidth_gbps", value_parser = non_negative)]
    overhead_us: Option<f64>,
    /// Bandwidth of an all-reduce (bytes of the buffer / time) in 10⁹ bytes per second, instead of --records
    #[arg(long, value_name = "GBPS", requires = "overhead_us", value_parser = positive)]
    bandwidth_gbps: Option<f64>,
    /// Model whose gradients are all-reduced, in f32: small, medium, large, xl or 2.7B
    #[arg(long, default_value = "xl")]
    size: String,
    /// Bytes of all gradients, instead of a model's
    #[arg(long, value_parser = positive)]
    bytes: Option<f64>,
    /// Bucket sizes, in megabytes (10⁶ bytes)
    #[arg(long, value_name = "MB,…", value_delimiter = ',', default_values_t = [1.0, 10.0, 25.0, 100.0, 1000.0], value_parser = positive)]
    buckets: Vec<f64>,
    /// JSON file of `tilewright bench ddp`: its exposed communication is shown next to the prediction
    #[arg(long, value_name = "FILE")]
    measured: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    match &arguments.subject {
        Subject::Ddp(arguments) => {
            let outputs = arguments.outputs.protecting_inputs(arguments.records.iter().chain(&arguments.measured));
            outputs.check()?;
            Ok(outputs.write(ddp(arguments)?, out)?)
        }
        Subject::Memory(arguments) => {
            arguments.outputs.expect_no_plot()?;
            arguments.outputs.check()?;
            Ok(arguments.outputs.write(memory(arguments), out)?)
        }
        Subject::Fsdp(arguments) => {
            arguments.outputs.expect_no_plot()?;
            arguments.outputs.check()?;
            Ok(arguments.outputs.write(fsdp(arguments), out)?)
        }
    }
}

fn memory(arguments: &Memory) -> Report {
    let (ffn, capacity) = (arguments.model.ffn(), arguments.device_gb * 1e9);
    let p = ffn.parameters();
    let columns = [
        Column::text("item"),
        Column::text("formula"),
        Column::number("memory").unit("GB").decimals(3),
        Column::number("devices").decimals(2),
    ];
    let mut table = Table::new("memory", "Memory on a single device", columns);
    let mut row = |what: &str, formula: String, bytes: f64| {
        let devices = devices(bytes, capacity);
        table.push([Cell::from(what), Cell::from(formula), Cell::from(bytes / 1e9), Cell::from(devices)]);
    };
    let Bytes { weights, gradients, optimizer } = Bytes::F32;
    row("weights, f32", format!("{weights} P"), weights * p);
    row("gradients, f32", format!("{gradients} P"), gradients * p);
    row("AdamW's moments, f32", format!("{optimizer} P"), optimizer * p);
    row("state", format!("{} P", Bytes::F32.sum()), Bytes::F32.sum() * p);
    let element = arguments.model.activation_bytes;
    row("saved for backward, per token", format!("blocks (d_model + d_ff) {element}"), ffn.activations(element));
    if arguments.model.tokens > 0.0 {
        let tokens = arguments.model.tokens;
        row("saved for backward", format!("{tokens} tokens"), ffn.activations(element) * tokens);
    }
    let state = Bytes::F32.sum() * p;
    let table = table
        .note(format!("P = {} · 2 · {} · {} = {:.5e} parameters.", ffn.blocks, ffn.d_model, ffn.d_ff, p))
        .note(format!(
            "The state takes {:.2} TB: {} devices of {} GB.",
            state / 1e12,
            devices(state, capacity).ceil(),
            arguments.device_gb
        ));
    Report::new("account-memory", "Memory of a model during training").table(table)
}

fn fsdp(arguments: &Fsdp) -> Report {
    let (ffn, sharding) = (arguments.model.ffn(), arguments.model.sharding(arguments.sharded_activations));
    let (tokens, limit) = (arguments.model.tokens, arguments.limit_gb * 1e9);
    let columns = [Column::integer("devices"), Column::number("per device").unit("GB").decimals(2)];
    let mut table = Table::new("fsdp-memory", "Memory per device, on N devices", columns);
    let fewest = sharding.min_devices(&ffn, limit, tokens);
    let mut counts: Vec<u64> = [1, 2, 4, 8, 16, 32, 64, 128].to_vec();
    counts.extend(fewest);
    counts.extend(fewest.map(|n| n.saturating_sub(1)).filter(|n| *n > 0));
    counts.sort_unstable();
    counts.dedup();
    for n in counts {
        table.push([Cell::from(n), Cell::from(sharding.per_device(&ffn, n as f64, tokens) / 1e9)]);
    }
    let s = sharding.sharded_activations;
    let table = table.note(format!(
        "M(N) = (16 P + {s} A) / N + {} A, with P = {:.5e} parameters and A = {:.3e} bytes of activations of {tokens} \
         tokens.",
        1.0 - s,
        ffn.parameters(),
        ffn.activations(sharding.element) * tokens
    ));
    let table = table.note(match fewest {
        Some(n) => format!("Each device needs less than {} GB from N = {n} on.", arguments.limit_gb),
        None => format!("No N is enough for {} GB: the unsharded activations need more.", arguments.limit_gb),
    });
    Report::new("account-fsdp", "Model sharded over many devices").table(table).table(batch(arguments, &ffn))
}

fn batch(arguments: &Fsdp, ffn: &Ffn) -> Table {
    let mesh = Mesh {
        x: arguments.x,
        y: arguments.y,
        m_x: arguments.mx,
        m_y: arguments.my,
        flops: arguments.flops,
        bandwidth: arguments.bandwidth,
    };
    let columns = [
        Column::text("communication of the mesh axes"),
        Column::text("formula"),
        Column::number("tokens per device").decimals(1),
        Column::number("tokens in total").decimals(0),
    ];
    let mut table = Table::new("fsdp-batch", "Smallest batch with a compute-bound forward pass", columns);
    let rows = [
        ("overlapped", "α / (Y M_X)", mesh.batch(ffn)),
        ("sequential", "α / (Y M_X) / (1 − α Y / (M_Y F))", mesh.batch_serialized(ffn)),
    ];
    for (how, formula, batch) in rows {
        let cell =
            |value: fn(crate::account::fsdp::MinBatch) -> f64| batch.map_or(Cell::NotApplicable, |b| value(b).into());
        table.push([Cell::from(how), Cell::from(formula), cell(|b| b.per_device), cell(|b| b.overall)]);
    }
    let fits = if mesh.tensor_axis_fits(ffn) { "is" } else { "is not" };
    table
        .note(format!("α = C / W = {:.4e} / {:.4e} = {:.1} FLOP per byte.", mesh.flops, mesh.bandwidth, mesh.alpha()))
        .note(format!(
            "The tensor axis {fits} short enough: Y = {} and M_Y F / α = {:.1}.",
            mesh.y,
            mesh.m_y * ffn.d_ff / mesh.alpha()
        ))
}

fn ddp(arguments: &Ddp) -> Result<Report> {
    let (link, from) = link(arguments)?;
    let s = match arguments.bytes {
        Some(bytes) => bytes,
        None => Config::named(&arguments.size, 128)?.parameters() as f64 * 4.0,
    };
    let measured = arguments.measured.as_deref().map(exposed_times).transpose()?.unwrap_or_default();
    let columns = [
        Column::number("bucket").unit("MB"),
        Column::number("buckets").decimals(1),
        Column::number("overhead").unit("ms"),
        Column::number("last bucket").unit("ms"),
        Column::number("predicted").unit("ms"),
        Column::number("measured").unit("ms"),
    ];
    let best = link.optimal_bucket_bytes(s) / 1e6;
    let mut sizes = arguments.buckets.clone();
    sizes.extend((best > 0.0).then_some(best));
    sizes.sort_by(f64::total_cmp);
    let mut table = Table::new("ddp", "Exposed communication after backward", columns);
    for &mb in &sizes {
        let n = s / (mb * 1e6);
        let found = measured.iter().find(|(bucket, _)| (bucket - mb).abs() < 1e-3 * mb).map(|(_, ms)| *ms);
        table.push([
            Cell::from(mb),
            n.into(),
            (n * link.overhead * 1e3).into(),
            (s / n / link.bandwidth * 1e3).into(),
            (link.exposed_time(s, n) * 1e3).into(),
            found.into(),
        ]);
    }
    let table = table
        .note(format!(
            "o = {:.1} µs, w = {:.2} GB/s ({from}); s = {:.3} GB.",
            link.overhead * 1e6,
            link.bandwidth / 1e9,
            s / 1e9
        ))
        .note(format!("T(n) = s / (n w) + n o has its minimum at buckets of √(s o w) = {best:.1} MB."))
        .without_empty_columns();
    let points = |f: &dyn Fn(f64) -> f64| {
        let sizes: Vec<f64> = (0..=60).map(|i| 10f64.powf(-1.0 + i as f64 / 12.0)).collect();
        sizes.into_iter().map(|mb| Point { x: mb, y: f(mb), error: None }).collect::<Vec<_>>()
    };
    let mut series = vec![Series::new("predicted", points(&|mb| link.exposed_time(s, s / (mb * 1e6)) * 1e3))];
    if !measured.is_empty() {
        series.push(Series::new("measured", measured.iter().map(|&(x, y)| Point { x, y, error: None })));
    }
    let (x, y) = (Axis::log10("bucket size (MB)"), Axis::log10("exposed communication (ms)"));
    let plot = Plot::lines("ddp", "Exposed communication after backward", x, y, series);
    Ok(Report::new("account-ddp", "Cost of bucketed gradients").table(table).plot(plot))
}

/// Returns the overhead per call and the bandwidth of an all-reduce, and their source as text.
fn link(arguments: &Ddp) -> Result<(Link, String)> {
    if let (Some(us), Some(gbps)) = (arguments.overhead_us, arguments.bandwidth_gbps) {
        return Ok((Link { overhead: us * 1e-6, bandwidth: gbps * 1e9 }, "given".into()));
    }
    let Some(path) = &arguments.records else {
        let help = "give --records FILE, written by `tilewright bench comm --json FILE`, or --overhead-us and \
                    --bandwidth-gbps";
        return Err(CliError::usage("no overhead and bandwidth to predict from", help));
    };
    let rows = rows(path)?;
    let wanted = |row: &&Value| {
        row["collective"] == "all_reduce"
            && arguments.backend.as_deref().is_none_or(|name| column(row, "backend", "back_end") == name)
            && arguments.ranks.is_none_or(|n| row["ranks"].as_u64() == Some(n))
    };
    let mut worlds: Vec<(String, u64)> = Vec::new();
    let mut times = Vec::new();
    for row in rows.iter().filter(wanted) {
        let world = (
            column(row, "backend", "back_end").as_str().unwrap_or_default().to_string(),
            row["ranks"].as_u64().unwrap_or(0),
        );
        if !worlds.contains(&world) {
            worlds.push(world);
        }
        if let (Some(mb), Some(ms)) = (row["size_mb"].as_f64(), row["median_ms"].as_f64()) {
            times.push((mb * 1e6, ms * 1e-3));
        }
    }
    match worlds.as_slice() {
        [] => {
            Err(CliError::Failure(format!("{} has no all_reduce row of this backend and rank count", path.display())))
        }
        [(backend, ranks)] => {
            let link = Link::fit(&times).map_err(|error| CliError::file("fit the times in", path, error))?;
            Ok((link, format!("fitted to {} sizes, {ranks} ranks, {backend}", times.len())))
        }
        several => {
            let list: Vec<String> = several.iter().map(|(name, ranks)| format!("{ranks} ranks of {name}")).collect();
            let message = format!("{} has rows of several worlds: {}", path.display(), list.join(", "));
            Err(CliError::usage(message, "choose with --backend and --ranks"))
        }
    }
}

/// Returns the rows of all tables of a JSON report.
///
/// # Errors
/// The file cannot be read, or is not JSON.
fn rows(path: &Path) -> Result<Vec<Value>> {
    let text = crate::files::read_to_string(path).map_err(|error| CliError::file("read", path, error))?;
    let report: Value = serde_json::from_str(&text).map_err(|error| CliError::file("read", path, error))?;
    let tables = report["tables"].as_array().cloned().unwrap_or_default();
    Ok(tables.iter().flat_map(|table| table["rows"].as_array().cloned().unwrap_or_default()).collect())
}

/// Returns the value of a column. Reports of earlier versions call the column `old`.
fn column<'a>(row: &'a Value, name: &str, old: &str) -> &'a Value {
    row.get(name).unwrap_or(&row[old])
}

/// Returns (bucket size in MB, exposed communication in ms) of each bucketed row of a `bench ddp` report, sorted by
/// bucket size.
///
/// # Errors
/// The file cannot be read, or has no row of the form `bucketed`.
fn exposed_times(path: &Path) -> Result<Vec<(f64, f64)>> {
    let pair = |row: &Value| Some((row["bucket_mb"].as_f64()?, column(row, "exposed_ms", "left_over_ms").as_f64()?));
    let mut exposed_times: Vec<(f64, f64)> =
        rows(path)?.iter().filter(|row| row["form"] == "bucketed").filter_map(pair).collect();
    exposed_times.sort_by(|a, b| a.0.total_cmp(&b.0));
    match exposed_times.is_empty() {
        true => Err(CliError::Failure(format!("{} has no row of the form `bucketed`", path.display()))),
        false => Ok(exposed_times),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reports_of_earlier_versions_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let report = |backend: &str, exposed: &str| {
            let path = folder.path().join(backend);
            let comm = |mb: f64| json!({ backend: "tcp", "ranks": 2, "collective": "all_reduce", "size_mb": mb, "median_ms": 1.0 + mb });
            let ddp = json!({ "form": "bucketed", "bucket_mb": 25.0, exposed: 1.5 });
            let report = json!({ "tables": [{ "rows": [comm(1.0), comm(10.0), ddp] }] });
            std::fs::write(&path, report.to_string()).unwrap();
            path
        };
        for path in [report("back_end", "left_over_ms"), report("backend", "exposed_ms")] {
            assert_eq!(exposed_times(&path).unwrap(), [(25.0, 1.5)]);
            let rows = rows(&path).unwrap();
            assert_eq!(column(&rows[0], "backend", "back_end"), "tcp");
        }
    }
}
