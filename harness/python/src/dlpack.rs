//! Arrays by DLPack (<https://dmlc.github.io/dlpack>, versions 0 and 1): objects with `__dlpack__` and `__dlpack_device__`.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::{PyAttributeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use tilewright::Dtype;

use crate::array::{Array, Dims, Owner, Source, row_major};
use crate::device::Place;

const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Host memory that CUDA has pinned.
const CUDA_HOST: i32 = 3;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    /// In elements; null for a row-major tensor.
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`, the content of capsules of version 1. (Those of version 0 begin with the tensor.)
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

const READ_ONLY: u64 = 1;
/// The producer made a copy for this tensor: what is written there is lost.
const IS_COPIED: u64 = 2;

const VERSION_0: &CStr = c"dltensor";
const VERSION_1: &CStr = c"dltensor_versioned";

/// The stream on which the producer makes the data ready: the legacy default stream, for which a launch waits.
const STREAM: u64 = 1;

/// Reads `object`, the argument `name`; `None` if it has no `__dlpack__`. Its elements are not checked.
///
/// # Errors
/// `TypeError` for elements that kernels do not know, `ValueError` for another device; those of the object.
pub fn read(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Option<Array>> {
    let py = object.py();
    let device = match object.getattr(intern!(py, "__dlpack_device__")) {
        Ok(device) => device.call0()?,
        Err(error) if error.is_instance_of::<PyAttributeError>(py) => return Ok(None),
        Err(error) => return Err(error),
    };
    let (device_type, ordinal): (i32, i32) = device.extract()?;
    let place = match device_type {
        // The producer's enumeration has subclasses of int.
        CPU | CUDA_HOST => Place::Cpu,
        CUDA => Place::Gpu(usize::try_from(ordinal).unwrap_or_default()),
        other => {
            return Err(PyValueError::new_err(format!(
                "{name}: kernels run on NVIDIA GPUs and the CPU, found a tensor on the DLPack device type {other}"
            )));
        }
    };
    let stream = matches!(place, Place::Gpu(_)).then_some(STREAM);
    let capsule = export(object, stream)?;
    let capsule = capsule.cast::<PyCapsule>().map_err(|_| {
        PyTypeError::new_err(format!("{name}: its __dlpack__() returned no capsule of a DLPack tensor"))
    })?;
    let (tensor, read_only) = content(name, capsule)?;
    // SAFETY: the capsule holds the tensor, and is alive.
    let tensor = unsafe { &*tensor };
    let rank = usize::try_from(tensor.ndim).unwrap_or(0);
    let entries = |first: *const i64| match rank {
        0 => Some(Dims::new()),
        _ if first.is_null() => None,
        // SAFETY: shape and strides have one entry per dimension.
        _ => Some(Dims::from_slice(unsafe { std::slice::from_raw_parts(first, rank) })),
    };
    let (shape, strides) = (entries(tensor.shape), entries(tensor.strides));
    let Some(shape) = shape.filter(|shape| shape.iter().all(|&n| n >= 0)) else {
        return Err(PyValueError::new_err(format!(
            "{name}: its DLPack tensor has no shape, or one with negative extents"
        )));
    };
    let dtype = dtype(tensor).ok_or_else(|| {
        let (code, bits, lanes) = (tensor.code, tensor.bits, tensor.lanes);
        PyTypeError::new_err(format!(
            "{name}: kernels have no element type for a DLPack tensor of type code {code} with {bits} bits and {lanes} lanes"
        ))
    })?;
    let address = (tensor.data as u64).checked_add(tensor.byte_offset).filter(|_| !tensor.data.is_null());
    if address.is_none() && !shape.contains(&0) {
        return Err(PyValueError::new_err(format!("{name}: it has no memory")));
    }
    Ok(Some(Array {
        // Its destructor calls the producer's deleter.
        owner: Owner::Object(capsule.clone().into_any().unbind()),
        address: address.unwrap_or(0),
        dtype,
        strides: strides.unwrap_or_else(|| row_major(&shape)),
        shape,
        writable: !read_only,
        place,
        source: Source::Interface,
        stream,
    }))
}

/// Calls `__dlpack__`, also one of a producer that knows version 0 only.
fn export<'py>(object: &Bound<'py, PyAny>, stream: Option<u64>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let named = PyDict::new(py);
    if let Some(stream) = stream {
        named.set_item(intern!(py, "stream"), stream)?;
    }
    let method = object.getattr(intern!(py, "__dlpack__"))?;
    let old = named.copy()?;
    named.set_item(intern!(py, "max_version"), (1, 0))?;
    match method.call((), Some(&named)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => method.call((), Some(&old)),
        found => found,
    }
}

/// The tensor in a capsule, and whether it must not be written.
fn content(name: &str, capsule: &Bound<'_, PyCapsule>) -> PyResult<(*const Tensor, bool)> {
    if let Ok(pointer) = capsule.pointer_checked(Some(VERSION_1)) {
        let managed = pointer.cast::<Versioned>();
        // SAFETY: a capsule of this name has such a content, whose first field is its version in all versions.
        let managed = unsafe { managed.as_ref() };
        if managed.major != 1 {
            return Err(PyValueError::new_err(format!(
                "{name}: its DLPack tensor has version {}.{}, expected version 1",
                managed.major, managed.minor
            )));
        }
        return Ok((&raw const managed.tensor, managed.flags & (READ_ONLY | IS_COPIED) != 0));
    }
    match capsule.pointer_checked(Some(VERSION_0)) {
        Ok(pointer) => Ok((pointer.as_ptr().cast_const().cast(), false)),
        Err(_) => Err(PyTypeError::new_err(format!(
            "{name}: its __dlpack__() returned a capsule that is no DLPack tensor, or that was used before"
        ))),
    }
}

fn dtype(tensor: &Tensor) -> Option<Dtype> {
    match (tensor.code, tensor.bits, tensor.lanes) {
        (0, 8, 1) => Some(Dtype::I8),
        (0, 16, 1) => Some(Dtype::I16),
        (0, 32, 1) => Some(Dtype::I32),
        (0, 64, 1) => Some(Dtype::I64),
        (1, 8, 1) => Some(Dtype::U8),
        (1, 16, 1) => Some(Dtype::U16),
        (1, 32, 1) => Some(Dtype::U32),
        (1, 64, 1) => Some(Dtype::U64),
        (2, 16, 1) => Some(Dtype::F16),
        (2, 32, 1) => Some(Dtype::F32),
        (2, 64, 1) => Some(Dtype::F64),
        (4, 16, 1) => Some(Dtype::Bf16),
        (6, 8, 1) => Some(Dtype::Bool),
        (10, 8, 1) => Some(Dtype::F8E4M3),
        (12, 8, 1) => Some(Dtype::F8E5M2),
        _ => None,
    }
}
