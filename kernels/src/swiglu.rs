//! SwiGLU: y = silu(a) · b (Shazeer, "GLU variants improve Transformer", 2020), and its gradients. SiLU alone is an
//! [`Activation`](crate::activation::Activation).
//!
//! With g = ∂L/∂y, and silu′(a) = σ(a) · (1 + a · (1 − σ(a))),
//!
//! - ∂L/∂a = g · b · silu′(a) and ∂L/∂b = g · silu(a).
//!
//! The backward pass recomputes σ(a) from a: the forward pass saves only its inputs.

use crate::blocks::{ElementwiseTiles, tile_start};
use crate::tensor::{FloatElement, Tensor, TensorMut};
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
#[kernel(grid = cdiv(rows, rows_tile) * cdiv(d, d_tile))]
pub fn swiglu_fwd<T: Float>(
    a: Tensor<T, (rows, d)>,
    b: Tensor<T, (rows, d)>,
    y: TensorMut<T, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (row, col) = tile_start(d, (rows_tile, d_tile));
    let a_block = a.block([row, col], [rows_tile, d_tile]);
    let b_block = b.block([row, col], [rows_tile, d_tile]);
    let y_block = y.block([row, col], [rows_tile, d_tile]);
    let at = load(a_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    let bt = load(b_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    store(y_block, (at * sigmoid(at) * bt).to::<T>(), boundary_check = [0, 1]);
}

/// grad_a = grad_y · b · silu′(a) and grad_b = grad_y · silu(a), computed in f32.
///
/// One program per tile.
#[kernel(grid = cdiv(rows, rows_tile) * cdiv(d, d_tile))]
pub fn swiglu_bwd<T: Float>(
    a: Tensor<T, (rows, d)>,
    b: Tensor<T, (rows, d)>,
    grad_y: Tensor<T, (rows, d)>,
    grad_a: TensorMut<T, (rows, d)>,
    grad_b: TensorMut<T, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (row, col) = tile_start(d, (rows_tile, d_tile));
    let a_block = a.block([row, col], [rows_tile, d_tile]);
    let b_block = b.block([row, col], [rows_tile, d_tile]);
    let g_block = grad_y.block([row, col], [rows_tile, d_tile]);
    let grad_a_block = grad_a.block([row, col], [rows_tile, d_tile]);
    let grad_b_block = grad_b.block([row, col], [rows_tile, d_tile]);
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
    let [rows, d] = a.shape();
    let tiles = ElementwiseTiles::new(rows, d);
    let (a, b, y) = (&a, &b, &mut y);
    SwigluFwd { a, b, y, rows_tile: tiles.rows_tile, d_tile: tiles.d_tile }.launch_with(device, &tiles.config())
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
    let [rows, d] = a.shape();
    let tiles = ElementwiseTiles::new(rows, d);
    SwigluBwd {
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
