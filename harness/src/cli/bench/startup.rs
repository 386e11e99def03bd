//! Times a process from its start until its first kernel has run: process start, device, cache, driver.
//!
//! The program starts itself as a subprocess, once with an empty cache and then with the cache that the first one
//! filled. Each child launches FlashAttention-2's forward kernel once, as users do, checks the result, and prints the
//! time of each part.

use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use half::bf16;
use tilewright::bench::Timing;
use tilewright::kernels::attention::{Options, forward_into, forward_workspace};
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::trace::{self, Recording, span};
use tilewright::{Buffer, Device};

use super::compile::Scratch;
use super::record::{Recorder, Row, Work};
use crate::cli::{CliError, Result};
use tilewright_cli::device::{DeviceArg, open};

/// The parts of the time until the end of the first launch, in order. The last one is the remainder.
const PARTS: [&str; 6] =
    ["start program", "start device", "start memory", "start lookup", "start load", "start launch"];

/// Number of heads of the launch. The batch size is 1.
const HEADS: usize = 2;
/// Sequence length of the launch.
const LENGTH: usize = 128;

/// Environments of the children: `case` of their rows, and variables in addition to the cache's.
const WARM: (&str, &[(&str, &str)]) = ("from the cache", &[]);
const WARM_WITHOUT_DRIVER: (&str, &[(&str, &str)]) =
    ("from the cache, driver cache off", &[("CUDA_CACHE_DISABLE", "1")]);

/// Records rows of one child with an empty cache, and medians of `count` children with a warm cache. On a GPU, also
/// with the driver's own cache of machine code disabled, which shows the driver's compile time.
///
/// # Errors
/// A child fails, or the file of rows cannot be written.
pub fn measure(recorder: &mut Recorder, device: &Device, d: usize, count: u32) -> Result<()> {
    let folder = Scratch::new("start");
    let rows = |recorder: &mut Recorder, case: &str, children: &[[f64; PARTS.len()]]| -> Result<()> {
        let row = |name: &str, samples: Vec<f64>| {
            let row = Row::new(name, &[1, HEADS, LENGTH, d], "bf16").case(case);
            row.timed(&Timing::from_samples(samples), Work::None)
        };
        for (i, name) in PARTS.iter().enumerate() {
            recorder.push(row(name, children.iter().map(|parts| parts[i]).collect()))?;
        }
        recorder.push(row("start to first launch", children.iter().map(|parts| parts.iter().sum()).collect()))
    };
    rows(recorder, "empty cache", &[child(&folder, &[])?])?;
    let without_driver = device.is_cuda().then_some(WARM_WITHOUT_DRIVER);
    for (case, variables) in [WARM].into_iter().chain(without_driver) {
        let children = (0..count).map(|_| child(&folder, variables)).collect::<Result<Vec<_>>>()?;
        rows(recorder, case, &children)?;
    }
    Ok(())
}

fn child(folder: &Scratch, variables: &[(&str, &str)]) -> Result<[f64; PARTS.len()]> {
    let failure = |error: &dyn std::fmt::Display| CliError::Failure(format!("cannot measure a first launch: {error}"));
    let program = std::env::current_exe().map_err(|error| failure(&error))?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).env_remove("TILEWRIGHT_TUNE");
    command.env("TILEWRIGHT_CACHE", folder.path().join("ours")).env("CUDA_CACHE_PATH", folder.path().join("driver"));
    command.envs(variables.iter().copied()).stderr(std::process::Stdio::inherit());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let output = command.args(["--first-launch-of", &now.as_nanos().to_string()]).output();
    let output = output.map_err(|error| failure(&error))?;
    if !output.status.success() {
        return Err(failure(&"the subprocess failed"));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| failure(&error))
}

/// Launches once and returns the milliseconds of each part. `since` is the start of the process in nanoseconds after
/// the Unix epoch.
///
/// # Errors
/// An error of the device or the kernel, or a wrong result.
pub fn first_launch(choice: Option<DeviceArg>, d: usize, since: u128) -> Result<[f64; PARTS.len()]> {
    let started = Duration::from_nanos(u64::try_from(since).unwrap_or(u64::MAX));
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (program, begin) = (now.saturating_sub(started), Instant::now());
    let recording = Recording::start(trace::Options { spans: true, ..trace::Options::default() })?;
    let device = {
        let _span = span("device");
        open(choice)?
    };
    let shape = [1, HEADS, LENGTH, d];
    let memory = span("memory");
    let ones = vec![bf16::ONE; HEADS * LENGTH * d];
    let qkv = Buffer::from_slice(&device, &ones)?;
    let mut o = Buffer::<bf16>::uninit(&device, ones.len())?;
    let mut lse = Buffer::<f32>::uninit(&device, HEADS * LENGTH)?;
    let options = Options::new(true);
    let mut workspace =
        Buffer::<f32>::uninit(&device, forward_workspace::<bf16>(&device, shape, shape, shape, &options))?;
    device.synchronize()?;
    drop(memory);
    let input = || Tensor::dense(qkv.view(), shape);
    let target = TensorMut::dense(o.view_mut(), shape)?;
    forward_into(&device, input()?, input()?, input()?, target, lse.view_mut(), workspace.view_mut(), &options)?;
    device.synchronize()?;
    let whole = begin.elapsed();
    let trace = recording.finish()?;
    // Attention over equal values returns that value, whatever the attention weights.
    if o.to_vec()? != ones {
        return Err(CliError::Failure("wrong result: attention over ones is not one".into()));
    }
    let of = |name: &str| -> f64 {
        let spans = trace.spans.iter().filter(|span| trace.path(span.node).last() == Some(&name));
        spans.map(|span| (span.end_ns - span.start_ns) as f64 * 1e-6).sum()
    };
    let known = [of("device"), of("memory"), of("kernel from cache or compiler"), of("kernel to device")];
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    let [device, memory, lookup, load] = known;
    Ok([ms(program), device, memory, lookup, load, ms(whole) - known.iter().sum::<f64>()])
}
