"""PyTorch modules on several devices per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .torch_model import TorchModel
from .towers import Towers


class TorchTowers(Towers):
    """Copies of a PyTorch module. Parameters that are frozen in the first copy are frozen in all."""

    def load_params(self) -> None:
        freeze_alike(self._towers)
        super().load_params()


def freeze_alike(towers: Sequence[Any]) -> None:
    """Freeze the parameters of all copies that are frozen in the first one, and no others."""
    first, *others = towers
    assert isinstance(first, TorchModel)
    for other in others:
        other.freeze_as(first)
