"""The state of a run as named arrays: what a checkpoint holds, and whether it fits a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array, Layout
from ..errors import CheckpointError
from ..plan.progress import Progress
from .container import Compression, write_container
from .reader import FORMAT, Checkpoint

_EXTRA_STATE = "run/state"  # the group whose attributes they are


def write(
    path: Path,
    layout: Layout,
    vectors: Mapping[str, Array],
    step: int,
    data_cursor: int,
    seed: int,
    about: Mapping[str, Any],
    compression: Compression = "none",
    extra_state: Mapping[str, float] | None = None,
) -> None:
    """Write a checkpoint so that ``path`` holds all of it, on disk, or does not change.

    Local; one rank writes for all.

    Args:
        vectors: Flat vectors, shape (layout.size,): ``params``, each slot, and ``average`` where there is one.
            They must not change meanwhile.
        step: Steps done.
        position: Examples taken from the endless stream: where the data goes on.
        seed: Of the run. With the position it is the state of everything random: the order of examples and dropout
            are functions of the two.
        about: Numbers and texts to keep with it, and tables of such (the options, the job's arguments, versions).
        numbers: What else is state of the run; see ``strategy.base.Strategy``.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    write_container(path, *contents(layout, vectors, step, data_cursor, extra_state, seed, about), compression)


def contents(
    layout: Layout,
    vectors: Mapping[str, Array],
    step: int,
    data_cursor: int,
    extra_state: Mapping[str, float] | None,
    seed: int,
    about: Mapping[str, Any],
) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
    """What ``write`` writes: arrays and attributes by path; the arrays are views of the vectors."""
    arrays: dict[str, Array] = {}
    attributes: dict[str, dict[str, Any]] = {"/": _root(step, data_cursor, seed)}
    for name, vector in vectors.items():
        group = _group(name)
        attributes[group] = {}
        arrays |= {f"{group}/{entry}": view for entry, view in _kept(name, layout, vector).items()}
    for entry in layout.entries:
        attributes[f"params/{entry.name}"] = {"kind": entry.kind, "start": entry.start}
    for name, value in about.items():
        if isinstance(value, Mapping):
            attributes[f"run/{name}"] = {key: _attribute(item) for key, item in value.items()}
        else:
            attributes["/"][name] = _attribute(value)
    if extra_state:
        attributes[_EXTRA_STATE] = dict(extra_state)
    if "params" not in vectors:
        attributes = {name: values for name, values in attributes.items() if not name.startswith("params/")}
    return arrays, attributes


def read(path: Path, layout: Layout, vectors: Mapping[str, Array], seed: int) -> Progress:
    """Fill ``vectors`` from a checkpoint; return its step, its position and the numbers that it holds, if any.

    Local; every rank that holds vectors may read.

    Args:
        seed: Must be that of the checkpoint: the order of examples depends on it.

    Raises:
        DamagedCheckpoint: The file is not as it was written; ``vectors`` then hold anything.
        CheckpointError: It lacks or exceeds what the model has; the message names all of it.
    """
    with Checkpoint(path) as checkpoint:
        _check_groups(checkpoint, {_group(name) for name in vectors})
        wanted = {
            f"{_group(name)}/{entry}": view
            for name, vector in vectors.items()
            for entry, view in _kept(name, layout, vector).items()
        }
        fit = compare(checkpoint, {name: view.shape for name, view in wanted.items()})
        if fit.wrong:
            raise CheckpointError(f"{path} is of another model: {fit}; --init-from {path} takes what fits")
        root = checkpoint.attributes["/"]
        if root["seed"] != seed:
            raise CheckpointError(
                f"{path} was written with --seed {root['seed']}, not {seed}: give that seed, so that the order of "
                "examples goes on, or --resume never"
            )
        checkpoint.fill(wanted)
        return Progress(int(root["step"]), int(root["position"]), checkpoint.attributes.get(_EXTRA_STATE, {}))


@dataclass(frozen=True)
class Fit:
    """How a checkpoint's parameters compare with a model's, each named by its path.

    Attributes:
        fitting: In both, of the same shape.
        missing: In the model only.
        unexpected: In the checkpoint only.
        reshaped: In both: the shape in the checkpoint, and in the model.
    """

    fitting: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def wrong(self) -> bool:
        """Whether anything does not fit."""
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        return "; ".join(
            [
                *(f"{name} is missing" for name in self.missing),
                *(f"{name} is not in the model" for name in self.unexpected),
                *(f"{name} is {there} there and {here} in the model" for name, (there, here) in self.reshaped.items()),
            ]
        )


def compare(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> Fit:
    """Compare the datasets in the groups of ``wanted`` with it: shapes by path."""
    groups = {name.rpartition("/")[0] for name in wanted}
    stored = {name: s.shape for name, s in checkpoint.datasets.items() if name.rpartition("/")[0] in groups}
    both = [name for name in wanted if name in stored]
    return Fit(
        fitting=tuple(name for name in both if stored[name] == wanted[name]),
        missing=tuple(name for name in wanted if name not in stored),
        unexpected=tuple(name for name in stored if name not in wanted),
        reshaped={name: (stored[name], wanted[name]) for name in both if stored[name] != wanted[name]},
    )


def match_of(path: Path, layout: Layout) -> Fit:
    """How a checkpoint's parameters fit a model; reads no values.

    Raises:
        DamagedCheckpoint: The file is not as it was written.
        CheckpointError: Nothing fits.
    """
    with Checkpoint(path) as checkpoint:
        return _fit(checkpoint, layout)


def load_matching(path: Path, layout: Layout, params: Array) -> Fit:
    """Fill what fits of ``params``, shape (layout.size,), from a checkpoint's parameters; leave the rest.

    Raises:
        DamagedCheckpoint: The file is not as it was written; ``params`` then hold anything.
        CheckpointError: Nothing fits.
    """
    with Checkpoint(path) as checkpoint:
        fit = _fit(checkpoint, layout)
        views = layout.views(params)
        checkpoint.fill({name: views[name.removeprefix("params/")] for name in fit.fitting})
        return fit


def _fit(checkpoint: Checkpoint, layout: Layout) -> Fit:
    fit = compare(checkpoint, {f"params/{entry.name}": entry.shape for entry in layout.entries})
    if not fit.fitting:
        raise CheckpointError(f"--init-from {checkpoint.path}: none of its parameters fits the model: {fit}")
    return fit


def _root(step: int, data_cursor: int, seed: int) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"format": FORMAT, "step": step, "position": data_cursor, "seed": seed, "saved_at": now}


def _attribute(value: Any) -> Any:
    """A value as HDF5 has it: numbers and texts as they are, everything else as JSON."""
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


def _group(name: str) -> str:
    return {"params": "params", "average": "averages"}.get(name, f"optimizer/{name}")


def _check_groups(checkpoint: Checkpoint, wanted: set[str]) -> None:
    held = {name for name in checkpoint.attributes if name != "/" and not name.startswith("run")} - {"optimizer"}
    if held != wanted:
        raise CheckpointError(
            f"{checkpoint.path} holds {', '.join(sorted(held))}, and this run has {', '.join(sorted(wanted))}: "
            "it was written with another optimizer or moving average"
        )


def _kept(name: str, layout: Layout, vector: Array) -> dict[str, Array]:
    """The views of a vector that a checkpoint holds: state has no slots."""
    state = {entry.name for entry in layout.entries if entry.kind == "state"}
    views = layout.views(np.asarray(vector))
    return views if name in ("params", "average") else {n: v for n, v in views.items() if n not in state}
