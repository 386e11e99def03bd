//! Tests of signals, of launchers that end, and of closed outputs: what a run survives, and which processes remain.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use libc::{SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1};
use tilewright_harness::dist::lifeline;
use tilewright_harness::signals::{self, StopSignal};

use crate::tensors::tensors;

/// Far longer than any operation here.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Exit code after a stop signal, with the state saved.
const STOPPED: i32 = 75;
/// Environment variable with the test's folder, in all processes of a test.
const MARK: &str = "TILEWRIGHT_TEST_MARK";

/// A folder with a training text.
fn place() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text"), "one fish two fish red fish blue fish. ".repeat(400)).unwrap();
    folder
}

fn program() -> std::ffi::OsString {
    std::env::var_os("TILEWRIGHT_TEST_PROGRAM").unwrap_or_else(|| env!("CARGO_BIN_EXE_tilewright").into())
}

/// `tilewright` with these arguments, in `folder`.
fn tilewright(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(words).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("TILEWRIGHT_DEVICE", "cpu").env("TILEWRIGHT_CACHE", folder.join("cache")).env(MARK, folder);
    command.env("TILEWRIGHT_COMM_TIMEOUT", "100");
    for name in
        ["MASTER_ADDR", "MASTER_PORT", "TILEWRIGHT_COMM", "TILEWRIGHT_JOB", "RANK", "WORLD_SIZE", "TILEWRIGHT_LOG"]
    {
        command.env_remove(name);
    }
    // Tests may run under nohup, and the child would inherit ignored signals. SAFETY: signal is safe to call between
    // fork and exec.
    unsafe {
        command.pre_exec(|| {
            for signal in [SIGINT, SIGTERM, SIGHUP, SIGUSR1] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
    command
}

const TRAIN: &str = "train --data text --layers 1 --d-model 16 --d-ff 16 --heads 1 --vocab-size 300 --context 16 --evaluate-every 0 \
    --evaluate-sequences 6 --save-every 0 --lr 0.003 --min-lr 0.003 --warmup 0";

/// The arguments of a training on one rank, or on several under `launch` with these options.
fn words(launch: Option<&str>, train: &str) -> Vec<String> {
    let batch = if train.contains("--batch") { "" } else { "--batch 12" };
    let start = launch.map(|options| format!("launch {options} -- tilewright ")).unwrap_or_default();
    let out = if train.contains("--out") { "" } else { "--out run" };
    format!("{start}{TRAIN} {batch} {out} {train}").split_whitespace().map(str::to_string).collect()
}

fn train(folder: &Path, launch: Option<&str>, more: &str) -> Command {
    let words = words(launch, more);
    tilewright(folder, &words.iter().map(String::as_str).collect::<Vec<_>>())
}

fn send(child: &Child, signal: i32) {
    // SAFETY: a child that is not reaped.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Waits until `what` returns true.
#[track_caller]
fn wait_for(why: &str, mut what: impl FnMut() -> bool) {
    let began = Instant::now();
    while !what() {
        assert!(began.elapsed() < TIMEOUT, "{why}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn steps(folder: &Path) -> usize {
    let log = std::fs::read_to_string(folder.join("run/log.jsonl")).unwrap_or_default();
    log.lines().filter(|line| line.contains("\"what\":\"step\"")).count()
}

/// Waits until a run has this many steps.
#[track_caller]
fn wait_for_steps(child: &mut Child, folder: &Path, count: usize) {
    wait_for("the run makes steps", || {
        if steps(folder) >= count {
            return true;
        }
        if let Some(status) = child.try_wait().unwrap() {
            let mut said = String::new();
            child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut said));
            panic!("it ended ({status}): {said}");
        }
        false
    });
}

/// Processes with the marker of a test's folder.
fn processes_with_mark(folder: &Path) -> Vec<i32> {
    let mark = format!("{MARK}={}", folder.display());
    let is_marked = |pid: &str| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes()).then(|| pid.parse().ok())?
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| is_marked(entry.file_name().to_str()?)).collect()
}

#[track_caller]
fn nothing_is_left(folder: &Path) {
    wait_for("all processes end", || processes_with_mark(folder).is_empty());
}

#[test]
fn a_curve_that_cannot_be_drawn_does_not_hide_that_the_state_is_saved() {
    let folder = place();
    let path = folder.path();
    let mut child = train(path, None, "--steps 1000000").spawn().unwrap();
    wait_for_steps(&mut child, path, 1);
    std::fs::create_dir(path.join("run/loss.svg")).unwrap();
    send(&child, SIGTERM);
    let ended = child.wait_with_output().unwrap();
    let said = text(&ended);
    assert_eq!(ended.status.code(), Some(STOPPED), "{said}");
    assert!(said.contains("loss.svg") && !said.contains("wrote run/loss.svg"), "{said}");
    let resumed = train(path, None, &format!("--resume --steps {}", steps(path) + 1)).output().unwrap();
    assert_eq!(resumed.status.code(), Some(1), "{}", text(&resumed));
    assert!(text(&resumed).contains("loss.svg"), "{}", text(&resumed));
}

#[test]
fn signals_end_training_with_its_state_saved() {
    for (signal, name) in [(SIGINT, "SIGINT"), (SIGTERM, "SIGTERM"), (SIGHUP, "SIGHUP"), (SIGUSR1, "SIGUSR1")] {
        let folder = place();
        let path = folder.path();
        let mut child = train(path, None, "--steps 1000000").spawn().unwrap();
        wait_for_steps(&mut child, path, 3);
        send(&child, signal);
        let ended = child.wait_with_output().unwrap();
        let said = text(&ended);
        assert_eq!(ended.status.code(), Some(STOPPED), "{said}");
        let made = steps(path);
        assert!(said.contains(&format!("stopped by {name} after step {made}, with the state saved")), "{said}");
        assert!(path.join("run/loss.svg").exists());
        if signal != SIGTERM {
            continue;
        }
        // The run resumes as if uninterrupted.
        let more = format!("--steps {}", made + 2);
        let resumed = train(path, None, &format!("--resume {more}")).output().unwrap();
        assert!(resumed.status.success(), "{}", text(&resumed));
        let (whole, other) = (place(), path.join("run/checkpoint.safetensors"));
        assert!(train(whole.path(), None, &more).output().unwrap().status.success());
        assert!(tensors(&other) == tensors(&whole.path().join("run/checkpoint.safetensors")), "{name}: tensors differ");
    }
}

#[test]
fn resume_restores_the_rank_settings() {
    let folder = place();
    let path = folder.path();
    let ranks = Some("--nproc 2");
    let run = |out: &str, more: &str| {
        let ran = train(path, ranks, &format!("--out {out} {more}")).output().unwrap();
        assert!(ran.status.success(), "{}", text(&ran));
        text(&ran)
    };
    let weights = |out: &str| tensors(&path.join(out).join("checkpoint.safetensors"));
    let how = "--ddp flat --comm-dtype bf16";
    run("whole", &format!("{how} --steps 6"));
    run("parts", &format!("{how} --steps 3"));
    let said = run("parts", "--resume --steps 6");
    assert!(said.contains("gradients flat"), "{said}");
    assert!(weights("parts") == weights("whole"), "other bits");
    // Options of ranks can be overridden.
    let said = run("parts", "--resume --steps 7 --ddp naive --comm-dtype f32 --shard zero1");
    assert!(said.contains("gradients naive, optimizer state ZeRO-1"), "{said}");
    let said = run("parts", "--resume --steps 8");
    assert!(said.contains("gradients naive, optimizer state ZeRO-1"), "{said}");
    let said = run("parts", "--resume --steps 9 --shard none");
    assert!(said.contains("optimizer state replicated"), "{said}");
}

/// Signals are ignored under nohup, and SIGINT in background jobs of a shell.
#[test]
fn signals_that_were_ignored_stay_ignored() {
    for launch in [None, Some("--nproc 2")] {
        let folder = place();
        let path = folder.path();
        let mut command = train(path, launch, "--steps 1000000");
        // SAFETY: signal is safe to call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::signal(SIGHUP, libc::SIG_IGN);
                libc::signal(SIGINT, libc::SIG_IGN);
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        wait_for_steps(&mut child, path, 2);
        for signal in [SIGHUP, SIGINT, SIGHUP] {
            let made = steps(path);
            send(&child, signal);
            wait_for_steps(&mut child, path, made + 5);
        }
        send(&child, SIGTERM);
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(STOPPED), "{}", text(&ended));
        assert!(text(&ended).contains("stopped by SIGTERM"), "{}", text(&ended));
    }
}

/// A step with many micro-batches, which takes long.
const LONG_STEP: &str = "--steps 5 --batch 480000 --micro-batch 120";

#[test]
fn a_second_signal_ends_at_once() {
    for launch in [None, Some("--nproc 2")] {
        let folder = place();
        let mut child = train(folder.path(), launch, LONG_STEP).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("uniform predictions") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "it ended early");
        }
        send(&child, SIGTERM);
        let mut err = BufReader::new(child.stderr.take().unwrap());
        line.clear();
        while !line.contains("stopping after this step") {
            line.clear();
            assert!(err.read_line(&mut line).unwrap() > 0, "it ended at the first signal");
        }
        let began = Instant::now();
        // A second signal within the debounce time is ignored; repeat until one is later.
        while child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < TIMEOUT, "the second signal did not end it");
            std::thread::sleep(signals::DEBOUNCE);
            send(&child, SIGTERM);
        }
        assert_eq!(child.wait().unwrap().signal(), Some(SIGTERM));
        nothing_is_left(folder.path());
    }
}

