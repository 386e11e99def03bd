//! Runs the program `tilewright bench`: its errors, its output, and the rows that it writes.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// Runs `tilewright bench` on the CPU with short measurements.
fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.arg("bench").args(arguments).env("TILEWRIGHT_CACHE", "off").env("TILEWRIGHT_DEVICE", "cpu");
    command.output().expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a benchmark that must succeed, and returns its output and its rows.
fn rows(name: &str, arguments: &[&str]) -> (String, Vec<Value>) {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{name}.jsonl"));
    let _ = std::fs::remove_file(&file);
    let path = file.to_string_lossy();
    let options = ["--record", &*path, "--commit", "abc123"];
    // Launches and compilations are counted.
    let times: &[&str] = match arguments[0] {
        "launch" | "compile" => &[],
        _ => &["--warmup-ms", "0", "--rep-ms", "0"],
    };
    let output = bench(&[arguments, &options[..], times].concat());
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let lines = std::fs::read_to_string(&file).expect("the file of rows is there");
    let rows = lines.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
    (text(&output.stdout), rows)
}

/// Returns the kernels of the rows, in order.
fn kernels(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["kernel"].as_str().expect("a kernel has a name")).collect()
}

/// Checks that every row has its metadata and a time.
fn assert_timed(rows: &[Value]) {
    for row in rows {
        assert_eq!(row["commit"], "abc123", "{row}");
        assert!(row["failed"].is_null() && row["driver"].is_null() && row["device"].is_string(), "{row}");
        assert!(row["median_ms"].as_f64().is_some_and(|ms| ms > 0.0) && row["n"].as_u64() >= Some(1), "{row}");
        assert!(row["p20_ms"].as_f64() <= row["median_ms"].as_f64(), "{row}");
    }
}

#[test]
fn attention_is_checked_and_timed_with_the_tiles_asked_for() {
    let arguments = ["attention", "--heads", "2", "--seq-len", "65", "--head-dim", "16", "--causal", "true"];
    let tiles = ["--fwd-tiles", "32,16,4,2", "--fwd-tiles", "16,32,4,2", "--dkdv-tiles", "16,16,4,2"];
    let (out, rows) = rows("attention", &[&arguments[..], &tiles[..]].concat());
    assert_timed(&rows);
    let expected = ["attention_fwd", "attention_fwd", "candle_fwd", "attention_bwd", "attention_fwd_bwd"];
    assert_eq!(kernels(&rows), expected);
    assert_eq!((&rows[0]["tiles"], &rows[1]["tiles"]), (&Value::from("32,16,4,2"), &Value::from("16,32,4,2")));
    assert!(rows[3]["tiles"].as_str().is_some_and(|tiles| tiles.starts_with("16,16,4,2 ")), "{}", rows[3]);
    for row in &rows {
        assert_eq!(row["shape"], serde_json::json!([1, 2, 65, 16]));
        assert_eq!((&row["case"], &row["dtype"]), (&Value::from("causal"), &Value::from("f32")));
        assert!(row["error"].as_f64().is_some_and(|error| error < 1e-5) && row["tflops"].is_f64(), "{row}");
    }
    assert!(out.contains("attention_fwd_bwd") && out.contains("1×2×65×16 causal"), "{out}");
}

#[test]
fn kernels_are_compared_with_a_copy() {
    let arguments = ["kernels", "--only", "softmax,matmul", "--rows", "20", "--d", "33", "--sizes", "17"];
    let (out, rows) = rows("kernels", &arguments);
    assert_timed(&rows);
    let matmuls = ["matmul", "matmul", "matmul", "matmul_swiglu"].repeat(2);
    assert_eq!(kernels(&rows), [["softmax", "softmax_bwd"].repeat(2), matmuls, vec!["matmul"]].concat());
    assert_eq!((&rows[4]["case"], &rows[5]["case"]), (&Value::Null, &Value::from("bias relu")));
    assert!(rows[0]["gbps"].is_f64() && rows[0]["fraction"].is_f64() && rows[4]["tflops"].is_f64());
    assert!(out.contains("of copy bandwidth"), "{out}");
}

