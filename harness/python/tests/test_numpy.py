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


def attention64(q, k, v, causal, scale):
    """o, lse and a function from the gradient of o to those of q, k, v."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    s = scale * q @ k.swapaxes(-1, -2)
    n_q, n_k = s.shape[-2:]
    if causal:
        s = np.where(np.arange(n_k)[None] <= np.arange(n_q)[:, None] + n_k - n_q, s, -np.inf)
    top = s.max(-1, keepdims=True)
    lse = np.log(np.exp(s - top).sum(-1)) + top[..., 0]
    p = np.exp(s - lse[..., None])
    o = p @ v

    def gradients(g):
        dv = p.swapaxes(-1, -2) @ g
        ds = p * (g @ v.swapaxes(-1, -2) - (g * o).sum(-1, keepdims=True))
        dq, dk = scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q
        folded = [x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv)]
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


def test_attention_of_strided_arrays(rng):
    # [batch, n, heads, d] in memory, and every second key.
    qkv = rng.standard_normal((2, 30, 3, 4, 16)).astype(np.float32)
    q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
    o64, _, _ = attention64(q, k, v, True, 0.25)
    close(tw.attention(q, k, v, causal=True), o64)
    o64, _, _ = attention64(q, k[:, :, ::2], v[:, :, ::2], False, 0.25)
    close(tw.attention(q, k[:, :, ::2], v[:, :, ::2]), o64)


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
    # A target that is no column is visible in the loss.
    targets[1, 1] = 131
    np.testing.assert_array_equal(np.isnan(tw.cross_entropy(logits, targets)), np.arange(18) == 10)


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
