//! `tilewright demo`: shows the whole pipeline in one command.
//!
//! Compiles weighted sum and FlashAttention-2, forward and backward, to PTX and to native code, runs them on the GPU or
//! else on the CPU, and checks the results against f64 references.

mod attention;
pub mod case;
mod data;
mod inputs;
mod weighted_sum;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use tabled::builder::Builder;
use tabled::settings::Style;
use tilewright::codegen::ir::DType;
use tilewright::codegen::target::{GpuArch, HostCpu, Target};

use self::case::Case;
use self::inputs::Inputs;
use super::device::{self, DeviceArg, open};
use super::{CliError, Result};

#[derive(Args)]
pub struct Arguments {
    /// Safetensors file with your own inputs: x [rows, d] and w [d], optionally grad_y [rows]; q [batch, heads, length,
    /// d], k and v, optionally d_o. Missing gradients are ones
    #[arg(short, long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Output folder for PTX, native code and manifests
    #[arg(short, long, value_name = "DIR", default_value = "tilewright-demo")]
    out: PathBuf,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let device = open(arguments.device)?;
    let inputs = Inputs::read(arguments.input.as_deref())?;
    let cases = cases(&inputs)?;
    if cases.is_empty() {
        return Err(CliError::Failure(format!(
            "the input has {}, and none of the tensors that the demo needs\n  help: provide x and w, or q, k and v",
            inputs.names()
        )));
    }
    // The architecture of this machine's GPU, else Hopper.
    let gpu = Target::Nvptx(device.gpu_arch().unwrap_or(GpuArch::Sm90a));
    let native = Target::Host(HostCpu::native());

    writeln!(out, "Running on {device}. PTX is for {gpu}.\n")?;
    out.flush()?;
    let mut table = Builder::default();
    table.push_record(["kernel", "device", "shape", "dtype", "error", "tolerance", "time", "PTX"]);
    let mut failures = Vec::new();
    for case in &cases {
        let input = arguments.input.as_deref();
        let ptx = case.compile(&gpu, &arguments.out, input)?;
        case.compile(&native, &arguments.out, input)?;
        let outcome = case.run(&device)?;
        if !(outcome.error <= case.tolerance) {
            let (error, tolerance) = (outcome.error, case.tolerance);
            failures
                .push(format!("{}: the error of {} is {error:.1e}, above {tolerance:.0e}", case.name, outcome.worst));
        }
        table.push_record([
            case.kernel.clone(),
            if device.is_cuda() { "GPU" } else { "CPU" }.to_string(),
            case.shape.clone(),
            case.dtype.to_string(),
            format!("{:.1e}", outcome.error),
            format!("{:.0e}", case.tolerance),
            format!("{:.3} ms", outcome.ms),
            file_pattern(&ptx),
        ]);
    }
    writeln!(out, "{}", table.build().with(Style::sharp()))?;
    finish(&failures, cases.len(), &arguments.out, out)
}

/// Returns all cases of the demo.
fn cases(inputs: &Inputs) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        cases.extend(weighted_sum::cases(inputs, dtype)?);
    }
    for (dtype, causal) in [(DType::F32, true), (DType::F16, false), (DType::BF16, true)] {
        cases.extend(attention::cases(inputs, dtype, causal)?);
    }
    Ok(cases)
}

/// Formats the path of one file, or the pattern of several.
fn file_pattern(files: &[PathBuf]) -> String {
    match files {
        [file] => file.display().to_string(),
        files => files.first().map_or(String::new(), |file| file.with_file_name("*.ptx").display().to_string()),
    }
}

/// Prints the legend of the table, and whether all results are right.
///
/// # Errors
/// A result is wrong.
fn finish(failures: &[String], cases: usize, dir: &Path, out: &mut dyn Write) -> Result<()> {
    let dir = dir.display();
    writeln!(
        out,
        "error: largest relative error of the outputs, against f64 references. time: median of one run.\n\
        PTX, native objects and the manifest of each kernel are in {dir}."
    )?;
    if failures.is_empty() {
        writeln!(out, "All {cases} agree with their references.")?;
        return Ok(());
    }
    Err(CliError::Failure(format!("{} of {cases} results are wrong\n  {}", failures.len(), failures.join("\n  "))))
}
