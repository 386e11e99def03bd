//! End-to-end tests of `tile-opt`.

use std::io::Write;
use std::process::{Command, Output, Stdio};

const ADD: &str = "kernel @add(%x: ptr<f32>, %y: ptr<f32>, %n: i32) {
  %0 = constant {value = 0} : i32
  %1 = add %n, %0 : i32
  %2 = ptr_add %x, %1 : ptr<f32>
  %3 = load %2 {eviction = normal} : f32
  store %y, %3 {eviction = normal}
  return
}
";

fn tile_opt(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tile-opt"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("tile-opt starts");
    // A process that exits before it reads closes the pipe.
    let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
    child.wait_with_output().expect("tile-opt ends")
}

fn succeeds(args: &[&str], input: &str) -> String {
    let output = tile_opt(args, input);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn fails(args: &[&str], input: &str) -> String {
    let output = tile_opt(args, input);
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn runs_passes_and_prints() {
    let out = succeeds(&["-", "--passes", "canonicalize,dce", "--verify-each"], ADD);
    assert_eq!(
        out,
        "kernel @add(%x: ptr<f32>, %y: ptr<f32>, %n: i32) {
  %0 = ptr_add %x, %n : ptr<f32>
  %1 = load %0 {eviction = normal} : f32
  store %y, %1 {eviction = normal}
  return
}
"
    );
}

#[test]
fn interprets() {
    let args = ["-", "--interpret", "--quiet", "--arg", "x=range:8", "--arg", "y=zeros:1", "--arg", "n=5"];
    let out = succeeds(&args, ADD);
    assert!(out.contains("// x: 8 f32, hash ") && out.contains("[0, 1, 2, 3, 4, 5, 6, 7]"), "{out}");
    assert!(out.contains("// y: 1 f32, hash ") && out.ends_with("[5]\n"), "{out}");
}

#[test]
fn lists_ops_and_passes() {
    assert!(succeeds(&["--ops"], "").contains("\nmake_view {order}  (from stage tile)\n"));
    assert!(succeeds(&["--list-passes"], "").contains("resolve_views"));
}

#[test]
fn errors_say_what_to_do() {
    assert_eq!(fails(&["-"], "kernel @f() { boom }"), "tile-opt: -:1:15: unknown op `boom`\n");
    assert_eq!(
        fails(&["-"], "kernel @f(%x: f32) { %0 = not %x : f32\nreturn }"),
        "tile-opt: - is not a valid function:\n  -:1:27: `%0 = not %x : f32`: operand 0 should be a scalar or tile of bool or integers, \
         found f32 (rule: operand types)\n"
    );
    assert!(
        fails(&["-", "--passes", "nothing"], ADD).starts_with("tile-opt: unknown pass `nothing`: expected one of ")
    );
    assert_eq!(
        fails(&["-", "--interpret", "--arg", "x=zeros:1"], ADD),
        "tile-opt: the kernel's argument `y` needs a value, for example --arg y=random:1024\n"
    );
    let far = ["-", "--interpret", "--quiet", "--arg", "x=zeros:8", "--arg", "y=zeros:1", "--arg", "n=9"];
    assert_eq!(
        fails(&far, ADD),
        "tile-opt: -:5:8: `%3 = load %2 {eviction = normal} : f32` in program (0, 0, 0): accesses 4 bytes at offset 36 of \
         buffer 0, which has 32 bytes\n"
    );
    let none = ["-", "--interpret", "--arg", "x=zeros:8", "--arg", "y=zeros:1", "--arg", "n=8", "--grid", "2,0"];
    assert_eq!(fails(&none, ADD), "tile-opt: --grid 2,0,1 has no program to run; extents begin at 1\n");
    assert!(fails(&["-", "--passes", "dce", "--reduce"], ADD).contains("there is nothing to reduce"));
}

#[test]
fn reduces_what_makes_a_pass_panic() {
    // `assign_layouts` requires resolved views; an `advance` makes it panic.
    let text = "kernel @moved(%x: ptr<f32>, %y: ptr<f32>, %n: i64) {
  %0 = constant {value = 0} : i64
  %1 = constant {value = 1} : i64
  %2 = make_view %x, %n, %1, %0 {order = [0]} : view<32xf32>
  %3 = advance %2, %1 : view<32xf32>
  %4 = load_view %3 {boundary = [0], padding = zero, eviction = normal} : tensor<32xf32>
  %5 = exp %4 : tensor<32xf32>
  %6 = make_view %y, %n, %1, %0 {order = [0]} : view<32xf32>
  store_view %6, %5 {boundary = [0], eviction = normal}
  return
}
";
    let out = succeeds(&["-", "--passes", "assign_layouts", "--reduce"], text);
    assert!(out.contains("advance") && !out.contains("exp"), "{out}");
}

/// Output that nobody reads is no error; output that cannot be written is one, and never a panic.
#[test]
fn output_that_cannot_be_written() {
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
    let run = |args: &[&str], stdout: Stdio, stderr: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tile-opt"));
        command.args(args).stdin(Stdio::null()).stdout(stdout).stderr(stderr).output().expect("tile-opt ends")
    };
    for args in [&["--ops"][..], &["--list-passes"]] {
        let output = run(args, full().into(), Stdio::piped());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && message.contains("standard output"), "{args:?}: {message}");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = run(args, writer.into(), Stdio::piped());
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let output = run(&["/no/such/file"], Stdio::piped(), full().into());
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn an_endless_kernel_is_stopped() {
    let endless = "kernel @endless(%n: i32) {
  %yes = constant {value = true} : bool
  while () {
    condition %yes
  } () {
    yield
  }
  return
}
";
    let message = fails(&["-", "--interpret", "--quiet", "--arg", "n=1", "--max-ops", "1000"], endless);
    assert!(message.contains("stopped after 1000 ops") && message.contains("--max-ops allows more"), "{message}");
}

#[test]
fn schedules_of_another_form_are_refused() {
    let message = fails(&["-", "--loops", "garbage"], ADD);
    assert!(message.contains("`garbage` is not the schedule of a loop: expected LOOP@INTERVAL"), "{message}");
}
