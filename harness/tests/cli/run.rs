//! Tests of `run`: kernels on tensors from files, compared with results computed here.

use crate::tilewright;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::path::Path;

pub struct Named {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Returns an f32 tensor.
pub fn tensor(name: &str, shape: &[usize], values: &[f32]) -> Named {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    Named { name: name.to_string(), dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

/// Returns the contents of a safetensors file.
pub fn file(tensors: &[Named]) -> Vec<u8> {
    let views = tensors.iter().map(|t| (&t.name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

fn write(dir: &Path, tensors: &[Named]) {
    std::fs::write(dir.join("in.safetensors"), file(tensors)).unwrap();
}

fn run(dir: &Path, kernel: &str, more: &[&str]) -> crate::Ran {
    tilewright(dir, &[&["run", kernel, "-i", "in.safetensors", "-o", "out.safetensors"], more].concat())
}

/// Reads shape and values of an f32 tensor of the output file.
fn output(dir: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(dir.join("out.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).unwrap();
    assert_eq!(view.dtype(), Dtype::F32);
    let number = |chunk: &[u8]| f32::from_le_bytes(chunk.try_into().unwrap());
    (view.shape().to_vec(), view.data().chunks_exact(4).map(number).collect())
}

/// Returns integers whose sums are exact in f32.
fn small(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7 % 11) as f32 - 5.0).collect()
}

const TILES: [&str; 4] = ["--set", "rows_tile=16,d_tile=32", "--grid", "rows/rows_tile"];

#[test]
fn scalars_are_derived_from_parameter_names() {
    let dir = tempfile::tempdir().unwrap();
    let (rows, d) = (37, 45);
    let (x, w) = (small(rows * d), small(d));
    write(dir.path(), &[tensor("x", &[rows, d], &x), tensor("w", &[d], &w)]);
    let text = run(dir.path(), "weighted_sum_fwd", &[&TILES[..], &["--shape", "y=rows"]].concat()).ok();
    assert!(text.contains("grid (3, 1, 1)") && text.contains("y: f32 [37]"), "{text}");
    let expected: Vec<f32> = (0..rows).map(|r| (0..d).map(|j| x[r * d + j] * w[j]).sum()).collect();
    assert_eq!(output(dir.path(), "y"), (vec![rows], expected));
}

/// Without constants, `run` takes those of the configuration that a launch would have; arguments that the kernel then does
/// not use, such as the counter of a persistent launch, need no value.
#[test]
fn constants_that_are_not_given_are_those_of_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let (m, k, n) = (37, 45, 20);
    let (a, b) = (small(m * k), small(k * n));
    write(dir.path(), &[tensor("a", &[m, k], &a), tensor("b", &[k, n], &b)]);
    let ran = run(dir.path(), "matmul", &[]);
    assert!(
        ran.err
            .contains("note: constants and options that are not given are those of the default configuration: m_tile="),
        "{}",
        ran.err
    );
    ran.ok();
    let product = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum::<f32>();
    let expected: Vec<f32> = (0..m * n).map(|at| product(at / n, at % n)).collect();
    assert_eq!(output(dir.path(), "c"), (vec![m, n], expected));

    // Given constants are not those of the configuration, and fit beside small tiles.
    let ran = run(dir.path(), "matmul", &["--set", "m_tile=8192"]);
    assert!(ran.err.contains("default configuration: n_tile="), "{}", ran.err);
    ran.ok();
    // The bias is an input of other constants.
    write(dir.path(), &[tensor("a", &[m, k], &a), tensor("b", &[k, n], &b), tensor("bias", &[n], &small(n))]);
    let ran = run(dir.path(), "matmul", &[]);
    assert_eq!(
        ran.err.matches("note: with these constants, `matmul` does not use the tensor `bias`").count(),
        1,
        "{}",
        ran.err
    );
    let message = run(dir.path(), "matmul", &["--set", "activation=relu"]).fails(1);
    assert!(message.contains("activation") && message.contains("Relu"), "{message}");

    let (rows, d, scale) = (40, 16, 0.25);
    let q: Vec<f32> = small(rows * d).iter().map(|x| x / 8.0).collect();
    // Two heads of queries share one of keys.
    let heads = q.repeat(2);
    let [k, v] = ["k", "v"].map(|name| tensor(name, &[1, 1, rows, d], &q));
    write(dir.path(), &[tensor("q", &[1, 2, rows, d], &heads), k, v]);
    let attention = |more: &[&str]| run(dir.path(), "flash_attention_fwd", &[&["--arg", "scale=0.25"], more].concat());
    let shapes = ["--shape", "o=q", "--shape", "lse=2,40"];
    attention(&shapes).ok();
    let expected: Vec<f32> = (0..2 * rows * d)
        .map(|at| at % (rows * d))
        .map(|at| {
            let score = |j: usize| (0..d).map(|l| q[at / d * d + l] * q[j * d + l]).sum::<f32>() * scale;
            let weights: Vec<f32> = (0..rows).map(|j| score(j).exp()).collect();
            let sum: f32 = (0..rows).map(|j| weights[j] * q[j * d + at % d]).sum();
            sum / weights.iter().sum::<f32>()
        })
        .collect();
    let message = attention(&[&shapes[..], &["--set", "d=8"]].concat()).fails(2);
    assert!(message.contains("the constant d is 8, and dimension 3 of `q`, its extent, is 16"), "{message}");
    let message = attention(&[&shapes[..], &["--set", "d_tile=8"]].concat()).fails(1);
    assert!(message.contains("d, group and pack must be at least 1, and d_tile at least d"), "{message}");
    attention(&shapes).ok();
    let (shape, found) = output(dir.path(), "o");
    assert_eq!(shape, [1, 2, rows, d]);
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?}, expected {expected:?}");
}

/// Rows narrower than the smallest default tile, and a tile that is said to hold a row and does not.
#[test]
fn tiles_of_columns_hold_the_rows_that_they_promise() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[tensor("x", &[3, 4], &[0.0; 12])]);
    run(dir.path(), "softmax_rows", &["--set", "d_tile=4"]).ok();
    assert_eq!(output(dir.path(), "y"), (vec![3, 4], vec![0.25; 12]));
    write(dir.path(), &[tensor("x", &[3, 100], &small(300)), tensor("w", &[100], &small(100))]);
    let message = run(dir.path(), "weighted_sum_fwd", &["--set", "single_tile=true,d_tile=32"]).fails(1);
    assert!(message.contains("100 == 32"), "{message}");
}

#[test]
fn outputs_of_named_dimensions_need_no_shape() {
    let dir = tempfile::tempdir().unwrap();
    let (m, n, k) = (20, 33, 17);
    let (a, b) = (small(m * k), small(k * n));
    write(dir.path(), &[tensor("a", &[m, k], &a), tensor("b", &[k, n], &b)]);
    run(dir.path(), "matmul", &["--set", "m_tile=16,n_tile=16,k_tile=16", "--grid", "m/m_tile*3"]).ok();
    let expected: Vec<f32> = (0..m * n).map(|at| (0..k).map(|i| a[at / n * k + i] * b[i * n + at % n]).sum()).collect();
    assert_eq!(output(dir.path(), "c"), (vec![m, n], expected));
}

#[test]
fn the_own_grid_uses_the_defaults_of_constants() {
    let dir = tempfile::tempdir().unwrap();
    let (m, n, k) = (20, 33, 17);
    write(dir.path(), &[tensor("a", &[m, k], &small(m * k)), tensor("b", &[k, n], &small(k * n))]);
    let with = |more: &[&str]| {
        run(dir.path(), "matmul", &[&["--set", "m_tile=16,n_tile=16,k_tile=16", "--device", "cpu"], more].concat())
    };
    assert!(with(&[]).ok().contains("grid (6, 1, 1)"));
    let message = with(&["--arg", "m=-1"]).fails(2);
    assert!(message.contains("`m`, a dimension of `c`, is negative, -1: expected 0 or more"), "{message}");
    let message = with(&["--arg", "m=-1", "--shape", "c=20,33"]).fails(2);
    assert!(message.contains("depends on `m`, which is negative, -1") && message.contains("--arg m=…"), "{message}");
}

#[test]
fn strides_can_be_given() {
    let dir = tempfile::tempdir().unwrap();
    // With a row stride of 0, every row is the first one.
    write(dir.path(), &[tensor("x", &[3, 4], &small(12)), tensor("w", &[4], &[1.0; 4])]);
    let more = [&TILES[..], &["--shape", "y=rows", "--arg", "x_stride_rows=0"]].concat();
    run(dir.path(), "weighted_sum_fwd", &more).ok();
    assert_eq!(output(dir.path(), "y").1, [small(4).iter().sum::<f32>(); 3]);
}

#[test]
fn empty_tensors_run_nothing() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[tensor("x", &[0, 4], &[]), tensor("w", &[4], &small(4))]);
    let text = run(dir.path(), "weighted_sum_fwd", &[&TILES[..], &["--shape", "y=rows"]].concat()).ok();
    assert!(text.contains("grid (0, 1, 1)"), "{text}");
    assert_eq!(output(dir.path(), "y"), (vec![0], vec![]));
}

