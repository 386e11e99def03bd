//! Rotary position embedding (RoPE), by a Tilewright kernel and in candle ops.

use candle_core::{DType, Device, Result, Tensor};
use tilewright::Device as KernelDevice;
use tilewright::kernels::rope::{Direction, frequencies, rotate_from};
use tilewright::kernels::{self, FloatElement};

use super::graph::record1;
use super::memory::{Elem, OutputAlloc, Read, for_float_type, kernel_error};
use crate::profile::span;

/// Rotates pairs of adjacent elements in each head by angles proportional to the position.
#[derive(Clone, Debug)]
pub struct Rope {
    /// θᵢ = base^(−2i/d): f64 [d/2].
    frequencies: Tensor,
    d: usize,
    /// cos and sin of every angle, f32 [max_length, d/2], for the unfused form.
    tables: Option<(Tensor, Tensor)>,
    max_length: usize,
}

impl Rope {
    /// Creates the embedding for heads of `d` elements and positions below `max_length`, with frequencies base^(−2i/d).
    ///
    /// # Errors
    /// An odd `d`.
    pub fn new(d: usize, base: f64, max_length: usize, device: &Device) -> Result<Rope> {
        if !d.is_multiple_of(2) {
            return Err(candle_core::Error::Msg(format!(
                "rope rotates pairs of elements: expected an even head dimension, found {d}"
            )));
        }
        let frequencies = Tensor::from_vec(frequencies(d, base), d / 2, device)?;
        Ok(Rope { frequencies, d, tables: None, max_length })
    }

    /// Computes tables of cosines and sines, for [`Rope::apply_unfused`].
    pub fn with_tables(self) -> Result<Rope> {
        let positions =
            Tensor::arange(0_u32, self.max_length as u32, self.frequencies.device())?.to_dtype(DType::F64)?;
        let angles = positions.unsqueeze(1)?.matmul(&self.frequencies.unsqueeze(0)?)?;
        let [cos, sin] = [angles.cos()?, angles.sin()?].map(|table| table.to_dtype(DType::F32));
        Ok(Rope { tables: Some((cos?, sin?)), ..self })
    }

    /// Largest number of positions.
    pub fn max_length(&self) -> usize {
        self.max_length
    }

    fn check(&self, x: &Tensor, start: usize) -> Result<[usize; 4]> {
        let dims = <[usize; 4]>::try_from(x.dims()).map_err(|_| {
            candle_core::Error::Msg(format!("rope expects [batch, length, heads, d], found the shape {:?}", x.dims()))
        })?;
        let [_, length, _, d] = dims;
        if d != self.d {
            return Err(candle_core::Error::Msg(format!("rope expects heads of {} elements, found {d}", self.d)));
        }
        self.check_positions(start, length)?;
        Ok(dims)
    }

    /// Rotates x [batch, length, heads, d], where the first of the `length` positions is `start`. x may be a view of a
    /// larger tensor, as long as batches are contiguous.
    ///
    /// # Errors
    /// Positions of `max_length` or more, or heads of another size.
    pub fn apply(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let _span = span("rope");
        self.check(x, start)?;
        let rope = self.clone();
        for_float_type!(x.dtype(), "rope", T => {
            let y = self.rotate::<T>(x, start, Direction::Forward)?;
            record1("rope", x, y, x.shape(), move |[x], _, grad| {
                Ok([Some(rope.rotate::<T>(grad, start, Direction::Backward)?.into_tensor(x.shape()))])
            })
        })
    }

    /// The rotation outside of the autograd graph, with a dense result.
    pub(crate) fn rotate<T: Elem + FloatElement>(
        &self,
        x: &Tensor,
        start: usize,
        direction: Direction,
    ) -> Result<OutputAlloc<T>> {
        let [batch, length, heads, d] = self.check(x, start)?;
        let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
        let (x, theta) = (Read::<T>::new(x)?, Read::<f64>::new(&self.frequencies)?);
        let target = y.dense([batch * length, heads, d])?;
        rotate_from(x.device(), flatten_batch(&x)?, start, length, theta.strided()?, target, direction)
            .map_err(kernel_error)?;
        Ok(y)
    }

    /// Rotates sequences of `length` tokens that start at position 0: x and y are [tokens, heads, d].
    pub(crate) fn rotate_into<T: Elem + FloatElement>(
        &self,
        device: &KernelDevice,
        x: kernels::Tensor<'_, T, 3>,
        length: usize,
        y: kernels::TensorMut<'_, T, 3>,
        direction: Direction,
    ) -> Result<()> {
        self.check_positions(0, length)?;
        let theta = Read::<f64>::new(&self.frequencies)?;
        rotate_from(device, x, 0, length, theta.strided()?, y, direction).map_err(kernel_error)
    }

    fn check_positions(&self, start: usize, length: usize) -> Result<()> {
        if start + length <= self.max_length {
            return Ok(());
        }
        let end = start + length;
        let message = format!("positions {start}..{end} exceed the context length of {}", self.max_length);
        Err(candle_core::Error::Msg(message))
    }

    /// As [`Rope::apply`], in candle ops: the baseline.
    ///
    /// # Errors
    /// As [`Rope::apply`]; also [`Rope::with_tables`] was not called.
    pub fn apply_unfused(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let _span = span("rope");
        let [batch, length, heads, d] = self.check(x, start)?;
        let Some((cos, sin)) = &self.tables else {
            return Err(candle_core::Error::Msg("the unfused rope needs its tables: call Rope::with_tables".into()));
        };
        let table = |t: &Tensor| t.narrow(0, start, length)?.reshape((1, length, 1, d / 2))?.to_dtype(x.dtype());
        let (cos, sin) = (table(cos)?, table(sin)?);
        let pairs = x.reshape((batch, length, heads, d / 2, 2))?;
        let (even, odd) = (pairs.narrow(4, 0, 1)?.squeeze(4)?, pairs.narrow(4, 1, 1)?.squeeze(4)?);
        let rotated = [
            (even.broadcast_mul(&cos)? - odd.broadcast_mul(&sin)?)?,
            (even.broadcast_mul(&sin)? + odd.broadcast_mul(&cos)?)?,
        ];
        Tensor::stack(&rotated, 4)?.reshape((batch, length, heads, d))
    }
}

/// Flattens [batch, length, heads, d] to [batch · length, heads, d]: batches must be contiguous.
fn flatten_batch<'a, T: Elem>(x: &'a Read<'_, T>) -> Result<kernels::Tensor<'a, T, 3>> {
    let x = x.strided::<4>()?;
    let ([batch, length, heads, d], [by_batch, by_token, by_head, by_element]) = (x.shape(), x.strides());
    if batch > 1 && by_batch != by_token * length as i64 {
        return Err(candle_core::Error::RequiresContiguous { op: "rope" }.bt());
    }
    kernels::Tensor::strided(x.view(), [batch * length, heads, d], [by_token, by_head, by_element])
        .map_err(kernel_error)
}
