"""The Triton counterpart of examples/18_bias_gelu_dropout.rs."""

import torch
import triton
import triton.language as tl


# ANCHOR: kernel
@triton.jit
def normal_cdf(x):
    return tl.erf(x * 0.7071067811865476) * 0.5 + 0.5


@triton.jit
def bias_gelu_dropout_fwd(x, bias, y, n, p, seed, stride_x, stride_y, TILE: tl.constexpr):
    row = tl.program_id(1)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < n
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32) + shift
    kept = tl.where(tl.rand(seed, row * n + columns) >= p, v * normal_cdf(v) / (1.0 - p), 0.0)
    tl.store(y + row * stride_y + columns, kept.to(y.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_dropout_bwd(x, bias, grad_y, grad_x, n, p, seed, stride_x, stride_gy, stride_gx, TILE: tl.constexpr):
    row = tl.program_id(1)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < n
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32) + shift
    g = tl.load(grad_y + row * stride_gy + columns, mask=inside, other=0.0).to(tl.float32)
    slope = normal_cdf(v) + v * tl.exp(v * v * -0.5) * 0.3989422804014327
    grad = tl.where(tl.rand(seed, row * n + columns) >= p, g * slope / (1.0 - p), 0.0)
    tl.store(grad_x + row * stride_gx + columns, grad.to(grad_x.dtype.element_ty), mask=inside)


# ANCHOR_END: kernel


def cases():
    rows, n, p, seed = 8192, 8192, 0.1, 1234
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, bias, grad_y = random(rows, n), random(n), random(rows, n)
    y, grad_x, grad_bias = torch.empty_like(x), torch.empty_like(x), [None]
    grid = (triton.cdiv(n, 1024), rows)

    def forward():
        bias_gelu_dropout_fwd[grid](x, bias, y, n, p, seed, n, n, 1024)

    def backward():
        bias_gelu_dropout_bwd[grid](x, bias, grad_y, grad_x, n, p, seed, n, n, n, 1024)
        grad_bias[0] = grad_x.sum(0)

    def check():
        kept = y != 0
        assert abs(kept.double().mean() - (1 - p)) < 0.01
        return y, torch.nn.functional.gelu(x.double() + bias.double()) * kept / (1 - p)

    def check_backward():
        v = (x.double() + bias.double()).requires_grad_()
        torch.nn.functional.gelu(v).backward(grad_y.double())
        return grad_x, v.grad * (grad_x != 0) / (1 - p)

    yield "bias_gelu_dropout_fwd", f"{rows} × {n}", forward, check
    yield "bias_gelu_dropout_bwd", f"{rows} × {n}", backward, check_backward
