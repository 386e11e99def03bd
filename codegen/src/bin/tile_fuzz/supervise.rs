//! Distributes seeds to worker processes and collects their results.

use super::Cli;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

/// Number of seeds that a worker gets at a time.
const BATCH_SEEDS: u64 = 100;

#[derive(Default)]
struct Totals {
    programs: u64,
    counts: [u64; 5],
    failures: Vec<String>,
}

/// Runs all seeds; returns whether all passed.
pub fn run(cli: &Cli) -> Result<bool, String> {
    let next = Mutex::new(cli.seeds.start);
    let totals = Mutex::new(Totals::default());
    let started = Instant::now();
    let next_batch = || {
        let mut next = next.lock().unwrap_or_else(|e| e.into_inner());
        let range = *next..next.saturating_add(BATCH_SEEDS).min(cli.seeds.end);
        *next = range.end;
        (!range.is_empty()).then_some(range)
    };
    let work = || -> Result<(), String> {
        while let Some(mut seeds) = next_batch() {
            while !seeds.is_empty() {
                seeds = run_worker(cli, seeds, &totals)?;
            }
            let totals = totals.lock().unwrap_or_else(|e| e.into_inner());
            eprintln!("{} programs, {} failed, {:?}", totals.programs, totals.failures.len(), started.elapsed());
        }
        Ok(())
    };
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cli.jobs).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|w| w.join().unwrap_or_else(|_| Err("a thread panicked".into()))).collect()
    });
    results.into_iter().collect::<Result<(), String>>()?;
    let totals = totals.into_inner().unwrap_or_else(|e| e.into_inner());
    let [host, simulated, compiled, assembled, refused] = totals.counts;
    println!(
        "seeds {:?}: {} programs, {host} native runs, {simulated} simulated runs, {compiled} PTX files, {assembled} assembled, \
         {refused} over resource limits, {} failed, in {:.0?}",
        cli.seeds,
        totals.programs,
        totals.failures.len(),
        started.elapsed()
    );
    Ok(totals.failures.is_empty())
}

/// Runs one worker on a range of seeds; returns the seeds that are left if it crashed or timed out.
fn run_worker(cli: &Cli, seeds: Range<u64>, totals: &Mutex<Totals>) -> Result<Range<u64>, String> {
    let mut child = start(cli, &seeds)?;
    let lines = BufReader::new(child.stdout.take().ok_or("a worker without standard output")?).lines();
    let (sender, receiver) = mpsc::channel();
    let reader = std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    let mut current = None;
    let failed = |seed: u64, what: &str| {
        let mut totals = totals.lock().unwrap_or_else(|e| e.into_inner());
        println!("seed {seed}: {what}");
        totals.programs += 1;
        totals.failures.push(what.into());
    };
    let ended = loop {
        match receiver.recv_timeout(Duration::from_secs(cli.timeout)) {
            Ok(line) => {
                let mut words = line.splitn(3, ' ');
                let (verb, seed) = (words.next(), words.next().and_then(|s| s.parse::<u64>().ok()));
                let rest = words.next().unwrap_or("");
                match (verb, seed) {
                    (Some("start"), seed) => current = seed,
                    (Some("done"), Some(_)) => {
                        let mut totals = totals.lock().unwrap_or_else(|e| e.into_inner());
                        totals.programs += 1;
                        for (sum, n) in
                            totals.counts.iter_mut().zip(rest.split(' ').filter_map(|n| n.parse::<u64>().ok()))
                        {
                            *sum += n;
                        }
                        current = None;
                    }
                    (Some("fail"), Some(seed)) => {
                        failed(seed, &rest.replace("\\n", "\n"));
                        current = None;
                    }
                    _ => println!("{line}"),
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break "crashed",
            Err(mpsc::RecvTimeoutError::Timeout) => break "exceeded the timeout",
        }
    };
    let _ = child.kill();
    let status = child.wait().map_err(|e| e.to_string())?;
    let _ = reader.join();
    let Some(seed) = current else { return Ok(seeds.end..seeds.end) };
    failed(seed, &format!("the worker process {ended} ({status})"));
    Ok(seed + 1..seeds.end)
}

fn start(cli: &Cli, seeds: &Range<u64>) -> Result<Child, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.arg("--in-process").args(["--seeds", &format!("{}..{}", seeds.start, seeds.end)]);
    command.args(["--targets", &cli.targets.join(",")]);
    if !cli.ptx.is_empty() {
        command.args(["--ptx", &cli.ptx.join(",")]);
    }
    if let Some(ptxas) = &cli.ptxas {
        command.arg("--ptxas").arg(ptxas);
    }
    let no_analysis_checks = (cli.no_analysis_checks, "--no-analysis-checks");
    for (set, flag) in [(cli.each_pass, "--each-pass"), no_analysis_checks, (cli.reduce, "--reduce")] {
        if set {
            command.arg(flag);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().map_err(|e| e.to_string())
}
