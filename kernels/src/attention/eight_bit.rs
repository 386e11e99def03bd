//! Attention of 8-bit floats: their values as the forward kernel reads them, and tensors of 8-bit floats with scales from wider ones.
//!
//! Matrix instructions of 8 bits read V with its keys contiguous, so that it is transposed first. They take the elements
//! of P in other lanes than those in which the product of q and k leaves them: four consecutive keys in a lane, where the
//! product leaves two and two of eight keys further. A reordering of the keys of both, P and V, makes the lanes the same
//! (FlashAttention-3: Shah and others, 2024, section 3.3).

use super::launch::{Descale, MAX_D, Problem, Tensor, TensorMut};
use super::loops::{SCALED_ROWS, not_negative};
use crate::tensor::{self, FloatElement};
use tilewright_codegen::ir::DType;
use tilewright_runtime::elements;
use tilewright_runtime::prelude::*;

/// Reorders each 16 elements along `axis` of a matrix: 8·h + 2·t + e becomes 4·t + 2·h + e, with h and e below 2 and t below 4.
#[device_fn]
pub(super) fn in_fragment_order<T: Dtype>(x: Tile<T>, axis: usize) -> Tile<T> {
    let (rows, columns) = (x.shape()[0], x.shape()[1]);
    let ordered = if axis == 0 {
        x.reshape([rows / 16, 2, 4, 2, columns]).permute([0, 2, 1, 3, 4])
    } else {
        x.reshape([rows, columns / 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    };
    ordered.reshape([rows, columns])
}

/// V transposed for 8-bit matrix instructions: v [batch, heads, n, d] with its rows in the order of [`in_fragment_order`].
///
/// `transposed` is [batch, heads, padded, d], of which the rows are contiguous. Rows from n to `padded`, a multiple of 16, are zeros.
///
/// With `descale`, `scales` has the binary logarithms of the scales of blocks of [`SCALED_ROWS`] rows, NaN where they are negative, and
/// −∞ where they are 0 or subnormal: such blocks become zeros.
///
/// Grid: (⌈padded / row_tile⌉, heads, batch). `row_tile` divides 128. `d_tile` is at least d: a power of two, or 192.
#[kernel(grid = (padded.div_ceil(row_tile), heads, batch))]
pub fn transpose_values<T: Dtype>(
    v: Tensor<T, (batch, heads, n, d)>,
    transposed: TensorMut<T, (batch, heads, padded, d)>,
    #[given = false] descale: Option<Tensor<f32, (batch, heads, blocks)>>,
    scales: TensorMut<f32, (batch, heads, scaled)>,
    #[constexpr] row_tile: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
) {
    static_assert(T::dtype().is_f8(), "T must be an 8-bit float");
    assume(v.dim(3) <= d_tile);
    static_assert(SCALED_ROWS.is_multiple_of(row_tile), "row_tile must divide 128");
    let (row, head) = (program_id(0) * row_tile, [program_id(2), program_id(1)]);
    let (at, shape) = ([row, 0], [row_tile, d_tile]);
    let rows = load(v.index(head).block(at, shape), boundary_check = [0, 1], padding = zero);
    let to = transposed.index(head).block(at, shape);
    if let Some(descale) = descale {
        let (of_head, to_scales) = (descale.index(head), scales.index(head));
        let block = program_id(0) / (SCALED_ROWS / row_tile);
        let scale = not_negative(load(of_head.ptr() + block * of_head.stride(0)));
        let is_zero = scale < f32::MIN_POSITIVE;
        let logarithm = log2(where_(is_zero, 0.0, scale));
        store(to_scales.ptr() + block * to_scales.stride(0), logarithm, mask = row == block * SCALED_ROWS);
        let rows = where_(is_zero, scalar::<f32>(0.0).to::<T>(), rows);
        store(to, in_fragment_order(rows, 0), boundary_check = [0, 1]);
    } else {
        store(to, in_fragment_order(rows, 0), boundary_check = [0, 1]);
    }
}

/// Blocks of [`SCALED_ROWS`] rows in 8 bits: y · descale ≈ x, where the largest |y| is the largest number of its type.
///
/// A block of zeros has the scale 0, and so has one whose scale would be subnormal; one with an infinity has an infinite scale.
///
/// Grid: (blocks, heads, batch), with blocks = ⌈n / 128⌉. `d_tile` is at least d: a power of two, or 192.
#[kernel(grid = (n.div_ceil(SCALED_ROWS), heads, batch))]
pub fn quantize_rows<T: Float, U: Dtype>(
    x: Tensor<T, (batch, heads, n, d)>,
    y: TensorMut<U, (batch, heads, n, d)>,
    descale: TensorMut<f32, (batch, heads, blocks)>,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
) {
    static_assert(U::dtype().is_f8(), "U must be an 8-bit float");
    assume(x.dim(3) <= d_tile);
    let (block, head) = (program_id(0), [program_id(2), program_id(1)]);
    let (at, shape) = ([block * SCALED_ROWS, 0], [SCALED_ROWS, d_tile]);
    let rows = load(x.index(head).block(at, shape), boundary_check = [0, 1], padding = zero).to::<f32>();
    let largest = max(max(rows.abs(), axis = 1), axis = 0);
    let scale = largest / if U::dtype() == DType::F8E4M3 { 448.0 } else { 57344.0 };
    let is_zero = scale < f32::MIN_POSITIVE;
    let numbers = where_(is_zero, 0.0, rows / where_(is_zero, 1.0, scale));
    store(y.index(head).block(at, shape), numbers.to::<U>(), boundary_check = [0, 1]);
    let scales = descale.index(head);
    store(scales.ptr() + block * scales.stride(0), where_(is_zero, 0.0, scale));
}

/// A tensor [batch, heads, rows, d] of 8-bit floats, dense, with the scale of each block of [`SCALED_ROWS`] rows: dense [batch, heads, ⌈rows /
/// 128⌉].
pub struct Quantized<U: Element> {
    pub values: Buffer<U>,
    pub descale: Buffer<f32>,
}

/// The number of blocks of rows that have a scale each.
pub fn scaled_blocks(rows: usize) -> usize {
    rows.div_ceil(SCALED_ROWS)
}

/// Rounds a tensor [batch, heads, rows, d] to 8-bit floats ([`QuantizeRows`]): for the queries, keys and values of
/// [`forward`](super::forward()). On the device's own stream.
///
/// # Errors
/// Types other than 8-bit floats; head dimensions above 256; launch errors.
pub fn quantize<T: FloatElement, U: Element + Dtype>(device: &Device, x: Tensor<T>) -> Result<Quantized<U>> {
    let shape @ [batch, heads, rows, _] = x.shape();
    let scales = [batch, heads, scaled_blocks(rows)];
    let mut values = Buffer::uninit(device, elements(&shape)?)?;
    let mut descale = Buffer::uninit(device, elements(&scales)?)?;
    quantize_into(device, x, values.tensor_mut(shape)?, descale.tensor_mut(scales)?)?;
    Ok(Quantized { values, descale })
}

/// As [`quantize`], into memory of the caller: y [batch, heads, rows, d], descale [batch, heads, ⌈rows / 128⌉].
///
/// # Errors
/// As [`quantize`]; shapes that do not match.
pub fn quantize_into<T: FloatElement, U: Element + Dtype>(
    device: &Device,
    x: Tensor<T>,
    mut y: TensorMut<U>,
    mut descale: tensor::TensorMut<f32, 3>,
) -> Result<()> {
    let [batch, heads, rows, d] = x.shape();
    let found = format_args!("shape {:?}", x.shape());
    let expect = |is_valid, name, expected: String, found: String| {
        let error = Error::Argument { kernel: "quantize".into(), name, expected, found };
        if is_valid { Ok(()) } else { Err(error) }
    };
    expect((1..=MAX_D).contains(&d), "x", format!("a head dimension of 1 to {MAX_D}"), found.to_string())?;
    expect(U::dtype().is_f8(), "y", "elements of type f8e4m3 or f8e5m2".into(), U::DTYPE.name().into())?;
    tensor::expect_shape("quantize", "y", y.shape(), x.shape())?;
    tensor::expect_shape("quantize", "descale", descale.shape(), [batch, heads, scaled_blocks(rows)])?;
    let config = LaunchConfig::default().num_warps(8).num_stages(1);
    QuantizeRows { x: &x, y: &mut y, descale: &mut descale }.launch_with(device, &config)
}

/// V as the forward kernel reads it, [batch, heads, padded, d], with the scales of its blocks, in memory of its own.
pub(super) struct Transposed<T: Element> {
    values: Buffer<T>,
    shape: [usize; 4],
    scales: Buffer<f32>,
    /// [batch, heads, blocks]; without blocks [batch, heads, 0].
    scales_shape: [usize; 3],
}

impl<T: Element + Dtype> Transposed<T> {
    /// Memory for V of this shape, whose blocks have scales of their own where `descale` has them.
    pub fn uninit(p: &Problem, [batch, heads, rows, d]: [usize; 4]) -> Result<Transposed<T>> {
        let shape = [batch, heads, rows.next_multiple_of(16), d];
        let blocks = p.options.descale.map_or(0, |descale| descale.v.shape()[2]);
        let scales_shape = [batch, heads, if blocks > 1 { blocks } else { 0 }];
        let (values, scales) =
            (Buffer::uninit(p.device, elements(&shape)?), Buffer::uninit(p.device, elements(&scales_shape)?));
        Ok(Transposed { values: values?, shape, scales: scales?, scales_shape })
    }

    /// Transposes V, on the stream of the options.
    pub fn fill(&mut self, p: &Problem, v: Tensor<T>) -> Result<()> {
        let (shape, strides) = (self.shape, self.strides());
        let mut transposed = TensorMut::strided(self.values.view_mut(), shape, strides)?;
        let blocks = self.scales_shape[2];
        let descale = p.options.descale.map(|descale| descale.v).filter(|_| blocks > 0);
        TransposeValues {
            v: &v,
            transposed: &mut transposed,
            descale: descale.as_ref().map(|scales| scales as _),
            scales: &mut self.scales.tensor_mut(self.scales_shape)?,
            // A warp then writes sectors of 32 bytes, and reads few bytes of one bank of shared memory.
            row_tile: 32,
        }
        .launch_with(p.device, &p.options.launch_rows())
    }

    /// The scales: as they were given, but of blocks of V their logarithms.
    pub fn descale<'a>(&'a self, given: Option<Descale<'a>>) -> Result<Option<Descale<'a>>> {
        match given {
            Some(descale) if self.scales_shape[2] > 0 => {
                Ok(Some(Descale { v: self.scales.tensor(self.scales_shape)?, ..descale }))
            }
            given => Ok(given),
        }
    }

    fn strides(&self) -> [i64; 4] {
        let [_, heads, rows, d] = self.shape.map(|n| n as i64);
        [heads * d * rows, d * rows, 1, rows]
    }

    pub fn tensor(&self) -> Result<Tensor<'_, T>> {
        Tensor::strided(self.values.view(), self.shape, self.strides())
    }
}
