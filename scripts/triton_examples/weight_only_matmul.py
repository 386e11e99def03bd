"""The Triton counterpart of examples/13_weight_only_matmul.rs."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"M_TILE": m, "N_TILE": n, "K_TILE": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps_of, stages_of in [
        (16, 64, 128, [4], [4, 6, 8]),
        (16, 128, 128, [4, 8], [4, 6]),
        (64, 128, 64, [4, 8], [3, 4]),
        (128, 128, 64, [4, 8], [3, 4]),
        (256, 128, 64, [8], [3, 4]),
        (256, 128, 128, [8], [2]),
    ]
    for warps in warps_of
    for stages in stages_of
]


@triton.autotune(configs=CONFIGS, key=["m", "n", "k", "BITS"])
# ANCHOR: kernel
@triton.jit
def weight_only_matmul(
    a,
    q,
    scale,
    c,
    m,
    n,
    k,
    stride_am,
    stride_qn,
    stride_sg,
    stride_cm,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    M_TILE: tl.constexpr,
    N_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):
    rows = tl.program_id(1) * M_TILE + tl.arange(0, M_TILE)
    columns = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    depth = tl.arange(0, K_TILE)
    BYTES: tl.constexpr = K_TILE * BITS // 8
    acc = tl.zeros((N_TILE, M_TILE), dtype=tl.float32)
    for l in range(0, k, K_TILE):
        at = l * BITS // 8 + tl.arange(0, BYTES)
        packed = tl.load(q + columns[:, None] * stride_qn + at[None, :], mask=columns[:, None] < n, other=0)
        if BITS == 4:
            numbers = tl.interleave(packed & 15, packed >> 4)
        else:
            numbers = packed
        scales = tl.load(scale + l // GROUP * stride_sg + columns, mask=columns < n, other=0.0)
        weights = (numbers.to(a.dtype.element_ty) - 2 ** (BITS - 1)) * scales[:, None]
        x = tl.load(a + rows[:, None] * stride_am + (l + depth)[None, :], mask=rows[:, None] < m, other=0.0)
        acc = tl.dot(weights.to(a.dtype.element_ty), x.T, acc)
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * stride_cm + columns[None, :], acc.T.to(c.dtype.element_ty), mask=mask)


# ANCHOR_END: kernel


def case(bits, m, n, k, group):
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    q = torch.randint(0, 256, (n, k * bits // 8), device="cuda", dtype=torch.uint8)
    scale = torch.rand(k // group, n, device="cuda").half() / (16 << bits)
    c = torch.empty(m, n, device="cuda", dtype=torch.float16)

    def launch():
        grid = lambda meta: (triton.cdiv(n, meta["N_TILE"]), triton.cdiv(m, meta["M_TILE"]))
        weight_only_matmul[grid](a, q, scale, c, m, n, k, k, q.stride(0), n, n, bits, group)

    def check():
        numbers = torch.stack([q & 15, q >> 4], -1).reshape(n, k) if bits == 4 else q
        weights = (numbers.double() - 2 ** (bits - 1)) * scale.double().T.repeat_interleave(group, 1)
        return c, a.double() @ weights.T

    return f"int{bits} {m} × {n} × {k}, group {group}", launch, check


def cases():
    for m in [16, 2048]:
        for bits in [8, 4]:
            yield "weight_only_matmul", *case(bits, m, 8192, 8192, 128)
