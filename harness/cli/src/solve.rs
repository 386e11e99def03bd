//! `tilewright solve`: the best schedules of a kernel's loops, by a constraint solver, and the bounds that it proves.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use tilewright_codegen::ir::{Func, Stage};
use tilewright_codegen::lang::kernel::ConstValue;
use tilewright_codegen::pipeline::{self, Observer};
use tilewright_codegen::schedule::problem::{LoopSchedule, LoopSchedules, Problem, loops, register_pressure};
use tilewright_codegen::target::{CompileOptions, GpuArch, Target};
use tilewright_runtime::autotune::{Autotune, Config, Entry, Table as TuningTable};
use tilewright_runtime::solver::{Found, Limits, solve};

use crate::compile::{self, Emit, Request};
use crate::value_parsers::seconds;
use crate::{CliError, Kernels, Result};

#[derive(Args)]
// Its group would have the name of that of the arguments of `compile`.
#[group(skip)]
pub struct Arguments {
    #[command(flatten)]
    compile: compile::Arguments,
    /// Time budget of each loop, in seconds, at most 86400
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    budget: f64,
    /// Add the schedules to the entries of this tuning table that have the same kernel, types, constants and options
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
}

/// Solves the loops of a kernel, prints what was found, and compiles the kernel with the schedules.
///
/// # Errors
/// A target that is not a GPU, a kernel without loops that can be scheduled, and what `compile` reports.
pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let (mut request, mut emit) = compile::request(&arguments.compile, kernels)?;
    let Target::Nvptx(arch) = request.target else {
        return Err(CliError::usage(
            "only loops on a GPU have a schedule",
            "give --target sm_80, sm_86, sm_89 or sm_90a",
        ));
    };
    if !arguments.compile.has_outputs() {
        emit = vec![Emit::Schedule];
    }
    let table = arguments.export.as_deref().map(|path| read_table(path, &request, kernels.autotune(request.def)));
    let table = table.transpose()?;
    request.options.loops = None;
    let func = scheduled(&request, arch)?;
    let mut schedules = Vec::new();
    for (number, id) in loops(&func).into_iter().enumerate() {
        let problem = match Problem::of(&func, id, arch, &request.options) {
            Ok(problem) if problem.nodes.is_empty() => continue,
            Ok(problem) => problem,
            Err(reason) => {
                writeln!(out, "loop {number}: {reason}")?;
                continue;
            }
        };
        let limits = Limits { time: Duration::from_secs_f64(arguments.budget) };
        let pressure = |behind: &[bool]| register_pressure(&func, &problem, behind);
        match solve(&problem, &pressure, limits) {
            Ok(found) => {
                writeln!(out, "{}", describe(number, &problem, &found))?;
                schedules.push(LoopSchedule { number, bound: found.bound, solution: found.solution });
            }
            Err(reason) => writeln!(out, "loop {number} at {}: {reason}", problem.loc)?,
        }
    }
    if schedules.is_empty() {
        return Err(CliError::Failure(format!(
            "kernel `{}` has no loop for which a schedule was found",
            request.def.name
        )));
    }
    let text = LoopSchedules(schedules).to_string();
    writeln!(out, "loops={text}")?;
    request.options.loops = Some(text);
    if let (Some(path), Some((table, autotune))) = (&arguments.export, table) {
        let count = export(path, table, &request, autotune)?;
        writeln!(out, "wrote {} ({count} entries)", path.display())?;
    }
    for path in compile::compile_to(&request, &emit, arguments.compile.out())? {
        writeln!(out, "{}", path.display())?;
    }
    Ok(())
}

/// The result of a loop in words.
fn describe(number: usize, problem: &Problem, found: &Found) -> String {
    let Found { solution, bound, bounds, before, time } = found;
    let proof = match (found.is_optimal(), bounds.interval() == *bound) {
        (true, true) => format!("optimal: {} allows no shorter one", bounds.cause()),
        (true, false) => "optimal: the solver proved that there is no shorter one".to_string(),
        (false, _) => format!("none is shorter than {bound}"),
    };
    let before = before.map_or("unknown".to_string(), |cycles| cycles.to_string());
    format!(
        "loop {number} at {}: interval {} cycles ({proof}); the compiler's own schedule: {before}; {:.2} s",
        problem.loc,
        solution.interval,
        time.as_secs_f64()
    )
}

