"""Cross-entropy losses of `tilewright.torch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._native import Error
from ._registration import in_transform, kernel, Op
from ._shared import autocast_to_narrow, dense, expect_rows, expect_tensors, matrix, precision_code, row_vector


# Cross-entropy


_cross_entropy_forward = kernel(
    "cross_entropy_forward(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    lambda logits, *_: (row_vector(logits), row_vector(logits)),
)
_cross_entropy_backward = Op(
    "cross_entropy_backward",
    kernel(
        "cross_entropy_backward(Tensor logits, Tensor target, Tensor lse, Tensor grad_loss, int ignore_index)"
        " -> Tensor",
        lambda logits, *_: dense(logits),
    ),
    fold=4,
)


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


_cross_entropy_op = Op(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    _cross_entropy_forward,
    _save_cross_entropy,
    lambda ctx, grad, _: (_cross_entropy_backward(*ctx.saved_tensors, grad, ctx.ignore_index), None, None),
    fold=2,
)


def cross_entropy(logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """The cross-entropy loss, float32, of logits [..., classes] and target [...], int64 or int32.

    `reduction` is "mean" (over targets other than `ignore_index`), "sum" or "none", which gives a loss per target. A
    target that is neither a class nor `ignore_index` is an error on the CPU; on a GPU, where a check would wait for the
    device, its loss and the gradient of its row are NaN (PyTorch's fails with a device-side assertion).
    """
    flat = _targets("cross_entropy", "logits", logits, target, reduction)
    # The batching rule tells rows from targets by their rank.
    logits = logits[None] if logits.dim() == 1 else logits
    return _reduced(_cross_entropy_op(logits, flat, ignore_index)[0], target, flat, ignore_index, reduction)


def _targets(op: str, name: str, x: Tensor, target: Tensor, reduction: str) -> Tensor:
    """The targets of the rows of x, in one dimension."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected mean, sum or none, found {reduction!s:.200}")
    expect_rows(op, name, x)
    expect_tensors(op, target=target)
    if x.shape[:-1] != target.shape:
        raise ValueError(f"target: expected the shape {list(x.shape[:-1])}, found {list(target.shape)}")
    return target.reshape(-1)


