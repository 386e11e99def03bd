//! The command line `tilewright`.
//!
//! Each command is a file with a clap struct of its arguments and a function `run` that writes to a given output. Exit
//! codes:
//!
//! | code | meaning |
//! |---|---|
//! | 0 | success |
//! | 1 | failure |
//! | 2 | invalid command line, as clap's own errors |
//! | 70 | a library call hung and could not be canceled (`EX_SOFTWARE` of sysexits.h) |
//! | 75 | stopped by a signal after the state was saved, so that the run can be resumed (`EX_TEMPFAIL` of sysexits.h) |
//! | 141 | standard output was closed (as if terminated by SIGPIPE) |
//!
//! A second signal terminates a command by the signal's default action: shells show 128 + its number.
//!
//! Adding a command: a file here, a variant of `Command`, a line in `dispatch`.

mod account;
pub(crate) mod bench;
mod cache;
pub(crate) mod demo;
mod doctor;
mod generate;
mod hints;
mod launch;
mod memory;
mod model_options;
mod numerics;
#[cfg(test)]
mod old_flags;
mod oom_probe;
mod products;
mod profile;
mod ranks;
mod report;
mod step;
mod train;
mod tune;
#[cfg(test)]
mod value_parsers_tests;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::dist::launch::guard;
use crate::dist::{lifeline, rank};
use crate::signals::{self, StopSignal};

pub use hints::shipped;
pub use tilewright_cli::{CliError, Output, Result, STOPPED};
use tilewright_cli::{bind, choose, compile, device, expect_used, explain, list, output, run, tensors, value_parsers};

/// GPU tile kernels written in Rust: PTX for the GPU, native code for the CPU, no CUDA toolkit.
#[derive(Parser)]
#[command(name = "tilewright", version = tilewright::codegen::VERSION, max_term_width = 100)]
pub(crate) struct Arguments {
    /// Run only this row of a sweep, to find out whether it fits into memory
    #[arg(long = oom_probe::OPTION, value_name = "ROW", hide = true)]
    oom_probe: Option<usize>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Report GPU, driver, CPU and tools of this machine, and what each missing part costs
    Doctor(doctor::Arguments),
    /// Compile weighted sum and FlashAttention-2, run them, and check their results
    Demo(demo::Arguments),
    /// List the kernels with their parameters
    List(list::Arguments),
    /// Compile a kernel ahead of time: IR, code, and a manifest for launching it
    Compile(compile::Arguments),
    /// Benchmark kernels, models, collectives, launches and compilation, with checks
    Bench(bench::Arguments),
    /// Train a Transformer on a text; by default on the book that ships
    Train(Box<train::Arguments>),
    /// Generate text from a trained model
    Generate(generate::Arguments),
    /// Start the ranks of a program on this host; if one fails, terminate all of them
    Launch(launch::Arguments),
    /// Profile the memory of a training step: peaks, largest allocations, a timeline
    Memory(memory::Arguments),
    /// Run experiments on precision: accumulation, autocast, layer norm, loss scaling, products
    Numerics(numerics::Arguments),
    /// Estimate the cost of training on many devices: memory, communication, batch sizes
    Account(account::Arguments),
    /// Analyze a compiled kernel: registers, occupancy, instructions, and roofline bounds
    Explain(explain::Arguments),
    /// Autotune kernels for this device, and write the configurations to a table
    Tune(tune::Arguments),
    /// Record when the warps of a block reach each wait, matrix product and copy, for `explain --clocks` (GPU)
    Clocks(Box<tilewright_cli::clocks::Arguments>),
    /// Find the best schedules of a kernel's loops by a constraint solver, with a proof, and compile with them
    #[cfg(feature = "solver")]
    Solve(Box<tilewright_cli::solve::Arguments>),
    /// Profile the time of a training step: phases, kernels, a trace, a flame graph
    Profile(profile::Arguments),
    /// Run several measurements, and write one HTML page with tables and plots
    Report(report::Arguments),
    /// Run a kernel on tensors from a safetensors file
    Run(run::Arguments),
    /// Show or clear the cache of compiled kernels
    Cache(cache::Arguments),
    /// Terminates the ranks of a launcher that has died; started by `launch`
    #[command(name = guard::COMMAND, hide = true)]
    Guard,
    /// Print the versions of Tilewright and of its LLVM
    Version,
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program(|arguments: Arguments, out| {
        arguments.oom_probe.into_iter().for_each(oom_probe::probe_row);
        dispatch(arguments.command, out)
    })
}

/// As [`tilewright_cli::program`], for a program that a launcher may have started.
pub fn program<A: Parser>(run: impl FnOnce(A, &mut Output) -> Result<()>) -> ExitCode {
    // Before any file is opened, so that the launcher's socket still has the descriptor number that the launcher
    // passed.
    let lifeline = lifeline::attach();
    tilewright_cli::program(|arguments, out| {
        let own = lifeline.and_then(|()| rank::check_environment());
        own.map_err(|error| CliError::Failure(error.to_string()))?;
        run(arguments, out)
    })
}

/// Calls `heard` for every signal that asks to stop ([`crate::signals`]), on a separate thread.
///
/// # Errors
/// The thread cannot be created.
fn on_signals(heard: impl FnMut(StopSignal) + Send + 'static) -> Result<()> {
    signals::listen(heard).map_err(|error| CliError::Failure(format!("cannot install signal handlers: {error}")))
}

fn dispatch(command: Command, out: &mut Output) -> Result<()> {
    match command {
        Command::Doctor(arguments) => doctor::run(&arguments, out),
        Command::Demo(arguments) => demo::run(&arguments, out),
        Command::List(arguments) => list::run(&arguments, &shipped(), out),
        Command::Compile(arguments) => compile::run(&arguments, &shipped(), out),
        Command::Bench(arguments) => bench::run(&arguments, out),
        Command::Train(arguments) => train::run(&arguments, out.keep_going_on_write_errors()),
        Command::Generate(arguments) => generate::run(&arguments, out),
        Command::Launch(arguments) => launch::run(&arguments, out),
        Command::Memory(arguments) => memory::run(&arguments, out),
        Command::Numerics(arguments) => numerics::run(&arguments, out),
        Command::Account(arguments) => account::run(&arguments, out),
        Command::Clocks(arguments) => tilewright_cli::clocks::run(&arguments, &shipped(), out),
        #[cfg(feature = "solver")]
        Command::Solve(arguments) => tilewright_cli::solve::run(&arguments, &shipped(), out),
        Command::Explain(arguments) => explain::run(&arguments, &shipped(), out),
        Command::Tune(arguments) => tune::run(&arguments, out),
        Command::Profile(arguments) => profile::run(&arguments, out),
        Command::Report(arguments) => report::run(&arguments, out),
        Command::Run(arguments) => run::run(&arguments, &shipped(), out),
        Command::Cache(arguments) => cache::run(&arguments, out),
        Command::Guard => {
            guard::watch();
            Ok(())
        }
        Command::Version => version(out),
    }
}

fn version(out: &mut dyn Write) -> Result<()> {
    writeln!(out, "tilewright {}", tilewright::codegen::VERSION)?;
    if let Some(llvm) = tilewright::codegen::llvm::version() {
        writeln!(out, "LLVM {llvm}")?;
    }
    Ok(())
}
