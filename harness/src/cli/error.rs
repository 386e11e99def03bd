//! Errors of commands, and their exit codes.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Result of a command.
pub type Result<T, E = CliError> = std::result::Result<T, E>;

/// Why a command did not run to its end.
#[derive(Debug)]
pub enum CliError {
    /// The command line names something that does not exist or does not apply: exit code 2.
    Usage(String),
    /// Any other failure: exit code 1.
    Failure(String),
    /// Invalid arguments (exit code 2), or a request for help or the version (exit code 0).
    Arguments(clap::Error),
    /// Stopped by a signal after the state was saved: exit code [`STOPPED`].
    Stopped(String),
    /// Standard output was closed by its reader: the exit code of a program that SIGPIPE terminates.
    ClosedOutput,
}

/// Exit code of a run that a signal stopped and that can be resumed: `EX_TEMPFAIL` of sysexits.h, "try again later".
pub const STOPPED: u8 = 75;

impl CliError {
    /// Returns a usage error with a hint on what to write instead.
    pub fn usage(message: impl Into<String>, help: impl fmt::Display) -> CliError {
        CliError::Usage(format!("{}\n  help: {help}", message.into()))
    }

    /// Returns the error for a file operation. `doing` is the verb after "cannot", such as "read".
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
            // Diagnostics of the compiler have their own heading.
            CliError::Usage(text) | CliError::Failure(text) if text.starts_with("error") => f.write_str(text),
            CliError::Usage(text) | CliError::Failure(text) => write!(f, "error: {text}"),
            CliError::Arguments(error) => error.fmt(f),
            CliError::Stopped(text) => f.write_str(text),
            CliError::ClosedOutput => f.write_str("error: standard output was closed"),
        }
    }
}

impl std::error::Error for CliError {}

impl From<io::Error> for CliError {
    /// Converts an error of standard output. For errors of files, see [`CliError::file`].
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
