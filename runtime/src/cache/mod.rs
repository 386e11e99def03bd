//! Compiled kernels on disk, shared by all processes of a user.
//!
//! One file holds one artifact; `format.rs` has its layout, `key.rs` what its name is made of. An entry is written to a
//! temporary file beside its place and then renamed, so a reader sees all of it or nothing. Whatever is wrong with an entry,
//! it is a miss: damage, another format, another key, somebody else's file. Whatever is wrong with the folder, the program
//! goes on without a cache, and says so once.
//!
//! What is in the cache is run. It is trusted because nobody else can write it: folder and entry belong to the user of the
//! process, who alone can write them (`owned.rs`), else they are not used. The checksum of an entry finds damage; it says nothing
//! of who wrote it.
//!
//! The entries take a limited room (`entries.rs`): those go first that were used longest ago.

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

/// How much room entries take unless the environment says otherwise: some thousands of kernels.
const DEFAULT_MAX_BYTES: u64 = 1 << 30;

/// No kernel is as large as this: a larger file is none of ours, and is not read.
const MAX_ENTRY_BYTES: u64 = 256 << 20;

/// A folder of compiled kernels, or none.
#[derive(Debug)]
pub struct Cache {
    dir: Option<PathBuf>,
    max_bytes: u64,
    /// Whose files are used.
    user: u32,
    /// Bytes that this process kept since it last looked at how much there is; `None` before that.
    kept: Mutex<Option<u64>>,
    /// What was warned about, and in which words.
    warnings: Mutex<Vec<(About, String)>>,
}

/// What warnings are about: of each there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    /// The folder is not used.
    Folder,
    /// An entry is not used.
    Entry,
    /// Something cannot be written, or removed to make room.
    Write,
}

impl Cache {
    /// The cache that the environment asks for ([`env`](crate::env)). A process has one, so that it warns once.
    ///
    /// # Errors
    /// A variable with a bad value.
    pub fn from_env() -> Result<&'static Cache> {
        static CACHE: OnceLock<Result<Cache>> = OnceLock::new();
        let open = || {
            let env = Env::get()?;
            let cache = env.cache_dir.as_ref().map_or_else(Cache::disabled, Cache::at);
            Ok(cache.max_bytes(env.cache_max_bytes.unwrap_or(DEFAULT_MAX_BYTES)))
        };
        CACHE.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// A cache in `dir`, which is made at the first write.
    pub fn at(dir: impl Into<PathBuf>) -> Cache {
        Cache { dir: Some(dir.into()), ..Cache::disabled() }
    }

    /// A cache that keeps nothing.
    pub fn disabled() -> Cache {
        Cache {
            dir: None,
            max_bytes: DEFAULT_MAX_BYTES,
            user: owned::user(),
            kept: Mutex::default(),
            warnings: Mutex::default(),
        }
    }

    /// Lets the entries take at most so many bytes whenever one is kept; `u64::MAX` is no limit. Each further process that writes at the same time
    /// may add a sixteenth of it, or one entry, before one of them looks again.
    pub fn max_bytes(mut self, max_bytes: u64) -> Cache {
        self.max_bytes = max_bytes;
        self
    }

