//! Gives Tilewright kernels access to the memory of candle tensors, without copies.
//!
//! - [`Read`] borrows a tensor's elements for a kernel that reads them.
//! - [`OutputAlloc`] is a new allocation that a kernel fills and that then becomes a tensor.
//! - [`write()`] borrows a tensor's elements mutably, for in-place kernels.
//!
//! Kernels run on the CPU, or on candle's own CUDA stream: they are ordered with candle's work.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;

use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, StorageRef, Tensor, WithDType,
};
use half::slice::HalfFloatSliceExt;
use tilewright::{Device as KernelDevice, Element, F8E4M3, View, ViewMut, kernels};

/// Element types that candle and Tilewright kernels share.
pub trait Elem: WithDType + Element + bytemuck::Pod + CudaElem {
    #[doc(hidden)]
    fn cpu_slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]>;

    /// Converts as many elements as the shorter slice has.
    fn to_f32s(from: &[Self], to: &mut [f32]) {
        to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f64() as f32);
    }

    /// Converts as many elements as the shorter slice has, with round-to-nearest.
    fn from_f32s(from: &[f32], to: &mut [Self]) {
        to.iter_mut().zip(from).for_each(|(to, x)| *to = Self::from_f64(*x as f64));
    }
}

/// Element types of candle's tensors that kernels read: [`Elem`], and 8-bit floats.
pub trait ReadElem: Element + bytemuck::Pod {
    /// candle's type of the same bits.
    type Candle: WithDType + bytemuck::Pod + CudaElem;
}
impl<T: Elem> ReadElem for T {
    type Candle = T;
}
impl ReadElem for F8E4M3 {
    type Candle = float8::F8E4M3;
}

/// Requirements of candle's CUDA back end on an element type.
#[cfg(feature = "cuda")]
pub trait CudaElem: candle_core::cuda::CudaDType + candle_core::cuda::cudarc::driver::DeviceRepr {}
#[cfg(feature = "cuda")]
impl<T: candle_core::cuda::CudaDType + candle_core::cuda::cudarc::driver::DeviceRepr> CudaElem for T {}
/// Requirements of candle's CUDA back end on an element type: none in a build without it.
#[cfg(not(feature = "cuda"))]
pub trait CudaElem {}
#[cfg(not(feature = "cuda"))]
impl<T> CudaElem for T {}

macro_rules! elems {
    ($($ty:ty => $variant:ident $({ $($faster:tt)* })?),* $(,)?) => {$(
        impl Elem for $ty {
            $($($faster)*)?


            fn cpu_slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(elements) => Ok(elements),
                    other => Err(wrong_dtype(<$ty as Element>::DTYPE, candle_core::backend::BackendStorage::dtype(other))),
                }
            }
        }
    )*};
}
macro_rules! half_slices {
    ($ty:ty => $variant:ident) => {
        elems!($ty => $variant {
            fn to_f32s(from: &[Self], to: &mut [f32]) {
                let n = from.len().min(to.len());
                from[..n].convert_to_f32_slice(&mut to[..n]);
            }

            fn from_f32s(from: &[f32], to: &mut [Self]) {
                let n = from.len().min(to.len());
                to[..n].convert_from_f32_slice(&from[..n]);
            }
        });
    };
}
half_slices!(half::bf16 => BF16);
half_slices!(half::f16 => F16);
elems!(f32 => F32, f64 => F64, u32 => U32, i32 => I32, i64 => I64);

fn wrong_dtype(expected: impl std::fmt::Display, found: DType) -> candle_core::Error {
    candle_core::Error::Msg(format!("expected a tensor of {expected}, found {}", found.as_str()))
}

