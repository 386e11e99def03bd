//! Arrays of Python: NumPy arrays, PyTorch tensors, and objects with `__array_interface__`, `__cuda_array_interface__` or
//! `__dlpack__`.

use pyo3::exceptions::{PyAttributeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use smallvec::SmallVec;
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::{Device, Dtype, Element, View, ViewMut};

use crate::call::shown;
use crate::device::{Place, gpu_of_address};
use crate::dlpack;
use crate::torch::abi::Handle;

/// Which library's array this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Torch,
    Interface,
}

pub type Dims = SmallVec<[i64; 6]>;

/// What keeps the memory of an array.
pub enum Owner {
    Object(Py<PyAny>),
    /// A tensor of PyTorch's C++ library.
    Tensor(Handle),
}

/// An array: its memory, and how its elements lie there. Keeps the memory.
pub struct Array {
    pub owner: Owner,
    /// Address of the first element.
    pub address: u64,
    pub dtype: Dtype,
    pub shape: Dims,
    /// In elements.
    pub strides: Dims,
    pub writable: bool,
    pub place: Place,
    pub source: Source,
    /// The stream that the array's interface names.
    pub stream: Option<u64>,
}

/// Parts of PyTorch that this module calls.
pub struct Torch {
    tensor: Py<PyAny>,
    /// Returns the handle of the current stream of a GPU; absent in builds for the CPU.
    pub current_stream: Option<Py<PyAny>>,
    dtypes: Vec<(Py<PyAny>, Dtype)>,
}

/// Element types by the names that PyTorch and NumPy have for them.
pub const DTYPES: [(&str, Dtype); 15] = [
    ("bool", Dtype::Bool),
    ("int8", Dtype::I8),
    ("int16", Dtype::I16),
    ("int32", Dtype::I32),
    ("int64", Dtype::I64),
    ("uint8", Dtype::U8),
    ("uint16", Dtype::U16),
    ("uint32", Dtype::U32),
    ("uint64", Dtype::U64),
    ("float8_e4m3fn", Dtype::F8E4M3),
    ("float8_e5m2", Dtype::F8E5M2),
    ("float16", Dtype::F16),
    ("bfloat16", Dtype::Bf16),
    ("float32", Dtype::F32),
    ("float64", Dtype::F64),
];

/// PyTorch, if the program has imported it.
///
/// # Errors
/// A PyTorch without the expected attributes.
pub fn torch(py: Python<'_>) -> PyResult<Option<&Torch>> {
    static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
    if let Some(torch) = TORCH.get(py) {
        return Ok(Some(torch));
    }
    let modules = py.import("sys")?.getattr("modules")?;
    let Some(module) = modules.cast::<PyDict>()?.get_item("torch")? else { return Ok(None) };
    // While PyTorch is being imported there are no tensors.
    let Ok(tensor) = module.getattr("Tensor") else { return Ok(None) };
    let of_name = |name: &str| module.getattr(name).ok().map(Bound::unbind);
    let dtypes: Vec<_> = DTYPES.iter().filter_map(|(name, dtype)| Some((of_name(name)?, *dtype))).collect();
    // It defines its class of tensors before their types.
    if dtypes.is_empty() {
        return Ok(None);
    }
    let current_stream = module.getattr("_C").and_then(|c| c.getattr("_cuda_getCurrentRawStream")).ok();
    let torch = Torch { tensor: tensor.unbind(), current_stream: current_stream.map(Bound::unbind), dtypes };
    Ok(Some(TORCH.get_or_init(py, || torch)))
}

