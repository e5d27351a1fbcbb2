"""The training and evaluation modes of a PyTorch module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode; afterwards, restore the mode of each part."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode, without gradients; afterwards, restore the modes."""
    with evaluating(model), torch.no_grad():
        yield
