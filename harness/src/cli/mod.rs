//! The command line `tilewright`.
//!
//! Each command is a file with its arguments (a clap struct) and one function that writes to a given output. Exit codes:
//!
//! | | |
//! |---|---|
//! | 0 | done |
//! | 1 | failed |
//! | 2 | asked for something that does not exist (as clap's own errors) |
//! | 70 | a call of a library did not come back, and could not be taken back (`EX_SOFTWARE` of sysexits.h) |
//! | 75 | stopped by a signal, with what it takes to go on saved (`EX_TEMPFAIL` of sysexits.h) |
//! | 141 | nobody reads the output any more (as if ended by SIGPIPE) |
//!
//! A second signal ends a command as the signal does where nobody handles it: shells show 128 + its number.
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
mod manifest;
mod memory;
mod model_options;
pub(crate) mod numbers;
mod numerics;
mod output;
mod profile;
mod ranks;
mod report;
pub(crate) mod run;
mod shapes;
mod step;
mod tensors;
mod train;
mod trial;
mod tune;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tilewright::terminal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::dist::launch::guard;
use crate::dist::{lifeline, rank};
use crate::signals::{self, Heard};

pub use error::{CliError, Result, STOPPED};
use output::Output;

/// GPU tile kernels written in Rust: PTX for the GPU, native code for the CPU, no CUDA toolkit.
#[derive(Parser)]
#[command(name = "tilewright", version = tilewright::codegen::VERSION, max_term_width = 100)]
pub(crate) struct Arguments {
    /// Only make this row of a sweep, to see whether it fits into memory
    #[arg(long = trial::OPTION, value_name = "ROW", hide = true)]
    trial: Option<usize>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what this machine offers, and what each missing part costs
    Doctor(doctor::Arguments),
    /// Compile weighted sum and FlashAttention-2, run them, and check the results
    Demo(demo::Arguments),
    /// Show the kernels and what each takes
    List(list::Arguments),
    /// Compile a kernel ahead of time: text, code, and a manifest for whoever launches it
    Compile(compile::Arguments),
    /// Time kernels, launches and compilations, and check what is timed
    Bench(bench::Arguments),
    /// Train a Transformer on a text: on the book that ships, unless told otherwise
    Train(Box<train::Arguments>),
    /// Let a trained model write
    Generate(generate::Arguments),
    /// Start the ranks of a program on this host, and end all of them when one fails
    Launch(launch::Arguments),
    /// Say what the memory of a training step is for: peaks, largest allocations, a timeline
    Memory(memory::Arguments),
    /// Show by experiment what 16-bit numbers do to sums, layer norms and gradients
    Numerics(numerics::Arguments),
    /// Compute what training on many devices costs: memory, communication, batch sizes
    Account(account::Arguments),
    /// Say what the compiler made of a kernel: registers, occupancy, instructions, and the least that it must do
    Explain(explain::Arguments),
    /// Find the best configurations of kernels for this device, and write them to a table
    Tune(tune::Arguments),
    /// Say where the time of a training step goes: phases, kernels, a trace, a flame graph
    Profile(profile::Arguments),
    /// Measure a chosen set of all this, and write one page with tables and plots
    Report(report::Arguments),
    /// Run a kernel on tensors from a safetensors file
    Run(run::Arguments),
    /// Show, or empty, the folder of compiled kernels
    Cache(cache::Arguments),
    /// Ends the ranks of a launcher that has ended: started by `launch`
    #[command(name = guard::COMMAND, hide = true)]
    Guard,
    /// Print the versions of Tilewright and of the LLVM inside it
    Version,
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program(|arguments: Arguments, out| {
        arguments.trial.into_iter().for_each(trial::only);
        dispatch(arguments.command, out)
    })
}

