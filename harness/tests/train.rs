//! Tests of `tilewright train` and `tilewright generate` as programs: learning, resuming, and errors.

mod support;

use std::process::{Command, Output};

use support::{Place, assert_says, fails, field, ok, text};

/// Returns kind, step and loss, with all digits, of every line of a run's log.
fn losses(place: &Place, out: &str) -> Vec<String> {
    let loss = |line: &String| format!("{} {} {}", field(line, "what"), field(line, "step"), field(line, "loss"));
    place.log(out).iter().map(loss).collect()
}

#[test]
fn a_killed_run_resumes_bit_for_bit() {
    killed_and_resumed("f32");
    killed_and_resumed("bf16");
}

fn killed_and_resumed(precision: &str) {
    let place = Place::new();
    let steps = format!("--steps 60 --save-every 7 --evaluate-every 20 --precision {precision}");
    ok(place.train("uninterrupted", &steps));
    let expected = losses(&place, "uninterrupted");
    assert_eq!(expected.len(), 63);

    let mut child = place.train("killed", &steps).spawn().unwrap();
    place.wait_for_lines(&mut child, "killed", 23);
    // SIGKILL cannot be handled.
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(losses(&place, "killed").len() < expected.len(), "the run was killed before its end");
    let said = ok(place.resume("killed", ""));
    assert_says(&said, &["resuming after step "]);
    assert_eq!(losses(&place, "killed"), expected);

    let model = |out: &str| std::fs::read(place.path(out).join("checkpoint.safetensors")).unwrap();
    assert_eq!(model("killed"), model("uninterrupted"), "parameters and moments are the same too");
}

#[test]
fn training_fits_the_text_and_generates_it() {
    let place = Place::new();
    let said = ok(place.train("run", "--steps 150 --lr 0.01 --micro-batch 3"));
    assert_says(&said, &["text.txt", "ln(", "step 150: training loss", "wrote run/loss.svg"]);
    let losses = losses(&place, "run");
    let loss = |line: &String| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
    let (first, last) = (loss(&losses[0]), loss(losses.last().unwrap()));
    assert!(first > 5.0 && last < 0.5, "from {first} to {last}");
    let generate = |more: &str| {
        let mut command = place.command(&format!("generate run --tokens 12 {more}"));
        command.args(["--prompt", "the quick brown"]);
        ok(command)
    };
    assert_says(&generate("--temperature 0"), &["the quick brown fox jumps over the lazy dog"]);
    assert_eq!(generate("--seed 3"), generate("--seed 3"));
    assert!(std::fs::read_to_string(place.path("run/loss.svg")).unwrap().contains("</svg>"));
}

