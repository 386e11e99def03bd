//! Benchmarks of launches.

use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::Result;

/// Times of repeated runs, in milliseconds.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Timing {
    pub mean: f64,
    pub median: f64,
    /// 20th percentile.
    pub p20: f64,
    /// 80th percentile.
    pub p80: f64,
    pub min: f64,
    pub max: f64,
    /// Number of runs.
    pub n: usize,
    /// All samples, in the order of the runs.
    pub samples: Vec<f64>,
}

impl Timing {
    /// Statistics of `samples` in milliseconds. Percentiles are interpolated linearly between neighbors. Without
    /// samples all are NaN.
    pub fn from_samples(samples: Vec<f64>) -> Timing {
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let quantile = |q: f64| {
            let place = q * n.saturating_sub(1) as f64;
            let (below, fraction) = (place.floor() as usize, place.fract());
            match (sorted.get(below), sorted.get(below + 1)) {
                (Some(low), Some(high)) => low + (high - low) * fraction,
                (Some(last), None) => *last,
                (None, _) => f64::NAN,
            }
        };
        Timing {
            mean: sorted.iter().sum::<f64>() / n as f64,
            median: quantile(0.5),
            p20: quantile(0.2),
            p80: quantile(0.8),
            min: quantile(0.0),
            max: quantile(1.0),
            n,
            samples,
        }
    }

    /// Rate of `flop` floating-point operations in the median time, in TFLOP/s.
    pub fn tflops(&self, flop: f64) -> f64 {
        flop / (self.median * 1e-3) / 1e12
    }

    /// Rate of `bytes` moved in the median time, in GB/s.
    pub fn gbps(&self, bytes: f64) -> f64 {
        bytes / (self.median * 1e-3) / 1e9
    }
}

/// Runs of the short estimate before warm-up.
const ESTIMATE_RUNS: u32 = 5;
/// Maximum number of runs of one measurement: each has two events.
const MAX_RUNS: f64 = 100_000.0;

/// Times `f` on `device`: runs it for about `warmup_ms`, then for about `rep_ms`, and times each run separately.
///
/// On a GPU `f` queues work on the device's stream; GPU events time each run, and the L2 cache is cleared before each
/// run, outside of the measured time. On the CPU a clock times each run, and caches are not cleared.
///
/// # Errors
/// Those of `f`, and of the kernels that it queues.
pub fn do_bench(device: &Device, warmup_ms: f64, rep_ms: f64, mut f: impl FnMut() -> Result<()>) -> Result<Timing> {
    f()?;
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..ESTIMATE_RUNS {
        f()?;
    }
    device.synchronize()?;
    let run_ms = milliseconds(start.elapsed()) / ESTIMATE_RUNS as f64;
    let runs_in = |ms: f64| (ms / run_ms.max(1e-6)).clamp(1.0, MAX_RUNS) as usize;
    for _ in 0..runs_in(warmup_ms) {
        f()?;
    }
    let samples = match device.is_cuda() {
        true => time_on_gpu(device, runs_in(rep_ms), &mut f)?,
        false => {
            let mut time = || {
                let start = Instant::now();
                f().map(|()| milliseconds(start.elapsed()))
            };
            (0..runs_in(rep_ms)).map(|_| time()).collect::<Result<_>>()?
        }
    };
    Ok(Timing::from_samples(samples))
}

fn time_on_gpu(device: &Device, runs: usize, f: &mut impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let mut l2 = L2Flush::new(device)?;
    let stream = device.stream();
    let mut events = Vec::with_capacity(runs);
    for _ in 0..runs {
        l2.flush()?;
        let start = stream.record()?;
        f()?;
        events.push((start, stream.record()?));
    }
    device.synchronize()?;
    events.iter().map(|(start, end)| end.elapsed_since(start).map(milliseconds)).collect()
}

/// Clears a GPU's L2 cache by writing more than its size.
pub struct L2Flush {
    scratch: Buffer<u8>,
}

impl L2Flush {
    /// Allocates 256 MiB of the device's memory, or twice its L2 cache if that is more; one byte on the CPU.
    pub fn new(device: &Device) -> Result<L2Flush> {
        let bytes = match device.is_cuda() {
            true => (256 << 20).max(2 * device.info().l2_bytes as usize),
            false => 1,
        };
        Ok(L2Flush { scratch: Buffer::uninit(device, bytes)? })
    }

    /// Queues the writes on the device's stream.
    pub fn flush(&mut self) -> Result<()> {
        self.scratch.fill_zero()
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_known_samples() {
        let timing = Timing::from_samples(vec![5.0, 1.0, 4.0, 2.0, 3.0, 6.0]);
        assert_eq!((timing.min, timing.max, timing.n), (1.0, 6.0, 6));
        assert_eq!((timing.mean, timing.median), (3.5, 3.5));
        assert_eq!((timing.p20, timing.p80), (2.0, 5.0));
        assert_eq!(timing.samples[0], 5.0);
        assert!(Timing::from_samples(vec![]).median.is_nan());
    }

    #[test]
    fn rates_use_the_median() {
        let timing = Timing::from_samples(vec![2.0]);
        assert_eq!(timing.tflops(4e12), 2000.0);
        assert_eq!(timing.gbps(4e9), 2000.0);
    }

    #[test]
    fn the_cpu_is_timed_by_the_clock() {
        let timing = do_bench(&Device::cpu(), 1.0, 20.0, || {
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        })
        .unwrap();
        assert!(timing.min >= 2.0, "{timing:?}");
        assert!((1..=10).contains(&timing.n), "{timing:?}");
    }
}
