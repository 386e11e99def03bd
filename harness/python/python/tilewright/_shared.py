"""What the ops of `tilewright.torch` share: results like arguments, and checks of arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._native import Error


def dense(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def like_type(x: Tensor, of: Tensor) -> Tensor:
    """x in the element type of another tensor. `to` by itself takes microseconds where they are the same."""
    return x if x.dtype == of.dtype else x.to(of.dtype)


def row_vector(x: Tensor) -> Tensor:
    """A float32 for each row of x [..., d]."""
    return x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32)


def heads_like(x: Tensor, d: int | None = None) -> Tensor:
    """A new tensor like x [batch, heads, n, d], in memory as it is or as [batch, n, heads, d], whichever x is like.

    With `d`, that is its last extent.
    """
    batch, heads, n, own = x.shape
    d = own if d is None else d
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, n, heads, d).transpose(1, 2)
    return x.new_empty(batch, heads, n, d)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The precisions of float32 products, as the kernels number them.
_PRECISIONS = {None: 0, "ieee": 1, "tf32": 2, "tf32x3": 3}


def precision_code(name: str | None) -> int:
    if name not in _PRECISIONS:
        raise ValueError(f"precision: expected ieee, tf32 or tf32x3, found {name!s:.200}")
    return _PRECISIONS[name]


def expect_numbers(**numbers: object) -> None:
    """Raises unless all are numbers or None. Of a tensor, the gradient would be lost."""
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            raise TypeError(f"{name}: expected a number, found a tensor: pass its .item(), which has no gradient")
        if number is not None and not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
            if not hasattr(number, "__float__"):
                raise TypeError(f"{name}: expected a number, found {type(number).__name__}")


def expect_no_gradients(name: str, *tensors: Tensor) -> None:
    reverse = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if reverse or forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ValueError(f"{name} has no gradient: pass tensors that do not require one, as x.detach()")


def expect_matrices(name: str, a: Tensor, b: Tensor) -> None:
    expect_tensors(name, a=a, b=b)
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"{name}: expected matrices, found the shapes {list(a.shape)} and {list(b.shape)}")


# Types under `torch.autocast`, as for PyTorch's ops of the same kind.


def autocast_to_narrow(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a matmul or of attention: of the type of `torch.autocast` where it is active."""
    kind = "cuda" if tensors[0].is_cuda else "cpu" if tensors[0].is_cpu else None
    if kind is None or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x.dtype != dtype and x.dtype in _FLOATS else x for x in tensors
    )


def autocast_to_float32(x: Tensor) -> Tensor:
    """The input of an op whose result is float32 under `torch.autocast`, which is so on GPUs only."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype in _FLOATS:
        return x.float()
    return x


# Checks of arguments for eager mode and for graphs of `torch.compile`, whose formulas have none of the kernels' checks.

def expect_tensors(op: str, **tensors: object) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: `{name}` expects a torch.Tensor, found {type(x).__name__}")


def expect_floats(op: str, name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
        expect_tensors(op, **{name: x})
        found = str(x.dtype).removeprefix("torch.")
        raise Error(f"{op}: `{name}` expects elements of type float32, bfloat16 or float16, found {found}")


def expect_rows(op: str, name: str, x: Tensor) -> None:
    """Raises unless x is [..., d] of an element type that kernels have."""
    expect_floats(op, name, x)
    if x.dim() == 0:
        raise Error(f"{op}: `{name}` expects at least one dimension, found none")


def expect_vector(op: str, name: str, vector: Tensor, x: Tensor) -> None:
    """Raises unless the vector is [d] for x [..., d], of a type that is converted to x's."""
    if isinstance(vector, Tensor) and vector.shape == x.shape[-1:] and vector.dtype.is_floating_point:
        return
    expect_tensors(op, **{name: vector})
    if vector.dim() != 1 or vector.shape[0] != x.shape[-1]:
        raise Error(f"{op}: `{name}` expects the shape {[x.shape[-1]]}, found {list(vector.shape)}")
    found = str(vector.dtype).removeprefix("torch.")
    raise Error(f"{op}: `{name}` expects a floating-point type, found {found}")


def expect_alike(op: str, name: str, x: Tensor, of: str, other: Tensor) -> None:
    """Raises unless both have the same shape and element type."""
    expect_tensors(op, **{name: x})
    if x.shape != other.shape or x.dtype != other.dtype:
        expected, found = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (other, x))
        raise Error(f"{op}: `{name}` expects what `{of}` is, {expected}, found {found}")


def expect_eps(eps: float) -> None:
    if isinstance(eps, float) and eps >= 0:
        return
    expect_numbers(eps=eps)
    if not eps >= 0:
        raise ValueError(f"eps: expected a number of at least 0, found {eps}")


def matrix(x: Tensor) -> Tensor:
    """x [..., d] as [rows, d]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