#[test]
fn launch_passes_signals_on_and_waits_for_the_state() {
    for (signal, name, group) in [(SIGINT, "SIGINT", true), (SIGUSR1, "SIGUSR1", false)] {
        let folder = place();
        let path = folder.path();
        let mut command = train(path, Some("--nproc 3"), "--steps 1000000 --shard zero1");
        command.process_group(0);
        let mut child = command.spawn().unwrap();
        wait_for_steps(&mut child, path, 3);
        // To the process group as a terminal does, and to the process as a scheduler does.
        let to = if group { -(child.id() as i32) } else { child.id() as i32 };
        // SAFETY: a child that is not reaped, and its group.
        assert_eq!(unsafe { libc::kill(to, signal) }, 0);
        let ended = child.wait_with_output().unwrap();
        let said = text(&ended);
        assert_eq!(ended.status.code(), Some(STOPPED), "{said}");
        assert!(said.contains(&format!("{name} forwarded to all ranks")), "{said}");
        let made = steps(path);
        for rank in 0..3 {
            assert!(said.contains(&format!("[rank {rank}] stopped by {name} after step {made},")), "{said}");
        }
        nothing_is_left(path);
        let resumed = train(path, Some("--nproc 2"), &format!("--resume --steps {}", made + 1)).output().unwrap();
        assert!(text(&resumed).contains(&format!("resuming after step {made}")), "{}", text(&resumed));
        assert!(resumed.status.success());
    }
}

