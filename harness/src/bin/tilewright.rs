//! The program `tilewright`.

use std::process::ExitCode;

/// `tilewright memory` listens to it; otherwise it is the system's.
#[global_allocator]
static ALLOCATOR: tilewright::trace::CountingAllocator = tilewright::trace::CountingAllocator;

fn main() -> ExitCode {
    tilewright_harness::cli::main()
}
