"""The Triton counterpart of examples/17_mixture_of_experts.rs."""

import torch
import triton
import triton.language as tl


# ANCHOR: kernel
@triton.jit
def gate(logits, weight, chosen, experts, stride_lt, TOP: tl.constexpr, TILE: tl.constexpr):
    token, expert = tl.program_id(0), tl.arange(0, TILE)
    row = tl.load(logits + token * stride_lt + expert, mask=expert < experts, other=float("-inf"))
    peak = tl.max(row, 0)
    rest = row
    total = 0.0
    for i in tl.static_range(0, TOP):
        value, index = tl.max(rest, 0, return_indices=True)
        p = tl.exp(value - peak)
        total += p
        tl.store(weight + token * TOP + i, p)
        tl.store(chosen + token * TOP + i, index)
        rest = tl.where(expert == index, float("-inf"), rest)
    tl.debug_barrier()
    for i in tl.static_range(0, TOP):
        tl.store(weight + token * TOP + i, tl.load(weight + token * TOP + i) / total)


@triton.jit
def route(chosen, routed, counts, slots, TILE: tl.constexpr):
    expert = tl.program_id(0)
    count = 0
    for first in range(0, slots, TILE):
        slot = first + tl.arange(0, TILE)
        mine = tl.load(chosen + slot, mask=slot < slots, other=-1) == expert
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(routed + expert * slots + place, slot, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit
def expert_matmul(
    a,
    w,
    weight,
    routed,
    counts,
    out,
    experts,
    slots,
    n,
    k,
    stride_at,
    stride_we,
    stride_wk,
    stride_os,
    TOP: tl.constexpr,
    M_TILE: tl.constexpr,
    N_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    first = 0
    n_tiles = tl.cdiv(n, N_TILE)
    for expert in range(0, experts):
        count = tl.load(counts + expert)
        end = first + tl.cdiv(count, M_TILE) * n_tiles
        while tile < end:
            place = (tile - first) // n_tiles * M_TILE + tl.arange(0, M_TILE)
            columns = (tile - first) % n_tiles * N_TILE + tl.arange(0, N_TILE)
            valid = place < count
            slot = tl.load(routed + expert * slots + place, mask=valid, other=0)
            acc = tl.zeros((M_TILE, N_TILE), dtype=tl.float32)
            for l in range(0, k, K_TILE):
                depth = l + tl.arange(0, K_TILE)
                at = (slot // TOP).to(tl.int64)[:, None] * stride_at + depth[None, :]
                x = tl.load(a + at, mask=valid[:, None] & (depth[None, :] < k), other=0.0)
                at = expert.to(tl.int64) * stride_we + depth[:, None] * stride_wk + columns[None, :]
                y = tl.load(w + at, mask=(depth[:, None] < k) & (columns[None, :] < n), other=0.0)
                acc = tl.dot(x, y, acc)
            scaled = acc * tl.load(weight + slot, mask=valid, other=0.0)[:, None]
            to = out + slot.to(tl.int64)[:, None] * stride_os + columns[None, :]
            tl.store(to, scaled.to(out.dtype.element_ty), mask=valid[:, None] & (columns[None, :] < n))
            tile += tl.num_programs(0)
        first = end


# ANCHOR_END: kernel


def cases():
    tokens, experts, top, n, k = 4096, 8, 2, 4096, 4096
    slots = tokens * top
    logits = torch.randn(tokens, experts, device="cuda")
    a = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts, k, n, device="cuda", dtype=torch.bfloat16)
    weight, out = torch.empty(slots, device="cuda"), torch.empty(slots, n, device="cuda", dtype=torch.bfloat16)
    chosen, counts = (torch.empty(size, device="cuda", dtype=torch.int32) for size in (slots, experts))
    routed = torch.empty(experts, slots, device="cuda", dtype=torch.int32)
    programs = torch.cuda.get_device_properties(0).multi_processor_count

    def launch():
        gate[(tokens,)](logits, weight, chosen, experts, experts, top, triton.next_power_of_2(experts), num_warps=1)
        route[(experts,)](chosen, routed, counts, slots, 1024)
        expert_matmul[(programs,)](
            a,
            w,
            weight,
            routed,
            counts,
            out,
            experts,
            slots,
            n,
            k,
            k,
            k * n,
            n,
            n,
            top,
            128,
            128,
            64,
            num_warps=8,
            num_stages=3,
        )

    def check():
        best = torch.topk(torch.softmax(logits.double(), -1), top)
        share = best.values / best.values.sum(-1, keepdim=True)
        want = [share[t, i] * (a[t].double() @ w[best.indices[t, i]].double()) for t in range(64) for i in range(top)]
        return out[: 64 * top], torch.stack(want)

    yield "mixture_of_experts", f"{tokens} tokens, {top} of {experts} experts, {n} × {k}", launch, check
