//! Torture: trainings that are hit at a moment by a fault, both drawn from a seed, and go on to their end, which has to be that of a
//! training that nothing hit.
//!
//! `make torture` makes 200 of them, `cargo test` eleven, one for each fault. `-- --seed S --runs N --first I` makes others; a run depends on the seed and its number
//! alone, as far as its moment does: parts of a step are met by watching, within some microseconds.
//!
//! This program is also `tilewright` itself, with a look at what a rank does ([`inject`]).

mod inject;
mod job;
mod plan;
mod runner;
mod state;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use plan::{Fault, Phase, PlannedRun};

/// In so many runs every phase and every fault comes.
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
            // The list of tests, of which there are none; options of tests.
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

/// The number of runs that failed.
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
                println!("{drawn}: FAILED: {error}\n  again: make torture SEED={seed} FIRST={number} RUNS=1");
            }
        }
    }
    let counts = |name: &str, counts: Vec<(&str, u64)>| {
        let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
        println!("{name}: {}", counts.join(", "));
    };
    counts("hit in", phases.iter().map(|(phase, count)| (phase.name(), *count)).collect());
    counts("hit by", faults.iter().map(|(fault, count)| (fault.name(), *count)).collect());
    println!("{}", torture.summary());
    // So many runs meet all there is.
    let missing = |name: &str, is_missing: bool| {
        if total >= ALL && is_missing {
            println!("torture: nothing was hit in or by: {name}");
        }
        usize::from(total >= ALL && is_missing)
    };
    let phases: usize = Phase::ALL.iter().map(|phase| missing(phase.name(), !phases.contains_key(phase))).sum();
    let faults: usize = Fault::ALL.iter().map(|fault| missing(fault.name(), !faults.contains_key(fault))).sum();
    failures + phases + faults
}