/// Reads a program's arguments, sets logging up, runs its one function with its output, and says why it stopped.
///
/// A broken pipe ends the program quietly; output that cannot be written for another reason is an error. Commands whose work is worth more
/// than their output finish it first ([`Output::going_on`]). What cannot be written to standard error is lost, and ends nothing.
pub fn program<A: Parser>(run: impl FnOnce(A, &mut Output) -> Result<()>) -> ExitCode {
    // A file beyond the limit of `ulimit -f` is then an error of the write, and not the end of the process.
    // SAFETY: no handler runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let (filter, log) = match log_filter(std::env::var_os(LOG)) {
        Ok(filter) => (filter, Ok(())),
        Err(error) => (EnvFilter::new("warn"), Err(error)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // The library would say so with `eprintln!`, which panics where standard error is full.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    // Before anything is opened: the launcher's socket then is what its number says.
    let lifeline = lifeline::attach();
    // Not locked: kernels print from the threads of the pool.
    let mut out = Output::new();
    let arguments = A::try_parse().map_err(CliError::Arguments);
    let environment = || -> Result<()> {
        log?;
        tilewright::env::Env::get()?;
        let own = lifeline.and_then(|()| rank::check_own());
        own.map_err(|error| CliError::Failure(error.to_string()))
    };
    let outcome = arguments.and_then(|arguments| {
        environment()?;
        run(arguments, &mut out)?;
        Ok(out.finish()?)
    });
    let error = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        // Help is what was asked for.
        Err(CliError::Arguments(help)) if !help.use_stderr() => {
            match output::expect_open().and_then(|()| help.print()).and_then(|()| io::stdout().flush()) {
                Ok(()) => return ExitCode::SUCCESS,
                Err(error) => error.into(),
            }
        }
        Err(error) => error,
    };
    match &error {
        // Whoever read our output has seen enough, as in `tilewright list | head`.
        CliError::ClosedOutput => {}
        CliError::Arguments(wrong) => drop(wrong.print()),
        error => {
            // What was found before the failure is worth reading too.
            let _ = out.flush();
            terminal::say(error);
        }
    }
    error.exit_code()
}

/// What is logged to standard error: `warn` without it.
const LOG: &str = "TILEWRIGHT_LOG";
const LOG_VALUES: &str =
    "a level (off, error, warn, info, debug or trace) or MODULE=LEVEL, several separated by commas";

/// What `TILEWRIGHT_LOG` asks for.
fn log_filter(value: Option<OsString>) -> Result<EnvFilter> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(EnvFilter::new("warn")) };
    let bad = || tilewright::Error::BadVariable {
        name: LOG,
        value: value.to_string_lossy().into_owned(),
        expected: LOG_VALUES,
    };
    let text = value.to_str().ok_or_else(bad)?;
    // The library takes any word for a module of which everything is logged: a level that is misspelled would log nothing.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    if !text.contains('[') && !text.split(',').map(str::trim).all(|word| is_level(word) || word.contains('=')) {
        return Err(bad().into());
    }
    Ok(EnvFilter::try_new(text).map_err(|_| bad())?)
}

/// Calls `heard` at signals that ask to stop ([`crate::signals`]), on a thread of its own.
///
/// # Errors
/// The system has no more threads.
fn on_signals(heard: impl FnMut(Heard) + Send + 'static) -> Result<()> {
    signals::listen(heard).map_err(|error| CliError::Failure(format!("cannot watch for signals: {error}")))
}

fn dispatch(command: Command, out: &mut Output) -> Result<()> {
    match command {
        Command::Doctor(arguments) => doctor::run(&arguments, out),
        Command::Demo(arguments) => demo::run(&arguments, out),
        Command::List(arguments) => list::run(&arguments, out),
        Command::Compile(arguments) => compile::run(&arguments, out),
        Command::Bench(arguments) => bench::run(&arguments, out),
        Command::Train(arguments) => train::run(&arguments, out.going_on()),
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
    let (major, minor, patch) = tilewright::codegen::llvm::version();
    writeln!(out, "tilewright {}", tilewright::codegen::VERSION)?;
    writeln!(out, "LLVM {major}.{minor}.{patch}")?;
    Ok(())
}
