"""Times of the package's PyTorch ops on a GPU: python bench.py [--out FILE].

- Attention, forward + sum + backward: in eager mode, in a CUDA graph, and the sum of its kernels' times.
- Time of the host for a call.
- Training steps of a GPT in plain PyTorch, and with this package's ops in place: losses and times.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn

import tilewright.torch as tt

ROWS: list[dict] = []


def row(**values):
    ROWS.append(values)
    print(
        "  ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
        ),
        flush=True,
    )


def median_ms(f, seconds=1.0):
    """Median time of f between two events, with a cold L2 cache, in ms."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(5):
        f()
    torch.cuda.synchronize()
    times, end = [], time.monotonic() + seconds
    while len(times) < 20 or time.monotonic() < end:
        flush.zero_()
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        f()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[len(times) // 2]


def graph_of(f):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph


def kernels_ms(f, times=10):
    """The sum of the times of the kernels of one call, in ms."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            f()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in profile.key_averages()) / 1e3 / times


def host_us(f, times=200):
    """Time of the host for one call, in µs, while the GPU has enough work queued."""
    for _ in range(10):
        f()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times // 5):
            f()
        best = min(best, (time.perf_counter() - start) / (times // 5))
        torch.cuda.synchronize()
    return best * 1e6


def attention(n, seconds):
    q, k, v = (torch.randn(1, 16, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step(op=tt.attention, **options):
        q.grad = k.grad = v.grad = None
        op(q, k, v, **options).sum().backward()

    ours = lambda: step(causal=True)  # noqa: E731
    graph = graph_of(ours)
    row(
        case=f"attention forward + sum + backward, bf16, 16 heads, {n} tokens, d = 64, causal",
        eager_ms=median_ms(ours, seconds),
        graph_ms=median_ms(graph.replay, seconds),
        kernels_ms=kernels_ms(ours),
        sdpa_ms=median_ms(lambda: step(F.scaled_dot_product_attention, is_causal=True), seconds),
    )


def host_times():
    q, k, v = (torch.randn(1, 16, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    x, w = (
        torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16),
        torch.ones(1024, device="cuda", dtype=torch.bfloat16),
    )
    grads = [t.clone().requires_grad_() for t in (q, k, v)]
    row(
        case="time of the host for a call, 1024 tokens",
        attention_us=host_us(lambda: tt.attention(q, k, v, causal=True)),
        attention_and_backward_us=host_us(lambda: torch.autograd.grad(tt.attention(*grads, causal=True), grads, q)),
        rms_norm_us=host_us(lambda: tt.rms_norm(x, w)),
        swiglu_us=host_us(lambda: tt.swiglu(x, x)),
        sdpa_us=host_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    )


class Plain:
    """PyTorch's own ops."""

    @staticmethod
    def rope(x):
        d = x.shape[-1]
        theta = 10000.0 ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
        angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * theta
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., ::2].float(), x[..., 1::2].float()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)

    attention = staticmethod(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    rms_norm = staticmethod(lambda x, w: F.rms_norm(x, w.shape, w, 1e-6))
    swiglu = staticmethod(lambda a, b: F.silu(a) * b)
    cross_entropy = staticmethod(lambda logits, target: F.cross_entropy(logits.flatten(0, -2), target.flatten()))
    optimizer = staticmethod(lambda p: torch.optim.AdamW(p, lr=3e-4, fused=True))


class Ours:
    """This package's."""

    attention = staticmethod(lambda q, k, v: tt.attention(q, k, v, causal=True))
    rope, rms_norm, swiglu, cross_entropy = map(staticmethod, (tt.rope, tt.rms_norm, tt.swiglu, tt.cross_entropy))
    optimizer = staticmethod(lambda p: tt.AdamW(p, lr=3e-4))


class Block(nn.Module):
    def __init__(self, ops, d, heads):
        super().__init__()
        self.ops, self.heads = ops, heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = (
            nn.Linear(d, 16 * d // 3 // 64 * 64, bias=False),
            nn.Linear(8 * d // 3 // 32 * 32, d, bias=False),
        )

    def forward(self, x):
        ops, (batch, n, d) = self.ops, x.shape
        qkv = self.qkv(ops.rms_norm(x, self.norm1)).view(batch, n, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = ops.attention(ops.rope(q), ops.rope(k), v)
        x = x + self.out(o.transpose(1, 2).reshape(batch, n, d))
        return x + self.down(ops.swiglu(*self.up(ops.rms_norm(x, self.norm2)).chunk(2, -1)))


class Gpt(nn.Module):
    def __init__(self, ops, vocabulary=32000, d=768, heads=12, layers=12):
        super().__init__()
        self.ops = ops
        self.embedding = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(ops, d, heads) for _ in range(layers))
        self.norm, self.head = nn.Parameter(torch.ones(d)), nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.ops.cross_entropy(self.head(self.ops.rms_norm(x, self.norm)), targets)


def train(ops, compiled, steps=30, batch=8, n=1024):
    """Losses, ms per step and peak memory in GiB of training on random text with repetitions."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Gpt(ops)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    optimizer = ops.optimizer(model.parameters())
    forward = torch.compile(model) if compiled else model
    generator = torch.Generator("cuda").manual_seed(1)
    losses, times = [], []
    for _ in range(steps):
        text = torch.randint(200, (batch, n + 1), device="cuda", generator=generator)
        text[:, n // 2 :] = text[:, : n + 1 - n // 2]
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(text[:, :-1], text[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        losses.append(loss.item())
        if len(losses) == steps // 2:
            torch.cuda.reset_peak_memory_stats()
    return losses, sorted(times[steps // 2 :])[steps // 4], torch.cuda.max_memory_allocated() / 2**30


def gpt():
    for compiled in (False, True):
        plain, plain_ms, plain_gib = train(Plain, compiled)
        ours, ours_ms, ours_gib = train(Ours, compiled)
        row(
            case=f"GPT, 12 layers of 768, batch 8 × 1024, bf16 autocast, {'torch.compile' if compiled else 'eager'}",
            plain_ms=plain_ms,
            ours_ms=ours_ms,
            plain_gib=plain_gib,
            ours_gib=ours_gib,
            first_losses=f"{plain[0]:.4f}/{ours[0]:.4f}",
            last_losses=f"{plain[-1]:.4f}/{ours[-1]:.4f}",
            largest_difference=max(abs(a - b) for a, b in zip(plain, ours)),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="file for the rows, as JSON")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per measurement")
    arguments = parser.parse_args()
    row(case="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    for n in (1024, 16384):
        attention(n, arguments.seconds)
    host_times()
    gpt()
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(ROWS, file, indent=1)


if __name__ == "__main__":
    main()
