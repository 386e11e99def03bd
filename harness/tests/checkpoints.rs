//! Tests of the files in a run's folder: what `tilewright train` writes, and how it and `tilewright generate` handle
//! existing files.

mod support;
#[path = "support/tensors.rs"]
mod tensors;

use support::{Place, SMALL, assert_says, fails, field, ok};
use tensors::tensors;

/// Returns a number from the line of a training step in a run's log.
fn number(place: &Place, out: &str, step: usize, name: &str) -> String {
    let is_step = |line: &&String| line.contains(&format!("\"step\":{step},")) && line.contains("\"rate\"");
    field(place.log(out).iter().find(is_step).unwrap(), name)
}

#[test]
fn a_folder_has_one_run_at_a_time() {
    let place = Place::new();
    let mut child = place.train("run", "--steps 1000000 --evaluate-every 0 --save-every 0").spawn().unwrap();
    place.wait_for_lines(&mut child, "run", 1);
    let pid = format!("process {} on host ", child.id());
    for second in [place.train("run", "--steps 3"), place.resume("run", "--steps 3")] {
        assert_says(&fails(second, 1), &["another run", "run", &pid, "--out"]);
    }
    // Reading needs no lock.
    assert_says(&fails(place.command("generate run"), 1), &["run/checkpoint.safetensors", "train"]);
    child.kill().unwrap();
    child.wait().unwrap();
    // The lock is released when its holder exits, and the next run removes temporary files of killed writers.
    std::fs::write(place.path("run/.tilewright-4f7aQx"), vec![7; 100_000]).unwrap();
    ok(place.train("run", "--steps 3"));
    assert_eq!(place.names("run"), ["checkpoint.safetensors", "log.jsonl", "loss.svg"]);
}

/// A new run would treat these checkpoints as its own and remove them.
#[test]
fn a_new_run_refuses_a_folder_with_checkpoints() {
    let place = Place::new();
    ok(place.train("run", "--steps 3 --save-every 1 --keep-last 0"));
    std::fs::remove_file(place.path("run/checkpoint.safetensors")).unwrap();
    let names = place.names("run");
    let message = fails(place.train("run", "--steps 3"), 2);
    assert_says(
        &message,
        &["run already contains a checkpoint of another run", "checkpoint-00000002.safetensors", "after step 2"],
    );
    // Even if the checkpoint cannot be read.
    std::fs::write(place.path("run/checkpoint-00000002.safetensors"), "damaged").unwrap();
    std::fs::remove_file(place.path("run/checkpoint-00000001.safetensors")).unwrap();
    assert_says(
        &fails(place.train("run", "--steps 3"), 2),
        &["checkpoint-00000002.safetensors", "choose another folder with --out"],
    );
    assert_eq!(place.names("run").len() + 1, names.len());
}

