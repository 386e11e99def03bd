//! The source lines of a kernel's ops.

use std::collections::BTreeSet;
use std::path::PathBuf;

use tilewright_codegen::explain::Trace;
use tilewright_codegen::ir::Loc;
use tilewright_runtime::kernel::source_file;

use crate::report::escaped;

/// Lines that are shown before and after those of ops.
const CONTEXT: u32 = 3;
/// Longest run of lines between them that is shown too.
const GAP: u32 = 12;

/// The files that a kernel's ops come from.
pub struct Sources(Vec<Source>);

struct Source {
    /// As the compiler of the kernel named it.
    name: String,
    path: Option<PathBuf>,
    /// `None` if the file cannot be read, as on another machine, or is not the one that was compiled.
    text: Option<Vec<String>>,
    /// The lines of ops.
    used: BTreeSet<u32>,
}

impl Sources {
    /// The files of all ops before and after the passes. `kernel_line` is shown too.
    pub fn of(trace: &Trace, kernel_line: u32) -> Sources {
        let mut sources = Sources(Vec::new());
        let kernel = Loc { line: kernel_line, ..trace.last().loc.clone() };
        sources.add(&kernel);
        for snapshot in trace.snapshots() {
            snapshot.lines.iter().filter_map(|line| line.op.as_ref()).for_each(|op| sources.add(&op.loc));
        }
        for source in &mut sources.0 {
            let last = source.used.last().copied().unwrap_or_default() as usize;
            source.text.take_if(|text| text.len() < last);
        }
        sources
    }

    fn add(&mut self, loc: &Loc) {
        if loc.is_unknown() {
            return;
        }
        let known = self.0.iter().position(|source| *source.name == *loc.file);
        let index = known.unwrap_or_else(|| {
            let path = source_file(&loc.file);
            let text = path.as_deref().and_then(|path| crate::files::read_to_string(path).ok());
            let text = text.map(|text| text.lines().map(str::to_string).collect());
            self.0.push(Source { name: loc.file.to_string(), path, text, used: BTreeSet::new() });
            self.0.len() - 1
        });
        self.0[index].used.insert(loc.line);
    }

    /// The index of a location's file, and its line.
    pub fn place(&self, loc: &Loc) -> Option<(usize, u32)> {
        if loc.is_unknown() {
            return None;
        }
        Some((self.0.iter().position(|source| *source.name == *loc.file)?, loc.line))
    }

    /// The files that were read.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.0.iter().filter_map(|source| source.path.clone()).collect()
    }

    /// The lines of ops with their surroundings, by file.
    pub fn html(&self) -> String {
        self.0.iter().enumerate().map(|(file, source)| source.html(file)).collect()
    }
}

impl Source {
    fn html(&self, file: usize) -> String {
        let mut out = format!("<div class=\"file\">{}</div>\n", escaped(&self.name));
        let problem = match (&self.text, &self.path) {
            (Some(_), _) => None,
            (None, None) => Some("The file cannot be read here"),
            (None, Some(_)) => Some("The file is not the one that was compiled, or cannot be read"),
        };
        if let Some(problem) = problem {
            out += &format!("<div class=\"file note\">{problem}: only the numbers of its lines are known.</div>\n");
        }
        let mut last = None;
        for number in self.shown() {
            if last.is_some_and(|last| number > last + 1) {
                out += "<div class=\"skip\">⋯</div>\n";
            }
            last = Some(number);
            let text = self.text.as_ref().and_then(|lines| lines.get(number as usize - 1));
            let text = escaped(text.map_or("", String::as_str));
            let class = if self.used.contains(&number) { "line used" } else { "line" };
            out += &format!(
                "<div class=\"{class}\" data-place=\"{file}:{number}\"><span class=\"number\">{number}</span>\
                 <span class=\"text\">{text}</span></div>\n"
            );
        }
        out
    }

    /// The numbers of the lines that are shown: those of ops, and lines around them if the file can be read.
    fn shown(&self) -> BTreeSet<u32> {
        let Some(text) = &self.text else { return self.used.clone() };
        let end = text.len() as u32;
        let mut shown = BTreeSet::new();
        let mut last: Option<u32> = None;
        for &line in &self.used {
            let start = match last {
                Some(last) if line - last <= GAP => last,
                Some(_) | None => line.saturating_sub(CONTEXT).max(1),
            };
            shown.extend(start..=(line + CONTEXT).min(end));
            last = Some(line);
        }
        shown
    }
}
