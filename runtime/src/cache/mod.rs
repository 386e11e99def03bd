//! Compiled kernels on disk, shared by all processes of a user.
//!
//! One file holds one artifact; `format.rs` has its layout. An entry is written to a temporary file beside its place and
//! then renamed, so a reader sees all of it or nothing. Whatever is wrong with an entry, it is a miss: damage, another
//! format, another key. Whatever is wrong with the directory, the program goes on without a cache, and says so once.

mod format;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use tilewright_codegen::target::{Artifact, CompileOptions, Target};

use crate::env::Env;
use crate::error::{Error, Result};

/// A directory of compiled kernels, or none.
#[derive(Debug, Default)]
pub struct Cache {
    dir: Option<PathBuf>,
    warned: AtomicBool,
}

/// Name of an artifact: a hash of everything that it was made from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// Key of what `compiler_version` makes of `ir_text` for `target` under `options`.
    pub fn new(ir_text: &str, target: &Target, options: &CompileOptions, compiler_version: &str) -> Key {
        let mut hasher = blake3::Hasher::new();
        // Each part's length goes first, so that no two different lists of parts give the same bytes.
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(compiler_version.as_bytes());
        // The derived text has every field of both, with its name.
        part(format!("{target:?}").as_bytes());
        part(format!("{options:?}").as_bytes());
        part(ir_text.as_bytes());
        Key(*hasher.finalize().as_bytes())
    }
}

impl fmt::Display for Key {
    /// 64 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

impl Cache {
    /// The cache that the environment asks for: see [`env`](crate::env).
    ///
    /// # Errors
    /// A variable with a bad value.
    pub fn from_env() -> Result<Cache> {
        Ok(Cache { dir: Env::get()?.cache_dir.clone(), warned: AtomicBool::new(false) })
    }

    /// A cache in `dir`, which is made at the first write.
    pub fn at(dir: impl Into<PathBuf>) -> Cache {
        Cache { dir: Some(dir.into()), warned: AtomicBool::new(false) }
    }

    /// A cache that keeps nothing.
    pub fn disabled() -> Cache {
        Cache::default()
    }

    /// Where the entries are; `None` where nothing is kept.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// The artifact of `key`, if an intact entry has it.
    pub fn get(&self, key: &Key) -> Option<Artifact> {
        let path = self.path_of(key)?;
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::debug!("cache entry {} cannot be read: {error}", path.display());
                }
                return None;
            }
        };
        match format::decode(&bytes, key) {
            Ok(artifact) => Some(artifact),
            Err(reason) => {
                tracing::debug!("cache entry {} is not usable: {reason}", path.display());
                None
            }
        }
    }

    /// Keeps `artifact` under `key`. A failure is no error: the next process compiles again.
    pub fn put(&self, key: &Key, artifact: &Artifact) {
        let Some(path) = self.path_of(key) else { return };
        if let Err(error) = write(&path, &format::encode(artifact, key))
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            let dir = self.dir.as_deref().unwrap_or(Path::new(""));
            tracing::warn!(
                "compiled kernels cannot be kept in {}: {error}; going on without (TILEWRIGHT_CACHE names another directory)",
                dir.display()
            );
        }
    }

    /// Whether a failed write has been reported.
    pub fn has_warned(&self) -> bool {
        self.warned.load(Ordering::Relaxed)
    }

    /// Number of entries, and their size in bytes together.
    pub fn usage(&self) -> (usize, u64) {
        let sizes = self.entries().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len());
        sizes.fold((0, 0), |(count, bytes), size| (count + 1, bytes + size))
    }

    /// Removes every entry; returns how many there were. Other files in the directory stay.
    ///
    /// # Errors
    /// Names the entry that could not be removed.
    pub fn clear(&self) -> Result<usize> {
        let mut removed = 0;
        for path in self.entries() {
            match std::fs::remove_file(&path) {
                Ok(()) => removed += 1,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let (path, message) = (path.display().to_string(), error.to_string());
                    return Err(Error::Io { doing: "remove the cache entry", path, message });
                }
            }
        }
        Ok(removed)
    }

    /// Tries a write in the directory, for `doctor`.
    ///
    /// # Errors
    /// Why nothing can be written there.
    pub fn check_writable(&self) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let attempt = || -> io::Result<()> {
            std::fs::create_dir_all(dir)?;
            tempfile::NamedTempFile::new_in(dir)?.write_all(b"tilewright")
        };
        attempt().map_err(|error| Error::Io {
            doing: "write to the cache directory",
            path: dir.display().to_string(),
            message: error.to_string(),
        })
    }

    /// Two levels, so that no directory grows large.
    fn path_of(&self, key: &Key) -> Option<PathBuf> {
        let name = key.to_string();
        Some(self.dir.as_ref()?.join(&name[..2]).join(format!("{name}.{EXTENSION}")))
    }

    fn entries(&self) -> impl Iterator<Item = PathBuf> {
        let children = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let shards: Vec<PathBuf> = self.dir.iter().flat_map(|dir| children(dir)).collect();
        let is_entry = |path: &PathBuf| path.extension().is_some_and(|extension| extension == EXTENSION);
        shards.into_iter().flat_map(move |shard| children(&shard)).filter(is_entry)
    }
}

/// File name extension of entries.
const EXTENSION: &str = "tile";

/// Writes all of `bytes` to `path`, or nothing.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let Some(dir) = path.parent() else { return Err(io::ErrorKind::InvalidInput.into()) };
    std::fs::create_dir_all(dir)?;
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}
