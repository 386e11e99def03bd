//! What a program does around its commands: arguments, logging, standard output, errors and exit codes.

use std::any::TypeId;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Command, Parser};
use tilewright_runtime::env::Env;
use tilewright_runtime::terminal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::output::{self, Output};
use crate::{CliError, Result, value_parsers};

/// Parses a program's arguments, sets up logging, calls `run` with standard output, and prints the error, if any.
///
/// A broken pipe ends the program silently; any other failure to write the output is an error. Commands whose work
/// matters more than their output finish their work first ([`Output::keep_going_on_write_errors`]). Failures to write
/// to standard error are ignored.
pub fn program<A: Parser>(run: impl FnOnce(A, &mut Output) -> Result<()>) -> ExitCode {
    // A write beyond the limit of `ulimit -f` then returns an error instead of killing the process.
    // SAFETY: SIG_IGN installs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let (filter, log) = match log_filter(std::env::var_os(LOG)) {
        Ok(filter) => (filter, Ok(())),
        Err(error) => (EnvFilter::new("warn"), Err(error)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // The library would report internal errors with `eprintln!`, which panics if standard error cannot be written.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    // Standard output is not locked: kernels print from the threads of the pool.
    let mut out = Output::new();
    let arguments = parse(std::env::args_os()).map_err(CliError::Arguments);
    let environment = || -> Result<()> {
        log?;
        Env::get()?;
        Ok(())
    };
    let outcome = arguments.and_then(|arguments| {
        environment()?;
        run(arguments, &mut out)?;
        Ok(out.finish()?)
    });
    let error = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        // `--help` and `--version` are successes.
        Err(CliError::Arguments(help)) if !help.use_stderr() => {
            match output::expect_open().and_then(|()| help.print()).and_then(|()| io::stdout().flush()) {
                Ok(()) => return ExitCode::SUCCESS,
                Err(error) => error.into(),
            }
        }
        Err(error) => error,
    };
    match &error {
        // The reader closed the pipe, as in `tilewright list | head`.
        CliError::ClosedOutput => {}
        CliError::Arguments(wrong) => drop(wrong.print()),
        error => {
            // Results before the failure are printed too.
            let _ = out.flush();
            terminal::print_stderr(error);
        }
    }
    error.exit_code()
}

/// As [`Parser::try_parse_from`], but `-1` after an option that takes a value other than a path is its value: the
/// option's own message then says which values it takes, also of options of type `usize`, for which clap only says that
/// a digit is invalid.
///
/// # Errors
/// As [`Parser::try_parse_from`].
pub fn parse<A: Parser>(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<A, clap::Error> {
    let mut command = with_messages(A::command());
    let mut matches = command.try_get_matches_from_mut(words)?;
    A::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

fn with_messages(command: Command) -> Command {
    let command = command.mut_args(|arg| {
        let of_type = |id: TypeId| arg.get_value_parser().type_id() == id;
        let [is_path, is_count] = [of_type(TypeId::of::<PathBuf>()), of_type(TypeId::of::<usize>())];
        let takes_number = arg.get_action().takes_values() && !arg.is_positional() && !is_path;
        let arg = arg.allow_negative_numbers(takes_number);
        if is_count { arg.value_parser(value_parsers::count) } else { arg }
    });
    command.mut_subcommands(with_messages)
}

/// Environment variable with the log filter of standard error. Default: `warn`.
const LOG: &str = "TILEWRIGHT_LOG";
/// The accepted values of [`LOG`], for its error message.
const LOG_VALUES: &str =
    "a level (off, error, warn, info, debug or trace) or MODULE=LEVEL, several separated by commas";

/// Parses the value of `TILEWRIGHT_LOG`.
///
/// # Errors
/// Not UTF-8, an unknown level, or another error of the filter's syntax.
fn log_filter(value: Option<OsString>) -> Result<EnvFilter> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(EnvFilter::new("warn")) };
    let bad = || tilewright_runtime::Error::BadVariable {
        name: LOG,
        value: value.to_string_lossy().into_owned(),
        expected: LOG_VALUES,
    };
    let text = value.to_str().ok_or_else(bad)?;
    // `EnvFilter` accepts any word as the name of a module to log at all levels: a misspelled level would log nothing.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    if !text.contains('[') && !text.split(',').map(str::trim).all(|word| is_level(word) || word.contains('=')) {
        return Err(bad().into());
    }
    Ok(EnvFilter::try_new(text).map_err(|_| bad())?)
}
