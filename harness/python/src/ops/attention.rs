//! Attention, forward and backward.

use pyo3::prelude::*;
use tilewright::kernels::attention::{
    Backward, Options, Saved, backward_into, backward_workspace, forward_into, forward_workspace,
};

use super::{Call, for_float_type};
use crate::array::{Argument, Array};
use crate::call::without_gil;

/// The options of both passes.
///
/// # Errors
/// `ValueError` for an unknown precision.
fn options(
    causal: bool,
    scale: Option<f32>,
    precision: Option<&str>,
    deterministic: bool,
) -> PyResult<Options<'static>> {
    let precision = precision.map(super::dense::precision).transpose()?;
    Ok(Options { causal, scale, precision, backward: backward_of(deterministic), ..Options::default() })
}

pub fn backward_of(deterministic: bool) -> Backward {
    if deterministic { Backward::TwoPass } else { Backward::Auto }
}

/// Extents of an array of rank 4.
fn shape4(array: &Array, at: Argument) -> tilewright::Result<[usize; 4]> {
    let shape: Result<[i64; 4], _> = array.shape.as_slice().try_into();
    shape
        .map(|shape| shape.map(|n| n as usize))
        .map_err(|_| at.error("4 dimensions [batch, heads, rows, d]".into(), format!("the shape {:?}", array.shape)))
}

