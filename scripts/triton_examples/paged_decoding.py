"""The Triton counterpart of examples/14_paged_decoding.rs."""

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"TILE": t}, num_warps=w, num_stages=s) for t in [64, 128] for w in [4, 8] for s in [2, 3, 4]]


@triton.autotune(configs=CONFIGS, key=["PAGE", "D"])
# ANCHOR: kernel
@triton.jit
def paged_decode(
    q,
    k,
    v,
    table,
    lengths,
    o,
    lse,
    scale,
    heads,
    splits,
    stride_qb,
    stride_qh,
    stride_qg,
    stride_kt,
    stride_kh,
    stride_tb,
    stride_os,
    stride_ob,
    stride_oh,
    stride_og,
    stride_ls,
    stride_lb,
    stride_lh,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    split, head, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + entry)
    each = tl.cdiv(tl.cdiv(length, splits), PAGE) * PAGE
    last = tl.minimum(split * each + each, length)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, D)
    mask = rows[:, None] < GROUP
    qt = tl.load(
        q + entry * stride_qb + head * stride_qh + rows[:, None] * stride_qg + columns[None, :], mask=mask, other=0.0
    )
    peak = tl.full((ROWS,), -3.4e38, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, D), dtype=tl.float32)
    for first in range(split * each, last, TILE):
        key = first + tl.arange(0, TILE)
        seen = key < last
        page = tl.load(table + entry * stride_tb + key // PAGE, mask=seen, other=0)
        row = (page.to(tl.int64) * PAGE + key % PAGE) * stride_kt + head * stride_kh
        at = row[:, None] + columns[None, :]
        kt = tl.load(k + at, mask=seen[:, None], other=0.0)
        vt = tl.load(v + at, mask=seen[:, None], other=0.0)
        s = tl.where(seen[None, :], tl.dot(qt, kt.T) * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        decay = tl.exp2(peak - top)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype.element_ty), vt, acc * decay[:, None])
        peak = top
    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    to = split * stride_os + entry * stride_ob + head * stride_oh
    tl.store(o + to + rows[:, None] * stride_og + columns[None, :], acc / divisor, mask=mask)
    to = split * stride_ls + entry * stride_lb + head * stride_lh
    tl.store(lse + to + rows, peak + tl.log2(total), mask=rows < GROUP)


@triton.jit
def combine_splits(
    partial, lse, o, splits, stride_ps, stride_pr, stride_ls, stride_or, MOST: tl.constexpr, D: tl.constexpr
):
    row, split, columns = tl.program_id(0), tl.arange(0, MOST), tl.arange(0, D)
    weight = tl.load(lse + split * stride_ls + row, mask=split < splits, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    at = split[:, None] * stride_ps + row * stride_pr + columns[None, :]
    every = tl.load(partial + at, mask=split[:, None] < splits, other=0.0)
    ot = tl.sum(every * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(o + row * stride_or + columns, ot.to(o.dtype.element_ty))


# ANCHOR_END: kernel


def cases():
    batch, heads, group, d, page, longest, splits = 64, 8, 4, 128, 16, 4096, 4
    lengths = torch.tensor([longest - b * 37 % (longest // 2) for b in range(batch)], device="cuda", dtype=torch.int32)
    most = longest // page
    table = torch.randperm(batch * most, device="cuda").to(torch.int32).reshape(batch, most)
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    q, k, v = random(batch, heads, group, d), random(batch * most, page, heads, d), random(batch * most, page, heads, d)
    partial = torch.empty(splits, batch, heads, group, d, device="cuda")
    lse = torch.empty(splits, batch, heads, group, device="cuda")
    o = torch.empty_like(q)
    rows = batch * heads * group

    def launch():
        paged_decode[(splits, heads, batch)](
            q,
            k,
            v,
            table,
            lengths,
            partial,
            lse,
            d**-0.5 * 1.4426950408889634,
            heads,
            splits,
            *q.stride()[:3],
            *k.stride()[1:3],
            table.stride(0),
            *partial.stride()[:4],
            *lse.stride()[:3],
            group,
            16,
            page,
            d,
        )
        combine_splits[(rows,)](partial, lse, o, splits, rows * d, d, rows, d, splits, d)

    def check():
        want = torch.empty(q.shape, device="cuda", dtype=torch.float64)
        for b in range(batch):
            keys, values = (x[table[b].long()].reshape(-1, heads, d)[: lengths[b]].double() for x in (k, v))
            p = torch.softmax(torch.einsum("hgd,nhd->hgn", q[b].double(), keys) * d**-0.5, -1)
            want[b] = torch.einsum("hgn,nhd->hgd", p, values)
        return o, want

    yield "paged_decoding", f"{batch} × {heads} × {group} × {d}, {longest} keys, page {page}", launch, check
