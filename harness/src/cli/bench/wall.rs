//! What benchmarks of models and ops share: times by the clock, and what to do without memory.

use std::time::Instant;

use candle_core::Device;
use tilewright::trace::{MemoryEvent, Options, Recording};

use crate::cli::Result;
use crate::report::Cell;
use crate::train;

/// Times that were taken, in milliseconds.
#[derive(Clone, Debug, Default)]
pub struct Times(pub Vec<f64>);

impl Times {
    /// Runs `f` and waits for the device; keeps the time of both.
    pub fn take<R>(&mut self, device: &Device, f: impl FnOnce() -> train::Result<R>) -> train::Result<R> {
        let start = Instant::now();
        let result = f()?;
        device.synchronize()?;
        self.0.push(1e3 * start.elapsed().as_secs_f64());
        Ok(result)
    }

    pub fn mean_std(&self) -> Cell {
        Cell::statistics(&self.0)
    }

    pub fn median(&self) -> Cell {
        match self.0.is_empty() {
            true => Cell::Empty,
            false => Cell::Number(tilewright::bench::Timing::from_samples(self.0.clone()).median),
        }
    }
}

/// What a measurement gave, or that it did not fit.
pub enum Fitted<R> {
    Yes(R),
    /// Out of memory, with what there is to say about it.
    No(String),
}

/// Takes lack of memory as a finding; other errors end the command.
pub fn fitted<R>(measured: train::Result<R>) -> Result<Fitted<R>> {
    match measured {
        Ok(result) => Ok(Fitted::Yes(result)),
        Err(error) if error.is_out_of_memory() => {
            Ok(Fitted::No(error.to_string().lines().next().unwrap_or_default().to_string()))
        }
        Err(error) => Err(crate::cli::CliError::Failure(error.to_string())),
    }
}

/// Fails as a device without memory does where the CPU has less than `bytes` left: see [`tilewright::expect_host_memory`].
pub fn expect_memory(device: &Device, bytes: f64) -> train::Result<()> {
    Ok(crate::ops::memory::kernel_device(device)?.expect_memory(bytes)?)
}

/// Runs `f`; says how many bytes of what it allocated are alive after it, and what it returned with them. `None` where allocations
/// cannot be listened to.
pub fn held<R>(device: &Device, f: impl FnOnce() -> train::Result<R>) -> train::Result<(R, Option<f64>)> {
    let gpu = match device.is_cpu() {
        true => None,
        false => Some(crate::ops::memory::kernel_device(device)?.clone()),
    };
    let options = Options { memory_from_bytes: Some(SMALLEST_BLOCK), gpu, ..Options::default() };
    let recording = match Recording::start(options) {
        Ok(recording) => recording,
        Err(error) => {
            tracing::warn!("memory is not measured: {error}");
            return Ok((f()?, None));
        }
    };
    let result = f();
    device.synchronize()?;
    let trace = recording.finish()?;
    let signed = |event: &MemoryEvent| if event.allocated { event.bytes as f64 } else { -(event.bytes as f64) };
    Ok((result?, Some(trace.memory.iter().map(signed).sum())))
}

/// Smaller blocks hold no tensors that matter.
const SMALLEST_BLOCK: usize = 1024;

/// Gives memory of the last measurement back, so that the next one finds what there is.
pub fn release(device: &Device) {
    if let Ok(device) = crate::ops::memory::kernel_device(device) {
        // Only a courtesy to the next measurement.
        let _ = device.synchronize();
        let _ = device.release_unused_memory();
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
