"""Differentiable ops on PyTorch tensors, and the optimizer `AdamW`.

Attention, matmuls, losses, and all ops in eager mode, are kernels. In graphs of `torch.compile`, row-wise and elementwise
ops (norms, softmax, SiLU, SwiGLU, rotary embedding) are formulas in float32: Inductor fuses them with the casts, copies
and additions around them, which read and write more memory than the op.

The ops are registered with `torch.library`: they work in eager mode, under `torch.compile(fullgraph=True)` and in CUDA
graphs, on NVIDIA GPUs (compute capability 8.0 and later) and on the CPU. They run on PyTorch's current stream, on the
tensors' own memory. Element types are float32, bfloat16 and float16, in some ops 8-bit floats and integers; statistics
and losses are float32.

A CUDA graph can be captured after one run of the same code outside of the graph, which compiles and loads the kernels.
"""

from __future__ import annotations

import os

import torch

from . import _native
from ._adamw import AdamW
from ._attention import attention, quantize
from ._losses import cross_entropy, linear_cross_entropy
from ._matmul import int_mm, linear, matmul, scaled_mm
from ._rope import rope
from ._rows import layer_norm, rms_norm, silu, softmax, swiglu

__all__ = [
    "AdamW",
    "attention",
    "cross_entropy",
    "int_mm",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "quantize",
    "rms_norm",
    "rope",
    "scaled_mm",
    "silu",
    "softmax",
    "swiglu",
]

_native.register_torch_kernels(os.path.join(os.path.dirname(torch.__file__), "lib"))