/// Without the check, no program would write the outputs, and the exit code would be 0.
#[test]
fn outputs_that_nothing_would_write_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[tensor("x", &[3, 4], &small(12)), tensor("w", &[4], &[1.0; 4])]);
    let with = |more: &[&str]| {
        let common = ["--set", "rows_tile=16,d_tile=32", "--shape", "y=rows"];
        let message = run(dir.path(), "weighted_sum_fwd", &[&common[..], more].concat()).fails(2);
        assert!(!dir.path().join("out.safetensors").exists(), "{message}");
        message
    };
    for grid in ["0", "1,0", "rows*0"] {
        let message = with(&["--grid", grid]);
        assert!(message.contains(&format!("--grid {grid} is (")) && message.contains("`y` of shape [3]"), "{message}");
    }
    let message = with(&["--grid", "1", "--arg", "y_stride_rows=0"]);
    assert!(message.contains("`y_stride_rows` is 0: output `y` is written to a file in row-major order"), "{message}");
    // The file would have the elements in the order of memory.
    let message = with(&["--grid", "1", "--arg", "y_stride_rows=2"]);
    assert!(message.contains("`y_stride_rows` is 2") && message.contains("where it is 1"), "{message}");
}

#[test]
fn undetermined_arguments_are_requested() {
    let dir = tempfile::tempdir().unwrap();
    let mistake = |kernel: &str, more: &[&str], parts: &[&str]| {
        let message = run(dir.path(), kernel, more).fails(2);
        for part in parts {
            assert!(message.contains(part), "`{part}` is missing in:\n{message}");
        }
        assert!(!dir.path().join("out.safetensors").exists());
    };
    write(dir.path(), &[tensor("x", &[3, 4], &small(12)), tensor("w", &[4], &small(4))]);
    mistake("softmax_rows", &[], &["needs a value for d_tile", "--set d_tile=…"]);
    mistake(
        "weighted_sum_fwd",
        &["--set", "rows_tile=16,d_tile=16", "--shape", "y=rows", "--grid", "rows/rowtile"],
        &["`rowtile`", "did you mean `rows_tile`"],
    );
    mistake("weighted_sum_fwd", &[&TILES[..], &["--arg", "row=1"]].concat(), &["`row`", "did you mean `rows`"]);
    mistake("weighted_sum_fwd", &[&TILES[..], &["--arg", "d_tile=1"]].concat(), &["--set d_tile"]);
    mistake("weighted_sum_fwd", &[&TILES[..], &["--shape", "z=rows"]].concat(), &["`z`"]);
    mistake(
        "weighted_sum_fwd",
        &[&TILES[..], &["--shape", "y=3", "--arg", "rows=4294967296"]].concat(),
        &["`rows`", "i32"],
    );
    mistake("matmul", &["--set", "m_tile=16,n_tile=16,k_tile=16", "--grid", "1"], &["tensor `a`", "x"]);
    mistake("rms_norm_fwd", &["--set", "rows_tile=16,d_tile=16"], &["--arg eps=…"]);
    write(dir.path(), &[tensor("x", &[4], &small(4)), tensor("y", &[4], &small(4))]);
    let ranks = ["--set", "tile=16,rank=0,world=2,write_copy=true", "--arg", "n=4"];
    mistake("rank_sum", &[&ranks[..], &["--shape", "copy=y"]].concat(), &["does not give its grid", "--grid"]);
    mistake("rank_sum", &[&ranks[..], &["--grid", "1"]].concat(), &["shape of `copy`"]);
}

