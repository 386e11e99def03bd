//! Tests of `tilewright tune`: results, the log of known configurations, and tables.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::run::{file, tensor};
use crate::{tilewright, tilewright_with};

fn table(dir: &TempDir, name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(dir.path().join(name)).expect("the table is there")).expect("JSON")
}

#[test]
fn a_kernel_is_tuned_once_and_its_table_grows() {
    let dir = TempDir::new().unwrap();
    let arguments = ["tune", "matmul", "--size", "40x50x60", "--budget", "30", "--export", "t.json"];
    let out = tilewright(dir.path(), &arguments).ok();
    assert!(out.contains("matmul f32 40×50×60") && out.contains("candidates in"), "{out}");
    let written = table(&dir, "t.json");
    assert_eq!(written["entries"].as_array().map(Vec::len), Some(1), "{written}");
    let entry = &written["entries"][0];
    assert_eq!(entry["kernel"], "matmul");
    let key = "T=f32,C=f32,a_col_major=false,b_col_major=false,precision=ieee,m<=64,n<=64,k<=64,cut=64x32";
    assert_eq!(entry["key"], key);
    assert!(entry["config"].as_str().is_some_and(|config| config.starts_with("m_tile=")), "{entry}");
    assert!(entry["median_ms"].as_f64() > Some(0.0), "{entry}");

    // Its key has an expression of sizes and of the device, which `run` and `compile` compute too.
    let inputs =
        [("a", [40, 60]), ("b", [60, 50])].map(|(name, shape)| tensor(name, &shape, &vec![1.0; shape[0] * shape[1]]));
    std::fs::write(dir.path().join("in.safetensors"), file(&inputs)).unwrap();
    let config = entry["config"].as_str().unwrap();
    let run = ["run", "matmul", "-i", "in.safetensors", "-o", "out.safetensors", "--dtype", "C=f32"];
    let compile = ["compile", "matmul", "--target", "host", "--dtype", "f32", "--size", "m=40,n=50,k=60", "-o", "out"];
    for words in [&run[..], &compile] {
        let ran = tilewright(dir.path(), words);
        assert!(ran.err.contains(&format!("the configuration that was measured here: {config}")), "{}", ran.err);
        ran.ok();
    }

    // Without the cache, the table has it.
    let elsewhere = dir.path().join("elsewhere").display().to_string();
    let with_table = |words: &[&str]| {
        let words = [words, &["--table", "t.json"]].concat();
        tilewright_with(dir.path(), &words, &[("TILEWRIGHT_CACHE", &elsewhere)])
    };
    for words in [&run[..], &compile] {
        let ran = with_table(words);
        assert!(ran.err.contains(&format!("those of the table of --table: {config}")), "{}", ran.err);
        ran.ok();
    }
    let message = with_table(&["explain", "matmul"]).fails(1);
    assert!(message.contains("cannot use t.json: it is a table of") && message.contains("sm_90a"), "{message}");
    let message = with_table(&["compile", "softmax_rows", "--target", "host", "--dtype", "f32", "-o", "o"]).fails(1);
    assert!(message.contains("cannot use t.json: it has no entry of `softmax_rows`"), "{message}");
    let message = with_table(&["compile", "matmul", "--target", "host", "--dtype", "f64", "-o", "o"]).fails(2);
    assert!(message.contains("--table is unused: it has no entry for these types, constants and sizes"), "{message}");

    // The second time, the configuration is known. Further entries are added to the table.
    let out = tilewright(dir.path(), &arguments).ok();
    assert!(out.contains("known before"), "{out}");
    let ms = |entry: &Value| entry["median_ms"].as_f64().expect("a time");
    let known = table(&dir, "t.json");
    assert!((ms(&known["entries"][0]) / ms(entry) - 1.0).abs() < 1e-9, "{known} {entry}");
    let columns = [&arguments[..], &["--column-major", "b"]].concat();
    let out = tilewright(dir.path(), &columns).ok();
    assert!(out.contains("matmul f32 40×50×60, b column-major") && out.contains("candidates in"), "{out}");
    let other = [
        "tune",
        "flash_attention_bwd_dq",
        "--seq-len",
        "64",
        "--head-dim",
        "16",
        "--budget",
        "30",
        "--export",
        "t.json",
    ];
    let out = tilewright(dir.path(), &other).ok();
    assert!(out.contains("flash_attention_bwd_dq f32 1×2×64×16 causal"), "{out}");
    let written = table(&dir, "t.json");
    let kernels: Vec<&Value> = written["entries"].as_array().unwrap().iter().map(|entry| &entry["kernel"]).collect();
    assert_eq!(kernels, ["flash_attention_bwd_dq", "matmul", "matmul"]);
    assert_eq!(written["entries"][2]["key"], key.replace("b_col_major=false", "b_col_major=true"));
}

