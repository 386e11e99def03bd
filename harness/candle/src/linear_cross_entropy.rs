//! The last layer and the loss of a language model as one op, without the logits of all rows in memory.

use candle_core::{DType, Result, Tensor};
use tilewright::kernels::FloatElement;
use tilewright::trace::span;

use crate::check::{bad_argument, expect_below, expect_dtype, expect_shape, same_device};
use crate::for_float_type;
use crate::graph::{grad_enabled, record2};
use crate::linear::as_rows;
use crate::loss;
use crate::matmul::{matmul_alloc, matmul_into, multiply};
use crate::memory::{Elem, OutputAlloc};
use crate::weight::{Weight, WeightUse, label};

/// The mean over all rows of the cross-entropy of x·Wᵀ with the targets, an f32 scalar: as `cross_entropy(linear(x, W),
/// targets)`, for x [.., k], a weight W [vocabulary, k] and targets u32 [..]. A target outside of the vocabulary gives NaN
/// on a GPU.
///
/// At most 512 MiB of logits, or a row, are in memory at a time. If the op is recorded, the forward pass computes the gradients of x
/// and W too (Liger kernel: Hsu et al., 2024), that of W in f32, so that backward needs no logits.
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
        let (losses, gradients) = forward::<T>(&rows, &w, &targets, tracked, CHUNK)?;
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

/// Logits in memory at a time, in bytes.
const CHUNK: usize = 512 << 20;

/// Returns the losses [rows], and the gradients of their sum where the two of `tracked` say so: that of x [rows, k] in
/// its dtype, that of W [vocabulary, k] in f32. At most `chunk_bytes` of logits, or a row, are in memory at a time.
fn forward<T: Elem + FloatElement>(
    x: &Tensor,
    w: &Tensor,
    targets: &Tensor,
    [tracked_x, tracked_w]: [bool; 2],
    chunk_bytes: usize,
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let ((rows, k), vocabulary, device) = (x.dims2()?, w.dim(0)?, x.device());
    let tracked = tracked_x || tracked_w;
    // Rows of logits begin at multiples of 16 bytes, which TMA requires: with rows of zeros in W, where that is not copied for
    // a product alone.
    let columns = if tracked { vocabulary.next_multiple_of(16 / size_of::<T>()) } else { vocabulary };
    let w = &if columns == vocabulary { w.clone() } else { w.pad_with_zeros(0, 0, columns - vocabulary)? };
    let chunk = chunk_bytes / (columns * size_of::<T>());
    let chunk = if chunk < 128 { chunk.max(1) } else { chunk / 128 * 128 };
    let one = Tensor::ones(1, DType::F32, device)?;
    let (mut losses, mut grad_x) = (Vec::new(), Vec::new());
    let grad_w = match tracked_w {
        true => Some(OutputAlloc::<f32>::new(device, columns * k)?.into_tensor((columns, k))),
        false => None,
    };
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let (x, targets) = (x.narrow(0, first, count)?, targets.narrow(0, first, count)?);
        let mut logits = matmul_alloc::<T>(&x, &w.t()?)?;
        if !tracked {
            let logits = logits.into_tensor((count, columns));
            losses.push(loss::forward::<T>(&logits, &targets)?.0.into_tensor(count));
            continue;
        }
        let mut chunk_losses = OutputAlloc::<f32>::new(device, count)?;
        loss::forward_backward::<T>(&mut logits, [count, columns], vocabulary, &targets, &one, &mut chunk_losses)?;
        losses.push(chunk_losses.into_tensor(count));
        let grad_logits = logits.into_tensor((count, columns));
        if tracked_x {
            grad_x.push(multiply(&grad_logits, w)?);
        }
        if let Some(grad_w) = &grad_w {
            matmul_into(grad_w, &grad_logits.t()?, &x, first > 0)?;
        }
    }
    let grad_x = if tracked_x { Some(Tensor::cat(&grad_x, 0)?) } else { None };
    let grad_w = grad_w.map(|grad_w| grad_w.narrow(0, 0, vocabulary)).transpose()?;
    Ok((Tensor::cat(&losses, 0)?, [grad_x, grad_w]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(rows: usize, columns: usize) -> Tensor {
        let values = (0..rows * columns).map(|i| (i * 7919 % 1009) as f32 / 504.0 - 1.0);
        Tensor::from_iter(values, &candle_core::Device::Cpu).unwrap().reshape((rows, columns)).unwrap()
    }

    /// Chunks of one row, of 128 rows and the rest, and of all rows.
    #[test]
    fn chunks_do_not_change_the_result() {
        let (x, w) = (numbers(150, 8), numbers(37, 8));
        let targets = Tensor::from_iter((0..150_u32).map(|i| i * 7 % 37), x.device()).unwrap();
        let with = |bytes, tracked| forward::<f32>(&x, &w, &targets, tracked, bytes).unwrap();
        let (losses, all) = with(CHUNK, [true; 2]);
        assert_eq!(all[1].as_ref().unwrap().dims(), [37, 8]);
        let distance =
            |a: &Tensor, b: &Tensor| (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        for bytes in [1, 200 * 40 * 4] {
            let (other, gradients) = with(bytes, [true; 2]);
            assert!(distance(&other, &losses) < 1e-6);
            for (a, b) in gradients.iter().zip(&all) {
                assert!(distance(a.as_ref().unwrap(), b.as_ref().unwrap()) < 1e-4);
            }
            let (other, gradients) = with(bytes, [false; 2]);
            assert!(distance(&other, &losses) < 1e-6 && gradients.iter().all(Option::is_none));
        }
    }
}
