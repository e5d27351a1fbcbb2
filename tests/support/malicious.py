"""Writes checkpoints with valid digests that a stranger could send, and finds out what reading them does.

Each is read in a forked process with limited memory and time. It must be refused in one line, or be harmless: no file
is opened that it names, and nothing of another file is in what is read.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import ml_dtypes  # noqa: F401  imported before memory is limited
import numpy as np
import safetensors.numpy  # noqa: F401

from mpitrain import checkpoint
from mpitrain.checkpoint.container import read_chunks, write_container
from mpitrain.checkpoint.diff import differences
from mpitrain.checkpoint.digest import Digest, digest_of
from mpitrain.checkpoint.export import export
from mpitrain.checkpoint.manifest import HEAD, Manifest, block_bytes
from mpitrain.checkpoint.sharded import ShardedWriter, ShardSpec
from mpitrain.checkpoint.state import root_attributes
from mpitrain.checkpoint.summary import describe
from mpitrain.core.layout import Layout
from mpitrain.errors import CheckpointError

from .damage import LAYOUT, NAMES, save, state
from .launch import VERSION_0_1

SECRET = b"the content of a secret file " * 8
MEMORY_BYTES, TIME_S, MAX_FILES = 500 << 20, 5, 200
STEP = 30
_TERA = 10**14

Edit = Callable[[h5py.File, Path], object]


def seal(path: Path, content: Mapping[str, Any] | None = None) -> None:
    """Write a manifest with valid digests.

    Args:
        path: A file with a user block.
        content: Replaces what the manifest has.
    """
    with path.open("r+b") as file:
        old = manifest_of(path)
        size = file.seek(0, os.SEEK_END)
        arrays = {name: ranges for name, ranges in old.arrays.items() if ranges[-1].stop <= size}
        digest = Digest()
        for start, stop in Manifest(old.block, size, "", arrays).other_ranges():
            for chunk in read_chunks(file.fileno(), start, stop):
                digest.add(chunk)
        sealed = Manifest(old.block, size, str(digest), arrays)
        file.seek(0)
        file.write(sealed.pack())
    if content is not None:
        plain = {name: [list(each) for each in ranges] for name, ranges in arrays.items()}
        seal_text(path, json.dumps({"bytes": size, "rest": str(digest), "arrays": plain} | content).encode())


def seal_text(path: Path, text: bytes) -> None:
    """Write a manifest that has any text, with a valid digest."""
    block = manifest_of(path).block
    body = text.ljust(block - HEAD, b"\0")
    magic = b"mpitrain checkpoint 2\n"
    with path.open("r+b") as file:
        file.write(magic + f"{digest_of(magic + str(block).encode() + body)} {block:012d}\n".encode() + body)


def manifest_of(path: Path) -> Manifest:
    with path.open("rb") as file:
        content = file.read(1 << 20)
    return Manifest.unpack(content[: block_bytes(content[:HEAD])])


# Crafted structures. Each edits a valid checkpoint with the HDF5 library; it is sealed afterwards.


def _add(file: h5py.File, **options: Any) -> None:
    file.create_dataset("params/x", **options)


def _virtual(file: h5py.File, source: str) -> None:
    layout = h5py.VirtualLayout((37,), np.float32)
    layout[:] = h5py.VirtualSource(source, "params/x", (37,), np.float32)
    file.create_virtual_dataset("params/x", layout)


def _chunk(file: h5py.File, data: bytes, shape: tuple[int, ...] = (37,), chunks: tuple[int, ...] = (37,)) -> None:
    """Store a chunk with any compressed bytes."""
    _add(file, shape=shape, dtype=np.float32, chunks=chunks, compression="gzip", shuffle=True)
    file["params/x"].id.write_direct_chunk((0,) * len(shape), data)


def _deep(file: h5py.File, depth: int) -> None:
    group = file
    for _ in range(depth):
        group = group.create_group("g")


def _cycle(file: h5py.File) -> None:
    file["params/loop"] = file["params"]


def _root(name: str, value: Any) -> Edit:
    return lambda file, _: file.attrs.__setitem__(name, value)


def _added(name: str, **options: Any) -> Edit:
    return lambda file, _: file.create_dataset(name, **options)


_BOMB = zlib.compress(bytes(1 << 28))
EDITS: dict[str, Edit] = {
    "external storage": lambda f, s: _add(f, shape=(37,), dtype="f4", external=[(str(s), 0, 148)]),
    "external storage of /etc": lambda f, _: _add(f, shape=(37,), dtype="f4", external=[("/etc/passwd", 0, 148)]),
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
    "declared size": lambda f, _: _add(
        f, shape=(_TERA,), dtype="f4", chunks=(1 << 16,), compression="gzip", shuffle=True
    ),
    "declared size, plain chunks": lambda f, _: _add(f, shape=(_TERA,), dtype="f4", chunks=(1 << 16,)),
    "declared size, contiguous": lambda f, _: _add(f, shape=(_TERA,), dtype="f4"),
    "declared size, empty": lambda f, _: _add(f, shape=(0, 2**62), dtype="f8"),
    "huge chunk": lambda f, _: _chunk(f, _BOMB[:5000], (1 << 26,), (1 << 26,)),
    "bomb": lambda f, _: _chunk(f, _BOMB),
    "bomb of declared size": lambda f, _: _add(
        f, shape=(1 << 25,), data=np.zeros(1 << 25, "f4"), compression="gzip", shuffle=True
    ),
    "not compressed": lambda f, _: _chunk(f, b"not compressed"),
    "empty chunk": lambda f, _: _chunk(f, b"\0"),
    "missing chunk": lambda f, _: _add(f, shape=(37,), dtype="f4", chunks=(5,), compression="gzip", shuffle=True),
    "other filter": lambda f, _: _add(f, data=np.ones(37, "f4"), compression="lzf"),
    "checksum filter": lambda f, _: _add(f, data=np.ones(37, "f4"), chunks=(5,), fletcher32=True),
    "resizable": lambda f, _: _add(f, data=np.ones(37, "f4"), maxshape=(None,)),
    "null": lambda f, _: f.__setitem__("params/x", h5py.Empty("f4")),
    "committed type": lambda f, _: f.__setitem__("params/x", np.dtype("f4")),
    "control name": _added("params/\x1b[2J", data=np.float32(1)),
    "line in name": _added("params/a\nb", data=np.float32(1)),
    "bidirectional name": _added("params/a\u202eb", data=np.float32(1)),
    "latin name": lambda f, _: h5py.h5g.create(f["params"].id, b"\xff\xfe"),
    "long name": _added("params/" + "n" * 5000, data=np.float32(1)),
    "name of a parent": lambda f, _: h5py.h5g.create(f["params"].id, b".."),
    "control attribute": _root("a\x1b[2J", 1),
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
        f"{name} {value!r}": _root(name, value)
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
        f"part {file}": _root("parts", json.dumps({file: digest_of(b"")}))
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
_SIZE = 48_000
CONTENTS: dict[str, Mapping[str, Any]] = {
    "no arrays": {"arrays": None},
    "list of arrays": {"arrays": []},
    "array of text": {"arrays": {"a": "text"}},
    "array of nothing": {"arrays": {"a": []}},
    "array of a list": {"arrays": {"a": [[]]}},
    "array of numbers": {"arrays": {"a": [1, 2, 3]}},
    "array of another name": {"arrays": {"a\x1b": [_SIZE - 4, _SIZE, digest_of(b"")]}},
    "text of bytes": {"bytes": "5"},
    "fractional bytes": {"bytes": 5.5},
    "many bytes": {"bytes": 2**200},
    "negative bytes": {"bytes": -1},
    "rest of a number": {"rest": 5},
    "rest of null": {"rest": None},
    **{
        f"range {lo} {hi}": {"arrays": {"params/dense.bias": [lo, hi, digest_of(b"")]}}
        for lo, hi in (
            (-8, 8),
            (0, 148),
            (5000, 4000),
            (5000, 5000),
            (0.5, 9.5),
            (_SIZE, 10**15),
            (2**70, 2**71),
            (True, 5),
        )
    },
    "overlap": {"arrays": {"a": [5000, 6000, digest_of(b"")], "b": [5500, 6500, digest_of(b"")]}},
    "gap": {"arrays": {"a": [[5000, 6000, digest_of(b"")], [6500, 7000, digest_of(b"")]]}},
}
TEXTS = {
    "deep manifest": b"[" * 3000,
    "deep manifest of objects": b'{"a":' * 600,
    "manifest of a number": b"5",
    "manifest of null": b"null",
    "manifest of nothing": b"",
    "manifest in latin": b'"\xff\xfe"',
    "manifest of digits": b"9" * 3900,
    "manifest without keys": b"{}",
}


def _edited(edit: Edit) -> Callable[[Path, Path], None]:
    def write(path: Path, secret: Path) -> None:
        with h5py.File(path, "r+") as file:
            edit(file, secret)
        seal(path)

    return write


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
    """Let 10 MB declare two million chunks: each chunk in a node of a tree is also the header of another node."""
    with h5py.File(path, "r+") as file:
        _add(file, shape=(1 << 60,), dtype="u1", chunks=(1,), compression="gzip", shuffle=True)
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
    """Let two shards be holes of 40 MiB each, which is less than any file may have."""
    layout = Layout.pack([("x", (2, 10 << 20), "param")])
    writers = [ShardedWriter(path.parent, layout, 0, {}, "none", ShardSpec(i, 2, "ab")) for i in range(2)]
    for index, writer in enumerate(writers):
        writer.write(checkpoint.Snapshot({"params": np.zeros(layout.size, np.float32)}, STEP, 10 * STEP))
        shard = path.with_name(f"{path.stem}-ab-{index + 1}-of-2.h5")
        content = shard.read_bytes()
        shard.write_bytes(content.rstrip(b"\0"))
        os.truncate(shard, len(content))
    writers[0].write_index()


def _overlapping_chunks(path: Path, _: Path) -> None:
    """Let 100 chunks have the same bytes of the file."""
    with h5py.File(path, "r+") as file:
        _add(file, data=np.zeros(500, "f4"), chunks=(5,), compression="gzip", shuffle=True)
        size = file["params/x"].id.get_chunk_info(0).size
    content = path.read_bytes() + bytes(200_000)
    for first in range(0, 500, 5):
        key = struct.pack("<IIQQ", size, 0, first, 0)
        content = content.replace(key, struct.pack("<I", 200_000) + key[4:])
    path.write_bytes(content)
    seal(path)


def _fifo(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _sparse(path: Path, _: Path) -> None:
    size = 1 << 40
    os.truncate(path, size)
    text = json.dumps({"bytes": size, "rest": digest_of(b""), "arrays": {}})
    seal_text(path, text.encode())


def _sparse_values(path: Path, _: Path) -> None:
    with h5py.File(path, "r+") as file:
        _add(file, shape=(1 << 38,), dtype="f4")
        file["params/x"][-1] = 1
    seal_text(path, json.dumps({"bytes": path.stat().st_size, "rest": digest_of(b""), "arrays": {}}).encode())


def _sharded(change: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """Return a recipe that replaces the first shard of a sharded checkpoint."""

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
    """Replace the shard by a link to the same content elsewhere."""
    shard.rename(shard.parent / "elsewhere")
    shard.symlink_to("elsewhere")


def _whole(shard: Path, _: Path) -> None:
    """Replace the shard by one with all rows."""
    writer = ShardedWriter(shard.parent, LAYOUT, 0, {}, "none", ShardSpec(0, 1, "cd"))
    writer.write(checkpoint.Snapshot(state(STEP), STEP, 10 * STEP))
    shard.with_name(f"step-{STEP:010d}-cd-1-of-1.h5").rename(shard)


RECIPES: dict[str, Callable[[Path, Path], None]] = {
    **{name: _edited(edit) for name, edit in EDITS.items()},
    **{name: lambda path, _, content=content: seal(path, content) for name, content in CONTENTS.items()},  # type: ignore[misc]
    **{name: lambda path, _, text=text: seal_text(path, text) for name, text in TEXTS.items()},  # type: ignore[misc]
    "repeated text": _repeated_text,
    "dataset as root": _dataset_as_root,
    "long name of a link": _long_name,
    "slash in a name": _slash_in_a_name,
    "overlapping nodes": _overlapping_nodes,
    "overlapping chunks": _overlapping_chunks,
    "named pipe": _fifo,
    "sparse": _sparse,
    "sparse values": _sparse_values,
    "shard is a named pipe": _sharded(_fifo),
    "shard is a link": _sharded(_linked),
    "shard is a link to a shard": _sharded(_moved),
    "shard is sharded": _sharded(_edited(_root("parts", json.dumps({"step-0000000030-ab-1-of-2.h5": digest_of(b"")})))),
    "shard has other rows": _sharded(_whole),
    "too many shards": _too_many_shards,
    "sparse shards": _sparse_shards,
}


def mutate(path: Path, rng: np.random.Generator) -> None:
    """Change a few bytes of the structure, and seal the file."""
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
        else:  # a block of another place
            length, source = int(rng.integers(1, 64)), int(rng.integers(start, stop))
            content[at : at + length] = content[source : source + length]
    path.write_bytes(content[: manifest.size])
    seal(path)


# What reading does


def read_all(path: Path) -> dict[str, str]:
    """Do everything that reads a checkpoint; return the errors, each in one line, by action."""
    errors: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except CheckpointError as error:
            errors[name] = str(error)

    out = path.parent / "out"
    attempt("verify", lambda: checkpoint.verify(path))
    attempt("inspect", lambda: _with(path, lambda opened: [*describe(opened)]))
    attempt("diff", lambda: _with(path, lambda opened: [*differences(opened, opened)]))
    for to in ("npz", "safetensors"):
        attempt(f"export {to}", lambda to=to: _with(path, lambda opened: export(opened, out, to)))  # type: ignore[misc]
        attempt(f"export {to} averages", lambda to=to: _with(path, lambda opened: export(opened, out, to, None, True)))  # type: ignore[misc]
        if out.exists():
            assert SECRET[:29] not in out.read_bytes() and b"root:" not in out.read_bytes(), "a secret was exported"
            out.unlink()
    vectors = {name: np.zeros(LAYOUT.size, np.float32) for name in NAMES}
    attempt("resume", lambda: checkpoint.read(path, LAYOUT, vectors, 0))
    attempt("init", lambda: checkpoint.load_matching(path, LAYOUT, vectors["params"]))
    assert not any(SECRET[:29] in vector.tobytes() for vector in vectors.values()), "a secret was read"
    return errors


def _with(path: Path, action: Callable[[checkpoint.Checkpoint], object]) -> None:
    with checkpoint.Checkpoint(path) as opened:
        action(opened)


def check(path: Path, secret: Path) -> str:
    """Read a checkpoint; return ``accepted`` or ``refused``. Fails if it does harm or is not refused in one line."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(os.fsdecode(args[0])) if _opens(event, args) else None)
    errors = read_all(path)
    inside = {Path(file).name for file in opened if file.startswith(str(secret.parent))}
    assert all(name.startswith(("step-", "out", path.parent.name)) for name in inside), f"opened {inside}"
    assert "/etc/passwd" not in opened
    for error in errors.values():
        assert str(path.parent) in error and error.isprintable(), f"not one line with the file's name: {error!r}"
    assert ("verify" in errors) == ("diff" in errors), "both read all values, but only one refuses the file"
    return "refused" if "verify" in errors else "accepted"


