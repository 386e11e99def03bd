//! `tilewright explain`: what the compiler made of a kernel, and how far that is from the least that it must do.

mod assemble;
mod code;
mod floors;
mod occupancy;
mod subject;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use tilewright::codegen::target::{Code as Artifacts, GpuArch};

use self::assemble::{Assembled, assemble};
use self::code::{Code, Counts, classes, products};
use self::floors::{Peaks, Work, data_sheet};
use self::occupancy::occupancy;
use self::subject::Subject;
use super::compile::Schedule;
use super::{CliError, Result, numbers};
use crate::report::{Cell, Column, Outputs, Report, Table};

#[derive(Args)]
pub struct Arguments {
    /// The kernel, as `tilewright list` names it
    kernel: String,
    /// What to compile for: sm_80 or sm_90a
    #[arg(long, default_value = "sm_90a", value_parser = arch)]
    target: GpuArch,
    /// Element types: `bf16` for all, or `T=bf16,U=f32`; bf16 and i64 without it
    #[arg(long, value_name = "TYPE")]
    dtype: Vec<String>,
    /// Constants of the kernel: `d=128,causal=true`; what is missing comes from the shipped configurations, or is usual
    #[arg(long, value_name = "NAME=VALUE,…")]
    set: Vec<String>,
    /// What the code may assume about arguments; without it that tensors are dense and extents multiples of 16
    #[arg(long, value_name = "NAME%N|NAME=N,…")]
    assume: Vec<String>,
    /// Warps of 32 threads in a block, a power of two
    #[arg(long, value_name = "N")]
    num_warps: Option<u32>,
    /// Depth of software pipelines
    #[arg(long, value_name = "N")]
    num_stages: Option<u32>,
    /// Upper bound of registers per thread
    #[arg(long, value_name = "N")]
    max_registers: Option<u32>,
    #[command(flatten)]
    schedule: Schedule,
    /// Shape of a tensor, for the floors: `q=1,16,16384,64`; others follow from the names of dimensions
    #[arg(long, value_name = "NAME=X,Y,…")]
    shape: Vec<String>,
    /// How long a launch took, in milliseconds
    #[arg(long, value_name = "MS", conflicts_with = "record", value_parser = numbers::positive)]
    time_ms: Option<f64>,
    /// Take time, shape and measured peak from the last row about this kernel in a file that `tilewright bench --json` or
    /// `leaderboard --record` wrote
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// The rate of products that the device reaches, in TFLOP/s; without it, that of a data sheet
    #[arg(long, value_name = "RATE", value_parser = numbers::positive)]
    peak_tflops: Option<f64>,
    /// The rate of memory that the device reaches, in GB/s; without it, that of a data sheet
    #[arg(long, value_name = "RATE", value_parser = numbers::positive)]
    peak_gbps: Option<f64>,
    #[command(flatten)]
    outputs: Outputs,
}

fn arch(word: &str) -> Result<GpuArch, String> {
    word.parse()
}

/// Everything that is known of a kernel.
struct Facts {
    subject: Subject,
    threads: u32,
    shared_bytes: u32,
    assembled: Option<Assembled>,
    ptx: Code,
    work: Work,
    peaks: Peaks,
    time_ms: Option<f64>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let outputs = arguments.outputs.apart_from(&arguments.record);
    outputs.check()?;
    let row = arguments.record.as_deref().map(|path| last_row(path, &arguments.kernel)).transpose()?;
    let mut subject = Subject::new(arguments, row.as_ref())?;
    let artifact = super::compile::compile_artifact(&subject.request)?;
    let Artifacts::Ptx(ptx) = &artifact.code else {
        return Err(CliError::Failure("internal error: a GPU's code is no PTX; please report".to_string()));
    };
    let sheet = data_sheet(arguments.target, subject.main_type(), subject.precision());
    let measured = row.as_ref().and_then(Row::peak_tflops);
    let tflops = arguments.peak_tflops.or(measured);
    let peaks = Peaks {
        flop: tflops.map_or(sheet.flop, |rate| rate * 1e12),
        bytes: arguments.peak_gbps.map_or(sheet.bytes, |rate| rate * 1e9),
        whose: match (tflops, arguments.peak_gbps) {
            (None, None) => sheet.whose,
            (Some(_), Some(_)) => "what was measured".to_string(),
            (Some(_), None) => format!("what was measured, for memory {}", sheet.whose),
            (None, Some(_)) => format!("what was measured, for products {}", sheet.whose),
        },
    };
    let facts = Facts {
        threads: artifact.manifest.threads,
        shared_bytes: artifact.manifest.shared_bytes,
        assembled: assemble(ptx, arguments.target.name())?,
        ptx: Code::of_ptx(ptx),
        work: subject.work(),
        peaks,
        time_ms: arguments.time_ms.or(row.and_then(|row| row.median_ms)),
        subject,
    };
    outputs.write(facts.report(arguments.target), out)?;
    Ok(())
}

impl Facts {
    fn report(&self, arch: GpuArch) -> Report {
        let mut report = Report::new("explain", &self.subject.title(arch)).table(self.resources(arch));
        report = report.table(self.instructions());
        if self.work != Work::default() {
            report = report.table(self.floors());
        }
        report
    }

