//! Runs the program `tilewright`, and checks its output, files and exit codes.

mod ahead_of_time;
mod compile;
mod explain;
mod faults;
mod machine;
mod messages;
mod run;
mod solve;
mod tune;

use std::path::Path;
use std::process::{Command, Output};

/// Exit code and output of one run of the program.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Runs the program in `dir` with these arguments, on the CPU, with a separate cache in `dir`.
pub fn tilewright(dir: &Path, arguments: &[&str]) -> Ran {
    tilewright_with(dir, arguments, &[])
}

/// As [`tilewright`], with additional environment variables.
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
    /// Returns standard output; the run must have succeeded.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self.out
    }

    /// Returns standard error; the run must have failed with exit code `code`, and without a panic. The compiler's
    /// notes may stand before the error.
    #[track_caller]
    pub fn fails(self, code: i32) -> String {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        let first = self.err.lines().find(|line| !line.starts_with("note: "));
        assert!(first.is_some_and(|line| line.starts_with("error")), "{}", self.err);
        self.err
    }
}
