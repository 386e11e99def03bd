"""`attention` of `tilewright.torch` against its definition in float64: values, gradients, modifiers, compilation, mistakes."""

import pytest

torch = pytest.importorskip("torch")

import tilewright  # noqa: E402
import tilewright.torch as tt  # noqa: E402
from torch_reference import DEVICES, DTYPES, attention64, compare, randn, seed  # noqa: E402, F401

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "heads_kv, n_q, n_k, d, scale", [(4, 65, 65, 32, None), (2, 48, 100, 64, 0.2), (1, 7, 129, 128, None)]
)
def test_attention(device, dtype, causal, heads_kv, n_q, n_k, d, scale):
    q = randn(2, 4, n_q, d, device=device, dtype=dtype)
    k, v = (randn(2, heads_kv, n_k, d, device=device, dtype=dtype) for _ in range(2))
    for deterministic in (True, False):
        compare(
            lambda *x: tt.attention(*x, causal=causal, scale=scale, deterministic=deterministic),
            lambda *x: attention64(*x, causal, scale),
            (q, k, v),
            dtype,
        )


def modified64(
    q, k, v, causal, window=None, prefix=None, softcap=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_k=None, sinks=None, relative_bias=None
):
    """Attention with modifiers by its definition; each row sees a key."""
    (n_q, n_k), n_heads = (q.shape[2], k.shape[2]), q.shape[1]
    k, v = (x.repeat_interleave(n_heads // k.shape[1], 1) for x in (k, v))
    s = q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    rows, keys = torch.arange(n_q, device=q.device)[:, None], torch.arange(n_k, device=q.device)[None]
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[:, None, None] * (rows + n_k - n_q - keys).abs()
    if relative_bias is not None:
        s = s + relative_bias[:, rows - keys + n_k - 1]
    starts = [torch.tensor([0, n], device=q.device) for n in (n_q, n_k)]
    if cu_seqlens_q is not None:
        starts = [cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k]
    of_row, of_key = (torch.searchsorted(start[1:].contiguous(), x, right=True) for start, x in zip(starts, (rows, keys)))
    before = rows - starts[0][of_row + 1] - keys + starts[1][of_row + 1]
    seen = (of_row == of_key) & ((before >= 0) | (not causal))
    seen = seen if window is None else seen & (before.abs() <= window)
    seen = seen if prefix is None else seen | (keys < prefix)
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return torch.softmax(s, -1) @ v
    sinks = sinks[None, :, None, None].expand(*s.shape[:-1], 1)
    return torch.softmax(torch.cat([s, sinks], -1), -1)[..., :-1] @ v


def modifiers(device):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0], device=device)
    lengths = torch.tensor([0, 9, 10, 33], dtype=torch.int32, device=device)
    more_keys = torch.tensor([0, 12, 14, 45], dtype=torch.int32, device=device)
    return [
        {"window": 7},
        {"prefix": 20},
        {"softcap": 1.5},
        {"softcap": 30.0},
        {"alibi_slopes": slopes},
        {"window": 9, "softcap": 2.0, "alibi_slopes": slopes},
        {"cu_seqlens_q": lengths},
        {"cu_seqlens_q": lengths, "softcap": 2.0, "alibi_slopes": slopes, "window": 4},
        {"cu_seqlens_q": lengths, "cu_seqlens_k": more_keys},
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_modifiers(device, dtype, causal):
    for options in modifiers(device):
        if "prefix" in options and not causal:
            continue
        n_k = 33 if "cu_seqlens_q" in options and "cu_seqlens_k" not in options else 45
        q = randn(2, 4, 33, 32, device=device, dtype=dtype)
        k, v = (randn(2, 2, n_k, 32, device=device, dtype=dtype) for _ in range(2))
        for deterministic in (True, False):
            compare(
                lambda *x: tt.attention(*x, causal=causal, deterministic=deterministic, **options),
                lambda *x: modified64(*x, causal, **options),
                (q, k, v),
                dtype,
            )


@pytest.mark.parametrize("d, d_v", [(32, 32), (48, 16), (16, 64)])
def test_attention_with_sinks_and_other_values(device, d, d_v):
    q, k = randn(2, 4, 33, d, device=device), randn(2, 2, 45, d, device=device)
    v, sinks = randn(2, 2, 45, d_v, device=device), randn(4, device=device)
    for causal, options in [(False, {}), (True, {"window": 9, "softcap": 2.0})]:
        for deterministic in (True, False):
            compare(
                lambda *x: tt.attention(*x[:3], causal=causal, deterministic=deterministic, sinks=x[3], **options),
                lambda *x: modified64(*x[:3], causal, sinks=x[3], **options),
                (q, k, v, sinks),
                torch.float32,
            )
        compare(
            lambda *x: tt.attention(*x, causal=causal, **options),
            lambda *x: modified64(*x, causal, **options),
            (q, k, v),
            torch.float32,
        )
    # Each token's heads side by side, and sinks without a gradient.
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    found = tt.attention(*turned, causal=True, sinks=sinks)
    expected = modified64(*(x.double() for x in (q, k, v)), True, sinks=sinks.double())
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    assert found.transpose(1, 2).is_contiguous()


def test_attention_with_a_relative_bias(device):
    q, k, v = randn(2, 4, 33, 32, device=device), *(randn(2, 2, 45, 32, device=device) for _ in range(2))
    bias, sinks = randn(4, 33 + 45 - 1, device=device), randn(4, device=device)
    for causal, options in [(False, {}), (True, {}), (True, {"window": 9}), (True, {"prefix": 5})]:
        compare(
            lambda *x: tt.attention(*x[:3], causal=causal, relative_bias=x[3], **options),
            lambda *x: modified64(*x[:3], causal, relative_bias=x[3], **options),
            (q, k, v, bias),
            torch.float32,
        )
    packed = {"cu_seqlens_q": torch.tensor([0, 9, 33], dtype=torch.int32, device=device)}
    compare(
        lambda *x: tt.attention(*x[:3], causal=True, relative_bias=x[3], **packed),
        lambda *x: modified64(*x[:3], True, relative_bias=x[3], **packed),
        (q, *(x.detach()[:, :, :33].requires_grad_() for x in (k, v)), bias.detach()[:, :65].requires_grad_()),
        torch.float32,
    )
    compare(
        lambda *x: tt.attention(*x[:3], relative_bias=x[3], sinks=x[4]),
        lambda *x: modified64(*x[:3], False, relative_bias=x[3], sinks=x[4]),
        (q, k, v, bias, sinks),
        torch.float32,
    )
    # T5: buckets of distances, of which several share a number.
    table, distances = randn(4, 8, device=device).requires_grad_(), torch.arange(-32, 45, device=device)
    buckets = distances.clamp(0, 7)
    f = lambda table: tt.attention(q, k, v, causal=True, relative_bias=table[:, buckets])  # noqa: E731
    expected = modified64(*(x.double() for x in (q, k, v)), True, relative_bias=table.double()[:, buckets])
    grad = randn(*expected.shape, device=device)
    (expected,) = torch.autograd.grad(expected, table, grad.double())
    for one in (f, torch.compile(f, fullgraph=True)):
        (found,) = torch.autograd.grad(one(table), table, grad)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_attention_with_a_cache(device):
    lengths, page = [5, 0, 12], 4
    q = randn(3, 4, 2, 16, device=device)
    pages = [randn(10, page, 2, d, device=device).transpose(1, 2) for d in (16, 24)]
    table = torch.tensor([[7, 2, -1], [1, 2**31 - 1, -9], [4, 9, 0]], dtype=torch.int32, device=device)
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    # The pages of each entry side by side, of which the last rows are not read.
    rows = [x[table.clamp(0, 9).long()].permute(0, 2, 1, 3, 4).flatten(2, 3) for x in pages]
    spoiled = [x.clone() for x in rows]
    for x in spoiled:
        x[0, :, 5:], x[1], x[2, :, 12:] = torch.nan, torch.nan, torch.nan
    for options in ({}, {"causal": True}, {"causal": True, "window": 3, "softcap": 2.0, "sinks": randn(4, device=device)}, {"relative_bias": randn(4, 13, device=device)}):
        for k, v, more in [(*pages, {"block_table": table}), (*spoiled, {})]:
            found = tt.attention(q, k, v, cache_seqlens=cache_seqlens, **more, **options)
            assert found.shape == (3, 4, 2, 24)
            for entry, length in enumerate(lengths):
                k64, v64 = (x[entry : entry + 1, :, :length] for x in rows)
                own = options | {"relative_bias": options["relative_bias"][:, : length + 1]} if "relative_bias" in options else options
                expected = tt.attention(q[entry : entry + 1], k64, v64, **own)
                torch.testing.assert_close(found[entry : entry + 1], expected, rtol=1e-4, atol=1e-5)
    # Entries with different numbers of queries, which are rows of one batch entry; the last row is of no entry.
    counts, starts = [1, 3, 2], torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=device)
    packed = randn(1, 4, 7, 16, device=device)
    for options in ({}, {"causal": True, "window": 3, "softcap": 2.0, "sinks": randn(4, device=device)}, {"alibi_slopes": randn(4, device=device)}):
        for k, v, more in [(*pages, {"block_table": table}), (*spoiled, {})]:
            f = lambda *x: tt.attention(*x, cache_seqlens=cache_seqlens, cu_seqlens_q=starts, **more, **options)  # noqa: B023, E731
            found = f(packed, k, v)
            expected = [tt.attention(packed[:, :, starts[i] : starts[i] + counts[i]], *(x[i : i + 1, :, : lengths[i]] for x in rows), **options) for i in range(3)]
            expected = torch.cat([*expected, torch.zeros(1, 4, 1, 24, device=device)], 2)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.compile(f, fullgraph=True)(packed, *spoiled), found)
    compiled = torch.compile(lambda *x: tt.attention(*x[:3], causal=True, cache_seqlens=x[3], block_table=x[4]), fullgraph=True)
    arguments = (q, *pages, cache_seqlens, table)
    torch.testing.assert_close(compiled(*arguments), tt.attention(q, *pages, causal=True, cache_seqlens=cache_seqlens, block_table=table))
    for options, error, message in [
        ({"block_table": table}, ValueError, "block_table: expected cache_seqlens beside it"),
        ({"cache_seqlens": cache_seqlens[:2]}, tilewright.Error, "`cache_seqlens` expects numbers for each of 3 batch entries, found those of 2"),
        ({"cache_seqlens": cache_seqlens.long()}, tilewright.Error, "`cache_seqlens` expects elements of type int32, found int64: pass cache_seqlens.int"),
        ({"cache_seqlens": cache_seqlens, "block_table": table[0]}, tilewright.Error, "`block_table`"),
        ({"cache_seqlens": cache_seqlens, "cu_seqlens_k": starts}, ValueError, "cu_seqlens_k: cannot be combined with cache_seqlens"),
        ({"cache_seqlens": cache_seqlens, "cu_seqlens_q": starts}, tilewright.Error, "`q` expects one batch entry, .* found 3 batch entries"),
        ({"cache_seqlens": cache_seqlens, "cu_seqlens_q": starts.long()}, tilewright.Error, "`cu_seqlens_q` expects elements of type int32"),
        ({"cache_seqlens": cache_seqlens, "block_table": table[:2]}, tilewright.Error, "`block_table` expects numbers for each of 3"),
        ({"cache_seqlens": [1, 2, 3]}, TypeError, "cache_seqlens"),
        ({"cache_seqlens": cache_seqlens, "sinks": [1.0] * 4}, TypeError, "sinks"),
    ]:
        with pytest.raises(error, match=message):
            tt.attention(q, *rows, **options)
    with pytest.raises(ValueError, match="has no gradient"), torch.enable_grad():
        tt.attention(q.clone().requires_grad_(), *rows, cache_seqlens=cache_seqlens)
    sinks = torch.zeros(q.shape[1], device=device, requires_grad=True)
    with pytest.raises(ValueError, match="^sinks: attention of a cache has no gradient.*sinks.detach"), torch.enable_grad():
        tt.attention(q.detach(), *rows, cache_seqlens=cache_seqlens, sinks=sinks)
    for starts, message in [([0, 1, 4], "`cache_seqlens` expects numbers for each of 2 sequences of"), ([0], "`cu_seqlens_q` expects the first row of each sequence")]:
        with pytest.raises(tilewright.Error, match=message):
            tt.attention(packed, *rows, cache_seqlens=cache_seqlens, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device))
    if device == "cpu":
        with pytest.raises(tilewright.Error, match="`cu_seqlens_q` expects numbers from 0 to at most 7 that do not decrease.* found 2 at 2"):
            decreasing = torch.tensor([0, 3, 2, 5], dtype=torch.int32)
            tt.attention(packed, *rows, cache_seqlens=cache_seqlens, cu_seqlens_q=decreasing)


