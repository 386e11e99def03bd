"""The adapters of CS336, assignment 2: what the course's tests of attention check, and what runs inside."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "cs336"))

import adapters  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
ADAPTERS = [
    adapters.get_flashattention_autograd_function_pytorch,
    adapters.get_flashattention_autograd_function_triton,
]


class Ops(TorchDispatchMode):
    """Records the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(device, adapter, is_causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 128, 64, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(4, 128, 64, device=device)
    s = q.double() @ k.double().transpose(-1, -2) / 8
    if is_causal:
        s = s.masked_fill(torch.ones(128, 128, dtype=bool, device=device).triu(1), -torch.inf)
    expected = torch.softmax(s, -1) @ v.double()
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad.double())
    with Ops() as ops:
        o = adapter().apply(q, k, v, is_causal)
        saved = [x for x in o.grad_fn.saved_tensors if x.shape == (4, 128)]
        grads = torch.autograd.grad(o, (q, k, v), grad)
    assert len(saved) == 1
    torch.testing.assert_close(saved[0].double(), torch.logsumexp(s, -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-4)
    for found, wanted in zip(grads, expected_grads):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="a second derivative is not defined"):
        torch.autograd.grad(adapter().apply(q, k, v, is_causal).sum(), q, create_graph=True)
    # The kernels are ours; PyTorch only allocates and views.
    assert {name for name in ops.names if name.startswith("tilewright")} == {
        "tilewright.attention_forward.default",
        "tilewright.attention_backward.default",
    }
    computing = ("mm", "attention", "softmax", "exp", "mul", "einsum", "sum", "dot")
    assert not [name for name in ops.names if name.startswith("aten") and any(word in name for word in computing)]


def test_a_causal_mask_of_other_shapes_is_an_error():
    q, k = torch.zeros(1, 4, 16), torch.zeros(1, 6, 16)
    with pytest.raises(ValueError, match="as many keys as queries: found 6 and 4"):
        adapters.FlashAttention.apply(q, k, k, True)
    assert adapters.FlashAttention.apply(q, k, k, False).shape == q.shape