impl Array {
    /// Reads `object`, the argument `name`.
    ///
    /// # Errors
    /// `TypeError` for an object that is no array or has another kind of elements; `ValueError` for memory that a
    /// kernel cannot use: freed, misaligned, of a device that is not supported.
    pub fn new(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let py = object.py();
        if let Some(torch) = torch(py)?
            && object.is_instance(torch.tensor.bind(py))?
        {
            return from_torch(torch, name, object);
        }
        match numpy_class(object)? {
            Some(NumpyClass::Scalar) => {
                let text = format!("{name}: expected an array, found a NumPy scalar: use np.array(…)");
                return Err(PyTypeError::new_err(text));
            }
            Some(NumpyClass::Masked) => return Err(masked(name)),
            None => {}
        }
        for (attribute, gpu) in
            [(intern!(py, "__cuda_array_interface__"), true), (intern!(py, "__array_interface__"), false)]
        {
            match object.getattr(attribute) {
                Ok(interface) => return from_interface(name, object, interface.cast::<PyDict>()?, gpu),
                Err(error) if error.is_instance_of::<PyAttributeError>(py) => {}
                Err(error) => return Err(error),
            }
        }
        if let Some(array) = dlpack::read(name, object)? {
            return checked(name, array);
        }
        Err(PyTypeError::new_err(format!(
            "{name}: expected an array (NumPy, PyTorch, or with __array_interface__, __cuda_array_interface__ or \
             __dlpack__), found {}",
            object.get_type().name()?
        )))
    }

    /// Reads an optional argument.
    ///
    /// # Errors
    /// As [`Array::new`].
    pub fn optional(name: &str, object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Array>> {
        object.map(|object| Array::new(name, object)).transpose()
    }

    /// Number of elements.
    pub fn elements(&self) -> i64 {
        self.shape.iter().product()
    }

    /// Whether the elements are those of one range of memory, each once, in any order of the dimensions.
    pub fn is_dense(&self) -> bool {
        let mut dims: Vec<(i64, i64)> = self.strides.iter().copied().zip(self.shape.iter().copied()).collect();
        dims.retain(|&(_, n)| n != 1);
        dims.sort_unstable();
        let steps = dims.iter().try_fold(1, |next, &(stride, n)| (stride == next).then_some(next * n));
        self.shape.contains(&0) || steps.is_some()
    }

    /// The number of elements from the first to the one with the highest address.
    pub fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let last: i64 = self.shape.iter().zip(&self.strides).map(|(n, stride)| (n - 1) * stride.max(&0)).sum();
        last as usize + 1
    }

    /// The bytes from the lowest to the highest element, as addresses.
    fn byte_range(&self) -> (u64, u64) {
        if self.shape.contains(&0) {
            return (self.address, self.address);
        }
        let size = self.dtype.size() as u64;
        let below: i64 = self.shape.iter().zip(&self.strides).map(|(n, stride)| (n - 1) * stride.min(&0)).sum();
        (self.address - below.unsigned_abs() * size, self.address + self.span() as u64 * size)
    }

    /// Whether the memory of both may have a byte in common.
    pub fn overlaps(&self, other: &Array) -> bool {
        let ((a, a_end), (b, b_end)) = (self.byte_range(), other.byte_range());
        self.place == other.place && a < b_end && b < a_end
    }