def _opens(event: str, args: tuple[Any, ...]) -> bool:
    return event == "open" and isinstance(args[0], (str, bytes, os.PathLike))


class Outcome(NamedTuple):
    """What an action returned, or how it failed; its CPU time, and the largest memory of its process in bytes."""

    result: str
    seconds: float
    peak_bytes: int


def in_child(action: Callable[[], str]) -> Outcome:
    """Run an action in a forked process with limited memory and time."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        os.close(receive)
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES,) * 2)
            signal.setitimer(signal.ITIMER_PROF, TIME_S)  # other processes may keep the cores busy
            signal.alarm(12 * TIME_S)
            result = action()
        except BaseException as error:
            result = f"FAILED {type(error).__name__}: {error}"[:1000]
        os.write(send, result.encode("utf-8", "replace"))
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as pipe:
        result = pipe.read().decode()
    _, status, usage = os.wait4(child, 0)
    if os.WIFSIGNALED(status):
        result = f"FAILED with signal {os.WTERMSIG(status)}"
    return Outcome(result, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)


def campaign(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Outcome]]:
    """Yield kind and outcome of ``count`` malicious files: all crafted ones, and mutated ones."""
    rng = np.random.default_rng(seed)
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    plain = save(folder / "none", STEP)
    many = save(folder / "many", STEP)
    write_container(many, {f"params/{i}": np.ones(3) for i in range(60)}, {"/": root_attributes(STEP, 1, 0)})
    valid = [plain, save(folder / "gzip", STEP, "gzip"), many, *sorted(VERSION_0_1.rglob("step-??????????.h5"))]
    for index in range(count):
        name = [*RECIPES][index] if index < len(RECIPES) else "mutated"
        inner = folder / f"{index}"
        original = valid[index % len(valid)] if name == "mutated" else plain
        path = shutil.copytree(original.parent, inner) / original.name
        if name == "mutated":
            mutate(path, rng)
        else:
            RECIPES[name](path, secret)
        outcome = in_child(lambda path=path: check(path, secret))  # type: ignore[misc]
        yield name, outcome
        if not outcome.result.startswith("FAILED"):
            shutil.rmtree(inner)


def main(count: int, seed: int = 0) -> int:
    """Run a campaign; return 1 if a file does harm or a crafted one is not refused."""
    found: Counter[str] = Counter()
    failed, seconds, peak_bytes = 0, 0.0, 0
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # exports are flushed, which disks do slowly
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for index, (name, (result, *used)) in enumerate(campaign(Path(folder), count, seed)):
            seconds, peak_bytes = max(seconds, used[0]), max(peak_bytes, used[1])
            found[f"{'mutated' if name == 'mutated' else 'crafted'} {result.split()[0]}"] += 1
            if result.startswith("FAILED") or (name != "mutated" and result != "refused"):
                print(f"file {index} of seed {seed}, {name}: {result}")
                failed += 1
    for line, times in sorted(found.items()):
        print(f"{times:6,} {line}")
    print(f"each within {seconds:.2f} s and {peak_bytes >> 20} MiB")
    return int(failed > 0)
