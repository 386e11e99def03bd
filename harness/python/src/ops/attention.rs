//! Attention, forward and backward.

use pyo3::prelude::*;
use tilewright::kernels::attention::eight_bit::scaled_blocks;
use tilewright::kernels::attention::{
    Backward, Cache, Descale, Mask, Options, Saved, Score, backward_into, backward_workspace, documents, forward_into,
    forward_workspace, quantize_into, relative_bias_gradient_into, relative_bias_workspace, sink_gradients_into,
};
use tilewright::kernels::{FloatElement, OperandElement};
use tilewright::prelude::{Dtype as KernelDtype, F8E4M3, F8E5M2};
use tilewright::{Buffer, Dtype, Element, View, ViewMut};

use super::{Call, for_float_type};
use crate::array::{Argument, Array};
use crate::call::{Error, without_gil};

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
    if deterministic { Backward::Deterministic } else { Backward::Auto }
}

/// What attention does beside its dense form. A caller gives one of `window`, `prefix` and `ranges` at most.
#[derive(Clone, Copy, Default)]
pub struct Modifiers<'a> {
    pub window: Option<usize>,
    pub prefix: Option<usize>,
    pub softcap: Option<f32>,
    /// f32 [heads].
    pub alibi_slopes: Option<&'a Array>,
    /// f32 [heads, n_q + n_k − 1], without `softcap` and `alibi_slopes`.
    pub relative_bias: Option<&'a Array>,
    /// f32 [heads]; the backward pass reads none.
    pub sinks: Option<&'a Array>,
    /// The ranges of packed sequences, from [`document_ranges`].
    pub ranges: Option<&'a Array>,
    /// For the forward pass: the number of keys of each batch entry, i32 [batch].
    pub cache_seqlens: Option<&'a Array>,
    /// The pages of each batch entry, i32 [batch, most].
    pub block_table: Option<&'a Array>,
    /// Beside a cache: the first of each entry's rows, which are those of one batch entry of q, and the end, i32 [batch + 1].
    pub cu_seqlens_q: Option<&'a Array>,
    /// Dequantization scales of q, k and v: f32 [batch, heads, blocks], or those of k and v [heads_kv].
    pub descale: [Option<&'a Array>; 3],
}

