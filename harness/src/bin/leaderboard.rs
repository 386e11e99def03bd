//! The program `leaderboard`.

use std::process::ExitCode;

fn main() -> ExitCode {
    tilewright_harness::leaderboard::main()
}
