"""Writes manifests with valid digests into changed checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.container import read_chunks
from mpitrain.checkpoint.digest import Digest, digest_of
from mpitrain.checkpoint.manifest import HEAD, Manifest, block_bytes

# Changes a checkpoint, given its path and the path of a secret file.
Recipe = Callable[[Path, Path], None]


def seal(path: Path, content: Mapping[str, Any] | None = None, described: bool = False) -> None:
    """Write a manifest with valid digests.

    Args:
        path: A file with a user block.
        content: Entries of the manifest to replace or to add.
        described: Whether to keep the manifest's description of the structure. Without the description, readers get
            the structure from HDF5, as for files of earlier versions.
    """
    with path.open("r+b") as file:
        old = manifest_of(path)
        size = file.seek(0, os.SEEK_END)
        arrays = {name: ranges for name, ranges in old.arrays.items() if ranges[-1].stop <= size}
        digest = Digest()
        for start, stop in Manifest(old.block, size, "", arrays).other_ranges():
            for chunk in read_chunks(file.fileno(), start, stop):
                digest.add(chunk)
        structure = old.structure if described else None
        sealed = Manifest(old.block, size, str(digest), arrays, structure)
        file.seek(0)
        file.write(sealed.pack())
    if content is not None:
        plain = {name: [list(each) for each in ranges] for name, ranges in arrays.items()}
        seal_text(path, json.dumps({"bytes": size, "rest": str(digest), "arrays": plain} | content).encode())


def seal_text(path: Path, text: bytes) -> None:
    """Write a manifest with the given text and a valid digest."""
    block = manifest_of(path).block
    body = text.ljust(block - HEAD, b"\0")
    magic = b"mpitrain checkpoint 2\n"
    with path.open("r+b") as file:
        file.write(magic + f"{digest_of(magic + str(block).encode() + body)} {block:012d}\n".encode() + body)


def manifest_of(path: Path) -> Manifest:
    with path.open("rb") as file:
        content = file.read(1 << 20)
    return Manifest.unpack(content[: block_bytes(content[:HEAD])])
