"""The timing function of CS336, assignment 2, section 1.3.3 ("FlashAttention-2 Leaderboard"), over our op."""

import torch
import triton

from adapters import FlashAttention as FlashAttention2


def test_timing_flash_forward_backward():
    n_heads = 16
    d_head = 64
    sequence_length = 16384
    q, k, v = torch.randn(3, n_heads, sequence_length, d_head, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    flash = torch.compile(FlashAttention2.apply)

    def flash_forward_backward():
        o = flash(q, k, v, True)
        loss = o.sum()
        loss.backward()

    results = triton.testing.do_bench(flash_forward_backward, rep=10000, warmup=1000)
    print(results)


if __name__ == "__main__":
    test_timing_flash_forward_backward()
