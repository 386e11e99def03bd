//! Tuning on the CPU: candidates that are slow, wrong, too large or end the process; stored choices; resuming an
//! interrupted run.
//!
//! Each test starts this binary again with a separate cache, for `child_tunes` with variables that set its role;
//! without them that test does nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tilewright_runtime::autotune::{
    DeviceId, Entry, Journal, JournalEvent, Options, Outcome, Report, Table, saved_choices, tuning,
};
use tilewright_runtime::prelude::*;

/// y[i] += x[i].
///
/// `work` is a number of repetitions without effect; with `mode` 1, the kernel adds x[i] twice, which is wrong.
#[autotune(
    configs = [
        Config(tile = 256, work = 20000, mode = 0, num_warps = 1),
        Config(tile = 256, work = 1, mode = 0, num_warps = 1),
        Config(tile = 256, work = 1, mode = 1, num_warps = 1),
        Config(tile = 1048576, work = 1, mode = 0, num_warps = 1),
        Config(tile = 512, work = 1, mode = 0, num_warps = 1),
    ],
    key = [n],
)]
#[kernel]
fn accumulate(
    x: In<f32>,
    y: InOut<f32>,
    #[no_specialize] n: i32,
    #[constexpr] tile: usize,
    #[constexpr] work: i32,
    #[constexpr] mode: i32,
) {
    let i = program_id(0) * tile + arange(0, tile);
    let mask = i < n;
    let v = load(x + i, mask = mask, other = 0.0);
    let mut nothing = zeros::<f32>([tile]);
    for _ in range(0, work) {
        // Needs the whole tile at the same time.
        nothing = 0.5 * nothing + (v - max(v)) * 0.0;
    }
    let factor = if mode == 1 { 2.0 } else { 1.0 };
    store(y + i, load(y + i, mask = mask, other = 0.0) + v * factor + nothing, mask = mask);
}

/// y[i] = x[i]; wrong with `mode` 1. With `mode` 2, the kernel reads far outside of x, which ends the process.
#[autotune(configs = [Config(mode = 0), Config(mode = 2), Config(mode = 1)], key = [n])]
#[kernel]
fn deadly(x: In<f32>, y: Out<f32>, #[no_specialize] n: i64, #[constexpr] mode: i32) {
    let i = arange(0, 64);
    let away = if mode == 2 { 1i64 << 44 } else { 0i64 };
    let factor = if mode == 1 { 2.0 } else { 1.0 };
    let v = load(x + (i.to::<i64>() + n * away), mask = i.to::<i64>() < n, other = 0.0);
    store(y + i, v * factor, mask = i.to::<i64>() < n);
}

/// y = x + 1 by tiles that may not divide the length; with a `step` of 0, it would not end.
#[autotune(configs = [Config(tile = 1000), Config(tile = 4096), Config(tile = 5000)], key = [n])]
#[kernel]
fn unmasked(x: In<f32>, y: Out<f32>, n: i32, step: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let mut v = load(x + i);
    for _ in range(0, n, step) {
        v = v + 1.0 / n.to::<f32>();
    }
    store(y + i, v);
}

const ROLE: &str = "TILEWRIGHT_TEST_ROLE";
const N: usize = 10_000;

fn child(cache: &Path, role: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_tunes", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env("TILEWRIGHT_CACHE", cache).env_remove("TILEWRIGHT_TUNE");
    command.envs(variables.iter().copied());
    command
}

/// Runs a child that must succeed; returns its standard output.
fn run(cache: &Path, role: &str, variables: &[(&str, &str)]) -> String {
    let Output { status, stdout, stderr } = child(cache, role, variables).output().unwrap();
    let text = String::from_utf8_lossy(&stdout).into_owned();
    assert!(status.success(), "{text}{}", String::from_utf8_lossy(&stderr));
    text
}

/// Launches `accumulate`, checks the result, and prints the choice.
fn launch_accumulate(n: usize) {
    let device = Device::cpu();
    let values: Vec<f32> = (0..n).map(|i| (i % 100) as f32).collect();
    let x = Buffer::from_slice(&device, &values).unwrap();
    let mut y = Buffer::from_slice(&device, &values).unwrap();
    let mut args = Accumulate { x: &x, y: &mut y, n: n as i32, tile: tuned(), work: tuned(), mode: tuned() };
    let mut grid = |args: &mut Accumulate| n.div_ceil(args.tile);
    args.launch_tuned(&device, &mut grid).unwrap();
    let choice = args.choose(&device, &LaunchConfig::new(0), &mut grid).unwrap();
    println!("chosen {} ({:?})", choice.config, choice.source);
    let want: Vec<f32> = values.iter().map(|v| 2.0 * v).collect();
    assert!(y.to_vec().unwrap() == want, "the caller's memory has something else than one launch's result");
}

fn launch_deadly() {
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[3.0f32; 64]).unwrap();
    let mut y = Buffer::<f32>::poisoned(&device, 64).unwrap();
    // SAFETY: not given; this is what ends the process.
    let config = unsafe { LaunchConfig::new(0).unchecked() };
    Deadly { x: &x, y: &mut y, n: 64, mode: tuned() }.launch_tuned_with(&device, &config, |_| 1).unwrap();
    assert_eq!(y.to_vec().unwrap(), [3.0; 64]);
}

