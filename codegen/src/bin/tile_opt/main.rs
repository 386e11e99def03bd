//! `tile-opt`: reads Tile IR, runs passes, and prints, interprets or reduces the result.

mod interpret;
mod run;

use clap::{Args, Parser};
use run::Steps;
use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::process::ExitCode;
use tilewright_codegen::ir::{Func, Op, Stage};
use tilewright_codegen::pipeline::NUM_CTAS;
use tilewright_codegen::schedule::problem::{self, LoopSchedules, Problem};
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_codegen::{reduce, text, verify};

/// Read a kernel in the text form of Tile IR, run passes over it, and print the result.
#[derive(Parser)]
#[command(
    version,
    after_help = "Example:\n  tile-opt kernel.tile --passes canonicalize,cse --interpret --arg x=random:1024 --arg n=1000"
)]
struct Cli {
    /// File to read; `-` is standard input.
    file: Option<String>,

    /// Comma-separated passes to run, in order; `gpu` stands for all passes of the GPU pipeline.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    passes: Vec<String>,

    /// Verify the function after each pass, not only the input and the result.
    #[arg(long)]
    verify_each: bool,

    /// Print the time that each pass took.
    #[arg(long)]
    time_passes: bool,

    /// Print the scheduling problem of each loop of the resulting function: the cycles of its ops, their dependences, and
    /// what no schedule can beat.
    #[arg(long)]
    problems: bool,

    /// Do not print the resulting function.
    #[arg(long)]
    quiet: bool,

    #[command(flatten)]
    target: TargetArgs,

    #[command(flatten)]
    interpret: interpret::InterpretArgs,

    /// Print the smallest function found on which the passes still fail: by a panic, by invalid IR or, with
    /// --interpret, by different results.
    #[arg(long, requires = "passes")]
    reduce: bool,

    /// List the ops of Tile IR.
    #[arg(long)]
    ops: bool,

    /// List the passes.
    #[arg(long)]
    list_passes: bool,
}

/// Parameters of the passes of the GPU pipeline.
#[derive(Args)]
struct TargetArgs {
    /// GPU architecture: sm_80 or sm_90a.
    #[arg(long, default_value = "sm_90a")]
    target: GpuArch,

    /// Warps per block: a power of two from 1 to 32.
    #[arg(long, default_value_t = 4, value_parser = num_warps)]
    num_warps: u32,

    /// CTAs of the cluster that shares each program: 1, 2, 4 or 8.
    #[arg(long, default_value_t = 1, value_parser = num_ctas)]
    num_ctas: u32,

    /// Number of stages of software pipelines.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    num_stages: u32,

    /// How loops are scheduled: `tma`, `warp_specialize`, `overlap`, `pingpong`, `wgmma_f32` or `tma_stores`,
    /// each `true` or `false`, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = choice, value_name = "NAME=BOOL")]
    schedule: Vec<(String, bool)>,

    /// Schedules of loops that `schedule_loops` takes in place of its own, as `tilewright solve` prints them.
    #[arg(long, value_name = "SCHEDULES")]
    loops: Option<LoopSchedules>,
}

impl TargetArgs {
    fn options(&self) -> CompileOptions {
        let mut schedule = Schedule::default();
        for (name, value) in &self.schedule {
            *schedule.choice(name).expect("parsed by `choice`") = Some(*value);
        }
        let (num_warps, num_ctas, num_stages, loops) =
            (self.num_warps, self.num_ctas, self.num_stages, self.loops.as_ref().map(ToString::to_string));
        CompileOptions { num_warps, num_ctas, num_stages, loops, schedule, ..CompileOptions::default() }
    }
}

fn num_ctas(text: &str) -> Result<u32, String> {
    let ctas: u32 = text.parse().map_err(|_| format!("expected a number, found `{text}`"))?;
    NUM_CTAS.contains(&ctas).then_some(ctas).ok_or_else(|| "expected 1, 2, 4 or 8".into())
}

fn num_warps(text: &str) -> Result<u32, String> {
    let warps = text.parse().ok().filter(|n: &u32| n.is_power_of_two() && *n <= 32);
    warps.ok_or_else(|| "expected a power of two from 1 to 32".into())
}

/// Parses `name=true` or `name=false` for the name of a schedule option.
fn choice(text: &str) -> Result<(String, bool), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=true or NAME=false")?;
    let mut schedule = Schedule::default();
    if schedule.choice(name).is_none() {
        let known: Vec<&str> = schedule.named().iter().map(|(name, _)| *name).collect();
        return Err(format!("unknown schedule option `{name}`: expected one of {}", known.join(", ")));
    }
    Ok((name.into(), value.parse().map_err(|_| format!("expected true or false, found `{value}`"))?))
}

fn main() -> ExitCode {
    match tile_opt(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            say(format_args!("tile-opt: {message}"));
            ExitCode::FAILURE
        }
    }
}

