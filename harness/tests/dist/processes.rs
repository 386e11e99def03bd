//! Tests of ranks that are processes, started by `tilewright launch`.

use std::process::Command;
use std::time::{Duration, Instant};

use tilewright_harness::dist;
use tilewright_harness::dist::comm::{CommError, Communicator, Reduce};
use tilewright_harness::dist::rank::Environment;

use crate::{collectives, training};

/// The program of a rank; the launcher runs only this test, in this test program, with `TILEWRIGHT_TEST_RANK` set.
#[test]
fn program_of_a_rank() {
    let Ok(what) = std::env::var("TILEWRIGHT_TEST_RANK") else { return };
    let (what, who) = what.split_once(':').unwrap_or((&what, ""));
    let mut environment = Environment::get().unwrap();
    if ["hang", "stop"].contains(&what) {
        // Longer than waits on a busy machine.
        environment.options.timeout = Duration::from_secs(5);
    }
    let outcome = dist::connect_to(&environment).and_then(|comm| {
        println!("backend: {}", comm.backend());
        match what {
            "suite" => collectives::check(&comm),
            "train" => training::check(&candle_core::Device::Cpu, comm),
            "disagree" if comm.rank() == 2 => return comm.barrier(),
            "disagree" => return comm.all_reduce(&mut [1.0_f32], Reduce::Sum),
            _ => return fail(comm, what, who),
        }
        Ok(())
    });
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(3);
    }
}

/// Runs collectives until rank `who` does `what`.
fn fail(comm: Communicator, what: &str, who: &str) -> Result<(), CommError> {
    let chosen = comm.rank().to_string() == who;
    let length = if what == "stop" { 4_000_000 } else { 10_000 };
    for step in 1.. {
        if chosen && step == 5 && what == "stop" {
            // At a random point of a collective.
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(3));
                // SAFETY: stops this process.
                unsafe { libc::kill(std::process::id() as i32, libc::SIGSTOP) }
            });
        } else if chosen && step == 5 {
            match what {
                // SAFETY: ends this process.
                "kill" => drop(unsafe { libc::kill(std::process::id() as i32, libc::SIGKILL) }),
                "hang" => std::thread::sleep(Duration::from_secs(600)),
                "exit" => std::process::exit(7),
                "leave" => return Ok(()),
                _ => std::panic::resume_unwind(Box::new("thrown")),
            }
        }
        comm.all_reduce(&mut vec![1.0_f32; length], Reduce::Sum)?;
    }
    Ok(())
}

pub struct Ran {
    pub code: Option<i32>,
    pub text: String,
    pub took: Duration,
}

/// Launches `program_of_a_rank` of this test program.
fn launch(ranks: usize, what: &str) -> Ran {
    launch_test(ranks, "processes::program_of_a_rank", ("TILEWRIGHT_TEST_RANK", what))
}

/// Launches one test of this program on every rank, with a variable that selects what it does.
pub fn launch_test(ranks: usize, test: &str, (variable, what): (&str, &str)) -> Ran {
    // A test program that was copied to another machine gets the path of the command there.
    let program = std::env::var_os("TILEWRIGHT_TEST_PROGRAM");
    let mut command = Command::new(program.unwrap_or_else(|| env!("CARGO_BIN_EXE_tilewright").into()));
    command.args(["launch", "--grace", "4", "--nproc", &ranks.to_string(), "--"]);
    command.arg(std::env::current_exe().unwrap()).args([test, "--exact", "--nocapture"]);
    command.env(variable, what).env("TILEWRIGHT_COMM_TIMEOUT", "60");
    for name in ["MASTER_ADDR", "MASTER_PORT", "TILEWRIGHT_COMM", "TILEWRIGHT_JOB", "RANK", "WORLD_SIZE"] {
        command.env_remove(name);
    }
    let began = Instant::now();
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    Ran { code: output.status.code(), text, took: began.elapsed() }
}