/// Wraps an error of the runtime or of a kernel's argument checks as a candle error.
pub fn kernel_error(error: tilewright::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// Evaluates an expression with a type alias for the element type, one of f32, bf16 and f16.
#[macro_export]
macro_rules! for_float_type {
    ($dtype:expr, $what:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::candle_core::DType::BF16 => {
                type $T = $crate::half::bf16;
                $body
            }
            $crate::candle_core::DType::F16 => {
                type $T = $crate::half::f16;
                $body
            }
            other => Err($crate::candle_core::Error::Msg(format!(
                "{} takes f32, bf16 and f16, found a tensor of {}: convert it with to_dtype",
                $what,
                other.as_str()
            ))),
        }
    };
}
pub use crate::for_float_type;

/// Returns a flat tensor of zeros in memory that other processes can map (CUDA IPC): see
/// [`OutputAlloc::ipc_shareable`].
///
/// # Errors
/// The device is out of memory.
pub fn ipc_shareable_zeros<T: Elem>(device: &Device, len: usize) -> Result<Tensor> {
    let tensor = OutputAlloc::<T>::ipc_shareable(device, len)?.into_tensor(len);
    tensor.zero_set()?;
    Ok(tensor)
}

/// Returns the Tilewright device for a candle device. Cheap after the first call.
///
/// # Errors
/// A GPU or a back end that Tilewright kernels do not support.
pub fn kernel_device(device: &Device) -> Result<&'static KernelDevice> {
    static CPU: OnceLock<KernelDevice> = OnceLock::new();
    match device {
        Device::Cpu => Ok(CPU.get_or_init(KernelDevice::cpu)),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::kernel_device(cuda),
        other => Err(candle_core::Error::Msg(format!("Tilewright kernels do not run on {:?}", other.location()))),
    }
}

/// Opens GPU `ordinal` for candle and Tilewright, with its own stream. Returns the same device on every call, because
/// different streams do not wait for each other.
///
/// Disables the event tracking of cudarc, which records events around every use of every slice for the case of several
/// streams. All work of this program on the device uses its one stream; collectives, which have their own streams,
/// order them with events themselves.
///
/// # Errors
/// No such GPU.
#[cfg(feature = "cuda")]
pub fn open_cuda(ordinal: usize) -> Result<Device> {
    static OPEN: std::sync::Mutex<Vec<(usize, Device)>> = std::sync::Mutex::new(Vec::new());
    let mut open = OPEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some((_, device)) = open.iter().find(|(known, _)| *known == ordinal) {
        return Ok(device.clone());
    }
    let device = Device::new_cuda_with_stream(ordinal)?;
    // SAFETY: nothing was allocated yet, and memory of this device is used on its stream only, or ordered explicitly.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    open.push((ordinal, device.clone()));
    Ok(device)
}

/// A tensor's elements, borrowed for kernels that read them.
pub struct Read<'t, T: ReadElem> {
    storage: StorageRef<'t>,
    layout: &'t Layout,
    candle_device: &'t Device,
    device: &'static KernelDevice,
    elements: PhantomData<T>,
}

impl<'t, T: ReadElem> Read<'t, T> {
    /// Borrows `tensor`: nothing can write it while the borrow lives. Once another thread waits to write it, a second borrow
    /// of the same memory waits for that thread, and the thread for the first one: order writes with ops that read.
    ///
    /// # Errors
    /// The tensor has another dtype.
    pub fn new(tensor: &'t Tensor) -> Result<Read<'t, T>> {
        if tensor.dtype() != <T::Candle as WithDType>::DTYPE {
            return Err(wrong_dtype(<T as Element>::DTYPE, tensor.dtype()));
        }
        let device = kernel_device(tensor.device())?;
        let (storage, layout) = tensor.storage_and_layout();
        Ok(Read { storage, layout, candle_device: tensor.device(), device, elements: PhantomData })
    }

    /// The memory from the first element of the tensor to the end of its storage.
    fn tail_view(&self) -> Result<View<'_, T>> {
        let start = self.layout.start_offset();
        match &*self.storage {
            Storage::Cpu(storage) => {
                // An empty view may start beyond an empty storage.
                let elements = storage.as_slice::<T::Candle>()?.get(start..).unwrap_or_default();
                View::of_slice(self.device, bytemuck::cast_slice(elements)).map_err(kernel_error)
            }
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => cuda::view(self.device, storage, start),
            other => Err(candle_core::Error::Msg(format!(
                "Tilewright kernels do not run on {:?}",
                other.device().location()
            ))),
        }
    }

