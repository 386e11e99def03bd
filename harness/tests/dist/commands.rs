//! Tests of `tilewright account` and `tilewright bench comm` as programs.

use std::process::Command;

use serde_json::Value;

pub fn tilewright(arguments: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TILEWRIGHT_COMM"] {
        command.env_remove(name);
    }
    let output = command.env("TILEWRIGHT_DEVICE", "cpu").args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code().unwrap(), text)
}

#[track_caller]
pub fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is not in\n{text}");
    }
}

/// The accounting section of the assignment, without arguments.
#[test]
fn accounts_reproduce_the_assignments_figures() {
    let (code, text) = tilewright(&["account", "memory"]);
    assert_eq!(code, 0, "{text}");
    has(&text, &["3517.578", "43.97", "3.52 TB: 44 devices of 80 GB", "2.19849e11 parameters"]);
    let (code, text) = tilewright(&["account", "fsdp"]);
    assert_eq!(code, 0, "{text}");
    has(&text, &["less than 95 GB from N = 38 on", "92.57", "319.4", "20444", "395.3", "25302", "α / (Y M_X)"]);
}

#[test]
fn accounts_take_any_configuration() {
    let (_, text) =
        tilewright(&["account", "memory", "--d-model", "1000", "--d-ff", "4000", "--blocks", "10", "--device-gb", "1"]);
    // 16 · 10 · 2 · 4·10⁶ bytes.
    has(&text, &["1.28", "2 devices of 1 GB"]);
    let (_, text) = tilewright(&["account", "fsdp", "--tokens", "20000"]);
    has(&text, &["No N is enough for 95 GB"]);
    let (code, text) = tilewright(&["account", "memory", "--d-model", "-3"]);
    assert_eq!(code, 2, "{text}");
}

#[test]
fn ddp_is_predicted_from_overhead_and_bandwidth() {
    let given = ["--overhead-us", "100", "--bandwidth-gbps", "10", "--bytes", "4e9", "--buckets", "1,10,100"];
    let (code, text) = tilewright(&[&["account", "ddp"], given.as_slice()].concat());
    assert_eq!(code, 0, "{text}");
    // √(4e9 · 1e-4 · 1e10) bytes = 63.2 MB; 400 buckets of 10 MB cost 40 ms and leave 1 ms.
    has(&text, &["63.2 MB", "41.00"]);
    let (code, text) = tilewright(&["account", "ddp"]);
    assert_eq!(code, 2);
    has(&text, &["no overhead and bandwidth to predict from", "--records FILE"]);
    let (code, text) = tilewright(&["account", "ddp", "--records", "/no/such/file"]);
    assert_eq!(code, 1);
    has(&text, &["cannot read /no/such/file"]);
}

/// Measures, writes and reads a report, and fits it.
#[test]
fn collectives_are_timed_and_fitted() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("comm.json");
    let json = json.to_str().unwrap();
    let sizes = ["--sizes", "0.1,1,4", "--ranks", "2,3", "--repeat", "3", "--warmup", "1"];
    let all = ["--collective", "all_reduce,reduce_scatter,all_gather,broadcast", "--json", json];
    let (code, text) = tilewright(&[&["bench", "comm"], sizes.as_slice(), &all].concat());
    assert_eq!(code, 0, "{text}");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let rows = report["tables"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 4 * 3, "{text}");
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
        assert!(number("mean_ms") > 0.0 && number("median_ms") > 0.0 && number("mean_ms_std") >= 0.0, "{row}");
        let algorithm = number("size_mb") / number("median_ms");
        assert!((number("algbw_gbps") / algorithm - 1.0).abs() < 1e-9, "{row}");
        let share = (number("ranks") - 1.0) / number("ranks");
        let factor = match row["collective"].as_str().unwrap() {
            "all_reduce" => 2.0 * share,
            "broadcast" => 1.0,
            _ => share,
        };
        assert!((number("busbw_gbps") / algorithm / factor - 1.0).abs() < 1e-9, "{row}");
    }
    let (code, text) = tilewright(&["account", "ddp", "--records", json]);
    assert_eq!(code, 2);
    has(&text, &["choose with --backend and --ranks"]);
    let (code, text) =
        tilewright(&["account", "ddp", "--records", json, "--backend", "tcp", "--ranks", "2", "--size", "small"]);
    // Three sizes on a busy machine: the times may not grow, which the command reports.
    match code {
        0 => has(&text, &["fitted to 3 sizes, 2 ranks, tcp", "T(n) = s / (n w) + n o"]),
        _ => has(&text, &["do not grow"]),
    }
}

