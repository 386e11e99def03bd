//! Runs `tilewright train` in a temporary folder, for tests of the program.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A model whose step takes a few milliseconds.
pub const SMALL: &str = "--layers 1 --d-model 32 --d-ff 64 --heads 2 --context 16 --vocab-size 300 --batch 4";

/// A temporary folder with a training text (`text.txt`) and a separate cache.
pub struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let words = "the quick brown fox jumps over the lazy dog and runs away. ".repeat(60);
        std::fs::write(folder.path().join("text.txt"), words).unwrap();
        Place { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a command: `tilewright` with the arguments of this line.
    pub fn command(&self, line: &str) -> Command {
        let mut command = self.set_up(env!("CARGO_BIN_EXE_tilewright"));
        command.args(line.split_whitespace());
        command
    }

    /// Same as [`Place::command`], started by a shell after the command `before`, which may set limits. The cache is
    /// off: kernels are compiled again, and tokens are in the run's folder.
    pub fn shell(&self, before: &str, line: &str) -> Command {
        let mut command = self.set_up("sh");
        command.args(["-c", &format!("{before}; exec {} {line}", env!("CARGO_BIN_EXE_tilewright"))]);
        command.env("TILEWRIGHT_CACHE", "off");
        command
    }

    fn set_up(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("TILEWRIGHT_CACHE", self.path("cache")).env("TILEWRIGHT_DEVICE", "cpu");
        command.env("RAYON_NUM_THREADS", "2").current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Trains the small model in the folder `out`.
    pub fn train(&self, out: &str, more: &str) -> Command {
        self.command(&format!("train --data text.txt --out {out} {SMALL} {more}"))
    }

    /// Resumes the training in the folder `out`.
    pub fn resume(&self, out: &str, more: &str) -> Command {
        self.command(&format!("train --resume --out {out} {more}"))
    }

    /// Returns the lines of a run's log; none if there is no log.
    pub fn log(&self, out: &str) -> Vec<String> {
        let log = std::fs::read_to_string(self.path(out).join("log.jsonl")).unwrap_or_default();
        log.lines().map(str::to_string).collect()
    }

    /// Waits until the log of a running training has at least `lines` lines.
    pub fn wait_for_lines(&self, child: &mut Child, out: &str, lines: usize) {
        let start = Instant::now();
        while self.log(out).len() < lines {
            assert!(child.try_wait().unwrap().is_none(), "the run ended before it had {lines} lines");
            assert!(start.elapsed() < Duration::from_secs(300), "no {lines} lines after five minutes");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns the sorted names of the files in a folder.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

/// Returns a number of a line of a log, with all its digits.
pub fn field(line: &str, name: &str) -> String {
    let value = line.split(&format!("\"{name}\":")).nth(1).unwrap();
    value.split([',', '}']).next().unwrap().to_string()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a program, which must succeed, and returns its standard output.
#[track_caller]
pub fn ok(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{}{}", text(&stdout), text(&stderr));
    text(&stdout)
}

/// Runs a program, which must fail with this exit code and without a panic, and returns its error output.
#[track_caller]
pub fn fails(mut command: Command, code: i32) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert_eq!(status.code(), Some(code), "{}{}", text(&stdout), text(&stderr));
    let error = text(&stderr);
    assert!(error.contains("error: ") && !error.contains("panicked"), "{error}");
    error
}

#[track_caller]
pub fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
}
