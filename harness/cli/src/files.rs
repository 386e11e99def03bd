//! Reading and writing of files by commands.
//!
//! Output files are replaced atomically ([`replace`]). Symbolic links are followed: the link stays and its target is
//! replaced. An existing file keeps its permissions, and its owner and group if the system permits it; hard links to it
//! keep the old contents. Paths that are not regular files (`/dev/stdout`, a pipe) are written in place.
//!
//! Input files are regular files or anonymous pipes ([`read`]): a named pipe without a writer, or an endless device,
//! would block forever.
//!
//! Errors never name temporary files. Writers hold a lock on their temporary files, which ends with the process, so
//! that files of killed writers can be distinguished from files in use ([`remove_stale_temporaries`]).

use std::fmt;
use std::fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// Writes the file at `path` by `write`. An existing file stays unchanged until the new one is on the disk: an error, a
/// full disk or the end of the process leaves either the old or the new file.
///
/// # Errors
/// Errors of `write` and of the file system. A file without write permission is not replaced either.
pub fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    match Target::of(path)? {
        Target::Stream(stream) => write_buffered(&stream.open()?, write),
        Target::File { path, old } => prepare_at(path, old.as_ref(), write)?.commit(),
    }
}

/// A file on the disk that does not have its final name yet. It is removed unless it is committed.
pub struct Prepared {
    temporary: tempfile::NamedTempFile,
    path: PathBuf,
}

impl Prepared {
    /// Renames the file to its final name, and atomically replaces an existing file.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn commit(self) -> io::Result<()> {
        self.temporary.persist(&self.path).map_err(|error| error.error)?;
        sync_folder(folder_of(&self.path))
    }
}

/// The first half of [`replace`], for a regular file. Symbolic links are not followed: the file replaces the link.
///
/// # Errors
/// See [`replace`]; also a path that is not a regular file.
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

/// Synchronizes the names in a folder to the disk. Does nothing for a folder without read permission.
///
/// # Errors
/// Errors of the file system.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder) {
        Ok(folder) => folder.sync_all(),
        Err(_) => Ok(()),
    }
}

/// Removes temporary files of killed writers from a folder. Files of living writers and of other users stay.
///
/// # Errors
/// Errors of the file system; one without locks.
pub fn remove_stale_temporaries(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()) || !entry.file_type()?.is_file() {
            continue;
        }
        // Held until the name is removed: a writer that gets the lock checks whether the file still exists. Opened for
        // writing, since NFS requires it for an exclusive lock.
        let Ok(file) = OpenOptions::new().write(true).open(entry.path()) else { continue };
        match file.try_lock() {
            Ok(()) => fs::remove_file(entry.path())?,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(())
}

/// Creates an empty marker file in a folder, by which other ranks see whether they use the same folder. It is removed
/// when the returned value is dropped; after a kill [`remove_stale_temporaries`] removes it.
///
/// # Errors
/// Errors of the file system.
pub fn create_marker(folder: &Path, number: u64) -> io::Result<tempfile::TempPath> {
    let path = folder.join(marker_name(number));
    File::create_new(&path)?;
    tempfile::TempPath::try_from_path(path)
}

/// Whether the folder has the marker file with this number.
pub fn has_marker(folder: &Path, number: u64) -> bool {
    folder.join(marker_name(number)).exists()
}

fn marker_name(number: u64) -> String {
    format!("{PREFIX}{number:016x}")
}

