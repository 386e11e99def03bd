//! Rotary position embedding (RoPE), by a Tilewright kernel and in candle ops.

use candle_core::{DType, Device, Result, Tensor};
use tilewright::Device as KernelDevice;
use tilewright::kernels::rope::{Direction, Pairs, Rotation, frequencies, rotate_from};
use tilewright::kernels::{self, FloatElement};
use tilewright::trace::span;

use crate::check::{bad_argument, same_device};
use crate::graph::record1;
use crate::memory::{Elem, OutputAlloc, Read, for_float_type, kernel_error};

/// Rotates pairs of elements in each head by angles proportional to the position: p · θᵢ for pair i at position p.
#[derive(Clone, Debug)]
pub struct Rope {
    /// θᵢ: f64 [d/2].
    frequencies: Tensor,
    d: usize,
    pairs: Pairs,
    /// cos and sin of every angle, f32 [max_length, d/2], for the unfused form.
    tables: Option<(Tensor, Tensor)>,
    max_length: usize,
}

impl Rope {
    /// Creates the embedding for heads of `d` elements and positions below `max_length`, with frequencies base^(−2i/d),
    /// for pairs of adjacent elements.
    ///
    /// # Errors
    /// An odd `d`; a base that is not a positive finite number.
    pub fn new(d: usize, base: f64, max_length: usize, device: &Device) -> Result<Rope> {
        // Before memory is allocated for it. The kernel has a lower limit.
        if d > 1 << 20 {
            return Err(bad_argument("rope", "d", "a head dimension of at most 2048", d));
        }
        if !d.is_multiple_of(2) {
            let message = format!("rope rotates pairs of elements: expected an even head dimension, found {d}");
            return Err(candle_core::Error::Msg(message));
        }
        if !(base > 0.0 && base.is_finite()) {
            return Err(bad_argument("rope", "base", "a positive finite number", base));
        }
        Rope::from_frequencies(&frequencies(d, base), max_length, device)
    }

    /// As [`Rope::new`], with given frequencies θᵢ, as scaled variants have, for heads of twice as many elements.
    ///
    /// # Errors
    /// A frequency that is not finite, or so large that the angles are not; out of memory.
    pub fn from_frequencies(frequencies: &[f64], max_length: usize, device: &Device) -> Result<Rope> {
        let is_bad = |theta: &&f64| !(**theta * max_length.max(1) as f64).is_finite();
        if let Some(theta) = frequencies.iter().find(is_bad) {
            let expected = format!("numbers whose angles are finite at all positions below {max_length}");
            return Err(bad_argument("rope", "frequencies", expected, theta));
        }
        let d = 2 * frequencies.len();
        let frequencies = Tensor::from_slice(frequencies, d / 2, device)?;
        Ok(Rope { frequencies, d, pairs: Pairs::Adjacent, tables: None, max_length })
    }

    /// Pairs elements i and i + d/2, as GPT-NeoX, Llama and `candle_nn::rotary_emb::rope` do, instead of 2i and 2i + 1.
    pub fn with_halves(self) -> Rope {
        Rope { pairs: Pairs::Halves, ..self }
    }

    /// Computes tables of cosines and sines, for [`Rope::apply_unfused`].
    pub fn with_tables(self) -> Result<Rope> {
        let max_length = u32::try_from(self.max_length)
            .map_err(|_| bad_argument("rope", "max_length", "a number below 2³²", self.max_length))?;
        let positions = Tensor::arange(0_u32, max_length, self.frequencies.device())?.to_dtype(DType::F64)?;
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
        same_device("rope", x, "the frequencies", &self.frequencies)?;
        self.check_positions(start, length)?;
        Ok(dims)
    }

    /// Rotates x [batch, length, heads, d], where the first of the `length` positions is `start`. x may be a view of a
    /// larger tensor; one whose batches are not contiguous is copied first.
    ///
    /// # Errors
    /// Positions of `max_length` or more, or heads of another size.
    pub fn apply(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let _span = span("rope");
        self.check(x, start)?;
        let x = &if batches_are_contiguous(x) { x.clone() } else { x.contiguous()? };
        let rope = self.clone();
        for_float_type!(x.dtype(), "rope", T => {
            let y = self.rotate::<T>(x, start, Direction::Forward)?;
            record1("rope", x, y, x.shape(), move |[x], _, grad| {
                Ok([Some(rope.rotate::<T>(grad, start, Direction::Backward)?.into_tensor(x.shape()))])
            })
        })
    }

