//! Compiled kernels on disk, shared by all processes of a user.
//!
//! One file holds one artifact; `format.rs` defines its layout, `key.rs` its name. An entry is written to a temporary
//! file in the same directory and then renamed, so a reader sees all of it or nothing. Any invalid entry is a miss:
//! damage, another format, another key, another user's file. If the directory cannot be used, the program continues
//! without a cache, and warns once.
//!
//! The code in the cache is executed. It is trusted because no other user can write it: directory and entry belong to
//! the user of the process, and only this user can write them (`owned.rs`); otherwise they are not used. The checksum
//! of an entry detects damage; it does not authenticate the writer.
//!
//! The total size of the entries is limited (`entries.rs`): the least recently used ones are evicted first.

mod entries;
mod format;
mod key;
pub(crate) mod owned;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::time::SystemTime;

use tilewright_codegen::target::Artifact;

use crate::env::Env;
use crate::error::{Error, Result};
use entries::{EXTENSION, Entries};
pub use key::Key;
use owned::{Folder, Unusable};

/// Default limit of the total size of entries: some thousands of kernels.
const DEFAULT_MAX_BYTES: u64 = 1 << 30;

/// Maximum size of an entry: a larger file is not an entry, and is not read.
const MAX_ENTRY_BYTES: u64 = 256 << 20;

/// A directory of compiled kernels, or none.
#[derive(Debug)]
pub struct Cache {
    dir: Option<PathBuf>,
    max_bytes: u64,
    /// The user whose files are used.
    user: u32,
    /// Bytes that this process stored since it last computed the total size; `None` before that.
    stored_since_scan: Mutex<Option<u64>>,
    /// The warnings so far: their subject and text.
    warnings: Mutex<Vec<(WarningKind, String)>>,
}

/// Subjects of warnings: there is at most one warning for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WarningKind {
    /// The directory is not used.
    Folder,
    /// An entry is not used.
    Entry,
    /// Something cannot be written, or cannot be removed to free space.
    Write,
}

impl Cache {
    /// The cache of the environment variables: see [`env`](crate::env). A process has one, so that it warns once.
    ///
    /// # Errors
    /// A variable with an invalid value.
    pub fn from_env() -> Result<&'static Cache> {
        static CACHE: OnceLock<Result<Cache>> = OnceLock::new();
        let open = || {
            let env = Env::get()?;
            let cache = env.cache_dir.as_ref().map_or_else(Cache::disabled, Cache::at);
            Ok(cache.max_bytes(env.cache_max_bytes.unwrap_or(DEFAULT_MAX_BYTES)))
        };
        CACHE.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// A cache in `dir`, which is created by the first write.
    pub fn at(dir: impl Into<PathBuf>) -> Cache {
        Cache { dir: Some(dir.into()), ..Cache::disabled() }
    }

    /// A cache that stores nothing.
    pub fn disabled() -> Cache {
        Cache {
            dir: None,
            max_bytes: DEFAULT_MAX_BYTES,
            user: owned::user(),
            stored_since_scan: Mutex::default(),
            warnings: Mutex::default(),
        }
    }

    /// Limits the total size of the entries after each write; `u64::MAX` is no limit. Each further process that writes
    /// at the same time may exceed the limit by a sixteenth, or by one entry, before one of the processes computes the
    /// size again.
    pub fn max_bytes(mut self, max_bytes: u64) -> Cache {
        self.max_bytes = max_bytes;
        self
    }

    /// The directory of the entries; `None` if nothing is stored.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// The artifact of `key`, if an intact entry of this user has it.
    pub fn get(&self, key: &Key) -> Option<Artifact> {
        let name = file_name(key);
        let folder = self.open(&[shard(&name)])?;
        let path = folder.path().join(&name);
        let file = match folder.open_file(&name) {
            Ok(file) => file,
            Err(Unusable::Missing) => return None,
            Err(refused @ Unusable::Refused { .. }) => {
                self.warn(WarningKind::Entry, format!("a cache entry is not used: {refused}"));
                return None;
            }
            Err(Unusable::Failed(error)) => {
                tracing::debug!("cache entry {} cannot be read: {error}", path.display());
                return None;
            }
        };
        let bytes = owned::read(&file, MAX_ENTRY_BYTES).map_err(|error| error.to_string());
        match bytes.and_then(|bytes| format::decode(&bytes, key)) {
            Ok(artifact) => {
                // If the directory cannot be written, nothing is evicted either.
                let _ = file.set_modified(SystemTime::now());
                Some(artifact)
            }
            Err(reason) => {
                tracing::debug!("cache entry {} is not usable: {reason}", path.display());
                None
            }
        }
    }

    /// Stores `artifact` under `key`. A failure is not an error: the next process compiles again.
    pub fn put(&self, key: &Key, artifact: &Artifact) {
        let name = file_name(key);
        let Some(folder) = self.make(&[shard(&name)]) else { return };
        let bytes = format::encode(artifact, key);
        if !self.evict_for(bytes.len() as u64) {
            tracing::debug!(
                "{} is not cached: its {} bytes exceed the limit of the cache",
                artifact.manifest.kernel,
                bytes.len()
            );
        } else if let Err(error) = folder.write(&name, &bytes) {
            self.warn_unwritable(&folder.path().display().to_string(), &error);
        }
    }

    /// The warnings so far.
    pub fn warnings(&self) -> Vec<String> {
        let warnings = self.warnings.lock().unwrap_or_else(|e| e.into_inner());
        warnings.iter().map(|(_, message)| message.clone()).collect()
    }

