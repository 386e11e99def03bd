//! What the larger examples share: data, checks against f64, and the form `--bench`.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use tilewright::bench::{Timing, do_bench};
use tilewright::prelude::*;

pub type Outcome<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What a kernel is measured by.
pub enum Work {
    /// Bytes that it must read and write.
    Bytes(f64),
    /// Floating-point operations.
    Flop(f64),
}

/// A case of a kernel whose results were checked.
pub struct Row {
    pub kernel: &'static str,
    /// The shape and what else identifies the problem. The counterpart in Triton has the same name.
    pub case: String,
    pub work: Work,
    /// The largest error of the checked results.
    pub error: f64,
    /// Not measured for small shapes.
    pub time: Option<Timing>,
}

impl Row {
    fn line(&self, device: &Device) -> String {
        let Row { kernel, case, error, .. } = self;
        let time = match (&self.time, &self.work) {
            (None, _) => String::new(),
            (Some(time), Work::Bytes(bytes)) => format!("{:9.4} ms {:9.2} GB/s", time.median, time.gbps(*bytes)),
            (Some(time), Work::Flop(flop)) => format!("{:9.4} ms {:9.2} TFLOP/s", time.median, time.tflops(*flop)),
        };
        format!("{kernel:<22} {case:<44} error {error:<7.1e} {time:<30} {device}")
    }

    /// With the fields of the project's other records.
    fn json(&self, device: &Device) -> Option<String> {
        let Row { kernel, case, error, .. } = self;
        let time = self.time.as_ref()?;
        let rate = match self.work {
            Work::Bytes(bytes) => format!("\"gbps\": {:.2}", time.gbps(bytes)),
            Work::Flop(flop) => format!("\"tflops\": {:.3}", time.tflops(flop)),
        };
        let (name, Timing { median, p20, p80, n, .. }) = (&device.info().name, time);
        Some(format!(
            "{{\"device\": {name:?}, \"kernel\": {kernel:?}, \"case\": {case:?}, \"median_ms\": {median:.5}, \
             \"p20_ms\": {p20:.5}, \"p80_ms\": {p80:.5}, \"n\": {n}, {rate}, \"error\": {error:.2e}}}"
        ))
    }
}

/// Runs `launch`, and times it if `bench`. With `--interleave` it prints `ready` and then, for each line `time` on
/// standard input, times it and prints the median in milliseconds, up to another line.
///
/// # Errors
/// Those of `launch`.
pub fn time(device: &Device, bench: bool, mut launch: impl FnMut() -> Result<()>) -> Result<Option<Timing>> {
    launch()?;
    if !bench {
        return Ok(None);
    }
    let mut timing = do_bench(device, 25.0, 100.0, &mut launch)?;
    if INTERLEAVE.load(Ordering::Relaxed) {
        println!("ready");
        let lines = std::io::stdin().lines();
        for _ in lines.map_while(std::result::Result::ok).take_while(|line| line == "time") {
            timing = do_bench(device, 10.0, 60.0, &mut launch)?;
            println!("{}", timing.median);
        }
    }
    Ok(Some(timing))
}

static INTERLEAVE: AtomicBool = AtomicBool::new(false);

/// The `main` of an example. Without arguments it checks small shapes. With `--bench` it checks and times realistic
/// ones, and with `--record FILE` appends a JSON row for each to the file. With `--interleave` another program says
/// when to time ([`time`]).
///
/// # Errors
/// Those of the example, an argument that is unknown, or a file that cannot be written.
#[allow(dead_code, reason = "the tests include the examples as modules")]
pub fn main(cases: Cases) -> Outcome {
    with_arguments(cases, &std::env::args().skip(1).collect::<Vec<_>>())
}

/// The checked cases of an example: small ones, or realistic ones that are timed.
pub type Cases = fn(&Device, bench: bool) -> Outcome<Vec<Row>>;

/// [`main`] with these arguments.
///
/// # Errors
/// As there.
pub fn with_arguments(cases: Cases, arguments: &[String]) -> Outcome {
    let (bench, file) = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => (false, None),
        ["--bench"] => (true, None),
        ["--bench", "--record", file] => (true, Some(file)),
        ["--interleave"] => {
            INTERLEAVE.store(true, Ordering::Relaxed);
            (true, None)
        }
        _ => {
            let expected = "nothing, `--bench`, `--bench --record FILE`, or `--interleave`";
            return Err(format!("expected {expected}; found {arguments:?}").into());
        }
    };
    let device = Device::best()?;
    report(&device, &cases(&device, bench)?, file)
}

/// Prints a line for each row, and appends the measured ones to `file` as JSON.
///
/// # Errors
/// The file cannot be written.
pub fn report(device: &Device, rows: &[Row], file: Option<&str>) -> Outcome {
    for row in rows {
        println!("{}", row.line(device));
    }
    let Some(file) = file else { return Ok(()) };
    let text: String = rows.iter().filter_map(|row| row.json(device)).map(|row| row + "\n").collect();
    let write = || std::fs::OpenOptions::new().create(true).append(true).open(file)?.write_all(text.as_bytes());
    write().map_err(|error| format!("{file}: {error}").into())
}

/// `len` numbers between −1 and 1 that do not repeat with any power of two.
pub fn wave(len: usize, frequency: f32) -> Vec<f32> {
    (0..len).map(|i| ((i % 1_000_003) as f32 * frequency).sin()).collect()
}

/// Numbers in another type.
#[allow(dead_code, reason = "an example that computes in f32 has no use for it")]
pub fn to<T>(numbers: &[f32], convert: fn(f32) -> T) -> Vec<T> {
    numbers.iter().map(|x| convert(*x)).collect()
}

/// Compares at most `most` elements of `got`, evenly spaced, the first and the last among them, with `want` of their
/// index; returns the largest error, relative to values above 1.
///
/// # Errors
/// The first element whose error is above `tolerance`.
pub fn check<T: Copy + Into<f64>>(
    what: &str,
    got: &[T],
    most: usize,
    tolerance: f64,
    want: impl Fn(usize) -> f64,
) -> Outcome<f64> {
    let count = got.len().min(most);
    let mut worst = 0.0_f64;
    for i in (0..count).map(|i| i * (got.len() - 1) / (count - 1).max(1)) {
        let (got, want): (f64, f64) = (got[i].into(), want(i));
        let error = (got - want).abs() / want.abs().max(1.0);
        // Also true for NaN.
        if !(error <= tolerance) {
            return Err(format!("{what}[{i}] is {got}, expected {want} to within {tolerance}").into());
        }
        worst = error.max(worst);
    }
    Ok(worst)
}
