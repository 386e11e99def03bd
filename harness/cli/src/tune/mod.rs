//! `tune`: autotunes kernels in worker processes, so that a crashing candidate does not abort the tuning.
//!
//! This process starts a worker, the same program again, that tunes one kernel for one problem, and supervises it
//! ([`supervise`](mod@crate::supervise)): a candidate that crashes the worker or hangs is dropped, and a new worker
//! continues from the log.

mod own;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use tilewright_runtime::autotune::{self, DeviceId, Entry, Outcome, Table as TuningTable};
use tilewright_runtime::{Cache, Device};

use crate::device::{self, DeviceArg, open};
use crate::report::{Cell, Column, Outputs, Report, Table};
use crate::supervise::{Watch, is_stopped, supervise};
use crate::value_parsers::seconds;
use crate::{CliError, Kernels, Result};

pub use own::{Arguments, run};

/// How problems are tuned.
#[derive(Args)]
pub struct Settings {
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    pub device: Option<DeviceArg>,
    /// Time budget of each kernel and problem, in seconds, at most 86400
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    budget: f64,
    /// Timeout of one run of a candidate, in seconds, at most 86400
    #[arg(long, alias = "limit", value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    candidate_timeout: f64,
    /// Tune again even if the configuration is known
    #[arg(long, alias = "again")]
    retune: bool,
    /// Add the configurations to this table; its entries for other problems are kept
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
    /// Run as a worker for one problem, with this log
    #[arg(long, value_name = "FILE", hide = true)]
    worker: Option<PathBuf>,
}

/// A kernel, and the arguments for which it is tuned.
pub trait Problem {
    /// The problem in words; unique for every problem.
    fn title(&self) -> String;
    /// The kernel's name.
    fn kernel(&self) -> &'static str;
    /// The arguments of `tune` that select only this problem.
    fn arguments(&self) -> Vec<String>;
    /// Launches the kernel with the best known configuration, or asks for it: the tuner measures then.
    ///
    /// # Errors
    /// What the launch reports.
    fn launch(&self, device: &Device) -> tilewright_runtime::Result<()>;
}

/// Tunes the problems, each in worker processes; in a worker, tunes the one problem.
///
/// # Errors
/// A device or file that cannot be used, and problems that were not tuned.
pub fn tune<P: Problem>(problems: &[P], arguments: &Settings, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    if let Some(log) = &arguments.worker {
        let [problem] = problems else {
            return Err(CliError::usage("a worker tunes one kernel for one problem", "omit --worker"));
        };
        let result = measure(problem, &open(arguments.device)?, arguments, log)?;
        writeln!(out, "{}", result.line())?;
        out.flush()?;
        exit_without_cleanup();
    }
    arguments.outputs.expect_no_plot()?;
    arguments.outputs.check_with(arguments.export.iter().map(|path| ("--export", path)))?;
    let device = open(arguments.device)?;
    let mut table = arguments.export.as_deref().map(|path| read_export(path, &device, kernels)).transpose()?;
    let mut results: Vec<TuneResult> = Vec::new();
    let mut written = Vec::new();
    let mut failures = Vec::new();
    for problem in problems {
        match arguments.tune_in_worker(problem) {
            Ok(result) => results.push(result),
            // Continue with the other problems.
            Err(error) if problems.len() > 1 && !is_stopped() => {
                tilewright_runtime::terminal::print_stderr(&error);
                failures.push(problem.title());
                continue;
            }
            Err(error) => return Err(error),
        }
        // Write and print each result immediately: the tuning may be interrupted during the next problem.
        let last = &results[results.len() - 1];
        if let (Some(table), Some(path)) = (&mut table, &arguments.export) {
            add(table, last.entry());
            crate::files::replace(path, |file| file.write_all(table.text().as_bytes()))
                .map_err(|error| CliError::file("write", path, error))?;
        }
        write!(out, "{}", report(std::slice::from_ref(last)).to_text())?;
        out.flush()?;
        written = arguments.outputs.write_files(&arguments.outputs.with_machine(report(&results)))?;
    }
    if results.len() > 1 {
        let all = Report::new("tune", "Tuning").table(chosen(&results));
        write!(out, "\n{}", arguments.outputs.with_machine(all).to_text())?;
    }
    for path in written.iter().chain(&arguments.export) {
        writeln!(out, "wrote {}", path.display())?;
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(CliError::Failure(format!("not tuned because of the errors above: {}", failures.join("; ")))),
    }
}

/// Exits a worker that has printed its result, without destructors: threads may still be compiling candidates, and a
/// normal exit would tear down LLVM and the driver while they run.
fn exit_without_cleanup() -> ! {
    // SAFETY: exits the process; all output has been written and flushed.
    unsafe { libc::_exit(0) }
}

