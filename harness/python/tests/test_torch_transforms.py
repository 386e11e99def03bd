"""Derivatives of `tilewright.torch` beyond one backward pass, and `vmap`: right values, or errors that say what is missing."""

import warnings

import pytest

torch = pytest.importorskip("torch")

import tilewright.torch as tt  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vmap  # noqa: E402
from torch_reference import DEVICES, randn, seed  # noqa: E402, F401

pytestmark = pytest.mark.parametrize("device", DEVICES)


def functions(device):
    """Functions of x [4, 16], which contain each op, with each of its arguments at least once depending on x."""
    w, classes = torch.randn(16, device=device), torch.randn(5, 16, device=device)
    target = torch.tensor([1, 2, 3, 4], device=device)
    lengths = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    slopes = torch.ones(1, device=device)
    attention = lambda x, **options: tt.attention(*[x.view(1, 1, 4, 16)] * 3, causal=True, **options)  # noqa: E731
    return {
        "rms_norm": lambda x: tt.rms_norm(x, w),
        "rms_norm of a vector": lambda x: tt.rms_norm(x[0], x[1]),
        "layer_norm": lambda x: tt.layer_norm(x, w, w),
        "layer_norm with its weight": lambda x: tt.layer_norm(x, x[1], x[2]),
        "softmax": tt.softmax,
        "silu": tt.silu,
        "silu of a vector": lambda x: tt.silu(x[0]),
        "swiglu": tt.swiglu,
        "swiglu of two": lambda x: tt.swiglu(x, x.flip(0)),
        "cross_entropy": lambda x: tt.cross_entropy(x, target),
        "cross_entropy of a vector": lambda x: tt.cross_entropy(x[0], target[0]),
        "linear_cross_entropy": lambda x: tt.linear_cross_entropy(x, classes, target),
        "rope": lambda x: tt.rope(x.view(1, 1, 4, 16)),
        "rope at positions": lambda x: tt.rope(x.view(1, 1, 4, 16), positions=target),
        "matmul": lambda x: tt.matmul(x, x.t()),
        "linear": lambda x: tt.linear(x, classes, classes[:, 0]),
        "attention": attention,
        "window": lambda x: attention(x, window=2),
        "sinks": lambda x: attention(x, sinks=slopes),
        "sinks with their gradient": lambda x: attention(x, sinks=x[0, :1]),
        "relative bias with its gradient": lambda x: attention(x, relative_bias=x.view(1, -1)[:, :7]),
        "packed sequences": lambda x: attention(x, cu_seqlens_q=lengths, alibi_slopes=slopes),
    }


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_vmap_is_a_loop(device):
    """Of values, gradients inside and outside, Jacobians, and vmap in vmap: as calls for each entry."""
    entries = torch.randn(3, 4, 16, device=device)
    for name, f in functions(device).items():
        loss = lambda x: f(x).square().sum()  # noqa: E731
        values, grads = (torch.stack([g(x) for x in entries]) for g in (f, grad(loss)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch's slow fallback
            close(vmap(f)(entries), values)
            close(vmap(f, in_dims=2)(entries.movedim(0, 2)), values)
            close(vmap(vmap(f))(entries.expand(2, 3, 4, 16)), values.expand(2, *values.shape))
            close(vmap(grad(loss))(entries), grads)
            close(grad(lambda x: vmap(loss)(x).sum())(entries), grads)
            leaf = entries.clone().requires_grad_()
            close(torch.autograd.grad(vmap(loss)(leaf).sum(), leaf)[0], grads)
            expected = torch.autograd.functional.jacobian(f, entries[0])
            close(jacrev(f)(entries[0]), expected)
        if name not in ("window", "sinks", "sinks with their gradient", "relative bias with its gradient", "packed sequences"):  # Their lists of tensors have no fallback in PyTorch's older vmap.
            close(torch.autograd.functional.jacobian(f, entries[0], vectorize=True), expected)


def test_vmap_over_other_arguments(device):
    x, w = torch.randn(4, 16, device=device), torch.randn(3, 16, device=device)
    close(vmap(tt.rms_norm, in_dims=(None, 0))(x, w), torch.stack([tt.rms_norm(x, one) for one in w]))
    q, k = torch.randn(2, 1, 2, 8, 16, device=device), torch.randn(1, 1, 9, 16, device=device)
    close(
        vmap(lambda q: tt.attention(q, k, k), out_dims=2)(q), torch.stack([tt.attention(one, k, k) for one in q], 2)
    )
    lengths = torch.tensor([[5], [9], [0]], dtype=torch.int32, device=device)
    cached = lambda lengths: tt.attention(q[0], k, k, cache_seqlens=lengths)  # noqa: E731
    close(vmap(cached)(lengths), torch.stack([cached(one) for one in lengths]))
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: tt.attention(q, k, k, cache_seqlens=lengths[0]), (q[0],), (q[0],))
    slopes = torch.rand(3, 2, device=device)
    close(
        vmap(lambda s: tt.attention(q[0], k, k, alibi_slopes=s))(slopes),
        torch.stack([tt.attention(q[0], k, k, alibi_slopes=s) for s in slopes]),
    )
    with pytest.raises(ValueError, match="silu: vmap over a dimension of size 0"):
        vmap(tt.silu)(x[:0])


def test_forward_mode_derivatives_are_errors(device):
    """Not zeros."""
    x = torch.randn(4, 16, device=device)
    for f in functions(device).values():

        def dual(x=x):
            with forward_ad.dual_level():
                f(forward_ad.make_dual(x, torch.ones_like(x)))

        for call in (
            dual,
            lambda: dual(x.clone().requires_grad_()),
            lambda: jvp(f, (x,), (x,)),
            lambda: jacfwd(f)(x),
            lambda: hessian(lambda x: f(x).square().sum())(x),
        ):
            with pytest.raises(RuntimeError, match="has no forward-mode derivative .*: use reverse mode"):
                call()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="scaled_mm has no gradient"):
        one = torch.ones((), device=device)
        a = torch.ones(16, 16, dtype=torch.int8, device=device)
        tt.scaled_mm(a, a, forward_ad.make_dual(one, one), one)
    # Ops on other tensors are not concerned.
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(forward_ad.make_dual(x, x) + tt.silu(x)).tangent, x)


