//! `tilewright explain`: reports registers, occupancy and instructions of a compiled kernel, and compares its time with
//! roofline bounds. With `--html`, shows what each pass of the compiler did ([`page`]).

mod assemble;
mod code;
mod occupancy;
mod page;
mod roofline;
mod subject;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use tilewright_codegen::explain::Trace;
use tilewright_codegen::explain::dots::{self, Place};
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_codegen::target::{Code as TargetCode, CompileOptions, GpuArch, Target};
use tilewright_runtime::terminal;

use self::assemble::{Assembled, assemble};
use self::code::{Code, Counts, classes, mma_count};
use self::occupancy::occupancy;
use self::roofline::{Peaks, Work, data_sheet};
use self::subject::Subject;
use crate::bind::Extents;
use crate::clocks::Recording;
use crate::compile::{self, Options, Request};
use crate::report::{Cell, Column, Outputs, Report, Table};
use crate::{CliError, Hints, Kernels, Result, choose, expect_used, value_parsers};

#[derive(Args)]
#[command(
    after_help = "The page of --html also shows what the compiler did: the IR after each pass beside the kernel's \
                        source, a predicted timeline of each loop (and a measured one with --clocks), the layouts of \
                        tiles, shared memory, registers, and the loops by pipe. --svg writes its pictures as files."
)]
pub struct Arguments {
    /// Name of the kernel, as in `tilewright list`
    kernel: String,
    /// Target: sm_80, sm_86, sm_89 or sm_90a
    #[arg(long, default_value = "sm_90a", value_parser = arch)]
    target: GpuArch,
    /// Element types: `bf16` for all, or `T=bf16,U=f32`. Default of type parameters without one: bf16, else i64
    #[arg(long, value_name = "TYPE")]
    dtype: Vec<String>,
    /// Constants of the kernel: `d=128,causal=true`. Default: the shipped tuned configuration, else common values
    #[arg(long, value_name = "NAME=VALUE,…")]
    set: Vec<String>,
    /// Assumptions about arguments, as of `compile`. Default: dense tensors, and extents that are multiples of 16, unless
    /// shapes have others
    #[arg(long, value_name = "NAME%N|NAME=N|dense,…")]
    assume: Vec<String>,
    #[command(flatten)]
    options: Options,
    /// Shape of a tensor, for the roofline: `q=1,16,16384,64`. Other shapes are derived from the names of dimensions
    #[arg(long, value_name = "NAME=X,Y,…")]
    shape: Vec<String>,
    /// Measured time of a launch, in milliseconds
    #[arg(long, value_name = "MS", conflicts_with = "record", value_parser = value_parsers::positive)]
    time_ms: Option<f64>,
    /// Take time, shape and measured peak from the last row of this kernel, with the type of --dtype and the constants of
    /// --set, in a file that `tilewright bench --record` or `leaderboard --record` wrote on a GPU of this target
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Peak matmul rate of the device, in TFLOP/s. Default: NVIDIA's data sheet
    #[arg(long, value_name = "RATE", value_parser = value_parsers::positive)]
    peak_tflops: Option<f64>,
    /// Peak memory bandwidth of the device, in GB/s. Default: NVIDIA's data sheet
    #[arg(long, value_name = "RATE", value_parser = value_parsers::positive)]
    peak_gbps: Option<f64>,
    /// Show measured timelines beside the predicted ones, from a file that the command `clocks` wrote on a GPU, which
    /// says types, constants, options and target
    #[arg(long, value_name = "FILE", conflicts_with_all = GIVEN_BY_CLOCKS)]
    clocks: Option<PathBuf>,
    /// Write the pictures of the page of --html as SVG files to a folder, which is created if needed
    #[arg(long, value_name = "FOLDER")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
}

/// Arguments that a file of clocks gives, or that are of no use beside it: it has no shapes for the roofline.
const GIVEN_BY_CLOCKS: [&str; 22] = [
    "target",
    "dtype",
    "set",
    "assume",
    "num_warps",
    "num_ctas",
    "num_stages",
    "max_registers",
    "loops",
    "table",
    "no_asserts",
    "tma",
    "warp_specialize",
    "overlap",
    "pingpong",
    "wgmma_f32",
    "tma_stores",
    "shape",
    "time_ms",
    "record",
    "peak_tflops",
    "peak_gbps",
];

