"""The other ops of `tilewright.torch` against PyTorch's in float64: values, gradients, strides, compilation, mistakes."""

import itertools
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import tilewright  # noqa: E402
import tilewright.torch as tt  # noqa: E402
from torch_reference import DEVICES, DTYPES, TOLERANCE, attention64, compare, randn, seed  # noqa: E402, F401

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 256), (3, 10000)])
def test_norms(device, dtype, shape):
    x = randn(*shape, device=device, dtype=dtype)
    w, b = (randn(shape[-1], device=device, dtype=dtype) for _ in range(2))
    compare(tt.rms_norm, lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w, (x, w), dtype)
    compare(tt.layer_norm, lambda x, w, b: F.layer_norm(x, shape[-1:], w, b), (x, w, b), dtype)


def test_norms_of_strided_tensors_and_other_weight_types(device):
    base = randn(3, 4, 5, 32, device=device)
    w = randn(16, device=device)
    for view in (lambda x: x[..., ::2], lambda x: x.transpose(1, 2)[..., :16], lambda x: x[:, 1, :, :16]):
        compare(
            lambda x, w: tt.rms_norm(view(x), w),
            lambda x, w: view(x) * (view(x).square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w,
            (base, w),
            torch.float32,
        )
    y = tt.rms_norm(base[..., :16].bfloat16(), w)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert w.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_cross_entropy(device, dtype, reduction, index):
    logits = randn(3, 7, 131, device=device, dtype=dtype)
    target = torch.randint(131, (3, 7), device=device)
    target[1, 2:5] = -100
    compare(
        lambda x: tt.cross_entropy(x, target.to(index), reduction=reduction),
        lambda x: F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction=reduction).view(
            target.shape if reduction == "none" else ()
        ),
        (logits,),
        dtype,
    )
    with pytest.raises(ValueError, match=r"target: expected the shape \[3, 7\], found \[7, 3\]"):
        tt.cross_entropy(logits, target.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    """Types of results and of gradients are those of PyTorch's ops, in eager mode and in compiled graphs."""
    x, w, b = randn(4, 16, device=device), randn(16, 16, device=device), randn(16, device=device)
    heads, target = (lambda x: x.view(1, 2, 2, 16)), torch.tensor([1, 2, 3, 4], device=device)
    pairs = [
        (tt.linear, F.linear, (x, w, b)),
        (tt.linear, F.linear, (x, w)),
        (tt.linear, F.linear, (x.detach().to(dtype).requires_grad_(), w)),
        (tt.matmul, torch.matmul, (x, w)),
        (lambda x: tt.attention(*[heads(x)] * 3), lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3), (x,)),
        (
            lambda x: tt.attention(heads(x), heads(x).to(dtype), heads(x), window=9),
            lambda x: F.scaled_dot_product_attention(heads(x), heads(x).to(dtype), heads(x)),
            (x,),
        ),
        (lambda x, w: tt.linear_cross_entropy(x, w, target), lambda x, w: F.cross_entropy(x @ w.t(), target), (x, w)),
        (lambda x: tt.cross_entropy(x, target), lambda x: F.cross_entropy(x, target), (x.detach().to(dtype).requires_grad_(),)),
        (tt.softmax, lambda x: torch.softmax(x, -1), (x.detach().to(dtype).requires_grad_(),)),
        (tt.layer_norm, lambda x, w, b: F.layer_norm(x, (16,), w, b), (x.detach().to(dtype).requires_grad_(), b, b)),
        (tt.silu, F.silu, (x.detach().to(dtype).requires_grad_(),)),
    ]
    for ours, theirs, inputs in pairs:
        for compiled in (False, True):
            torch.compiler.reset()
            op = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
            with torch.autocast(device, dtype):
                found, expected = op(*inputs), theirs(*inputs)
            assert found.dtype == expected.dtype
            grad = torch.randn_like(found)
            torch.testing.assert_close(found, expected, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
            for a, b in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad)):
                assert (a - b).abs().max() <= 4 * TOLERANCE[dtype] * b.abs().max().clamp(min=1)
    with torch.autocast(device, dtype), torch.autocast(device, enabled=False):
        assert tt.matmul(x, w).dtype == torch.float32
    with torch.autocast(device, dtype), pytest.raises(tilewright.Error, match="found float64"):
        tt.linear(x.double(), w.double())


