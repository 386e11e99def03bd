//! Wall-clock times and memory of model and op benchmarks.

use std::time::Instant;

use candle_core::Device;
use tilewright::trace::{MemoryEvent, Options, Recording};

use crate::report::Cell;
use crate::train;

/// Wall-clock times, in milliseconds.
#[derive(Clone, Debug, Default)]
pub struct Times(pub Vec<f64>);

impl Times {
    /// Runs `f`, synchronizes the device, and records the time of both.
    pub fn time<R>(&mut self, device: &Device, f: impl FnOnce() -> train::Result<R>) -> train::Result<R> {
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

/// Runs `f` and returns its result with the number of bytes that `f` allocated and that are still live. The number is
/// `None` if allocations cannot be recorded.
pub fn live_bytes_after<R>(device: &Device, f: impl FnOnce() -> train::Result<R>) -> train::Result<(R, Option<f64>)> {
    let gpu = match device.is_cpu() {
        true => None,
        false => Some(tilewright_candle::memory::kernel_device(device)?.clone()),
    };
    let options = Options { min_allocation_bytes: Some(SMALLEST_BLOCK), gpu, ..Options::default() };
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

/// Smaller blocks, in bytes, are not recorded: they hold no relevant tensors.
const SMALLEST_BLOCK: usize = 1024;

/// Returns unused memory of the last measurement to the system, so that it is available to the next one.
pub fn release_memory(device: &Device) {
    if let Ok(device) = tilewright_candle::memory::kernel_device(device) {
        // An error here is not an error of the measurement.
        let _ = device.synchronize();
        let _ = device.release_unused_memory();
    }
}
