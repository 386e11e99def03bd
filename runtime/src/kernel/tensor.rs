//! Tensors as arguments: borrowed device memory with a shape and strides, and their checks.

use tilewright_codegen::lang::kernel::KernelDef;

use super::arg::{Input, Memory, MemoryMut, Output, label};
use crate::buffer::{Buffer, Strided, View, ViewMut, assert_axes};
use crate::device::Device;
use crate::element::{Dtype, Element};
use crate::error::{Error, Result};
use crate::launch::LaunchArg;

/// A read-only tensor of rank `R`.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a, T: Element, const R: usize> {
    data: View<'a, T>,
    shape: [usize; R],
    strides: [i64; R],
}

/// A writable tensor of rank `R`.
#[derive(Debug)]
pub struct TensorMut<'a, T: Element, const R: usize> {
    data: ViewMut<'a, T>,
    shape: [usize; R],
    strides: [i64; R],
}

impl<'a, T: Element, const R: usize> Tensor<'a, T, R> {
    /// A dense row-major tensor: the last dimension is contiguous.
    ///
    /// # Errors
    /// The data has fewer elements than the shape; extents whose product, each counted as at least 1, is above 2⁶².
    pub fn dense(data: View<'a, T>, shape: [usize; R]) -> Result<Self> {
        Self::strided(data, shape, dense_strides(shape)?)
    }

    /// A strided tensor: element i₀, i₁, … is element Σ iₙ · stridesₙ of `data`. Strides may be zero: those elements
    /// repeat.
    ///
    /// # Errors
    /// An element lies outside of the data; extents whose product, each counted as at least 1, is above 2⁶².
    pub fn strided(data: View<'a, T>, shape: [usize; R], strides: [i64; R]) -> Result<Self> {
        check_fits(shape, strides, data.len())?;
        Ok(Tensor { data, shape, strides })
    }

    /// The same elements with dimensions `a` and `b` swapped.
    ///
    /// # Panics
    /// `a` or `b` is not below `R`.
    #[track_caller]
    pub fn transposed(mut self, a: usize, b: usize) -> Self {
        assert_axes([a, b], R);
        self.shape.swap(a, b);
        self.strides.swap(a, b);
        self
    }

    /// The memory of the tensor, from its first element on.
    pub fn view(&self) -> View<'a, T> {
        self.data
    }

    /// The extent of each dimension.
    pub fn shape(&self) -> [usize; R] {
        self.shape
    }

    /// The stride of each dimension, in elements.
    pub fn strides(&self) -> [i64; R] {
        self.strides
    }
}

impl<'a, T: Element, const R: usize> TensorMut<'a, T, R> {
    /// As [`Tensor::dense`].
    ///
    /// # Errors
    /// As [`Tensor::dense`].
    pub fn dense(data: ViewMut<'a, T>, shape: [usize; R]) -> Result<Self> {
        Self::strided(data, shape, dense_strides(shape)?)
    }

    /// As [`Tensor::strided`].
    ///
    /// # Errors
    /// As [`Tensor::strided`]; also strides with which elements overlap.
    pub fn strided(data: ViewMut<'a, T>, shape: [usize; R], strides: [i64; R]) -> Result<Self> {
        check_fits(shape, strides, data.len())?;
        check_no_overlap(shape, strides)?;
        Ok(TensorMut { data, shape, strides })
    }

    /// The same elements with dimensions `a` and `b` swapped.
    ///
    /// # Panics
    /// `a` or `b` is not below `R`.
    #[track_caller]
    pub fn transposed(mut self, a: usize, b: usize) -> Self {
        assert_axes([a, b], R);
        self.shape.swap(a, b);
        self.strides.swap(a, b);
        self
    }

    /// The memory of the tensor, from its first element on.
    pub fn as_view(&self) -> View<'_, T> {
        self.data.as_view()
    }

    /// As [`TensorMut::as_view`], to write.
    pub fn into_view_mut(self) -> ViewMut<'a, T> {
        self.data
    }

    /// The extent of each dimension.
    pub fn shape(&self) -> [usize; R] {
        self.shape
    }

    /// The stride of each dimension, in elements.
    pub fn strides(&self) -> [i64; R] {
        self.strides
    }
}

impl<T: Element> Buffer<T> {
    /// The buffer as a dense row-major tensor of this shape.
    ///
    /// # Errors
    /// The buffer has fewer elements than the shape.
    pub fn tensor<const R: usize>(&self, shape: [usize; R]) -> Result<Tensor<'_, T, R>> {
        Tensor::dense(self.view(), shape)
    }

    /// As [`Buffer::tensor`], to write.
    ///
    /// # Errors
    /// As [`Buffer::tensor`].
    pub fn tensor_mut<const R: usize>(&mut self, shape: [usize; R]) -> Result<TensorMut<'_, T, R>> {
        TensorMut::dense(self.view_mut(), shape)
    }
}

/// Largest product of the extents of a tensor, each counted as at least 1: no product of some of them overflows.
const MAX_EXTENTS_PRODUCT: u64 = 1 << 62;

