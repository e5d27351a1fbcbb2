"""Manifests whose description of groups and arrays does not match the file, or is not valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..damage import save
from .sealing import Recipe, manifest_of, seal, seal_text

STEP = 30
ODD = (None, True, False, 0, -1, 2**31, 2**62, 2**200, 0.5, float("nan"), "", "x", "\x1b[2J", "../secret", [], {})


def described(change: Callable[[dict[str, Any]], object]) -> Recipe:
    """Return a recipe that changes the description of the structure in the manifest."""

    def write(path: Path, _: Path) -> None:
        structure = manifest_of(path).structure
        change(structure)
        seal(path, {"structure": structure})

    return write


def _dataset(**entry: Any) -> Callable[[dict[str, Any]], object]:
    """Return a change of a parameter's entry, which has shape (37,)."""
    return lambda structure: structure["datasets"]["params/dense.bias"].update(entry)


def _added(name: str, **entry: Any) -> Callable[[dict[str, Any]], object]:
    return lambda structure: structure["datasets"].update({name: {"dtype": "float32", "shape": [0], **entry}})


def _root(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda structure: structure["groups"]["/"].update({name: value})


SHAPES = ([36], [38], [], [0], [-37], [37.0], [True], [2**70], [1] * 40 + [37], [37, 0], "37", None, 37, [[37]])
DTYPES = ("float64", "int8", "O", "V4", ">f4", "", 4, None, ["float32"])
ROWS = (
    *(5, [[]], [[[], 0, 37]], [["../secret", 0, 37]], [["/etc/passwd", 0, 37]]),
    *([["x", 0, 2**64]], [["x", 5, 1]], [["step-0000000030.h5", 0, 37]]),
)
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"shape {shape!r}": _dataset(shape=shape) for shape in SHAPES},
    **{f"dtype {dtype!r}": _dataset(dtype=dtype) for dtype in DTYPES},
    **{f"rows {rows!r} and values": _dataset(rows=rows) for rows in ROWS},
    **{f"rows {rows!r}": _added("params/x", shape=[37], rows=rows) for rows in ROWS},
    "no values": _added("params/x", shape=[37]),
    "many values": _added("params/x", shape=[2**40]),
    "many empty values": _added("params/x", shape=[0, 2**61]),
    "another empty array": _added("params/x"),
    "array at the root's path": _added("/"),
    "array at a group's path": _added("params"),
    "array below an array": _added("params/dense.bias/x"),
    "array below nothing": _added("a/b"),
    "control character": _added("params/\x1b[2J"),
    "parent": _added("../x"),
    "half a character": _added("params/\ud800"),
    "missing array": lambda structure: structure["datasets"].pop("params/dense.bias"),
    "renamed array": lambda structure: structure["datasets"].update(x=structure["datasets"].pop("params/dense.bias")),
    "no root": lambda structure: structure["groups"].pop("/"),
    "no datasets": lambda structure: structure.pop("datasets"),
    "other datasets": lambda structure: structure.update(datasets=[]),
    "other groups": lambda structure: structure.update(groups={"/": []}),
    "group as a number": lambda structure: structure["groups"].update(params=5),
    **{f"step {value!r}": _root("step", value) for value in (31, -1, 30.0, "30", None, 2**70, [30])},
    **{f"mode {value!r}": _root("mode", value) for value in ("local", None, [], {}, 2**70, "\ud800")},
    "parts": _root("parts", json.dumps({"../secret": "x"})),
}


def compressed(**entry: Any) -> Recipe:
    """Return a recipe that changes a parameter's entry in a compressed file; its values are one chunk, shape (37,)."""
    change = described(_dataset(**entry))

    def write(path: Path, secret: Path) -> None:
        save(path.parent, STEP, "gzip")
        change(path, secret)

    return write


CHUNKS: dict[str, dict[str, Any]] = {
    **{f"filters {value!r}": {"filters": value} for value in ([], ["gzip"], ["shuffle", "lzf"], None, "gzip", 5)},
    **{
        f"chunk shape {value!r}": {"chunk_shape": value}
        for value in ([], [0], [36], [38], [-37], [37.0], [2**61], [37, 1], [[37]], None, "37")
    },
    **{f"offsets {value!r}": {"offsets": value} for value in ([], [0], [-1], [2**61], [5, 5], ["5"], None, {})},
    **{f"sizes {value!r}": {"sizes": value} for value in ([], [0], [1], [300], [2**61], [5, 5], [True], None, 5)},
    "overlapping chunks": {"shape": [200], "chunk_shape": [1], "offsets": [40_000] * 200, "sizes": [60] * 200},
    "many declared chunks": {"shape": [2**60], "chunk_shape": [1]},
    "rows and chunks": {"rows": [["step-0000000030-ab-1-of-2.h5", 0, 37]]},
    "no chunk shape": {"chunk_shape": [], "filters": []},
}

RECIPES: dict[str, Recipe] = {
    **{f"compressed {name}": compressed(**entry) for name, entry in CHUNKS.items()},
    **{f"described {name}": described(change) for name, change in CHANGES.items()},
    **{f"description {v!r}": lambda path, _, v=v: seal(path, {"structure": v}) for v in ODD[1:]},  # type: ignore[misc]
}


def mutate_description(path: Path, rng: np.random.Generator) -> None:
    """Replace a few values or keys of the manifest by odd ones, and seal the file."""
    manifest = manifest_of(path)
    head = path.read_bytes()[: manifest.block]
    content = json.loads(head.rstrip(b"\0").split(b"\n", 2)[2])
    for _ in range(int(rng.integers(1, 4))):
        inner, key = _random_place(content, rng)
        others = [*ODD, *(inner.values() if isinstance(inner, dict) else inner)]
        if isinstance(inner, dict) and rng.random() < 0.2:
            inner[str(others[int(rng.integers(len(others)))])[:99]] = inner.pop(key)
        else:
            inner[key] = others[int(rng.integers(len(others)))]
    text = json.dumps(content).encode()
    seal_text(path, text[: manifest.block // 2])


def _random_place(content: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return a dict or list at a random depth of a JSON value, and a key or index of this dict or list."""
    while True:
        keys = [*content] if isinstance(content, dict) else [*range(len(content))]
        key = keys[int(rng.integers(len(keys)))]
        inner = content[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.2:
            return content, key
        content = inner
