"""The Triton counterpart of examples/21_fp8_matmul.rs."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"M_TILE": m, "N_TILE": n, "K_TILE": k}, num_warps=w, num_stages=s)
    for m, n, k, w in [(128, 128, 128, 8), (128, 256, 128, 8), (256, 128, 128, 8), (128, 128, 64, 4), (64, 128, 128, 4)]
    for s in [3, 4]
]


@triton.autotune(configs=CONFIGS, key=["m", "n", "k"])
# ANCHOR: kernel
@triton.jit
def fp8_matmul(
    a,
    w,
    a_scale,
    w_scale,
    c,
    m,
    n,
    k,
    M_TILE: tl.constexpr,
    N_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    program, m_tiles, n_tiles = tl.program_id(0), tl.cdiv(m, M_TILE), tl.cdiv(n, N_TILE)
    i, j = tl.swizzle2d(program // n_tiles, program % n_tiles, m_tiles, n_tiles, GROUP)
    rows, columns = i * M_TILE + tl.arange(0, M_TILE), j * N_TILE + tl.arange(0, N_TILE)
    acc = tl.zeros((M_TILE, N_TILE), dtype=tl.float32)
    for l in range(0, k, K_TILE):
        depth = l + tl.arange(0, K_TILE)
        x = tl.load(a + rows[:, None] * k + depth[None, :], mask=(rows[:, None] < m) & (depth[None, :] < k), other=0.0)
        y = tl.load(
            w + columns[None, :] * k + depth[:, None], mask=(columns[None, :] < n) & (depth[:, None] < k), other=0.0
        )
        acc = tl.dot(x, y, acc)
    x_scale = tl.load(a_scale + rows, mask=rows < m, other=0.0)
    y_scale = tl.load(w_scale + columns, mask=columns < n, other=0.0)
    scaled = acc * x_scale[:, None] * y_scale[None, :]
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], scaled.to(c.dtype.element_ty), mask=mask)


# ANCHOR_END: kernel


def cases():
    m, n, k = 8192, 8192, 8192
    a, w = (torch.randn(size, k, device="cuda").to(torch.float8_e4m3fn) for size in (m, n))
    a_scale, w_scale = torch.rand(m, device="cuda") + 0.5, torch.rand(n, device="cuda") + 0.5
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def launch():
        grid = lambda meta: (triton.cdiv(m, meta["M_TILE"]) * triton.cdiv(n, meta["N_TILE"]),)
        fp8_matmul[grid](a, w, a_scale, w_scale, c, m, n, k, GROUP=8)

    def check():
        rows = slice(0, 256)
        want = (a[rows].double() * a_scale[rows, None].double()) @ (w.double() * w_scale[:, None].double()).T
        # Partial sums have about 14 bits: errors are relative to the largest, about four standard deviations.
        return c[rows] / (4 * k**0.5), want / (4 * k**0.5)

    yield "fp8_matmul", f"{m} × {n} × {k}", launch, check
