"""Registration of ops in PyTorch: kernels, and differentiable ops that consist of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from . import _native

_library = torch.library.Library("tilewright", "DEF")
# Results have strides that depend on the arguments' strides, so compilers must keep those.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


_kernels = torch.ops.tilewright
_functorch = torch._C._functorch
_transforms_active = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
# The transform of `torch.func` that takes no `torch.autograd.Function`.
_FUNCTIONALIZE = _functorch.TransformType.Functionalize


def in_transform() -> bool:
    """Whether a transform of `torch.func` runs eagerly."""
    return not _is_compiling() and _transforms_active()


def kernel(schema: str, fake: Callable[..., Any], run: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """An op without a gradient, for all devices; `fake` returns tensors like its results.

    `run` implements it, or `_native` in PyTorch's dispatcher, so that a call runs no Python code.
    Callers get the exceptions of the extension module, where PyTorch's dispatcher makes RuntimeError of all.
    """
    name = schema.split("(")[0]

    def checked(*args: Any) -> Any:
        # PyTorch also calls it for a mix of tensors with and without memory, as in a model that is loaded in part.
        devices = {x.device for x in tree_leaves(args) if isinstance(x, Tensor)}
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

    Compiled graphs contain the kernels. In eager mode the op is called without PyTorch's dispatcher. Forward-mode
    derivatives, and second ones unless `grad` consists of ops that have one, raise an error.
    """

    def __init__(
        self,
        schema: str,
        forward: Callable[..., Any],
        save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
        grad: Callable[..., Any] | None = None,
        fold: int = 0,
    ) -> None:
        """`save` keeps what `grad`, the backward pass, needs in its context; without `grad` the op has no gradient.

        A backward pass is an op without a schema, only a name: graphs contain its kernels. The first `fold` arguments
        are tensors whose rows (or batch entries, in dimension 0) the op computes independently of each other: `vmap` adds
        its dimension to them. Under `vmap` over other arguments the op runs once for each entry.
        """
        self.name = schema.split("(")[0]
        self.forward = forward
        self.fold = fold

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            # Results that are statistics have no gradient, and none is allocated for them.
            ctx.set_materialize_grads(False)
            if save is not None:
                save(ctx, inputs, output)

        def backward(ctx: Any, *grads: Any) -> Any:
            if grad is None:
                raise RuntimeError(
                    f"tilewright: {self.name} has no gradient: a second derivative is not defined: compute it with"
                    " PyTorch's own op in place of this one"
                )
            return (None,) * len(ctx.needs_input_grad) if grads[0] is None else grad(ctx, *grads)

        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise RuntimeError(
                f"tilewright: {self.name} has no forward-mode derivative (forward_ad, jvp, jacfwd, hessian): use reverse"
                " mode (backward, vjp, jacrev), or PyTorch's own op in place of this one"
            )

        members = {
            "forward": forward,
            "setup_context": setup_context,
            "backward": backward,
            "jvp": jvp,
            "vmap": self._vmap,
        }
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
        if _transforms_active() and _functorch.peek_interpreter_stack().key() != _FUNCTIONALIZE:
            return self.function.apply(*args)
        if forward_ad._current_level >= 0:
            return self.apply(*args)
        if _is_grad_enabled():
            # A loop, which a call of a differentiable op leaves at its first argument: `any` would cost it 1 µs.
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad:
                    return self.apply(*args)
        return self.forward(*args)

    def __call__(self, *args: Any) -> Any:
        if self.registered is not None and _is_compiling():
            return self.registered(*args)
        return self._eager(*args)

    def _vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """The batching rule: results whose dimension 0 is that of `vmap`, and their dimensions."""
        size = info.batch_size
        if size == 0:
            raise ValueError(f"{self.name}: vmap over a dimension of size 0 is not supported")
        leaves, form = tree_flatten(args)
        dims = tree_leaves(tree_map(lambda dim: -1 if dim is None else dim, in_dims, is_leaf=lambda dim: dim is None))
        leaves = [x if dim < 0 else x.movedim(dim, 0) for x, dim in zip(leaves, dims)]
        batched = [dim >= 0 for dim in dims]
        if self.fold and not any(batched[self.fold :]):
            for at in range(self.fold):
                if not batched[at]:
                    leaves[at] = leaves[at].expand(size, *leaves[at].shape).contiguous()
            # Rows [d] become [size, d]; others have a dimension for `size` to be part of.
            single = all(x.dim() == 2 for x in leaves[: self.fold])
            if not single:
                leaves[: self.fold] = [x.flatten(0, 1) for x in leaves[: self.fold]]
            results = self(*tree_unflatten(leaves, form))

            def split(x: Tensor) -> Tensor:
                return x if single and x.dim() == 2 else x.unflatten(0, (size, x.shape[0] // size))

            results = tree_map(split, results)
        else:
            entries = [
                self(*tree_unflatten([x[at] if of else x for x, of in zip(leaves, batched)], form)) for at in range(size)
            ]
            results = tree_map(lambda *parts: torch.stack(parts), *entries)
        return results, tree_map(lambda _: 0, results)
