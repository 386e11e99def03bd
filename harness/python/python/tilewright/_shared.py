"""What the ops of `tilewright.torch` share: results like arguments, and checks of arguments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def dense(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def row_vector(x: Tensor) -> Tensor:
    """A float32 for each row of x [..., d]."""
    return x.new_empty(x.numel() // max(x.shape[-1], 1), dtype=torch.float32)


def heads_like(x: Tensor) -> Tensor:
    """A new tensor like x [batch, heads, n, d], in memory as it is or as [batch, n, heads, d], whichever x is like."""
    batch, heads, n, d = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, n, heads, d).transpose(1, 2)
    return x.new_empty(x.shape)


# The precisions of float32 products, as the kernels number them.
_PRECISIONS = {None: 0, "ieee": 1, "tf32": 2, "tf32x3": 3}


def precision_code(name: str | None) -> int:
    if name not in _PRECISIONS:
        raise ValueError(f"precision: expected ieee, tf32 or tf32x3, found {name!s:.200}")
    return _PRECISIONS[name]


def expect_numbers(**numbers: object) -> None:
    """Raises for tensors where a number is expected: their gradient would be lost."""
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            raise TypeError(f"{name}: expected a number, found a tensor: pass its .item(), which has no gradient")


def expect_no_gradients(name: str, *tensors: Tensor) -> None:
    reverse = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if reverse or forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ValueError(f"{name} has no gradient: pass tensors that do not require one, as x.detach()")


def expect_matrices(name: str, a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"{name}: expected matrices, found the shapes {list(a.shape)} and {list(b.shape)}")
