"""Times of the package's PyTorch ops on a GPU: python bench.py [--out FILE].

- Attention, forward + sum + backward: in eager mode, in a CUDA graph, and the sum of its kernels' times.
- Products of matrices of 16-bit and 8-bit types, beside cuBLAS.
- Time of the host for a call.
- Training steps of a GPT in plain PyTorch, and with this package's ops in place: losses, times and peak memory, in eager
  mode, under torch.compile, and there with CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import NamedTuple

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


def interleaved_ms(calls, rounds=15):
    """Median times of calls in CUDA graphs, in rounds in turn, each with a cold L2 cache, in ms."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    graphs = {name: graph_of(call) for name, call in calls.items()}
    times = {name: [] for name in graphs}
    for count in range(rounds):
        for name, graph in list(graphs.items())[:: 1 if count % 2 else -1]:
            flush.zero_()
            a, b = torch.cuda.Event(True), torch.cuda.Event(True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            times[name].append(a.elapsed_time(b))
    return {f"{name}_ms": sorted(ms)[rounds // 2] for name, ms in times.items()}


def products(m, n, k, only=None):
    """a [m, k] · weight [n, k]ᵀ of normal numbers, in each type or in one, beside cuBLAS."""
    a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    one = torch.ones((), device="cuda")
    rows, columns = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")

    def fp8(mm, scales, fast):
        x, w = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        return lambda: mm(x, w, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def int8(mm):
        x, w = ((32 * t).round().clamp(-128, 127).to(torch.int8) for t in (a, b))
        return lambda: mm(x, w.t())

    half_a, half_b = a.bfloat16(), b.bfloat16().t()
    cases = {
        "bf16": (lambda: tt.matmul(half_a, half_b), lambda: half_a @ half_b),
        "float8_e4m3fn": (fp8(tt.scaled_mm, (one, one), False), fp8(torch._scaled_mm, (one, one), False)),
        "float8_e4m3fn, fast": (fp8(tt.scaled_mm, (one, one), True), fp8(torch._scaled_mm, (one, one), True)),
        "float8_e4m3fn, scales of rows": (
            fp8(tt.scaled_mm, (rows, columns), True),
            fp8(torch._scaled_mm, (rows, columns), True),
        ),
        "int8": (int8(tt.int_mm), int8(torch._int_mm)),
    }
    for name, (ours, theirs) in cases.items():
        if only not in (None, name):
            continue
        try:
            expected = theirs()
            expected_bytes = expected.element_size()
            found, expected = ours().double(), expected.double()
        except RuntimeError as error:
            print(f"{name} {m} x {n} x {k}: {error}")
            continue
        error = ((found - expected).norm() / expected.norm()).item()
        both = {"ours": ours, "torch": theirs}
        if m <= 64:
            # Reading the weight bounds these: beside them, a copy that reads and writes as many bytes in sum.
            moved = (m * k + n * k) * (2 if name == "bf16" else 1) + m * n * expected_bytes
            source = torch.empty(moved // 2, dtype=torch.int8, device="cuda")
            target = torch.empty_like(source)
            both["copy"] = lambda source=source, target=target: target.copy_(source)
        times = interleaved_ms(both)
        tflops = {f"{side}_tflops": 2 * m * n * k / times[f"{side}_ms"] / 1e9 for side in ("ours", "torch")}
        row(case=f"product {m} x {n} x {k}, {name}", **times, **tflops, difference=error)


def rotate(x, cos, sin):
    """Rotary position embedding as in Hugging Face's Llama; cos and sin [n, d] are tables of x's type."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def swiglu(x):
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


class Plain:
    """PyTorch's own ops."""

    rope = staticmethod(rotate)
    attention = staticmethod(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    rms_norm = staticmethod(lambda x, w: F.rms_norm(x, w.shape, w, 1e-6))
    swiglu = staticmethod(swiglu)
    cross_entropy = staticmethod(lambda logits, target: F.cross_entropy(logits.flatten(0, -2), target.flatten()))
    optimizer = staticmethod(lambda p: torch.optim.AdamW(p, lr=3e-4, fused=True))


class Ours:
    """This package's."""

    rope = staticmethod(lambda x, cos, sin: tt.rope(x, halves=True))
    attention = staticmethod(lambda q, k, v: tt.attention(q, k, v, causal=True))
    rms_norm, swiglu, cross_entropy = map(staticmethod, (tt.rms_norm, tt.swiglu, tt.cross_entropy))
    optimizer = staticmethod(lambda p: tt.AdamW(p, lr=3e-4))


class Block(nn.Module):
    def __init__(self, ops, d, heads):
        super().__init__()
        self.ops, self.heads = ops, heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        d_ff = 8 * d // 3 // 64 * 64
        self.up, self.down = nn.Linear(d, 2 * d_ff, bias=False), nn.Linear(d_ff, d, bias=False)

    def forward(self, x, cos, sin):
        ops, (batch, n, d) = self.ops, x.shape
        qkv = self.qkv(ops.rms_norm(x, self.norm1)).view(batch, n, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = ops.attention(ops.rope(q, cos, sin), ops.rope(k, cos, sin), v)
        x = x + self.out(o.transpose(1, 2).reshape(batch, n, d))
        return x + self.down(ops.swiglu(self.up(ops.rms_norm(x, self.norm2))))


class Gpt(nn.Module):
    def __init__(self, ops, shape):
        super().__init__()
        self.ops, d, d_head = ops, shape.d_model, shape.d_model // shape.heads
        self.embedding = nn.Embedding(shape.vocabulary, d)
        self.blocks = nn.ModuleList(Block(ops, d, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.Parameter(torch.ones(d)), nn.Linear(d, shape.vocabulary, bias=False)
        angle = torch.arange(shape.context)[:, None] * 10000.0 ** (-torch.arange(0, d_head, 2) / d_head)
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos().bfloat16())
        self.register_buffer("sin", angle.sin().bfloat16())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.ops.cross_entropy(self.head(self.ops.rms_norm(x, self.norm)), targets)


class Shape(NamedTuple):
    layers: int
    d_model: int
    heads: int
    vocabulary: int
    batch: int
    context: int


# d_model and d_ff of the models of the course's table: small, medium, large, xl, 2.7B.
MODELS = ((768, 3072), (1024, 4096), (1280, 5120), (1600, 6400), (2560, 10240))
# Columns and depths of products of few rows.
FEW_ROWS = ((4096, 4096), (8192, 8192), (16384, 16384), (4096, 14336), (14336, 4096), (6144, 4096))
SHAPES = {
    "small": Shape(6, 384, 6, 4096, 16, 256),
    "base": Shape(12, 768, 12, 32000, 8, 1024),
    "medium": Shape(24, 1024, 16, 32000, 8, 1024),
}
MODES = {"eager": None, "compile": "default", "compile, CUDA graphs": "reduce-overhead"}


class Training:
    """Trains on random text with repetitions."""

    def __init__(self, ops, shape, mode):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Gpt(ops, shape)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.shape, self.mode, self.losses = shape, mode, []
        self.optimizer = ops.optimizer(model.parameters())
        self.forward = model if mode is None else torch.compile(model, mode=mode)
        self.generator = torch.Generator("cuda").manual_seed(1)

    def step(self):
        batch, n = self.shape.batch, self.shape.context
        text = torch.randint(200, (batch, n + 1), device="cuda", generator=self.generator)
        text[:, n // 2 :] = text[:, : n + 1 - n // 2]
        if self.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.forward(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach().clone())

    def steps_ms(self, steps):
        """Time per step; the host waits for the GPU only at the end."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / steps


def gpt(names, rounds=15, steps=4):
    """Time per step of both models, each the median of `rounds` that alternate between them."""
    for name in names:
        for mode, option in MODES.items():
            torch._dynamo.reset()
            models, peaks, times = [], [], ([], [])
            for ops in (Plain, Ours):
                before = torch.cuda.memory_allocated()
                models.append(Training(ops, SHAPES[name], option))
                models[-1].steps_ms(5)
                torch.cuda.reset_peak_memory_stats()
                models[-1].steps_ms(7)
                peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
            for _ in range(rounds):
                for model, found in zip(models, times):
                    found.append(model.steps_ms(steps))
            plain, ours = ([float(loss) for loss in model.losses] for model in models)
            shape = SHAPES[name]._asdict()
            row(
                case=f"GPT {name}, bf16 autocast, {mode}",
                plain_ms=sorted(times[0])[rounds // 2],
                ours_ms=sorted(times[1])[rounds // 2],
                plain_gib=peaks[0],
                ours_gib=peaks[1],
                losses_of_step=[1, 30, len(ours)],
                plain_losses=[plain[i] for i in (0, 29, -1)],
                ours_losses=[ours[i] for i in (0, 29, -1)],
                largest_difference_in_30=max(abs(a - b) for a, b in zip(plain[:30], ours)),
                **shape,
            )
            del models, model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="file for the rows, as JSON")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per measurement")
    parser.add_argument("--gpt", nargs="*", choices=SHAPES, default=list(SHAPES), help="models to train")
    parser.add_argument("--gpt-only", action="store_true", help="no other measurements")
    parser.add_argument("--products", action="store_true", help="only the products")
    arguments = parser.parse_args()
    row(case="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    if not arguments.gpt_only:
        for n in (512, 1024, 2048, 4096, 8192):
            products(n, n, n)
        for n, k in FEW_ROWS:
            for m in (1, 8, 16, 32, 48, 64):
                products(m, n, k)
        # The models' products: attention's projections, both layers of the MLP, and the gradient of a weight.
        for d, d_ff in MODELS:
            for tokens in (512, 4096):
                for n, k in ((d, d), (d_ff, d), (d, d_ff)):
                    products(tokens, n, k, "bf16")
            products(d, d_ff, 4096, "bf16")
    if not arguments.gpt_only and not arguments.products:
        for n in (1024, 16384):
            attention(n, arguments.seconds)
        host_times()
    if not arguments.products:
        gpt(arguments.gpt)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(ROWS, file, indent=1)


if __name__ == "__main__":
    main()
