//! RMSNorm and LayerNorm over the last dimension, by Tilewright kernels.

use candle_core::{Result, Tensor};
use tilewright::kernels::{FloatElement, layer_norm as layer, rms_norm as rms};
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
            let (grad_x, grad_w) = rms_backward::<T>(x, &w, &rstd, grad)?;
            Ok([Some(grad_x), weight_use.deliver(input, || Ok(grad_w))?])
        })
    })
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
    if !(eps >= 0.0 && eps.is_finite()) {
        return Err(bad_argument(op, "eps", "a finite number of at least 0", eps));
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

/// Returns (∂L/∂x in the shape of x, ∂L/∂w [d] in f32), given the rstd of [`rms_forward`].
pub fn rms_backward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    rstd: &Tensor,
    grad: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let shape = x.shape();
    let (x, w, rstd, grad) = (Read::<T>::new(x)?, Read::<T>::new(w)?, Read::<f32>::new(rstd)?, Read::<T>::new(grad)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let mut grad_w = OutputAlloc::<f32>::new(x.candle_device(), d)?;
    rms::backward(
        x.device(),
        x_rows,
        w.strided()?,
        rstd.strided()?,
        grad.rows()?,
        grad_x.dense([rows, d])?,
        grad_w.dense([d])?,
    )
    .map_err(kernel_error)?;
    Ok((grad_x.into_tensor(shape), grad_w.into_tensor(d)))
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
            let (grad_x, [grad_w, grad_b]) = layer_backward::<T>(x, &w, &stats, grad)?;
            let grad_w = weight_use.deliver(weight, || Ok(grad_w))?;
            Ok([Some(grad_x), grad_w, bias_use.deliver(bias, || Ok(grad_b))?])
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

/// Returns (∂L/∂x in the shape of x, [∂L/∂w, ∂L/∂b], both [d] in f32), given the mean and rstd of [`layer_forward`].
pub fn layer_backward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    [mean, rstd]: &[Tensor; 2],
    grad: &Tensor,
) -> Result<(Tensor, [Tensor; 2])> {
    let mut grad_x = OutputAlloc::<T>::new(x.device(), x.elem_count())?;
    let shape = x.shape();
    let (x, w, grad) = (Read::<T>::new(x)?, Read::<T>::new(w)?, Read::<T>::new(grad)?);
    let (mean, rstd) = (Read::<f32>::new(mean)?, Read::<f32>::new(rstd)?);
    let x_rows = x.rows()?;
    let [rows, d] = x_rows.shape();
    let [mut grad_w, mut grad_b] =
        [OutputAlloc::<f32>::new(x.candle_device(), d)?, OutputAlloc::new(x.candle_device(), d)?];
    layer::backward(
        x.device(),
        x_rows,
        w.strided()?,
        mean.strided()?,
        rstd.strided()?,
        grad.rows()?,
        grad_x.dense([rows, d])?,
        grad_w.dense([d])?,
        grad_b.dense([d])?,
    )
    .map_err(kernel_error)?;
    Ok((grad_x.into_tensor(shape), [grad_w.into_tensor(d), grad_b.into_tensor(d)]))
}
