//! The kernels of the ops. Each reads its arguments, allocates the results, and runs a computation of `crate::ops`.

use std::ffi::CStr;

use pyo3::PyResult;
use pyo3::exceptions::PyValueError;
use smallvec::{SmallVec, smallvec};
use tilewright::Dtype;
use tilewright::kernels::adamw as adam;
use tilewright::kernels::attention::Options;
use tilewright::kernels::matmul as gemm;
use tilewright::prelude::Precision;

use super::abi::{Handle, Kernel};
use super::{
    Arguments, Results, call, contiguous, dense, empty, halves, heads_like, row_vector, rows, run, tokens_first,
    unit_stride,
};
use crate::array::Array;
use crate::call::{Error, guarded};
use crate::ops::attention::Modifiers;
use crate::ops::dense::Positions;
use crate::ops::{Call, attention, dense as dense_ops, expect_separate, rows as row_ops, scaled as scaled_ops};

/// A table of functions of this module as kernels, by their names.
macro_rules! kernels {
    ($($name:ident)*) => {
        pub const KERNELS: &[(&CStr, Kernel)] = &[$((
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name has no zeros"),
            },
            {
                unsafe extern "C-unwind" fn kernel(stack: *mut u64, arguments: u64, results: u64) {
                    // SAFETY: PyTorch calls it for the op of this name, whose schema in Python has these arguments.
                    unsafe { run(stack, arguments, results, $name) }
                }
                kernel
            },
        )),*];
    };
}

kernels! {
    attention_forward attention_backward
    modified_attention_forward modified_attention_backward document_ranges sink_gradients
    relative_bias_gradient quantize_rows
    rms_norm_forward rms_norm_backward
    layer_norm_forward layer_norm_backward
    softmax_forward softmax_backward
    cross_entropy_forward cross_entropy_backward
    silu_forward silu_backward
    swiglu_forward swiglu_backward
    swiglu_packed_forward swiglu_packed_backward
    rope_from rope_at
    matmul_forward matmul_bias_forward column_sum
    scaled_mm int_mm
    adamw_
}

fn precision(code: i64) -> PyResult<Option<Precision>> {
    const PRECISIONS: [&str; 3] = ["ieee", "tf32", "tf32x3"];
    match code {
        0 => Ok(None),
        1..=3 => Ok(Precision::from_name(PRECISIONS[code as usize - 1])),
        _ => Err(PyValueError::new_err(format!("precision: expected a code from 0 to 3, found {code}"))),
    }
}

fn attention_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let tensors = arguments.tensors();
    let options = dense_options(arguments)?;
    forward(tensors, options, Modifiers::default())
}

fn attention_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let tensors = arguments.tensors();
    let options = dense_options(arguments)?;
    let options = Options { backward: attention::backward_of(arguments.bool()), ..options };
    backward(tensors, options, Modifiers::default())
}

fn modified_attention_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let tensors = arguments.tensors();
    let arrays = ModifierArrays::of(arguments, true)?;
    let options = dense_options(arguments)?;
    forward(tensors, options, arrays.modifiers(arguments))
}

fn modified_attention_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let tensors = arguments.tensors();
    let arrays = ModifierArrays::of(arguments, false)?;
    let options = dense_options(arguments)?;
    let options = Options { backward: attention::backward_of(arguments.bool()), ..options };
    backward(tensors, options, arrays.modifiers(arguments))
}

fn relative_bias_gradient(arguments: &mut Arguments) -> PyResult<Results> {
    let [q, k, v, o, lse, d_o, bias] = arguments.tensors();
    let ranges = arguments.list().pop();
    let options = dense_options(arguments)?;
    let mut length = || usize::try_from(arguments.int()).ok();
    let (window, prefix) = (length(), length());
    let saved = Saved::of([q, k, v, o, lse, d_o])?;
    let bias = Array::of_handle("relative_bias", bias)?;
    let ranges = ranges.map(|ranges| Array::of_handle("ranges", ranges)).transpose()?;
    let (relative_bias, ranges) = (Some(&bias), ranges.as_ref());
    let modifiers = Modifiers { window, prefix, relative_bias, ranges, ..Modifiers::default() };
    let (call, options) = saved.call(&modifiers, options)?;
    let gradient = dense(&bias)?;
    let [q, k, v, ..] = saved.arrays();
    let elements = guarded(|| attention::workspace_of_relative_bias(call, [q, k, v]))?;
    let workspace = workspace(q, elements)?;
    let saved = saved.arrays();
    guarded(|| attention::relative_bias_gradient(call, saved, &gradient, workspace.as_ref(), &options))?;
    Ok(smallvec![gradient])
}