def test_targets_that_are_no_classes(device):
    logits, weight = randn(4, 16, device=device), randn(16, 16, device=device)
    for wrong in (16, -1, -101):
        target = torch.tensor([1, -100, wrong, 3], device=device)
        for op in (tt.cross_entropy, lambda x, t, **o: tt.linear_cross_entropy(x, weight, t, **o)):
            if device == "cpu":
                with pytest.raises(tilewright.Error, match=f"ignore_index = -100, found {wrong} in row 2"):
                    op(logits, target)
                with pytest.raises(IndexError):
                    F.cross_entropy(logits, target)
            else:
                loss = op(logits, target, reduction="none")
                assert loss.isnan().tolist() == [False, False, True, False]
                (grad,) = torch.autograd.grad(loss.nansum(), logits)
                assert grad[:2].isfinite().all() and grad[3].isfinite().all()
            # Any number may be the one that is ignored.
            loss = op(logits[2:], target[2:], ignore_index=wrong, reduction="none")
            assert loss[0] == 0 and loss[1] > 0
            (grad,) = torch.autograd.grad(loss.sum(), logits)
            assert not grad[:3].any() and grad[3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy(device, dtype, reduction, monkeypatch):
    monkeypatch.setattr(tilewright._losses, "_CHUNK_BYTES", 8 * 56 * 4)
    x, weight = randn(3, 7, 32, device=device, dtype=dtype), randn(50, 32, device=device, dtype=dtype)
    target = torch.randint(50, (3, 7), device=device)
    target[1, 2:5] = -100
    compare(
        lambda x, w: tt.linear_cross_entropy(x, w, target, reduction=reduction),
        lambda x, w: F.cross_entropy((x @ w.t()).flatten(0, 1), target.flatten(), reduction=reduction).view(
            target.shape if reduction == "none" else ()
        ),
        (x, weight),
        dtype,
    )


def test_linear_cross_entropy_of_no_targets_and_of_one_variable(device):
    x, weight = randn(5, 32, device=device), randn(50, 32, device=device)
    for rows in (5, 0):
        target = torch.full((rows,), -100, device=device)
        loss = tt.linear_cross_entropy(x[:rows], weight, target)
        assert loss.isnan()
        for grad in torch.autograd.grad(loss, (x, weight)):
            assert not grad.any()
    target = torch.randint(50, (5,), device=device)
    expected = torch.autograd.grad(F.cross_entropy(x @ weight.t(), target, reduction="sum"), (x, weight))
    for at, arguments in enumerate([(x, weight.detach()), (x.detach(), weight)]):
        loss = tt.linear_cross_entropy(*arguments, target, reduction="sum")
        # Twice: the saved gradient is not changed.
        for factor in (1, 3):
            (found,) = torch.autograd.grad(factor * loss, arguments[at], retain_graph=True)
            torch.testing.assert_close(found, factor * expected[at], rtol=1e-4, atol=1e-5)


def test_linear_cross_entropy_has_no_second_derivative(device):
    x, weight = randn(5, 32, device=device), randn(50, 32, device=device)
    target = torch.randint(50, (5,), device=device)
    for variable in (x, weight):
        (grad,) = torch.autograd.grad(tt.linear_cross_entropy(x, weight, target), variable, create_graph=True)
        # Not zeros.
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(grad.square().sum(), variable)


def test_linear_cross_entropy_sums_the_gradient_of_the_weight_in_float32(device, monkeypatch):
    """Many chunks: a sum in bfloat16 would lose them, once it is large beside one of them."""
    monkeypatch.setattr(tilewright._losses, "_CHUNK_BYTES", 4 * 8 * 2)
    x = torch.rand(2048, 16, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(8, 16, device=device) / 8).bfloat16().requires_grad_()
    target = torch.zeros(2048, dtype=torch.int64, device=device)
    tt.linear_cross_entropy(x, weight, target, reduction="sum").backward()
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    F.cross_entropy(x64 @ weight64.t(), target, reduction="sum").backward()
    error = (weight.grad.double() - weight64.grad).abs().max() / weight64.grad.abs().max()
    assert error < 2 ** -8, error


def plain_swiglu(x):
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_swiglu_and_softmax(device, dtype):
    both = randn(3, 5, 96, device=device, dtype=dtype)
    compare(tt.swiglu, lambda x: F.silu(x[..., :48]) * x[..., 48:], (both,), dtype)
    compare(lambda x: tt.swiglu(x.transpose(0, 1)), lambda x: plain_swiglu(x.transpose(0, 1)), (both,), dtype)
    compare(lambda x: tt.swiglu(*x.chunk(2, -1)), lambda x: F.silu(x[..., :48]) * x[..., 48:], (both,), dtype)
    compare(tt.silu, F.silu, (both,), dtype)
    compare(tt.softmax, lambda x: torch.softmax(x, -1), (both,), dtype)


def test_halves_of_views_with_an_offset(device):
    whole = torch.randn(40, 24, device=device)
    for view in (lambda x: x[5:8, 8:24], lambda x: x[39:, 8:], lambda x: x[::3, 2:10]):
        x = whole.clone().requires_grad_()
        exact = whole.double().requires_grad_()
        found, expected = tt.swiglu(view(x)), plain_swiglu(view(exact))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        grad = torch.randn_like(expected)
        (found_grad,) = torch.autograd.grad(found, x, grad.float())
        (expected_grad,) = torch.autograd.grad(expected, exact, grad)
        torch.testing.assert_close(found_grad.double(), expected_grad, rtol=1e-4, atol=1e-5)


def test_tensors_in_place_of_numbers_are_errors(device):
    x, number = torch.randn(2, 2, 4, 8, device=device), torch.ones((), device=device, requires_grad=True)
    for call in (
        lambda: tt.attention(x, x, x, scale=number),
        lambda: tt.attention(x, x, x, softcap=number),
        lambda: tt.rms_norm(x, x[0, 0, 0], eps=number),
        lambda: tt.layer_norm(x, x[0, 0, 0], eps=number),
        lambda: tt.rope(x, base=number),
    ):
        with pytest.raises(TypeError, match="expected a number"):
            call()


def test_tensors_without_memory_beside_others_are_errors(device):
    x = torch.randn(4, 8, device=device)
    for call in (
        lambda: tt.rms_norm(x, torch.ones(8, device="meta")),
        lambda: tt.matmul(x, torch.ones(8, 4, device="meta")),
        lambda: tt.swiglu(x, torch.ones(4, 8, device="meta")),
    ):
        with pytest.raises(ValueError, match="different devices"):
            call()


def test_empty_tensors_have_no_loss(device):
    logits = torch.zeros(0, 16, device=device, requires_grad=True)
    loss = tt.cross_entropy(logits, torch.zeros(0, dtype=torch.int64, device=device), reduction="sum")
    loss.backward()
    assert loss.item() == 0 and logits.grad.shape == (0, 16)


def test_memory_that_is_short(device):
    """The exception is that of PyTorch's own ops, so that what catches it catches ours."""
    x = torch.zeros(1, device=device).expand(1 << 30, 1 << 30)
    with pytest.raises(torch.OutOfMemoryError if x.is_cuda else MemoryError, match="out of memory"):
        tt.silu(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens_first", [False, True])
def test_rope(device, dtype, tokens_first):
    x = randn(2, 3, 17, 16, device=device, dtype=dtype)
    if tokens_first:
        x = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()

    def reference(positions, halves=False):
        theta = 10000.0 ** (-torch.arange(0, 16, 2, device=device, dtype=torch.float64) / 16)
        angle = positions.double()[:, None] * theta

        def rotate(x):
            a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
            turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
            return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)

        return rotate

    compare(tt.rope, reference(torch.arange(17, device=device)), (x,), dtype)
    compare(lambda x: tt.rope(x, halves=True), reference(torch.arange(17, device=device), halves=True), (x,), dtype)
    compare(lambda x: tt.rope(x, start=90), reference(torch.arange(90, 107, device=device)), (x,), dtype)
    packed = randn(2, 17, 3, 3, 16, device=device, dtype=dtype)
    for view in (lambda x: x[:, :, 1].transpose(1, 2), lambda x: x[:, :, 1].transpose(1, 2)[:, :2, :13]):
        compare(
            lambda x: tt.rope(view(x)),
            lambda x: reference(torch.arange(view(x).shape[2], device=device))(view(x)),
            (packed,),
            dtype,
        )
    positions = torch.randperm(50, device=device)[:17]
    compare(lambda x: tt.rope(x, positions=positions), reference(positions), (x,), dtype)
    compare(
        lambda x: tt.rope(x[:, :, 1].transpose(1, 2), positions=positions),
        lambda x: reference(positions)(x[:, :, 1].transpose(1, 2)),
        (packed,),
        dtype,
    )
    # Tokens first, and other orders of dimensions.
    arange = torch.arange(17, device=device)
    for order in itertools.permutations(range(4)):
        shape = (2, 3, 17, 16)
        back = [order.index(axis) for axis in range(4)]
        tokens = randn(*(shape[axis] for axis in order), device=device, dtype=dtype)
        compare(lambda x: tt.rope(x.permute(back)), lambda x: reference(arange)(x.permute(back)), (tokens,), dtype)
        compare(
            lambda x: tt.rope(x.permute(back), positions=positions),
            lambda x: reference(positions)(x.permute(back)),
            (tokens,),
            dtype,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_and_linear(device, dtype):
    a, b = randn(33, 48, device=device, dtype=dtype), randn(20, 48, device=device, dtype=dtype)
    compare(lambda a, b: tt.matmul(a, b.t()), lambda a, b: a @ b.t(), (a, b), dtype)
    compare(lambda a, b: tt.matmul(a.t(), b.t()[:33]), lambda a, b: a.t() @ b.t()[:33], (a, b), dtype)
    x, bias = randn(2, 5, 48, device=device, dtype=dtype), randn(20, device=device, dtype=dtype)
    compare(tt.linear, F.linear, (x, b, bias), dtype)
    compare(tt.linear, F.linear, (x, b), dtype)
    # Without columns, the product is 0.
    empty = [x[..., :0].detach().requires_grad_(), b[:, :0].detach().requires_grad_()]
    compare(tt.linear, F.linear, (*empty, bias), dtype)
    compare(lambda a, b: tt.matmul(a, b.t()), lambda a, b: a @ b.t(), (empty[0].flatten(0, 1), empty[1]), dtype)
    target = torch.zeros(2, 5, dtype=torch.int64, device=device)
    compare(
        lambda x, w: tt.linear_cross_entropy(x, w, target),
        lambda x, w: F.cross_entropy((x @ w.t()).flatten(0, 1), target.flatten()),
        empty,
        dtype,
    )


def test_registrations(device):
    q = randn(1, 2, 9, 16, device=device)
    tokens_first = randn(2, 9, 3, 2, 16, device=device)[:, :, 1].transpose(1, 2)
    x, w = randn(4, 16, device=device), randn(16, device=device)
    target = torch.tensor([1, 2, 3, 4], device=device)
    ops = torch.ops.tilewright
    frequencies = torch.ones(8, device=device, dtype=torch.float64)
    lengths, slopes = torch.tensor([0, 4, 9], device=device, dtype=torch.int32), torch.ones(2, device=device)
    ranges = ops.document_ranges(lengths, lengths, 9, 9, True, 3)
    for op, arguments in [
        (ops.attention, (q, q, q, True, 0.25, 0, True)),
        (ops.attention, (tokens_first, tokens_first, tokens_first, True, 0.25, 0, True)),
        (ops.modified_attention, (q, q, q, None, None, None, None, False, 0.25, 0, True, 3, -1, 1.5)),
        (ops.modified_attention, (q, q, q[..., :8], None, None, slopes, None, False, 0.25, 0, True, -1, -1, 0.0)),
        (ops.modified_attention, (tokens_first, tokens_first, tokens_first, slopes, None, None, ranges, True, 0.25, 0, True, -1, -1, 0.0)),
        (ops.modified_attention, (q, q, q, None, randn(2, 17, device=device), slopes, None, False, 0.25, 0, True, 3, -1, 0.0)),
        (ops.inference_attention, (*[q.detach()] * 3, None, None, None, None, lengths[1:2], *[None] * 5, True, 0.25, 0, -1, -1, 0.0)),
        (ops.document_ranges, (lengths, lengths, 9, 9, True, 3)),
        (ops.rms_norm, (x, w, 1e-6)),
        (ops.layer_norm, (x, w, w, 1e-6)),
        (ops.cross_entropy, (x, target, -100)),
        (ops.swiglu, (x, x)),
        (ops.silu, (x,)),
        (ops.rope, (q, frequencies, 0, None, False, False)),
        (ops.rope, (tokens_first, frequencies, 3, None, False, True)),
        (ops.rope, (randn(9, 2, 3, 16, device=device).permute(1, 2, 0, 3), frequencies, 3, None, False, True)),
        (ops.rope, (tokens_first[..., ::2], frequencies[:4], 3, None, False, False)),
        (ops.rope, (tokens_first, frequencies, 0, torch.arange(9, device=device), False, False)),
        (ops.softmax, (x,)),
        (ops.linear_cross_entropy, (x, randn(7, 16, device=device), target, -100, "ieee")),
        (ops.linear_cross_entropy_sum, (x, randn(7, 16, device=device), target, -100, "ieee", True, True)),
        (ops.linear_cross_entropy_sum, (x, randn(7, 16, device=device).detach(), target, -100, "ieee", True, False)),
        (ops.matmul, (x, w.view(16, 1), None, 1)),
        (ops.matmul, (x, w.view(16, 1), torch.ones(1, device=device), 0)),
        (ops.rms_norm_forward, (x.detach().t(), w[:4].detach(), 1e-6)),
        (ops.column_sum, (x.detach(),)),
    ]:
        torch.library.opcheck(op.default, arguments)


def block(x, w, target):
    h = tt.rms_norm(x, w)
    q = h.view(2, -1, 4, 16).transpose(1, 2)
    o = tt.attention(tt.rope(q), tt.rope(q), q, causal=True).transpose(1, 2).reshape(x.shape)
    h = tt.layer_norm(tt.swiglu(*tt.linear(x + o, w.outer(w).repeat(2, 1)).chunk(2, -1)), w, w)
    return tt.cross_entropy(h, target)


def test_compile_of_a_full_graph(device):
    x, w = randn(2, 24, 64, device=device), randn(64, device=device)
    target = torch.randint(64, (2, 24), device=device)
    try:
        compiled = torch.compile(block, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        loss = compiled(x, w, target)
    except Exception as error:  # a PyTorch without a compiler for this machine
        if "not supported" in str(error):
            pytest.skip(str(error))
        raise
    expected = block(x, w, target)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w))):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_of_compiled_graphs(device, dtype):
    """Row-wise ops are formulas there; their results are those of the kernels."""
    positions = torch.randperm(50, device=device)[:17]
    heads = randn(2, 17, 3, 16, device=device, dtype=dtype)
    x = randn(2, 5, 96, device=device, dtype=dtype)
    w, b = (randn(96, device=device) for _ in range(2))
    ops = [
        (tt.rms_norm, (x, w)),
        (tt.layer_norm, (x, w, b)),
        (tt.layer_norm, (x, w)),
        (tt.softmax, (x,)),
        (tt.silu, (x,)),
        (tt.swiglu, (x,)),
        (lambda x: tt.swiglu(*x.split((48, 48), -1)), (x,)),
        (lambda x: tt.rope(x.transpose(1, 2)), (heads,)),
        (lambda x: tt.rope(x.transpose(1, 2), start=90, base=500.0), (heads,)),
        (lambda x: tt.rope(x.transpose(1, 2), positions=positions, halves=True), (heads,)),
    ]
    for op, inputs in ops:
        torch.compiler.reset()
        compiled = torch.compile(op, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        found, expected = compiled(*inputs), op(*inputs)
        assert found.dtype == expected.dtype
        grad = torch.randn_like(expected)
        found = found, *torch.autograd.grad(found, inputs, grad)
        expected = expected, *torch.autograd.grad(expected, inputs, grad)
        for a, b in zip(found, expected):
            scale = b.detach().double().abs().max().clamp(min=1)
            assert (a.double() - b.double()).abs().max() / scale < TOLERANCE[dtype]


def test_mistakes_are_the_same_in_compiled_graphs(device):
    """Where the ops are formulas, which broadcast and take any type."""
    x, w, q = randn(4, 16, device=device), randn(16, device=device), randn(1, 2, 8, 16, device=device)
    positions = torch.arange(8, device=device)
    mistakes = [
        (lambda: tt.rms_norm(x, w[:1]), r"`weight` expects the shape \[16\], found \[1\]"),
        (lambda: tt.rms_norm(x, x), r"`weight` expects the shape \[16\], found \[4, 16\]"),
        (lambda: tt.rms_norm(w[0], w[:1]), "`x` expects at least one dimension"),
        (lambda: tt.rms_norm(x.double(), w), "`x` expects elements of type .*, found float64"),
        (lambda: tt.rms_norm(x.long(), w), "`x` expects elements of type .*, found int64"),
        (lambda: tt.rms_norm(x, w.to(torch.complex64)), "`weight` expects a floating-point type, found complex64"),
        (lambda: tt.rms_norm(x, w, -1.0), "eps: expected a number of at least 0, found -1.0"),
        (lambda: tt.layer_norm(x, w, w[:1]), r"`bias` expects the shape \[16\], found \[1\]"),
        (lambda: tt.layer_norm(x, x), r"`weight` expects the shape \[16\]"),
        (lambda: tt.layer_norm(x.double(), w), "found float64"),
        (lambda: tt.softmax(x.double()), "found float64"),
        (lambda: tt.softmax(w[0]), "`x` expects at least one dimension"),
        (lambda: tt.silu(x.to(torch.complex64)), "found complex64"),
        (lambda: tt.silu(w[0]), "`x` expects at least one dimension"),
        (lambda: tt.swiglu(x[:, :5]), r"`a` expects an even number of columns, found the shape \[4, 5\]"),
        (lambda: tt.swiglu(x, x[:1]), r"`b` expects what `a` is, \[4, 16\] of float32, found \[1, 16\] of float32"),
        (lambda: tt.swiglu(x, x.half()), r"`b` expects what `a` is, .*, found \[4, 16\] of float16"),
        (lambda: tt.swiglu(x.double()), "found float64"),
        (lambda: tt.rope(q.double()), "found float64"),
        (lambda: tt.rope(q[..., :5]), "with an even d"),
        (lambda: tt.rope(q, start=-3), "start: expected a position of at least 0, found -3"),
        (lambda: tt.rope(q, start=1.5), "start: expected a position of at least 0, found 1.5"),
        (lambda: tt.rope(q, positions=positions[:4]), r"`positions` expects the shape \[8\], found \[4\]"),
        (lambda: tt.rope(q, positions=positions.float()), "`positions` expects elements of type int64 or int32, found float32"),
        (lambda: tt.matmul(x, x), r"`b` expects the shape \[16, n\] and elements of type float32"),
        (lambda: tt.linear(x, w), r"`weight` expects the shape \[n, 16\]"),
        (lambda: tt.linear(x, x, w), r"`bias` expects the shape \[4\]"),
        (lambda: tt.linear(x, x.half()), r"`weight` expects .* of type float32, as `x` has, found \[4, 16\] of float16"),
        (lambda: tt.cross_entropy(w[0], positions[0]), "`logits` expects at least one dimension"),
        (lambda: tt.cross_entropy(x, positions), r"target: expected the shape \[4\], found \[8\]"),
        (lambda: tt.linear_cross_entropy(x, q[0, 0, :, :9], positions[:4]), "`weight` expects d = 16, as in `x`"),
    ]
    for call, message in mistakes:
        with pytest.raises((tilewright.Error, ValueError), match=message):
            call()
        torch.compiler.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(call, fullgraph=True, backend="aot_eager")()


def test_a_graph_takes_the_tables_of_rope_from_an_op(device):
    def model(x):
        return tt.rope(tt.rope(x)) + tt.rope(x)

    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=backend))(torch.randn(1, 2, 5, 8, device=device))
    assert "tilewright.rope_tables.default" in targets
    assert not any("cos" in target or "sin" in target for target in targets)


