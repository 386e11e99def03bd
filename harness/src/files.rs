//! Files that commands read and write.
//!
//! What a command writes is there whole or not at all ([`replace`]). A symbolic link is written through: it stays, and
//! what it points to is replaced; so is every other name of the path. An existing file keeps its permissions, and its
//! owner and group where the system lets us; hard links to it keep the old contents. What is no ordinary file
//! (`/dev/stdout`, a pipe) is written to.
//!
//! What a command reads is an ordinary file or what another program pipes in ([`read`]): a named pipe that nobody
//! writes, or a device without end, would keep the command for ever.
//!
//! Errors never name temporary files: they are nobody's but ours. Whoever writes one holds a lock on it, which ends
//! with the process: what killed writers leave can be told from what is being written ([`remove_stale_temporaries`]).

use std::fmt;
use std::fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// Writes the file at `path` by `write`. A file that was there before stays as it is until the new one is on the disk:
/// whatever ends this, an error, a full disk or the end of the process, leaves the old one or the new one.
///
/// # Errors
/// Those of `write`, and what the file system says. A file that may not be written is not replaced either.
pub fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    match Target::of(path)? {
        Target::Stream(stream) => write_buffered(&stream.open()?, write),
        Target::File { path, old } => prepare_at(path, old.as_ref(), write)?.commit(),
    }
}

/// A file that is on the disk, and does not have its name yet. It goes away unless it is committed.
pub struct Prepared {
    temporary: tempfile::NamedTempFile,
    path: PathBuf,
}

impl Prepared {
    /// Gives the file its name, in the place of what had it before, at once.
    ///
    /// # Errors
    /// What the file system says.
    pub fn commit(self) -> io::Result<()> {
        self.temporary.persist(&self.path).map_err(|error| error.error)?;
        sync_folder(folder_of(&self.path))
    }
}

