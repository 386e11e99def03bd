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
mod bind;
mod cache;
mod choose;
mod compile;
pub(crate) mod demo;
mod doctor;
mod error;
mod explain;
mod generate;
mod launch;
mod list;
mod memory;
mod model_options;
mod numerics;
#[cfg(test)]
mod old_flags;
mod oom_probe;
mod output;
mod profile;
mod ranks;
mod report;
pub(crate) mod run;
mod shapes;
mod step;
mod tensors;
mod train;
mod tune;
pub(crate) mod value_parsers;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tilewright::terminal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::dist::launch::guard;
use crate::dist::{lifeline, rank};
use crate::signals::{self, StopSignal};

pub use error::{CliError, Result, STOPPED};
pub use explain::pictures as explain_pictures;
use output::Output;

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
    /// Run experiments on 16-bit precision: accumulation, autocast, layer norm, loss scaling
    Numerics(numerics::Arguments),
    /// Estimate the cost of training on many devices: memory, communication, batch sizes
    Account(account::Arguments),
    /// Analyze a compiled kernel: registers, occupancy, instructions, and roofline bounds
    Explain(explain::Arguments),
    /// Autotune kernels for this device, and write the configurations to a table
    Tune(tune::Arguments),
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

/// Parses a program's arguments, sets up logging, calls `run` with standard output, and prints the error, if any.
///
/// A broken pipe ends the program silently; any other failure to write the output is an error. Commands whose work
/// matters more than their output finish their work first ([`Output::keep_going_on_write_errors`]). Failures to write
/// to standard error are ignored.
pub fn program<A: Parser>(run: impl FnOnce(A, &mut Output) -> Result<()>) -> ExitCode {
    // A write beyond the limit of `ulimit -f` then returns an error instead of killing the process.
    // SAFETY: SIG_IGN installs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let (filter, log) = match log_filter(std::env::var_os(LOG)) {
        Ok(filter) => (filter, Ok(())),
        Err(error) => (EnvFilter::new("warn"), Err(error)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // The library would report internal errors with `eprintln!`, which panics if standard error cannot be written.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    // Before any file is opened, so that the launcher's socket still has the descriptor number that the launcher
    // passed.
    let lifeline = lifeline::attach();
    // Standard output is not locked: kernels print from the threads of the pool.
    let mut out = Output::new();
    let arguments = A::try_parse().map_err(CliError::Arguments);
    let environment = || -> Result<()> {
        log?;
        tilewright::env::Env::get()?;
        let own = lifeline.and_then(|()| rank::check_environment());
        own.map_err(|error| CliError::Failure(error.to_string()))
    };
    let outcome = arguments.and_then(|arguments| {
        environment()?;
        run(arguments, &mut out)?;
        Ok(out.finish()?)
    });
    let error = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        // `--help` and `--version` are successes.
        Err(CliError::Arguments(help)) if !help.use_stderr() => {
            match output::expect_open().and_then(|()| help.print()).and_then(|()| io::stdout().flush()) {
                Ok(()) => return ExitCode::SUCCESS,
                Err(error) => error.into(),
            }
        }
        Err(error) => error,
    };
    match &error {
        // The reader closed the pipe, as in `tilewright list | head`.
        CliError::ClosedOutput => {}
        CliError::Arguments(wrong) => drop(wrong.print()),
        error => {
            // Results before the failure are printed too.
            let _ = out.flush();
            terminal::print_stderr(error);
        }
    }
    error.exit_code()
}

/// Environment variable with the log filter of standard error. Default: `warn`.
const LOG: &str = "TILEWRIGHT_LOG";
/// The accepted values of [`LOG`], for its error message.
const LOG_VALUES: &str =
    "a level (off, error, warn, info, debug or trace) or MODULE=LEVEL, several separated by commas";

/// Parses the value of `TILEWRIGHT_LOG`.
///
/// # Errors
/// Not UTF-8, an unknown level, or another error of the filter's syntax.
fn log_filter(value: Option<OsString>) -> Result<EnvFilter> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(EnvFilter::new("warn")) };
    let bad = || tilewright::Error::BadVariable {
        name: LOG,
        value: value.to_string_lossy().into_owned(),
        expected: LOG_VALUES,
    };
    let text = value.to_str().ok_or_else(bad)?;
    // `EnvFilter` accepts any word as the name of a module to log at all levels: a misspelled level would log nothing.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    if !text.contains('[') && !text.split(',').map(str::trim).all(|word| is_level(word) || word.contains('=')) {
        return Err(bad().into());
    }
    Ok(EnvFilter::try_new(text).map_err(|_| bad())?)
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
        Command::List(arguments) => list::run(&arguments, out),
        Command::Compile(arguments) => compile::run(&arguments, out),
        Command::Bench(arguments) => bench::run(&arguments, out),
        Command::Train(arguments) => train::run(&arguments, out.keep_going_on_write_errors()),
        Command::Generate(arguments) => generate::run(&arguments, out),
        Command::Launch(arguments) => launch::run(&arguments, out),
        Command::Memory(arguments) => memory::run(&arguments, out),
        Command::Numerics(arguments) => numerics::run(&arguments, out),
        Command::Account(arguments) => account::run(&arguments, out),
        Command::Explain(arguments) => explain::run(&arguments, out),
        Command::Tune(arguments) => tune::run(&arguments, out),
        Command::Profile(arguments) => profile::run(&arguments, out),
        Command::Report(arguments) => report::run(&arguments, out),
        Command::Run(arguments) => run::run(&arguments, out),
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
