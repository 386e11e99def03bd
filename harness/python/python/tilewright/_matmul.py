"""Matmuls of `tilewright.torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._native import Error
from ._registration import kernel, Op
from ._shared import autocast_to_narrow, expect_matrices, expect_no_gradients, expect_rows, expect_tensors, matrix, precision_code


# Matmul


_matmul_forward = kernel(
    "matmul_forward(Tensor a, Tensor b, int precision) -> Tensor",
    lambda a, b, _: a.new_empty(a.shape[0], b.shape[1]),
)
_matmul_bias_forward = kernel(
    "matmul_bias_forward(Tensor a, Tensor b, Tensor bias, int precision) -> Tensor",
    lambda a, b, *_: a.new_empty(a.shape[0], b.shape[1]),
)
_column_sum = Op("column_sum", kernel("column_sum(Tensor x) -> Tensor", lambda x: x.new_empty(x.shape[-1])))


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None, precision: int) -> Tensor:
    return _matmul_forward(a, b, precision) if bias is None else _matmul_bias_forward(a, b, bias, precision)


def _save_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, ctx.precision = inputs
    ctx.save_for_backward(a, b)
    ctx.has_bias = bias is not None


def _matmul_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    grad = grad.contiguous()
    needs_a, needs_b, needs_bias, _ = ctx.needs_input_grad
    grad_a = _matmul_op(grad, b.t(), None, ctx.precision) if needs_a else None
    grad_b = _matmul_op(a.t(), grad, None, ctx.precision) if needs_b else None
    grad_bias = _column_sum(grad) if ctx.has_bias and needs_bias else None
    return grad_a, grad_b, grad_bias, None


_matmul_op = Op(
    "matmul(Tensor a, Tensor b, Tensor? bias, int precision) -> Tensor",
    _matmul,
    _save_matmul,
    _matmul_grad,
    fold=1,
)


def matmul(a: Tensor, b: Tensor, *, precision: str = "ieee") -> Tensor:
    """a [m, k] · b [k, n], of any strides, accumulated in float32.

    `precision` is for float32 operands: "ieee", "tf32" or "tf32x3".
    """
    expect_matrices("matmul", a, b)
    a, b = autocast_to_narrow(a, b)
    if b.shape[0] != a.shape[1] or b.dtype != a.dtype:
        _refuse_operand("matmul", "b", b, "a", a, f"[{a.shape[1]}, n]")
    return _matmul_op(a, b, None, precision_code(precision))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, precision: str = "ieee") -> Tensor:
    """x [..., k] · weight [n, k]ᵀ + bias [n]: `torch.nn.functional.linear`. `precision` as for `matmul`."""
    expect_tensors("linear", x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    x, weight, *biases = autocast_to_narrow(x, weight, *(() if bias is None else (bias,)))
    bias = biases[0] if biases else None
    expect_rows("linear", "x", x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        _refuse_operand("linear", "weight", weight, "x", x, f"[n, {x.shape[-1]}]")
    n = weight.shape[0]
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != n or bias.dtype != x.dtype):
        _refuse_operand("linear", "bias", bias, "x", x, f"[{n}]")
    y = _matmul_op(matrix(x), weight.t(), bias, precision_code(precision))
    return y.view(*x.shape[:-1], n)


def _refuse_operand(op: str, name: str, operand: Tensor, of: str, x: Tensor, shape: str) -> None:
    expected, found = (str(t.dtype).removeprefix("torch.") for t in (x, operand))
    raise Error(
        f"{op}: `{name}` expects the shape {shape} and elements of type {expected}, as `{of}` has, found"
        f" {list(operand.shape)} of {found}"
    )


# 8-bit matmul

# The result types of `scaled_mm`, as the kernels number them.
_SCALED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_scaled_mm = kernel(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int out_dtype, bool use_fast_accum) -> Tensor",
    lambda a, b, _a, _b, dtype, _: a.new_empty(a.shape[0], b.shape[1], dtype=_SCALED_DTYPES[dtype]),
)
_int_mm = kernel(
    "int_mm(Tensor a, Tensor b) -> Tensor", lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.int32)
)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Tensor:
    """scale_a · scale_b · (a [m, k] · b [k, n]) for float8_e4m3fn, float8_e5m2, int8 or uint8, the same for both:
    `torch._scaled_mm`.

    Scales are float32: one for the matrix, or one for each row of a ([m] or [m, 1]) and each column of b ([n] or
    [1, n]). Any strides; a row-major and b column-major, as `weight.t()`, are fastest. With `use_fast_accum`, sums of
    8-bit floats have the precision of tensor cores (about 14 bits on Hopper), else sums of at most 128 products are added
    in float32. Sums of integers are int32: at most 131071 columns of int8, 33025 of uint8. Without a gradient.
    """
    if out_dtype not in _SCALED_DTYPES:
        raise ValueError(f"scaled_mm: expected out_dtype bfloat16, float16 or float32, found {out_dtype!s:.200}")
    expect_matrices("scaled_mm", a, b)
    whole_a = _is_one_scale("scale_a", scale_a, "[m] or [m, 1]", 1)
    whole_b = _is_one_scale("scale_b", scale_b, "[n] or [1, n]", 0)
    expect_no_gradients("scaled_mm", a, b, scale_a, scale_b)
    scale_a, scale_b = scale_a.reshape(-1), scale_b.reshape(-1)
    if whole_a and not whole_b:
        scale_a = scale_a.expand(a.shape[0])
    if whole_b and not whole_a:
        scale_b = scale_b.expand(b.shape[1])
    return _scaled_mm(a, b, scale_a, scale_b, _SCALED_DTYPES.index(out_dtype), use_fast_accum)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] · b [k, n] for int8 or uint8, in int32: `torch._int_mm`. Without a gradient."""
    expect_matrices("int_mm", a, b)
    expect_no_gradients("int_mm", a, b)
    if a.dtype.is_floating_point:
        raise ValueError(f"int_mm: expected int8 or uint8, found {a.dtype}")
    return _int_mm(a, b)


def _is_one_scale(name: str, scale: Tensor, lines: str, axis: int) -> bool:
    """Whether a scale is that of the whole matrix, not one for each of its rows or columns: of shape `lines`, in which
    dimension `axis` of two is 1."""
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name}: expected a float32 tensor, found {type(scale).__name__}")
    if all(extent == 1 for extent in scale.shape):
        return True
    if scale.dim() == 1 or (scale.dim() == 2 and scale.shape[axis] == 1):
        return False
    raise ValueError(f"{name}: expected one number, or the shape {lines}, found {list(scale.shape)}")
