//! `tilewright report`: runs several measurements and writes one HTML page.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};

use super::ranks::RankOptions;
use super::step::{StepOptions, Work};
use super::{CliError, Result, memory, numerics, profile};
use crate::files;
use crate::report::{Outputs, Part, Report, to_html_page};

#[derive(Args)]
pub struct Arguments {
    /// Measurements; all of them if none is named here and neither --run nor --include is given
    #[arg(value_enum)]
    sections: Vec<Section>,
    /// HTML file to write
    #[arg(long, value_name = "FILE", default_value = "tilewright-report.html")]
    page: PathBuf,
    /// Also run another command of this program, in quotes: --run "bench norm --rows 500"; may be repeated
    #[arg(long, value_name = "COMMAND")]
    run: Vec<String>,
    /// Also include JSON files that other commands wrote (--json)
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    include: Vec<PathBuf>,
    /// Context lengths (tokens per sequence) of the memory measurement, separated by commas; the profile uses the first
    #[arg(long, value_delimiter = ',', default_value = "64,128,256", value_parser = clap::value_parser!(u32).range(1..))]
    context: Vec<u32>,
    /// Number of profiled steps
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    #[command(flatten)]
    step: StepOptions,
    /// Commit that this program was built from. Default: the commit of the repository that contains the program
    #[arg(long, value_name = "ID")]
    commit: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Section {
    /// Experiments on numerical precision
    Numerics,
    /// Time of a training step
    Profile,
    /// Time of a training step with naive attention, which shows softmax and matmuls separately
    NaiveProfile,
    /// Memory of a training step
    Memory,
}

impl Section {
    const ALL: [Section; 4] = [Section::Numerics, Section::Profile, Section::NaiveProfile, Section::Memory];
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let cannot_write = |error| CliError::file("write", &arguments.page, error);
    let included: Vec<&Path> = arguments.include.iter().map(PathBuf::as_path).collect();
    files::check_distinct(&[&arguments.page], &included)?;
    files::check_writable(&arguments.page).map_err(cannot_write)?;
    let included = arguments.include.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    let all = arguments.sections.is_empty() && arguments.run.is_empty() && arguments.include.is_empty();
    let chosen = Section::ALL.into_iter().filter(|section| all || arguments.sections.contains(section));
    let mut reports = Vec::new();
    for section in chosen {
        writeln!(out, "measuring: {}", word(section))?;
        out.flush()?;
        reports.push(measure(section, arguments)?);
    }
    for command in &arguments.run {
        writeln!(out, "running: tilewright {command}")?;
        out.flush()?;
        reports.push(run_command(command)?);
    }
    reports.extend(included);
    let outputs = Outputs { commit: arguments.commit.clone(), ..Outputs::default() };
    // The header shows the machine of this run; included files have theirs in a line of text.
    let here = outputs.with_machine(Report::new("machine", "This machine"));
    if let Some(first) = reports.first_mut() {
        first.machine = here.machine;
    }
    let page = to_html_page("Tilewright: measurements", &reports);
    files::replace(&arguments.page, |file| file.write_all(page.as_bytes())).map_err(cannot_write)?;
    writeln!(out, "wrote {}", arguments.page.display())?;
    Ok(())
}

fn word(section: Section) -> String {
    section.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
}

fn measure(section: Section, arguments: &Arguments) -> Result<Report> {
    let step = |naive: bool| {
        let mut step = arguments.step.clone();
        if naive {
            step.model.attention = Some(crate::model::Attention::Naive);
            step.model.fusion = None;
        }
        step
    };
    let first = arguments.context.first().copied().unwrap_or(128);
    let profile = |naive: bool, name: &str| -> Result<Report> {
        let arguments = profile::Arguments {
            work: Work::TrainStep,
            context: first,
            warmup: 2,
            steps: arguments.steps,
            top: 8,
            trace: None,
            flame_graph: None,
            nvtx: false,
            how: RankOptions::default(),
            ranks: None,
            backend: None,
            step: step(naive),
            outputs: Outputs::default(),
        };
        let (mut report, _) = profile::profile(&arguments)?;
        report.name = name.to_string();
        Ok(report)
    };
    match section {
        Section::Numerics => numerics::report(&[], numerics::ADDEND, numerics::STEPS, None),
        Section::Profile => profile(false, "profile"),
        Section::NaiveProfile => profile(true, "profile-naive"),
        Section::Memory => {
            let arguments = memory::Arguments {
                context: arguments.context.clone(),
                work: vec![Work::Forward, Work::TrainStep],
                min_bytes: 1024,
                top: 10,
                snapshot: None,
                step: step(false),
                outputs: Outputs::default(),
            };
            Ok(memory::memory(&arguments)?.0)
        }
    }
}

/// Runs this program with the given arguments, and reads the JSON report that it writes.
fn run_command(words: &str) -> Result<Report> {
    let fail = |reason: String| CliError::Failure(format!("`tilewright {words}` cannot be included: {reason}"));
    let folder = files::temporary_folder().map_err(|error| fail(error.to_string()))?;
    let json = folder.path().join("results.json");
    // The user does not know this temporary file: hide its name.
    let fail = |reason: String| fail(reason.replace(&*json.to_string_lossy(), "its results"));
    let program =
        std::env::current_exe().map_err(|error| fail(format!("the path of this program is unknown: {error}")))?;
    let command = Command::new(program).args(words.split_whitespace()).arg("--json").arg(&json).output();
    let output = command.map_err(|error| fail(error.to_string()))?;
    if !output.status.success() {
        return Err(fail(format!(
            "it exited with {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        )));
    }
    read(&json).map(without_machine_line).map_err(|error| match error {
        CliError::Failure(reason) => fail(reason),
        other => other,
    })
}

/// Removes the line about the machine, which the header of the page shows already.
fn without_machine_line(mut report: Report) -> Report {
    if matches!(report.parts.first(), Some(Part::Text(text)) if text.starts_with(MEASURED_ON)) {
        report.parts.remove(0);
    }
    report
}

const MEASURED_ON: &str = "Measured on ";

/// Reads a report that another command wrote as JSON.
fn read(path: &Path) -> Result<Report> {
    let bytes = crate::files::read(path).map_err(|error| CliError::file("read", path, error))?;
    let value = serde_json::from_slice(&bytes).map_err(|error| CliError::file("read", path, error))?;
    let mut report = Report::from_json(&value).map_err(|reason| {
        CliError::Failure(format!(
            "{} is not a report in JSON: {reason}\n  help: use a file that bench, memory, numerics or profile wrote \
             with --json",
            path.display()
        ))
    })?;
    if let Some(machine) = report.machine.take() {
        report.parts.insert(0, Part::Text(format!("{MEASURED_ON}{}", machine.line())));
    }
    Ok(report)
}
