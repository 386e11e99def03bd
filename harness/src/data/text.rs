//! Plain text: a file, or the book that ships with the program.

use std::path::Path;

use super::{Error, Result};

/// The shipped text (source: `harness/data/README.md`).
static SHIPPED: &str = include_str!("../../data/around-the-world.txt");

/// Name of the shipped text in messages and logs.
pub const SHIPPED_NAME: &str = "the shipped book (Around the World in Eighty Days)";

/// Text for a tokenizer: valid UTF-8, not empty.
pub struct Text {
    name: String,
    contents: Contents,
}

enum Contents {
    Static(&'static str),
    Owned(String),
}

impl Text {
    /// The book that ships with the program.
    pub fn shipped() -> Text {
        Text { name: SHIPPED_NAME.to_string(), contents: Contents::Static(SHIPPED) }
    }

    /// Text from memory, called `name` in messages.
    ///
    /// # Errors
    /// The text is empty.
    pub fn of(name: impl Into<String>, text: impl Into<String>) -> Result<Text> {
        let (name, text) = (name.into(), text.into());
        match text.is_empty() {
            true => Err(Error::Empty { name }),
            false => Ok(Text { name, contents: Contents::Owned(text) }),
        }
    }

    /// Reads a file into memory: later changes of the file have no effect.
    ///
    /// # Errors
    /// A file that is missing, cannot be read, is empty, changes while it is read, or is not UTF-8 (the message gives
    /// the offset of the first invalid byte); out of memory.
    pub fn open(path: &Path) -> Result<Text> {
        let name = path.display().to_string();
        let bytes = crate::files::read_unchanged(path).map_err(Error::file("read", path))?;
        if bytes.is_empty() {
            return Err(Error::Empty { name });
        }
        String::from_utf8(bytes).map(|text| Text { name: name.clone(), contents: Contents::Owned(text) }).map_err(
            |error| {
                let offset = error.utf8_error().valid_up_to();
                Error::NotUtf8 { name, offset, byte: error.as_bytes()[offset] }
            },
        )
    }

    /// Path of the file, or another name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The whole text.
    pub fn as_str(&self) -> &str {
        match &self.contents {
            Contents::Static(text) => text,
            Contents::Owned(text) => text,
        }
    }

    /// Splits into pieces of about `bytes` bytes, at ends of lines where possible. Their concatenation is the text.
    pub fn pieces(&self, bytes: usize) -> impl Iterator<Item = &str> {
        let mut rest = self.as_str();
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let aim = rest.ceil_char_boundary(bytes.min(rest.len()));
            let end = rest[aim..].find('\n').map_or(rest.len(), |newline| aim + newline + 1);
            // Split a text without line breaks at any character.
            let end = if end - aim > bytes { aim } else { end };
            let (piece, tail) = rest.split_at(end.max(1).min(rest.len()));
            rest = tail;
            Some(piece)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_book_is_a_book_and_nothing_else() {
        let text = Text::shipped();
        assert!((300_000..500_000).contains(&text.as_str().len()));
        assert!(text.as_str().is_ascii() && text.as_str().contains("Phileas Fogg"));
        let lower = text.as_str().to_lowercase();
        for word in ["gutenberg", "copyright", "license", "ebook", "http"] {
            assert!(!lower.contains(word), "`{word}` is in the book");
        }
    }

    #[test]
    fn pieces_concatenate_to_the_text() {
        for (contents, bytes) in [("ab\ncd\n\nef", 2), ("äöü€no lines at all, and long", 3), ("x", 100)] {
            let text = Text::of("t", contents).unwrap();
            let pieces: Vec<&str> = text.pieces(bytes).collect();
            assert_eq!(pieces.concat(), contents);
            assert!(pieces.iter().all(|piece| !piece.is_empty() && piece.len() <= 2 * bytes + 4), "{pieces:?}");
        }
        let text = Text::shipped();
        let pieces: Vec<&str> = text.pieces(10_000).collect();
        assert!(pieces.len() > 20 && pieces.iter().all(|piece| piece.ends_with('\n')));
        assert_eq!(pieces.concat(), text.as_str());
    }

    #[test]
    fn non_text_files_are_reported_by_cause() {
        let dir = tempfile::tempdir().unwrap();
        let message = |path: &Path| Text::open(path).err().unwrap().to_string();
        let missing = message(&dir.path().join("missing.txt"));
        assert!(missing.contains("missing.txt") && missing.contains("--data"), "{missing}");
        assert!(message(dir.path()).contains("folder"));
        let path = dir.path().join("bytes");
        std::fs::write(&path, b"").unwrap();
        assert!(message(&path).contains("is empty"));
        std::fs::write(&path, b"caf\xe9 au lait").unwrap();
        let latin = message(&path);
        assert!(latin.contains("byte 3 (0xe9)") && latin.contains("iconv"), "{latin}");
    }
}
