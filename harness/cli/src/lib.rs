//! The command line of kernels: list, compile, run, bench, tune, explain, clocks.
//!
//! A crate with kernels of its own gets the commands with one call:
//!
//! ```no_run
//! use tilewright_runtime::prelude::*;
//!
//! /// y = a · x
//! #[kernel]
//! pub fn scale(x: In<f32>, y: Out<f32>, a: f32, n: i32, #[constexpr] tile: usize) {
//!     let i = program_id(0) * tile + arange(0, tile);
//!     store(y + i, load(x + i, mask = i < n) * a, mask = i < n);
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     tilewright_cli::main(&[&SCALE])
//! }
//! ```
//!
//! The program `tilewright` has the same commands for the kernels that ship. A program with other commands, too, takes
//! the `Arguments` of the commands into its own command line, and passes [`Kernels`] to their `run`.
//!
//! In reading order: [`kernels`], the commands ([`list`], [`compile`], [`run`], [`mod@bench`], [`tune`],
//! [`explain`], [`clocks`]), and what commands share:
//! [`choose`] and [`bind`] (names to kernels, constants, shapes), [`device`], [`tensors`], [`output`] and [`error`],
//! [`files`], [`report`], [`signals`].

// The print macros panic when a write fails: see `terminal::print_stderr`.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]
#![allow(rustdoc::broken_intra_doc_links, reason = "shapes are full of brackets: x [rows, d]")]

pub mod bench;
pub mod bind;
pub mod choose;
pub mod clocks;
pub mod compile;
pub mod device;
pub mod error;
pub mod explain;
pub mod files;
pub mod kernels;
pub mod list;
mod missing;
pub mod output;
mod program;
pub mod report;
pub mod run;
mod shapes;
pub mod signals;
#[cfg(feature = "solver")]
pub mod solve;
pub mod supervise;
pub mod tensors;
pub mod tune;
mod tuned;
pub mod unique_keys;
pub mod value_parsers;

pub use error::{CliError, Result, STOPPED, expect_used};
pub use kernels::{Hints, Kernel, Kernels};
pub use output::Output;
pub use program::{parse, program};

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tilewright kernels: list, compile, run, benchmark, tune, explain.
#[derive(Parser)]
#[command(max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the kernels with their parameters
    List(list::Arguments),
    /// Compile a kernel ahead of time: IR, code, and a manifest for launching it
    Compile(compile::Arguments),
    /// Run a kernel on tensors from a safetensors file
    Run(run::Arguments),
    /// Time a kernel at given shapes, also beside other constants
    Bench(Box<bench::Arguments>),
    /// Autotune a kernel for this device at given shapes; launches and `compile` then use the result
    Tune(Box<tune::Arguments>),
    /// Record when the warps of a block reach each wait, matrix product and copy, for `explain --clocks` (GPU)
    Clocks(Box<clocks::Arguments>),
    /// Find the best schedules of a kernel's loops by a constraint solver, with a proof, and compile with them
    #[cfg(feature = "solver")]
    Solve(Box<solve::Arguments>),
    /// Analyze a compiled kernel: registers, occupancy, instructions, and roofline bounds
    Explain(Box<explain::Arguments>),
}

/// Runs the commands over these kernels, with the arguments of the process. A kernel is given by its definition
/// (`&SCALE`), or by its configurations (`&SCALE_AUTOTUNE`), which give the commands the constants that are not given.
///
/// The exit code is that of the program `tilewright`: 0 after success, 1 after a failure, 2 for a wrong command line.
pub fn main(kernels: &[&'static dyn Kernel]) -> ExitCode {
    let kernels = Kernels::of(kernels);
    program(|arguments: Arguments, out| match &arguments.command {
        Command::List(arguments) => list::run(arguments, &kernels, out),
        Command::Compile(arguments) => compile::run(arguments, &kernels, out),
        Command::Run(arguments) => run::run(arguments, &kernels, out),
        Command::Bench(arguments) => bench::run(arguments, &kernels, out),
        Command::Tune(arguments) => tune::run(arguments, &kernels, out),
        Command::Clocks(arguments) => clocks::run(arguments, &kernels, out),
        #[cfg(feature = "solver")]
        Command::Solve(arguments) => solve::run(arguments, &kernels, out),
        Command::Explain(arguments) => explain::run(arguments, &kernels, out),
    })
}