fn document_ranges(arguments: &mut Arguments) -> PyResult<Results> {
    let [rows, keys] = arguments.tensors();
    let extents = [arguments.int(), arguments.int()].map(|n| usize::try_from(n).unwrap_or(0));
    let (causal, window) = (arguments.bool(), usize::try_from(arguments.int()).ok());
    let (rows, keys) = (Array::of_handle("cu_seqlens_q", rows)?, Array::of_handle("cu_seqlens_k", keys)?);
    let call = call("attention", &[("cu_seqlens_q", &rows), ("cu_seqlens_k", &keys)])?;
    let len = 2_i64.saturating_mul(extents[0].saturating_add(extents[1]) as i64);
    let ranges = empty(&rows, &[len], Dtype::I32)?;
    guarded(|| attention::document_ranges(call, [&rows, &keys], extents, causal, window, &ranges))?;
    Ok(smallvec![ranges])
}

fn quantize_rows(arguments: &mut Arguments) -> PyResult<Results> {
    let x = Array::of_handle("x", arguments.tensor())?;
    let dtype = if arguments.bool() { Dtype::F8E5M2 } else { Dtype::F8E4M3 };
    let call = call("quantize", &[("x", &x)])?;
    let scales = guarded(|| attention::scales_shape(call, &x))?;
    let (values, descale) = (heads_like(&x, None, dtype)?, empty(&x, &scales, Dtype::F32)?);
    guarded(|| attention::quantize(call, &x, &values, &descale))?;
    Ok(smallvec![values, descale])
}

fn sink_gradients(arguments: &mut Arguments) -> PyResult<Results> {
    let [o, lse, d_o, sinks] = arguments.tensors();
    let (o, lse, d_o) = (Array::of_handle("o", o)?, Array::of_handle("lse", lse)?, unit_stride("d_o", d_o)?);
    let sinks = Array::of_handle("sinks", sinks)?;
    let call = call("attention", &[("o", &o), ("lse", &lse), ("d_o", &d_o), ("sinks", &sinks)])?;
    let d_sinks = dense(&sinks)?;
    guarded(|| attention::sink_gradients(call, [&o, &lse, &d_o, &sinks], &d_sinks))?;
    Ok(smallvec![d_sinks])
}

/// Options that attention has with and without modifiers.
fn dense_options(arguments: &mut Arguments) -> PyResult<Options<'static>> {
    let (causal, scale) = (arguments.bool(), Some(arguments.float()));
    Ok(Options { causal, scale, precision: precision(arguments.int())?, ..Options::default() })
}

/// The tensors of modifiers.
struct ModifierArrays {
    alibi_slopes: Option<Array>,
    relative_bias: Option<Array>,
    sinks: Option<Array>,
    ranges: Option<Array>,
    cache_seqlens: Option<Array>,
    block_table: Option<Array>,
    cu_seqlens_q: Option<Array>,
    descale: [Option<Array>; 3],
}

impl ModifierArrays {
    /// Reads lists of one tensor or none: the backward pass has no sinks and no cache.
    fn of(arguments: &mut Arguments, forward: bool) -> PyResult<ModifierArrays> {
        // All are taken before any can be refused.
        let mut list = |is_there: bool| if is_there { arguments.list().pop() } else { None };
        let (slopes, bias, sinks, ranges) = (list(true), list(true), list(forward), list(true));
        let (lengths, table, starts) = (list(forward), list(forward), list(forward));
        let [of_q, of_k, of_v] = [list(forward), list(forward), list(forward)];
        let read = |name, handle: Option<Handle>| handle.map(|handle| Array::of_handle(name, handle)).transpose();
        Ok(ModifierArrays {
            alibi_slopes: read("alibi_slopes", slopes)?,
            relative_bias: read("relative_bias", bias)?,
            sinks: read("sinks", sinks)?,
            ranges: read("ranges", ranges)?,
            cache_seqlens: read("cache_seqlens", lengths)?,
            block_table: read("block_table", table)?,
            cu_seqlens_q: read("cu_seqlens_q", starts)?,
            descale: [read("q_descale", of_q)?, read("k_descale", of_k)?, read("v_descale", of_v)?],
        })
    }