/// The first half of [`replace`], for an ordinary file. A symbolic link is not written through: the file takes its
/// place.
///
/// # Errors
/// As there; also what is no ordinary file.
pub fn prepare(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<Prepared> {
    let old = match fs::symlink_metadata(path) {
        Ok(old) if old.is_file() => Some(old),
        Ok(old) if old.is_symlink() => None,
        Ok(old) => return Err(not_a_file(old.file_type())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    prepare_at(path.to_path_buf(), old.as_ref(), write)
}

fn prepare_at(
    path: PathBuf,
    old: Option<&Metadata>,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<Prepared> {
    let temporary = temporary(&path, old)?;
    write_buffered(temporary.as_file(), write)?;
    temporary.as_file().sync_all()?;
    Ok(Prepared { temporary, path })
}

/// Sees to it that new and changed names of a folder are on the disk. A folder that we may write and not read cannot be
/// asked for that.
///
/// # Errors
/// What the file system says.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder) {
        Ok(folder) => folder.sync_all(),
        Err(_) => Ok(()),
    }
}

/// Removes the temporary files of writers that were killed from a folder. Those of living writers stay, and those of
/// other users.
///
/// # Errors
/// What the file system says; one that has no locks.
pub fn remove_stale_temporaries(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()) || !entry.file_type()?.is_file() {
            continue;
        }
        // Held until the name is gone: its writer looks whether it still is there when it has the lock.
        // For writing: a lock of ours alone is one to write for NFS.
        let Ok(file) = OpenOptions::new().write(true).open(entry.path()) else { continue };
        match file.try_lock() {
            Ok(()) => fs::remove_file(entry.path())?,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(())
}

/// Puts an empty file into a folder, by which others see whether theirs is the same. It goes with what is returned; if
/// this process is killed, it is a leftover ([`remove_stale_temporaries`]).
///
/// # Errors
/// What the file system says.
pub fn create_marker(folder: &Path, number: u64) -> io::Result<tempfile::TempPath> {
    let path = folder.join(marker_name(number));
    File::create_new(&path)?;
    tempfile::TempPath::try_from_path(path)
}

/// Whether the mark of this number is in a folder.
pub fn has_marker(folder: &Path, number: u64) -> bool {
    folder.join(marker_name(number)).exists()
}

fn marker_name(number: u64) -> String {
    format!("{PREFIX}{number:016x}")
}

/// Bytes that the file system of a folder has left for this user.
///
/// # Errors
/// What the file system says.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let name = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the name is a string that ends with a zero, and the call fills what it is given when it returns 0.
    let found = unsafe {
        if libc::statvfs(name.as_ptr(), found.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        found.assume_init()
    };
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Finds out, before hours of work, whether [`replace`] could write a file at `path` now.
///
/// # Errors
/// What the file system says against it.
pub fn check_writable(path: &Path) -> io::Result<()> {
    match Target::of(path)? {
        // Whoever reads a pipe would take this for the end.
        Target::Stream(_) => Ok(()),
        Target::File { path, old } => temporary(&path, old.as_ref()).map(drop),
    }
}

/// Opens a file to append to; it is made where there is none.
///
/// # Errors
/// What the file system says.
pub fn append(path: &Path) -> io::Result<File> {
    match Target::of(path)? {
        Target::Stream(stream) => stream.open(),
        Target::File { path, .. } => OpenOptions::new().create(true).append(true).open(path),
    }
}

fn write_buffered(file: &File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut buffered = BufWriter::with_capacity(1 << 20, file);
    write(&mut buffered)?;
    buffered.flush()
}

/// What a path to write means.
enum Target {
    /// A file that is or will be at this path, which is no link.
    File { path: PathBuf, old: Option<Metadata> },
    /// Something that is written to.
    Stream(Stream),
}

enum Stream {
    /// One that this process has open: another one on the same file would have a place of its own in it.
    Open(i32),
    Path(PathBuf),
}

impl Target {
    fn of(path: &Path) -> io::Result<Target> {
        let last = resolve_links(path)?;
        if let Some(descriptor) = own_descriptor(&last) {
            return Ok(Target::Stream(Stream::Open(descriptor)));
        }
        match fs::metadata(&last) {
            Ok(old) if old.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(old) if old.is_file() => {
                OpenOptions::new().write(true).open(&last)?;
                Ok(Target::File { path: last, old: Some(old) })
            }
            Ok(_) => Ok(Target::Stream(Stream::Path(last))),
            Err(error) if error.kind() == io::ErrorKind::NotFound && last.file_name().is_some() => {
                Ok(Target::File { path: last, old: None })
            }
            Err(error) => Err(error),
        }
    }
}

impl Stream {
    fn open(&self) -> io::Result<File> {
        match self {
            Stream::Open(descriptor) => {
                // SAFETY: /proc says that it is open, and nothing here closes descriptors of others; the clone is ours.
                let borrowed = unsafe { BorrowedFd::borrow_raw(*descriptor) };
                Ok(borrowed.try_clone_to_owned()?.into())
            }
            // Without waiting for a reader: a pipe that nobody reads is an error.
            Stream::Path(path) => blocking(OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path)?),
        }
    }
}

/// Where a path leads when the links at its end are followed, whether or not something is there.
fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..40 {
        match fs::read_link(&path) {
            // A link of /proc says what is open in words that may be no path.
            Ok(_) if own_descriptor(&path).is_some() => return Ok(path),
            Ok(to) => path = folder_of(&path).join(to),
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// The number in `/proc/self/fd/N`, by whatever name that folder goes (`/dev/fd`).
fn own_descriptor(path: &Path) -> Option<i32> {
    let number: i32 = path.file_name()?.to_str()?.parse().ok().filter(|n| *n >= 0)?;
    let own = fs::canonicalize("/proc/self/fd").ok()?;
    let folder = fs::canonicalize(folder_of(path)).ok()?;
    (folder == own && fs::symlink_metadata(path).is_ok()).then_some(number)
}

/// The same file, with reads and writes that wait.
fn blocking(file: File) -> io::Result<File> {
    // SAFETY: the descriptor is open as long as `file`.
    let set = unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        flags >= 0 && libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) >= 0
    };
    if set { Ok(file) } else { Err(io::Error::last_os_error()) }
}

/// How names of temporary files begin.
const PREFIX: &str = ".tilewright-";

/// An empty file beside `path`, which goes away unless it is renamed, with the permissions of the old one, and locked.
fn temporary(path: &Path, old: Option<&Metadata>) -> io::Result<tempfile::NamedTempFile> {
    loop {
        let made = unlocked(path, old)?;
        match made.as_file().try_lock() {
            // Somebody took it for a leftover, or is about to.
            Err(TryLockError::WouldBlock) => continue,
            Ok(()) if made.as_file().metadata()?.nlink() == 0 => continue,
            // A file system without locks: nobody can take it for a leftover.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(made),
        }
    }
}

fn unlocked(path: &Path, old: Option<&Metadata>) -> io::Result<tempfile::NamedTempFile> {
    // Of a new file, what everyone may do who may do it to files of this user: temporary files are private otherwise.
    let mode = if old.is_some() { 0o600 } else { 0o666 };
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).permissions(Permissions::from_mode(mode));
    let made = builder.tempfile_in(folder_of(path)).map_err(|error| {
        io::Error::new(error.kind(), format!("no file can be made in its folder: {}", without_temporary_name(&error)))
    })?;
    if let Some(old) = old {
        let permissions = kept_permissions(made.as_file(), old)?;
        made.as_file().set_permissions(permissions)?;
    }
    Ok(made)
}

/// The permissions of `old`, for a new file that takes its place, after owner and group if the system lets us keep
/// them. What a group may do that it cannot keep is dropped: it was said of another group.
fn kept_permissions(new: &File, old: &Metadata) -> io::Result<Permissions> {
    let made = new.metadata()?;
    let mut mode = old.mode() & 0o777;
    let keep = |uid, gid| fchown(new, uid, gid).is_ok();
    let same = (made.uid(), made.gid()) == (old.uid(), old.gid());
    if !same && !keep(Some(old.uid()), Some(old.gid())) && made.gid() != old.gid() && !keep(None, Some(old.gid())) {
        mode &= 0o707;
    }
    Ok(Permissions::from_mode(mode))
}

/// The folder that a path is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    }
}

