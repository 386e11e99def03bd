"""The attention adapters of the tests of CS336, assignment 2 (`tests/adapters.py` there), over `tilewright.torch`."""

from __future__ import annotations

import torch

import tilewright.torch  # noqa: F401 - registers the ops


class FlashAttention(torch.autograd.Function):
    """Attention of q [..., n_q, d], k and v [..., n_k, d], with a causal mask that lets row i see the keys j ≤ i."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        n_q, n_k = q.shape[-2], k.shape[-2]
        if is_causal and n_q != n_k:
            raise ValueError(f"a causal mask needs as many keys as queries: found {n_k} and {n_q}")
        heads = [x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v)]
        # 0 is the default precision of float32 products.
        o, lse = torch.ops.tilewright.attention_forward(*heads, is_causal, q.shape[-1] ** -0.5, 0)
        o, lse = o.view(q.shape), lse.view(q.shape[:-1])
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, grad_o):
        if torch.is_grad_enabled():
            raise RuntimeError("FlashAttention: a second derivative is not defined: call backward without create_graph")
        q, k, v, o, lse = ctx.saved_tensors
        heads = [x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v, o)]
        grad = grad_o.reshape(heads[3].shape)
        grads = torch.ops.tilewright.attention_backward(
            *heads, lse.reshape(1, -1, lse.shape[-1]), grad, ctx.is_causal, q.shape[-1] ** -0.5, 0, True
        )
        return *(g.view(x.shape) for g, x in zip(grads, (q, k, v))), None


def get_flashattention_autograd_function_pytorch() -> type:
    """FlashAttention-2 on any device."""
    return FlashAttention


def get_flashattention_autograd_function_triton() -> type:
    """FlashAttention-2 on a GPU: the same class, since the kernels are those of the device."""
    return FlashAttention
