//! `tilewright account` and `tilewright bench comm` from the outside.

use std::process::Command;

use serde_json::Value;

fn tilewright(arguments: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TILEWRIGHT_COMM"] {
        command.env_remove(name);
    }
    let output = command.env("TILEWRIGHT_DEVICE", "cpu").args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code().unwrap(), text)
}

#[track_caller]
fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is not in\n{text}");
    }
}

/// The assignment's section on accounting, without arguments.
#[test]
fn accounts_reproduce_the_assignments_figures() {
    let (code, text) = tilewright(&["account", "memory"]);
    assert_eq!(code, 0, "{text}");
    has(&text, &["3517.578", "43.97", "3.52 TB: 44 devices of 80 GB", "2.19849e11 parameters"]);
    let (code, text) = tilewright(&["account", "fsdp"]);
    assert_eq!(code, 0, "{text}");
    has(&text, &["Below 95 GB from N = 38 on", "92.57", "319.4", "20444", "395.3", "25302", "α / (Y M_X)"]);
}

#[test]
fn accounts_take_any_configuration() {
    let (_, text) =
        tilewright(&["account", "memory", "--width", "1000", "--hidden", "4000", "--blocks", "10", "--device-gb", "1"]);
    // 16 · 10 · 2 · 4·10⁶ bytes.
    has(&text, &["1.28", "2 devices of 1 GB"]);
    let (_, text) = tilewright(&["account", "fsdp", "--tokens", "20000"]);
    has(&text, &["No N is enough for 95 GB"]);
    let (code, text) = tilewright(&["account", "memory", "--width", "-3"]);
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
    has(&text, &["nothing to predict from", "--records FILE"]);
    let (code, text) = tilewright(&["account", "ddp", "--records", "/no/such/file"]);
    assert_eq!(code, 1);
    has(&text, &["cannot read /no/such/file"]);
}

/// Measured, written, read again, and fitted.
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
    has(&text, &["choose with --back-end and --ranks"]);
    let (code, text) =
        tilewright(&["account", "ddp", "--records", json, "--back-end", "tcp", "--ranks", "2", "--size", "small"]);
    // Three sizes on a busy machine: they may not grow, and then it says so.
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
