//! `tilewright tune`: autotunes kernels in worker processes, so that a crashing candidate does not abort the tuning.
//!
//! This process starts a worker, the same program again, that tunes one kernel for one problem (`worker.rs`), and
//! supervises it (`supervise.rs`): a candidate that crashes the worker or hangs is dropped, and a new worker continues
//! from the log.

mod worker;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tilewright::Cache;
use tilewright::autotune::{DeviceId, Entry, Table as TuningTable};
use tilewright::codegen::lang::Precision;

use self::worker::{Problem, TuneResult};
use super::device::{self, DeviceArg, open};
use super::value_parsers::seconds;
use super::{CliError, Result, choose};
use crate::report::{Cell, Column, Outputs, Report, Table};
use tilewright_cli::supervise::{Watch, is_stopped, supervise};

#[derive(Args)]
pub struct Arguments {
    /// Names of kernels, as in `tilewright list`; `attention` means the FlashAttention-2 kernels with tiles. Default:
    /// all that can be tuned
    kernels: Vec<String>,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    /// Time budget of each kernel and problem, in seconds, at most 86400
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    budget: f64,
    /// Timeout of one run of a candidate, in seconds, at most 86400
    #[arg(long, alias = "limit", value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    candidate_timeout: f64,
    /// Tune again even if the configuration is known
    #[arg(long, alias = "again")]
    retune: bool,
    /// Element types, separated by commas. Default: bf16, or f32 on the CPU
    #[arg(long, value_delimiter = ',', value_parser = ["bf16", "f16", "f32"])]
    dtype: Vec<String>,
    /// Attention: batch size
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Attention: number of heads. Default: 16, or 2 on the CPU
    #[arg(long)]
    heads: Option<usize>,
    /// Attention: sequence lengths, separated by commas. Default: 16384, or 512 on the CPU
    #[arg(long, alias = "length", value_delimiter = ',')]
    seq_len: Vec<usize>,
    /// Attention: head dimensions, separated by commas. Default: 64,128, or 64 on the CPU
    #[arg(long, alias = "dim", value_delimiter = ',')]
    head_dim: Vec<usize>,
    /// Attention: causal mask; `true,false` tunes with and without
    #[arg(long, value_delimiter = ',', default_value = "true", action = clap::ArgAction::Set)]
    causal: Vec<bool>,
    /// Matmul: sizes m×n×k, separated by commas. Default: 4096x4096x4096, or 256x256x256 on the CPU
    #[arg(long, value_delimiter = ',', value_parser = worker::size)]
    size: Vec<[usize; 3]>,
    /// Matmul: column-major operands, separated by commas: none, a, b, ab. A linear layer has b forward, none for the
    /// gradient of its input, and a for the gradient of its weight
    #[arg(long, alias = "columns", value_delimiter = ',', default_value = "none", value_parser = worker::columns)]
    column_major: Vec<[bool; 2]>,
    /// f32 on a GPU: precision of matmul and attention, separated by commas. Default: tf32x3
    #[arg(long, value_delimiter = ',', value_parser = ["tf32x3", "tf32", "ieee"])]
    precision: Vec<String>,
    /// Row-wise kernels: number of rows. Default: 50000 (16384 for cross-entropy), or 512 on the CPU
    #[arg(long)]
    rows: Option<usize>,
    /// Row-wise kernels: elements per row, separated by commas. Default: 1024 to 8192 (10000, 50257 and 131072 for
    /// cross-entropy), or 256 on the CPU
    #[arg(long, value_delimiter = ',')]
    d: Vec<usize>,
    /// Add the configurations to this table; its entries for other problems are kept
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
    /// Run as a worker for one problem, with this log
    #[arg(long, value_name = "FILE", hide = true)]
    worker: Option<PathBuf>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let problems = arguments.problems()?;
    if let Some(log) = &arguments.worker {
        let [problem] = &problems[..] else {
            return Err(CliError::usage("a worker tunes one kernel for one problem", "omit --worker"));
        };
        let result = worker::tune(problem, &open(arguments.device)?, arguments, log)?;
        writeln!(out, "{}", result.line())?;
        out.flush()?;
        exit_without_cleanup();
    }
    arguments.outputs.check_with(&arguments.export)?;
    let device = open(arguments.device)?;
    let mut table = arguments.export.as_deref().map(|path| read_export(path, &device)).transpose()?;
    let mut results: Vec<TuneResult> = Vec::new();
    let mut written = Vec::new();
    let mut failures = Vec::new();
    for problem in &problems {
        match arguments.tune_in_worker(problem) {
            Ok(result) => results.push(result),
            // Continue with the other problems.
            Err(error) if problems.len() > 1 && !is_stopped() => {
                tilewright::terminal::print_stderr(&error);
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
fn read_export(path: &std::path::Path, device: &tilewright::Device) -> Result<TuningTable> {
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
    Ok(tilewright::kernels::KERNELS.iter().fold(table, |table, def| table.renamed(def)))
}

impl Arguments {
    /// Returns every requested combination of kernel and problem.
    fn problems(&self) -> Result<Vec<Problem>> {
        let mut kernels: Vec<&'static str> = Vec::new();
        for name in &self.kernels {
            match name.as_str() {
                "attention" => kernels.extend(worker::ATTENTION),
                other => match worker::kernels().find(|known| *known == other) {
                    Some(known) => kernels.push(known),
                    None => {
                        let known: Vec<&str> = worker::kernels().collect();
                        let help = choose::suggest(other, &known, "the kernels that can be tuned are");
                        return Err(CliError::usage(format!("`{other}` is not a kernel that can be tuned"), help));
                    }
                },
            }
        }
        if kernels.is_empty() {
            kernels.extend(worker::kernels());
        }
        let gpu = open(self.device)?.is_cuda();
        let or = |given: &[usize], gpu_default: &[usize], cpu_default: &[usize]| match (given, gpu) {
            ([], true) => gpu_default.to_vec(),
            ([], false) => cpu_default.to_vec(),
            (given, _) => given.to_vec(),
        };
        let (heads, lengths) = (self.heads.unwrap_or(if gpu { 16 } else { 2 }), or(&self.seq_len, &[16384], &[512]));
        let dims = or(&self.head_dim, &[64, 128], &[64]);
        let default_size = [[if gpu { 4096 } else { 256 }; 3]];
        let sizes = if self.size.is_empty() { &default_size[..] } else { &self.size };
        let default_dtype = [if gpu { "bf16" } else { "f32" }.to_string()];
        let dtypes = if self.dtype.is_empty() { &default_dtype[..] } else { &self.dtype };
        if self.rows == Some(0) || self.d.contains(&0) {
            return Err(CliError::usage(
                "kernels cannot be tuned for empty tensors",
                "--rows and --d must be at least 1",
            ));
        }
        let wrong =
            [self.batch, heads].contains(&0) || lengths.contains(&0) || !dims.iter().all(|d| (1..=256).contains(d));
        if wrong {
            return Err(CliError::usage(
                "invalid shape of attention",
                "--batch, --heads and --seq-len must be at least 1, head dimensions from 1 to 256",
            ));
        }
        let mut problems = Vec::new();
        let precisions = |dtype: &str| match (dtype == "f32" && gpu, &self.precision[..]) {
            (false, _) => vec![None],
            (true, []) => vec![Some(Precision::Tf32x3)],
            (true, given) => given.iter().map(|word| Precision::from_name(word)).collect(),
        };
        for kernel in kernels {
            for dtype in dtypes {
                if kernel == worker::MATMUL {
                    for precision in precisions(dtype) {
                        for &columns in &self.column_major {
                            problems.extend(sizes.iter().map(|&size| Problem::matmul(dtype, precision, size, columns)));
                        }
                    }
                    continue;
                }
                if let Some((rows, ds)) = worker::default_row_shapes(kernel) {
                    let rows = self.rows.unwrap_or(if gpu { rows } else { 512 });
                    let shapes = or(&self.d, ds, &[256]).into_iter().map(|d| [rows, d]);
                    problems.extend(shapes.map(|shape| Problem::rowwise(kernel, dtype, shape)));
                    continue;
                }
                for precision in precisions(dtype) {
                    for &d in &dims {
                        for &causal in &self.causal {
                            let shape = |n| [self.batch, heads, n, d];
                            let problem = |&n| Problem::attention(kernel, dtype, precision, shape(n), causal);
                            problems.extend(lengths.iter().map(problem));
                        }
                    }
                }
            }
        }
        Ok(problems)
    }

    /// Tunes one problem in a worker.
    fn tune_in_worker(&self, problem: &Problem) -> Result<TuneResult> {
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
    fn log(&self, problem: &Problem) -> Result<(Option<tempfile::TempDir>, PathBuf)> {
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
fn device_word(choice: Option<DeviceArg>, device: &tilewright::Device) -> String {
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
            compiler: Some(tilewright::codegen::compiler_id().to_string()),
            ir: None,
        }
    }
}