    /// The Python object, if the array was made of one.
    pub fn object<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        match &self.owner {
            Owner::Object(object) => Some(object.bind(py)),
            Owner::Tensor(_) => None,
        }
    }

    /// The tensor, if the array was made of one.
    pub fn into_handle(self) -> Option<Handle> {
        match self.owner {
            Owner::Object(_) => None,
            Owner::Tensor(handle) => Some(handle),
        }
    }

    /// The tensor of PyTorch's C++ library, if the array was made of one.
    pub fn handle(&self) -> Option<&Handle> {
        match &self.owner {
            Owner::Object(_) => None,
            Owner::Tensor(handle) => Some(handle),
        }
    }

    /// Reads a tensor of PyTorch's C++ library.
    ///
    /// # Errors
    /// As [`Array::new`].
    pub fn of_handle(name: &str, handle: Handle) -> PyResult<Array> {
        let description = handle.describe(name)?;
        let array = Array {
            address: description.address,
            dtype: description.dtype,
            shape: description.shape,
            strides: description.strides,
            writable: true,
            place: description.place,
            source: Source::Torch,
            stream: None,
            owner: Owner::Tensor(handle),
        };
        in_storage(name, array, description.offset, description.bytes)
    }

    /// The elements as `T`, from the first to the one with the highest address.
    ///
    /// # Errors
    /// Elements of another type.
    pub fn view<'a, T: Element>(&'a self, at: Argument<'a>) -> tilewright::Result<View<'a, T>> {
        self.expect::<T>(at)?;
        // SAFETY: this array holds the object that owns the memory, which has `span` elements from its address on (read
        // in `from_torch` and `from_interface`, with the alignment of the type). Other use of the memory meanwhile is
        // the Python program's matter, as for every library that releases the GIL.
        Ok(unsafe { View::from_address(at.device, self.address, self.span()) })
    }

    /// As [`Array::view`], for writing.
    ///
    /// # Errors
    /// As [`Array::view`].
    pub fn view_mut<'a, T: Element>(&'a self, at: Argument<'a>) -> tilewright::Result<ViewMut<'a, T>> {
        self.expect::<T>(at)?;
        // SAFETY: as above; callers have checked that no other argument overlaps (`ops::Call`).
        Ok(unsafe { ViewMut::from_address(at.device, self.address, self.span()) })
    }

    fn expect<T: Element>(&self, at: Argument) -> tilewright::Result<()> {
        if self.dtype == T::DTYPE {
            return Ok(());
        }
        Err(at.error(format!("elements of type {}", T::DTYPE), self.dtype.to_string()))
    }

    /// The array as a tensor of rank `R`.
    ///
    /// # Errors
    /// Another rank or element type; negative strides.
    pub fn tensor<'a, T: Element, const R: usize>(&'a self, at: Argument<'a>) -> tilewright::Result<Tensor<'a, T, R>> {
        let (shape, strides) = self.dims(at)?;
        Tensor::strided(self.view(at)?, shape, strides)
    }

    /// As [`Array::tensor`], for writing.
    ///
    /// # Errors
    /// As [`Array::tensor`]; also elements that overlap.
    pub fn tensor_mut<'a, T: Element, const R: usize>(
        &'a self,
        at: Argument<'a>,
    ) -> tilewright::Result<TensorMut<'a, T, R>> {
        let (shape, strides) = self.dims(at)?;
        TensorMut::strided(self.view_mut(at)?, shape, strides)
    }

    fn expect_forward(&self, at: Argument) -> tilewright::Result<()> {
        if self.shape.iter().zip(&self.strides).all(|(&extent, &stride)| stride >= 0 || extent <= 1) {
            return Ok(());
        }
        let found = format!("the strides {:?}: pass a contiguous copy", self.strides);
        Err(at.error("strides of at least 0".into(), found))
    }

    fn dims<const R: usize>(&self, at: Argument) -> tilewright::Result<([usize; R], [i64; R])> {
        self.expect_forward(at)?;
        let shape: Option<[i64; R]> = self.shape.as_slice().try_into().ok();
        let strides: Option<[i64; R]> = self.strides.as_slice().try_into().ok();
        match (shape, strides) {
            (Some(shape), Some(strides)) => Ok((shape.map(|n| n as usize), strides)),
            _ => Err(at.error(format!("{R} dimensions"), format!("the shape {:?}", self.shape))),
        }
    }

    /// The array as a matrix: the last dimension is the columns, all others are one.
    ///
    /// # Errors
    /// Another element type; no dimension; leading dimensions whose strides do not make them one.
    pub fn rows<'a, T: Element>(&'a self, at: Argument<'a>) -> tilewright::Result<Tensor<'a, T, 2>> {
        let (shape, strides) = self.matrix(at)?;
        Tensor::strided(self.view(at)?, shape, strides)
    }

    /// As [`Array::rows`], for writing.
    ///
    /// # Errors
    /// As [`Array::rows`].
    pub fn rows_mut<'a, T: Element>(&'a self, at: Argument<'a>) -> tilewright::Result<TensorMut<'a, T, 2>> {
        let (shape, strides) = self.matrix(at)?;
        TensorMut::strided(self.view_mut(at)?, shape, strides)
    }

    fn matrix(&self, at: Argument) -> tilewright::Result<([usize; 2], [i64; 2])> {
        self.expect_forward(at)?;
        let Some((d, lead)) = self.shape.split_last() else {
            return Err(at.error("at least one dimension".into(), "none".into()));
        };
        let (rows, stride) = self.merged(0..lead.len()).ok_or_else(|| {
            at.error(
                "leading dimensions that are one in memory: make a contiguous copy".into(),
                format!("the shape {:?} with the strides {:?}", self.shape, self.strides),
            )
        })?;
        Ok(([rows, *d as usize], [stride, self.strides[lead.len()]]))
    }

    /// Consecutive dimensions as one, with its stride; `None` if their strides do not allow it.
    pub fn merged(&self, dims: std::ops::Range<usize>) -> Option<(usize, i64)> {
        let count: i64 = self.shape[dims.clone()].iter().product();
        if count == 0 {
            return Some((0, 0));
        }
        let (mut extent, mut inner) = (1, None);
        for dim in dims.rev().filter(|&dim| self.shape[dim] != 1) {
            let stride = *inner.get_or_insert(self.strides[dim]);
            if self.strides[dim] != stride * extent {
                return None;
            }
            extent *= self.shape[dim];
        }
        Some((count as usize, inner.unwrap_or(0)))
    }
}

