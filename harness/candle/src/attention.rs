//! FlashAttention-2 by Tilewright kernels.

use candle_core::{DType, Result, Tensor};
use tilewright::F8E4M3;
use tilewright::kernels::attention::{self as kernel, Saved};
use tilewright::kernels::rope::Direction;
use tilewright::kernels::{self, FloatElement, OperandElement, TensorMut};
use tilewright::trace::span;

use crate::attention_options::{AttentionOptions, KeyCache};
use crate::check::{bad_argument, expect_dtype, expect_shape, same_device};
use crate::graph::{grad_enabled, record1, record2, record3};
use crate::memory::{Elem, OutputAlloc, Read, ReadElem, StridedColumns, for_float_type, kernel_error};
use crate::rope::Rope;

/// Returns O [batch, heads, n_q, d_v] = softmax(scale · Q Kᵀ) V for q [batch, heads, n_q, d], k [batch, heads_kv, n_k, d] and v
/// [batch, heads_kv, n_k, d_v] of any strides, where heads_kv divides heads. O is stored as [batch, n_q, heads, d_v]: its
/// transpose to that shape is contiguous.
///
/// With a cache ([`KeyCache`]) there are no gradients, and k and v may be f8e4m3.
///
/// # Errors
/// Shapes that do not match, also of a relative bias, a head dimension above 256, a cache beside variables outside of [`no_grad`](crate::no_grad), a scale or
/// a softcap that is not positive, packed sequences with other lengths than the tensors.
pub fn flash_attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions) -> Result<Tensor> {
    let _span = span("attention");
    let is_8_bit = options.cache.is_some() && k.dtype() == DType::F8E4M3;
    let of_keys = if is_8_bit { k.dtype() } else { q.dtype() };
    for (name, x, dtype) in [("q", q, q.dtype()), ("k", k, of_keys), ("v", v, of_keys)] {
        if x.rank() != 4 {
            let found = format!("the shape {:?}", x.dims());
            return Err(bad_argument("flash_attention", name, "a tensor [batch, heads, length, d]", found));
        }
        same_device("flash_attention", q, name, x)?;
        expect_dtype("flash_attention", name, x, dtype)?;
    }
    let (batch, heads, n_q, _) = q.dims4()?;
    let d_v = v.dim(3)?;
    options.check(q, k)?;
    let relative_bias = options.relative_bias.as_ref().map(Tensor::contiguous).transpose()?;
    let options = &AttentionOptions { relative_bias, ..options.clone() };
    let tracked = |x: Option<&Tensor>| x.is_some_and(|x| x.track_op() && grad_enabled());
    let learned = [("sinks", options.sinks.as_ref()), ("relative_bias", options.relative_bias.as_ref())];
    let scales = options.cache.iter().flat_map(KeyCache::scales).map(|(name, x)| (name, Some(x)));
    let mut inputs = [("q", Some(q)), ("k", Some(k)), ("v", Some(v))].into_iter().chain(learned).chain(scales);
    if options.cache.is_some()
        && let Some((name, _)) = inputs.find(|(_, x)| tracked(*x))
    {
        let expected = "a tensor without gradients beside a cache: detach it, or call it in no_grad;";
        return Err(bad_argument("flash_attention", name, expected, "a variable or a result of one"));
    }
    for_float_type!(q.dtype(), "flash_attention", T => {
        let forward = if is_8_bit { forward::<T, F8E4M3> } else { forward::<T, T> };
        let (o, lse) = forward([q, k, v], options)?;
        let shape = (batch, n_q, heads, d_v);
        let (own, lse_of_q) = (options.clone(), lse.clone());
        let mut o = record3("flash_attention", [q, k, v], o, shape, move |[q, k, v], o, grad| {
            let (o, grad) = (o.transpose(1, 2)?, grad.transpose(1, 2)?);
            let gradients = backward::<T>([q, k, v, &o, &grad], &lse_of_q, &own)?;
            Ok(gradients.map(Some))
        })?;
        // A custom op of candle has at most three inputs: others pass the gradient of O on, and add theirs.
        if let Some(bias) = options.relative_bias.as_ref().filter(|bias| tracked(Some(*bias))) {
            let copy = OutputAlloc::<T>::copy_of(&o)?;
            let (own, [q, k, v], lse) = (options.clone(), [q, k, v].map(Tensor::detach), lse.clone());
            o = record2("attention_relative_bias", [&o, bias], copy, shape, move |[o, bias], _, grad| {
                let inputs = [&q, &k, &v, &o.transpose(1, 2)?, &grad.transpose(1, 2)?];
                Ok([Some(grad.clone()), Some(relative_bias_gradient::<T>(inputs, &lse, bias, &own)?)])
            })?;
        }
        if let Some(sinks) = options.sinks.as_ref().filter(|sinks| tracked(Some(*sinks))) {
            let copy = OutputAlloc::<T>::copy_of(&o)?;
            o = record2("attention_sinks", [&o, sinks], copy, shape, move |[o, sinks], _, grad| {
                let d_sinks = sink_gradients::<T>(sinks, &o.transpose(1, 2)?, &lse, &grad.transpose(1, 2)?)?;
                Ok([Some(grad.clone()), Some(d_sinks)])
            })?;
        }
        o.transpose(1, 2)
    })
}