#[test]
fn every_kernel_over_rows_is_checked_and_timed() {
    let (_, rows) = rows("all", &["kernels", "--rows", "40", "--d", "64", "--sizes", "16"]);
    assert_timed(&rows);
    // Twenty-five kernels, three matmul variants and one with SwiGLU in two types, a matmul in f64, and three 8-bit matmuls.
    assert_eq!(rows.len(), 2 * 29 + 1 + 3);
    assert!(rows.iter().all(|row| row["error"].is_f64()), "{rows:?}");
    let (_, one) = self::rows("one", &["rms_norm_bwd", "--rows", "33", "--d", "50"]);
    assert_eq!(kernels(&one), ["rms_norm_bwd"; 2]);
}

#[test]
fn decoding_is_checked_and_timed_in_pages_and_without() {
    let shape = ["decode", "--batch", "2", "--heads", "6", "--heads-kv", "2", "--n-q", "2", "--n-k", "40", "--d", "16"];
    let (_, rows) = rows("decode", &[&shape[..], &["--page", "0,7"]].concat());
    assert_timed(&rows);
    assert_eq!(kernels(&rows), ["attention_decode"; 2]);
    for (row, case) in rows.iter().zip(["2 key/value heads, rows", "2 key/value heads, pages of 7"]) {
        assert_eq!((&row["case"], &row["shape"]), (&Value::from(case), &serde_json::json!([2, 6, 2, 40, 16])));
        assert!(row["error"].as_f64().is_some_and(|error| error < 1e-5) && row["gbps"].is_f64(), "{row}");
    }
    let (_, wide) = self::rows("decode-v", &[&shape[..], &["--page", "0,7", "--head-dim-v", "24"]].concat());
    assert_eq!(kernels(&wide), ["attention_decode"; 2]);
    for (row, case) in wide.iter().zip(["2 key/value heads, rows, d_v=24", "2 key/value heads, pages of 7, d_v=24"]) {
        assert_eq!((&row["case"], &row["shape"]), (&Value::from(case), &serde_json::json!([2, 6, 2, 40, 16])));
        assert!(row["error"].as_f64().is_some_and(|error| error < 1e-5), "{row}");
        // The keys and values of 2 sequences and 2 heads, in f32.
        let [gbps, ms] = ["gbps", "median_ms"].map(|key| row[key].as_f64().unwrap());
        assert!((gbps * ms * 1e6 / f64::from(2 * 2 * 40 * (16 + 24) * 4) - 1.0).abs() < 1e-6, "{row}");
    }
    let refused = bench(&["decode", "--heads", "6", "--heads-kv", "4"]);
    assert!(
        refused.status.code() == Some(2)
            && text(&refused.stderr).contains("--heads 6 is not a multiple of --heads-kv 4")
    );
    let refused = text(&bench(&["decode", "--rows", "-1"]).stderr);
    assert!(refused.contains("'--rows <ROWS>'") && refused.contains("expected a whole number from 0"), "{refused}");
}

#[test]
fn launches_and_copies_are_timed() {
    let (_, launch) = rows("launch", &["launch", "--rounds", "3", "--launches", "5"]);
    assert_timed(&launch);
    assert_eq!((kernels(&launch), &launch[0]["n"]), (vec!["launch"], &Value::from(3)));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("bench-copy");
    let (out, copy) = rows("copy", &["copy", "--mib", "1", "--out", &folder.to_string_lossy()]);
    assert_timed(&copy);
    assert_eq!(copy[0]["shape"], serde_json::json!([1 << 18]));
    for extension in ["json", "csv", "md", "tex", "svg", "html"] {
        let file = folder.join(format!("bench-copy.{extension}"));
        assert!(file.is_file() && out.contains(&*file.to_string_lossy()), "{extension}: {out}");
    }
    let table: Value = serde_json::from_slice(&std::fs::read(folder.join("bench-copy.json")).unwrap()).unwrap();
    assert_eq!(table["tables"][0]["rows"][0]["median_ms"], copy[0]["median_ms"]);
}