/// A type that no tensor of the file has is asked for by its name, not by a tensor that has nothing to do with it.
#[test]
fn missing_types_are_requested_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let eight_bit = |name: &str| Named {
        name: name.into(),
        dtype: Dtype::F8_E4M3,
        shape: vec![1, 2, 32, 32],
        bytes: vec![0; 2 * 32 * 32],
    };
    write(dir.path(), &["q", "k", "v"].map(eight_bit));
    let more = ["--arg", "scale=0.1", "--shape", "o=q", "--shape", "lse=batch,heads,n_q"];
    let message = run(dir.path(), "flash_attention_fwd", &more).fails(2);
    assert!(message.contains("`flash_attention_fwd` needs an element type for `R`"), "{message}");
    assert!(message.contains("--dtype R=TYPE, one of f16, bf16, f32, f64") && !message.contains("sinks"), "{message}");
    // The type is that of a missing tensor.
    write(dir.path(), &[tensor("z", &[1, 2, 32, 32], &small(2048))]);
    let message = run(dir.path(), "flash_attention_fwd", &more).fails(2);
    assert!(message.contains("has no tensor `q`, which `flash_attention_fwd` reads"), "{message}");
    let message = run(dir.path(), "quantize_rows", &["--dtype", "T=f32,U=f8e4m3"]).fails(2);
    assert!(message.contains("has no tensor `x`, which `quantize_rows` reads"), "{message}");
    // `d_tile` follows from the tensor.
    write(dir.path(), &[tensor("x", &[1, 2, 130, 24], &small(2 * 130 * 24))]);
    run(dir.path(), "quantize_rows", &["--dtype", "U=f8e4m3", "--shape", "descale=batch,heads,2"]).ok();
    assert_eq!(output(dir.path(), "descale").0, [1, 2, 2]);
}

