//! What benchmarks of models and ops share: times by the clock.

use std::time::Instant;

use candle_core::Device;
use tilewright::trace::{MemoryEvent, Options, Recording};

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