impl<'a> Modifiers<'a> {
    /// The options, with the modifiers of a call with these queries.
    ///
    /// # Errors
    /// Arrays of other shapes or types.
    pub fn options(&'a self, call: Call, q: &Array, options: Options<'a>) -> tilewright::Result<Options<'a>> {
        let [batch, heads, n_q, _] = shape4(q, call.arg("q"))?;
        let mask = match (self.ranges, self.window, self.prefix) {
            (Some(ranges), ..) => Mask::documents(vector(ranges, call.arg("ranges"))?, n_q),
            (None, Some(size), _) => Mask::window(size),
            (None, None, Some(length)) => Mask::prefix(length),
            (None, None, None) => Mask::default(),
        };
        let of_heads = |name, array: Option<&'a Array>, what| -> tilewright::Result<Option<View<'a, f32>>> {
            let Some(array) = array else { return Ok(None) };
            let numbers = vector(array, call.arg(name))?;
            if numbers.len() == heads {
                return Ok(Some(numbers));
            }
            let expected = format!("a {what} for each of {heads} heads");
            Err(call.arg(name).error(expected, format!("{} {what}s", numbers.len())))
        };
        let slopes = of_heads("alibi_slopes", self.alibi_slopes, "slope")?;
        let sinks = of_heads("sinks", self.sinks, "score")?;
        let score = match self.relative_bias {
            Some(bias) => Score::relative(relative_bias(bias, heads, call.arg("relative_bias"))?),
            None => Score::new(self.softcap, slopes),
        };
        let table: Option<tilewright::kernels::Tensor<i32, 2>> =
            self.block_table.map(|table| table.tensor(call.arg("block_table"))).transpose()?;
        let lengths = self.cache_seqlens.map(|lengths| vector(lengths, call.arg("cache_seqlens"))).transpose()?;
        let row_starts = self.cu_seqlens_q.map(|starts| row_starts(starts, batch, n_q, call)).transpose()?;
        let batch = row_starts.map_or(batch, |starts| starts.shape()[0] - 1);
        let numbers = [("cache_seqlens", lengths.map(|x| x.len())), ("block_table", table.map(|x| x.shape()[0]))];
        for (name, found) in numbers.into_iter().filter_map(|(name, found)| Some((name, found?))) {
            if found != batch {
                let what = if row_starts.is_some() { "sequences of `cu_seqlens_q`" } else { "batch entries" };
                let expected = format!("numbers for each of {batch} {what}");
                return Err(call.arg(name).error(expected, format!("those of {found}")));
            }
        }
        let cache = lengths.map(|lengths| Cache { lengths, table, row_starts });
        Ok(Options { mask, score, sinks, cache, descale: self.scales(call, batch)?, ..options })
    }

    fn scales(&self, call: Call, batch: usize) -> tilewright::Result<Option<Descale<'a>>> {
        let [q, k, v] = self.descale;
        let (k, v) = match (k, v) {
            (Some(k), Some(v)) => (k, v),
            (None, None) if q.is_none() => return Ok(None),
            _ => return Err(call.arg("k_descale").error("v_descale beside it".into(), "one of them".into())),
        };
        let q = q.map(|q| scales_of(q, batch, call.arg("q_descale"))).transpose()?;
        let k = scales_of(k, batch, call.arg("k_descale"))?;
        Ok(Some(Descale { q, k, v: scales_of(v, batch, call.arg("v_descale"))? }))
    }

    /// The arrays, as inputs of a call.
    pub fn arrays(&self) -> impl Iterator<Item = (&'static str, &'a Array)> {
        let named = [
            ("alibi_slopes", self.alibi_slopes),
            ("relative_bias", self.relative_bias),
            ("sinks", self.sinks),
            ("ranges", self.ranges),
            ("cache_seqlens", self.cache_seqlens),
            ("block_table", self.block_table),
            ("cu_seqlens_q", self.cu_seqlens_q),
            ("q_descale", self.descale[0]),
            ("k_descale", self.descale[1]),
            ("v_descale", self.descale[2]),
        ];
        named.into_iter().filter_map(|(name, array)| Some((name, array?)))
    }
}

/// The first rows of the entries of a cache, in q with `batch` entries of `n_q` rows.
fn row_starts<'a>(
    starts: &'a Array,
    batch: usize,
    n_q: usize,
    call: Call,
) -> tilewright::Result<tilewright::kernels::Tensor<'a, i32, 1>> {
    let at = call.arg("cu_seqlens_q");
    if batch != 1 {
        let expected = "one batch entry, whose rows are those of all sequences, beside cu_seqlens_q".into();
        return Err(call.arg("q").error(expected, format!("{batch} batch entries")));
    }
    let numbers = vector::<i32>(starts, at)?;
    if numbers.len() < 2 {
        let expected = "the first row of each sequence, and the end of the last".into();
        return Err(at.error(expected, format!("{} numbers", numbers.len())));
    }
    if let Some(numbers) = numbers.as_slice() {
        expect_cumulative(numbers, at, n_q)?;
    }
    starts.tensor(at)
}

/// Dequantization scales [heads], which all batch entries have, or [batch, heads, blocks].
fn scales_of<'a>(
    scales: &'a Array,
    batch: usize,
    at: Argument<'a>,
) -> tilewright::Result<tilewright::kernels::Tensor<'a, f32, 3>> {
    match scales.shape[..] {
        [_] => {
            let scales = vector(scales, at)?;
            tilewright::kernels::Tensor::strided(scales, [batch, scales.len(), 1], [0, 1, 0])
        }
        [_, _, _] => scales.tensor(at),
        _ => {
            let expected = "the shape [heads], or [batch, heads, blocks], where one block is all rows".into();
            Err(at.error(expected, format!("the shape {:?}", scales.shape)))
        }
    }
}

