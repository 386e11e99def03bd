//! Tests of ranks with different settings or files: no rank trains.

use std::path::Path;
use std::process::Command;

/// Runs `tilewright train` on two ranks with different options; returns the success and the output.
fn train(folder: &Path, [zero, one]: [&str; 2]) -> (bool, String) {
    let program = env!("CARGO_BIN_EXE_tilewright");
    let common = "--d-model 16 --d-ff 32 --heads 2 --vocab-size 300 --context 8 --batch 4 --evaluate-sequences 2";
    let own = format!("test $RANK = 0 && set -- {zero} || set -- {one}; exec {program} train {common} \"$@\"");
    let mut command = Command::new(program);
    command.args(["launch", "--nproc", "2", "--", "sh", "-c", &own]).current_dir(folder);
    command.env("TILEWRIGHT_DEVICE", "cpu").env("TILEWRIGHT_CACHE", folder.join("cache"));
    for name in ["MASTER_ADDR", "MASTER_PORT", "TILEWRIGHT_COMM", "TILEWRIGHT_JOB", "RANK", "WORLD_SIZE"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

const PLAIN: &str = "--out run --data text --layers 1 --steps 2";

/// Checks that both ranks report all lines, and no step was run.
#[track_caller]
fn both_report(folder: &Path, (good, text): (bool, String), lines: &[&str]) {
    assert!(!good && !text.contains("step 1"), "{text}");
    for rank in [0, 1] {
        let prefix = format!("[rank {rank}] ");
        let said: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        for line in lines {
            assert!(said.iter().any(|found| found.trim() == *line), "rank {rank} does not say `{line}`: {text}");
        }
    }
    assert!(!folder.join("run/checkpoint.safetensors").exists(), "{text}");
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..400).map(|i| format!("line {} of a text that says {}.\n", i, i * i % 97)).collect();
    std::fs::write(folder.path().join("text"), &text).unwrap();
    std::fs::write(folder.path().join("other"), text.replace("line 7 ", "line 8 ")).unwrap();
    folder
}

#[test]
fn options_that_differ_are_named_on_all_ranks() {
    let folder = folder();
    let options =
        "--lr 0.002 --weight-decay 0 --beta1 0.8 --warmup 2 --micro-batch 1 --clip 0 --seed 3 --evaluate-every 1";
    let lines = [
        "rank 1: --lr is 0.002, and 0.003 on rank 0",
        "rank 1: --min-lr is 0.0002, and 0.00030000000000000003 on rank 0",
        "rank 1: --weight-decay is 0, and 0.1 on rank 0",
        "rank 1: --beta1 is 0.8, and 0.9 on rank 0",
        "rank 1: --warmup is 2, and 0 on rank 0",
        "rank 1: --micro-batch is 1, and 4 on rank 0",
        "rank 1: --clip is off, and 1 on rank 0",
        "rank 1: --seed is 3, and 0 on rank 0",
        "rank 1: --evaluate-every is 1, and 100 on rank 0",
    ];
    both_report(folder.path(), train(folder.path(), [PLAIN, options]), &lines);
    let options =
        "--out run --data text --steps 3 --precision bf16 --comm-dtype bf16 --ddp flat --shard zero1 --layers 2";
    let lines = [
        "rank 1: --steps is 3, and 2 on rank 0",
        "rank 1: --precision is bf16, and f32 on rank 0",
        "rank 1: --comm-dtype is bf16, and off on rank 0",
        "rank 1: --ddp is flat, and bucketed on rank 0",
        "rank 1: --shard is zero1, and off on rank 0",
        "rank 1: --layers is 2, and 1 on rank 0",
    ];
    both_report(folder.path(), train(folder.path(), [PLAIN, options]), &lines);
}

#[test]
fn texts_that_differ_are_named_on_all_ranks() {
    let folder = folder();
    let hash = |name: &str| blake3::hash(&std::fs::read(folder.path().join(name)).unwrap()).to_hex();
    let line = format!("rank 1: the text's hash (--data) is {}, and {} on rank 0", hash("other"), hash("text"));
    both_report(folder.path(), train(folder.path(), [PLAIN, "--out run --data other --layers 1 --steps 2"]), &[&line]);
}

/// Rank 1 resumes from a checkpoint in a folder of its own; rank 0 starts at step 0.
#[test]
fn a_rank_that_goes_on_from_another_step_is_named() {
    let folder = folder();
    let (good, text) = train(folder.path(), [PLAIN, &format!("{PLAIN} --minutes 60")]);
    assert!(good, "{text}");
    std::fs::copy(folder.path().join("run/checkpoint.safetensors"), folder.path().join("checkpoint")).unwrap();
    std::fs::remove_dir_all(folder.path().join("run")).unwrap();
    std::fs::create_dir(folder.path().join("mine")).unwrap();
    std::fs::rename(folder.path().join("checkpoint"), folder.path().join("mine/checkpoint.safetensors")).unwrap();
    let ran = train(folder.path(), [PLAIN, "--out mine --data text --layers 1 --steps 4 --schedule keep --resume"]);
    both_report(folder.path(), ran, &["rank 1: the step to resume from (--resume) is 2, and 0 on rank 0"]);
}