    /// The elements.
    ///
    /// # Errors
    /// The tensor is not contiguous.
    pub fn view(&self) -> Result<View<'_, T>> {
        if !self.layout.is_contiguous() {
            return Err(candle_core::Error::RequiresContiguous { op: "kernel" }.bt());
        }
        self.tail_view()?.slice(..self.layout.shape().elem_count()).map_err(kernel_error)
    }

    /// The elements in the shape and strides of the tensor.
    ///
    /// # Errors
    /// The rank of the tensor is not R.
    pub fn strided<const R: usize>(&self) -> Result<kernels::Tensor<'_, T, R>> {
        let (shape, strides) = (array::<R>(self.layout.dims())?, array::<R>(self.layout.stride())?);
        kernels::Tensor::strided(self.tail_view()?, shape, strides.map(|s| s as i64)).map_err(kernel_error)
    }

    /// The elements in another shape with the same number of elements.
    ///
    /// # Errors
    /// The tensor is not contiguous, or has fewer elements than the shape.
    pub fn dense<const R: usize>(&self, shape: [usize; R]) -> Result<kernels::Tensor<'_, T, R>> {
        kernels::Tensor::dense(self.view()?, shape).map_err(kernel_error)
    }

    /// The tensor as a matrix: the last dimension is the columns, all others are flattened to rows.
    ///
    /// # Errors
    /// No single stride leads from each row to the next: see [`with_rows`].
    pub fn rows(&self) -> Result<kernels::Tensor<'_, T, 2>> {
        let Some((shape, strides)) = row_strides(self.layout) else {
            return Err(candle_core::Error::RequiresContiguous { op: "kernel" }.bt());
        };
        kernels::Tensor::strided(self.tail_view()?, shape, strides).map_err(kernel_error)
    }

    /// The device on which kernels run.
    pub fn device(&self) -> &'static KernelDevice {
        self.device
    }

    /// The same device in candle.
    pub fn candle_device(&self) -> &'t Device {
        self.candle_device
    }
}

#[cfg(feature = "cuda")]
impl<T: ReadElem> Drop for Read<'_, T> {
    fn drop(&mut self) {
        // The kernels that read the elements are queued.
        if let Storage::Cuda(storage) = &*self.storage {
            cuda::was_read::<T>(storage);
        }
    }
}

/// Shape and strides of a tensor as a matrix, with all dimensions but the last flattened to rows; `None` if the rows
/// have no common stride.
fn row_strides(layout: &Layout) -> Option<([usize; 2], [i64; 2])> {
    let (Some((&d, outer)), Some((&by_element, outer_strides))) =
        (layout.dims().split_last(), layout.stride().split_last())
    else {
        return Some(([1, 1], [1, 1]));
    };
    let (mut rows, mut by_row) = (1, None);
    for (&n, &stride) in outer.iter().zip(outer_strides).rev().filter(|(n, _)| **n != 1) {
        match by_row {
            None => by_row = Some(stride),
            Some(by_row) if stride == by_row * rows => {}
            Some(_) if layout.shape().elem_count() > 0 => return None,
            Some(_) => {}
        }
        rows *= n;
    }
    Some(([rows, d], [by_row.unwrap_or(d.max(1)), by_element].map(|stride| stride as i64)))
}

/// Whether both tensors are in the same memory: an op that writes one waits for ever for a [`Read`] of the other.
pub(crate) fn same_storage(a: &Tensor, b: &Tensor) -> bool {
    let address = |x: &Tensor| std::ptr::from_ref::<Storage>(&x.storage_and_layout().0) as usize;
    address(a) == address(b)
}

/// The tensor itself if [`Read::rows`] takes it, else a contiguous copy with the gradient of candle's copy.
///
/// # Errors
/// The device is out of memory.
pub fn with_rows(tensor: &Tensor) -> Result<Tensor> {
    if row_strides(tensor.layout()).is_some() { Ok(tensor.clone()) } else { tensor.contiguous() }
}

