"""Registration of ops in PyTorch: kernels, and differentiable ops that consist of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _native

_library = torch.library.Library("tilewright", "DEF")
# Results have strides that depend on the arguments' strides, so compilers must keep those.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


_kernels = torch.ops.tilewright


def kernel(schema: str, fake: Callable[..., Any], run: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """An op without a gradient, for all devices; `fake` returns tensors like its results.

    `run` implements it, or `_native` in PyTorch's dispatcher, so that a call runs no Python code.
    Callers get the exceptions of the extension module, where PyTorch's dispatcher makes RuntimeError of all.
    """
    name = schema.split("(")[0]

    def checked(*args: Any) -> Any:
        # PyTorch also calls it for a mix of tensors with and without memory, as in a model that is loaded in part.
        devices = {x.device for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)}
        if len({device.type for device in devices}) > 1:
            found = " and ".join(sorted(map(str, devices)))
            raise ValueError(f"{name}: its arguments are on different devices: {found}")
        return fake(*args)

    _library.define(schema, tags=_TAGS)
    torch.library.register_fake(f"tilewright::{name}", checked, lib=_library)
    if run is not None:
        _library.impl(name, run, "CompositeExplicitAutograd")
    overload = getattr(_kernels, name).default

    def call(*args: Any) -> Any:
        try:
            return overload(*args)
        except RuntimeError as error:
            raise _native.take_error(error) from None

    return call


class Op:
    """A differentiable op: an op of `torch.library` that consists of kernels, in its forward and in its backward pass.

    Compiled graphs contain the kernels. In eager mode the op is called without PyTorch's dispatcher.
    """

    def __init__(
        self,
        schema: str,
        forward: Callable[..., Any],
        save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
        grad: Callable[..., Any] | None = None,
    ) -> None:
        """`save` keeps what `grad`, the backward pass, needs in its context; without `grad` the op has no gradient.

        A backward pass is an op without a schema, only a name: graphs contain its kernels.
        """
        self.name = schema.split("(")[0]
        self.forward = forward

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            # Results that are statistics have no gradient, and none is allocated for them.
            ctx.set_materialize_grads(False)
            if save is not None:
                save(ctx, inputs, output)

        def backward(ctx: Any, *grads: Any) -> Any:
            if grad is None:
                raise RuntimeError(f"tilewright: {self.name} has no gradient: a second derivative is not defined")
            return (None,) * len(ctx.needs_input_grad) if grads[0] is None else grad(ctx, *grads)

        members = {"forward": forward, "setup_context": setup_context, "backward": backward}
        self.function = type(
            self.name, (torch.autograd.Function,), {name: staticmethod(member) for name, member in members.items()}
        )
        # What `apply` of the class calls outside of `torch.func`, without inspecting the signature of `forward` first.
        self.apply = super(torch.autograd.Function, self.function).apply
        self.registered = None
        if schema != self.name:
            _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
            _library.impl(self.name, self._eager, "CompositeImplicitAutograd")
            self.registered = getattr(_kernels, self.name).default

    def _eager(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return (self.function.apply if torch._C._are_functorch_transforms_active() else self.apply)(*args)
        return self.forward(*args)

    def __call__(self, *args: Any) -> Any:
        if self.registered is not None and torch.compiler.is_compiling():
            return self.registered(*args)
        return self._eager(*args)