#[test]
fn damaged_checkpoints_are_refused_by_generate_and_resume() {
    let place = Place::new();
    ok(place.train("run", "--steps 2"));
    let path = place.path("run/checkpoint.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let refuse = |bytes: Vec<u8>, parts: &[&str]| {
        std::fs::write(&path, bytes).unwrap();
        for command in [place.command("generate run --tokens 2"), place.resume("run", "--steps 4 --schedule keep")] {
            assert_says(&fails(command, 1), &[&["run/checkpoint.safetensors"], parts].concat());
        }
    };
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let flip = |offset: usize| {
        let mut flipped = whole.clone();
        flipped[offset] ^= 1;
        flipped
    };
    refuse(flip(header + 3), &["the tensor `", "is damaged", "BLAKE3"]);
    // The digit of `"step":2`, in JSON within a string of the header: the changed header is still valid JSON.
    let step = whole.windows(7).position(|part| part == br#"step\":"#).unwrap();
    refuse(flip(step + 7), &["was changed", "BLAKE3"]);
    refuse(whole[..whole.len() / 2].to_vec(), &["truncated"]);
}

#[test]
fn a_flipped_tokenizer_is_refused() {
    let place = Place::new();
    let train = |out: &str| place.command(&format!("train --data text.txt --out {out} {SMALL} --steps 1"));
    ok(train("a"));
    let kept = std::fs::read_dir(place.path("cache/data")).unwrap().map(|entry| entry.unwrap().path());
    let kept = kept.into_iter().find(|path| path.to_str().unwrap().contains(".tokenizer")).unwrap();
    let whole = std::fs::read(&kept).unwrap();
    let number = whole.windows(5).position(|part| part == b"\"z\":8" || part == b"\"a\":6").unwrap() + 4;
    let mut flipped = whole.clone();
    flipped[number] ^= 1;
    std::fs::write(&kept, flipped).unwrap();
    assert_says(&fails(train("b"), 1), &["tokenizer", "is damaged", "remove it"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_first_save_that_fails_claims_no_checkpoint() {
    let place = Place::new();
    // Limits files to 16 KiB: tokens and logs fit; checkpoints and cached kernels do not.
    let model = SMALL.replace("--d-model 32", "--d-model 64");
    let limited = |blocks: u32, out: &str| {
        let train = format!("train --data text.txt --out {out} {model} --steps 2");
        fails(place.shell(&format!("trap '' XFSZ; ulimit -f {blocks}"), &train), 1)
    };
    // Nothing can be written, and no file remains.
    assert_says(&limited(0, "none"), &["cannot write none/run.lock"]);
    assert!(!place.path("none").exists());
    let message = limited(32, "run");
    assert_says(&message, &["cannot write run/checkpoint.safetensors", "ulimit -f", "no checkpoint of this run"]);
    assert!(!message.contains("intact"), "{message}");
    assert_eq!(place.names("run"), ["data", "log.jsonl"]);
}

/// The log exceeds the limit on file sizes; checkpoints do not.
#[cfg(target_os = "linux")]
#[test]
fn a_log_that_cannot_be_written_says_which_checkpoint_is_whole() {
    let place = Place::new();
    let tiny = "--layers 1 --d-model 8 --d-ff 8 --heads 1 --context 16 --vocab-size 300 --batch 1";
    let train = format!("train --data text.txt --out run {tiny} --steps 1000000 --save-every 10 --evaluate-every 0");
    let message = fails(place.shell("trap '' XFSZ; ulimit -f 256", &train), 1);
    assert_says(
        &message,
        &["cannot write run/log.jsonl", "ulimit -f", "the last checkpoint, of step ", "--resume continues from it"],
    );
    let step = message.split("of step ").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
    let resumed = ok(place.command("train --resume --out run --minutes 0"));
    assert_says(&resumed, &[&format!("resuming after step {step},")]);
}

#[test]
fn a_log_that_is_no_log_is_not_touched() {
    let place = Place::new();
    ok(place.train("run", "--steps 2"));
    let notes = "notes on this run\n";
    std::fs::write(place.path("notes"), notes).unwrap();
    std::fs::remove_file(place.path("run/log.jsonl")).unwrap();
    std::os::unix::fs::symlink("../notes", place.path("run/log.jsonl")).unwrap();
    let more = "--steps 4 --schedule keep";
    let message = fails(place.resume("run", more), 1);
    assert_says(&message, &["cannot use run/log.jsonl", "line 1 is not a log line", "help: move the file away"]);
    assert_eq!(std::fs::read_to_string(place.path("notes")).unwrap(), notes);
    std::fs::remove_file(place.path("run/log.jsonl")).unwrap();
    ok(place.resume("run", more));
}

#[test]
fn the_last_and_the_best_checkpoints_are_kept() {
    let place = Place::new();
    let said = ok(place.train("run", "--steps 12 --save-every 2 --evaluate-every 2 --keep-last 3 --keep-best 0"));
    let kept = ["checkpoint-00000008.safetensors", "checkpoint-00000010.safetensors", "checkpoint.safetensors"];
    assert_eq!(place.names("run")[..3], kept);
    // The checkpoint with the lowest validation loss, according to the log.
    let evaluations = place.log("run").into_iter().filter(|line| line.contains("evaluation"));
    let losses: Vec<f64> = evaluations.map(|line| field(&line, "loss").parse().unwrap()).collect();
    let best = (3..6).min_by(|a, b| losses[*a].total_cmp(&losses[*b])).unwrap();
    let (name, step, loss) = (kept[best - 3], 2 * (best + 1), losses[best]);
    let line = format!("the best checkpoint is {name}, of step {step}, with a validation loss of {loss:.3}\n");
    assert_says(&said, &[&line]);
    // Each is complete.
    for name in kept {
        ok(place.command(&format!("generate run/{name} --tokens 2")));
    }
    // For a damaged newest checkpoint, the message names an older one to copy.
    let newest = place.path("run/checkpoint.safetensors");
    let whole = std::fs::read(&newest).unwrap();
    std::fs::write(&newest, &whole[..whole.len() - 1]).unwrap();
    let message = fails(place.resume("run", ""), 1);
    let older = "copy checkpoint-00000010.safetensors to checkpoint.safetensors";
    assert_says(&message, &["truncated", older]);
    // Damage of the last byte, and of the first byte of the tensors.
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&newest, &flipped).unwrap();
    let message = fails(place.resume("run", "--steps 14 --schedule keep"), 1);
    assert_says(&message, &["the tensor `", "is damaged", older]);
    flipped.clone_from(&whole);
    let first = whole.len() - tensors(&place.path("run/checkpoint-00000010.safetensors")).len();
    flipped[first] ^= 1;
    std::fs::write(&newest, &flipped).unwrap();
    let message = fails(place.command("generate run"), 1);
    assert_says(&message, &["is damaged", "help: `tilewright generate run/checkpoint-00000010.safetensors`"]);
    std::fs::copy(place.path("run/checkpoint-00000010.safetensors"), &newest).unwrap();
    assert_says(&ok(place.resume("run", "")), &["resuming after step 10", &line]);
    assert!(std::fs::read(&newest).unwrap() == whole, "the recomputed steps are identical");
    let help = ok(place.command("train --help"));
    assert_says(&help, &["--keep-last", "--keep-best", "--save-every"]);
}

/// Converts a checkpoint to that of an earlier version, with the old names in its header: in format 2, or in format 1,
/// which has no checksums.
fn with_old_names(checkpoint: &[u8], format: u32) -> Vec<u8> {
    let length = u64::from_le_bytes(checkpoint[..8].try_into().unwrap()) as usize;
    let (header, tensors) = checkpoint[8..].split_at(length);
    let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let metadata = header["__metadata__"].as_object_mut().unwrap();
    let mut own = metadata["tilewright"].as_str().unwrap().to_string();
    for (name, old) in [
        ("d_model", "width"),
        ("d_ff", "hidden"),
        ("trainer", "learner"),
        ("evaluate_sequences", "evaluate_windows"),
        ("comm_dtype", "wire"),
    ] {
        assert_eq!(own.matches(&format!("\"{name}\":")).count(), 1, "{name} in {own}");
        own = own.replace(&format!("\"{name}\":"), &format!("\"{old}\":"));
    }
    own = own.replace("tilewright checkpoint 2", &format!("tilewright checkpoint {format}"));
    metadata.insert("tilewright".into(), own.into());
    match format {
        1 => metadata.retain(|name, _| name == "tilewright" || name == "tokenizer"),
        _ => drop(metadata.insert("header_blake3".into(), "0".repeat(64).into())),
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut start = [&(header.len() as u64).to_le_bytes(), header.as_slice()].concat();
    if format == 2 {
        // The hash of the header is computed with zeros in place of the hash.
        let (hash, zeros) = (blake3::hash(&start).to_hex(), b"0".repeat(64));
        let offset = start.windows(64).position(|part| part == zeros).unwrap();
        start[offset..offset + 64].copy_from_slice(hash.as_bytes());
    }
    [&start, tensors].concat()
}

#[test]
fn checkpoints_with_the_names_of_earlier_versions_are_resumed_bit_for_bit() {
    let place = Place::new();
    let ranks = "--ddp bucketed --comm-dtype bf16 --evaluate-sequences 3";
    ok(place.train("whole", &format!("--steps 8 {ranks}")));
    for format in [1, 2] {
        let out = format!("run{format}");
        let path = place.path(&out).join("checkpoint.safetensors");
        ok(place.train(&out, &format!("--steps 8 {ranks} --minutes 0")));
        std::fs::write(&path, with_old_names(&std::fs::read(&path).unwrap(), format)).unwrap();
        ok(place.command(&format!("generate {out} --tokens 2")));
        // Another model is refused with the field's present name.
        let other = fails(place.resume(&out, "--d-model 64"), 1);
        assert_says(&other, &["`d_model` is expected to be 64, found 32"]);
        assert_says(&ok(place.resume(&out, "--ddp bucketed")), &["resuming after step 1,"]);
        let [found, expected] = [&path, &place.path("whole/checkpoint.safetensors")].map(|path| tensors(path));
        assert!(found == expected, "format {format}");
        let validation = |out: &str| {
            let log = place.log(out);
            log.iter().filter(|line| line.contains("evaluation")).map(|line| field(line, "loss")).collect::<Vec<_>>()
        };
        assert_eq!(validation(&out).last(), validation("whole").last());
    }
}

/// Recomputed activations have the same bits, so that a run can resume with recomputation.
#[test]
fn a_run_resumes_with_recomputation_bit_for_bit() {
    for precision in ["f32", "bf16"] {
        let place = Place::new();
        let train = |out: &str, more: &str| {
            let model = SMALL.replace("--layers 1", "--layers 2");
            place.command(&format!(
                "train --data text.txt --out {out} {model} --steps 12 --precision {precision} {more}"
            ))
        };
        ok(train("whole", ""));
        ok(train("run", "--minutes 0"));
        assert_says(&ok(place.resume("run", "--recompute")), &["resuming after step 1,"]);
        let [found, expected] = ["run", "whole"].map(|out| tensors(&place.path(out).join("checkpoint.safetensors")));
        assert!(found == expected, "{precision}");
        for step in 1..=12 {
            let loss = |out: &str| number(&place, out, step, "loss");
            assert_eq!(loss("run"), loss("whole"), "{precision}, step {step}");
        }
    }
}

#[test]
fn other_steps_need_a_decision_about_the_learning_rate() {
    let place = Place::new();
    ok(place.train("run", "--steps 10 --lr 0.01 --min-lr 0.001 --warmup 2"));
    let checkpoint = std::fs::read(place.path("run/checkpoint.safetensors")).unwrap();
    let message = fails(place.resume("run", "--steps 20"), 2);
    let both = ["until step 10", "--steps is 20", "--schedule keep", "1.000e-3 in step 11", "--schedule extend"];
    assert_says(&message, &both);
    assert!(std::fs::read(place.path("run/checkpoint.safetensors")).unwrap() == checkpoint);
    assert_says(&fails(place.command("train --out new --schedule keep"), 2), &["--schedule", "--resume"]);

    let rates = |plan: &str| -> Vec<f64> {
        std::fs::write(place.path("run/checkpoint.safetensors"), &checkpoint).unwrap();
        ok(place.resume("run", &format!("--steps 20 --schedule {plan}")));
        (11..=20).map(|step| number(&place, "run", step, "rate").parse().unwrap()).collect()
    };
    assert_eq!(rates("keep"), [0.001; 10]);
    let extended = rates("extend");
    // Half a cosine from step 2 to step 20.
    for (rate, step) in extended.iter().zip(11..) {
        let progress = (f64::from(step) - 2.0) / 18.0;
        let expected = 0.001 + 0.009 * (0.5 + 0.5 * (progress * std::f64::consts::PI).cos());
        assert!((rate - expected).abs() < 1e-12, "step {step}: {rate} for {expected}");
    }
    // The choice is stored for the next resume. Fewer steps need another choice; a constant rate needs none.
    std::fs::write(place.path("run/checkpoint.safetensors"), &checkpoint).unwrap();
    ok(place.resume("run", "--steps 20 --schedule extend --minutes 0"));
    ok(place.resume("run", "--minutes 0"));
    assert!((number(&place, "run", 12, "rate").parse::<f64>().unwrap() - extended[1]).abs() < 1e-12);
    assert_says(&fails(place.resume("run", "--steps 15"), 2), &["until step 20", "--steps is 15"]);
    ok(place.resume("run", "--steps 15 --lr 0.002 --min-lr 0.002"));
}