    fn resources(&self, arch: GpuArch) -> Table {
        let columns = [Column::text("resource"), Column::text("of this kernel")];
        let mut table = Table::new("resources", &self.subject.title(arch), columns);
        let mut add = |name: &str, value: String| table.push([Cell::from(name), Cell::from(value)]);
        add("configuration", self.subject.configuration());
        add("threads of a block", self.threads.to_string());
        add("shared memory of a block", format!("{} bytes of {}", self.shared_bytes, arch.max_shared_bytes()));
        let mut notes = self.subject.notes.clone();
        match &self.assembled {
            Some(assembled) => {
                add("registers of a thread", format!("{} of 255", assembled.registers));
                let spills = assembled.spill_stores + assembled.spill_loads;
                add(
                    "spills of a thread",
                    match spills {
                        0 => "none".to_string(),
                        _ => format!("{} bytes written, {} read", assembled.spill_stores, assembled.spill_loads),
                    },
                );
                let found = occupancy(arch, self.threads, assembled.registers, self.shared_bytes);
                let plural = if found.blocks == 1 { "block" } else { "blocks" };
                add(
                    "a multiprocessor runs",
                    format!(
                        "{} {plural}, {} of {} warps; the limit is {}",
                        found.blocks, found.warps, found.of, found.limit
                    ),
                );
                add(
                    "products in flight",
                    match &assembled.serialised {
                        Some(why) => format!("none: {why}"),
                        None if products(&self.ptx.all()) == 0 => "the kernel has none".to_string(),
                        None => "yes: the assembler keeps them apart from what they wait for".to_string(),
                    },
                );
                for tool in &assembled.missing {
                    notes.push(format!(
                        "There is no {tool} here, so that instructions are counted in the PTX: `make cuda-tools` fetches it."
                    ));
                }
            }
            None => notes.push(
                "There is no ptxas here, so that registers, spills and the machine's instructions are unknown: \
                 `make cuda-tools` fetches it, or TILEWRIGHT_PTXAS names yours."
                    .to_string(),
            ),
        }
        notes.into_iter().fold(table, Table::note)
    }

    /// The machine's code, or the PTX where there is no disassembler.
    fn code(&self) -> (&Code, &'static str) {
        match self.assembled.as_ref().and_then(|assembled| assembled.code.as_ref()) {
            Some(code) => (code, "machine instructions"),
            None => (&self.ptx, "PTX instructions"),
        }
    }

    fn instructions(&self) -> Table {
        /// Loops that have a column.
        const LOOPS: usize = 3;
        let (code, what) = self.code();
        let loops: Vec<Counts> = code.innermost_loops().into_iter().take(LOOPS).collect();
        let mut columns = vec![Column::text("kind"), Column::integer("all")];
        columns.extend((1..=loops.len()).map(|n| Column::integer(&format!("loop {n}"))));
        let mut table =
            Table::new("instructions", &format!("{} {what}, and those of the innermost loops", code.len()), columns);
        let all = code.all();
        for class in classes().filter(|class| all.contains_key(class)) {
            let cell = |counts: &Counts| Cell::from(counts.get(class).copied());
            let mut row = vec![Cell::from(class), cell(&all)];
            row.extend(loops.iter().map(cell));
            table.push(row);
        }
        table
    }

    fn floors(&self) -> Table {
        let columns = [
            Column::text("floor"),
            Column::number("at least").key("least"),
            Column::text("of"),
            Column::number("takes").unit("µs"),
            Column::number("reached").unit("%").decimals(1),
        ];
        let mut table = Table::new("floors", "The least that a launch must do", columns);
        let [flop_s, bytes_s] = self.work.seconds(&self.peaks);
        let rows = [
            ("products", self.work.flop.map(|flop| flop / 1e9), "GFLOP", flop_s),
            ("memory", self.work.bytes.map(|bytes| bytes / 1e6), "MB", bytes_s),
        ];
        for (name, amount, unit, seconds) in rows {
            let (Some(amount), Some(seconds)) = (amount, seconds) else { continue };
            let reached = self.time_ms.map(|ms| 100.0 * seconds / (ms * 1e-3));
            table.push([name.into(), amount.into(), unit.into(), (seconds * 1e6).into(), reached.into()]);
        }
        let mut table = table.note(format!("Rates are {}.", self.peaks.whose));
        if let Some(ms) = self.time_ms {
            table = table.note(format!("A launch takes {ms} ms."));
        }
        table.without_empty_columns()
    }
}

/// What is used of a row of a record.
#[derive(Clone, Debug, serde::Deserialize)]
pub struct Row {
    kernel: String,
    shape: Vec<usize>,
    #[serde(default)]
    case: Option<String>,
    #[serde(default)]
    peer: Option<String>,
    dtype: String,
    #[serde(default)]
    median_ms: Option<f64>,
    #[serde(default)]
    tflops: Option<f64>,
    #[serde(default)]
    fraction: Option<f64>,
}

impl Row {
    /// The peak of the same run, where the row is about products.
    fn peak_tflops(&self) -> Option<f64> {
        Some(self.tflops? / self.fraction?)
    }
}

/// A kernel's name in records: attention's forward kernel is the whole forward pass.
fn record_name(kernel: &str) -> &str {
    match kernel {
        "flash_attention_fwd" => "attention_fwd",
        other => other,
    }
}

fn last_row(path: &Path, kernel: &str) -> Result<Row> {
    let text = crate::files::read_to_string(path).map_err(|error| CliError::file("read", path, error))?;
    let rows = text.lines().filter_map(|line| serde_json::from_str::<Row>(line).ok());
    let mut ours =
        rows.filter(|row| row.peer.is_none() && row.median_ms.is_some() && row.kernel == record_name(kernel));
    ours.next_back().ok_or_else(|| {
        CliError::usage(
            format!("{} has no time of `{}`", path.display(), record_name(kernel)),
            "a row is a line that `tilewright bench --json` wrote; --time-ms gives a time by hand",
        )
    })
}
