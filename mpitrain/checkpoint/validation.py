"""Validates the structure of a checkpoint before any of it is used.

Digests detect damage, not forgery: whoever writes a file can write matching digests. After ``check``, the structure of
a checkpoint is known to be one that this package writes: names, shapes, dtypes, byte ranges and attributes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime

from ..core.checkpoint_files import SHARD_NAME
from .digest import is_digest
from .manifest import Manifest
from .structure import Dataset, Structure, UnsupportedStructure, Value

FORMAT = 2

_MAX_COUNT = 2**53  # maximum number of steps and of examples; exact in JSON
# Maximum number of characters of a name, of an attribute, and of the list of shards.
_MAX_NAME, _MAX_TEXT, _MAX_SHARDS_TEXT = 1 << 10, 1 << 20, 1 << 22
# The values of any file may expand to 64 MiB; for more, the file needs 1 byte per 256 bytes of expanded values.
_ALWAYS_BYTES, _MAX_EXPANSION = 1 << 26, 256
_MAX_CHUNK_BYTES = 1 << 24  # decompressed


def check(structure: Structure, manifest: Manifest, stored_bytes: int) -> Mapping[str, str]:
    """Validate a checkpoint or a shard; return the digests of its shards' manifests by file name.

    Args:
        structure: The structure that the manifest describes, or the HDF5 structure.
        manifest: The file's manifest.
        stored_bytes: Bytes of the structure, including compressed values, that are not in holes of the file.

    Raises:
        UnsupportedStructure: The structure is not one that this package writes; the message states why.
    """
    if (root := structure.groups.get("/")) is None:
        raise UnsupportedStructure("its root is not a group")
    _check_names(structure)
    _check_root(root)
    for group, values in structure.groups.items():
        _check_values(group, values)
    shards = _shards(root)
    _check_places(structure.datasets, manifest)
    for name, dataset in structure.datasets.items():
        _check_storage(name, dataset)
        if any(rows.file not in shards for rows in dataset.virtual):
            raise UnsupportedStructure(f"the values of {name} are in a file that is not one of its shards")
        _check_chunks(name, dataset, manifest.size)
    chunks = [chunk for dataset in structure.datasets.values() for chunk in dataset.chunks]
    if sum(stop - start for start, stop in chunks) > manifest.size:
        raise UnsupportedStructure("its compressed values overlap")
    expanded = (len(dataset.chunks) * dataset.chunk_bytes for dataset in structure.datasets.values() if dataset.chunks)
    _check_expansion(sum(expanded), stored_bytes)
    return shards


def check_shards(datasets: Mapping[str, Dataset], shards: Mapping[str, Mapping[str, Dataset]], on_disk: int) -> None:
    """Check that shards have the rows of virtual datasets, in the same dtype.

    Args:
        datasets: The datasets of the checkpoint.
        shards: The datasets of each shard, by file name.
        on_disk: Bytes of all shards on disk.

    Raises:
        UnsupportedStructure: A shard has other rows, or the shards are too small for the values.
    """
    _check_expansion(sum(dataset.nbytes for dataset in datasets.values() if dataset.virtual), on_disk)
    for name, dataset in datasets.items():
        for rows in dataset.virtual:
            part = shards[rows.file].get(name)
            if part is None or (part.shape, part.dtype) != ((rows.hi - rows.lo, *dataset.shape[1:]), dataset.dtype):
                raise UnsupportedStructure(f"its shard {rows.file} does not have the expected rows of {name}")


def _check_names(structure: Structure) -> None:
    for path in [*(structure.groups.keys() - {"/"}), *structure.datasets]:
        for name in path.split("/"):
            if name in ("", ".", "..") or not name.isprintable() or len(name) > _MAX_NAME:
                raise UnsupportedStructure(f"it contains the name {path[:200]!a}, which is not valid")
        if (path.rpartition("/")[0] or "/") not in structure.groups:
            raise UnsupportedStructure(f"{path[:200]!r} is not in a group")
    for path in structure.groups.keys() & structure.datasets.keys():
        raise UnsupportedStructure(f"{path[:200]!r} is both a group and a dataset")
    for group, values in structure.groups.items():
        for name in values:
            if not name.isprintable():
                raise UnsupportedStructure(f"{group} has the attribute {name[:200]!a}, whose name is not valid")


def _check_root(root: Mapping[str, Value]) -> None:
    """Check the attributes that every checkpoint has."""
    for name in ("format", "step", "position", "seed"):
        if type(root.get(name)) is not int:
            raise UnsupportedStructure(f"its {name} is not an integer" if name in root else f"it has no {name}")
    if root["format"] != FORMAT:
        raise UnsupportedStructure(f"it has format {root['format']}, but this version of mpitrain reads {FORMAT}")
    for name in ("step", "position"):
        if not 0 <= int(root[name]) <= _MAX_COUNT:
            raise UnsupportedStructure(f"its {name} is {root[name]}, which is not between 0 and {_MAX_COUNT}")
    saved = str(root.get("saved_at"))
    try:
        aware = datetime.fromisoformat(saved).tzinfo is not None
    except ValueError:
        aware = False
    if not aware or not saved.isprintable():  # fromisoformat accepts any separator
        raise UnsupportedStructure("its attribute saved_at is not a time")


def _check_values(group: str, values: Mapping[str, Value]) -> None:
    for name, value in values.items():
        limit = _MAX_SHARDS_TEXT if (group, name) == ("/", "parts") else _MAX_TEXT
        if isinstance(value, str) and len(value) > limit:
            raise UnsupportedStructure(f"the attribute {name} of {group} has more than {limit:,} characters")


def _shards(root: Mapping[str, Value]) -> dict[str, str]:
    try:
        shards = json.loads(str(root.get("parts", "{}")))
    except (ValueError, RecursionError):
        shards = None
    if not isinstance(shards, dict) or not all(SHARD_NAME.fullmatch(name) for name in shards):
        raise UnsupportedStructure("its list of shards is malformed")
    if not all(is_digest(digest) for digest in shards.values()):
        raise UnsupportedStructure("its list of shards is malformed")
    return shards


def _check_storage(name: str, dataset: Dataset) -> None:
    """Check that the storage has all values of the dataset."""
    if math.prod(n or 1 for n in dataset.shape) * dataset.dtype.itemsize >= 1 << 62:  # limits empty arrays, too
        raise UnsupportedStructure(f"{name!r} is larger than any memory")
    first = 0
    for rows in dataset.virtual:
        if rows.lo != first or rows.hi <= first:
            raise UnsupportedStructure(f"the shards of {name!r} are malformed")
        first = rows.hi
    if dataset.virtual and dataset.shape[:1] != (first,):
        raise UnsupportedStructure(f"the shards of {name!r} do not have all of its rows")
    start, stop = dataset.place or (0, 0)
    if not (dataset.virtual or dataset.chunks) and stop - start != dataset.nbytes:
        raise UnsupportedStructure(f"the size of {name!r} does not match its shape")


def _check_places(datasets: Mapping[str, Dataset], manifest: Manifest) -> None:
    """Check that the manifest has digests for the places of all values that are not a part of the structure."""
    for name in manifest.arrays:
        if name not in datasets:
            raise UnsupportedStructure("its manifest has values of a dataset that does not exist")
    for name, dataset in datasets.items():
        ranges = manifest.arrays.get(name)
        if ranges is not None:
            if dataset.place != (ranges[0].start, ranges[-1].stop):
                raise UnsupportedStructure(f"the values of {name} are not at the offset that its manifest has")
            if any((part.stop - part.start) % dataset.dtype.itemsize for part in ranges):
                raise UnsupportedStructure(f"the ranges of {name} are not whole values")
        elif dataset.place is not None and (dataset.shape or dataset.place[1] > manifest.size):
            raise UnsupportedStructure(f"its manifest has no digest of {name}")


def _check_chunks(name: str, dataset: Dataset, size: int) -> None:
    """Check that the chunks of a compressed dataset cover it and are within a file of ``size`` bytes."""
    chunk = dataset.chunk_shape
    if not chunk and not dataset.chunks:
        return
    if not chunk or len(chunk) != len(dataset.shape) or 0 in (*chunk, *dataset.shape):
        raise UnsupportedStructure(f"the chunks of {name!r} are malformed")
    if dataset.chunk_bytes > _MAX_CHUNK_BYTES:
        raise UnsupportedStructure(f"the chunks of {name!r} are larger than {_MAX_CHUNK_BYTES >> 20} MiB")
    if len(dataset.chunks) != (expected := math.prod(dataset.grid)):
        raise UnsupportedStructure(f"{name!r} does not have {expected:,} chunks")
    if any(stop > size for _, stop in dataset.chunks):
        raise UnsupportedStructure(f"the values of {name!r} are beyond its end")
    if any(stop - start > 2 * dataset.chunk_bytes + 64 for start, stop in dataset.chunks):
        raise UnsupportedStructure(f"a chunk of {name!r} is larger than its values")


def _check_expansion(expanded: int, stored: int) -> None:
    if expanded > max(_ALWAYS_BYTES, _MAX_EXPANSION * stored):
        raise UnsupportedStructure(
            f"its {stored:,} bytes expand to {expanded:,} bytes, more than {_MAX_EXPANSION} times as many"
        )