/// Calls `allocate` for `elements` f32, if there are any. Checks the array as an output beside the `arguments`.
fn workspace(
    py: Python<'_>,
    call: Call,
    allocate: &Bound<'_, PyAny>,
    elements: usize,
    arguments: &[(&'static str, &Array)],
) -> PyResult<Option<Array>> {
    if elements == 0 {
        return Ok(None);
    }
    let workspace = Array::new("workspace", &allocate.call1((elements,))?)?;
    super::prepare(py, call.kernel, arguments, &[("workspace", &workspace)], None)?;
    Ok(Some(workspace))
}

/// o, in q's shape, and lse [batch, heads, n_q] of q [batch, heads, n_q, d], k and v [batch, heads_kv, n_k, d].
/// `allocate(n)` returns an array of n f32 on the same device.
#[pyfunction]
#[pyo3(signature = (q, k, v, o, lse, allocate, causal, scale=None, precision=None))]
fn attention_forward(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    allocate: &Bound<'_, PyAny>,
    causal: bool,
    scale: Option<f32>,
    precision: Option<&str>,
) -> PyResult<()> {
    let py = q.py();
    let (q, k, v) = (Array::new("q", q)?, Array::new("k", k)?, Array::new("v", v)?);
    let (o, lse) = (Array::new("o", o)?, Array::new("lse", lse)?);
    let call = Call::new(py, "attention", &[("q", &q), ("k", &k), ("v", &v)], &[("o", &o), ("lse", &lse)])?;
    let options = options(causal, scale, precision, true)?;
    let elements = without_gil(py, || workspace_of_forward(call, &q, &k, &options))?;
    let arguments = [("q", &q), ("k", &k), ("v", &v), ("o", &o), ("lse", &lse)];
    let workspace = workspace(py, call, allocate, elements, &arguments)?;
    without_gil(py, || forward(call, [&q, &k, &v], &o, &lse, workspace.as_ref(), &options))
}

/// The elements of the workspace of [`forward`].
pub fn workspace_of_forward(call: Call, q: &Array, k: &Array, options: &Options) -> tilewright::Result<usize> {
    let (q_shape, k_shape) = (shape4(q, call.arg("q"))?, shape4(k, call.arg("k"))?);
    for_float_type!(q.dtype, call.arg("q"), T => Ok(forward_workspace::<T>(call.device, q_shape, k_shape, options)))
}

/// The forward pass, on arrays of the device of `call`.
pub fn forward(
    call: Call,
    [q, k, v]: [&Array; 3],
    o: &Array,
    lse: &Array,
    workspace: Option<&Array>,
    options: &Options,
) -> tilewright::Result<()> {
    for_float_type!(q.dtype, call.arg("q"), T => {
        let mut none = tilewright::Buffer::uninit(call.device, 0)?;
        let workspace = match workspace {
            Some(workspace) => workspace.view_mut(call.arg("workspace"))?,
            None => none.view_mut(),
        };
        forward_into::<T>(
            call.device,
            q.tensor(call.arg("q"))?,
            k.tensor(call.arg("k"))?,
            v.tensor(call.arg("v"))?,
            o.tensor_mut(call.arg("o"))?,
            dense_rows(lse, call.arg("lse"))?,
            workspace,
            options,
        )
    })
}

/// Row vectors, as the kernels need them: without gaps.
fn dense_rows<'a>(lse: &'a Array, at: Argument<'a>) -> tilewright::Result<tilewright::ViewMut<'a, f32>> {
    expect_dense(lse, at)?;
    lse.view_mut(at)
}

fn expect_dense(lse: &Array, at: Argument) -> tilewright::Result<()> {
    if lse.merged(0..lse.shape.len()).is_some_and(|(n, stride)| n <= 1 || stride == 1) {
        return Ok(());
    }
    Err(at.error("a contiguous array".into(), format!("the strides {:?}", lse.strides)))
}

/// The gradients dq, dk and dv, given the results o and lse of the forward pass and the gradient d_o of o.
#[pyfunction]
#[pyo3(signature = (q, k, v, o, lse, d_o, dq, dk, dv, allocate, causal, scale=None, precision=None, deterministic=true))]
fn attention_backward(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    d_o: &Bound<'_, PyAny>,
    dq: &Bound<'_, PyAny>,
    dk: &Bound<'_, PyAny>,
    dv: &Bound<'_, PyAny>,
    allocate: &Bound<'_, PyAny>,
    causal: bool,
    scale: Option<f32>,
    precision: Option<&str>,
    deterministic: bool,
) -> PyResult<()> {
    let py = q.py();
    let (q, k, v) = (Array::new("q", q)?, Array::new("k", k)?, Array::new("v", v)?);
    let (o, lse, d_o) = (Array::new("o", o)?, Array::new("lse", lse)?, Array::new("d_o", d_o)?);
    let (dq, dk, dv) = (Array::new("dq", dq)?, Array::new("dk", dk)?, Array::new("dv", dv)?);
    let inputs = [("q", &q), ("k", &k), ("v", &v), ("o", &o), ("lse", &lse), ("d_o", &d_o)];
    let call = Call::new(py, "attention", &inputs, &[("dq", &dq), ("dk", &dk), ("dv", &dv)])?;
    let options = options(causal, scale, precision, deterministic)?;
    let elements = without_gil(py, || workspace_of_backward(call, &q, &k, &options))?;
    let outputs = [("dq", &dq), ("dk", &dk), ("dv", &dv)];
    let arguments: Vec<_> = inputs.into_iter().chain(outputs).collect();
    let workspace = workspace(py, call, allocate, elements, &arguments)?;
    let saved = [&q, &k, &v, &o, &lse, &d_o];
    without_gil(py, || backward(call, saved, [&dq, &dk, &dv], workspace.as_ref(), &options))
}

/// The elements of the workspace of [`backward`].
pub fn workspace_of_backward(call: Call, q: &Array, k: &Array, options: &Options) -> tilewright::Result<usize> {
    let (q_shape, k_shape) = (shape4(q, call.arg("q"))?, shape4(k, call.arg("k"))?);
    for_float_type!(q.dtype, call.arg("q"), T => Ok(backward_workspace::<T>(call.device, q_shape, k_shape, options)))
}

/// The backward pass, on arrays of the device of `call`.
pub fn backward(
    call: Call,
    [q, k, v, o, lse, d_o]: [&Array; 6],
    [dq, dk, dv]: [&Array; 3],
    workspace: Option<&Array>,
    options: &Options,
) -> tilewright::Result<()> {
    for_float_type!(q.dtype, call.arg("q"), T => {
        let mut none = tilewright::Buffer::uninit(call.device, 0)?;
        let workspace = match workspace {
            Some(workspace) => workspace.view_mut(call.arg("workspace"))?,
            None => none.view_mut(),
        };
        expect_dense(lse, call.arg("lse"))?;
        let saved = Saved::<T> {
            q: q.tensor(call.arg("q"))?,
            k: k.tensor(call.arg("k"))?,
            v: v.tensor(call.arg("v"))?,
            o: o.tensor(call.arg("o"))?,
            lse: lse.view(call.arg("lse"))?,
            d_o: d_o.tensor(call.arg("d_o"))?,
        };
        backward_into(
            call.device,
            saved,
            dq.tensor_mut(call.arg("dq"))?,
            dk.tensor_mut(call.arg("dk"))?,
            dv.tensor_mut(call.arg("dv"))?,
            workspace,
            options,
        )
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(attention_forward, module)?)?;
    module.add_function(wrap_pyfunction!(attention_backward, module)?)
}
