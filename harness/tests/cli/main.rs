//! The program `tilewright` from the outside: what it prints, writes and returns.

mod ahead;
mod compile;
mod explain;
mod faults;
mod machine;
mod run;
mod tune;
mod words;

use std::path::Path;
use std::process::{Command, Output};

/// What one run of the program gave.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Runs the program in `dir` with these arguments, on the CPU, with a cache of its own in `dir`.
pub fn tilewright(dir: &Path, arguments: &[&str]) -> Ran {
    tilewright_with(dir, arguments, &[])
}

/// As [`tilewright`], with these variables too.
pub fn tilewright_with(dir: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    for name in ["TILEWRIGHT_DUMP", "TILEWRIGHT_REPRO", "TILEWRIGHT_LOG", "COLUMNS"] {
        command.env_remove(name);
    }
    command.env("TILEWRIGHT_DEVICE", "cpu").env("TILEWRIGHT_CACHE", dir.join("cache"));
    command.envs(variables.iter().copied()).current_dir(dir).args(arguments);
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8 output");
    Ran { code: status.code().expect("an exit code, not a signal"), out: text(stdout), err: text(stderr) }
}

impl Ran {
    /// Standard output of a run that succeeded.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self.out
    }

    /// Standard error of a run that returned `code`. A panic never counts.
    #[track_caller]
    pub fn fails(self, code: i32) -> String {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        assert!(self.err.starts_with("error"), "{}", self.err);
        self.err
    }
}
