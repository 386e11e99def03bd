//! Row-wise ops: norms, softmax, cross-entropy, SiLU and SwiGLU. Arrays [..., d] are matrices of rows.

use pyo3::prelude::*;
use tilewright::kernels::{
    activation as act, cross_entropy, layer_norm as layer, rms_norm as rms, softmax as soft, swiglu as glu,
};

use super::{Call, for_float_type, for_index_type};
use crate::array::{Argument, Array};
use crate::call::without_gil;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

// The computations, on arrays of the device of `call`.

/// y [..., d] and rstd [rows] of x [..., d] and w [d].
pub fn rms_norm_fwd(call: Call, x: &Array, w: &Array, y: &Array, rstd: &Array, eps: f32) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => {
        let (x, w) = (x.rows::<T>(call.arg("x"))?, w.tensor(call.arg("w"))?);
        rms::forward(call.device, x, w, y.rows_mut(call.arg("y"))?, rstd.tensor_mut(call.arg("rstd"))?, eps)
    })
}

/// grad_x [..., d] and grad_w [d]; the latter of w's type.
pub fn rms_norm_bwd(
    call: Call,
    x: &Array,
    w: &Array,
    rstd: &Array,
    grad_y: &Array,
    grad_x: &Array,
    grad_w: &Array,
) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => rms::backward::<T, T>(
        call.device,
        x.rows(call.arg("x"))?,
        w.tensor(call.arg("w"))?,
        rstd.tensor(call.arg("rstd"))?,
        grad_y.rows(call.arg("grad_y"))?,
        grad_x.rows_mut(call.arg("grad_x"))?,
        grad_w.tensor_mut(call.arg("grad_w"))?,
    ))
}

/// y [..., d], mean and rstd [rows] of x [..., d], w and b [d].
pub fn layer_norm_fwd(
    call: Call,
    x: &Array,
    w: &Array,
    b: &Array,
    y: &Array,
    mean: &Array,
    rstd: &Array,
    eps: f32,
) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => layer::forward::<T>(
        call.device,
        x.rows(call.arg("x"))?,
        w.tensor(call.arg("w"))?,
        b.tensor(call.arg("b"))?,
        y.rows_mut(call.arg("y"))?,
        mean.tensor_mut(call.arg("mean"))?,
        rstd.tensor_mut(call.arg("rstd"))?,
        eps,
    ))
}

/// grad_x [..., d], grad_w and grad_b [d]; the latter two of w's type.
pub fn layer_norm_bwd(
    call: Call,
    x: &Array,
    w: &Array,
    mean: &Array,
    rstd: &Array,
    grad_y: &Array,
    grad_x: &Array,
    grad_w: &Array,
    grad_b: &Array,
) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => layer::backward::<T, T>(
        call.device,
        x.rows(call.arg("x"))?,
        w.tensor(call.arg("w"))?,
        mean.tensor(call.arg("mean"))?,
        rstd.tensor(call.arg("rstd"))?,
        grad_y.rows(call.arg("grad_y"))?,
        grad_x.rows_mut(call.arg("grad_x"))?,
        grad_w.tensor_mut(call.arg("grad_w"))?,
        grad_b.tensor_mut(call.arg("grad_b"))?,
    ))
}

/// y [..., d] = softmax(x [..., d]) of each row.
pub fn softmax(call: Call, x: &Array, y: &Array) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => {
        soft::forward::<T>(call.device, x.rows(call.arg("x"))?, y.rows_mut(call.arg("y"))?)
    })
}

/// grad_x, given y = softmax(x) and grad_y.
pub fn softmax_bwd(call: Call, y: &Array, grad_y: &Array, grad_x: &Array) -> tilewright::Result<()> {
    for_float_type!(y.dtype, call.arg("y"), T => soft::backward::<T>(
        call.device,
        y.rows(call.arg("y"))?,
        grad_y.rows(call.arg("grad_y"))?,
        grad_x.rows_mut(call.arg("grad_x"))?,
    ))
}

