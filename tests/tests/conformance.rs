//! `docs/triton.md`: the tests of Triton, and the tests here that check the same.
//!
//! `BLESS=1 cargo test -p tilewright-tests --test conformance` writes the tables of the page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

const LIST: &str = "tests/conformance/triton.tsv";
const PAGE: &str = "docs/triton.md";
/// The tables begin here.
const HEADING: &str = "## Summary\n";
const STATES: [&str; 4] = ["same", "partly", "open", "excluded"];

/// A test of this repository.
struct Counterpart<'a> {
    file: &'a str,
    function: &'a str,
    /// Letters of the page's list of targets.
    targets: &'a str,
}

/// A test of Triton.
struct Upstream<'a> {
    file: &'a str,
    name: &'a str,
    state: &'a str,
    counterparts: Vec<&'a str>,
    note: &'a str,
}

struct List<'a> {
    counterparts: BTreeMap<&'a str, Counterpart<'a>>,
    tests: Vec<Upstream<'a>>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn parse(text: &str) -> List<'_> {
    let mut list = List { counterparts: BTreeMap::new(), tests: Vec::new() };
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        match (line.strip_prefix('@'), &fields[..]) {
            (Some(_), [key, file, function, targets]) => {
                let counterpart = Counterpart { file, function, targets };
                assert!(list.counterparts.insert(&key[1..], counterpart).is_none(), "{key} is there twice");
            }
            (None, [file, name, state, counterparts, note]) => list.tests.push(Upstream {
                file,
                name,
                state,
                counterparts: counterparts.split_whitespace().collect(),
                note,
            }),
            _ => panic!("{LIST}: expected 4 fields after `@`, or 5: {line:?}"),
        }
    }
    list
}

impl Upstream<'_> {
    /// The targets of all counterparts, in the order of the page.
    fn targets(&self, list: &List) -> String {
        let has = |letter: char| self.counterparts.iter().any(|key| list.counterparts[key].targets.contains(letter));
        "ICSGHB".chars().filter(|letter| has(*letter)).collect()
    }
}

/// The tables of the page.
fn tables(list: &List) -> String {
    let mut out = format!("{HEADING}\n| file | tests | same | partly | open | excluded |\n|---|---|---|---|---|---|\n");
    let mut files: Vec<&str> = list.tests.iter().map(|test| test.file).collect();
    files.dedup();
    let count = |file: Option<&str>, state: Option<&str>| {
        let is = |test: &&Upstream| file.is_none_or(|f| test.file == f) && state.is_none_or(|s| test.state == s);
        list.tests.iter().filter(is).count().to_string()
    };
    for file in files.iter().copied().map(Some).chain([None]) {
        let counts = STATES.map(|state| count(file, Some(state)));
        let name = file.map_or("all".into(), |file| format!("`{file}`"));
        writeln!(out, "| {name} | {} | {} |", count(file, None), counts.join(" | ")).unwrap();
    }
    let targets: Vec<String> = list.tests.iter().map(|test| test.targets(list)).collect();
    let on =
        |letters: &str| targets.iter().filter(|found| letters.chars().all(|letter| found.contains(letter))).count();
    let run = targets.iter().filter(|found| found.contains(['I', 'C', 'S', 'G'])).count();
    writeln!(
        out,
        "\nFor {run} tests a counterpart runs kernels: for {} on the CPU and on the simulated GPU, for {} on a GPU.",
        on("CS"),
        on("G")
    )
    .unwrap();
    for file in files {
        write!(out, "\n## {file}\n\n| test | state | tests here | targets | note |\n|---|---|---|---|---|\n").unwrap();
        for test in list.tests.iter().filter(|test| test.file == file) {
            let here: Vec<String> =
                test.counterparts.iter().map(|key| format!("`{}`", list.counterparts[key].function)).collect();
            let Upstream { name, state, note, .. } = test;
            let row = [&format!("`{name}`"), *state, &here.join(", "), &test.targets(list), *note].join(" | ");
            writeln!(out, "| {row} |").unwrap();
        }
    }
    out.push_str("\n## Tests here\n\n| test | targets | file |\n|---|---|---|\n");
    let mut here: Vec<&Counterpart> = list.counterparts.values().collect();
    here.sort_by_key(|test| (test.file, test.function));
    for Counterpart { file, function, targets } in here {
        writeln!(out, "| `{function}` | {targets} | `{file}` |").unwrap();
    }
    out
}

#[test]
fn every_counterpart_is_a_test() {
    let text = read(LIST);
    let list = parse(&text);
    let used: BTreeSet<&str> = list.tests.iter().flat_map(|test| test.counterparts.iter().copied()).collect();
    for (key, Counterpart { file, function, targets }) in &list.counterparts {
        assert!(used.contains(key), "no row has {key}");
        assert!(!targets.is_empty() && targets.chars().all(|letter| "ICSGHB".contains(letter)), "{key}: {targets}");
        let source = read(file);
        let before = source.split(&format!("fn {function}(")).next().unwrap();
        assert!(before.len() < source.len(), "{file} has no function `{function}`");
        // Attributes and comments may be between.
        let attributes = before.rsplit(['}', ';']).next().unwrap();
        assert!(attributes.contains("#[test]"), "{file}: `{function}` is no test");
    }
}

#[test]
fn every_row_has_what_its_state_needs() {
    let text = read(LIST);
    let list = parse(&text);
    let mut names = BTreeSet::new();
    for test in &list.tests {
        let Upstream { file, name, state, counterparts, note } = test;
        assert!(names.insert((file, name)), "{file}: {name} is there twice");
        assert!(STATES.contains(state), "{name}: {state}");
        let tested = matches!(*state, "same" | "partly");
        assert_eq!(tested, !counterparts.is_empty(), "{file}: {name} is {state}");
        assert!(tested || !note.is_empty(), "{file}: {name} is {state}, without a note");
        let unknown = counterparts.iter().find(|key| !list.counterparts.contains_key(**key));
        assert_eq!(unknown, None, "{file}: {name}");
    }
}

#[test]
fn the_page_has_the_tables_of_the_list() {
    let (text, page) = (read(LIST), read(PAGE));
    let written = page.split(HEADING).next().unwrap();
    let expected = format!("{}\n\n{}", written.trim_end(), tables(&parse(&text)));
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(root().join(PAGE), &expected).unwrap();
    }
    assert!(
        read(PAGE) == expected,
        "{PAGE} differs from {LIST}: `BLESS=1 cargo test -p tilewright-tests --test conformance` writes it"
    );
}
