//! The commands over kernels that are not among those that ship.

use std::path::Path;

use clap::{Args, Parser};
use tilewright_cli::tensors::{self, Tensor};
use tilewright_cli::{CliError, Kernels, bench, compile, list, run, tune};
use tilewright_runtime::prelude::*;

/// y = a · x, row by row.
#[autotune(configs = [Config(rows_tile = 4, num_warps = 2), Config(rows_tile = 16)], key = [rows])]
#[kernel]
fn scale_rows<T: Float>(
    x: In<T>,
    y: Out<T>,
    x_stride_row: i64,
    x_stride_d: i64,
    y_stride_row: i64,
    y_stride_d: i64,
    a: f32,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr = 64] d_tile: usize,
) {
    let x =
        make_block_ptr(x, [rows, d], [x_stride_row, x_stride_d], [program_id(0) * rows_tile, 0], [rows_tile, d_tile]);
    let y =
        make_block_ptr(y, [rows, d], [y_stride_row, y_stride_d], [program_id(0) * rows_tile, 0], [rows_tile, d_tile]);
    let tile = load(x, boundary_check = [0, 1]).to::<f32>() * a;
    store(y, tile.to::<T>(), boundary_check = [0, 1]);
}

/// y = x + c
#[kernel]
fn shift(x: In<f32>, y: Out<f32>, n: i32, #[constexpr] tile: usize, #[constexpr = 0.5] c: f64) {
    let i = program_id(0) * tile + arange(0, tile);
    store(y + i, load(x + i, mask = i < n) + c as f32, mask = i < n);
}

#[derive(Parser)]
struct CommandLine<A: Args> {
    #[command(flatten)]
    arguments: A,
}

