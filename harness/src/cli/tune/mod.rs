//! `tilewright tune`: finds the best configurations of kernels, each candidate in a process of its own that may die.
//!
//! This process asks a worker, the same program again, to tune one kernel for one problem (`worker.rs`), and watches over
//! it (`supervise.rs`): a candidate that ends the worker or does not end is dropped, and a new worker goes on from the log.

mod supervise;
mod worker;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tilewright::Cache;
use tilewright::autotune::{DeviceId, Entry, Table as Choices};
use tilewright::codegen::lang::Precision;

use self::supervise::{Watch, is_stopped, supervise};
use self::worker::{Answer, Problem};
use super::numbers::seconds;
use super::run::{Choice, device, open};
use super::{CliError, Result, choose};
use crate::report::{Cell, Column, Outputs, Report, Table};

#[derive(Args)]
pub struct Arguments {
    /// Kernels, as `tilewright list` names them; `attention` means those that have tiles; without a name, all that can be tuned
    kernels: Vec<String>,
    /// Where to run: cpu, cuda or cuda:N; without it, where TILEWRIGHT_DEVICE says, else on a GPU if there is one
    #[arg(long, value_parser = device)]
    device: Option<Choice>,
    /// How many seconds each kernel and problem may take, at most 86400
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    budget: f64,
    /// How many seconds one run of a candidate may take, at most 86400
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    limit: f64,
    /// Measure again what is known
    #[arg(long)]
    again: bool,
    /// Element types, several with commas; bf16, and f32 on the CPU
    #[arg(long, value_delimiter = ',', value_parser = ["bf16", "f16", "f32"])]
    dtype: Vec<String>,
    /// Attention: batch entries
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Attention: heads; 16, and 2 on the CPU
    #[arg(long)]
    heads: Option<usize>,
    /// Attention: tokens, several with commas; 16384, and 512 on the CPU
    #[arg(long, value_delimiter = ',')]
    length: Vec<usize>,
    /// Attention: head dimensions, several with commas; 64 and 128, and 64 on the CPU
    #[arg(long, value_delimiter = ',')]
    dim: Vec<usize>,
    /// Attention: whether row i sees the keys up to i only; `true,false` tunes both
    #[arg(long, value_delimiter = ',', default_value = "true", action = clap::ArgAction::Set)]
    causal: Vec<bool>,
    /// Matrix products: m×n×k, several with commas; 4096x4096x4096, and 256x256x256 on the CPU
    #[arg(long, value_delimiter = ',', value_parser = worker::size)]
    size: Vec<[usize; 3]>,
    /// Matrix products: which operands lie column by column, several with commas: none, a, b, ab; a linear layer's are b forward,
    /// none for its input's gradient, and a for its weight's
    #[arg(long, value_delimiter = ',', default_value = "none", value_parser = worker::columns)]
    columns: Vec<[bool; 2]>,
    /// f32 on a GPU: how matrix products and attention multiply, several with commas; tf32x3
    #[arg(long, value_delimiter = ',', value_parser = ["tf32x3", "tf32", "ieee"])]
    precision: Vec<String>,
    /// Kernels over rows: how many; 50000 (16384 for cross-entropy), and 512 on the CPU
    #[arg(long)]
    rows: Option<usize>,
    /// Kernels over rows: elements of a row, several with commas; 1024 to 8192 (10000, 50257 and 131072 for cross-entropy), and
    /// 256 on the CPU
    #[arg(long, value_delimiter = ',')]
    d: Vec<usize>,
    /// Write what was found to this table, beside what it has for other problems
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
    /// The log of the one problem that this process tunes for another one
    #[arg(long, value_name = "FILE", hide = true)]
    worker: Option<PathBuf>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let problems = arguments.problems()?;
    if let Some(log) = &arguments.worker {
        let [problem] = &problems[..] else {
            return Err(CliError::usage("a worker tunes one kernel for one problem", "leave --worker out"));
        };
        let answer = worker::tune(problem, &open(arguments.device)?, arguments, log)?;
        writeln!(out, "{}", answer.line())?;
        out.flush()?;
        leave();
    }
    arguments.outputs.check_beside(&arguments.export)?;
    let device = open(arguments.device)?;
    let mut table = arguments.export.as_deref().map(|path| read_export(path, &device)).transpose()?;
    let mut answers: Vec<Answer> = Vec::new();
    let mut written = Vec::new();
    let mut failures = Vec::new();
    for problem in &problems {
        match arguments.ask(problem) {
            Ok(answer) => answers.push(answer),
            // The others may fare better.
            Err(error) if problems.len() > 1 && !is_stopped() => {
                tilewright::terminal::say(&error);
                failures.push(problem.title());
                continue;
            }
            Err(error) => return Err(error),
        }
        // What is found is kept and shown at once: the next problem may be stopped.
        let last = &answers[answers.len() - 1];
        if let (Some(table), Some(path)) = (&mut table, &arguments.export) {
            add(table, last.entry());
            crate::files::replace(path, |file| file.write_all(table.text().as_bytes()))
                .map_err(|error| CliError::file("write", path, error))?;
        }
        write!(out, "{}", report(std::slice::from_ref(last)).to_text())?;
        out.flush()?;
        written = arguments.outputs.write_files(&arguments.outputs.with_machine(report(&answers)))?;
    }
    if answers.len() > 1 {
        let all = Report::new("tune", "Tuning").table(chosen(&answers));
        write!(out, "\n{}", arguments.outputs.with_machine(all).to_text())?;
    }
    for path in written.iter().chain(&arguments.export) {
        writeln!(out, "wrote {}", path.display())?;
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(CliError::Failure(format!("not tuned, as said above: {}", failures.join("; ")))),
    }
}

