"""Checkpoints: HDF5 files that any reader of HDF5 understands.

    /params/<name>              every parameter and state
    /optimizer/<slot>/<name>    the optimizer's slots
    /averages/<name>            moving averages, where there are any

The step, the data cursor (``position``) and what else is a number or a text are attributes of the root.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py

from .errors import CheckpointError
from .params import Array, Layout

FORMAT = 1
_PATTERN = "step-*.h5"


def path_for(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:010d}.h5"


def newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step in a folder, or None."""
    return max(folder.glob(_PATTERN), default=None)


def write(
    path: Path,
    layout: Layout,
    vectors: Mapping[str, Array],
    step: int,
    position: int,
    seed: int,
    about: Mapping[str, Any],
) -> None:
    """Write a checkpoint so that ``path`` holds all of it or does not change.

    Args:
        vectors: Flat vectors, shape (layout.size,): ``params``, each slot, and ``average`` where there is one.
        step: Steps done.
        position: Examples taken from the endless stream: where the data goes on.
        seed: Of the run.
        about: Numbers and texts to keep with it.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with h5py.File(partial, "w") as file:
            file.attrs.update(format=FORMAT, step=step, position=position, seed=seed, **about)
            for name, vector in vectors.items():
                group = file.create_group(_group(name))
                for entry, view in _kept(name, layout, vector).items():
                    group.create_dataset(entry, data=view)
        _flush(partial)
        os.replace(partial, path)
        _flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path, layout: Layout, vectors: Mapping[str, Array], seed: int) -> tuple[int, int]:
    """Fill ``vectors`` from a checkpoint; return its step and position.

    Args:
        seed: Must be that of the checkpoint: the order of examples depends on it.

    Raises:
        CheckpointError: It cannot be read, or lacks or exceeds what the model has; the message names it.
    """
    try:
        with h5py.File(path, "r") as file:
            _check_groups(path, file, {_group(name) for name in vectors})
            for name, vector in vectors.items():
                _fill(path, file, _group(name), _kept(name, layout, vector))
            step, position, written = (int(file.attrs[name]) for name in ("step", "position", "seed"))
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {' '.join(str(error).split())}") from error
    if written != seed:
        raise CheckpointError(
            f"{path} was written with --seed {written}, not {seed}: give that seed, so that the order of examples "
            "goes on, or --resume never"
        )
    return step, position


def _group(name: str) -> str:
    return {"params": "params", "average": "averages"}.get(name, f"optimizer/{name}")


def _check_groups(path: Path, file: h5py.File, wanted: set[str]) -> None:
    slots = {f"optimizer/{name}" for name in file["optimizer"]} if "optimizer" in file else set()
    there = {name for name in file if name != "optimizer"} | slots
    if there != wanted:
        raise CheckpointError(
            f"{path} holds {', '.join(sorted(there))}, and this run has {', '.join(sorted(wanted))}: "
            "it was written with another optimizer or moving average"
        )


def _kept(name: str, layout: Layout, vector: Array) -> dict[str, Array]:
    """The views of a vector that a checkpoint holds: state has no slots."""
    state = {entry.name for entry in layout.entries if entry.kind == "state"}
    views = layout.views(vector)
    return views if name in ("params", "average") else {n: v for n, v in views.items() if n not in state}


def _fill(path: Path, file: h5py.File, group: str, views: Mapping[str, Array]) -> None:
    stored = file[group]
    wrong = [
        *(f"{name} is missing" for name in views if name not in stored),
        *(f"{name} is not in the model" for name in stored if name not in views),
        *(
            f"{name} is {stored[name].shape} there and {view.shape} in the model"
            for name, view in views.items()
            if name in stored and stored[name].shape != view.shape
        ),
    ]
    if wrong:
        raise CheckpointError(f"{path} is of another model: in /{group} {'; '.join(wrong)}")
    for name, view in views.items():
        view[...] = stored[name][()]


def _flush(path: Path) -> None:
    """Make the file or the folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