/// The elements of a relative bias; the launch checks how many there are.
fn relative_bias<'a>(bias: &'a Array, heads: usize, at: Argument<'a>) -> tilewright::Result<View<'a, f32>> {
    if bias.shape.len() != 2 || bias.shape[0] != heads as i64 {
        let expected = format!("the shape [heads, n_q + n_k - 1] with {heads} heads");
        return Err(at.error(expected, format!("the shape {:?}", bias.shape)));
    }
    expect_dense(bias, at)?;
    bias.view(at)
}

/// The elements of a vector without gaps.
fn vector<'a, T: tilewright::Element>(array: &'a Array, at: Argument<'a>) -> tilewright::Result<View<'a, T>> {
    match (&array.shape[..], &array.strides[..]) {
        ([n], [stride]) if *n <= 1 || *stride == 1 => array.view(at),
        (shape, strides) => {
            let found = format!("the shape {shape:?} with the strides {strides:?}");
            Err(at.error("a contiguous array of one dimension".into(), found))
        }
    }
}

/// Writes the ranges of packed sequences, i32 [2 · (n_q + n_k)]: an argument of both passes.
#[pyfunction]
#[pyo3(name = "document_ranges", signature = (cu_seqlens_q, cu_seqlens_k, ranges, n_q, n_k, causal, window=None))]
fn document_ranges_(
    cu_seqlens_q: &Bound<'_, PyAny>,
    cu_seqlens_k: &Bound<'_, PyAny>,
    ranges: &Bound<'_, PyAny>,
    n_q: usize,
    n_k: usize,
    causal: bool,
    window: Option<usize>,
) -> PyResult<()> {
    let py = cu_seqlens_q.py();
    let rows = Array::new("cu_seqlens_q", cu_seqlens_q)?;
    let keys = Array::new("cu_seqlens_k", cu_seqlens_k)?;
    let ranges = Array::new("ranges", ranges)?;
    let inputs = [("cu_seqlens_q", &rows), ("cu_seqlens_k", &keys)];
    let call = Call::new(py, "attention", &inputs, &[("ranges", &ranges)])?;
    without_gil(py, || document_ranges(call, [&rows, &keys], [n_q, n_k], causal, window, &ranges))
}

/// The ranges of packed sequences of `n_q` rows and `n_k` keys, from their cumulative lengths.
///
/// # Errors
/// Arrays of other shapes or types; on the CPU also numbers that are no cumulative lengths.
pub fn document_ranges(
    call: Call,
    [rows, keys]: [&Array; 2],
    extents: [usize; 2],
    causal: bool,
    window: Option<usize>,
    ranges: &Array,
) -> tilewright::Result<()> {
    let args = ["cu_seqlens_q", "cu_seqlens_k"].map(|name| call.arg(name));
    let lengths = [vector::<i32>(rows, args[0])?, vector::<i32>(keys, args[1])?];
    if lengths[0].is_empty() || lengths[0].len() != lengths[1].len() {
        let expected = format!("as many cumulative lengths as `cu_seqlens_q`, {}, at least one", lengths[0].len());
        return Err(args[1].error(expected, format!("{}", lengths[1].len())));
    }
    for ((lengths, at), extent) in lengths.iter().zip(args).zip(extents) {
        if let Some(lengths) = lengths.as_slice() {
            expect_cumulative(lengths, at, extent)?;
        }
    }
    let target = ranges.view_mut(call.arg("ranges"))?;
    documents::document_ranges(call.device, lengths, extents, causal, window, target, None)
}

/// Checks that lengths begin with 0, do not decrease and do not exceed `extent`.
fn expect_cumulative(lengths: &[i32], at: Argument, extent: usize) -> tilewright::Result<()> {
    let wrong = match lengths {
        [first, ..] if *first != 0 => Some(0),
        _ => lengths.windows(2).position(|pair| pair[0] > pair[1]).map(|at| at + 1),
    };
    let wrong = wrong.or(lengths.iter().position(|&end| end as usize > extent));
    let Some(wrong) = wrong else { return Ok(()) };
    let expected = format!("numbers from 0 to at most {extent} that do not decrease, beginning with 0");
    Err(at.error(expected, format!("{} at {wrong}", lengths[wrong])))
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
    // Its gaps would be written.
    expect_dense(&workspace, call.arg("workspace")).map_err(|error| Error::new_err(error.to_string()))?;
    Ok(Some(workspace))
}

