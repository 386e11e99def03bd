//! `tilewright compile`: compiles a kernel ahead of time to IR text and code, with a manifest for the program that
//! launches it.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use tilewright_codegen::explain::Trace;
use tilewright_codegen::ir::{DType, Func, Stage};
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef, ParamKind, Specialization};
use tilewright_codegen::llvm::{self, Opt};
use tilewright_codegen::passes::assume_ranges;
use tilewright_codegen::pipeline::{MAX_REGISTERS, NUM_CTAS, Observer};
use tilewright_codegen::schedule::given;
use tilewright_codegen::schedule::problem::LoopSchedules;
use tilewright_codegen::target::{self, Artifact, Code, CompileOptions, GpuArch, HostCpu, Target};
use tilewright_codegen::text;
use tilewright_runtime::autotune::{self, Autotune, Config, Table};
use tilewright_runtime::env::Env;
use tilewright_runtime::kernel::compile_error;
use tilewright_runtime::precompiled::{self, Document};
use tilewright_runtime::{Device, dump, terminal};

use crate::{CliError, Kernels, Result, bind, choose, value_parsers};

#[derive(Args)]
pub struct Arguments {
    /// Name of the kernel, as in `tilewright list`
    kernel: String,
    /// Target: sm_80, sm_86, sm_89, sm_90a, or host (this machine's CPU)
    #[arg(long)]
    target: String,
    /// Element type of the kernel's type parameters: `bf16` for all, or `T=bf16,U=f32`
    #[arg(long, value_name = "TYPE")]
    dtype: Vec<String>,
    /// Constants of the kernel: `q_tile=64,k_tile=32`. Default: those of the measured or shipped configuration
    #[arg(long, value_name = "NAME=VALUE,…")]
    set: Vec<String>,
    /// Assumptions about arguments: `d%16` (a multiple of 16), `stride=1` (equal to 1), `dense` (tensors are row-major,
    /// with rows of a multiple of 16 elements). Pointers are assumed to be aligned to 16 bytes; `x%1` drops that
    /// assumption
    #[arg(long, value_name = "NAME%N|NAME=N|dense,…")]
    assume: Vec<String>,
    /// Usual values of arguments that the shipped or measured configuration depends on, where it gives the constants
    /// that are not given: `rows=4096`. Default: 16384, or 64 for an extent that only optional tensors have
    #[arg(long, value_name = "NAME=N,…")]
    size: Vec<String>,
    #[command(flatten)]
    options: Options,
    /// Newest PTX version that the code may use, as in `8.3`
    #[arg(long, value_name = "VERSION", default_value = "8.4", value_parser = ptx_version)]
    ptx_version: u32,
    /// Files to write, separated by commas. Default: ptx for a GPU, obj for the host
    #[arg(long, value_delimiter = ',')]
    emit: Vec<Emit>,
    /// Output folder; it is created if it does not exist
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
}

/// Compiler options that every kernel has.
#[derive(Args, Clone, Debug, Default)]
pub struct Options {
    /// Warps (32 threads each) per block (GPU), a power of two. Default: 4, or that of the configuration (`compile`, `explain`)
    #[arg(long, value_name = "N", value_parser = value_parsers::whole)]
    num_warps: Option<u32>,
    /// CTAs of the cluster that shares each program, 1, 2, 4 or 8 (Hopper). Default: 1, or that of the
    /// configuration (`compile`, `explain`)
    #[arg(long, value_name = "N", value_parser = value_parsers::whole)]
    num_ctas: Option<u32>,
    /// Number of stages of software pipelines, in loops that do not set it themselves (GPU). Default: 3, or that
    /// of the configuration (`compile`, `explain`)
    #[arg(long, value_name = "N", value_parser = value_parsers::whole)]
    num_stages: Option<u32>,
    /// Maximum number of registers per thread (GPU)
    #[arg(long, value_name = "N", value_parser = value_parsers::whole)]
    max_registers: Option<u32>,
    /// Schedules of loops in place of those that the compiler chooses (GPU): as `tilewright solve` prints them, or
    /// @FILE, the text of `--emit schedule` with other placements. Default: those of the configuration (`compile`,
    /// `explain`)
    #[arg(long, value_name = "SCHEDULES|@FILE", value_parser = loop_schedules)]
    loops: Option<String>,
    /// Take constants and options that are not given from this table, which `tilewright tune --export` wrote
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Compile without `device_assert`s
    #[arg(long)]
    no_asserts: bool,
    #[command(flatten)]
    schedule: Schedule,
}

