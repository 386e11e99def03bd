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

/// Refuses the first option that is given without an effect. Each has its name, whether it is unused, why, and what to
/// do.
///
/// # Errors
/// An option is unused.
pub fn expect_used(options: impl IntoIterator<Item = (&'static str, bool, String, String)>) -> Result<()> {
    match options.into_iter().find(|(_, is_unused, ..)| *is_unused) {
        None => Ok(()),
        Some((option, _, why, help)) => Err(CliError::usage(format!("{option} is unused: {why}"), help)),
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

/// Converts any other error: into one of standard output ([`io::Error`]; for errors of files, see [`CliError::file`]), a
/// usage error ([`Clash`](crate::files::Clash), or options that do not go together), or a failure with the error's
/// message.
impl<E: std::error::Error + 'static> From<E> for CliError {
    fn from(error: E) -> CliError {
        let any: &(dyn std::error::Error + 'static) = &error;
        if let Some(crate::report::Error::Options(text)) = any.downcast_ref::<crate::report::Error>() {
            return CliError::Usage(text.clone());
        }
        let printed = match any.downcast_ref::<crate::report::Error>() {
            Some(crate::report::Error::Print(error)) => Some(error),
            Some(_) | None => any.downcast_ref::<io::Error>(),
        };
        let clash = match any.downcast_ref::<crate::report::Error>() {
            Some(crate::report::Error::Clash(clash)) => Some(clash),
            Some(_) | None => any.downcast_ref::<crate::files::Clash>(),
        };
        match (printed, clash) {
            (Some(error), _) if error.kind() == io::ErrorKind::BrokenPipe => CliError::ClosedOutput,
            (Some(error), _) => CliError::Failure(format!("cannot write the output: {error}")),
            (None, Some(clash)) => CliError::usage(clash.to_string(), "name another file"),
            (None, None) => CliError::Failure(error.to_string()),
        }
    }
}