fn array<const R: usize>(values: &[usize]) -> Result<[usize; R]> {
    <[usize; R]>::try_from(values)
        .map_err(|_| candle_core::Error::Msg(format!("expected a tensor of rank {R}, found rank {}", values.len())))
}

/// A tensor in a range of columns of a dense matrix.
#[derive(Clone, Debug)]
pub struct StridedColumns<const R: usize> {
    pub shape: [usize; R],
    pub strides: [i64; R],
    pub columns: Range<usize>,
}

/// An allocation for the output of a kernel, which then becomes a tensor.
pub struct OutputAlloc<T: Elem> {
    memory: OutputMemory<T>,
    /// Elements in use: an empty allocation on a GPU has memory of one element, because drivers refuse none.
    len: usize,
    device: &'static KernelDevice,
}

enum OutputMemory<T: Elem> {
    Cpu(Vec<T>),
    #[cfg(feature = "cuda")]
    Cuda(candle_core::cuda::cudarc::driver::CudaSlice<T>, candle_core::CudaDevice),
}

impl<T: Elem> OutputAlloc<T> {
    /// Allocates `len` elements with unspecified values.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn new(device: &Device, len: usize) -> Result<OutputAlloc<T>> {
        let on = kernel_device(device)?;
        let memory = match device {
            Device::Cpu => OutputMemory::Cpu(bytemuck::allocation::try_zeroed_vec(len).map_err(|()| {
                let requested = (len as u64).saturating_mul(size_of::<T>() as u64);
                kernel_error(tilewright::Error::HostMemory { requested })
            })?),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => OutputMemory::Cuda(cuda::allocate(cuda, len.max(1))?, cuda.clone()),
            other => {
                return Err(candle_core::Error::Msg(format!(
                    "Tilewright kernels do not run on {:?}",
                    other.location()
                )));
            }
        };
        Ok(OutputAlloc { memory, len, device: on })
    }

    /// As [`OutputAlloc::new`]; on a GPU the memory can be mapped by other processes (CUDA IPC): it belongs to no
    /// memory pool, and is freed when no tensor uses it any more.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn ipc_shareable(device: &Device, len: usize) -> Result<OutputAlloc<T>> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let memory = OutputMemory::Cuda(cuda::allocate_ipc_shareable(cuda, len)?, cuda.clone());
                Ok(OutputAlloc { memory, len, device: kernel_device(device)? })
            }
            _ => OutputAlloc::new(device, len),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All elements, writable.
    pub fn view(&mut self) -> Result<ViewMut<'_, T>> {
        match &mut self.memory {
            OutputMemory::Cpu(elements) => ViewMut::of_slice(self.device, elements).map_err(kernel_error),
            #[cfg(feature = "cuda")]
            OutputMemory::Cuda(slice, device) => {
                cuda::view_of_output(self.device, slice, device).slice(..self.len).map_err(kernel_error)
            }
        }
    }

    /// All elements in a shape with that number of elements, writable.
    ///
    /// # Errors
    /// The allocation has fewer elements than the shape.
    pub fn dense<const R: usize>(&mut self, shape: [usize; R]) -> Result<kernels::TensorMut<'_, T, R>> {
        kernels::TensorMut::dense(self.view()?, shape).map_err(kernel_error)
    }

    /// Splits the elements, a dense matrix [rows, d], into matrices by ranges of columns, for one kernel that writes
    /// all of them.
    ///
    /// # Errors
    /// Ranges that overlap or leave the matrix.
    pub fn columns<const N: usize>(
        &mut self,
        [rows, d]: [usize; 2],
        ranges: [Range<usize>; N],
    ) -> Result<[kernels::TensorMut<'_, T, 2>; N]> {
        self.strided_columns(
            [rows, d],
            ranges.map(|columns| StridedColumns { shape: [rows, columns.len()], strides: [d as i64, 1], columns }),
        )
    }

    /// Splits the elements, a dense matrix [rows, d], into tensors, for one kernel that writes all of them: for
    /// example the gradients of queries, keys and values of one packed projection.
    ///
    /// # Errors
    /// Ranges that overlap or leave the matrix, and tensors that leave their range.
    pub fn strided_columns<const N: usize, const R: usize>(
        &mut self,
        [rows, d]: [usize; 2],
        parts: [StridedColumns<R>; N],
    ) -> Result<[kernels::TensorMut<'_, T, R>; N]> {
        split_columns(self.device, self.view()?, [rows, d], parts)
    }

    /// Copies the elements of a contiguous tensor.
    ///
    /// # Errors
    /// A tensor of another dtype or one that is not contiguous; the device is out of memory.
    pub fn copy_of(tensor: &Tensor) -> Result<OutputAlloc<T>> {
        let mut copy = OutputAlloc::new(tensor.device(), tensor.elem_count())?;
        copy.view()?.copy_from(Read::<T>::new(tensor)?.view()?).map_err(kernel_error)?;
        Ok(copy)
    }

    /// Converts to candle storage.
    pub fn into_storage(self) -> Storage {
        match self.memory {
            OutputMemory::Cpu(elements) => Storage::Cpu(T::to_cpu_storage_owned(elements)),
            #[cfg(feature = "cuda")]
            OutputMemory::Cuda(mut slice, device) => {
                cuda::written(&mut slice, &device);
                Storage::Cuda(candle_core::CudaStorage::wrap_cuda_slice(slice, device))
            }
        }
    }

    /// Converts to a tensor of this shape, outside of the autograd graph.
    ///
    /// # Panics
    /// The shape has another number of elements than this memory.
    #[track_caller]
    pub fn into_tensor(self, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        assert_eq!(shape.elem_count(), self.len(), "the elements of the shape {:?} and of the memory", shape.dims());
        Tensor::from_storage(self.into_storage(), shape, candle_core::op::BackpropOp::none(), false)
    }
}

