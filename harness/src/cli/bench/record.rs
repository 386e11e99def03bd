//! Records rows of measurements: appends them to a file of JSON lines, and prints a table.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tilewright::Device;
use tilewright::bench::Timing;

use crate::cli::{CliError, Result};
use crate::report::{Axis, Bar, Cell, Column, Outputs, Plot, Report, Table};

/// One measurement. `harness/records/README.md` documents the fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    pub commit: Option<String>,
    pub device: String,
    pub driver: Option<String>,
    /// The implementation, if it is not ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    pub kernel: String,
    pub shape: Vec<usize>,
    /// Further properties of the problem: `causal`, or a precision.
    pub case: Option<String>,
    pub dtype: String,
    pub tiles: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_ms: Option<f64>,
    pub median_ms: Option<f64>,
    pub p20_ms: Option<f64>,
    pub p80_ms: Option<f64>,
    pub n: Option<usize>,
    pub tflops: Option<f64>,
    pub gbps: Option<f64>,
    /// `gbps` relative to a copy, or `tflops` relative to a large matmul.
    pub fraction: Option<f64>,
    /// Largest relative error of the checked outputs.
    pub error: Option<f64>,
    /// The error, if there is no time.
    pub failed: Option<String>,
}

/// The work of one run, for its rate.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    Flop(f64),
    /// Bytes read and written, and the bandwidth of a copy in GB/s if it is known.
    Bytes(f64, Option<f64>),
    /// No rate is computed.
    None,
}

/// Why a measurement has no time.
#[derive(Clone, Debug, PartialEq)]
pub enum BenchError {
    /// The result is wrong, which always fails the command.
    WrongResult(String),
    /// The kernel does not compile or launch, which is expected of some tiles of a sweep.
    Unsupported(String),
}

impl From<tilewright::Error> for BenchError {
    fn from(error: tilewright::Error) -> BenchError {
        BenchError::Unsupported(error.to_string())
    }
}

/// A time and the relative error of the results, or why there is no time.
pub type Measured = Result<(Timing, f64), BenchError>;

/// Returns `error`, the relative error of the output `what`.
///
/// # Errors
/// [`BenchError::WrongResult`] if the error exceeds `tolerance` or is NaN.
pub fn accept(what: &str, error: f64, tolerance: f64) -> Result<f64, BenchError> {
    match error <= tolerance {
        true => Ok(error),
        false => Err(BenchError::WrongResult(format!(
            "wrong result: the error of {what} is {error:.1e}, above {tolerance:.0e}"
        ))),
    }
}

impl Row {
    /// Creates a row without a measurement.
    pub fn new(kernel: &str, shape: &[usize], dtype: &str) -> Row {
        Row { kernel: kernel.to_string(), shape: shape.to_vec(), dtype: dtype.to_string(), ..Row::default() }
    }

    pub fn case(mut self, case: &str) -> Row {
        self.case = Some(case.to_string());
        self
    }

    pub fn tiles(mut self, tiles: String) -> Row {
        self.tiles = Some(tiles);
        self
    }

    /// Adds the statistics of a timing.
    pub fn timed(mut self, timing: &Timing, work: Work) -> Row {
        self.mean_ms = Some(timing.mean);
        self.median_ms = Some(timing.median);
        self.p20_ms = Some(timing.p20);
        self.p80_ms = Some(timing.p80);
        self.n = Some(timing.n);
        match work {
            Work::Flop(flop) => self.tflops = Some(timing.tflops(flop)),
            Work::Bytes(bytes, copy_gbps) => {
                self.gbps = Some(timing.gbps(bytes));
                self.fraction = copy_gbps.map(|copy_gbps| timing.gbps(bytes) / copy_gbps);
            }
            Work::None => {}
        }
        self
    }

    /// Adds the result of a measurement.
    pub fn measured(mut self, measured: &Measured, work: Work) -> Row {
        match measured {
            Ok((timing, error)) => {
                self.error = Some(*error);
                self.timed(timing, work)
            }
            Err(BenchError::WrongResult(why) | BenchError::Unsupported(why)) => {
                self.failed = Some(why.clone());
                self
            }
        }
    }

    /// Returns kernel, shape with case, dtype and tiles, as text.
    fn words(&self) -> [String; 4] {
        let shape: Vec<String> = self.shape.iter().map(usize::to_string).collect();
        let shape = format!("{} {}", shape.join("×"), self.case.as_deref().unwrap_or_default());
        let tiles = self.tiles.clone().unwrap_or_default();
        [self.kernel.clone(), shape.trim_end().to_string(), self.dtype.clone(), tiles]
    }

