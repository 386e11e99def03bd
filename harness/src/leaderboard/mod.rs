//! The program `leaderboard`: benchmarks FlashAttention-2, forward and backward, as CS336's second assignment does.
//!
//! Measures one case, or a table of cases with `--sweep`. A case is checked before it is timed (`check.rs`), and timed
//! like `triton.testing.do_bench` (`measure.rs`). `peak.rs` measures the matmul peak of the device in the same run,
//! and `peers.rs` reads the results of other implementations on the same machine.

mod arguments;
mod check;
mod measure;
mod peak;
mod peers;
mod single;
mod sweep;
#[cfg(test)]
mod tests;

use std::process::ExitCode;

pub use arguments::Arguments;

use crate::cli::{Result, program};

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program(|arguments: Arguments, out| run(&arguments, out))
}

/// Measures the cases, prints the tables, and writes the files.
///
/// # Errors
/// A wrong result, an invalid shape, or an error of the device or a file.
pub fn run(arguments: &Arguments, out: &mut dyn std::io::Write) -> Result<()> {
    let outputs = arguments.outputs.protecting_inputs(&arguments.compare);
    outputs.check_with(arguments.record.iter().map(|path| ("--record", path)))?;
    let arguments = &Arguments { outputs, ..arguments.clone() };
    match arguments.sweep {
        false => single::run(arguments, out),
        true => sweep::run(arguments, out),
    }
}
