"""Cases, the peers' process, and the comparison of values and their types."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

PEERS = Path(__file__).parents[1] / "peers" / "formats.py"


def no_checksum(way: str, start: int, stop: int) -> bool:
    """Return that a format does not show damage."""
    return False


@dataclass
class Case:
    """Some files that are read together.

    Attributes:
        files: The files, of which one may be damaged.
        read: Reads the files with mpitrain; the result must be ``expected``.
        about: What is special about the files.
        refusals: Errors by which ``read`` may refuse files, besides DataError.
        is_protected: Takes the way of damage of the first file, its first byte, and the byte after the last; returns
            whether a checksum or a length of the format shows the damage.
    """

    files: list[Path]
    read: Callable[[], Any]
    expected: Any
    about: str = ""
    refusals: tuple[type[Exception], ...] = ()
    is_protected: Callable[[str, int, int], bool] = no_checksum


class Peers:
    """A process with another Python, which writes and reads files with the packages of others."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, what: str, *arguments: Any) -> Any:
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            pipe = subprocess.PIPE
            command = [self._python, str(PEERS)]
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
            )
        assert self._process.stdin and self._process.stdout
        pickle.dump((what, arguments), self._process.stdin)
        self._process.stdin.flush()
        result = pickle.load(self._process.stdout)
        if isinstance(result, Exception):
            raise result
        return result


class Near:
    """Expected where a format does not determine the type: a function says whether a value is right."""

    def __init__(self, is_right: Callable[[Any], bool], text: str) -> None:
        self._is_right, self.text = is_right, text

    def is_right(self, value: Any) -> bool:
        try:
            return self._is_right(value)
        except (ValueError, TypeError):  # the value is of another type
            return False


def difference(got: Any, expected: Any, place: str = "") -> str:
    """Return how two values differ, in their types too; an empty text if they do not."""
    if isinstance(expected, Near):
        return "" if expected.is_right(got) else f"{place}: {_short(got)} instead of {expected.text}"
    if type(got) is not type(expected):
        return f"{place}: {type(got).__name__} {_short(got)} instead of {type(expected).__name__} {_short(expected)}"
    if isinstance(expected, dict):
        if got.keys() != expected.keys():
            return f"{place}: names {_short(list(got))} instead of {_short(list(expected))}"
        return next(filter(None, (difference(got[key], expected[key], f"{place}.{key}") for key in expected)), "")
    if isinstance(expected, (list, tuple)):
        if len(got) != len(expected):
            return f"{place}: {len(got)} values instead of {len(expected)}: {_short(got)}, {_short(expected)}"
        pairs = enumerate(zip(got, expected, strict=True))
        return next(filter(None, (difference(*pair, f"{place}[{i}]") for i, pair in pairs)), "")
    return "" if _same(got, expected) else f"{place}: {_short(got)} instead of {_short(expected)}"


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, (np.ndarray, np.generic, float)):
        one, other = np.asarray(got), np.asarray(expected)
        alike = one.dtype == other.dtype and one.shape == other.shape and one.dtype.isnative
        return bool(alike and np.array_equal(one, other, equal_nan=one.dtype.kind in "fcmM"))
    return bool(got == expected)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 160 else text[:160] + "..."


def documented(scalar: Any) -> Any:
    """Return the Python value of an Arrow scalar by the documentation of ``mpitrain.data.parquet``."""
    kind, types = scalar.type, pa.types
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.FixedShapeTensorScalar):
        return scalar.to_numpy()
    if isinstance(scalar, pa.ExtensionScalar) or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        inner = scalar.as_py() if types.is_run_end_encoded(kind) else scalar.value
        return documented(inner) if isinstance(inner, pa.Scalar) else documented(pa.scalar(inner, kind.value_type))
    if types.is_struct(kind):
        return {name: documented(scalar[name]) for name in (field.name for field in kind)}
    if types.is_map(kind):
        return {documented(pair["key"]): documented(pair["value"]) for pair in scalar.values}
    if types.is_nested(kind) and not types.is_union(kind):
        return _list([documented(item) for item in scalar.values], kind)
    if types.is_timestamp(kind) and kind.unit == "ns":
        return np.datetime64(scalar.value, "ns")
    if types.is_duration(kind) and kind.unit == "ns":
        return np.timedelta64(scalar.value, "ns")
    if kind == pa.time64("ns"):
        return np.timedelta64(scalar.value, "ns")
    is_plain = kind in (pa.int64(), pa.float64(), pa.bool_()) or not is_number(kind)
    return scalar.as_py() if is_plain else kind.to_pandas_dtype()(scalar.as_py())


def is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _list(items: Sequence[Any], kind: Any) -> Any:
    """Return a list, or an array if it consists of numbers, and its lists have one length."""
    leaf = kind.value_type
    while hasattr(leaf, "value_type") and not pa.types.is_map(leaf):  # a list, or the storage of a dictionary
        leaf = leaf.value_type
    if is_number(leaf) and not any(item is None or isinstance(item, (list, np.ndarray)) for item in items):
        return np.array(items, leaf.to_pandas_dtype())
    if is_number(leaf):
        if not items:
            return np.array([], leaf.to_pandas_dtype())
        if all(isinstance(item, np.ndarray) and item.shape == items[0].shape for item in items):
            return np.stack(items)
    return list(items)