#[test]
fn all_collectives_between_processes() {
    for ranks in [2, 3] {
        let ran = launch(ranks, "suite");
        assert_eq!(ran.code, Some(0), "{}", ran.text);
        for rank in 0..ranks {
            assert!(ran.text.contains(&format!("[rank {rank}] test result: ok. 1 passed")), "{}", ran.text);
        }
    }
}

#[test]
fn training_in_processes_gives_the_weights_of_training_on_one_rank() {
    for ranks in [2, 4] {
        let ran = launch(ranks, "train");
        assert_eq!(ran.code, Some(0), "{}", ran.text);
        assert_eq!(ran.text.matches("backend: tcp").count(), ranks, "{}", ran.text);
    }
}

/// Checks that every rank but the failed one names it and the operation.
pub fn others_name(ran: &Ran, ranks: usize, at_fault: usize, words: &[&str]) {
    for rank in (0..ranks).filter(|&rank| rank != at_fault) {
        let prefix = format!("[rank {rank}] ");
        let lines: String = ran.text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let name = format!("rank {at_fault}");
        let all =
            words.iter().chain([&name.as_str(), &"all_reduce(sum) of 10000 f32"]).all(|word| lines.contains(word));
        assert!(all, "rank {rank}: {}", ran.text);
    }
    assert!(ran.took < Duration::from_secs(40), "{:?}\n{}", ran.took, ran.text);
}

#[test]
fn a_killed_rank_ends_all() {
    let ran = launch(3, "kill:1");
    others_name(&ran, 3, 1, &[]);
    assert!(ran.text.contains("error: rank 1 failed first: it ended by signal 9 (SIGKILL)"), "{}", ran.text);
    assert_eq!(ran.code, Some(1));
}

#[test]
fn a_rank_that_exits_ends_all() {
    let ran = launch(2, "exit:0");
    others_name(&ran, 2, 0, &[]);
    assert!(ran.text.contains("rank 0 failed first: it ended with exit code 7"), "{}", ran.text);
}

#[test]
fn a_rank_that_throws_ends_all() {
    let ran = launch(3, "throw:2");
    others_name(&ran, 3, 2, &["aborted: it panicked"]);
    assert_eq!(ran.code, Some(1), "{}", ran.text);
}

#[test]
fn a_hanging_rank_is_named_and_ended() {
    let ran = launch(3, "hang:0");
    others_name(&ran, 3, 0, &["waited 5 s"]);
    assert!(
        ran.text.contains("error: rank 0 hung, and the launcher terminated it: it ended by signal 15 (SIGTERM) after "),
        "{}",
        ran.text
    );
    assert!(ran.text.contains(" waited 5 s for rank 0 at all_reduce"), "{}", ran.text);
}

/// Stopped during a transfer: one rank waits for it, and the others wait for that one.
#[test]
fn a_rank_stopped_inside_a_collective_is_named() {
    let ran = launch(4, "stop:2");
    assert!(
        ran.text.contains("error: rank 2 hung, and the launcher terminated it: it ended by signal 9 (SIGKILL)"),
        "{}",
        ran.text
    );
    for rank in [0, 1, 3] {
        let prefix = format!("[rank {rank}] ");
        let said: String = ran.text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let waited = said.contains(" waited 5 s for rank 2 at all_reduce(sum) of 4000000 f32");
        assert!(waited, "rank {rank}: {}", ran.text);
    }
}

#[test]
fn a_program_that_does_not_exist_is_named() {
    let launch = ["launch", "--nproc", "2", "--", "/no/such/program"];
    let output = Command::new(env!("CARGO_BIN_EXE_tilewright")).args(launch).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("cannot start /no/such/program") && output.status.code() == Some(1), "{text}");
}

