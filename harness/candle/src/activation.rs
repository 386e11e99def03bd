//! Activations, and what follows a matmul: bias, activation and residual in one pass, by a Tilewright kernel.

use candle_core::{Result, Tensor};
use candle_nn::Activation;
use tilewright::kernels::activation::{self as kernel, Activation as Function};
use tilewright::kernels::{FloatElement, column_sum};
use tilewright::trace::span;

use crate::check::{bad_argument, expect_shape, same_kind};
use crate::for_float_type;
use crate::graph::{AnyOutput, record1_any, record2_any, record3_any};
use crate::memory::{Elem, OutputAlloc, Read, kernel_error, with_rows};

/// SiLU: y = x · σ(x).
///
/// # Errors
/// An x of another dtype than f32, bf16 and f16.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    apply("silu", x, Function::Silu, None, None)
}

/// GELU in its approximation by tanh, as [`Tensor::gelu`]: y = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
///
/// # Errors
/// An x of another dtype than f32, bf16 and f16.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    apply("gelu", x, Function::GeluTanh, None, None)
}

/// GELU, as [`Tensor::gelu_erf`]: y = x/2 · (1 + erf(x/√2)).
///
/// # Errors
/// An x of another dtype than f32, bf16 and f16.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    apply("gelu_erf", x, Function::Gelu, None, None)
}

/// What follows a matmul z = x·Wᵀ or z = a·b: y = activation(z + bias) + residual. Each part may be absent.
///
/// [`linear_with`](crate::linear_with()) and [`matmul_with`](crate::matmul_with()) take it. z is computed as without an
/// epilogue and rounded to its dtype; one kernel then computes y from it in f32. The backward pass computes the gradient
/// of z with one kernel, if there is an activation, and sums the bias gradient in f32 with another. z is saved for it.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_nn::Activation;
/// use tilewright_candle::{Epilogue, linear_with};
///
/// let (x, weight) = (Tensor::ones((3, 4), DType::F32, &Device::Cpu)?, Var::ones((2, 4), DType::F32, &Device::Cpu)?);
/// let bias = Var::new(&[1_f32, -8.0], &Device::Cpu)?;
/// let y = linear_with(&x, &weight, &Epilogue::default().with_bias(&bias).with_activation(Activation::Relu))?;
/// assert_eq!(y.to_vec2::<f32>()?[0], [5.0, 0.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Epilogue<'a> {
    /// One element for each column: [n].
    pub bias: Option<&'a Tensor>,
    /// ReLU, SiLU, GELU or its approximation by tanh.
    pub activation: Option<Activation>,
    /// Of the shape of y.
    pub residual: Option<&'a Tensor>,
}

impl<'a> Epilogue<'a> {
    pub fn with_bias(self, bias: &'a Tensor) -> Epilogue<'a> {
        Epilogue { bias: Some(bias), ..self }
    }

    pub fn with_activation(self, activation: Activation) -> Epilogue<'a> {
        Epilogue { activation: Some(activation), ..self }
    }