/// Starts a training of `ranks` ranks, each as the child of a shell that waits for it, and returns after `steps` steps.
fn in_shells(folder: &Path, ranks: usize, steps: usize) -> Child {
    let inside = format!("{} {}; true", program().to_string_lossy(), words(None, "--steps 1000000").join(" "));
    let launch = ["launch", "--nproc", &ranks.to_string(), "--", "sh", "-c", &inside];
    let mut child = tilewright(folder, &launch).spawn().unwrap();
    wait_for_steps(&mut child, folder, steps);
    child
}

/// The signal ends the shell around a rank; the rank inside still gets its time.
#[test]
fn launch_waits_for_ranks_inside_of_shells() {
    let folder = place();
    let path = folder.path();
    let child = in_shells(path, 2, 3);
    send(&child, SIGTERM);
    let ended = child.wait_with_output().unwrap();
    assert!(text(&ended).contains("[rank 1] stopped by SIGTERM after step"), "{}", text(&ended));
    assert!(path.join("run/checkpoint.safetensors").exists());
    nothing_is_left(path);
}

/// The program of a rank of [`launched`]: only this test, with the variable set.
#[test]
fn program_of_a_rank_that_stops() {
    let Ok(what) = std::env::var("TILEWRIGHT_TEST_STOPS") else { return };
    lifeline::attach().unwrap();
    let (sender, heard) = std::sync::mpsc::channel();
    signals::listen(move |meaning| sender.send(meaning).unwrap()).unwrap();
    let ready = std::env::var("TILEWRIGHT_TEST_READY").unwrap();
    std::fs::write(format!("{ready}-{}", std::env::var("RANK").unwrap()), "ready").unwrap();
    assert!(matches!(heard.recv().unwrap(), StopSignal::Stop(SIGTERM)));
    match what.as_str() {
        "ignores-signals" => wait_for("a kill by the launcher", || false),
        _ => {
            let saving = lifeline::saving();
            // Far longer than the stop timeout, and shorter than the save timeout.
            let time = if what == "save" { Duration::from_secs(2) } else { TIMEOUT };
            std::thread::sleep(time);
            drop(saving);
            println!("saved");
            std::process::exit(STOPPED);
        }
    }
}

