//! Attacks on the cache directory, and other invalid states of it: a program that uses it computes the correct result,
//! ends, and warns once.
//!
//! A test prepares a directory and starts this binary again as the program, for `child_launches` with variables that
//! set its role; without them that test does nothing. The forged entry of these tests is complete, with a correct
//! checksum: where it is executed, the result is wrong.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode};
use tempfile::TempDir;

mod right {
    use tilewright_runtime::prelude::*;

    /// y = 2 x
    #[kernel]
    pub fn scale(x: In<f32>, y: Out<f32>, n: i32, #[constexpr = 32] tile: usize) {
        let i = program_id(0) * tile + arange(0, tile);
        store(y + i, 2.0 * load(x + i, mask = i < n), mask = i < n);
    }
}

/// The attacker's kernel: it has the same name, arguments and manifest.
mod forged {
    use tilewright_runtime::prelude::*;

    /// y = 666 x
    #[kernel]
    pub fn scale(x: In<f32>, y: Out<f32>, n: i32, #[constexpr = 32] tile: usize) {
        let i = program_id(0) * tile + arange(0, tile);
        store(y + i, 666.0 * load(x + i, mask = i < n), mask = i < n);
    }
}

const ROLE: &str = "TILEWRIGHT_TEST_ROLE";
const NOBODY: u32 = 65534;

/// Number of kernels that the role `many` launches.
const MANY: usize = 10;

/// Prints `factor F`, where the result is F times the input. The role `many` launches with [`MANY`] tile sizes.
#[test]
fn child_launches() {
    use tilewright_runtime::prelude::*;
    let Ok(role) = std::env::var(ROLE) else { return };
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .init();
    let device = Device::cpu();
    let values: Vec<f32> = (1..100).map(|i| i as f32).collect();
    let x = Buffer::from_slice(&device, &values).unwrap();
    let mut y = Buffer::<f32>::poisoned(&device, values.len()).unwrap();
    let n = values.len() as i32;
    let tiles: Vec<usize> = if role == "many" { (4..4 + MANY).map(|log| 1 << log).collect() } else { vec![32] };
    for tile in tiles {
        let grid = values.len().div_ceil(tile);
        match role.as_str() {
            "forger" => forged::Scale { x: &x, y: &mut y, n, tile }.launch(&device, grid).unwrap(),
            _ => right::Scale { x: &x, y: &mut y, n, tile }.launch(&device, grid).unwrap(),
        }
        let y = y.to_vec().unwrap();
        let factor = y[0] / values[0];
        assert!(y.iter().zip(&values).all(|(y, x)| *y == factor * x), "{y:?}");
        println!("factor {factor}");
    }
}

/// Output of a program.
struct Outcome {
    factors: Vec<String>,
    warnings: Vec<String>,
}

/// The program with this cache.
fn program(role: &str, cache: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_launches", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env("TILEWRIGHT_CACHE", cache).env("NO_COLOR", "1");
    command
}

/// Runs a program that must succeed within a minute.
fn run(mut command: Command) -> Outcome {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("the program does not end: {command:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}: {out}{err}", output.status);
    // The runner's own `test child_launches ...` may precede the first line.
    let factors = out.lines().filter_map(|line| Some(line.split_once("factor ")?.1.to_string())).collect();
    let warnings = err.lines().filter(|line| line.contains("WARN")).map(str::to_string).collect();
    Outcome { factors, warnings }
}

/// Runs the program; checks the result, and that it prints one warning with these parts, or none if there are no parts.
fn expect_right_result(command: Command, what: &str, warning: &[&str]) {
    let Outcome { factors, warnings } = run(command);
    assert_eq!(factors, ["2"], "{what}: {warnings:?}");
    assert_eq!(warnings.len(), usize::from(!warning.is_empty()), "{what}: {warnings:?}");
    for part in warning {
        assert!(warnings[0].contains(part), "{what}: `{part}` is missing in: {}", warnings[0]);
    }
}

fn launch(cache: &Path, what: &str, warning: &[&str]) {
    expect_right_result(program("launch", cache), what, warning);
}

