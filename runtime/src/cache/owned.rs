//! Directories and files that only this user can write: the storage of the cache.
//!
//! Compiled code is executed, so it must come from this user. A directory or file is owned by this user if it belongs
//! to the effective user of the process and its mode lets neither group nor others write (an access control list that
//! permits writing shows in the group's bits). Directories are created with mode 0700 and files with mode 0600,
//! whatever the umask.
//!
//! Every check is made on an open descriptor, and paths below a directory are opened relative to its descriptor:
//! nothing can be exchanged between check and use (TOCTOU). Symbolic links are not followed, except above the directory
//! that the caller names. A FIFO, device or socket in place of a file is rejected without waiting for its other end.

use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::process::Resource;

/// The effective user of this process.
pub(crate) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Why a directory or file is not used.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// It does not exist.
    Missing,
    /// Another user may have written it, or it is neither a file nor a directory: the reason, and what to do.
    Refused { reason: String, remedy: String },
    /// The operating system's error.
    Failed(io::Error),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::Missing => f.write_str("it does not exist"),
            Unusable::Refused { reason, remedy } => write!(f, "{reason}: {remedy}"),
            Unusable::Failed(error) => error.fmt(f),
        }
    }
}

impl From<Errno> for Unusable {
    fn from(error: Errno) -> Unusable {
        match error {
            Errno::NOENT => Unusable::Missing,
            other => Unusable::Failed(other.into()),
        }
    }
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Unusable {
        Unusable::Failed(error)
    }
}

/// Why a file or directory of this owner and mode does not count as owned by `user`; `None` if it does.
fn permission_problem(owner: u32, mode: u32, user: u32) -> Option<String> {
    if owner != user {
        return Some(format!("belongs to user {owner}, but this process runs as user {user}"));
    }
    (mode & 0o022 != 0).then(|| format!("can be written by others (mode {:04o})", mode & 0o7777))
}

fn check(stat: &Stat, wanted: FileType, path: &Path, user: u32) -> Result<(), Unusable> {
    let is_folder = wanted == FileType::Directory;
    if FileType::from_raw_mode(stat.st_mode) != wanted {
        return Err(if is_folder { not_a_folder(path) } else { not_a_file(path) });
    }
    let Some(permission_problem) = permission_problem(stat.st_uid, stat.st_mode, user) else { return Ok(()) };
    let remedy = match (is_folder, stat.st_uid == user) {
        (true, false) => "use a directory that you own".to_string(),
        (true, true) => format!("remove files that are not yours, then `chmod 700 {}`", path.display()),
        (false, _) => "remove it".to_string(),
    };
    Err(Unusable::Refused { reason: format!("{} {permission_problem}", path.display()), remedy })
}

fn not_a_folder(path: &Path) -> Unusable {
    let reason = format!("{} is not a directory, or is a symbolic link, which is not followed", path.display());
    Unusable::Refused { reason, remedy: "use the path of the directory itself".into() }
}

fn not_a_file(path: &Path) -> Unusable {
    Unusable::Refused { reason: format!("{} is not a regular file", path.display()), remedy: "remove it".into() }
}

/// An open directory that is owned by this user.
#[derive(Debug)]
pub(crate) struct Folder {
    descriptor: OwnedFd,
    path: PathBuf,
    user: u32,
}

/// Prefix of the names of files that are being written.
pub(crate) const TEMPORARY: &str = ".tmp-";

impl Folder {
    /// Opens the directory at the path components `below` in `root`, one after the other; each must be owned by `user`.
    pub fn open(root: &Path, below: &[&str], user: u32) -> Result<Folder, Unusable> {
        // Without a trailing slash, which would make the system follow a link.
        let root: PathBuf = root.components().collect();
        let mut folder = open_folder(CWD, &root, root.clone(), user)?;
        for name in below {
            folder = folder.child(name)?;
        }
        Ok(folder)
    }

    /// Like [`open`](Folder::open); creates missing directories, including those above `root`. Never
    /// [`Unusable::Missing`].
    pub fn make(root: &Path, below: &[&str], user: u32) -> Result<Folder, Unusable> {
        // Some file systems, such as /proc, return this error for a directory that they cannot create.
        Folder::make_or_open(root, below, user).map_err(|why| match why {
            Unusable::Missing => Unusable::Failed(Errno::NOENT.into()),
            other => other,
        })
    }

    fn make_or_open(root: &Path, below: &[&str], user: u32) -> Result<Folder, Unusable> {
        let root: PathBuf = root.components().collect();
        let mut folder = match open_folder(CWD, &root, root.clone(), user) {
            Err(Unusable::Missing) => {
                make_path(&root)?;
                open_folder(CWD, &root, root.clone(), user)?
            }
            outcome => outcome?,
        };
        for name in below {
            folder = match folder.child(name) {
                Err(Unusable::Missing) => {
                    make_folder(&folder.descriptor, Path::new(name))?;
                    folder.child(name)?
                }
                outcome => outcome?,
            };
        }
        Ok(folder)
    }

    pub fn child(&self, name: &str) -> Result<Folder, Unusable> {
        open_folder(&self.descriptor, Path::new(name), self.path.join(name), self.user)
    }

    /// The directory's path, for messages and for access by path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file of that name for reading.
    pub fn open_file(&self, name: &str) -> Result<File, Unusable> {
        open_file(&self.descriptor, Path::new(name), OFlags::RDONLY, &self.path.join(name), self.user)
    }

