"""The structure of a checkpoint: groups with attributes, and shapes, dtypes and storage of datasets.

The manifest contains the structure as JSON. In older files it is only in HDF5 form, which ``isolation`` reads. The file
may come from an untrusted source: types and ranges of numbers are checked here, everything else in ``validation``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ..core.layout import Shape

Value = bool | int | float | str
Attributes = Mapping[str, Mapping[str, Any]]

MALFORMED = "its structure is malformed"
FILTERS = ("shuffle", "gzip")  # of compressed values, in the order in which writing applies them
_MAX_RANK = 32
DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool",
        "float16",
        "float32",
        "float64",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}


class UnsupportedStructure(ValueError):
    """The structure is malformed, or is not one that this package writes; the message states why."""


@dataclass(frozen=True)
class Rows:
    """Rows [lo, hi) of a virtual dataset, which are all rows of the dataset of the same name in another file."""

    file: str
    lo: int
    hi: int


@dataclass(frozen=True)
class Dataset:
    """Shape, dtype and storage of a dataset. At most one kind of storage is set; a dataset without storage is empty.

    Attributes:
        place: First and last (exclusive) byte of contiguous values.
        chunk_shape: Shape of compressed chunks; the last chunks may extend beyond the dataset.
        chunks: First and last (exclusive) byte of each chunk, in the order of the chunks' first elements.
        virtual: Rows in other files.
    """

    shape: Shape
    dtype: np.dtype[Any]
    place: tuple[int, int] | None = None
    chunk_shape: Shape = ()
    chunks: tuple[tuple[int, int], ...] = ()
    virtual: tuple[Rows, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Size of a decompressed chunk."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def grid(self) -> Shape:
        """Number of chunks along each dimension."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.chunk_shape, strict=True))


@dataclass(frozen=True, eq=False)
class Structure:
    """All groups and datasets of a file by path, sorted by the names on the path.

    Attributes that are NaN in both structures count as equal; 1, True and 1.0 count as different.

    Attributes:
        groups: Attributes of each group; the root's path is "/", others have no leading slash.
        datasets: The datasets, without their attributes.
    """

    groups: dict[str, dict[str, Value]]
    datasets: dict[str, Dataset]

    @classmethod
    def of(cls, datasets: Mapping[str, Dataset], attributes: Attributes) -> Structure:
        """Return the structure of a file with these datasets, and with these attributes of groups and datasets."""
        parents = {path[:at] for path in (*datasets, *attributes) for at, c in enumerate(path) if c == "/" and at}
        groups = {path: dict(attributes.get(path, {})) for path in {"/", *attributes, *parents} - datasets.keys()}
        return cls(_sorted(groups), _sorted(datasets))

    @classmethod
    def from_json(cls, content: Any, places: Mapping[str, tuple[int, int]]) -> Structure:
        """Return the structure that ``to_json`` converted.

        Args:
            content: The parsed JSON, equal to the value that ``to_json`` returned.
            places: The places of contiguous values, by the dataset's name.

        Raises:
            UnsupportedStructure: The content is malformed.
        """
        try:
            groups = {path: {k: _value(v) for k, v in values.items()} for path, values in content["groups"].items()}
            datasets = {name: _dataset(entry, places.get(name)) for name, entry in content["datasets"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnsupportedStructure(MALFORMED) from error
        return cls(groups, datasets)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the places, as values for JSON."""
        datasets = {
            name: {"dtype": dataset.dtype.name, "shape": dataset.shape}
            | ({"rows": [(rows.file, rows.lo, rows.hi) for rows in dataset.virtual]} if dataset.virtual else {})
            | (_compressed(dataset) if dataset.chunks else {})
            for name, dataset in self.datasets.items()
        }
        return {"groups": self.groups, "datasets": datasets}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        texts = [json.dumps(structure.groups, sort_keys=True) for structure in (self, other)]
        return texts[0] == texts[1] and self.datasets == other.datasets


def _value(value: Any) -> Value:
    """Return the value of an attribute.

    Raises:
        ValueError: It is neither a text nor a number that HDF5 can store.
    """
    if type(value) is str:
        value.encode()  # raises for half a surrogate pair, which cannot be printed
    elif type(value) not in (bool, int, float) or (type(value) is int and not -(2**63) <= value < 2**64):
        raise ValueError("not a number or text")
    return value


def _dataset(entry: Any, place: tuple[int, int] | None) -> Dataset:
    """Return the dataset that an entry describes.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: The entry is malformed.
    """
    shape, chunk_shape = tuple(entry["shape"]), tuple(entry.get("chunk_shape", ()))
    offsets, sizes, filters = (entry.get(name, []) for name in ("offsets", "sizes", "filters"))
    virtual = tuple(Rows(*rows) for rows in entry.get("rows", ()))
    numbers = chain(shape, chunk_shape, offsets, sizes, (n for rows in virtual for n in (rows.lo, rows.hi)))
    if any(type(n) is not int or not 0 <= n < 2**62 for n in numbers) or len(shape) > _MAX_RANK:
        raise ValueError("not a shape, a range of rows or a list of chunks")
    if any(type(rows.file) is not str for rows in virtual) or sum(map(bool, (place, virtual, chunk_shape))) > 1:
        raise ValueError("not rows of a file, or two kinds of storage")
    if filters != (list(FILTERS) if chunk_shape else []):
        raise ValueError("not the filters that compress chunks")
    chunks = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
    return Dataset(shape, DTYPES[entry["dtype"]], place, chunk_shape, chunks, virtual)


def _compressed(dataset: Dataset) -> dict[str, Any]:
    """Return the part of an entry that describes the chunks."""
    offsets, sizes = [start for start, _ in dataset.chunks], [stop - start for start, stop in dataset.chunks]
    return {"filters": FILTERS, "chunk_shape": dataset.chunk_shape, "offsets": offsets, "sizes": sizes}


def _sorted(items: Mapping[str, Any]) -> dict[str, Any]:
    return {path: items[path] for path in sorted(items, key=lambda path: path.split("/"))}
