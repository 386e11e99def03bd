//! Matmul, column sums, rotary position embedding and AdamW.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tilewright::kernels::activation::Activation;
use tilewright::kernels::adamw::{self as adam, AdamState};
use tilewright::kernels::cast;
use tilewright::kernels::matmul as gemm;
use tilewright::kernels::rope::{self, Direction, Pairs, Rotation};
use tilewright::kernels::{FloatElement, Tensor, TensorMut, column_sum as columns};
use tilewright::prelude::Precision;

use super::{Call, for_float_type, for_index_type};
use crate::array::{Argument, Array};
use crate::call::{shown, without_gil};

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// A precision by name.
///
/// # Errors
/// `ValueError` for another name.
pub fn precision(name: &str) -> PyResult<Precision> {
    Precision::from_name(name).ok_or_else(|| {
        PyValueError::new_err(format!("precision: expected ieee, tf32 or tf32x3, found {}", shown(name)))
    })
}

fn activation(name: &str) -> PyResult<Activation> {
    match name {
        "none" => Ok(Activation::None),
        "relu" => Ok(Activation::Relu),
        "gelu" => Ok(Activation::Gelu),
        "silu" => Ok(Activation::Silu),
        other => {
            Err(PyValueError::new_err(format!("activation: expected none, relu, gelu or silu, found {}", shown(other))))
        }
    }
}

/// c [m, n] = activation(a [m, k] · b [k, n] + bias [n]), for c of the type of a and b or float32; with `accumulate`, and
/// then without a bias, c += that.
#[pyfunction]
#[pyo3(signature = (a, b, c, bias=None, activation="none", precision="ieee", accumulate=false))]
fn matmul(
    a: Object,
    b: Object,
    c: Object,
    bias: Option<Object>,
    activation: &str,
    precision: &str,
    accumulate: bool,
) -> PyResult<()> {
    let py = a.py();
    let (a, b, c) = (Array::new("a", a)?, Array::new("b", b)?, Array::new("c", c)?);
    let bias = Array::optional("bias", bias)?;
    let mut inputs = vec![("a", &a), ("b", &b)];
    inputs.extend(bias.as_ref().map(|bias| ("bias", bias)));
    let call = Call::new(py, "matmul", &inputs, &[("c", &c)])?;
    if accumulate && bias.is_some() {
        return Err(PyValueError::new_err("matmul: accumulate=True takes no bias"));
    }
    let options = gemm::Options {
        activation: self::activation(activation)?,
        precision: self::precision(precision)?,
        ..gemm::Options::default()
    };
    without_gil(py, || multiply(call, &a, &b, bias.as_ref(), &c, options, accumulate))
}

/// The computation of [`matmul`], on arrays of the device of `call`.
pub fn multiply(
    call: Call,
    a: &Array,
    b: &Array,
    bias: Option<&Array>,
    c: &Array,
    options: gemm::Options,
    accumulate: bool,
) -> tilewright::Result<()> {
    for_float_type!(a.dtype, call.arg("a"), T => match c.dtype {
        tilewright::Dtype::F32 => multiply_to::<T, f32>(call, a, b, bias, c, options, accumulate),
        _ => multiply_to::<T, T>(call, a, b, bias, c, options, accumulate),
    })
}

fn multiply_to<T: FloatElement, C: FloatElement>(
    call: Call,
    a: &Array,
    b: &Array,
    bias: Option<&Array>,
    c: &Array,
    options: gemm::Options,
    accumulate: bool,
) -> tilewright::Result<()> {
    let (a, b) = (a.tensor::<T, 2>(call.arg("a"))?, b.tensor(call.arg("b"))?);
    let c = c.tensor_mut::<C, 2>(call.arg("c"))?;
    match bias {
        None if accumulate => gemm::accumulate(call.device, a, b, c, options),
        Some(bias) => gemm::multiply_add_bias(call.device, a, b, bias.tensor(call.arg("bias"))?, c, options),
        None => gemm::multiply(call.device, a, b, c, options),
    }
}

