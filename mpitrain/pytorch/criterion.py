"""The loss of a PyTorch module: the shapes that it takes, and how many labels it is a mean over."""

from __future__ import annotations

import copy
import functools
import logging
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from ..errors import JobError

_log = logging.getLogger(__name__)

_OF_CLASSES: Any = (nn.CrossEntropyLoss, nn.NLLLoss, f.cross_entropy, f.nll_loss)
_OF_ROWS: Any = (nn.MultiLabelSoftMarginLoss, f.multilabel_soft_margin_loss)  # means over the last dimension
_OF_ELEMENTS: Any = (
    *(nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.HingeEmbeddingLoss, f.l1_loss, f.mse_loss, f.smooth_l1_loss, f.huber_loss),
    *(f.poisson_nll_loss, f.kl_div, f.soft_margin_loss, f.hinge_embedding_loss),
    *(f.binary_cross_entropy, f.binary_cross_entropy_with_logits),
)
_BY_WEIGHT = (f.l1_loss, f.mse_loss, f.huber_loss)  # with ``weight``, they divide by its sum
# The group of each of these losses, by its function or the method ``forward`` of its class.
_GROUPS = {getattr(loss, "forward", loss): group for group in (_OF_CLASSES, _OF_ROWS, _OF_ELEMENTS) for loss in group}


class Criterion:
    """A job's loss, the mean over a batch.

    Attributes:
        name: The name of the loss.
        counts: Whether the loss is a mean over a known number of labels: a loss of torch, or a ``partial`` of one.
        ignore_index: Labels with this value do not count; None if all labels count.
    """

    def __init__(self, loss: Any) -> None:
        self._loss, plain = loss, getattr(loss, "_orig_mod", loss)  # of a compiled loss
        self._plain, options, function = plain, plain, plain
        if isinstance(plain, functools.partial) and isinstance(plain.func, FunctionType) and not plain.args:
            options, function = SimpleNamespace(**plain.keywords), plain.func
        self.name: str = getattr(function, "__name__", type(function).__name__)
        key = getattr(type(function), "forward", None) if isinstance(function, nn.Module) else function
        self._group = _GROUPS.get(key) if isinstance(key, FunctionType) else None
        self._options, self._reduction = options, getattr(options, "reduction", "mean")
        others = ["size_average", "reduce", *(["weight"] if function in _BY_WEIGHT else [])]
        is_mean = self._reduction in ("mean", "batchmean") and not any(hasattr(options, name) for name in others)
        self.counts = self._group is not None and is_mean
        self.ignore_index = getattr(options, "ignore_index", -100) if self._group is _OF_CLASSES else None

    def __call__(self, outputs: Any, labels: Any) -> Tensor:
        """Return the loss.

        Raises:
            JobError: A loss of torch would broadcast outputs and labels, whose shapes differ.
        """
        by_element = self._group is _OF_ELEMENTS or self._group is _OF_ROWS
        if by_element and isinstance(outputs, Tensor) and isinstance(labels, Tensor) and outputs.shape != labels.shape:
            same_size = outputs.numel() == labels.numel()
            fix = "reshape the labels" if same_size else "the last layer needs as many features as a label has"
            if outputs.shape == (*labels.shape, 1):
                fix = f"end the model with nn.Flatten({labels.dim() - 1}), or {fix}"
            raise JobError(
                f"{self.name} requires labels with the outputs' shape {(*outputs.shape,)}, "
                f"got {(*labels.shape,)}; {fix}"
            )
        return self._loss(outputs, labels)  # type: ignore[no-any-return]

    def total(self, outputs: Any, labels: Any, examples: int) -> Tensor:
        """Return the loss times ``count``, without division: it is 0 if no label counts. Raises like the loss."""
        if not self.counts:
            return self(outputs, labels).double() * examples
        if not isinstance(self._plain, nn.Module):
            return Criterion(functools.partial(self._plain, reduction="sum"))(outputs, labels)
        summing = copy.copy(self._plain)
        summing.reduction = "sum"  # type: ignore[assignment]
        return Criterion(summing)(outputs, labels)

    def count(self, labels: Any, examples: int) -> float:
        """Return what the loss divides by: the number of labels that count, or the sum of their weights.

        It is the number of examples if this is not known (see ``counts``).
        """
        if not self.counts or self._reduction == "batchmean":
            return examples
        if self._group is not _OF_CLASSES:
            return labels.numel() / (labels.shape[-1] if self._group is _OF_ROWS else 1)  # type: ignore[no-any-return]
        if labels.is_floating_point() and labels.dim() > 1:  # probabilities of the classes
            return labels.numel() / labels.shape[1]  # type: ignore[no-any-return]
        labels = labels.long()  # an unsigned type has no negative values to ignore
        counted = labels != self.ignore_index
        if (weight := getattr(self._options, "weight", None)) is not None:
            inside = labels.clamp(0, len(weight) - 1)  # the loss itself reports labels that are not classes
            counted = weight.to(labels.device, torch.float64)[inside] * counted
        return float(counted.sum())

    def note_broadcast(self, outputs: Any, labels: Any) -> None:
        """Print a notice, once, if a loss of the user's own gets shapes that differ, probably by mistake."""
        if self._group is None and isinstance(outputs, Tensor) and isinstance(labels, Tensor) and labels.dim():
            n = len(labels)
            if n > 1 and {outputs.shape, labels.shape} == {(n,), (n, 1)}:
                shapes = "outputs (n, 1) and labels (n,)" if labels.dim() == 1 else "outputs (n,) and labels (n, 1)"
                _log_once(f"the loss {self.name} gets {shapes}; their difference has shape (n, n): reshape one of them")


@functools.cache
def _log_once(message: str) -> None:
    _log.info("%s", message)