/// The device of a launch, and the argument's place in it, for messages.
#[derive(Clone, Copy)]
pub struct Argument<'a> {
    pub device: &'a Device,
    pub kernel: &'static str,
    pub name: &'static str,
}

impl Argument<'_> {
    /// An error about this argument.
    pub fn error(&self, expected: String, found: String) -> tilewright::Error {
        tilewright::Error::Argument { kernel: format!("`{}`", self.kernel), name: self.name, expected, found }
    }
}

fn from_torch(torch: &Torch, name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Array> {
    let py = tensor.py();
    let element_type = tensor.getattr(intern!(py, "dtype"))?;
    let dtype = torch.dtypes.iter().find(|(known, _)| known.is(&element_type)).map(|(_, dtype)| *dtype);
    let dtype = dtype.ok_or_else(|| {
        PyTypeError::new_err(format!("{name}: kernels have no element type for a tensor of {element_type}"))
    })?;
    let place = match tensor.call_method0(intern!(py, "get_device"))?.extract::<i64>()? {
        index if index >= 0 && tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? => Place::Gpu(index as usize),
        _ if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? => Place::Cpu,
        _ => {
            let device = tensor.getattr("device")?;
            return Err(PyValueError::new_err(format!(
                "{name}: kernels run on NVIDIA GPUs and the CPU, found a tensor on {device}"
            )));
        }
    };
    let strides = dims(&tensor.call_method0(intern!(py, "stride"))?)?;
    let shape = dims(&tensor.getattr(intern!(py, "shape"))?)?;
    if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        return Err(PyValueError::new_err(format!("{name}: its negation is pending: call resolve_neg()")));
    }
    let address: u64 = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let array = Array {
        owner: Owner::Object(tensor.clone().unbind()),
        address,
        dtype,
        shape,
        strides,
        writable: true,
        place,
        source: Source::Torch,
        stream: None,
    };
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let bytes: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let offset: u64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
    in_storage(name, array, offset, bytes)
}

/// An array of a tensor, checked for memory: its storage has `bytes`, and it begins at the element `offset`.
fn in_storage(name: &str, array: Array, offset: u64, bytes: u64) -> PyResult<Array> {
    let span = array.span();
    let needed = (offset + span as u64).saturating_mul(array.dtype.size() as u64);
    if span > 0 && (array.address == 0 || needed > bytes) {
        return Err(PyValueError::new_err(format!(
            "{name}: its memory was freed: a tensor of {span} elements has a storage of {bytes} bytes"
        )));
    }
    checked(name, array)
}

