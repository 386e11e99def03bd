//! The command line of the kernels of this crate.

#[path = "../../../kernel.rs"]
mod kernel;
#[path = "../../../tuned.rs"]
mod tuned;

fn main() -> std::process::ExitCode {
    tilewright::cli::main(&[&kernel::DOUBLE, &tuned::SCALE_AUTOTUNE])
}