def test_fake_tensors_are_not_kept(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tt.rope(torch.randn(1, 2, 5, 6, device=device))
    y = tt.rope(torch.randn(1, 2, 5, 6, device=device))
    assert type(y) is torch.Tensor


def test_kernels_run_no_python_code_of_the_package(device):
    """PyTorch's dispatcher calls the kernels: nothing of Python runs below an op."""
    import sys

    x, w = torch.randn(4, 16, device=device), torch.ones(16, device=device)
    calls = []
    torch.ops.tilewright.rms_norm_forward(x, w, 1e-6)
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        torch.ops.tilewright.rms_norm_forward(x, w, 1e-6)
    finally:
        sys.setprofile(None)
    assert not [name for name in calls if "tilewright" in name], calls


def test_cuda_graph(device):
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    x, w = randn(2, 24, 64, device=device), randn(64, device=device)
    target = torch.randint(64, (2, 24), device=device)

    def step():
        loss = block(x, w, target)
        return loss, *torch.autograd.grad(loss, (x, w))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        for a, b in zip(captured, step()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_streams(device):
    if device == "cpu":
        pytest.skip("streams need a GPU")
    x, w = torch.randn(4096, 4096, device=device), torch.ones(4096, device=device)
    tt.rms_norm(x, w)
    expected = tt.rms_norm(2 * x, w)
    for _ in range(5):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            found = tt.rms_norm(x * 2, w)
        stream.synchronize()
        torch.testing.assert_close(found, expected)
    assert torch.cuda.current_device() == 0


def test_streams_that_interfaces_name(device):
    """A launch waits for the streams of all arrays: without that, the slow one would overwrite the result."""
    if device == "cpu":
        pytest.skip("streams need a GPU")

    class Named:
        def __init__(self, tensor, stream):
            self.tensor = tensor
            interface = {**tensor.__cuda_array_interface__, "version": 3, "stream": stream.cuda_stream}
            self.__cuda_array_interface__ = interface

    x = torch.randn(256, 60, device=device)
    y = torch.empty_like(x)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(3):  # the first launch compiles
        torch.cuda.synchronize()
        with torch.cuda.stream(second):
            torch.cuda._sleep(50_000_000)
            y.fill_(7.0)
        tilewright._native.softmax_forward(Named(x, first), Named(y, second))
        torch.cuda.synchronize()
        torch.testing.assert_close(y, torch.softmax(x, -1))


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
def test_empty_tensors(device, shape):
    x, w = randn(*shape, device=device), randn(16, device=device)
    for y in (tt.rms_norm(x, w), tt.layer_norm(x, w, w), tt.silu(x), tt.swiglu(x, x)):
        assert y.shape == shape
    tt.rms_norm(x, w).sum().backward()
    assert x.grad.shape == shape and not w.grad.any()
    q = randn(2, 2, 0, 16, device=device)
    tt.attention(q, q, q, causal=True).sum().backward()
    assert tt.linear(x, w.view(1, 16)).shape == (*shape[:-1], 1)


def test_mistakes_are_exceptions(device):
    q = randn(1, 4, 10, 16, device=device)
    with pytest.raises(tilewright.Error, match="elements of type f32, found f16"):
        tt.attention(q, q.half(), q)
    with pytest.raises(tilewright.Error, match="expects the shape"):
        tt.attention(q, q[..., :8], q)
    with pytest.raises(tilewright.Error, match="divides the number of heads of q"):
        tt.attention(q, q[:, :3], q[:, :3])
    with pytest.raises(ValueError, match=r"expected q \[batch, heads, rows, d\]"):
        tt.attention(q[0], q[0], q[0])
    with pytest.raises(tilewright.Error, match="elements of type f32, bf16 or f16, found f64"):
        tt.attention(q.double(), q.double(), q.double())
    with pytest.raises(ValueError, match="precision: expected ieee, tf32 or tf32x3"):
        tt.attention(q, q, q, precision="fast")
    with pytest.raises(tilewright.Error, match="scale"):
        tt.attention(q, q, q, scale=-1.0)
    for base in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="base: expected a positive finite number"):
            tt.rope(q, base=base)
    for call in (
        lambda text: tt.attention(q, q, q, precision=text),
        lambda text: tt.cross_entropy(q, q[..., 0].long(), reduction=text),
    ):
        with pytest.raises(ValueError) as caught:
            call("x" * (1 << 20))
        assert len(str(caught.value)) < 1000
    if device == "cuda":
        with pytest.raises(tilewright.Error, match="different devices: `q` is on GPU 0, `k` on the CPU"):
            tt.attention(q, q.cpu(), q)
    freed = torch.randn(4, 16, device=device)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="x: its memory was freed"):
        tt.silu(freed)
    with pytest.raises(TypeError, match="q: kernels have no element type for this tensor"):
        tt.attention(q.to(torch.complex64), q, q)
    # PyTorch's dispatcher makes RuntimeError of the kernels' exceptions, with the same message.
    with pytest.raises(RuntimeError, match="elements of type f32, bf16 or f16, found i64"):
        torch.ops.tilewright.silu_forward(torch.zeros(4, 16, dtype=torch.int64, device=device))
    # Another error does not get an old message.
    with pytest.raises(RuntimeError, match="missing value for argument"):
        torch.ops.tilewright.silu_forward()


