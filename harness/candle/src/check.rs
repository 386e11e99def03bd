//! Checks of arguments that ops share, and their messages.

use std::fmt::Display;

use candle_core::{DType, Error, Result, Tensor};

use crate::memory::Read;

/// An error about the argument `name` of an op.
pub(crate) fn bad_argument(op: &str, name: &str, expected: impl Display, found: impl Display) -> Error {
    Error::Msg(format!("{op}: expected {expected} as {name}, found {found}"))
}

/// Fails unless `other` is on the device of `x`, where kernels run.
pub(crate) fn same_device(op: &str, x: &Tensor, name: &str, other: &Tensor) -> Result<()> {
    if x.device().same_device(other.device()) {
        return Ok(());
    }
    let [here, there] = [x, other].map(|tensor| tensor.device().location());
    Err(bad_argument(op, name, format!("a tensor on {here:?}, the device of the input,"), format!("one on {there:?}")))
}

/// Fails unless `other` has the dtype and the device of `x`.
pub(crate) fn same_kind(op: &str, x: &Tensor, name: &str, other: &Tensor) -> Result<()> {
    same_device(op, x, name, other)?;
    expect_dtype(op, name, other, x.dtype())
}

/// Fails unless the tensor has this dtype.
pub(crate) fn expect_dtype(op: &str, name: &str, tensor: &Tensor, dtype: DType) -> Result<()> {
    if tensor.dtype() == dtype {
        return Ok(());
    }
    let expected = format!("a tensor of {}", dtype.as_str());
    Err(bad_argument(op, name, expected, format!("{}: convert it with `cast` or to_dtype", tensor.dtype().as_str())))
}

/// Fails unless the tensor has this shape.
pub(crate) fn expect_shape(op: &str, name: &str, tensor: &Tensor, shape: &[usize]) -> Result<()> {
    if tensor.dims() == shape {
        return Ok(());
    }
    Err(bad_argument(op, name, format!("the shape {shape:?}"), format!("{:?}", tensor.dims())))
}

/// Fails if one of the numbers u32 [n], in the host's memory, is not below `limit`. On a GPU the check would wait for the
/// device.
pub(crate) fn expect_below(op: &str, name: &str, numbers: &Tensor, limit: usize) -> Result<()> {
    let numbers = Read::<u32>::new(numbers)?;
    let numbers = numbers.strided::<1>()?;
    let Some(values) = numbers.view().as_slice() else { return Ok(()) };
    let ([n], [stride]) = (numbers.shape(), numbers.strides());
    match (0..n).map(|i| (i, values[i * stride as usize])).find(|(_, number)| *number as usize >= limit) {
        None => Ok(()),
        Some((i, number)) => Err(bad_argument(op, name, format!("numbers below {limit}"), format!("{number} at {i}"))),
    }
}