/// A cache with one forged entry, owned by this user as if this user had written it.
struct Attack {
    dir: TempDir,
    cache: PathBuf,
    entry: PathBuf,
    genuine: Vec<u8>,
    forged: Vec<u8>,
}

fn entries(cache: &Path) -> Vec<PathBuf> {
    let children = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    children(cache).flat_map(|shard| children(&shard).collect::<Vec<_>>()).collect()
}

fn only_entry(cache: &Path) -> PathBuf {
    let found = entries(cache);
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

impl Attack {
    fn new() -> Attack {
        let dir = TempDir::new().unwrap();
        // Other users must be able to read its contents.
        set_mode(dir.path(), 0o755);
        let (cache, other) = (dir.path().join("cache"), dir.path().join("other"));
        launch(&cache, "an empty directory", &[]);
        assert_eq!(run(program("forger", &other)).factors, ["666"]);
        let entry = only_entry(&cache);
        let genuine = fs::read(&entry).unwrap();
        // The key of the genuine kernel, the code of the other one, and a checksum of both.
        let mut forged = fs::read(only_entry(&other)).unwrap();
        forged[16..48].copy_from_slice(&genuine[16..48]);
        let content = forged.len() - 32;
        let checksum = blake3::hash(&forged[..content]);
        forged[content..].copy_from_slice(checksum.as_bytes());
        fs::write(&entry, &forged).unwrap();
        Attack { dir, cache, entry, genuine, forged }
    }

    fn shard(&self) -> &Path {
        self.entry.parent().unwrap()
    }

    /// Checks that the kernel was compiled again and that its entry belongs to this user.
    fn expect_replaced_entry(&self, what: &str) {
        assert!(fs::read(&self.entry).unwrap() == self.genuine, "{what}: the entry is not the genuine one");
        assert!(fs::symlink_metadata(&self.entry).unwrap().is_file() && mode(&self.entry) == 0o600, "{what}");
        launch(&self.cache, what, &[]);
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Control experiment: the forged entry works. Write access to the directory controls what is executed, so only this
/// user may have it.
#[test]
fn entries_of_this_user_are_trusted() {
    let attack = Attack::new();
    assert_eq!(run(program("launch", &attack.cache)).factors, ["666"]);
}

#[test]
fn folders_writable_by_others_are_ignored() {
    let attack = Attack::new();
    for (place, bits) in [(&*attack.cache, 0o777), (&attack.cache, 0o770), (attack.shard(), 0o702)] {
        set_mode(place, bits);
        launch(
            &attack.cache,
            &format!("mode {bits:o}"),
            &["can be written by others", "chmod 700", "TILEWRIGHT_CACHE"],
        );
        assert!(fs::read(&attack.entry).unwrap() == attack.forged, "the foreign directory is unchanged");
        set_mode(place, 0o700);
    }
}

#[test]
fn folders_of_other_users_are_ignored() {
    if !is_root() {
        println!("skipped: only root can change the owner of files (cache::tests checks it with an injected user)");
        return;
    }
    // The directory of another user, writable by all or by its owner only; root runs the program.
    let attack = Attack::new();
    let warning = ["belongs to user 65534", "runs as user 0", "a directory that you own", "TILEWRIGHT_CACHE"];
    for place in [&attack.cache, attack.shard()] {
        chown(place, Some(NOBODY), None).unwrap();
        for bits in [0o777, 0o700] {
            set_mode(place, bits);
            launch(&attack.cache, "the directory of another user", &warning);
        }
        set_mode(place, 0o700);
        chown(place, Some(0), None).unwrap();
    }
    chown(&attack.entry, Some(NOBODY), None).unwrap();
    launch(&attack.cache, "the entry of another user", &["a cache entry is not used", "belongs to user 65534"]);
    attack.expect_replaced_entry("the entry of another user");
}

#[test]
fn entries_writable_by_others_are_replaced() {
    for bits in [0o666, 0o620, 0o602] {
        let attack = Attack::new();
        set_mode(&attack.entry, bits);
        launch(&attack.cache, "an entry open to others", &["a cache entry is not used", "can be written by others"]);
        attack.expect_replaced_entry("an entry open to others");
    }
}

#[test]
fn links_are_not_followed() {
    let attack = Attack::new();
    let elsewhere = attack.dir.path().join("elsewhere");
    fs::write(&elsewhere, &attack.forged).unwrap();
    set_mode(&elsewhere, 0o600);
    fs::remove_file(&attack.entry).unwrap();
    symlink(&elsewhere, &attack.entry).unwrap();
    launch(&attack.cache, "a link in place of the entry", &["is not a regular file"]);
    assert!(fs::read(&elsewhere).unwrap() == attack.forged, "written through the link");
    attack.expect_replaced_entry("a link in place of the entry");

    fs::write(&attack.entry, &attack.forged).unwrap();
    for place in [attack.shard(), &attack.cache] {
        let elsewhere = attack.dir.path().join("elsewhere.d");
        fs::rename(place, &elsewhere).unwrap();
        symlink(&elsewhere, place).unwrap();
        launch(&attack.cache, "a link in place of a directory", &["a symbolic link, which is not followed"]);
        fs::remove_file(place).unwrap();
        fs::rename(&elsewhere, place).unwrap();
        assert!(fs::read(&attack.entry).unwrap() == attack.forged, "written through the link");
    }
    // A dangling link, too.
    symlink(attack.dir.path().join("nowhere"), attack.dir.path().join("dangling")).unwrap();
    launch(&attack.dir.path().join("dangling"), "a dangling link", &["is not a directory"]);
    assert!(!attack.dir.path().join("nowhere").exists());
}

#[test]
fn fifos_sockets_and_devices_do_not_block() {
    let attack = Attack::new();
    fs::remove_file(&attack.entry).unwrap();
    rustix::fs::mknodat(CWD, &attack.entry, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    launch(&attack.cache, "a FIFO", &["is not a regular file"]);
    attack.expect_replaced_entry("a FIFO");

    fs::remove_file(&attack.entry).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(&attack.entry);
    match socket {
        Ok(_socket) => {
            launch(&attack.cache, "a socket", &["is not a regular file"]);
            attack.expect_replaced_entry("a socket");
        }
        Err(error) => println!("skipped: a socket ({error})"),
    }

    fs::remove_file(&attack.entry).unwrap();
    // /dev/zero: reading it would never end.
    let zero = rustix::fs::makedev(1, 5);
    match rustix::fs::mknodat(CWD, &attack.entry, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, zero) {
        Ok(()) => {
            assert!(fs::symlink_metadata(&attack.entry).unwrap().file_type().is_char_device());
            launch(&attack.cache, "a device", &["is not a regular file"]);
            attack.expect_replaced_entry("a device");
        }
        Err(error) => println!("skipped: a device ({error})"),
    }

    // A non-empty directory cannot be replaced: it stays, and the program warns.
    let _ = fs::remove_file(&attack.entry);
    fs::create_dir(&attack.entry).unwrap();
    fs::write(attack.entry.join("file"), "").unwrap();
    let Outcome { factors, warnings } = run(program("launch", &attack.cache));
    assert_eq!(factors, ["2"]);
    assert!(warnings.len() == 2 && warnings[0].contains("is not a regular file"), "{warnings:?}");
    assert!(warnings[1].contains("cannot be stored"), "{warnings:?}");
    assert!(attack.entry.join("file").exists());
}

#[test]
fn damage_is_a_miss() {
    let attack = Attack::new();
    let write = |bytes: &[u8]| fs::write(&attack.entry, bytes).unwrap();
    let genuine = &attack.genuine;
    for length in [0, 1, 63, 64, genuine.len() / 2, genuine.len() - 32, genuine.len() - 1] {
        write(&genuine[..length]);
        launch(&attack.cache, "a torn entry", &[]);
        attack.expect_replaced_entry("a torn entry");
    }
    for place in (0..genuine.len()).step_by(genuine.len() / 12) {
        let mut bytes = genuine.clone();
        bytes[place] ^= 0x10;
        write(&bytes);
        launch(&attack.cache, "a flipped bit", &[]);
        attack.expect_replaced_entry("a flipped bit");
    }
    // Lengths whose sum is correct modulo 2^64.
    let mut bytes = genuine.clone();
    bytes[48..56].copy_from_slice(&u64::MAX.to_le_bytes());
    let content = bytes.len() - 32;
    let checksum = blake3::hash(&bytes[..content]);
    bytes[content..].copy_from_slice(checksum.as_bytes());
    write(&bytes);
    launch(&attack.cache, "a huge length", &[]);
    File::options().write(true).open(&attack.entry).unwrap().set_len(1 << 40).unwrap();
    launch(&attack.cache, "a huge file", &[]);
    attack.expect_replaced_entry("a huge file");
}

/// Unusual values of `TILEWRIGHT_CACHE`: a file, a device, a missing path, an empty value.
#[test]
fn the_folder_can_be_anything() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "precious").unwrap();
    launch(&file, "a file", &["is not a directory", "TILEWRIGHT_CACHE"]);
    launch(&file.join("below"), "below a file", &["is not a directory"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    launch(Path::new("/dev/null"), "a device", &["is not a directory"]);
    launch(Path::new("/proc/kernels"), "a file system without regular files", &["cannot be stored"]);

    let deep = dir.path().join("a/b/c/d");
    launch(&deep, "a path that does not exist", &[]);
    assert_eq!(entries(&deep).len(), 1);
    let entry = only_entry(&deep);
    for folder in entry.ancestors().skip(1).take(5) {
        assert_eq!(mode(folder), 0o700, "{}", folder.display());
    }

    let mut unset = program("launch", Path::new(""));
    unset.env("HOME", dir.path()).env_remove("XDG_CACHE_HOME");
    expect_right_result(unset, "an empty value", &[]);
    assert_eq!(entries(&dir.path().join(".cache/tilewright")).len(), 1, "an empty value counts as unset");
    assert_eq!(mode(&dir.path().join(".cache")), 0o700);

    launch(Path::new("off"), "no cache", &[]);
    let mut wrong = program("launch", &deep);
    let output = wrong.env("TILEWRIGHT_CACHE_MAX_SIZE", "much").output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("TILEWRIGHT_CACHE_MAX_SIZE is `much`: expected"), "{message}");
}

/// The program, started by a shell after `script`.
fn with_shell(role: &str, cache: &Path, script: &str) -> Command {
    let program = program(role, cache);
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{script}; exec \"$0\" \"$@\"")).arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        shell.env(name, value.unwrap());
    }
    shell
}

