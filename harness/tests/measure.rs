//! Tests of the measuring commands as programs: output, files, and errors.

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

/// Runs a command that must succeed, and returns its standard output.
fn succeeds(arguments: &[&str]) -> String {
    let output = tilewright(arguments);
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command that must fail with this exit code, and returns its standard error.
fn fails(arguments: &[&str], code: i32) -> String {
    let output = tilewright(arguments);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    message
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("the file is there")).expect("the file is JSON")
}

/// Returns the number of blocks of `bytes` bytes that were live at the peak of a training step.
fn at_the_peak(report: &Value, bytes: f64) -> u64 {
    let table = rows(report, "largest-allocations-train-step");
    let of_this_size = table.iter().filter(|row| row["size_mib"].as_f64().unwrap() * f64::from(1 << 20) == bytes);
    of_this_size.map(|row| row["at_the_peak"].as_u64().unwrap()).sum()
}

/// Returns the rows of the table with this name.
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
    let products = rows(&report, "products");
    let error =
        |operands: &str| products.iter().find(|row| row["operands"] == operands).unwrap()["error_4096"].as_f64();
    assert!(error("bf16").is_some_and(|error| error > 0.0 && error < 1e-5), "{products:?}");
    assert_eq!(error("i8"), Some(0.0));
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
    let unused = fails(&["numerics", "autocast", "--addend", "0.5"], 2);
    assert!(unused.contains("--addend is unused: it goes with the experiment accumulation"), "{unused}");
    assert!(fails(&["numerics", "--json", "/no/such/folder/x.json"], 1).contains("/no/such/folder/x.json"));
}

/// Options of a model whose step takes milliseconds.
const TINY: [&str; 10] = ["--layers", "1", "--d-model", "32", "--d-ff", "64", "--heads", "2", "--vocab-size", "100"];

#[test]
fn memory_accounts_for_the_allocators_peak() {
    let folder = tempfile::tempdir().unwrap();
    let out_folder = folder.path().to_string_lossy().into_owned();
    let arguments = ["memory", "--context", "16,32", "--batch", "2", "--out", &out_folder, "--min-bytes", "1"];
    let out = succeeds(&[&arguments[..], &TINY].concat());
    let report = json(&folder.path().join("memory.json"));
    let contexts = rows(&report, "memory-contexts");
    let peak = |row: usize, work: &str| contexts[row][format!("peak_of_{work}_mib")].as_f64().unwrap();
    assert_eq!((&contexts[0]["context"], &contexts[1]["context"]), (&Value::from(16), &Value::from(32)));
    assert!(
        peak(0, "forward") < peak(0, "train_step") && peak(0, "train_step") < peak(1, "train_step"),
        "{contexts:?}"
    );
    // The percentage of the allocator's own peak that the events explain, from the note below each table of peaks.
    let explained: Vec<f64> =
        out.split("explain ").skip(1).filter_map(|rest| rest.split_whitespace().next()?.parse().ok()).collect();
    assert_eq!(explained.len(), 2, "{out}");
    assert!(explained.iter().all(|percent| (99.0..=100.0).contains(percent)), "{explained:?}");
    // Parameters, gradients and two moments are live throughout a step; no activation is live in the optimizer phase.
    let step = rows(&report, "memory-peaks-train-step");
    let setup = step.iter().find(|row| row["during"] == "setup").unwrap()["peak_mib"].as_f64().unwrap();
    let parameters = contexts[1]["parameters_mib"].as_f64().unwrap();
    assert!((setup / (4.0 * parameters) - 1.0).abs() < 0.2, "{setup} {parameters}");
    let largest = rows(&report, "largest-allocations-train-step");
    assert!(largest.iter().any(|row| row["place"].as_str().unwrap_or_default().contains("matmul")), "{largest:?}");
    // A flat tensor of the parameters: 16 832 elements with padding.
    let flat = |bytes: u32| f64::from(16_832 * bytes);
    assert_eq!((at_the_peak(&report, flat(4)), at_the_peak(&report, flat(2))), (4, 0), "{largest:?}");
    // In bf16 values and moments are f32; compute weights and gradients are bf16.
    succeeds(&[&arguments[..], &TINY, &["--precision", "bf16"]].concat());
    let report = json(&folder.path().join("memory.json"));
    assert_eq!((at_the_peak(&report, flat(4)), at_the_peak(&report, flat(2))), (3, 2), "{report}");
    for file in ["memory-timeline-forward.svg", "memory-train-step.pickle", "memory.html"] {
        assert!(folder.path().join(file).is_file(), "{file}");
    }
    assert!(fails(&["memory", "--size", "huge"], 2).contains("huge"));
    assert!(fails(&["memory", "--d-model", "30", "--heads", "4"], 2).contains("divide"));
    assert!(fails(&["memory", "--snapshot", "/no/such/folder/x"], 1).contains("/no/such/folder/x"));
}