#[test]
fn compilation_is_timed_by_phase_without_a_gpu() {
    let options = ["--runs", "1", "--starts", "2", "--target", "sm_90a"];
    let (_, rows) = rows("compile", &[&["compile", "--head-dim", "64"][..], &options].concat());
    assert_timed(&rows);
    let phases = ["record", "passes", "lower", "llvm parse", "llvm optimize", "llvm codegen", "IR to PTX"];
    let parts = ["program", "device", "memory", "lookup", "load", "launch"].map(|part| format!("start {part}"));
    let parts: Vec<&str> = parts.iter().map(String::as_str).chain(["start to first launch"]).collect();
    assert_eq!(kernels(&rows), [&phases[..], &phases[..], &["cache hit"], &parts, &parts].concat());
    assert_eq!(rows[0]["case"], "sm_90a first in process");
    let total: f64 = rows[1..6].iter().map(|row| row["median_ms"].as_f64().unwrap_or(f64::NAN)).sum();
    assert!((rows[6]["median_ms"].as_f64().unwrap_or(f64::NAN) - total).abs() < 1e-6, "{rows:?}");
    let ms = |row: &Value| row["median_ms"].as_f64().unwrap_or(f64::NAN);
    let [cold, warm] = [&rows[15..22], &rows[22..29]];
    assert!(cold.iter().all(|row| row["case"] == "empty cache" && row["n"] == 1), "{cold:?}");
    assert!(warm.iter().all(|row| row["case"] == "from the cache" && row["n"] == 2), "{warm:?}");
    assert!((cold[..6].iter().map(ms).sum::<f64>() - ms(&cold[6])).abs() < 1e-6, "{cold:?}");
    // Compilation takes longer than a cache hit.
    assert!(ms(&cold[3]) > 2.0 * ms(&warm[3]), "{cold:?} {warm:?}");
}

/// Runs a benchmark with `--json`, and returns its output and the rows of `table`.
fn report_rows(name: &str, table: &str, arguments: &[&str]) -> (String, Vec<Value>) {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{name}.json"));
    let path = file.to_string_lossy();
    let output = bench(&[arguments, &["--json", &*path]].concat());
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let tables = report["tables"].as_array().unwrap();
    let table = tables.iter().find(|found| found["name"] == table).unwrap_or_else(|| panic!("{table}: {report}"));
    (text(&output.stdout), table["rows"].as_array().unwrap().clone())
}

fn positive(row: &Value, key: &str) -> bool {
    row[key].as_f64().is_some_and(|x| x > 0.0)
}

const TINY: &[&str] = &["--layers", "1", "--d-model", "32", "--d-ff", "64", "--heads", "2", "--vocab-size", "100"];

#[test]
fn models_are_timed_by_mode_and_attention() {
    let arguments = ["model", "--contexts", "16,32", "--modes", "forward,forward-backward,train-step", "--steps", "2"];
    let more = ["--attentions", "naive,flash", "--warmup", "0"];
    let (out, rows) = report_rows("model", "model", &[&arguments[..], TINY, &more].concat());
    assert_eq!(rows.len(), 12);
    for row in &rows {
        assert!(positive(row, "step_ms") && positive(row, "forward_ms") && positive(row, "median_ms"), "{row}");
        let mode = row["mode"].as_str().unwrap();
        assert_eq!(positive(row, "backward_ms"), mode != "forward", "{row}");
        assert_eq!(positive(row, "optimizer_ms"), mode == "train-step", "{row}");
    }
    assert_eq!((&rows[0]["attention"], &rows[0]["fusion"]), (&Value::from("naive"), &Value::from("ops")));
    assert_eq!((&rows[3]["attention"], &rows[3]["fusion"]), (&Value::from("flash"), &Value::from("blocks")));
    assert!(out.contains("2 steps"), "{out}");
}

#[test]
fn each_warmup_runs_in_its_own_process() {
    let arguments = [&["model", "--contexts", "16", "--steps", "2", "--warmup", "0,2"], TINY].concat();
    let (_, rows) = report_rows("warmup", "model", &arguments);
    let warmups: Vec<u64> = rows.iter().map(|row| row["warm_up"].as_u64().unwrap()).collect();
    assert_eq!(warmups, [0, 2]);
    let step = |row: &Value| row["step_ms"].as_f64().unwrap();
    assert!(step(&rows[0]) > step(&rows[1]), "kernels are compiled in the first step: {rows:?}");
}

