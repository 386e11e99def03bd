//! Checks a range of seeds, one after the other. For each, prints a line `start SEED`, then `done SEED COUNTS` or `fail
//! SEED WHAT`.

use super::Cli;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use tilewright_codegen::reduce::reduce;
use tilewright_codegen::target::{GpuArch, HostCpu};
use tilewright_codegen::testgen::check::{Checks, Counts, Failure, check, check_function};
use tilewright_codegen::testgen::{Case, case};
use tilewright_codegen::text::print;

/// Returns whether all seeds passed.
pub fn run(cli: &Cli) -> Result<bool, String> {
    let archs = |names: &[String]| -> Result<Vec<GpuArch>, String> {
        names.iter().filter(|t| *t != "host").map(|t| t.parse()).collect()
    };
    let hosts = if cli.targets.iter().any(|t| t == "host") { vec![HostCpu::native()] } else { Vec::new() };
    let (simulated, compiled) = (archs(&cli.targets)?, archs(&cli.ptx)?);
    let ptxas = cli.ptxas.clone().or_else(|| std::env::var_os("TILEWRIGHT_PTXAS").map(Into::into));
    let assemble = |ptx: &str, arch: GpuArch| ptxas.as_ref().map_or(Ok(()), |program| assemble(program, ptx, arch));
    let checks = Checks {
        analyses: !cli.no_analysis_checks,
        each_pass: cli.each_pass,
        hosts: &hosts,
        simulated: &simulated,
        compiled: &compiled,
        assemble: ptxas.is_some().then_some(&assemble),
    };
    // Panics are results: the message becomes part of the failure, and the location is printed to standard error.
    std::panic::set_hook(Box::new(|panic| match panic.location() {
        Some(place) => eprintln!("panic at {place}"),
        None => eprintln!("panic"),
    }));
    let mut passed = true;
    for seed in cli.seeds.clone() {
        print_line(&format!("start {seed}"));
        let case = case(seed);
        match check(&case, &checks) {
            Ok(Counts { host, simulated, compiled, assembled, refused, .. }) => {
                print_line(&format!("done {seed} {host} {simulated} {compiled} {assembled} {refused}"));
            }
            Err(failure) => {
                passed = false;
                print_line(&format!("fail {seed} {}", failure.to_string().replace('\n', "\\n")));
                if cli.reduce {
                    print_line(&reduced(&case, &checks, &failure));
                }
            }
        }
    }
    Ok(passed)
}

fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    // If the supervisor is gone, the output is not read.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// The smallest program found that fails the same check with the same message (numbers aside).
fn reduced(case: &Case, checks: &Checks, failure: &Failure) -> String {
    let kind = |f: &Failure| {
        let words = f.message.split_whitespace().filter(|w| !w.contains(|c: char| c.is_ascii_digit()));
        (f.check.clone(), words.take(6).collect::<Vec<_>>().join(" "))
    };
    let wanted = kind(failure);
    let func = reduce(&case.program.func, &mut |func| {
        check_function(case, func, checks).is_err_and(|found| kind(&found) == wanted)
    });
    let message = check_function(case, &func, checks).err().map_or_else(String::new, |f| f.to_string());
    format!("{}// grid {:?}, {:?}\n// {message}", print(&func), case.program.grid, case.options)
}

fn assemble(program: &Path, ptx: &str, arch: GpuArch) -> Result<(), String> {
    let folder = std::env::temp_dir();
    let file = folder.join(format!("tile-fuzz-{}.ptx", std::process::id()));
    std::fs::write(&file, ptx).map_err(|e| format!("{}: {e}", file.display()))?;
    let output = Command::new(program)
        .args(["-arch", arch.name(), "-o", "/dev/null"])
        .arg(&file)
        .output()
        .map_err(|e| format!("{}: {e}", program.display()));
    let _ = std::fs::remove_file(&file);
    let output = output?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ptxas: {text}")) }
}