/// Splits the elements of `whole`, a dense matrix [rows, d] on the device, into tensors, for one kernel that writes all of them.
///
/// # Errors
/// Ranges that overlap or leave the matrix, and tensors that leave their range.
pub(crate) fn split_columns<'a, T: Elem, const N: usize, const R: usize>(
    device: &'a KernelDevice,
    whole: ViewMut<'a, T>,
    [rows, d]: [usize; 2],
    parts: [StridedColumns<R>; N],
) -> Result<[kernels::TensorMut<'a, T, R>; N]> {
    let inside = |StridedColumns { shape, strides, columns }: &StridedColumns<R>| {
        // A stride that is a multiple of d moves to another row, any other stride along a row.
        let (mut down, mut along) = (0_usize, 0_usize);
        for (&n, &stride) in shape.iter().zip(strides) {
            let (stride, steps) = (stride.unsigned_abs() as usize, n.saturating_sub(1));
            let (sum, stride) = match d > 0 && stride.is_multiple_of(d) {
                true => (&mut down, stride / d),
                false => (&mut along, stride),
            };
            *sum = sum.saturating_add(steps.saturating_mul(stride));
        }
        columns.end <= d && along < columns.len() && down < rows && strides.iter().all(|&s| s > 0)
    };
    let disjoint = |a: &Range<usize>, b: &Range<usize>| a.end <= b.start || b.end <= a.start;
    let apart = (0..N).all(|i| (0..i).all(|j| disjoint(&parts[i].columns, &parts[j].columns)));
    let fits = rows.checked_mul(d).is_some_and(|elements| elements <= whole.len()) && apart && parts.iter().all(inside);
    if !fits && !whole.is_empty() {
        let message = format!("{parts:?} are not disjoint parts of a matrix of {rows} rows and {d} columns");
        return Err(candle_core::Error::Msg(message));
    }
    let mut tensors = Vec::with_capacity(N);
    for StridedColumns { shape, strides, columns } in parts {
        // Parts of no elements can begin anywhere.
        let start = columns.start.min(whole.len());
        let address = whole.address() + (start * size_of::<T>()) as u64;
        // SAFETY: `whole` borrows these elements exclusively while the parts live, and the check above ensures that
        // no element is in two of them: rows and columns are those of one matrix, and the ranges of columns are
        // disjoint.
        let view = unsafe { ViewMut::from_address(device, address, whole.len() - start) };
        tensors.push(kernels::TensorMut::strided(view, shape, strides).map_err(kernel_error)?);
    }
    <[_; N]>::try_from(tensors).map_err(|_| {
        candle_core::Error::Msg("internal error: expected one tensor per range; please report this".into())
    })
}