def test_other_objects_are_errors(device):
    """Not attributes that are missing."""
    x, q = torch.randn(4, 16, device=device), torch.randn(1, 2, 8, 16, device=device)
    target = torch.arange(4, device=device)
    for call, name, found in [
        (lambda: tt.silu(None), "x", "NoneType"),
        (lambda: tt.softmax([1.0]), "x", "list"),
        (lambda: tt.rms_norm(x, 1.0), "weight", "float"),
        (lambda: tt.layer_norm(x, x[0], "b"), "bias", "str"),
        (lambda: tt.swiglu(x, x.tolist()), "b", "list"),
        (lambda: tt.cross_entropy(x, [1, 2, 3, 4]), "target", "list"),
        (lambda: tt.linear_cross_entropy(x, None, target), "weight", "NoneType"),
        (lambda: tt.linear(x, x, 0), "bias", "int"),
        (lambda: tt.matmul(x, None), "b", "NoneType"),
        (lambda: tt.rope(q, positions=list(range(8))), "positions", "list"),
        (lambda: tt.attention(q, q, None), "v", "NoneType"),
        (lambda: tt.attention(q, q, q, alibi_slopes=[1.0, 2.0]), "alibi_slopes", "list"),
        (lambda: tt.attention(q, q, q, cu_seqlens_q=[0, 8]), "cu_seqlens_q", "list"),
    ]:
        with pytest.raises(TypeError, match=f"`{name}` expects a torch.Tensor, found {found}"):
            call()
    for call in (lambda: tt.rope(q, base="1"), lambda: tt.attention(q, q, q, scale="1"), lambda: tt.rms_norm(x, x[0], "1")):
        with pytest.raises(TypeError, match="expected a number, found str"):
            call()
    assert tt.rope(q[..., :0]).shape == (1, 2, 8, 0)
    torch.testing.assert_close(tt.rope(q, start=target.cpu().numpy()[3]), tt.rope(q, start=3))


