//! The command line `tilewright`.
//!
//! Each command is a file with its arguments (a clap struct) and one function that writes to a given output. Exit codes:
//! 0 done, 1 failed, 2 asked for something that does not exist (as clap's own errors).
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
mod numerics;
mod profile;
mod ranks;
mod report;
pub(crate) mod run;
mod shapes;
mod step;
mod tensors;
mod train;
mod tune;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tilewright::terminal;
use tracing_subscriber::EnvFilter;

pub use error::{CliError, Result};

/// GPU tile kernels written in Rust: PTX for the GPU, native code for the CPU, no CUDA toolkit.
#[derive(Parser)]
#[command(name = "tilewright", version = tilewright::codegen::VERSION, max_term_width = 100)]
pub(crate) struct Arguments {
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
    /// Print the versions of Tilewright and of the LLVM inside it
    Version,
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program(|arguments: Arguments, out| dispatch(arguments.command, out))
}

/// Reads a program's arguments, sets logging up, runs its one function with its output, and says why it stopped.
///
/// A broken pipe ends the program quietly; output that cannot be written for another reason is an error. What cannot be written to
/// standard error is lost, and ends nothing.
pub fn program<A: Parser>(run: impl FnOnce(A, &mut dyn Write) -> Result<()>) -> ExitCode {
    // A file beyond the limit of `ulimit -f` is then an error of the write, and not the end of the process.
    // SAFETY: no handler runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let filter = EnvFilter::try_from_env("TILEWRIGHT_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // The library would say so with `eprintln!`, which panics where standard error is full.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    // Not locked: kernels print from the threads of the pool.
    let mut out = io::BufWriter::new(io::stdout());
    let arguments = A::try_parse().map_err(CliError::Arguments);
    let outcome = arguments.and_then(|arguments| run(arguments, &mut out)).and_then(|()| Ok(out.flush()?));
    let error = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        // Help is what was asked for.
        Err(CliError::Arguments(help)) if !help.use_stderr() => {
            match help.print().and_then(|()| io::stdout().flush()) {
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

/// Calls `heard` at each Ctrl-C from now on, on a thread of its own.
///
/// # Errors
/// The system has no more threads.
fn on_ctrl_c(heard: impl FnMut() + Send + 'static) -> Result<()> {
    ctrlc::set_handler(heard).map_err(|error| {
        let reason = match error {
            ctrlc::Error::System(error) => error.to_string(),
            other => other.to_string(),
        };
        CliError::Failure(format!("cannot watch for Ctrl-C: {reason}"))
    })
}

fn dispatch(command: Command, out: &mut dyn Write) -> Result<()> {
    match command {
        Command::Doctor(arguments) => doctor::run(&arguments, out),
        Command::Demo(arguments) => demo::run(&arguments, out),
        Command::List(arguments) => list::run(&arguments, out),
        Command::Compile(arguments) => compile::run(&arguments, out),
        Command::Bench(arguments) => bench::run(&arguments, out),
        Command::Train(arguments) => train::run(&arguments, out),
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
        Command::Version => version(out),
    }
}

fn version(out: &mut dyn Write) -> Result<()> {
    let (major, minor, patch) = tilewright::codegen::llvm::version();
    writeln!(out, "tilewright {}", tilewright::codegen::VERSION)?;
    writeln!(out, "LLVM {major}.{minor}.{patch}")?;
    Ok(())
}