#[test]
fn modes_are_private_under_any_umask() {
    for umask in ["000", "077", "0277", "0777"] {
        let dir = TempDir::new().unwrap();
        let cache = dir.path().join("a/cache");
        expect_right_result(with_shell("launch", &cache, &format!("umask {umask}")), umask, &[]);
        let entry = only_entry(&cache);
        assert_eq!(mode(&entry), 0o600, "umask {umask}");
        for folder in entry.ancestors().skip(1).take(3) {
            assert_eq!(mode(folder), 0o700, "umask {umask}: {}", folder.display());
        }
        launch(&cache, umask, &[]);
    }
}

/// Root can write everything: if root runs the test, the program runs as another user.
#[test]
fn a_folder_that_cannot_be_written_is_no_failure() {
    let attack = Attack::new();
    let of = |user: Option<u32>| {
        let give = |path: &Path| chown(path, user, None).unwrap();
        [&*attack.cache, attack.shard(), &attack.entry].into_iter().for_each(give);
    };
    fs::write(&attack.entry, &attack.genuine).unwrap();
    let as_user = |role: &str, cache: &Path| {
        let mut command = program(role, cache);
        if is_root() {
            command.uid(NOBODY);
        }
        command
    };
    if is_root() {
        let executable = std::env::current_exe().unwrap();
        let reachable = Command::new("test").arg("-x").arg(&executable).uid(NOBODY).status().unwrap().success();
        if !reachable {
            println!("skipped: another user cannot access {}", executable.display());
            return;
        }
        of(Some(NOBODY));
    }
    set_mode(attack.shard(), 0o500);
    set_mode(&attack.cache, 0o500);
    expect_right_result(as_user("launch", &attack.cache), "a readable directory: a hit", &[]);
    let before = entries(&attack.cache);
    let Outcome { factors, warnings } = run(as_user("many", &attack.cache));
    assert_eq!(factors, ["2"; MANY]);
    assert!(warnings.len() == 1 && warnings[0].contains("cannot be stored"), "one warning for all: {warnings:?}");
    assert_eq!(entries(&attack.cache), before);
    set_mode(&attack.cache, 0o000);
    expect_right_result(
        as_user("launch", &attack.cache),
        "a directory without write permission",
        &["cannot be stored"],
    );
    set_mode(&attack.cache, 0o700);
    set_mode(attack.shard(), 0o700);
    expect_right_result(as_user("launch", &attack.cache), "the user's own directory", &[]);
    expect_right_result(
        as_user("launch", &attack.dir.path().join("new")),
        "nothing can be created here",
        match is_root() {
            true => &["cannot be stored"],
            false => &[],
        },
    );
}