/// Two paths of a command that are one file.
#[derive(Debug, PartialEq, Eq)]
pub struct Clash {
    output: PathBuf,
    other: PathBuf,
    is_input: bool,
}

impl std::error::Error for Clash {}

impl fmt::Display for Clash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Clash { output, other, is_input } = self;
        let (output, other) = (output.display(), other.display());
        match is_input {
            true => write!(f, "cannot write {output}: it is the file that is read as {other}"),
            false => write!(f, "cannot write {output}: it is the file that is written as {other} too"),
        }
    }
}

/// Fails where a command would write a file that it reads, or one file twice, under whatever names: links, other
/// spellings. What is no ordinary file may be named as often as one likes.
///
/// # Errors
/// The first two paths that are one file.
pub fn check_distinct(outputs: &[&Path], inputs: &[&Path]) -> Result<(), Clash> {
    let mut seen: Vec<(Identity, &Path, bool)> = Vec::new();
    for (path, is_input) in inputs.iter().map(|path| (*path, true)).chain(outputs.iter().map(|path| (*path, false))) {
        let Some(identity) = Identity::of(path) else { continue };
        let same = seen.iter().find(|(other, ..)| !is_input && *other == identity);
        if let Some((_, other, is_input)) = same {
            return Err(Clash { output: path.to_path_buf(), other: other.to_path_buf(), is_input: *is_input });
        }
        seen.push((identity, path, is_input));
    }
    Ok(())
}

/// What makes two paths one ordinary file.
#[derive(PartialEq)]
enum Identity {
    /// Device and number of the file that is there.
    There(u64, u64),
    /// Folder and name of one that is not there yet.
    New(PathBuf),
}

impl Identity {
    fn of(path: &Path) -> Option<Identity> {
        match fs::metadata(path) {
            Ok(found) => found.is_file().then(|| Identity::There(found.dev(), found.ino())),
            Err(_) => {
                let path = resolve_links(path).ok()?;
                Some(Identity::New(fs::canonicalize(folder_of(&path)).ok()?.join(path.file_name()?)))
            }
        }
    }
}