/// y = factor · x, both [..., d], for a factor [1] in the memory of their device.
#[pyfunction]
fn scale(x: Object, factor: Object, y: Object) -> PyResult<()> {
    let py = x.py();
    let (x, factor, y) = (Array::new("x", x)?, Array::new("factor", factor)?, Array::new("y", y)?);
    let call = Call::new(py, "scale", &[("x", &x), ("factor", &factor)], &[("y", &y)])?;
    without_gil(py, || {
        for_float_type!(x.dtype, call.arg("x"), T => for_float_type!(y.dtype, call.arg("y"), U => {
            let (rows, factor) = (x.rows::<T>(call.arg("x"))?, factor.tensor::<f32, 1>(call.arg("factor"))?);
            cast::scaled(call.device, rows, factor, y.rows_mut::<U>(call.arg("y"))?)
        }))
    })
}

/// y [d] = the sums of the columns of x [..., d].
#[pyfunction]
fn column_sum(x: Object, y: Object) -> PyResult<()> {
    let py = x.py();
    let (x, y) = (Array::new("x", x)?, Array::new("y", y)?);
    let call = Call::new(py, "column_sum", &[("x", &x)], &[("y", &y)])?;
    without_gil(py, || sum_columns(call, &x, &y))
}

/// The computation of [`column_sum`], on arrays of the device of `call`.
pub fn sum_columns(call: Call, x: &Array, y: &Array) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => {
        columns::forward::<T, T>(call.device, x.rows(call.arg("x"))?, y.tensor_mut(call.arg("y"))?)
    })
}

/// An array [batch, heads, n, d] as [tokens, heads, d] with consecutive sequences of n tokens: batch is part of the
/// heads or of the tokens, whichever the strides allow.
#[derive(Clone, Copy)]
struct Tokens {
    shape: [usize; 3],
    strides: [i64; 3],
    /// Whether the tokens are those of all batch entries.
    batch_in_tokens: bool,
}

impl Tokens {
    /// The dimensions of `array`; `None` for another rank than 4, or strides that do not allow this form.
    fn new(array: &Array, batch_in_tokens: bool) -> Option<Tokens> {
        let [_, heads, n, d] = array.shape.as_slice() else { return None };
        let ([_, heads, n, d], s) = ([0, *heads as usize, *n as usize, *d as usize], &array.strides);
        if batch_in_tokens {
            // [batch, n] is one dimension if the stride of batch is n steps of a token.
            let one = array.shape[0] == 1 || s[0] == s[2] * n as i64;
            let tokens = array.shape[0] as usize * n;
            return one.then_some(Tokens { shape: [tokens, heads, d], strides: [s[2], s[1], s[3]], batch_in_tokens });
        }
        let (heads, stride) = array.merged(0..2)?;
        Some(Tokens { shape: [n, heads, d], strides: [s[2], stride, s[3]], batch_in_tokens })
    }

    /// x and y in the same way.
    ///
    /// # Errors
    /// Another rank, or strides that allow neither.
    fn pair(x: &Array, y: &Array, at: Argument) -> tilewright::Result<(Tokens, Tokens)> {
        let pair = |batch_in_tokens| Tokens::new(x, batch_in_tokens).zip(Tokens::new(y, batch_in_tokens));
        pair(false).or_else(|| pair(true)).ok_or_else(|| {
            at.error(
                "4 dimensions [batch, heads, n, d], in memory as they are or as [batch, n, heads, d]".into(),
                format!("the shape {:?} with the strides {:?}", x.shape, x.strides),
            )
        })
    }
}

