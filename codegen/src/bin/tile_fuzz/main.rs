//! `tile-fuzz`: checks random programs on every target against the interpreter.
//!
//! Programs run in worker processes: a crash or an endless loop is a failure of its seed and does not end the run.

mod supervise;
mod worker;

use clap::Parser;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use tilewright_codegen::target::GpuArch;

/// Check the random programs of a range of seeds against the interpreter: results of the analyses, passes, native code
/// and simulated GPUs must agree with it, and PTX must assemble.
#[derive(Parser, Clone)]
#[command(version, after_help = "Example:\n  tile-fuzz --seeds 0..1000 --targets host,sm_80,sm_90a --jobs 2")]
struct Cli {
    /// Range of seeds; the end is excluded.
    #[arg(long, value_parser = seeds, value_name = "A..B")]
    seeds: Range<u64>,

    /// `host`, and GPUs to simulate (sm_80, sm_86, sm_89, sm_90a).
    #[arg(long, value_delimiter = ',', default_value = "host,sm_80,sm_90a")]
    targets: Vec<String>,

    /// GPUs to generate PTX for.
    #[arg(long, value_delimiter = ',', value_name = "GPUS")]
    ptx: Vec<String>,

    /// Path of `ptxas`, which must accept the PTX; default: the environment variable TILEWRIGHT_PTXAS.
    #[arg(long)]
    ptxas: Option<PathBuf>,

    /// Compare with the interpreter after each pass, not only after the last.
    #[arg(long)]
    each_pass: bool,

    /// Do not check the results of the analyses.
    #[arg(long, alias = "no-claims")]
    no_analysis_checks: bool,

    /// Number of worker processes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: u16,

    /// Seconds after which a program counts as an endless loop.
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,

    /// Print failing programs, reduced to the ops that the failure needs.
    #[arg(long)]
    reduce: bool,

    /// Check the seeds in this process, without workers.
    #[arg(long, alias = "here")]
    in_process: bool,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let parts = text.split_once("..").ok_or("expected A..B")?;
    let number = |s: &str| s.parse::<u64>().map_err(|e| format!("`{s}`: {e}"));
    let range = number(parts.0)?..number(parts.1)?;
    if range.is_empty() {
        return Err(format!("{range:?} has no seeds: expected A below B"));
    }
    Ok(range)
}

/// Refuses targets that there are not: no program would be checked on them.
fn check_targets(cli: &Cli) -> Result<(), String> {
    let mut gpus = cli.targets.iter().filter(|target| *target != "host").chain(&cli.ptx);
    gpus.try_for_each(|target| target.parse().map(|_: GpuArch| ()))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let run = |cli: &Cli| if cli.in_process { worker::run(cli) } else { supervise::run(cli) };
    let result = check_targets(&cli).and_then(|()| run(&cli));
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}