    /// Reads the numbers, of which a negative window or prefix and a softcap of 0 mean none.
    fn modifiers(&self, arguments: &mut Arguments) -> Modifiers<'_> {
        let mut length = || usize::try_from(arguments.int()).ok();
        let (window, prefix) = (length(), length());
        let softcap = Some(arguments.float()).filter(|&cap| cap != 0.0);
        Modifiers {
            window,
            prefix,
            softcap,
            alibi_slopes: self.alibi_slopes.as_ref(),
            relative_bias: self.relative_bias.as_ref(),
            sinks: self.sinks.as_ref(),
            ranges: self.ranges.as_ref(),
            cache_seqlens: self.cache_seqlens.as_ref(),
            block_table: self.block_table.as_ref(),
            cu_seqlens_q: self.cu_seqlens_q.as_ref(),
            descale: self.descale.each_ref().map(Option::as_ref),
        }
    }
}

fn forward([q, k, v]: [Handle; 3], options: Options, modifiers: Modifiers) -> PyResult<Results> {
    let (q, k, v) = (Array::of_handle("q", q)?, Array::of_handle("k", k)?, Array::of_handle("v", v)?);
    let mut all: SmallVec<[_; 8]> = smallvec![("q", &q), ("k", &k), ("v", &v)];
    all.extend(modifiers.arrays());
    let call = call("attention", &all)?;
    let options = modifiers.options(call, &q, options).map_err(|error| Error::new_err(error.to_string()))?;
    let elements = guarded(|| attention::workspace_of_forward(call, [&q, &k, &v], &options))?;
    let dtype = if q.dtype.is_f8() { Dtype::Bf16 } else { q.dtype };
    let (o, lse) = (heads_like(&q, v.shape.get(3).copied(), dtype)?, empty(&q, &q.shape[..3], Dtype::F32)?);
    let workspace = workspace(&q, elements)?;
    guarded(|| attention::forward(call, [&q, &k, &v], &o, &lse, workspace.as_ref(), &options))?;
    Ok(smallvec![o, lse])
}

fn workspace(like: &Array, elements: usize) -> PyResult<Option<Array>> {
    if elements == 0 { Ok(None) } else { empty(like, &[elements as i64], Dtype::F32).map(Some) }
}

/// The inputs of the backward pass: q, k, v, o, lse and d_o.
struct Saved([Array; 6]);

impl Saved {
    fn of([q, k, v, o, lse, d_o]: [Handle; 6]) -> PyResult<Saved> {
        let (q, k, v) = (Array::of_handle("q", q)?, Array::of_handle("k", k)?, Array::of_handle("v", v)?);
        let (o, lse) = (Array::of_handle("o", o)?, Array::of_handle("lse", lse)?);
        Ok(Saved([q, k, v, o, lse, unit_stride("d_o", d_o)?]))
    }

    fn arrays(&self) -> [&Array; 6] {
        self.0.each_ref()
    }

    /// The call, and its options with the modifiers.
    fn call<'a>(&'a self, modifiers: &'a Modifiers<'a>, options: Options<'a>) -> PyResult<(Call, Options<'a>)> {
        let names = ["q", "k", "v", "o", "lse", "d_o"];
        let mut all: SmallVec<[_; 8]> = names.into_iter().zip(&self.0).collect();
        all.extend(modifiers.arrays());
        let call = call("attention", &all)?;
        let options =
            modifiers.options(call, &self.0[0], options).map_err(|error| Error::new_err(error.to_string()))?;
        Ok((call, options))
    }
}