fn dims(tuple: &Bound<'_, PyAny>) -> PyResult<Dims> {
    tuple.cast::<PyTuple>()?.iter().map(|n| n.extract()).collect()
}

/// An array checked for the alignment of its elements, and for a range of memory: later arithmetic on it does not overflow.
fn checked(name: &str, array: Array) -> PyResult<Array> {
    let (mut below, mut above) = (0_i128, 0_i128);
    for (&n, &stride) in array.shape.iter().zip(&array.strides).filter(|_| !array.shape.contains(&0)) {
        let reach = i128::from(n - 1) * i128::from(stride);
        (below, above) = (below.saturating_add(reach.min(0)), above.saturating_add(reach.max(0)));
    }
    let extents = array.shape.iter().try_fold(array.dtype.size() as i64, |bytes, &n| bytes.checked_mul(n.max(1)));
    let size = array.dtype.size() as i128;
    let at = |elements: i128| i128::from(array.address).saturating_add(elements.saturating_mul(size));
    if extents.is_none()
        || at(below) < 0
        || at(above + 1) > i128::from(u64::MAX)
        || above - below >= i128::from(i64::MAX) / size
    {
        return Err(PyValueError::new_err(format!(
            "{name}: its elements are outside of memory: the address is {:#x}, the shape {:?} and the strides {:?}, in \
             elements",
            array.address, array.shape, array.strides
        )));
    }
    if array.address.is_multiple_of(array.dtype.size() as u64) {
        return Ok(array);
    }
    Err(PyValueError::new_err(format!(
        "{name}: elements of {} are not aligned to {} bytes: make a copy",
        array.dtype,
        array.dtype.size()
    )))
}

/// The element type of a NumPy array, by the name of its type where the interface has no word for it.
fn interface_dtype(name: &str, object: &Bound<'_, PyAny>, typestr: &str) -> PyResult<Dtype> {
    let code = typestr.trim_start_matches(['<', '>', '|', '=']);
    let by_code = match code {
        "b1" => Some(Dtype::Bool),
        "i1" => Some(Dtype::I8),
        "i2" => Some(Dtype::I16),
        "i4" => Some(Dtype::I32),
        "i8" => Some(Dtype::I64),
        "u1" => Some(Dtype::U8),
        "u2" => Some(Dtype::U16),
        "u4" => Some(Dtype::U32),
        "u8" => Some(Dtype::U64),
        "f2" => Some(Dtype::F16),
        "f4" => Some(Dtype::F32),
        "f8" => Some(Dtype::F64),
        _ => None,
    };
    // Types of the package ml_dtypes, whose words only say how many bytes they have.
    let by_name =
        || match (object.getattr("dtype").ok()?.getattr("name").ok()?.extract::<String>().ok()?.as_str(), code) {
            ("bfloat16", "V2" | "f2") => Some(Dtype::Bf16),
            ("float8_e4m3fn", "V1" | "f1") => Some(Dtype::F8E4M3),
            ("float8_e5m2", "V1" | "f1") => Some(Dtype::F8E5M2),
            _ => None,
        };
    // The code of ml_dtypes' types may be that of another type.
    let dtype = by_name().or(by_code);
    let swapped = typestr.starts_with('>') && dtype.is_none_or(|dtype| dtype.size() > 1);
    let itemsize = || object.getattr("dtype").ok()?.getattr("itemsize").ok()?.extract::<usize>().ok();
    if let (Some(dtype), Some(itemsize)) = (dtype, itemsize())
        && dtype.size() != itemsize
    {
        return Err(PyTypeError::new_err(format!(
            "{name}: its array interface has elements of type {}, its dtype has {itemsize} bytes",
            shown(typestr)
        )));
    }
    dtype.filter(|_| !swapped).ok_or_else(|| {
        let found = object.getattr("dtype").map_or_else(|_| shown(typestr), shown);
        let hint = if swapped { ": convert it to this machine's byte order" } else { "" };
        PyTypeError::new_err(format!("{name}: kernels have no element type for an array of {found}{hint}"))
    })
}