/// Launches `unmasked` over 5000 elements; `n` and `step` are what a caller says.
fn launch_unmasked(n: i32, step: i32) -> Result<()> {
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[3.0f32; 5000]).unwrap();
    let mut y = Buffer::<f32>::poisoned(&device, 5000).unwrap();
    let mut args = Unmasked { x: &x, y: &mut y, n, step, tile: tuned() };
    args.launch_tuned(&device, |args| (n as usize).div_ceil(args.tile))
}

fn print_candidates(reports: Vec<Report>) {
    for report in reports {
        println!("report {} {}", report.kernel, report.key);
        for candidate in report.candidates {
            match candidate.outcome {
                Outcome::Timed { .. } => println!("timed {}", candidate.config),
                Outcome::Dropped(why) => println!("dropped {}: {why}", candidate.config),
                Outcome::Unfinished => println!("unfinished {}", candidate.config),
            }
        }
    }
}

#[test]
fn child_tunes() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let hurried = role == "tune in no time";
    let options = Options::new(if hurried { Duration::from_millis(1) } else { Duration::from_secs(120) });
    match role.as_str() {
        "tune" | "tune in no time" => {
            let ((), reports) = tuning(&options, || launch_accumulate(N));
            print_candidates(reports);
        }
        "overshoot" => {
            let (outcome, reports) = tuning(&options, || launch_unmasked(5000, 1));
            outcome.unwrap();
            print_candidates(reports);
            for (n, step) in [(10_000, 1), (3000, 0)] {
                println!("{}", tuning(&options, || launch_unmasked(n, step)).0.unwrap_err());
            }
        }
        "launch" => launch_accumulate(N),
        "launch larger" => launch_accumulate(3 * N),
        "deadly" => tuning(&options, launch_deadly).0,
        "time" => {
            let start = Instant::now();
            launch_accumulate(N);
            println!("took {}", start.elapsed().as_secs_f64());
        }
        other => panic!("no role {other}"),
    }
}

const BEST: [&str; 2] =
    ["tile=256,work=1,mode=0,num_warps=1,num_stages=3", "tile=512,work=1,mode=0,num_warps=1,num_stages=3"];

fn logs(cache: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for kernel in std::fs::read_dir(cache.join("tuned")).into_iter().flatten().flatten() {
        let files = std::fs::read_dir(kernel.path()).unwrap().flatten().map(|file| file.path());
        found.extend(files.filter(|path| path.to_string_lossy().ends_with(".log.jsonl")));
    }
    found
}

#[test]
fn best_correct_candidate_wins_and_is_saved() {
    let cache = TempDir::new().unwrap();
    let before = run(cache.path(), "launch", &[]);
    assert!(before.contains("chosen tile=256,work=20000") && before.contains("(Default)"), "{before}");

    let text = run(cache.path(), "tune", &[]);
    assert!(text.contains("report accumulate n<=16384"), "{text}");
    assert!(BEST.iter().any(|best| text.contains(&format!("chosen {best} (Measured)"))), "{text}");
    assert!(text.contains("timed tile=256,work=20000,mode=0"), "{text}");
    let wrong = text.lines().find(|line| line.starts_with("dropped tile=256,work=1,mode=1")).expect("the wrong one");
    assert!(wrong.contains("`y` differs"), "{wrong}");
    let large = text.lines().find(|line| line.starts_with("dropped tile=1048576")).expect("the large one");
    assert!(large.contains("scratch memory"), "{large}");

    // Another process finds the choice for this size, and uses it as the nearest one for another size.
    let after = run(cache.path(), "launch", &[]);
    assert!(after.contains("work=1,mode=0") && after.contains("(Measured)"), "{after}");
    let larger = run(cache.path(), "launch larger", &[]);
    assert!(larger.contains("work=1,mode=0") && larger.contains("(Nearest)"), "{larger}");
    // A second request does not measure again.
    assert!(!run(cache.path(), "tune", &[]).contains("report"));
    // `TILEWRIGHT_TUNE` requests tuning, too.
    let asked = run(cache.path(), "launch larger", &[("TILEWRIGHT_TUNE", "60")]);
    assert!(asked.contains("(Measured)"), "{asked}");
}

/// The default is loaded first, however long it takes; when the time is over, the largest candidate has not been
/// started.
#[test]
fn exhausted_budget_still_measures_the_default() {
    let cache = TempDir::new().unwrap();
    let text = run(cache.path(), "tune in no time", &[]);
    assert!(text.contains("timed tile=256,work=20000,mode=0"), "{text}");
    assert!(text.contains("chosen tile=256,work=20000,mode=0"), "{text}");
    assert!(text.contains("unfinished tile=1048576"), "{text}");
    // A run with a larger budget resumes the log.
    let text = run(cache.path(), "tune", &[]);
    assert!(BEST.iter().any(|best| text.contains(&format!("chosen {best}"))), "{text}");
}