def test_second_derivatives_are_errors(device):
    """Not zeros. `matmul` and `rope` have them."""
    x = randn(4, 16, device=device)
    for name, f in functions(device).items():
        loss = lambda x: f(x).square().sum()  # noqa: E731
        if name in ("matmul", "rope", "rope at positions"):
            (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            close(grad(lambda x: grad(loss)(x).square().sum())(x.detach()), second)
            continue
        if name == "linear":  # which is linear in x
            continue
        (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
        with pytest.raises(RuntimeError, match="has no gradient: a second derivative is not defined: compute it with"):
            first.sum().backward()
        with pytest.raises(RuntimeError, match="a second derivative is not defined"):
            grad(lambda x: grad(loss)(x).sum())(x.detach())


def test_matmul_has_second_derivatives(device):
    a, b = randn(5, 4, device=device), randn(4, 3, device=device)
    (first,) = torch.autograd.grad(tt.matmul(a, b).square().sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), b)
    a64, b64 = a.detach().double(), b.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad((2 * a64 @ b64 @ b64.t()).square().sum(), b64)
    torch.testing.assert_close(second.double(), expected, rtol=1e-4, atol=1e-3)


def test_torch_func(device):
    x, w = torch.randn(4, 16, device=device), torch.randn(16, device=device)
    found = grad(lambda x: tt.rms_norm(x, w).square().sum())(x)
    x64 = x.double().requires_grad_()
    y = x64 * (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
    (expected,) = torch.autograd.grad(y.square().sum(), x64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    close(functionalize(tt.rms_norm)(x, w), tt.rms_norm(x, w))


def test_gradients_of_a_batched_and_a_shared_operand(device):
    x, weight = randn(3, 4, 16, device=device).detach(), randn(9, 16, device=device).detach()
    target = torch.tensor([1, 2, 0, 8], device=device)

    def total(op):
        return lambda x, weight: torch.vmap(lambda x: op(x, weight))(x).sum()

    found = torch.func.grad(total(lambda x, w: tt.linear_cross_entropy(x, w, target)), argnums=(0, 1))(x, weight)
    plain = total(lambda x, w: torch.nn.functional.cross_entropy(x @ w.t(), target))
    for a, b in zip(found, torch.func.grad(plain, argnums=(0, 1))(x, weight)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