#[test]
fn tensors_that_do_not_fit_the_kernel_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let more = [&TILES[..], &["--shape", "y=rows"]].concat();
    let refuse = |tensors: &[Named], parts: &[&str]| {
        write(dir.path(), tensors);
        let message = run(dir.path(), "weighted_sum_fwd", &more).fails(2);
        for part in parts {
            assert!(message.contains(part), "`{part}` is missing in:\n{message}");
        }
    };
    let w = || tensor("w", &[4], &small(4));
    refuse(&[tensor("x", &[12], &small(12)), w()], &["`x`", "1 dimensions", "2 strides"]);
    let half = Named { name: "w".into(), dtype: Dtype::F16, shape: vec![4], bytes: vec![0; 8] };
    refuse(&[tensor("x", &[3, 4], &small(12)), half], &["`w`", "f16", "f32"]);
    let ints = Named { name: "x".into(), dtype: Dtype::I32, shape: vec![3, 4], bytes: vec![0; 48] };
    refuse(&[ints, w()], &["i32", "f16, bf16, f32"]);
}

#[test]
fn a_missing_gpu_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[tensor("x", &[3, 4], &small(12)), tensor("w", &[4], &small(4))]);
    let more = [&TILES[..], &["--shape", "y=rows", "--device", "cuda:99"]].concat();
    let message = run(dir.path(), "weighted_sum_fwd", &more).fails(1);
    assert!(message.contains("CUDA") || message.contains("GPU 99"), "{message}");
}