def test_pending_negation(device):
    """The imaginary part of a conjugate."""
    x = torch.randn(4, 16, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(tt.silu(x), F.silu(x))
    with pytest.raises(ValueError, match="x: its negation is pending: call resolve_neg"):
        tilewright.launch("cast", x, torch.empty(4, 16, device=device), 16, 1, 16, 1, 4, 16, grid=1)


def test_kernels_by_name_take_tensors(device):
    x, y = torch.randn(100, 60, device=device), torch.empty(100, 60, device=device)
    version = y._version
    tilewright.launch("softmax_rows", x, y, 60, 1, 60, 1, 100, 60, grid=25, rows_tile=4, d_tile=64)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    assert y._version == version + 1
    with pytest.raises(tilewright.Error, match="out of bounds"):
        tilewright.launch("softmax_rows", x, y, 60, 1, 60, 1, 101, 60, grid=26, rows_tile=4, d_tile=64)


def test_compiled_code_with_tensor_maps(device, tmp_path):
    """Code that was compiled ahead of time, whose tensor maps each launch encodes."""
    dims, strides = ("m", "n", "k"), ("a_stride_m", "b_stride_k", "c_stride_m")
    tilewright.compile(
        "matmul",
        "sm_90a",
        types="bf16",
        multiple_of=dict.fromkeys(dims + strides, 16),
        equal_to=dict.fromkeys(("a_stride_k", "b_stride_n", "c_stride_n"), 1),
        options={"num_warps": 8, "num_stages": 4, "tma": True},
        m_tile=128,
        n_tile=128,
        k_tile=64,
    ).save(tmp_path)
    code = tilewright.load(tmp_path)
    assert len(code.manifest["tensor_maps"]) == 2
    if device == "cpu" or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this code needs a Hopper GPU")
    m, n, k = 256, 384, 192
    a, b = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    c = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    code(a, b, a, a, c, 1, k, 1, m, n, k, k, 1, n, 1, n, 1, grid=6)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=2e-2, atol=0.3)
    with pytest.raises(tilewright.Error, match="out of bounds"):
        code(a, b, a, a, c, 1, k, 1, m + 16, n, k, k, 1, n, 1, n, 1, grid=9)


