//! SwiGLU: y = silu(a) · b (Shazeer, "GLU variants improve Transformer", 2020), and its gradients. SiLU alone is an
//! [`Activation`](crate::activation::Activation).
//!
//! With g = ∂L/∂y, and silu′(a) = σ(a) · (1 + a · (1 − σ(a))),
//!
//! - ∂L/∂a = g · b · silu′(a) and ∂L/∂b = g · silu(a).
//!
//! The backward pass recomputes σ(a) from a: the forward pass saves only its inputs.

use crate::blocks::{ElementwiseTiles, row_block, tile_start};
use crate::tensor::{FloatElement, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::prelude::*;

/// (silu(x), silu′(x))
#[device_fn]
fn silu_and_grad(x: Tile<f32>) -> (Tile<f32>, Tile<f32>) {
    let s = sigmoid(x);
    (x * s, s * (1.0 + x * (1.0 - s)))
}

/// y = silu(a) · b, computed in f32.
///
/// One program per tile.
#[kernel]
pub fn swiglu_fwd<T: Float>(
    a: In<T>,
    b: In<T>,
    y: Out<T>,
    a_stride_row: i64,
    a_stride_d: i64,
    b_stride_row: i64,
    b_stride_d: i64,
    y_stride_row: i64,
    y_stride_d: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (shape, tile) = ((rows, d), (rows_tile, d_tile));
    let (row, col) = tile_start(d, tile);
    let a_block = row_block(a, shape, (a_stride_row, a_stride_d), row, tile).advance([0, col]);
    let b_block = row_block(b, shape, (b_stride_row, b_stride_d), row, tile).advance([0, col]);
    let y_block = row_block(y, shape, (y_stride_row, y_stride_d), row, tile).advance([0, col]);
    let at = load(a_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    let bt = load(b_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    store(y_block, (at * sigmoid(at) * bt).to::<T>(), boundary_check = [0, 1]);
}

/// grad_a = grad_y · b · silu′(a) and grad_b = grad_y · silu(a), computed in f32.
///
/// One program per tile.
#[kernel]
pub fn swiglu_bwd<T: Float>(
    a: In<T>,
    b: In<T>,
    grad_y: In<T>,
    grad_a: Out<T>,
    grad_b: Out<T>,
    a_stride_row: i64,
    a_stride_d: i64,
    b_stride_row: i64,
    b_stride_d: i64,
    grad_y_stride_row: i64,
    grad_y_stride_d: i64,
    grad_a_stride_row: i64,
    grad_a_stride_d: i64,
    grad_b_stride_row: i64,
    grad_b_stride_d: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (shape, tile) = ((rows, d), (rows_tile, d_tile));
    let (row, col) = tile_start(d, tile);
    let a_block = row_block(a, shape, (a_stride_row, a_stride_d), row, tile).advance([0, col]);
    let b_block = row_block(b, shape, (b_stride_row, b_stride_d), row, tile).advance([0, col]);
    let g_block = row_block(grad_y, shape, (grad_y_stride_row, grad_y_stride_d), row, tile).advance([0, col]);
    let grad_a_block = row_block(grad_a, shape, (grad_a_stride_row, grad_a_stride_d), row, tile).advance([0, col]);
    let grad_b_block = row_block(grad_b, shape, (grad_b_stride_row, grad_b_stride_d), row, tile).advance([0, col]);
    let at = load(a_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    let bt = load(b_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    let (value, derivative) = silu_and_grad(at);
    store(grad_a_block, (g * bt * derivative).to::<T>(), boundary_check = [0, 1]);
    store(grad_b_block, (g * value).to::<T>(), boundary_check = [0, 1]);
}

/// y = silu(a) · b, all [rows, d]. The gate and up projections of one fused GEMM are passed as two strided tensors.
///
/// # Errors
/// Shapes that differ; tensors on another device; launch errors.
pub fn forward<T: FloatElement>(
    device: &Device,
    a: Tensor<'_, T, 2>,
    b: Tensor<'_, T, 2>,
    mut y: TensorMut<'_, T, 2>,
) -> Result<()> {
    const NAME: &str = "swiglu_fwd";
    let [rows, d] = a.shape();
    expect_shape(NAME, "b", b.shape(), [rows, d])?;
    expect_shape(NAME, "y", y.shape(), [rows, d])?;
    let tiles = ElementwiseTiles::new(rows, d);
    SwigluFwd {
        a_stride_row: a.strides()[0],
        a_stride_d: a.strides()[1],
        b_stride_row: b.strides()[0],
        b_stride_d: b.strides()[1],
        y_stride_row: y.strides()[0],
        y_stride_d: y.strides()[1],
        rows: extent(NAME, "a", rows)?,
        d: extent(NAME, "a", d)?,
        a: &a,
        b: &b,
        y: &mut y,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
    }
    .launch_with(device, &tiles.config())
}

/// grad_a and grad_b, given the gradient grad_y of silu(a) · b, all [rows, d].
///
/// # Errors
/// As [`forward`].
pub fn backward<T: FloatElement>(
    device: &Device,
    a: Tensor<'_, T, 2>,
    b: Tensor<'_, T, 2>,
    grad_y: Tensor<'_, T, 2>,
    mut grad_a: TensorMut<'_, T, 2>,
    mut grad_b: TensorMut<'_, T, 2>,
) -> Result<()> {
    const NAME: &str = "swiglu_bwd";
    let [rows, d] = a.shape();
    expect_shape(NAME, "b", b.shape(), [rows, d])?;
    expect_shape(NAME, "grad_y", grad_y.shape(), [rows, d])?;
    expect_shape(NAME, "grad_a", grad_a.shape(), [rows, d])?;
    expect_shape(NAME, "grad_b", grad_b.shape(), [rows, d])?;
    let tiles = ElementwiseTiles::new(rows, d);
    SwigluBwd {
        a_stride_row: a.strides()[0],
        a_stride_d: a.strides()[1],
        b_stride_row: b.strides()[0],
        b_stride_d: b.strides()[1],
        grad_y_stride_row: grad_y.strides()[0],
        grad_y_stride_d: grad_y.strides()[1],
        grad_a_stride_row: grad_a.strides()[0],
        grad_a_stride_d: grad_a.strides()[1],
        grad_b_stride_row: grad_b.strides()[0],
        grad_b_stride_d: grad_b.strides()[1],
        rows: extent(NAME, "a", rows)?,
        d: extent(NAME, "a", d)?,
        a: &a,
        b: &b,
        grad_y: &grad_y,
        grad_a: &mut grad_a,
        grad_b: &mut grad_b,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
    }
    .launch_with(device, &tiles.config())
}

/// The reference in f64, element by element.
pub mod reference {
    use crate::activation::{Activation, reference};

    fn silu(x: f64) -> f64 {
        reference::forward(x, Activation::Silu)
    }

    fn silu_grad(x: f64) -> f64 {
        reference::derivative(x, Activation::Silu)
    }

    /// y of a and b.
    pub fn forward(a: &[f64], b: &[f64]) -> Vec<f64> {
        a.iter().zip(b).map(|(a, b)| silu(*a) * b).collect()
    }

    /// (grad_a, grad_b) of a, b and grad_y.
    pub fn backward(a: &[f64], b: &[f64], grad_y: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let grad = |i: usize| (grad_y[i] * b[i] * silu_grad(a[i]), grad_y[i] * silu(a[i]));
        (0..a.len()).map(grad).unzip()
    }
}