/// Fails for a shape whose products of extents may overflow.
fn check_extents<const R: usize>(shape: [usize; R]) -> Result<()> {
    let product = shape.iter().try_fold(1_u64, |product, &n| product.checked_mul(n.max(1) as u64));
    match product.is_some_and(|product| product <= MAX_EXTENTS_PRODUCT) {
        true => Ok(()),
        false => Err(Error::ExtentsTooLarge { shape: shape.to_vec(), limit: MAX_EXTENTS_PRODUCT }),
    }
}

fn dense_strides<const R: usize>(shape: [usize; R]) -> Result<[i64; R]> {
    check_extents(shape)?;
    let mut strides = [1_i64; R];
    for axis in (1..R).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1) as i64;
    }
    Ok(strides)
}

/// Fails unless every element lies within the `len` elements of the data, and as [`check_extents`].
fn check_fits<const R: usize>(shape: [usize; R], strides: [i64; R], len: usize) -> Result<()> {
    check_extents(shape)?;
    if shape.contains(&0) {
        return Ok(());
    }
    // At most 2⁶³ · Σ (n − 1), which is below 2⁶³ · Π n.
    let mut last = 0_i128;
    for (n, stride) in shape.into_iter().zip(strides) {
        last += (n as i128 - 1) * stride.max(0) as i128;
    }
    if last < len as i128 && strides.iter().all(|&s| s >= 0) {
        return Ok(());
    }
    let shape = shape.iter().map(|&n| n as i64).collect();
    Strided { shape, strides: strides.to_vec() }.check_fits(len)
}

/// Fails if two elements of an output may share an address: in order of their strides, the stride of each dimension
/// must exceed the span of all smaller ones.
fn check_no_overlap<const R: usize>(shape: [usize; R], strides: [i64; R]) -> Result<()> {
    if shape.contains(&0) {
        return Ok(());
    }
    let mut order: [usize; R] = std::array::from_fn(|axis| axis);
    order.sort_by_key(|&axis| strides[axis]);
    let mut span = 0_i128;
    for axis in order {
        if shape[axis] > 1 && i128::from(strides[axis]) <= span {
            return Err(Error::Argument {
                kernel: "tensor".into(),
                name: "strides",
                expected: "strides with which no two elements of an output overlap".into(),
                found: format!("{strides:?} for the shape {shape:?}"),
            });
        }
        span += (shape[axis] as i128 - 1) * i128::from(strides[axis]);
    }
    Ok(())
}

/// Memory that holds a tensor of `R` dimensions of `T` and that a kernel can read: a [`Tensor`], a [`TensorMut`], or with
/// one dimension a [`Buffer`] or a view of one.
pub trait InputTensor<T: Element, const R: usize>: Input<T> {
    /// The extent of each dimension.
    fn shape(&self) -> [usize; R];
    /// The stride of each dimension, in elements.
    fn strides(&self) -> [i64; R];
}

/// Memory that holds a tensor and that a kernel can write: a [`TensorMut`], or with one dimension a [`Buffer`] or a
/// [`ViewMut`].
pub trait OutputTensor<T: Element, const R: usize>: InputTensor<T, R> + Output<T> {}

macro_rules! tensors {
    ($($ty:ident),*) => {$(
        impl<T: Element, const R: usize> Memory for $ty<'_, T, R> {
            fn launch_arg(&self) -> LaunchArg {
                self.data.launch_arg()
            }
            fn dtype(&self) -> Dtype {
                T::DTYPE
            }
            fn memory_device(&self) -> &Device {
                self.data.memory_device()
            }
        }
        impl<T: Element, const R: usize> Input<T> for $ty<'_, T, R> {}
        impl<T: Element, const R: usize> InputTensor<T, R> for $ty<'_, T, R> {
            fn shape(&self) -> [usize; R] {
                self.shape
            }
            fn strides(&self) -> [i64; R] {
                self.strides
            }
        }
    )*};
}
tensors!(Tensor, TensorMut);

impl<T: Element, const R: usize> MemoryMut for TensorMut<'_, T, R> {}
impl<T: Element, const R: usize> Output<T> for TensorMut<'_, T, R> {}
impl<T: Element, const R: usize> OutputTensor<T, R> for TensorMut<'_, T, R> {}

macro_rules! vectors {
    ($($ty:ty),*) => {$(
        impl<T: Element> InputTensor<T, 1> for $ty {
            fn shape(&self) -> [usize; 1] {
                [self.len()]
            }
            fn strides(&self) -> [i64; 1] {
                [1]
            }
        }
    )*};
}
vectors!(Buffer<T>, View<'_, T>, ViewMut<'_, T>);

impl<T: Element> OutputTensor<T, 1> for Buffer<T> {}
impl<T: Element> OutputTensor<T, 1> for ViewMut<'_, T> {}

/// Largest extent of a dimension: offsets of the last tile, which may extend past it, are i32.
pub const MAX_EXTENT: usize = i32::MAX as usize - (1 << 20);

