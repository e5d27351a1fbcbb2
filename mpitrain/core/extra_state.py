"""State of a run that is not in the flat vectors: of the strategy, the model and the hooks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ..errors import CheckpointError
from .layout import Array

Value = float | str | Array


class Versioned(NamedTuple):
    """The state of one part of a run.

    Attributes:
        version: The version of the meaning of the values, from 1.
        values: Numbers, strings and arrays by name.
    """

    version: int
    values: Mapping[str, Value]


# State by namespace; a namespace is the name of the part of a run to which the state belongs.
ExtraState = Mapping[str, Versioned]


class HasExtraState(Protocol):
    """A part of a run with state of its own."""

    def extra_state(self) -> ExtraState:
        """Return the state to store. Collective over the workers, at a consistent point; the chief's is stored."""

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore the state, on every worker; ``state`` may have other namespaces, too, or none."""


class StoredState(dict[str, Versioned]):
    """The extra state of a checkpoint.

    Attributes:
        used: The namespaces that were read on this rank.
    """

    def __init__(self, state: ExtraState = MappingProxyType({})) -> None:
        super().__init__(state)
        self.used: set[str] = set()

    def get(self, namespace: str, default: Any = None) -> Any:
        self.used.add(namespace)
        return super().get(namespace, default)

    def __getitem__(self, namespace: str) -> Versioned:
        self.used.add(namespace)
        return super().__getitem__(namespace)


def values_of(state: ExtraState, namespace: str, version: int) -> Mapping[str, Value]:
    """Return the values of a namespace; empty if the state has none. Local.

    Args:
        version: The newest version that the caller understands.

    Raises:
        CheckpointError: A later version of the package has written the state.
    """
    part = state.get(namespace)
    if part is None:
        return MappingProxyType({})
    if part.version > version:
        raise CheckpointError(
            f"the checkpoint has version {part.version} of the state {namespace}, but this mpitrain reads version "
            f"{version} or less; resume with a newer mpitrain, or use --init-from",
            on_all_ranks=True,
        )
    return part.values
