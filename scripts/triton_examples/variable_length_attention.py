"""The Triton counterpart of examples/20_variable_length_attention.rs."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"Q_TILE": m, "K_TILE": n}, num_warps=w, num_stages=s)
    for m, n, w in [(64, 64, 4), (128, 64, 8), (128, 128, 8)]
    for s in [2, 3]
]


@triton.autotune(configs=CONFIGS, key=["total", "D"])
# ANCHOR: kernel
@triton.jit
def variable_length_attention(
    q, k, v, o, starts, total, scale, D: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr
):
    sequence, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    n = tl.load(starts + sequence + 1) - start
    row = tl.program_id(0) * Q_TILE
    if row >= n:
        return
    base = (head.to(tl.int64) * total + start) * D
    rows, columns = row + tl.arange(0, Q_TILE), tl.arange(0, D)
    at = base + rows[:, None] * D + columns[None, :]
    qt = tl.load(q + at, mask=rows[:, None] < n, other=0.0)
    peak = tl.full((Q_TILE,), -3.4e38, dtype=tl.float32)
    sums = tl.zeros((Q_TILE,), dtype=tl.float32)
    acc = tl.zeros((Q_TILE, D), dtype=tl.float32)
    for first in range(0, tl.minimum(row + Q_TILE, n), K_TILE):
        keys = first + tl.arange(0, K_TILE)
        from_key = base + keys[:, None] * D + columns[None, :]
        kt = tl.load(k + from_key, mask=keys[:, None] < n, other=0.0)
        vt = tl.load(v + from_key, mask=keys[:, None] < n, other=0.0)
        s = tl.where(rows[:, None] >= keys[None, :], tl.dot(qt, kt.T) * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        decay = tl.exp2(peak - top)
        sums = sums * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype.element_ty), vt, acc * decay[:, None])
        peak = top
    tl.store(o + at, (acc / sums[:, None]).to(o.dtype.element_ty), mask=rows[:, None] < n)


# ANCHOR_END: kernel


def cases():
    heads, d, lengths = 16, 128, [4096, 100, 2000, 512, 7000, 1300, 64, 1312]
    total = sum(lengths)
    starts = torch.tensor([0] + lengths, device="cuda").cumsum(0).to(torch.int32)
    random = lambda: torch.randn(heads, total, d, device="cuda", dtype=torch.bfloat16)
    q, k, v = random(), random(), random()
    o = torch.empty_like(q)

    def launch():
        grid = lambda meta: (triton.cdiv(max(lengths), meta["Q_TILE"]), len(lengths), heads)
        variable_length_attention[grid](q, k, v, o, starts, total, d**-0.5 * 1.4426950408889634, d)

    def check():
        at = slice(lengths[0], lengths[0] + lengths[1] + lengths[2])
        parts = [slice(lengths[0], lengths[0] + lengths[1]), slice(lengths[0] + lengths[1], at.stop)]
        attention = torch.nn.functional.scaled_dot_product_attention
        want = [attention(*(x[:, part].double() for x in (q, k, v)), is_causal=True) for part in parts]
        return o[:, at], torch.cat(want, 1)

    yield "variable_length_attention", f"{len(lengths)} sequences of {total} tokens, {heads} × {d}", launch, check
