//! The extension module `tilewright._native` of the Python package: kernels on the memory of NumPy arrays, PyTorch
//! tensors and other arrays, without copies.
//!
//! - `array.rs` reads address, shape, strides, element type and device of an array, and holds the array meanwhile.
//! - `dlpack.rs` does so for objects with `__dlpack__`.
//! - `device.rs` finds the device and stream of a launch.
//! - `kernel.rs` compiles and launches any kernel that ships; `options.rs` converts its arguments.
//! - `compiled.rs` has code compiled ahead of time, here or elsewhere, with its manifest.
//! - `ops/` calls the host functions of the kernels, which check shapes and choose tiles.
//! - `torch/` has the same as ops of PyTorch's dispatcher, called without Python in between.
//! - `call.rs` runs all of this without the GIL, converts errors and panics to exceptions, and handles `fork`.

mod array;
mod call;
mod compiled;
mod device;
mod dlpack;
mod kernel;
mod ops;
mod options;
mod torch;

use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    // As the program `tilewright` writes them; a filter that is wrong is no reason to fail here.
    let filter = EnvFilter::try_from_env("TILEWRIGHT_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let warnings = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let _ = warnings.log_internal_errors(false).without_time().with_target(false).try_init();
    module.add("Error", py.get_type::<call::Error>())?;
    module.add("InternalError", py.get_type::<call::InternalError>())?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<kernel::Kernel>()?;
    module.add_class::<compiled::Compiled>()?;
    module.add_function(wrap_pyfunction!(kernel::kernel_names, module)?)?;
    module.add_function(wrap_pyfunction!(compiled::load, module)?)?;
    call::register_fork_handlers(module)?;
    ops::register(module)?;
    torch::register(module)
}
