"""Differentiable ops on PyTorch tensors, and the optimizer `AdamW`.

Attention, matmuls, losses, and all ops in eager mode, are kernels. In graphs of `torch.compile`, row-wise and elementwise
ops (norms, softmax, SiLU, SwiGLU, rotary embedding) are formulas in float32: Inductor fuses them with the casts, copies
and additions around them, which read and write more memory than the op.

The ops are registered with `torch.library`: they work in eager mode, under `torch.compile(fullgraph=True)` and in CUDA
graphs, on NVIDIA GPUs (compute capability 8.0 and later) and on the CPU. They run on PyTorch's current stream, on the
tensors' own memory. Element types are float32, bfloat16 and float16; statistics and losses are float32.

A CUDA graph can be captured after one run of the same code outside of the graph, which compiles and loads the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._adamw import AdamW
from ._modifiers import check
from ._registration import kernel, Op

__all__ = [
    "AdamW",
    "attention",
    "cross_entropy",
    "int_mm",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "rms_norm",
    "rope",
    "scaled_mm",
    "silu",
    "softmax",
    "swiglu",
]

def _dense(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _row_vector(x: Tensor) -> Tensor:
    """A float32 for each row of x [..., d]."""
    return x.new_empty(x.numel() // max(x.shape[-1], 1), dtype=torch.float32)


def _heads_like(x: Tensor) -> Tensor:
    """A new tensor like x [batch, heads, n, d], in memory as it is or as [batch, n, heads, d], whichever x is like."""
    batch, heads, n, d = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, n, heads, d).transpose(1, 2)
    return x.new_empty(x.shape)


# The precisions of float32 products, as the kernels number them.
_PRECISIONS = {None: 0, "ieee": 1, "tf32": 2, "tf32x3": 3}


def _precision(name: str | None) -> int:
    if name not in _PRECISIONS:
        raise ValueError(f"precision: expected ieee, tf32 or tf32x3, found {name!s:.200}")
    return _PRECISIONS[name]


def _expect_numbers(**numbers: object) -> None:
    """Raises for tensors where a number is expected: their gradient would be lost."""
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            raise TypeError(f"{name}: expected a number, found a tensor: pass its .item(), which has no gradient")


def _expect_no_gradients(name: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(f"{name} has no gradient: pass tensors that do not require one, as x.detach()")


# Attention

_attention_forward = kernel(
    "attention_forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, int precision) -> (Tensor, Tensor)",
    lambda q, k, v, *_: (_heads_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
)
_attention_backward = Op(
    "attention_backward",
    kernel(
        "attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor grad_o, bool causal, float scale,"
        " int precision, bool deterministic) -> (Tensor, Tensor, Tensor)",
        lambda q, k, v, *_: (_heads_like(q), _heads_like(k), _heads_like(v)),
    ),
)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


_attention_op = Op(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, int precision, bool deterministic)"
    " -> (Tensor, Tensor)",
    lambda q, k, v, causal, scale, precision, _: _attention_forward(q, k, v, causal, scale, precision),
    _save_attention,
    lambda ctx, grad_o, _: (*_attention_backward(*ctx.saved_tensors, grad_o, *ctx.options), None, None, None, None),
)


_document_ranges = kernel(
    "document_ranges(Tensor q, Tensor k, Tensor cu_seqlens_q, Tensor cu_seqlens_k, bool causal, int window) -> Tensor",
    lambda q, k, *_: q.new_empty(2 * (q.shape[2] + k.shape[2]), dtype=torch.int32),
)
# The lists have one tensor or none.
_modified_attention_forward = kernel(
    "modified_attention_forward(Tensor q, Tensor k, Tensor v, Tensor[] alibi_slopes, Tensor[] ranges, bool causal,"
    " float scale, int precision, int window, int prefix, float softcap) -> (Tensor, Tensor)",
    lambda q, k, v, *_: (_heads_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
)
_modified_attention_backward = Op(
    "modified_attention_backward",
    kernel(
        "modified_attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor grad_o,"
        " Tensor[] alibi_slopes, Tensor[] ranges, bool causal, float scale, int precision, bool deterministic, int window,"
        " int prefix, float softcap) -> (Tensor, Tensor, Tensor)",
        lambda q, k, v, *_: (_heads_like(q), _heads_like(k), _heads_like(v)),
    ),
)


def _list(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


def _modified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    precision: int,
    _: bool,
    *modifiers: Any,
) -> tuple[Tensor, Tensor]:
    lists = _list(alibi_slopes), _list(ranges)
    return _modified_attention_forward(q, k, v, *lists, causal, scale, precision, *modifiers)


def _save_modified_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, alibi_slopes, ranges, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, alibi_slopes, ranges)
    ctx.mark_non_differentiable(output[1])


def _modified_attention_grad(ctx: Any, grad_o: Tensor, _: Any) -> tuple[Any, ...]:
    *saved, alibi_slopes, ranges = ctx.saved_tensors
    lists = _list(alibi_slopes), _list(ranges)
    grads = _modified_attention_backward(*saved, grad_o, *lists, *ctx.options)
    return *grads, *(None,) * (len(ctx.needs_input_grad) - 3)


_modified_attention_op = Op(
    "modified_attention(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? ranges, bool causal, float scale,"
    " int precision, bool deterministic, int window, int prefix, float softcap) -> (Tensor, Tensor)",
    _modified_attention,
    _save_modified_attention,
    _modified_attention_grad,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    prefix: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    precision: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v for q [batch, heads, n_q, d], k and v [batch, heads_kv, n_k, d], of any strides.

    heads_kv divides heads (grouped-query attention); d is at most 256. With `causal`, row i sees the keys
    j ≤ i + (n_k − n_q): the last query sees every key. `scale` is 1/√d by default. `precision` is that of float32
    products: "tf32x3" by default on a GPU, or "tf32", "ieee". With `deterministic`, which defaults to
    `torch.are_deterministic_algorithms_enabled()`, the same inputs give the same bits of all gradients; without it, dq
    is added up atomically on GPUs where that is faster.

    What is beside plain attention is named as in flash-attn, and may be combined:

    - `window`: a row sees that many keys before its diagonal, i + (n_k − n_q), the key on it, and without `causal` as many
      after it. (flash-attn: window_size=(window, 0) with causal, else (window, window).)
    - `prefix`, with `causal` and without a window or packed sequences: a row also sees that many first keys (prefix LM).
    - `softcap`: a score s becomes softcap · tanh(s / softcap).
    - `alibi_slopes`, float32 [heads], without a gradient: a score s becomes s − slope · |i + (n_k − n_q) − j|, after the
      softcap.
    - `cu_seqlens_q`, int32: rows and keys are those of packed sequences, which see only themselves, with a causal mask
      and a window of their own. Sequence s has the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] − 1, and the same keys or
      those of `cu_seqlens_k`. All batch entries have the same sequences; rows beyond the last one give 0. The numbers
      begin with 0, do not decrease, and do not exceed n_q and n_k. That is checked on the CPU; on a GPU, where a check
      would wait for the device, others give wrong rows, but no access outside of the tensors.
    """
    if scale is not None or softcap is not None:
        _expect_numbers(scale=scale, softcap=softcap)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if q.dim() != 4:
        raise ValueError(f"attention: expected q [batch, heads, rows, d], found {list(q.shape)}")
    if scale is None:
        scale = max(q.shape[3], 1) ** -0.5
    options = causal, scale, _precision(precision), deterministic
    if window is prefix is softcap is alibi_slopes is cu_seqlens_q is cu_seqlens_k is None:
        return _attention_op(q, k, v, *options)[0]
    if k.dim() != 4:
        raise ValueError(f"attention: expected k [batch, heads, rows, d], found {list(k.shape)}")
    check(q.shape[2], k.shape[2], causal, window, prefix, softcap, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes: has no gradient: pass alibi_slopes.detach()")
    ranges = None
    if cu_seqlens_q is not None:
        keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        ranges = _document_ranges(q, k, cu_seqlens_q, keys, causal, -1 if window is None else window)
        window = None
    lengths = (-1 if length is None else length for length in (window, prefix))
    return _modified_attention_op(q, k, v, alibi_slopes, ranges, *options, *lengths, softcap or 0.0)[0]


# Norms


_rms_norm_forward = kernel(
    "rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, *_: (_dense(x), _row_vector(x)),
)
_rms_norm_backward = Op(
    "rms_norm_backward",
    kernel(
        "rms_norm_backward(Tensor x, Tensor weight, Tensor rstd, Tensor grad_y) -> (Tensor, Tensor)",
        lambda x, weight, *_: (_dense(x), _dense(weight)),
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
)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(mean(x²) + eps) · weight for each row of x [..., d]. The weight [d] is converted to x's type."""
    _expect_numbers(eps=eps)
    if torch.compiler.is_compiling():
        exact = x.float()
        y = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        return (y * weight.to(x.dtype).float()).to(x.dtype)
    return _rms_norm_op(x, weight.to(x.dtype), eps)[0]


_layer_norm_forward = kernel(
    "layer_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, *_: (_dense(x), _row_vector(x), _row_vector(x)),
)
_layer_norm_backward = Op(
    "layer_norm_backward",
    kernel(
        "layer_norm_backward(Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor grad_y)"
        " -> (Tensor, Tensor, Tensor)",
        lambda x, weight, *_: (_dense(x), _dense(weight), _dense(weight)),
    ),
)
_layer_norm_op = Op(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm_forward,
    _save_norm,
    lambda ctx, grad_y, *_: (*_layer_norm_backward(*ctx.saved_tensors, grad_y), None),
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias for each row of x [..., d]. Weight and bias are converted to x's type."""
    _expect_numbers(eps=eps)
    bias = torch.zeros_like(weight) if bias is None else bias
    if torch.compiler.is_compiling():
        exact = x.float()
        centered = exact - exact.mean(-1, keepdim=True)
        y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
        return (y * weight.to(x.dtype).float() + bias.to(x.dtype).float()).to(x.dtype)
    return _layer_norm_op(x, weight.to(x.dtype), bias.to(x.dtype), eps)[0]


# Cross-entropy


_cross_entropy_forward = kernel(
    "cross_entropy_forward(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    lambda logits, *_: (_row_vector(logits), _row_vector(logits)),
)
_cross_entropy_backward = Op(
    "cross_entropy_backward",
    kernel(
        "cross_entropy_backward(Tensor logits, Tensor target, Tensor lse, Tensor grad_loss, int ignore_index)"
        " -> Tensor",
        lambda logits, *_: _dense(logits),
    ),
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
)


def cross_entropy(logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """The cross-entropy loss, float32, of logits [..., classes] and target [...], int64 or int32.

    `reduction` is "mean" (over targets other than `ignore_index`), "sum" or "none", which gives a loss per target.
    """
    flat = _targets(logits, target, reduction)
    return _reduced(_cross_entropy_op(logits, flat, ignore_index)[0], target, flat, ignore_index, reduction)


def _targets(x: Tensor, target: Tensor, reduction: str) -> Tensor:
    """The targets of the rows of x, in one dimension."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected mean, sum or none, found {reduction!s:.200}")
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
    loss, lse = _row_vector(x), _row_vector(x)
    for rows, logits in _chunks(x, weight, precision):
        _native.cross_entropy_forward(logits, target[rows], loss[rows], lse[rows], ignore_index)
    return loss, lse


def _linear_cross_entropy_backward(
    x: Tensor, weight: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, ignore_index: int, precision: str
) -> tuple[Tensor, Tensor]:
    grad_x, sum_weight = _dense(x), torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
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
        lambda x, weight, *_: (_dense(x), _dense(weight)),
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
        lambda x, *_: (_row_vector(x), _row_vector(x)),
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

    The backward pass computes the logits again, and sums the gradient of the weight in float32. `precision` as for
    `matmul`.
    """
    flat = _targets(x, target, reduction)
    _precision(precision)
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [classes, d], found {list(weight.shape)}")
    loss = _linear_cross_entropy_op(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), flat, ignore_index, precision)[0]
    return _reduced(loss, target, flat, ignore_index, reduction)


# Softmax


_softmax_backward = Op(
    "softmax_backward",
    kernel("softmax_backward(Tensor y, Tensor grad_y) -> Tensor", lambda y, _: _dense(y)),
)
_softmax_op = Op(
    "softmax(Tensor x) -> Tensor",
    kernel("softmax_forward(Tensor x) -> Tensor", _dense),
    lambda ctx, inputs, output: ctx.save_for_backward(output),
    lambda ctx, grad_y: _softmax_backward(*ctx.saved_tensors, grad_y),
)


def softmax(x: Tensor) -> Tensor:
    """The softmax of each row of x [..., d]."""
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
        lambda a, b, _: (_dense(a), _dense(b)),
    ),
)
_swiglu_op = Op(
    "swiglu(Tensor a, Tensor b) -> Tensor",
    kernel("swiglu_forward(Tensor a, Tensor b) -> Tensor", lambda a, b: _dense(a)),
    _save_inputs,
    lambda ctx, grad_y: _swiglu_backward(*ctx.saved_tensors, grad_y),
)


_swiglu_packed_backward = Op(
    "swiglu_packed_backward",
    kernel("swiglu_packed_backward(Tensor x, Tensor grad_y) -> Tensor", lambda x, _: _dense(x)),
)
_swiglu_packed_op = Op(
    "swiglu_packed(Tensor x) -> Tensor",
    kernel(
        "swiglu_packed_forward(Tensor x) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    ),
    _save_inputs,
    lambda ctx, grad_y: _swiglu_packed_backward(*ctx.saved_tensors, grad_y),
)


def swiglu(a: Tensor, b: Tensor | None = None) -> Tensor:
    """silu(a) · b for a and b [..., d]; without b, for the halves of a [..., 2 · d], the result of one fused projection.

    The gradient of the halves is one tensor: with slices as a and b, PyTorch would concatenate theirs.
    """
    if torch.compiler.is_compiling():
        left, right = a.chunk(2, -1) if b is None else (a, b)
        if left.shape != right.shape or left.dtype != right.dtype:
            raise ValueError(f"swiglu: expected halves that are alike, found {left.shape} and {right.shape}")
        return (_silu_formula(left.float()) * right.float()).to(a.dtype)
    return _swiglu_packed_op(a) if b is None else _swiglu_op(a, b)


def _silu_formula(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


_silu_backward = Op(
    "silu_backward",
    kernel("silu_backward(Tensor x, Tensor grad_y) -> Tensor", lambda x, _: _dense(x)),
)
_silu_op = Op(
    "silu(Tensor x) -> Tensor",
    kernel("silu_forward(Tensor x) -> Tensor", _dense),
    _save_inputs,
    lambda ctx, grad_y: _silu_backward(*ctx.saved_tensors, grad_y),
)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) for x [..., d]."""
    if torch.compiler.is_compiling():
        return _silu_formula(x.float()).to(x.dtype)
    return _silu_op(x)


# Rotary position embedding

_frequencies: dict[tuple[int, float, torch.device], Tensor] = {}


def _rope_frequencies(d: int, base: float, device: torch.device) -> Tensor:
    """base^(−2i/d) for the d/2 pairs of a head, float64."""
    return torch.pow(base, torch.arange(d // 2, dtype=torch.float64, device=device) * (-2 / d))


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
        _frequencies[key] = frequencies
    return frequencies


def _rope_fake(x: Tensor, *_: Any) -> Tensor:
    """As the kernel: it copies x unless batch and heads, or batch and n, are one dimension in memory."""
    (batch, heads, n, _), (of_batch, of_head, of_token, of_element) = x.shape, x.stride()
    one = batch == 1 or of_batch == of_head * heads or of_batch == of_token * n
    expanded = any(extent > 1 and stride == 0 for extent, stride in zip(x.shape, x.stride()))
    return _heads_like(x) if one and not expanded and of_element == 1 else _dense(x)


_rope_from = kernel(
    "rope_from(Tensor x, Tensor frequencies, int start, bool inverse, bool halves) -> Tensor", _rope_fake
)
_rope_at = kernel(
    "rope_at(Tensor x, Tensor frequencies, Tensor positions, bool inverse, bool halves) -> Tensor",
    lambda x, *_: _dense(x),
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
    if positions.shape != (n,):
        raise ValueError(f"rope: expected {n} positions, found the shape {list(positions.shape)}")
    cos, sin = _rope_tables_op(positions, d, base)
    a, b = x.float().chunk(2, -1) if halves else (x.float()[..., ::2], x.float()[..., 1::2])
    pairs = a * cos - b * sin, a * sin + b * cos
    return (torch.cat(pairs, -1) if halves else torch.stack(pairs, -1).flatten(-2)).to(x.dtype)


def rope(
    x: Tensor, *, base: float = 10000.0, start: int = 0, positions: Tensor | None = None, halves: bool = False
) -> Tensor:
    """Rotary position embedding of x [batch, heads, n, d], in memory as it is or as [batch, n, heads, d].

    Pairs (x[2i], x[2i + 1]) of the token at position p rotate by the angle p · base^(−2i/d). Positions are `positions`
    [n], int64 or int32, or start, start + 1, …. With `halves`, pairs are (x[i], x[i + d/2]), as in Llama.
    """
    if x.dim() != 4 or x.shape[3] % 2 != 0:
        raise ValueError(f"rope: expected x [batch, heads, n, d] with an even d, found {list(x.shape)}")
    _expect_numbers(base=base, start=start)
    if positions is not None and start != 0:
        raise ValueError(f"rope: expected start or positions, found both: start is {start}")
    if not 0 < base < float("inf"):
        raise ValueError(f"base: expected a positive finite number, found {base}")
    if torch.compiler.is_compiling():
        return _rope_formula(x, base, start, positions, halves)
    return _rope_op(x, _kept_frequencies(x.shape[-1], base, x.device), start, positions, False, halves)


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
)


def matmul(a: Tensor, b: Tensor, *, precision: str = "ieee") -> Tensor:
    """a [m, k] · b [k, n], of any strides, accumulated in float32.

    `precision` is for float32 operands: "ieee", "tf32" or "tf32x3".
    """
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"matmul: expected matrices, found the shapes {list(a.shape)} and {list(b.shape)}")
    return _matmul_op(a, b, None, _precision(precision))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, precision: str = "ieee") -> Tensor:
    """x [..., k] · weight [n, k]ᵀ + bias [n]: `torch.nn.functional.linear`. `precision` as for `matmul`."""
    y = _matmul_op(x.reshape(-1, x.shape[-1]), weight.t(), bias, _precision(precision))
    return y.view(*x.shape[:-1], weight.shape[0])


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
    _expect_matrices("scaled_mm", a, b)
    whole_a = _is_one_scale("scale_a", scale_a, "[m] or [m, 1]", 1)
    whole_b = _is_one_scale("scale_b", scale_b, "[n] or [1, n]", 0)
    _expect_no_gradients("scaled_mm", a, b, scale_a, scale_b)
    scale_a, scale_b = scale_a.reshape(-1), scale_b.reshape(-1)
    if whole_a and not whole_b:
        scale_a = scale_a.expand(a.shape[0])
    if whole_b and not whole_a:
        scale_b = scale_b.expand(b.shape[1])
    return _scaled_mm(a, b, scale_a, scale_b, _SCALED_DTYPES.index(out_dtype), use_fast_accum)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] · b [k, n] for int8 or uint8, in int32: `torch._int_mm`. Without a gradient."""
    _expect_matrices("int_mm", a, b)
    _expect_no_gradients("int_mm", a, b)
    if a.dtype.is_floating_point:
        raise ValueError(f"int_mm: expected int8 or uint8, found {a.dtype}")
    return _int_mm(a, b)


def _expect_matrices(name: str, a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"{name}: expected matrices, found the shapes {list(a.shape)} and {list(b.shape)}")


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


_native.register_torch_kernels(os.path.join(os.path.dirname(torch.__file__), "lib"))
