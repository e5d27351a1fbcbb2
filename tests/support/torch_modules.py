"""PyTorch modules that compute in unusual ways, for tests of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))


class Tied(nn.Module):
    """Nested modules, one of which is used twice, with weights that are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.again = nn.Linear(6, 6)
        self.again.weight = self.inner[0].weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.inner(self.inner(x))))


class SeveralInputs(nn.Module):
    """Takes two inputs and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"scores": self.left(left) + self.right(right), "size": self.right(right).pow(2)}


def of_scores(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs["scores"], labels) + 0.1 * outputs["size"].mean()


class Counter(nn.Module):
    """Has buffers of each kind, and changes some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(6), persistent=False)
        self.register_buffer("constant", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.largest = torch.maximum(self.largest, x.detach().abs().amax(0))
        return self.head(self.norm(x)) * self.constant


class Masked(nn.Module):
    """Has buffers that are not finite, one of which becomes finite."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("first", torch.full((3,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(x)
        self.first = torch.where(self.first.isnan(), scores.detach().mean(0), self.first)
        return (scores[:, None] + self.mask).softmax(-1).mean(1) - self.first


class Square(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class Slope(torch.autograd.Function):
    """Its backward pass computes a gradient, as in deep equilibrium models."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(ctx.module(inner).sum(), inner)
        return dy + 0.1 * slope, None


class Call(nn.Module):
    """Calls a function with the output of a module."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.module, *inputs)


def checkpointed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        hidden = module[0](x)  # type: ignore[index]
        for _ in range(2):  # the same weights twice: with reentrant checkpointing their gradient has two parts
            hidden = checkpoint(module[1], hidden, use_reentrant=reentrant)  # type: ignore[index]
        return module[2](hidden)  # type: ignore[index]

    return call


def penalized(module: nn.Module, x: Tensor) -> Tensor:
    """Return a loss that contains a gradient."""
    x = x.clone().requires_grad_()
    outputs = module(x).pow(2).mean()
    (slope,) = torch.autograd.grad(outputs, x, create_graph=True)
    return outputs + slope.pow(2).sum()


def scaled(module: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of the module with doubled parameters."""
    return torch.func.functional_call(module, {name: 2 * each for name, each in module.named_parameters()}, x)


def sloped(module: nn.Module, x: Tensor) -> Tensor:
    return module[2](module[1](Slope.apply(module[0](x), module[1])))  # type: ignore[index]


def adapted(module: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs after a step of gradient descent, as in meta-learning."""
    weights = dict(module.named_parameters())
    slopes = torch.func.grad(lambda w: torch.func.functional_call(module, w, (x,)).pow(2).mean())(weights)
    stepped = {name: value - 0.1 * slopes[name] for name, value in weights.items()}
    return torch.func.functional_call(module, stepped, (x,))  # type: ignore[no-any-return]


class Repeating(nn.Module):
    """Uses a layer once, twice or three times, as determined by the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(1 + int(x.abs().sum() * 1e6) % 3):
            hidden = self.again(hidden).tanh()
        return self.last(hidden)


class Growing(nn.Linear):
    """Makes a buffer when it is first needed."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("mask", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.mask) < x.shape[1]:
            self.mask = torch.ones(x.shape[1], dtype=x.dtype)
        return super().forward(x * self.mask)


class Regularized(nn.Sequential):
    """Also uses weights outside the layers that own them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self[0].weight.pow(2).mean() + 0.1 * self[2].weight.sum(1)


class WithEmpty(nn.Linear):
    """Has a parameter without elements, and a parameter that no batch uses."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.empty, self.spare = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(2))


class Last(nn.Module):
    """The last output of an LSTM."""

    def forward(self, outputs: tuple[Tensor, object]) -> Tensor:
        return outputs[0][:, -1]


class Overwriting(nn.Linear):
    """Changes its weight in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


class DetachedFirst(nn.Module):
    """Reads a parameter in the backward pass after its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.linear(self.first(x), self.last.weight.detach()).tanh())