#[test]
fn empty_variables_count_as_unset() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    for name in ["MASTER_ADDR", "MASTER_PORT", "TILEWRIGHT_JOB", "TILEWRIGHT_SECRET", "TILEWRIGHT_SECRET_FILE"] {
        command.env(name, "");
    }
    let shows = "echo $MASTER_ADDR ${MASTER_PORT:-none} ${TILEWRIGHT_JOB:-none}";
    let output = command.args(["launch", "--nproc", "1", "--", "sh", "-c", shows]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("127.0.0.1 ") && !text.contains("none"), "{text}");
}

/// `tilewright train` of a small model under `tilewright launch`, or on a single rank.
fn train(folder: &std::path::Path, ranks: Option<usize>, out: &str, more: &[&str]) -> (i32, String) {
    let program = env!("CARGO_BIN_EXE_tilewright");
    let mut command = Command::new(program);
    if let Some(ranks) = ranks {
        command.args(["launch", "--nproc", &ranks.to_string(), "--", program]);
    }
    let model = ["--layers", "2", "--d-model", "32", "--d-ff", "64", "--heads", "2", "--vocab-size", "300"];
    let steps =
        ["--context", "16", "--batch", "12", "--evaluate-sequences", "6", "--evaluate-every", "0", "--save-every", "2"];
    command.args(["train", "--out", out]).args(model).args(steps).args(more).current_dir(folder);
    command.env("TILEWRIGHT_DEVICE", "cpu").env("TILEWRIGHT_CACHE", folder.join("cache"));
    command.env("TILEWRIGHT_COMM_TIMEOUT", "120");
    for name in ["MASTER_ADDR", "MASTER_PORT", "TILEWRIGHT_COMM", "TILEWRIGHT_JOB", "RANK", "WORLD_SIZE"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code().unwrap_or(-1), text)
}

/// The parameters of a run's checkpoint, by name.
fn parameters(folder: &std::path::Path, out: &str) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(folder.join(out).join("checkpoint.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |data: &[u8]| data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    // Moments are in the checkpoint or in separate files.
    let mut all: Vec<(String, Vec<f32>)> = tensors
        .tensors()
        .iter()
        .filter(|(name, _)| !name.starts_with("optimizer"))
        .map(|(name, tensor)| (name.clone(), floats(tensor.data())))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Largest distance between tensors of two runs.
#[track_caller]
fn compare(folder: &std::path::Path, found: &str, expected: &str) -> f64 {
    let (found, expected) = (parameters(folder, found), parameters(folder, expected));
    assert_eq!(found.iter().map(|t| &t.0).collect::<Vec<_>>(), expected.iter().map(|t| &t.0).collect::<Vec<_>>());
    let flat = |all: &[(String, Vec<f32>)]| all.iter().flat_map(|t| t.1.clone()).collect::<Vec<_>>();
    crate::model::distance(&flat(&found), &flat(&expected))
}

/// Complete runs of the command: on 2 ranks with every form, with sharded state, with micro-batches; and a run with a
/// killed rank that resumes with another world size.
#[test]
fn runs_on_many_ranks_match_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let eps = ["--eps", "1e-4", "--steps", "6"];
    let run = |ranks, out: &str, more: &[&str]| {
        let (code, text) = train(folder, ranks, out, &[&eps, more].concat());
        assert_eq!(code, 0, "{text}");
        text
    };
    run(None, "alone", &[]);
    let text = run(Some(2), "bucketed", &["--ddp", "bucketed", "--bucket-mb", "0.01"]);
    assert!(text.contains("ranks: 2 over tcp, gradients bucketed, optimizer state replicated"), "{text}");
    assert_eq!(text.matches("wrote bucketed/checkpoint").count(), 1, "one rank writes: {text}");
    run(Some(3), "flat", &["--ddp", "flat", "--micro-batch", "3"]);
    run(Some(2), "zero1", &["--shard", "zero1", "--bucket-mb", "0.02"]);
    run(Some(3), "broadcast", &["--shard", "broadcast", "--ddp", "overlap"]);
    for found in ["bucketed", "flat", "zero1", "broadcast"] {
        let distance = compare(folder, found, "alone");
        assert!(distance <= 2e-6, "{found}: {distance:e}");
    }

    // Three ranks run four steps; two resume, then one.
    let part = |ranks, steps: &str, more: &[&str]| {
        let arguments = [&["--eps", "1e-4", "--steps", steps], more].concat();
        let (code, text) = train(folder, ranks, "resumed", &arguments);
        assert_eq!(code, 0, "{text}");
    };
    // The schedule of all six steps.
    let schedule = ["--lr", "0.003", "--min-lr", "0.003", "--warmup", "0"];
    part(Some(3), "2", &[&["--shard", "zero1"], schedule.as_slice()].concat());
    part(Some(2), "4", &[&["--shard", "broadcast", "--resume"], schedule.as_slice()].concat());
    part(None, "6", &[&["--resume"], schedule.as_slice()].concat());
    run(None, "level", &schedule);
    let distance = compare(folder, "resumed", "level");
    assert!(distance <= 2e-6, "{distance:e}");
}

/// The rank that updates a parameter does not affect the result, even with clipping by the whole gradient's norm.
#[test]
fn broadcast_sharding_is_bit_exact() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for clip in ["0.05", "0"] {
        let run = |out: &str, more: &[&str]| {
            let (code, text) = train(folder, Some(3), out, &[&["--steps", "6", "--clip", clip], more].concat());
            assert_eq!(code, 0, "{text}");
            parameters(folder, out)
        };
        let whole = run(&format!("whole-{clip}"), &[]);
        let shared = run(&format!("shared-{clip}"), &["--shard", "broadcast"]);
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for ((name, one), (_, other)) in whole.iter().zip(&shared) {
            assert!(bits(one) == bits(other), "--clip {clip}: `{name}` differs");
        }
    }
}

