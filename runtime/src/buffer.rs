//! Typed device memory, and borrowed ranges of it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use crate::device::{Device, Memory, same_device};
use crate::element::Element;
use crate::error::{Error, Result};

/// `len` elements of `T` on a device. On the CPU the memory is 64-byte aligned, on a GPU 256-byte aligned.
///
/// On a GPU all operations of a buffer are queued on its device's stream; reading waits for them.
pub struct Buffer<T: Element> {
    memory: Memory,
    len: usize,
    elements: PhantomData<T>,
}

/// A shared borrow of consecutive elements of a [`Buffer`].
pub struct View<'a, T: Element> {
    device: &'a Device,
    address: u64,
    len: usize,
    elements: PhantomData<&'a [T]>,
}

/// An exclusive borrow of consecutive elements of a [`Buffer`].
pub struct ViewMut<'a, T: Element> {
    device: &'a Device,
    address: u64,
    len: usize,
    elements: PhantomData<&'a mut [T]>,
}

impl<T: Element> Buffer<T> {
    /// `len` elements with unspecified values, for outputs that a kernel writes completely.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn uninit(device: &Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(Error::HostMemory { requested: u64::MAX })?;
        Ok(Buffer { memory: Memory::new(device, bytes)?, len, elements: PhantomData })
    }

    /// `len` zeros.
    pub fn zeros(device: &Device, len: usize) -> Result<Self> {
        let mut buffer = Self::uninit(device, len)?;
        // The CPU allocates zeroed memory.
        if device.is_cuda() {
            buffer.fill_bytes(0)?;
        }
        Ok(buffer)
    }

    /// `len` elements whose bytes are all 0xff: NaN for every float type, -1 or the largest value for integers.
    /// Elements that a kernel does not write are then visible in its output.
    pub fn poisoned(device: &Device, len: usize) -> Result<Self> {
        let mut buffer = Self::uninit(device, len)?;
        buffer.poison()?;
        Ok(buffer)
    }

    /// A copy of `values`.
    pub fn from_slice(device: &Device, values: &[T]) -> Result<Self> {
        let mut buffer = Self::uninit(device, values.len())?;
        buffer.copy_from_slice(values)?;
        Ok(buffer)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that the memory belongs to.
    pub fn device(&self) -> &Device {
        self.memory.device()
    }

    /// Address of the first element, for kernels. Valid while the buffer lives.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// All elements, copied to the host.
    ///
    /// # Errors
    /// Not enough host memory; on a GPU, also a failure of the kernels that were queued before.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.view().to_vec()
    }

    /// Overwrites all elements with `values`, which must have the same length.
    pub fn copy_from_slice(&mut self, values: &[T]) -> Result<()> {
        self.view_mut().copy_from_slice(values)
    }

    /// Overwrites all elements with those of `source`, which must have the same length and device.
    pub fn copy_from(&mut self, source: View<'_, T>) -> Result<()> {
        self.view_mut().copy_from(source)
    }

    /// A new buffer with the same contents.
    pub fn try_clone(&self) -> Result<Self> {
        let mut copy = Self::uninit(self.device(), self.len)?;
        copy.copy_from(self.view())?;
        Ok(copy)
    }

    /// A copy on another device, through the host.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Self::from_slice(device, &self.to_vec()?)
    }

    /// Sets all elements to zero.
    pub fn fill_zero(&mut self) -> Result<()> {
        self.fill_bytes(0)
    }

    /// Sets all bytes to 0xff, like [`Buffer::poisoned`].
    pub fn poison(&mut self) -> Result<()> {
        self.fill_bytes(0xff)
    }

    /// A view of all elements.
    pub fn view(&self) -> View<'_, T> {
        View { device: self.device(), address: self.address(), len: self.len, elements: PhantomData }
    }

    /// An exclusive view of all elements.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { device: self.memory.device(), address: self.memory.address(), len: self.len, elements: PhantomData }
    }

    /// A view of the elements in `range`.
    ///
    /// # Errors
    /// The range is out of bounds.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>> {
        self.view().slice(range)
    }

    /// An exclusive view of the elements in `range`.
    ///
    /// # Errors
    /// The range is out of bounds.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>> {
        self.view_mut().slice(range)
    }

    fn fill_bytes(&mut self, value: u8) -> Result<()> {
        self.view_mut().fill_bytes(value)
    }
}

