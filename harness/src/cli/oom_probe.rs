//! Handles rows of sweeps that may not fit into host memory.
//!
//! Only a lower bound of a step's memory is known ([`crate::model::Config::step_bytes`]). With less memory than that,
//! the row does not fit; with [`SAFETY_FACTOR`] times as much, it does. In between, a subprocess runs the row first:
//! this program with the same arguments skips the rows before, runs this one, and exits. If the subprocess runs out of
//! memory, the row is reported as out of memory and the sweep continues.

use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Device;

use super::{CliError, Result};
use crate::train;

/// With this multiple of the estimate available, no subprocess is needed. The factor covers temporary activations and
/// those that the estimate omits.
const SAFETY_FACTOR: f64 = 16.0;

/// Bytes that the subprocess leaves free, because the sweep itself needs memory in addition.
const RESERVE: usize = 64 << 20;

/// The hidden option with the index of the row that the subprocess runs.
pub const OPTION: &str = "oom-probe";

/// The row that this process runs as a subprocess.
static PROBED_ROW: OnceLock<usize> = OnceLock::new();
/// Number of rows that have started.
static ROWS: AtomicUsize = AtomicUsize::new(0);

/// Makes this process the subprocess for row `number`.
pub fn probe_row(number: usize) {
    PROBED_ROW.get_or_init(|| number);
    tilewright::reserve_host_memory(RESERVE);
}

/// The result of a measurement, or that it ran out of memory.
pub enum MemoryOutcome<R> {
    Fits(R),
    /// Out of memory, with the first line of the error.
    OutOfMemory(String),
}

/// Converts out-of-memory errors to [`MemoryOutcome::OutOfMemory`]; returns other errors. A subprocess exits here,
/// after its row.
pub fn catch_oom<R>(measured: train::Result<R>) -> Result<MemoryOutcome<R>> {
    let oom = measured.as_ref().err().filter(|error| error.is_out_of_memory()).map(ToString::to_string);
    if PROBED_ROW.get().is_some_and(|probed| probed + 1 == ROWS.load(Ordering::Relaxed)) {
        if let Some(oom) = &oom {
            tilewright::terminal::print_stderr(oom);
        }
        // Other errors occur again in the sweep, which reports them. The subprocess has no other output.
        std::process::exit(i32::from(oom.is_some()));
    }
    match (measured, oom) {
        (Ok(result), _) => Ok(MemoryOutcome::Fits(result)),
        (Err(_), Some(oom)) => Ok(MemoryOutcome::OutOfMemory(oom.lines().next().unwrap_or_default().to_string())),
        (Err(error), None) => Err(CliError::Failure(error.to_string())),
    }
}

/// Checks that host memory suffices for a row of a sweep that needs at least `bytes`, by estimate or by running it in a
/// subprocess. Called once for each row, before it allocates; [`catch_oom`] takes the result.
///
/// # Errors
/// Out of memory.
pub fn expect_memory(device: &Device, bytes: f64) -> train::Result<()> {
    let row = ROWS.fetch_add(1, Ordering::Relaxed);
    if PROBED_ROW.get().is_some_and(|probed| row < *probed) {
        return Err(oom_error("this subprocess runs another row"));
    }
    tilewright_candle::memory::kernel_device(device)?.check_memory(bytes)?;
    match device.is_cpu() && PROBED_ROW.get().is_none() && !tilewright::has_ample_host_memory(bytes, SAFETY_FACTOR) {
        true => run_probe(row),
        false => Ok(()),
    }
}

fn oom_error(why: &str) -> train::Error {
    candle_core::Error::Msg(format!("out of memory on the CPU: {why}")).into()
}

/// Runs one row in a subprocess, to find out whether it fits into memory.
fn run_probe(row: usize) -> train::Result<()> {
    let program =
        if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe().unwrap_or_default() };
    let mut words = std::env::args_os();
    words.next();
    let mut command = Command::new(program);
    command.arg(format!("--{OPTION}={row}")).args(words);
    let output = match command.stdin(Stdio::null()).output() {
        Ok(output) => output,
        // If no subprocess can be started, the row runs without a probe.
        Err(_) => return Ok(()),
    };
    match output.status.code() {
        Some(1) | None => {
            let messages = String::from_utf8_lossy(&output.stderr);
            let lines = messages.lines().map(|line| line.trim_start_matches("error: "));
            let why = lines.filter_map(|line| line.strip_prefix("out of memory on the CPU: ")).next_back();
            Err(oom_error(why.unwrap_or("the system killed a subprocess that ran this row")))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_above_the_host_memory_is_out_of_memory() {
        expect_memory(&Device::Cpu, 1e6).unwrap();
        let oom = expect_memory(&Device::Cpu, 1e18).unwrap_err();
        assert!(oom.is_out_of_memory(), "{oom}");
        assert!(matches!(catch_oom::<()>(Err(oom)), Ok(MemoryOutcome::OutOfMemory(why)) if why.contains("GiB")));
        assert!(catch_oom::<()>(Err(candle_core::Error::Msg("shape".into()).into())).is_err());
    }
}