/// y = x [batch, heads, n, d], rotated by the position of each of the n tokens: `positions` [n], or start, start + 1, …
/// With `inverse` by the negative angle. Pairs are adjacent elements, or with `halves` elements i and i + d/2.
/// `frequencies` is [d/2] in f64.
#[pyfunction]
#[pyo3(name = "rope", signature = (x, frequencies, y, start=0, positions=None, inverse=false, halves=false))]
fn rope_(
    x: Object,
    frequencies: Object,
    y: Object,
    start: usize,
    positions: Option<Object>,
    inverse: bool,
    halves: bool,
) -> PyResult<()> {
    let py = x.py();
    let (x, frequencies, y) = (Array::new("x", x)?, Array::new("frequencies", frequencies)?, Array::new("y", y)?);
    let positions = Array::optional("positions", positions)?;
    let mut inputs = vec![("x", &x), ("frequencies", &frequencies)];
    inputs.extend(positions.as_ref().map(|positions| ("positions", positions)));
    let call = Call::new(py, "rope", &inputs, &[("y", &y)])?;
    let at = positions.as_ref().map_or(Positions::From(start), Positions::Each);
    without_gil(py, || rotate(call, &x, &frequencies, &y, at, rotation(inverse, halves)))
}

/// The positions of the tokens of [`rotate`].
#[derive(Clone, Copy)]
pub enum Positions<'a> {
    From(usize),
    Each(&'a Array),
}

pub fn rotation(inverse: bool, halves: bool) -> Rotation {
    Rotation {
        direction: if inverse { Direction::Backward } else { Direction::Forward },
        pairs: if halves { Pairs::Halves } else { Pairs::Adjacent },
    }
}

/// The computation of `rope`, on arrays of the device of `call`.
pub fn rotate(
    call: Call,
    x: &Array,
    frequencies: &Array,
    y: &Array,
    positions: Positions<'_>,
    rotation: Rotation,
) -> tilewright::Result<()> {
    let at = call.arg("x");
    let (of_x, of_y) = Tokens::pair(x, y, at)?;
    let n = x.shape[2] as usize;
    for_float_type!(x.dtype, at, T => {
        let source = Tensor::<T, 3>::strided(x.view(at)?, of_x.shape, of_x.strides)?;
        let target = TensorMut::strided(y.view_mut(call.arg("y"))?, of_y.shape, of_y.strides)?;
        let frequencies = frequencies.tensor(call.arg("frequencies"))?;
        let positions = match positions {
            Positions::Each(positions) => positions,
            Positions::From(start) => {
                return rope::rotate_from(call.device, source, start, n.max(1), frequencies, target, rotation);
            }
        };
        if of_x.batch_in_tokens && x.shape[0] > 1 {
            let (expected, found) = ("contiguous memory if there are positions", format!("the strides {:?}", x.strides));
            return Err(at.error(expected.into(), found));
        }
        for_index_type!(positions.dtype, call.arg("positions"), I => {
            let positions = positions.tensor::<I, 1>(call.arg("positions"))?;
            rope::rotate_at(call.device, source, positions, frequencies, target, rotation)
        })
    })
}

/// θᵢ of the pairs of a head of `d` elements.
#[pyfunction]
fn rope_frequencies(d: usize, base: f64) -> PyResult<Vec<f64>> {
    const MAX: usize = 1 << 20;
    if d > MAX {
        return Err(PyValueError::new_err(format!("rope: expected heads of at most {MAX} elements, found {d}")));
    }
    if !(base > 0.0 && base.is_finite()) {
        return Err(PyValueError::new_err(format!("base: expected a positive finite number, found {base}")));
    }
    Ok(rope::frequencies(d, base))
}

