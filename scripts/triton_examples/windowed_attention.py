"""The Triton counterpart of examples/19_windowed_attention.rs: the forward pass."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"Q_TILE": m, "K_TILE": n}, num_warps=w, num_stages=s)
    for m, n, w in [(64, 64, 4), (128, 64, 8), (128, 128, 8)]
    for s in [2, 3]
]


@triton.autotune(configs=CONFIGS, key=["n", "D"])
# ANCHOR: kernel
@triton.jit
def windowed_attention(
    q, k, v, o, slopes, n, heads, window, cap, scale, D: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr
):
    row, head = tl.program_id(0) * Q_TILE, tl.program_id(1)
    slope = tl.load(slopes + head % heads)
    base = head.to(tl.int64) * n * D
    rows, columns = row + tl.arange(0, Q_TILE), tl.arange(0, D)
    at = base + rows[:, None] * D + columns[None, :]
    qt = tl.load(q + at, mask=rows[:, None] < n, other=0.0)
    peak = tl.full((Q_TILE,), -3.4e38, dtype=tl.float32)
    total = tl.zeros((Q_TILE,), dtype=tl.float32)
    acc = tl.zeros((Q_TILE, D), dtype=tl.float32)
    for first in range(tl.maximum(row - window, 0) // K_TILE * K_TILE, tl.minimum(row + Q_TILE, n), K_TILE):
        keys = first + tl.arange(0, K_TILE)
        from_key = base + keys[:, None] * D + columns[None, :]
        kt = tl.load(k + from_key, mask=keys[:, None] < n, other=0.0)
        vt = tl.load(v + from_key, mask=keys[:, None] < n, other=0.0)
        distance = rows[:, None] - keys[None, :]
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        s = cap * (1 - 2 / (tl.exp(tl.dot(qt, kt.T) * (2 * scale / cap)) + 1)) - slope * distance
        s = tl.where((distance >= 0) & (distance <= window), s * 1.4426950408889634, float("-inf"))
        top = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        decay = tl.exp2(peak - top)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype.element_ty), vt, acc * decay[:, None])
        peak = top
    tl.store(o + at, (acc / total[:, None]).to(o.dtype.element_ty), mask=rows[:, None] < n)


# ANCHOR_END: kernel


def cases():
    batch, heads, n, d, window, cap = 2, 16, 8192, 128, 1024, 20.0
    random = lambda: torch.randn(batch, heads, n, d, device="cuda", dtype=torch.bfloat16)
    q, k, v, d_o = random(), random(), random(), random()
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
    o = torch.empty_like(q)

    def reference(q, k, v, rows):
        i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(rows, device="cuda")[None, :]
        s = cap * torch.tanh(q @ k.mT * d**-0.5 / cap) - slopes.to(q.dtype)[:, None, None] * (i - j)
        return torch.softmax(s.masked_fill((j > i) | (i - j > window), float("-inf")), -1) @ v

    def launch():
        grid = lambda meta: (triton.cdiv(n, meta["Q_TILE"]), batch * heads)
        windowed_attention[grid](q, k, v, o, slopes, n, heads, window, cap, d**-0.5, d)

    def check():
        return o[:1, :, :2048], reference(*(x[:1, :, :2048].double() for x in (q, k, v)), 2048)

    name = f"{batch} × {heads} × {n} × {d}, window {window}"
    yield "windowed_attention_fwd", name, launch, check
    # The backward pass of FlexAttention, whose kernels are Triton's.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= window), None, None, n, n)
    score = lambda s, b, h, i, j: cap * torch.tanh(s / cap) - slopes[h] * (i - j)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    result = torch.compile(flex_attention)(*inputs, score_mod=score, block_mask=mask)
    found = [None]

    def backward():
        found[0] = torch.autograd.grad(result, inputs, d_o, retain_graph=True)

    def check_backward():
        short = [x[:1, :, :2048].double().requires_grad_() for x in (q, k, v)]
        wanted = torch.autograd.grad(reference(*short, 2048), short, d_o[:1, :, :2048].double())
        return found[0][0][:1, :, :2048], wanted[0]

    yield "windowed_attention_bwd", name, backward, check_backward