/// The error about what the file of clocks has.
fn in_file(arguments: &Arguments, error: &CliError) -> CliError {
    let path = arguments.clocks.as_deref().unwrap_or(Path::new("")).display().to_string();
    CliError::Usage(format!("{path}: {}", error.to_string().trim_start_matches("error: ")))
}

fn arch(word: &str) -> Result<GpuArch, String> {
    word.parse()
}

/// Everything that the report shows.
struct Facts {
    subject: Subject,
    threads: u32,
    shared_bytes: u32,
    assembled: Option<Assembled>,
    ptx: Code,
    work: Work,
    peaks: Peaks,
    time_ms: Option<f64>,
    /// The device of the row of a record.
    device: Option<String>,
}

pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let inputs = arguments.record.iter().chain(&arguments.clocks).chain(arguments.options.table());
    let mut outputs = arguments.outputs.protecting_inputs(inputs);
    outputs.expect_no_plot()?;
    outputs.check()?;
    if let Some(folder) = &arguments.svg {
        compile::check_folder(folder)?;
    }
    let row = arguments.record.as_deref().map(|path| last_row(path, arguments, kernels)).transpose()?;
    let recording = arguments.clocks.as_deref().map(Recording::read).transpose()?;
    let mut subject = match &recording {
        Some(recording) => {
            let request = recording.request(kernels, &arguments.kernel).map_err(|error| in_file(arguments, &error))?;
            Subject::recorded(request, kernels, recording.note())
        }
        None => Subject::new(arguments, kernels, row.as_ref())?,
    };
    let work = subject.work();
    arguments.expect_roofline(&work)?;
    let Target::Nvptx(arch) = subject.request.target else { unreachable!("internal error: not for a GPU") };
    let (artifact, trace) = match &recording {
        Some(recording) => recording.compile(&subject.request)?,
        None => compile::compile_traced(&subject.request, false)?,
    };
    let TargetCode::Ptx(ptx) = &artifact.code else {
        return Err(CliError::Failure("internal error: the code for a GPU is not PTX; please report this".to_string()));
    };
    let sheet = data_sheet(arch, subject.main_type(), subject.precision());
    let measured = row.as_ref().and_then(Row::peak_tflops);
    let tflops = arguments.peak_tflops.or(measured);
    let peaks = Peaks {
        flop: tflops.map_or(sheet.flop, |rate| rate * 1e12),
        bytes: arguments.peak_gbps.map_or(sheet.bytes, |rate| rate * 1e9),
        source: {
            let of_matmuls = if arguments.peak_tflops.is_some() { "given" } else { "measured" };
            match (tflops, arguments.peak_gbps) {
                (None, None) => sheet.source,
                (Some(_), Some(_)) => format!("{of_matmuls} for matmuls, given for memory"),
                (Some(_), None) => format!("{of_matmuls}, for memory {}", sheet.source),
                (None, Some(_)) => format!("given, for matmuls {}", sheet.source),
            }
        },
    };
    let facts = Facts {
        threads: artifact.manifest.threads,
        shared_bytes: artifact.manifest.shared_bytes,
        assembled: assemble(ptx, arch.name())?,
        ptx: Code::from_ptx(ptx),
        work,
        peaks,
        time_ms: arguments.time_ms.or(row.as_ref().and_then(|row| row.median_ms)),
        device: row.and_then(|row| row.device),
        subject,
    };
    let settings = page::Settings {
        arch,
        threads: facts.threads,
        max_registers: facts.subject.request.options.max_registers,
        kernel_line: facts.subject.request.def.line,
        clocks: recording.map_or_else(Vec::new, |recording| recording.events().to_vec()),
    };
    let mut report = facts.report(arch);
    for table in [dots(&trace, arch), page::loops_table(&trace, &settings)].into_iter().flatten() {
        report = report.table(table);
    }
    if outputs.html.is_some() || outputs.out.is_some() {
        let (sections, sources) = page::sections(&trace, &settings);
        report.interactive = Some(sections);
        // The page must not replace the kernel that it shows.
        outputs.inputs.extend(sources);
    }
    outputs.write(report, out)?;
    if let Some(folder) = &arguments.svg {
        write_pictures(folder, &page::pictures(&trace, &settings), &outputs, out)?;
    }
    Ok(())
}