#[test]
fn profile_adds_up_to_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let out_folder = folder.path().to_string_lossy().into_owned();
    // A step long enough to make the calls between its phases (tens of microseconds on a busy machine) negligible.
    let arguments = ["profile", "--context", "256", "--steps", "3", "--attention", "naive", "--out", &out_folder];
    succeeds(&[&arguments[..], &TINY].concat());
    let report = json(&folder.path().join("profile.json"));
    let phases = rows(&report, "phases");
    let row =
        |name: &str| phases.iter().find(|row| row["phase"] == name).unwrap_or_else(|| panic!("{name}: {phases:?}"));
    let time = |name: &str| row(name)["time_ms"].as_f64().unwrap();
    let parts = time("forward") + time("backward") + time("optimizer");
    assert!((parts - time("sum")).abs() < 1e-6);
    assert!((parts / time("step, measured") - 1.0).abs() < 0.03, "{phases:?}");
    let attention = rows(&report, "attention");
    assert_eq!(attention.len(), 3);
    assert!(attention.iter().all(|row| row["time_ms"].as_f64() > Some(0.0)), "{attention:?}");
    let names = rows(&report, "names");
    assert!(names.iter().any(|row| row["name"] == "adamw_controlled" && row["phase"] == "optimizer"), "{names:?}");
    let trace = json(&folder.path().join("trace.json"));
    assert!(trace["traceEvents"].as_array().unwrap().iter().any(|event| event["name"] == "softmax"));
    let flame = std::fs::read_to_string(folder.path().join("flame-graph.svg")).unwrap();
    assert!(flame.contains("backward") && flame.contains("adamw"));

    let nvtx = fails(&[&["profile", "--nvtx", "--context", "8"][..], &TINY].concat(), 1);
    assert!(nvtx.contains("NVTX") && nvtx.contains("nsys"), "{nvtx}");
    assert!(fails(&["profile", "--steps", "0"], 2).contains("--steps"));
    let unused = fails(&["profile", "--bucket-mb", "5"], 2);
    assert!(unused.contains("--bucket-mb is unused: it goes with --ddp, --shard or --ranks"), "{unused}");
}

#[test]
fn a_report_is_one_page() {
    let folder = tempfile::tempdir().unwrap();
    let (page, json) = (folder.path().join("page.html"), folder.path().join("numerics.json"));
    let (page_name, json_name) = (page.to_string_lossy().into_owned(), json.to_string_lossy().into_owned());
    succeeds(&["numerics", "accumulation", "--json", &json_name]);
    let arguments = ["report", "memory", "profile", "--context", "16", "--steps", "1", "--page", &page_name];
    let out = succeeds(&[&arguments[..], &["--include", &json_name], &TINY].concat());
    assert!(out.contains("measuring: memory") && out.contains("wrote "), "{out}");
    let html = std::fs::read_to_string(&page).unwrap();
    for expected in
        ["<h2 id=\"memory\">", "<h2 id=\"profile\">", "9.9531", "Measured on ", "data:image/svg+xml", "<th>CPU</th>"]
    {
        assert!(html.contains(expected), "{expected}");
    }
    assert!(!html.contains("src=\"http") && !html.contains("href=\"http"), "the page needs no other file");
    let run = "numerics autocast";
    succeeds(&["report", "--run", run, "--page", &page_name]);
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("output of LayerNorm") && html.contains("<th>CPU</th>") && !html.contains("Measured on"));
    let message = fails(&["report", "--run", "numerics nonsense", "--page", &page_name], 1);
    assert!(message.contains("tilewright numerics nonsense") && message.contains("possible values"), "{message}");
    std::fs::write(&json, "{}").unwrap();
    let message = fails(&["report", "--include", &json_name, "--page", &page_name], 1);
    assert!(message.contains("numerics.json") && message.contains("title"), "{message}");
}
