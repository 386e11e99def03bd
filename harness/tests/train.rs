//! `tilewright train` and `tilewright generate` as programs: what they learn, what survives their end, and what they refuse.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A model that makes a step in some milliseconds.
const SMALL: &[&str] = &[
    "--layers",
    "1",
    "--width",
    "32",
    "--hidden",
    "64",
    "--heads",
    "2",
    "--context",
    "16",
    "--vocab",
    "300",
    "--batch",
    "4",
];

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let words = "the quick brown fox jumps over the lazy dog and runs away. ".repeat(60);
        std::fs::write(folder.path().join("text.txt"), words).unwrap();
        Place { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        // Without a cache, kernels are compiled anew and tokens lie in the run's own folder.
        command.env("TILEWRIGHT_CACHE", "off").env("TILEWRIGHT_DEVICE", "cpu").env("RAYON_NUM_THREADS", "2");
        command.current_dir(self.folder.path()).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn train(&self, out: &str, more: &[&str]) -> Command {
        self.command(&[&["train", "--data", "text.txt", "--out", out], SMALL, more].concat())
    }

    fn resume(&self, out: &str, more: &[&str]) -> Command {
        self.command(&[&["train", "--resume", "--out", out], more].concat())
    }

    /// The losses of a run, as its log has them: all digits of step and loss.
    fn losses(&self, out: &str) -> Vec<String> {
        let log = std::fs::read_to_string(self.path(out).join("log.jsonl")).unwrap();
        let field = |line: &str, name: &str| {
            let value = line.split(&format!("\"{name}\":")).nth(1).unwrap();
            value.split([',', '}']).next().unwrap().to_string()
        };
        let loss = |line: &str| format!("{} {} {}", field(line, "what"), field(line, "step"), field(line, "loss"));
        log.lines().map(loss).collect()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn ok(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{}{}", text(&stdout), text(&stderr));
    text(&stdout)
}

/// The error of a program that ended with this exit code. A panic never counts.
#[track_caller]
fn fails(mut command: Command, code: i32) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert_eq!(status.code(), Some(code), "{}{}", text(&stdout), text(&stderr));
    let error = text(&stderr);
    assert!(error.contains("error: ") && !error.contains("panicked"), "{error}");
    error
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
}

/// Waits until the log of a run has so many lines.
fn wait_for_lines(child: &mut Child, log: &Path, lines: usize) {
    let start = Instant::now();
    while std::fs::read_to_string(log).map_or(0, |text| text.lines().count()) < lines {
        assert!(child.try_wait().unwrap().is_none(), "the run ended before it had {lines} lines");
        assert!(start.elapsed() < Duration::from_secs(300), "no {lines} lines after five minutes");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_run_that_was_killed_goes_on_bit_for_bit() {
    killed_and_resumed("f32");
    killed_and_resumed("bf16");
}

fn killed_and_resumed(precision: &str) {
    let place = Place::new();
    let steps = ["--steps", "60", "--save-every", "7", "--evaluate-every", "20", "--precision", precision];
    ok(place.train("whole", &steps));
    let expected = place.losses("whole");
    assert_eq!(expected.len(), 63);

    let mut child = place.train("killed", &steps).spawn().unwrap();
    wait_for_lines(&mut child, &place.path("killed/log.jsonl"), 23);
    // SIGKILL: the program has no say in it.
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(place.losses("killed").len() < expected.len(), "the run was killed before its end");
    let said = ok(place.resume("killed", &[]));
    assert_says(&said, &["resuming after step "]);
    assert_eq!(place.losses("killed"), expected);

    let model = |out: &str| std::fs::read(place.path(out).join("checkpoint.safetensors")).unwrap();
    assert_eq!(model("killed"), model("whole"), "parameters and moments are the same too");
}

#[test]
fn it_learns_the_text_and_writes_like_it() {
    let place = Place::new();
    let said = ok(place.train("run", &["--steps", "150", "--lr", "0.01", "--micro-batch", "3"]));
    assert_says(&said, &["text.txt", "ln(", "step 150: training loss", "wrote run/loss.svg"]);
    let losses = place.losses("run");
    let loss = |line: &String| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
    let (first, last) = (loss(&losses[0]), loss(losses.last().unwrap()));
    assert!(first > 5.0 && last < 0.5, "from {first} to {last}");
    let generate = |more: &[&str]| {
        let arguments = [&["generate", "run", "--prompt", "the quick brown", "--tokens", "12"], more].concat();
        ok(place.command(&arguments))
    };
    assert_says(&generate(&["--temperature", "0"]), &["the quick brown fox jumps over the lazy dog"]);
    assert_eq!(generate(&["--seed", "3"]), generate(&["--seed", "3"]));
    assert!(std::fs::read_to_string(place.path("run/loss.svg")).unwrap().contains("</svg>"));
}

/// All ways to compute the model give the same losses, up to rounding, and the same forms the same bits.
#[test]
fn losses_agree_however_the_model_is_computed() {
    let place = Place::new();
    let forms = [
        ("blocks", &["--attention", "flash", "--fusion", "blocks"][..]),
        ("recomputed", &["--attention", "flash", "--fusion", "blocks", "--recompute"]),
        ("flash", &["--attention", "flash", "--fusion", "ops"]),
        ("tiled", &["--attention", "tiled", "--fusion", "ops"]),
        ("naive", &["--attention", "naive", "--fusion", "none"]),
    ];
    let losses = |out: &str| -> Vec<f64> {
        place.losses(out).iter().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    for (out, form) in forms {
        ok(place.train(out, &[form, &["--steps", "100"]].concat()));
    }
    let expected = losses("naive");
    assert_eq!(expected.len(), 101);
    assert!(expected[99] < 0.6 * expected[0], "{expected:?}");
    for (out, _) in forms {
        for (step, (found, expected)) in losses(out).iter().zip(&expected).enumerate() {
            assert!((found - expected).abs() <= 1e-4, "{out}, line {step}: {found} for {expected}");
        }
    }
}

/// Where one micro-batch is the step, gradients are bf16 in mixed precision; several add up in f32. That rounding is no more
/// than what bf16 does elsewhere: the losses are as far from those of f32.
#[test]
fn mixed_precision_learns_as_f32_does() {
    let place = Place::new();
    let losses = |out: &str, options: &[&str]| -> Vec<f64> {
        ok(place.train(out, &[options, &["--steps", "100", "--lr", "0.003"]].concat()));
        place.losses(out).iter().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    let expected = losses("f32", &[]);
    let once = losses("once", &["--precision", "bf16"]);
    let added = losses("added", &["--precision", "bf16", "--micro-batch", "2"]);
    assert!(expected[99] < 0.6 * expected[0], "{expected:?}");
    let worst = |found: &[f64]| found.iter().zip(&expected).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
    let (once, added) = (worst(&once), worst(&added));
    println!("largest difference from f32: {once:.1e} with gradients in bf16, {added:.1e} with gradients in f32");
    assert!(once > 0.0 && once < 0.02 && added < 0.02, "{once} {added}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_what_there_is() {
    let place = Place::new();
    // Without evaluations every line is a step, however many there are by then.
    let options = ["--steps", "100000", "--save-every", "0", "--evaluate-every", "0"];
    let mut train = place.train("run", &options);
    // Tests may run in the background of a shell, which ignores SIGINT, and what is ignored stays ignored.
    // SAFETY: signal is safe to call between fork and exec.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut train, || {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut child = train.spawn().unwrap();
    wait_for_lines(&mut child, &place.path("run/log.jsonl"), 3);
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert_eq!(status.code(), Some(75));
    assert_says(&text(&stderr), &["stopped by SIGINT after step", "--resume"]);
    let made = place.losses("run").len() as u64;
    ok(place.resume("run", &["--steps", &(made + 2).to_string(), "--schedule", "keep"]));
    assert_eq!(place.losses("run").len() as u64, made + 3, "two steps and an evaluation");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_last_checkpoint() {
    let place = Place::new();
    ok(place.train("run", &["--steps", "4"]));
    let path = place.path("run/checkpoint.safetensors");
    let before = std::fs::read(&path).unwrap();
    // Files of at most half of the checkpoint: what is beyond cannot be written.
    let limit = before.len() / 2 / 512;
    let program = env!("CARGO_BIN_EXE_tilewright");
    let script =
        format!("trap '' XFSZ; ulimit -f {limit}; exec {program} train --resume --out run --steps 8 --schedule keep");
    let command = place.command(&[]);
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).current_dir(command.get_current_dir().unwrap());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let message = fails(shell, 1);
    assert_says(&message, &["cannot write run/checkpoint.safetensors", "no room", "still whole"]);
    assert!(std::fs::read(&path).unwrap() == before, "the checkpoint was touched");
    let left: Vec<String> = std::fs::read_dir(place.path("run"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(".tilewright"))
        .collect();
    assert!(left.is_empty(), "{left:?} were left behind");
    ok(place.resume("run", &["--steps", "8", "--schedule", "keep"]));
}

#[test]
fn a_loss_that_is_no_number_stops_the_run() {
    let place = Place::new();
    let rates = ["--steps", "50", "--lr", "1e30", "--warmup", "0", "--clip", "0"];
    let message = fails(place.train("run", &rates), 1);
    assert_says(
        &message,
        &["step ", "not finite", "the first that has NaN or infinity is", "run/not-finite.safetensors"],
    );
    assert!(place.path("run/not-finite.safetensors").exists());
}

#[test]
fn more_micro_batches_than_a_step_has_room_for_are_refused_before_it() {
    let place = Place::new();
    ok(place.train("run", &["--steps", "1"]));
    let more = ["--steps", "2", "--schedule", "keep", "--batch", "8194", "--micro-batch", "1"];
    let message = fails(place.resume("run", &more), 1);
    assert_says(&message, &["8194 micro-batches", "at most 4096", "--micro-batch 3"]);
}

#[test]
fn another_seed_is_refused_when_a_run_goes_on() {
    let place = Place::new();
    ok(place.train("run", &["--steps", "2"]));
    let message = fails(place.resume("run", &["--steps", "4", "--schedule", "keep", "--seed", "7"]), 2);
    assert_says(&message, &["--seed is 7", "began with 0"]);
    ok(place.resume("run", &["--steps", "4", "--schedule", "keep", "--seed", "0"]));
}

#[test]
fn mistakes_are_told_with_what_to_do() {
    let place = Place::new();
    let train = |more: &[&str]| place.command(&[&["train", "--out", "x"], more].concat());
    assert_says(&fails(train(&["--data", "missing.txt"]), 1), &["missing.txt", "--data"]);
    std::fs::write(place.path("latin.txt"), b"caf\xe9 ".repeat(500)).unwrap();
    assert_says(&fails(train(&["--data", "latin.txt"]), 1), &["latin.txt", "UTF-8", "byte 3"]);
    std::fs::write(place.path("short.txt"), "only a few words are in this text").unwrap();
    let short = fails(train(&["--data", "short.txt", "--vocab", "300"]), 1);
    assert_says(&short, &["short.txt", "context 128", "129", "--context"]);
    assert_says(&fails(train(&["--size", "huge"]), 2), &["huge", "small, medium, large, xl, 2.7B"]);
    assert_says(&fails(train(&["--width", "96", "--heads", "5"]), 2), &["5 heads", "96"]);
    assert_says(&fails(train(&["--attention", "fast"]), 2), &["fast", "flash"]);
    assert_says(&fails(train(&["--beta1", "1"]), 2), &["--beta1", "'1'", "a number from 0 to below 1"]);
    assert_says(&fails(train(&["--batch", "0"]), 2), &["--batch is 0"]);
    assert_says(&fails(train(&["--vocab", "100"]), 1), &["vocabulary of 100", "256"]);
    if !cfg!(feature = "cuda") {
        assert_says(&fails(train(&["--device", "cuda:3"]), 1), &["GPU 3 was asked for", "--device cpu"]);
    }
    assert!(!place.path("x/checkpoint.safetensors").exists());
    assert_says(&fails(place.command(&["generate", "x"]), 1), &["cannot read", "tilewright train"]);
    assert_says(&fails(place.resume("x", &[]), 1), &["x/checkpoint.safetensors"]);
}

#[test]
fn checkpoints_that_do_not_fit_are_refused() {
    let place = Place::new();
    ok(place.train("run", &["--steps", "2"]));
    assert_says(&fails(place.train("run", &["--steps", "4"]), 2), &["another run", "--resume", "--out"]);
    assert_says(&fails(place.resume("run", &[]), 2), &["completed 2 of 2 steps", "--steps"]);
    let other = fails(place.resume("run", &["--schedule", "keep", "--steps", "4", "--layers", "2", "--tied"]), 1);
    assert_says(&other, &["another model", "`layers` is expected to be 2, found 1", "`tied` is expected to be true"]);
    std::fs::write(place.path("text.txt"), "another text, which is long enough. ".repeat(90)).unwrap();
    assert_says(&fails(place.resume("run", &["--schedule", "keep", "--steps", "4"]), 1), &["another text", "--data"]);

    let path = place.path("run/checkpoint.safetensors");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 100]).unwrap();
    let found = (whole.len() - 100).to_string();
    for command in [place.resume("run", &["--schedule", "keep", "--steps", "4"]), place.command(&["generate", "run"])] {
        assert_says(&fails(command, 1), &["run/checkpoint.safetensors", "cut short", &found]);
    }
}