/// Schedule of loops with dots on a GPU. The compiler chooses whatever is `None`.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Schedule {
    /// Use TMA for the loads of software pipelines, where a tensor map can describe them (sm_90a)
    #[arg(long, alias = "bulk-copies", value_name = "BOOL")]
    pub tma: Option<bool>,
    /// Warp specialization: producer warps load, consumer warps compute (sm_90a)
    #[arg(long, value_name = "BOOL")]
    pub warp_specialize: Option<bool>,
    /// Overlap asynchronous MMAs with the arithmetic of the next iteration (sm_90a)
    #[arg(long, value_name = "BOOL")]
    pub overlap: Option<bool>,
    /// Ping-pong scheduling of the consumer warpgroups in warp-specialized loops (sm_90a)
    #[arg(long, alias = "take-turns", value_name = "BOOL")]
    pub pingpong: Option<bool>,
    /// Use wgmma for f32 dots in tf32 and tf32x3, where tiles are large enough (sm_90a)
    #[arg(long, value_name = "BOOL")]
    pub wgmma_f32: Option<bool>,
    /// Store tiles by TMA, where a tensor map can describe them (sm_90a). Default: in loops
    #[arg(long, value_name = "BOOL")]
    pub tma_stores: Option<bool>,
}

impl From<Schedule> for target::Schedule {
    fn from(given: Schedule) -> target::Schedule {
        let Schedule { tma, warp_specialize, overlap, pingpong, wgmma_f32, tma_stores } = given;
        target::Schedule { tma, warp_specialize, overlap, pingpong, wgmma_f32, tma_stores }
    }
}

impl From<target::Schedule> for Schedule {
    fn from(chosen: target::Schedule) -> Schedule {
        let target::Schedule { tma, warp_specialize, overlap, pingpong, wgmma_f32, tma_stores } = chosen;
        Schedule { tma, warp_specialize, overlap, pingpong, wgmma_f32, tma_stores }
    }
}

/// A file that `--emit` can write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Emit {
    /// Tile IR as recorded from the kernel
    Tile,
    /// Tile IR with layouts assigned (GPU)
    #[value(alias = "laid")]
    Layout,
    /// Tile IR with the schedule of its loops: stage, order and partition of each op (GPU)
    Schedule,
    /// Tile IR with asynchronous copies and MMAs (GPU)
    Async,
    /// LLVM IR before LLVM's passes
    Llvm,
    /// PTX (GPU)
    Ptx,
    /// Native assembly (host)
    Asm,
    /// A native object file (host)
    Obj,
}

impl Emit {
    /// File extension, appended to the kernel's name.
    fn extension(self) -> &'static str {
        match self {
            Emit::Tile => "tile",
            Emit::Layout => "layout.tile",
            Emit::Schedule => "schedule.tile",
            Emit::Async => "async.tile",
            Emit::Llvm => "ll",
            Emit::Ptx => "ptx",
            Emit::Asm => "s",
            Emit::Obj => "o",
        }
    }

    /// Name on the command line and in the manifest.
    fn name(self) -> &'static str {
        match self {
            Emit::Tile => "tile",
            Emit::Layout => "layout",
            Emit::Schedule => "schedule",
            Emit::Async => "async",
            Emit::Llvm => "llvm",
            Emit::Ptx => "ptx",
            Emit::Asm => "asm",
            Emit::Obj => "obj",
        }
    }

    fn exists_for(self, target: &Target) -> bool {
        match (self, target) {
            (Emit::Tile | Emit::Llvm, _) => true,
            (Emit::Layout | Emit::Schedule | Emit::Async | Emit::Ptx, Target::Nvptx(_)) => true,
            (Emit::Asm | Emit::Obj, Target::Host(_)) => true,
            (Emit::Layout | Emit::Schedule | Emit::Async | Emit::Ptx, Target::Host(_)) => false,
            (Emit::Asm | Emit::Obj, Target::Nvptx(_)) => false,
        }
    }
}

