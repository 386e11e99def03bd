//! Compiles and runs the host programs of `docs/ahead-of-time.md`.

use crate::tilewright;
use std::path::Path;
use std::process::Command;

/// Returns the code block of `docs/ahead-of-time.md` that begins with this line.
fn block(first_line: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ahead-of-time.md");
    let page = std::fs::read_to_string(page).unwrap();
    let start = page.find(first_line).unwrap_or_else(|| panic!("the page has no `{first_line}`"));
    page[start..].split("```").next().unwrap().to_string()
}

/// Compiles the kernel as on that page, and returns the manifest.
fn compile(dir: &Path, target: &str, out: &str) -> serde_json::Value {
    let constants = ["--dtype", "f32", "--set", "rows_tile=32,d_tile=64"];
    tilewright(dir, &[&["compile", "weighted_sum_fwd", "--target", target, "-o", out], &constants[..]].concat()).ok();
    serde_json::from_str(&std::fs::read_to_string(dir.join(out).join("manifest.json")).unwrap()).unwrap()
}

/// Runs a command in `dir`, and returns its output.
fn run(dir: &Path, command: &[&str]) -> String {
    let output = Command::new(command[0]).args(&command[1..]).current_dir(dir).env("LD_LIBRARY_PATH", dir).output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}\n{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn the_c_program_runs_native_code() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = compile(dir.path(), "host", "out");
    let source = block("/* cpu.c");
    let written = source.lines().find(|line| line.starts_with("#define ARENA_BYTES")).unwrap().to_string();
    let source = source.replace(&written, &format!("#define ARENA_BYTES {}", manifest["arena_bytes"]));
    std::fs::write(dir.path().join("cpu.c"), source).unwrap();
    run(dir.path(), &["cc", "-Wall", "-Werror", "cpu.c", "out/weighted_sum_fwd.o", "-o", "cpu"]);
    assert_eq!(run(dir.path(), &["./cpu"]), "right\n");
}
