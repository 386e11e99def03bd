//! Messages on standard error.

use std::fmt::Display;
use std::io::Write;

/// Writes `message` and a newline to standard error in one call, so that lines of several threads do not mix.
///
/// If standard error is closed or full, the message is lost and the program continues; `eprintln!` would panic.
pub fn print_stderr(message: impl Display) {
    let line = format!("{message}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}
