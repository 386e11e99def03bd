//! `tilewright cache`: shows or clears the cache of compiled kernels on disk.

use std::io::Write;

use clap::{Args, Subcommand};
use tilewright::Cache;

use super::{CliError, Result};

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Subcommand)]
enum Action {
    /// Print the path of the cache folder
    Path,
    /// Print the number and the total size of the compiled kernels (default)
    List,
    /// Remove all compiled kernels; programs recompile what they need
    Clear,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let cache = Cache::from_env()?;
    let Some(dir) = cache.dir() else {
        return Err(CliError::Failure(
            "there is no cache: TILEWRIGHT_CACHE is `off`, or neither XDG_CACHE_HOME nor HOME names a folder for it\n  \
             help: set TILEWRIGHT_CACHE to a folder"
                .to_string(),
        ));
    };
    let dir = dir.display();
    match arguments.action.as_ref().unwrap_or(&Action::List) {
        Action::Path => writeln!(out, "{dir}")?,
        Action::List => {
            let (entries, bytes) = cache.usage()?;
            writeln!(out, "{dir}: {}, {} KiB", kernels(entries), bytes.div_ceil(1024))?;
        }
        Action::Clear => {
            let removed = cache.clear()?;
            writeln!(out, "{dir}: removed {}", kernels(removed))?;
        }
    }
    Ok(())
}

/// Formats a number of kernels: `1 kernel`, `3 kernels`.
pub fn kernels(count: usize) -> String {
    format!("{count} kernel{}", if count == 1 { "" } else { "s" })
}