    /// The first line of the error, if there is no time.
    fn reason(&self) -> Option<&str> {
        self.failed.as_deref().map(|why| why.lines().next().unwrap_or_default())
    }

    fn cells(&self, with_reason: bool) -> [Cell; 13] {
        let [kernel, shape, dtype, tiles] = self.words();
        // A single run has no percentiles.
        let spread = |ms: Option<f64>| Cell::from(ms.filter(|_| self.n > Some(1)));
        [
            Cell::from(kernel),
            Cell::from(shape),
            Cell::from(dtype),
            if tiles.is_empty() { Cell::Empty } else { Cell::from(tiles) },
            if self.failed.is_some() { Cell::from("failed") } else { Cell::from(self.median_ms) },
            spread(self.p20_ms),
            spread(self.p80_ms),
            Cell::from(self.n),
            Cell::from(self.tflops),
            Cell::from(self.gbps),
            Cell::from(self.fraction.map(|fraction| 100.0 * fraction)),
            Cell::from(self.error),
            Cell::from(self.reason().filter(|_| with_reason)),
        ]
    }
}

/// Collects rows. Each is written to the file immediately, so that an interrupted run keeps its rows.
pub struct Recorder {
    commit: Option<String>,
    device: String,
    driver: Option<String>,
    file: Option<(PathBuf, File)>,
    rows: Vec<Row>,
    failures: usize,
    /// Name of the report, and the files to write it to.
    subject: String,
    outputs: Outputs,
}

impl Recorder {
    /// Creates a recorder for measurements on `device`.
    ///
    /// # Errors
    /// The file cannot be written, or has something else than rows.
    pub fn new(device: &Device, commit: Option<&str>, json: Option<&Path>) -> Result<Recorder> {
        let open = |path: &Path| {
            let file = crate::files::append_rows(path);
            file.map(|file| (path.to_path_buf(), file)).map_err(|error| CliError::file("write", path, error))
        };
        let info = device.info();
        Ok(Recorder {
            commit: commit.map(str::to_string),
            device: info.name.clone(),
            driver: info.driver_version.map(|v| format!("{}.{}", v / 1000, v % 1000 / 10)),
            file: json.map(open).transpose()?,
            rows: Vec::new(),
            failures: 0,
            subject: "bench".to_string(),
            outputs: Outputs::default(),
        })
    }

    /// Sets the name of the benchmark and the files for its table.
    pub fn writing(mut self, subject: &str, outputs: Outputs) -> Recorder {
        self.subject = format!("bench-{subject}");
        self.outputs = outputs;
        self
    }

