"""``torch.nn.Linear`` layers that write their weights' gradients directly to the flat gradient.

Autograd would allocate new memory for each gradient, from which the gradient is copied. For a large layer and a small
batch, the copy takes as long as the product itself.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .bfloat16 import is_copied

LEAST_ELEMENTS = 1 << 18  # minimum size of a weight; for smaller weights, calling Python takes longer than a copy


class Sink(Protocol):
    """Receives the gradients of weights."""

    @property
    def is_collecting(self) -> bool:
        """Whether the backward pass of the training step runs, and no other backward pass inside it."""

    def count_use(self, index: int) -> None:
        """Expect a call of ``add_product``."""

    def add_product(self, index: int, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices to the gradient of a parameter."""


def write_gradients(model: nn.Module, params: Sequence[nn.Parameter], sink: Sink) -> None:
    """Let the large linear layers of a model write the gradients of their weights to ``sink``.

    Args:
        params: The parameters; the sink identifies them by their index.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(params)}
    copyreg.pickle(nn.Linear, _reduced)  # type: ignore[arg-type]
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            # None if the weight is computed, as by ``torch.nn.utils.weight_norm``.
            weight = module._parameters.get("weight")
            if weight is not None and weight.numel() >= LEAST_ELEMENTS and not weight._post_accumulate_grad_hooks:
                forward = partial(_forward, module, weight, sink, index_of[id(weight)])
                module.forward = forward  # type: ignore[method-assign]


def _reduced(layer: nn.Linear) -> tuple[Any, ...]:
    """Return the state for copies and pickles of a layer, which do not write to a sink."""
    state, forward = vars(layer), vars(layer).get("forward")
    if isinstance(forward, partial) and forward.func is _forward:
        state = {name: value for name, value in state.items() if name != "forward"}
    return copyreg.__newobj__, (nn.Linear,), state  # type: ignore[attr-defined]


def _forward(layer: nn.Linear, param: nn.Parameter, sink: Sink, index: int, x: Tensor) -> Tensor:
    weight = layer.weight  # inside ``functional_call``, the weight is another tensor
    is_transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    is_plain = not (is_transformed or torch.is_autocast_enabled(x.device.type) or weight._backward_hooks)
    is_plain = is_plain and not is_copied(weight)  # the gradient of a copy has another type than the flat gradient
    if is_plain and weight is param and weight.requires_grad and torch.is_grad_enabled() and x.dtype == weight.dtype:
        sink.count_use(index)
        return _Linear.apply(x, weight, layer.bias, sink, index)  # type: ignore[no-any-return]
    return functional.linear(x, weight, layer.bias)


class _Linear(torch.autograd.Function):
    """``functional.linear``, whose weight's gradient is written to a sink in the backward pass of a training step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink, index: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.index = sink, index
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows_x, rows_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dbias = rows_dy.sum(0) if ctx.needs_input_grad[2] else None
        dweight = None
        if ctx.needs_input_grad[1]:
            # Return a tensor for double backward, and for gradients that other code computes.
            if torch.is_grad_enabled() or not ctx.sink.is_collecting:
                dweight = rows_dy.t() @ rows_x
            else:  # must come last: other ranks may update the weight from now on
                ctx.sink.add_product(ctx.index, rows_dy.t(), rows_x)
        return dx, dweight, dbias, None, None