    /// The directory at the path components `below` in the cache directory, for other files of this user; created if
    /// missing. `None` if there is no usable cache. Its contents do not count towards the limit.
    pub fn folder(&self, below: &[&str]) -> Option<PathBuf> {
        Some(self.make(below)?.path().to_path_buf())
    }

    /// Number of entries, and their total size in bytes.
    ///
    /// # Errors
    /// Why the directory is not used.
    pub fn usage(&self) -> Result<(usize, u64)> {
        let entries = self.entries("read the cache directory")?;
        Ok(entries.map_or((0, 0), |entries| (entries.list.len(), entries.bytes())))
    }

    /// Removes every entry; returns how many there were. Other files in the directory stay.
    ///
    /// # Errors
    /// Why the directory is not used, or which entry could not be removed.
    pub fn clear(&self) -> Result<usize> {
        let Some(entries) = self.entries("clear the cache directory")? else { return Ok(0) };
        entries.clear().map_err(|(path, error)| Error::Io {
            operation: "remove the cache entry",
            path,
            message: error.to_string(),
        })
    }

    /// Tests a write in the directory, for `doctor`.
    ///
    /// # Errors
    /// Why nothing can be written there.
    pub fn check_writable(&self) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let outcome = Folder::make(dir, &[], self.user).and_then(|folder| Ok(folder.check_writable()?));
        outcome.map_err(|why| self.error("write to the cache directory", &why))
    }

    fn entries(&self, operation: &'static str) -> Result<Option<Entries>> {
        let Some(dir) = &self.dir else { return Ok(None) };
        let listed = Folder::open(dir, &[], self.user).and_then(|root| Ok(Entries::of(&root)?));
        match listed {
            Ok(entries) => Ok(Some(entries)),
            Err(Unusable::Missing) => Ok(None),
            Err(why) => Err(self.error(operation, &why)),
        }
    }

    fn error(&self, operation: &'static str, why: &Unusable) -> Error {
        let dir = self.dir.as_deref().unwrap_or(Path::new(""));
        Error::Io { operation, path: dir.display().to_string(), message: why.to_string() }
    }

    /// Opens the directory at the path components `below` in the cache directory; `None`, with a warning, if it cannot
    /// be used.
    pub(crate) fn open(&self, below: &[&str]) -> Option<Folder> {
        self.usable(Folder::open(self.dir.as_deref()?, below, self.user))
    }

    /// Like [`open`](Cache::open); creates missing directories.
    pub(crate) fn make(&self, below: &[&str]) -> Option<Folder> {
        self.usable(Folder::make(self.dir.as_deref()?, below, self.user))
    }

    fn usable(&self, folder: Result<Folder, Unusable>) -> Option<Folder> {
        match folder {
            Ok(folder) => return Some(folder),
            Err(Unusable::Missing) => {}
            Err(refused @ Unusable::Refused { .. }) => self.warn(
                WarningKind::Folder,
                format!(
                    "the cache directory is not used: {refused} (set TILEWRIGHT_CACHE to another directory, or to `off`); \
                     kernels are compiled again"
                ),
            ),
            Err(Unusable::Failed(error)) => {
                let dir = self.dir.as_deref().unwrap_or(Path::new(""));
                self.warn_unwritable(&dir.display().to_string(), &error);
            }
        }
        None
    }

    /// Evicts entries so that a new one of `bytes` bytes fits; returns false if the limit is too small for it.
    ///
    /// Listing all entries takes time if there are many. So it is done at the first entry of a process, and when the
    /// process has stored a sixteenth of the limit since.
    fn evict_for(&self, bytes: u64) -> bool {
        if self.max_bytes == u64::MAX {
            return true;
        }
        let margin = self.max_bytes / 16;
        let Some(limit) = (self.max_bytes - margin).checked_sub(bytes) else { return false };
        let mut stored = self.stored_since_scan.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(stored) = stored.as_mut().filter(|stored| **stored + bytes <= margin) {
            *stored += bytes;
            return true;
        }
        *stored = Some(0);
        let removed = self.open(&[]).map(|root| match Entries::of(&root) {
            Ok(entries) => entries.evict(limit),
            Err(error) => Err((root.path().display().to_string(), error)),
        });
        match removed {
            None | Some(Ok(0)) => {}
            Some(Ok(removed)) => tracing::debug!("{removed} cache entries were evicted"),
            Some(Err((path, error))) => self.warn_unwritable(&path, &error),
        }
        true
    }

    pub(crate) fn warn_unwritable(&self, path: &str, error: &std::io::Error) {
        self.warn(
            WarningKind::Write,
            format!(
                "compiled and tuned kernels cannot be stored in {path}: {error}; continuing without a cache (set TILEWRIGHT_CACHE to \
                 another directory, or to `off`)"
            ),
        );
    }

    fn warn(&self, about: WarningKind, message: String) {
        let mut warnings = self.warnings.lock().unwrap_or_else(|e| e.into_inner());
        if warnings.iter().any(|(other, _)| *other == about) {
            tracing::debug!("{message}");
        } else {
            tracing::warn!("{message}");
            warnings.push((about, message));
        }
    }
}

fn file_name(key: &Key) -> String {
    format!("{key}{EXTENSION}")
}

/// The directory of an entry: two levels, so that no directory grows large.
fn shard(file_name: &str) -> &str {
    &file_name[..2]
}
