//! The program `leaderboard`: the time of FlashAttention-2, forward and backward, as CS336's second assignment takes it.
//!
//! One case, or with `--sweep` a table of them. A case is checked before it is timed (`check.rs`), and timed as
//! `triton.testing.do_bench` does it (`measure.rs`); `ceiling.rs` measures what the device could reach, in the same run, and
//! `peers.rs` reads what other implementations reached on the same machine.

mod arguments;
mod ceiling;
mod check;
mod measure;
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

/// Measures what the arguments say; prints and writes it.
///
/// # Errors
/// A wrong result, which gets no time; a shape that does not fit; a device or a file that does not work.
pub fn run(arguments: &Arguments, out: &mut dyn std::io::Write) -> Result<()> {
    let outputs = arguments.outputs.apart_from(&arguments.compare);
    outputs.check_beside(&arguments.record)?;
    let arguments = &Arguments { outputs, ..arguments.clone() };
    match arguments.sweep {
        false => single::run(arguments, out),
        true => sweep::run(arguments, out),
    }
}