/// Parses a PTX version: `8.3` or `83`.
fn ptx_version(text: &str) -> Result<u32, String> {
    let wrong = || format!("`{text}` is not a PTX version: expected a version such as 8.3");
    let version = match text.split_once('.') {
        Some((major, minor)) => {
            let major: u32 = major.parse().map_err(|_| wrong())?;
            let minor: u32 = minor.parse().ok().filter(|minor| *minor < 10).ok_or_else(wrong)?;
            major.saturating_mul(10).saturating_add(minor)
        }
        None => text.parse().map_err(|_| wrong())?,
    };
    match version {
        80..=99 => Ok(version),
        _ => Err(format!("PTX {text} is out of range: kernels use instructions of PTX 8.0 and later")),
    }
}

/// Reads `--loops`: schedules of a solver, or a file with the text of a scheduled kernel.
fn loop_schedules(text: &str) -> std::result::Result<String, String> {
    let Some(file) = text.strip_prefix('@') else {
        return text.parse::<LoopSchedules>().map(|schedules| schedules.to_string());
    };
    if file.is_empty() {
        return Err("expected the name of a file after @".into());
    }
    let text = crate::files::read_to_string(Path::new(file)).map_err(|error| format!("cannot read {file}: {error}"))?;
    match given::is_text(&text) {
        true => Ok(text),
        false => Err(format!("{file} has no kernel: expected a file that `--emit schedule` writes, with your changes")),
    }
}

impl Options {
    /// These options, and those of `base` where one is not given.
    pub fn over(&self, base: CompileOptions) -> Options {
        Options {
            num_warps: self.num_warps.or(Some(base.num_warps)),
            num_ctas: self.num_ctas.or(Some(base.num_ctas)),
            num_stages: self.num_stages.or(Some(base.num_stages)),
            max_registers: self.max_registers.or(base.max_registers),
            loops: self.loops.clone().or(base.loops),
            table: self.table.clone(),
            no_asserts: self.no_asserts,
            schedule: target::Schedule::from(self.schedule).or(base.schedule).into(),
        }
    }

    /// The file of `--table`.
    pub fn table(&self) -> Option<&PathBuf> {
        self.table.as_ref()
    }

    /// Takes configurations of a kernel from the table of `--table`.
    ///
    /// # Errors
    /// A file that cannot be read, or that is no table with entries of this kernel for this target.
    pub fn use_table(&self, def: &KernelDef, target: &Target) -> Result<()> {
        let Some(path) = &self.table else { return Ok(()) };
        let text = crate::files::read_to_string(path).map_err(|error| CliError::file("read", path, error))?;
        let table = Table::parse(&text).map_err(|why| CliError::file("use", path, why))?;
        if !table.is_for(target) {
            let why = format!("it is a table of {}, and the target is {target}", table.device);
            return Err(CliError::file("use", path, why));
        }
        if !table.entries.iter().any(|entry| def.has_name(&entry.kernel)) {
            return Err(CliError::file("use", path, format!("it has no entry of `{}`", def.name)));
        }
        autotune::use_table(table);
        Ok(())
    }

    /// Notes which of these options have no effect on a CPU.
    pub fn note_unused(&self, target: &Target) {
        let has_schedule = target::Schedule::from(self.schedule) != target::Schedule::default();
        let options = [
            ("--num-warps", self.num_warps.is_some()),
            ("--num-ctas", self.num_ctas.is_some()),
            ("--num-stages", self.num_stages.is_some()),
            ("--max-registers", self.max_registers.is_some()),
            ("--loops", self.loops.is_some()),
            ("options of the schedule", has_schedule),
        ];
        let given: Vec<&str> =
            options.into_iter().filter(|(_, is_given)| *is_given).map(|(option, _)| option).collect();
        if matches!(target, Target::Host(_)) && !given.is_empty() {
            let given = given.join(", ");
            terminal::print_stderr(format_args!("note: without effect on code for the CPU: {given}"));
        }
    }