impl Arguments {
    /// Refuses times and rates for a roofline that the report does not have.
    fn expect_roofline(&self, work: &Work) -> Result<()> {
        let no_shape = "the shape of no tensor is known, so that there is no roofline";
        let no_flop = match work.bytes {
            None => no_shape,
            Some(_) => "the FLOPs of this kernel are not known",
        };
        let shape = "--shape NAME=X,Y,…, as in --shape q=1,16,16384,64";
        let options = [
            ("--time-ms", self.time_ms.is_some() && work.bytes.is_none(), no_shape, shape),
            ("--peak-gbps", self.peak_gbps.is_some() && work.bytes.is_none(), no_shape, shape),
            (
                "--peak-tflops",
                self.peak_tflops.is_some() && work.flop.is_none(),
                no_flop,
                if work.bytes.is_none() { shape } else { "omit it; --peak-gbps is the rate of its memory accesses" },
            ),
        ];
        expect_used(options.map(|(option, unused, why, help)| (option, unused, why.to_string(), help.to_string())))
    }
}

/// The matrix instructions of a kernel; `None` for one without dots.
fn dots(trace: &Trace, arch: GpuArch) -> Option<Table> {
    let columns = ["line", "instruction", "a from", "b from"].map(Column::text);
    let mut table = Table::new("dots", "Dots", columns);
    let dots = dots::dots(trace.last(), arch);
    for dot in &dots {
        let instruction = dot.instruction.clone().unwrap_or_else(|| "a multiply-add for each product".into());
        let line = dot.loc.line.to_string();
        let [a, b] = dot.operands.map(|place| place.name().to_string());
        table.push([line.into(), instruction.into(), a.into(), b.into()]);
    }
    let stored = dots.iter().any(|dot| dot.operands.contains(&Place::Stored));
    let table = match stored {
        true => table.note(
            "Operands that are stored from registers were loaded outside of a pipelined loop, computed, or, for wgmma \
             of 8-bit types and of f32, are not contiguous along K.",
        ),
        false => table,
    };
    (!dots.is_empty()).then_some(table)
}

