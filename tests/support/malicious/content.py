"""Changed bytes of a checkpoint: structures that the HDF5 library does not write, holes, and mutations."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import h5py
import numpy as np

from mpitrain.checkpoint.digest import digest_of

from .sealing import Recipe, manifest_of, seal, seal_text
from .structures import add_parameter


def _repeated_text(path: Path, _: Path) -> None:
    """Let 3,000 attributes have the same long text."""
    with h5py.File(path, "r+") as file:
        for index in range(3000):
            file["run"].attrs[f"a{index}"] = "x" * 11
        file["run"].attrs["long"] = "x" * 999_999
    content = path.read_bytes()
    at = content.index(struct.pack("<I", 999_999))
    reference = re.compile(re.escape(struct.pack("<I", 11)) + b".{4}\0{4}.\0{3}", re.DOTALL)  # length, address, index
    path.write_bytes(reference.sub(lambda _: content[at : at + 16], content))
    seal(path)


def _dataset_as_root(path: Path, _: Path) -> None:
    with h5py.File(path) as file:
        address = h5py.h5o.get_info(file["params/dense.bias"].id).addr
    with path.open("r+b") as content:
        content.seek(manifest_of(path).block + 64)
        content.write(struct.pack("<Q", address))
    seal(path)


def _long_name(path: Path, _: Path) -> None:
    """Declare that a name has 2^64 - 1 bytes."""
    with h5py.File(path, "r+") as file:
        options = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
        options.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED)  # stores links as messages
        h5py.h5g.create(file["params"].id, b"ordered", gcpl=options)
        file.create_group("params/ordered/" + "n" * 40)
    content = path.read_bytes()
    link = b"\1\4" + bytes(8) + b"\x28" + b"n" * 40  # version, flags, creation order, length and name
    path.write_bytes(content.replace(link, b"\1\3" + b"\xff" * 8 + link[10:]))
    seal(path)


def _slash_in_a_name(path: Path, _: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.create_group("runXparams")
    path.write_bytes(path.read_bytes().replace(b"runXparams", b"run/params"))
    seal(path)


def _overlapping_nodes(path: Path, _: Path) -> None:
    """Let a file of 10 MB declare two million chunks: each chunk in a node of a tree is also the header of a node."""
    with h5py.File(path, "r+") as file:
        add_parameter(file, shape=(1 << 60,), dtype="u1", chunks=(1,), compression="gzip", shuffle=True)
        file["params/x"].id.write_direct_chunk((0,), b"\0")
    content = path.read_bytes()
    block, start = manifest_of(path).block, -(-len(content) // 8) * 8
    node, chunks, nodes = content.index(struct.pack("<IIQQ", 1, 0, 0, 0)) - 24, 4000, 500
    header = b"TREE\1\0" + struct.pack("<H24x", chunks)
    children = b"".join(struct.pack("<24xQ", start - block + 32 * index) for index in range(nodes))
    added = header * (nodes + chunks + 1) + b"TREE\1\1" + struct.pack("<H16x", nodes) + children
    root = start + len(header) * (nodes + chunks + 1)
    content = content.replace(struct.pack("<Q", node - block), struct.pack("<Q", root - block))
    path.write_bytes(content.ljust(start, b"\0") + added + b"x" * 10_000_000)
    seal(path)


def _overlapping_chunks(path: Path, _: Path) -> None:
    """Let 100 chunks have the same bytes of the file."""
    with h5py.File(path, "r+") as file:
        add_parameter(file, data=np.zeros(500, "f4"), chunks=(5,), compression="gzip", shuffle=True)
        size = file["params/x"].id.get_chunk_info(0).size
    content = path.read_bytes() + bytes(200_000)
    for first in range(0, 500, 5):
        key = struct.pack("<IIQQ", size, 0, first, 0)
        content = content.replace(key, struct.pack("<I", 200_000) + key[4:])
    path.write_bytes(content)
    seal(path)


def _misplaced_chunk(path: Path, _: Path) -> None:
    """Let the index have a chunk at element 4 instead of 5, where HDF5 does not find it and reads zeros."""
    with h5py.File(path, "r+") as file:
        add_parameter(file, data=np.ones(10, "f4"), chunks=(5,), compression="gzip", shuffle=True)
    content, key = path.read_bytes(), struct.Struct("<IQQ")  # filter mask, place
    assert content.count(key.pack(0, 5, 0)) == 1
    path.write_bytes(content.replace(key.pack(0, 5, 0), key.pack(0, 4, 0)))
    seal(path)


def named_pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _sparse(path: Path, _: Path) -> None:
    size = 1 << 40
    os.truncate(path, size)
    text = json.dumps({"bytes": size, "rest": digest_of(b""), "arrays": {}})
    seal_text(path, text.encode())


def _sparse_values(path: Path, _: Path) -> None:
    with h5py.File(path, "r+") as file:
        add_parameter(file, shape=(1 << 38,), dtype="f4")
        file["params/x"][-1] = 1
    seal_text(path, json.dumps({"bytes": path.stat().st_size, "rest": digest_of(b""), "arrays": {}}).encode())


RECIPES: dict[str, Recipe] = {
    "repeated text": _repeated_text,
    "dataset as root": _dataset_as_root,
    "long name of a link": _long_name,
    "slash in a name": _slash_in_a_name,
    "overlapping nodes": _overlapping_nodes,
    "overlapping chunks": _overlapping_chunks,
    "misplaced chunk": _misplaced_chunk,
    "named pipe": named_pipe,
    "sparse": _sparse,
    "sparse values": _sparse_values,
}


def mutate(path: Path, rng: np.random.Generator) -> None:
    """Change the structure in a few places, and seal the file."""
    content = bytearray(path.read_bytes())
    manifest = manifest_of(path)
    start, stop = next(iter(manifest.other_ranges()))
    numbers = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1)
    for _ in range(int(rng.integers(1, 5))):
        at, way = int(rng.integers(start, stop)), int(rng.integers(5))
        if way == 0:
            content[at] ^= 1 << int(rng.integers(8))
        elif way == 1:
            content[at] = int(rng.integers(256))
        elif way == 2:  # a number or an address
            at -= at % 8
            content[at : at + 8] = numbers[int(rng.integers(len(numbers)))].to_bytes(8, "little")
        elif way == 3:  # an address in the structure
            at -= at % 8
            content[at : at + 8] = (int(rng.integers(stop - manifest.block)) & ~7).to_bytes(8, "little")
        else:  # bytes from another place
            length, source = int(rng.integers(1, 64)), int(rng.integers(start, stop))
            content[at : at + length] = content[source : source + length]
    path.write_bytes(content[: manifest.size])
    seal(path, described=rng.random() < 0.75)  # other files take longer: each action starts a process
