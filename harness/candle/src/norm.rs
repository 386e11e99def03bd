//! RMSNorm and LayerNorm over the last dimension, by Tilewright kernels.

use candle_core::{Result, Tensor};
use tilewright::kernels::{FloatElement, TensorMut, layer_norm as layer, rms_norm as rms};
use tilewright::trace::span;

use crate::check::{bad_argument, same_device};
use crate::for_float_type;
use crate::graph::{record2, record3};
use crate::memory::{Elem, OutputAlloc, Read, kernel_error, with_rows};
use crate::weight::{Weight, WeightUse, label};

/// RMSNorm: y = x / √(mean(x²) + ε) · w over the last dimension of x, for a weight w [d].
///
/// # Errors
/// A weight of another length or dtype, or an x that is no float tensor.
pub fn rms_norm(x: &Tensor, weight: &impl Weight, eps: f64) -> Result<Tensor> {
    let x = &check("rms_norm", x, &[("weight", weight)], eps)?;
    let w = weight.value(x.dtype())?;
    let weight_use = WeightUse::begin(weight);
    for_float_type!(x.dtype(), "rms_norm", T => {
        let (y, rstd) = rms_forward::<T>(x, &w, eps)?;
        record2("rms_norm", [x, weight.graph_input()], y, x.shape(), move |[x, input], _, grad| {
            let (grad_x, grad_w) = rms_backward::<T>(x, &w, &rstd, grad, weight_use.needs_grad(input))?;
            Ok([Some(grad_x), deliver(&weight_use, input, grad_w)?])
        })
    })
}

/// Delivers a gradient that was computed.
fn deliver(weight_use: &WeightUse, input: &Tensor, gradient: Option<Tensor>) -> Result<Option<Tensor>> {
    gradient.map_or(Ok(None), |gradient| weight_use.deliver(input, || Ok(gradient)))
}

/// Returns x as the kernels take it: rows with one stride between them, else a copy.
fn check(op: &str, x: &Tensor, weights: &[(&str, &dyn Weight)], eps: f64) -> Result<Tensor> {
    let d = match x.dims().last() {
        Some(&d) if d > 0 => d,
        _ => return Err(bad_argument(op, "x", "a last dimension of at least one element", format!("{:?}", x.dims()))),
    };
    for &(role, weight) in weights {
        let name = label(weight, role);
        if weight.dims() != [d] {
            let expected = format!("the shape [{d}], that of a row of x {:?}", x.dims());
            return Err(bad_argument(op, &name, &expected, format!("{:?}", weight.dims())));
        }
        same_device(op, x, &name, weight.graph_input())?;
    }
    // A number that is 0 in f32, where kernels add it, would not do what it is for.
    if !(eps >= 0.0 && (eps as f32).is_finite() && (eps as f32 > 0.0 || eps == 0.0)) {
        return Err(bad_argument(op, "eps", "0, or a positive finite number in f32", eps));
    }
    with_rows(x)
}

/// Returns (y, rstd [rows]) for x and w.
pub fn rms_forward<T: Elem + FloatElement>(x: &Tensor, w: &Tensor, eps: f64) -> Result<(OutputAlloc<T>, Tensor)> {
    let _span = span("rms_norm");
    let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let (x, w) = (Read::<T>::new(x)?, Read::<T>::new(w)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let mut rstd = OutputAlloc::<f32>::new(x.candle_device(), rows)?;
    rms::forward(x.device(), x_rows, w.strided()?, y.dense([rows, d])?, rstd.dense([rows])?, eps as f32)
        .map_err(kernel_error)?;
    Ok((y, rstd.into_tensor(rows)))
}

/// Returns (∂L/∂x in the shape of x, with `needs_grad_w` ∂L/∂w [d] in f32), given the rstd of [`rms_forward`].
pub fn rms_backward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    rstd: &Tensor,
    grad: &Tensor,
    needs_grad_w: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let shape = x.shape();
    let (x, w, rstd, grad) = (Read::<T>::new(x)?, Read::<T>::new(w)?, Read::<f32>::new(rstd)?, Read::<T>::new(grad)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let mut grad_w = weight_gradient(&x, d, needs_grad_w)?;
    rms::backward(
        x.device(),
        x_rows,
        w.strided()?,
        rstd.strided()?,
        grad.rows()?,
        grad_x.dense([rows, d])?,
        dense(&mut grad_w)?,
    )
    .map_err(kernel_error)?;
    Ok((grad_x.into_tensor(shape), grad_w.map(|grad| grad.into_tensor(d))))
}

/// Allocates the gradient of a weight [d], if it is needed.
fn weight_gradient<T: Elem>(x: &Read<'_, T>, d: usize, needed: bool) -> Result<Option<OutputAlloc<f32>>> {
    if needed { OutputAlloc::new(x.candle_device(), d).map(Some) } else { Ok(None) }
}

fn dense(gradient: &mut Option<OutputAlloc<f32>>) -> Result<Option<TensorMut<'_, f32, 1>>> {
    gradient.as_mut().map(|gradient| gradient.dense([gradient.len()])).transpose()
}

