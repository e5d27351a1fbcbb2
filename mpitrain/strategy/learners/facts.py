"""What the learners of a run must have in common."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ...core.layout import Layout
from ...errors import ConfigError
from .store import Store

_FILE = "model"  # names and shapes of the run's tensors, one in a line


def check_facts(own: Mapping[str, Any], of_run: Mapping[str, Any], layout: Layout, store: Store) -> None:
    """Check that a learner has the same facts, by name, as the run that it joins; a missing one is not compared.

    Raises:
        ConfigError: One differs.
        OSError: The store cannot be used.
    """
    tensors = [f"{entry.name} {'x'.join(map(str, entry.shape)) or 'number'}" for entry in layout.entries]
    of_store = store.read(_FILE)
    for name, value in own.items():
        if (other := of_run.get(name, value)) != value:
            here, there = _different(tensors, of_store) if name == "model" else (value, other)
            raise ConfigError(
                f"--join: this learner and the run that it would join differ in {name}: "
                f"{_own_parts(here, there)} here, {_own_parts(there, here)} there; "
                "use the same job, options and seed of random numbers, or another directory"
            )
    if of_store is None:
        store.create(_FILE, "\n".join(tensors).encode())


def _different(tensors: list[str], of_store: bytes | None) -> tuple[str, str]:
    """Return name and shape of the first tensor of the model that differs from the run's, here and there."""
    there = (of_store or b"tensors that are not known").decode().split("\n")
    pairs = itertools.zip_longest(tensors, there, fillvalue="no further tensor")
    return next((pair for pair in pairs if pair[0] != pair[1]), ("other kinds of tensors",) * 2)


def _own_parts(value: object, other: object) -> str:
    """Return the parts of a list of arguments, or another value, that differ from the other one, for an error."""
    parts, others = str(value).split(", "), str(other).split(", ")
    return ", ".join(part for part in parts if part not in others) or str(value)