fn backward(saved: [Handle; 6], options: Options, modifiers: Modifiers) -> PyResult<Results> {
    let saved = Saved::of(saved)?;
    let (call, options) = saved.call(&modifiers, options)?;
    let [q, k, v, ..] = saved.arrays();
    let elements = guarded(|| attention::workspace_of_backward(call, [q, k, v], &options))?;
    let (dq, dk, dv) = (heads_like(q, None, q.dtype)?, heads_like(k, None, k.dtype)?, heads_like(v, None, v.dtype)?);
    let workspace = workspace(q, elements)?;
    guarded(|| attention::backward(call, saved.arrays(), [&dq, &dk, &dv], workspace.as_ref(), &options))?;
    Ok(smallvec![dq, dk, dv])
}

fn rms_norm_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let ([x, w], eps) = (arguments.tensors(), arguments.float());
    let (x, w) = (rows("x", x)?, Array::of_handle("w", w)?);
    let call = call("rms_norm_fwd", &[("x", &x), ("w", &w)])?;
    let (y, rstd) = (dense(&x)?, row_vector(&x)?);
    guarded(|| row_ops::rms_norm_fwd(call, &x, &w, &y, &rstd, eps))?;
    Ok(smallvec![y, rstd])
}

fn rms_norm_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let [x, w, rstd, grad_y] = arguments.tensors();
    let (x, w) = (rows("x", x)?, Array::of_handle("w", w)?);
    let (rstd, grad_y) = (Array::of_handle("rstd", rstd)?, rows("grad_y", grad_y)?);
    let call = call("rms_norm_bwd", &[("x", &x), ("w", &w), ("rstd", &rstd), ("grad_y", &grad_y)])?;
    let (grad_x, grad_w) = (dense(&x)?, dense(&w)?);
    guarded(|| row_ops::rms_norm_bwd(call, &x, &w, &rstd, &grad_y, &grad_x, &grad_w))?;
    Ok(smallvec![grad_x, grad_w])
}

fn layer_norm_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let ([x, w, b], eps) = (arguments.tensors(), arguments.float());
    let (x, w, b) = (rows("x", x)?, Array::of_handle("w", w)?, Array::of_handle("b", b)?);
    let call = call("layer_norm_fwd", &[("x", &x), ("w", &w), ("b", &b)])?;
    let (y, mean, rstd) = (dense(&x)?, row_vector(&x)?, row_vector(&x)?);
    guarded(|| row_ops::layer_norm_fwd(call, &x, &w, &b, &y, &mean, &rstd, eps))?;
    Ok(smallvec![y, mean, rstd])
}

fn layer_norm_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let [x, w, mean, rstd, grad_y] = arguments.tensors();
    let (x, w, mean) = (rows("x", x)?, Array::of_handle("w", w)?, Array::of_handle("mean", mean)?);
    let (rstd, grad_y) = (Array::of_handle("rstd", rstd)?, rows("grad_y", grad_y)?);
    let inputs = [("x", &x), ("w", &w), ("mean", &mean), ("rstd", &rstd), ("grad_y", &grad_y)];
    let call = call("layer_norm_bwd", &inputs)?;
    let (grad_x, grad_w, grad_b) = (dense(&x)?, dense(&w)?, dense(&w)?);
    guarded(|| row_ops::layer_norm_bwd(call, &x, &w, &mean, &rstd, &grad_y, &grad_x, &grad_w, &grad_b))?;
    Ok(smallvec![grad_x, grad_w, grad_b])
}

fn softmax_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let x = rows("x", arguments.tensor())?;
    let call = call("softmax", &[("x", &x)])?;
    let y = dense(&x)?;
    guarded(|| row_ops::softmax(call, &x, &y))?;
    Ok(smallvec![y])
}

fn softmax_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let [y, grad_y] = arguments.tensors();
    let (y, grad_y) = (rows("y", y)?, rows("grad_y", grad_y)?);
    let call = call("softmax_bwd", &[("y", &y), ("grad_y", &grad_y)])?;
    let grad_x = dense(&y)?;
    guarded(|| row_ops::softmax_bwd(call, &y, &grad_y, &grad_x))?;
    Ok(smallvec![grad_x])
}

