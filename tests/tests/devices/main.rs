//! Operations of the language on every device: native code, simulated GPUs and, where there is one, a GPU, against plain Rust or
//! f64. `make gpu-package` takes this program to a GPU machine.

mod aggregates;
mod atomics;
mod bytes;
mod clocks;
mod descriptor_rows;
mod divisors;
mod dot_scaled;
mod dots;
mod extents;
mod functions;
mod in_place;
mod parameters;
mod sort;
mod tensor_parameters;
mod triton;
mod triton_forms;
