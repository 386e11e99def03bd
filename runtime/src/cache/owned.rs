//! Folders and files that nobody but this user can write: what the cache is made of.
//!
//! Compiled code is run, so it has to come from this user. A folder or file counts as this user's own if it belongs to the
//! effective user of the process and its mode lets neither group nor others write (an access control list that lets somebody
//! write shows in the group's bits). Folders are made with mode 0700 and files with mode 0600, whatever the umask.
//!
//! Every check is made on an open descriptor, and what is below a folder is opened relative to its descriptor: nothing can
//! be exchanged between check and use. Symbolic links are not followed, except above the folder that the caller names. A
//! FIFO, device or socket in place of a file is refused without waiting for its other end.

use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::process::Resource;

/// The user that this process acts for.
pub(crate) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Why a folder or file is not used.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// It is not there.
    Missing,
    /// Somebody else may have written it, or it is no folder or file at all: the reason, and what to do about it.
    Refused { reason: String, remedy: String },
    /// The operating system's error.
    Failed(io::Error),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::Missing => f.write_str("it is not there"),
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

/// What speaks against something of this owner and mode as `user`'s own.
fn objection(owner: u32, mode: u32, user: u32) -> Option<String> {
    if owner != user {
        return Some(format!("belongs to user {owner}, and this process acts for user {user}"));
    }
    (mode & 0o022 != 0).then(|| format!("can be written by others (mode {:04o})", mode & 0o7777))
}

fn check(stat: &Stat, wanted: FileType, path: &Path, user: u32) -> Result<(), Unusable> {
    let is_folder = wanted == FileType::Directory;
    if FileType::from_raw_mode(stat.st_mode) != wanted {
        return Err(if is_folder { no_folder(path) } else { no_file(path) });
    }
    let Some(objection) = objection(stat.st_uid, stat.st_mode, user) else { return Ok(()) };
    let remedy = match (is_folder, stat.st_uid == user) {
        (true, false) => "use a folder of your own".to_string(),
        (true, true) => format!("remove what you did not put there, then `chmod 700 {}`", path.display()),
        (false, _) => "remove it".to_string(),
    };
    Err(Unusable::Refused { reason: format!("{} {objection}", path.display()), remedy })
}

fn no_folder(path: &Path) -> Unusable {
    let reason = format!("{} is no folder, or a symbolic link, which is not followed", path.display());
    Unusable::Refused { reason, remedy: "name the folder itself".into() }
}

fn no_file(path: &Path) -> Unusable {
    Unusable::Refused { reason: format!("{} is no regular file", path.display()), remedy: "remove it".into() }
}

/// An open folder of this user's own.
#[derive(Debug)]
pub(crate) struct Folder {
    descriptor: OwnedFd,
    path: PathBuf,
    user: u32,
}

/// Names of files that are being written begin so.
pub(crate) const TEMPORARY: &str = ".tmp-";

impl Folder {
    /// The folder `below` the folder `root`, one name after the other; each of them has to be `user`'s own.
    pub fn open(root: &Path, below: &[&str], user: u32) -> Result<Folder, Unusable> {
        // Without a slash at the end, which would have a link followed.
        let root: PathBuf = root.components().collect();
        let mut folder = open_folder(CWD, &root, root.clone(), user)?;
        for name in below {
            folder = folder.child(name)?;
        }
        Ok(folder)
    }

    /// As [`open`](Folder::open); makes what is missing, folders above `root` too. Never [`Unusable::Missing`].
    pub fn make(root: &Path, below: &[&str], user: u32) -> Result<Folder, Unusable> {
        // Some file systems, such as /proc, say so of what they cannot make.
        let is_there = |why| if matches!(why, Unusable::Missing) { Unusable::Failed(Errno::NOENT.into()) } else { why };
        Folder::make_or_open(root, below, user).map_err(is_there)
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

    /// Where it is, for messages and for those who go there by themselves.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file of that name, for reading.
    pub fn open_file(&self, name: &str) -> Result<File, Unusable> {
        open_file(&self.descriptor, Path::new(name), OFlags::RDONLY, &self.path.join(name), self.user)
    }

    /// Puts a file with these bytes in its place at once: whoever reads sees the file before or this one.
    ///
    /// # Errors
    /// What the file system says. Nothing is left then.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        check_file_size(bytes.len() as u64)?;
        let temporary = Temporary::new(self)?;
        (&temporary.file).write_all(bytes)?;
        rustix::fs::renameat(&self.descriptor, &temporary.name, &self.descriptor, name)?;
        Ok(())
    }

