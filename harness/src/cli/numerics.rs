//! `tilewright numerics`: experiments with precision.

use std::io::Write;

use clap::{Args, ValueEnum};

use super::{Result, numbers};
use crate::numerics::{accumulate, autocast, norm, scaling};
use crate::report::{Outputs, Report};

/// The assignment's sum: a thousand times 0.01.
pub const ADDEND: f64 = 0.01;
pub const STEPS: u32 = 1000;

#[derive(Args)]
pub struct Arguments {
    /// Which experiments; all of them unless some are named
    #[arg(value_enum)]
    experiments: Vec<Experiment>,
    /// What is added again and again
    #[arg(long, default_value_t = ADDEND, value_parser = numbers::finite)]
    addend: f64,
    /// How often it is added
    #[arg(long, default_value_t = STEPS, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    steps: u32,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Experiment {
    /// A small number added many times, in several types
    Accumulation,
    /// Which types a toy model's tensors have under mixed precision
    Autocast,
    /// Layer normalisation in 16 bits
    LayerNorm,
    /// Gradients that f16 loses, and the scale that saves them
    LossScaling,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.check()?;
    let report = report(&arguments.experiments, arguments.addend, arguments.steps)?;
    Ok(arguments.outputs.write(report, out)?)
}

/// Tables, plots and words of the experiments, or of all if none are named.
///
/// # Errors
/// What candle refuses.
pub fn report(experiments: &[Experiment], addend: f64, steps: u32) -> Result<Report> {
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
    let mut report = Report::new("numerics", "Numerics of mixed precision");
    report.parts = parts.into_iter().flat_map(|part| part.parts).collect();
    Ok(report)
}
