//! Activations with a fused bias and residual, as they follow a GEMM: y = f(x + bias) + residual, and the gradients.
//!
//! - ReLU: max(x, 0)
//! - GELU: x · Φ(x) with the normal distribution function Φ(x) = (1 + erf(x/√2)) / 2, and its approximation
//!   x · (1 + tanh u) / 2 = x · σ(2u) with u = √(2/π) · (x + 0.044715 x³) (Hendrycks and Gimpel, "Gaussian error linear
//!   units", 2016)
//! - SiLU: x · σ(x) with the logistic function σ (Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units", 2018)
//!
//! With g = ∂L/∂y, ∂L/∂x = g · f′(x + bias) is also the gradient of each row of the bias, which
//! [`column_sum`](crate::column_sum) adds up, and ∂L/∂residual = g. The backward pass needs x, not y.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use crate::blocks::{ElementwiseTiles, tile_start, vector_block};
use crate::tensor::{FloatElement, Tensor, TensorMut, expect_shape};
use tilewright_runtime::prelude::*;

constexpr_enum! {
    /// The activation, applied to each element in f32.
    pub enum Activation {
        /// x
        None,
        /// max(x, 0)
        Relu,
        /// x · Φ(x)
        Gelu,
        /// x · (1 + tanh u) / 2, the approximation of GELU
        GeluTanh,
        /// x · σ(x)
        Silu,
    }
}

/// √(2/π) and the factor of x³ in the argument of tanh.
const TANH_SCALE: f32 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
const TANH_CUBIC: f32 = 0.044715;

/// f(x), elementwise.
#[device_fn]
pub(crate) fn activate(x: Tile<f32>, activation: Activation) -> Tile<f32> {
    match activation {
        Activation::None => x,
        // NaN stays NaN.
        Activation::Relu => where_(x <= 0.0, 0.0, x),
        Activation::Gelu => x * normal_cdf(x),
        Activation::GeluTanh => x * sigmoid(tanh_argument(x)),
        Activation::Silu => x * sigmoid(x),
    }
}

/// Φ(x)
#[device_fn]
fn normal_cdf(x: Tile<f32>) -> Tile<f32> {
    0.5 * (1.0 + erf(x * FRAC_1_SQRT_2))
}

/// 2u
#[device_fn]
fn tanh_argument(x: Tile<f32>) -> Tile<f32> {
    (2.0 * TANH_SCALE) * x * (1.0 + TANH_CUBIC * (x * x))
}

/// g · f′(x), elementwise.
#[device_fn]
fn gradient(x: Tile<f32>, g: Tile<f32>, activation: Activation) -> Tile<f32> {
    match activation {
        Activation::None => g,
        Activation::Relu => where_(x <= 0.0, 0.0, g),
        Activation::Gelu => {
            let density = (0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2) * exp(x * x * -0.5);
            g * (normal_cdf(x) + x * density)
        }
        Activation::GeluTanh => {
            let s = sigmoid(tanh_argument(x));
            // σ · (1 − σ) is 0 beyond ±20, where the other factors would overflow.
            let inside = clamp(x, -20.0, 20.0);
            let slope = (2.0 * TANH_SCALE) * (1.0 + (3.0 * TANH_CUBIC) * (inside * inside));
            g * (s + inside * (s * (1.0 - s)) * slope)
        }
        Activation::Silu => {
            let s = sigmoid(x);
            g * (s * (1.0 + x * (1.0 - s)))
        }
    }
}

