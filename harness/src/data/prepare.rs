//! Trains a tokenizer and tokenizes a text, once: caches both on disk.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::{Bpe, Error, Result, Text, TokenFile, write_tokens};
use crate::tensor_file::checksum;

/// A tokenizer, and the tokens of a text, split into training and validation.
pub struct Dataset {
    /// Name of the text in messages.
    pub name: String,
    pub tokenizer: Bpe,
    pub tokens: TokenFile,
    /// Number of training tokens; the rest is for validation.
    split: usize,
}

/// A range of the tokens of a file.
#[derive(Clone)]
pub struct TokenSlice<'a> {
    file: &'a TokenFile,
    range: Range<usize>,
}

impl<'a> TokenSlice<'a> {
    /// The tokens of `file` in `range`.
    ///
    /// # Panics
    /// A range beyond the end of the file.
    pub fn new(file: &'a TokenFile, range: Range<usize>) -> TokenSlice<'a> {
        assert!(
            range.start <= range.end && range.end <= file.len(),
            "internal error: {range:?} of {} tokens",
            file.len()
        );
        TokenSlice { file, range }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Appends the tokens of `range`, relative to the start of this slice, to `to`.
    ///
    /// # Errors
    /// As [`TokenFile::read`].
    ///
    /// # Panics
    /// A range beyond the end of the slice.
    pub fn read(&self, range: Range<usize>, to: &mut Vec<u32>) -> Result<()> {
        assert!(range.end <= self.len(), "internal error: {range:?} of {} tokens", self.len());
        self.file.read(self.range.start + range.start..self.range.start + range.end, to)
    }
}

/// One in this many tokens is for validation: the last ones of the text.
const VALIDATION_SHARE: usize = 10;

impl Dataset {
    /// Training split: the first nine tenths.
    pub fn train(&self) -> TokenSlice<'_> {
        TokenSlice::new(&self.tokens, 0..self.split)
    }

    /// Validation split: the last tenth.
    pub fn validation(&self) -> TokenSlice<'_> {
        TokenSlice::new(&self.tokens, self.split..self.tokens.len())
    }

    /// Fails unless both splits hold a sequence of `context` tokens and the token after it.
    ///
    /// # Errors
    /// The text is too short; the message gives both lengths.
    pub fn check_context(&self, context: usize) -> Result<()> {
        for (split, found) in [("training", self.train().len()), ("validation", self.validation().len())] {
            let needed = context.saturating_add(1);
            if found < needed {
                return Err(Error::TooShort { name: self.name.clone(), split, found, context, needed });
            }
        }
        Ok(())
    }
}

/// Returns tokenizer and tokens of `text`: reads them from `folder` if an earlier run cached them there, else computes
/// and caches them. `vocabulary` is the largest number of entries of the tokenizer.
///
/// # Errors
/// A folder that cannot be written, damaged files in it, and errors of [`Bpe::train`].
pub fn prepare(text: &Text, vocabulary: usize, folder: &Path) -> Result<Dataset> {
    let text_hash = *blake3::hash(text.as_str().as_bytes()).as_bytes();
    let path = path_of(folder, &text_hash, &format!("{vocabulary}.tokenizer"));
    let tokenizer = match path.exists() {
        true => read_tokenizer(&path)?,
        false => {
            let tokenizer = Bpe::train(text, vocabulary)?;
            std::fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
            write_tokenizer(&path, &tokenizer)?;
            tokenizer
        }
    };
    load_or_tokenize(text, tokenizer, folder)
}

/// Start of the first line of a cached tokenizer. The BLAKE3 hash of all other lines follows it in hexadecimal; those
/// lines are the `tokenizer.json`.
const TOKENIZER_HEADER: &str = "tilewright tokenizer 1 ";

fn write_tokenizer(path: &Path, tokenizer: &Bpe) -> Result<()> {
    let hash = checksum(tokenizer.json().as_bytes());
    crate::files::replace(path, |file| write!(file, "{TOKENIZER_HEADER}{hash}\n{}", tokenizer.json()))
        .map_err(Error::file("write", path))
}

fn read_tokenizer(path: &Path) -> Result<Bpe> {
    let bytes = crate::files::read(path).map_err(Error::file("read", path))?;
    let damaged = |reason: &str| Error::damaged(path, reason);
    let text = String::from_utf8(bytes).map_err(|_| damaged("it is not UTF-8 text"))?;
    let (first, json) = text.split_once('\n').ok_or_else(|| damaged("it was cut short"))?;
    let stated = first
        .strip_prefix(TOKENIZER_HEADER)
        .ok_or_else(|| damaged("its first line is not that of a tokenizer file"))?;
    if stated != checksum(json.as_bytes()) {
        return Err(damaged("its checksum does not match"));
    }
    Bpe::from_json(json.to_string()).map_err(|error| damaged(&error.to_string()))
}