    /// Records a row. A row without a time makes the command fail.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn push(&mut self, row: Row) -> Result<()> {
        self.failures += usize::from(row.failed.is_some());
        self.keep(row)
    }

    /// Records a row of a sweep. Tiles that do not compile or launch do not make the command fail; wrong results do.
    ///
    /// # Errors
    /// As [`Recorder::push`].
    pub fn push_choice(&mut self, row: Row, measured: &Measured) -> Result<()> {
        self.failures += usize::from(matches!(measured, Err(BenchError::WrongResult(_))));
        self.keep(row)
    }

    fn keep(&mut self, row: Row) -> Result<()> {
        let row = Row { commit: self.commit.clone(), device: self.device.clone(), driver: self.driver.clone(), ..row };
        if let Some((path, file)) = &mut self.file {
            let line = serde_json::to_string(&row).map_err(|error| CliError::file("write", path, error))?;
            writeln!(file, "{line}").map_err(|error| CliError::file("write", path, error))?;
        }
        // The table comes at the end: a benchmark of minutes says how far it is.
        let words = row.words().join(" ");
        let result = row.median_ms.map_or("failed".to_string(), |ms| format!("{ms:.4} ms"));
        tilewright::terminal::print_stderr(format_args!("measured {}: {result}", words.trim_end()));
        self.rows.push(row);
        Ok(())
    }

    /// Prints the table and the errors of rows, to standard error if a file is standard output, and writes the files.
    ///
    /// # Errors
    /// A row failed, or a file cannot be written.
    pub fn finish(self, out: &mut dyn Write) -> Result<()> {
        let driver = self.driver.as_ref().map(|driver| format!(", driver for CUDA {driver}")).unwrap_or_default();
        let mut stderr = std::io::stderr();
        let record = self.file.iter().map(|(path, _)| path.as_path());
        let takes_stdout = self.outputs.named().chain(record).any(crate::files::is_stdout);
        let out: &mut dyn Write = if takes_stdout { &mut stderr } else { out };
        writeln!(out, "{}{driver}", self.device)?;
        // Reasons are long: they are printed below the table.
        writeln!(out, "{}", self.table(false).to_text())?;
        let table = self.table(true);
        let report = Report::new(&self.subject, &table.title.clone()).table(table).plot(self.plot());
        if self.outputs.any() {
            for path in self.outputs.write_files(&self.outputs.with_machine(report))? {
                writeln!(out, "wrote {}", path.display())?;
            }
        }
        for row in &self.rows {
            if let Some(why) = row.reason() {
                writeln!(out, "{}: {why}", row.words().join(" ").trim_end())?;
            }
        }
        match self.failures {
            0 => Ok(()),
            n => Err(CliError::Failure(format!("{n} of {} measurements failed", self.rows.len()))),
        }
    }

    fn table(&self, with_reasons: bool) -> Table {
        let ms = |name: &str| Column::number(name).unit("ms");
        let columns = [
            Column::text("kernel"),
            Column::text("shape"),
            Column::text("dtype"),
            Column::text("tiles"),
            ms("median"),
            ms("p20"),
            ms("p80"),
            Column::integer("n"),
            Column::number("rate").unit("TFLOP/s").significant(3),
            Column::number("rate").unit("GB/s").significant(3),
            Column::number("of copy bandwidth").unit("%").decimals(0),
            Column::number("error").significant(2),
            Column::text("failed"),
        ];
        let mut table = Table::new(&self.subject, "Measurements", columns);
        for row in &self.rows {
            table.push(row.cells(with_reasons));
        }
        table.without_empty_columns()
    }

    /// Plots medians as bars, with the 20th to 80th percentile as error bars.
    fn plot(&self) -> Plot {
        let bar = |row: &Row| {
            let median = row.median_ms?;
            let error = row.p80_ms.zip(row.p20_ms).filter(|_| row.n > Some(1)).map(|(high, low)| 0.5 * (high - low));
            Some(Bar { name: row.words().join(" ").trim_end().to_string(), group: String::new(), value: median, error })
        };
        Plot::bars(&self.subject, "Median time", Axis::linear("ms"), self.rows.iter().filter_map(bar).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing() -> Timing {
        Timing::from_samples(vec![1.0, 2.0, 3.0])
    }

    #[test]
    fn rows_have_rates_and_fractions() {
        let row = Row::new("copy", &[8], "f32").timed(&timing(), Work::Bytes(2e6, Some(4.0)));
        assert_eq!((row.median_ms, row.n), (Some(2.0), Some(3)));
        assert!((row.gbps.unwrap() - 1.0).abs() < 1e-12 && (row.fraction.unwrap() - 0.25).abs() < 1e-12);
        let row = Row::new("matmul", &[8], "f32").timed(&timing(), Work::Flop(4e9));
        assert!((row.tflops.unwrap() - 2.0).abs() < 1e-12 && row.gbps.is_none());
    }

    #[test]
    fn wrong_results_get_no_time_and_fail() {
        assert_eq!(accept("o", 0.5, 1.0), Ok(0.5));
        assert!(matches!(accept("o", f64::NAN, 1.0), Err(BenchError::WrongResult(why)) if why.contains("NaN")));
        let wrong: Measured = accept("o", 2.0, 1.0).map(|error| (timing(), error));
        let cannot: Measured = Err(BenchError::Unsupported("too much shared memory".to_string()));
        let folder = tempfile::tempdir().unwrap();
        let [json, csv] = ["t.json", "t.csv"].map(|name| folder.path().join(name));
        let outputs = Outputs { json: Some(json.clone()), csv: Some(csv.clone()), ..Outputs::default() };
        let recorder = Recorder::new(&Device::cpu(), Some("abc"), None).unwrap();
        let mut recorder = recorder.writing("tiles", outputs);
        recorder.push_choice(Row::new("a", &[], "f32").measured(&cannot, Work::None), &cannot).unwrap();
        let row = Row::new("b", &[], "f32").measured(&wrong, Work::Flop(1.0));
        assert!(row.median_ms.is_none() && row.tflops.is_none());
        recorder.push_choice(row, &wrong).unwrap();
        let mut out = Vec::new();
        let error = recorder.finish(&mut out).unwrap_err().to_string();
        assert!(error.contains("1 of 2"), "{error}");
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("too much shared memory") && text.contains("wrong result"), "{text}");
        let table: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        assert_eq!(table["tables"][0]["rows"][0]["failed"], "too much shared memory");
        assert!(std::fs::read_to_string(csv).unwrap().contains("too much shared memory"));
    }
}
