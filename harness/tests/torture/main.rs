//! Fault injection: trainings that get a fault at a random point, drawn from a seed, then resume and run to their end.
//! The result has to equal that of an undisturbed training.
//!
//! `make torture` runs 200 of them, `cargo test` eleven, one for each fault. `-- --seed S --runs N --first I` runs
//! others. A run depends only on the seed and its number, except for its timing: phases of a step are found by polling,
//! within some microseconds.
//!
//! This program also acts as `tilewright` itself, with hooks in a rank ([`inject`]).

mod inject;
mod job;
mod plan;
mod runner;
mod state;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use plan::{Fault, Phase, PlannedRun};

/// Number of runs in which every phase and every fault occurs.
const ALL: u64 = 200;

fn main() -> ExitCode {
    if std::env::var_os(job::MARK).is_some() {
        inject::start();
        return tilewright_harness::cli::main();
    }
    let (mut seed, mut runs, mut first) = (1, 11, 0);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let number = match word.as_str() {
            "--seed" => &mut seed,
            "--runs" => &mut runs,
            "--first" => &mut first,
            // `--list` of test harnesses (there are no tests), and other options of tests.
            "--list" => return ExitCode::SUCCESS,
            word if word.starts_with('-') => continue,
            // The name of a test.
            filter if "torture".contains(filter) => continue,
            _ => return ExitCode::SUCCESS,
        };
        *number = words.next().and_then(|word| word.parse().ok()).expect("a number");
    }
    match torture(seed, first..first + runs) {
        0 => ExitCode::SUCCESS,
        failures => {
            println!("torture: {failures} of {runs} runs failed");
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of failed runs.
fn torture(seed: u64, runs: std::ops::Range<u64>) -> usize {
    let total = runs.end - runs.start;
    let mut torture = runner::Runner::new();
    let (mut phases, mut faults) = (BTreeMap::<Phase, u64>::new(), BTreeMap::<Fault, u64>::new());
    let mut failures = 0;
    for number in runs {
        let drawn = PlannedRun::new(seed, number);
        let began = Instant::now();
        let outcome = torture.run(&drawn);
        *phases.entry(drawn.phase).or_default() += 1;
        *faults.entry(drawn.fault).or_default() += 1;
        match outcome {
            Ok(how) => println!("{drawn}: {how} ({:.1} s)", began.elapsed().as_secs_f64()),
            Err(error) => {
                failures += 1;
                println!("{drawn}: FAILED: {error}\n  reproduce: make torture SEED={seed} FIRST={number} RUNS=1");
            }
        }
    }
    let counts = |name: &str, counts: Vec<(&str, u64)>| {
        let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
        println!("{name}: {}", counts.join(", "));
    };
    counts("faults by phase", phases.iter().map(|(phase, count)| (phase.name(), *count)).collect());
    counts("faults by kind", faults.iter().map(|(fault, count)| (fault.name(), *count)).collect());
    println!("{}", torture.summary());
    // `ALL` runs cover all phases and faults.
    let missing = |name: &str, is_missing: bool| {
        if total >= ALL && is_missing {
            println!("torture: no fault in this phase or of this kind: {name}");
        }
        usize::from(total >= ALL && is_missing)
    };
    let phases: usize = Phase::ALL.iter().map(|phase| missing(phase.name(), !phases.contains_key(phase))).sum();
    let faults: usize = Fault::ALL.iter().map(|fault| missing(fault.name(), !faults.contains_key(fault))).sum();
    failures + phases + faults
}
