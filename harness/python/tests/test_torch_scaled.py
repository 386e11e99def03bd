"""Products of 8-bit matrices of `tilewright.torch` against float64."""

import pytest

torch = pytest.importorskip("torch")

import tilewright  # noqa: E402
import tilewright.torch as tt  # noqa: E402
from torch_reference import DEVICES, TOLERANCE, seed  # noqa: E402, F401

pytestmark = pytest.mark.parametrize("device", DEVICES)


def operands(device, dtype, shape):
    m, n, k = shape
    if dtype.is_floating_point:
        a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
        a, b = (torch.randint(low, high, (rows, k), dtype=dtype, device=device) for rows in (m, n))
    return a, b


@pytest.mark.parametrize("shape", [(64, 128, 256), (33, 20, 70), (1, 1, 1), (16, 512, 48)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_scaled_mm(device, dtype, shape):
    a, b = operands(device, dtype, shape)
    m, n, _ = shape
    one, rows, columns = (torch.rand(x, device=device) + 0.5 for x in (1, m, n))
    product = a.double() @ b.double().t()
    for scale_a, scale_b in ((one, one), (rows, columns), (rows[:, None], columns[None]), (one[0], columns)):
        expected = scale_a.double().reshape(-1, 1) * product * scale_b.double().reshape(1, -1)
        for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
            for fast in (False, True):
                for right in (b.t(), b.t().contiguous()):
                    found = tt.scaled_mm(a, right, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)
                    assert found.dtype == out_dtype and found.shape == (m, n)
                    if out_dtype == torch.float16 and expected.abs().max() > 6e4:
                        continue
                    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-6)
                    # Tensor cores of Hopper keep 14 bits of sums of 8-bit floats; without `fast`, only within 128 products.
                    of_sums = (5e-3 if fast else 2**-13) if a.is_cuda and dtype.is_floating_point else 0
                    assert error < TOLERANCE[out_dtype] + of_sums, error


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_int_mm(device, dtype):
    for shape in [(64, 128, 256), (33, 20, 70), (5, 3, 0)]:
        a, b = operands(device, dtype, shape)
        expected = (a.cpu().long() @ b.cpu().long().t()).int()
        assert torch.equal(tt.int_mm(a, b.t()).cpu(), expected)
        assert torch.equal(tt.int_mm(a, b.t().contiguous()).cpu(), expected)


def test_compiled_graphs(device):
    a, b = operands(device, torch.float8_e4m3fn, (32, 64, 96))
    scale = torch.ones(1, device=device)
    step = torch.compile(lambda a, b: tt.scaled_mm(a, b.t(), scale, scale) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(a, b), tt.scaled_mm(a, b.t(), scale, scale) + 1)


def test_compiled_graphs_of_other_shapes(device):
    step = torch.compile(
        lambda a, b, x, y: tt.scaled_mm(a, b.t(), x, y), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for m in (32, 48, 1, 7):
        a, b = operands(device, torch.float8_e4m3fn, (m, 64, 96))
        x, y = torch.rand(m, 1, device=device), torch.rand(1, 64, device=device)
        torch.testing.assert_close(step(a, b, x, y), tt.scaled_mm(a, b.t(), x, y))


def test_mistakes(device):
    a, b = operands(device, torch.float8_e4m3fn, (32, 64, 96))
    scale = torch.ones(1, device=device)
    for call, error, text in (
        (lambda: tt.scaled_mm(a, b, scale, scale), tilewright.Error, "96"),
        (lambda: tt.scaled_mm(a, b.t(), torch.ones(31, device=device), torch.ones(64, device=device)), tilewright.Error, "31"),
        (lambda: tt.scaled_mm(a.float(), b.float().t(), scale, scale), tilewright.Error, "float8_e4m3fn"),
        (lambda: tt.scaled_mm(a, b.t().to(torch.float8_e5m2), scale, scale), tilewright.Error, "f8e4m3"),
        (lambda: tt.scaled_mm(a, b.t(), scale.double(), scale), tilewright.Error, "f64"),
        (lambda: tt.scaled_mm(a, b.t(), scale, scale, out_dtype=torch.int32), ValueError, "out_dtype"),
        (lambda: tt.scaled_mm(a[0], b.t(), scale, scale), ValueError, "matrices"),
        (lambda: tt.scaled_mm(a, b.t(), torch.ones(1, 32, device=device), scale), ValueError, "scale_a"),
        (lambda: tt.scaled_mm(a, b.t(), scale, torch.ones(64, 1, device=device)), ValueError, "scale_b"),
        (lambda: tt.scaled_mm(a, b.t(), scale.clone().requires_grad_(), scale), ValueError, "no gradient"),
        (lambda: tt.scaled_mm(a, b.t(), 1.0, scale), TypeError, "scale_a"),
        (lambda: tt.int_mm(a, b.t()), ValueError, "int8 or uint8"),
        (lambda: tt.int_mm(*(torch.ones(shape, dtype=torch.uint8) for shape in ((1, 33026), (33026, 1)))), tilewright.Error, "33025"),
    ):
        with pytest.raises(error, match=text):
            call()
