//! Token files: a header, then the tokens. Tokens are read from the file on demand, because the file can be larger than
//! memory.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `TWTOKENS` |
//! | 8..12 | version of the format, 1 |
//! | 12..16 | bytes of a token: 2 where the vocabulary allows it, else 4 |
//! | 16..24 | size of the vocabulary |
//! | 24..32 | number of tokens |
//! | 32..64 | hash of the tokenizer |
//! | 64..96 | hash of the text |
//! | 96..128 | BLAKE3 of the tokens' bytes |
//! | 128..160 | BLAKE3 of bytes 0..128 |
//!
//! Integers are little-endian. Opening a file verifies all of it: a truncated, modified or mismatched file is refused.
//! [`TokenFile::read`] fails after a later modification that changes the length or the modification time of the file.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{Error, Result};
use crate::files::FileStamp;

const MAGIC: &[u8; 8] = b"TWTOKENS";
const VERSION: u32 = 1;
const HEADER: usize = 160;

/// Tokens on disk.
pub struct TokenFile {
    path: PathBuf,
    file: File,
    stamp: FileStamp,
    token_bytes: usize,
    vocabulary: usize,
    len: usize,
    tokenizer: [u8; 32],
    text: [u8; 32],
}

fn token_bytes_for(vocabulary: usize) -> usize {
    if vocabulary <= 1 << 16 { 2 } else { 4 }
}

/// Writes `tokens` to `path` atomically.
///
/// # Errors
/// Errors of the file system.
///
/// # Panics
/// A token outside of the vocabulary.
pub fn write_tokens(path: &Path, tokens: &[u32], vocabulary: usize, tokenizer: [u8; 32], text: [u8; 32]) -> Result<()> {
    let token_bytes = token_bytes_for(vocabulary);
    let mut payload = Vec::with_capacity(tokens.len() * token_bytes);
    for &token in tokens {
        assert!((token as usize) < vocabulary, "internal error: token {token} in a vocabulary of {vocabulary}");
        payload.extend_from_slice(&token.to_le_bytes()[..token_bytes]);
    }
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&(token_bytes as u32).to_le_bytes());
    header.extend_from_slice(&(vocabulary as u64).to_le_bytes());
    header.extend_from_slice(&(tokens.len() as u64).to_le_bytes());
    header.extend_from_slice(&tokenizer);
    header.extend_from_slice(&text);
    header.extend_from_slice(blake3::hash(&payload).as_bytes());
    header.extend_from_slice(blake3::hash(&header).as_bytes());

    crate::files::replace(path, |file| {
        file.write_all(&header)?;
        file.write_all(&payload)
    })
    .map_err(Error::file("write", path))
}