def _reduced(loss: Tensor, target: Tensor, flat: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (flat != ignore_index).sum()


# Cross-entropy of a linear layer, without all logits in memory

# Logits in memory at a time, in bytes.
_CHUNK_BYTES = 512 << 20


def _chunks(x: Tensor, weight: Tensor, precision: str) -> Iterator[tuple[slice, Tensor]]:
    """The logits of some rows of x [rows, d] after others, in the same memory."""
    rows, size = x.shape[0], max(1, _CHUNK_BYTES // max(1, weight.shape[0] * weight.itemsize))
    size = min(rows, size if size < 128 else size // 128 * 128)
    buffer = x.new_empty(size, weight.shape[0])
    for first in range(0, rows, max(1, size)):
        chunk = slice(first, min(first + size, rows))
        logits = buffer[: chunk.stop - first]
        _native.matmul(x[chunk], weight.t(), logits, None, "none", precision)
        yield chunk, logits


def _linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, precision: str) -> Tensor:
    loss, lse = row_vector(x), row_vector(x)
    for rows, logits in _chunks(x, weight, precision):
        _native.cross_entropy_forward(logits, target[rows], loss[rows], lse[rows], ignore_index)
    return loss


def _with_gradients(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    ignore_index: int,
    precision: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the gradients of x, in its type, and of the weight, in float32: empty where they are not needed."""
    classes = weight.shape[0]
    # Rows of logits begin at multiples of 16 bytes, which TMA requires.
    extra = -classes % (16 // weight.itemsize)
    weight = torch.nn.functional.pad(weight, (0, 0, 0, extra)) if extra else weight
    loss, grad_x = row_vector(x), dense(x) if need_x else x.new_empty(0)
    grad_weight = x.new_empty(weight.shape if need_weight else 0, dtype=torch.float32)
    if not x.shape[0]:
        grad_weight.zero_()
    for rows, logits in _chunks(x, weight, precision):
        _native.cross_entropy_forward_backward(
            logits, classes, target[rows], grad_loss[rows], loss[rows], ignore_index
        )
        if need_x:
            _native.matmul(logits, weight, grad_x[rows], None, "none", precision)
        if need_weight:
            _native.matmul(logits.t(), x[rows], grad_weight, None, "none", precision, rows.start > 0)
    return loss, grad_x, grad_weight[:classes]


def _rows_backward(
    x: Tensor, weight: Tensor, target: Tensor, grad_loss: Tensor, ignore_index: int, precision: str
) -> tuple[Tensor, Tensor]:
    _, grad_x, grad_weight = _with_gradients(x, weight, target, grad_loss, ignore_index, precision, True, True)
    return grad_x, grad_weight.to(weight.dtype)


_linear_cross_entropy_backward_op = Op(
    "linear_cross_entropy_backward",
    kernel(
        "linear_cross_entropy_backward(Tensor x, Tensor weight, Tensor target, Tensor grad_loss, int ignore_index,"
        " str precision) -> (Tensor, Tensor)",
        lambda x, weight, *_: (dense(x), dense(weight)),
        _rows_backward,
    ),
)


def _save_linear_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, target, *ctx.options = inputs
    ctx.save_for_backward(x, weight, target)


_linear_cross_entropy_op = Op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, str precision) -> Tensor",
    kernel(
        "linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor target, int ignore_index, str precision) -> Tensor",
        lambda x, *_: row_vector(x),
        _linear_cross_entropy,
    ),
    _save_linear_cross_entropy,
    lambda ctx, grad: (*_linear_cross_entropy_backward_op(*ctx.saved_tensors, grad, *ctx.options), None, None, None),
)


def _sum_forward(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, precision: str, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    ones = x.new_ones(1, dtype=torch.float32).expand(x.shape[0])
    loss, *grads = _with_gradients(x, weight, target, ones, ignore_index, precision, need_x, need_weight)
    return loss.sum(), *grads


def _sum_fake(x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, need_x, need_weight = options
    grad_x = dense(x) if need_x else x.new_empty(0)
    grad_weight = weight.new_empty(weight.shape if need_weight else 0, dtype=torch.float32)
    return x.new_empty((), dtype=torch.float32), grad_x, grad_weight


def _scaled_to(x: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    y = torch.empty_like(x, dtype=like.dtype)
    _native.scale(x, factor.reshape(1), y)
    return y


# x [...] times a factor [], in the type of a third tensor.
_scaled_to_op = Op(
    "scaled_to",
    kernel(
        "scaled_to(Tensor x, Tensor factor, Tensor like) -> Tensor",
        lambda x, _, like: torch.empty_like(x, dtype=like.dtype),
        _scaled_to,
    ),
)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    (x, weight, *_, ctx.need_x, ctx.need_weight), (_, grad_x, grad_weight) = inputs, output
    # The tensors themselves for the types, and because gradients depend on them: a second derivative is an error, not 0.
    ctx.save_for_backward(grad_x, grad_weight, x, weight)
    ctx.mark_non_differentiable(grad_x, grad_weight)


def _sum_grad(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    grad_x, grad_weight, x, weight = ctx.saved_tensors
    of_x = _scaled_to_op(grad_x, grad, x) if ctx.need_x else None
    of_weight = _scaled_to_op(grad_weight, grad, weight) if ctx.need_weight else None
    return of_x, of_weight, None, None, None, None, None


_linear_cross_entropy_sum_op = Op(
    "linear_cross_entropy_sum(Tensor x, Tensor weight, Tensor target, int ignore_index, str precision, bool need_x,"
    " bool need_weight) -> (Tensor, Tensor, Tensor)",
    kernel(
        "linear_cross_entropy_sum_forward(Tensor x, Tensor weight, Tensor target, int ignore_index, str precision,"
        " bool need_x, bool need_weight) -> (Tensor, Tensor, Tensor)",
        _sum_fake,
        _sum_forward,
    ),
    _save_sum,
    _sum_grad,
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    precision: str = "ieee",
) -> Tensor:
    """`cross_entropy` of the logits x [..., d] · weight [classes, d]ᵀ, with at most 512 MiB of logits in memory at a time.

    Where a gradient is needed, it is computed with the loss (as Liger kernels do), and that of the weight, [classes, d] in
    float32, kept for the backward pass. With the reduction "none", whose rows have gradients of their own, the backward
    pass computes the logits again, as under the transforms of `torch.func`. `precision` as for `matmul`.
    """
    expect_tensors("linear_cross_entropy", x=x, weight=weight)
    x, weight = autocast_to_narrow(x, weight)
    flat = _targets("linear_cross_entropy", "x", x, target, reduction)
    precision_code(precision)
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [classes, d], found {list(weight.shape)}")
    if weight.shape[1] != x.shape[-1]:
        raise Error(f"linear_cross_entropy: `weight` expects d = {x.shape[-1]}, as in `x`, found {list(weight.shape)}")
    arguments = (matrix(x), weight.to(x.dtype), flat, ignore_index, precision)
    needs = (x.requires_grad, weight.requires_grad)
    # Under `torch.func`, a batched tensor does not tell whether it needs a gradient.
    if reduction == "none" or in_transform() or not (torch.is_grad_enabled() and any(needs)):
        return _reduced(_linear_cross_entropy_op(*arguments), target, flat, ignore_index, reduction)
    loss = _linear_cross_entropy_sum_op(*arguments, *needs)[0]
    if reduction == "sum":
        return loss
    count = (flat != ignore_index).sum()
    # Of no targets the mean is NaN, and its gradients are 0, as PyTorch's.
    return torch.where(count > 0, loss / count.clamp(min=1), torch.nan)
