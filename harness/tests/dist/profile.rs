//! Tests of `tilewright profile` on several ranks: one trace, and the share of overlapped communication.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::commands::{has, tilewright};

/// Options of a model that is large enough for backward to take longer than waking a thread on a busy machine.
const MODEL: [&str; 14] = [
    "--layers",
    "4",
    "--d-model",
    "128",
    "--d-ff",
    "256",
    "--heads",
    "2",
    "--context",
    "128",
    "--vocab-size",
    "500",
    "--warmup",
    "1",
];
const STEPS: usize = 3;

struct Found {
    rows: Vec<Value>,
    events: Vec<Value>,
    text: String,
}

/// Runs the command after `before`, and reads its output files.
fn profile(before: &[&str], more: &[&str]) -> Found {
    let folder = tempfile::tempdir().unwrap();
    let (json, trace) = (folder.path().join("found.json"), folder.path().join("trace.json"));
    let files = ["--json", json.to_str().unwrap(), "--trace", trace.to_str().unwrap()];
    let steps = ["--steps", &STEPS.to_string()];
    let (code, text) = tilewright(&[before, &["profile"], &MODEL, &steps, &files, more].concat());
    assert_eq!(code, 0, "{text}");
    let read = |path| -> Value { serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap() };
    let (report, trace) = (read(&json), read(&trace));
    let rows = report["tables"].as_array().unwrap().iter().find(|table| table["name"] == "overlap").unwrap();
    Found {
        rows: rows["rows"].as_array().unwrap().clone(),
        events: trace["traceEvents"].as_array().unwrap().clone(),
        text,
    }
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"))
}

/// Start and end of a rank's events with this name (or `cat`), in microseconds, in order.
fn times(events: &[Value], rank: usize, key: &str, what: &str) -> Vec<(f64, f64)> {
    let is = |event: &&Value| event["ph"] == "X" && event[key] == what;
    let mut times: Vec<(f64, f64)> = events
        .iter()
        .filter(|event| event["pid"] == 2 * rank + 1)
        .filter(is)
        .map(|event| (number(event, "ts"), number(event, "ts") + number(event, "dur")))
        .collect();
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    times
}

/// Checks that every rank has its tracks, its steps, and its collectives inside of them.
fn check_trace(found: &Found, ranks: usize) {
    let names: BTreeMap<u64, &str> = found
        .events
        .iter()
        .filter(|event| event["name"] == "process_name")
        .map(|event| (event["pid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap()))
        .collect();
    assert_eq!(names.len(), ranks, "{names:?}");
    assert_eq!(found.rows.len(), ranks, "{}", found.text);
    for (rank, row) in found.rows.iter().enumerate() {
        assert_eq!(names[&(2 * rank as u64 + 1)], format!("rank {rank}: host"));
        let (steps, sent) =
            (times(&found.events, rank, "name", "step"), times(&found.events, rank, "cat", "communication"));
        assert_eq!((steps.len(), row["rank"].as_u64()), (STEPS, Some(rank as u64)));
        assert_eq!(sent.len() as f64, STEPS as f64 * number(row, "collectives"));
        for (start, end) in &sent {
            assert!(steps.iter().any(|step| step.0 <= *start && *end <= step.1), "{start} to {end}: {steps:?}");
        }
        // The table agrees with the trace.
        let shown = sent.iter().map(|(start, end)| end - start).sum::<f64>() / 1e3 / STEPS as f64;
        let (said, overlapped) = (number(row, "communication_ms"), number(row, "overlapped_ms"));
        assert!((shown - said).abs() <= 0.01 * said + 0.01, "rank {rank}: {shown} ms, {said} ms: {}", found.text);
        assert!(overlapped >= 0.0 && (overlapped + number(row, "exposed_ms") - said).abs() <= 1e-6, "{row}");
        assert!(
            said <= number(row, "step_ms") + 1e-6 && number(row, "computing_ms") <= number(row, "step_ms"),
            "{row}"
        );
        assert_eq!(times(&found.events, rank, "name", "backward").len() % STEPS, 0);
        // Ranks wait for each other in every step, so that their steps overlap on a common clock.
        for (own, first) in steps.iter().zip(times(&found.events, 0, "name", "step")) {
            assert!(own.0 < first.1 && first.0 < own.1, "rank {rank}: {own:?}, rank 0: {first:?}");
        }
    }
}

fn overlapped(found: &Found) -> Vec<f64> {
    found.rows.iter().map(|row| number(row, "overlapped_percent")).collect()
}

#[test]
fn communication_after_backward_is_exposed() {
    for form in ["naive", "flat"] {
        let found = profile(&[], &["--ddp", form, "--ranks", "2", "--work", "forward-backward"]);
        check_trace(&found, 2);
        assert_eq!(overlapped(&found), [0.0, 0.0], "{form}: {}", found.text);
        has(&found.text, &[&format!("per step: 2 ranks over threads, gradients {form}, optimizer state replicated")]);
    }
}

#[test]
fn communication_during_backward_is_overlapped() {
    let found = profile(&[], &["--ddp", "bucketed", "--bucket-mb", "0.2", "--backend", "tcp"]);
    check_trace(&found, 2);
    assert!(overlapped(&found).iter().sum::<f64>() > 5.0, "{}", found.text);
    has(&found.text, &["per step: 2 ranks over tcp, gradients bucketed"]);
}

#[test]
fn processes_make_one_trace() {
    let program = env!("CARGO_BIN_EXE_tilewright");
    let found = profile(
        &["launch", "--nproc", "3", "--", program],
        &["--batch", "3", "--shard", "zero1", "--bucket-mb", "0.2"],
    );
    check_trace(&found, 3);
    assert_eq!(
        found.text.matches("Overlap of communication and compute").count(),
        1,
        "only rank 0 prints: {}",
        found.text
    );
    // Reduce-scatters and all-gathers.
    for name in ["reduce_scatter(avg)", "all_gather"] {
        let named = |event: &&Value| event["name"].as_str().is_some_and(|found| found.starts_with(name));
        assert!(found.events.iter().any(|event| named(&event)), "{name}");
    }
}

#[test]
fn profiles_that_make_no_sense_are_refused() {
    let (code, text) = tilewright(&["profile", "--ranks", "2", "--work", "forward"]);
    assert_eq!(code, 2, "{text}");
    has(&text, &["a forward pass has no communication between ranks"]);
    let (code, text) = tilewright(&["profile", "--ranks", "3", "--batch", "4"]);
    assert_eq!(code, 1, "{text}");
    has(&text, &["a batch of 4 sequences is not a multiple of the world size, 3"]);
}
