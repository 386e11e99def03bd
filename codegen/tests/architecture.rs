//! The folders of the compiler depend on each other in one direction.

use std::path::{Path, PathBuf};

/// A folder of `codegen/src`, and the modules that its files may not name. Tests may.
const LAYERS: &[(&str, &[&str])] = &[
    ("ir", &["analysis", "schedule", "passes", "lower", "pipeline"]),
    ("analysis", &["schedule", "passes", "lower", "pipeline"]),
    ("functions", &["analysis", "schedule", "passes", "lower", "pipeline"]),
    ("schedule", &["passes", "lower", "pipeline"]),
    ("passes", &["lower", "pipeline"]),
    ("lower", &["schedule", "passes", "pipeline"]),
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("an entry").path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests");
        match path.is_dir() {
            _ if is_test => {}
            true => sources(&path, found),
            false => found.push(path),
        }
    }
}

/// The lines of code, without tests, that name a module of the crate.
fn names<'t>(text: &'t str, module: &str) -> Vec<(usize, &'t str)> {
    let named = [format!("crate::{module}::"), format!("crate::{module};"), format!("super::super::{module}")];
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code = code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"));
    code.filter(|(_, line)| named.iter().any(|name| line.contains(name.as_str()))).collect()
}

#[test]
fn folders_depend_in_one_direction() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut violations = Vec::new();
    for (layer, others) in LAYERS {
        let mut files = Vec::new();
        sources(&root.join(layer), &mut files);
        assert!(!files.is_empty(), "{layer} has no files");
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            for module in *others {
                for (line, found) in names(&text, module) {
                    let file = file.strip_prefix(&root).unwrap_or(&file).display();
                    violations.push(format!("{file}:{}: {layer} may not use {module}: {}", line + 1, found.trim()));
                }
            }
        }
    }
    assert!(violations.is_empty(), "move what both use to analysis, layout or ir:\n{}", violations.join("\n"));
}

#[test]
fn names_of_modules_are_found() {
    let text = "use crate::passes::dce;\n// crate::passes::dce\nuse super::super::passes::dce;\nuse crate::passes;\n\
                #[cfg(test)]\nmod tests {\n    use crate::passes::cse;\n}\n";
    let lines: Vec<usize> = names(text, "passes").into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [0, 2, 3]);
    assert_eq!(names(text, "lower"), []);
}