/// o [batch, heads, n_q, d_v] and lse [batch, heads, n_q] of q [batch, heads, n_q, d], k [batch, heads_kv, n_k, d] and v
/// [batch, heads_kv, n_k, d_v], or of a cache of keys. `allocate(n)` returns an array of n f32 on the same device.
#[pyfunction]
#[pyo3(signature = (
    q, k, v, o, lse, allocate, causal, scale=None, precision=None,
    window=None, prefix=None, softcap=None, alibi_slopes=None, relative_bias=None, sinks=None, ranges=None,
    cache_seqlens=None, block_table=None, cu_seqlens_q=None, k_descale=None, v_descale=None,
))]
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
    window: Option<usize>,
    prefix: Option<usize>,
    softcap: Option<f32>,
    alibi_slopes: Option<&Bound<'_, PyAny>>,
    relative_bias: Option<&Bound<'_, PyAny>>,
    sinks: Option<&Bound<'_, PyAny>>,
    ranges: Option<&Bound<'_, PyAny>>,
    cache_seqlens: Option<&Bound<'_, PyAny>>,
    block_table: Option<&Bound<'_, PyAny>>,
    cu_seqlens_q: Option<&Bound<'_, PyAny>>,
    k_descale: Option<&Bound<'_, PyAny>>,
    v_descale: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = q.py();
    let (q, k, v) = (Array::new("q", q)?, Array::new("k", k)?, Array::new("v", v)?);
    let (o, lse) = (Array::new("o", o)?, Array::new("lse", lse)?);
    let (slopes, ranges) = (Array::optional("alibi_slopes", alibi_slopes)?, Array::optional("ranges", ranges)?);
    let (sinks, bias) = (Array::optional("sinks", sinks)?, Array::optional("relative_bias", relative_bias)?);
    let (alibi_slopes, relative_bias) = (slopes.as_ref(), bias.as_ref());
    let (sinks, ranges) = (sinks.as_ref(), ranges.as_ref());
    let lengths = Array::optional("cache_seqlens", cache_seqlens)?;
    let table = Array::optional("block_table", block_table)?;
    let starts = Array::optional("cu_seqlens_q", cu_seqlens_q)?;
    let of_k = Array::optional("k_descale", k_descale)?;
    let of_v = Array::optional("v_descale", v_descale)?;
    let modifiers = Modifiers {
        window,
        prefix,
        softcap,
        alibi_slopes,
        relative_bias,
        sinks,
        ranges,
        cache_seqlens: lengths.as_ref(),
        block_table: table.as_ref(),
        cu_seqlens_q: starts.as_ref(),
        descale: [None, of_k.as_ref(), of_v.as_ref()],
    };
    let inputs: Vec<_> = [("q", &q), ("k", &k), ("v", &v)].into_iter().chain(modifiers.arrays()).collect();
    let outputs = [("o", &o), ("lse", &lse)];
    let call = Call::new(py, "attention", &inputs, &outputs)?;
    for_float_type!(q.dtype, call.arg("q"), _T => Ok(())).map_err(|error| Error::new_err(error.to_string()))?;
    let options = options(causal, scale, precision, true)?;
    let options = modifiers.options(call, &q, options).map_err(|error| Error::new_err(error.to_string()))?;
    let elements = without_gil(py, || workspace_of_forward(call, [&q, &k, &v], &options))?;
    let arguments: Vec<_> = inputs.into_iter().chain(outputs).collect();
    let workspace = workspace(py, call, allocate, elements, &arguments)?;
    without_gil(py, || forward(call, [&q, &k, &v], &o, &lse, workspace.as_ref(), &options))
}

/// The elements of the workspace of [`forward`].
pub fn workspace_of_forward(call: Call, inputs: [&Array; 3], options: &Options) -> tilewright::Result<usize> {
    let [q, k, v] = shapes4(call, inputs)?;
    match inputs[0].dtype {
        dtype if dtype.is_f8() => Ok(forward_workspace::<F8E4M3>(call.device, q, k, v, options)),
        dtype => {
            for_float_type!(dtype, call.arg("q"), T => Ok(forward_workspace::<T>(call.device, q, k, v, options)))
        }
    }
}