/// Adds an entry to a table, and replaces the entry of the same problem.
fn add(table: &mut TuningTable, entry: Entry) {
    table.entries.retain(|other| (&other.kernel, &other.key) != (&entry.kernel, &entry.key));
    table.entries.push(entry);
    table.entries.sort_by(|a, b| (&a.kernel, &a.key).cmp(&(&b.kernel, &b.key)));
}

/// Reads the table to which `--export` adds; creates a new one if the file does not exist.
///
/// # Errors
/// The file cannot be read, is not a tuning table, or is the table of another device.
fn read_export(path: &Path, device: &Device, kernels: &Kernels) -> Result<TuningTable> {
    let id = DeviceId::of(device);
    let text = match crate::files::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(TuningTable::new(id, Vec::new())),
        Err(error) => return Err(CliError::file("read", path, error)),
    };
    let table = TuningTable::parse(&text).map_err(|why| CliError::file("add to", path, why))?;
    if table.device != id {
        let found = format!("it is a table of {}, but this device is {id}", table.device);
        return Err(CliError::file("add to", path, found));
    }
    // Under former names, an entry would stay beside the one that replaces it.
    Ok(kernels.defs().iter().fold(table, |table, def| table.renamed(def)))
}

impl Settings {
    /// Tunes one problem in a worker.
    fn tune_in_worker(&self, problem: &impl Problem) -> Result<TuneResult> {
        let program = std::env::current_exe()
            .map_err(|error| CliError::Failure(format!("cannot start a worker, unknown program path: {error}")))?;
        let (_keep, log) = self.log(problem)?;
        let device = open(self.device)?;
        let words = problem.arguments();
        let start = || {
            let mut command = std::process::Command::new(&program);
            command.arg("tune").args(&words).args(["--budget", &self.budget.to_string()]);
            command.args([
                "--candidate-timeout",
                &self.candidate_timeout.to_string(),
                "--device",
                &device_word(self.device, &device),
            ]);
            command.arg("--worker").arg(&log);
            if self.retune {
                command.arg("--retune");
            }
            command
        };
        let watch = Watch { log: &log, limit: Duration::from_secs_f64(self.candidate_timeout), title: problem.title() };
        let line = supervise(&start, &watch)?;
        TuneResult::parse(problem, &line)
    }

    /// Returns the path of a problem's log. Without a cache, the log is in a temporary folder, which is returned too
    /// and exists until it is dropped.
    fn log(&self, problem: &impl Problem) -> Result<(Option<tempfile::TempDir>, PathBuf)> {
        let name = format!("{}.log.jsonl", problem.title().replace(|c: char| !c.is_alphanumeric(), "-"));
        match Cache::from_env()?.folder(&["tuned", "logs"]) {
            Some(dir) => Ok((None, dir.join(name))),
            None => {
                let dir = crate::files::temporary_folder()
                    .map_err(|error| CliError::Failure(format!("cannot create the log of the tuning: {error}")))?;
                let log = dir.path().join(name);
                Ok((Some(dir), log))
            }
        }
    }
}

/// Formats the device for the worker's command line.
fn device_word(choice: Option<DeviceArg>, device: &Device) -> String {
    match choice {
        Some(DeviceArg::Cpu) => "cpu".to_string(),
        Some(DeviceArg::Cuda(ordinal)) => format!("cuda:{ordinal}"),
        None if device.is_cuda() => "cuda".to_string(),
        None => "cpu".to_string(),
    }
}

/// Returns a table of the candidates of each problem, and one of the chosen configurations.
fn report(results: &[TuneResult]) -> Report {
    let mut report = Report::new("tune", "Tuning");
    for result in results.iter().filter(|result| !result.candidates.is_empty()) {
        let name = format!("candidates-{}", report.parts.len() + 1);
        report = report.table(candidates(result, &name));
    }
    report.table(chosen(results))
}

/// Returns the table of chosen configurations, one row per problem.
fn chosen(results: &[TuneResult]) -> Table {
    let columns = [
        Column::text("kernel"),
        Column::text("problem"),
        Column::text("chosen"),
        Column::number("median").unit("ms"),
        Column::text("remark"),
    ];
    let mut table = Table::new("tuned", "Chosen configurations", columns);
    for result in results {
        let remark = match result.candidates.is_empty() {
            true => "known before".to_string(),
            false => format!("of {} candidates in {:.1} s", result.candidates.len(), result.seconds),
        };
        table.push([
            Cell::from(result.kernel.as_str()),
            Cell::from(result.key.as_str()),
            Cell::from(result.config.as_str()),
            Cell::from(result.median_ms),
            Cell::from(remark),
        ]);
    }
    table
}