/// The file size limit is one block of 512 or 1024 bytes (`ulimit -f 1`), less than an entry: the system would end a
/// process that writes more with SIGXFSZ.
#[test]
fn a_limit_on_files_is_no_failure() {
    let dir = TempDir::new().unwrap();
    let cache = dir.path().join("cache");
    expect_right_result(with_shell("launch", &cache, "ulimit -f 1"), "a file size limit", &["cannot be stored"]);
    assert!(entries(&cache).is_empty(), "no temporary file is left: {:?}", entries(&cache));
}

/// In a separate mount namespace, with a file system for the test.
#[test]
fn full_and_read_only_file_systems_are_no_failure() {
    let dir = TempDir::new().unwrap();
    let inside = |role: &str, script: &str| {
        let shell = with_shell(role, &dir.path().join("cache"), script);
        let mut command = Command::new("unshare");
        command.arg("-m").arg(shell.get_program()).args(shell.get_args());
        command.envs(shell.get_envs().map(|(name, value)| (name, value.unwrap())));
        command
    };
    let mount = format!("mount -t tmpfs -o mode=700,size=8k none {} || exit 9", dir.path().display());
    let possible =
        Command::new("unshare").args(["-m", "sh", "-c", &mount]).output().is_ok_and(|out| out.status.success());
    if !possible {
        println!("skipped: this user cannot mount a file system");
        return;
    }
    let filled = format!("{mount}; head -c 8192 /dev/zero > {}/other", dir.path().display());
    expect_right_result(inside("launch", &filled), "a full disk", &["cannot be stored", "No space left on device"]);
    let emptied = format!("{mount}; mkdir -m 700 {0}/cache; mount -o remount,ro {0} || exit 9", dir.path().display());
    expect_right_result(
        inside("launch", &emptied),
        "a read-only file system",
        &["cannot be stored", "Read-only file system"],
    );
}

