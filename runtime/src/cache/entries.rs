//! All entries of a cache: how much room they take, and which of them go.
//!
//! An entry's time of modification is when it was used last: a hit sets it. Several processes may use, write and remove
//! entries at once: a file that is gone is a miss for whoever wanted it, and removing it twice is no mistake.

use std::io;
use std::time::{Duration, SystemTime};

use rustix::fs::FileType;

use super::owned::{Folder, TEMPORARY, Unusable};

/// File name extension of entries.
pub(super) const EXTENSION: &str = ".tile";

/// A temporary file that is as old as this has lost its process.
const ABANDONED: Duration = Duration::from_secs(3600);

pub(super) struct Entry {
    shard: usize,
    name: String,
    pub bytes: u64,
    /// Seconds and nanoseconds.
    used: (i64, i64),
}

/// The entries below a cache's folder, and temporary files that processes left behind.
pub(super) struct Entries {
    shards: Vec<Folder>,
    pub list: Vec<Entry>,
    abandoned: Vec<Entry>,
}

impl Entries {
    /// Reads the folder. What is in the way of an entry or shard, and belongs to others, is passed over.
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
            // Others are no files that a cache made: they stay, and are misses.
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

    /// Removes one; gives whether this call did it.
    ///
    /// # Errors
    /// What the file system says, with the file's path.
    fn remove(&self, entry: &Entry) -> Result<bool, (String, io::Error)> {
        let shard = &self.shards[entry.shard];
        match shard.remove(&entry.name) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err((shard.path().join(&entry.name).display().to_string(), error)),
        }
    }

    /// Removes all; gives how many entries there were.
    pub fn clear(&self) -> Result<usize, (String, io::Error)> {
        self.abandoned.iter().try_for_each(|file| self.remove(file).map(drop))?;
        self.list.iter().try_fold(0, |count, entry| Ok(count + usize::from(self.remove(entry)?)))
    }

    /// Removes those that were used longest ago, until the others have at most `limit` bytes together.
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