impl<T: Element> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for View<'_, T> {}

impl<'a, T: Element> View<'a, T> {
    /// No elements, for arguments that a kernel does not read.
    pub fn empty(device: &'a Device) -> View<'a, T> {
        // An aligned address, as of memory that is allocated: kernels are specialized for it.
        const ALIGNED: u64 = 256;
        View { device, address: ALIGNED, len: 0, elements: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn device(&self) -> &'a Device {
        self.device
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The elements in `range` of this view.
    ///
    /// # Errors
    /// The range is out of bounds.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'a, T>> {
        let (start, end) = resolve(range, self.len)?;
        Ok(View { address: self.address + (start * size_of::<T>()) as u64, len: end - start, ..*self })
    }

    /// A view of a slice of this process, for kernels on the CPU: another library's memory, without a copy.
    ///
    /// # Errors
    /// `device` is a GPU.
    pub fn of_slice(device: &'a Device, elements: &'a [T]) -> Result<View<'a, T>> {
        expect_cpu(device)?;
        let address = elements.as_ptr().expose_provenance() as u64;
        Ok(View { device, address, len: elements.len(), elements: PhantomData })
    }

    /// `len` elements of another library's memory on `device`.
    ///
    /// # Safety
    /// While the view lives, they are initialized, live memory of the device (on the CPU: of exposed provenance),
    /// aligned for `T`, and written only in the order of the device's stream.
    pub unsafe fn from_address(device: &'a Device, address: u64, len: usize) -> View<'a, T> {
        View { device, address, len, elements: PhantomData }
    }

    /// The elements as a slice, on the CPU.
    pub fn as_slice(&self) -> Option<&'a [T]>
    where
        // Every bit pattern is a valid value.
        T: bytemuck::Pod,
    {
        if self.device.is_cuda() {
            return None;
        }
        // The address of no elements may be null.
        if self.len == 0 {
            return Some(&[]);
        }
        let first = std::ptr::with_exposed_provenance(self.address as usize);
        // SAFETY: the view borrows `len` live elements, aligned and, on the CPU, initialized; nothing writes them
        // meanwhile.
        Some(unsafe { std::slice::from_raw_parts(first, self.len) })
    }

    /// The elements, copied to the host.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        // SAFETY: the view borrows `len` live elements, and no exclusive borrow of them exists.
        T::from_bytes(self.len, |bytes| unsafe { self.device.read(self.address, bytes) })
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// An exclusive view of a slice of this process, for kernels on the CPU: another library's memory, without a copy.
    ///
    /// # Errors
    /// `device` is a GPU.
    pub fn of_slice(device: &'a Device, elements: &'a mut [T]) -> Result<ViewMut<'a, T>>
    where
        // Kernels may write any bit pattern.
        T: bytemuck::Pod,
    {
        expect_cpu(device)?;
        let address = elements.as_mut_ptr().expose_provenance() as u64;
        Ok(ViewMut { device, address, len: elements.len(), elements: PhantomData })
    }

    /// `len` elements of another library's memory on `device`.
    ///
    /// # Safety
    /// As for [`View::from_address`]; the elements are also read only in the order of the device's stream.
    pub unsafe fn from_address(device: &'a Device, address: u64, len: usize) -> ViewMut<'a, T> {
        ViewMut { device, address, len, elements: PhantomData }
    }
}

impl<T: Element> ViewMut<'_, T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn device(&self) -> &Device {
        self.device
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// A shared view of the same elements, while this one is borrowed.
    pub fn as_view(&self) -> View<'_, T> {
        View { device: self.device, address: self.address, len: self.len, elements: PhantomData }
    }

    /// The elements as a slice, on the CPU.
    pub fn as_mut_slice(&mut self) -> Option<&mut [T]>
    where
        // Every bit pattern is a valid value.
        T: bytemuck::Pod,
    {
        if self.device.is_cuda() {
            return None;
        }
        if self.len == 0 {
            return Some(&mut []);
        }
        let first = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: the view borrows `len` live elements exclusively; they are aligned and, on the CPU, initialized.
        Some(unsafe { std::slice::from_raw_parts_mut(first, self.len) })
    }

    /// An exclusive view of the same elements, while this one is borrowed.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { device: self.device, address: self.address, len: self.len, elements: PhantomData }
    }