/// Each result is written to the table and printed before the next problem starts.
#[test]
fn each_problem_is_written_when_it_is_done() {
    let dir = TempDir::new().unwrap();
    let sizes = "40x50x60,512x512x512";
    let mut program = Command::new(env!("CARGO_BIN_EXE_tilewright"))
        .args(["tune", "matmul", "--size", sizes, "--budget", "10", "--export", "t.json", "--csv", "t.csv"])
        .env("TILEWRIGHT_DEVICE", "cpu")
        .env("TILEWRIGHT_CACHE", dir.path().join("cache"))
        .env("TILEWRIGHT_LOG", "info")
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("Chosen configurations")), "nothing is printed");
    let written = table(&dir, "t.json");
    assert_eq!(written["entries"].as_array().map(Vec::len), Some(1), "{written}");
    assert!(lines.any(|line| line.contains("512×512×512")), "the second problem is not printed");
    drop(lines.by_ref().collect::<Vec<_>>());
    let output = program.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
    for part in ["candidates, 10 s", "loading m_tile", "checking m_tile", "round 1 of 5"] {
        assert!(log.contains(part), "`{part}` is missing in the log: {log}");
    }
    assert_eq!(table(&dir, "t.json")["entries"].as_array().map(Vec::len), Some(2));
    assert!(dir.path().join("t.csv").exists());
}

#[test]
fn untunable_arguments_are_errors() {
    let dir = TempDir::new().unwrap();
    let refused = |arguments: &[&str], code: i32, reason: &str| {
        let message = tilewright(dir.path(), &[&["tune"], arguments].concat()).fails(code);
        assert!(message.contains(reason), "{arguments:?}: {message}");
    };
    refused(&["softmax"], 2, "not a kernel that can be tuned");
    refused(&["matmull"], 2, "did you mean `matmul`?");
    refused(&["matmul", "--budget", "soon"], 2, "a number of seconds");
    refused(&["matmul", "--size", "4x5"], 2, "256x256x64");
    refused(&["matmul", "--column-major", "c"], 2, "expected none, a, b or ab");
    refused(&["matmul", "--precision", "fp32"], 2, "possible values");
    refused(&["attention", "--head-dim", "300"], 2, "1 to 256");
    refused(&["matmul", "--head-dim", "64"], 2, "--head-dim is unused: it is for attention");
    refused(&["softmax_rows", "--size", "64"], 2, "--size is unused: it is for matmul");
    refused(&["attention", "--d", "64"], 2, "--d is unused: it is for row-wise kernels");
    refused(
        &["matmul", "--precision", "ieee"],
        2,
        "--precision is unused: it is for matmul and attention of f32 on a GPU",
    );
    std::fs::write(dir.path().join("foreign.json"), r#"{"format": "tilewright tuning table", "version": 1, "device": "another", "compute_capability": "9.0", "entries": []}"#).unwrap();
    refused(&["matmul", "--export", "foreign.json"], 1, "a table of another");
    std::fs::write(dir.path().join("bad.json"), "[]").unwrap();
    refused(&["matmul", "--export", "bad.json"], 1, "not a tuning table");
}
