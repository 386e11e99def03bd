//! Cross-entropy over a vocabulary, by a Tilewright kernel that reads the logits once.

use candle_core::{D, DType, Result, Tensor};
use tilewright::kernels::cross_entropy as kernel;
use tilewright::kernels::{self, FloatElement};
use tilewright::trace::span;

use crate::check::{bad_argument, expect_below, expect_dtype, expect_shape, same_device};
use crate::for_float_type;
use crate::graph::record1;
use crate::memory::{Elem, OutputAlloc, Read, kernel_error};

/// An ignore index that no target has.
const NO_IGNORE_INDEX: i64 = -1;

/// The mean over all rows of −log softmax(logits)[target]: an f32 scalar.
///
/// logits: [rows, vocabulary] of any float dtype; targets: u32 [rows]. On a GPU, where a check would wait for the device, a
/// target outside of the vocabulary gives NaN.
///
/// # Errors
/// Shapes that do not match, targets of another dtype; on the CPU a target outside of the vocabulary.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let rows = check("cross_entropy", logits, targets)?;
    let targets = targets.clone();
    for_float_type!(logits.dtype(), "cross_entropy", T => {
        let (losses, lse) = forward::<T>(logits, &targets)?;
        let mean = OutputAlloc::<f32>::copy_of(&losses.into_tensor(rows).mean_all()?)?;
        record1("cross_entropy", logits, mean, (), move |[logits], _, grad| {
            Ok([Some(backward::<T>(logits, &targets, &lse, &grad.reshape(1)?, true)?)])
        })
    })
}

/// −log softmax(logits)[target] per row: f32 [rows].
///
/// # Errors
/// As [`cross_entropy`].
pub fn cross_entropy_rows(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let rows = check("cross_entropy", logits, targets)?;
    let targets = targets.clone();
    for_float_type!(logits.dtype(), "cross_entropy", T => {
        let (losses, lse) = forward::<T>(logits, &targets)?;
        record1("cross_entropy", logits, losses, rows, move |[logits], _, grad| {
            Ok([Some(backward::<T>(logits, &targets, &lse, grad, false)?)])
        })
    })
}

/// Returns the number of rows.
pub(crate) fn check(op: &str, logits: &Tensor, targets: &Tensor) -> Result<usize> {
    let &[rows, vocabulary] = logits.dims() else {
        let found = format!("the shape {:?}: flatten the others with flatten_to", logits.dims());
        return Err(bad_argument(op, "logits", "a matrix [rows, vocabulary]", found));
    };
    if vocabulary == 0 {
        return Err(bad_argument(op, "logits", "a vocabulary of at least one element", format!("{:?}", logits.dims())));
    }
    same_device(op, logits, "targets", targets)?;
    expect_dtype(op, "targets", targets, DType::U32)?;
    expect_shape(op, "targets", targets, &[rows])?;
    expect_below(op, "targets", targets, vocabulary)?;
    Ok(rows)
}

/// Returns (losses [rows], log-sum-exp [rows]).
pub fn forward<T: Elem + FloatElement>(logits: &Tensor, targets: &Tensor) -> Result<(OutputAlloc<f32>, Tensor)> {
    let _span = span("cross_entropy");
    let rows = logits.dim(0)?;
    let [mut losses, mut lse] =
        [OutputAlloc::<f32>::new(logits.device(), rows)?, OutputAlloc::new(logits.device(), rows)?];
    let (logits, targets) = (Read::<T>::new(logits)?, Read::<u32>::new(targets)?);
    kernel::forward(
        logits.device(),
        logits.strided()?,
        targets.strided()?,
        NO_IGNORE_INDEX,
        losses.dense([rows])?,
        lse.dense([rows])?,
    )
    .map_err(kernel_error)?;
    Ok((losses, lse.into_tensor(rows)))
}

/// The gradient of the logits, given the gradient of the losses: one per row, or with `mean` one scalar for their mean.
///
/// # Errors
/// Shapes and dtypes that do not match.
pub fn backward<T: Elem + FloatElement>(
    logits: &Tensor,
    targets: &Tensor,
    lse: &Tensor,
    grad: &Tensor,
    mean: bool,
) -> Result<Tensor> {
    let (rows, d) = logits.dims2()?;
    let of_losses = if mean { 1 } else { rows };
    if grad.elem_count() != of_losses {
        let expected = format!("{of_losses} elements");
        return Err(bad_argument("cross_entropy", "the gradient", expected, format!("the shape {:?}", grad.dims())));
    }
    let mut grad_logits = OutputAlloc::<T>::new(logits.device(), rows * d)?;
    let (logits, targets) = (Read::<T>::new(logits)?, Read::<u32>::new(targets)?);
    let (lse, grad) = (Read::<f32>::new(lse)?, Read::<f32>::new(grad)?);
    // The gradient of a mean is the same for every row: stride 0.
    let grad_rows = kernels::Tensor::strided(grad.view()?, [rows], [if mean { 0 } else { 1 }]).map_err(kernel_error)?;
    let scale = if mean { 1.0 / rows.max(1) as f32 } else { 1.0 };
    kernel::backward(
        logits.device(),
        logits.strided()?,
        targets.strided()?,
        NO_IGNORE_INDEX,
        lse.strided()?,
        grad_rows,
        scale,
        grad_logits.dense([rows, d])?,
    )
    .map_err(kernel_error)?;
    Ok(grad_logits.into_tensor((rows, d)))
}

/// Writes the loss of each row to `losses` [rows], and the gradient of the logits [rows, columns], of which the first
/// `vocabulary` columns count, over them: 0 in the others. `grad` is the gradient of every loss, one element.
///
/// # Errors
/// Shapes and dtypes that do not match.
pub(crate) fn forward_backward<T: Elem + FloatElement>(
    logits: &mut OutputAlloc<T>,
    [rows, columns]: [usize; 2],
    vocabulary: usize,
    targets: &Tensor,
    grad: &Tensor,
    losses: &mut OutputAlloc<f32>,
) -> Result<()> {
    let _span = span("cross_entropy");
    let (targets, grad) = (Read::<u32>::new(targets)?, Read::<f32>::new(grad)?);
    let grad_rows = kernels::Tensor::strided(grad.view()?, [rows], [0]).map_err(kernel_error)?;
    kernel::forward_backward(
        targets.device(),
        logits.dense([rows, columns])?,
        vocabulary,
        targets.strided()?,
        NO_IGNORE_INDEX,
        grad_rows,
        1.0,
        losses.dense([rows])?,
    )
    .map_err(kernel_error)
}

/// As [`cross_entropy`], in candle ops, in f32: the baseline.
pub fn cross_entropy_unfused(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let _span = span("cross_entropy");
    let logits = logits.to_dtype(DType::F32)?;
    // The maximum only keeps exp in range; its gradient cancels.
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    let lse = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let chosen = shifted.gather(&targets.unsqueeze(1)?, 1)?;
    (lse - chosen)?.mean_all()
}