#[test]
fn tensors_that_do_not_fit_together_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[tensor("x", &[4, 8], &small(32)), tensor("w", &[7], &small(7))]);
    let run = |more: &[&str]| run(dir.path(), "weighted_sum_fwd", &[&TILES[..], more].concat()).fails(2);
    let text = run(&["--shape", "y=rows"]);
    assert!(text.contains("tensor `w` has shape [7]: `d` is 7 there, and 8 in `x`"), "{text}");
    write(dir.path(), &[tensor("x", &[4, 8], &small(32)), tensor("w", &[8], &small(8))]);
    let text = run(&["--shape", "y=rows", "--arg", "x_stride_rows=999999"]);
    assert!(text.contains("`x` has 32 elements") && text.contains("access element 3000004"), "{text}");
    let text = run(&["--shape", "y=2"]);
    assert!(text.contains("tensor `y` has shape [2]: `rows` is 2 there, and 4 in `x`"), "{text}");
    write(dir.path(), &[tensor("x", &[4, 8], &small(32)), tensor("w", &[9], &small(9))]);
    let text = run(&["--shape", "y=rows"]);
    assert!(text.contains("tensor `w` has shape [9]: `d` is 9 there, and 8 in `x`"), "{text}");
}

/// Shapes of outputs, extents and the grid follow from the kernel's signature.
#[test]
fn tensor_parameters_need_no_options() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[tensor("x", &[3, 4], &small(12)), tensor("w", &[4], &[1.0; 4])]);
    let text = run(dir.path(), "weighted_sum_fwd", &["--set", "rows_tile=2,d_tile=16"]).ok();
    assert!(text.contains("grid (2, 1, 1)"), "{text}");
    let expected = small(12).chunks(4).map(|row| row.iter().sum()).collect();
    assert_eq!(output(dir.path(), "y"), (vec![3], expected));
}

/// Regression test: with −1 tokens, every access passed the bounds check, because extents were compared as unsigned
/// numbers.
#[test]
fn extents_below_zero_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let frequencies = [1.0f64, 0.5].iter().flat_map(|x| x.to_le_bytes()).collect();
    let frequencies = Named { name: "frequencies".to_string(), dtype: Dtype::F64, shape: vec![2], bytes: frequencies };
    write(dir.path(), &[tensor("x", &[1, 1, 4], &small(4)), frequencies]);
    let arguments = ["--grid", "1", "--shape", "y=x", "--set", "tokens_tile=64,heads_tile=1,d_tile=64", "--arg"];
    let with = |arg: &str| run(dir.path(), "rope_from", &[&arguments[..], &[arg]].concat());
    let message = with("tokens=-1,start=0,length=1").fails(2);
    for part in ["`tokens` is -1", "`rope_from`", "expected 0 or more", "--arg"] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    with("tokens=1,start=0,length=1").ok();
}

#[test]
fn control_characters_in_names_are_escaped() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[tensor("y\u{1b}[2J\nerror: x", &[16], &small(16))]);
    let message = run(dir.path(), "weighted_sum_fwd", &TILES).fails(2);
    assert!(message.contains(r"y\u{1b}[2J\u{a}error: x") && !message.contains('\u{1b}'), "{message}");
    let demo = tilewright(dir.path(), &["demo", "-i", "in.safetensors", "-o", "out.safetensors"]);
    assert!(demo.code != 0 && !demo.err.contains('\u{1b}'), "{}", demo.err);
}

/// A grid that does not cover an output: the elements that no program wrote are counted.
#[test]
fn elements_that_no_program_writes_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[tensor("x", &[37, 4], &small(148)), tensor("w", &[4], &small(4))]);
    let of = |grid: &str| run(dir.path(), "weighted_sum_fwd", &["--set", "rows_tile=16,d_tile=32", "--grid", grid]);
    let short = of("1");
    assert!(
        short.err.contains("21 of the 37 elements of output `y` are what memory has that no program wrote"),
        "{}",
        short.err
    );
    assert!(short.err.contains("the grid (1, 1, 1) may be too small"), "{}", short.err);
    short.ok();
    let whole = of("3");
    assert!(!whole.err.contains("warning"), "{}", whole.err);
    whole.ok();
}