/// O, stored as [batch, n_q, heads, d_v], and the log-sum-exp of each row, for keys and values of type `C`.
fn forward<T: Elem + FloatElement, C: ReadElem + OperandElement>(
    [q, k, v]: [&Tensor; 3],
    options: &AttentionOptions,
) -> Result<(OutputAlloc<T>, Tensor)> {
    let ((batch, heads, n_q, _), d_v, device) = (q.dims4()?, v.dim(3)?, q.device());
    let mut o = OutputAlloc::<T>::new(device, batch * heads * n_q * d_v)?;
    let mut lse = OutputAlloc::<f32>::new(device, batch * heads * n_q)?;
    {
        let modifiers = options.modifiers()?;
        let options = modifiers.options()?;
        let (q, k, v) = (Read::<T>::new(q)?, Read::<C>::new(k)?, Read::<C>::new(v)?);
        let (q, k, v, on) = (q.strided()?, k.strided()?, v.strided()?, q.device());
        let needed = kernel::forward_workspace::<T>(on, q.shape(), k.shape(), v.shape(), &options);
        let mut workspace = allocate_workspace(device, needed)?;
        let strides = [n_q * heads * d_v, d_v, heads * d_v, 1].map(|stride| stride as i64);
        let target = TensorMut::strided(o.view()?, [batch, heads, n_q, d_v], strides).map_err(kernel_error)?;
        kernel::forward_into(on, q, k, v, target, lse.view()?, workspace.view()?, &options).map_err(kernel_error)?;
    }
    Ok((o, lse.into_tensor((batch, heads, n_q))))
}

fn relative_bias_gradient<T: Elem + FloatElement>(
    [q, k, v, o, grad]: [&Tensor; 5],
    lse: &Tensor,
    bias: &Tensor,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let mut gradient = OutputAlloc::<f32>::new(bias.device(), bias.elem_count())?;
    {
        let [q, k, v, o, grad] = [Read::<T>::new(q)?, Read::new(k)?, Read::new(v)?, Read::new(o)?, Read::new(grad)?];
        let (lse, modifiers) = (Read::<f32>::new(lse)?, options.modifiers()?);
        let saved = saved([&q, &k, &v, &o, &grad], &lse)?;
        let needed =
            kernel::relative_bias_workspace::<T>(q.device(), saved.q.shape(), saved.k.shape(), saved.v.shape());
        let mut workspace = allocate_workspace(bias.device(), needed)?;
        let (gradient, options) = (gradient.view()?, modifiers.options()?);
        kernel::relative_bias_gradient_into(q.device(), saved, gradient, workspace.view()?, &options)
            .map_err(kernel_error)?;
    }
    Ok(gradient.into_tensor(bias.shape()))
}

fn saved<'a, T: Elem>([q, k, v, o, grad]: [&'a Read<T>; 5], lse: &'a Read<f32>) -> Result<Saved<'a, T>> {
    let (q, k, v) = (q.strided()?, k.strided()?, v.strided()?);
    Ok(Saved { q, k, v, o: o.strided()?, lse: lse.view()?, d_o: grad.strided()? })
}