    /// Splits the view at `middle`.
    ///
    /// # Errors
    /// `middle` is beyond the end.
    pub fn split_at(self, middle: usize) -> Result<(Self, Self)> {
        resolve(..middle, self.len)?;
        let address = self.address + (middle * size_of::<T>()) as u64;
        let (device, elements) = (self.device, PhantomData);
        let left = ViewMut { device, address: self.address, len: middle, elements };
        Ok((left, ViewMut { device, address, len: self.len - middle, elements }))
    }

    /// The elements in `range` of this view.
    ///
    /// # Errors
    /// The range is out of bounds.
    pub fn slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (start, end) = resolve(range, self.len)?;
        Ok(ViewMut { address: self.address + (start * size_of::<T>()) as u64, len: end - start, ..self })
    }

    /// Overwrites the elements with `values`, which must have the same length.
    pub fn copy_from_slice(&mut self, values: &[T]) -> Result<()> {
        self.check_len("the source of a copy", values.len())?;
        // SAFETY: the view borrows `len` live elements exclusively.
        unsafe { self.device.write(self.address, T::as_bytes(values)) }
    }

    /// Overwrites the elements with those of `source`, which must have the same length and device.
    pub fn copy_from(&mut self, source: View<'_, T>) -> Result<()> {
        self.check_len("the source of a copy", source.len)?;
        same_device("a copy between buffers", self.device, source.device)?;
        // SAFETY: one range is borrowed exclusively and the other shared, so they are live and do not overlap.
        unsafe { self.device.copy(self.address, source.address, self.len * size_of::<T>()) }
    }

    fn fill_bytes(&mut self, value: u8) -> Result<()> {
        // SAFETY: the view borrows `len` live elements exclusively; every byte pattern can be read back.
        unsafe { self.device.fill(self.address, value, self.len * size_of::<T>()) }
    }

    fn check_len(&self, what: &'static str, found: usize) -> Result<()> {
        if found == self.len {
            return Ok(());
        }
        Err(Error::Length { what, expected: self.len, found })
    }
}

fn expect_cpu(device: &Device) -> Result<()> {
    if !device.is_cuda() {
        return Ok(());
    }
    let what = "a kernel and a slice of this process";
    Err(Error::DifferentDevices { what, left: device.to_string(), right: Device::cpu().to_string() })
}

fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<(usize, usize)> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    if start <= end && end <= len {
        return Ok((start, end));
    }
    Err(Error::OutOfRange { start, end, len })
}

/// Number of elements of a tensor of this shape.
///
/// # Errors
/// The product of the extents is more than memory can hold of the widest element type.
pub fn elements(shape: &[usize]) -> Result<usize> {
    /// For the widest element type, f64.
    const MAX_ELEMENTS: usize = isize::MAX as usize / 8;
    let product = match shape.contains(&0) {
        true => Some(0),
        false => shape.iter().try_fold(1_usize, |product, &extent| product.checked_mul(extent)),
    };
    product.filter(|&n| n <= MAX_ELEMENTS).ok_or_else(|| Error::TooLarge { shape: shape.to_vec() })
}

/// Shape and strides, in elements, of a tensor inside a buffer: the values of a kernel's shape and stride arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Strided {
    /// Extent of each dimension.
    pub shape: Vec<i64>,
    /// Distance between neighbors along each dimension, in elements.
    pub strides: Vec<i64>,
}