    /// The rotation outside of the autograd graph, with a dense result.
    pub fn rotate<T: Elem + FloatElement>(
        &self,
        x: &Tensor,
        start: usize,
        direction: Direction,
    ) -> Result<OutputAlloc<T>> {
        let [batch, length, heads, d] = self.check(x, start)?;
        let rotation = Rotation { direction, pairs: self.pairs };
        let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
        let (x, theta) = (Read::<T>::new(x)?, Read::<f64>::new(&self.frequencies)?);
        let target = y.dense([batch * length, heads, d])?;
        rotate_from(x.device(), flatten_batch(&x)?, start, length, theta.strided()?, target, rotation)
            .map_err(kernel_error)?;
        Ok(y)
    }

    /// Rotates sequences of `length` tokens that start at position 0: x and y are [tokens, heads, d].
    pub fn rotate_into<T: Elem + FloatElement>(
        &self,
        device: &KernelDevice,
        x: kernels::Tensor<'_, T, 3>,
        length: usize,
        y: kernels::TensorMut<'_, T, 3>,
        direction: Direction,
    ) -> Result<()> {
        self.check_positions(0, length)?;
        let rotation = Rotation { direction, pairs: self.pairs };
        let theta = Read::<f64>::new(&self.frequencies)?;
        rotate_from(device, x, 0, length, theta.strided()?, y, rotation).map_err(kernel_error)
    }

    fn check_positions(&self, start: usize, length: usize) -> Result<()> {
        let end = start.saturating_add(length);
        if end <= self.max_length {
            return Ok(());
        }
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
        let (shape, axis) = match self.pairs {
            Pairs::Adjacent => ([d / 2, 2], 4),
            Pairs::Halves => ([2, d / 2], 3),
        };
        let pairs = x.reshape((batch, length, heads, shape[0], shape[1]))?;
        let [a, b] = [pairs.narrow(axis, 0, 1)?.squeeze(axis)?, pairs.narrow(axis, 1, 1)?.squeeze(axis)?];
        let rotated =
            [(a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?, (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?];
        Tensor::stack(&rotated, axis)?.reshape((batch, length, heads, d))
    }
}

/// Rotates x [batch, heads, length, d], where the first of the `length` positions is `start`. The result is stored as
/// [batch, length, heads, d]: its transpose to that shape is contiguous.
///
/// # Errors
/// As [`Rope::apply`].
pub fn rope(x: &Tensor, rope: &Rope, start: usize) -> Result<Tensor> {
    if x.rank() != 4 {
        let found = format!("the shape {:?}", x.dims());
        return Err(bad_argument("rope", "x", "a tensor [batch, heads, length, d]", found));
    }
    rope.apply(&x.transpose(1, 2)?, start)?.transpose(1, 2)
}

/// Whether one stride leads from each token [d] of x [batch, length, heads, d] to the next, also across batches.
fn batches_are_contiguous(x: &Tensor) -> bool {
    match (x.dims(), x.stride()) {
        (&[batch, length, ..], &[by_batch, by_token, ..]) => {
            token_stride([batch, length], [by_batch, by_token].map(|stride| stride as i64)).is_some()
        }
        _ => false,
    }
}

/// The stride between the tokens of all batches; `None` where there is none.
fn token_stride([batch, length]: [usize; 2], [by_batch, by_token]: [i64; 2]) -> Option<i64> {
    match (batch, length) {
        (0..=1, _) => Some(by_token),
        // The stride of a dimension of one element says nothing, also in a tensor that is contiguous for candle.
        (_, 1) => Some(by_batch),
        _ => (by_batch == by_token * length as i64).then_some(by_token),
    }
}

/// Flattens [batch, length, heads, d] to [batch · length, heads, d]: batches must be contiguous.
fn flatten_batch<'a, T: Elem>(x: &'a Read<'_, T>) -> Result<kernels::Tensor<'a, T, 3>> {
    let x = x.strided::<4>()?;
    let ([batch, length, heads, d], [by_batch, by_token, by_head, by_element]) = (x.shape(), x.strides());
    let by_token = token_stride([batch, length], [by_batch, by_token])
        .ok_or_else(|| candle_core::Error::RequiresContiguous { op: "rope" }.bt())?;
    kernels::Tensor::strided(x.view(), [batch * length, heads, d], [by_token, by_head, by_element])
        .map_err(kernel_error)
}
