"""The Triton counterpart of examples/09_persistent_matmul.rs."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"M_TILE": m, "N_TILE": n, "K_TILE": k}, num_warps=w, num_stages=s)
    for m, n, k, w, s in [
        (64, 64, 32, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3),
    ]
]


@triton.autotune(configs=CONFIGS, key=["m", "n", "k"])
# ANCHOR: kernel
@triton.jit
def persistent_matmul(
    a, b, c, m, n, k, M_TILE: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr, GROUP: tl.constexpr
):
    a_tensor = tl.make_tensor_descriptor(a, [m, k], [k, 1], [M_TILE, K_TILE])
    b_tensor = tl.make_tensor_descriptor(b, [n, k], [k, 1], [N_TILE, K_TILE])
    c_tensor = tl.make_tensor_descriptor(c, [m, n], [n, 1], [M_TILE, N_TILE])
    m_tiles, n_tiles = tl.cdiv(m, M_TILE), tl.cdiv(n, N_TILE)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        i, j = tl.swizzle2d(tile // n_tiles, tile % n_tiles, m_tiles, n_tiles, GROUP)
        acc = tl.zeros((M_TILE, N_TILE), dtype=tl.float32)
        for l in range(0, k, K_TILE):
            at, bt = a_tensor.load([i * M_TILE, l]), b_tensor.load([j * N_TILE, l])
            acc = tl.dot(at, bt.T, acc)
        c_tensor.store([i * M_TILE, j * N_TILE], acc.to(c.dtype.element_ty))


# ANCHOR_END: kernel


def cases():
    m, n, k = 4096, 4096, 4096
    a, b = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))

    def launch():
        tiles = lambda meta: triton.cdiv(m, meta["M_TILE"]) * triton.cdiv(n, meta["N_TILE"])
        persistent_matmul[lambda meta: (min(tiles(meta), programs),)](a, b, c, m, n, k, GROUP=8)

    def check():
        return c[:256], a[:256].double() @ b.double().T

    yield "persistent_matmul", f"{m} × {n} × {k}", launch, check
