"""What the tests of `tilewright.torch` share: devices, inputs, and references in float64."""

import pytest

torch = pytest.importorskip("torch")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def compare(ours, reference, inputs, dtype):
    """Values and gradients of both functions of the inputs; the reference gets them in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = ours(*inputs), reference(*exact)
    assert found.shape == expected.shape
    grad = torch.randn_like(expected)
    found_grads = torch.autograd.grad(found, inputs, grad.to(found.dtype))
    expected_grads = torch.autograd.grad(expected, exact, grad)
    for a, b in zip((found, *found_grads), (expected, *expected_grads)):
        error = (a.detach().double() - b.detach()).abs().max() / b.detach().abs().max().clamp(min=1) if b.numel() else 0
        assert error < TOLERANCE[dtype], error


def attention64(q, k, v, causal=False, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (scale or q.shape[-1] ** -0.5) * q @ k.transpose(-1, -2)
    if causal:
        n_q, n_k = s.shape[-2:]
        s = s.masked_fill(torch.ones(n_q, n_k, dtype=bool, device=s.device).triu(n_k - n_q + 1), -torch.inf)
    return torch.softmax(s, -1) @ v
