//! `tilewright bench norm`: times norms in tensor ops and by our kernels.

use std::io::Write;

use candle_core::{D, DType, Device, Result as CandleResult, Tensor, Var};
use clap::Args;

use super::wall_time::{Times, release_memory};
use crate::cli::model_options::{device_info, model_device};
use crate::cli::oom_probe::{MemoryOutcome, catch_oom, expect_memory};
use crate::cli::{CliError, Result};
use crate::ops;
use crate::params::{Init, ParamSpec, Params};
use crate::report::{Axis, Cell, Column, Outputs, Plot, Point, Report, Series, Table};
use crate::train;
use tilewright_cli::device::{self, DeviceArg};

#[derive(Args)]
pub struct Arguments {
    /// Number of rows. Default: 50000, or 2000 on the CPU
    #[arg(long)]
    rows: Option<usize>,
    /// Elements per row, separated by commas
    #[arg(long, alias = "widths", value_delimiter = ',', default_value = "1024,2048,4096,8192")]
    d: Vec<usize>,
    /// Element type: f32, bf16 or f16
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16", "f16"])]
    dtype: String,
    /// Number of measured runs. Default: 100, or 5 on the CPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    #[command(flatten)]
    outputs: Outputs,
}

/// A norm and its implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    RmsInOps,
    RmsKernel,
    LayerInOps,
    LayerKernel,
}

const SUBJECTS: [Subject; 4] = [Subject::RmsInOps, Subject::RmsKernel, Subject::LayerInOps, Subject::LayerKernel];
const EPS: f64 = 1e-5;

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Subject::RmsInOps => "RMSNorm, tensor ops",
            Subject::RmsKernel => "RMSNorm, our kernel",
            Subject::LayerInOps => "LayerNorm, tensor ops",
            Subject::LayerKernel => "LayerNorm, our kernel",
        }
    }

    fn run(self, x: &Tensor, params: &Params) -> CandleResult<Tensor> {
        let (weight, bias) = (params.get("weight")?, params.get("bias")?);
        match self {
            Subject::RmsKernel => ops::rms_norm(x, &weight, EPS),
            Subject::LayerKernel => ops::layer_norm(x, &weight, &bias, EPS),
            Subject::RmsInOps => scaled(&x.to_dtype(DType::F32)?, &weight.leaf(DType::F32)?)?.to_dtype(x.dtype()),
            Subject::LayerInOps => {
                let wide = x.to_dtype(DType::F32)?;
                let centered = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
                let y = scaled(&centered, &weight.leaf(DType::F32)?)?.broadcast_add(&bias.leaf(DType::F32)?)?;
                y.to_dtype(x.dtype())
            }
        }
    }
}

/// Computes x / √(mean(x²) + ε) · w, one tensor op at a time.
fn scaled(x: &Tensor, w: &Tensor) -> CandleResult<Tensor> {
    let root_mean_square = (x.sqr()?.mean_keepdim(D::Minus1)? + EPS)?.sqrt()?;
    x.broadcast_div(&root_mean_square)?.broadcast_mul(w)
}

struct NormTimes {
    forward: Times,
    backward: Times,
}

/// One row of the table.
struct NormRow {
    subject: Subject,
    /// Elements per row.
    d: usize,
    /// `None` if the measurement ran out of memory.
    times: Option<NormTimes>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.check()?;
    let device = model_device(arguments.device)?;
    let (rows, runs) = if device.is_cpu() { (2000, 5) } else { (50_000, 100) };
    let (rows, runs) = (arguments.rows.unwrap_or(rows), arguments.runs.map_or(runs, |runs| runs as usize));
    if rows == 0 || arguments.d.contains(&0) {
        return Err(CliError::usage("rows of this shape are empty", "--rows and --d must be at least 1"));
    }
    let dtype = match arguments.dtype.as_str() {
        "bf16" => DType::BF16,
        "f16" => DType::F16,
        _ => DType::F32,
    };
    let mut table_rows = Vec::new();
    let mut notes = Vec::new();
    for subject in SUBJECTS {
        for &d in &arguments.d {
            let times = match catch_oom(measure(subject, [rows, d], dtype, &device, runs))? {
                MemoryOutcome::Fits(times) => Some(times),
                MemoryOutcome::OutOfMemory(why) => {
                    notes.push(format!("{}, d {d}: {why}", subject.name()));
                    None
                }
            };
            release_memory(&device);
            table_rows.push(NormRow { subject, d, times });
        }
    }
    notes.push(format!(
        "On {}. Mean ± standard deviation of {runs} runs, with a synchronization after each; backward computes the \
         gradients of rows and weights.",
        device_info(&device)?.name
    ));
    Ok(arguments.outputs.write(report(&table_rows, rows, dtype, notes), out)?)
}