/// Returns the table of all candidates of a problem.
fn candidates(result: &TuneResult, name: &str) -> Table {
    let columns = [
        Column::text("candidate"),
        Column::number("median").unit("ms"),
        Column::integer("runs"),
        Column::text("dropped because"),
    ];
    let mut table = Table::new(name, &result.title, columns);
    for candidate in &result.candidates {
        let why = candidate.dropped.as_deref().map(|why| why.lines().next().unwrap_or_default());
        table.push([
            Cell::from(candidate.config.as_str()),
            Cell::from(candidate.median_ms),
            Cell::from(candidate.runs),
            Cell::from(why),
        ]);
    }
    table
}

impl TuneResult {
    fn entry(&self) -> Entry {
        Entry {
            kernel: self.kernel.clone(),
            key: self.key.clone(),
            config: self.config.clone(),
            median_ms: self.median_ms,
            compiler: Some(tilewright_codegen::compiler_id().to_string()),
            ir: None,
        }
    }
}

/// The result of a worker, printed as one line of JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TuneResult {
    #[serde(skip)]
    pub title: String,
    pub kernel: String,
    pub key: String,
    pub config: String,
    pub median_ms: Option<f64>,
    pub seconds: f64,
    /// Empty if the configuration was known.
    pub candidates: Vec<CandidateResult>,
}

/// The result of one candidate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CandidateResult {
    pub config: String,
    pub median_ms: Option<f64>,
    pub runs: Option<usize>,
    pub dropped: Option<String>,
}

/// Tunes the kernel for the problem.
///
/// # Errors
/// All candidates fail, or the device is lost.
fn measure(problem: &impl Problem, device: &Device, arguments: &Settings, log: &Path) -> Result<TuneResult> {
    let options = autotune::Options {
        remeasure: arguments.retune,
        kernel: Some(problem.kernel().to_string()),
        limit: Duration::from_secs_f64(arguments.candidate_timeout),
        log: Some(log.to_path_buf()),
        ..autotune::Options::new(Duration::from_secs_f64(arguments.budget))
    };
    let (outcome, reports) = autotune::tuning(&options, || problem.launch(device));
    outcome?;
    if let Some(report) = reports.into_iter().next() {
        let result = |candidate: autotune::Candidate| {
            let config = candidate.config.to_string();
            match candidate.outcome {
                Outcome::Timed { median_ms, runs } => {
                    CandidateResult { config, median_ms: Some(median_ms), runs: Some(runs), dropped: None }
                }
                Outcome::Dropped(why) => CandidateResult { config, dropped: Some(why), ..CandidateResult::default() },
                Outcome::Unfinished => CandidateResult {
                    config,
                    dropped: Some("the time budget ran out".to_string()),
                    ..CandidateResult::default()
                },
            }
        };
        let (config, median_ms) = report.chosen;
        return Ok(TuneResult {
            title: problem.title(),
            kernel: report.kernel.to_string(),
            key: report.key,
            config: config.to_string(),
            median_ms: Some(median_ms),
            seconds: report.seconds,
            candidates: report.candidates.into_iter().map(result).collect(),
        });
    }
    let chosen = autotune::current_choices().into_iter().find(|choice| choice.kernel == problem.kernel());
    let choice = chosen.ok_or_else(|| {
        CliError::Failure(format!("internal error: `{}` chose no configuration; please report this", problem.kernel()))
    })?;
    let (kernel, key, config) = (choice.kernel.to_string(), choice.key.clone(), choice.config.to_string());
    let compiler = Some(tilewright_codegen::compiler_id().to_string());
    let saved = autotune::saved_choices(&kernel, device).entries;
    let same = |entry: &&Entry| (&entry.key, &entry.config, &entry.compiler) == (&key, &config, &compiler);
    let median_ms = saved.iter().find(same).and_then(|entry| entry.median_ms);
    Ok(TuneResult { title: problem.title(), kernel, key, config, median_ms, ..TuneResult::default() })
}

impl TuneResult {
    /// Serializes the result as a worker prints it.
    fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Parses the line that a worker printed.
    ///
    /// # Errors
    /// The line is not the JSON of a result.
    fn parse(problem: &impl Problem, line: &str) -> Result<TuneResult> {
        let result: TuneResult = serde_json::from_str(line).map_err(|error| {
            CliError::Failure(format!("internal error: a worker printed `{line}`: {error}; please report this"))
        })?;
        Ok(TuneResult { title: problem.title(), ..result })
    }
}