/// Runs two ranks that are asked to stop.
fn launched(what: &str, options: &[&str]) -> Output {
    let folder = place();
    let own = std::env::current_exe().unwrap();
    let test = ["--", own.to_str().unwrap(), "stops::program_of_a_rank_that_stops", "--exact", "--nocapture"];
    let words = [&["launch", "--nproc", "2", "--grace", "0.2"], options, &test].concat();
    let mut command = tilewright(folder.path(), &words);
    let ready = folder.path().join("ready");
    command.env("TILEWRIGHT_TEST_STOPS", what).env("TILEWRIGHT_TEST_READY", &ready);
    let mut child = command.spawn().unwrap();
    wait_for("ranks are ready", || {
        assert!(child.try_wait().unwrap().is_none(), "the launcher ended");
        (0..2).all(|rank| folder.path().join(format!("ready-{rank}")).exists())
    });
    send(&child, SIGTERM);
    let ended = child.wait_with_output().unwrap();
    nothing_is_left(folder.path());
    ended
}

#[test]
fn launch_waits_longer_for_ranks_that_save_up_to_a_limit() {
    let ended = launched("save", &["--stop-timeout", "0.5", "--save-timeout", "100"]);
    assert_eq!(ended.status.code(), Some(STOPPED), "{}", text(&ended));
    assert_eq!(text(&ended).matches("] saved\n").count(), 2, "{}", text(&ended));
    for (what, options) in [
        ("ignores-signals", ["--stop-timeout", "0.5", "--save-timeout", "100"]),
        ("save-forever", ["--stop-timeout", "0.2", "--save-timeout", "1"]),
    ] {
        let ended = launched(what, &options);
        assert_eq!(ended.status.signal(), Some(SIGTERM), "{}", text(&ended));
        for rank in 0..2 {
            let line = format!("rank {rank} ended by signal 9 (SIGKILL), which the launcher sent");
            assert!(text(&ended).contains(&line), "{}", text(&ended));
        }
    }
}

/// A program that does not use the lifeline, and starts and waits for child processes.
const NESTED_SHELLS: &str = "sleep 1000 & sh -c 'sleep 1000; true'; true";

