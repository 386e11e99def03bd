//! The commands that measure, as programs: what they print, what they write, what they refuse.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Runs `tilewright` on the CPU.
fn tilewright(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(arguments).env("TILEWRIGHT_DEVICE", "cpu");
    command.output().expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The output of a run that succeeds.
fn succeeds(arguments: &[&str]) -> String {
    let output = tilewright(arguments);
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// The error of a run that ends with this exit code.
fn fails(arguments: &[&str], code: i32) -> String {
    let output = tilewright(arguments);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    message
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("the file is there")).expect("the file is JSON")
}

/// The rows of the table with this name.
fn rows<'a>(report: &'a Value, table: &str) -> &'a [Value] {
    let tables = report["tables"].as_array().expect("there are tables");
    let table = tables.iter().find(|t| t["name"] == table).unwrap_or_else(|| panic!("no table {table}: {report}"));
    table["rows"].as_array().expect("a table has rows")
}

#[test]
fn numerics_shows_the_assignments_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let out = succeeds(&["numerics", "--out", &folder.path().to_string_lossy(), "--commit", "abc123"]);
    for number in ["10.0001", "9.9531", "10.0021", "4.0000"] {
        assert!(out.contains(number), "{number}: {out}");
    }
    let report = json(&folder.path().join("numerics.json"));
    assert_eq!(report["machine"]["commit"], "abc123");
    let types = rows(&report, "autocast");
    let norm = types.iter().find(|row| row["tensor"] == "output of LayerNorm").unwrap();
    assert_eq!((&norm["f16"], &norm["bf16"]), (&Value::from("f32"), &Value::from("f32")));
    for file in ["numerics.tex", "numerics.md", "numerics.html", "accumulation.csv", "loss-scaling.svg"] {
        assert!(folder.path().join(file).is_file(), "{file}");
    }
}

#[test]
fn numerics_runs_what_is_named() {
    let out = succeeds(&["numerics", "accumulation", "--addend", "0.5", "--steps", "8"]);
    assert!(out.contains("8 × 0.5") && out.contains("exactly 4") && !out.contains("LayerNorm"), "{out}");
    assert!(fails(&["numerics", "--addend", "nan"], 2).contains("finite"));
    assert!(fails(&["numerics", "--steps", "0"], 2).contains("--steps"));
    assert!(fails(&["numerics", "--json", "/no/such/folder/x.json"], 1).contains("/no/such/folder/x.json"));
}
