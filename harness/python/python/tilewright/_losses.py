"""Cross-entropy losses of `tilewright.torch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._native import Error
from ._registration import kernel, Op
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

_CHUNK_ROWS = 2048


def _chunks(x: Tensor, weight: Tensor, precision: str) -> Iterator[tuple[slice, Tensor]]:
    """The logits of `_CHUNK_ROWS` rows of x [rows, d] after another, in the same memory."""
    buffer = x.new_empty(min(_CHUNK_ROWS, x.shape[0]), weight.shape[0])
    for first in range(0, x.shape[0], _CHUNK_ROWS):
        rows = slice(first, min(first + _CHUNK_ROWS, x.shape[0]))
        logits = buffer[: rows.stop - rows.start]
        _native.matmul(x[rows], weight.t(), logits, None, "none", precision)
        yield rows, logits


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, precision: str
) -> tuple[Tensor, Tensor]:
    loss, lse = row_vector(x), row_vector(x)
    for rows, logits in _chunks(x, weight, precision):
        _native.cross_entropy_forward(logits, target[rows], loss[rows], lse[rows], ignore_index)
    return loss, lse


def _linear_cross_entropy_backward(
    x: Tensor, weight: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, ignore_index: int, precision: str
) -> tuple[Tensor, Tensor]:
    grad_x, sum_weight = dense(x), torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    grad_buffer = x.new_empty(min(_CHUNK_ROWS, x.shape[0]), weight.shape[0])
    # The matmul's result has the type of its operands: each chunk's is rounded once, and the sum is float32.
    chunk_weight = None if weight.dtype == torch.float32 else torch.empty_like(weight)
    for rows, logits in _chunks(x, weight, precision):
        grad = grad_buffer[: len(logits)]
        _native.cross_entropy_backward(logits, target[rows], lse[rows], grad_loss[rows], grad, ignore_index)
        _native.matmul(grad, weight, grad_x[rows], None, "none", precision)
        if chunk_weight is None:
            _native.matmul(grad.t(), x[rows], sum_weight, None, "none", precision, True)
        else:
            _native.matmul(grad.t(), x[rows], chunk_weight, None, "none", precision)
            sum_weight += chunk_weight
    return grad_x, sum_weight.to(weight.dtype)


_linear_cross_entropy_backward_op = Op(
    "linear_cross_entropy_backward",
    kernel(
        "linear_cross_entropy_backward(Tensor x, Tensor weight, Tensor target, Tensor lse, Tensor grad_loss,"
        " int ignore_index, str precision) -> (Tensor, Tensor)",
        lambda x, weight, *_: (dense(x), dense(weight)),
        _linear_cross_entropy_backward,
    ),
)


def _save_linear_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, target, *ctx.options = inputs
    ctx.save_for_backward(x, weight, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _linear_cross_entropy_grad(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Any, ...]:
    grads = _linear_cross_entropy_backward_op(*ctx.saved_tensors, grad_loss, *ctx.options)
    return *grads, None, None, None


_linear_cross_entropy_op = Op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, str precision) -> (Tensor, Tensor)",
    kernel(
        "linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor target, int ignore_index, str precision)"
        " -> (Tensor, Tensor)",
        lambda x, *_: (row_vector(x), row_vector(x)),
        _linear_cross_entropy,
    ),
    _save_linear_cross_entropy,
    _linear_cross_entropy_grad,
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
    """`cross_entropy` of the logits x [..., d] · weight [classes, d]ᵀ, with the logits of 2048 rows in memory at a time.

    The backward pass computes the logits again, and sums the gradients of the weight, each rounded to its type, in float32.
    `precision` as for `matmul`.
    """
    expect_tensors("linear_cross_entropy", x=x, weight=weight)
    x, weight = autocast_to_narrow(x, weight)
    flat = _targets("linear_cross_entropy", "x", x, target, reduction)
    precision_code(precision)
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [classes, d], found {list(weight.shape)}")
    if weight.shape[1] != x.shape[-1]:
        raise Error(f"linear_cross_entropy: `weight` expects d = {x.shape[-1]}, as in `x`, found {list(weight.shape)}")
    loss = _linear_cross_entropy_op(matrix(x), weight.to(x.dtype), flat, ignore_index, precision)[0]
    return _reduced(loss, target, flat, ignore_index, reduction)
