//! Ops of PyTorch: kernels in its dispatcher, which allocate their results and launch on its current stream. A call runs
//! no Python code, also where `torch.compile` calls it.
//!
//! The modules of `tilewright.torch` define the ops' schemas, the shapes of their results for tracing (fake kernels), and
//! their gradients; `ops.rs` has the kernels; `abi.rs` has PyTorch's C interface.

pub mod abi;
mod ops;

use std::cell::RefCell;
use std::ffi::CString;
use std::path::PathBuf;

use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use smallvec::SmallVec;
use tilewright::Dtype;

use crate::array::Array;
use crate::call::catching;
use crate::device::{self, Place};
use crate::ops::Call;
use abi::Handle;

/// The arguments of a kernel, in the order of its schema.
struct Arguments<'a>(std::slice::Iter<'a, u64>);

impl Arguments<'_> {
    fn word(&mut self) -> u64 {
        *self.0.next().expect("a kernel takes as many arguments as its schema has")
    }

    fn tensor(&mut self) -> Handle {
        // SAFETY: the schema has a tensor here, and an argument belongs to the kernel.
        unsafe { Handle::from_word(self.word()) }
    }

    fn tensors<const N: usize>(&mut self) -> [Handle; N] {
        std::array::from_fn(|_| self.tensor())
    }

    fn list(&mut self) -> Vec<Handle> {
        // SAFETY: the schema has a list of tensors here, and an argument belongs to the kernel.
        unsafe { abi::tensors_from_word(self.word()) }
    }

    fn double(&mut self) -> f64 {
        f64::from_bits(self.word())
    }

    fn int(&mut self) -> i64 {
        self.word() as i64
    }

    fn float(&mut self) -> f32 {
        self.double() as f32
    }

    fn bool(&mut self) -> bool {
        self.word() as u8 != 0
    }
}

/// The results of a kernel, in the order of its schema.
type Results = SmallVec<[Array; 3]>;

thread_local! {
    /// The error of the last kernel that failed on this thread.
    static ERROR: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs a kernel of PyTorch's dispatcher. An error is kept for [`take_error`], and thrown as a C++ exception.
///
/// # Safety
/// As a [`abi::Kernel`] is called, for a schema with the arguments and results of `kernel`.
unsafe fn run(stack: *mut u64, arguments: u64, results: u64, kernel: fn(&mut Arguments) -> PyResult<Results>) {
    let message = {
        // SAFETY: the caller's promise.
        let words = unsafe { std::slice::from_raw_parts(stack, arguments as usize) };
        match catching(|| kernel(&mut Arguments(words.iter()))) {
            Ok(found) => {
                debug_assert_eq!(found.len(), results as usize);
                // SAFETY: the stack has room for the results.
                let words = unsafe { std::slice::from_raw_parts_mut(stack, results as usize) };
                for (word, result) in words.iter_mut().zip(found) {
                    *word = result.into_handle().map_or(0, Handle::into_word);
                }
                return;
            }
            Err(error) => {
                let text = Python::attach(|py| error.value(py).to_string());
                ERROR.set(Some(error));
                CString::new(text.replace('\0', " ")).unwrap_or_default()
            }
        }
    };
    abi::throw(&message);
}

/// The exception that a kernel raised, for the `RuntimeError` that PyTorch made of it.
#[pyfunction]
fn take_error<'py>(py: Python<'py>, error: Bound<'py, PyAny>) -> Bound<'py, PyAny> {
    let kept = ERROR.take().map(|kept| kept.value(py).clone().into_any());
    match (kept, error.str()) {
        (Some(kept), Ok(text)) if kept.str().is_ok_and(|kept| text.to_string().contains(&kept.to_string())) => kept,
        _ => error,
    }
}

/// Registers the kernels. `folder` has PyTorch's libraries. The ops must be defined.
#[pyfunction]
fn register_torch_kernels(folder: PathBuf) -> PyResult<()> {
    abi::load(&folder)?;
    abi::register_kernels(ops::KERNELS)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(take_error, module)?)?;
    module.add_function(wrap_pyfunction!(register_torch_kernels, module)?)
}

