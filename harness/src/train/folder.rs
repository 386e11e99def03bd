//! The folder of a run, and its lock.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{Error, Result, keep};

/// The lock file.
pub const LOCK: &str = "run.lock";
/// Maximum bytes of the lock file that are shown.
const MAX_HOLDER_BYTES: u64 = 300;

/// A run's locked folder: no other process, and no other caller in this one, can lock it while this is alive. The lock
/// ends with the process. A killed process leaves only the file, which names it.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// `None` on a file system without locks.
    lock: Option<File>,
    /// Whether the folder was created here.
    created: bool,
}

impl RunFolder {
    /// Creates the folder if it does not exist, locks it, and removes files of killed writers: temporary files, and
    /// shards of checkpoints that were not committed.
    ///
    /// # Errors
    /// Another run that holds the lock, with its process and host; errors of the file system.
    pub fn lock(path: &Path) -> Result<RunFolder> {
        let created = create(path).map_err(Error::file("create", path))?;
        let place = path.join(LOCK);
        let lock = loop {
            let mut options = OpenOptions::new();
            // Does not follow a link, since the file's contents are overwritten.
            options
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
            let opened = options.open(&place);
            let file = opened.map_err(Error::file("lock", &place))?;
            let kind = file.metadata().map_err(Error::file("lock", &place))?.file_type();
            if !kind.is_file() {
                return Err(Error::file("lock", &place)(crate::files::not_a_file(kind)));
            }
            match file.try_lock() {
                // The previous holder removes the file when it is done.
                Ok(()) if !is_at(&file, &place) => continue,
                Ok(()) => break Some(file),
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::Locked { folder: path.to_path_buf(), holder: holder(&place) });
                }
                Err(TryLockError::Error(error)) => {
                    tracing::warn!(
                        "{} cannot be locked ({error}): a second run with the same --out is not detected",
                        path.display()
                    );
                    break None;
                }
            }
        };
        let mut folder = RunFolder { path: path.to_path_buf(), lock, created };
        if let Some(file) = &mut folder.lock {
            // First, since these files may be what fills the disk.
            if let Err(error) = crate::files::remove_stale_temporaries(path) {
                tracing::warn!("temporary files of killed runs remain in {}: {error}", path.display());
            }
            if let Err(error) = keep::remove_stale_shards(path) {
                tracing::warn!("unused moments of checkpoints may remain in {}: {error}", path.display());
            }
            write_holder(file).map_err(Error::file("write", &place))?;
        }
        Ok(folder)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fails if the folder or its lock file was removed or replaced: another run may have started in it.
    ///
    /// # Errors
    /// Names the folder.
    pub fn check(&self) -> Result<()> {
        match self.lock.as_ref().is_none_or(|file| is_at(file, &self.path.join(LOCK))) {
            true => Ok(()),
            false => Err(Error::LockLost { folder: self.path.clone() }),
        }
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        let place = self.path.join(LOCK);
        if self.lock.as_ref().is_some_and(|file| is_at(file, &place)) {
            // Before the lock is released: a process that has opened the file sees that it is removed.
            let _ = fs::remove_file(place);
        }
        if self.created {
            // Removes an empty folder; a folder with files stays.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Creates a folder and its missing ancestors; returns whether any was missing. The new names are synchronized to the
/// disk.
fn create(path: &Path) -> std::io::Result<bool> {
    let missing = missing_ancestors(path);
    fs::create_dir_all(path)?;
    missing.iter().try_for_each(|folder| crate::files::sync_folder(crate::files::folder_of(folder)))?;
    Ok(!missing.is_empty())
}

/// A path and its ancestors that do not exist, innermost first.
fn missing_ancestors(path: &Path) -> Vec<&Path> {
    path.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists()).collect()
}

/// Whether the file at `path` is `file`.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(own), Ok(there)) => (own.dev(), own.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

fn write_holder(file: &mut File) -> std::io::Result<()> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    file.set_len(0)?;
    file.write_all(format!("process {} on host {}", std::process::id(), host.trim()).as_bytes())
}

/// The holder of the lock, according to the file.
fn holder(place: &Path) -> String {
    let mut text = Vec::new();
    let read = File::open(place).and_then(|file| file.take(MAX_HOLDER_BYTES).read_to_end(&mut text));
    match read {
        Ok(len) if len > 0 => String::from_utf8_lossy(&text).into_owned(),
        _ => format!("an unknown process ({LOCK} is empty or unreadable)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_run_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/on demand");
        let first = RunFolder::lock(&path).unwrap();
        let message = RunFolder::lock(&path).unwrap_err().to_string();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        for part in
            ["another run", "on demand", &format!("process {} on host {}", std::process::id(), host.trim()), "--out"]
        {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
        drop(first);
        assert!(!path.exists(), "nothing is left");
        fs::create_dir(&path).unwrap();
        // The file of a killed run exists, and is not locked.
        fs::write(path.join(LOCK), "process 1 on host \u{1b}[2J").unwrap();
        let second = RunFolder::lock(&path).unwrap();
        fs::write(path.join(LOCK), "process 1 on host \u{1b}[2J").unwrap();
        let message = RunFolder::lock(&path).unwrap_err().to_string();
        assert!(message.contains(r"\u{1b}[2J") && !message.contains('\u{1b}'), "{message}");
        drop(second);
        RunFolder::lock(&path).unwrap();
    }

    /// New ancestors are the ones that are synchronized.
    #[test]
    fn new_ancestors_are_synchronized() {
        let dir = tempfile::tempdir().unwrap();
        let (outer, inner) = (dir.path().join("a"), dir.path().join("a/b"));
        assert_eq!(missing_ancestors(&inner), [inner.as_path(), &outer]);
        assert!(create(&inner).unwrap() && inner.is_dir());
        assert!(missing_ancestors(&inner).is_empty() && !create(&inner).unwrap());
        assert_eq!(missing_ancestors(Path::new("no such folder/b")).len(), 2);
    }

    #[test]
    fn a_link_in_the_place_of_the_lock_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "another file").unwrap();
        std::os::unix::fs::symlink(&other, dir.path().join(LOCK)).unwrap();
        let message = RunFolder::lock(dir.path()).unwrap_err().to_string();
        assert!(message.contains("cannot lock") && message.contains(LOCK), "{message}");
        assert_eq!(fs::read(&other).unwrap(), b"another file");
    }

    #[test]
    fn a_pipe_in_the_place_of_the_lock_stays() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join(LOCK);
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a NUL byte.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let message = RunFolder::lock(dir.path()).unwrap_err().to_string();
        assert!(message.contains("it is a pipe, expected a file"), "{message}");
        assert!(pipe.exists());
    }

    #[test]
    fn concurrent_locks_are_exclusive() {
        let dir = tempfile::tempdir().unwrap();
        let inside = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        if let Ok(_folder) = RunFolder::lock(dir.path()) {
                            assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                            inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        }
                    }
                });
            }
        });
    }
}
