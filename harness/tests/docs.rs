//! Checks that files, links, anchors, included code, commands and passes in the documentation exist, and that the book's
//! summary lists its pages.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns every page with its text.
fn pages() -> Vec<(PathBuf, String)> {
    let in_folder = |folder: PathBuf| {
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect::<Vec<_>>()
    };
    let folders = [root(), root().join("docs"), root().join("docs/tour")];
    let paths = folders.into_iter().flat_map(in_folder);
    let pages: Vec<(PathBuf, String)> =
        paths.map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect();
    assert!(pages.len() >= 8, "{pages:?}");
    pages
}

/// The links and images of a page, and the anchors of its headings.
#[derive(Default)]
struct Outline {
    links: Vec<String>,
    anchors: BTreeSet<String>,
}

fn outline(text: &str) -> Outline {
    let mut found = Outline::default();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                found.links.push(dest_url.to_string());
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(text) | Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    *heading += &text;
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let is_kept = |c: &char| c.is_alphanumeric() || ['-', '_', ' '].contains(c);
                let text = heading.take().unwrap_or_default().to_lowercase();
                found.anchors.insert(text.chars().filter(is_kept).collect::<String>().replace(' ', "-"));
            }
            _ => {}
        }
    }
    found
}

#[test]
fn links_lead_somewhere() {
    let pages = pages();
    let outlines: BTreeMap<PathBuf, Outline> =
        pages.iter().map(|(page, text)| (page.canonicalize().unwrap(), outline(text))).collect();
    let mut broken = Vec::new();
    for (page, of) in &outlines {
        for target in &of.links {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            if file.starts_with("http") {
                continue;
            }
            let path = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            let Ok(path) = path.canonicalize() else {
                broken.push(format!("{}: {target}", page.display()));
                continue;
            };
            let known = outlines.get(&path).is_none_or(|of| anchor.is_empty() || of.anchors.contains(anchor));
            if !known {
                broken.push(format!("{}: {target} is not a heading", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(outlines.values().map(|of| of.links.len()).sum::<usize>() > 100);
}

/// The summary lists every page of `docs/` once, and the book has every file that its pages link to.
#[test]
fn the_summary_of_the_book_is_complete() {
    let docs = root().join("docs").canonicalize().unwrap();
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: Vec<PathBuf> =
        outline(&summary).links.iter().map(|link| docs.join(link).canonicalize().expect(link)).collect();
    let distinct: BTreeSet<&PathBuf> = listed.iter().collect();
    assert_eq!(distinct.len(), listed.len(), "a page is listed twice");
    for (page, _) in pages() {
        let page = page.canonicalize().unwrap();
        let is_page = page.starts_with(&docs) && !page.ends_with("SUMMARY.md");
        assert!(!is_page || distinct.contains(&page), "docs/SUMMARY.md does not list {}", page.display());
    }
    // What `make book` copies.
    let script = std::fs::read_to_string(root().join("scripts/book.sh")).unwrap();
    let files = script.lines().find_map(|line| line.strip_prefix("FILES=")).unwrap().trim_matches('"');
    let copied: Vec<PathBuf> = ["docs", "examples"]
        .into_iter()
        .chain(files.split(' '))
        .map(|file| root().join(file).canonicalize().expect(file))
        .collect();
    for page in &listed {
        for link in outline(&std::fs::read_to_string(page).unwrap()).links {
            let file = link.split('#').next().unwrap_or_default();
            if !file.starts_with("http") && !file.is_empty() {
                let path = page.parent().unwrap().join(file).canonicalize().expect(file);
                let has = copied.iter().any(|copied| path.starts_with(copied));
                assert!(has, "{}: scripts/book.sh does not copy {file}", page.display());
            }
        }
    }
}

/// The block of code after a comment `<!-- FILE:ANCHOR -->` is that part of the file. With `BLESS=1`, writes it into the page.
#[test]
fn code_of_examples_is_theirs() {
    let mut count = 0;
    for (page, text) in pages() {
        let mut expected = String::new();
        let mut rest = &text[..];
        while let Some((before, after)) = rest.split_once("<!-- ") {
            let (name, after) =
                after.split_once(" -->").unwrap_or_else(|| panic!("{}: `<!-- {after}`", page.display()));
            expected += &format!("{before}<!-- {name} -->");
            rest = after;
            let Some((file, anchor)) = name.split_once(".rs:") else { continue };
            let code = std::fs::read_to_string(page.parent().unwrap().join(format!("{file}.rs")));
            let code = part(&code.unwrap_or_else(|error| panic!("{}: {name}: {error}", page.display())), anchor);
            let code = code.unwrap_or_else(|| panic!("{}: {file}.rs has no `// ANCHOR: {anchor}`", page.display()));
            let is_fence = |line: &&str| line.starts_with("```rust");
            let fence = after.trim_start().lines().next().filter(is_fence);
            let fence = fence.unwrap_or_else(|| panic!("{}: no block of code after {name}", page.display()));
            expected += &format!("\n\n{fence}\n{code}```");
            rest = after.trim_start()[fence.len()..].split_once("```").expect("an end of the block").1;
            count += 1;
        }
        expected += rest;
        if expected != text {
            assert!(
                std::env::var_os("BLESS").is_some(),
                "{}: code of an example is old; BLESS=1 updates it",
                page.display()
            );
            std::fs::write(&page, expected).unwrap();
        }
    }
    assert!(count >= 6, "{count} parts of examples were found");
}

/// The lines between `// ANCHOR: name` and `// ANCHOR_END: name`, without their common indentation.
fn part(code: &str, name: &str) -> Option<String> {
    let is_mark = |line: &&str, mark: &str| line.trim() == format!("// {mark}: {name}");
    let mut lines = code.lines().skip_while(|line| !is_mark(line, "ANCHOR"));
    lines.next()?;
    let lines: Vec<&str> = lines.take_while(|line| !is_mark(line, "ANCHOR_END")).collect();
    let lines: Vec<&str> = lines.into_iter().filter(|line| !line.trim().starts_with("// ANCHOR")).collect();
    let indentation = |line: &&&str| line.len() - line.trim_start().len();
    let common = lines.iter().filter(|line| !line.trim().is_empty()).map(|line| indentation(&line)).min()?;
    Some(lines.iter().map(|line| format!("{}\n", line.get(common..).unwrap_or_default())).collect())
}

/// Words in code font that look like paths from the root exist.
#[test]
fn paths_exist() {
    const CRATES: [&str; 8] = ["codegen", "dsl-macros", "docs", "harness", "kernels", "runtime", "scripts", "tests"];
    let mut absent = Vec::new();
    for (page, text) in pages() {
        for word in text.split('`').skip(1).step_by(2) {
            let is_path = word.split_once('/').is_some_and(|(folder, _)| CRATES.contains(&folder));
            // A page may name a file that the reader is about to create.
            let is_example = ["kernels/src/scale.rs"].contains(&word);
            if is_path && !word.contains([' ', '<', '*', '…']) && !is_example && !root().join(word).exists() {
                absent.push(format!("{}: {word}", page.display()));
            }
        }
    }
    assert!(absent.is_empty(), "{}", absent.join("\n"));
}

/// Every command in the blocks of shell of the pages about training and the assignment exists, with all its options. Those
/// of the tour are run by `book.rs`.
#[test]
fn commands_exist() {
    let mut count = 0;
    for (page, text) in pages() {
        if !["training.md", "assignment.md"].iter().any(|name| page.ends_with(name)) {
            continue;
        }
        let blocks = text.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
        for line in blocks.flat_map(str::lines) {
            let line = line.split("  #").next().unwrap_or_default();
            let mut words = words(line);
            let program = match words.first().map(String::as_str) {
                Some("tilewright") => env!("CARGO_BIN_EXE_tilewright"),
                Some("leaderboard") => env!("CARGO_BIN_EXE_leaderboard"),
                _ => panic!("{}: what is `{line}`?", page.display()),
            };
            words.remove(0);
            // For `launch`, check the command after `--`.
            if let Some(dashes) = words.iter().position(|word| word == "--") {
                words.drain(..dashes + 2);
            }
            // Options before --help are read, so that one that does not exist is an error.
            let output = std::process::Command::new(program).args(&words).arg("--help").output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: `{line}`: {error}", page.display());
            count += 1;
        }
    }
    assert!(count > 25, "{count} commands were found");
}

/// A test that a script selects by name exists: `--exact` with an unknown name runs no test and succeeds.
#[test]
fn tests_that_scripts_run_exist() {
    let read = |folder: &str, extension: &str| -> Vec<String> {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let paths = entries.filter(|path| path.extension().is_some_and(|end| end == extension));
        paths.map(|path| std::fs::read_to_string(path).unwrap()).collect()
    };
    let tests = [("tests/tests/gpu", "loops::"), ("harness/tests/dist", "nccl::")];
    let mut count = 0;
    for (folder, prefix) in tests {
        let sources = read(folder, "rs").concat();
        for script in read("scripts", "sh") {
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let names = script.split(prefix).skip(1).map(|rest| rest.split(|c| !is_name(c)).next().unwrap_or_default());
            for name in names.filter(|name| !name.is_empty()) {
                assert!(sources.contains(&format!("fn {name}")), "no test in {folder} begins with `{name}`");
                count += 1;
            }
        }
    }
    assert!(count >= 4, "{count} names were found");
}

/// Splits a line of shell into words, with double quotes.
fn words(line: &str) -> Vec<String> {
    let quoted = |(i, part): (usize, &str)| match i % 2 {
        0 => part.split_whitespace().map(str::to_string).collect::<Vec<_>>(),
        _ => vec![part.to_string()],
    };
    line.split('"').enumerate().flat_map(quoted).collect()
}

/// ARCHITECTURE.md's table of passes contains every pass of the pipeline.
#[test]
fn the_table_of_passes_is_complete() {
    let architecture = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let table = architecture.split("### The passes").nth(1).unwrap().split("###").next().unwrap();
    for pass in tilewright::codegen::pipeline::PASS_NAMES {
        assert!(table.contains(&format!("`{pass}`")), "ARCHITECTURE.md does not describe `{pass}`");
    }
}
