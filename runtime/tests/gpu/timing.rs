//! Overhead of a launch, and the results of the benchmark.

use std::time::{Duration, Instant};

use tilewright_codegen::target::ArgType;
use tilewright_runtime::bench::do_bench;
use tilewright_runtime::{Buffer, Device, LaunchArg};

use crate::{arg, artifact, gpu};

/// An empty kernel with 12 arguments.
fn empty_kernel() -> tilewright_codegen::target::Artifact {
    let params: Vec<String> = (0..12).map(|i| format!(".param .u64 p{i}")).collect();
    let ptx = format!(".visible .entry entry({}) {{ ret; }}\n", params.join(", "));
    let args = (0..12).map(|i| arg(&format!("p{i}"), if i < 4 { ArgType::Ptr } else { ArgType::I64 })).collect();
    artifact(&ptx, "sm_80", 128, args)
}

#[test]
fn a_launch_costs_less_than_five_microseconds() {
    let Some(device) = gpu() else { return };
    let kernel = device.load(&empty_kernel()).unwrap();
    let x = Buffer::<f32>::zeros(&device, 16).unwrap();
    let mut args = [LaunchArg::from(&x); 12];
    args[4..].fill(LaunchArg::I64(5));
    // SAFETY: the kernel accesses nothing.
    let median = median_launch_time(&device, || unsafe { kernel.launch([1, 1, 1], &args) }.unwrap());
    println!("launch: {median:?}");
    if cfg!(debug_assertions) {
        println!("skipped: the limit is for optimized builds");
        return;
    }
    assert!(median < Duration::from_micros(5), "{median:?}");
}

/// The CPU time of one launch: the median over batches that fit the driver's queue, so that the queue is never full.
pub fn median_launch_time(device: &Device, launch: impl Fn()) -> Duration {
    let batch = |_| {
        device.synchronize().unwrap();
        let start = Instant::now();
        (0..500).for_each(|_| launch());
        start.elapsed() / 500
    };
    let mut times: Vec<Duration> = (0..20).map(batch).collect();
    times.sort();
    times[10]
}

#[test]
fn a_large_copy_is_timed_at_a_plausible_speed() {
    let Some(device) = gpu() else { return };
    let n = 1 << 28;
    let source = Buffer::<f32>::zeros(&device, n).unwrap();
    let mut target = Buffer::<f32>::uninit(&device, n).unwrap();
    let timing = do_bench(&device, 20.0, 100.0, || target.copy_from(source.view())).unwrap();
    let speed = timing.gbps(2.0 * 4.0 * n as f64);
    println!(
        "copy: {speed:.0} GB/s, median {:.3} ms, p20 {:.3}, p80 {:.3}, n {}",
        timing.median, timing.p20, timing.p80, timing.n
    );
    assert!((200.0..10_000.0).contains(&speed), "{timing:?}");
    assert!(timing.min <= timing.median && timing.median <= timing.max && timing.n > 10);
}

#[test]
fn an_empty_kernel_takes_microseconds() {
    let Some(device) = gpu() else { return };
    let kernel = device.load(&empty_kernel()).unwrap();
    let args: Vec<LaunchArg> =
        (0..12).map(|i| if i < 4 { LaunchArg::Ptr { addr: 0, bytes: 0 } } else { LaunchArg::I64(0) }).collect();
    // SAFETY: the kernel accesses nothing.
    let timing = do_bench(&device, 5.0, 20.0, || unsafe { kernel.launch([1, 1, 1], &args) }).unwrap();
    println!("empty kernel: median {:.2} µs", timing.median * 1e3);
    assert!(timing.median < 0.05, "{timing:?}");
}
