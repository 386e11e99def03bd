//! Text tests of passes, as LLVM's lit tests: each file of `tests/ir` has a function, the passes to run, and the
//! expected output.
//!
//! ```text
//! // What the file tests.
//! // run: canonicalize,cse
//! // options: num_stages=2 tma=true
//! kernel @name(…) { … }
//! // expect:
//! kernel @name(…) { … }
//! ```
//!
//! Options are those of `tile-opt`, for sm_90a where `target` does not say otherwise; without them the line is not there.
//! Notes of passes precede the output as comments; the error of a pass replaces it.
//!
//! `BLESS=1 cargo test -p tilewright-tests --test ir` writes the output into the files; review the difference before
//! committing it.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use tilewright_codegen::ir::Func;
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_codegen::{passes, text, verify};

const EXPECT: &str = "// expect:\n";

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("ir");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|e| e.expect("a readable folder").path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "tile"));
    paths.sort();
    paths
}

/// Fails unless the function round-trips through its text and is valid.
fn check(func: &Func, when: &str) -> Result<(), String> {
    let printed = text::print(func);
    let again =
        text::parse(&printed).map_err(|e| format!("{when}, the printed text does not parse: {e}\n{printed}"))?;
    if text::print(&again) != printed {
        return Err(format!("{when}, parse and print change the text:\n{printed}\nto\n{}", text::print(&again)));
    }
    verify::verify(func, verify::stage_of(func)).map_err(|errors| {
        let list: Vec<String> = errors.iter().map(|e| e.to_string()).collect();
        format!("{when}, the function is not valid:\n{}\n{printed}", list.join("\n"))
    })
}

/// The target and the options of a file.
fn options(input: &str) -> Result<(GpuArch, CompileOptions), String> {
    let (mut arch, mut options) = (GpuArch::Sm90a, CompileOptions::default());
    let line = input.lines().find_map(|line| line.strip_prefix("// options:")).unwrap_or_default();
    for word in line.split_whitespace() {
        let wrong = || format!("unknown option `{word}`");
        let (name, value) = word.split_once('=').ok_or_else(wrong)?;
        match name {
            "target" => arch = value.parse().map_err(|_| wrong())?,
            "num_warps" => options.num_warps = value.parse().map_err(|_| wrong())?,
            "num_ctas" => options.num_ctas = value.parse().map_err(|_| wrong())?,
            "num_stages" => options.num_stages = value.parse().map_err(|_| wrong())?,
            _ => *options.schedule.choice(name).ok_or_else(wrong)? = Some(value.parse().map_err(|_| wrong())?),
        }
    }
    Ok((arch, options))
}

/// Runs the passes of a file; returns the output.
fn run(file: &str, input: &str) -> Result<String, String> {
    let names = input
        .lines()
        .find_map(|line| line.strip_prefix("// run:"))
        .ok_or("expected a line `// run: pass, pass, …` before the kernel")?;
    let mut func = text::parse_file(file, input).map_err(|e| e.to_string())?;
    check(&func, "before the passes")?;
    let (arch, options) = options(input)?;
    let mut out = String::new();
    for name in names.split(',').map(str::trim) {
        let step = passes::step(name, arch, &options).ok_or_else(|| format!("no pass is called `{name}`"))?;
        match step(&mut func) {
            Ok(notes) => notes.iter().for_each(|note| out += &format!("// note: {note}\n")),
            Err(e) => return Ok(format!("// error: {e}\n")),
        }
        check(&func, &format!("after {name}"))?;
    }
    Ok(out + &text::print(&func))
}

/// Up to 12 lines of each text, from three lines before the first difference.
fn difference(expected: &str, found: &str) -> String {
    let (left, right): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), found.lines().collect());
    let same_start = left.iter().zip(&right).take_while(|(a, b)| a == b).count();
    let from = same_start.saturating_sub(3);
    let mut out = String::new();
    for (mark, lines) in [("expected", &left), ("found", &right)] {
        let _ = writeln!(out, "--- {mark}, from line {}", from + 1);
        for line in lines.iter().skip(from).take(12) {
            let _ = writeln!(out, "{line}");
        }
    }
    out
}

#[test]
fn passes_give_what_the_files_expect() {
    let bless = std::env::var_os("BLESS").is_some_and(|v| v == "1");
    let mut failures = Vec::new();
    let files = files();
    assert!(!files.is_empty(), "no files in tests/ir");
    for path in files {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let content = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (input, expected) = content.split_once(EXPECT).unwrap_or((&content, ""));
        match run(&name, input) {
            Err(e) => failures.push(format!("{name}: {e}")),
            Ok(found) if found == expected => {}
            Ok(found) if bless => {
                let blessed = format!("{}\n{EXPECT}{found}", input.trim_end());
                std::fs::write(&path, blessed).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            }
            Ok(found) => failures.push(format!("{name}\n{}", difference(expected, &found))),
        }
    }
    assert!(failures.is_empty(), "{} files fail (BLESS=1 accepts):\n{}", failures.len(), failures.join("\n"));
}

/// Every pass that tools run by name has a file.
#[test]
fn every_pass_has_a_file() {
    let contents: Vec<String> =
        files().iter().map(|path| std::fs::read_to_string(path).expect("a readable file")).collect();
    let runs: Vec<&str> =
        contents.iter().filter_map(|text| text.lines().find_map(|line| line.strip_prefix("// run:"))).collect();
    let run: Vec<&str> = runs.iter().flat_map(|names| names.split(',')).map(str::trim).collect();
    let names = passes::PASSES.iter().map(|pass| pass.name).chain(passes::TARGET_PASSES.iter().map(|pass| pass.name));
    let untested: Vec<&str> = names.filter(|name| !run.contains(name)).collect();
    assert!(untested.is_empty(), "no file of tests/ir runs {}", untested.join(", "));
}

/// Attributes with numbers far beyond what the files have are valid or refused: neither the parser nor the verifier panics.
#[test]
fn huge_numbers_in_attributes_do_not_panic() {
    let huge = ["2147483648", "4294967295", "18446744073709551615"];
    for path in files() {
        let contents = std::fs::read_to_string(&path).expect("a readable file");
        for text in contents.split(EXPECT).filter(|text| text.contains("kernel @")) {
            let numbers = text.match_indices(|c: char| c.is_ascii_digit()).map(|(at, _)| at).filter(|&at| {
                let before = text[..at].chars().next_back().unwrap_or(' ');
                let in_attributes = text[..at].rfind(['{', '}', '\n']).is_some_and(|i| text[i..].starts_with('{'));
                in_attributes && !before.is_alphanumeric() && !"%#_.".contains(before)
            });
            for (n, at) in numbers.enumerate() {
                let rest = text[at..].trim_start_matches(|c: char| c.is_ascii_digit());
                let changed = format!("{}{}{rest}", &text[..at], huge[n % huge.len()]);
                if let Ok(func) = text::parse(&changed) {
                    let _ = verify::verify(&func, verify::stage_of(&func));
                }
            }
        }
    }
}
