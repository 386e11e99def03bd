"""The computations of `tilewright.numpy`, against formulas in float64."""

import numpy as np
import pytest

import tilewright
import tilewright.numpy as tw

TOLERANCE = {np.float32: 2e-5, np.float16: 4e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def close(found, expected, dtype=np.float32, factor=1.0):
    assert found.shape == expected.shape
    scale = max(np.abs(expected).max(initial=0.0), 1.0)
    error = np.abs(found.astype(np.float64) - expected).max(initial=0.0) / scale
    assert error <= factor * TOLERANCE[dtype], error


def seen64(n_q, n_k, causal, window=None, prefix=None, cu_seqlens_q=None, cu_seqlens_k=None):
    """Which keys each row sees: one row after the other."""
    rows = [0, n_q] if cu_seqlens_q is None else cu_seqlens_q
    keys = ([0, n_k] if cu_seqlens_q is None else cu_seqlens_q) if cu_seqlens_k is None else cu_seqlens_k
    seen = np.zeros((n_q, n_k), bool)
    for row, row_end, key, key_end in zip(rows, rows[1:], keys, keys[1:]):
        for i in range(row, row_end):
            for j in range(key, key_end):
                before = (i - row_end) - (j - key_end)
                inside = (window is None or abs(before) <= window) and (not causal or before >= 0)
                seen[i, j] = inside or prefix is not None and j < prefix
    return seen


def attention64(q, k, v, causal, scale, softcap=None, alibi_slopes=None, relative_bias=None, sinks=None, **mask):
    """o, lse and a function from the gradient of o to those of q, k, v, the relative bias and the sinks."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    s = scale * q @ k.swapaxes(-1, -2)
    n_q, n_k = s.shape[-2:]
    slope_of_s = 1.0
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
        slope_of_s = 1 - (s / softcap) ** 2
    if alibi_slopes is not None:
        distance = np.abs(np.arange(n_q)[:, None] + n_k - n_q - np.arange(n_k))
        s = s - np.asarray(alibi_slopes, np.float64)[:, None, None] * distance
    element = np.arange(n_q)[:, None] + n_k - 1 - np.arange(n_k)
    if relative_bias is not None:
        s = s + relative_bias.astype(np.float64)[:, element]
    seen = seen64(n_q, n_k, causal, **mask)
    s = np.where(seen, s, -np.inf)
    sink = np.full(q.shape[1], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    sink = np.broadcast_to(sink[:, None], s.shape[:-1])
    highest = np.maximum(s.max(-1, initial=-np.inf), sink)
    top = np.where(np.isneginf(highest), 0, highest)[..., None]
    weights = np.exp(s - top)
    total = weights.sum(-1) + np.exp(sink - top[..., 0])
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top[..., 0]
    p = weights / np.where(total == 0, 1, total)[..., None]
    o = p @ v

    def gradients(g):
        dv = p.swapaxes(-1, -2) @ g
        ds = p * (g @ v.swapaxes(-1, -2) - (g * o).sum(-1, keepdims=True)) * slope_of_s
        dq, dk = scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q
        folded = [x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv)]
        if relative_bias is not None:
            folded.append(np.stack([ds.sum(0)[:, element == at].sum(-1) for at in range(n_q + n_k - 1)], -1))
        if sinks is not None:
            folded.append(-(np.exp(sink - lse) * (g * o).sum(-1)).sum((0, 2)))
        return dq, *folded

    return o, lse, gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "heads_kv, n_q, n_k, d, scale", [(4, 33, 33, 16, None), (2, 20, 45, 24, 0.3), (1, 1, 7, 64, None)]
)
def test_attention(rng, dtype, causal, heads_kv, n_q, n_k, d, scale):
    q = rng.standard_normal((2, 4, n_q, d)).astype(dtype)
    k, v = (rng.standard_normal((2, heads_kv, n_k, d)).astype(dtype) for _ in range(2))
    grad = rng.standard_normal(q.shape).astype(dtype)
    o64, lse64, gradients = attention64(q, k, v, causal, scale or d**-0.5)
    o, lse = tw.attention_forward(q, k, v, causal=causal, scale=scale)
    close(o, o64, dtype)
    close(lse, lse64, dtype)
    for found, expected in zip(
        tw.attention_backward(q, k, v, o, lse, grad, causal=causal, scale=scale), gradients(grad.astype(np.float64))
    ):
        close(found, expected, dtype, 4)
    np.testing.assert_array_equal(tw.attention(q, k, v, causal=causal, scale=scale), o)


LENGTHS = np.array([0, 9, 10, 10, 33], np.int32)
MORE_KEYS = np.array([0, 12, 14, 17, 45], np.int32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0], np.float32)
SINKS = np.array([-1.0, 0.0, 2.0, 30.0], np.float32)
MODIFIERS = [
    {"window": 7},
    {"window": 0},
    {"window": 2**40},
    {"softcap": 1.5},
    {"alibi_slopes": SLOPES},
    {"window": 9, "softcap": 2.0, "alibi_slopes": SLOPES},
    {"sinks": SINKS},
    {"window": 0, "sinks": SINKS},
    {"prefix": 0},
    {"prefix": 20},
    {"prefix": 1000, "softcap": 3.0, "alibi_slopes": SLOPES},
    {"cu_seqlens_q": LENGTHS},
    {"cu_seqlens_q": LENGTHS, "window": 4, "softcap": 2.0, "alibi_slopes": SLOPES},
    {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": MORE_KEYS},
    {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": MORE_KEYS, "window": 3},
    # Rows beyond the last sequence.
    {"cu_seqlens_q": LENGTHS[:3]},
    {"cu_seqlens_q": LENGTHS[:1]},
    {"cu_seqlens_q": LENGTHS[:3], "softcap": 2.0, "sinks": SINKS},
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", MODIFIERS, ids=lambda options: "-".join(options))
def test_attention_with_modifiers(rng, causal, options):
    if "prefix" in options and not causal:
        pytest.skip("a prefix is causal")
    n_k = 33 if "cu_seqlens_q" in options and "cu_seqlens_k" not in options else 45
    dtype = np.float32
    q = rng.standard_normal((2, 4, 33, 24)).astype(dtype)
    # Sinks also with values of another head dimension.
    d_v = 40 if "sinks" in options else 24
    k, v = (rng.standard_normal((2, 2, n_k, d)).astype(dtype) for d in (24, d_v))
    grad = rng.standard_normal((2, 4, 33, d_v)).astype(dtype)
    o64, lse64, gradients = attention64(q, k, v, causal, 24**-0.5, **options)
    o, lse = tw.attention_forward(q, k, v, causal=causal, **options)
    close(o, o64, dtype)
    finite = np.isfinite(lse64)
    assert (np.isneginf(lse) == ~finite).all()
    close(lse[finite], lse64[finite], dtype)
    for found, expected in zip(
        tw.attention_backward(q, k, v, o, lse, grad, causal=causal, **options), gradients(grad.astype(np.float64))
    ):
        close(found, expected, dtype, 4)
    np.testing.assert_array_equal(tw.attention(q, k, v, causal=causal, **options), o)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 7, "sinks": SINKS}, {"cu_seqlens_q": LENGTHS}], ids=["alone", "window", "packed"])
def test_attention_with_a_relative_bias(rng, causal, options):
    n_k = 33 if "cu_seqlens_q" in options else 45
    q, grad = rng.standard_normal((2, 2, 4, 33, 24)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 2, n_k, 24)).astype(np.float32)
    options = options | {"relative_bias": rng.standard_normal((4, 33 + n_k - 1)).astype(np.float32)}
    o64, lse64, gradients = attention64(q, k, v, causal, 24**-0.5, **options)
    o, lse = tw.attention_forward(q, k, v, causal=causal, **options)
    close(o, o64, np.float32)
    found = tw.attention_backward(q, k, v, o, lse, grad, causal=causal, **options)
    expected = gradients(grad.astype(np.float64))
    assert len(found) == len(expected) == 4 + ("sinks" in options)
    for x, y in zip(found, expected):
        close(x, y, np.float32, 4)


@pytest.mark.parametrize("batch, n_q, n_k", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_a_relative_bias_of_nothing_has_no_gradient(batch, n_q, n_k):
    q, k = np.ones((batch, 2, n_q, 8), np.float32), np.ones((batch, 2, n_k, 8), np.float32)
    bias = np.ones((2, n_q + n_k - 1), np.float32)
    o, lse = tw.attention_forward(q, k, k, relative_bias=bias)
    *_, gradient = tw.attention_backward(q, k, k, o, lse, o, relative_bias=bias)
    assert gradient.shape == bias.shape and (gradient == 0).all()


def test_a_modifier_changes_the_result(rng):
    """The options reach the kernels: none of them gives what attention without it gives."""
    q, k, v = rng.standard_normal((3, 1, 4, 33, 16)).astype(np.float32)
    plain = tw.attention(q, k, v, causal=True)
    for options in MODIFIERS:
        if "cu_seqlens_k" not in options and options not in ({"window": 2**40}, {"prefix": 0}):
            assert np.abs(tw.attention(q, k, v, causal=True, **options) - plain).max() > 1e-3, options


INT32 = np.int32


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"window": -1}, ValueError, "window: expected a number of keys of at least 0, found -1"),
        ({"window": 2.5}, TypeError, "(?s)float.*window"),
        ({"prefix": -3}, ValueError, "prefix: expected a number of keys of at least 0, found -3"),
        ({"prefix": 3}, ValueError, "prefix: expected causal=True"),
        ({"prefix": 3, "window": 2, "causal": True}, ValueError, "prefix: cannot be combined with window"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a number from 1e-30 to 10000, or None for no softcap, found 0.0"),
        ({"softcap": np.nan}, ValueError, "softcap: expected a number"),
        ({"softcap": 1e-300}, ValueError, "softcap: expected a number from 1e-30 .* found 1e-300"),
        ({"window": 2**64}, ValueError, "window: expected a number of keys"),
        ({"softcap": np.inf}, tilewright.Error, "`softcap` expects a number from 1e-30 to 10000"),
        ({"alibi_slopes": SLOPES[:3]}, tilewright.Error, "`alibi_slopes` expects a slope for each of 4 heads, found 3"),
        ({"alibi_slopes": SLOPES.astype(float)}, tilewright.Error, "`alibi_slopes` expects elements of type f32"),
        ({"alibi_slopes": SLOPES[::2]}, tilewright.Error, "`alibi_slopes` expects a contiguous array of one dimension"),
        ({"relative_bias": SLOPES}, tilewright.Error, "`relative_bias` expects the shape .heads, n_q . n_k - 1. with 4 heads"),
        ({"relative_bias": np.ones((4, 64), np.float32)}, tilewright.Error, "`relative_bias` expects 65 numbers.*33 rows and 33 keys.*found 256"),
        ({"relative_bias": np.ones((4, 65), np.float32), "softcap": 1.0}, ValueError, "relative_bias: cannot be combined"),
        ({"sinks": SINKS[:3]}, tilewright.Error, "`sinks` expects a score for each of 4 heads, found 3 scores"),
        ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes: expected an array"),
        ({"cu_seqlens_k": LENGTHS}, ValueError, "cu_seqlens_k: expected cu_seqlens_q beside it"),
        ({"cu_seqlens_q": LENGTHS.astype(np.int64)}, tilewright.Error, "`cu_seqlens_q` expects elements of type i32"),
        ({"cu_seqlens_q": LENGTHS[1:]}, tilewright.Error, "beginning with 0, found 9 at 0"),
        ({"cu_seqlens_q": np.array([0, 5, 3], INT32)}, tilewright.Error, "do not decrease.*found 3 at 2"),
        ({"cu_seqlens_q": np.array([0, -5], INT32)}, tilewright.Error, "do not decrease.*found -5 at 1"),
        ({"cu_seqlens_q": np.array([0, 34], INT32)}, tilewright.Error, "`cu_seqlens_q` expects .* at most 33.*found 34"),
        ({"cu_seqlens_q": LENGTHS[:0]}, tilewright.Error, "`cu_seqlens_k` expects .*at least one"),
        ({"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS[:2]}, tilewright.Error, "`cu_seqlens_k` expects as many"),
        (
            {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS.copy(), "alibi_slopes": SLOPES},
            ValueError,
            "alibi_slopes: expected one tensor of lengths for rows and keys: leave cu_seqlens_k out",
        ),
        ({"softcaps": 3.0}, TypeError, "softcaps"),
    ],
)
def test_mistakes_of_modifiers_are_exceptions(options, error, message):
    q = np.ones((1, 4, 33, 16), np.float32)
    with pytest.raises(error, match=message):
        tw.attention(q, q, q, **options)


def test_packed_sequences_of_other_extents_are_exceptions():
    q, k = np.ones((1, 4, 33, 16), np.float32), np.ones((1, 4, 40, 16), np.float32)
    with pytest.raises(ValueError, match="cu_seqlens_k: is missing: q has 33 rows and k 40"):
        tw.attention(q, k, k, cu_seqlens_q=LENGTHS)
    with pytest.raises(ValueError, match=r"expected q and k \[batch, heads, rows, d\], found \(4, 33, 16\)"):
        tw.attention(q[0], q[0], q[0])


def test_attention_of_strided_arrays(rng):
    # [batch, n, heads, d] in memory, and every second key.
    qkv = rng.standard_normal((2, 30, 3, 4, 16)).astype(np.float32)
    q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
    o64, _, _ = attention64(q, k, v, True, 0.25)
    close(tw.attention(q, k, v, causal=True), o64)
    o64, _, _ = attention64(q, k[:, :, ::2], v[:, :, ::2], False, 0.25)
    close(tw.attention(q, k[:, :, ::2], v[:, :, ::2]), o64)


CACHE_LENGTHS = [5, 0, 12]


def caches(rng, dtype, widths=(16, 24)):
    """Keys and values of three entries as rows, the same in pages of 4 rows, and the table of pages; what is no key is NaN."""
    table = np.array([[7, 2, -1], [1, 2**31 - 1, -9], [4, 99, 0]], np.int32)
    rows = [rng.standard_normal((3, 2, 12, d)).astype(dtype) for d in widths]
    # Heads are together in memory, as in flash-attn's caches.
    pages = [np.full((10, 4, 2, d), np.nan, dtype).swapaxes(1, 2) for d in widths]
    for x, paged in zip(rows, pages):
        for entry, length in enumerate(CACHE_LENGTHS):
            x[entry, :, length:] = np.nan
            for key in range(length):
                page = table[entry, key // 4]
                if 0 <= page < 10:
                    paged[page, :, key % 4] = x[entry, :, key]
                else:
                    x[entry, :, key] = 0
    return rows, pages, table


def cached64(queries, rows, causal, relative_bias=None, **options):
    """o and lse of each entry's queries [1, heads, n_q, d], over its keys alone."""
    results = []
    for entry, (q, length) in enumerate(zip(queries, CACHE_LENGTHS)):
        k, v = (x[entry : entry + 1, :, :length] for x in rows)
        # With keys up to `length`, distances are those of the first elements.
        bias = None if relative_bias is None else relative_bias[:, : q.shape[2] + length - 1]
        results.append(attention64(q, k, v, causal, q.shape[3] ** -0.5, relative_bias=bias, **options)[:2])
    return results


CACHE_OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window": 3, "softcap": 2.0, "sinks": SINKS},
    {"causal": True, "prefix": 2},
    {"alibi_slopes": SLOPES},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [*CACHE_OPTIONS, {"relative_bias": None}], ids=lambda options: "-".join(options) or "plain")
