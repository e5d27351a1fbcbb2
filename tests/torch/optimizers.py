"""User-defined optimizers, which update whole tensors, and pairs of optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class HalfAdam(torch.optim.Adam):
    """Takes steps of half the length of Adam's; only the code of ``step`` shows this."""

    def step(self, closure: Any = None) -> None:
        before = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]
        super().step(closure)
        after = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter, old in zip(after, before, strict=True):
                parameter.copy_((parameter + old) / 2)


class Counting(torch.optim.Optimizer):
    """Counts its steps in its group, keeps a number that belongs to no parameter, and replaces the parameters' data."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["k"] += 1
        self.state["all"]["norm"] = 0.9 * self.state["all"].get("norm", 1.0) + float(group["params"][0].grad.norm())
        for parameter in group["params"]:
            self.state[parameter]["taken"] = group["k"]
            parameter.data = parameter.data - group["lr"] / group["k"] * parameter.grad / self.state["all"]["norm"]


class RowNorm(torch.optim.Optimizer):
    """Divides gradients by a mean of the norms of their rows: a state with fewer elements than the parameter."""

    updates_tensors_separately = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.7})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                norms = parameter.grad.norm(dim=-1, keepdim=True)
                state["calls"] = state.get("calls", 0) + 1
                state["norms"] = torch.lerp(norms, state.get("norms", norms), group["beta"])
                parameter -= group["lr"] / state["calls"] ** 0.5 * parameter.grad / state["norms"]


class GlobalNorm(torch.optim.Optimizer):
    """Divides gradients by their norm over all parameters, so that the work cannot be divided among ranks."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = sum(parameter.grad.square().sum() for parameter in group["params"]) ** 0.5
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = 0.5 * state.get("mean", 0) + parameter.grad / norm
                parameter -= group["lr"] * state["mean"]


def two_adams(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = model
    return [torch.optim.Adam(each.parameters(), 0.02, betas=(0.5, 0.9)) for each in (first, nn.ModuleList(rest))]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, vectors = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
    return [torch.optim.Muon(matrices, 0.05), torch.optim.AdamW(vectors, 0.02)]
