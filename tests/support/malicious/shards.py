"""Sharded checkpoints, of which a shard or the index is malicious."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np

from mpitrain import checkpoint
from mpitrain.checkpoint.digest import digest_of
from mpitrain.checkpoint.sharded import ShardedWriter, ShardSpec
from mpitrain.core.layout import Layout

from ..damage import LAYOUT, state
from .content import named_pipe
from .descriptions import STEP
from .sealing import Recipe, manifest_of, seal
from .structures import edited, root_attribute

MAX_FILES = 200  # limit of open files for a process that reads a checkpoint


def _sharded(change: Recipe) -> Recipe:
    """Return a recipe that writes a sharded checkpoint and changes its first shard."""

    def write(path: Path, secret: Path) -> None:
        writers = [ShardedWriter(path.parent, LAYOUT, 0, {}, "none", ShardSpec(i, 2, "ab")) for i in range(2)]
        for writer in writers:
            writer.write(checkpoint.Snapshot(state(STEP), STEP, 10 * STEP))
        writers[0].write_index()
        shard = path.with_name(f"{path.stem}-ab-1-of-2.h5")
        change(shard, secret)
        if shard.is_file() and not shard.is_symlink():
            _list_shard(path, shard)

    return write


def _list_shard(path: Path, shard: Path) -> None:
    """Store the digest of a changed shard in the index."""
    content = shard.read_bytes()
    with h5py.File(path, "r+") as file:
        parts = json.loads(file.attrs["parts"])
        parts[shard.name] = digest_of(content[: manifest_of(shard).block])
        file.attrs["parts"] = json.dumps(parts)
    seal(path)


def _linked(shard: Path, secret: Path) -> None:
    shard.unlink()
    shard.symlink_to(secret)


def _moved(shard: Path, _: Path) -> None:
    """Replace the shard by a link to a file with the same content."""
    shard.rename(shard.parent / "elsewhere")
    shard.symlink_to("elsewhere")


def _whole(shard: Path, _: Path) -> None:
    """Replace the shard by a shard with all rows."""
    writer = ShardedWriter(shard.parent, LAYOUT, 0, {}, "none", ShardSpec(0, 1, "cd"))
    writer.write(checkpoint.Snapshot(state(STEP), STEP, 10 * STEP))
    shard.with_name(f"step-{STEP:010d}-cd-1-of-1.h5").rename(shard)


def _too_many_shards(path: Path, _: Path) -> None:
    """Let a checkpoint have more shards than a process may open."""
    _sharded(lambda shard, _: None)(path, path)
    with h5py.File(path, "r+") as file:
        parts = json.loads(file.attrs["parts"])
        name, digest = next(iter(parts.items()))
        more = {f"step-{STEP:010d}-cd-{index}-of-{MAX_FILES}.h5": digest for index in range(MAX_FILES)}
        file.attrs["parts"] = json.dumps(parts | more)
    for file in more:
        os.link(path.with_name(name), path.with_name(file))
    seal(path)


def _sparse_shards(path: Path, _: Path) -> None:
    """Let two shards have holes of 40 MiB each: a single file of this size may be sparse."""
    layout = Layout.pack([("x", (2, 10 << 20), "param")])
    writers = [ShardedWriter(path.parent, layout, 0, {}, "none", ShardSpec(i, 2, "ab")) for i in range(2)]
    for index, writer in enumerate(writers):
        writer.write(checkpoint.Snapshot({"params": np.zeros(layout.size, np.float32)}, STEP, 10 * STEP))
        shard = path.with_name(f"{path.stem}-ab-{index + 1}-of-2.h5")
        content = shard.read_bytes()
        shard.write_bytes(content.rstrip(b"\0"))
        os.truncate(shard, len(content))
    writers[0].write_index()


RECIPES: dict[str, Recipe] = {
    "shard is a named pipe": _sharded(named_pipe),
    "shard is a link": _sharded(_linked),
    "shard is a link to a shard": _sharded(_moved),
    "shard is sharded": _sharded(
        edited(root_attribute("parts", json.dumps({"step-0000000030-ab-1-of-2.h5": digest_of(b"")})))
    ),
    "shard has other rows": _sharded(_whole),
    "too many shards": _too_many_shards,
    "sparse shards": _sparse_shards,
}