/// loss and lse [rows] of logits [..., d] and targets [rows].
///
/// # Errors
/// On the CPU also targets that are neither classes nor `ignore_index`. On a GPU, where a check would wait for the
/// device, their losses are NaN.
pub fn cross_entropy_fwd(
    call: Call,
    logits: &Array,
    targets: &Array,
    loss: &Array,
    lse: &Array,
    ignore_index: i64,
) -> tilewright::Result<()> {
    expect_classes(targets, call.arg("targets"), logits.shape.last().copied().unwrap_or(0), ignore_index)?;
    for_float_type!(logits.dtype, call.arg("logits"), T => {
        for_index_type!(targets.dtype, call.arg("targets"), I => cross_entropy::forward::<T, I>(
            call.device,
            logits.rows(call.arg("logits"))?,
            targets.tensor(call.arg("targets"))?,
            ignore_index,
            loss.tensor_mut(call.arg("loss"))?,
            lse.tensor_mut(call.arg("lse"))?,
        ))
    })
}

/// Checks targets in the host's memory: each is a class, or `ignored`.
fn expect_classes(targets: &Array, at: Argument<'_>, classes: i64, ignored: i64) -> tilewright::Result<()> {
    for_index_type!(targets.dtype, at, I => {
        let targets = targets.tensor::<I, 1>(at)?;
        let Some(values) = targets.view().as_slice() else { return Ok(()) };
        for row in 0..targets.shape()[0] {
            #[allow(clippy::useless_conversion, reason = "one of the types is i64")]
            let target = i64::from(values[row * targets.strides()[0] as usize]);
            if target != ignored && !(0..classes).contains(&target) {
                let expected = format!("one of the {classes} classes of `logits`, from 0 on, or ignore_index = {ignored}");
                return Err(at.error(expected, format!("{target} in row {row}")));
            }
        }
        Ok(())
    })
}

/// grad_logits [..., d], given grad_loss [rows], which may have stride 0.
pub fn cross_entropy_bwd(
    call: Call,
    logits: &Array,
    targets: &Array,
    lse: &Array,
    grad_loss: &Array,
    grad_logits: &Array,
    ignore_index: i64,
) -> tilewright::Result<()> {
    for_float_type!(logits.dtype, call.arg("logits"), T => {
        for_index_type!(targets.dtype, call.arg("targets"), I => cross_entropy::backward::<T, I>(
            call.device,
            logits.rows(call.arg("logits"))?,
            targets.tensor(call.arg("targets"))?,
            ignore_index,
            lse.tensor(call.arg("lse"))?,
            grad_loss.tensor(call.arg("grad_loss"))?,
            1.0,
            grad_logits.rows_mut(call.arg("grad_logits"))?,
        ))
    })
}

/// loss [rows], and the gradients of the first `classes` logits of each row [rows, columns] over them: 0 in the others.
/// `grad_loss` [rows] may have stride 0.
///
/// # Errors
/// As [`cross_entropy_fwd`].
pub fn cross_entropy_fwd_bwd(
    call: Call,
    logits: &Array,
    classes: usize,
    targets: &Array,
    grad_loss: &Array,
    loss: &Array,
    ignore_index: i64,
) -> tilewright::Result<()> {
    expect_classes(targets, call.arg("targets"), classes as i64, ignore_index)?;
    for_float_type!(logits.dtype, call.arg("logits"), T => {
        for_index_type!(targets.dtype, call.arg("targets"), I => cross_entropy::forward_backward::<T, I>(
            call.device,
            logits.rows_mut(call.arg("logits"))?,
            classes,
            targets.tensor(call.arg("targets"))?,
            ignore_index,
            grad_loss.tensor(call.arg("grad_loss"))?,
            1.0,
            loss.tensor_mut(call.arg("loss"))?,
        ))
    })
}

/// y = silu(x).
pub fn silu_fwd(call: Call, x: &Array, y: &Array) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => {
        let (x, y) = (x.rows(call.arg("x"))?, y.rows_mut(call.arg("y"))?);
        act::forward::<T>(call.device, x, None, act::Activation::Silu, None, y)
    })
}

