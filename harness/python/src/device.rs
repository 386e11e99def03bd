//! The device and the stream of a launch.

use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock, RwLock};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use tilewright::{Device, probe};

use crate::array::{Array, Source, torch};
use crate::call::{Error, InProgress, gpu_used, guarded, is_gpu_lost, without_gil};

/// Where an array's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu,
    /// A GPU, counted from 0 among those that are visible.
    Gpu(usize),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Cpu => f.write_str("the CPU"),
            Place::Gpu(ordinal) => write!(f, "GPU {ordinal}"),
        }
    }
}

/// GPUs in use, by ordinal.
static OPENED: LazyLock<RwLock<HashMap<usize, Device>>> = LazyLock::new(RwLock::default);

/// Devices of GPUs by ordinal and stream. They are never freed: a program has few streams.
static GPUS: LazyLock<RwLock<HashMap<(usize, u64), &'static Device>>> = LazyLock::new(RwLock::default);

/// This machine's CPU.
pub fn cpu() -> &'static Device {
    static CPU: OnceLock<Device> = OnceLock::new();
    CPU.get_or_init(Device::cpu)
}

/// The GPU `ordinal`, with a stream.
///
/// # Errors
/// No driver, a GPU that is not supported, or a process that was forked.
pub fn gpu(ordinal: usize, stream: u64) -> PyResult<&'static Device> {
    if is_gpu_lost() {
        return Err(forked());
    }
    // A `fork` waits until the locks are free.
    let _call = InProgress::begin();
    let known = GPUS.read().unwrap_or_else(|e| e.into_inner()).get(&(ordinal, stream)).copied();
    if let Some(device) = known {
        return Ok(device);
    }
    let opened = OPENED.read().unwrap_or_else(|e| e.into_inner()).get(&ordinal).cloned();
    let opened = match opened {
        Some(opened) => opened,
        None => {
            guarded(|| probe::cuda_driver().map(drop))?;
            // From here on calls restore the thread's context.
            gpu_used();
            let opened = guarded(|| Device::cuda(ordinal))?;
            OPENED.write().unwrap_or_else(|e| e.into_inner()).entry(ordinal).or_insert(opened).clone()
        }
    };
    // SAFETY: the handle is PyTorch's current stream, a stream that the caller passes, or the default stream; a launch
    // uses the stream that its call names.
    let device = unsafe { opened.with_cuda_stream(stream) }.unwrap_or(opened);
    let device: &'static Device = Box::leak(Box::new(device));
    Ok(GPUS.write().unwrap_or_else(|e| e.into_inner()).entry((ordinal, stream)).or_insert(device))
}

fn forked() -> PyErr {
    Error::new_err(
        "this process was forked after its parent had used a GPU: CUDA does not work here\n  \
         help: start processes with multiprocessing's method \"spawn\"",
    )
}

/// Returns the device of all arrays, with the stream that orders a launch: `stream`, else PyTorch's current stream, else
/// the first stream that an array's interface names, else the default stream. It waits for the other streams that
/// interfaces name.
///
/// # Errors
/// Arrays on different devices, a GPU that is not supported, an object that is no stream.
pub fn of_arrays(
    py: Python<'_>,
    kernel: &str,
    arrays: &[(&str, &Array)],
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<&'static Device> {
    let Place::Gpu(ordinal) = place_of_arrays(kernel, arrays)? else { return Ok(cpu()) };
    let handle = match stream {
        Some(stream) => stream_handle(stream)?,
        None if arrays.iter().any(|(_, array)| array.source == Source::Torch) => current_torch_stream(py, ordinal)?,
        None => arrays.iter().find_map(|(_, array)| array.stream).unwrap_or(0),
    };
    let device = py.detach(|| gpu(ordinal, handle))?;
    for producer in other_streams(arrays, handle) {
        let producer = py.detach(|| gpu(ordinal, producer))?;
        without_gil(py, || device.stream().wait(&producer.stream().record()?))?;
    }
    Ok(device)
}

/// The streams that arrays' interfaces name, besides the stream of the launch: it waits for the work queued there, which
/// may still write the arrays.
fn other_streams(arrays: &[(&str, &Array)], launch: u64) -> smallvec::SmallVec<[u64; 2]> {
    let mut streams = smallvec::SmallVec::new();
    for stream in arrays.iter().filter_map(|(_, array)| array.stream) {
        if stream != launch && !streams.contains(&stream) {
            streams.push(stream);
        }
    }
    streams
}

/// Where all arrays are: the CPU if there are none.
///
/// # Errors
/// Arrays on different devices.
pub fn place_of_arrays(kernel: &str, arrays: &[(&str, &Array)]) -> PyResult<Place> {
    let Some(&(first_name, first)) = arrays.first() else { return Ok(Place::Cpu) };
    match arrays.iter().find(|(_, array)| array.place != first.place) {
        None => Ok(first.place),
        Some((name, other)) => Err(Error::new_err(format!(
            "kernel `{kernel}`: its arguments are on different devices: `{first_name}` is on {}, `{name}` on {}",
            first.place, other.place
        ))),
    }
}

fn current_torch_stream(py: Python<'_>, ordinal: usize) -> PyResult<u64> {
    match torch(py)?.and_then(|torch| torch.current_stream.as_ref()) {
        Some(current) => current.bind(py).call1((ordinal,))?.extract(),
        None => Ok(0),
    }
}

/// The handle of a stream: of PyTorch's, CuPy's, or of an object with `__cuda_stream__`.
fn stream_handle(stream: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = stream.py();
    if let Ok(protocol) = stream.getattr(intern!(py, "__cuda_stream__")) {
        let (version, handle): (u64, u64) = protocol.call0()?.extract()?;
        return match version {
            0 => Ok(handle),
            _ => Err(PyValueError::new_err(format!("stream: version {version} of __cuda_stream__ is not supported"))),
        };
    }
    for name in [intern!(py, "cuda_stream"), intern!(py, "ptr")] {
        if let Ok(handle) = stream.getattr(name) {
            return handle.extract();
        }
    }
    Err(PyTypeError::new_err(format!(
        "stream: expected a CUDA stream (of PyTorch or CuPy, or with __cuda_stream__), found {}",
        stream.get_type().name()?
    )))
}

/// The GPU that an address belongs to.
///
/// # Errors
/// No driver, an address that is not GPU memory, such as freed memory, or a process that was forked.
pub fn gpu_of_address(py: Python<'_>, address: u64) -> PyResult<usize> {
    if is_gpu_lost() {
        return Err(forked());
    }
    without_gil(py, || probe::gpu_of_address(address))
}