/// Keeps the function that the scheduler leaves.
#[derive(Default)]
struct Scheduled(Option<Func>);

impl Observer for Scheduled {
    fn after(&mut self, _: &'static str, stage: Stage, func: &Func) {
        if stage == Stage::Schedule {
            self.0 = Some(func.clone());
        }
    }

    fn llvm_ir(&mut self, _: &str) {}
}

/// The kernel with the schedule of the compiler.
fn scheduled(request: &Request, arch: GpuArch) -> Result<Func> {
    let func = compile::record(request)?;
    pipeline::check(&func, &request.options)
        .map_err(|error| tilewright_runtime::kernel::compile_error(&func, error.into()))?;
    let mut kept = Scheduled::default();
    pipeline::gpu_ir(&func, arch, &request.options, &mut kept);
    kept.0.ok_or_else(|| CliError::Failure("internal error: no pass schedules loops; please report this".to_string()))
}

/// Reads the tuning table of `--export`, before anything is solved.
///
/// # Errors
/// A file that is not a tuning table, or has no entry with these types, constants and options.
fn read_table(
    path: &Path,
    request: &Request,
    autotune: Option<&'static Autotune>,
) -> Result<(TuningTable, &'static Autotune)> {
    let text = crate::files::read_to_string(path).map_err(|error| CliError::file("read", path, error))?;
    let table = TuningTable::parse(&text).map_err(|why| CliError::file("add to", path, why))?;
    let name = request.def.name;
    let autotune = autotune.ok_or_else(|| CliError::Failure(format!("kernel `{name}` has no configurations")))?;
    let table = table.renamed(request.def);
    if !table.entries.iter().any(|entry| fitting(entry, request, autotune).is_some()) {
        let message = format!("it has no entry of `{name}` with these types, constants and options");
        return Err(CliError::file("add to", path, message));
    }
    Ok((table, autotune))
}

/// The configuration of an entry, if it is that of a compilation, whatever its schedules.
fn fitting(entry: &Entry, request: &Request, autotune: &Autotune) -> Option<Config> {
    let mut config = autotune.parse_config(&entry.config).ok().filter(|_| entry.kernel == request.def.name)?;
    config.loops = None;
    let of = |options: &CompileOptions| {
        (options.num_warps, options.num_ctas, options.num_stages, options.max_registers, options.schedule)
    };
    let has = |(name, value): &(&'static str, ConstValue)| {
        let given = request.constants.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        given.or_else(|| request.def.default_of(name)).as_ref() == Some(value)
    };
    let fits = of(&config.options()) == of(&request.options)
        && config.constants.iter().all(has)
        && has_key(request, &entry.key);
    fits.then_some(config)
}

/// Adds the schedules to the entries of a table for this kernel, types, constants and options. Returns how many.
///
/// # Errors
/// A file that cannot be written.
fn export(path: &Path, mut table: TuningTable, request: &Request, autotune: &Autotune) -> Result<usize> {
    let mut count = 0;
    for entry in &mut table.entries {
        if let Some(mut config) = fitting(entry, request, autotune) {
            config.loops.clone_from(&request.options.loops);
            entry.config = config.to_string();
            count += 1;
        }
    }
    crate::files::replace(path, |file| file.write_all(table.text().as_bytes()))
        .map_err(|error| CliError::file("write", path, error))?;
    Ok(count)
}

/// Whether a key of a table is for the types and constants of a compilation; sizes can be any.
fn has_key(request: &Request, key: &str) -> bool {
    key.split(',').filter_map(|part| part.split_once('=')).filter(|(name, _)| !name.ends_with('<')).all(
        |(name, value)| {
            let types = request.def.generics.iter().zip(&request.dtypes);
            let is_type = types.into_iter().any(|(generic, dtype)| generic.name == name && dtype.to_string() == value);
            let constant = request.constants.iter().find(|(known, _)| *known == name);
            is_type || constant.is_none_or(|(_, known)| known.to_string() == value) && !is_other_type(request, name)
        },
    )
}

/// Whether a name is that of a type parameter.
fn is_other_type(request: &Request, name: &str) -> bool {
    request.def.generics.iter().any(|generic| generic.name == name)
}