    /// Where the entries are; `None` where nothing is kept.
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
                self.warn(About::Entry, format!("a cache entry is not used: {refused}"));
                return None;
            }
            Err(Unusable::Failed(error)) => {
                tracing::debug!("cache entry {} cannot be read: {error}", path.display());
                return None;
            }
        };
        let bytes = owned::read(&file, MAX_ENTRY_BYTES).map_err(|error| error.to_string());
        match bytes.and_then(|bytes| format::decode(&bytes, key).map_err(str::to_string)) {
            Ok(artifact) => {
                // Where the folder cannot be written, nothing is removed for want of room either.
                let _ = file.set_modified(SystemTime::now());
                Some(artifact)
            }
            Err(reason) => {
                tracing::debug!("cache entry {} is not usable: {reason}", path.display());
                None
            }
        }
    }

    /// Keeps `artifact` under `key`. A failure is no error: the next process compiles again.
    pub fn put(&self, key: &Key, artifact: &Artifact) {
        let name = file_name(key);
        let Some(folder) = self.make(&[shard(&name)]) else { return };
        let bytes = format::encode(artifact, key);
        if !self.make_room(bytes.len() as u64) {
            tracing::debug!(
                "{} is not kept: {} bytes are too many for the cache",
                artifact.manifest.kernel,
                bytes.len()
            );
        } else if let Err(error) = folder.write(&name, &bytes) {
            self.warn_unwritable(&folder.path().display().to_string(), &error);
        }
    }

    /// What was warned about so far.
    pub fn warnings(&self) -> Vec<String> {
        let warnings = self.warnings.lock().unwrap_or_else(|e| e.into_inner());
        warnings.iter().map(|(_, message)| message.clone()).collect()
    }

    /// The folder `below` the cache's, one name after the other, for other things that this user keeps; it is made if need be.
    /// `None` where there is no cache, or none that can be used. What is in it does not count towards the limit.
    pub fn folder(&self, below: &[&str]) -> Option<PathBuf> {
        Some(self.make(below)?.path().to_path_buf())
    }

    /// Number of entries, and their size in bytes together.
    ///
    /// # Errors
    /// Why the folder is not used.
    pub fn usage(&self) -> Result<(usize, u64)> {
        let entries = self.entries("read the cache folder")?;
        Ok(entries.map_or((0, 0), |entries| (entries.list.len(), entries.bytes())))
    }

    /// Removes every entry; returns how many there were. Other files in the folder stay.
    ///
    /// # Errors
    /// Why the folder is not used, or which entry could not be removed.
    pub fn clear(&self) -> Result<usize> {
        let Some(entries) = self.entries("clear the cache folder")? else { return Ok(0) };
        entries.clear().map_err(|(path, error)| Error::Io {
            doing: "remove the cache entry",
            path,
            message: error.to_string(),
        })
    }

    /// Tries a write in the folder, for `doctor`.
    ///
    /// # Errors
    /// Why nothing can be written there.
    pub fn check_writable(&self) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let outcome = Folder::make(dir, &[], self.user).and_then(|folder| Ok(folder.check_writable()?));
        outcome.map_err(|why| self.error("write to the cache folder", &why))
    }

    fn entries(&self, doing: &'static str) -> Result<Option<Entries>> {
        let Some(dir) = &self.dir else { return Ok(None) };
        let listed = Folder::open(dir, &[], self.user).and_then(|root| Ok(Entries::of(&root)?));
        match listed {
            Ok(entries) => Ok(Some(entries)),
            Err(Unusable::Missing) => Ok(None),
            Err(why) => Err(self.error(doing, &why)),
        }
    }

    fn error(&self, doing: &'static str, why: &Unusable) -> Error {
        let dir = self.dir.as_deref().unwrap_or(Path::new(""));
        Error::Io { doing, path: dir.display().to_string(), message: why.to_string() }
    }

    /// The folder `below` the cache's; `None`, with a warning, where it cannot be used.
    pub(crate) fn open(&self, below: &[&str]) -> Option<Folder> {
        self.usable(Folder::open(self.dir.as_deref()?, below, self.user))
    }

    /// As [`open`](Cache::open); makes what is missing.
    pub(crate) fn make(&self, below: &[&str]) -> Option<Folder> {
        self.usable(Folder::make(self.dir.as_deref()?, below, self.user))
    }

    fn usable(&self, folder: Result<Folder, Unusable>) -> Option<Folder> {
        match folder {
            Ok(folder) => return Some(folder),
            Err(Unusable::Missing) => {}
            Err(refused @ Unusable::Refused { .. }) => self.warn(
                About::Folder,
                format!(
                    "the cache folder is not used: {refused} (TILEWRIGHT_CACHE names another folder, or `off`); kernels are \
                     compiled again"
                ),
            ),
            Err(Unusable::Failed(error)) => {
                let dir = self.dir.as_deref().unwrap_or(Path::new(""));
                self.warn_unwritable(&dir.display().to_string(), &error);
            }
        }
        None
    }

    /// Makes room for an entry of so many bytes; gives whether there can be enough.
    ///
    /// Looking at all entries takes a while where there are many. So it is done at the first entry of a process, and when
    /// the process has kept a sixteenth of the limit since.
    fn make_room(&self, bytes: u64) -> bool {
        if self.max_bytes == u64::MAX {
            return true;
        }
        let margin = self.max_bytes / 16;
        let Some(limit) = (self.max_bytes - margin).checked_sub(bytes) else { return false };
        let mut kept = self.kept.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(kept) = kept.as_mut().filter(|kept| **kept + bytes <= margin) {
            *kept += bytes;
            return true;
        }
        *kept = Some(0);
        let removed = self.open(&[]).map(|root| match Entries::of(&root) {
            Ok(entries) => entries.evict(limit),
            Err(error) => Err((root.path().display().to_string(), error)),
        });
        match removed {
            None | Some(Ok(0)) => {}
            Some(Ok(removed)) => tracing::debug!("{removed} cache entries were removed to make room"),
            Some(Err((path, error))) => self.warn_unwritable(&path, &error),
        }
        true
    }

    pub(crate) fn warn_unwritable(&self, path: &str, error: &std::io::Error) {
        self.warn(
            About::Write,
            format!(
                "compiled and tuned kernels cannot be kept in {path}: {error}; going on without (TILEWRIGHT_CACHE names another folder, or \
                 `off`)"
            ),
        );
    }

    fn warn(&self, about: About, message: String) {
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

/// The folder of an entry: two levels, so that no folder grows large.
fn shard(file_name: &str) -> &str {
    &file_name[..2]
}
