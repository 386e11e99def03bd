//! `tilewright solve`: the best schedules of a kernel's loops, by a constraint solver, and the bounds that it proves.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::lang::kernel::{GenericDef, ParamDef, ParamKind};
use tilewright_codegen::pipeline;
use tilewright_codegen::schedule::problem::{LoopSchedule, LoopSchedules, Problem, loops, register_pressure};
use tilewright_codegen::target::{CompileOptions, GpuArch, Target};
use tilewright_runtime::autotune::{Autotune, Config, Entry, Table as TuningTable};
use tilewright_runtime::solver::{Found, Limits, solve};

use crate::compile::{self, Emit, Request};
use crate::value_parsers::seconds;
use crate::{CliError, Kernels, Result, bind, choose};

#[derive(Args)]
// Its group would have the name of that of the arguments of `compile`.
#[group(skip)]
pub struct Arguments {
    #[command(flatten)]
    compile: compile::Arguments,
    /// Time budget of each loop, in seconds, at most 86400
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    budget: f64,
    /// Add the schedules to the entries of this tuning table that have the same kernel, types, constants and options; with
    /// --assume dense
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
    let table = arguments.export.as_deref().map(|path| read_table(path, &request, arch, kernels.autotune(request.def)));
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

/// The kernel with the schedule of the compiler.
fn scheduled(request: &Request, arch: GpuArch) -> Result<Func> {
    let func = compile::record(request)?;
    pipeline::check(&func, &request.options)
        .map_err(|error| tilewright_runtime::kernel::compile_error(&func, error.into()))?;
    Ok(pipeline::scheduled(&func, arch, &request.options))
}

/// Reads the tuning table of `--export`, before anything is solved.
///
/// # Errors
/// A file that is not a tuning table, is for other GPUs, or has no entry with these types, constants and options;
/// assumptions other than those of launches of contiguous tensors.
fn read_table(
    path: &Path,
    request: &Request,
    arch: GpuArch,
    autotune: Option<&'static Autotune>,
) -> Result<(TuningTable, &'static Autotune)> {
    let text = crate::files::read_to_string(path).map_err(|error| CliError::file("read", path, error))?;
    let table = TuningTable::parse(&text).map_err(|why| CliError::file("add to", path, why))?;
    let name = request.def.name;
    if request.specialization != bind::row_major(request.def) {
        return Err(CliError::usage(
            "--export needs the schedules of launches of contiguous tensors",
            "give --assume dense, and no other assumptions",
        ));
    }
    let (of_table, wanted) = (table.device.compute_capability.as_deref(), arch.compute_capability());
    if of_table != Some(wanted) {
        let device = of_table.map_or("a CPU".to_string(), |found| format!("compute capability {found}"));
        let message = format!("it is for {device}, and the schedules are for compute capability {wanted}");
        return Err(CliError::file("add to", path, message));
    }
    let autotune = autotune.ok_or_else(|| CliError::Failure(format!("kernel `{name}` has no configurations")))?;
    let table = table.renamed(request.def);
    if !table.entries.iter().any(|entry| fitting(entry, request, autotune).is_some()) {
        let message = format!("it has no entry of `{name}` with these types, constants and options");
        return Err(CliError::file("add to", path, message));
    }
    Ok((table, autotune))
}

/// The configuration of an entry, if it is that of a compilation, whatever its schedules and the sizes in its key.
/// Of constants that neither the key nor the configuration has, those with a default must have it; heuristics, and those
/// that the host derives from the others, can have any value.
fn fitting(entry: &Entry, request: &Request, autotune: &Autotune) -> Option<Config> {
    let Request { def, dtypes, constants, options, .. } = request;
    let mut config = autotune.parse_config(&entry.config).ok().filter(|_| entry.kernel == def.name)?;
    config.loops = None;
    let of = |options: &CompileOptions| {
        (options.num_warps, options.num_ctas, options.num_stages, options.max_registers, options.schedule)
    };
    let in_key = |name: &str| entry.key.split(',').filter_map(|part| part.split_once('=')).find(|(n, _)| *n == name);
    let of_type = |(generic, dtype): (&GenericDef, &DType)| {
        in_key(generic.name).is_some_and(|(_, value)| value == dtype.to_string())
    };
    let of_constant = |param: &ParamDef| {
        let given = choose::given(constants, param.name);
        let (default, tuned) = (def.default_of(param.name), config.constant(param.name));
        match (given.or(default.clone()), tuned, in_key(param.name)) {
            (None, _, _) => !matches!(param.kind, ParamKind::Constexpr { .. }),
            (Some(value), Some(tuned), _) => value == *tuned,
            (Some(value), None, Some((_, text))) => value.to_string() == text,
            (Some(value), None, None) => param.heuristic.is_some() || default.is_none_or(|default| default == value),
        }
    };
    let fits = of(&config.options()) == of(options)
        && def.generics.iter().zip(dtypes).all(of_type)
        && def.params.iter().all(of_constant);
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
