"""The Triton counterpart of examples/16_welford_layer_norm.rs."""

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"TILE": tile}, num_warps=warps) for tile in [1024, 2048, 4096] for warps in [4, 8]]


# ANCHOR: kernel
@triton.jit
def combine(m1, s1, n1, m2, s2, n2):
    share = n2 / tl.maximum(n1 + n2, 1.0)
    return m1 + (m2 - m1) * share, s1 + s2 + (m2 - m1) * (m2 - m1) * n1 * share, n1 + n2


# ANCHOR_END: kernel
@triton.autotune(configs=CONFIGS, key=["n"])
# ANCHOR: kernel
@triton.jit
def welford_layer_norm(x, w, b, y, mean, rstd, n, eps, stride_x, stride_y, TILE: tl.constexpr):
    row = tl.program_id(0)
    means = tl.zeros((TILE,), dtype=tl.float32)
    squares = tl.zeros((TILE,), dtype=tl.float32)
    counts = tl.zeros((TILE,), dtype=tl.float32)
    for first in range(0, n, TILE):
        columns = first + tl.arange(0, TILE)
        inside = columns < n
        v = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
        counts += inside.to(tl.float32)
        difference = v - means
        means += tl.where(inside, difference / counts, 0.0)
        squares += tl.where(inside, difference * (v - means), 0.0)
    mu, square, count = tl.reduce((means, squares, counts), 0, combine)
    rs = tl.rsqrt(square / count + eps)
    tl.store(mean + row, mu)
    tl.store(rstd + row, rs)
    for first in range(0, n, TILE):
        columns = first + tl.arange(0, TILE)
        inside = columns < n
        v = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(w + columns, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(b + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * stride_y + columns, ((v - mu) * rs * scale + shift).to(y.dtype.element_ty), mask=inside)


# ANCHOR_END: kernel


def cases():
    rows, n = 8192, 8192
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, w, b = random(rows, n) + 8, random(n), random(n)
    y, mean, rstd = torch.empty_like(x), torch.empty(rows, device="cuda"), torch.empty(rows, device="cuda")

    def launch():
        welford_layer_norm[(rows,)](x, w, b, y, mean, rstd, n, 1e-5, n, n)

    def check():
        return y[:256], torch.nn.functional.layer_norm(x[:256].double(), (n,), w.double(), b.double(), 1e-5)

    yield "welford_layer_norm", f"{rows} × {n}", launch, check
    # The backward pass is PyTorch's: the example calls the library's kernels.
    grad = random(rows, n)
    x64, w64, b64, grad64 = (t.double() for t in (x[:256], w, b, grad[:256]))
    native = torch.ops.aten.native_layer_norm_backward
    results = torch.ops.aten.native_layer_norm(x, (n,), w, b, 1e-5)
    wanted = torch.ops.aten.native_layer_norm(x64, (n,), w64, b64, 1e-5)
    found = [None]

    def backward():
        found[0] = native(grad, x, (n,), results[1], results[2], w, b, [True] * 3)

    def check_backward():
        return found[0][0][:256], native(grad64, x64, (n,), wanted[1], wanted[2], w64, b64, [True] * 3)[0]

    yield "layer_norm_bwd", f"{rows} × {n}", backward, check_backward