    pub fn with_residual(self, residual: &'a Tensor) -> Epilogue<'a> {
        Epilogue { residual: Some(residual), ..self }
    }

    /// Applies the epilogue to the result z [.., n] of a matmul.
    pub(crate) fn apply(&self, op: &'static str, z: &Tensor) -> Result<Tensor> {
        let function = match self.activation {
            None => Function::None,
            Some(Activation::Relu) => Function::Relu,
            Some(Activation::Gelu) => Function::Gelu,
            Some(Activation::NewGelu | Activation::GeluPytorchTanh) => Function::GeluTanh,
            Some(Activation::Silu | Activation::Swish) => Function::Silu,
            Some(other) => {
                let expected = "Relu, Gelu, NewGelu, GeluPytorchTanh, Silu or Swish";
                return Err(bad_argument(op, "the activation", expected, format!("{other:?}: apply it to the result")));
            }
        };
        if (function, self.bias.is_none(), self.residual.is_none()) == (Function::None, true, true) {
            return Ok(z.clone());
        }
        apply(op, z, function, self.bias, self.residual)
    }
}

/// f(x + bias) + residual, in the autograd graph.
fn apply(
    op: &'static str,
    x: &Tensor,
    function: Function,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let _span = span(op);
    if let Some(bias) = bias {
        same_kind(op, x, "bias", bias)?;
        expect_shape(op, "bias", bias, &x.dims()[x.rank().saturating_sub(1)..])?;
    }
    if let Some(residual) = residual {
        same_kind(op, x, "residual", residual)?;
        expect_shape(op, "residual", residual, x.dims())?;
    }
    let x = &with_rows(x)?;
    let residual = residual.map(with_rows).transpose()?;
    for_float_type!(x.dtype(), op, T => {
        let y = AnyOutput::new(op, forward::<T>(x, bias, function, residual.as_ref())?, x.shape().clone())?;
        match (bias, &residual) {
            (None, None) => record1_any(op, x, y, move |[x], _, grad| {
                Ok([gradients::<T>(x, None, function, grad)?[0].take()])
            }),
            (Some(bias), None) => record2_any(op, [x, bias], y, move |[x, bias], _, grad| {
                gradients::<T>(x, Some(bias), function, grad)
            }),
            (None, Some(residual)) => record2_any(op, [x, residual], y, move |[x, _], _, grad| {
                Ok([gradients::<T>(x, None, function, grad)?[0].take(), Some(grad.clone())])
            }),
            (Some(bias), Some(residual)) => record3_any(op, [x, bias, residual], y, move |[x, bias, _], _, grad| {
                let [grad_x, grad_bias] = gradients::<T>(x, Some(bias), function, grad)?;
                Ok([grad_x, grad_bias, Some(grad.clone())])
            }),
        }
    })
}

fn forward<T: Elem + FloatElement>(
    x: &Tensor,
    bias: Option<&Tensor>,
    function: Function,
    residual: Option<&Tensor>,
) -> Result<OutputAlloc<T>> {
    let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let x = Read::<T>::new(x)?;
    let bias = bias.map(Read::<T>::new).transpose()?;
    let residual = residual.map(Read::<T>::new).transpose()?;
    let rows = x.rows()?;
    let bias = bias.as_ref().map(|bias| bias.strided()).transpose()?;
    let residual = residual.as_ref().map(|residual| residual.rows()).transpose()?;
    kernel::forward(x.device(), rows, bias, function, residual, y.dense(rows.shape())?).map_err(kernel_error)?;
    Ok(y)
}

/// The gradients of x and, where it is tracked, of the bias.
fn gradients<T: Elem + FloatElement>(
    x: &Tensor,
    bias: Option<&Tensor>,
    function: Function,
    grad: &Tensor,
) -> Result<[Option<Tensor>; 2]> {
    let tracked_bias = bias.filter(|bias| bias.track_op());
    if !x.track_op() && tracked_bias.is_none() {
        return Ok([None, None]);
    }
    let grad_x = match function {
        Function::None => grad.clone(),
        _ => {
            let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
            let (x_memory, grad) = (Read::<T>::new(x)?, Read::<T>::new(grad)?);
            let bias = bias.map(Read::<T>::new).transpose()?;
            let bias = bias.as_ref().map(|bias| bias.strided()).transpose()?;
            let rows = x_memory.rows()?;
            kernel::backward(x_memory.device(), rows, bias, function, grad.rows()?, grad_x.dense(rows.shape())?)
                .map_err(kernel_error)?;
            grad_x.into_tensor(x.shape())
        }
    };
    let Some(bias) = tracked_bias else { return Ok([Some(grad_x), None]) };
    let mut grad_bias = OutputAlloc::<T>::new(bias.device(), bias.elem_count())?;
    {
        let source = Read::<T>::new(&grad_x)?;
        column_sum::forward(source.device(), source.rows()?, grad_bias.dense([bias.elem_count()])?)
            .map_err(kernel_error)?;
    }
    Ok([Some(grad_x), Some(grad_bias.into_tensor(bias.shape()))])
}
