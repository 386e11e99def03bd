"""The Triton counterpart of examples/22_fused_mlp.rs."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"ROWS_TILE": rows, "H_TILE": units}, num_warps=w, num_stages=s)
    for rows, units, w in [(128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4)]
    for s in [2, 3]
]


@triton.autotune(configs=CONFIGS, key=["rows", "hidden"])
# ANCHOR: kernel
@triton.jit
def fused_mlp(x, w1, w2, y, rows, hidden, D: tl.constexpr, ROWS_TILE: tl.constexpr, H_TILE: tl.constexpr):
    row = tl.program_id(0) * ROWS_TILE
    x_desc = tl.make_tensor_descriptor(x, shape=[rows, D], strides=[D, 1], block_shape=[ROWS_TILE, D])
    w1_desc = tl.make_tensor_descriptor(w1, shape=[D, hidden], strides=[hidden, 1], block_shape=[D, H_TILE])
    w2_desc = tl.make_tensor_descriptor(w2, shape=[hidden, D], strides=[D, 1], block_shape=[H_TILE, D])
    y_desc = tl.make_tensor_descriptor(y, shape=[rows, D], strides=[D, 1], block_shape=[ROWS_TILE, D])
    xt = x_desc.load([row, 0])
    total = tl.zeros((ROWS_TILE, D), dtype=tl.float32)
    for unit in range(0, hidden, H_TILE):
        sums = tl.dot(xt, w1_desc.load([0, unit]))
        activation = sums * tl.sigmoid(sums * (sums * sums * 0.07135481627 + 1.5957691216))
        total = tl.dot(activation.to(x.dtype.element_ty), w2_desc.load([unit, 0]), total)
    y_desc.store([row, 0], total.to(y.dtype.element_ty))


# ANCHOR_END: kernel


def cases():
    rows, d, hidden = 131072, 128, 512
    x, w1, w2 = (torch.randn(size, device="cuda").bfloat16() for size in [(rows, d), (d, hidden), (hidden, d)])
    w1, w2 = w1 / d**0.5, w2 / hidden**0.5
    y = torch.empty_like(x)
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))

    def launch():
        grid = lambda meta: (triton.cdiv(rows, meta["ROWS_TILE"]),)
        fused_mlp[grid](x, w1, w2, y, rows, hidden, D=d)

    def check():
        few = slice(0, 256)
        hidden_units = torch.nn.functional.gelu(x[few].double() @ w1.double(), approximate="tanh")
        return y[few], hidden_units @ w2.double()

    for name in ("fused_mlp", "fused_mlp_by_hand"):
        yield name, f"{rows} × {d} × {hidden}", launch, check
