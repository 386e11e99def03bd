//! What can be wrong with data, in words for whoever brought it.

use std::path::{Path, PathBuf};

use crate::escape::printable;

/// Result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong with a text, a tokenizer or a token file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot {doing} {}: {source}{}", printable(&path.display().to_string()), hint(source))]
    File { doing: &'static str, path: PathBuf, source: std::io::Error },

    #[error(
        "{} is not UTF-8 text: byte {offset} (0x{byte:02x}) starts no character\n  \
         help: convert it, as with `iconv -f latin1 -t utf-8`",
        printable(name)
    )]
    NotUtf8 { name: String, offset: usize, byte: u8 },

    #[error("{} is empty\n  help: --data names a file of plain text", printable(name))]
    Empty { name: String },

    #[error(
        "{} is too short: its {part} part has {found} tokens, a window of context {context} takes {needed}\n  \
         help: a longer text, a smaller --context, or a smaller --vocab",
        printable(name)
    )]
    TooShort { name: String, part: &'static str, found: usize, context: usize, needed: usize },

    #[error("a vocabulary of {found} is too small: {least} entries are the bytes themselves\n  help: --vocab 1024")]
    VocabularyTooSmall { found: usize, least: usize },

    #[error("{what} is damaged: {}\n  help: remove it, and it will be made again from the text", printable(reason))]
    Damaged { what: String, reason: String },

    #[error("the tokenizer: {}", printable(_0))]
    Tokenizer(String),
}

fn hint(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::NotFound => {
            "\n  help: --data names a file of plain text; without it the shipped book is used"
        }
        std::io::ErrorKind::StorageFull => "\n  help: the disk is full",
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
