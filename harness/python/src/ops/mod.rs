//! Ops of the package: one function per host function of the kernels. Callers allocate the outputs.

pub mod attention;
pub mod dense;
pub mod rows;
pub mod scaled;

use pyo3::prelude::*;
use tilewright::Device;

use crate::array::{Argument, Array, Source};
use crate::call::Error;
use crate::device;

/// Evaluates an expression with a type alias for the element type, one of f32, bf16 and f16, or returns an error.
macro_rules! for_float_type {
    ($dtype:expr, $at:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::tilewright::Dtype::F32 => {
                type $T = f32;
                $body
            }
            ::tilewright::Dtype::Bf16 => {
                type $T = ::half::bf16;
                $body
            }
            ::tilewright::Dtype::F16 => {
                type $T = ::half::f16;
                $body
            }
            other => Err($at.error("elements of type f32, bf16 or f16".into(), other.to_string())),
        }
    };
}
use for_float_type;

/// As [`for_float_type`], for i32, i64 and u32.
macro_rules! for_index_type {
    ($dtype:expr, $at:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::tilewright::Dtype::I32 => {
                type $T = i32;
                $body
            }
            ::tilewright::Dtype::I64 => {
                type $T = i64;
                $body
            }
            ::tilewright::Dtype::U32 => {
                type $T = u32;
                $body
            }
            other => Err($at.error("elements of type i32, i64 or u32".into(), other.to_string())),
        }
    };
}
use for_index_type;

/// The arrays of a call, with the device of its launches.
#[derive(Clone, Copy)]
pub struct Call {
    pub device: &'static Device,
    pub kernel: &'static str,
}

impl Call {
    /// Checks the arrays as [`prepare`] does.
    fn new(
        py: Python<'_>,
        kernel: &'static str,
        inputs: &[(&'static str, &Array)],
        outputs: &[(&'static str, &Array)],
    ) -> PyResult<Call> {
        Ok(Call { device: prepare(py, kernel, inputs, outputs, None)?, kernel })
    }

    pub fn arg(&self, name: &'static str) -> Argument<'static> {
        Argument { device: self.device, kernel: self.kernel, name }
    }
}

/// Checks that all arrays are on one device, that the outputs can be written and that none overlaps another argument.
/// Returns the device, with the stream of the launch.
///
/// # Errors
/// An array for which this does not hold; those of [`device::of_arrays`].
pub fn prepare(
    py: Python<'_>,
    kernel: &str,
    inputs: &[(&str, &Array)],
    outputs: &[(&str, &Array)],
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<&'static Device> {
    for (index, (name, output)) in outputs.iter().enumerate() {
        if !output.writable {
            return Err(Error::new_err(format!("kernel `{kernel}`: `{name}` is read-only")));
        }
        if let Some((other, _)) = inputs.iter().chain(&outputs[..index]).find(|(_, other)| output.overlaps(other)) {
            return Err(overlap(kernel, name, other));
        }
    }
    let all: smallvec::SmallVec<[(&str, &Array); 12]> = inputs.iter().chain(outputs).copied().collect();
    device::of_arrays(py, kernel, &all, stream)
}

fn overlap(kernel: &str, name: &str, other: &str) -> PyErr {
    Error::new_err(format!("kernel `{kernel}`: `{name}`, which it writes, overlaps `{other}`: pass separate memory"))
}

/// Checks that no array overlaps another.
///
/// # Errors
/// Two that do.
pub fn expect_separate(kernel: &str, arrays: &[(&str, &Array)]) -> PyResult<()> {
    for (index, (name, array)) in arrays.iter().enumerate() {
        if let Some((other, _)) = arrays[..index].iter().find(|(_, other)| array.overlaps(other)) {
            return Err(overlap(kernel, name, other));
        }
    }
    Ok(())
}

/// Tells PyTorch that a tensor was written, so that a later backward pass does not use a saved value that has changed.
pub fn mark_written(py: Python<'_>, array: &Array) -> PyResult<()> {
    if array.source != Source::Torch {
        return Ok(());
    }
    let Some(tensor) = array.object(py) else { return Ok(()) };
    // Tensors of inference mode have no version.
    if !tensor.call_method0("is_inference")?.is_truthy()? {
        py.import("torch.autograd.graph")?.call_method1("increment_version", (tensor,))?;
    }
    Ok(())
}

/// Adds the functions of all ops.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    attention::register(module)?;
    dense::register(module)?;
    rows::register(module)
}