/// The same command on every rank, under the launcher.
#[test]
fn collectives_are_timed_between_processes() {
    let program = env!("CARGO_BIN_EXE_tilewright");
    let bench = [program, "bench", "comm", "--sizes", "0.1", "--repeat", "2", "--warmup", "1"];
    let (code, text) = tilewright(&[&["launch", "--nproc", "2", "--"], bench.as_slice()].concat());
    assert_eq!(code, 0, "{text}");
    assert_eq!(text.matches("all_reduce").count(), 1, "only rank 0 prints: {text}");
    has(&text, &["[rank 0]", "tcp"]);
}

const SMALL: [&str; 8] = ["--layers", "2", "--d-model", "32", "--d-ff", "64", "--heads", "2"];

/// Rows of the first table in a command's JSON output.
fn rows(command: &[&str]) -> (Vec<Value>, String, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("found.json");
    let (code, text) = tilewright(&[command, &["--json", json.to_str().unwrap()]].concat());
    assert_eq!(code, 0, "{text}");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    (report["tables"][0]["rows"].as_array().unwrap().clone(), text, folder)
}

#[test]
fn steps_are_timed_by_form() {
    let steps = ["--repeat", "2", "--warmup", "1", "--context", "16", "--buckets", "0.05,100"];
    let (rows, text, folder) = rows(&[&["bench", "ddp"], SMALL.as_slice(), &steps].concat());
    let forms: Vec<&str> = rows.iter().map(|row| row["form"].as_str().unwrap()).collect();
    assert_eq!(forms, ["none", "naive", "flat", "overlap", "bucketed", "bucketed"], "{text}");
    for row in &rows[1..] {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
        assert!(number("step_ms") > number("exposed_ms") && number("communication_ms") > 0.0, "{row}");
        assert!((0.0..=100.0).contains(&number("overlapped_percent")), "{row}");
    }
    let calls: Vec<u64> = rows[1..].iter().map(|row| row["calls"].as_u64().unwrap()).collect();
    assert!(calls[0] == calls[2] && calls[0] > calls[3] && calls[3] > 1, "{calls:?}");
    assert_eq!((calls[1], calls[4]), (1, 1));
    // No communication during backward.
    assert!(
        rows[1]["overlapped_percent"].as_f64().unwrap() < 10.0
            && rows[2]["overlapped_percent"].as_f64().unwrap() < 10.0,
        "{text}"
    );
    // The measured waits are compared with a prediction.
    let json = folder.path().join("found.json");
    let given = ["--overhead-us", "10", "--bandwidth-gbps", "1", "--buckets", "0.05,100", "--bytes", "4e5"];
    let (code, text) =
        tilewright(&[&["account", "ddp", "--measured", json.to_str().unwrap()], given.as_slice()].concat());
    assert_eq!(code, 0, "{text}");
    has(&text, &["measured"]);
}

#[test]
fn sharded_state_takes_its_shard_of_memory() {
    let steps = ["--repeat", "2", "--warmup", "0", "--context", "16", "--ranks", "2"];
    let (rows, text, _folder) = rows(&[&["bench", "shard"], SMALL.as_slice(), &steps].concat());
    let state: Vec<f64> = rows.iter().map(|row| row["state_mb"].as_f64().unwrap()).collect();
    assert_eq!(rows.len(), 3, "{text}");
    // The embedding is nearly half of this model, so that whole parameters are not balanced; shards of buckets are.
    assert!(state[1] < 0.8 * state[0] && (state[2] / state[0] - 0.5).abs() < 0.01, "{state:?}");
    assert!((state[0] - 2.0 * rows[0]["parameters_mb"].as_f64().unwrap()).abs() < 1e-9);
    for row in &rows[1..] {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
        // Half of 8 bytes per parameter.
        assert!((number("saved_predicted_mb") - number("parameters_mb")).abs() < 1e-9, "{row}");
        assert!(
            number("parameter_sync_ms") > 0.0 && (0.0..=100.0).contains(&number("parameter_sync_percent")),
            "{row}"
        );
    }
    assert!(rows[0]["parameter_sync_ms"].is_null() && rows[0]["size"] == "custom", "{text}");
}

/// A backend that is not built in, or not available for the device, is named with the remedy.
#[test]
fn missing_backends_are_named() {
    let bench = |backend: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command.env("TILEWRIGHT_COMM", backend).env("RANK", "0").env("WORLD_SIZE", "2").env("TILEWRIGHT_DEVICE", "cpu");
        let output = command.args(["bench", "comm", "--sizes", "0.1"]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    has(&bench("nccl"), &["NCCL transfers GPU memory only", "unset TILEWRIGHT_COMM"]);
    has(&bench("gloo"), &["TILEWRIGHT_COMM is `gloo`, expected tcp, mpi or nccl"]);
    if !cfg!(feature = "mpi") {
        has(&bench("mpi"), &["built without MPI", "--features tilewright-harness/mpi"]);
    }
}
