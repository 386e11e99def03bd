//! Rows of sweeps that may not fit into the memory of the CPU.
//!
//! What a step takes is known from below only ([`crate::model::Config::step_bytes`]). Less than that does not fit, [`PLENTY`] times as much
//! does; in between the row is tried first, by this program in a process of its own, with the same words: the process skips the rows before,
//! makes this one, and ends. If it ends for want of memory, the row does not fit, and the sweep goes on.

use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Device;

use super::{CliError, Result};
use crate::train;

/// Memory for so many times the estimate is enough without a trial: activations that the estimate leaves out, and those that live a moment.
const PLENTY: f64 = 16.0;

/// Bytes that a trial leaves: the sweep itself has memory of its own, and takes what it finds otherwise.
const RESERVE: usize = 64 << 20;

/// The option of the program with the number of the row that is tried.
pub const OPTION: &str = "trial";

/// Which row this process tries.
static TRIED: OnceLock<usize> = OnceLock::new();
/// Rows that have begun.
static ROWS: AtomicUsize = AtomicUsize::new(0);

/// Makes this process a trial of row `number`.
pub fn only(number: usize) {
    TRIED.get_or_init(|| number);
    tilewright::reserve_host_memory(RESERVE);
}

/// What a measurement gave, or that it did not fit.
pub enum Fitted<R> {
    Yes(R),
    /// Out of memory, with what there is to say about it.
    No(String),
}

/// Takes lack of memory as a finding; other errors end the command. A trial ends here, once its row has been made.
pub fn fitted<R>(measured: train::Result<R>) -> Result<Fitted<R>> {
    let lack = measured.as_ref().err().filter(|error| error.is_out_of_memory()).map(ToString::to_string);
    if TRIED.get().is_some_and(|tried| tried + 1 == ROWS.load(Ordering::Relaxed)) {
        if let Some(lack) = &lack {
            tilewright::terminal::say(lack);
        }
        // Other errors the sweep finds itself. Nothing of a trial is kept.
        std::process::exit(i32::from(lack.is_some()));
    }
    match (measured, lack) {
        (Ok(result), _) => Ok(Fitted::Yes(result)),
        (Err(_), Some(lack)) => Ok(Fitted::No(lack.lines().next().unwrap_or_default().to_string())),
        (Err(error), None) => Err(CliError::Failure(error.to_string())),
    }
}

/// Fails where the CPU has no memory for a row of a sweep that takes at least `bytes`, by estimate or by trial. Once for each row, before it
/// allocates; [`fitted`] takes its outcome.
///
/// # Errors
/// Lack of memory.
pub fn expect_memory(device: &Device, bytes: f64) -> train::Result<()> {
    let row = ROWS.fetch_add(1, Ordering::Relaxed);
    if TRIED.get().is_some_and(|tried| row < *tried) {
        return Err(lack("it is another row that is tried"));
    }
    crate::ops::memory::kernel_device(device)?.expect_memory(bytes)?;
    match device.is_cpu() && TRIED.get().is_none() && !tilewright::is_plenty(bytes, PLENTY) {
        true => try_row(row),
        false => Ok(()),
    }
}

fn lack(why: &str) -> train::Error {
    candle_core::Error::Msg(format!("out of memory on the CPU: {why}")).into()
}

/// Makes one row in a process of its own, to see whether it fits.
fn try_row(row: usize) -> train::Result<()> {
    let program =
        if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe().unwrap_or_default() };
    let mut words = std::env::args_os();
    words.next();
    let mut command = Command::new(program);
    command.arg(format!("--{OPTION}={row}")).args(words);
    let output = match command.stdin(Stdio::null()).output() {
        Ok(output) => output,
        // Without a trial, the row itself is what tells.
        Err(_) => return Ok(()),
    };
    match output.status.code() {
        Some(1) | None => {
            let said = String::from_utf8_lossy(&output.stderr);
            let lines = said.lines().map(|line| line.trim_start_matches("error: "));
            let why = lines.filter_map(|line| line.strip_prefix("out of memory on the CPU: ")).next_back();
            Err(lack(why.unwrap_or("the system ended a process that tried it")))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_there_is_counts_as_lack_of_memory() {
        expect_memory(&Device::Cpu, 1e6).unwrap();
        let lack = expect_memory(&Device::Cpu, 1e18).unwrap_err();
        assert!(lack.is_out_of_memory(), "{lack}");
        assert!(matches!(fitted::<()>(Err(lack)), Ok(Fitted::No(why)) if why.contains("GiB")));
        assert!(fitted::<()>(Err(candle_core::Error::Msg("shape".into()).into())).is_err());
    }
}
