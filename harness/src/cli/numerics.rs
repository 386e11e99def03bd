//! `tilewright numerics`: runs experiments on numerical precision.

use std::io::Write;

use clap::{Args, ValueEnum};

use super::device::{self, DeviceArg, open};
use super::{Result, expect_used, products, value_parsers};
use crate::numerics::{accumulate, autocast, norm, scaling};
use crate::report::{Outputs, Report};

/// Addend of the assignment's sum, which adds 0.01 a thousand times.
pub const ADDEND: f64 = 0.01;
/// Number of additions of the assignment's sum.
pub const STEPS: u32 = 1000;

#[derive(Args)]
pub struct Arguments {
    /// Experiments to run; all of them by default
    #[arg(value_enum)]
    experiments: Vec<Experiment>,
    /// Addend of the accumulation. Default: 0.01
    #[arg(long, value_parser = value_parsers::finite)]
    addend: Option<f64>,
    /// Number of additions of the accumulation. Default: 1000
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    steps: Option<u32>,
    /// Device of the products: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Experiment {
    /// Accumulation of a small number, in several types
    Accumulation,
    /// Types of a toy model's tensors under autocast
    Autocast,
    /// Layer normalization in 16 bits
    LayerNorm,
    /// Gradients that underflow in f16, and loss scaling
    LossScaling,
    /// Errors of matrix products by element type and precision
    Products,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.check_experiments()?;
    arguments.outputs.check()?;
    let (addend, steps) = (arguments.addend.unwrap_or(ADDEND), arguments.steps.unwrap_or(STEPS));
    let report = report(&arguments.experiments, addend, steps, arguments.device)?;
    Ok(arguments.outputs.write(report, out)?)
}

impl Arguments {
    /// # Errors
    /// An option of an experiment that does not run.
    fn check_experiments(&self) -> Result<()> {
        let options = [
            (Experiment::Accumulation, "accumulation", "--addend", self.addend.is_some()),
            (Experiment::Accumulation, "accumulation", "--steps", self.steps.is_some()),
            (Experiment::Products, "products", "--device", self.device.is_some()),
        ];
        let runs = |experiment: &Experiment| self.experiments.is_empty() || self.experiments.contains(experiment);
        expect_used(options.map(|(experiment, name, option, is_given)| {
            let is_unused = is_given && !runs(&experiment);
            (option, is_unused, format!("it goes with the experiment {name}"), format!("omit it, or name {name} too"))
        }))
    }
}

/// Runs the experiments, or all of them if `experiments` is empty, and returns their report.
///
/// # Errors
/// Errors of candle, and of launches on the device.
pub fn report(experiments: &[Experiment], addend: f64, steps: u32, device: Option<DeviceArg>) -> Result<Report> {
    let wanted = |experiment| experiments.is_empty() || experiments.contains(&experiment);
    let mut parts = Vec::new();
    if wanted(Experiment::Accumulation) {
        parts.push(accumulate::report(addend, steps as usize));
    }
    if wanted(Experiment::Autocast) {
        parts.push(autocast::report()?);
    }
    if wanted(Experiment::LayerNorm) {
        parts.push(norm::report()?);
    }
    if wanted(Experiment::LossScaling) {
        parts.push(scaling::report());
    }
    if wanted(Experiment::Products) {
        parts.push(products::report(&open(device)?)?);
    }
    let mut report = Report::new("numerics", "Numerics of mixed precision");
    report.parts = parts.into_iter().flat_map(|part| part.parts).collect();
    Ok(report)
}