fn measure(
    subject: Subject,
    [rows, d]: [usize; 2],
    dtype: DType,
    device: &Device,
    runs: usize,
) -> train::Result<NormTimes> {
    // Tensor ops save five f32 tensors of this size, and allocate two more at a time in backward.
    expect_memory(device, 8.0 * 4.0 * rows as f64 * d as f64)?;
    let specs = vec![ParamSpec::vector("weight", d, Init::Ones), ParamSpec::vector("bias", d, Init::Zeros)];
    let params = Params::new(specs, device, 0)?;
    if dtype != DType::F32 {
        params.set_compute_dtype(dtype)?;
    }
    let x = Var::from_tensor(&Tensor::randn(0.0_f32, 1.0, (rows, d), device)?.to_dtype(dtype)?)?;
    let mut times = NormTimes { forward: Times::default(), backward: Times::default() };
    for _ in 0..2 {
        subject.run(x.as_tensor(), &params)?.backward()?;
    }
    device.synchronize()?;
    for _ in 0..runs {
        let y = times.forward.time(device, || Ok(subject.run(x.as_tensor(), &params)?))?;
        times.backward.time(device, || Ok(y.backward().map(drop)?))?;
    }
    Ok(times)
}

fn report(table_rows: &[NormRow], rows: usize, dtype: DType, notes: Vec<String>) -> Report {
    let columns = [
        Column::text("norm"),
        Column::integer("rows"),
        Column::integer("d"),
        Column::text("dtype"),
        Column::number("forward").unit("ms"),
        Column::number("backward").unit("ms"),
        Column::number("both").unit("ms"),
    ];
    let mut table = Table::new("norm", "Norms, forward and backward", columns);
    for NormRow { subject, d, times } in table_rows {
        let mut cells: Vec<Cell> = vec![subject.name().into(), rows.into(), (*d).into(), dtype.as_str().into()];
        cells.extend(match times {
            None => [Cell::OutOfMemory, Cell::OutOfMemory, Cell::OutOfMemory],
            Some(NormTimes { forward, backward }) => {
                let both = forward.0.iter().zip(&backward.0).map(|(a, b)| a + b).collect();
                [forward.mean_std(), backward.mean_std(), Times(both).mean_std()]
            }
        });
        table.push(cells);
    }
    table.notes = notes;
    let mut report = Report::new("norm", "Norms").table(table);
    for (name, title, pick) in [
        ("norm-forward", "Forward", (|times: &NormTimes| times.forward.mean_std()) as fn(&NormTimes) -> Cell),
        ("norm-backward", "Backward", |times: &NormTimes| times.backward.mean_std()),
    ] {
        let lines = SUBJECTS.map(|subject| {
            let of_line = table_rows.iter().filter(|row| row.subject == subject);
            let points = of_line.filter_map(|row| {
                let cell = pick(row.times.as_ref()?);
                Some(Point { x: row.d as f64, y: cell.value()?, error: cell.deviation() })
            });
            Series::new(subject.name(), points)
        });
        report = report.plot(Plot::lines(name, title, Axis::log2("d"), Axis::log10("ms"), lines.into()));
    }
    report
}