impl Strided {
    /// Row-major and contiguous. Strides beyond an `i64` saturate: such a tensor is empty or does not fit any memory.
    pub fn row_major(shape: &[i64]) -> Strided {
        let mut strides = vec![1_i64; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis].saturating_mul(shape[axis].max(1));
        }
        Strided { shape: shape.to_vec(), strides }
    }

    /// Number of elements; saturates.
    pub fn elements(&self) -> usize {
        if self.shape.iter().any(|&extent| extent <= 0) {
            return 0;
        }
        self.shape.iter().fold(1, |product: usize, &extent| product.saturating_mul(extent as usize))
    }

    /// The same elements with two dimensions transposed.
    ///
    /// # Panics
    /// There is no dimension `a` or `b`.
    #[track_caller]
    pub fn transposed(mut self, a: usize, b: usize) -> Strided {
        assert_axes([a, b], self.shape.len());
        self.shape.swap(a, b);
        self.strides.swap(a, b);
        self
    }

    /// Checks that every element is among the `len` elements from the tensor's base on.
    ///
    /// # Errors
    /// An element outside; the error has the lowest and the highest element index.
    pub fn check_fits(&self, len: usize) -> Result<()> {
        if self.shape.iter().any(|&extent| extent <= 0) {
            return Ok(());
        }
        let (mut lowest, mut highest) = (0_i128, 0_i128);
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            // Each is below 2¹²⁶: only sums of several leave the range.
            let span = (extent as i128 - 1) * stride as i128;
            lowest = lowest.saturating_add(span.min(0));
            highest = highest.saturating_add(span.max(0));
        }
        if lowest >= 0 && highest < len as i128 {
            return Ok(());
        }
        Err(Error::StridesOutOfRange { shape: self.shape.clone(), strides: self.strides.clone(), lowest, highest, len })
    }
}

/// Panics with the axis and the rank unless all axes are below the rank.
#[track_caller]
pub(crate) fn assert_axes(axes: [usize; 2], rank: usize) {
    for axis in axes {
        assert!(axis < rank, "transposed: there is no axis {axis} in a tensor of {rank} dimensions, numbered from 0");
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer<{}>({} elements on {})", T::DTYPE, self.len, self.device())
    }
}

impl<T: Element> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View<{}>({} elements on {})", T::DTYPE, self.len, self.device)
    }
}