/// y = f(x + bias) + residual, computed in f32. bias and residual are read if `has_bias` and `has_residual` say so.
///
/// One program per tile.
#[kernel(grid = cdiv(rows, rows_tile) * cdiv(d, d_tile))]
pub fn activation_fwd<T: Float>(
    x: Tensor<T, (rows, d)>,
    bias: In<T>,
    bias_stride: i64,
    residual: Tensor<T, (rows, d)>,
    y: TensorMut<T, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] activation: Activation,
    #[constexpr = false] has_bias: bool,
    #[constexpr = false] has_residual: bool,
) {
    let (row, col) = tile_start(d, (rows_tile, d_tile));
    let x_block = x.block([row, col], [rows_tile, d_tile]);
    let y_block = y.block([row, col], [rows_tile, d_tile]);
    let mut xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    if has_bias {
        let bias_block = vector_block(bias, d, bias_stride, col, d_tile);
        xt = xt + load(bias_block, boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
    }
    let mut yt = activate(xt, activation);
    if has_residual {
        let residual_block = residual.block([row, col], [rows_tile, d_tile]);
        yt = yt + load(residual_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    }
    store(y_block, yt.to::<T>(), boundary_check = [0, 1]);
}

/// grad_x = grad_y · f′(x + bias), computed in f32. bias is read if `has_bias` says so.
///
/// One program per tile.
#[kernel(grid = cdiv(rows, rows_tile) * cdiv(d, d_tile))]
pub fn activation_bwd<T: Float>(
    x: Tensor<T, (rows, d)>,
    bias: In<T>,
    bias_stride: i64,
    grad_y: Tensor<T, (rows, d)>,
    grad_x: TensorMut<T, (rows, d)>,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] activation: Activation,
    #[constexpr = false] has_bias: bool,
) {
    let (row, col) = tile_start(d, (rows_tile, d_tile));
    let x_block = x.block([row, col], [rows_tile, d_tile]);
    let g_block = grad_y.block([row, col], [rows_tile, d_tile]);
    let grad_block = grad_x.block([row, col], [rows_tile, d_tile]);
    let mut xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    if has_bias {
        let bias_block = vector_block(bias, d, bias_stride, col, d_tile);
        xt = xt + load(bias_block, boundary_check = [0], padding = zero).to::<f32>().expand_dims(0);
    }
    let g = load(g_block, boundary_check = [0, 1], padding = zero).to::<f32>();
    store(grad_block, gradient(xt, g, activation).to::<T>(), boundary_check = [0, 1]);
}

/// y = f(x + bias) + residual for x, residual and y [rows, d] and bias [d].
///
/// # Errors
/// Shapes that differ; tensors on another device; launch errors.
pub fn forward<T: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    bias: Option<Tensor<'_, T, 1>>,
    activation: Activation,
    residual: Option<Tensor<'_, T, 2>>,
    mut y: TensorMut<'_, T, 2>,
) -> Result<()> {
    let [rows, d] = x.shape();
    let (bias_data, bias_stride) = bias_or("activation_fwd", bias, x)?;
    let tiles = ElementwiseTiles::new(rows, d);
    ActivationFwd {
        x: &x,
        bias: &bias_data,
        bias_stride,
        residual: &residual.unwrap_or(x),
        y: &mut y,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
        activation,
        has_bias: bias.is_some(),
        has_residual: residual.is_some(),
    }
    .launch_with(device, &tiles.config())
}

/// grad_x [rows, d], given the gradient grad_y [rows, d] of [`forward`]'s result.
///
/// # Errors
/// As [`forward`].
pub fn backward<T: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    bias: Option<Tensor<'_, T, 1>>,
    activation: Activation,
    grad_y: Tensor<'_, T, 2>,
    mut grad_x: TensorMut<'_, T, 2>,
) -> Result<()> {
    let [rows, d] = x.shape();
    let (bias_data, bias_stride) = bias_or("activation_bwd", bias, x)?;
    let tiles = ElementwiseTiles::new(rows, d);
    ActivationBwd {
        x: &x,
        bias: &bias_data,
        bias_stride,
        grad_y: &grad_y,
        grad_x: &mut grad_x,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
        activation,
        has_bias: bias.is_some(),
    }
    .launch_with(device, &tiles.config())
}

/// The memory and the stride of a bias [d] of x; without one, memory that the kernel does not read.
fn bias_or<'a, T: FloatElement>(
    kernel: &'static str,
    bias: Option<Tensor<'a, T, 1>>,
    x: Tensor<'a, T, 2>,
) -> Result<(View<'a, T>, i64)> {
    match bias {
        None => Ok((x.view(), 1)),
        Some(bias) => {
            expect_shape(kernel, "bias", bias.shape(), [x.shape()[1]])?;
            Ok((bias.view(), bias.strides()[0]))
        }
    }
}

/// The reference in f64, element by element.
pub mod reference {
    use super::Activation;
    use std::f64::consts::{FRAC_1_SQRT_2, PI};

    /// f(x)
    pub fn forward(x: f64, activation: Activation) -> f64 {
        match activation {
            Activation::None => x,
            Activation::Relu => x.max(0.0),
            Activation::Gelu => 0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2),
            Activation::GeluTanh => 0.5 * x * (1.0 + tanh_argument(x).tanh()),
            Activation::Silu => x / (1.0 + (-x).exp()),
        }
    }

    /// f′(x)
    pub fn derivative(x: f64, activation: Activation) -> f64 {
        match activation {
            Activation::None => 1.0,
            Activation::Relu => f64::from(u8::from(x > 0.0)),
            Activation::Gelu => 0.5 * libm::erfc(-x * FRAC_1_SQRT_2) + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt(),
            Activation::GeluTanh => {
                let t = tanh_argument(x).tanh();
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x)
            }
            Activation::Silu => {
                let e = (-x).exp();
                (1.0 + e + x * e) / ((1.0 + e) * (1.0 + e))
            }
        }
    }

    fn tanh_argument(x: f64) -> f64 {
        (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)
    }
}
