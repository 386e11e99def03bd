"""`attention` of `tilewright.torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._modifiers import check, check_cache
from ._native import Error
from ._registration import kernel, Op
from ._shared import (
    autocast_to_narrow,
    expect_floats,
    expect_numbers,
    expect_tensors,
    heads_like,
    precision_code,
)


_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def _results_like(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Tensors like o and lse."""
    o = heads_like(q, v.shape[3])
    return o.to(torch.bfloat16) if q.dtype in _BYTES else o, q.new_empty(q.shape[:3], dtype=torch.float32)


_attention_forward = kernel(
    "attention_forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, int precision) -> (Tensor, Tensor)",
    _results_like,
)
_attention_backward = Op(
    "attention_backward",
    kernel(
        "attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor grad_o, bool causal, float scale,"
        " int precision, bool deterministic) -> (Tensor, Tensor, Tensor)",
        lambda q, k, v, *_: (heads_like(q), heads_like(k), heads_like(v)),
    ),
    fold=6,
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
    fold=3,
)


_document_ranges = kernel(
    "document_ranges(Tensor cu_seqlens_q, Tensor cu_seqlens_k, int n_q, int n_k, bool causal, int window) -> Tensor",
    lambda cu_seqlens_q, _k, n_q, n_k, *_: cu_seqlens_q.new_empty(2 * (n_q + n_k), dtype=torch.int32),
)
# The lists have one tensor or none.
_modified_attention_forward = kernel(
    "modified_attention_forward(Tensor q, Tensor k, Tensor v, Tensor[] alibi_slopes, Tensor[] relative_bias, Tensor[] sinks,"
    " Tensor[] ranges, Tensor[] cache_seqlens, Tensor[] block_table, Tensor[] cu_seqlens_q, Tensor[] q_descale,"
    " Tensor[] k_descale, Tensor[] v_descale, bool causal, float scale, int precision, int window, int prefix,"
    " float softcap) -> (Tensor, Tensor)",
    _results_like,
)
_modified_attention_backward = Op(
    "modified_attention_backward",
    kernel(
        "modified_attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor grad_o,"
        " Tensor[] alibi_slopes, Tensor[] relative_bias, Tensor[] ranges, bool causal, float scale, int precision,"
        " bool deterministic, int window, int prefix, float softcap) -> (Tensor, Tensor, Tensor)",
        lambda q, k, v, *_: (heads_like(q), heads_like(k), heads_like(v)),
    ),
    fold=6,
)


_sink_gradients = Op(
    "sink_gradients",
    kernel(
        "sink_gradients(Tensor o, Tensor lse, Tensor grad_o, Tensor sinks) -> Tensor",
        lambda o, lse, grad_o, sinks: torch.empty_like(sinks, memory_format=torch.contiguous_format),
    ),
)


_relative_bias_gradient = Op(
    "relative_bias_gradient",
    kernel(
        "relative_bias_gradient(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor grad_o, Tensor relative_bias,"
        " Tensor[] ranges, bool causal, float scale, int precision, int window, int prefix) -> Tensor",
        lambda q, k, v, o, lse, grad_o, bias, *_: torch.empty_like(bias, memory_format=torch.contiguous_format),
    ),
)


