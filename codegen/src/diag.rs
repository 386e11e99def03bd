//! Diagnostics about the user's kernel, in the style of rustc.
//!
//! A [`Diagnostic`] stores a location, not the source text: this crate reads no files. The caller passes the text to
//! [`Diagnostic::render`].

use crate::ir::Loc;
use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use std::fmt;

/// One error: what is wrong and where, what was expected and found, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// One sentence without a final period.
    pub message: String,
    /// Unknown only if no source line is at fault.
    pub loc: Loc,
    /// Text under the underlined source span.
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

    /// Renders the message, with the source line if `source` is the text of the file that [`Diagnostic::loc`] names and
    /// contains that line.
    pub fn render(&self, source: Option<&str>) -> String {
        let title = Level::ERROR.primary_title(&*self.message);
        let mut group = Group::with_title(title);
        let line = source.and_then(|s| s.lines().nth((self.loc.line as usize).checked_sub(1)?));
        let span = line.and_then(|line| token_span(line, self.loc.column));
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

/// Byte range of the word or operator that starts at a 1-based column.
fn token_span(line: &str, column: u32) -> Option<std::ops::Range<usize>> {
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
    fn token_span_covers_a_word_or_an_operator() {
        assert_eq!(token_span("    acc += sum(x)", 9), Some(8..10));
        assert_eq!(token_span("    acc += sum(x)", 12), Some(11..14));
        assert_eq!(token_span("é + (b)", 5), Some(5..6));
        assert_eq!(token_span("short", 9), None);
    }

    #[test]
    fn rendering_without_source_keeps_location_and_notes() {
        let loc = Loc { file: "k.rs".into(), line: 3, column: 7 };
        let text = Diagnostic::new("shapes differ", loc).label("here").note("a").help("b").to_string();
        for part in ["error: shapes differ", "k.rs:3:7", "here", "note: a", "help: b"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