/// Calls `f` with a mutable view of the elements of a contiguous tensor. The whole storage of the tensor is locked
/// during the call: `f` must not access another view of it, which would wait for ever.
///
/// # Errors
/// A tensor of another dtype, a tensor that is not contiguous, and those of `f`.
pub fn write<T: Elem, R>(
    tensor: &Tensor,
    f: impl FnOnce(&'static KernelDevice, ViewMut<'_, T>) -> Result<R>,
) -> Result<R> {
    let device = kernel_device(tensor.device())?;
    let op = Write { f: RefCell::new(Some(f)), result: RefCell::new(None), device, elements: PhantomData::<T> };
    tensor.inplace_op1(&op)?;
    op.result
        .into_inner()
        .ok_or_else(|| candle_core::Error::Msg("internal error: an in-place op did not run; please report this".into()))
}

struct Write<T, F, R> {
    f: RefCell<Option<F>>,
    result: RefCell<Option<R>>,
    device: &'static KernelDevice,
    elements: PhantomData<T>,
}

impl<T: Elem, R, F: FnOnce(&'static KernelDevice, ViewMut<'_, T>) -> Result<R>> Write<T, F, R> {
    fn run(&self, view: ViewMut<'_, T>) -> Result<()> {
        if let Some(f) = self.f.borrow_mut().take() {
            let result = f(self.device, view)?;
            *self.result.borrow_mut() = Some(result);
        }
        Ok(())
    }
}

fn contiguous_range(layout: &Layout) -> Result<(usize, usize)> {
    layout.contiguous_offsets().ok_or_else(|| candle_core::Error::RequiresContiguous { op: "write" }.bt())
}

impl<T: Elem, R, F: FnOnce(&'static KernelDevice, ViewMut<'_, T>) -> Result<R>> InplaceOp1 for Write<T, F, R> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (start, end) = contiguous_range(layout)?;
        let elements = &mut T::cpu_slice_mut(storage)?[start..end];
        self.run(ViewMut::of_slice(self.device, elements).map_err(kernel_error)?)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        let (start, end) = contiguous_range(layout)?;
        self.run(cuda::view_mut(self.device, storage, start, end)?)?;
        let device = storage.device.clone();
        cuda::written(storage.as_cuda_slice_mut::<T>()?, &device);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
pub(crate) use cuda::{is_per_thread, stream_key};

#[cfg(feature = "cuda")]
mod cuda {
    //! CUDA part: addresses of candle's slices, on candle's stream.

    use std::collections::HashMap;
    use std::sync::{Mutex, PoisonError};

    use candle_core::backend::BackendStorage;

    use candle_core::cuda::cudarc::driver::result::malloc_sync;
    use candle_core::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
    use candle_core::{CudaDevice, CudaStorage, Result};
    use tilewright::{Device as KernelDevice, View, ViewMut};

    use super::{Elem, ReadElem, kernel_error};

    /// The GPU and the handle of a stream. Different streams have different ones while both are alive.
    pub(crate) fn stream_key(stream: &CudaStream) -> (usize, usize) {
        (stream.context().cu_ctx() as usize, stream.cu_stream() as usize)
    }