/// The shape of the scales of [`quantize`].
pub fn scales_shape(call: Call, x: &Array) -> tilewright::Result<[i64; 3]> {
    let [batch, heads, rows, _] = shape4(x, call.arg("x"))?;
    Ok([batch, heads, scaled_blocks(rows)].map(|n| n as i64))
}

/// `values` and `descale` of x [batch, heads, rows, d], in 8-bit floats.
pub fn quantize(call: Call, x: &Array, values: &Array, descale: &Array) -> tilewright::Result<()> {
    for_float_type!(x.dtype, call.arg("x"), T => match values.dtype {
        Dtype::F8E5M2 => quantize_of::<T, F8E5M2>(call, x, values, descale),
        _ => quantize_of::<T, F8E4M3>(call, x, values, descale),
    })
}

fn quantize_of<T: FloatElement, U: Element + KernelDtype>(
    call: Call,
    x: &Array,
    values: &Array,
    descale: &Array,
) -> tilewright::Result<()> {
    let (values, descale) = (values.tensor_mut(call.arg("values"))?, descale.tensor_mut(call.arg("descale"))?);
    quantize_into::<T, U>(call.device, x.tensor(call.arg("x"))?, values, descale)
}

/// The extents of q, k and v.
fn shapes4(call: Call, [q, k, v]: [&Array; 3]) -> tilewright::Result<[[usize; 4]; 3]> {
    Ok([shape4(q, call.arg("q"))?, shape4(k, call.arg("k"))?, shape4(v, call.arg("v"))?])
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
    match q.dtype {
        Dtype::F8E4M3 => return forward_of::<F8E4M3, F8E4M3>(call, [q, k, v], o, lse, workspace, options),
        Dtype::F8E5M2 => return forward_of::<F8E5M2, F8E5M2>(call, [q, k, v], o, lse, workspace, options),
        _ => {}
    }
    for_float_type!(q.dtype, call.arg("q"), T => {
        match k.dtype {
            Dtype::F8E4M3 => forward_of::<T, F8E4M3>(call, [q, k, v], o, lse, workspace, options),
            Dtype::F8E5M2 => forward_of::<T, F8E5M2>(call, [q, k, v], o, lse, workspace, options),
            _ => forward_of::<T, T>(call, [q, k, v], o, lse, workspace, options),
        }
    })
}

fn forward_of<T: OperandElement, C: Element + KernelDtype>(
    call: Call,
    [q, k, v]: [&Array; 3],
    o: &Array,
    lse: &Array,
    workspace: Option<&Array>,
    options: &Options,
) -> tilewright::Result<()> {
    let mut none = Buffer::uninit(call.device, 0)?;
    let workspace = workspace_view(workspace, &mut none, call.arg("workspace"))?;
    forward_into::<T, C>(
        call.device,
        q.tensor(call.arg("q"))?,
        k.tensor(call.arg("k"))?,
        v.tensor(call.arg("v"))?,
        o.tensor_mut(call.arg("o"))?,
        dense_rows(lse, call.arg("lse"))?,
        workspace,
        options,
    )
}

/// The elements of a workspace, or none.
fn workspace_view<'a>(
    workspace: Option<&'a Array>,
    none: &'a mut Buffer<f32>,
    at: Argument<'a>,
) -> tilewright::Result<ViewMut<'a, f32>> {
    workspace.map_or(Ok(none.view_mut()), |workspace| workspace.view_mut(at))
}

/// Row vectors, as the kernels need them: without gaps.
fn dense_rows<'a>(lse: &'a Array, at: Argument<'a>) -> tilewright::Result<ViewMut<'a, f32>> {
    expect_dense(lse, at)?;
    lse.view_mut(at)
}

fn expect_dense(array: &Array, at: Argument) -> tilewright::Result<()> {
    if array.merged(0..array.shape.len()).is_some_and(|(n, stride)| n <= 1 || stride == 1) {
        return Ok(());
    }
    Err(at.error("a contiguous array".into(), format!("the strides {:?}", array.strides)))
}