def test_tensors_by_dlpack(device):
    """For objects that have nothing but DLPack."""

    class Dlpack:
        def __init__(self, tensor):
            self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__

    x, y = torch.randn(100, 60, device=device), torch.empty(100, 60, device=device)
    tilewright._native.softmax_forward(Dlpack(x), Dlpack(y))
    if device == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(y, torch.softmax(x, -1))


def test_many_threads(device):
    errors = []

    def work(n):
        try:
            for _ in range(5):
                q = torch.randn(1, 2, n, 16, device=device)
                torch.testing.assert_close(tt.attention(q, q, q), attention64(q, q, q), atol=1e-4, rtol=1e-4)
                with pytest.raises(tilewright.Error):
                    tt.attention(q, q.double(), q)
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(20, 28)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def plain_block(x, w, target):
    """`block`, by PyTorch's ops."""
    norm = lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w  # noqa: E731
    q = norm(x).view(2, -1, 4, 16).transpose(1, 2)
    angle = torch.arange(q.shape[2], device=x.device)[:, None] * 10000.0 ** (
        -torch.arange(0, 16, 2, device=x.device) / 16
    )
    a, b = q[..., ::2], q[..., 1::2]
    turned = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)
    o = F.scaled_dot_product_attention(turned, turned, q, is_causal=True).transpose(1, 2).reshape(x.shape)
    a, b = F.linear(x + o, w.outer(w).repeat(2, 1)).chunk(2, -1)
    return F.cross_entropy(F.layer_norm(F.silu(a) * b, (64,), w, w).flatten(0, 1), target.flatten())


def test_a_model_trains_as_with_other_ops(device):
    """The losses of training steps, against those of PyTorch's ops and optimizer in float64."""
    x, target = torch.randn(2, 24, 64, device=device), torch.randint(64, (2, 24), device=device)
    w = (1 + torch.randn(64, device=device) / 10).requires_grad_()
    exact = w.detach().double().requires_grad_()
    optimizer, reference = tt.AdamW([w], lr=0.01), torch.optim.AdamW([exact], lr=0.01)
    for _ in range(20):
        loss, expected = block(x, w, target), plain_block(x.double(), exact, target)
        torch.testing.assert_close(loss.double(), expected, rtol=2e-4, atol=1e-4)
        for opt, value in ((optimizer, loss), (reference, expected)):
            opt.zero_grad()
            value.backward()
            opt.step()