    /// Whether this is CUDA's per-thread default stream, as `Device::new_cuda` has it: each thread that uses the handle
    /// has a stream of its own.
    pub(crate) fn is_per_thread(stream: &CudaStream) -> bool {
        // CU_STREAM_PER_THREAD
        stream.cu_stream() as usize == 2
    }

    /// One Tilewright device per stream, never freed: a program has few streams.
    pub(super) fn kernel_device(device: &CudaDevice) -> Result<&'static KernelDevice> {
        static DEVICES: Mutex<Option<HashMap<(usize, usize), &'static KernelDevice>>> = Mutex::new(None);
        let stream = device.cuda_stream();
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let devices = devices.get_or_insert_default();
        let key = stream_key(&stream);
        if let Some(known) = devices.get(&key) {
            return Ok(known);
        }
        // The device holds the stream, so no other stream gets its handle.
        let made: &'static KernelDevice =
            Box::leak(Box::new(KernelDevice::from_cuda_stream(stream).map_err(kernel_error)?));
        devices.insert(key, made);
        Ok(made)
    }

    pub(super) fn allocate<T: Elem>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
        // SAFETY: every bit pattern is a value of these types, and kernels write the memory before it is read.
        unsafe { device.alloc::<T>(len) }
    }

    pub(super) fn allocate_ipc_shareable<T: Elem>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().map_err(candle_core::Error::wrap)?;
        // SAFETY: as above; the slice is the only owner of this memory, and frees it (cuMemFreeAsync accepts memory of
        // cuMemAlloc).
        unsafe {
            let address = malloc_sync((len * size_of::<T>()).max(1)).map_err(candle_core::Error::wrap)?;
            Ok(stream.upgrade_device_ptr(address, len))
        }
    }

    pub(super) fn view<'a, T: ReadElem>(
        device: &'a KernelDevice,
        storage: &'a CudaStorage,
        start: usize,
    ) -> Result<View<'a, T>> {
        let slice = storage.as_cuda_slice::<T::Candle>()?;
        let (address, _) = slice.device_ptr(&storage.device().cuda_stream());
        let address = address + (start * size_of::<T>()) as u64;
        // SAFETY: the view borrows the slice, of elements with the same bits, and candle and Tilewright use one stream.
        Ok(unsafe { View::from_address(device, address, slice.len().saturating_sub(start)) })
    }

    pub(super) fn view_mut<'a, T: Elem>(
        device: &'a KernelDevice,
        storage: &'a mut CudaStorage,
        start: usize,
        end: usize,
    ) -> Result<ViewMut<'a, T>> {
        let stream = storage.device().cuda_stream();
        let slice = storage.as_cuda_slice_mut::<T>()?;
        let (address, _) = slice.device_ptr_mut(&stream);
        let address = address + (start * size_of::<T>()) as u64;
        // SAFETY: as above, with an exclusive borrow; the range is that of a tensor in this memory.
        Ok(unsafe { ViewMut::from_address(device, address, end - start) })
    }

    /// Notes that kernels that read the elements are queued: with several streams, cudarc records an event, for which a
    /// stream that writes them waits. The event of [`view`] was recorded before the kernel was queued.
    pub(super) fn was_read<T: ReadElem>(storage: &CudaStorage) {
        if let Ok(slice) = storage.as_cuda_slice::<T::Candle>() {
            drop(slice.device_ptr(&storage.device().cuda_stream()).1);
        }
    }

    /// As [`was_read`], for kernels that write the elements.
    pub(super) fn written<T: Elem>(slice: &mut CudaSlice<T>, device: &CudaDevice) {
        drop(slice.device_ptr_mut(&device.cuda_stream()).1);
    }

    pub(super) fn view_of_output<'a, T: Elem>(
        device: &'a KernelDevice,
        slice: &'a mut CudaSlice<T>,
        candle: &CudaDevice,
    ) -> ViewMut<'a, T> {
        let len = slice.len();
        let (address, _) = slice.device_ptr_mut(&candle.cuda_stream());
        // SAFETY: as above.
        unsafe { ViewMut::from_address(device, address, len) }
    }
}