/// Ends a worker that has answered. Threads may still be compiling candidates that came too late: what LLVM and the driver tear down when
/// a process ends in good order they would be using.
fn leave() -> ! {
    // SAFETY: ends the process; all that was to be written has been.
    unsafe { libc::_exit(0) }
}

/// Puts an entry into a table, in the place of what it has for the same problem.
fn add(table: &mut Choices, entry: Entry) {
    table.entries.retain(|other| (&other.kernel, &other.key) != (&entry.kernel, &entry.key));
    table.entries.push(entry);
    table.entries.sort_by(|a, b| (&a.kernel, &a.key).cmp(&(&b.kernel, &b.key)));
}

/// The table that `--export` adds to; a new one where there is none.
fn read_export(path: &std::path::Path, device: &tilewright::Device) -> Result<Choices> {
    let id = DeviceId::of(device);
    let text = match crate::files::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Choices::new(id, Vec::new())),
        Err(error) => return Err(CliError::file("read", path, error)),
    };
    let table = Choices::parse(&text).map_err(|why| CliError::file("add to", path, why))?;
    if table.device != id {
        let found = format!("it is a table of {}, and this is {id}", table.device);
        return Err(CliError::file("add to", path, found));
    }
    Ok(table)
}

impl Arguments {
    /// Every kernel with every problem that is asked for.
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
                        return Err(CliError::usage(format!("`{other}` is no kernel that can be tuned"), help));
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
        let (heads, lengths) = (self.heads.unwrap_or(if gpu { 16 } else { 2 }), or(&self.length, &[16384], &[512]));
        let dims = or(&self.dim, &[64, 128], &[64]);
        let default_size = [[if gpu { 4096 } else { 256 }; 3]];
        let sizes = if self.size.is_empty() { &default_size[..] } else { &self.size };
        let default_dtype = [if gpu { "bf16" } else { "f32" }.to_string()];
        let dtypes = if self.dtype.is_empty() { &default_dtype[..] } else { &self.dtype };
        if self.rows == Some(0) || self.d.contains(&0) {
            return Err(CliError::usage(
                "there is nothing to tune for in an empty tensor",
                "--rows and --d are at least 1",
            ));
        }
        let wrong =
            [self.batch, heads].contains(&0) || lengths.contains(&0) || !dims.iter().all(|d| (1..=256).contains(d));
        if wrong {
            return Err(CliError::usage(
                "there is no attention of this shape",
                "batch, heads and length are at least 1, head dimensions from 1 to 256",
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
                        for &columns in &self.columns {
                            problems.extend(sizes.iter().map(|&size| Problem::matmul(dtype, precision, size, columns)));
                        }
                    }
                    continue;
                }
                if let Some((rows, widths)) = worker::usual_rows(kernel) {
                    let rows = self.rows.unwrap_or(if gpu { rows } else { 512 });
                    let shapes = or(&self.d, widths, &[256]).into_iter().map(|d| [rows, d]);
                    problems.extend(shapes.map(|shape| Problem::over_rows(kernel, dtype, shape)));
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

    /// Has one problem tuned by a worker.
    fn ask(&self, problem: &Problem) -> Result<Answer> {
        let program = std::env::current_exe()
            .map_err(|error| CliError::Failure(format!("this program cannot start itself: {error}")))?;
        let (_keep, log) = self.log(problem)?;
        let device = open(self.device)?;
        let words = problem.arguments();
        let start = || {
            let mut command = std::process::Command::new(&program);
            command.arg("tune").args(&words).args(["--budget", &self.budget.to_string()]);
            command.args(["--limit", &self.limit.to_string(), "--device", &device_word(self.device, &device)]);
            command.arg("--worker").arg(&log);
            if self.again {
                command.arg("--again");
            }
            command
        };
        let watch = Watch { log: &log, limit: Duration::from_secs_f64(self.limit), what: problem.title() };
        let line = supervise(&start, &watch)?;
        Answer::parse(problem, &line)
    }

    /// Where the log of a problem is; with a folder to keep as long as the log is needed, where nothing is cached.
    fn log(&self, problem: &Problem) -> Result<(Option<tempfile::TempDir>, PathBuf)> {
        let name = format!("{}.log.jsonl", problem.title().replace(|c: char| !c.is_alphanumeric(), "-"));
        match Cache::from_env()?.folder(&["tuned", "logs"]) {
            Some(dir) => Ok((None, dir.join(name))),
            None => {
                let dir = crate::files::temporary_folder()
                    .map_err(|error| CliError::Failure(format!("cannot keep a log of tuning: {error}")))?;
                let log = dir.path().join(name);
                Ok((Some(dir), log))
            }
        }
    }
}

/// The device as the worker's command line has it.
fn device_word(choice: Option<Choice>, device: &tilewright::Device) -> String {
    match choice {
        Some(Choice::Cpu) => "cpu".to_string(),
        Some(Choice::Cuda(ordinal)) => format!("cuda:{ordinal}"),
        None if device.is_cuda() => "cuda".to_string(),
        None => "cpu".to_string(),
    }
}

/// A table of the candidates of each problem, and one of what was chosen.
fn report(answers: &[Answer]) -> Report {
    let mut report = Report::new("tune", "Tuning");
    for answer in answers.iter().filter(|answer| !answer.candidates.is_empty()) {
        let name = format!("candidates-{}", report.parts.len() + 1);
        report = report.table(candidates(answer, &name));
    }
    report.table(chosen(answers))
}

/// What was chosen, a row per problem.
fn chosen(answers: &[Answer]) -> Table {
    let columns = [
        Column::text("kernel"),
        Column::text("problem"),
        Column::text("chosen"),
        Column::number("median").unit("ms"),
        Column::text("remark"),
    ];
    let mut table = Table::new("tuned", "Chosen configurations", columns);
    for answer in answers {
        let remark = match answer.candidates.is_empty() {
            true => "known before".to_string(),
            false => format!("of {} candidates in {:.1} s", answer.candidates.len(), answer.seconds),
        };
        table.push([
            Cell::from(answer.kernel.as_str()),
            Cell::from(answer.key.as_str()),
            Cell::from(answer.config.as_str()),
            Cell::from(answer.median_ms),
            Cell::from(remark),
        ]);
    }
    table
}

/// What became of every candidate.
fn candidates(answer: &Answer, name: &str) -> Table {
    let columns = [
        Column::text("candidate"),
        Column::number("median").unit("ms"),
        Column::integer("runs"),
        Column::text("left out because"),
    ];
    let mut table = Table::new(name, &answer.title, columns);
    for candidate in &answer.candidates {
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

impl Answer {
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