fn sink_gradients<T: Elem + FloatElement>(sinks: &Tensor, o: &Tensor, lse: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let mut d_sinks = OutputAlloc::<f32>::new(sinks.device(), sinks.elem_count())?;
    {
        let (o, grad) = (Read::<T>::new(o)?, Read::<T>::new(grad)?);
        let (sinks, lse) = (Read::<f32>::new(sinks)?, Read::<f32>::new(lse)?);
        let (o_in, grad_in) = (o.strided()?, grad.strided()?);
        kernel::sink_gradients_into(o.device(), sinks.view()?, o_in, lse.view()?, grad_in, d_sinks.view()?)
            .map_err(kernel_error)?;
    }
    Ok(d_sinks.into_tensor(sinks.shape()))
}

/// Allocates a workspace of at least one element, because drivers may refuse allocations of size 0.
fn allocate_workspace(device: &candle_core::Device, len: usize) -> Result<OutputAlloc<f32>> {
    OutputAlloc::new(device, len.max(1))
}

fn backward<T: Elem + FloatElement>(
    [q, k, v, o, grad]: [&Tensor; 5],
    lse: &Tensor,
    options: &AttentionOptions,
) -> Result<[Tensor; 3]> {
    let alloc = |x: &Tensor| OutputAlloc::<T>::new(x.device(), x.elem_count());
    let (mut dq, mut dk, mut dv) = (alloc(q)?, alloc(k)?, alloc(v)?);
    let shape = |x: &Tensor| x.dims4().map(|(a, b, c, d)| [a, b, c, d]);
    let (q_shape, k_shape, v_shape) = (shape(q)?, shape(k)?, shape(v)?);
    let device = q.device();
    {
        let [q, k, v, o, grad] = [Read::<T>::new(q)?, Read::new(k)?, Read::new(v)?, Read::new(o)?, Read::new(grad)?];
        let lse = Read::<f32>::new(lse)?;
        let modifiers = options.modifiers()?;
        let options = &modifiers.options()?;
        let needed = kernel::backward_workspace::<T>(q.device(), q_shape, k_shape, v_shape, options);
        let mut workspace = allocate_workspace(device, needed)?;
        let saved = saved([&q, &k, &v, &o, &grad], &lse)?;
        let targets = (dq.dense(q_shape)?, dk.dense(k_shape)?, dv.dense(v_shape)?);
        kernel::backward_into(q.device(), saved, targets.0, targets.1, targets.2, workspace.view()?, options)
            .map_err(kernel_error)?;
    }
    Ok([dq.into_tensor(q.shape()), dk.into_tensor(k.shape()), dv.into_tensor(v.shape())])
}

/// Layout of the columns of a packed tensor: `heads` query heads, then `heads_kv` key heads, then `heads_kv` value
/// heads, each of `d` columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkvLayout {
    pub heads: usize,
    pub heads_kv: usize,
    pub d: usize,
}

impl QkvLayout {
    /// Columns of the packed tensor.
    pub fn columns(&self) -> usize {
        self.heads.saturating_add(self.heads_kv.saturating_mul(2)).saturating_mul(self.d)
    }

    /// Number of heads that rope rotates: those of queries and keys.
    fn num_rotated_heads(&self) -> usize {
        self.heads + self.heads_kv
    }
}

/// Causal self-attention of qkv [batch, n, (heads + 2·heads_kv) · d], as one projection computes it, with `rope`
/// applied to queries and keys: O [batch, n, heads · d]. Its gradients have the same bits in every run.
///
/// # Errors
/// A qkv with another number of columns, or more positions than `rope` supports.
pub fn flash_attention_packed(qkv: &Tensor, layout: QkvLayout, rope: &Rope) -> Result<Tensor> {
    let (batch, n, _) = qkv.dims3()?;
    let (qkv, rope) = (&qkv.contiguous()?, rope.clone());
    for_float_type!(qkv.dtype(), "flash_attention", T => {
        let (o, saved) = packed_forward::<T>(qkv, layout, &rope)?;
        record1("flash_attention", qkv, o, (batch, n, layout.heads * layout.d), move |[qkv], o, grad| {
            Ok([Some(packed_backward::<T>(qkv, o, grad, &saved, layout, &rope)?)])
        })
    })
}