def _list(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


def _inference_attention(q: Tensor, k: Tensor, v: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    tensors, numbers = inputs[:10], inputs[10:]
    return _modified_attention_forward(q, k, v, *map(_list, tensors), *numbers)


# What has no gradients: caches, and 8-bit floats.
_inference_attention_op = Op(
    "inference_attention(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? relative_bias, Tensor? sinks,"
    " Tensor? ranges, Tensor? cache_seqlens, Tensor? block_table, Tensor? cu_seqlens_q, Tensor? q_descale,"
    " Tensor? k_descale, Tensor? v_descale, bool causal, float scale, int precision, int window, int prefix, float softcap)"
    " -> (Tensor, Tensor)",
    _inference_attention,
)


_quantize_rows = kernel(
    "quantize_rows(Tensor x, bool e5m2) -> (Tensor, Tensor)",
    lambda x, e5m2: (
        heads_like(x).to(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn),
        x.new_empty(*x.shape[:2], -(-x.shape[2] // 128), dtype=torch.float32),
    ),
)
_quantize_op = Op(
    "quantize(Tensor x, bool e5m2) -> (Tensor, Tensor)",
    lambda x, e5m2: _quantize_rows(x, e5m2),
    fold=1,
)


def quantize(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x [batch, heads, rows, d] in 8-bit floats, float8_e4m3fn or float8_e5m2, for `attention`, and their dequantization scales.

    The scales are float32 [batch, heads, ⌈rows / 128⌉], one for each block of 128 rows, whose largest element becomes the largest
    number of the type: rows of padding should be zeros. An infinity gives an infinite scale. There is no gradient. A cache, to which
    rows are added, has other scales, for whole heads: x / scale, clamped to the largest number (448 for float8_e4m3fn) and converted.
    """
    if dtype not in _BYTES:
        raise ValueError(f"quantize: expected dtype float8_e4m3fn or float8_e5m2, found {dtype!s:.200}")
    expect_floats("quantize", "x", x)
    if x.dim() != 4:
        raise ValueError(f"quantize: expected x [batch, heads, rows, d], found {list(x.shape)}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("quantize: has no gradient: call it under torch.no_grad()")
    values, descale = _quantize_op(x, dtype == torch.float8_e5m2)
    return values, descale


def _modified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    relative_bias: Tensor | None,
    sinks: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    precision: int,
    _: bool,
    *modifiers: Any,
) -> tuple[Tensor, Tensor]:
    lists = _list(alibi_slopes), _list(relative_bias), _list(sinks), _list(ranges), *([],) * 6
    return _modified_attention_forward(q, k, v, *lists, causal, scale, precision, *modifiers)


def _save_modified_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, alibi_slopes, relative_bias, sinks, ranges, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, alibi_slopes, relative_bias, sinks, ranges)
    ctx.mark_non_differentiable(output[1])


def _modified_attention_grad(ctx: Any, grad_o: Tensor, _: Any) -> tuple[Any, ...]:
    *saved, alibi_slopes, relative_bias, sinks, ranges = ctx.saved_tensors
    lists = _list(alibi_slopes), _list(relative_bias), _list(ranges)
    grads = (None,) * 3
    if any(ctx.needs_input_grad[:3]):
        grads = _modified_attention_backward(*saved, grad_o, *lists, *ctx.options)
    of_bias = None
    if ctx.needs_input_grad[4]:
        causal, scale, precision, _, window, prefix, _ = ctx.options
        numbers = causal, scale, precision, window, prefix
        of_bias = _relative_bias_gradient(*saved, grad_o, relative_bias, _list(ranges), *numbers)
    of_sinks = _sink_gradients(*saved[3:], grad_o, sinks) if ctx.needs_input_grad[5] else None
    return *grads, None, of_bias, of_sinks, *(None,) * (len(ctx.needs_input_grad) - 6)


_modified_attention_op = Op(
    "modified_attention(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? relative_bias, Tensor? sinks,"
    " Tensor? ranges, bool causal, float scale, int precision, bool deterministic, int window, int prefix,"
    " float softcap) -> (Tensor, Tensor)",
    _modified_attention,
    _save_modified_attention,
    _modified_attention_grad,
    fold=3,
)


_INTEGERS = ("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table")
_NUMBERS = ("alibi_slopes", "relative_bias", "sinks", "q_descale", "k_descale", "v_descale")


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
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    precision: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v for q [batch, heads, n_q, d], k [batch, heads_kv, n_k, d] and v [batch, heads_kv, n_k, d_v].

    Strides are any; heads_kv divides heads (grouped-query attention); d and d_v are at most 256. With `causal`, row i sees the keys
    j ≤ i + (n_k − n_q): the last query sees every key. `scale`, a positive number, is 1/√d by default. `precision` is that of float32
    products: "tf32x3" by default on a GPU, or "tf32", "ieee". With `deterministic`, which defaults to
    `torch.are_deterministic_algorithms_enabled()`, the same inputs give the same bits of all gradients; without it, dq
    is added up atomically on GPUs where that is faster.

    What is beside plain attention is named as in flash-attn, and may be combined:

    - `window`: a row sees that many keys before its diagonal, i + (n_k − n_q), the key on it, and without `causal` as many
      after it. (flash-attn: window_size=(window, 0) with causal, else (window, window).)
    - `prefix`, with `causal`, without a window, and without packed sequences but beside a cache: a row also sees that many first keys (prefix LM).
    - `softcap`, at most 10⁴: a score s becomes softcap · tanh(s / softcap), with an error of about 10⁻⁷ · softcap.
    - `alibi_slopes`, float32 [heads], without a gradient: a score s becomes s − slope · |i + (n_k − n_q) − j|, after the
      softcap.
    - `relative_bias`, float32 [heads, n_q + n_k − 1], without softcap and alibi_slopes (T5): element n_q − 1 + t of a head is
      added to the scores of keys t places before their row's diagonal, i + (n_k − n_q) − j = t. It has a gradient. With
      `cache_seqlens`, n_k is the number of keys that there is room for.
    - `sinks`, float32 [heads]: a score that each row has in addition to those of its keys, with a value of 0 (gpt-oss). It is
      not scaled or modified, and has a gradient.
    - `cu_seqlens_q`, int32: rows and keys are those of packed sequences, which see only themselves, with a causal mask
      and a window of their own. Sequence s has the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] − 1, and the same keys or
      those of `cu_seqlens_k`. All batch entries have the same sequences; rows beyond the last one give 0. The numbers
      begin with 0, do not decrease, and do not exceed n_q and n_k; what is beyond the last sequence has to be finite. That is checked on the CPU; on a GPU, where a check
      would wait for the device, others give wrong rows, but no access outside of the tensors.
    - `cache_seqlens`, int32 [batch], for inference: k and v have room for more keys than there are, of which each batch entry
      has this many; what is beyond them has no effect. The causal mask ends at an entry's last key. Numbers below 0 count as 0,
      and larger ones than there is room for as that. There are no gradients. k and v may be float8_e4m3fn or float8_e5m2.
      With `cu_seqlens_q` beside it, entries have different numbers of rows: q [1, heads, rows of all, d] has those of entry s from
      cu_seqlens_q[s] to cu_seqlens_q[s + 1] − 1, the last ones of its keys. `cu_seqlens_k` stays out, and so does `relative_bias`.
    - `block_table`, int32 [batch, most], beside `cache_seqlens`: k [pages, heads_kv, rows, d] and v are pages, and key j of an
      entry is row j mod rows of the page in column ⌊j / rows⌋. A page that is not there counts as zeros. (flash-attn's
      caches are [pages, rows, heads_kv, d]: pass k_cache.transpose(1, 2).)

    q, k and v may all be float8_e4m3fn, or all float8_e5m2, without `cache_seqlens`, as `quantize` makes them: products are those of
    8-bit numbers, the softmax's weights are rounded to them, too, and the result is bfloat16, without gradients.

    - `k_descale` and `v_descale`, float32, of 8-bit k and v: dequantization scales: 0 means zeros, a negative one gives NaN. [heads_kv], the same for all batch
      entries, [batch, heads_kv, 1], or beside q of 8 bits [batch, heads_kv, ⌈n_k / 128⌉], those of blocks of 128 keys. (flash-attn's are
      [batch, heads_kv]: pass k_descale[:, :, None].) Without them, scales are 1.
    - `q_descale`, float32 [heads], [batch, heads, 1] or [batch, heads, ⌈n_q / 128⌉], beside these two, for q of 8 bits.
    """
    if scale is not None or softcap is not None:
        expect_numbers(scale=scale, softcap=softcap)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    expect_tensors("attention", q=q, k=k, v=v)
    if q.dim() != 4:
        raise ValueError(f"attention: expected q [batch, heads, rows, d], found {list(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"attention: expected v [batch, heads, rows, d], found {list(v.shape)}")
    q, k, v = autocast_to_narrow(q, k, v)
    if scale is None:
        scale = max(q.shape[3], 1) ** -0.5
    options = causal, scale, precision_code(precision), deterministic
    is_8_bit = q.dtype in _BYTES
    if (k_descale is None) != (v_descale is None):
        raise ValueError("k_descale and v_descale: expected both or none")
    if k_descale is not None and k.dtype not in _BYTES:
        raise ValueError(f"k_descale and v_descale: expected k and v of 8-bit floats, found {k.dtype}")
    if q_descale is not None and not (is_8_bit and k_descale is not None):
        raise ValueError("q_descale: expected q of 8-bit floats, k_descale and v_descale beside it")
    if cache_seqlens is not None or block_table is not None:
        check_cache(cache_seqlens, block_table, cu_seqlens_q, cu_seqlens_k, relative_bias)
    elif not is_8_bit and window is prefix is softcap is alibi_slopes is relative_bias is sinks is None and (
        cu_seqlens_q is cu_seqlens_k is None
    ):
        return _attention_op(q, k, v, *options)[0]
    if k.dim() != 4:
        raise ValueError(f"attention: expected k [batch, heads, rows, d], found {list(k.shape)}")
    scores = softcap, alibi_slopes, relative_bias
    packed = (None, None) if cache_seqlens is not None else (cu_seqlens_q, cu_seqlens_k)
    check(q.shape[2], k.shape[2], causal, window, prefix, *scores, *packed)
    arrays = {
        "alibi_slopes": alibi_slopes,
        "relative_bias": relative_bias,
        "sinks": sinks,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "cache_seqlens": cache_seqlens,
        "block_table": block_table,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    expect_tensors("attention", **{name: array for name, array in arrays.items() if array is not None})
    for names, dtype, convert in ((_INTEGERS, torch.int32, "int"), (_NUMBERS, torch.float32, "float")):
        for name in names:
            if arrays[name] is not None and arrays[name].dtype != dtype:
                expected, found = (str(x).removeprefix("torch.") for x in (dtype, arrays[name].dtype))
                message = f"expects elements of type {expected}, found {found}: pass {name}.{convert}()"
                raise Error(f"attention: `{name}` {message}")
    if alibi_slopes is not None:
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError("alibi_slopes: has no gradient: pass alibi_slopes.detach()")
        alibi_slopes = alibi_slopes.contiguous()
    if relative_bias is not None:
        relative_bias = relative_bias.contiguous()
    if sinks is not None:
        sinks = sinks.contiguous()
    ranges = None
    if cu_seqlens_q is not None and cache_seqlens is None:
        cu_seqlens_q = cu_seqlens_q.contiguous()
        keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k.contiguous()
        extents = q.shape[2], k.shape[2]
        ranges = _document_ranges(cu_seqlens_q, keys, *extents, causal, -1 if window is None else window)
        window = None
    lengths = (-1 if length is None else length for length in (window, prefix))
    if cache_seqlens is not None or is_8_bit:
        what = "8-bit floats" if cache_seqlens is None else "a cache"
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "relative_bias": relative_bias,
            "sinks": sinks,
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
        }
        for name, x in inputs.items():
            if x is not None and x.requires_grad and torch.is_grad_enabled():
                expected = f"call it under torch.no_grad(), or pass {name}.detach()"
                raise ValueError(f"{name}: attention of {what} has no gradient: {expected}")
        numbers = causal, scale, precision_code(precision), *lengths, softcap or 0.0
        starts = None if cache_seqlens is None else cu_seqlens_q
        tensors = cache_seqlens, block_table, starts, q_descale, k_descale, v_descale
        tensors = (None if x is None else x.contiguous() for x in tensors)
        return _inference_attention_op(q, k, v, alibi_slopes, relative_bias, sinks, ranges, *tensors, *numbers)[0]
    tensors = alibi_slopes, relative_bias, sinks, ranges
    return _modified_attention_op(q, k, v, *tensors, *options, *lengths, softcap or 0.0)[0]
