//! Mistakes in the user's kernel, told the way rustc tells them.
//!
//! A [`Diagnostic`] knows its place, not the text there: this crate reads no files. Who has the text passes it to
//! [`Diagnostic::render`].

use crate::ir::Loc;
use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use std::fmt;

/// One mistake: what is wrong, where, what was expected and found, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// One sentence without a full stop.
    pub message: String,
    /// Unknown only where no source line is to blame.
    pub loc: Loc,
    /// Words under the marked source text.
    pub label: String,
    pub notes: Vec<String>,
    pub help: Option<String>,
}

impl Diagnostic {
    pub fn new(message: impl Into<String>, loc: Loc) -> Diagnostic {
        Diagnostic { message: message.into(), loc, label: String::new(), notes: Vec::new(), help: None }
    }

    pub fn label(mut self, label: impl Into<String>) -> Diagnostic {
        self.label = label.into();
        self
    }

    pub fn note(mut self, note: impl Into<String>) -> Diagnostic {
        self.notes.push(note.into());
        self
    }

    pub fn help(mut self, help: impl Into<String>) -> Diagnostic {
        self.help = Some(help.into());
        self
    }

    /// The message with the source line, when `source` is the text of the file that [`Diagnostic::loc`] names and still
    /// has that line; otherwise without.
    pub fn render(&self, source: Option<&str>) -> String {
        let title = Level::ERROR.primary_title(&*self.message);
        let mut group = Group::with_title(title);
        let line = source.and_then(|s| s.lines().nth((self.loc.line as usize).checked_sub(1)?));
        let span = line.and_then(|line| marked(line, self.loc.column));
        match (line, span) {
            (Some(line), Some(span)) => {
                group = group.element(
                    Snippet::source(line)
                        .line_start(self.loc.line as usize)
                        .path(&*self.loc.file)
                        .annotation(AnnotationKind::Primary.span(span).label(&*self.label)),
                );
            }
            _ if self.loc.is_unknown() => {}
            _ => {
                let origin = annotate_snippets::Origin::path(&*self.loc.file)
                    .line(self.loc.line as usize)
                    .char_column(self.loc.column as usize);
                group = group.element(origin);
                if !self.label.is_empty() {
                    group = group.element(Level::NOTE.message(&*self.label));
                }
            }
        }
        for note in &self.notes {
            group = group.element(Level::NOTE.message(&**note));
        }
        if let Some(help) = &self.help {
            group = group.element(Level::HELP.message(&**help));
        }
        Renderer::plain().render(&[group])
    }
}

/// The byte range of the word or operator that starts at a one-based column.
fn marked(line: &str, column: u32) -> Option<std::ops::Range<usize>> {
    let start = line.char_indices().map(|(i, _)| i).nth((column as usize).checked_sub(1)?)?;
    let rest = &line[start..];
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let is_operator = |c: char| "+-*/%&|^<>=!".contains(c);
    let first = rest.chars().next()?;
    let belongs: &dyn Fn(char) -> bool = if is_word(first) { &is_word } else { &is_operator };
    let len = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
    Some(start..start + len.max(first.len_utf8()))
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(None))
    }
}

impl std::error::Error for Diagnostic {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marked_text_is_a_word_or_an_operator() {
        assert_eq!(marked("    acc += sum(x)", 9), Some(8..10));
        assert_eq!(marked("    acc += sum(x)", 12), Some(11..14));
        assert_eq!(marked("é + (b)", 5), Some(5..6));
        assert_eq!(marked("short", 9), None);
    }

    #[test]
    fn without_source_the_place_and_all_sentences_remain() {
        let loc = Loc { file: "k.rs".into(), line: 3, column: 7 };
        let text = Diagnostic::new("shapes differ", loc).label("here").note("a").help("b").to_string();
        for part in ["error: shapes differ", "k.rs:3:7", "here", "note: a", "help: b"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
