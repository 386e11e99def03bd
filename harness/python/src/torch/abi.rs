//! The C interface of PyTorch's C++ library (`torch/csrc/inductor/aoti_torch/c/shim.h` and `stable/c/shim.h`), which stays compatible between
//! versions of PyTorch: tensors by handle, and kernels in its dispatcher.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use pyo3::exceptions::{PyImportError, PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyType;
use tilewright::Dtype;

use crate::array::Dims;
use crate::device::Place;

/// A kernel in PyTorch's dispatcher: takes the arguments as words (`StableIValue`) and replaces them by the results.
pub type Kernel = unsafe extern "C-unwind" fn(stack: *mut u64, arguments: u64, results: u64);

/// 0 for success. PyTorch logs the error otherwise.
type Status = i32;
type Tensor = *mut c_void;
type Registry = *mut c_void;
type List = *mut c_void;

/// The version of the interface that this module is written for: PyTorch 2.10.
const VERSION: u64 = 2 << 56 | 10 << 48;

/// Declares the functions of PyTorch that this module calls.
macro_rules! interface {
    ($(fn $name:ident($($type:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        struct Interface {
            $($name: unsafe extern "C-unwind" fn($($type),*) $(-> $result)?,)*
            /// Absent in builds of PyTorch for the CPU.
            current_stream: Option<unsafe extern "C-unwind" fn(i32, *mut *mut c_void) -> Status>,
            dtypes: Vec<(i32, Dtype)>,
            cpu: i32,
            cuda: i32,
        }

        impl Interface {
            /// # Safety
            /// `library` is PyTorch's, whose functions have these types.
            unsafe fn functions(library: &Library) -> Result<Interface, libloading::Error> {
                // SAFETY: the caller's promise.
                unsafe {
                    Ok(Interface {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)*
                        current_stream: None,
                        dtypes: Vec::new(),
                        cpu: 0,
                        cuda: 0,
                    })
                }
            }
        }
    };
}

interface! {
    fn aoti_torch_get_data_ptr(Tensor, *mut *mut c_void) -> Status;
    fn aoti_torch_get_storage_size(Tensor, *mut i64) -> Status;
    fn aoti_torch_get_storage_offset(Tensor, *mut i64) -> Status;
    fn aoti_torch_get_dim(Tensor, *mut i64) -> Status;
    fn aoti_torch_get_sizes(Tensor, *mut *mut i64) -> Status;
    fn aoti_torch_get_strides(Tensor, *mut *mut i64) -> Status;
    fn aoti_torch_get_dtype(Tensor, *mut i32) -> Status;
    fn aoti_torch_get_layout(Tensor, *mut i32) -> Status;
    fn aoti_torch_get_device_type(Tensor, *mut i32) -> Status;
    fn aoti_torch_get_device_index(Tensor, *mut i32) -> Status;
    fn aoti_torch_empty_strided(i64, *const i64, *const i64, i32, i32, i32, *mut Tensor) -> Status;
    fn aoti_torch__reinterpret_tensor(Tensor, i64, *const i64, *const i64, i64, *mut Tensor) -> Status;
    fn aoti_torch_copy_(Tensor, Tensor, i32) -> Status;
    fn aoti_torch_delete_tensor_object(Tensor) -> Status;
    fn aoti_torch_library_init_impl(*const c_char, *const c_char, *const c_char, u32, *mut Registry) -> Status;
    fn torch_library_impl(Registry, *const c_char, Kernel, u64) -> Status;
    fn torch_list_size(List, *mut usize) -> Status;
    fn torch_list_get_item(List, usize, *mut u64) -> Status;
    fn torch_delete_list(List) -> Status;
    fn aoti_torch_check(bool, *const c_char, *const c_char, u32, *const c_char);
    fn aoti_torch_layout_strided() -> i32;
    fn aoti_torch_device_type_cpu() -> i32;
    fn aoti_torch_device_type_cuda() -> i32;
    fn aoti_torch_dtype_bool() -> i32;
    fn aoti_torch_dtype_uint8() -> i32;
    fn aoti_torch_dtype_int8() -> i32;
    fn aoti_torch_dtype_int16() -> i32;
    fn aoti_torch_dtype_int32() -> i32;
    fn aoti_torch_dtype_int64() -> i32;
    fn aoti_torch_dtype_float8_e4m3fn() -> i32;
    fn aoti_torch_dtype_float8_e5m2() -> i32;
    fn aoti_torch_dtype_float16() -> i32;
    fn aoti_torch_dtype_bfloat16() -> i32;
    fn aoti_torch_dtype_float32() -> i32;
    fn aoti_torch_dtype_float64() -> i32;
}

static INTERFACE: OnceLock<Interface> = OnceLock::new();

/// The interface, after [`load`].
fn interface() -> &'static Interface {
    INTERFACE.get().expect("kernels and handles exist only after `load`")
}

/// Finds the functions in the libraries in `folder`, which the program has loaded.
///
/// # Errors
/// `ImportError` for a PyTorch without them.
pub fn load(folder: &Path) -> PyResult<()> {
    // SAFETY: PyTorch has loaded the library, so that no initialization runs; its functions have these types.
    let found = unsafe {
        Library::open(Some(folder.join("libtorch_cpu.so")), RTLD_LAZY | RTLD_LOCAL)
            .and_then(|library| Interface::functions(&library).map(|interface| (interface, library)))
    };
    let (mut interface, library) = found.map_err(|error| {
        PyImportError::new_err(format!(
            "tilewright.torch needs PyTorch 2.10 or later, with its shared libraries: {error}"
        ))
    })?;
    // SAFETY: as above; the functions take no arguments.
    unsafe {
        interface.cpu = (interface.aoti_torch_device_type_cpu)();
        interface.cuda = (interface.aoti_torch_device_type_cuda)();
        let i = &interface;
        interface.dtypes = vec![
            ((i.aoti_torch_dtype_bfloat16)(), Dtype::Bf16),
            ((i.aoti_torch_dtype_float32)(), Dtype::F32),
            ((i.aoti_torch_dtype_float16)(), Dtype::F16),
            ((i.aoti_torch_dtype_int64)(), Dtype::I64),
            ((i.aoti_torch_dtype_int32)(), Dtype::I32),
            ((i.aoti_torch_dtype_float64)(), Dtype::F64),
            ((i.aoti_torch_dtype_bool)(), Dtype::Bool),
            ((i.aoti_torch_dtype_uint8)(), Dtype::U8),
            ((i.aoti_torch_dtype_int8)(), Dtype::I8),
            ((i.aoti_torch_dtype_int16)(), Dtype::I16),
            ((i.aoti_torch_dtype_float8_e4m3fn)(), Dtype::F8E4M3),
            ((i.aoti_torch_dtype_float8_e5m2)(), Dtype::F8E5M2),
        ];
    }
    // The libraries stay loaded.
    std::mem::forget(library);
    // SAFETY: as above.
    if let Ok(cuda) = unsafe { Library::open(Some(folder.join("libtorch_cuda.so")), RTLD_LAZY | RTLD_LOCAL) } {
        // SAFETY: as above.
        interface.current_stream = unsafe { cuda.get(b"aoti_torch_get_current_cuda_stream\0") }.ok().map(|f| *f);
        std::mem::forget(cuda);
    }
    let _ = INTERFACE.set(interface);
    Ok(())
}

/// Registers kernels, by the name of their op in the namespace `tilewright`, for all devices.
///
/// # Errors
/// `ImportError` for a PyTorch that refuses them.
pub fn register_kernels(kernels: &[(&'static CStr, Kernel)]) -> PyResult<()> {
    let i = interface();
    let mut registry: Registry = null_mut();
    let (namespace, key) = (c"tilewright".as_ptr(), c"CompositeExplicitAutograd".as_ptr());
    // SAFETY: the strings are static, and the registry is not freed: the kernels stay registered.
    let mut status =
        unsafe { (i.aoti_torch_library_init_impl)(namespace, key, c"tilewright".as_ptr(), line!(), &raw mut registry) };
    for (name, kernel) in kernels {
        if status == 0 {
            // SAFETY: as above.
            status = unsafe { (i.torch_library_impl)(registry, name.as_ptr(), *kernel, VERSION) };
        }
    }
    match status {
        0 => Ok(()),
        _ => Err(PyImportError::new_err("tilewright.torch: PyTorch did not register the ops: its log says why")),
    }
}

/// Throws a C++ exception with this message, which PyTorch converts to `RuntimeError`.
pub fn throw(message: &CStr) {
    let place = c"tilewright".as_ptr();
    // SAFETY: the strings are valid until the function has thrown.
    unsafe { (interface().aoti_torch_check)(false, place, place, 0, message.as_ptr()) }
}

/// The current stream of a GPU.
///
/// # Errors
/// A PyTorch without CUDA, which has no tensors on a GPU.
pub fn current_stream(ordinal: usize) -> PyResult<u64> {
    let mut stream = null_mut();
    let found = interface().current_stream.map(|current| {
        // SAFETY: writes one pointer.
        unsafe { current(ordinal as i32, &raw mut stream) }
    });
    match found {
        Some(0) => Ok(stream as u64),
        _ => Err(PyValueError::new_err(format!("PyTorch has no current stream of GPU {ordinal}"))),
    }
}

/// The exception of PyTorch's own ops where memory is short.
fn out_of_memory(place: Place, message: String) -> PyErr {
    let class = Python::attach(|py| {
        let class = py.import("torch").and_then(|torch| torch.getattr("OutOfMemoryError")).ok()?;
        class.cast_into::<PyType>().ok().map(|class| PyErr::from_type(class, message.clone()))
    });
    match (place, class) {
        (Place::Gpu(_), Some(error)) => error,
        _ => PyMemoryError::new_err(message),
    }
}

/// A tensor of PyTorch's C++ library, which this holds a reference to.
pub struct Handle(Tensor);

// SAFETY: PyTorch's reference counts are atomic, and its tensors are used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is owned, and not used any more.
        unsafe { (interface().aoti_torch_delete_tensor_object)(self.0) };
    }
}

/// Takes a list of tensors, which is an argument of a [`Kernel`].
///
/// # Safety
/// `word` is such a list, which nobody else frees.
pub unsafe fn tensors_from_word(word: u64) -> Vec<Handle> {
    let (i, list, mut length) = (interface(), word as List, 0);
    // SAFETY: the list is alive; each item is a reference of its own.
    unsafe {
        (i.torch_list_size)(list, &raw mut length);
        let item = |index| {
            let mut word = 0;
            (i.torch_list_get_item)(list, index, &raw mut word);
            Handle::from_word(word)
        };
        let items = (0..length).map(item).collect();
        (i.torch_delete_list)(list);
        items
    }
}

/// Where a tensor is, and how its elements lie there.
pub struct Description {
    pub address: u64,
    pub dtype: Dtype,
    pub shape: Dims,
    pub strides: Dims,
    pub place: Place,
    /// Of the first element in the storage, in elements.
    pub offset: u64,
    /// Size of the storage.
    pub bytes: u64,
}

impl Handle {
    /// Takes an argument of a [`Kernel`].
    ///
    /// # Safety
    /// `word` is a tensor, which nobody else frees.
    pub unsafe fn from_word(word: u64) -> Handle {
        Handle(word as Tensor)
    }

    /// Gives the tensor up, as a result of a [`Kernel`].
    pub fn into_word(self) -> u64 {
        std::mem::ManuallyDrop::new(self).0 as u64
    }

    /// Reads one property. `unset` is replaced.
    fn get<T>(&self, f: unsafe extern "C-unwind" fn(Tensor, *mut T) -> Status, unset: T) -> PyResult<T> {
        let mut value = unset;
        // SAFETY: the tensor is alive, and the function writes one value.
        match unsafe { f(self.0, &raw mut value) } {
            0 => Ok(value),
            _ => Err(PyValueError::new_err("PyTorch cannot describe a tensor: its log says why")),
        }
    }

    /// Reads what a kernel needs to know of the argument `name`.
    ///
    /// # Errors
    /// `TypeError` for elements that kernels do not know; `ValueError` for a sparse tensor or another device.
    pub fn describe(&self, name: &str) -> PyResult<Description> {
        let i = interface();
        let code = self.get(i.aoti_torch_get_dtype, 0)?;
        let dtype = i.dtypes.iter().find(|(known, _)| *known == code).map(|(_, dtype)| *dtype);
        let dtype = dtype
            .ok_or_else(|| PyTypeError::new_err(format!("{name}: kernels have no element type for this tensor")))?;
        let device = self.get(i.aoti_torch_get_device_type, 0)?;
        let place = if device == i.cpu {
            Place::Cpu
        } else if device == i.cuda {
            Place::Gpu(self.get(i.aoti_torch_get_device_index, 0)?.max(0) as usize)
        } else {
            let text = format!("{name}: kernels run on NVIDIA GPUs and the CPU, found a tensor on another device");
            return Err(PyValueError::new_err(text));
        };
        // SAFETY: takes no arguments.
        if self.get(i.aoti_torch_get_layout, 0)? != unsafe { (i.aoti_torch_layout_strided)() } {
            return Err(PyValueError::new_err(format!("{name}: expected a dense tensor, found a sparse one")));
        }
        let rank = self.get(i.aoti_torch_get_dim, 0)? as usize;
        let (shape, strides) =
            (self.get(i.aoti_torch_get_sizes, null_mut())?, self.get(i.aoti_torch_get_strides, null_mut())?);
        let read = |entries: *mut i64| match rank {
            0 => Dims::new(),
            // SAFETY: both have one entry per dimension, and live as long as the tensor.
            _ => Dims::from_slice(unsafe { std::slice::from_raw_parts(entries, rank) }),
        };
        Ok(Description {
            address: self.get(i.aoti_torch_get_data_ptr, null_mut())? as u64,
            dtype,
            shape: read(shape),
            strides: read(strides),
            place,
            offset: self.offset()?,
            bytes: self.get(i.aoti_torch_get_storage_size, 0)? as u64,
        })
    }

    /// A new tensor without values.
    ///
    /// # Errors
    /// `torch.OutOfMemoryError` on a GPU, `MemoryError` on the CPU; `TypeError` for elements that PyTorch does not have.
    pub fn empty(shape: &[i64], strides: &[i64], dtype: Dtype, place: Place) -> PyResult<Handle> {
        let i = interface();
        let code = i.dtypes.iter().find(|(_, known)| *known == dtype).map(|(code, _)| *code);
        let code = code.ok_or_else(|| PyTypeError::new_err(format!("PyTorch has no tensors of {dtype}")))?;
        let (device, index) = match place {
            Place::Cpu => (i.cpu, 0),
            Place::Gpu(ordinal) => (i.cuda, ordinal as i32),
        };
        let (mut tensor, rank) = (null_mut(), shape.len() as i64);
        let (shape_of, strides_of) = (shape.as_ptr(), strides.as_ptr());
        // SAFETY: both have `rank` entries.
        let status =
            unsafe { (i.aoti_torch_empty_strided)(rank, shape_of, strides_of, code, device, index, &raw mut tensor) };
        match status {
            0 => Ok(Handle(tensor)),
            _ => Err(out_of_memory(
                place,
                format!("out of memory: PyTorch cannot allocate a tensor of the shape {shape:?} of {dtype} on {place}"),
            )),
        }
    }

    /// A tensor on the same memory, whose first element is `offset` elements after that of this one.
    ///
    /// # Errors
    /// Those of PyTorch.
    pub fn strided(&self, shape: &[i64], strides: &[i64], offset: i64) -> PyResult<Handle> {
        let (mut tensor, rank) = (null_mut(), shape.len() as i64);
        let (shape, strides) = (shape.as_ptr(), strides.as_ptr());
        // SAFETY: both have `rank` entries.
        let status = unsafe {
            (interface().aoti_torch__reinterpret_tensor)(self.0, rank, shape, strides, offset, &raw mut tensor)
        };
        match status {
            0 => Ok(Handle(tensor)),
            _ => Err(PyValueError::new_err("PyTorch cannot make a view of a tensor: its log says why")),
        }
    }

    /// The storage's element that is the first of this tensor.
    ///
    /// # Errors
    /// Those of PyTorch.
    pub fn offset(&self) -> PyResult<u64> {
        Ok(self.get(interface().aoti_torch_get_storage_offset, 0)? as u64)
    }

    /// Copies the values of another tensor of the same shape.
    ///
    /// # Errors
    /// Those of PyTorch.
    pub fn copy_from(&self, other: &Handle) -> PyResult<()> {
        // SAFETY: both are alive.
        match unsafe { (interface().aoti_torch_copy_)(self.0, other.0, 1) } {
            0 => Ok(()),
            _ => Err(PyValueError::new_err("PyTorch cannot copy a tensor: its log says why")),
        }
    }
}
