"""The state of a run as named arrays in a checkpoint, and the comparison with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.extra_state import ExtraState, StoredState, Value, Versioned
from ..core.layout import ARRAY_GROUPS, Array, Layout, Shape
from ..errors import CheckpointError, JobError
from ..plan.progress import Progress
from .container import Compression, write_container
from .reader import Checkpoint
from .snapshot import Snapshot
from .structure import DTYPES
from .validation import FORMAT

_STATE = "run/state"  # group of the extra state, with one group per namespace; ARRAY_GROUPS are at the top level
_VERSION = "version"  # attribute of a namespace's group
_MAX_DIFFERENCES = 3  # maximum number of differences in an error message


class Restored(NamedTuple):
    """The result of ``read``, in addition to the vectors that it fills."""

    progress: Progress
    extra_state: StoredState


def write(
    path: Path,
    layout: Layout,
    snapshot: Snapshot,
    seed: int,
    record: Mapping[str, Any],
    compression: Compression = "none",
) -> None:
    """Write a checkpoint durably; ``path`` is replaced atomically, or does not change.

    Local; one rank writes for all.

    Args:
        path: The file to write.
        layout: The layout of the vectors.
        snapshot: The state; its vectors must not change during the call.
        seed: The run's seed. The seed and the data cursor determine all random numbers, such as the order of examples
            and dropout.
        record: Numbers, texts, and tables of these, such as the options, the job's arguments, and versions.
        compression: How to compress the values.

    Raises:
        OSError: The disk is full, or the directory cannot be written.
    """
    write_container(path, *contents(layout, snapshot, seed, record), compression)


def contents(
    layout: Layout, snapshot: Snapshot, seed: int, record: Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
    """Return the arrays and attributes that ``write`` writes, by path; parameters and slots are views, not copies."""
    arrays: dict[str, Array] = {}
    attributes: dict[str, dict[str, Any]] = {"/": root_attributes(snapshot.step, snapshot.data_cursor, seed)}
    for name, vector in snapshot.vectors.items():
        group = _group(name)
        attributes[group] = {}
        arrays |= {f"{group}/{entry}": view for entry, view in _kept(name, layout, vector).items()}
    for entry in layout.entries:
        attributes[f"params/{entry.name}"] = {"kind": entry.kind, "start": entry.start}
    for name, value in record.items():
        if isinstance(value, Mapping):
            attributes[f"run/{name}"] = {key: _attribute(item) for key, item in value.items()}
        else:
            attributes["/"][name] = _attribute(value)
    for namespace, (version, values) in snapshot.extra_state.items():
        group = _group_of(namespace)
        if type(version) is not int or _VERSION in values:
            raise JobError(
                f"the state {namespace} has version {version!r} and the values {', '.join(values)}: the version must "
                f"be an int, and no value may be named {_VERSION}"
            )
        attributes[group] = {_VERSION: version}
        for name, value in values.items():
            if isinstance(value, (bool, int, float, str)):
                attributes[group][name] = value
            else:
                arrays[f"{group}/{name}"] = _in_native_order(f"{namespace}/{name}", np.asarray(value))
    if layout.aliases:
        attributes["params"]["aliases"] = json.dumps(layout.aliases)
    if "params" not in snapshot.vectors:
        attributes = {name: values for name, values in attributes.items() if not name.startswith("params/")}
    return arrays, attributes


def read(path: Path, layout: Layout, vectors: Mapping[str, Array], seed: int) -> Restored:
    """Fill ``vectors`` from a checkpoint; return its progress and extra state.

    Local; every rank that holds vectors may read.

    Args:
        path: The checkpoint.
        layout: The layout of the vectors.
        vectors: Flat vectors by name, shape (layout.size,).
        seed: Must be the checkpoint's seed, because the order of examples depends on it.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged; the content of ``vectors`` is then undefined.
        CheckpointError: It does not match the model, the optimizer or the seed; the message states the differences.
    """
    with Checkpoint(path) as checkpoint:
        _check_groups(checkpoint, {_group(name) for name in vectors})
        wanted = {
            f"{_group(name)}/{entry}": view
            for name, vector in vectors.items()
            for entry, view in _kept(name, layout, vector).items()
        }
        groups = {_group(name) for name in vectors}
        stored = {
            name: dataset.shape for name, dataset in checkpoint.datasets.items() if name.rpartition("/")[0] in groups
        }
        fit = compare(stored, {name: view.shape for name, view in wanted.items()})
        if fit.wrong:
            raise CheckpointError(
                f"{path} does not match the model: {fit.first_differences()}; --init-from {path} loads the parameters "
                "that match"
            )
        root = checkpoint.attributes["/"]
        if root["seed"] != seed:
            raise CheckpointError(
                f"{path} was written with --seed {root['seed']}, not {seed}; pass --seed {root['seed']} to continue "
                "with the same order of examples, or --resume never"
            )
        checkpoint.read_into(wanted)
        return Restored(Progress(int(root["step"]), int(root["position"])), StoredState(_extra_state(checkpoint)))


def read_model(checkpoint: Checkpoint, layout: Layout, averages: bool = False) -> tuple[Array, ExtraState]:
    """Return the parameters, or their moving averages, as a vector of shape (layout.size,), and the model's buffers.

    Raises:
        DamagedCheckpoint: The values are damaged.
        CheckpointError: The checkpoint does not match the model, or has no moving averages.
    """
    group = _group("average" if averages else "params")
    if group not in checkpoint.attributes:
        raise CheckpointError(f"{checkpoint.path} contains no {group}")
    stored = {name: dataset.shape for name, dataset in checkpoint.datasets.items() if name.startswith(f"{group}/")}
    entries = {entry.name: entry for entry in layout.entries}
    fit = compare(stored, {f"{group}/{name}": entry.shape for name, entry in entries.items()})
    if fit.wrong:
        raise CheckpointError(f"{checkpoint.path} does not match the model: {fit.first_differences()}")
    dtype = checkpoint.datasets[fit.fitting[0]].dtype
    params = np.zeros(layout.size, dtype)
    checkpoint.read_into({f"{group}/{name}": view for name, view in layout.views(params).items()})
    return params, {name: part for name, part in _extra_state(checkpoint).items() if name in ARRAY_GROUPS}


def is_extra_state(name: str) -> bool:
    """Return whether a dataset holds extra state, such as a module's buffer; a checkpoint has only the chief's."""
    return name.startswith(f"{_STATE}/") or name.partition("/")[0] in ARRAY_GROUPS


def _group_of(namespace: str) -> str:
    return namespace if namespace in ARRAY_GROUPS else f"{_STATE}/{namespace}"


def _extra_state(checkpoint: Checkpoint) -> ExtraState:
    """Read the extra state."""
    state = _former_state(checkpoint.attributes.get(_STATE, {}))
    arrays = {name for name in checkpoint.datasets if is_extra_state(name)}
    for group, attributes in checkpoint.attributes.items():
        namespace = group.removeprefix(f"{_STATE}/")
        if group == _STATE or group != _group_of(namespace) or group in arrays:
            continue
        values: dict[str, Value] = {name: value for name, value in attributes.items() if name != _VERSION}
        for name in arrays:
            if name.startswith(f"{group}/"):
                values[name.removeprefix(f"{group}/")] = checkpoint.read(name)
        state[namespace] = Versioned(_version(attributes), values)
    return state


def _version(attributes: Mapping[str, Any]) -> int:
    version = attributes.get(_VERSION, 1)
    if type(version) is not int:
        raise CheckpointError(
            f"the checkpoint has a state of version {version!r}, not an int; use another checkpoint or --init-from"
        )
    return version


def _former_state(values: Mapping[str, Any]) -> dict[str, Versioned]:
    """Return the state that version 0.1 stored without namespaces."""
    state = {}
    if "loss_scale" in values:
        scaler = {"scale": values["loss_scale"], "steps": values.get("loss_scale_steps", 0.0)}
        state["loss_scale"] = Versioned(1, scaler)
    for former in values:
        if former.startswith("transport_"):
            state["gpu_transport"] = Versioned(1, {"name": former.removeprefix("transport_")})
    if "hooks" in values:
        state["hooks"] = Versioned(1, {"states": values["hooks"]})
    return state


@dataclass(frozen=True)
class Fit:
    """How a checkpoint's parameters match a model's, each named by its path.

    Attributes:
        fitting: In both, with the same shape.
        missing: Only in the model.
        unexpected: Only in the checkpoint.
        reshaped: In both, with different shapes; the checkpoint's shape, then the model's.
    """

    fitting: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def wrong(self) -> bool:
        """Whether anything does not match."""
        return bool(self.missing or self.unexpected or self.reshaped)

    @property
    def _differences(self) -> list[str]:
        """A description of each difference, first of parameters, then of optimizer slots."""
        differences = {
            **{name: f"has shape {a} in the checkpoint but {b} in the model" for name, (a, b) in self.reshaped.items()},
            **dict.fromkeys(self.missing, "is missing in the checkpoint"),
            **dict.fromkeys(self.unexpected, "is not in the model"),
        }
        names = sorted(differences, key=lambda name: name.startswith("optimizer/"))
        return [f"{name} {differences[name]}" for name in names]

    def __str__(self) -> str:
        return "; ".join(self._differences)

    def first_differences(self) -> str:
        """Return a description of the first differences, and the number of further differences."""
        differences = self._differences
        shown, more = differences[:_MAX_DIFFERENCES], len(differences) - _MAX_DIFFERENCES
        return "; ".join([*shown, *([f"and {more} more differences"] if more > 0 else [])])


def compare(stored: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> Fit:
    """Compare the shapes of stored arrays with those of ``wanted``, by name."""
    both = [name for name in wanted if name in stored]
    return Fit(
        fitting=tuple(name for name in both if stored[name] == wanted[name]),
        missing=tuple(name for name in wanted if name not in stored),
        unexpected=tuple(name for name in stored if name not in wanted),
        reshaped={name: (stored[name], wanted[name]) for name in both if stored[name] != wanted[name]},
    )


def root_attributes(step: int, data_cursor: int, seed: int) -> dict[str, Any]:
    """Return the attributes of the root that every checkpoint has."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"format": FORMAT, "step": step, "position": data_cursor, "seed": seed, "saved_at": now}