fn tile_opt(cli: &Cli) -> Result<(), String> {
    if cli.ops {
        return show(format_args!("{}", list_of_ops()));
    }
    if cli.list_passes {
        for (name, summary) in run::names() {
            show(format_args!("{name:<16} {summary}\n"))?;
        }
        return Ok(());
    }
    let name = cli.file.as_deref().ok_or("expected a file to read (or `-`); `tile-opt --help` lists the options")?;
    let func =
        text::parse_file(name, &read(name)?).map_err(|e| format!("{name}:{}:{}: {}", e.line, e.column, e.message))?;
    verify_func(&func).map_err(|e| format!("{name} is not a valid function:\n{e}"))?;
    let steps = Steps::new(&cli.passes, cli.target.target, &cli.target.options())?;
    if cli.reduce {
        return reduce_failure(cli, &func, &steps);
    }

    let mut out = func.clone();
    for (pass, time) in steps.run(&mut out, cli.verify_each)? {
        if cli.time_passes {
            say(format_args!("{pass:<16} {:>9.3} ms", time.as_secs_f64() * 1e3));
        }
    }
    verify_func(&out).map_err(|e| format!("the passes leave a function that is not valid:\n{e}"))?;
    if !cli.quiet {
        show(format_args!("{}", text::print(&out)))?;
    }
    if cli.problems {
        run::expect_stage("--problems", &out, &[Stage::Layout, Stage::Schedule, Stage::Async])?;
        for id in problem::loops(&out) {
            match Problem::of(&out, id, cli.target.target, &cli.target.options()) {
                Ok(problem) => show(format_args!("{problem}"))?,
                Err(reason) => show(format_args!("{reason}\n"))?,
            }
        }
    }
    if cli.interpret.interpret {
        let after = cli.interpret.run(&out)?;
        show(format_args!("{after}"))?;
        if !cli.passes.is_empty() {
            after.same_as(&cli.interpret.run(&func)?).map_err(|e| format!("the passes change the results: {e}"))?;
        }
    }
    Ok(())
}

/// Writes to standard output. A reader that stops reading is no error.
fn show(text: std::fmt::Arguments) -> Result<(), String> {
    match std::io::stdout().lock().write_fmt(text) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(format!("standard output: {e}")),
        _ => Ok(()),
    }
}

/// Writes a line to standard error, if that is possible.
fn say(line: std::fmt::Arguments) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The text of a file, up to the `// expect:` line of a text test.
fn read(name: &str) -> Result<String, String> {
    let mut text = String::new();
    match name {
        "-" => std::io::stdin().read_to_string(&mut text).map_err(|e| format!("standard input: {e}"))?,
        _ => {
            let metadata = std::fs::metadata(name).map_err(|e| format!("{name}: {e}"))?;
            if metadata.file_type().is_char_device() || metadata.file_type().is_block_device() {
                return Err(format!("{name} is a device: expected a file, or `-` for standard input"));
            }
            std::fs::File::open(name)
                .and_then(|mut f| f.read_to_string(&mut text))
                .map_err(|e| format!("{name}: {e}"))?
        }
    };
    let end = text.find("\n// expect:").unwrap_or(text.len());
    text.truncate(end);
    Ok(text)
}

/// Verifies a function. The error has a line per violated rule.
fn verify_func(func: &Func) -> Result<(), String> {
    verify::verify(func, verify::stage_of(func))
        .map_err(|errors| errors.iter().map(|e| format!("  {e}")).collect::<Vec<_>>().join("\n"))
}

fn reduce_failure(cli: &Cli, func: &Func, steps: &Steps) -> Result<(), String> {
    let failure = |f: &Func| -> Option<String> {
        let mut out = f.clone();
        if let Err(e) = run::without_panic_messages(|| steps.run(&mut out, true)) {
            return Some(e);
        }
        // A failure of the interpreter on the input says nothing about the passes.
        let before = cli.interpret.interpret.then(|| cli.interpret.run(f).ok()).flatten()?;
        match cli.interpret.run(&out) {
            Ok(after) => after.same_as(&before).err(),
            Err(e) => Some(e),
        }
    };
    let message = failure(func).ok_or("the passes do not fail on this function, so there is nothing to reduce")?;
    say(format_args!("reducing a function of {} ops that fails: {message}", func.walk().len()));
    let small = reduce::reduce(func, &mut |f| failure(f).is_some());
    say(format_args!("{} ops remain and fail: {}", small.walk().len(), failure(&small).unwrap_or_default()));
    show(format_args!("{}", text::print(&small)))
}

fn list_of_ops() -> String {
    let stage = |s: Stage| match s {
        Stage::Tile => "tile",
        Stage::Layout => "layout",
        Stage::Schedule => "schedule",
        Stage::Async => "async",
    };
    let mut text = format!(
        "Elementwise functions of one operand: {}\nElementwise functions of two operands: {}\nComparisons: {}\n",
        names(tilewright_codegen::ir::UnaryOp::ALL.iter().map(|o| o.name())),
        names(tilewright_codegen::ir::BinaryOp::ALL.iter().map(|o| o.name())),
        names(tilewright_codegen::ir::CmpOp::ALL.iter().map(|o| o.name()))
    );
    for info in Op::TABLE {
        let attributes =
            if info.attributes.is_empty() { String::new() } else { format!(" {{{}}}", info.attributes.join(", ")) };
        text += &format!("\n{}{attributes}  (from stage {})\n", info.mnemonic, stage(info.stage));
        info.doc.lines().for_each(|line| text += &format!("   {line}\n"));
    }
    text
}

fn names<'a>(list: impl Iterator<Item = &'a str>) -> String {
    list.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