/// As [`prepare`], with an existing tokenizer, for example that of a checkpoint.
///
/// # Errors
/// As [`prepare`].
pub fn load_or_tokenize(text: &Text, tokenizer: Bpe, folder: &Path) -> Result<Dataset> {
    let text_hash = *blake3::hash(text.as_str().as_bytes()).as_bytes();
    let path = path_of(folder, &text_hash, &format!("{}.tokens", short_hash(&tokenizer.hash())));
    if !path.exists() {
        std::fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
        let tokens = tokenizer.encode_text(text)?;
        write_tokens(&path, &tokens, tokenizer.vocabulary(), tokenizer.hash(), text_hash)?;
    }
    let tokens = TokenFile::open(&path)?;
    if tokens.tokenizer_hash() != tokenizer.hash() || tokens.text_hash() != text_hash {
        return Err(Error::damaged(&path, "it was created from another text or tokenizer"));
    }
    let split = tokens.len() - tokens.len() / VALIDATION_SHARE;
    Ok(Dataset { name: text.name().to_string(), tokenizer, tokens, split })
}

fn path_of(folder: &Path, text: &[u8; 32], rest: &str) -> PathBuf {
    folder.join(format!("{}-{rest}", short_hash(text)))
}

/// The first 16 hexadecimal digits of a hash: enough for file names; the whole hash is compared after opening.
fn short_hash(hash: &[u8; 32]) -> String {
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_reuses_the_cached_files() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("made/on/demand");
        let text = Text::of("t", "one fish two fish red fish blue fish. ".repeat(40)).unwrap();
        let first = prepare(&text, 280, &folder).unwrap();
        let times: Vec<_> = modified(&folder);
        let second = prepare(&text, 280, &folder).unwrap();
        assert_eq!((times.len(), modified(&folder)), (2, times));
        assert_eq!(first.tokenizer.json(), second.tokenizer.json());
        let mut tokens = Vec::new();
        second.train().read(0..second.train().len(), &mut tokens).unwrap();
        second.validation().read(0..second.validation().len(), &mut tokens).unwrap();
        assert_eq!(second.tokenizer.decode(&tokens).unwrap(), text.as_str());
        assert!(second.validation().len() >= tokens.len() / 10);
        // Another vocabulary size and another text use other files.
        prepare(&text, 260, &folder).unwrap();
        prepare(&Text::of("u", "abc ".repeat(9)).unwrap(), 280, &folder).unwrap();
        assert_eq!(modified(&folder).len(), 6);
    }

    fn modified(folder: &Path) -> Vec<(PathBuf, std::time::SystemTime)> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let mut list: Vec<_> = entries.map(|e| (e.path(), e.metadata().unwrap().modified().unwrap())).collect();
        list.sort();
        list
    }

    #[test]
    fn short_texts_and_damaged_files_are_refused_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let text = Text::of("a.txt", "one fish two fish red fish blue fish. ".repeat(4)).unwrap();
        let data = prepare(&text, 256, dir.path()).unwrap();
        data.check_context(8).unwrap();
        let message = data.check_context(64).unwrap_err().to_string();
        for part in ["a.txt", "context 64", "65", "validation", "15 tokens", "--context"] {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
        let path = data.tokens.path().to_path_buf();
        drop(data);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        let message = prepare(&text, 256, dir.path()).err().unwrap().to_string();
        assert!(message.contains("damaged") && message.contains("remove it"), "{message}");
        // A changed tokenizer may still be a valid one, but another one.
        let kept = modified(dir.path())
            .into_iter()
            .map(|(path, _)| path)
            .find(|path| path.extension().unwrap() == "tokenizer");
        let kept = kept.unwrap();
        let whole = std::fs::read(&kept).unwrap();
        for place in (0..whole.len()).step_by(11) {
            let mut flipped = whole.clone();
            flipped[place] ^= 1;
            std::fs::write(&kept, flipped).unwrap();
            let message = prepare(&text, 256, dir.path()).err().unwrap().to_string();
            assert!(message.contains(".tokenizer is damaged") && message.contains("remove it"), "{place}: {message}");
        }
    }
}