def _attribute(value: Any) -> Any:
    """Convert a value to an HDF5 attribute: numbers and texts are unchanged, everything else becomes JSON."""
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


def _in_native_order(name: str, array: Array) -> Array:
    """Return an array of extra state in this host's byte order.

    Raises:
        JobError: A checkpoint cannot contain its dtype.
    """
    if array.dtype.name not in DTYPES:
        raise JobError(f"the state {name} has the dtype {array.dtype}: must be one of {', '.join(DTYPES)}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _group(name: str) -> str:
    return {"params": "params", "average": "averages"}.get(name, f"optimizer/{name}")


def _check_groups(checkpoint: Checkpoint, wanted: set[str]) -> None:
    others = {"optimizer", *ARRAY_GROUPS}
    held = {name for name in checkpoint.attributes if name != "/" and not name.startswith("run")} - others
    if held != wanted:
        raise CheckpointError(
            f"{checkpoint.path} contains {', '.join(sorted(held))}, but this run has {', '.join(sorted(wanted))}; "
            "use the optimizer and moving average of the checkpoint, or --init-from"
        )


def _kept(name: str, layout: Layout, vector: Array) -> dict[str, Array]:
    """Return the views of a vector that a checkpoint stores: layer state has no optimizer slots."""
    state = {entry.name for entry in layout.entries if entry.kind == "state"}
    views = layout.views(np.asarray(vector))
    return views if name in ("params", "average") else {n: v for n, v in views.items() if n not in state}
