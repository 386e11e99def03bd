//! Handles rows of sweeps that may not fit into host memory.
//!
//! Only a lower bound of a step's memory is known ([`crate::model::Config::step_bytes`]). With less memory than that,
//! the row does not fit; with [`PLENTY`] times as much, it does. In between, a subprocess runs the row first: this
//! program with the same arguments skips the rows before, runs this one, and exits. If the subprocess runs out of
//! memory, the row is reported as out of memory and the sweep continues.

use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Device;

use super::{CliError, Result};
use crate::train;

/// With this multiple of the estimate available, no subprocess is needed. The factor covers temporary activations and
/// those that the estimate omits.
const PLENTY: f64 = 16.0;

/// Bytes that the subprocess leaves free, because the sweep itself needs memory in addition.
const RESERVE: usize = 64 << 20;

/// The hidden option with the index of the row that the subprocess runs.
pub const OPTION: &str = "trial";

/// The row that this process runs as a subprocess.
static TRIED: OnceLock<usize> = OnceLock::new();
/// Number of rows that have started.
static ROWS: AtomicUsize = AtomicUsize::new(0);

/// Makes this process the subprocess for row `number`.
pub fn only(number: usize) {
    TRIED.get_or_init(|| number);
    tilewright::reserve_host_memory(RESERVE);
}

/// The result of a measurement, or that it ran out of memory.
pub enum Fitted<R> {
    Yes(R),
    /// Out of memory, with the first line of the error.
    No(String),
}

/// Converts out-of-memory errors to [`Fitted::No`]; returns other errors. A subprocess exits here, after its row.
pub fn fitted<R>(measured: train::Result<R>) -> Result<Fitted<R>> {
    let lack = measured.as_ref().err().filter(|error| error.is_out_of_memory()).map(ToString::to_string);
    if TRIED.get().is_some_and(|tried| tried + 1 == ROWS.load(Ordering::Relaxed)) {
        if let Some(lack) = &lack {
            tilewright::terminal::say(lack);
        }
        // The sweep runs into other errors itself. The subprocess has no other output.
        std::process::exit(i32::from(lack.is_some()));
    }
    match (measured, lack) {
        (Ok(result), _) => Ok(Fitted::Yes(result)),
        (Err(_), Some(lack)) => Ok(Fitted::No(lack.lines().next().unwrap_or_default().to_string())),
        (Err(error), None) => Err(CliError::Failure(error.to_string())),
    }
}

/// Checks that host memory suffices for a row of a sweep that needs at least `bytes`, by estimate or by running it in a
/// subprocess. Called once for each row, before it allocates; [`fitted`] takes the result.
///
/// # Errors
/// Out of memory.
pub fn expect_memory(device: &Device, bytes: f64) -> train::Result<()> {
    let row = ROWS.fetch_add(1, Ordering::Relaxed);
    if TRIED.get().is_some_and(|tried| row < *tried) {
        return Err(lack("this subprocess runs another row"));
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

/// Runs one row in a subprocess, to find out whether it fits into memory.
fn try_row(row: usize) -> train::Result<()> {
    let program =
        if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe().unwrap_or_default() };
    let mut words = std::env::args_os();
    words.next();
    let mut command = Command::new(program);
    command.arg(format!("--{OPTION}={row}")).args(words);
    let output = match command.stdin(Stdio::null()).output() {
        Ok(output) => output,
        // Without a subprocess, the row itself runs out of memory or not.
        Err(_) => return Ok(()),
    };
    match output.status.code() {
        Some(1) | None => {
            let said = String::from_utf8_lossy(&output.stderr);
            let lines = said.lines().map(|line| line.trim_start_matches("error: "));
            let why = lines.filter_map(|line| line.strip_prefix("out of memory on the CPU: ")).next_back();
            Err(lack(why.unwrap_or("the system killed a subprocess that ran this row")))
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