#[test]
fn a_model_out_of_memory_is_a_row_of_the_sweep() {
    let arguments = [
        &["model", "--contexts", "16,4096", "--batches", "8192", "--attentions", "naive", "--modes", "forward"],
        &["--steps", "1", "--warmup", "0"][..],
        &["--layers", "1", "--d-model", "8", "--d-ff", "8", "--heads", "2", "--vocab-size", "16"][..],
    ]
    .concat();
    let (out, rows) = report_rows("oom", "model", &arguments);
    assert_eq!((rows.len(), &rows[1]["step_ms"]), (2, &Value::from("OOM")));
    assert!(positive(&rows[0], "step_ms") && out.contains("GiB are needed"), "{out}");
}

#[test]
fn attention_is_timed_under_autograd() {
    let arguments =
        ["attention", "--kinds", "naive,tiled,flash", "--seq-lens", "32,64", "--head-dim", "16", "--runs", "2"];
    let (out, rows) = report_rows("kinds", "attention", &arguments);
    assert_eq!(rows.len(), 6);
    for row in &rows {
        assert!(positive(row, "forward_ms") && positive(row, "backward_ms"), "{row}");
        assert_eq!((&row["batch"], &row["mask"], &row["dtype"]), (&8.into(), &"causal".into(), &"f32".into()));
    }
    let saved = |row: &Value| row["saved_for_backward_mib"].as_f64().unwrap();
    // Bytes of queries, keys, values and output; naive attention saves score matrices in addition.
    let least = 4.0 * 8.0 * 64.0 * 16.0 * 4.0 / f64::from(1 << 20);
    assert!(saved(&rows[5]) >= least && saved(&rows[5]) < 1.5 * least, "{} for {least}", rows[5]);
    assert!(saved(&rows[1]) > 2.0 * saved(&rows[5]), "{}", rows[1]);
    assert!(out.contains("score matrices"), "{out}");
}

#[test]
fn attention_out_of_memory_shows_the_arithmetic() {
    let arguments = ["attention", "--kinds", "naive", "--seq-lens", "32,1000000", "--head-dim", "16", "--runs", "1"];
    let (out, rows) = report_rows("attention-oom", "attention", &arguments);
    assert!(positive(&rows[0], "forward_ms") && rows[1]["forward_ms"] == "OOM", "{rows:?}");
    let text = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("seq_len 1000000") && text.contains("8 · 1000000² · 4 B = 29802.32 GiB"), "{text}");
}

#[test]
fn attention_of_8_bit_floats_is_timed() {
    let arguments = ["attention", "--dtype", "f8e4m3,f8e5m2", "--seq-len", "70", "--heads", "2", "--head-dim", "16"];
    let (_, rows) = rows("attention-8-bit", &[&arguments[..], &["--causal", "true"]].concat());
    assert_timed(&rows);
    assert_eq!(kernels(&rows), ["attention_quantize", "attention_fwd"].repeat(2));
    assert!(rows[0]["gbps"].is_f64() && rows[1]["tflops"].is_f64() && rows[3]["dtype"] == "f8e5m2", "{rows:?}");
    // The rounding to four and to three bits.
    let error = |i: usize| rows[i]["error"].as_f64().unwrap();
    assert!((0.02..0.07).contains(&error(1)) && (0.04..0.14).contains(&error(3)), "{rows:?}");
}

#[test]
fn norms_and_fusion_are_timed() {
    let (_, rows) = report_rows("norm", "norm", &["norm", "--rows", "20", "--d", "64,100", "--runs", "2"]);
    assert_eq!(rows.len(), 8);
    assert!(rows.iter().all(|row| positive(row, "forward_ms") && positive(row, "backward_ms")), "{rows:?}");
    let arguments = ["fused", "--head-dims", "16", "--seq-lens", "32", "--contexts", "16", "--runs", "2"];
    let more = ["--steps", "2", "--warmup", "1"];
    let (out, rows) = report_rows("fused", "fused-model", &[&arguments[..], &more].concat());
    let forms: Vec<&str> = rows.iter().map(|row| row["form"].as_str().unwrap()).collect();
    assert_eq!(forms, ["tensor ops", "one kernel per op", "fused blocks"]);
    let gain = |row: &Value| row["whole_step_gain"].as_f64().unwrap();
    assert!(gain(&rows[0]) == 1.0 && rows.iter().all(|row| gain(row) > 0.0), "{rows:?}");
    assert!(out.contains("unfused forward"), "{out}");
}

