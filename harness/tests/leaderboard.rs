//! Runs the program `leaderboard` on the CPU at small sizes.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn leaderboard(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leaderboard"));
    command.env("TILEWRIGHT_CACHE", dir.join("cache")).env("TILEWRIGHT_DEVICE", "cpu").env_remove("TILEWRIGHT_TUNE");
    command.current_dir(dir).args(arguments).args(["--warmup-ms", "0", "--rep-ms", "0", "--commit", "abc"]);
    command.output().expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs the program, which must succeed, and returns its output.
fn ok(dir: &Path, arguments: &[&str]) -> String {
    let output = leaderboard(dir, arguments);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("the file is there");
    text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
}

#[test]
fn a_case_is_checked_timed_compared_and_recorded() {
    let dir = TempDir::new().unwrap();
    let peer = r#"{"peer": "other", "B": 1, "H": 2, "N": 65, "D": 32, "dtype": "bfloat16", "causal": true, "fwd_ms": 1.5, "bwd_ms": 2.5, "fb_sum_ms": 4.5}"#;
    std::fs::write(dir.path().join("peers.jsonl"), peer).unwrap();
    let arguments = [
        "--seq-len",
        "65",
        "--head-dim",
        "32",
        "--compare",
        "peers.jsonl",
        "--record",
        "record.jsonl",
        "--json",
        "l.json",
    ];
    // Notes are wrapped.
    let out = ok(dir.path(), &arguments).split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["forward + sum + backward", "other", "not a valid entry of the", "all outputs against f64"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let rows = lines(&dir.path().join("record.jsonl"));
    assert_eq!(rows.len(), 6, "three rows of ours and three of the peer");
    for row in &rows[..3] {
        assert_eq!((&row["commit"], &row["shape"]), (&Value::from("abc"), &serde_json::json!([1, 2, 65, 32])));
        assert!(row["median_ms"].as_f64() > Some(0.0) && row["mean_ms"].is_f64() && row["peer"].is_null(), "{row}");
        assert!(row["error"].as_f64() < Some(1e-2) && row["fraction"].is_f64(), "{row}");
    }
    assert_eq!((&rows[5]["peer"], &rows[5]["median_ms"]), (&Value::from("other"), &Value::from(4.5)));
    let json: Value = serde_json::from_str(&std::fs::read_to_string(dir.path().join("l.json")).unwrap()).unwrap();
    assert_eq!(json["tables"].as_array().map(Vec::len), Some(2), "{json}");
}

#[test]
fn a_sweep_is_a_table_in_every_format() {
    let dir = TempDir::new().unwrap();
    let out = ok(
        dir.path(),
        &["--sweep", "--seq-len", "40,70", "--head-dim", "16", "--out", "sweep", "--record", "record.jsonl"],
    );
    assert!(out.contains("bf16") && out.contains("f32"), "{out}");
    for extension in ["json", "csv", "md", "tex", "svg"] {
        let file = dir.path().join(format!("sweep/flash-benchmarking.{extension}"));
        assert!(file.metadata().is_ok_and(|file| file.len() > 200), "{}", file.display());
    }
    let csv = std::fs::read_to_string(dir.path().join("sweep/flash-benchmarking.csv")).unwrap();
    assert_eq!(csv.lines().count(), 5, "{csv}");
    assert_eq!(lines(&dir.path().join("record.jsonl")).len(), 12);
}

#[test]
fn unmeasurable_cases_are_errors() {
    let dir = TempDir::new().unwrap();
    let refused = |arguments: &[&str], code: i32, reason: &str| {
        let output = leaderboard(dir.path(), arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
        assert!(message.contains(reason) && !message.contains("panicked"), "{arguments:?}: {message}");
    };
    refused(&["--seq-len", "64,128"], 2, "--sweep");
    refused(&["--compare", "nothing.jsonl", "--seq-len", "64"], 1, "nothing.jsonl");
    refused(&["--json", "no/such/folder/l.json", "--seq-len", "64"], 1, "no/such/folder");
    // 2⁴⁹ bytes for q alone, more than the address space.
    refused(&["--seq-len", "1073741824", "--heads", "64", "--batch", "64"], 1, "out of memory");
    refused(&["--device", "cuda:99"], 1, "help");
}