/// The extents that the tensors of a launch give, one for each of [`KernelDef::dims`]. `shapes` has one entry per tensor.
///
/// # Errors
/// Two tensors have different extents of the same name, or an extent is above [`MAX_EXTENT`].
#[doc(hidden)]
pub fn tensor_dims<const N: usize>(def: &KernelDef, shapes: &[&[usize]]) -> Result<[usize; N]> {
    let mut found: [Option<(usize, &'static str)>; N] = [None; N];
    for (tensor, shape) in def.tensors.iter().zip(shapes) {
        for (&dim, &extent) in tensor.dims.iter().zip(*shape) {
            let name = def.dims[dim];
            let fail = |expected: String| Error::Argument {
                kernel: label(def),
                name: tensor.name,
                expected,
                found: format!("{name} = {extent} in the shape {shape:?}"),
            };
            match found[dim] {
                Some((other, _)) if other == extent => {}
                Some((other, of)) => return Err(fail(format!("{name} = {other}, as in `{of}`"))),
                None if extent > MAX_EXTENT => return Err(fail(format!("{name} of at most {MAX_EXTENT}"))),
                None => found[dim] = Some((extent, tensor.name)),
            }
        }
    }
    Ok(found.map(|dim| dim.map_or(0, |(extent, _)| extent)))
}

/// ⌈n / tile⌉, for grids. A `tile` of 0 gives `n`: compiling the kernel reports the tile.
pub fn cdiv(n: usize, tile: usize) -> usize {
    n.div_ceil(tile.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_must_not_self_overlap() {
        let mut data = Buffer::<f32>::zeros(&Device::cpu(), 100).unwrap();
        let mut strided = |shape, strides| TensorMut::strided(data.view_mut(), shape, strides).map(|_| ());
        strided([3, 4], [4, 1]).unwrap();
        strided([3, 4], [1, 3]).unwrap();
        strided([3, 4], [20, 5]).unwrap();
        strided([1, 4], [0, 1]).unwrap();
        strided([0, 4], [0, 0]).unwrap();
        let message = strided([3, 4], [3, 1]).unwrap_err().to_string();
        assert!(message.contains("[3, 1]") && message.contains("[3, 4]"), "{message}");
        assert!(strided([3, 4], [0, 1]).is_err());
        assert!(strided([3, 40], [40, 1]).unwrap_err().to_string().contains("0..=119"));
    }

    #[test]
    fn inputs_may_repeat_elements_within_their_buffer() {
        let data = Buffer::<f32>::zeros(&Device::cpu(), 10).unwrap();
        Tensor::strided(data.view(), [1000, 10], [0, 1]).unwrap();
        assert!(Tensor::strided(data.view(), [2, 2], [-1, 1]).is_err());
        assert!(Tensor::dense(data.view(), [usize::MAX]).is_err());
        assert_eq!(Tensor::dense(data.view(), [5, 2]).unwrap().transposed(0, 1).strides(), [1, 2]);
    }

    #[test]
    fn shapes_whose_extents_overflow_are_refused() {
        let mut data = Buffer::<f32>::zeros(&Device::cpu(), 10).unwrap();
        const MAX: usize = usize::MAX;
        let messages = [
            Tensor::strided(data.view(), [MAX, MAX], [i64::MAX; 2]).map(drop),
            Tensor::strided(data.view(), [MAX, 3], [0, 0]).map(drop),
            Tensor::strided(data.view(), [MAX, 0, MAX], [0, 0, 0]).map(drop),
            data.tensor([MAX, MAX]).map(drop),
            data.tensor([MAX, 0, MAX]).map(drop),
            data.tensor([(1 << 62) + 1]).map(drop),
            data.tensor_mut([1 << 31, 1 << 31, 2]).map(drop),
            TensorMut::strided(data.view_mut(), [MAX, 0], [0, 0]).map(drop),
        ]
        .map(|outcome| outcome.unwrap_err().to_string());
        for message in &messages {
            assert!(message.contains("the product of the extents is above 4611686018427387904"), "{message}");
        }
        assert!(messages[3].contains(&format!("[{MAX}, {MAX}]")), "{}", messages[3]);

        // The largest shapes: their elements repeat, or there are none.
        Tensor::strided(data.view(), [1 << 31, 1 << 31], [0, 0]).unwrap();
        assert_eq!(data.tensor([1 << 31, 0, 1 << 31]).unwrap().strides(), [1 << 31, 1 << 31, 1]);
        let message = Tensor::strided(data.view(), [1 << 31, 1 << 31], [i64::MAX; 2]).unwrap_err().to_string();
        assert!(message.contains("outside 0..10"), "{message}");
    }

    #[test]
    #[should_panic = "there is no axis 5 in a tensor of 2 dimensions"]
    fn transposing_an_axis_that_does_not_exist_names_it() {
        let data = Buffer::<f32>::zeros(&Device::cpu(), 10).unwrap();
        let _ = data.tensor([5, 2]).unwrap().transposed(5, 0);
    }
}
