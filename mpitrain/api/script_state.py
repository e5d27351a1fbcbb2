"""The state that a script keeps in the checkpoints of its run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..comm.cluster import Cluster
from ..core.extra_state import ExtraState, Value, Versioned, values_of
from ..core.words import one_line
from ..errors import CheckpointError, JobError
from ..pytorch.state_tree import flatten, unflatten

_log = logging.getLogger(__name__)
_VALUES, _OBJECT, _PART = "script", "script: ", "script's "  # namespaces; the last two are followed by a name
_VERSION = 1


class HasState(Protocol):
    """An object whose state can be saved, such as a module, a scheduler, or a ``GradScaler``."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class _OfDict:
    """The values of a dict as a ``HasState``.

    Args:
        keys: The keys of the saved values; None for all.
    """

    def __init__(self, values: dict[str, Any], keys: Sequence[str] | None) -> None:
        self._values, self._keys, self.load_state_dict = values, keys, values.update

    def state_dict(self) -> dict[str, Any]:
        return {key: self._values[key] for key in (self._values if self._keys is None else self._keys)}


class ScriptState:
    """Objects with state, and values, that checkpoints contain; a ``core.extra_state.HasExtraState``.

    Args:
        cluster: The ranks; its roles are assigned before a method is called.

    Attributes:
        values: The script's own values, by name.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.values: dict[str, Any] = {}
        self._objects: dict[str, HasState] = {}
        self._of_ranks: dict[str, HasState] = {}
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def add(self, name: str, owner: Any, per_rank: bool, keys: Sequence[str] | None = None) -> None:
        """Save the state of an object: every worker's state, or the chief's.

        Raises:
            JobError: The object has no state, or the name or a key is not valid.
        """
        where = f"trainer.register({name!r}, ...)"
        if not isinstance(name, str) or not name or "/" in name:
            raise JobError(f"{where}: the name must be a string that is not empty, without '/'")
        if name in self._objects or name in self._of_ranks:
            raise JobError(f"{where}: the name is registered already; use another name")
        if keys is not None and not isinstance(owner, dict):
            raise JobError(f"{where} got keys, which only a dict can have, with {type(owner).__name__}: remove them")
        missing = [key for key in keys or () if key not in owner]
        if missing:
            raise JobError(
                f"{where} got the keys {', '.join(missing)}, which the dict does not have: set them before this call"
            )
        if isinstance(owner, dict):
            owner = _OfDict(owner, keys)
        if not callable(getattr(owner, "state_dict", None)) or not callable(getattr(owner, "load_state_dict", None)):
            kind = type(owner).__name__
            raise JobError(f"{where} got {kind}: must be a dict, or have the methods state_dict and load_state_dict")
        (self._of_ranks if per_rank else self._objects)[name] = owner

    def add_part(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Save the result of ``save`` on the chief; every worker passes it to ``load``."""
        self._parts[name] = save, load

    def extra_state(self) -> ExtraState:
        state = {_VALUES: Versioned(_VERSION, flatten("trainer.state", self.values))}
        for name, owner in self._objects.items():
            state[_OBJECT + name] = Versioned(_VERSION, flatten(repr(name), owner.state_dict()))
        for name, (save, _) in self._parts.items():
            state[_PART + name] = Versioned(_VERSION, flatten(f"the {name}", save()))
        workers = self._cluster.workers
        for name, owner in self._of_ranks.items():
            of_all = workers.gather(flatten(repr(name), owner.state_dict()))
            for rank, values in enumerate(of_all or ()):
                state[self._of_rank(name, rank)] = Versioned(_VERSION, values)
        return state

    def load_extra_state(self, state: ExtraState) -> None:
        if stored := values_of(state, _VALUES, _VERSION):
            self.values.update(unflatten(stored))
        for name, (_, load) in self._parts.items():
            if stored := values_of(state, _PART + name, _VERSION):
                load(unflatten(stored))
        for name, owner in self._objects.items():
            self._load(name, owner, values_of(state, _OBJECT + name, _VERSION))
        for name, owner in self._of_ranks.items():
            # Mark all values as used, also those that belong to other ranks.
            for rank in range(self._cluster.workers.size):
                values_of(state, self._of_rank(name, rank), _VERSION)
            self._load(name, owner, values_of(state, self._of_rank(name, self._cluster.workers.rank), _VERSION))

    def _of_rank(self, name: str, rank: int) -> str:
        """Return the namespace of one worker's state."""
        return f"{_OBJECT}{name}, worker {rank} of {self._cluster.workers.size}"

    def _load(self, name: str, owner: HasState, stored: Mapping[str, Value]) -> None:
        if not stored:
            _log.info("the checkpoint has no state of %r for this number of workers: it is not restored", name)
            return
        try:
            owner.load_state_dict(unflatten(stored))
        except Exception as error:
            text = one_line(error)
            raise CheckpointError(
                f"the checkpoint's state of {name!r} does not fit: {type(error).__name__}: {text}; pass --resume never "
                "to start a new run"
            ) from error