/// The gradients dq, dk and dv, given the results o and lse of the forward pass and the gradient d_o of o.
#[pyfunction]
#[pyo3(signature = (
    q, k, v, o, lse, d_o, dq, dk, dv, allocate, causal, scale=None, precision=None, deterministic=true,
    window=None, prefix=None, softcap=None, alibi_slopes=None, relative_bias=None, ranges=None,
    d_relative_bias=None,
))]
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
    window: Option<usize>,
    prefix: Option<usize>,
    softcap: Option<f32>,
    alibi_slopes: Option<&Bound<'_, PyAny>>,
    relative_bias: Option<&Bound<'_, PyAny>>,
    ranges: Option<&Bound<'_, PyAny>>,
    d_relative_bias: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = q.py();
    let (q, k, v) = (Array::new("q", q)?, Array::new("k", k)?, Array::new("v", v)?);
    let (o, lse, d_o) = (Array::new("o", o)?, Array::new("lse", lse)?, Array::new("d_o", d_o)?);
    let (dq, dk, dv) = (Array::new("dq", dq)?, Array::new("dk", dk)?, Array::new("dv", dv)?);
    let (slopes, ranges) = (Array::optional("alibi_slopes", alibi_slopes)?, Array::optional("ranges", ranges)?);
    let bias = Array::optional("relative_bias", relative_bias)?;
    let d_bias = Array::optional("d_relative_bias", d_relative_bias)?;
    let (alibi_slopes, relative_bias, ranges) = (slopes.as_ref(), bias.as_ref(), ranges.as_ref());
    let none = Modifiers::default();
    let modifiers = Modifiers { window, prefix, softcap, alibi_slopes, relative_bias, ranges, ..none };
    let inputs = [("q", &q), ("k", &k), ("v", &v), ("o", &o), ("lse", &lse), ("d_o", &d_o)];
    let inputs: Vec<_> = inputs.into_iter().chain(modifiers.arrays()).collect();
    let outputs: Vec<_> = [("dq", &dq), ("dk", &dk), ("dv", &dv)]
        .into_iter()
        .chain(d_bias.as_ref().map(|d_bias| ("d_relative_bias", d_bias)))
        .collect();
    let call = Call::new(py, "attention", &inputs, &outputs)?;
    let options = options(causal, scale, precision, deterministic)?;
    let options = modifiers.options(call, &q, options).map_err(|error| Error::new_err(error.to_string()))?;
    let elements = without_gil(py, || workspace_of_backward(call, [&q, &k, &v], &options))?;
    let arguments: Vec<_> = inputs.into_iter().chain(outputs).collect();
    let workspace = workspace(py, call, allocate, elements, &arguments)?;
    let saved = [&q, &k, &v, &o, &lse, &d_o];
    without_gil(py, || backward(call, saved, [&dq, &dk, &dv], workspace.as_ref(), &options))?;
    let Some(d_bias) = &d_bias else { return Ok(()) };
    let elements = without_gil(py, || workspace_of_relative_bias(call, [&q, &k, &v]))?;
    let workspace = self::workspace(py, call, allocate, elements, &arguments)?;
    without_gil(py, || relative_bias_gradient(call, saved, d_bias, workspace.as_ref(), &options))
}

/// The elements of the workspace of [`backward`].
pub fn workspace_of_backward(call: Call, inputs: [&Array; 3], options: &Options) -> tilewright::Result<usize> {
    let [q, k, v] = shapes4(call, inputs)?;
    let at = call.arg("q");
    for_float_type!(inputs[0].dtype, at, T => Ok(backward_workspace::<T>(call.device, q, k, v, options)))
}

/// The backward pass, on arrays of the device of `call`.
pub fn backward(
    call: Call,
    saved: [&Array; 6],
    [dq, dk, dv]: [&Array; 3],
    workspace: Option<&Array>,
    options: &Options,
) -> tilewright::Result<()> {
    for_float_type!(saved[0].dtype, call.arg("q"), T => {
        let mut none = Buffer::uninit(call.device, 0)?;
        let workspace = workspace_view(workspace, &mut none, call.arg("workspace"))?;
        backward_into(
            call.device,
            saved_tensors::<T>(call, saved)?,
            dq.tensor_mut(call.arg("dq"))?,
            dk.tensor_mut(call.arg("dk"))?,
            dv.tensor_mut(call.arg("dv"))?,
            workspace,
            options,
        )
    })
}

