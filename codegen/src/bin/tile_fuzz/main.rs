//! `tile-fuzz`: checks random programs against the interpreter, on every target.
//!
//! Programs run in worker processes, so that one that ends its process, or never ends, is a failure of its seed and not the
//! end of the run.

mod supervise;
mod work;

use clap::Parser;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;

/// Checks the random programs of some seeds: the interpreter says what is right; passes, native code, simulated GPUs and the
/// claims of analyses have to agree with it, PTX has to assemble.
#[derive(Parser, Clone)]
#[command(version, after_help = "Example:\n  tile-fuzz --seeds 0..1000 --targets host,sm_80,sm_90a --jobs 2")]
struct Cli {
    /// Seeds, the last not included.
    #[arg(long, value_parser = seeds, value_name = "A..B")]
    seeds: Range<u64>,

    /// `host`, and GPUs to simulate (sm_80, sm_86, sm_89, sm_90a).
    #[arg(long, value_delimiter = ',', default_value = "host,sm_80,sm_90a")]
    targets: Vec<String>,

    /// GPUs to generate PTX for.
    #[arg(long, value_delimiter = ',', value_name = "GPUS")]
    ptx: Vec<String>,

    /// The program `ptxas`, which is to take the PTX; else the environment variable TILEWRIGHT_PTXAS.
    #[arg(long)]
    ptxas: Option<PathBuf>,

    /// Compare with the interpreter after each pass, not after the last alone.
    #[arg(long)]
    each_pass: bool,

    /// Leave out the claims of analyses.
    #[arg(long)]
    no_claims: bool,

    /// Worker processes.
    #[arg(long, default_value_t = 1)]
    jobs: usize,

    /// Seconds after which a program counts as one that never ends.
    #[arg(long, default_value_t = 120)]
    timeout: u64,

    /// Print the failing programs, reduced to the ops that the failure needs.
    #[arg(long)]
    reduce: bool,

    /// Check the seeds in this process.
    #[arg(long)]
    here: bool,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let parts = text.split_once("..").ok_or("expected A..B")?;
    let number = |s: &str| s.parse::<u64>().map_err(|e| format!("`{s}`: {e}"));
    Ok(number(parts.0)?..number(parts.1)?)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = if cli.here { work::run(&cli) } else { supervise::run(&cli) };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(2)
        }
    }
}