fn cross_entropy_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let ([logits, targets], ignore_index) = (arguments.tensors(), arguments.int());
    let (logits, targets) = (rows("logits", logits)?, Array::of_handle("targets", targets)?);
    let call = call("cross_entropy_fwd", &[("logits", &logits), ("targets", &targets)])?;
    let (loss, lse) = (row_vector(&logits)?, row_vector(&logits)?);
    guarded(|| row_ops::cross_entropy_fwd(call, &logits, &targets, &loss, &lse, ignore_index))?;
    Ok(smallvec![loss, lse])
}

fn cross_entropy_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let ([logits, targets, lse, grad_loss], ignore_index) = (arguments.tensors(), arguments.int());
    let (logits, targets) = (rows("logits", logits)?, Array::of_handle("targets", targets)?);
    let (lse, grad_loss) = (Array::of_handle("lse", lse)?, Array::of_handle("grad_loss", grad_loss)?);
    let inputs = [("logits", &logits), ("targets", &targets), ("lse", &lse), ("grad_loss", &grad_loss)];
    let call = call("cross_entropy_bwd", &inputs)?;
    let grad = dense(&logits)?;
    guarded(|| row_ops::cross_entropy_bwd(call, &logits, &targets, &lse, &grad_loss, &grad, ignore_index))?;
    Ok(smallvec![grad])
}

fn silu_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let x = rows("x", arguments.tensor())?;
    let call = call("activation_fwd", &[("x", &x)])?;
    let y = dense(&x)?;
    guarded(|| row_ops::silu_fwd(call, &x, &y))?;
    Ok(smallvec![y])
}

fn silu_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let [x, grad_y] = arguments.tensors();
    let (x, grad_y) = (rows("x", x)?, rows("grad_y", grad_y)?);
    let call = call("activation_bwd", &[("x", &x), ("grad_y", &grad_y)])?;
    let grad_x = dense(&x)?;
    guarded(|| row_ops::silu_bwd(call, &x, &grad_y, &grad_x))?;
    Ok(smallvec![grad_x])
}

fn swiglu_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let [a, b] = arguments.tensors();
    let (a, b) = (rows("a", a)?, rows("b", b)?);
    let call = call("swiglu_fwd", &[("a", &a), ("b", &b)])?;
    let y = dense(&a)?;
    guarded(|| row_ops::swiglu_fwd(call, &a, &b, &y))?;
    Ok(smallvec![y])
}

fn swiglu_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let [a, b, grad_y] = arguments.tensors();
    let (a, b, grad_y) = (rows("a", a)?, rows("b", b)?, rows("grad_y", grad_y)?);
    let call = call("swiglu_bwd", &[("a", &a), ("b", &b), ("grad_y", &grad_y)])?;
    let (grad_a, grad_b) = (dense(&a)?, dense(&b)?);
    guarded(|| row_ops::swiglu_bwd(call, &a, &b, &grad_y, &grad_a, &grad_b))?;
    Ok(smallvec![grad_a, grad_b])
}

fn swiglu_packed_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let x = rows("x", arguments.tensor())?;
    let call = call("swiglu_fwd", &[("x", &x)])?;
    let [a, b] = halves("x", &x)?;
    let y = dense(&a)?;
    guarded(|| row_ops::swiglu_fwd(call, &a, &b, &y))?;
    Ok(smallvec![y])
}

fn swiglu_packed_backward(arguments: &mut Arguments) -> PyResult<Results> {
    let [x, grad_y] = arguments.tensors();
    let (x, grad_y) = (rows("x", x)?, rows("grad_y", grad_y)?);
    let call = call("swiglu_bwd", &[("x", &x), ("grad_y", &grad_y)])?;
    let grad_x = dense(&x)?;
    let ([a, b], [grad_a, grad_b]) = (halves("x", &x)?, halves("grad_x", &grad_x)?);
    guarded(|| row_ops::swiglu_bwd(call, &a, &b, &grad_y, &grad_a, &grad_b))?;
    Ok(smallvec![grad_x])
}