fn saved_tensors<'a, T: FloatElement>(
    call: Call,
    [q, k, v, o, lse, d_o]: [&'a Array; 6],
) -> tilewright::Result<Saved<'a, T>> {
    expect_dense(lse, call.arg("lse"))?;
    Ok(Saved {
        q: q.tensor(call.arg("q"))?,
        k: k.tensor(call.arg("k"))?,
        v: v.tensor(call.arg("v"))?,
        o: o.tensor(call.arg("o"))?,
        lse: lse.view(call.arg("lse"))?,
        d_o: d_o.tensor(call.arg("d_o"))?,
    })
}

/// The elements of the workspace of [`relative_bias_gradient`].
pub fn workspace_of_relative_bias(call: Call, inputs: [&Array; 3]) -> tilewright::Result<usize> {
    let [q, k, v] = shapes4(call, inputs)?;
    let at = call.arg("q");
    for_float_type!(inputs[0].dtype, at, T => Ok(relative_bias_workspace::<T>(call.device, q, k, v)))
}

/// The gradient of the relative bias in `options`, on arrays of the device of `call`.
pub fn relative_bias_gradient(
    call: Call,
    saved: [&Array; 6],
    gradient: &Array,
    workspace: Option<&Array>,
    options: &Options,
) -> tilewright::Result<()> {
    let at = call.arg("d_relative_bias");
    expect_dense(gradient, at)?;
    let mut none = Buffer::uninit(call.device, 0)?;
    let workspace = workspace_view(workspace, &mut none, call.arg("workspace"))?;
    for_float_type!(saved[0].dtype, call.arg("q"), T => {
        let saved = saved_tensors::<T>(call, saved)?;
        relative_bias_gradient_into(call.device, saved, gradient.view_mut(at)?, workspace, options)
    })
}

/// The gradients of the sinks, f32 [heads], given the results o and lse of the forward pass and the gradient d_o of o.
#[pyfunction]
#[pyo3(name = "sink_gradients")]
fn sink_gradients_(
    o: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    d_o: &Bound<'_, PyAny>,
    sinks: &Bound<'_, PyAny>,
    d_sinks: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let py = o.py();
    let (o, lse, d_o) = (Array::new("o", o)?, Array::new("lse", lse)?, Array::new("d_o", d_o)?);
    let (sinks, d_sinks) = (Array::new("sinks", sinks)?, Array::new("d_sinks", d_sinks)?);
    let inputs = [("o", &o), ("lse", &lse), ("d_o", &d_o), ("sinks", &sinks)];
    let call = Call::new(py, "attention", &inputs, &[("d_sinks", &d_sinks)])?;
    without_gil(py, || sink_gradients(call, [&o, &lse, &d_o, &sinks], &d_sinks))
}

/// The gradients of the sinks, on arrays of the device of `call`.
pub fn sink_gradients(call: Call, [o, lse, d_o, sinks]: [&Array; 4], d_sinks: &Array) -> tilewright::Result<()> {
    expect_dense(lse, call.arg("lse"))?;
    let sinks = vector(sinks, call.arg("sinks"))?;
    let lse = lse.view(call.arg("lse"))?;
    for_float_type!(o.dtype, call.arg("o"), T => {
        let (o, d_o) = (o.tensor::<T, 4>(call.arg("o"))?, d_o.tensor(call.arg("d_o"))?);
        sink_gradients_into(call.device, sinks, o, lse, d_o, d_sinks.view_mut(call.arg("d_sinks"))?)
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(document_ranges_, module)?)?;
    module.add_function(wrap_pyfunction!(attention_forward, module)?)?;
    module.add_function(wrap_pyfunction!(attention_backward, module)?)?;
    module.add_function(wrap_pyfunction!(sink_gradients_, module)?)
}
