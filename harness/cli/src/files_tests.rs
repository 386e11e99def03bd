//! Tests of atomic replacement, of input files and of file identity.

use std::os::unix::fs::symlink;

use super::*;

/// A folder, and the path of a file in it that contains `old`.
fn with_file() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "old").unwrap();
    (dir, path)
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    replace(path, |file| file.write_all(text.as_bytes()))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn fifo(path: &Path) {
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name ends with a NUL byte.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
}

#[test]
fn a_failed_write_keeps_the_old_file() {
    let (dir, path) = with_file();
    let failed = replace(&path, |file| {
        file.write_all(&[7; 3 << 20])?;
        Err(io::Error::from(io::ErrorKind::StorageFull))
    });
    assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    write(&path, "new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert!(write(&dir.path().join("missing/file"), "").is_err());
}

#[test]
fn a_checked_folder_is_not_created() {
    let (dir, path) = with_file();
    let place = |name: &str| dir.path().join(name);
    check_folder(dir.path()).unwrap();
    check_folder(&place("new/folder")).unwrap();
    assert_eq!(check_folder(&path).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    assert!(check_folder(&path.join("new")).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(is_stream(Path::new("/dev/null")) && !is_stream(&path) && !is_stream(&place("new")));
}

#[test]
fn links_are_written_through() {
    let (dir, path) = with_file();
    let place = |name: &str| dir.path().join(name);
    symlink("file", place("link")).unwrap();
    symlink(place("link"), place("link to link")).unwrap();
    write(&place("link to link"), "new").unwrap();
    assert_eq!(fs::read_link(place("link to link")).unwrap(), place("link"));
    assert_eq!(fs::read(&path).unwrap(), b"new");
    // A dangling link.
    fs::create_dir(place("folder")).unwrap();
    symlink("folder/made", place("dangling")).unwrap();
    write(&place("dangling"), "made").unwrap();
    assert_eq!(fs::read(place("folder/made")).unwrap(), b"made");
    symlink("round", place("round")).unwrap();
    assert!(write(&place("round"), "").is_err() && check_writable(&place("round")).is_err());
    append(&place("link")).unwrap().write_all(b"er").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new\ner");
}

#[test]
fn permissions_are_kept_and_never_widened() {
    let (dir, path) = with_file();
    for kept in [0o600, 0o640, 0o604, 0o755] {
        fs::set_permissions(&path, Permissions::from_mode(kept)).unwrap();
        write(&path, "new").unwrap();
        assert_eq!(mode(&path), kept, "{kept:o}");
    }
    // A set-user-ID bit applies to the old contents only.
    fs::set_permissions(&path, Permissions::from_mode(0o4755)).unwrap();
    write(&path, "new").unwrap();
    assert_eq!(mode(&path), 0o755);
    // A new file gets the default permissions.
    let fresh = [dir.path().join("ours"), dir.path().join("theirs")];
    write(&fresh[0], "").unwrap();
    fs::write(&fresh[1], "").unwrap();
    assert_eq!(mode(&fresh[0]), mode(&fresh[1]));
}

#[test]
fn read_only_files_are_not_replaced() {
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } == 0 {
        // Permissions do not restrict root.
        return;
    }
    let (_dir, path) = with_file();
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    assert_eq!(write(&path, "new").unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn errors_do_not_name_temporary_files() {
    let (dir, path) = with_file();
    let wrong = [dir.path().join("missing/file"), path.join("file"), dir.path().join("x".repeat(300)), PathBuf::new()];
    for path in wrong {
        for error in [write(&path, "").unwrap_err(), check_writable(&path).unwrap_err()] {
            assert!(!error.to_string().contains(".tilewright-") && !error.to_string().contains(".tmp"), "{error}");
        }
    }
    assert_eq!(write(dir.path(), "").unwrap_err().kind(), io::ErrorKind::IsADirectory);
    assert_eq!(check_writable(dir.path()).unwrap_err().kind(), io::ErrorKind::IsADirectory);
}

#[test]
fn pipes_and_devices_are_written_in_place() {
    let (dir, _) = with_file();
    let error = write(Path::new("/dev/full"), "text").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    write(Path::new("/dev/null"), "text").unwrap();
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    let pipe = dir.path().join("pipe");
    fifo(&pipe);
    check_writable(&pipe).unwrap();
    // A pipe without a reader: an error instead of blocking.
    assert!(write(&pipe, "text").is_err() && append(&pipe).is_err());
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    let (mut reader, writer) = io::pipe().unwrap();
    for name in ["/dev/fd", "/proc/self/fd"] {
        write(&PathBuf::from(format!("{name}/{}", writer.as_raw_fd())), name).unwrap();
    }
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "/dev/fd/proc/self/fd");
}

#[test]
fn an_open_descriptor_is_written_at_its_offset() {
    let (_dir, path) = with_file();
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    write(&PathBuf::from(format!("/dev/fd/{}", file.as_raw_fd())), " and new").unwrap();
    file.write_all(b" and more").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old and new and more");
}

#[test]
fn aliases_of_one_file_are_found() {
    let (dir, path) = with_file();
    let place = |name: &str| dir.path().join(name);
    fs::hard_link(&path, place("hard")).unwrap();
    symlink("file", place("soft")).unwrap();
    fs::create_dir(place("folder")).unwrap();
    let check = |output: &Path, inputs: &[&Path]| check_distinct(&[output], inputs);
    for name in ["file", "hard", "soft", "folder/../file"] {
        let message = check(&place(name), &[&path]).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains("it is the same file as the input"), "{message}");
    }
    check(&place("other"), &[&path, &path]).unwrap();
    let new = [place("new"), place("folder/../new")];
    let message = check_distinct(&[&new[0], &new[1]], &[]).unwrap_err().to_string();
    assert!(message.contains("is also written as"), "{message}");
    let null = Path::new("/dev/null");
    check_distinct(&[null, null], &[null]).unwrap();
}

#[test]
fn inputs_are_regular_files_or_anonymous_pipes() {
    let (dir, path) = with_file();
    assert_eq!((read(&path).unwrap(), read_to_string(&path).unwrap()), (b"old".to_vec(), "old".to_string()));
    let pipe = dir.path().join("pipe");
    fifo(&pipe);
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let others = [(dir.path(), "folder"), (&pipe, "pipe"), (&socket, "socket"), (Path::new("/dev/zero"), "device")];
    for (path, what) in others {
        for error in [read(path).unwrap_err(), open_regular(path).unwrap_err()] {
            assert!(error.to_string().contains(what), "{error}");
        }
    }
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(b"piped").unwrap();
    drop(writer);
    let piped = PathBuf::from(format!("/dev/fd/{}", reader.as_raw_fd()));
    assert!(open_regular(&piped).is_err());
    assert_eq!(read(&piped).unwrap(), b"piped");
    fs::write(&path, [b'a', 0xff]).unwrap();
    assert!(read_to_string(&path).unwrap_err().to_string().contains("byte 1"));
}

#[test]
fn stale_temporaries_are_removed_and_locked_ones_stay() {
    let (dir, path) = with_file();
    let left = dir.path().join(".tilewright-left");
    fs::write(&left, [7; 1000]).unwrap();
    replace(&path, |file| {
        file.write_all(b"new")?;
        remove_stale_temporaries(dir.path())
    })
    .unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["file"], "the leftover is gone");
}

#[test]
fn free_space_is_what_the_file_system_says() {
    let (dir, _) = with_file();
    assert!(free_bytes(dir.path()).unwrap() > 0);
    assert!(free_bytes(&dir.path().join("missing")).is_err());
}

#[test]
fn a_file_that_changes_is_noticed() {
    let (_dir, path) = with_file();
    assert_eq!(read_unchanged(&path).unwrap(), b"old");
    let file = open_regular(&path).unwrap();
    let stamp = FileStamp::of(&file).unwrap();
    stamp.check(&file).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(1).unwrap();
    assert!(stamp.check(&file).unwrap_err().to_string().contains("changed while it was read"));
}

#[test]
fn a_prepared_file_replaces_a_link_at_commit() {
    let (dir, path) = with_file();
    let link = dir.path().join("link");
    symlink("file", &link).unwrap();
    let prepared = prepare(&link, |file| file.write_all(b"new")).unwrap();
    assert_eq!(fs::read(&link).unwrap(), b"old");
    prepared.commit().unwrap();
    assert_eq!((fs::read(&link).unwrap(), fs::read(&path).unwrap()), (b"new".to_vec(), b"old".to_vec()));
    drop(prepare(&path, |file| file.write_all(b"newer")).unwrap());
    assert_eq!((fs::read(&path).unwrap(), fs::read_dir(dir.path()).unwrap().count()), (b"old".to_vec(), 2));
    assert!(prepare(dir.path(), |_| Ok(())).err().unwrap().to_string().contains("folder"));
}

#[test]
fn errors_hide_the_temporary_path() {
    // An error of the library, which ends with the path.
    let missing = tempfile::Builder::new().tempfile_in("/no/such/folder").unwrap_err();
    let quoted = without_temporary_name(&missing);
    assert!(quoted.contains("os error 2") && !quoted.contains("/no/such"), "{quoted}");
}

#[test]
fn appended_lines_follow_an_unfinished_one() {
    let (_dir, path) = with_file();
    for (before, after) in [("", "new\n"), ("whole\n", "whole\nnew\n"), ("cut", "cut\nnew\n")] {
        fs::write(&path, before).unwrap();
        writeln!(append(&path).unwrap(), "new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), after);
    }
}

#[test]
fn rows_are_appended_to_rows_alone() {
    let (_dir, path) = with_file();
    for (before, after) in [
        ("", Some("new\n")),
        ("{\"a\": 1}\ncut", Some("{\"a\": 1}\ncut\nnew\n")),
        ("text\n", None),
        ("[1]\n", None),
        ("{\n  \"a\": 1\n}\n", None),
        ("{\"format\": \"tilewright tuning table\"}\n", None),
    ] {
        fs::write(&path, before).unwrap();
        let appended = append_rows(&path).map(|mut file| writeln!(file, "new").unwrap());
        assert_eq!(appended.is_ok(), after.is_some(), "{before}");
        assert_eq!(fs::read_to_string(&path).unwrap(), after.unwrap_or(before));
    }
}
