from os import PathLike
from typing import Any, Mapping

VERSION: str

class Error(RuntimeError):
    """What a kernel, its arguments or the device do not allow."""

class InternalError(Error):
    """A mistake in Tilewright itself."""

class Kernel:
    """A kernel that ships with Tilewright."""

    def __new__(cls, name: str) -> Kernel: ...
    @property
    def name(self) -> str: ...
    @property
    def doc(self) -> str:
        """What it computes, and on which grid."""

    @property
    def parameters(self) -> list[tuple[str, str, str, int | float | bool | str | None]]:
        """(name, kind, type, default) in order. The kind is "in", "out", "inout", "scalar" or "constant"."""

    @property
    def types(self) -> dict[str, list[str]]:
        """The element types that each type parameter can be."""

    def __call__(
        self,
        *args: Any,
        grid: int | tuple[int, ...],
        types: str | Mapping[str, str] | None = None,
        options: dict[str, Any] | None = None,
        stream: Any = None,
        **named: Any,
    ) -> None:
        """Launches the kernel.

        Arguments are given in order or by name, constants by name. `types` are the element types of type parameters that
        no array determines. `options` are the compiler's: num_warps, num_ctas, num_stages, max_registers, asserts, fp_fusion,
        tma, warp_specialize, overlap, pingpong, wgmma_f32, tma_stores. `stream` is a CUDA stream: by default PyTorch's
        current one.

        Raises `Error` if an access may be outside of its array, and for all other failed checks of a launch.
        """

    def compile(
        self,
        target: str,
        types: str | Mapping[str, str] | None = None,
        options: dict[str, Any] | None = None,
        multiple_of: dict[str, int] | None = None,
        equal_to: dict[str, int] | None = None,
        ptx_version: int = 84,
        **constants: Any,
    ) -> Compiled:
        """Compiles the kernel for "sm_80", "sm_86", "sm_89", "sm_90a" or "host" (this CPU).

        The code assumes memory that is aligned to 16 bytes, and of arguments what `multiple_of` and `equal_to` say.
        """

class Compiled:
    """Code that was compiled ahead of time, here or elsewhere, with its manifest."""

    @property
    def ptx(self) -> str | None: ...
    @property
    def object(self) -> bytes | None: ...
    @property
    def manifest(self) -> dict[str, Any]: ...
    def save(self, folder: str | PathLike[str]) -> None:
        """Writes the code and manifest.json."""

    def __call__(
        self, *args: Any, grid: int | tuple[int, ...], stream: Any = None, unchecked: bool = False, **named: Any
    ) -> None:
        """Launches the code, with the manifest's arguments in order or by name, without tensor maps.

        The launch is checked as `Kernel.__call__` checks it, by the manifest's footprint. With `unchecked=True` the
        caller guarantees that all accesses stay inside the arrays.
        """

def kernel_names() -> list[str]: ...
def load(folder: str | PathLike[str]) -> Compiled:
    """Loads the code that `tilewright compile` or `Compiled.save` wrote to a folder.

    A launch executes it with all rights of the process: load only folders that you trust, and code for "host" only if it
    was compiled for this CPU or one with fewer features.
    """

# For the package's own modules. Arrays that a function writes are arguments, too.
def document_ranges(
    cu_seqlens_q: Any, cu_seqlens_k: Any, ranges: Any, n_q: int, n_k: int, causal: bool, window: int | None = None
) -> None: ...
def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    allocate: Any,
    causal: bool,
    scale: float | None = None,
    precision: str | None = None,
    window: int | None = None,
    prefix: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    relative_bias: Any = None,
    sinks: Any = None,
    ranges: Any = None,
    cache_seqlens: Any = None,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
) -> None: ...
def sink_gradients(o: Any, lse: Any, d_o: Any, sinks: Any, d_sinks: Any) -> None: ...
def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    allocate: Any,
    causal: bool,
    scale: float | None = None,
    precision: str | None = None,
    deterministic: bool = True,
    window: int | None = None,
    prefix: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    relative_bias: Any = None,
    ranges: Any = None,
    d_relative_bias: Any = None,
) -> None: ...
def rms_norm_forward(x: Any, w: Any, y: Any, rstd: Any, eps: float) -> None: ...
def rms_norm_backward(x: Any, w: Any, rstd: Any, grad_y: Any, grad_x: Any, grad_w: Any) -> None: ...
def layer_norm_forward(x: Any, w: Any, b: Any, y: Any, mean: Any, rstd: Any, eps: float) -> None: ...
def layer_norm_backward(
    x: Any, w: Any, mean: Any, rstd: Any, grad_y: Any, grad_x: Any, grad_w: Any, grad_b: Any
) -> None: ...
def softmax_forward(x: Any, y: Any) -> None: ...
def softmax_backward(y: Any, grad_y: Any, grad_x: Any) -> None: ...
def cross_entropy_forward(logits: Any, targets: Any, loss: Any, lse: Any, ignore_index: int) -> None: ...
def cross_entropy_backward(
    logits: Any, targets: Any, lse: Any, grad_loss: Any, grad_logits: Any, ignore_index: int
) -> None: ...
def cross_entropy_forward_backward(
    logits: Any, classes: int, targets: Any, grad_loss: Any, loss: Any, ignore_index: int
) -> None: ...
def silu_forward(x: Any, y: Any) -> None: ...
def silu_backward(x: Any, grad_y: Any, grad_x: Any) -> None: ...
def swiglu_forward(a: Any, b: Any, y: Any) -> None: ...
def swiglu_backward(a: Any, b: Any, grad_y: Any, grad_a: Any, grad_b: Any) -> None: ...
def matmul(
    a: Any,
    b: Any,
    c: Any,
    bias: Any = None,
    activation: str = "none",
    precision: str = "ieee",
    accumulate: bool = False,
) -> None: ...
def scale(x: Any, factor: Any, y: Any) -> None: ...
def column_sum(x: Any, y: Any) -> None: ...
def rope(
    x: Any,
    frequencies: Any,
    y: Any,
    start: int = 0,
    positions: Any = None,
    inverse: bool = False,
    halves: bool = False,
) -> None: ...
def rope_frequencies(d: int, base: float) -> list[float]: ...
def adamw(
    parameters: list[tuple[Any, Any, Any, Any, Any]],
    t: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> None: ...

def register_torch_kernels(folder: str | PathLike[str]) -> None:
    """Registers the kernels of the ops that `tilewright.torch` has defined. `folder` has PyTorch's libraries."""

def take_error(error: BaseException) -> BaseException:
    """The exception that a kernel raised, for the RuntimeError that PyTorch made of it; else `error`."""