/// The device of the arguments, with PyTorch's current stream.
///
/// # Errors
/// Arguments on different devices; a GPU that is not supported.
fn call(kernel: &'static str, arguments: &[(&str, &Array)]) -> PyResult<Call> {
    let device = match device::place_of_arrays(kernel, arguments)? {
        Place::Cpu => device::cpu(),
        Place::Gpu(ordinal) => device::gpu(ordinal, abi::current_stream(ordinal)?)?,
    };
    Ok(Call { device, kernel })
}

/// A new tensor on the device of `like`, with these strides.
fn empty_strided(like: &Array, shape: &[i64], strides: &[i64], dtype: Dtype) -> PyResult<Array> {
    Array::of_handle("result", Handle::empty(shape, strides, dtype, like.place)?)
}

/// A new contiguous tensor on the device of `like`.
fn empty(like: &Array, shape: &[i64], dtype: Dtype) -> PyResult<Array> {
    empty_strided(like, shape, &crate::array::row_major(shape), dtype)
}

/// A new contiguous tensor like `x`.
fn dense(x: &Array) -> PyResult<Array> {
    empty(x, &x.shape, x.dtype)
}

/// A float32 for each row of x [..., d].
fn row_vector(x: &Array) -> PyResult<Array> {
    let rows = x.shape.split_last().map_or(0, |(_, lead)| lead.iter().product());
    empty(x, &[rows], Dtype::F32)
}

/// A new tensor like x [batch, heads, n, d], in memory as it is or as [batch, n, heads, d], whichever x is like; with another
/// extent in place of d, if one is given.
fn heads_like(x: &Array, d: Option<i64>, dtype: Dtype) -> PyResult<Array> {
    let &[batch, heads, n, own] = x.shape.as_slice() else { return dense(x) };
    if x.strides[1] < x.strides[2] {
        tokens_first(x, d, dtype)
    } else {
        empty(x, &[batch, heads, n, d.unwrap_or(own)], dtype)
    }
}

/// As [`heads_like`], in memory as [batch, n, heads, d].
fn tokens_first(x: &Array, d: Option<i64>, dtype: Dtype) -> PyResult<Array> {
    let &[batch, heads, n, own] = x.shape.as_slice() else { return dense(x) };
    let d = d.unwrap_or(own);
    empty_strided(x, &[batch, heads, n, d], &[heads * n * d, d, heads * d, 1], dtype)
}

/// A contiguous copy.
fn contiguous(name: &str, x: &Array) -> PyResult<Array> {
    let copy = dense(x)?;
    match (copy.handle(), x.handle()) {
        (Some(target), Some(source)) => target.copy_from(source)?,
        _ => return Err(PyMemoryError::new_err(format!("{name}: a copy needs a tensor"))),
    }
    Ok(copy)
}

/// The halves of the columns of x [..., 2 · d], without a copy.
///
/// # Errors
/// An odd number of columns.
fn halves(name: &str, x: &Array) -> PyResult<[Array; 2]> {
    let (Some(handle), Some((&columns, _)), Some(&stride)) = (x.handle(), x.shape.split_last(), x.strides.last())
    else {
        return Err(PyValueError::new_err(format!("{name}: expected a tensor of at least one dimension")));
    };
    if columns % 2 != 0 {
        let text = format!("{name}: expected an even number of columns, found the shape {:?}", &x.shape[..]);
        return Err(PyValueError::new_err(text));
    }
    let mut shape = x.shape.clone();
    *shape.last_mut().expect("it has a last dimension") = columns / 2;
    let half = |offset| Array::of_handle(name, handle.strided(&shape, &x.strides, offset)?);
    Ok([half(0)?, half(columns / 2 * stride)?])
}

/// Reads x [..., d]: the tensor, or a copy if its leading dimensions are not one dimension in memory.
fn rows(name: &str, handle: Handle) -> PyResult<Array> {
    let x = Array::of_handle(name, handle)?;
    let lead = x.shape.len().saturating_sub(1);
    if x.merged(0..lead).is_some() { Ok(x) } else { contiguous(name, &x) }
}

/// Reads x: the tensor, or a copy if its last dimension is not contiguous in memory, as that of an expanded gradient.
fn unit_stride(name: &str, handle: Handle) -> PyResult<Array> {
    let x = Array::of_handle(name, handle)?;
    if x.strides.last().is_none_or(|&stride| stride == 1) { Ok(x) } else { contiguous(name, &x) }
}
