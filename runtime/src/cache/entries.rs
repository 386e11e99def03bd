//! All entries of a cache: their total size, and which are evicted.
//!
//! The modification time of an entry is the time of its last use: a hit sets it. Several processes may use, write and
//! remove entries at the same time: a removed file is a miss for a process that wants it, and removing it twice is not
//! an error.

use std::io;
use std::time::{Duration, SystemTime};

use rustix::fs::FileType;

use super::owned::{Folder, TEMPORARY, Unusable};

/// File name extension of entries.
pub(super) const EXTENSION: &str = ".tile";

/// A temporary file of this age was left behind by a process that ended.
const ABANDONED: Duration = Duration::from_secs(3600);

pub(super) struct Entry {
    shard: usize,
    name: String,
    pub bytes: u64,
    /// Time of the last use: seconds and nanoseconds since 1970.
    used: (i64, i64),
}

/// The entries below a cache directory, and temporary files that processes left behind.
pub(super) struct Entries {
    shards: Vec<Folder>,
    pub list: Vec<Entry>,
    abandoned: Vec<Entry>,
}

impl Entries {
    /// Reads the directory. Files in place of an entry or shard that belong to other users are skipped.
    pub fn of(root: &Folder) -> io::Result<Entries> {
        let mut entries = Entries { shards: Vec::new(), list: Vec::new(), abandoned: Vec::new() };
        let is_shard = |name: &String| name.len() == 2 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        for name in root.names()?.iter().filter(|name| is_shard(name)) {
            match root.child(name) {
                Ok(shard) => entries.add(shard)?,
                Err(Unusable::Missing | Unusable::Refused { .. }) => {}
                Err(Unusable::Failed(error)) => return Err(error),
            }
        }
        Ok(entries)
    }

    fn add(&mut self, shard: Folder) -> io::Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        for name in shard.names()? {
            let (entry, temporary) = (name.ends_with(EXTENSION), name.starts_with(TEMPORARY));
            let Some(stat) = shard.stat(&name).ok().filter(|_| entry || temporary) else { continue };
            // Other kinds of files do not come from a cache: they stay, and are misses.
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                continue;
            }
            let used = (stat.st_mtime, stat.st_mtime_nsec as i64);
            let found = Entry { shard: self.shards.len(), name, bytes: stat.st_size.unsigned_abs(), used };
            if entry {
                self.list.push(found);
            } else if used.0 < now.saturating_sub(ABANDONED).as_secs() as i64 {
                self.abandoned.push(found);
            }
        }
        self.shards.push(shard);
        Ok(())
    }

    pub fn bytes(&self) -> u64 {
        self.list.iter().map(|entry| entry.bytes).sum()
    }

    /// Removes one file; returns whether this call removed it.
    ///
    /// # Errors
    /// The file system's error, with the file's path.
    fn remove(&self, entry: &Entry) -> Result<bool, (String, io::Error)> {
        let shard = &self.shards[entry.shard];
        match shard.remove(&entry.name) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err((shard.path().join(&entry.name).display().to_string(), error)),
        }
    }

    /// Removes all files; returns the number of entries among them.
    pub fn clear(&self) -> Result<usize, (String, io::Error)> {
        self.abandoned.iter().try_for_each(|file| self.remove(file).map(drop))?;
        self.list.iter().try_fold(0, |count, entry| Ok(count + usize::from(self.remove(entry)?)))
    }

    /// Removes the least recently used entries until the others have at most `limit` bytes in total.
    pub fn evict(mut self, limit: u64) -> Result<usize, (String, io::Error)> {
        self.abandoned.iter().try_for_each(|file| self.remove(file).map(drop))?;
        let mut list = std::mem::take(&mut self.list);
        list.sort_by(|a, b| (a.used, &a.name).cmp(&(b.used, &b.name)));
        let mut bytes: u64 = list.iter().map(|entry| entry.bytes).sum();
        let mut removed = 0;
        for entry in &list {
            if bytes <= limit {
                break;
            }
            removed += usize::from(self.remove(entry)?);
            bytes -= entry.bytes;
        }
        Ok(removed)
    }
}
