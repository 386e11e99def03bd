"""The optimizer `AdamW` of `tilewright.torch` against PyTorch's: steps, states, mistakes."""

import copy

import pytest

torch = pytest.importorskip("torch")

import tilewright.torch as tt  # noqa: E402
from torch_reference import DEVICES, DTYPES, TOLERANCE, randn, seed  # noqa: E402, F401

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw(device, dtype):
    ours = [
        randn(7, 33, device=device, dtype=dtype),
        randn(5, device=device, dtype=dtype),
        randn(3, device=device, dtype=dtype),
    ]
    exact = [p.detach().double().requires_grad_() for p in ours]
    options = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}
    optimizer, reference = tt.AdamW(ours, **options), torch.optim.AdamW(exact, **options)
    for step in range(6):
        for p, q in zip(ours[:2], exact[:2]):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
        optimizer.step()
        reference.step()
        if step == 2:
            # The state survives its own form.
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = tt.AdamW(ours, **options)
            optimizer.load_state_dict(state)
    for p, q in zip(ours, exact):
        state = optimizer.state.get(p, {})
        master = state.get("master", p).detach().double()
        torch.testing.assert_close(master, q.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(p.detach().double(), master, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert all(state[name].dtype == torch.float32 for name in ("exp_avg", "exp_avg_sq") if state)


def test_adamw_of_other_layouts_and_closures(device):
    p = torch.randn(6, 4, device=device).t().requires_grad_()
    q = p.detach().double().requires_grad_()
    optimizer, reference = tt.AdamW([p]), torch.optim.AdamW([q])
    grad = torch.randn(4, 6, device=device)

    def closure():
        p.grad, q.grad = grad.clone(), grad.double()
        return 3.5

    assert optimizer.step(closure) == 3.5
    reference.step()
    torch.testing.assert_close(p.detach().double(), q.detach(), rtol=1e-5, atol=1e-6)
    # The backward pass notices that a saved tensor has changed.
    loss = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_adamw_refuses_what_torch_refuses(device):
    p = torch.zeros(3, device=device, requires_grad=True)
    nan = float("nan")
    for bad in (
        {"lr": -1.0},
        {"lr": nan},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"weight_decay": nan},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"betas": (0.9, nan)},
        {"betas": (0.9, 0.99, 0.999)},
    ):
        for params, options in (([p], bad), ([{"params": [p], **bad}], {})):
            with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected"):
                tt.AdamW(params, **options)
        if len(bad.get("betas", "12")) == 2:
            with pytest.raises(ValueError):
                torch.optim.AdamW([p], **bad)
    for dtype in (torch.float64, torch.complex64):
        with pytest.raises(TypeError, match=f"expected parameters of float32, bfloat16 or float16, found {dtype}"):
            tt.AdamW([p.detach().to(dtype).requires_grad_()])
    # A number as a tensor, as for torch's.
    p.grad = torch.ones_like(p)
    tt.AdamW([p], lr=torch.tensor(0.5)).step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adamw_takes_values_that_others_write(device, dtype):
    """Not those of its master weights from before."""
    model = torch.nn.Linear(4, 4, bias=False, device=device, dtype=dtype)
    loaded = {"weight": torch.randn(4, 4, device=device).to(dtype)}
    writes = [
        lambda optimizer: model.load_state_dict(loaded),
        lambda optimizer: model.weight.detach().copy_(loaded["weight"]),
        lambda optimizer: setattr(model.weight, "data", loaded["weight"].clone()),
        lambda optimizer: (optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())), model.load_state_dict(loaded)),
        lambda optimizer: (model.load_state_dict(loaded), optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))),
    ]
    for write in writes:
        optimizer = tt.AdamW(model.parameters(), lr=2.0 ** -4, weight_decay=0.0)
        for _ in range(2):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        write(optimizer)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        expected = (loaded["weight"].double() - 2.0 ** -4).to(dtype)
        torch.testing.assert_close(model.weight.detach(), expected)
    # What nobody else writes keeps its precision: many steps that are smaller than half a unit in the last place.
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = tt.AdamW(model.parameters(), lr=2.0 ** -13, weight_decay=0.0)
    for step in range(64):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        if step == 20:
            with torch.no_grad():
                model.weight[0] = 0.25
        if step == 40:
            optimizer = copy.deepcopy(optimizer)
            (parameter,) = optimizer.param_groups[0]["params"]
            model.weight = parameter
    torch.testing.assert_close(model.weight[1:].detach().float(), torch.full((3, 4), 1 - 2.0 ** -7, device=device))
    assert (model.weight[0] < 0.25).all()


def test_adamw_continues_from_a_state_of_torch(device):
    """Which shares its step numbers, tensors, with the optimizer that goes on."""
    p = torch.ones(4, device=device, requires_grad=True)
    theirs = torch.optim.AdamW([p], lr=0.1)
    for _ in range(2):
        p.grad = torch.randn_like(p)
        theirs.step()
    q = p.detach().clone().requires_grad_()
    ours = tt.AdamW([q])
    ours.load_state_dict(theirs.state_dict())
    for _ in range(2):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        theirs.step()
        ours.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_compiled_step_does_not_compile_again(device):
    p, q = (torch.ones(4, device=device).requires_grad_() for _ in range(2))
    plain, compiled = tt.AdamW([p]), tt.AdamW([q])
    step = torch.compile(lambda: compiled.step(), backend="eager")
    torch._dynamo.utils.counters.clear()
    for _ in range(12):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        plain.step()
        step()
    assert torch.equal(p, q)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1


@pytest.mark.parametrize("g", [1e19, 3e19, 5e20, 1e38])
def test_adamw_of_large_gradients(device, g):
    """As torch's on the CPU, whose squares exceed float32 from 5.8e20 on: later steps are zero, not NaN.

    Torch's on a GPU squares before it multiplies by 1 − β₂: there steps are zero from 1.8e19 on.
    """
    ours, theirs = (torch.ones(4, device=place).requires_grad_() for place in (device, "cpu"))
    for optimizer, p in ((tt.AdamW([ours], lr=0.1), ours), (torch.optim.AdamW([theirs], lr=0.1), theirs)):
        for scale in (1.0, 1.0, -0.5):
            p.grad = torch.tensor([g, -g, 1.0, 0.0], device=p.device) * scale
            optimizer.step()
    assert ours.isfinite().all()
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)