def test_attention_with_a_cache(rng, dtype, options):
    rows, pages, table = caches(rng, dtype)
    q = rng.standard_normal((3, 4, 2, 16)).astype(dtype)
    options = {"causal": False} | options
    if "relative_bias" in options:
        options["relative_bias"] = rng.standard_normal((4, 2 + 12 - 1)).astype(np.float32)
    expected = cached64([q[i : i + 1] for i in range(3)], rows, **options)
    o64, lse64 = (np.concatenate([result[i] for result in expected]) for i in range(2))
    finite = np.isfinite(lse64)
    lengths = np.array(CACHE_LENGTHS, np.int32)
    for k, v, more in [(*rows, {}), (*pages, {"block_table": table})]:
        o, lse = tw.attention_forward(q, k, v, cache_seqlens=lengths, **more, **options)
        close(o, o64, dtype)
        assert (np.isneginf(lse) == ~finite).all()
        close(lse[finite], lse64[finite], dtype)
        np.testing.assert_array_equal(tw.attention(q, k, v, cache_seqlens=lengths, **more, **options), o)
    # Numbers below 0 count as 0, and larger ones than there is room for as that.
    others = np.array([5, -3, 2**31 - 1], np.int32)
    np.testing.assert_array_equal(tw.attention(q, *pages, cache_seqlens=others, block_table=table, **options), o)


