"""Structures that the HDF5 library writes into a valid checkpoint, which is sealed afterwards."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpitrain.checkpoint.digest import digest_of

from .sealing import Recipe, seal

Edit = Callable[[h5py.File, Path], object]
_TERA = 10**14


def edited(edit: Edit, described: bool = False) -> Recipe:
    """Return a recipe that edits a checkpoint with the HDF5 library, and seals it; see ``seal``."""

    def write(path: Path, secret: Path) -> None:
        with h5py.File(path, "r+") as file:
            edit(file, secret)
        seal(path, described=described)

    return write


def add_parameter(file: h5py.File, **options: Any) -> None:
    file.create_dataset("params/x", **options)


def _virtual(file: h5py.File, source: str) -> None:
    layout = h5py.VirtualLayout((37,), np.float32)
    layout[:] = h5py.VirtualSource(source, "params/x", (37,), np.float32)
    file.create_virtual_dataset("params/x", layout)


def _chunk(file: h5py.File, data: bytes, shape: tuple[int, ...] = (37,), chunks: tuple[int, ...] = (37,)) -> None:
    """Add a parameter whose first compressed chunk has the bytes ``data``."""
    add_parameter(file, shape=shape, dtype=np.float32, chunks=chunks, compression="gzip", shuffle=True)
    file["params/x"].id.write_direct_chunk((0,) * len(shape), data)


def _deep(file: h5py.File, depth: int) -> None:
    group = file
    for _ in range(depth):
        group = group.create_group("g")


def _cycle(file: h5py.File) -> None:
    file["params/loop"] = file["params"]


def root_attribute(name: str, value: Any) -> Edit:
    return lambda file, _: file.attrs.__setitem__(name, value)


def _added(name: str, **options: Any) -> Edit:
    return lambda file, _: file.create_dataset(name, **options)


_BOMB = zlib.compress(bytes(1 << 28))
EDITS: dict[str, Edit] = {
    "external storage": lambda f, s: add_parameter(f, shape=(37,), dtype="f4", external=[(str(s), 0, 148)]),
    "external storage of /etc": lambda f, _: add_parameter(
        f, shape=(37,), dtype="f4", external=[("/etc/passwd", 0, 148)]
    ),
    "external link": lambda f, s: f.__setitem__("params/x", h5py.ExternalLink(str(s), "/x")),
    "external link to itself": lambda f, _: f.__setitem__(
        "params/x", h5py.ExternalLink("step-0000000030.h5", "/params")
    ),
    "soft link": lambda f, _: f.__setitem__("run/x", h5py.SoftLink("/params")),
    "soft link to a parameter": lambda f, _: f.__setitem__("params/x", h5py.SoftLink("/params/dense.bias")),
    "hard link": lambda f, _: f.__setitem__("params/x", f["params/dense.bias"]),
    "cycle": lambda f, _: _cycle(f),
    "deep groups": lambda f, _: _deep(f, 500),
    "virtual secret": lambda f, s: _virtual(f, str(s)),
    "virtual relative": lambda f, _: _virtual(f, "../secret"),
    "virtual itself": lambda f, _: _virtual(f, "."),
    "declared size": lambda f, _: add_parameter(
        f, shape=(_TERA,), dtype="f4", chunks=(1 << 16,), compression="gzip", shuffle=True
    ),
    "declared size, plain chunks": lambda f, _: add_parameter(f, shape=(_TERA,), dtype="f4", chunks=(1 << 16,)),
    "declared size, contiguous": lambda f, _: add_parameter(f, shape=(_TERA,), dtype="f4"),
    "declared size, empty": lambda f, _: add_parameter(f, shape=(0, 2**62), dtype="f8"),
    "huge chunk": lambda f, _: _chunk(f, _BOMB[:5000], (1 << 26,), (1 << 26,)),
    "bomb": lambda f, _: _chunk(f, _BOMB),
    "bomb of declared size": lambda f, _: add_parameter(
        f, shape=(1 << 25,), data=np.zeros(1 << 25, "f4"), compression="gzip", shuffle=True
    ),
    "not compressed": lambda f, _: _chunk(f, b"not compressed"),
    "empty chunk": lambda f, _: _chunk(f, b"\0"),
    "missing chunk": lambda f, _: add_parameter(
        f, shape=(37,), dtype="f4", chunks=(5,), compression="gzip", shuffle=True
    ),
    "other filter": lambda f, _: add_parameter(f, data=np.ones(37, "f4"), compression="lzf"),
    "checksum filter": lambda f, _: add_parameter(f, data=np.ones(37, "f4"), chunks=(5,), fletcher32=True),
    "resizable": lambda f, _: add_parameter(f, data=np.ones(37, "f4"), maxshape=(None,)),
    "null": lambda f, _: f.__setitem__("params/x", h5py.Empty("f4")),
    "committed type": lambda f, _: f.__setitem__("params/x", np.dtype("f4")),
    "control name": _added("params/\x1b[2J", data=np.float32(1)),
    "line in name": _added("params/a\nb", data=np.float32(1)),
    "bidirectional name": _added("params/a\u202eb", data=np.float32(1)),
    "latin name": lambda f, _: h5py.h5g.create(f["params"].id, b"\xff\xfe"),
    "long name": _added("params/" + "n" * 5000, data=np.float32(1)),
    "name of a parent": lambda f, _: h5py.h5g.create(f["params"].id, b".."),
    "control attribute": root_attribute("a\x1b[2J", 1),
    **{
        f"dtype {dtype}": _added("params/x", shape=(2,), dtype=dtype)
        for dtype in (
            "c8",
            "S5",
            ">f4",
            "V3",
            h5py.string_dtype(),
            h5py.ref_dtype,
            h5py.vlen_dtype("f4"),
            "f4,i4",
            "(2,)f4",
        )
    },
    "without parameters": lambda f, _: f.__delitem__("params"),
    "without step": lambda f, _: f.attrs.__delitem__("step"),
    "without format": lambda f, _: f.attrs.__delitem__("format"),
    "without time": lambda f, _: f.attrs.__delitem__("saved_at"),
    **{
        f"{name} {value!r}": root_attribute(name, value)
        for name, values in {
            "format": (3, -1, "2", 2.0),
            "step": (-5, 1.5, 2**60, 2**63, "30", True, np.arange(3), np.nan),
            "position": (-1, 0.5, 2**62, "x", np.arange(1), h5py.Empty("i8")),
            "seed": ("x", 1.5, np.arange(2)),
            "saved_at": (
                "",
                "yesterday",
                5,
                "2026-01-01",
                "2026-01-01T00:00:00",
                "9999-99-99T00:00:00+00:00",
                "2026-01-01\x1b00:00:00+00:00",
            ),
            "mode": (1j, np.bytes_(b"\xff\xfe"), np.arange(5), "x" * (1 << 21), h5py.Empty("f4")),
            "parts": (
                "",
                "[]",
                "{",
                "5",
                "[" * 50_000,
                '{"a": 1}',
                '{"../secret": "x"}',
                '{"/etc/passwd": "x"}',
                "NaN",
            ),
        }.items()
        for value in values
    },
    **{
        f"part {file}": root_attribute("parts", json.dumps({file: digest_of(b"")}))
        for file in (
            "step-0000000030.h5",
            "step-0000000030-ab-1-of-2.h5",
            "step-0000000030-ab-2-of-2.h5",
            "x\n.h5",
            "..",
            "",
        )
    },
}
RECIPES: dict[str, Recipe] = {
    **{name: edited(edit) for name, edit in EDITS.items()},
    **{f"{name}, described otherwise": edited(edit, described=True) for name, edit in EDITS.items()},
}