/// Many concurrent processes, in a directory that is much too small for their entries.
#[test]
fn concurrent_eviction_keeps_results_right() {
    let dir = TempDir::new().unwrap();
    let (cache, unbounded) = (dir.path().join("cache"), dir.path().join("unbounded"));
    run(program("many", &unbounded));
    let sizes = entries(&unbounded).iter().map(|entry| fs::metadata(entry).unwrap().len()).collect::<Vec<_>>();
    assert_eq!(sizes.len(), MANY);
    let largest = *sizes.iter().max().unwrap();
    let limit = 2 * largest;
    assert!(sizes.iter().sum::<u64>() > limit + 3 * largest, "{sizes:?}");
    for _ in 0..3 {
        let start = || {
            let mut command = program("many", &cache);
            command.env("TILEWRIGHT_CACHE_MAX_SIZE", limit.to_string());
            std::thread::spawn(|| run(command))
        };
        let programs: Vec<_> = (0..4).map(|_| start()).collect();
        for program in programs {
            let Outcome { factors, warnings } = program.join().unwrap();
            assert_eq!(factors, ["2"; MANY]);
            assert!(warnings.is_empty(), "{warnings:?}");
        }
        let bytes: u64 = entries(&cache).iter().map(|entry| fs::metadata(entry).unwrap().len()).sum();
        assert!(bytes <= limit + 3 * largest, "{bytes} bytes with a limit of {limit}");
    }
    launch(&cache, "after the concurrent processes", &[]);
}