@pytest.mark.parametrize("options", CACHE_OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_entries_of_a_cache_have_different_numbers_of_queries(rng, options):
    rows, pages, table = caches(rng, np.float32)
    starts, lengths = np.array([0, 1, 4, 6], np.int32), np.array(CACHE_LENGTHS, np.int32)
    # The last row is of no entry.
    q = rng.standard_normal((1, 4, 7, 16)).astype(np.float32)
    options = {"causal": False} | options
    expected = cached64([q[:, :, start:end] for start, end in zip(starts, starts[1:])], rows, **options)
    o64 = np.concatenate([o for o, _ in expected] + [np.zeros((1, 4, 1, 24))], 2)
    for k, v, more in [(*rows, {}), (*pages, {"block_table": table})]:
        close(tw.attention(q, k, v, cache_seqlens=lengths, cu_seqlens_q=starts, **more, **options), o64)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cache_of_8_bits(rng, name):
    dtype = getattr(pytest.importorskip("ml_dtypes"), name)
    q = rng.standard_normal((3, 4, 2, 16)).astype(np.float32)
    k, v = (rng.standard_normal((3, 2, 12, d)).astype(dtype) for d in (16, 24))
    scales, lengths = np.array([[0.3, 0.2], [0.5, 2.0]], np.float32), np.array(CACHE_LENGTHS, np.int32)
    wide = [x.astype(np.float64) * of_heads[:, None, None] for x, of_heads in zip((k, v), scales)]
    o64 = np.concatenate([o for o, _ in cached64([q[i : i + 1] for i in range(3)], wide, True)])
    of_entries = [np.ascontiguousarray(np.broadcast_to(x[:, None], (3, 2, 1))) for x in scales]
    for k_descale, v_descale in (scales, of_entries):
        found = tw.attention(q, k, v, causal=True, cache_seqlens=lengths, k_descale=k_descale, v_descale=v_descale)
        close(found, o64, factor=4)


def test_mistakes_of_a_cache_are_exceptions(rng):
    rows, _, table = caches(rng, np.float32)
    q, lengths = np.ones((3, 4, 2, 16), np.float32), np.array(CACHE_LENGTHS, np.int32)
    starts, bias = np.array([0, 1, 4, 6], np.int32), np.ones((4, 13), np.float32)
    for options, error, message in [
        ({"cache_seqlens": None, "block_table": table}, ValueError, "block_table: expected cache_seqlens beside it"),
        ({"cache_seqlens": lengths[:2]}, tilewright.Error, "`cache_seqlens` expects numbers for each of 3 batch entries, found those of 2"),
        ({"cache_seqlens": lengths.astype(np.int64)}, tilewright.Error, "`cache_seqlens` expects elements of type i32, found i64"),
        ({"cache_seqlens": np.repeat(lengths, 2)[::2]}, tilewright.Error, "`cache_seqlens` expects a contiguous array"),
        ({"cache_seqlens": CACHE_LENGTHS}, TypeError, "cache_seqlens: expected an array"),
        ({"block_table": table[0]}, tilewright.Error, "`block_table` expects 2 dimensions"),
        ({"block_table": table[:2]}, tilewright.Error, "`block_table` expects numbers for each of 3 batch entries, found those of 2"),
        ({"block_table": table.astype(np.int64)}, tilewright.Error, "`block_table` expects elements of type i32, found i64"),
        ({"cu_seqlens_k": starts}, ValueError, "cu_seqlens_k: cannot be combined with cache_seqlens"),
        ({"cu_seqlens_q": starts}, tilewright.Error, "`q` expects one batch entry, .* found 3 batch entries"),
        ({"cu_seqlens_q": starts, "relative_bias": bias}, ValueError, "relative_bias: cannot be combined with cache_seqlens and"),
        ({"k_descale": SLOPES[:2]}, tilewright.Error, "`k_descale` expects v_descale beside it"),
        ({"k_descale": SLOPES[:2], "v_descale": SLOPES[:2]}, tilewright.Error, "`k` expects 8-bit floats"),
        ({"window": -1}, ValueError, "window: expected a number of keys of at least 0, found -1"),
    ]:
        with pytest.raises(error, match=message):
            tw.attention(q, *rows, **{"cache_seqlens": lengths} | options)
    packed = np.ones((1, 4, 7, 16), np.float32)
    for starts, message in [
        ([0, 1, 4], "`cache_seqlens` expects numbers for each of 2 sequences of"),
        ([0], "`cu_seqlens_q` expects the first row of each sequence, and the end of the last, found 1 numbers"),
        ([0, 3, 2, 5], "`cu_seqlens_q` expects numbers from 0 to at most 7 that do not decrease.* found 2 at 2"),
        ([0, 3, 5, 8], "`cu_seqlens_q` expects numbers from 0 to at most 7 .* found 8 at 3"),
    ]:
        with pytest.raises(tilewright.Error, match=message):
            tw.attention(packed, *rows, cache_seqlens=lengths, cu_seqlens_q=np.array(starts, np.int32))
    with pytest.raises(TypeError, match="cache_seqlens"):
        tw.attention_backward(q, *rows, q, q[..., 0], q, cache_seqlens=lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 64), (1, 9000), (40,)])
