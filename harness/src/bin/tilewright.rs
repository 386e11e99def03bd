//! The program `tilewright`.

use std::process::ExitCode;

/// Wraps the system allocator, so that `tilewright memory` can record allocations.
#[global_allocator]
static ALLOCATOR: tilewright::trace::CountingAllocator = tilewright::trace::CountingAllocator;

fn main() -> ExitCode {
    tilewright_harness::cli::main()
}
