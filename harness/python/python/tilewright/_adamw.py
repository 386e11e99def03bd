"""The optimizer `AdamW` of `tilewright.torch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ._registration import kernel

_adamw = kernel(
    "adamw_(Tensor(a!)[] parameters, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor[] grads,"
    " Tensor(d!)[] compute_weights, int step, float lr, float beta1, float beta2, float eps, float weight_decay) -> ()",
    lambda *_: None,
)


def _version(p: Tensor) -> tuple[int, int]:
    """What a write to the parameter, or other memory in its place, changes."""
    return p._version, p.data_ptr()


class AdamW(torch.optim.Optimizer):
    """AdamW: decoupled weight decay, one kernel per parameter.

    Parameters are float32, or bfloat16 or float16 with float32 master weights, which this optimizer keeps in its state.
    A value that anything else writes to such a parameter, as the model's `load_state_dict` does, is the next step's
    master weight; except a write to the memory of `parameter.data`, which PyTorch does not count as one: write to the
    parameter itself, under `torch.no_grad()`.
    Moments are float32. Gradients are float32, bfloat16 or float16. The names in its state are those of
    `torch.optim.AdamW`. The step number is a kernel argument: a step cannot be captured in a CUDA graph, and is a graph
    break for `torch.compile`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        # The version and the memory of each parameter with master weights, after this optimizer's last write.
        self._written: dict[Tensor, tuple[int, int]] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._written = {}
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with options of their own beside the optimizer's."""
        options = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= options[name]:
                raise ValueError(f"{name}: expected a number of at least 0, found {options[name]!s:.200}")
        betas = options["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), found {betas!s:.200}")
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                self.param_groups.pop()
                raise TypeError(f"AdamW: expected parameters of float32, bfloat16 or float16, found {p.dtype}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this optimizer or of `torch.optim.AdamW` without `maximize` and `amsgrad`."""
        for name in ("maximize", "amsgrad"):
            if any(group.get(name) for group in state_dict["param_groups"]):
                raise ValueError(f"AdamW: the state is of an optimizer with {name}=True, which is not supported")
        super().load_state_dict(state_dict)
        self._written.clear()
        # The base class has converted the state to the parameters' types: it is float32 for all types.
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, own):
            for name, value in state_dict["state"].get(index, {}).items():
                if name == "step":
                    # torch's optimizer counts in a tensor, which it shares with the state that it returned.
                    self.state[p][name] = int(value)
                else:
                    self.state[p][name] = value.detach().to(p.device, torch.float32, copy=True)

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype != torch.float32:
            master = state.get("master")
            if master is None:
                state["master"] = p.detach().to(torch.float32, copy=True)
            elif self._written.get(p) != _version(p):
                # Something else has written to the parameter, as the model's load_state_dict does.
                torch.where(p == master.to(p.dtype), master, p.to(torch.float32), out=master)
        return state

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies one step to all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "AdamW: a step cannot be captured in a CUDA graph: its number is an argument of the kernel"
            )
        for group in self.param_groups:
            # Arguments of a call: parameters without and with compute weights, for each step number.
            calls: dict[tuple[int, bool], tuple[list[Any], ...]] = {}
            for p in group["params"]:
                grad = p.grad
                if grad is None:
                    continue
                if grad.is_sparse:
                    raise RuntimeError("AdamW: sparse gradients are not supported")
                state = self._state_of(p)
                if grad.stride() != p.stride():
                    grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)
                master = state.get("master")
                values = (p if master is None else master, state["exp_avg"], state["exp_avg_sq"], grad, p, state)
                call = calls.setdefault((state["step"] + 1, master is not None), tuple([] for _ in values))
                for column, value in zip(call, values):
                    column.append(value)
            beta1, beta2 = group["betas"]
            for (step, with_compute_weights), (*arrays, own, states) in calls.items():
                compute_weights = own if with_compute_weights else []
                rates = (float(rate) for rate in (group["lr"], beta1, beta2, group["eps"], group["weight_decay"]))
                _adamw(*arrays, compute_weights, step, *rates)
                torch.autograd.graph.increment_version(own)
                for p, state in zip(own, states):
                    state["step"] = step
                    if with_compute_weights:
                        self._written[p] = _version(p)
        return loss