    /// Replaces a file atomically by one with these bytes: a reader sees the old file or the new one.
    ///
    /// # Errors
    /// The file system's error. No temporary file is left then.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        check_file_size(bytes.len() as u64)?;
        let temporary = Temporary::new(self)?;
        (&temporary.file).write_all(bytes)?;
        rustix::fs::renameat(&self.descriptor, &temporary.name, &self.descriptor, name)?;
        Ok(())
    }

    /// Tests whether a file can be written in the directory.
    ///
    /// # Errors
    /// The file system's error.
    pub fn check_writable(&self) -> io::Result<()> {
        (&Temporary::new(self)?.file).write_all(b"tilewright")
    }

    /// Names of all files and directories in the directory that are valid UTF-8.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.descriptor)? {
            if let Ok(name) = entry?.file_name().to_str()
                && !matches!(name, "." | "..")
            {
                names.push(name.to_string());
            }
        }
        Ok(names)
    }

    /// Metadata of the file or directory with this name, without following links.
    pub fn stat(&self, name: &str) -> io::Result<Stat> {
        Ok(rustix::fs::statat(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Removes a file.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.descriptor, name, AtFlags::empty())?)
    }
}

/// A file that is being written; dropping it removes the file, unless it was renamed.
struct Temporary<'a> {
    folder: &'a Folder,
    name: String,
    file: File,
}

impl Temporary<'_> {
    fn new(folder: &Folder) -> io::Result<Temporary<'_>> {
        let name = format!("{TEMPORARY}{:016x}", RandomState::new().build_hasher().finish());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let private = Mode::RUSR | Mode::WUSR;
        let file = rustix::fs::openat(&folder.descriptor, &name, flags, private)?;
        let temporary = Temporary { folder, name, file: file.into() };
        rustix::fs::fchmod(&temporary.file, private)?;
        Ok(temporary)
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        let _ = self.folder.remove(&self.name);
    }
}

fn open_folder(at: impl AsFd, name: &Path, path: PathBuf, user: u32) -> Result<Folder, Unusable> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let descriptor = match rustix::fs::openat(at, name, flags, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(not_a_folder(&path)),
        outcome => outcome?,
    };
    check(&rustix::fs::fstat(&descriptor)?, FileType::Directory, &path, user)?;
    Ok(Folder { descriptor, path, user })
}

/// Creates a directory and its missing ancestors.
fn make_path(path: &Path) -> Result<(), Unusable> {
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    path.parent().map_or(Ok(()), make_path)?;
    make_folder(CWD, path)
}

/// Creates a directory, unless another process has just created it.
fn make_folder(at: impl AsFd, name: &Path) -> Result<(), Unusable> {
    match rustix::fs::mkdirat(&at, name, Mode::RWXU) {
        Err(Errno::EXIST) => return Ok(()),
        outcome => outcome?,
    }
    // The umask may have cleared bits of the owner: then the directory cannot be opened for reading, but its path can
    // be used.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(&at, name, flags, Mode::empty())?;
    if rustix::fs::fstat(&made)?.st_mode & 0o777 != 0o700 {
        rustix::fs::chmod(format!("/proc/self/fd/{}", made.as_raw_fd()), Mode::RWXU)?;
    }
    Ok(())
}

fn open_file(at: impl AsFd, name: &Path, flags: OFlags, path: &Path, user: u32) -> Result<File, Unusable> {
    // Without NONBLOCK, opening a FIFO would wait for its other end.
    let always = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let private = Mode::RUSR | Mode::WUSR;
    let descriptor = match rustix::fs::openat(at, name, flags | always, private) {
        Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Err(not_a_file(path)),
        outcome => outcome?,
    };
    check(&rustix::fs::fstat(&descriptor)?, FileType::RegularFile, path, user)?;
    Ok(descriptor.into())
}

/// Opens the file at `path` for reading; its directory may belong to any user.
pub(crate) fn open(path: &Path, user: u32) -> Result<File, Unusable> {
    open_file(CWD, path, OFlags::RDONLY, path, user)
}

/// Opens the file at `path` for [`append`]; creates it and its directory if `make` is set.
pub(crate) fn open_to_append(path: &Path, make: bool, user: u32) -> Result<File, Unusable> {
    let flags = OFlags::WRONLY | OFlags::APPEND;
    if !make {
        return open_file(CWD, path, flags, path, user);
    }
    path.parent().map_or(Ok(()), make_path)?;
    let file = open_file(CWD, path, flags | OFlags::CREATE, path, user)?;
    // As for directories, the umask may have cleared bits of the owner.
    if rustix::fs::fstat(&file)?.st_mode & 0o600 != 0o600 {
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    }
    Ok(file)
}

/// Appends a text to a file and syncs it to disk.
///
/// # Errors
/// The file system's error.
pub(crate) fn append(mut file: &File, text: &str) -> io::Result<()> {
    check_file_size(file.metadata()?.len().saturating_add(text.len() as u64))?;
    file.write_all(text.as_bytes())?;
    file.sync_data()
}

/// All bytes of a file of at most `limit` bytes.
///
/// # Errors
/// The file system's error, and a larger file.
pub(crate) fn read(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    if file.metadata()?.len() > limit {
        return Err(Errno::FBIG.into());
    }
    let mut bytes = Vec::new();
    // The file may be growing.
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Rejects files beyond the file size limit of the process (`ulimit -f`): writing there would end it with SIGXFSZ.
pub(crate) fn check_file_size(bytes: u64) -> io::Result<()> {
    match rustix::process::getrlimit(Resource::Fsize).current {
        Some(limit) if bytes > limit => Err(Errno::FBIG.into()),
        Some(_) | None => Ok(()),
    }
}
