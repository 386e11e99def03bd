//! Errors of texts, tokenizers and token files, with a remedy.

use std::path::{Path, PathBuf};

use crate::escape::printable;

/// Result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of a text, a tokenizer or a token file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot {doing} {}: {source}{}", printable(&path.display().to_string()), hint(source))]
    File { doing: &'static str, path: PathBuf, source: std::io::Error },

    #[error(
        "{} is not UTF-8 text: byte {offset} (0x{byte:02x}) does not start a character\n  \
         help: convert it, for example with `iconv -f latin1 -t utf-8`",
        printable(name)
    )]
    NotUtf8 { name: String, offset: usize, byte: u8 },

    #[error("{} is empty\n  help: pass a file of plain text to --data", printable(name))]
    Empty { name: String },

    #[error(
        "{} is too short: its {split} split has {found} tokens, and a sequence of context {context} needs {needed}\n  \
         help: use a longer text, a smaller --context, or a smaller --vocab-size",
        printable(name)
    )]
    TooShort { name: String, split: &'static str, found: usize, context: usize, needed: usize },

    #[error(
        "expected a vocabulary of at least {least} entries (one per byte), found {found}\n  help: try --vocab-size 1024"
    )]
    VocabularyTooSmall { found: usize, least: usize },

    #[error(
        "{what} is damaged: {}\n  help: remove it, and the next run creates it again from the text",
        printable(reason)
    )]
    Damaged { what: String, reason: String },

    #[error("invalid tokenizer: {}", printable(_0))]
    Tokenizer(String),
}

fn hint(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::NotFound => {
            "\n  help: pass a file of plain text to --data, or leave --data out to use the shipped book"
        }
        std::io::ErrorKind::StorageFull => "\n  help: free space on the disk, which is full",
        _ => "",
    }
}

impl Error {
    pub(super) fn file(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::File { doing, path, source }
    }

    pub(super) fn damaged(path: &Path, reason: impl Into<String>) -> Error {
        Error::Damaged { what: path.display().to_string(), reason: reason.into() }
    }
}

impl From<tokenizers::Error> for Error {
    fn from(error: tokenizers::Error) -> Error {
        Error::Tokenizer(error.to_string())
    }
}