/// grad_x, given grad_y.
pub fn silu_bwd(call: Call, x: &Array, grad_y: &Array, grad_x: &Array) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => act::backward::<T>(
        call.device,
        x.rows(call.arg("x"))?,
        None,
        act::Activation::Silu,
        grad_y.rows(call.arg("grad_y"))?,
        grad_x.rows_mut(call.arg("grad_x"))?,
    ))
}

/// y = silu(a) · b.
pub fn swiglu_fwd(call: Call, a: &Array, b: &Array, y: &Array) -> tilewright::Result<()> {
    for_float_type!(a.dtype, call.arg("a"), T => {
        let (a, b) = (a.rows::<T>(call.arg("a"))?, b.rows(call.arg("b"))?);
        glu::forward(call.device, a, b, y.rows_mut(call.arg("y"))?)
    })
}

/// grad_a and grad_b, given grad_y.
pub fn swiglu_bwd(
    call: Call,
    a: &Array,
    b: &Array,
    grad_y: &Array,
    grad_a: &Array,
    grad_b: &Array,
) -> tilewright::Result<()> {
    for_float_type!(a.dtype, call.arg("a"), T => glu::backward::<T>(
        call.device,
        a.rows(call.arg("a"))?,
        b.rows(call.arg("b"))?,
        grad_y.rows(call.arg("grad_y"))?,
        grad_a.rows_mut(call.arg("grad_a"))?,
        grad_b.rows_mut(call.arg("grad_b"))?,
    ))
}

// Their functions for Python, whose callers allocate the outputs.

/// y [..., d] and rstd [rows] of x [..., d] and w [d].
#[pyfunction]
fn rms_norm_forward(x: Object, w: Object, y: Object, rstd: Object, eps: f32) -> PyResult<()> {
    let py = x.py();
    let (x, w, y, rstd) = (Array::new("x", x)?, Array::new("w", w)?, Array::new("y", y)?, Array::new("rstd", rstd)?);
    let call = Call::new(py, "rms_norm_fwd", &[("x", &x), ("w", &w)], &[("y", &y), ("rstd", &rstd)])?;
    without_gil(py, || rms_norm_fwd(call, &x, &w, &y, &rstd, eps))
}

/// grad_x [..., d] and grad_w [d]; the latter of w's type.
#[pyfunction]
fn rms_norm_backward(
    x: Object,
    w: Object,
    rstd: Object,
    grad_y: Object,
    grad_x: Object,
    grad_w: Object,
) -> PyResult<()> {
    let py = x.py();
    let (x, w, rstd) = (Array::new("x", x)?, Array::new("w", w)?, Array::new("rstd", rstd)?);
    let (grad_y, grad_x) = (Array::new("grad_y", grad_y)?, Array::new("grad_x", grad_x)?);
    let grad_w = Array::new("grad_w", grad_w)?;
    let inputs = [("x", &x), ("w", &w), ("rstd", &rstd), ("grad_y", &grad_y)];
    let call = Call::new(py, "rms_norm_bwd", &inputs, &[("grad_x", &grad_x), ("grad_w", &grad_w)])?;
    without_gil(py, || rms_norm_bwd(call, &x, &w, &rstd, &grad_y, &grad_x, &grad_w))
}

/// y [..., d], mean and rstd [rows] of x [..., d], w and b [d].
#[pyfunction]
fn layer_norm_forward(
    x: Object,
    w: Object,
    b: Object,
    y: Object,
    mean: Object,
    rstd: Object,
    eps: f32,
) -> PyResult<()> {
    let py = x.py();
    let (x, w, b) = (Array::new("x", x)?, Array::new("w", w)?, Array::new("b", b)?);
    let (y, mean, rstd) = (Array::new("y", y)?, Array::new("mean", mean)?, Array::new("rstd", rstd)?);
    let outputs = [("y", &y), ("mean", &mean), ("rstd", &rstd)];
    let call = Call::new(py, "layer_norm_fwd", &[("x", &x), ("w", &w), ("b", &b)], &outputs)?;
    without_gil(py, || layer_norm_fwd(call, &x, &w, &b, &y, &mean, &rstd, eps))
}

