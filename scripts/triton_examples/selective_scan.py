"""The Triton counterpart of examples/15_selective_scan.rs."""

import torch
import triton
import triton.language as tl

TILES = [(128, 4), (128, 8), (256, 4), (256, 8), (512, 4), (512, 8), (64, 1), (64, 2), (128, 1), (128, 2)]
CONFIGS = [triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in TILES]


# ANCHOR: kernel
@triton.jit
def compose(a, x, b, y):
    return a * b, x * b + y


# ANCHOR_END: kernel
@triton.autotune(configs=CONFIGS, key=["length", "STATES"])
# ANCHOR: kernel
@triton.jit
def selective_scan(
    u,
    delta,
    a,
    b,
    c,
    skip,
    y,
    length,
    stride_ub,
    stride_uc,
    stride_ac,
    stride_bb,
    stride_bs,
    STATES: tl.constexpr,
    TILE: tl.constexpr,
):
    channel, entry = tl.program_id(0), tl.program_id(1)
    states = tl.arange(0, STATES)
    rate = tl.load(a + channel * stride_ac + states)[:, None] * 1.4426950408889634
    through = tl.load(skip + channel)
    last = tl.full((STATES, 1), TILE - 1, dtype=tl.int32)
    state = tl.zeros((STATES, 1), dtype=tl.float32)
    row = entry * stride_ub + channel * stride_uc
    for first in range(0, length, TILE):
        t = first + tl.arange(0, TILE)
        ut = tl.load(u + row + t, mask=t < length, other=0.0)
        dt = tl.load(delta + row + t, mask=t < length, other=0.0)
        step = tl.where(dt > 20.0, dt, tl.log(tl.exp(dt) + 1.0))[None, :]
        at = entry * stride_bb + states[:, None] * stride_bs + t[None, :]
        bt = tl.load(b + at, mask=t[None, :] < length, other=0.0)
        ct = tl.load(c + at, mask=t[None, :] < length, other=0.0)
        decay, added = tl.associative_scan((tl.exp2(step * rate), step * ut[None, :] * bt), 1, compose)
        h = added + decay * state
        tl.store(y + row + t, tl.sum(h * ct, 0) + ut * through, mask=t < length)
        state = tl.gather(h, last, 1)


# ANCHOR_END: kernel


def cases():
    batch, channels, states, length = 8, 2048, 16, 2048
    random = lambda *shape: torch.randn(*shape, device="cuda")
    u, delta = random(batch, channels, length), random(batch, channels, length)
    a = -torch.arange(1, states + 1, device="cuda", dtype=torch.float32).repeat(channels, 1)
    b, c, skip = random(batch, states, length), random(batch, states, length), random(channels)
    y = torch.empty_like(u)

    def launch():
        selective_scan[(channels, batch)](
            u, delta, a, b, c, skip, y, length, *u.stride()[:2], a.stride(0), *b.stride()[:2], states
        )

    def check():
        h = torch.zeros(batch, channels, states, device="cuda", dtype=torch.float64)
        want = torch.empty(u.shape, device="cuda", dtype=torch.float64)
        steps = torch.nn.functional.softplus(delta.double())
        for t in range(length):
            step = steps[:, :, t, None]
            h = torch.exp(step * a.double()) * h + step * u[:, :, t, None].double() * b[:, None, :, t].double()
            want[:, :, t] = (h * c[:, None, :, t].double()).sum(-1) + skip.double() * u[:, :, t].double()
        return y, want

    yield "selective_scan", f"{batch} × {channels} × {states} states, {length} steps", launch, check
