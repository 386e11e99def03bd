//! Why a command stopped, and the exit code that says so.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Result of a command.
pub type Result<T, E = CliError> = std::result::Result<T, E>;

/// Why a command stopped.
#[derive(Debug)]
pub enum CliError {
    /// The command line asks for something that does not exist or does not fit: exit code 2.
    Usage(String),
    /// Something went wrong: exit code 1.
    Failure(String),
    /// Words that are no arguments of the program, or ask for help: exit codes 2 and 0.
    Arguments(clap::Error),
    /// A signal asked to stop, and what it takes to go on is on disk: exit code [`STOPPED`].
    Stopped(String),
    /// Nobody reads our output any more: the exit code of a program that SIGPIPE ends.
    ClosedOutput,
}

/// The exit code of what was stopped by a signal and can go on: `EX_TEMPFAIL` of sysexits.h, "try again later".
pub const STOPPED: u8 = 75;

impl CliError {
    /// A mistake on the command line, and what to do about it.
    pub fn usage(message: impl Into<String>, help: impl fmt::Display) -> CliError {
        CliError::Usage(format!("{}\n  help: {help}", message.into()))
    }

    /// A file that cannot be used. `doing` reads as in "cannot read".
    pub fn file(doing: &str, path: &Path, error: impl fmt::Display) -> CliError {
        CliError::Failure(format!("cannot {doing} {}: {error}", path.display()))
    }

    pub fn exit_code(&self) -> ExitCode {
        match self {
            CliError::ClosedOutput => ExitCode::from(128 + libc::SIGPIPE as u8),
            CliError::Stopped(_) => ExitCode::from(STOPPED),
            CliError::Failure(_) => ExitCode::from(1),
            CliError::Usage(_) => ExitCode::from(2),
            CliError::Arguments(error) => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // A diagnostic of the compiler has its own heading.
            CliError::Usage(text) | CliError::Failure(text) if text.starts_with("error") => f.write_str(text),
            CliError::Usage(text) | CliError::Failure(text) => write!(f, "error: {text}"),
            CliError::Arguments(error) => error.fmt(f),
            CliError::Stopped(text) => f.write_str(text),
            CliError::ClosedOutput => f.write_str("error: the output is closed"),
        }
    }
}

impl std::error::Error for CliError {}

impl From<io::Error> for CliError {
    /// For writes to our output; files go through [`CliError::file`].
    fn from(error: io::Error) -> CliError {
        match error.kind() {
            io::ErrorKind::BrokenPipe => CliError::ClosedOutput,
            _ => CliError::Failure(format!("cannot write the output: {error}")),
        }
    }
}

impl From<crate::files::Clash> for CliError {
    fn from(clash: crate::files::Clash) -> CliError {
        CliError::usage(clash.to_string(), "name another file")
    }
}

impl From<tilewright::Error> for CliError {
    fn from(error: tilewright::Error) -> CliError {
        CliError::Failure(error.to_string())
    }
}

impl From<crate::report::Error> for CliError {
    fn from(error: crate::report::Error) -> CliError {
        match error {
            crate::report::Error::Print(error) => error.into(),
            crate::report::Error::Clash(clash) => clash.into(),
            error => CliError::Failure(error.to_string()),
        }
    }
}

impl From<candle_core::Error> for CliError {
    fn from(error: candle_core::Error) -> CliError {
        CliError::Failure(error.to_string())
    }
}
