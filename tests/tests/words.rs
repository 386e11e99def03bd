//! Names, comments, messages and pages of the tree have none of the words in [`tests/words.txt`](../words.txt), for
//! which the field has other terms; and environment variables are spelled as programs read them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tilewright::env::names;

/// A line of the list.
struct Banned {
    /// Lowercase words in a row.
    phrase: Vec<String>,
    instead: String,
    /// Beginnings of paths where the words have another sense, or are read for the sake of old files and commands.
    allowed: Vec<String>,
}

/// A word of a file: `takeTurns`, `take_turns` and "take turns" are two words each.
struct Word {
    text: String,
    line: usize,
}

const SKIPPED: [&str; 10] = [
    ".git",
    "build",
    "target",
    "harness/data",
    "harness/records",
    "docs/glossary.md",
    "tests/words.txt",
    "tests/tests/words.rs",
    "codegen/fuzz/corpus",
    "codegen/fuzz/target",
];
const EXTENSIONS: [&str; 9] = ["rs", "md", "toml", "sh", "py", "tile", "snap", "stderr", "yml"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the workspace").to_path_buf()
}

fn list() -> Vec<Banned> {
    let text = std::fs::read_to_string(root().join("tests/words.txt")).expect("tests/words.txt");
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let parse = |line: &str| {
        let mut fields = line.split('|').map(str::trim);
        let phrase = fields.next().unwrap_or_default().split(' ').map(str::to_owned).collect();
        let instead =
            fields.next().unwrap_or_else(|| panic!("`{line}`: expected PHRASE | INSTEAD | ALLOWED PATHS")).to_owned();
        let allowed = fields.next().unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        Banned { phrase, instead, allowed }
    };
    lines.map(parse).collect()
}

fn words(text: &str) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
    let (mut line, mut last) = (1, ' ');
    for c in text.chars() {
        line += usize::from(c == '\n');
        if c.is_ascii_alphabetic() {
            let starts = !last.is_ascii_alphabetic() || (c.is_ascii_uppercase() && last.is_ascii_lowercase());
            match words.last_mut().filter(|_| !starts) {
                Some(word) => word.text.push(c.to_ascii_lowercase()),
                None => words.push(Word { text: c.to_ascii_lowercase().to_string(), line }),
            }
        }
        last = c;
    }
    words
}

/// The lines on which a phrase begins. Each of its words may have an additional `s` at its end.
fn find(words: &[Word], phrase: &[String]) -> Vec<usize> {
    let same = |word: &Word, wanted: &String| {
        word.text.strip_prefix(wanted.as_str()).is_some_and(|end| end.is_empty() || end == "s")
    };
    let hits = words.windows(phrase.len()).filter(|window| window.iter().zip(phrase).all(|(a, b)| same(a, b)));
    hits.map(|window| window[0].line).collect()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for entry in entries.map(|entry| entry.expect("an entry").path()) {
        let name = entry.strip_prefix(root()).expect("a path in the workspace");
        if SKIPPED.iter().any(|skipped| name.starts_with(skipped)) {
            continue;
        }
        if entry.is_dir() {
            files(&entry, found);
        } else if entry.extension().is_some_and(|end| EXTENSIONS.iter().any(|known| end == *known)) {
            found.push(entry);
        }
    }
}

#[test]
fn files_use_the_terms_of_the_field() {
    let list = list();
    let mut paths = Vec::new();
    files(&root(), &mut paths);
    assert!(paths.len() > 500, "{} files", paths.len());
    let mut faults = Vec::new();
    for path in paths {
        let name = path.strip_prefix(root()).expect("a path in the workspace").to_string_lossy().into_owned();
        let in_name = words(&name);
        let in_text = words(&std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{name}: {e}")));
        for banned in
            list.iter().filter(|banned| !banned.allowed.iter().any(|allowed| name.starts_with(allowed.as_str())))
        {
            let (phrase, instead) = (banned.phrase.join(" "), &banned.instead);
            if !find(&in_name, &banned.phrase).is_empty() {
                faults.push(format!("{name}: its name has `{phrase}`; write {instead}"));
            }
            faults.extend(
                find(&in_text, &banned.phrase)
                    .into_iter()
                    .map(|line| format!("{name}:{line}: `{phrase}`; write {instead}")),
            );
        }
    }
    assert!(faults.is_empty(), "{} places (tests/words.txt lists the words):\n{}", faults.len(), faults.join("\n"));
}

/// A program warns about variables that [`names`] lacks, so the list has every variable that a file mentions, and
/// no other.
#[test]
fn every_environment_variable_is_known() {
    let mut paths = vec![root().join("Makefile")];
    files(&root(), &mut paths);
    let mut mentioned = BTreeSet::new();
    let mut faults = Vec::new();
    for path in paths.iter().filter(|path| !path.ends_with("runtime/src/env/names.rs")) {
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for (at, prefix) in text.match_indices("TILEWRIGHT_") {
            let end = |c: char| !c.is_ascii_uppercase() && c != '_';
            let name = text[at..].split(end).next().unwrap_or(prefix).trim_end_matches('_');
            if name.len() > prefix.len() && !names::is_known(name) {
                faults.push(format!("{}: {name}", path.display()));
            }
            mentioned.insert(name.to_owned());
        }
    }
    assert!(faults.is_empty(), "not in the list of runtime/src/env/names.rs:\n{}", faults.join("\n"));
    let unused: Vec<String> = names::all().filter(|name| !mentioned.contains(name)).collect();
    assert!(unused.is_empty(), "nothing reads these variables of runtime/src/env/names.rs: {unused:?}");
}

#[test]
fn phrases_are_found_in_names_and_across_lines() {
    let found = |text: &str| find(&words(text), &["take".into(), "turn".into()]);
    assert_eq!(found("fn take_turns() {}"), [1]);
    assert_eq!(found("struct TakeTurn;\n"), [1]);
    assert_eq!(found("// warps take\n// turns at it"), [1]);
    assert_eq!(found("takes turns"), [1]);
    assert_eq!(found("mistake returns, take two turns"), [] as [usize; 0]);
}
