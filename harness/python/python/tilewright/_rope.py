"""The rotary position embedding of `tilewright.torch`."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from ._native import Error
from ._registration import kernel, Op
from ._shared import dense, expect_floats, expect_numbers, expect_tensors, heads_like


_frequencies: dict[tuple[int, float, torch.device], Tensor] = {}


def _rope_frequencies(d: int, base: float, device: torch.device) -> Tensor:
    """base^(−2i/d) for the d/2 pairs of a head, float64."""
    return torch.pow(base, torch.arange(d // 2, dtype=torch.float64, device=device) * (-2 / max(d, 1)))


def _kept_frequencies(d: int, base: float, device: torch.device) -> Tensor:
    """As `_rope_frequencies`; computed once, except in a graph, which owns the memory of its tensors."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _rope_frequencies(d, base, device)
    key = d, base, device
    if key in _frequencies:
        return _frequencies[key]
    # Backward passes save it, also if the first call is in inference mode.
    with torch.inference_mode(False):
        frequencies = _rope_frequencies(d, base, device)
    # Not a tensor of a tracer, such as FakeTensorMode.
    if type(frequencies) is Tensor:
        if device.type == "cuda":
            # Later calls read them on other streams.
            torch.cuda.current_stream(device).synchronize()
        _frequencies[key] = frequencies
    return frequencies


def _rope_fake(x: Tensor, *_: Any) -> Tensor:
    """As the kernel: the dimensions that are one in memory are so in the result; without such, it copies x."""
    (batch, heads, n, d), (of_batch, of_head, of_token, of_element) = x.shape, x.stride()
    if of_element != 1 or any(extent > 1 and stride == 0 for extent, stride in zip(x.shape, x.stride())):
        return dense(x)
    if batch == 1:
        return heads_like(x)
    if of_batch != of_head * heads and of_batch == of_token * n:
        return x.new_empty(batch, n, heads, d).transpose(1, 2)
    return dense(x)


_rope_from = kernel(
    "rope_from(Tensor x, Tensor frequencies, int start, bool inverse, bool halves) -> Tensor", _rope_fake
)
_rope_at = kernel(
    "rope_at(Tensor x, Tensor frequencies, Tensor positions, bool inverse, bool halves) -> Tensor",
    lambda x, *_: dense(x),
)


def _rope(x: Tensor, frequencies: Tensor, start: int, positions: Tensor | None, inverse: bool, halves: bool) -> Tensor:
    if positions is None:
        return _rope_from(x, frequencies, start, inverse, halves)
    return _rope_at(x, frequencies, positions, inverse, halves)


def _save_rope(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, frequencies, ctx.start, positions, ctx.inverse, ctx.halves = inputs
    ctx.save_for_backward(frequencies, positions)


def _rope_grad(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    frequencies, positions = ctx.saved_tensors
    grad = _rope_op(grad_y, frequencies, ctx.start, positions, not ctx.inverse, ctx.halves)
    return grad, None, None, None, None, None


_rope_op = Op(
    "rope(Tensor x, Tensor frequencies, int start, Tensor? positions, bool inverse, bool halves) -> Tensor",
    _rope,
    _save_rope,
    _rope_grad,
    fold=1,
)


def _rope_tables(positions: Tensor, d: int, base: float) -> tuple[Tensor, Tensor]:
    """The cosine and sine of each angle, float32 [n, d/2]."""
    # The kept frequencies could be in the memory of a CUDA graph that Inductor captures.
    angle = positions.double()[:, None] * _rope_frequencies(d, base, positions.device)
    return angle.cos().float(), angle.sin().float()


# An op, so that Inductor does not compute them in float64 in each kernel that uses them.
_rope_tables_op = kernel(
    "rope_tables(Tensor positions, int d, float base) -> (Tensor, Tensor)",
    lambda positions, d, base: tuple(
        positions.new_empty(positions.shape[0], d // 2, dtype=torch.float32) for _ in range(2)
    ),
    _rope_tables,
)


def _rope_formula(x: Tensor, base: float, start: int, positions: Tensor | None, halves: bool) -> Tensor:
    n, d = x.shape[2:]
    if positions is None:
        positions = torch.arange(start, start + n, device=x.device)
    cos, sin = _rope_tables_op(positions, d, base)
    a, b = x.float().chunk(2, -1) if halves else (x.float()[..., ::2], x.float()[..., 1::2])
    pairs = a * cos - b * sin, a * sin + b * cos
    return (torch.cat(pairs, -1) if halves else torch.stack(pairs, -1).flatten(-2)).to(x.dtype)


def _checked_start(x: Tensor, base: object, start: Any, positions: Tensor | None) -> Any:
    """The position `start` as an integer.

    Raises for a base, a start or positions that `rope` does not take.
    """
    expect_numbers(base=base, start=start)
    if positions is not None and start != 0:
        raise ValueError(f"rope: expected start or positions, found both: start is {start}")
    if not 0 < base < math.inf:
        raise ValueError(f"base: expected a positive finite number, found {base}")
    if positions is None:
        if not isinstance(start, (int, torch.SymInt)) and hasattr(start, "__index__"):
            start = operator.index(start)
        if not isinstance(start, (int, torch.SymInt)) or start < 0:
            raise ValueError(f"start: expected a position of at least 0, found {start!s:.200}")
        return start
    expect_tensors("rope", positions=positions)
    if positions.shape != (x.shape[2],):
        raise Error(f"rope: `positions` expects the shape {[x.shape[2]]}, found {list(positions.shape)}")
    if positions.dtype not in (torch.int64, torch.int32):
        found = str(positions.dtype).removeprefix("torch.")
        raise Error(f"rope: `positions` expects elements of type int64 or int32, found {found}")
    return start


def rope(
    x: Tensor, *, base: float = 10000.0, start: int = 0, positions: Tensor | None = None, halves: bool = False
) -> Tensor:
    """Rotary position embedding of x [batch, heads, n, d], of any strides.

    Without a copy: x in memory as it is, as [batch, n, heads, d], or without `positions` as [n, batch, heads, d].

    Pairs (x[2i], x[2i + 1]) of the token at position p rotate by the angle p · base^(−2i/d). Positions are `positions`
    [n], int64 or int32, or start, start + 1, …. With `halves`, pairs are (x[i], x[i + d/2]), as in Llama.
    """
    expect_floats("rope", "x", x)
    if x.dim() != 4 or x.shape[3] % 2 != 0:
        raise ValueError(f"rope: expected x [batch, heads, n, d] with an even d, found {list(x.shape)}")
    # The usual types, for which the checks in full would take longer than the launch.
    if positions is not None or type(start) is not int or start < 0 or type(base) is not float or not 0 < base < math.inf:
        start = _checked_start(x, base, start, positions)
    if torch.compiler.is_compiling():
        return _rope_formula(x, base, start, positions, halves)
    return _rope_op(x, _kept_frequencies(x.shape[-1], base, x.device), start, positions, False, halves)
