"""State of a training function that can be restored, and its file in the run directory.

The file is pickled: whoever can write it can make ranks run code.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ....checkpoint.disk import make_folder, replacing
from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class CommitFile:
    """The state that the first rank has committed. Every method is local.

    Args:
        path: Path of the file.
        is_writer: Whether this rank is the first one; other ranks neither read nor write.
    """

    def __init__(self, path: Path, is_writer: bool) -> None:
        self._path, self._is_writer = path, is_writer

    def read(self) -> Any:
        """Return the last commit; None if there is none."""
        if not self._is_writer or not self._path.exists():
            return None
        return torch.load(self._path, map_location="cpu", weights_only=False)

    def write(self, saved: Any) -> None:
        """Replace the file atomically.

        Raises:
            OSError: The file cannot be written.
        """
        if self._is_writer:
            content = io.BytesIO()
            torch.save(saved, content)
            make_folder(self._path.parent)
            with replacing(self._path) as writer:
                writer.append(np.frombuffer(content.getbuffer(), np.uint8))


class State:
    """The state that a training function restores. Subclasses define ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object, get_rank: Not needed; accepted because Horovod has them.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commit_file: CommitFile | None = None

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Add functions that are called after a restart, before ``sync``. Local."""
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        """Adapt to a restart, perhaps with another number of ranks. Local."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state; under ``mpitrain run``, the first rank also writes it to the run directory. Local.

        Raises:
            OSError: The file cannot be written.
        """
        self.save()
        if self._commit_file is not None:
            self._commit_file.write(self.saved())
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: hosts are not added to a run. Local."""

    def attach(self, commit_file: CommitFile) -> bool:
        """Use a file for commits; load its contents, and return whether the file exists. Local."""
        self._commit_file = commit_file
        saved = commit_file.read()
        if saved is not None:
            self.load(saved)
        return saved is not None

    def save(self) -> None:
        """Save the state in memory. Local."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the saved state. Local."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state of the first rank to all ranks. Collective over all ranks."""
        raise NotImplementedError

    def saved(self) -> Any:
        """Return the saved state, as an object that can be pickled. Local."""
        return None

    def load(self, saved: Any) -> None:
        """Restore a state that ``saved`` has returned, perhaps in another process. Local."""

    def reset(self) -> None:
        """Adapt objects to a restart; called before the callbacks. Local."""


class ObjectState(State):
    """Objects as attributes: keyword arguments name them and give their values.

    Objects with ``state_dict`` and ``load_state_dict`` keep their identity; others are copied.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = [*kwargs]
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(_content(getattr(self, name))) for name in self._names}

    def restore(self) -> None:
        self.load(self._saved)

    def saved(self) -> dict[str, Any]:
        return self._saved

    def load(self, saved: dict[str, Any]) -> None:
        for name in self._names:
            if name not in saved:
                continue
            value, content = getattr(self, name), copy.deepcopy(saved[name])
            if _is_stateful(value):
                value.load_state_dict(content)
            else:
                setattr(self, name, content)
        self.save()

    def sync(self) -> None:
        plain = {}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                plain[name] = _content(value)
        self.load(broadcast_object(plain, name="elastic state"))

    def reset(self) -> None:
        for name in self._names:
            value = getattr(self, name)
            if hasattr(value, "repartition"):
                value.repartition()


class TorchState(ObjectState):
    """A model, an optimizer and other objects: samplers, schedules, numbers.

    Args:
        model, optimizer: None if they are passed by other names.
        kwargs: Other objects.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**{"model": model, "optimizer": optimizer, **kwargs})


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _content(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value