fn from_interface(name: &str, object: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>, gpu: bool) -> PyResult<Array> {
    let py = object.py();
    let entry = |key: &str| {
        interface
            .get_item(key)?
            .ok_or_else(|| PyTypeError::new_err(format!("{name}: its array interface has no entry `{key}`")))
    };
    let dtype = interface_dtype(name, object, entry("typestr")?.extract::<&str>()?)?;
    let shape = dims(&entry("shape")?)?;
    if shape.iter().any(|&n| n < 0) {
        return Err(PyValueError::new_err(format!("{name}: its array interface has the shape {shape:?}")));
    }
    if interface.get_item("mask")?.is_some_and(|mask| !mask.is_none()) {
        return Err(masked(name));
    }
    let data = entry("data")?;
    let wrong_data = |_| {
        let found = shown(&data);
        PyValueError::new_err(format!(
            "{name}: its array interface has the data {found}, expected (address, read-only)"
        ))
    };
    let (address, read_only): (u64, bool) = data.extract().map_err(wrong_data)?;
    let size = dtype.size() as i64;
    let strides = match interface.get_item("strides")?.filter(|strides| !strides.is_none()) {
        None => row_major(&shape),
        Some(bytes) => {
            let bytes = dims(&bytes)?;
            if bytes.len() != shape.len() {
                let (strides, dims) = (bytes.len(), shape.len());
                return Err(PyValueError::new_err(format!(
                    "{name}: its array interface has {strides} strides and {dims} dimensions"
                )));
            }
            // A dimension of one element has any stride.
            if shape.iter().zip(&bytes).any(|(&n, stride)| n > 1 && stride % size != 0) {
                return Err(PyValueError::new_err(format!(
                    "{name}: its strides are not multiples of its element size: make a contiguous copy"
                )));
            }
            bytes.iter().map(|stride| stride / size).collect()
        }
    };
    let empty = shape.contains(&0);
    let place = match gpu {
        false => Place::Cpu,
        true if empty => Place::Gpu(0),
        true => Place::Gpu(gpu_of_address(py, address)?),
    };
    let stream = match interface.get_item("stream")?.filter(|stream| gpu && !stream.is_none()) {
        None => None,
        Some(stream) => match stream.extract::<u64>() {
            Ok(handle) if handle > 0 => Some(handle),
            _ => {
                let found = shown(&stream);
                return Err(PyValueError::new_err(format!(
                    "{name}: its array interface has the stream {found}, expected None, 1, 2 or a handle"
                )));
            }
        },
    };
    if !empty && address == 0 {
        return Err(PyValueError::new_err(format!("{name}: it has no memory")));
    }
    let array = Array {
        owner: Owner::Object(object.clone().unbind()),
        address,
        dtype,
        shape,
        strides,
        writable: !read_only,
        place,
        source: Source::Interface,
        stream,
    };
    checked(name, array)
}

fn masked(name: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "{name}: expected an array without a mask: kernels would ignore it; use its filled(…), or its data"
    ))
}

/// Objects of NumPy with an array interface that says too little.
enum NumpyClass {
    /// Its array interface names memory that is already freed.
    Scalar,
    /// Its array interface has no mask.
    Masked,
}

fn numpy_class(object: &Bound<'_, PyAny>) -> PyResult<Option<NumpyClass>> {
    for class in object.get_type().mro() {
        let class = class.cast_into::<PyType>()?;
        let name = class.name()?;
        let module = || class.module().map(|module| module.to_string());
        match name.to_str()? {
            "generic" if module()? == "numpy" => return Ok(Some(NumpyClass::Scalar)),
            "MaskedArray" if module()?.starts_with("numpy.ma") => return Ok(Some(NumpyClass::Masked)),
            _ => {}
        }
    }
    Ok(None)
}

pub fn row_major(shape: &[i64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1);
    }
    strides
}
