"""Batch normalization with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...pytorch.sync_batch_norm import normalize
from .. import world
from .operations import allreduce_
from .submission import Sum


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm`` over the joined batches of all ranks, on CPUs and GPUs.

    In training, ``forward`` and ``backward`` are collective over all ranks.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs an input with at least 2 dimensions, not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, of shape (n, channels, ...)."""
        self._check_input_dim(input)
        if not self.training or world.current().size == 1:
            return super().forward(input)
        return normalize(self, _add_up, input)


def _add_up(sums: Any) -> None:
    allreduce_(torch.from_numpy(sums), name="sync_batch_norm", op=Sum)