    /// Checks the options and converts them to the compiler's.
    ///
    /// # Errors
    /// A number of warps, stages or registers that GPUs do not support.
    pub fn compile_options(&self) -> Result<CompileOptions> {
        let default = CompileOptions::default();
        let num_warps = self.num_warps.unwrap_or(default.num_warps);
        let num_ctas = self.num_ctas.unwrap_or(default.num_ctas);
        let num_stages = self.num_stages.unwrap_or(default.num_stages);
        if !num_warps.is_power_of_two() || num_warps > 32 {
            return Err(CliError::usage(
                format!("--num-warps cannot be {num_warps}"),
                "a block has 1, 2, 4, 8, 16 or 32 warps",
            ));
        }
        if !NUM_CTAS.contains(&num_ctas) {
            return Err(CliError::usage(
                format!("--num-ctas cannot be {num_ctas}"),
                "1, 2, 4 or 8 CTAs share a program",
            ));
        }
        if !(1..=16).contains(&num_stages) {
            return Err(CliError::usage(
                format!("--num-stages cannot be {num_stages}"),
                "expected 1 to 16: 1 turns software pipelining off, 2 to 5 are common",
            ));
        }
        if let Some(registers) = self.max_registers
            && !MAX_REGISTERS.contains(&registers)
        {
            return Err(CliError::usage(
                format!("--max-registers cannot be {registers}"),
                "a thread has between 24 and 255 registers",
            ));
        }
        Ok(CompileOptions {
            num_warps,
            num_ctas,
            num_stages,
            debug_asserts: !self.no_asserts,
            max_registers: self.max_registers,
            loops: self.loops.clone(),
            schedule: self.schedule.into(),
            ..default
        })
    }
}

pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let (request, emit) = request(arguments, kernels)?;
    for path in compile_to(&request, &emit, &arguments.out)? {
        writeln!(out, "{}", path.display())?;
    }
    Ok(())
}

impl Arguments {
    /// The folder of the outputs.
    pub fn out(&self) -> &Path {
        &self.out
    }

    /// Whether the files to write are given.
    pub fn has_outputs(&self) -> bool {
        !self.emit.is_empty()
    }
}

/// What the arguments ask to compile, and the files to write.
///
/// # Errors
/// A mistake in the arguments, or a folder that cannot be written to.
pub fn request(arguments: &Arguments, kernels: &Kernels) -> Result<(Request, Vec<Emit>)> {
    let def = kernels.find(&arguments.kernel)?;
    let target = parse_target(&arguments.target)?;
    let emit = chosen_outputs(&arguments.emit, &target)?;
    let dtypes = choose::dtypes(def, &arguments.dtype)?;
    let mut constants = choose::constants(def, &arguments.set)?;
    let specialization = assumptions(def, &arguments.assume)?;
    let known = sizes(arguments, def, &specialization, kernels.autotune(def), &dtypes, &constants)?;
    arguments.options.use_table(def, &target)?;
    let config = configuration(&known, kernels.autotune(def), &target, &dtypes, &mut constants)?;
    constants.extend(def.heuristics(&|name| choose::given(&constants, name)));
    choose::check_complete(def, &constants)?;
    check_folder(&arguments.out)?;
    arguments.options.note_unused(&target);
    let options = arguments.options.over(config.map(|config| config.options()).unwrap_or_default());
    let request = Request {
        def,
        dtypes,
        constants,
        specialization,
        sizes: known.iter().map(|(name, size)| (name.to_string(), *size)).collect(),
        target,
        options: CompileOptions { ptx_version: arguments.ptx_version, ..options.compile_options()? },
    };
    Ok((request, emit))
}

/// Checks that files can be written to a folder, which may not exist yet, before a kernel is compiled.
///
/// # Errors
/// A folder that cannot be created or written to.
pub fn check_folder(folder: &Path) -> Result<()> {
    let doing = if folder.is_dir() { "write to the folder" } else { "create the folder" };
    crate::files::check_folder(folder).map_err(|error| CliError::file(doing, folder, error))
}