/// Bytes that this user may still write to the folder's file system.
///
/// # Errors
/// Errors of the file system.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let name = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the name ends with a NUL byte, and the call initializes the struct when it returns 0.
    let found = unsafe {
        if libc::statvfs(name.as_ptr(), found.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        found.assume_init()
    };
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Checks early whether [`replace`] could write a file at `path`.
///
/// # Errors
/// Errors of the file system.
pub fn check_writable(path: &Path) -> io::Result<()> {
    match Target::of(path)? {
        // Opening and closing a pipe would signal its end to the reader.
        Target::Stream(_) => Ok(()),
        Target::File { path, old } => temporary(&path, old.as_ref()).map(drop),
    }
}

/// Checks early whether a folder can be created, or files in it if it exists. Creates neither.
///
/// # Errors
/// Errors of the file system; a path that is not a folder.
pub fn check_folder(folder: &Path) -> io::Result<()> {
    // The nearest ancestor that exists decides.
    for ancestor in folder.ancestors() {
        let ancestor = if ancestor.as_os_str().is_empty() { Path::new(".") } else { ancestor };
        match fs::metadata(ancestor) {
            Ok(found) if found.is_dir() => return temporary(&ancestor.join("new"), None).map(drop),
            Ok(_) => return Err(io::ErrorKind::NotADirectory.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Whether a path is written in place, since it exists and is not a regular file: a pipe, a device or a descriptor.
pub fn is_stream(path: &Path) -> bool {
    matches!(Target::of(path), Ok(Target::Stream(_)))
}

/// Whether a path is the standard output of this process: `/dev/stdout`, where a report would mix with the file.
pub fn is_stdout(path: &Path) -> bool {
    matches!(Target::of(path), Ok(Target::Stream(Stream::Open(libc::STDOUT_FILENO))))
}

/// Opens a file for appending lines; creates it if it does not exist. Ends its last line, which a program may have left unfinished.
///
/// # Errors
/// Errors of the file system.
pub fn append(path: &Path) -> io::Result<File> {
    let path = match Target::of(path)? {
        Target::Stream(stream) => return stream.open(),
        Target::File { path, .. } => path,
    };
    let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
    // Without the permission to read, lines are as they are.
    let mut last = [b'\n'];
    if let Ok(mut old) = File::open(&path)
        && old.seek(SeekFrom::End(-1)).is_ok()
    {
        old.read_exact(&mut last)?;
    }
    if last != [b'\n'] {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

/// As [`append`], for rows of measurements as JSON lines.
///
/// # Errors
/// As [`append`]; a file that begins with something else, which stays unchanged.
pub fn append_rows(path: &Path) -> io::Result<File> {
    if let Target::File { path, old: Some(_) } = Target::of(path)?
        && let Ok(file) = File::open(path)
    {
        let mut first = String::new();
        let read = BufReader::new(file.take(1 << 20)).read_line(&mut first);
        let row = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&first);
        // Other files of one line, such as tuning tables, name their format.
        let is_row = row.is_ok_and(|row| !row.contains_key("format"));
        if read.is_err() || !(is_row || first.trim().is_empty()) {
            return Err(io::Error::other("it has no rows of measurements: name a new file, or one of such rows"));
        }
    }
    append(path)
}

fn write_buffered(file: &File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut buffered = BufWriter::with_capacity(1 << 20, file);
    write(&mut buffered)?;
    buffered.flush()
}

/// What an output path refers to.
enum Target {
    /// A regular file that exists or will be created at this path, which is not a link.
    File { path: PathBuf, old: Option<Metadata> },
    /// A path that is written in place.
    Stream(Stream),
}

enum Stream {
    /// A descriptor of this process: opening the file again would give another file offset.
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
                // SAFETY: /proc shows that it is open, and nothing here closes other code's descriptors; the clone is
                // owned.
                let borrowed = unsafe { BorrowedFd::borrow_raw(*descriptor) };
                Ok(borrowed.try_clone_to_owned()?.into())
            }
            // Non-blocking: a named pipe without a reader is an error.
            Stream::Path(path) => blocking(OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path)?),
        }
    }
}

/// Resolves the links at the end of a path, whether or not the target exists.
///
/// # Errors
/// Too many links: a cycle.
pub fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..40 {
        match fs::read_link(&path) {
            // The target of a link in /proc/self/fd may not be a path.
            Ok(_) if own_descriptor(&path).is_some() => return Ok(path),
            Ok(to) => path = folder_of(&path).join(to),
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// The number in `/proc/self/fd/N`, also if the folder has another name (`/dev/fd`).
fn own_descriptor(path: &Path) -> Option<i32> {
    let number: i32 = path.file_name()?.to_str()?.parse().ok().filter(|n| *n >= 0)?;
    let own = fs::canonicalize("/proc/self/fd").ok()?;
    let folder = fs::canonicalize(folder_of(path)).ok()?;
    (folder == own && fs::symlink_metadata(path).is_ok()).then_some(number)
}

/// Makes reads and writes of the file blocking.
fn blocking(file: File) -> io::Result<File> {
    // SAFETY: the descriptor is open as long as `file`.
    let set = unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        flags >= 0 && libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) >= 0
    };
    if set { Ok(file) } else { Err(io::Error::last_os_error()) }
}

/// Prefix of names of temporary files.
const PREFIX: &str = ".tilewright-";

/// Creates a locked empty file in the folder of `path`, with the permissions of the old file; it is removed unless it
/// is renamed.
fn temporary(path: &Path, old: Option<&Metadata>) -> io::Result<tempfile::NamedTempFile> {
    loop {
        let made = unlocked(path, old)?;
        match made.as_file().try_lock() {
            // Another process has the lock, and is removing it as a stale file.
            Err(TryLockError::WouldBlock) => continue,
            Ok(()) if made.as_file().metadata()?.nlink() == 0 => continue,
            // On a file system without locks no process takes it for a stale file.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(made),
        }
    }
}

fn unlocked(path: &Path, old: Option<&Metadata>) -> io::Result<tempfile::NamedTempFile> {
    // A new file gets the default permissions: temporary files are private otherwise.
    let mode = if old.is_some() { 0o600 } else { 0o666 };
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).permissions(Permissions::from_mode(mode));
    let made = builder.tempfile_in(folder_of(path)).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot create a file in its folder: {}", without_temporary_name(&error)))
    })?;
    if let Some(old) = old {
        let permissions = kept_permissions(made.as_file(), old)?;
        made.as_file().set_permissions(permissions)?;
    }
    Ok(made)
}