#[test]
fn mistakes_are_refused_with_the_remedy() {
    let refused = |arguments: &[&str], reason: &str| {
        let output = bench(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(reason), "{arguments:?}: {message}");
        assert!(!message.contains("measured attention"), "refused after a measurement: {message}");
    };
    let few = ["attention", "--heads", "1", "--seq-len", "16", "--head-dim", "8", "--forward-only"];
    refused(&[&few[..], &["--modifier", "prefix=5"]].concat(), "modifier `prefix` is causal");
    refused(&[&few[..], &["--dtype", "f32,f8e4m3", "--modifier", "alibi"]].concat(), "--dtype f8… with --modifier");
    refused(&[&few[..6], &["8,300"]].concat(), "head dimensions from 1 to 256");
    refused(&["attention", "--fwd-tiles", "48,64,4,2"], "q_tile is 48: expected a power of two");
    refused(&["attention", "--dkdv-tiles", "64,64"], "q_tile,k_tile,warps,stages");
    refused(&["attention", "--head-dim", "300"], "head dimensions from 1 to 256");
    refused(&["attention", "--dtype", "f8"], "[possible values: bf16, f16, f32, f8e4m3, f8e5m2]");
    refused(&["attention", "--dtype", "f8e4m3", "--modifier", "window=3"], "--dtype f8… with --modifier");
    refused(&["attention", "--dtype", "f8e5m2", "--splits", "2"], "--dtype f8… with --splits");
    refused(&["attention", "--dtype", "f8e5m2", "--deterministic"], "--dtype f8… with --one-pass or");
    refused(&["attention", "--dtype", "f8e5m2", "--kinds", "flash"], "--dtype f8… with --kinds");
    refused(&["attention", "--causal", "perhaps"], "'perhaps'");
    refused(&["kernels", "--only", "sort"], "weighted_sum");
    refused(&["sort"], "there is no kernel `sort`");
    refused(&["flash_attention_fwd"], "tilewright bench attention");
    refused(&["softmax_rows", "--rows", "many"], "many");
    refused(&["kernels", "--rows", "0"], "at least 1");
    refused(&["compile", "--target", "sm_70"], "expected sm_80");
    refused(&["copy", "--mib", "0"], "0");
    refused(&["norm", "--runs", "0"], "0 is not in 1..");
    refused(&["attention", "--kinds", "flash", "--runs", "0"], "0 is not in 1..");
    refused(&["model", "--sizes", "smal"], "did you mean `small`?");
    refused(&["model", "--modes", "backward"], "forward-backward");
    for option in ["--record", "--json", "--csv"] {
        let output = bench(&["copy", "--mib", "1", option, "/no/such/folder/rows.jsonl"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("/no/such/folder/rows.jsonl"), "{}", text(&output.stderr));
    }
}

#[test]
fn options_without_effect_are_refused_with_what_they_go_with() {
    for (line, parts) in [
        ("attention --seq-lens 64 --runs 2", &["required", "--kinds <KINDS>"][..]),
        ("attention --runs 2", &["required", "--kinds <KINDS>"]),
        ("attention --seq-lens 64 --heads 2", &["--seq-lens is unused", "an option of --kinds"]),
        ("attention --runs 2 --rep-ms 1", &["--runs is unused", "an option of --kinds"]),
        ("attention --kinds flash --heads 2", &["'--kinds <KINDS>' cannot be used with", "--heads"]),
        ("attention --kinds flash --fwd-tiles 64,64,4,2", &["cannot be used with", "--fwd-tiles"]),
        ("attention --kinds flash --rep-ms 5", &["cannot be used with", "--rep-ms"]),
        ("attention --kinds flash --record rows.jsonl", &["cannot be used with", "--record"]),
        ("attention --kinds flash --dtype f32,bf16", &["--dtype has 2 values with --kinds"]),
        ("attention --kinds flash --causal true,false", &["--causal has 2 values with --kinds"]),
        ("attention --forward-only --dq-tiles 64,64,4,2", &["cannot be used with", "--dq-tiles"]),
        ("fused --subjects model --seq-lens 64", &["--seq-lens is unused", "--subjects attention"]),
        ("fused --subjects attention --steps 2", &["--steps is unused", "--subjects model"]),
        ("kernels --only matmul --rows 8", &["--rows is unused", "--sizes"]),
        ("kernels --only softmax,rope --sizes 64", &["--sizes is unused", "--rows and --d"]),
        ("matmul --d 64", &["--d is unused", "--sizes"]),
        ("softmax_rows --only matmul", &["--only is unused", "tilewright bench kernels --only"]),
        ("ddp --form naive,overlap --buckets 25", &["--buckets is unused", "--form bucketed"]),
        ("ddp --form flat --ctas 8", &["--ctas is unused", "--form overlap or bucketed"]),
        ("launch --rep-ms 5", &["--rep-ms is unused", "--rounds and --launches"]),
        ("compile --warmup-ms 5", &["--warmup-ms is unused", "--runs and --starts"]),
    ] {
        let output = bench(&line.split(' ').collect::<Vec<_>>());
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{line}: {message}");
    }
}

#[test]
fn help_names_every_benchmark() {
    let help = bench(&["--help"]);
    let help = text(&help.stdout);
    for subject in ["attention", "decode", "model", "norm", "fused", "kernels", "copy", "launch", "compile"] {
        assert!(help.lines().any(|line| line.trim_start().starts_with(subject)), "{subject}: {help}");
    }
}

/// Values may have another head dimension, which the rates count.
#[test]
fn attention_is_timed_with_values_of_another_width() {
    let shape = ["attention", "--heads", "2", "--seq-len", "65", "--head-dim", "16", "--head-dim-v", "40"];
    let (_, rows) = rows("attention-v", &[&shape[..], &["--causal", "true"]].concat());
    assert_timed(&rows);
    assert_eq!(kernels(&rows), ["attention_fwd", "candle_fwd", "attention_bwd", "attention_fwd_bwd"]);
    // Half of the products of 65 rows and keys; one of each width forward, three and two backward, each of two operations.
    for (row, columns) in rows.iter().zip([16 + 40, 16 + 40, 3 * 16 + 2 * 40, 4 * 16 + 3 * 40]) {
        assert_eq!(row["case"], "causal d_v=40", "{row}");
        let flop = 2.0 * 2.0 * 0.5 * 65.0 * 65.0 * f64::from(columns);
        let [tflops, ms] = ["tflops", "median_ms"].map(|key| row[key].as_f64().unwrap());
        assert!((tflops * ms * 1e9 / flop - 1.0).abs() < 1e-6, "{row}: {flop}");
    }
}

/// Two outputs of one name: one is written, the other refused.
#[test]
fn outputs_of_one_name_do_not_replace_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("out");
    let csv = folder.join("bench-copy.json");
    let [folder, csv] = [&folder, &csv].map(|path| path.to_string_lossy().into_owned());
    let output = bench(&["copy", "--mib", "1", "--warmup-ms", "0", "--rep-ms", "0", "--out", &folder, "--csv", &csv]);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("another output of these options has this name"), "{message}");
    let kept = std::fs::read_to_string(&csv).unwrap();
    assert!(serde_json::from_str::<Value>(&kept).is_ok(), "{kept}");
}

#[test]
fn a_file_that_is_standard_output_has_it_alone() {
    let output = bench(&["copy", "--mib", "1", "--warmup-ms", "0", "--rep-ms", "0", "--json", "/dev/stdout"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).expect("standard output is JSON");
    assert!(text(&output.stderr).contains("wrote /dev/stdout"), "{}", text(&output.stderr));
}