impl<T: Element> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ViewMut<{}>({} elements on {})", T::DTYPE, self.len, self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn contents_survive_the_round_trip_through_the_cpu() {
        let device = Device::cpu();
        let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let buffer = Buffer::from_slice(&device, &values).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), values);
        assert_eq!(buffer.address() % 64, 0);
        assert_eq!(buffer.slice(10..13).unwrap().to_vec().unwrap(), [10.0, 11.0, 12.0]);
        let clone = buffer.try_clone().unwrap();
        assert_eq!(clone.to_vec().unwrap(), values);
        assert_ne!(clone.address(), buffer.address());
    }

    #[test]
    fn fresh_buffers_are_zeros_or_poison() {
        let device = Device::cpu();
        assert_eq!(Buffer::<i16>::zeros(&device, 5).unwrap().to_vec().unwrap(), [0; 5]);
        let poison = Buffer::<bf16>::poisoned(&device, 5).unwrap().to_vec().unwrap();
        assert!(poison.iter().all(|x| x.is_nan()));
        assert_eq!(Buffer::<bool>::poisoned(&device, 2).unwrap().to_vec().unwrap(), [true; 2]);
        let empty = Buffer::<f64>::zeros(&device, 0).unwrap();
        assert!(empty.is_empty() && empty.to_vec().unwrap().is_empty());
    }

    #[test]
    fn split_views_are_disjoint() {
        let mut buffer = Buffer::<i32>::zeros(&Device::cpu(), 6).unwrap();
        let (mut left, right) = buffer.view_mut().split_at(2).unwrap();
        left.copy_from_slice(&[1, 2]).unwrap();
        right.slice(1..=2).unwrap().copy_from_slice(&[3, 4]).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [1, 2, 0, 3, 4, 0]);
    }

    #[test]
    fn slices_are_borrowed_without_a_copy() {
        let device = Device::cpu();
        let mut values = vec![1.0_f32, 2.0, 3.0];
        let address = values.as_ptr() as u64;
        let mut target = ViewMut::of_slice(&device, &mut values[1..]).unwrap();
        assert_eq!(target.address(), address + 4);
        target.copy_from_slice(&[5.0, 0.0]).unwrap();
        target.as_mut_slice().unwrap()[1] = 6.0;
        // SAFETY: there are no elements.
        let (none, mut none_mut) =
            unsafe { (View::<f32>::from_address(&device, 0, 0), ViewMut::<f32>::from_address(&device, 0, 0)) };
        assert!(none.as_slice().unwrap().is_empty() && none_mut.as_mut_slice().unwrap().is_empty());
        let view = View::of_slice(&device, &values).unwrap();
        assert_eq!(
            (view.to_vec().unwrap().as_slice(), view.as_slice().unwrap()),
            ([1.0, 5.0, 6.0].as_slice(), [1.0, 5.0, 6.0].as_slice())
        );
        assert_eq!(values, [1.0, 5.0, 6.0]);
    }

    #[test]
    fn errors_name_expected_and_found() {
        let mut buffer = Buffer::<i32>::zeros(&Device::cpu(), 6).unwrap();
        let message = buffer.slice(4..8).unwrap_err().to_string();
        assert!(message.contains("4..8") && message.contains('6'), "{message}");
        #[expect(clippy::reversed_empty_ranges, reason = "the mistake under test")]
        let reversed = buffer.slice(3..2);
        assert!(reversed.is_err());
        let message = buffer.copy_from_slice(&[0; 5]).unwrap_err().to_string();
        assert!(message.contains("expected 6") && message.contains("found 5"), "{message}");
        assert!(Buffer::<f64>::uninit(&Device::cpu(), usize::MAX / 4).is_err());
    }

    #[test]
    fn strided_tensors_are_bounds_checked() {
        let dense = Strided::row_major(&[3, 4, 5]);
        assert_eq!(dense.strides, [20, 5, 1]);
        assert_eq!(dense.elements(), 60);
        dense.check_fits(60).unwrap();
        let message = dense.check_fits(59).unwrap_err().to_string();
        assert!(message.contains("0..=59"), "{message}");
        let transposed = dense.transposed(0, 2);
        assert_eq!(
            (transposed.shape.as_slice(), transposed.strides.as_slice()),
            ([5, 4, 3].as_slice(), [1, 5, 20].as_slice())
        );
        assert!(Strided { shape: vec![2, 2], strides: vec![-2, 1] }.check_fits(10).is_err());
        Strided { shape: vec![0, 9], strides: vec![1000, 1] }.check_fits(1).unwrap();
    }

    #[test]
    fn oversized_shapes_are_errors() {
        assert_eq!(
            [elements(&[]), elements(&[3, 4]), elements(&[usize::MAX, usize::MAX, 0])].map(Result::unwrap),
            [1, 12, 0]
        );
        for shape in [&[usize::MAX][..], &[1 << 32, 1 << 32], &[1 << 32, 1 << 32, 3]] {
            let message = elements(shape).unwrap_err().to_string();
            assert!(message.contains(&format!("{shape:?}")), "{message}");
        }
        let huge = Strided::row_major(&[i64::MAX, i64::MAX, i64::MAX]);
        assert_eq!((huge.strides.as_slice(), huge.elements()), ([i64::MAX, i64::MAX, 1].as_slice(), usize::MAX));
        assert!(huge.check_fits(usize::MAX).is_err());
        assert_eq!(Strided::row_major(&[0, i64::MAX, i64::MAX]).elements(), 0);
    }
}