impl TokenFile {
    /// Opens a file and verifies all of it.
    ///
    /// # Errors
    /// A file that cannot be read, is not a token file, or is damaged.
    pub fn open(path: &Path) -> Result<TokenFile> {
        let read = Error::file("read", path);
        let OpenedTokens { file, stamp, header, payload_hash } = open_and_hash(path).map_err(read)?;
        let Some(header) = header else {
            let bytes = file.metadata().map_err(Error::file("read", path))?.len();
            return Err(Error::damaged(path, format!("{bytes} bytes are fewer than the {HEADER} of its header")));
        };
        let u32_at = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        let hash_at = |at: usize| -> [u8; 32] { header[at..at + 32].try_into().expect("32 bytes") };
        if &header[..8] != MAGIC {
            return Err(Error::damaged(path, "it does not start with the magic number of a token file"));
        }
        if u32_at(8) != VERSION {
            let found = u32_at(8);
            return Err(Error::damaged(path, format!("expected format version {VERSION}, found {found}")));
        }
        if *blake3::hash(&header[..128]).as_bytes() != hash_at(128) {
            return Err(Error::damaged(path, "the checksum of its header does not match"));
        }
        let (token_bytes, vocabulary, len) = (u32_at(12) as usize, u64_at(16) as usize, u64_at(24) as usize);
        let expected = len.checked_mul(token_bytes).and_then(|bytes| bytes.checked_add(HEADER));
        let found = file.metadata().map_err(Error::file("read", path))?.len();
        if expected.is_none_or(|expected| expected as u64 != found) || !(token_bytes == 2 || token_bytes == 4) {
            let reason = format!("expected {len} tokens of {token_bytes} bytes, found {found} bytes");
            return Err(Error::damaged(path, reason));
        }
        if *payload_hash.as_bytes() != hash_at(96) {
            return Err(Error::damaged(path, "the checksum of its tokens does not match"));
        }
        let (tokenizer, text) = (hash_at(32), hash_at(64));
        Ok(TokenFile { path: path.to_path_buf(), file, stamp, token_bytes, vocabulary, len, tokenizer, text })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Vocabulary size: token ids are below it.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Hash of the tokenizer ([`Bpe::hash`](super::Bpe::hash)).
    pub fn tokenizer_hash(&self) -> [u8; 32] {
        self.tokenizer
    }

    /// Hash of the text.
    pub fn text_hash(&self) -> [u8; 32] {
        self.text
    }

    /// Appends the tokens of `range` to `to`.
    ///
    /// # Errors
    /// A file that cannot be read any more, or was modified since it was opened.
    ///
    /// # Panics
    /// A range beyond the end.
    pub fn read(&self, range: Range<usize>, to: &mut Vec<u32>) -> Result<()> {
        assert!(range.start <= range.end && range.end <= self.len, "internal error: {range:?} of {} tokens", self.len);
        let mut bytes = vec![0; range.len() * self.token_bytes];
        let place = (HEADER + range.start * self.token_bytes) as u64;
        // Check the stamp before the result is used.
        let read = self.file.read_exact_at(&mut bytes, place).and_then(|()| self.stamp.check(&self.file));
        read.map_err(Error::file("read", &self.path))?;
        match self.token_bytes {
            2 => to.extend(bytes.as_chunks::<2>().0.iter().map(|&token| u32::from(u16::from_le_bytes(token)))),
            _ => to.extend(bytes.as_chunks::<4>().0.iter().map(|&token| u32::from_le_bytes(token))),
        }
        Ok(())
    }
}

/// A file that was read once.
struct OpenedTokens {
    file: File,
    stamp: FileStamp,
    /// `None` if the file is too short for a header.
    header: Option<[u8; HEADER]>,
    /// Hash of the bytes after the header.
    payload_hash: blake3::Hash,
}

fn open_and_hash(path: &Path) -> io::Result<OpenedTokens> {
    let mut file = crate::files::open_regular(path)?;
    let stamp = FileStamp::of(&file)?;
    let mut header = [0; HEADER];
    let header = match file.read_exact(&mut header) {
        Ok(()) => Some(header),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
        Err(error) => return Err(error),
    };
    let mut hasher = blake3::Hasher::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        match file.read(&mut chunk)? {
            0 => break,
            len => hasher.update(&chunk[..len]),
        };
    }
    stamp.check(&file)?;
    Ok(OpenedTokens { file, stamp, header, payload_hash: hasher.finalize() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(tokens: &[u32], vocabulary: usize) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tokens");
        write_tokens(&path, tokens, vocabulary, [1; 32], [2; 32]).unwrap();
        (dir, path)
    }

    #[test]
    fn tokens_round_trip_with_2_and_4_bytes() {
        for (vocabulary, token_bytes) in [(1 << 16, 2), ((1 << 16) + 1, 4)] {
            let tokens: Vec<u32> = (0..1000).map(|i| (i * 7919) % vocabulary as u32).collect();
            let (_dir, path) = written(&tokens, vocabulary);
            let file = TokenFile::open(&path).unwrap();
            assert_eq!((file.len(), file.vocabulary()), (1000, vocabulary));
            assert_eq!(std::fs::metadata(&path).unwrap().len(), (HEADER + 1000 * token_bytes) as u64);
            assert_eq!((file.tokenizer_hash(), file.text_hash()), ([1; 32], [2; 32]));
            let mut found = Vec::new();
            file.read(0..3, &mut found).unwrap();
            file.read(3..1000, &mut found).unwrap();
            assert_eq!(found, tokens);
        }
    }

    #[test]
    fn a_file_that_shrinks_or_changes_after_it_was_opened_is_an_error() {
        let (_dir, path) = written(&[5; 100_000], 300);
        let file = TokenFile::open(&path).unwrap();
        let mut found = Vec::new();
        file.read(99_000..100_000, &mut found).unwrap();
        let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        other.write_all_at(&[6], 1000).unwrap();
        // File systems have coarse clocks.
        other.set_modified(std::time::UNIX_EPOCH).unwrap();
        let message = file.read(0..10, &mut found).unwrap_err().to_string();
        assert!(message.contains("x.tokens") && message.contains("changed"), "{message}");
        other.set_len(1000).unwrap();
        assert!(file.read(99_000..100_000, &mut found).unwrap_err().to_string().contains("x.tokens"));
        assert_eq!(found, [5; 1000]);
    }

    #[test]
    fn a_change_of_any_byte_is_noticed() {
        let (_dir, path) = written(&[5, 6, 7], 300);
        let whole = std::fs::read(&path).unwrap();
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 0x10;
            std::fs::write(&path, &damaged).unwrap();
            assert!(TokenFile::open(&path).is_err(), "byte {place}");
        }
        for len in [0, 7, HEADER - 1, HEADER, whole.len() - 1] {
            std::fs::write(&path, &whole[..len]).unwrap();
            let message = TokenFile::open(&path).err().unwrap().to_string();
            assert!(message.contains("damaged") && message.contains("x.tokens"), "{message}");
        }
        std::fs::write(&path, &whole).unwrap();
        TokenFile::open(&path).unwrap();
    }
}