/// Reads x [batch, heads, n, d]: the tensor, or a copy if neither batch and heads, nor, without positions, batch and n
/// are one dimension in memory, or if an element has several places.
fn rotatable(handle: Handle, positions: bool) -> PyResult<Array> {
    let x = unit_stride("x", handle)?;
    let (&[batch, heads, n, _], &[of_batch, of_head, of_token, _]) = (&x.shape[..], &x.strides[..]) else {
        return Ok(x);
    };
    let one = batch == 1 || of_batch == of_head * heads || (!positions && of_batch == of_token * n);
    let expanded = x.shape.iter().zip(&x.strides).any(|(&extent, &stride)| extent > 1 && stride == 0);
    if one && !expanded { Ok(x) } else { contiguous("x", &x) }
}

fn rope_from(arguments: &mut Arguments) -> PyResult<Results> {
    let [x, frequencies] = arguments.tensors();
    let (start, inverse, in_halves) = (arguments.int(), arguments.bool(), arguments.bool());
    let (x, frequencies) = (rotatable(x, false)?, Array::of_handle("frequencies", frequencies)?);
    let start = usize::try_from(start)
        .map_err(|_| PyValueError::new_err(format!("start: expected a position of at least 0, found {start}")))?;
    let call = call("rope", &[("x", &x), ("frequencies", &frequencies)])?;
    // The dimensions that are one in memory are so in the result.
    let y = match (&x.shape[..], &x.strides[..]) {
        (&[1, ..], _) => heads_like(&x, None, x.dtype)?,
        (&[_, heads, n, _], &[of_batch, of_head, of_token, _])
            if of_batch != of_head * heads && of_batch == of_token * n =>
        {
            tokens_first(&x, None, x.dtype)?
        }
        _ => dense(&x)?,
    };
    let rotation = dense_ops::rotation(inverse, in_halves);
    guarded(|| dense_ops::rotate(call, &x, &frequencies, &y, Positions::From(start), rotation))?;
    Ok(smallvec![y])
}

fn rope_at(arguments: &mut Arguments) -> PyResult<Results> {
    let [x, frequencies, positions] = arguments.tensors();
    let (inverse, in_halves) = (arguments.bool(), arguments.bool());
    let (x, frequencies) = (rotatable(x, true)?, Array::of_handle("frequencies", frequencies)?);
    let positions = Array::of_handle("positions", positions)?;
    let call = call("rope", &[("x", &x), ("frequencies", &frequencies), ("positions", &positions)])?;
    let (y, rotation) = (dense(&x)?, dense_ops::rotation(inverse, in_halves));
    guarded(|| dense_ops::rotate(call, &x, &frequencies, &y, Positions::Each(&positions), rotation))?;
    Ok(smallvec![y])
}

fn matmul_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let ([a, b], code) = (arguments.tensors(), arguments.int());
    multiply(a, b, None, code)
}

fn matmul_bias_forward(arguments: &mut Arguments) -> PyResult<Results> {
    let ([a, b, bias], code) = (arguments.tensors(), arguments.int());
    multiply(a, b, Some(bias), code)
}

fn multiply(a: Handle, b: Handle, bias: Option<Handle>, code: i64) -> PyResult<Results> {
    let (a, b) = (Array::of_handle("a", a)?, Array::of_handle("b", b)?);
    let bias = bias.map(|bias| Array::of_handle("bias", bias)).transpose()?;
    let all = [Some(("a", &a)), Some(("b", &b)), bias.as_ref().map(|bias| ("bias", bias))];
    let all: SmallVec<[_; 3]> = all.into_iter().flatten().collect();
    let call = call("matmul", &all)?;
    let ([m, _], [_, n]) = (&a.shape[..], &b.shape[..]) else {
        let text = format!("matmul: expected matrices, found the shapes {:?} and {:?}", a.shape, b.shape);
        return Err(PyValueError::new_err(text));
    };
    let c = empty(&a, &[*m, *n], a.dtype)?;
    let precision = precision(code)?.unwrap_or(Precision::Ieee);
    let options = gemm::Options { precision, ..gemm::Options::default() };
    guarded(|| dense_ops::multiply(call, &a, &b, bias.as_ref(), &c, options, false))?;
    Ok(smallvec![c])
}

/// Element types of the results of `scaled_mm`, as `_matmul.py` numbers them.
const SCALED_TYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

