//! Files that are there whole or not at all.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes the file at `path` by `write`. A file that was there before stays as it is until the new one is on the disk: whatever
/// ends this, an error, a full disk or the end of the process, leaves the old one or the new one.
///
/// # Errors
/// Those of `write`, and what the file system says.
pub fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary(path)?;
    let mut buffered = BufWriter::with_capacity(1 << 20, temporary.as_file());
    write(&mut buffered)?;
    buffered.flush()?;
    drop(buffered);
    temporary.as_file().sync_all()?;
    temporary.persist(path).map_err(|error| error.error)?;
    // The new name is on the disk when its folder is.
    #[cfg(unix)]
    File::open(folder_of(path))?.sync_all()?;
    Ok(())
}

/// Finds out, before hours of work, whether [`replace`] could write a file at `path` now.
///
/// # Errors
/// What the file system says against it.
pub fn check_writable(path: &Path) -> io::Result<()> {
    match path.is_dir() {
        true => Err(io::ErrorKind::IsADirectory.into()),
        false => temporary(path).map(drop),
    }
}

/// An empty file beside `path`, which goes away unless it is renamed.
fn temporary(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tilewright-");
    // What everyone may read who may read files of this user: temporary files are private otherwise.
    #[cfg(unix)]
    builder.permissions(<std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666));
    builder.tempfile_in(folder_of(path)).map_err(|error| {
        // The library names its temporary file, which nobody asked for.
        error.raw_os_error().map_or(error, io::Error::from_raw_os_error)
    })
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_what_was_there_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace(&path, |file| file.write_all(b"old")).unwrap();
        let failed = replace(&path, |file| {
            file.write_all(&[7; 3 << 20])?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        replace(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert!(replace(&dir.path().join("missing/file"), |_| Ok(())).is_err());
    }
}