#[test]
fn batches_that_do_not_divide_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (code, text) = train(folder.path(), Some(5), "run", &["--steps", "2"]);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("a batch of 12 sequences is not a multiple of the world size, 5")
            && text.contains("--batch 10 or 15"),
        "{text}"
    );
}

/// A rank killed during training leaves a complete checkpoint, from which one rank fewer resumes.
#[test]
fn a_run_survives_a_killed_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let checkpoint = path.join("run/checkpoint.safetensors");
    let killed = std::thread::scope(|scope| {
        let training = scope.spawn(|| train(path, Some(3), "run", &["--steps", "100000", "--shard", "zero1"]));
        let began = Instant::now();
        while !checkpoint.exists() && !training.is_finished() && began.elapsed() < Duration::from_secs(120) {
            std::thread::sleep(Duration::from_millis(20));
        }
        // Finds the process of rank 2 by its working directory and its rank.
        let pid = rank_process(path, 2).expect("rank 2 runs");
        // SAFETY: a process of this test.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        training.join().unwrap()
    });
    let (code, text) = killed;
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("rank 2 failed first: it ended by signal 9 (SIGKILL)"), "{text}");
    for rank in [0, 1] {
        let prefix = format!("[rank {rank}] ");
        let said: String = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        assert!(said.contains("rank 2 has ended") || said.contains("aborted: rank 2 has ended"), "{text}");
    }
    let (code, text) = train(path, Some(2), "run", &["--resume", "--minutes", "0", "--steps", "100000"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("resuming after step"), "{text}");
}

/// The process of a rank whose working directory is `folder`.
fn rank_process(folder: &std::path::Path, rank: usize) -> Option<i32> {
    let folder = folder.canonicalize().ok()?;
    let is_rank = |pid: &str| {
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
        let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let wanted = format!("RANK={rank}");
        let named = environment.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes());
        (cwd == folder && named).then(|| pid.parse().ok())?
    };
    let entries = std::fs::read_dir("/proc").ok()?.flatten();
    entries.filter_map(|entry| is_rank(entry.file_name().to_str()?)).next()
}
