"""GPU tile kernels: compiled by LLVM inside this package, launched on NVIDIA GPUs and on the CPU.

- `tilewright.torch` has differentiable ops on PyTorch tensors, and an AdamW optimizer.
- `tilewright.numpy` has attention, RMSNorm, LayerNorm, softmax, cross-entropy, rotary embeddings, SiLU and SwiGLU on NumPy
  arrays, on the CPU, with functions for their gradients, and matmul and AdamW.
- `Kernel`, `compile`, `launch` and `load` are for single kernels: any kernel of `kernel_names()`.

Arguments are arrays: PyTorch tensors, NumPy arrays, and objects with `__array_interface__` or
`__cuda_array_interface__`. They are used in place, without copies. A launch is refused with an `Error`, before it starts,
unless all its accesses are proven to stay inside the arrays.
"""

from __future__ import annotations

from typing import Any

from ._native import VERSION as __version__
from ._native import Compiled, Error, InternalError, Kernel, kernel_names, load

__all__ = [
    "Compiled",
    "Error",
    "InternalError",
    "Kernel",
    "__version__",
    "compile",
    "kernel_names",
    "launch",
    "load",
]


def compile(kernel: str | Kernel, target: str, **arguments: Any) -> Compiled:
    """Compiles a kernel ahead of time: `Kernel.compile`.

    >>> code = tilewright.compile("softmax_rows", "sm_90a", types="bf16", rows_tile=4, d_tile=1024)
    >>> code.save("out")
    """
    return _kernel(kernel).compile(target, **arguments)


def launch(kernel: str | Kernel, *args: Any, grid: int | tuple[int, ...], **arguments: Any) -> None:
    """Compiles a kernel for these arguments, unless that was done before, and launches it: `Kernel.__call__`.

    >>> tilewright.launch("softmax_rows", x, y, d, 1, d, 1, rows, d, grid=rows, rows_tile=1, d_tile=1024)
    """
    _kernel(kernel)(*args, grid=grid, **arguments)


def _kernel(kernel: str | Kernel) -> Kernel:
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)
