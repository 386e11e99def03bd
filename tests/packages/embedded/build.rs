//! Compiles kernels for CPU and GPU, with the configuration that `with-llvm` measured, and embeds them.

use tilewright::precompiled::embed;
use tilewright::prelude::*;

#[path = "../kernel.rs"]
mod kernel;
#[path = "../tuned.rs"]
mod tuned;
use kernel::Double;
use tuned::Scale;

fn main() -> Result<()> {
    println!("cargo::rerun-if-env-changed=TILEWRIGHT_CACHE");
    embed([
        Double::compile_for(HostCpu::native()).constant("tile", 4usize),
        Scale::<f32>::compile_for(HostCpu::native()).tuned(Scale::<f32>::AUTOTUNE).size("n", 5000),
        Scale::<bf16>::compile_for(HostCpu::native()).constant("tile", 512usize).assume("n % 16"),
        Scale::<f32>::compile_for(GpuArch::Sm80).tuned(Scale::<f32>::AUTOTUNE),
    ])
}
