"""A sampler that divides unprocessed examples among the ranks again after a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from ... import world


class ElasticSampler(Sampler[int]):
    """Divides the unprocessed examples of an epoch among the ranks. Every method is local.

    Pass the sampler to ``TorchState``, call ``record_batch`` after each batch, and ``set_epoch`` after each epoch.

    Args:
        dataset: The dataset, of which only the length is used.
        shuffle: Whether each epoch has a new random order, the same on all ranks.
        seed: Seed of that order; equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.repartition()

    def repartition(self) -> None:
        """Divide the unprocessed examples among the ranks; to make equal shares, some examples may be repeated."""
        current = world.current()
        self.rank, self.num_replicas = current.rank, current.size
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    reset = repartition

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which no example has been processed."""
        self.epoch, self.processed_num = epoch, 0
        self.repartition()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count the examples that all ranks have processed in a batch.

        Args:
            batch_idx: Not needed; accepted because Horovod has it.
            batch_size: Number of examples per rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed examples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, with this program's number of ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.repartition()

    def __iter__(self) -> Iterator[int]:
        total = self.num_samples * self.num_replicas
        indices = self.remaining_indices * (1 + total // max(1, len(self.remaining_indices)))
        return iter(indices[self.rank : total : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