/// The pictures of `--svg` of any kernel, compiled for dense tensors whose extents are multiples of 16: stems of file
/// names, and SVG.
///
/// # Errors
/// A mistake in the kernel, or a feature that the target lacks.
pub fn pictures(
    def: &'static KernelDef,
    dtypes: &[DType],
    constants: &[(&'static str, ConstValue)],
    arch: GpuArch,
    options: &CompileOptions,
) -> Result<Vec<(String, String)>> {
    let request = Request {
        def,
        dtypes: dtypes.to_vec(),
        constants: constants.to_vec(),
        specialization: subject::usual_assumptions(def, dtypes, constants, &[], &Extents::default()),
        sizes: Vec::new(),
        target: Target::Nvptx(arch),
        options: options.clone(),
    };
    let (artifact, trace) = compile::compile_traced(&request, false)?;
    let settings = page::Settings {
        arch,
        threads: artifact.manifest.threads,
        max_registers: options.max_registers,
        kernel_line: def.line,
        clocks: Vec::new(),
    };
    let pictures = page::pictures(&trace, &settings).into_iter();
    Ok(pictures.map(|picture| (picture.name.clone(), picture.file())).collect())
}

/// Writes each picture to a file of its name in the folder, which is created if needed.
fn write_pictures(folder: &Path, pictures: &[page::Picture], outputs: &Outputs, out: &mut dyn Write) -> Result<()> {
    let inputs = outputs.inputs.iter().map(PathBuf::as_path);
    let inputs: Vec<&Path> = inputs.chain(outputs.named()).collect();
    if pictures.is_empty() {
        let folder = folder.display();
        terminal::print_stderr(format_args!("note: nothing is written to {folder}: this kernel has no pictures"));
        return Ok(());
    }
    std::fs::create_dir_all(folder).map_err(|error| CliError::file("create the folder", folder, error))?;
    for picture in pictures {
        let path = folder.join(format!("{}.svg", picture.name));
        crate::files::check_distinct(&[&path], &inputs).map_err(|clash| CliError::Failure(clash.to_string()))?;
        crate::files::replace(&path, |file| file.write_all(picture.file().as_bytes()))
            .map_err(|error| CliError::file("write", &path, error))?;
        writeln!(out, "wrote {}", path.display()).map_err(|error| CliError::file("write", &path, error))?;
    }
    Ok(())
}

impl Facts {
    fn report(&self, arch: GpuArch) -> Report {
        let mut report = Report::new("explain", &self.subject.title(arch)).table(self.resources(arch));
        report = report.table(self.instructions());
        if self.work != Work::default() {
            report = report.table(self.roofline());
        }
        report
    }

    fn resources(&self, arch: GpuArch) -> Table {
        let columns = [Column::text("resource"), Column::text("this kernel")];
        let mut table = Table::new("resources", &self.subject.title(arch), columns);
        let mut add = |name: &str, value: String| table.push([Cell::from(name), Cell::from(value)]);
        add("configuration", self.subject.configuration());
        add("threads per block", self.threads.to_string());
        add("shared memory per block", format!("{} bytes of {}", self.shared_bytes, arch.max_shared_bytes()));
        let mut notes = self.subject.notes.clone();
        match &self.assembled {
            Some(assembled) => {
                add("registers per thread", format!("{} of 255", assembled.registers));
                let spills = assembled.spill_stores + assembled.spill_loads;
                add(
                    "spills per thread",
                    match spills {
                        0 => "none".to_string(),
                        _ => format!("{} bytes written, {} read", assembled.spill_stores, assembled.spill_loads),
                    },
                );
                let found = occupancy(arch, self.threads, assembled.registers, self.shared_bytes);
                let plural = if found.blocks == 1 { "block" } else { "blocks" };
                add(
                    "occupancy of an SM",
                    format!(
                        "{} {plural}, {} of {} warps; limited by {}",
                        found.blocks, found.warps, found.max_warps, found.limit
                    ),
                );
                add(
                    "asynchronous MMAs",
                    match &assembled.serialized {
                        Some(why) => format!("serialized: {why}"),
                        None if mma_count(&self.ptx.all()) == 0 => "none: the kernel has no MMAs".to_string(),
                        None => "not serialized by the assembler".to_string(),
                    },
                );
                for tool in &assembled.missing {
                    notes.push(format!(
                        "{tool} was not found: instructions are counted in the PTX. `make cuda-tools` downloads it."
                    ));
                }
            }
            None => notes.push(
                "ptxas was not found: registers, spills and SASS instructions are unknown. \
                `make cuda-tools` downloads it to build/cuda-tools/nvidia/cu13/bin/ptxas: set TILEWRIGHT_PTXAS to that path."
                    .to_string(),
            ),
        }
        notes.into_iter().fold(table, Table::note)
    }

    /// Returns the SASS with its title, or the PTX if no disassembler is installed.
    fn code(&self) -> (&Code, &'static str) {
        match self.assembled.as_ref().and_then(|assembled| assembled.code.as_ref()) {
            Some(code) => (code, "SASS instructions"),
            None => (&self.ptx, "PTX instructions"),
        }
    }

    fn instructions(&self) -> Table {
        /// Maximum number of loops with a column.
        const LOOPS: usize = 3;
        let (code, what) = self.code();
        let loops: Vec<Counts> = code.innermost_loops().into_iter().take(LOOPS).collect();
        let mut columns = vec![Column::text("class").key("kind"), Column::integer("total").key("all")];
        columns.extend((1..=loops.len()).map(|n| Column::integer(&format!("loop {n}"))));
        let mut table =
            Table::new("instructions", &format!("{} {what}, in all and by innermost loop", code.len()), columns);
        let all = code.all();
        for class in classes().filter(|class| all.contains_key(class)) {
            let cell = |counts: &Counts| Cell::from(counts.get(class).copied());
            let mut row = vec![Cell::from(class), cell(&all)];
            row.extend(loops.iter().map(cell));
            table.push(row);
        }
        table
    }

    fn roofline(&self) -> Table {
        let columns = [
            Column::text("bound"),
            Column::number("work").key("work"),
            Column::text("unit"),
            Column::number("minimum time").unit("µs"),
            Column::number("of roofline").unit("%").decimals(1),
        ];
        let mut table = Table::new("roofline", "Roofline bounds of a launch", columns);
        let [flop_s, bytes_s] = self.work.seconds(&self.peaks);
        let rows = [
            ("compute", self.work.flop.map(|flop| flop / 1e9), "GFLOP", flop_s),
            ("memory", self.work.bytes.map(|bytes| bytes / 1e6), "MB", bytes_s),
        ];
        for (name, amount, unit, seconds) in rows {
            let (Some(amount), Some(seconds)) = (amount, seconds) else { continue };
            let reached = self.time_ms.map(|ms| 100.0 * seconds / (ms * 1e-3));
            table.push([name.into(), amount.into(), unit.into(), (seconds * 1e6).into(), reached.into()]);
        }
        let mut table = table.note(format!("Source of the peak rates: {}.", self.peaks.source));
        if let Some(ms) = self.time_ms {
            let device = self.device.as_ref().map(|device| format!(" on {device}")).unwrap_or_default();
            table = table.note(format!("A launch takes {ms} ms{device}."));
        }
        table.without_empty_columns()
    }
}

/// The fields of a record row (`bench/record.rs`) that `explain` reads.
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
    device: Option<String>,
    #[serde(default)]
    median_ms: Option<f64>,
    #[serde(default)]
    tflops: Option<f64>,
    #[serde(default)]
    fraction: Option<f64>,
}

impl Row {
    /// Returns the matmul peak of the same run, if the row has one.
    fn peak_tflops(&self) -> Option<f64> {
        Some(self.tflops? / self.fraction?)
    }

    /// Returns the constants that the case of the row gives; `None` if it is no case of constants alone.
    fn constants(&self, hints: &dyn Hints) -> Option<Vec<(&'static str, ConstValue)>> {
        self.case.as_ref().map_or(Some(Vec::new()), |case| hints.record_constants(case))
    }
}

/// The last row with a time of the kernel, with the element types and constants that are given.
///
/// # Errors
/// A file that cannot be read, or that has no such row.
fn last_row(path: &Path, arguments: &Arguments, kernels: &Kernels) -> Result<Row> {
    let def = kernels.find(&arguments.kernel)?;
    let hints = kernels.hints();
    let name = hints.record_name(def.name);
    let (types, constants) = (choose::partial_dtypes(def, &arguments.dtype)?, choose::constants(def, &arguments.set)?);
    let text = crate::files::read_to_string(path).map_err(|error| CliError::file("read", path, error))?;
    for (n, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if let Err(error) = serde_json::from_str::<serde::de::IgnoredAny>(line) {
            let path = path.display();
            terminal::print_stderr(format_args!("note: {path}:{} is skipped: it is no row: {error}", n + 1));
        }
    }
    let rows = text.lines().filter_map(|line| serde_json::from_str::<Row>(line).ok());
    let has_time = |row: &Row| row.median_ms.is_some_and(|ms| ms > 0.0 && ms.is_finite());
    // The roofline is of a GPU.
    let is_of_gpu = |row: &Row| row.device.as_ref().is_none_or(|device| !device.starts_with("CPU"));
    let ours = rows.filter(|row| row.peer.is_none() && has_time(row) && is_of_gpu(row) && row.kernel == name);
    let ours: Vec<Row> = ours.collect();
    let found = ours.iter().rev().find(|row| subject::is_of(row, def, hints, &types, &constants));
    found.cloned().ok_or_else(|| {
        let kind = |row: &Row| format!("{} {}", row.dtype, row.case.as_deref().unwrap_or_default()).trim().to_string();
        let mut kinds: Vec<String> = ours.iter().map(kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let found = match kinds.is_empty() {
            true => String::new(),
            false => format!(" and of these types and constants: its rows are of {}", kinds.join(", ")),
        };
        CliError::usage(
            format!("{} has no row with a time of `{name}`{found}", path.display()),
            "use a file that `tilewright bench --record` wrote on a GPU, or give a time with --time-ms",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every argument but the kernel and the outputs.
    #[test]
    fn a_file_of_clocks_takes_no_other_arguments_of_the_compilation() {
        let command = Arguments::augment_args(clap::Command::new("explain"));
        let outputs = Outputs::augment_args(clap::Command::new("outputs"));
        let others = ["kernel", "clocks", "svg", "help"];
        let is_output = |id: &str| outputs.get_arguments().any(|arg| arg.get_id() == id);
        let ids = command.get_arguments().map(|arg| arg.get_id().as_str());
        let mut own: Vec<&str> = ids.filter(|id| !others.contains(id) && !is_output(id)).collect();
        let mut given = GIVEN_BY_CLOCKS.to_vec();
        own.sort_unstable();
        given.sort_unstable();
        assert_eq!(own, given);
    }
}