/// grad_x [..., d], grad_w and grad_b [d]; the latter two of w's type.
#[pyfunction]
fn layer_norm_backward(
    x: Object,
    w: Object,
    mean: Object,
    rstd: Object,
    grad_y: Object,
    grad_x: Object,
    grad_w: Object,
    grad_b: Object,
) -> PyResult<()> {
    let py = x.py();
    let (x, w) = (Array::new("x", x)?, Array::new("w", w)?);
    let (mean, rstd) = (Array::new("mean", mean)?, Array::new("rstd", rstd)?);
    let (grad_y, grad_x) = (Array::new("grad_y", grad_y)?, Array::new("grad_x", grad_x)?);
    let (grad_w, grad_b) = (Array::new("grad_w", grad_w)?, Array::new("grad_b", grad_b)?);
    let inputs = [("x", &x), ("w", &w), ("mean", &mean), ("rstd", &rstd), ("grad_y", &grad_y)];
    let outputs = [("grad_x", &grad_x), ("grad_w", &grad_w), ("grad_b", &grad_b)];
    let call = Call::new(py, "layer_norm_bwd", &inputs, &outputs)?;
    without_gil(py, || layer_norm_bwd(call, &x, &w, &mean, &rstd, &grad_y, &grad_x, &grad_w, &grad_b))
}

/// y [..., d] = softmax(x [..., d]) of each row.
#[pyfunction]
fn softmax_forward(x: Object, y: Object) -> PyResult<()> {
    let py = x.py();
    let (x, y) = (Array::new("x", x)?, Array::new("y", y)?);
    let call = Call::new(py, "softmax", &[("x", &x)], &[("y", &y)])?;
    without_gil(py, || softmax(call, &x, &y))
}

/// grad_x, given y = softmax(x) and grad_y.
#[pyfunction]
fn softmax_backward(y: Object, grad_y: Object, grad_x: Object) -> PyResult<()> {
    let py = y.py();
    let (y, grad_y, grad_x) = (Array::new("y", y)?, Array::new("grad_y", grad_y)?, Array::new("grad_x", grad_x)?);
    let call = Call::new(py, "softmax_bwd", &[("y", &y), ("grad_y", &grad_y)], &[("grad_x", &grad_x)])?;
    without_gil(py, || softmax_bwd(call, &y, &grad_y, &grad_x))
}

/// loss and lse [rows] of logits [..., d] and targets [rows].
#[pyfunction]
fn cross_entropy_forward(
    logits: Object,
    targets: Object,
    loss: Object,
    lse: Object,
    ignore_index: i64,
) -> PyResult<()> {
    let py = logits.py();
    let (logits, targets) = (Array::new("logits", logits)?, Array::new("targets", targets)?);
    let (loss, lse) = (Array::new("loss", loss)?, Array::new("lse", lse)?);
    let inputs = [("logits", &logits), ("targets", &targets)];
    let call = Call::new(py, "cross_entropy_fwd", &inputs, &[("loss", &loss), ("lse", &lse)])?;
    without_gil(py, || cross_entropy_fwd(call, &logits, &targets, &loss, &lse, ignore_index))
}

/// grad_logits [..., d], given grad_loss [rows], which may have stride 0.
#[pyfunction]
fn cross_entropy_backward(
    logits: Object,
    targets: Object,
    lse: Object,
    grad_loss: Object,
    grad_logits: Object,
    ignore_index: i64,
) -> PyResult<()> {
    let py = logits.py();
    let (logits, targets) = (Array::new("logits", logits)?, Array::new("targets", targets)?);
    let (lse, grad_loss) = (Array::new("lse", lse)?, Array::new("grad_loss", grad_loss)?);
    let grad_logits = Array::new("grad_logits", grad_logits)?;
    let inputs = [("logits", &logits), ("targets", &targets), ("lse", &lse), ("grad_loss", &grad_loss)];
    let call = Call::new(py, "cross_entropy_bwd", &inputs, &[("grad_logits", &grad_logits)])?;
    without_gil(py, || cross_entropy_bwd(call, &logits, &targets, &lse, &grad_loss, &grad_logits, ignore_index))
}

