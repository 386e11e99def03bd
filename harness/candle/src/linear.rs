//! Linear layers y = x·Wᵀ, and matmuls.

use candle_core::{Result, Tensor};
use tilewright::trace::span;

use crate::activation::Epilogue;
use crate::check::{bad_argument, same_device};
use crate::elementwise::swiglu_backward;
use crate::for_float_type;
use crate::graph::record2;
use crate::matmul::{matmul_alloc, matmul_into, matmul_swiglu, multiply};
use crate::memory::OutputAlloc;
use crate::weight::{Weight, WeightUse, label};

/// Returns y [.., n] = x·Wᵀ for x [.., k] of any float dtype and a weight W [n, k].
///
/// The gradient of the weight is (∂L/∂y)ᵀ·x, summed in f32 and rounded once.
///
/// # Errors
/// A weight whose number of columns is not the last dimension of x, or of another dtype.
pub fn linear(x: &Tensor, weight: &impl Weight) -> Result<Tensor> {
    let _span = span("linear");
    let (rows, shape) = rows_and_shape(x, weight)?;
    let w = weight.value(x.dtype())?;
    let weight_use = WeightUse::begin(weight);
    for_float_type!(x.dtype(), "linear", T => {
        let y = matmul_alloc::<T>(&rows, &w.t()?)?;
        record2("linear", [x, weight.graph_input()], y, shape, move |[x, input], _, grad| {
            gradients(&weight_use, &w, x, input, grad)
        })
    })
}

/// The gradients of x and of the weight of y = x·Wᵀ, where they are needed, given that of y.
fn gradients(
    weight_use: &WeightUse,
    w: &Tensor,
    x: &Tensor,
    input: &Tensor,
    grad: &Tensor,
) -> Result<[Option<Tensor>; 2]> {
    let (x_rows, grad_rows) = (as_rows(x)?, as_rows(grad)?);
    let grad_w = weight_use.deliver_with(
        input,
        |memory, accumulate| matmul_into(memory, &grad_rows.t()?, &x_rows, accumulate),
        || multiply(&grad_rows.t()?, &x_rows),
    )?;
    let grad_x = match x.track_op() {
        true => Some(multiply(&grad_rows, w)?.reshape(x.shape())?),
        false => None,
    };
    Ok([grad_x, grad_w])
}

/// Returns y [.., d] = silu(gate) · value, where gate and value are the halves of x·Wᵀ [.., 2d], for x [.., k] of any float
/// dtype and a weight W [2d, k]: `swiglu(linear(x, W))` up to rounding, in one kernel on Hopper for bf16 and f16.
///
/// # Errors
/// As [`linear`]; a weight with an odd number of rows.
pub fn linear_swiglu(x: &Tensor, weight: &impl Weight) -> Result<Tensor> {
    let _span = span("linear_swiglu");
    let (rows, mut shape) = rows_and_shape(x, weight)?;
    let Some(last) = shape.last_mut().filter(|last| last.is_multiple_of(2)) else {
        let expected = "a matrix with an even number of rows (gate and value)";
        return Err(bad_argument("linear_swiglu", &label(weight, "weight"), expected, format!("{:?}", weight.dims())));
    };
    *last /= 2;
    let w = weight.value(x.dtype())?;
    let weight_use = WeightUse::begin(weight);
    for_float_type!(x.dtype(), "linear_swiglu", T => {
        let n = w.dim(0)?;
        let products = OutputAlloc::<T>::new(x.device(), rows.dim(0)? * n)?.into_tensor((rows.dim(0)?, n));
        let y = matmul_swiglu::<T>(&products, &rows, &w.t()?)?;
        record2("linear_swiglu", [x, weight.graph_input()], y, shape, move |[x, input], _, grad| {
            gradients(&weight_use, &w, x, input, &swiglu_backward::<T>(&products, &as_rows(grad)?)?)
        })
    })
}

/// As [`linear`], followed by bias, activation and residual: y = activation(x·Wᵀ + bias) + residual.
///
/// # Errors
/// As [`linear`]; parts of the epilogue of another shape, dtype or device than the result.
pub fn linear_with(x: &Tensor, weight: &impl Weight, epilogue: &Epilogue) -> Result<Tensor> {
    epilogue.apply("linear", &linear(x, weight)?)
}

/// Flattens all dimensions but the last.
pub fn as_rows(x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    match x.rank() {
        2 => Ok(x),
        0 => Err(candle_core::Error::Msg("expected a tensor with at least one dimension, found a scalar".into())),
        rank => {
            let (rows, d) = x.dims().split_at(rank - 1);
            x.reshape((rows.iter().product::<usize>(), d[0]))
        }
    }
}

fn rows_and_shape(x: &Tensor, weight: &impl Weight) -> Result<(Tensor, Vec<usize>)> {
    let name = label(weight, "weight");
    same_device("linear", x, &name, weight.graph_input())?;
    let &[n, k] = weight.dims() else {
        return Err(bad_argument("linear", &name, "a matrix [n, k]", format!("the shape {:?}", weight.dims())));
    };
    let mut shape = x.dims().to_vec();
    match shape.last_mut() {
        Some(last) if *last == k => *last = n,
        _ => {
            let expected = format!("rows of {k} elements for {name} {:?}", weight.dims());
            return Err(bad_argument("linear", "x", expected, format!("the shape {:?}", x.dims())));
        }
    }
    Ok((as_rows(x)?, shape))
}

/// Returns a·b [.., n] for a [.., k] and b [k, n] of one float dtype.
///
/// # Errors
/// Shapes that do not match, different dtypes.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match (a.dims().last(), b.dims()) {
        (Some(k), [rows, _]) if k == rows && a.dtype() == b.dtype() => linear(a, &b.t()?),
        _ => {
            let say = |t: &Tensor| format!("{:?} of {}", t.dims(), t.dtype().as_str());
            let expected = format!("a matrix [k, n] that {} can be multiplied by", say(a));
            Err(bad_argument("matmul", "b", expected, say(b)))
        }
    }
}

/// As [`matmul`], followed by bias, activation and residual: y = activation(a·b + bias) + residual.
///
/// # Errors
/// As [`matmul`]; parts of the epilogue of another shape, dtype or device than the result.
pub fn matmul_with(a: &Tensor, b: &Tensor, epilogue: &Epilogue) -> Result<Tensor> {
    epilogue.apply("matmul", &matmul(a, b)?)
}
