//! `tilewright demo`: the main job in one command. Weighted sum and FlashAttention-2, forward and backward, are compiled
//! to PTX and to native code, run on the GPU or else on the CPU, and checked against f64 references.

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
use super::run::{Choice, device, open};
use super::{CliError, Result};

#[derive(Args)]
pub struct Arguments {
    /// A safetensors file with your own inputs: x [rows, d] and w [d], with grad_y [rows] if you like; q [batch, heads,
    /// length, d], k and v, with d_o if you like. Gradients that it lacks are ones
    #[arg(short, long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// The folder for PTX, native code and manifests
    #[arg(short, long, value_name = "DIR", default_value = "tilewright-demo")]
    out: PathBuf,
    /// Where to run: cpu, cuda or cuda:N; without it, where TILEWRIGHT_DEVICE says, else on a GPU if there is one
    #[arg(long, value_parser = device)]
    device: Option<Choice>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let device = open(arguments.device)?;
    let inputs = Inputs::read(arguments.input.as_deref())?;
    let cases = cases(&inputs)?;
    if cases.is_empty() {
        return Err(CliError::Failure(format!(
            "there is nothing to do: the input has {}\n  help: the demo needs x and w, or q, k and v",
            inputs.names()
        )));
    }
    // The GPU that is here, else the one that most people compile for.
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
            place(&ptx),
        ]);
    }
    writeln!(out, "{}", table.build().with(Style::sharp()))?;
    finish(&failures, cases.len(), &arguments.out, out)
}

/// Everything that the demo computes.
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

/// One file by its path, several by their pattern.
fn place(files: &[PathBuf]) -> String {
    match files {
        [file] => file.display().to_string(),
        files => files.first().map_or(String::new(), |file| file.with_file_name("*.ptx").display().to_string()),
    }
}

/// The last words, which say what the table showed.
fn finish(failures: &[String], cases: usize, dir: &Path, out: &mut dyn Write) -> Result<()> {
    let dir = dir.display();
    writeln!(
        out,
        "error: relative to an f64 reference, the largest of the results. time: median of one run.\n\
         PTX, native objects and the manifest of each kernel are in {dir}."
    )?;
    if failures.is_empty() {
        writeln!(out, "All {cases} agree with their references.")?;
        return Ok(());
    }
    Err(CliError::Failure(format!("{} of {cases} results are wrong\n  {}", failures.len(), failures.join("\n  "))))
}