/// Parses `--size`.
///
/// # Errors
/// A size on which no configuration depends, that a constant gives, of tensors that are left out, that is not positive, or that an
/// assumption excludes.
fn sizes<'a>(
    arguments: &'a Arguments,
    def: &KernelDef,
    specialization: &Specialization,
    autotune: Option<&'static Autotune>,
    dtypes: &[DType],
    constants: &[(&'static str, ConstValue)],
) -> Result<Vec<(&'a str, i64)>> {
    let keys = autotune.map_or(Vec::new(), |autotune| autotune.sizes(dtypes));
    let mut known = Vec::new();
    for (name, text) in choose::assignments(&arguments.size, "--size")? {
        let size = text.parse::<i64>().ok().filter(|size| *size > 0);
        let name = def.param_name(name);
        if let Some(value) = choose::given(constants, name) {
            return Err(CliError::usage(format!("--size {name} is unused: it is a constant, {value}"), "omit it"));
        }
        if def.is_absent(name, |flag| choose::given(constants, flag)) {
            return Err(CliError::usage(
                format!("--size {name} is unused: the constants leave out all tensors with this extent"),
                format!("omit it, or give them: `tilewright list {}` shows the constants", def.name),
            ));
        }
        match (keys.contains(&name), size) {
            (true, Some(size)) => known.push((name, size)),
            (true, None) => {
                return Err(CliError::usage(format!("--size {name} cannot be {text}"), "expected 1 or more"));
            }
            (false, _) => {
                let message = format!("--size {name} is unused: no configuration depends on it");
                return Err(CliError::usage(message, choose::suggest(name, &keys, "configurations depend on")));
            }
        }
    }
    precompiled::check_sizes(def, specialization, known.iter().copied())
        .map_err(|error| CliError::usage(error.message, format!("change --size or --assume: {}", error.help)))?;
    Ok(known)
}

/// The configuration, if one of its constants is not given and has no default; it sets the constants that are not given.
fn configuration(
    known: &[(&str, i64)],
    autotune: Option<&'static Autotune>,
    target: &Target,
    dtypes: &[DType],
    constants: &mut Vec<(&'static str, ConstValue)>,
) -> Result<Option<Config>> {
    let Some(autotune) = autotune.filter(|autotune| choose::needs_configuration(autotune, constants)) else {
        return choose::expect_table(None).map(|()| None);
    };
    // Launches on the CPU have as many as it has threads.
    let programs = matches!(target, Target::Host(_)).then(|| Device::cpu().info().compute_units.into());
    let constant = |name: &str| {
        choose::given(constants, name).or_else(|| programs.filter(|_| name == choose::PROGRAMS).map(ConstValue::Int))
    };
    let size = |name: &str| known.iter().find(|(given, _)| *given == name).map(|(_, size)| *size);
    let (config, source) = choose::configuration_for(autotune, target, dtypes, &constant, &size)?;
    let used = choose::without(&config, constants);
    choose::note_configuration(choose::origin(source), &used);
    constants.extend(used.constants);
    Ok(Some(config))
}

fn parse_target(word: &str) -> Result<Target> {
    match word {
        "host" => Ok(Target::Host(HostCpu::native())),
        other => other.parse::<GpuArch>().map(Target::Nvptx).map_err(|_| {
            CliError::usage(
                format!("there is no target `{other}`"),
                "the targets are sm_80, sm_86, sm_89, sm_90a and host",
            )
        }),
    }
}

fn chosen_outputs(wanted: &[Emit], target: &Target) -> Result<Vec<Emit>> {
    let all = [Emit::Tile, Emit::Layout, Emit::Schedule, Emit::Async, Emit::Llvm, Emit::Ptx, Emit::Asm, Emit::Obj];
    let possible = || all.into_iter().filter(|emit| emit.exists_for(target));
    if let Some(wrong) = wanted.iter().find(|emit| !emit.exists_for(target)) {
        let words: Vec<&str> = possible().map(Emit::name).collect();
        return Err(CliError::usage(
            format!("the target {target} has no {}", wrong.name()),
            format!("--emit can be {}", words.join(", ")),
        ));
    }
    Ok(match (wanted.is_empty(), target) {
        (true, Target::Nvptx(_)) => vec![Emit::Ptx],
        (true, Target::Host(_)) => vec![Emit::Obj],
        (false, _) => possible().filter(|emit| wanted.contains(emit)).collect(),
    })
}

/// Parses `--assume` on top of the default assumption that pointers are aligned to 16 bytes, and of those of `dense`.
///
/// # Errors
/// As [`precompiled::assumptions`].
pub fn assumptions(def: &'static KernelDef, words: &[String]) -> Result<Specialization> {
    let (dense, others): (Vec<&str>, Vec<&str>) = choose::comma_separated(words).partition(|word| *word == DENSE);
    let default = if dense.is_empty() { Specialization::aligned_memory(def) } else { bind::row_major(def) };
    precompiled::assumptions(def, default, others).map_err(|error| {
        let help = match &error.unknown {
            Some(name) => {
                let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
                choose::suggest(name, &passed.map(|p| p.name).collect::<Vec<_>>(), "the arguments are")
            }
            None => error.help,
        };
        CliError::usage(error.message, help)
    })
}

/// The word of `--assume` for [`bind::row_major`].
const DENSE: &str = "dense";

/// Everything that one compilation depends on.
pub struct Request {
    pub def: &'static KernelDef,
    /// The element type of each type parameter.
    pub dtypes: Vec<DType>,
    pub constants: Vec<(&'static str, ConstValue)>,
    pub specialization: Specialization,
    /// Usual values of arguments, with which the kernel's `assume`s must hold.
    pub sizes: Vec<(String, i64)>,
    pub target: Target,
    pub options: CompileOptions,
}

/// Compiles, writes the files and `manifest.json`, and returns their paths.
///
/// # Errors
/// A mistake in the kernel, a feature that the target lacks, or a folder that cannot be written to.
pub fn compile_to(request: &Request, emit: &[Emit], dir: &Path) -> Result<Vec<PathBuf>> {
    let names = emit.iter().map(|kind| format!("{}.{}", request.def.name, kind.extension()));
    for path in names.chain(["manifest.json".to_string()]).map(|name| dir.join(name)).filter(|_| dir.is_dir()) {
        crate::files::check_writable(&path).map_err(|error| CliError::file("write", &path, error))?;
    }
    let compiled = compile(request)?;
    std::fs::create_dir_all(dir).map_err(|error| CliError::file("create the folder", dir, error))?;
    let mut files = Vec::new();
    for &kind in emit {
        let name = format!("{}.{}", request.def.name, kind.extension());
        let path = dir.join(&name);
        if request.options.loops.is_some() && std::fs::read_to_string(&path).ok() == request.options.loops {
            return Err(CliError::usage(
                format!("cannot write {}: it has the schedules that --loops gives", path.display()),
                "choose another folder with -o, or rename the file",
            ));
        }
        write(&path, &compiled.bytes(kind, &request.target)?)?;
        files.push((kind.name(), name));
    }
    let path = dir.join("manifest.json");
    write(&path, manifest(request, &compiled.artifact, &files).as_bytes())?;
    let paths = files.iter().map(|(_, name)| dir.join(name));
    Ok(paths.chain([path]).collect())
}

/// Compiles, or takes the code from the cache, and writes it to `dir` with a manifest `KERNEL.json`. Returns the path
/// of the code. Neither file may be `input`.
///
/// # Errors
/// As [`compile_to`].
pub fn compile_cached_to(request: &Request, dir: &Path, input: Option<&Path>) -> Result<PathBuf> {
    let Request { def, dtypes, constants, specialization, target, options, .. } = request;
    let artifact = tilewright_runtime::kernel::compile(def, dtypes, constants, specialization, target, options)?;
    std::fs::create_dir_all(dir).map_err(|error| CliError::file("create the folder", dir, error))?;
    let (kind, code) = match &artifact.code {
        Code::Ptx(ptx) => (Emit::Ptx, ptx.as_bytes()),
        Code::Object(object) => (Emit::Obj, object.as_slice()),
    };
    let name = format!("{}.{}", def.name, kind.extension());
    let (path, described) = (dir.join(&name), dir.join(format!("{}.json", def.name)));
    crate::files::check_distinct(&[&path, &described], input.as_slice())?;
    write(&path, code)?;
    write(&described, manifest(request, &artifact, &[(kind.name(), name)]).as_bytes())?;
    Ok(path)
}

/// Returns the text of the manifest.
fn manifest(request: &Request, artifact: &Artifact, files: &[(&str, String)]) -> String {
    let Request { def, dtypes, constants, options, .. } = request;
    Document::new(def, dtypes, constants, options, artifact, files).to_json()
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    crate::files::replace(path, |file| file.write_all(bytes)).map_err(|error| CliError::file("write", path, error))
}

/// The code, and its text at each stage.
struct Compiled {
    artifact: Artifact,
    texts: Texts,
}

/// Tile IR as recorded and at the end of each stage, and the LLVM IR.
#[derive(Default)]
struct Texts {
    tile: String,
    layout: String,
    schedule: String,
    asynchronous: String,
    llvm: String,
    notes: Vec<String>,
}

impl Observer for Texts {
    fn after(&mut self, _: &'static str, stage: Stage, func: &Func) {
        match stage {
            Stage::Tile => {}
            Stage::Layout => self.layout = text::print(func),
            Stage::Schedule => self.schedule = text::print(func),
            Stage::Async => self.asynchronous = text::print(func),
        }
    }

    fn llvm_ir(&mut self, text: &str) {
        self.llvm = text.to_string();
    }

    fn note(&mut self, note: &str) {
        self.notes.push(note.to_string());
    }
}

/// Compiles without the cache, writes no file, and records what each pass did; where asked to, as for launches, which
/// check assumptions about ranges.
///
/// # Errors
/// A mistake in the kernel, or a feature that the target lacks.
pub fn compile_traced(request: &Request, for_launches: bool) -> Result<(Artifact, Trace)> {
    let mut func = record(request)?;
    if for_launches {
        assume_ranges::run(&mut func);
    }
    let mut trace = Trace::new(&func);
    let lowered = lower(request, &func, &mut trace);
    print_notes(request, trace.notes());
    let artifact = lowered?;
    Ok((artifact, trace))
}

fn print_notes(request: &Request, notes: &[String]) {
    for note in distinct(notes) {
        terminal::print_stderr(format_args!("note: {note}"));
    }
    // Nothing is known to be contiguous without assumptions.
    let known = |note: &String| note.contains("known to be contiguous");
    if notes.iter().any(known) && request.specialization == Specialization::aligned_memory(request.def) {
        terminal::print_stderr(format_args!(
            "help: if the tensors are row-major, with rows of a multiple of 16 elements, pass `--assume {DENSE}`: the loads may then be prefetched"
        ));
    }
}

/// The notes of a compilation, each once: the compiler repeats a note for each part of a tile that it splits.
pub fn distinct(notes: &[String]) -> impl Iterator<Item = &String> {
    notes.iter().enumerate().filter(|(n, note)| !notes[..*n].contains(note)).map(|(_, note)| note)
}

fn compile(request: &Request) -> Result<Compiled> {
    let func = record(request)?;
    let mut texts = Texts { tile: text::print(&func), ..Texts::default() };
    let lowered = lower(request, &func, &mut texts);
    print_notes(request, &texts.notes);
    let artifact = lowered?;
    Ok(Compiled { artifact, texts })
}

/// Records the kernel's Tile IR, and prints what the kernel prints meanwhile.
///
/// # Errors
/// A mistake in the kernel.
pub fn record(request: &Request) -> Result<Func> {
    let Request { def, dtypes, constants, specialization, .. } = request;
    Ok(tilewright_runtime::kernel::record(def, dtypes, constants, specialization)?)
}

fn lower(request: &Request, func: &Func, observer: &mut dyn Observer) -> Result<Artifact> {
    let footprint = precompiled::footprint(func, &request.sizes)?;
    let artifact = dump::compile(func, &request.target, &request.options, Env::get()?, observer);
    let mut artifact = artifact.map_err(|error| compile_error(func, error))?;
    artifact.manifest.footprint = Some(footprint);
    Ok(artifact)
}

impl Compiled {
    /// Returns the contents of one file.
    fn bytes(&self, kind: Emit, target: &Target) -> Result<Vec<u8>> {
        Ok(match (kind, target, &self.artifact.code) {
            (Emit::Tile, _, _) => self.texts.tile.clone().into_bytes(),
            (Emit::Layout, _, _) => self.texts.layout.clone().into_bytes(),
            (Emit::Schedule, _, _) => self.texts.schedule.clone().into_bytes(),
            (Emit::Async, _, _) => self.texts.asynchronous.clone().into_bytes(),
            (Emit::Llvm, _, _) => self.texts.llvm.clone().into_bytes(),
            (Emit::Asm, Target::Host(cpu), _) => {
                let asm = llvm::asm(&self.texts.llvm, cpu, &Opt::host());
                asm.map_err(|error| CliError::Failure(error.to_string()))?.code.into_bytes()
            }
            (Emit::Ptx, _, Code::Ptx(ptx)) => ptx.clone().into_bytes(),
            (Emit::Obj, _, Code::Object(object)) => object.clone(),
            (Emit::Ptx | Emit::Obj | Emit::Asm, _, _) => {
                unreachable!("internal compiler error: {kind:?} for {target}; please report this")
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_note_is_printed_once() {
        let notes = ["line 5: no TMA", "line 7: no TMA", "line 5: no TMA"].map(String::from);
        assert_eq!(distinct(&notes).collect::<Vec<_>>(), ["line 5: no TMA", "line 7: no TMA"]);
    }

    #[test]
    fn ptx_versions() {
        assert_eq!(ptx_version("8.3"), Ok(83));
        assert_eq!(ptx_version("87"), Ok(87));
        for bad in ["", "x", "8.", "8.33", "7.0", "100.0", "-8.0"] {
            assert!(ptx_version(bad).is_err(), "{bad}");
        }
    }
}
