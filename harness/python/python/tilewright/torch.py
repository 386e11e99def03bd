"""Differentiable ops on PyTorch tensors, and the optimizer `AdamW`.

The ops are registered with `torch.library`: they work in eager mode, under `torch.compile(fullgraph=True)` and in CUDA
graphs, on NVIDIA GPUs (compute capability 8.0 and later) and on the CPU. They run on PyTorch's current stream, on the
tensors' own memory. Element types are float32, bfloat16 and float16; statistics and losses are float32.

A CUDA graph can be captured after one run of the same code outside of the graph, which compiles and loads the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._adamw import AdamW

__all__ = [
    "AdamW",
    "attention",
    "cross_entropy",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "rms_norm",
    "rope",
    "silu",
    "softmax",
    "swiglu",
]

_library = torch.library.Library("tilewright", "DEF")
# Results have strides that depend on the arguments' strides, so compilers must keep those.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


class _Op:
    """An op whose results are new tensors.

    Graphs (`torch.compile`, `torch.export`, dispatch modes) contain it as an op of `torch.library`. In eager mode it is
    called directly, or as a `torch.autograd.Function`: that takes less of the host's time.
    """

    def __init__(
        self,
        schema: str,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
        grad: Callable[..., Any] | None = None,
    ) -> None:
        """`fake` returns tensors like the results; `save` keeps what `grad`, the backward pass, needs in its context."""
        self.name = schema.split("(")[0]
        self.run = run
        _library.define(schema, tags=_TAGS)
        _library.impl(self.name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tilewright::{self.name}", fake, lib=_library)
        self.registered = getattr(torch.ops.tilewright, self.name).default
        if grad is not None:
            torch.library.register_autograd(f"tilewright::{self.name}", grad, setup_context=save, lib=_library)

        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            if save is not None:
                save(ctx, args, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(grad or self._without_gradient)}
        self.function = type(self.name, (torch.autograd.Function,), members)

    def _without_gradient(self, ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"tilewright: {self.name} has no gradient: a second derivative is not defined")

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or _is_traced(args):
            return self.registered(*args)
        if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)):
            return self.run(*args)
        return self.function.apply(*args)


def _is_traced(args: tuple[Any, ...]) -> bool:
    """Whether an op must go through PyTorch's dispatcher: for dispatch modes, `torch.func` and tensor subclasses."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(isinstance(x, Tensor) and type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in args)
    )


def _float32(like: Tensor) -> Callable[[Any], Tensor]:
    """A function that allocates float32 tensors on the device of `like`."""
    return lambda shape: torch.empty(shape, dtype=torch.float32, device=like.device)


