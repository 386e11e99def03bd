"""The kernels' computations on NumPy arrays, on the CPU.

Arrays are float32, float16 or, with the package ml_dtypes, bfloat16; sums and statistics are float32. Strides are any
that NumPy makes with non-negative steps, except where leading dimensions [..., d] must be one dimension in memory;
sinks, slopes, biases, lengths, scales of heads and lse are contiguous. The results are new arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _native
from ._modifiers import check, check_cache

Array = NDArray[Any]


def _float32(shape: int | tuple[int, ...]) -> Array:
    return np.empty(shape, np.float32)


def _expect_array(x: Any) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"expected an array, found {type(x).__name__}: pass np.asarray(…, np.float32)")


def _like(x: Array) -> Array:
    _expect_array(x)
    return np.empty(x.shape, x.dtype)


def _rows(x: Array) -> int:
    _expect_array(x)
    return int(np.prod(x.shape[:-1]))


def _modifiers(
    q: Array,
    k: Array,
    causal: bool,
    window: int | None,
    prefix: int | None,
    softcap: float | None,
    alibi_slopes: Array | None,
    relative_bias: Array | None,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    **cache: Array | None,
) -> dict[str, Any]:
    """The arguments of a pass of attention. `cache` has those of the forward pass with a cache of keys."""
    _expect_array(q)
    _expect_array(k)
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"attention: expected q and k [batch, heads, rows, d], found {q.shape} and {k.shape}")
    n_q, n_k = q.shape[2], k.shape[2]
    scores = {"softcap": softcap, "alibi_slopes": alibi_slopes, "relative_bias": relative_bias}
    found = {"window": window, "prefix": prefix} | scores | cache
    lengths, table = cache.get("cache_seqlens"), cache.get("block_table")
    if lengths is not None or table is not None:
        check_cache(lengths, table, cu_seqlens_q, cu_seqlens_k, relative_bias)
        check(n_q, n_k, causal, window, prefix, *scores.values(), None, None)
        return found | {"cu_seqlens_q": cu_seqlens_q}
    check(n_q, n_k, causal, window, prefix, *scores.values(), cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is None:
        return found
    ranges = np.empty(2 * (n_q + n_k), np.int32)
    keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    _native.document_ranges(cu_seqlens_q, keys, ranges, n_q, n_k, causal, window)
    return found | {"window": None, "ranges": ranges}


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    prefix: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    cache_seqlens: Array | None = None,
    block_table: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
) -> tuple[Array, Array]:
    """softmax(scale · q kᵀ) v and the log-sum-exp [batch, heads, n_q] of each row of scores.

    q is [batch, heads, n_q, d], k [batch, heads_kv, n_k, d], v [batch, heads_kv, n_k, d_v] and the result
    [batch, heads, n_q, d_v], where heads_kv divides heads, and d and d_v are at most 256.
    With `causal`, row i sees the keys up to its diagonal, j ≤ i + (n_k − n_q). `scale` is 1/√d by default.

    - `window`: a row sees that many keys before its diagonal, the key on it, and without `causal` as many after it.
    - `prefix`, with `causal`: a row also sees that many first keys.
    - `softcap`, at most 10⁴: a score s becomes softcap · tanh(s / softcap).
    - `alibi_slopes`, float32 [heads]: a score s becomes s − slope · |i + (n_k − n_q) − j|, after the softcap.
    - `relative_bias`, float32 [heads, n_q + n_k − 1], without softcap and alibi_slopes: element n_q − 1 + t of a head is added
      to the scores of keys t places before their row's diagonal, i + (n_k − n_q) − j = t.
    - `sinks`, float32 [heads]: a score that each row has in addition to those of its keys, with a value of 0.
    - `cu_seqlens_q`, int32: rows and keys are those of packed sequences, which see only themselves, with a causal mask
      and a window of their own. Sequence s has the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] − 1, and the same keys or
      those of `cu_seqlens_k`. All batch entries have the same sequences.
    - `cache_seqlens`, int32 [batch]: k and v have room for more keys than there are, of which each batch entry has this many. The
      causal mask ends at an entry's last key. Numbers below 0 count as 0, and larger ones than there is room for as that. There is
      no backward pass. With `cu_seqlens_q` beside it, q [1, heads, rows of all, d] has the rows of entry s from cu_seqlens_q[s] to
      cu_seqlens_q[s + 1] − 1, the last ones of its keys; `cu_seqlens_k` stays out, and so does `relative_bias`.
    - `block_table`, int32 [batch, most], beside `cache_seqlens`: k [pages, heads_kv, rows, d] and v are pages, and key j of an entry
      is row j mod rows of the page in column ⌊j / rows⌋. A page that is not there counts as zeros.
    - `k_descale` and `v_descale`, float32 [heads_kv] or [batch, heads_kv, 1], beside `cache_seqlens`: dequantization scales of k and v of
      float8_e4m3fn or float8_e5m2 (of ml_dtypes), 1 by default.
    """
    scores = softcap, alibi_slopes, relative_bias
    cache = {"cache_seqlens": cache_seqlens, "block_table": block_table, "k_descale": k_descale, "v_descale": v_descale}
    modifiers = _modifiers(q, k, causal, window, prefix, *scores, cu_seqlens_q, cu_seqlens_k, **cache)
    _expect_array(v)
    o, lse = np.empty((*q.shape[:3], *v.shape[3:]), q.dtype), _float32(q.shape[:3])
    _native.attention_forward(q, k, v, o, lse, _float32, causal, scale, sinks=sinks, **modifiers)
    return o, lse


def attention(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """The first result of `attention_forward`, which says what the options are."""
    return attention_forward(q, k, v, **options)[0]


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    grad_o: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    prefix: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
) -> tuple[Array, ...]:
    """The gradients of q, k and v, given the results of `attention_forward` with the same options and the gradient of o.

    The gradients of `relative_bias` and of `sinks` follow, where they are given.
    """
    scores = softcap, alibi_slopes, relative_bias
    modifiers = _modifiers(q, k, causal, window, prefix, *scores, cu_seqlens_q, cu_seqlens_k)
    dq, dk, dv = _like(q), _like(k), _like(v)
    more = [] if relative_bias is None else [_like(relative_bias)]
    own = {"d_relative_bias": more[0] if more else None}
    _native.attention_backward(q, k, v, o, lse, grad_o, dq, dk, dv, _float32, causal, scale, **modifiers, **own)
    if sinks is not None:
        more.append(_like(sinks))
        _native.sink_gradients(o, lse, grad_o, sinks, more[-1])
    return dq, dk, dv, *more


def rms_norm_forward(x: Array, weight: Array, eps: float = 1e-6) -> tuple[Array, Array]:
    """x · rstd · weight with rstd = 1/√(mean(x²) + eps) of each row of x [..., d]; and rstd [rows]."""
    y, rstd = _like(x), _float32(_rows(x))
    _native.rms_norm_forward(x, weight, y, rstd, eps)
    return y, rstd


def rms_norm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    """The first result of `rms_norm_forward`."""
    return rms_norm_forward(x, weight, eps)[0]


def rms_norm_backward(x: Array, weight: Array, rstd: Array, grad_y: Array) -> tuple[Array, Array]:
    """The gradients of x and weight, given rstd of `rms_norm_forward` and the gradient of its first result."""
    grad_x, grad_weight = _like(x), _like(weight)
    _native.rms_norm_backward(x, weight, rstd, grad_y, grad_x, grad_weight)
    return grad_x, grad_weight


def layer_norm_forward(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> tuple[Array, Array, Array]:
    """(x − mean) · rstd · weight + bias with rstd = 1/√(variance + eps) of each row of x [..., d]; mean and rstd [rows]."""
    y, mean, rstd = _like(x), _float32(_rows(x)), _float32(_rows(x))
    _native.layer_norm_forward(x, weight, bias, y, mean, rstd, eps)
    return y, mean, rstd


def layer_norm(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    """The first result of `layer_norm_forward`."""
    return layer_norm_forward(x, weight, bias, eps)[0]


def layer_norm_backward(x: Array, weight: Array, mean: Array, rstd: Array, grad_y: Array) -> tuple[Array, Array, Array]:
    """The gradients of x, weight and bias, given mean and rstd of `layer_norm_forward`."""
    grad_x, grad_weight, grad_bias = _like(x), _like(weight), _like(weight)
    _native.layer_norm_backward(x, weight, mean, rstd, grad_y, grad_x, grad_weight, grad_bias)
    return grad_x, grad_weight, grad_bias


def softmax(x: Array) -> Array:
    """The softmax of each row of x [..., d]."""
    y = _like(x)
    _native.softmax_forward(x, y)
    return y


def softmax_backward(y: Array, grad_y: Array) -> Array:
    """The gradient of x, given y = softmax(x) and its gradient."""
    grad_x = _like(y)
    _native.softmax_backward(y, grad_y, grad_x)
    return grad_x


def _of_rows(targets: Array, logits: Array) -> Array:
    """Targets, one for each row of logits, as a vector."""
    if tuple(targets.shape) != tuple(logits.shape[:-1]):
        raise ValueError(
            f"targets: expected the shape of the logits without classes, {list(logits.shape[:-1])}, found {list(targets.shape)}"
        )
    return targets.reshape(-1)


def cross_entropy_forward(logits: Array, targets: Array, ignore_index: int = -100) -> tuple[Array, Array]:
    """The losses [rows] and log-sum-exps [rows] of logits [..., d]; the loss of a row with target `ignore_index` is 0."""
    loss, lse = _float32(_rows(logits)), _float32(_rows(logits))
    _native.cross_entropy_forward(logits, _of_rows(targets, logits), loss, lse, ignore_index)
    return loss, lse


def cross_entropy(logits: Array, targets: Array, ignore_index: int = -100) -> Array:
    """The first result of `cross_entropy_forward`."""
    return cross_entropy_forward(logits, targets, ignore_index)[0]


def cross_entropy_backward(
    logits: Array, targets: Array, lse: Array, grad_loss: Array, ignore_index: int = -100
) -> Array:
    """The gradient of the logits, given lse of `cross_entropy_forward` and the gradients [rows] of the losses."""
    grad = _like(logits)
    _native.cross_entropy_backward(logits, _of_rows(targets, logits), lse, grad_loss, grad, ignore_index)
    return grad


def rope(
    x: Array,
    *,
    base: float = 10000.0,
    start: int = 0,
    positions: Array | None = None,
    inverse: bool = False,
    halves: bool = False,
) -> Array:
    """Rotary position embedding of x [batch, heads, n, d].

    Pairs (x[2i], x[2i + 1]) of the token at position p rotate by the angle p · base^(−2i/d). Positions are `positions`
    [n], integers, or start, start + 1, …. `inverse` rotates back, which is the gradient. With `halves`, pairs are
    (x[i], x[i + d/2]), as in Llama.
    """
    y = np.empty_like(x)
    frequencies = np.array(_native.rope_frequencies(x.shape[-1], base))
    _native.rope(x, frequencies, y, start, positions, inverse, halves)
    return y


def silu(x: Array) -> Array:
    """x · sigmoid(x)."""
    y = _like(x)
    _native.silu_forward(x, y)
    return y


def silu_backward(x: Array, grad_y: Array) -> Array:
    """The gradient of x."""
    grad_x = _like(x)
    _native.silu_backward(x, grad_y, grad_x)
    return grad_x


def swiglu(a: Array, b: Array) -> Array:
    """silu(a) · b."""
    y = _like(a)
    _native.swiglu_forward(a, b, y)
    return y


def swiglu_backward(a: Array, b: Array, grad_y: Array) -> tuple[Array, Array]:
    """The gradients of a and b."""
    grad_a, grad_b = _like(a), _like(b)
    _native.swiglu_backward(a, b, grad_y, grad_a, grad_b)
    return grad_a, grad_b


def matmul(
    a: Array, b: Array, bias: Array | None = None, *, activation: str = "none", precision: str = "ieee"
) -> Array:
    """activation(a [m, k] · b [k, n] + bias [n]), accumulated in float32.

    The activation is "none", "relu", "gelu" or "silu". `precision` is for float32 operands: "ieee", "tf32", "tf32x3".
    """
    c = np.empty((a.shape[0], b.shape[-1]), a.dtype)
    _native.matmul(a, b, c, bias, activation, precision)
    return c


def adamw(
    p: Array,
    m: Array,
    v: Array,
    grad: Array,
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Applies step 1, 2, … of AdamW to the parameters p and their moments m and v, float32 and in place."""
    beta1, beta2 = betas
    _native.adamw([(p, m, v, grad, None)], step, lr, beta1, beta2, eps, weight_decay)