def test_a_sink_of_nan_is_seen(device):
    q, sinks = randn(1, 2, 5, 16, device=device), torch.tensor([0.5, torch.nan], device=device)
    sinks.requires_grad_()
    o = tt.attention(q, q, q, sinks=sinks)
    assert o[:, 0].isfinite().all() and o[:, 1].isnan().all()
    o.sum().backward()
    assert sinks.grad[0].isfinite() and sinks.grad[1].isnan()


def test_lengths_of_modifiers_may_be_symbolic(device):
    q = randn(1, 2, 8, 16, device=device)
    window = torch.compile(lambda q, n: tt.attention(q, q, q, causal=True, window=n), fullgraph=True, dynamic=True, backend="aot_eager")
    prefix = torch.compile(lambda q, n: tt.attention(q, q, q, causal=True, prefix=n), fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (3, 4, 5):
        torch.testing.assert_close(window(q, n), tt.attention(q, q, q, causal=True, window=n))
        torch.testing.assert_close(prefix(q, n), tt.attention(q, q, q, causal=True, prefix=n))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_attention_with_a_cache_of_8_bits(device, dtype):
    q = randn(2, 4, 3, 32, device=device)
    k, v = ((randn(2, 2, 40, 32, device=device) * 4).to(dtype) for _ in range(2))
    descale = [torch.tensor(x, device=device) for x in ([0.3, 0.2], [0.5, 2.0])]
    lengths = torch.tensor([40, 7], dtype=torch.int32, device=device)
    found = tt.attention(q, k, v, causal=True, cache_seqlens=lengths, k_descale=descale[0], v_descale=descale[1])
    wide = [x.float() * s[:, None, None] for x, s in zip((k, v), descale)]
    torch.testing.assert_close(found, tt.attention(q, *wide, causal=True, cache_seqlens=lengths), rtol=1e-4, atol=1e-5)
    table, scales = torch.tensor([[1], [0]], dtype=torch.int32, device=device), {"k_descale": descale[0], "v_descale": descale[1]}
    decode = lambda q: tt.attention(q, k, v, cache_seqlens=lengths, block_table=table, **scales)  # noqa: E731
    short, exact = decode(q.bfloat16()), tt.attention(q.bfloat16().float(), *(x.flip(0) for x in wide), cache_seqlens=lengths)
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.float(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(torch.compile(decode, fullgraph=True)(q.bfloat16()), short)
    with torch.autocast(device, torch.bfloat16):
        torch.testing.assert_close(decode(q), short)
    for options, message in [
        ({"k_descale": descale[0]}, "expected both or none"),
        ({"q_descale": descale[0], "k_descale": descale[0], "v_descale": descale[1]}, "expected q of 8-bit floats"),
    ]:
        with pytest.raises(ValueError, match=message):
            tt.attention(q, k, v, **{"cache_seqlens": lengths} | options)
    with pytest.raises(tilewright.Error, match="`v_descale` expects scales of 2 batch entries × 2 heads × 1 blocks of rows, found 2 × 3 × 1"):
        tt.attention(q, k, v, cache_seqlens=lengths, k_descale=descale[0], v_descale=torch.ones(3, device=device))
    blocks = [s[None, :, None].expand(2, 2, 1).contiguous() for s in descale]
    again = tt.attention(q, k, v, causal=True, cache_seqlens=lengths, k_descale=blocks[0], v_descale=blocks[1])
    torch.testing.assert_close(again, found)
    with pytest.raises(ValueError, match="has no gradient"), torch.enable_grad():
        learned = descale[1].clone().requires_grad_()
        tt.attention(q, k, v, cache_seqlens=lengths, k_descale=descale[0], v_descale=learned)
    with pytest.raises(tilewright.Error, match="`k` expects elements of type f32, as for q; beside a cache also 8-bit floats, found f8e"):
        tt.attention(q, k, v, window=3)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_attention_of_8_bits(device, dtype):
    q, k, v = randn(2, 4, 150, 32, device=device), randn(2, 2, 300, 32, device=device), randn(2, 2, 300, 32, device=device)
    k[:, :, :128] *= 0.1
    v[:, :, 256:] *= 20
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (tt.quantize(x, dtype) for x in (q, k, v))
    assert q8.dtype == dtype and q_scale.shape == (2, 4, 2) and k_scale.shape == (2, 2, 3)
    wide = [
        x.float() * s.repeat_interleave(128, dim=2)[:, :, : x.shape[2], None]
        for x, s in ((q8, q_scale), (k8, k_scale), (v8, v_scale))
    ]
    for x, rounded in zip((q, k, v), wide):
        assert (x - rounded).norm() / x.norm() < (0.04 if dtype == torch.float8_e4m3fn else 0.08)
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    for options in ({}, {"causal": True}, {"causal": True, "window": 40}):
        found = tt.attention(q8, k8, v8, **scales, **options)
        exact = tt.attention(*wide, **options)
        assert found.dtype == torch.bfloat16 and found.shape == q.shape
        assert (found.float() - exact).norm() / exact.norm() < 0.08, options
    attend = lambda q: tt.attention(q, k8, v8, **scales)  # noqa: E731
    torch.testing.assert_close(torch.compile(attend, fullgraph=True)(q8), attend(q8))
    rows_first = q8.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(attend(rows_first), attend(q8))
    assert tt.quantize(rows_first.bfloat16())[0].stride() == rows_first.stride()
    per_head = {"q_descale": q_scale[:, :, :1].contiguous(), "k_descale": k_scale[0, :, 0], "v_descale": v_scale[0, :, 0]}
    wide_scales = [x[:, :, :1].contiguous() for x in (k_scale[:1].expand(2, 2, 3), v_scale[:1].expand(2, 2, 3))]
    again = tt.attention(q8, k8, v8, q_descale=per_head["q_descale"], k_descale=wide_scales[0], v_descale=wide_scales[1])
    torch.testing.assert_close(tt.attention(q8, k8, v8, **per_head), again)
    by_vmap = torch.func.vmap(tt.quantize)(torch.stack([k, v]))
    for found, expected in zip(by_vmap, (torch.stack([k8, v8]), torch.stack([k_scale, v_scale]))):
        if dtype == torch.float8_e4m3fn:
            torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: tt.quantize(x)[1], (q,), (q,))
    plain = tt.attention(q8, k8, v8)
    assert plain.dtype == torch.bfloat16 and not torch.equal(plain, attend(q8))
    for call, error, message in [
        (lambda: tt.attention(q8, k8, v8, q_descale=q_scale), ValueError, "k_descale and v_descale beside it"),
        (lambda: tt.attention(q8, k, v), tilewright.Error, "`k` expects elements of type f8e"),
        (lambda: tt.attention(q8, k8, v8, **{**scales, "q_descale": q_scale[:1]}), tilewright.Error, "`q_descale` expects scales of 2 batch entries"),
        (lambda: tt.attention(q, k, v, k_descale=k_scale, v_descale=v_scale), ValueError, "expected k and v of 8-bit floats"),
        (lambda: tt.attention(q8, k8, v8, k_descale=k_scale[0], v_descale=v_scale[0]), tilewright.Error, r"`k_descale` expects the shape \[heads\]"),
        (lambda: tt.quantize(q, torch.float16), ValueError, "expected dtype float8_e4m3fn or float8_e5m2"),
        (lambda: tt.quantize(q8), tilewright.Error, "`x` expects elements of type float32"),
        (lambda: tt.quantize(q[0]), ValueError, "expected x .batch, heads, rows, d."),
    ]:
        with pytest.raises(error, match=message):
            call()
    sinks = torch.zeros(4, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="^sinks: attention of 8-bit floats has no gradient"), torch.enable_grad():
        tt.attention(q8, k8, v8, sinks=sinks, **scales)


def test_mistakes_of_modifiers_are_exceptions(device):
    q, k = randn(1, 4, 33, 16, device=device), randn(1, 4, 40, 16, device=device)
    slopes = torch.ones(4, device=device)
    lengths = torch.tensor([0, 9, 33], dtype=torch.int32, device=device)
    for options, error, message in [
        ({"window": -1}, ValueError, "window: expected a number of keys of at least 0, found -1"),
        ({"window": 2.5}, TypeError, "window: expected a number of keys, or None, found float"),
        ({"window": (3, 0)}, TypeError, "found tuple"),
        ({"prefix": 3}, ValueError, "prefix: expected causal=True"),
        ({"prefix": 3, "causal": True, "cu_seqlens_q": lengths}, ValueError, "prefix: cannot be combined"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a number from 1e-30"),
        ({"softcap": 1e-300}, ValueError, "softcap: expected a number from 1e-30"),
        ({"window": torch.tensor(3.5)}, TypeError, "window: expected a number of keys, or None, found Tensor"),
        ({"window": 2**63}, ValueError, "window: expected a number of keys"),
        ({"softcap": 1.1e4}, tilewright.Error, "`softcap` expects a number from .* to 10000 .*leave it out.*, found 11000"),
        ({"alibi_slopes": slopes[:3]}, tilewright.Error, "`alibi_slopes` expects a slope for each of 4 heads, found 3"),
        ({"alibi_slopes": slopes.double()}, tilewright.Error, "`alibi_slopes` expects elements of type float32, found float64: pass alibi_slopes.float\\(\\)"),
        ({"alibi_slopes": slopes.clone().requires_grad_()}, ValueError, "alibi_slopes: has no gradient"),
        ({"relative_bias": slopes}, tilewright.Error, "`relative_bias` expects the shape"),
        ({"relative_bias": torch.ones(4, 65, device=device).double()}, tilewright.Error, "`relative_bias` expects elements of type float32, found float64"),
        ({"relative_bias": torch.ones(4, 65, device=device), "alibi_slopes": slopes}, ValueError, "relative_bias: cannot be combined"),
        ({"sinks": slopes[:3]}, tilewright.Error, "`sinks` expects a score for each of 4 heads, found 3 scores"),
        ({"sinks": slopes.half()}, tilewright.Error, "`sinks` expects elements of type float32, found float16: pass sinks.float"),
        ({"cu_seqlens_k": lengths}, ValueError, "cu_seqlens_k: expected cu_seqlens_q beside it"),
        ({"cu_seqlens_q": lengths.long()}, tilewright.Error, "`cu_seqlens_q` expects elements of type int32, found int64"),
        ({"cu_seqlens_q": lengths, "cu_seqlens_k": lengths[:2]}, tilewright.Error, "`cu_seqlens_k` expects as many"),
    ]:
        with pytest.raises(error, match=message):
            tt.attention(q, q, q, **options)
    with pytest.raises(ValueError, match="cu_seqlens_k: is missing: q has 33 rows and k 40"):
        tt.attention(q, k, k, cu_seqlens_q=lengths)
    with pytest.raises(ValueError, match="alibi_slopes: expected as many keys as rows of packed sequences, found 33 rows and 40 keys"):
        tt.attention(q, k, k, alibi_slopes=slopes, cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    with torch.no_grad():
        tt.attention(q, q, q, alibi_slopes=slopes.clone().requires_grad_())
    decreasing = torch.tensor([0, 9, 5], dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(tilewright.Error, match="do not decrease, beginning with 0, found 5 at 2"):
            tt.attention(q, q, q, cu_seqlens_q=decreasing)
    else:
        # Without a check, and without an access outside of the tensors.
        assert tt.attention(q, q, q, cu_seqlens_q=decreasing).shape == q.shape
        with pytest.raises(tilewright.Error, match="on different devices"):
            tt.attention(q, q, q, alibi_slopes=slopes.cpu())


def modified_block(x, slopes, lengths):
    """Attention layers with modifiers; the packed sequences are those of both layers."""
    q = x.view(2, -1, 4, 16).transpose(1, 2)
    q = tt.attention(q, q, q, causal=True, cu_seqlens_q=lengths, window=5, softcap=2.0, alibi_slopes=slopes)
    q = tt.attention(q, q, q, causal=True, cu_seqlens_q=lengths)
    return tt.attention(q, q, q, causal=True, prefix=4).square().sum()


def modified_arguments(device):
    x, slopes = randn(2, 24, 64, device=device), torch.tensor([0.5, 0.25, 0.125, 0.0], device=device)
    return x, slopes, torch.tensor([0, 10, 24], dtype=torch.int32, device=device)


def test_modifiers_in_a_compiled_graph(device):
    x, *others = modified_arguments(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    loss = torch.compile(modified_block, fullgraph=True, backend=backend)(x, *others)
    expected = modified_block(x, *others)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (found,), (wanted,) = torch.autograd.grad(loss, x), torch.autograd.grad(expected, x)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    with pytest.raises(Exception, match="window: expected a number of keys of at least 0"):
        torch.compile(lambda q: tt.attention(q, q, q, window=-2), fullgraph=True, backend="aot_eager")(x[None])


def test_modifiers_in_a_cuda_graph(device):
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    x, slopes, lengths = modified_arguments(device)

    def step():
        loss = modified_block(x, slopes, lengths)
        return loss, *torch.autograd.grad(loss, x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # Other lengths, which the graph reads from memory.
    lengths[1] = 17
    graph.replay()
    for a, b in zip(captured, step()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_of_a_packed_projection(device):
    """Heads are views of [batch, n, 3 · heads · d]; the result's transpose is a view, too."""
    x = randn(2, 40, 3 * 4 * 16, device=device)

    def heads(x):
        return [y.view(2, 40, 4, 16).transpose(1, 2) for y in x.chunk(3, -1)]

    compare(
        lambda x: tt.attention(*heads(x), causal=True).transpose(1, 2).reshape(2, 40, 64),
        lambda x: attention64(*heads(x), True).transpose(1, 2).reshape(2, 40, 64),
        (x,),
        torch.float32,
    )
    q = torch.randn(2, 40, 4, 16, device=device).transpose(1, 2)
    assert tt.attention(q, q, q).transpose(1, 2).is_contiguous()


def test_arrays_of_modifiers_have_any_strides(device):
    q = torch.randn(1, 4, 33, 16, device=device)
    lengths = torch.tensor([0, 0, 9, 9, 33], dtype=torch.int32, device=device)[::2]
    for options in ({"alibi_slopes": torch.full((1,), 0.5, device=device).expand(4)}, {"cu_seqlens_q": lengths}):
        dense = {name: array.contiguous() for name, array in options.items()}
        assert torch.equal(tt.attention(q, q, q, **options), tt.attention(q, q, q, **dense))


def test_layouts_of_other_libraries(device):
    """The calls of the table in docs/python.md, in place of flash-attn's."""
    qkv = torch.randn(2, 33, 3, 4, 16, device=device)
    q, k, v = qkv.double().permute(2, 0, 3, 1, 4)
    found = tt.attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2)
    torch.testing.assert_close(found.double(), attention64(q, k, v).transpose(1, 2), rtol=1e-4, atol=1e-4)
    lengths = torch.tensor([0, 9, 33], dtype=torch.int32, device=device)
    found = tt.attention(*(x.transpose(0, 1)[None] for x in qkv[0].unbind(1)), cu_seqlens_q=lengths, causal=True)
    found = found[0].transpose(0, 1)
    for start, end in ((0, 9), (9, 33)):
        expected = attention64(*(x[:1, :, start:end] for x in (q, k, v)), True)[0].transpose(0, 1)
        torch.testing.assert_close(found[start:end].double(), expected, rtol=1e-4, atol=1e-4)


def test_expanded_gradients_and_inputs(device):
    q = randn(1, 2, 33, 16, device=device)
    k = randn(1, 1, 33, 16, device=device)
    expected = torch.autograd.grad(attention64(q.double(), k.double(), k.double()).sum(), (q, k))
    found = torch.autograd.grad(tt.attention(q, k.expand(1, 2, 33, 16), k.expand(1, 2, 33, 16)).sum(), (q, k))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b.float(), atol=1e-4, rtol=1e-4)