def test_norms(rng, dtype, shape):
    x, grad = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    w, b = (rng.standard_normal(shape[-1]).astype(dtype) for _ in range(2))
    x64, g64, w64 = (a.astype(np.float64) for a in (x, grad, w))
    leading = tuple(range(len(shape) - 1))
    rstd64 = 1 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6)
    y, rstd = tw.rms_norm_forward(x, w)
    close(y, x64 * rstd64 * w64, dtype)
    close(rstd, rstd64.reshape(-1), dtype)
    hat, gw = x64 * rstd64, g64 * w64
    grad_x, grad_w = tw.rms_norm_backward(x, w, rstd, grad)
    close(grad_x, rstd64 * (gw - hat * (gw * hat).mean(-1, keepdims=True)), dtype)
    close(grad_w, (g64 * hat).sum(leading), dtype, 4)

    mean64 = x64.mean(-1, keepdims=True)
    rstd64 = 1 / np.sqrt(((x64 - mean64) ** 2).mean(-1, keepdims=True) + 1e-5)
    hat = (x64 - mean64) * rstd64
    y, mean, rstd = tw.layer_norm_forward(x, w, b)
    close(y, hat * w64 + b.astype(np.float64), dtype)
    grad_x, grad_w, grad_b = tw.layer_norm_backward(x, w, mean, rstd, grad)
    inner = gw - gw.mean(-1, keepdims=True) - hat * (gw * hat).mean(-1, keepdims=True)
    close(grad_x, rstd64 * inner, dtype)
    close(grad_w, (g64 * hat).sum(leading), dtype, 4)
    close(grad_b, g64.sum(leading), dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_and_cross_entropy(rng, dtype):
    logits = (3 * rng.standard_normal((2, 9, 131))).astype(dtype)
    targets = rng.integers(0, 131, (2, 9))
    targets[0, 3] = -100
    x64 = logits.astype(np.float64)
    lse64 = np.log(np.exp(x64).sum(-1))
    p = np.exp(x64 - lse64[..., None])
    y = tw.softmax(logits)
    close(y, p, dtype)
    grad = rng.standard_normal(p.shape).astype(dtype)
    close(tw.softmax_backward(y, grad), p * (grad - (p * grad).sum(-1, keepdims=True)), dtype)
    keep = targets != -100
    picked = np.take_along_axis(x64, np.where(keep, targets, 0)[..., None], -1)[..., 0]
    loss, lse = tw.cross_entropy_forward(logits, targets)
    close(loss, np.where(keep, lse64 - picked, 0).reshape(-1), dtype)
    grad_loss = rng.standard_normal(18).astype(np.float32)
    onehot = np.eye(131)[np.where(keep, targets, 0)]
    expected = np.where(keep[..., None], p - onehot, 0) * grad_loss.reshape(2, 9, 1)
    close(tw.cross_entropy_backward(logits, targets, lse, grad_loss), expected, dtype)
    # One gradient for all rows, with stride 0.
    same = np.broadcast_to(np.float32(0.5), 18)
    close(tw.cross_entropy_backward(logits, targets, lse, same), np.where(keep[..., None], p - onehot, 0) / 2, dtype)
    for wrong in (131, -1):
        targets[1, 1] = wrong
        with pytest.raises(tilewright.Error, match=f"one of the 131 classes .* ignore_index = -100, found {wrong} in row 10"):
            tw.cross_entropy(logits, targets)
    flat = logits.reshape(18, 131)
    with pytest.raises(TypeError, match="expected an array, found list"):
        tw.softmax([[1.0]])
    with pytest.raises(tilewright.Error, match="strides of at least 0"):
        tw.cross_entropy(flat, np.zeros(18, targets.dtype)[::-1])
    assert tw.cross_entropy(flat[:0], targets.reshape(-1)[:0]).shape == (0,)
    targets[targets == -100] = -1
    assert tw.cross_entropy(logits, targets, ignore_index=-1)[10] == 0


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_rope(rng, layout):
    x = rng.standard_normal((2, 3, 11, 10)).astype(np.float32)
    if layout == "tokens first":
        x = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    theta = 500.0 ** (-2 * np.arange(5) / 10)

    def rotate(positions, halves=False):
        exact = x.astype(np.float64)
        a, b = (exact[..., :5], exact[..., 5:]) if halves else (exact[..., ::2], exact[..., 1::2])
        z = (a + 1j * b) * np.exp(1j * positions[:, None] * theta)
        return np.stack([z.real, z.imag], -2 if halves else -1).reshape(x.shape)

    close(tw.rope(x, base=500.0), rotate(np.arange(11)))
    close(tw.rope(x, base=500.0, halves=True), rotate(np.arange(11), halves=True))
    turned = tw.rope(x, base=500.0, start=1000)
    close(turned, rotate(np.arange(11) + 1000))
    close(tw.rope(turned, base=500.0, start=1000, inverse=True), x.astype(np.float64))
    if layout == "heads first":
        positions = rng.permutation(100)[:11]
        close(tw.rope(x, base=500.0, positions=positions), rotate(positions))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_swiglu(rng, dtype):
    both = (2 * rng.standard_normal((5, 7, 48))).astype(dtype)
    a, b = both[..., :24], both[..., 24:]
    grad = rng.standard_normal(a.shape).astype(dtype)
    a64, b64, g64 = (x.astype(np.float64) for x in (a, b, grad))
    sigmoid = 1 / (1 + np.exp(-a64))
    slope = sigmoid * (1 + a64 * (1 - sigmoid))
    close(tw.silu(a), a64 * sigmoid, dtype)
    close(tw.silu_backward(a, grad), g64 * slope, dtype)
    close(tw.swiglu(a, b), a64 * sigmoid * b64, dtype)
    grad_a, grad_b = tw.swiglu_backward(a, b, grad)
    close(grad_a, g64 * b64 * slope, dtype)
    close(grad_b, g64 * a64 * sigmoid, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul(rng, dtype):
    a, b = rng.standard_normal((37, 50)).astype(dtype), rng.standard_normal((29, 50)).astype(dtype).T
    bias = rng.standard_normal(29).astype(dtype)
    product = a.astype(np.float64) @ b.astype(np.float64)
    close(tw.matmul(a, b), product, dtype)
    close(tw.matmul(a, b, bias), product + bias.astype(np.float64), dtype)
    close(tw.matmul(a, b, activation="relu"), np.maximum(product, 0), dtype)
    with pytest.raises(ValueError, match="activation: expected none, relu, gelu or silu"):
        tw.matmul(a, b, activation="tanh")


def test_adamw(rng):
    p = rng.standard_normal((5, 300)).astype(np.float32)
    p64, m64, v64 = p.astype(np.float64), np.zeros(p.shape), np.zeros(p.shape)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for step in range(1, 6):
        grad = rng.standard_normal(p.shape).astype(np.float32)
        tw.adamw(p, m, v, grad, step, lr=0.1, betas=(0.8, 0.95), weight_decay=0.1)
        m64 = 0.8 * m64 + 0.2 * grad
        v64 = 0.95 * v64 + 0.05 * grad.astype(np.float64) ** 2
        update = m64 / (1 - 0.8**step) / (np.sqrt(v64 / (1 - 0.95**step)) + 1e-8)
        p64 = p64 - 0.1 * (update + 0.1 * p64)
    close(p, p64)
    close(m, m64)
    close(v, v64)


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal((6, 40)).astype(ml_dtypes.bfloat16)
    x64 = x.astype(np.float64)
    e = np.exp(x64)
    y = tw.softmax(x)
    assert y.dtype == x.dtype
    assert np.abs(y.astype(np.float64) - e / e.sum(-1, keepdims=True)).max() < 1e-2


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (4, 0)])
def test_empty_arrays(shape):
    x, w = np.zeros(shape, np.float32), np.ones(shape[-1], np.float32)
    y, rstd = tw.rms_norm_forward(x, w)
    assert y.shape == shape
    grad_x, grad_w = tw.rms_norm_backward(x, w, rstd, x)
    assert grad_x.shape == shape and not grad_w.any()
    assert tw.softmax(x).shape == shape
    assert tw.swiglu(x, x).shape == shape


def test_attention_without_keys_or_queries():
    q, k = np.ones((1, 2, 3, 16), np.float32), np.ones((1, 2, 0, 16), np.float32)
    assert tw.attention(q[:, :, :0], q, q).shape == (1, 2, 0, 16)
    np.testing.assert_array_equal(tw.attention(q, k, k), np.zeros_like(q))


def test_adamw_of_other_shapes_and_gaps_is_an_exception():
    def ones(*shape):
        return np.ones(shape, np.float32)

    def gapped():
        """[2, 2] with strides of 0 and 3 elements: as many elements as its memory, but not one of each."""
        return np.lib.stride_tricks.as_strided(ones(4), (2, 2), (0, 12))

    with pytest.raises(tilewright.Error, match="p's shape"):
        tw.adamw(np.asfortranarray(ones(2, 3)), np.asfortranarray(ones(2, 3)), np.asfortranarray(ones(2, 3)), ones(6), 1)
    with pytest.raises(tilewright.Error, match="without gaps"):
        tw.adamw(gapped(), gapped(), gapped(), gapped(), 1)