fn scaled_mm(arguments: &mut Arguments) -> PyResult<Results> {
    let ([a, b, scale_a, scale_b], dtype, fast) = (arguments.tensors(), arguments.int(), arguments.bool());
    let dtype = usize::try_from(dtype).ok().and_then(|at| SCALED_TYPES.get(at).copied());
    let dtype = dtype.ok_or_else(|| PyValueError::new_err("scaled_mm: expected out_dtype 0, 1 or 2"))?;
    let (scale_a, scale_b) = (Array::of_handle("scale_a", scale_a)?, Array::of_handle("scale_b", scale_b)?);
    scaled_product("scaled_mm", [a, b], Some([&scale_a, &scale_b]), dtype, fast)
}

fn int_mm(arguments: &mut Arguments) -> PyResult<Results> {
    scaled_product("int_mm", arguments.tensors(), None, Dtype::I32, false)
}

fn scaled_product(
    name: &'static str,
    [a, b]: [Handle; 2],
    scales: Option<[&Array; 2]>,
    dtype: Dtype,
    fast: bool,
) -> PyResult<Results> {
    let (a, b) = (Array::of_handle("a", a)?, Array::of_handle("b", b)?);
    let mut all: SmallVec<[_; 4]> = smallvec![("a", &a), ("b", &b)];
    all.extend(scales.into_iter().flat_map(|[of_a, of_b]| [("scale_a", of_a), ("scale_b", of_b)]));
    let call = call(name, &all)?;
    let ([m, _], [_, n]) = (&a.shape[..], &b.shape[..]) else {
        let text = format!("{name}: expected matrices, found the shapes {:?} and {:?}", a.shape, b.shape);
        return Err(PyValueError::new_err(text));
    };
    let c = empty(&a, &[*m, *n], dtype)?;
    guarded(|| scaled_ops::multiply(call, &a, &b, scales, &c, fast))?;
    Ok(smallvec![c])
}

fn column_sum(arguments: &mut Arguments) -> PyResult<Results> {
    let x = rows("x", arguments.tensor())?;
    let call = call("column_sum", &[("x", &x)])?;
    let y = empty(&x, x.shape.last().map_or(&[], std::slice::from_ref), x.dtype)?;
    guarded(|| dense_ops::sum_columns(call, &x, &y))?;
    Ok(smallvec![y])
}

fn adamw_(arguments: &mut Arguments) -> PyResult<Results> {
    let lists: [_; 5] = std::array::from_fn(|_| arguments.list());
    let step = arguments.int();
    let [lr, beta1, beta2, eps, weight_decay] = std::array::from_fn(|_| arguments.double());
    let options = adam::Options { lr, beta1, beta2, eps, weight_decay, grad_scale: 1.0 };
    let [parameters, ..] = &lists;
    let count = parameters.len();
    if lists[..4].iter().any(|list| list.len() != count) || ![0, count].contains(&lists[4].len()) {
        let lengths = lists.each_ref().map(Vec::len);
        return Err(PyValueError::new_err(format!("adamw: expected lists of the same length, found {lengths:?}")));
    }
    let step = u64::try_from(step)
        .map_err(|_| PyValueError::new_err(format!("adamw: expected a step of at least 1, found {step}")))?;
    let [p, m, v, g, compute] = lists.map(Vec::into_iter);
    let mut compute = compute.map(Some).chain(std::iter::repeat_with(|| None));
    let mut updates = Vec::with_capacity(count);
    for (((p, m), v), g) in p.zip(m).zip(v).zip(g) {
        let arrays = [
            Array::of_handle("p", p)?,
            Array::of_handle("m", m)?,
            Array::of_handle("v", v)?,
            Array::of_handle("g", g)?,
        ];
        let compute = compute.next().flatten().map(|c| Array::of_handle("compute_weights", c)).transpose()?;
        let call = {
            let [p, m, v, g] = &arrays;
            let mut all: SmallVec<[_; 5]> = smallvec![("p", p), ("m", m), ("v", v), ("g", g)];
            all.extend(compute.as_ref().map(|compute| ("compute_weights", compute)));
            expect_separate("adamw", &all)?;
            call("adamw", &all)?
        };
        updates.push((call, arrays, compute));
    }
    guarded(|| dense_ops::update_all(&updates, step, &options))?;
    Ok(Results::new())
}