#[test]
fn nothing_outlives_a_launcher_that_is_killed() {
    for group in [false, true] {
        let folder = place();
        let path = folder.path();
        let mut command = tilewright(path, &["launch", "--nproc", "2", "--", "sh", "-c", NESTED_SHELLS]);
        let mut child = command.process_group(0).spawn().unwrap();
        // Launcher, guard, and for each rank two shells and two sleepers.
        wait_for("all run", || processes_with_mark(path).len() >= 9);
        let to = if group { -(child.id() as i32) } else { child.id() as i32 };
        // SAFETY: a child that is not reaped, and its group.
        assert_eq!(unsafe { libc::kill(to, SIGKILL) }, 0);
        child.wait().unwrap();
        nothing_is_left(path);
    }
}

#[test]
fn nothing_outlives_a_launcher_whose_ranks_have_ended() {
    let folder = place();
    let ended =
        tilewright(folder.path(), &["launch", "--nproc", "2", "--", "sh", "-c", "sleep 1000 & true"]).output().unwrap();
    assert!(ended.status.success(), "{}", text(&ended));
    assert_eq!(processes_with_mark(folder.path()), [] as [i32; 0]);
}

/// A subreaper acts like the init process of a container: orphans become its children.
#[test]
fn a_subreaper_launcher_reaps_orphans() {
    let folder = place();
    let mut command = tilewright(folder.path(), &["launch", "--nproc", "2", "--", "sh", "-c", "sleep 1000 & true"]);
    // SAFETY: prctl is safe to call between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut child = command.spawn().unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > TIMEOUT / 2 {
            send(&child, SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success() && !text(&ended).contains("left processes"), "{}: {}", ended.status, text(&ended));
    assert_eq!(processes_with_mark(folder.path()), [] as [i32; 0]);
}

#[test]
fn nothing_outlives_launchers_of_launchers() {
    let folder = place();
    let path = folder.path();
    let words = "launch --nproc 1 -- tilewright launch --nproc 1 -- sh -c".split(' ');
    let mut child = tilewright(path, &words.chain([NESTED_SHELLS]).collect::<Vec<_>>()).spawn().unwrap();
    // Two launchers, two guards, two shells and two sleepers.
    wait_for("all run", || processes_with_mark(path).len() >= 8);
    send(&child, SIGKILL);
    child.wait().unwrap();
    nothing_is_left(path);
}

/// A rank ends with its launcher, even if the guard was killed.
#[test]
fn ranks_see_their_launcher_end() {
    let folder = place();
    let path = folder.path();
    let mut child = in_shells(path, 1, 1);
    let commands = |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let guards: Vec<i32> =
        processes_with_mark(path).into_iter().filter(|pid| commands(pid).contains("launch-guard")).collect();
    assert_eq!(guards.len(), 1);
    for pid in [guards[0], child.id() as i32] {
        // SAFETY: processes of this test: the guard's parent has not reaped it, and the launcher is our child.
        assert_eq!(unsafe { libc::kill(pid, SIGKILL) }, 0);
    }
    child.wait().unwrap();
    nothing_is_left(path);
}

#[test]
fn closed_output_pipes_do_not_end_training() {
    for launch in [None, Some("--nproc 2")] {
        for closed in ["out", "err", "both"] {
            let folder = place();
            let mut command = train(folder.path(), launch, "--steps 4");
            // Both outputs into one pipe, as with 2>&1, or only one of them.
            let (reader, writer) = std::io::pipe().unwrap();
            command.stdout(Stdio::null()).stderr(Stdio::null());
            match closed {
                "out" => command.stdout(writer),
                "err" => command.stderr(writer),
                _ => command.stdout(writer.try_clone().unwrap()).stderr(writer),
            };
            // Prints much to the closed pipe.
            command.env("TILEWRIGHT_LOG", "debug");
            let mut child = command.spawn().unwrap();
            drop(command);
            let mut reader = BufReader::new(reader);
            let mut line = String::new();
            assert!(reader.read_line(&mut line).unwrap() > 0);
            drop(reader);
            assert_eq!(child.wait().unwrap().code(), Some(0), "{launch:?} {closed}");
            assert_eq!(steps(folder.path()), 4, "{launch:?} {closed}");
            assert!(folder.path().join("run/checkpoint.safetensors").exists(), "{launch:?} {closed}");
        }
    }
}
