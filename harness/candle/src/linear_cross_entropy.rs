//! The last layer and the loss of a language model as one op, without the logits of all rows in memory.

use candle_core::{DType, Result, Tensor};
use tilewright::kernels::FloatElement;
use tilewright::trace::span;

use crate::check::{bad_argument, expect_below, expect_dtype, expect_shape, same_device};
use crate::for_float_type;
use crate::graph::{grad_enabled, record2};
use crate::linear::as_rows;
use crate::loss;
use crate::matmul::{matmul_into, multiply};
use crate::memory::{Elem, OutputAlloc};
use crate::weight::{Weight, WeightUse, label};

/// The mean over all rows of the cross-entropy of x·Wᵀ with the targets, an f32 scalar: as `cross_entropy(linear(x, W),
/// targets)`, for x [.., k], a weight W [vocabulary, k] and targets u32 [..]. A target outside of the vocabulary gives NaN
/// on a GPU.
///
/// Logits are computed for a chunk of rows at a time, of about as many elements as x has. If the op is recorded, the
/// forward pass computes the gradients of x and W too (Liger kernel: Hsu et al., 2024), so that backward needs no logits.
///
/// # Errors
/// Shapes and dtypes that do not match; no rows; on the CPU a target outside of the vocabulary.
pub fn linear_cross_entropy(x: &Tensor, weight: &impl Weight, targets: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear_cross_entropy";
    let _span = span(OP);
    let (outer, k) = match x.dims().split_last() {
        Some((k, outer)) if x.elem_count() > 0 => (outer, *k),
        _ => return Err(bad_argument(OP, "x", "a tensor [.., k] with at least one row", format!("{:?}", x.dims()))),
    };
    let name = label(weight, "weight");
    match weight.dims() {
        &[vocabulary, columns] if columns == k && vocabulary > 0 => {}
        found => return Err(bad_argument(OP, &name, format!("[vocabulary, {k}]"), format!("{found:?}"))),
    }
    same_device(OP, x, &name, weight.graph_input())?;
    same_device(OP, x, "targets", targets)?;
    expect_dtype(OP, "targets", targets, DType::U32)?;
    expect_shape(OP, "targets", targets, outer)?;
    let (rows, targets, w) = (as_rows(x)?, targets.flatten_all()?, weight.value(x.dtype())?);
    expect_below(OP, "targets", &targets, w.dim(0)?)?;
    let weight_use = WeightUse::begin(weight);
    let tracked = [x.track_op(), weight_use.needs_grad(weight.graph_input())].map(|needed| needed && grad_enabled());
    for_float_type!(x.dtype(), OP, T => {
        let (losses, gradients) = forward::<T>(&rows, &w, &targets, tracked)?;
        let mean = OutputAlloc::<f32>::copy_of(&losses.mean_all()?)?;
        let count = targets.elem_count() as f64;
        record2(OP, [x, weight.graph_input()], mean, (), move |[x, input], _, grad| {
            let scale = (grad / count)?;
            let scaled = |gradient: &Tensor| gradient.to_dtype(DType::F32)?.broadcast_mul(&scale);
            let [grad_x, grad_w] = &gradients;
            let grad_w = match grad_w {
                Some(grad_w) => weight_use.deliver(input, || scaled(grad_w))?,
                None => None,
            };
            let grad_x = match grad_x {
                Some(grad_x) => Some(scaled(grad_x)?.to_dtype(x.dtype())?.reshape(x.shape())?),
                None => None,
            };
            Ok([grad_x, grad_w])
        })
    })
}

/// Returns the losses [rows], and the gradients of their sum where the two of `tracked` say so: that of x [rows, k] in
/// its dtype, that of W [vocabulary, k] in f32.
fn forward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    [tracked_x, tracked_w]: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let ((rows, k), vocabulary) = (x.dims2()?, w.dim(0)?);
    let chunk = rows.div_ceil(vocabulary.div_ceil(k)).next_multiple_of(128);
    let (mut losses, mut grad_x) = (Vec::new(), Vec::new());
    let grad_w = if tracked_w { Some(Tensor::zeros((vocabulary, k), DType::F32, x.device())?) } else { None };
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let (x, targets) = (x.narrow(0, first, count)?, targets.narrow(0, first, count)?);
        let logits = multiply(&x, &w.t()?)?;
        let (chunk_losses, lse) = loss::forward::<T>(&logits, &targets)?;
        losses.push(chunk_losses.into_tensor(count));
        if tracked_x || tracked_w {
            let one = Tensor::ones(count, DType::F32, x.device())?;
            let grad_logits = loss::backward::<T>(&logits, &targets, &lse, &one, false)?;
            drop(logits);
            if tracked_x {
                grad_x.push(multiply(&grad_logits, w)?);
            }
            if let Some(grad_w) = &grad_w {
                matmul_into(grad_w, &grad_logits.t()?, &x, true)?;
            }
        }
    }
    let grad_x = if tracked_x { Some(Tensor::cat(&grad_x, 0)?) } else { None };
    Ok((Tensor::cat(&losses, 0)?, [grad_x, grad_w]))
}
