"""Row-wise ops of `tilewright.torch`: norms, softmax, SiLU and SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._native import Error
from ._registration import kernel, Op
from ._shared import autocast_to_float32, dense, expect_alike, expect_eps, expect_rows, expect_vector, like_type, row_vector


# Norms


_rms_norm_forward = kernel(
    "rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, *_: (dense(x), row_vector(x)),
)
_rms_norm_backward = Op(
    "rms_norm_backward",
    kernel(
        "rms_norm_backward(Tensor x, Tensor weight, Tensor rstd, Tensor grad_y) -> (Tensor, Tensor)",
        lambda x, weight, *_: (dense(x), dense(weight)),
    ),
)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The input, the weight and the statistics."""
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


_rms_norm_op = Op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _rms_norm_forward,
    _save_norm,
    lambda ctx, grad_y, _: (*_rms_norm_backward(*ctx.saved_tensors, grad_y), None),
    fold=1,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(mean(x²) + eps) · weight for each row of x [..., d]. The weight [d] is converted to x's type."""
    expect_rows("rms_norm", "x", x)
    expect_vector("rms_norm", "weight", weight, x)
    expect_eps(eps)
    if torch.compiler.is_compiling():
        exact = x.float()
        y = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        return (y * weight.to(x.dtype).float()).to(x.dtype)
    return _rms_norm_op(x, like_type(weight, x), eps)[0]


_layer_norm_forward = kernel(
    "layer_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, *_: (dense(x), row_vector(x), row_vector(x)),
)
_layer_norm_backward = Op(
    "layer_norm_backward",
    kernel(
        "layer_norm_backward(Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor grad_y)"
        " -> (Tensor, Tensor, Tensor)",
        lambda x, weight, *_: (dense(x), dense(weight), dense(weight)),
    ),
)
_layer_norm_op = Op(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm_forward,
    _save_norm,
    lambda ctx, grad_y, *_: (*_layer_norm_backward(*ctx.saved_tensors, grad_y), None),
    fold=1,
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias for each row of x [..., d]. Weight and bias are converted to x's type."""
    expect_rows("layer_norm", "x", x)
    expect_vector("layer_norm", "weight", weight, x)
    bias = torch.zeros_like(weight) if bias is None else bias
    expect_vector("layer_norm", "bias", bias, x)
    expect_eps(eps)
    x = autocast_to_float32(x)
    if torch.compiler.is_compiling():
        exact = x.float()
        centered = exact - exact.mean(-1, keepdim=True)
        y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
        return (y * weight.to(x.dtype).float() + bias.to(x.dtype).float()).to(x.dtype)
    return _layer_norm_op(x, like_type(weight, x), like_type(bias, x), eps)[0]


# Softmax


_softmax_backward = Op(
    "softmax_backward",
    kernel("softmax_backward(Tensor y, Tensor grad_y) -> Tensor", lambda y, _: dense(y)),
    fold=2,
)
_softmax_op = Op(
    "softmax(Tensor x) -> Tensor",
    kernel("softmax_forward(Tensor x) -> Tensor", dense),
    lambda ctx, inputs, output: ctx.save_for_backward(output),
    lambda ctx, grad_y: _softmax_backward(*ctx.saved_tensors, grad_y),
    fold=1,
)


def softmax(x: Tensor) -> Tensor:
    """The softmax of each row of x [..., d]."""
    expect_rows("softmax", "x", x)
    x = autocast_to_float32(x)
    if torch.compiler.is_compiling():
        return torch.softmax(x.float(), -1).to(x.dtype)
    return _softmax_op(x)


# SiLU and SwiGLU


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_swiglu_backward = Op(
    "swiglu_backward",
    kernel(
        "swiglu_backward(Tensor a, Tensor b, Tensor grad_y) -> (Tensor, Tensor)",
        lambda a, b, _: (dense(a), dense(b)),
    ),
    fold=3,
)
_swiglu_op = Op(
    "swiglu(Tensor a, Tensor b) -> Tensor",
    kernel("swiglu_forward(Tensor a, Tensor b) -> Tensor", lambda a, b: dense(a)),
    _save_inputs,
    lambda ctx, grad_y: _swiglu_backward(*ctx.saved_tensors, grad_y),
    fold=2,
)


_swiglu_packed_backward = Op(
    "swiglu_packed_backward",
    kernel("swiglu_packed_backward(Tensor x, Tensor grad_y) -> Tensor", lambda x, _: dense(x)),
    fold=2,
)
_swiglu_packed_op = Op(
    "swiglu_packed(Tensor x) -> Tensor",
    kernel(
        "swiglu_packed_forward(Tensor x) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    ),
    _save_inputs,
    lambda ctx, grad_y: _swiglu_packed_backward(*ctx.saved_tensors, grad_y),
    fold=1,
)


def swiglu(a: Tensor, b: Tensor | None = None) -> Tensor:
    """silu(a) · b for a and b [..., d]; without b, for the halves of a [..., 2 · d], the result of one fused projection.

    The gradient of the halves is one tensor: with slices as a and b, PyTorch would concatenate theirs.
    """
    expect_rows("swiglu", "a", a)
    if b is not None:
        expect_alike("swiglu", "b", b, "a", a)
    elif a.shape[-1] % 2 != 0:
        raise Error(f"swiglu: `a` expects an even number of columns, found the shape {list(a.shape)}")
    if torch.compiler.is_compiling():
        left, right = a.chunk(2, -1) if b is None else (a, b)
        return (_silu_formula(left.float()) * right.float()).to(a.dtype)
    return _swiglu_packed_op(a) if b is None else _swiglu_op(a, b)


def _silu_formula(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


_silu_backward = Op(
    "silu_backward",
    kernel("silu_backward(Tensor x, Tensor grad_y) -> Tensor", lambda x, _: dense(x)),
    fold=2,
)
_silu_op = Op(
    "silu(Tensor x) -> Tensor",
    kernel("silu_forward(Tensor x) -> Tensor", dense),
    _save_inputs,
    lambda ctx, grad_y: _silu_backward(*ctx.saved_tensors, grad_y),
    fold=1,
)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) for x [..., d]."""
    expect_rows("silu", "x", x)
    if torch.compiler.is_compiling():
        return _silu_formula(x.float()).to(x.dtype)
    return _silu_op(x)