/// Tensors that a packed forward pass saves: rotated queries and keys [batch, n, heads + heads_kv, d], and the
/// log-sum-exp of each row.
pub struct PackedSaved {
    rotated: Tensor,
    lse: Tensor,
}

fn batch_and_length(qkv: &Tensor, layout: QkvLayout) -> Result<(usize, usize)> {
    let (batch, n, columns) = qkv.dims3()?;
    if columns == layout.columns() {
        return Ok((batch, n));
    }
    let message = format!(
        "{} query heads and {} key/value heads of {} columns each need {} columns: found {columns}",
        layout.heads,
        layout.heads_kv,
        layout.d,
        layout.columns()
    );
    Err(candle_core::Error::Msg(message))
}

/// Some heads of a contiguous tensor [batch, n, columns]: `count` heads of `d` columns each, from column `first` on.
#[derive(Clone, Copy)]
struct PackedHeads {
    batch: usize,
    n: usize,
    columns: usize,
    first: usize,
    count: usize,
    d: usize,
}

impl PackedHeads {
    fn shape(&self) -> [usize; 4] {
        [self.batch, self.count, self.n, self.d]
    }

    fn strides(&self) -> [i64; 4] {
        [self.n * self.columns, self.d, self.columns, 1].map(|s| s as i64)
    }

    /// The heads of `packed` as [batch, count, n, d].
    fn of<'a, T: Elem>(&self, packed: &'a Read<'_, T>) -> Result<kernels::Tensor<'a, T, 4>> {
        let from_first = packed.view()?.slice(self.first..).map_err(kernel_error)?;
        kernels::Tensor::strided(from_first, self.shape(), self.strides()).map_err(kernel_error)
    }

    /// The columns of the heads, for their gradient.
    fn strided_columns(&self) -> StridedColumns<4> {
        let columns = self.first..self.first + self.count * self.d;
        StridedColumns { shape: self.shape(), strides: self.strides(), columns }
    }
}

/// The heads of queries, keys and values: queries and keys in the rotated tensor, values in the packed one.
fn qkv_heads(layout: QkvLayout, batch: usize, n: usize) -> [PackedHeads; 3] {
    let QkvLayout { heads, heads_kv, d } = layout;
    let rotated_columns = layout.num_rotated_heads() * d;
    let q = PackedHeads { batch, n, columns: rotated_columns, first: 0, count: heads, d };
    let k = PackedHeads { first: heads * d, count: heads_kv, ..q };
    let v = PackedHeads { columns: layout.columns(), first: rotated_columns, ..k };
    [q, k, v]
}

/// The heads of O and of its gradient.
fn o_heads(layout: QkvLayout, batch: usize, n: usize) -> PackedHeads {
    let QkvLayout { heads, d, .. } = layout;
    PackedHeads { batch, n, columns: heads * d, first: 0, count: heads, d }
}

/// Returns O as an allocation [batch, n, heads · d], and what backward needs.
pub fn packed_forward<T: Elem + FloatElement>(
    qkv: &Tensor,
    layout: QkvLayout,
    rope: &Rope,
) -> Result<(OutputAlloc<T>, PackedSaved)> {
    let _span = span("attention");
    let (batch, n) = batch_and_length(qkv, layout)?;
    let (d, rotated_heads) = (layout.d, layout.num_rotated_heads());
    let (columns, rotated_columns) = (layout.columns(), rotated_heads * d);
    let mut rotated = OutputAlloc::<T>::new(qkv.device(), batch * n * rotated_columns)?;
    let mut o = OutputAlloc::<T>::new(qkv.device(), batch * n * layout.heads * d)?;
    let mut lse = OutputAlloc::<f32>::new(qkv.device(), batch * layout.heads * n)?;
    let packed = Read::<T>::new(qkv)?;
    {
        let strides = [columns, d, 1].map(|s| s as i64);
        let tokens = kernels::Tensor::strided(packed.view()?, [batch * n, rotated_heads, d], strides);
        let target = rotated.dense([batch * n, rotated_heads, d])?;
        rope.rotate_into(packed.device(), tokens.map_err(kernel_error)?, n, target, Direction::Forward)?;
    }
    let rotated = rotated.into_tensor((batch, n, rotated_columns));
    {
        let source = Read::<T>::new(&rotated)?;
        let [q, k, v] = qkv_heads(layout, batch, n);
        let (q, k, v) = (q.of(&source)?, k.of(&source)?, v.of(&packed)?);
        let o_heads = o_heads(layout, batch, n);
        let target = TensorMut::strided(o.view()?, o_heads.shape(), o_heads.strides()).map_err(kernel_error)?;
        let options = AttentionOptions::new(true);
        let modifiers = options.modifiers()?;
        let options = modifiers.options()?;
        let needed = kernel::forward_workspace::<T>(packed.device(), q.shape(), k.shape(), v.shape(), &options);
        let mut workspace = allocate_workspace(qkv.device(), needed)?;
        kernel::forward_into(packed.device(), q, k, v, target, lse.view()?, workspace.view()?, &options)
            .map_err(kernel_error)?;
    }
    Ok((o, PackedSaved { rotated, lse: lse.into_tensor((batch, layout.heads, n)) }))
}

