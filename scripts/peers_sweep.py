"""Times PyTorch attention, eager and with torch.compile, over the lengths and head dimensions of `leaderboard --sweep`.

    python3 peers_sweep.py sweep > rows.jsonl

One head, batch 1, causal, f32 without TF32 and bf16; medians in milliseconds of forward, backward, and forward + sum +
backward. Prints one JSON object per case, as `leaderboard --compare` reads them; a case that runs out of memory has an
`error`.

torch.compile takes seconds for each shape. Several processes of this program compile all shapes in parallel into a
cache; then a single process times them, alone on the GPU.
"""

import json
import math
import os
import subprocess
import sys
import tempfile

LENGTHS = [128 << i for i in range(10)]
DIMS = [16, 32, 64, 128]
DTYPES = ["bfloat16", "float32"]
WARMUP_MS, REP_MS = 25, 100


def attention(q, k, v):
    import torch

    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    n = q.shape[-2]
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return torch.softmax(scores, -1) @ v


def cases():
    return [(dtype, d, n) for dtype in DTYPES for d in DIMS for n in LENGTHS]


def inputs(dtype, d, n):
    import torch

    torch.manual_seed(0)
    make = lambda grad: torch.randn(1, 1, n, d, device="cuda", dtype=getattr(torch, dtype), requires_grad=grad)
    return make(True), make(True), make(True), make(False)


def compiled():
    import torch
    import torch._functorch.config

    # The backward pass runs repeatedly on one graph, so its buffers must not be donated.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()
    return torch.compile(attention, dynamic=False)


def forward_backward(function, q, k, v):
    q.grad = k.grad = v.grad = None
    function(q, k, v).sum().backward()


def compile_all(part, parts):
    """Compiles every `parts`-th case, starting at `part`, by increasing length.

    In this order, peak memory use comes last in all processes.
    """
    import torch

    for dtype, d, n in sorted(cases(), key=lambda case: case[2])[part::parts]:
        q, k, v, _ = inputs(dtype, d, n)
        try:
            function = compiled()
            with torch.no_grad():
                function(q, k, v)
            forward_backward(function, q, k, v)
        except torch.OutOfMemoryError:
            pass
        del q, k, v
        torch.cuda.empty_cache()


def time():
    import torch
    import triton

    bench = lambda f: triton.testing.do_bench(f, warmup=WARMUP_MS, rep=REP_MS, return_mode="median")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ms = bench(lambda: a @ a)
    print(json.dumps({"ceiling": "bf16_matmul_8192_tflops", "v": round(2 * 8192**3 / ms / 1e9, 1)}), flush=True)
    del a
    for dtype, d, n in cases():
        for name in ["eager", "torch.compile"]:
            row = {"peer": name, "B": 1, "H": 1, "N": n, "D": d, "dtype": dtype, "causal": True}
            q, k, v, grad = inputs(dtype, d, n)
            out = None
            try:
                function = attention if name == "eager" else compiled()
                with torch.no_grad():
                    row["fwd_ms"] = round(bench(lambda: function(q, k, v)), 4)
                out = function(q, k, v)
                row["bwd_ms"] = round(bench(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)), 4)
                out = None
                row["fb_sum_ms"] = round(bench(lambda: forward_backward(function, q, k, v)), 4)
            except torch.OutOfMemoryError as error:
                row["error"] = f"{type(error).__name__}: {error}"[:90]
            print(json.dumps(row), flush=True)
            del q, k, v, grad, out
            torch.cuda.empty_cache()


def main():
    if sys.argv[1:2] == ["warm"]:
        compile_all(int(sys.argv[2]), int(sys.argv[3]))
        return
    if sys.argv[1:] not in ([], ["sweep"]):
        sys.exit(f"peers_sweep: expected no argument or `sweep`, found {' '.join(sys.argv[1:])}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, "inductor")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(cache, "triton")
        parts = max(1, min(12, (os.cpu_count() or 2) - 2))
        # One compile thread per process: the processes already use all cores.
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, os.path.abspath(__file__), "warm"]
        # stdout is for results only. A case that fails to compile here is compiled again, or fails, when it is timed.
        start = lambda part: subprocess.Popen([*command, str(part), str(parts)], env=environment, stdout=sys.stderr)
        for process in [start(part) for part in range(parts)]:
            process.wait()
        time()


main()
