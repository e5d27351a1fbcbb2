"""The interface of models before training: layers and a loss, or a PyTorch module and a loss."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..core.layout import Array, Layout
from ..data.batch import CollatedBatch
from ..data.split import Split
from ..errors import JobError
from ..nn.layer import Layer
from ..nn.loss import Loss
from ..optim import Optimizer
from .hook import Hook
from .layer_network import LayerNetwork

if TYPE_CHECKING:
    import torch

TorchModule: TypeAlias = "torch.nn.Module"
TorchLoss: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
TorchOptimizer: TypeAlias = "torch.optim.Optimizer | Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]"

_VALID: dict[type, str] = {  # text that messages append to the name of the class
    Layer: ", such as nn.Sequential(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 2)), or a torch.nn.Module",
    Loss: ", such as nn.SoftmaxCrossEntropy(), or for a torch.nn.Module a torch loss",
    Optimizer: ", such as optim.adam(0.001), or for a torch.nn.Module a function that makes one of torch.optim",
    Split: "; for arrays use data.from_arrays(examples, labels)",
    Sequence: " of hooks, such as [MyHook()]",
    Hook: ", such as MyHook()",
}


class Network(Protocol):
    """A model and its loss as a job declares them. Every method is local.

    Attributes:
        model, loss: As the job declares them.
    """

    model: Any
    loss: Any

    def as_split(self, dataset: object) -> object:
        """Return the split of a dataset that the model can use; return any other object unchanged."""

    def rule_of(self, optimizer: Any) -> Any:
        """Translate a PyTorch optimizer, or a function that makes one, for this model; return other objects unchanged.

        Raises:
            JobError: This package does not support the optimizer.
        """

    def lay_out(self, train: Split, dtype: Any) -> Layout:
        """Return the layout of parameters of type ``dtype`` for these examples. Called first.

        Raises:
            JobError: The model or the loss does not accept the examples.
        """

    def check_validation(self, validation: Split, dtype: Any) -> None:
        """Check that the model and the loss accept the validation examples. Called after ``lay_out``.

        Raises:
            JobError: The model or the loss does not accept them.
        """

    @property
    def classes(self) -> int | None:
        """Number of classes that the loss distinguishes; None if unknown, or if labels are not classes."""

    def starts(self, layout: Layout) -> list[int]:
        """Return the first elements of the ranges whose gradients become final together, in ascending order."""

    def initialize(self, layout: Layout, params: Array, seed: int) -> None:
        """Set ``params``, shape (layout.size,), to the initial values. The same on every rank."""

    def takes_integers(self, split: Split) -> bool:
        """Return whether the model takes the split's examples in their stored type, because they are integers."""

    @property
    def writes_grads_once(self) -> bool:
        """Whether a backward pass writes the gradient of each parameter once, not in parts.

        Ranges of the gradient are then final early, and are copied from a GPU during the backward pass.
        """

    def shown(self, batch: CollatedBatch, dtype: Any) -> Any:
        """Return the examples of a batch as the model gets them."""

    def joined(self, parts: Sequence[Any]) -> Any:
        """Join the outputs, or the labels, of several batches to one value for metrics; see ``OnOutputs``."""

    @property
    def has_own_loop(self) -> bool:
        """Whether the user's own loop computes outputs and losses, in training and in validation."""

    @property
    def counts_labels(self) -> bool:
        """Whether it is known over which labels the loss is a mean, so that the mean over all workers can be exact."""

    @property
    def synchronizes_statistics(self) -> bool:
        """Whether the model computes statistics over the batches of all workers."""

    @property
    def frozen(self) -> Collection[str]:
        """Names of the parameters that are not trained at first."""

    def components(self) -> list[tuple[str, str, str]]:
        """Return path, kind and parameters of each part of the model, for tables."""

    def facts(self) -> dict[str, object]:
        """Return the properties that must be the same on every rank, except the layout."""


def make_network(model: object, loss: object) -> Network:
    """Return the network of a job's model and loss.

    Raises:
        JobError: The model and the loss are not a model and a loss of the same framework.
    """
    torch = sys.modules.get("torch")  # a module exists only if the job has imported torch
    if torch is not None and isinstance(model, torch.nn.Module):
        from ..pytorch.network import TorchNetwork

        return TorchNetwork(model, loss)
    if not isinstance(model, Layer):
        raise JobError(must_be("model", model, Layer))
    if not isinstance(loss, Loss):
        raise JobError(must_be("loss", loss, Loss))
    return LayerNetwork(model, loss)


def must_be(name: str, value: object, kind: type) -> str:
    """Return the message for an argument of ``Job`` that is of the wrong type."""
    text = textwrap.shorten(without_address(repr(value)), 80)  # the text of an array has many lines
    return f"Job({name}=...) got {text}: must be {kind.__name__}{_VALID.get(kind, '')}"


def without_address(text: str) -> str:
    """Return the text of an object without its address, which differs between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