/// loss [rows], and gradients in place of the logits [rows, columns], of which the first `classes` count: 0 in the others.
/// `grad_loss` [rows] may have stride 0.
#[pyfunction]
fn cross_entropy_forward_backward(
    logits: Object,
    classes: usize,
    targets: Object,
    grad_loss: Object,
    loss: Object,
    ignore_index: i64,
) -> PyResult<()> {
    let py = logits.py();
    let (logits, targets) = (Array::new("logits", logits)?, Array::new("targets", targets)?);
    let (grad_loss, loss) = (Array::new("grad_loss", grad_loss)?, Array::new("loss", loss)?);
    let inputs = [("targets", &targets), ("grad_loss", &grad_loss)];
    let call = Call::new(py, "cross_entropy_fwd_bwd", &inputs, &[("logits", &logits), ("loss", &loss)])?;
    without_gil(py, || cross_entropy_fwd_bwd(call, &logits, classes, &targets, &grad_loss, &loss, ignore_index))
}

/// y = silu(x).
#[pyfunction]
fn silu_forward(x: Object, y: Object) -> PyResult<()> {
    let py = x.py();
    let (x, y) = (Array::new("x", x)?, Array::new("y", y)?);
    let call = Call::new(py, "activation_fwd", &[("x", &x)], &[("y", &y)])?;
    without_gil(py, || silu_fwd(call, &x, &y))
}

/// grad_x, given grad_y.
#[pyfunction]
fn silu_backward(x: Object, grad_y: Object, grad_x: Object) -> PyResult<()> {
    let py = x.py();
    let (x, grad_y, grad_x) = (Array::new("x", x)?, Array::new("grad_y", grad_y)?, Array::new("grad_x", grad_x)?);
    let call = Call::new(py, "activation_bwd", &[("x", &x), ("grad_y", &grad_y)], &[("grad_x", &grad_x)])?;
    without_gil(py, || silu_bwd(call, &x, &grad_y, &grad_x))
}

/// y = silu(a) · b.
#[pyfunction]
fn swiglu_forward(a: Object, b: Object, y: Object) -> PyResult<()> {
    let py = a.py();
    let (a, b, y) = (Array::new("a", a)?, Array::new("b", b)?, Array::new("y", y)?);
    let call = Call::new(py, "swiglu_fwd", &[("a", &a), ("b", &b)], &[("y", &y)])?;
    without_gil(py, || swiglu_fwd(call, &a, &b, &y))
}

/// grad_a and grad_b, given grad_y.
#[pyfunction]
fn swiglu_backward(a: Object, b: Object, grad_y: Object, grad_a: Object, grad_b: Object) -> PyResult<()> {
    let py = a.py();
    let (a, b, grad_y) = (Array::new("a", a)?, Array::new("b", b)?, Array::new("grad_y", grad_y)?);
    let (grad_a, grad_b) = (Array::new("grad_a", grad_a)?, Array::new("grad_b", grad_b)?);
    let inputs = [("a", &a), ("b", &b), ("grad_y", &grad_y)];
    let call = Call::new(py, "swiglu_bwd", &inputs, &[("grad_a", &grad_a), ("grad_b", &grad_b)])?;
    without_gil(py, || swiglu_bwd(call, &a, &b, &grad_y, &grad_a, &grad_b))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(rms_norm_forward, module)?)?;
    module.add_function(wrap_pyfunction!(rms_norm_backward, module)?)?;
    module.add_function(wrap_pyfunction!(layer_norm_forward, module)?)?;
    module.add_function(wrap_pyfunction!(layer_norm_backward, module)?)?;
    module.add_function(wrap_pyfunction!(softmax_forward, module)?)?;
    module.add_function(wrap_pyfunction!(softmax_backward, module)?)?;
    module.add_function(wrap_pyfunction!(cross_entropy_forward, module)?)?;
    module.add_function(wrap_pyfunction!(cross_entropy_backward, module)?)?;
    module.add_function(wrap_pyfunction!(cross_entropy_forward_backward, module)?)?;
    module.add_function(wrap_pyfunction!(silu_forward, module)?)?;
    module.add_function(wrap_pyfunction!(silu_backward, module)?)?;
    module.add_function(wrap_pyfunction!(swiglu_forward, module)?)?;
    module.add_function(wrap_pyfunction!(swiglu_backward, module)?)
}