/// The arrays of a parameter: p, its moments m and v, its gradient g, and the compute weights.
type Parameter<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// Applies AdamW's step `t` to each parameter (p, m, v, g, compute weights or None), all contiguous; p, m and v are f32.
#[pyfunction]
#[pyo3(signature = (parameters, t, lr, beta1, beta2, eps, weight_decay, grad_scale=1.0))]
fn adamw(
    py: Python<'_>,
    parameters: Vec<Parameter<'_>>,
    t: u64,
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    grad_scale: f64,
) -> PyResult<()> {
    let options = adam::Options { lr, beta1, beta2, eps, weight_decay, grad_scale };
    let mut updates = Vec::with_capacity(parameters.len());
    for (p, m, v, g, compute) in &parameters {
        let arrays = [Array::new("p", p)?, Array::new("m", m)?, Array::new("v", v)?, Array::new("g", g)?];
        let compute = Array::optional("compute_weights", compute.as_ref())?;
        let [p, m, v, g] = &arrays;
        let mut outputs = vec![("p", p), ("m", m), ("v", v)];
        outputs.extend(compute.as_ref().map(|compute| ("compute_weights", compute)));
        let call = Call::new(py, "adamw", &[("g", g)], &outputs)?;
        updates.push((call, arrays, compute));
    }
    without_gil(py, || update_all(&updates, t, &options))
}

/// One parameter of a step of AdamW: p, m, v and g, and compute weights.
pub type Update = (Call, [Array; 4], Option<Array>);

/// Applies a step of AdamW to all parameters, or to none if the arguments of one are wrong.
pub fn update_all(updates: &[Update], t: u64, options: &adam::Options) -> tilewright::Result<()> {
    updates.iter().try_for_each(|(call, arrays, compute)| expect_update(*call, arrays, compute.as_ref()))?;
    updates.iter().try_for_each(|(call, arrays, compute)| update(*call, arrays, compute.as_ref(), t, options))
}

fn expect_update(call: Call, [p, m, v, g]: &[Array; 4], compute: Option<&Array>) -> tilewright::Result<()> {
    for (name, array) in
        [("p", p), ("m", m), ("v", v), ("g", g)].into_iter().chain(compute.map(|c| ("compute_weights", c)))
    {
        if !array.is_dense() {
            return Err(call
                .arg(name)
                .error("an array without gaps".into(), format!("the strides {:?}", array.strides)));
        }
        if array.shape != p.shape {
            let (expected, found) = (format!("p's shape {:?}", p.shape), format!("{:?}", array.shape));
            return Err(call.arg(name).error(expected, found));
        }
        let moves = |i: usize| array.shape[i] > 1 && array.strides[i] != p.strides[i];
        if array.elements() > 0 && (0..array.shape.len()).any(moves) {
            let (expected, found) = (format!("p's strides {:?}", p.strides), format!("{:?}", array.strides));
            return Err(call.arg(name).error(expected, found));
        }
    }
    for (name, array) in [("p", p), ("m", m), ("v", v)] {
        array.view::<f32>(call.arg(name))?;
    }
    for (name, array) in [("g", g)].into_iter().chain(compute.map(|c| ("compute_weights", c))) {
        for_float_type!(array.dtype, call.arg(name), _T => Ok(()))?;
    }
    Ok(())
}

/// Applies a step to one parameter, whose arguments were checked.
fn update(
    call: Call,
    [p, m, v, g]: &[Array; 4],
    compute: Option<&Array>,
    t: u64,
    options: &adam::Options,
) -> tilewright::Result<()> {
    let state =
        AdamState { p: p.view_mut(call.arg("p"))?, m: m.view_mut(call.arg("m"))?, v: v.view_mut(call.arg("v"))? };
    for_float_type!(g.dtype, call.arg("g"), G => {
        let gradient = g.view::<G>(call.arg("g"))?;
        let Some(compute) = compute else { return adam::step(call.device, state, gradient, t, options) };
        let at = call.arg("compute_weights");
        for_float_type!(compute.dtype, at, C => {
            adam::step_with_compute_weights::<G, C>(call.device, state, gradient, compute.view_mut(at)?, t, options)
        })
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(matmul, module)?)?;
    module.add_function(wrap_pyfunction!(column_sum, module)?)?;
    module.add_function(wrap_pyfunction!(scale, module)?)?;
    module.add_function(wrap_pyfunction!(rope_, module)?)?;
    module.add_function(wrap_pyfunction!(rope_frequencies, module)?)?;
    module.add_function(wrap_pyfunction!(adamw, module)?)
}