/// All implementations of the model give the same losses up to rounding.
#[test]
fn losses_agree_however_the_model_is_computed() {
    let place = Place::new();
    let forms = [
        ("blocks", "--attention flash --fusion blocks"),
        ("recomputed", "--attention flash --fusion blocks --recompute"),
        ("flash", "--attention flash --fusion ops"),
        ("tiled", "--attention tiled --fusion ops"),
        ("naive", "--attention naive --fusion none"),
    ];
    let losses = |out: &str| -> Vec<f64> {
        losses(&place, out).iter().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    for (out, form) in forms {
        ok(place.train(out, &format!("{form} --steps 100")));
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

/// With one micro-batch per step, gradients are bf16 in mixed precision; several are accumulated in f32. Rounding
/// gradients to bf16 adds no more error than bf16 elsewhere: in both cases, losses differ from those in f32 by less
/// than 2 %.
#[test]
fn mixed_precision_learns_as_f32_does() {
    let place = Place::new();
    let losses = |out: &str, options: &str| -> Vec<f64> {
        ok(place.train(out, &format!("{options} --steps 100 --lr 0.003")));
        losses(&place, out).iter().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    let expected = losses("f32", "");
    let once = losses("once", "--precision bf16");
    let added = losses("added", "--precision bf16 --micro-batch 2");
    assert!(expected[99] < 0.6 * expected[0], "{expected:?}");
    let worst = |found: &[f64]| found.iter().zip(&expected).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
    let (once, added) = (worst(&once), worst(&added));
    println!("largest difference from f32: {once:.1e} with gradients in bf16, {added:.1e} with gradients in f32");
    assert!(once > 0.0 && once < 0.02 && added < 0.02, "{once} {added}");
}

#[cfg(unix)]
#[test]
fn sigint_saves_the_state() {
    let place = Place::new();
    // Without evaluations every line is a step.
    let mut train = place.train("run", "--steps 100000 --save-every 0 --evaluate-every 0");
    // A shell's background jobs ignore SIGINT, and the child would inherit it. SAFETY: signal is safe to call between
    // fork and exec.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut train, || {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut child = train.spawn().unwrap();
    place.wait_for_lines(&mut child, "run", 3);
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert_eq!(status.code(), Some(75));
    assert_says(&text(&stderr), &["stopped by SIGINT after step", "--resume"]);
    let made = losses(&place, "run").len() as u64;
    ok(place.resume("run", &format!("--steps {} --schedule keep", made + 2)));
    assert_eq!(losses(&place, "run").len() as u64, made + 3, "two steps and an evaluation");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_last_checkpoint() {
    let place = Place::new();
    ok(place.train("run", "--steps 4"));
    let path = place.path("run/checkpoint.safetensors");
    let before = std::fs::read(&path).unwrap();
    // Limits files to half of the checkpoint's size, in blocks of 512 bytes.
    let limit = before.len() / 2 / 512;
    let again = "train --resume --out run --steps 8 --schedule keep";
    let message = fails(place.shell(&format!("trap '' XFSZ; ulimit -f {limit}"), again), 1);
    assert_says(&message, &["cannot write run/checkpoint.safetensors", "ulimit -f", "is intact"]);
    assert!(std::fs::read(&path).unwrap() == before, "the checkpoint was touched");
    let left = place.names("run");
    assert!(!left.iter().any(|name| name.starts_with(".tilewright")), "{left:?} were left behind");
    ok(place.resume("run", "--steps 8 --schedule keep"));
}

#[test]
fn a_nan_loss_stops_the_run() {
    let place = Place::new();
    let message = fails(place.train("run", "--steps 50 --lr 1e30 --warmup 0 --clip 0"), 1);
    assert_says(&message, &["step ", "not finite", "the first non-finite value is in", "run/not-finite.safetensors"]);
    assert!(place.path("run/not-finite.safetensors").exists());
}

#[test]
fn too_many_micro_batches_are_refused() {
    let place = Place::new();
    ok(place.train("run", "--steps 1"));
    let message = fails(place.resume("run", "--steps 2 --schedule keep --batch 8194 --micro-batch 1"), 1);
    assert_says(&message, &["8194 micro-batches", "at most 4096", "--micro-batch 3"]);
}

#[test]
fn another_seed_is_refused_when_a_run_resumes() {
    let place = Place::new();
    ok(place.train("run", "--steps 2"));
    let message = fails(place.resume("run", "--steps 4 --schedule keep --seed 7"), 2);
    assert_says(&message, &["--seed is 7", "started with 0"]);
    ok(place.resume("run", "--steps 4 --schedule keep --seed 0"));
}

#[test]
fn mistakes_name_the_remedy() {
    let place = Place::new();
    let train = |more: &str| place.command(&format!("train --out x {more}"));
    assert_says(&fails(train("--data missing.txt"), 1), &["missing.txt", "--data"]);
    std::fs::write(place.path("latin.txt"), b"caf\xe9 ".repeat(500)).unwrap();
    assert_says(&fails(train("--data latin.txt"), 1), &["latin.txt", "UTF-8", "byte 3"]);
    std::fs::write(place.path("short.txt"), "only a few words are in this text").unwrap();
    let short = fails(train("--data short.txt --vocab-size 300"), 1);
    assert_says(&short, &["short.txt", "context 128", "129", "--context"]);
    assert_says(&fails(train("--size huge"), 2), &["huge", "small, medium, large, xl, 2.7B"]);
    assert_says(&fails(train("--d-model 96 --heads 5"), 2), &["5 heads", "96"]);
    assert_says(&fails(train("--attention fast"), 2), &["fast", "flash"]);
    assert_says(&fails(train("--beta1 1"), 2), &["--beta1", "'1'", "a number from 0 to below 1"]);
    assert_says(&fails(train("--batch 0"), 2), &["--batch is 0"]);
    assert_says(&fails(train("--vocab-size 100"), 1), &["vocabulary of at least 256", "found 100"]);
    if !cfg!(feature = "cuda") {
        assert_says(&fails(train("--device cuda:3"), 1), &["GPU 3 was requested", "--device cpu"]);
    }
    assert!(!place.path("x/checkpoint.safetensors").exists());
    assert_says(&fails(place.command("generate x"), 1), &["cannot read", "tilewright train"]);
    assert_says(&fails(place.resume("x", ""), 1), &["x/checkpoint.safetensors"]);
}

#[test]
fn checkpoints_that_do_not_fit_are_refused() {
    let place = Place::new();
    ok(place.train("run", "--steps 2"));
    assert_says(&fails(place.train("run", "--steps 4"), 2), &["another run", "--resume", "--out"]);
    assert_says(&fails(place.resume("run", ""), 2), &["completed 2 of 2 steps", "--steps"]);
    let other = fails(place.resume("run", "--schedule keep --steps 4 --layers 2 --tied"), 1);
    assert_says(&other, &["another model", "`layers` is expected to be 2, found 1", "`tied` is expected to be true"]);
    std::fs::write(place.path("text.txt"), "another text, which is long enough. ".repeat(90)).unwrap();
    assert_says(&fails(place.resume("run", "--schedule keep --steps 4"), 1), &["another text", "--data"]);

    let path = place.path("run/checkpoint.safetensors");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 100]).unwrap();
    let found = (whole.len() - 100).to_string();
    for command in [place.resume("run", "--schedule keep --steps 4"), place.command("generate run")] {
        assert_says(&fails(command, 1), &["run/checkpoint.safetensors", "truncated", &found]);
    }
}