/// Runs a command, and returns its output.
fn command<A: Args>(
    run: fn(&A, &Kernels, &mut dyn std::io::Write) -> Result<(), CliError>,
    words: &[&str],
) -> Result<String, CliError> {
    let parsed = CommandLine::<A>::try_parse_from(["program"].iter().chain(words));
    let CommandLine { arguments } = parsed.map_err(CliError::Arguments)?;
    let mut out = Vec::new();
    run(&arguments, &Kernels::of(&[&SCALE_ROWS_AUTOTUNE, &SHIFT]), &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn kernels_of_ones_own_are_listed_and_compiled() {
    let listed = command(list::run, &[]).unwrap();
    assert!(listed.contains("scale_rows<T: Float>") && listed.contains("y = a · x, row by row."), "{listed}");
    let dir = tempfile::tempdir().unwrap();
    let words = ["scale_rows", "--target", "sm_80", "--dtype", "f32", "-o", text(dir.path())];
    let files = command(compile::run, &words).unwrap();
    assert!(files.contains("scale_rows.ptx") && files.contains("manifest.json"), "{files}");
    let manifest = std::fs::read_to_string(dir.path().join("manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    // The first configuration.
    assert_eq!((&manifest["constants"]["rows_tile"], &manifest["options"]["num_warps"]), (&4.into(), &2.into()));
    let unknown = command(list::run, &["scale_row"]).unwrap_err().to_string();
    assert!(unknown.contains("did you mean `scale_rows`?"), "{unknown}");
}

/// A manifest has constants as JSON, which has no infinity.
#[test]
fn constants_are_finite_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let compiled = |set: &str| {
        command(compile::run, &["shift", "--target", "host", "-o", text(dir.path()), "--set", "tile=16", "--set", set])
    };
    for (set, part) in [
        ("c=1e400", "1e400 is larger than the largest f64"),
        ("c=-1e400", "-1e400 is less than the least finite f64"),
        ("c=inf", "a manifest cannot hold inf"),
        ("c=NaN", "a manifest cannot hold NaN"),
    ] {
        let message = compiled(set).unwrap_err().to_string();
        assert!(message.contains("`shift`: the constant `c` cannot be") && message.contains(part), "{message}");
    }
    compiled("c=1e30").unwrap();
    let manifest = std::fs::read_to_string(dir.path().join("manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    assert_eq!(manifest["constants"]["c"].as_f64(), Some(1e30));
}

#[test]
fn kernels_of_ones_own_run_on_files() {
    let dir = tempfile::tempdir().unwrap();
    let [input, output] = ["in", "out"].map(|name| dir.path().join(name));
    let values: Vec<f64> = (0..30).map(f64::from).collect();
    let x = Tensor::from_f64(tilewright_codegen::ir::DType::F32, &[10, 3], &values);
    tensors::write(&input, &[("x".to_string(), x)]).unwrap();
    let words = ["scale_rows", "-i", text(&input), "-o", text(&output), "--grid", "rows/rows_tile"];
    let more = ["--set", "rows_tile=8", "--arg", "a=2", "--device", "cpu"];
    command(run::run, &[&words[..], &more].concat()).unwrap();
    let read = tensors::read(&output).unwrap();
    assert_eq!(read[0].1.to_f64(), values.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
}

#[test]
fn kernels_of_ones_own_are_timed_with_other_constants() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("rows.jsonl");
    let words = ["scale_rows", "--shape", "x=100,64", "--dtype", "f32", "--grid", "rows/rows_tile", "--arg", "a=2"];
    let times = ["--device", "cpu", "--warmup-ms", "1", "--rep-ms", "5", "--set", "rows_tile=4"];
    let more = ["--against", "rows_tile=16", "--record", text(&record)];
    let table = command(bench::run, &[&words[..], &times, &more].concat()).unwrap();
    assert!(table.contains("rows_tile=4") && table.contains("rows_tile=16"), "{table}");
    let rows = std::fs::read_to_string(&record).unwrap();
    let rows: Vec<serde_json::Value> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    for row in &rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(0.0 < number("p20_ms") && number("p20_ms") <= number("p80_ms"), "{row}");
        // 100 · 64 elements of 4 bytes, read and written.
        let bytes = number("gbps") * 1e9 * number("median_ms") * 1e-3;
        assert!((bytes - 2.0 * 4.0 * 6400.0).abs() < 1.0, "{row}");
        assert_eq!((&row["shape"], &row["dtype"]), (&serde_json::json!([100, 64]), &"f32".into()));
    }

    for (arguments, words) in [
        (
            &["--set", "rows_tile=4", "--arg", "a=2"][..],
            ["reads the tensor `x`", "--shape x=… in numbers; given are none"],
        ),
        (
            &["--set", "rows_tile=4", "--arg", "a=1e50", "--shape", "x=100,64"],
            ["`a` cannot be 1e50", "the largest f32"],
        ),
        (&["--set", "rows_tile=4", "--shape", "x=100,64", "--shape", "x=1,1"], ["--shape names `x` twice", "once"]),
        (&["--set", "rows_tile=4", "--arg", "a=2", "--shape", "x=n,64"], ["`scale_rows` reads `x`", "numbers"]),
        (&["--arg", "a=2", "--shape", "x=100,64", "--set", "d_tile=0.5"], ["d_tile", "0.5"]),
        (&["--set", "rows_tile=4", "--shape", "x=100,64"], ["cannot be derived from tensors", "--arg a"]),
        (&["--set", "rows_tile=4", "--arg", "a=2", "--shape", "z=100,64"], ["no tensor `z`", "the tensors are"]),
    ] {
        let base = ["scale_rows", "--dtype", "f32", "--grid", "25", "--device", "cpu"];
        let message = command(bench::run, &[&base[..], arguments].concat()).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{words:?} in {message}");
    }
}

/// A tensor that neither the file nor the command line gives: the message has those that are given.
#[test]
fn missing_tensors_name_the_given_ones() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in");
    let other = Tensor::from_f64(tilewright_codegen::ir::DType::F32, &[2], &[0.0, 1.0]);
    tensors::write(&input, &[("other".to_string(), other)]).unwrap();
    let base = ["scale_rows", "--dtype", "f32", "--grid", "25", "--device", "cpu", "--arg", "a=2", "-i", text(&input)];
    let message = command(bench::run, &[&base[..], &["--set", "rows_tile=4"]].concat()).unwrap_err().to_string();
    let help = format!("--shape x=… in numbers, or a tensor `x` in {}; given are other", text(&input));
    assert!(message.contains("reads the tensor `x`, which is not given") && message.contains(&help), "{message}");
}

/// What a worker would refuse is found before one starts.
#[test]
fn mistakes_of_a_tuning_are_named() {
    let base = ["scale_rows", "--dtype", "f32", "--grid", "rows/rows_tile", "--device", "cpu"];
    for (arguments, words) in [
        (&["--set", "rows_tile=4", "--arg", "a=2", "--shape", "x=100,64"][..], ["--set rows_tile is unused", "bench"]),
        (&["--arg", "a=2"], ["reads the tensor `x`", "--shape x=… in numbers; given are none"]),
        (&["--shape", "x=100,64"], ["cannot be derived from tensors", "--arg a"]),
    ] {
        let message = command(tune::run, &[&base[..], arguments].concat()).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{words:?} in {message}");
    }
}