/// Permissions for a new file that replaces `old`; sets its owner and group first if the system permits it. Group
/// permissions are dropped if the group cannot be kept.
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

/// The parent folder of a path; `.` for a name alone.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    }
}

/// Two paths of a command that refer to the same file.
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
            true => write!(f, "cannot write {output}: it is the same file as the input {other}"),
            false => write!(f, "cannot write {output}: it is also written as {other}"),
        }
    }
}

/// Fails if a command would write a file that it reads, or write one file twice, also through links or other spellings
/// of the path. Paths that are not regular files may be repeated.
///
/// # Errors
/// The first two paths that refer to the same file.
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

/// Identity of a regular file.
#[derive(PartialEq)]
enum Identity {
    /// Device and inode of an existing file.
    There(u64, u64),
    /// Folder and name of a file that does not exist yet.
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

/// Reads a file, or a pipe from another program (`/dev/stdin`).
///
/// # Errors
/// Errors of the file system; a folder, a named pipe or a device; no memory for the contents.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut contents = Vec::new();
    open(path)?.read_to_end(&mut contents)?;
    Ok(contents)
}

/// Same as [`read`], for text.
///
/// # Errors
/// See [`read`]; also bytes that are not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        io::Error::new(io::ErrorKind::InvalidData, format!("byte {place} is not valid UTF-8"))
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

/// Opens `path` for reading without blocking: opening a named pipe would otherwise wait for a writer.
fn open_now(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(|error| {
        // The system's error for opening a socket does not say that it is one.
        let kind = fs::metadata(path).map(|found| found.file_type());
        kind.ok().filter(FileTypeExt::is_socket).map_or(error, not_a_file)
    })
}

/// Opens a regular file, which supports random access.
///
/// # Errors
/// See [`read`]; also pipes of all kinds.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let file = open_now(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() { Ok(file) } else { Err(not_a_file(kind)) }
}

/// Reads a regular file that must not change meanwhile.
///
/// # Errors
/// See [`open_regular`]; a file that changes while it is read; too little memory for it.
pub fn read_unchanged(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open_regular(path)?;
    let before = FileStamp::of(&file)?;
    tilewright_runtime::check_host_memory(before.len as f64).map_err(io::Error::other)?;
    let mut contents = Vec::with_capacity(before.len as usize);
    // Bounds the read of a growing file.
    (&mut file).take(before.len.saturating_add(1)).read_to_end(&mut contents)?;
    before.check(&file)?;
    // The file may have changed and changed back.
    if contents.len() as u64 != before.len { Err(changed()) } else { Ok(contents) }
}

/// Length and modification time of a file.
#[derive(Clone, Copy, PartialEq)]
pub struct FileStamp {
    len: u64,
    modified: (i64, i64),
}

impl FileStamp {
    /// The current stamp of an open file.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn of(file: &File) -> io::Result<FileStamp> {
        let found = file.metadata()?;
        Ok(FileStamp { len: found.len(), modified: (found.mtime(), found.mtime_nsec()) })
    }

    /// Fails if the file has another stamp now.
    ///
    /// # Errors
    /// A file that has changed; errors of the file system.
    pub fn check(self, file: &File) -> io::Result<()> {
        if FileStamp::of(file)? == self { Ok(()) } else { Err(changed()) }
    }
}

fn changed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it was changed while it was read")
}

/// The error for a path that is not a regular file.
pub fn not_a_file(kind: fs::FileType) -> io::Error {
    let what = match kind {
        kind if kind.is_dir() => "it is a folder, expected a file",
        kind if kind.is_fifo() => "it is a pipe, expected a file",
        kind if kind.is_socket() => "it is a socket, expected a file",
        _ => "it is a device, expected a file",
    };
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Whether a pipe is anonymous: a program had it open for writing when this process got it.
fn is_anonymous(pipe: &File) -> bool {
    /// File system type of Linux's anonymous pipes.
    const PIPEFS_MAGIC: i64 = 0x5049_5045;
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open, and the call initializes the struct when it returns 0.
    let kind = unsafe {
        let status = libc::fstatfs(pipe.as_raw_fd(), found.as_mut_ptr());
        (status == 0).then(|| found.assume_init().f_type)
    };
    kind == Some(PIPEFS_MAGIC)
}

/// Creates a folder that is removed with its handle.
///
/// # Errors
/// Errors of the file system, with the parent folder.
pub fn temporary_folder() -> io::Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|error| {
        let (why, place) = (without_temporary_name(&error), std::env::temp_dir());
        io::Error::new(error.kind(), format!("cannot create a folder in {}: {why}", place.display()))
    })
}

/// The system's message, without the temporary path that the library adds.
fn without_temporary_name(error: &io::Error) -> String {
    let text = error.to_string();
    text.split_once(" at path ").map_or(text.as_str(), |(why, _)| why).to_string()
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