/// Returns ∂L/∂qkv [batch, n, columns], given O and its gradient [batch, n, heads · d].
///
/// # Errors
/// Shapes that do not match.
pub fn packed_backward<T: Elem + FloatElement>(
    qkv: &Tensor,
    o: &Tensor,
    grad: &Tensor,
    saved: &PackedSaved,
    layout: QkvLayout,
    rope: &Rope,
) -> Result<Tensor> {
    let _span = span("attention");
    let (batch, n) = batch_and_length(qkv, layout)?;
    for (name, x) in [("o", o), ("the gradient", grad)] {
        expect_shape("flash_attention", name, x, &[batch, n, layout.heads * layout.d])?;
    }
    let (d, rotated_heads) = (layout.d, layout.num_rotated_heads());
    let (columns, rotated_columns) = (layout.columns(), rotated_heads * d);
    let tokens = batch * n;
    let mut grad_rotated = OutputAlloc::<T>::new(qkv.device(), tokens * rotated_columns)?;
    let mut grad_qkv = OutputAlloc::<T>::new(qkv.device(), tokens * columns)?;
    let options = AttentionOptions::new(true);
    let modifiers = options.modifiers()?;
    let options = modifiers.options()?;
    let packed = Read::<T>::new(qkv)?;
    let ([q, k, v], o_heads) = (qkv_heads(layout, batch, n), o_heads(layout, batch, n));
    let needed = kernel::backward_workspace::<T>(packed.device(), q.shape(), k.shape(), v.shape(), &options);
    let mut workspace = allocate_workspace(qkv.device(), needed)?;
    {
        let [rotated, o, grad] = [Read::<T>::new(&saved.rotated)?, Read::new(o)?, Read::new(grad)?];
        let lse = Read::<f32>::new(&saved.lse)?;
        let saved = Saved {
            q: q.of(&rotated)?,
            k: k.of(&rotated)?,
            v: v.of(&packed)?,
            o: o_heads.of(&o)?,
            lse: lse.view()?,
            d_o: o_heads.of(&grad)?,
        };
        let [dq, dk] =
            grad_rotated.strided_columns([tokens, rotated_columns], [q.strided_columns(), k.strided_columns()])?;
        let [dv] = grad_qkv.strided_columns([tokens, columns], [v.strided_columns()])?;
        kernel::backward_into(packed.device(), saved, dq, dk, dv, workspace.view()?, &options).map_err(kernel_error)?;
    }
    let grad_rotated = grad_rotated.into_tensor((tokens, rotated_heads, d));
    let source = Read::<T>::new(&grad_rotated)?;
    let strides = [columns, d, 1].map(|s| s as i64);
    let rotated = StridedColumns { shape: [tokens, rotated_heads, d], strides, columns: 0..rotated_columns };
    let [target] = grad_qkv.strided_columns([tokens, columns], [rotated])?;
    rope.rotate_into(packed.device(), source.strided()?, n, target, Direction::Backward)?;
    Ok(grad_qkv.into_tensor((batch, n, columns)))
}