    /// Tries whether something can be written.
    ///
    /// # Errors
    /// What the file system says.
    pub fn check_writable(&self) -> io::Result<()> {
        (&Temporary::new(self)?.file).write_all(b"tilewright")
    }

    /// The names of everything in it that have text.
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

    /// What the file system says of a name in it, links not followed.
    pub fn stat(&self, name: &str) -> io::Result<Stat> {
        Ok(rustix::fs::statat(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Removes what is not a folder.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.descriptor, name, AtFlags::empty())?)
    }
}

/// A file that is being written; dropping it removes it, unless it was renamed.
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
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(no_folder(&path)),
        outcome => outcome?,
    };
    check(&rustix::fs::fstat(&descriptor)?, FileType::Directory, &path, user)?;
    Ok(Folder { descriptor, path, user })
}

/// Makes a folder and those above it that are missing.
fn make_path(path: &Path) -> Result<(), Unusable> {
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    path.parent().map_or(Ok(()), make_path)?;
    make_folder(CWD, path)
}

/// Makes a folder, unless another process has just done so.
fn make_folder(at: impl AsFd, name: &Path) -> Result<(), Unusable> {
    match rustix::fs::mkdirat(&at, name, Mode::RWXU) {
        Err(Errno::EXIST) => return Ok(()),
        outcome => outcome?,
    }
    // The umask may have taken bits of the owner: then the folder cannot be opened for reading, but it can be named.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(&at, name, flags, Mode::empty())?;
    if rustix::fs::fstat(&made)?.st_mode & 0o777 != 0o700 {
        rustix::fs::chmod(format!("/proc/self/fd/{}", made.as_raw_fd()), Mode::RWXU)?;
    }
    Ok(())
}

fn open_file(at: impl AsFd, name: &Path, flags: OFlags, path: &Path, user: u32) -> Result<File, Unusable> {
    // Without NONBLOCK, a FIFO would wait for somebody at its other end.
    let always = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let private = Mode::RUSR | Mode::WUSR;
    let descriptor = match rustix::fs::openat(at, name, flags | always, private) {
        Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Err(no_file(path)),
        outcome => outcome?,
    };
    check(&rustix::fs::fstat(&descriptor)?, FileType::RegularFile, path, user)?;
    Ok(descriptor.into())
}

/// The file at `path`, for reading; the folder that it is in may be anyone's.
pub(crate) fn open(path: &Path, user: u32) -> Result<File, Unusable> {
    open_file(CWD, path, OFlags::RDONLY, path, user)
}

/// The file at `path`, for [`append`]; it is made if `make` says so, with the folder that it is in.
pub(crate) fn open_to_append(path: &Path, make: bool, user: u32) -> Result<File, Unusable> {
    let flags = OFlags::WRONLY | OFlags::APPEND;
    if !make {
        return open_file(CWD, path, flags, path, user);
    }
    path.parent().map_or(Ok(()), make_path)?;
    let file = open_file(CWD, path, flags | OFlags::CREATE, path, user)?;
    // As of folders, the umask may have taken bits of the owner.
    if rustix::fs::fstat(&file)?.st_mode & 0o600 != 0o600 {
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    }
    Ok(file)
}

/// Adds a text to a file, on the disk before this returns.
///
/// # Errors
/// What the file system says.
pub(crate) fn append(mut file: &File, text: &str) -> io::Result<()> {
    check_file_size(file.metadata()?.len().saturating_add(text.len() as u64))?;
    file.write_all(text.as_bytes())?;
    file.sync_data()
}

/// All bytes of a file that has at most `limit`.
///
/// # Errors
/// What the file system says, and a file that is larger.
pub(crate) fn read(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    if file.metadata()?.len() > limit {
        return Err(Errno::FBIG.into());
    }
    let mut bytes = Vec::new();
    // It may be growing.
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Refuses files beyond the limit of the process (`ulimit -f`): writing there would end it with SIGXFSZ.
pub(crate) fn check_file_size(bytes: u64) -> io::Result<()> {
    match rustix::process::getrlimit(Resource::Fsize).current {
        Some(limit) if bytes > limit => Err(Errno::FBIG.into()),
        Some(_) | None => Ok(()),
    }
}