def _rows(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _matrix(x: Tensor) -> Tensor:
    """x [..., d] with leading dimensions that are one dimension in memory: x itself or a view where possible."""
    return x if x.dim() == 2 or x.is_contiguous() else x.reshape(-1, x.shape[-1])


def _dense(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _with_unit_stride(x: Tensor) -> Tensor:
    """x, copied if its last dimension is not contiguous in memory, as that of an expanded gradient."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Attention


def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, precision: str | None, deterministic: bool
) -> tuple[Tensor, Tensor]:
    o, lse = _attention_fake(q, k, v, causal, scale, precision, deterministic)
    _native.attention_forward(q, k, v, o, lse, _float32(q), causal, scale, precision)
    return o, lse


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, precision: str | None, deterministic: bool
) -> tuple[Tensor, Tensor]:
    torch._check(q.dim() == 4, lambda: f"attention: expected q [batch, heads, rows, d], found {list(q.shape)}")
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor,
    causal: bool, scale: float | None, precision: str | None, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _native.attention_backward(
        q, k, v, o, lse, _with_unit_stride(grad_o), *grads, _float32(q), causal, scale, precision, deterministic
    )
    return grads


_attention_backward_op = _Op(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor grad_o, bool causal, float? scale,"
    " str? precision, bool deterministic) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    lambda q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _attention_grad(ctx: Any, grad_o: Tensor, _: Any) -> tuple[Any, ...]:
    return *_attention_backward_op(*ctx.saved_tensors, grad_o, *ctx.options), None, None, None, None


_attention_op = _Op(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float? scale, str? precision, bool deterministic)"
    " -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    _save_attention,
    _attention_grad,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    precision: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v for q [batch, heads, n_q, d], k and v [batch, heads_kv, n_k, d], of any strides.

    heads_kv divides heads (grouped-query attention); d is at most 256. With `causal`, row i sees the keys
    j ≤ i + (n_k − n_q): the last query sees every key. `scale` is 1/√d by default. `precision` is that of float32
    products: "tf32x3" by default on a GPU, or "tf32", "ieee". With `deterministic`, which defaults to
    `torch.are_deterministic_algorithms_enabled()`, the same inputs give the same bits of all gradients; without it, dq
    is added up atomically on GPUs where that is faster.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return _attention_op(q, k, v, causal, scale, precision, deterministic)[0]


# Norms


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = _rms_norm_fake(x, weight, eps)
    _native.rms_norm_forward(_matrix(x), weight, y, rstd, eps)
    return y, rstd


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _dense(x), x.new_empty(_rows(x), dtype=torch.float32)


def _rms_norm_backward(x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _dense(x), _dense(weight)
    _native.rms_norm_backward(_matrix(x), weight, rstd, _matrix(grad_y), grad_x, grad_weight)
    return grad_x, grad_weight


_rms_norm_backward_op = _Op(
    "rms_norm_backward(Tensor x, Tensor weight, Tensor rstd, Tensor grad_y) -> (Tensor, Tensor)",
    _rms_norm_backward,
    lambda x, weight, *_: (_dense(x), _dense(weight)),
)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def _rms_norm_grad(ctx: Any, grad_y: Tensor, _: Any) -> tuple[Any, ...]:
    return *_rms_norm_backward_op(*ctx.saved_tensors, grad_y), None


_rms_norm_op = _Op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _rms_norm,
    _rms_norm_fake,
    _save_rms_norm,
    _rms_norm_grad,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(mean(x²) + eps) · weight for each row of x [..., d]. The weight [d] is converted to x's type."""
    return _rms_norm_op(x, weight.to(x.dtype), eps)[0]


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _layer_norm_fake(x, weight, bias, eps)
    _native.layer_norm_forward(_matrix(x), weight, bias, y, mean, rstd, eps)
    return y, mean, rstd


def _layer_norm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    statistics = [x.new_empty(_rows(x), dtype=torch.float32) for _ in range(2)]
    return _dense(x), statistics[0], statistics[1]


def _layer_norm_backward(
    x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _dense(x), _dense(weight), _dense(weight)
    _native.layer_norm_backward(_matrix(x), weight, mean, rstd, _matrix(grad_y), *grads)
    return grads


_layer_norm_backward_op = _Op(
    "layer_norm_backward(Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor grad_y) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward,
    lambda x, weight, *_: (_dense(x), _dense(weight), _dense(weight)),
)


def _save_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _layer_norm_grad(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Any, ...]:
    return *_layer_norm_backward_op(*ctx.saved_tensors, grad_y), None


_layer_norm_op = _Op(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
    _layer_norm_fake,
    _save_layer_norm,
    _layer_norm_grad,
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias for each row of x [..., d]. Weight and bias are converted to x's type."""
    bias = torch.zeros_like(weight) if bias is None else bias
    return _layer_norm_op(x, weight.to(x.dtype), bias.to(x.dtype), eps)[0]


# Cross-entropy


def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    loss, lse = _cross_entropy_fake(logits, target, ignore_index)
    _native.cross_entropy_forward(_matrix(logits), target, loss, lse, ignore_index)
    return loss, lse


def _cross_entropy_fake(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    rows = _rows(logits)
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


def _cross_entropy_backward(
    logits: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, ignore_index: int
) -> Tensor:
    grad = _dense(logits)
    _native.cross_entropy_backward(_matrix(logits), target, lse, grad_loss, grad, ignore_index)
    return grad


_cross_entropy_backward_op = _Op(
    "cross_entropy_backward(Tensor logits, Tensor target, Tensor lse, Tensor grad_loss, int ignore_index) -> Tensor",
    _cross_entropy_backward,
    lambda logits, *_: _dense(logits),
)


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _cross_entropy_grad(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Any, ...]:
    return _cross_entropy_backward_op(*ctx.saved_tensors, grad_loss, ctx.ignore_index), None, None


_cross_entropy_op = _Op(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    _cross_entropy,
    _cross_entropy_fake,
    _save_cross_entropy,
    _cross_entropy_grad,
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
        raise ValueError(f"reduction: expected mean, sum or none, found {reduction}")
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
    loss, lse = _linear_cross_entropy_fake(x, weight, target, ignore_index, precision)
    for rows, logits in _chunks(x, weight, precision):
        _native.cross_entropy_forward(logits, target[rows], loss[rows], lse[rows], ignore_index)
    return loss, lse


def _linear_cross_entropy_fake(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, precision: str
) -> tuple[Tensor, Tensor]:
    torch._check(x.dim() == 2 and weight.dim() == 2, lambda: f"expected matrices, found {x.shape} and {weight.shape}")
    return x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32)


def _linear_cross_entropy_backward(
    x: Tensor, weight: Tensor, target: Tensor, lse: Tensor, grad_loss: Tensor, ignore_index: int, precision: str
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _dense(x), torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    grad_buffer = x.new_empty(min(_CHUNK_ROWS, x.shape[0]), weight.shape[0])
    for rows, logits in _chunks(x, weight, precision):
        grad = grad_buffer[: len(logits)]
        _native.cross_entropy_backward(logits, target[rows], lse[rows], grad_loss[rows], grad, ignore_index)
        _native.matmul(grad, weight, grad_x[rows], None, "none", precision)
        _native.matmul(grad.t(), x[rows], grad_weight, None, "none", precision, True)
    return grad_x, grad_weight


_linear_cross_entropy_backward_op = _Op(
    "linear_cross_entropy_backward(Tensor x, Tensor weight, Tensor target, Tensor lse, Tensor grad_loss,"
    " int ignore_index, str precision) -> (Tensor, Tensor)",
    _linear_cross_entropy_backward,
    lambda x, weight, *_: (_dense(x), _dense(weight)),
)


def _save_linear_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, target, *ctx.options = inputs
    ctx.save_for_backward(x, weight, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _linear_cross_entropy_grad(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Any, ...]:
    grads = _linear_cross_entropy_backward_op(*ctx.saved_tensors, grad_loss, *ctx.options)
    return *grads, None, None, None


_linear_cross_entropy_op = _Op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, str precision) -> (Tensor, Tensor)",
    _linear_cross_entropy,
    _linear_cross_entropy_fake,
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

    The backward pass computes the logits again. `precision` as for `matmul`.
    """
    flat = _targets(x, target, reduction)
    loss = _linear_cross_entropy_op(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), flat, ignore_index, precision)[0]
    return _reduced(loss, target, flat, ignore_index, reduction)


# Softmax


def _softmax(x: Tensor) -> Tensor:
    y = _dense(x)
    _native.softmax_forward(_matrix(x), y)
    return y


def _softmax_backward(y: Tensor, grad_y: Tensor) -> Tensor:
    grad_x = _dense(y)
    _native.softmax_backward(_matrix(y), _matrix(grad_y), grad_x)
    return grad_x


_softmax_backward_op = _Op(
    "softmax_backward(Tensor y, Tensor grad_y) -> Tensor", _softmax_backward, lambda y, _: _dense(y)
)


def _save_softmax(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


_softmax_op = _Op(
    "softmax(Tensor x) -> Tensor",
    _softmax,
    _dense,
    _save_softmax,
    lambda ctx, grad_y: _softmax_backward_op(*ctx.saved_tensors, grad_y),
)


def softmax(x: Tensor) -> Tensor:
    """The softmax of each row of x [..., d]."""
    return _softmax_op(x)


# SiLU and SwiGLU


def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    y = _dense(a)
    _native.swiglu_forward(_matrix(a), _matrix(b), y)
    return y


def _swiglu_backward(a: Tensor, b: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    grads = _dense(a), _dense(b)
    _native.swiglu_backward(_matrix(a), _matrix(b), _matrix(grad_y), *grads)
    return grads


_swiglu_backward_op = _Op(
    "swiglu_backward(Tensor a, Tensor b, Tensor grad_y) -> (Tensor, Tensor)",
    _swiglu_backward,
    lambda a, b, _: (_dense(a), _dense(b)),
)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_swiglu_op = _Op(
    "swiglu(Tensor a, Tensor b) -> Tensor",
    _swiglu,
    lambda a, b: _dense(a),
    _save_inputs,
    lambda ctx, grad_y: _swiglu_backward_op(*ctx.saved_tensors, grad_y),
)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b for a and b [..., d]; the halves of one fused projection are passed as slices, without a copy."""
    return _swiglu_op(a, b)


def _silu(x: Tensor) -> Tensor:
    y = _dense(x)
    _native.silu_forward(_matrix(x), y)
    return y


def _silu_backward(x: Tensor, grad_y: Tensor) -> Tensor:
    grad_x = _dense(x)
    _native.silu_backward(_matrix(x), _matrix(grad_y), grad_x)
    return grad_x


_silu_backward_op = _Op("silu_backward(Tensor x, Tensor grad_y) -> Tensor", _silu_backward, lambda x, _: _dense(x))
_silu_op = _Op(
    "silu(Tensor x) -> Tensor",
    _silu,
    _dense,
    _save_inputs,
    lambda ctx, grad_y: _silu_backward_op(*ctx.saved_tensors, grad_y),
)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) for x [..., d]."""
    return _silu_op(x)


# Rotary position embedding

_frequencies: dict[tuple[int, float, torch.device], Tensor] = {}


def _rope_frequencies(d: int, base: float, device: torch.device) -> Tensor:
    """base^(−2i/d) for the d/2 pairs of a head, float64."""
    return torch.pow(base, torch.arange(d // 2, dtype=torch.float64, device=device) * (-2 / d))


def _kept_frequencies(d: int, base: float, device: torch.device) -> Tensor:
    """As `_rope_frequencies`; computed once, except in a graph, which owns the memory of its tensors."""
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _rope_frequencies(d, base, device)
    key = d, base, device
    if key not in _frequencies:
        # Backward passes save it, also if the first call is in inference mode.
        with torch.inference_mode(False):
            _frequencies[key] = _rope_frequencies(d, base, device)
    return _frequencies[key]


def _rotatable(x: Tensor, positions: Tensor | None) -> Tensor:
    """x [batch, heads, n, d] with batch and heads, or batch and n without positions, as one dimension in memory.

    A copy if x is not so.
    """
    torch._check(x.dim() == 4, lambda: f"rope: expected x [batch, heads, n, d], found {list(x.shape)}")
    (batch, heads, n, _), (of_batch, of_head, of_token, _) = x.shape, x.stride()
    one = batch == 1 or of_batch == of_head * heads or (positions is None and of_batch == of_token * n)
    expanded = any(extent > 1 and stride == 0 for extent, stride in zip(x.shape, x.stride()))
    return x if one and not expanded else x.contiguous()


def _rope(x: Tensor, frequencies: Tensor, start: int, positions: Tensor | None, inverse: bool, halves: bool) -> Tensor:
    x = _rotatable(x, positions)
    y = torch.empty_like(x)
    _native.rope(x, frequencies, y, start, positions, inverse, halves)
    return y


def _save_rope(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, frequencies, ctx.start, positions, ctx.inverse, ctx.halves = inputs
    ctx.save_for_backward(frequencies, positions)


def _rope_grad(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    frequencies, positions = ctx.saved_tensors
    grad = _rope_op(_with_unit_stride(grad_y), frequencies, ctx.start, positions, not ctx.inverse, ctx.halves)
    return grad, None, None, None, None, None


_rope_op = _Op(
    "rope(Tensor x, Tensor frequencies, int start, Tensor? positions, bool inverse, bool halves) -> Tensor",
    _rope,
    lambda x, frequencies, start, positions, inverse, halves: torch.empty_like(_rotatable(x, positions)),
    _save_rope,
    _rope_grad,
)


def rope(
    x: Tensor, *, base: float = 10000.0, start: int = 0, positions: Tensor | None = None, halves: bool = False
) -> Tensor:
    """Rotary position embedding of x [batch, heads, n, d], in memory as it is or as [batch, n, heads, d].

    Pairs (x[2i], x[2i + 1]) of the token at position p rotate by the angle p · base^(−2i/d). Positions are `positions`
    [n], int64 or int32, or start, start + 1, …. With `halves`, pairs are (x[i], x[i + d/2]), as in Llama.
    """
    return _rope_op(x, _kept_frequencies(x.shape[-1], base, x.device), start, positions, False, halves)


# Matmul


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    c = a.new_empty(a.shape[0], b.shape[1])
    _native.matmul(a, b, c, bias, "none", precision)
    return c


def _matmul_fake(a: Tensor, b: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    torch._check(a.dim() == 2 and b.dim() == 2, lambda: f"matmul: expected matrices, found {a.shape} and {b.shape}")
    return a.new_empty(a.shape[0], b.shape[1])


def _column_sum(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[-1])
    _native.column_sum(_matrix(x), y)
    return y


_column_sum_op = _Op("column_sum(Tensor x) -> Tensor", _column_sum, lambda x: x.new_empty(x.shape[-1]))


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
    grad_bias = _column_sum_op(grad) if ctx.has_bias and needs_bias else None
    return grad_a, grad_b, grad_bias, None


_matmul_op = _Op(
    "matmul(Tensor a, Tensor b, Tensor? bias, str precision) -> Tensor",
    _matmul,
    _matmul_fake,
    _save_matmul,
    _matmul_grad,
)


def matmul(a: Tensor, b: Tensor, *, precision: str = "ieee") -> Tensor:
    """a [m, k] · b [k, n], of any strides, accumulated in float32.

    `precision` is for float32 operands: "ieee", "tf32" or "tf32x3".
    """
    return _matmul_op(a, b, None, precision)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, precision: str = "ieee") -> Tensor:
    """x [..., k] · weight [n, k]ᵀ + bias [n]: `torch.nn.functional.linear`. `precision` as for `matmul`."""
    y = _matmul_op(x.reshape(-1, x.shape[-1]), weight.t(), bias, precision)
    return y.view(*x.shape[:-1], weight.shape[0])