/// A killed process leaves the log lines that it has written, the last one perhaps truncated, and no table. This test
/// truncates a log at chosen lines instead: a kill may come at any time, and after one between the log's last line and
/// the table, the next run correctly starts over.
#[test]
fn killed_run_is_resumed() {
    let cache = TempDir::new().unwrap();
    run(cache.path(), "tune", &[]);
    let [log] = &logs(cache.path())[..] else { panic!("one log, not {:?}", logs(cache.path())) };
    let whole = std::fs::read_to_string(log).unwrap();
    let lines: Vec<&str> = whole.lines().filter(|line| !line.is_empty()).collect();
    let at = |event: &str| lines.iter().position(|line| line.starts_with(event)).unwrap_or_else(|| panic!("{whole}"));
    // The log ends while a candidate runs for the first time, in the first round of times, and before the choice.
    for kept in [at("{\"start\"") + 1, at("{\"times\"") + 1, lines.len() - 1] {
        let part = format!("{}\n{}", lines[..kept].join("\n"), &lines[kept][..lines[kept].len() / 2]);
        for table in std::fs::read_dir(log.parent().unwrap()).unwrap().flatten().filter(|file| file.path() != *log) {
            std::fs::remove_file(table.path()).unwrap();
        }
        // The file is overwritten, not created, and so keeps its mode.
        std::fs::write(log, part).unwrap();
        let before = Journal::read(log);
        assert_eq!(before.len(), kept);
        let text = run(cache.path(), "tune", &[]);
        assert!(BEST.iter().any(|best| text.contains(&format!("chosen {best} (Measured)"))), "{text}");
        let after = Journal::read(log);
        assert_eq!(after[..kept], before[..], "the second run added to the log of the first");
        assert!(matches!(after.last(), Some(JournalEvent::Chosen { .. })), "{after:?}");
    }
}

#[test]
fn candidate_that_crashes_twice_is_dropped() {
    let cache = TempDir::new().unwrap();
    for _ in 0..2 {
        let output = child(cache.path(), "deadly", &[]).output().unwrap();
        assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    run(cache.path(), "deadly", &[]);
    let events = Journal::read(&logs(cache.path())[0]);
    let dropped: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            JournalEvent::Dropped { config, why } => Some((config.as_str(), why.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(dropped.len(), 2, "{events:?}");
    assert!(dropped[0].0.starts_with("mode=2,") && dropped[0].1.contains("ended 2 times"), "{dropped:?}");
    assert!(dropped[1].0.starts_with("mode=1,") && dropped[1].1.contains("differs"), "{dropped:?}");
}

/// Tuning launches what a launch would: candidates whose accesses leave the memory do not run, nor what would not end.
#[test]
fn candidates_that_leave_their_memory_do_not_run() {
    let cache = TempDir::new().unwrap();
    let text = run(cache.path(), "overshoot", &[]);
    for tile in [1000, 5000] {
        assert!(text.contains(&format!("timed tile={tile},")), "{text}");
    }
    let dropped = text.lines().find(|line| line.starts_with("dropped tile=4096")).expect("the tile that overshoots");
    assert!(dropped.contains("out of bounds: `x` has 5000 elements"), "{dropped}");
    assert!(text.matches("no configuration runs").count() == 2, "{text}");
    assert!(text.contains("the step of a loop must be positive"), "{text}");
}

#[test]
fn malformed_tables_are_ignored() {
    let cache = TempDir::new().unwrap();
    let dir = cache.path().join("tuned/accumulate");
    std::fs::create_dir_all(&dir).unwrap();
    let table_of = |device: DeviceId, key: &str, config: &str| {
        let entry = Entry { kernel: "accumulate".into(), key: key.into(), config: config.into(), ..Entry::default() };
        Table::new(device, vec![entry]).text()
    };
    let table = |device: DeviceId, config: &str| table_of(device, "n<=4096", config);
    let here = DeviceId::of(&Device::cpu());
    let foreign = DeviceId { device: "another".into(), compute_capability: Some("9.0".into()) };
    std::fs::write(dir.join("a.json"), "no table").unwrap();
    std::fs::write(dir.join("b.json"), table(foreign, BEST[0])).unwrap();
    std::fs::write(dir.join("c.json"), table(here.clone(), "tile=256,gone=1")).unwrap();
    let text = run(cache.path(), "launch", &[]);
    assert!(text.contains("work=20000") && text.contains("(Default)"), "{text}");
    // A choice for a small problem is not used for one that is 256 times as large.
    std::fs::write(dir.join("c.json"), table_of(here.clone(), "n<=64", BEST[0])).unwrap();
    let text = run(cache.path(), "launch", &[]);
    assert!(text.contains("work=20000") && text.contains("(Default)"), "{text}");
    std::fs::write(dir.join("c.json"), table(here, BEST[0])).unwrap();
    let text = run(cache.path(), "launch", &[]);
    assert!(text.contains(BEST[0]) && text.contains("(Nearest)"), "{text}");
    // An invalid table causes a warning when it is read, never an error.
    assert!(saved_choices("no_such_kernel", &Device::cpu()).entries.is_empty());
}