/// The contents of a file, or of a pipe that another program writes (`/dev/stdin`).
///
/// # Errors
/// What the file system says; a folder, a named pipe or a device; no memory for the contents.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut contents = Vec::new();
    open(path)?.read_to_end(&mut contents)?;
    Ok(contents)
}

/// As [`read`], for text.
///
/// # Errors
/// As there; also bytes that are no UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        io::Error::new(io::ErrorKind::InvalidData, format!("byte {place} is no UTF-8 text"))
    })
}

fn open(path: &Path) -> io::Result<File> {
    let file = open_now(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    if kind.is_fifo() && is_anonymous(&file) {
        return blocking(file);
    }
    Err(not_a_file(kind))
}

/// Opens what is at `path`, for reading. Opening a named pipe would wait for whoever writes it otherwise.
fn open_now(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(|error| {
        // A socket cannot be opened: of what it says, nobody would guess that.
        let kind = fs::metadata(path).map(|found| found.file_type());
        kind.ok().filter(FileTypeExt::is_socket).map_or(error, not_a_file)
    })
}

/// Opens an ordinary file, which can be read in any order.
///
/// # Errors
/// As [`read`]; also pipes of all kinds.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let file = open_now(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() { Ok(file) } else { Err(not_a_file(kind)) }
}

/// The contents of an ordinary file that nobody writes meanwhile.
///
/// # Errors
/// As [`open_regular`]; a file that changes while it is read; too little memory for it.
pub fn read_unchanged(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open_regular(path)?;
    let before = Version::of(&file)?;
    tilewright::check_host_memory(before.len as f64).map_err(io::Error::other)?;
    let mut contents = Vec::with_capacity(before.len as usize);
    // One that grows without end has an end here.
    (&mut file).take(before.len.saturating_add(1)).read_to_end(&mut contents)?;
    before.check(&file)?;
    // It may have changed and changed back.
    if contents.len() as u64 != before.len { Err(changed()) } else { Ok(contents) }
}

/// What a file's contents have, as far as its length and the time of its last change say.
#[derive(Clone, Copy, PartialEq)]
pub struct Version {
    len: u64,
    modified: (i64, i64),
}

impl Version {
    /// That of an open file now.
    ///
    /// # Errors
    /// What the file system says.
    pub fn of(file: &File) -> io::Result<Version> {
        let found = file.metadata()?;
        Ok(Version { len: found.len(), modified: (found.mtime(), found.mtime_nsec()) })
    }

    /// Fails where the file has another one now.
    ///
    /// # Errors
    /// It has, and what the file system says.
    pub fn check(self, file: &File) -> io::Result<()> {
        if Version::of(file)? == self { Ok(()) } else { Err(changed()) }
    }
}

fn changed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it was changed while it was read")
}

/// The error of a path where something else than a file is.
pub(crate) fn not_a_file(kind: fs::FileType) -> io::Error {
    let what = match kind {
        kind if kind.is_dir() => "it is a folder, expected a file",
        kind if kind.is_fifo() => "it is a pipe, expected a file",
        kind if kind.is_socket() => "it is a socket, expected a file",
        _ => "it is a device, expected a file",
    };
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Whether a pipe has no name: then a program had it open for writing when it was handed to us.
fn is_anonymous(pipe: &File) -> bool {
    /// Of Linux's file system for pipes.
    const PIPEFS_MAGIC: i64 = 0x5049_5045;
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open, and the call fills what it is given when it returns 0.
    let kind = unsafe {
        let status = libc::fstatfs(pipe.as_raw_fd(), found.as_mut_ptr());
        (status == 0).then(|| found.assume_init().f_type)
    };
    kind == Some(PIPEFS_MAGIC)
}

/// A folder that goes away with its handle.
///
/// # Errors
/// What the file system says, with the folder that it would be in.
pub fn temporary_folder() -> io::Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|error| {
        let (why, place) = (without_temporary_name(&error), std::env::temp_dir());
        io::Error::new(error.kind(), format!("no folder can be made in {}: {why}", place.display()))
    })
}

/// What the system said, in an error of the library that also names its temporary file, which nobody asked for.
fn without_temporary_name(error: &io::Error) -> String {
    let text = error.to_string();
    text.split_once(" at path ").map_or(text.as_str(), |(why, _)| why).to_string()
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