/// LayerNorm: y = (x − mean(x)) / √(var(x) + ε) · w + b over the last dimension of x, for w and b [d].
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm(x: &Tensor, weight: &impl Weight, bias: &impl Weight, eps: f64) -> Result<Tensor> {
    let x = &check("layer_norm", x, &[("weight", weight), ("bias", bias)], eps)?;
    let (w, b) = (weight.value(x.dtype())?, bias.value(x.dtype())?);
    let (weight_use, bias_use) = (WeightUse::begin(weight), WeightUse::begin(bias));
    for_float_type!(x.dtype(), "layer_norm", T => {
        let (y, stats) = layer_forward::<T>(x, &w, &b, eps)?;
        let inputs = [x, weight.graph_input(), bias.graph_input()];
        record3("layer_norm", inputs, y, x.shape(), move |[x, weight, bias], _, grad| {
            let needs_grad = [weight_use.needs_grad(weight), bias_use.needs_grad(bias)];
            let (grad_x, [grad_w, grad_b]) = layer_backward::<T>(x, &w, &stats, grad, needs_grad)?;
            Ok([Some(grad_x), deliver(&weight_use, weight, grad_w)?, deliver(&bias_use, bias, grad_b)?])
        })
    })
}

/// Returns (y, [mean, rstd], both [rows]) for x, w and b.
pub fn layer_forward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    b: &Tensor,
    eps: f64,
) -> Result<(OutputAlloc<T>, [Tensor; 2])> {
    let _span = span("layer_norm");
    let mut y = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let (x, w, b) = (Read::<T>::new(x)?, Read::<T>::new(w)?, Read::<T>::new(b)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let [mut mean, mut rstd] =
        [OutputAlloc::<f32>::new(x.candle_device(), rows)?, OutputAlloc::new(x.candle_device(), rows)?];
    layer::forward(
        x.device(),
        x_rows,
        w.strided()?,
        b.strided()?,
        y.dense([rows, d])?,
        mean.dense([rows])?,
        rstd.dense([rows])?,
        eps as f32,
    )
    .map_err(kernel_error)?;
    Ok((y, [mean.into_tensor(rows), rstd.into_tensor(rows)]))
}

/// Returns (∂L/∂x in the shape of x, [∂L/∂w, ∂L/∂b], both [d] in f32 where `needs_grad` says so), given the mean and rstd
/// of [`layer_forward`].
pub fn layer_backward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    [mean, rstd]: &[Tensor; 2],
    grad: &Tensor,
    needs_grad: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let shape = x.shape();
    let (x, w, grad) = (Read::<T>::new(x)?, Read::<T>::new(w)?, Read::<T>::new(grad)?);
    let (mean, rstd) = (Read::<f32>::new(mean)?, Read::<f32>::new(rstd)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let [mut grad_w, mut grad_b] = [weight_gradient(&x, d, needs_grad[0])?, weight_gradient(&x, d, needs_grad[1])?];
    layer::backward(
        x.device(),
        x_rows,
        w.strided()?,
        mean.strided()?,
        rstd.strided()?,
        grad.rows()?,
        grad_x.dense([rows, d])?,
        dense(&mut grad_w)?,
        dense(&mut grad_b)?,
    )
    .map_err(kernel_error)?;
    Ok((grad_x.into_tensor(shape), [grad_w, grad_b].map(|grad| grad.map(|grad| grad.into_tensor(d)))))
}
