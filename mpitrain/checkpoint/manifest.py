"""The block of text in front of a checkpoint, from which the file is checked before anybody interprets it.

HDF5 leaves the first bytes of a file, its *user block*, to the user. Here they are text (``head -c 4096``)::

    mpitrain checkpoint 2
    xxh3-128:<of the rest of the block> <bytes of the block>
    {"bytes": <of the file>, "rest": "xxh3-128:...", "arrays": {NAME: [start, stop, "xxh3-128:..."], ...}}

``arrays`` are the ranges of the file with the values of datasets, and the digests of these; ``rest`` is the digest of
all other bytes behind the block, which are names, shapes, attributes, and values that are compressed. So every
byte of the file counts. Where several nodes wrote an array's values, it has a list of such ranges, which follow each
other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .digest import LENGTH, digest_of

_MAGIC = b"mpitrain checkpoint 2\n"
_DIGITS = 12
HEAD = len(_MAGIC) + LENGTH + 1 + _DIGITS + 1  # bytes of the first two lines


class DamagedManifest(ValueError):
    """The block is damaged, or there is none; the message says which."""


class Range(NamedTuple):
    """Bytes [start, stop) of a file, and their digest."""

    start: int
    stop: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a block says of its file.

    Attributes:
        block: Bytes of the block.
        size: Bytes of the whole file.
        rest: Digest of every byte behind the block that is in none of ``arrays``.
        arrays: Where datasets' values are, by name: ranges that follow each other.
    """

    block: int
    size: int
    rest: str
    arrays: Mapping[str, list[Range]]

    def pack(self) -> bytes:
        """The block, ``block`` bytes."""
        arrays = {name: ranges if len(ranges) > 1 else ranges[0] for name, ranges in self.arrays.items()}
        text = json.dumps({"bytes": self.size, "rest": self.rest, "arrays": arrays}) + "\n"
        body = text.encode().ljust(self.block - HEAD, b"\0")
        assert len(body) == self.block - HEAD
        return _MAGIC + f"{_digest(self.block, body)} {self.block:0{_DIGITS}d}\n".encode() + body

    @classmethod
    def unpack(cls, block: bytes) -> Manifest:
        """Read a block whose length ``block_bytes`` told.

        Raises:
            BrokenSeal: It is damaged.
        """
        digest, body = block[len(_MAGIC) : HEAD].decode("ascii", "replace").split(" ")[0], block[HEAD:]
        if digest != _digest(len(block), body):
            raise DamagedManifest("its first bytes are damaged")
        said = json.loads(body.rstrip(b"\0"))
        arrays = {name: _ranges(values) for name, values in said["arrays"].items()}
        return cls(len(block), said["bytes"], said["rest"], arrays)

    def other_ranges(self) -> Iterator[tuple[int, int]]:
        """What ``rest`` is the digest of, in order."""
        yield from gaps(((r.start, r.stop) for ranges in self.arrays.values() for r in ranges), self.block, self.size)


def block_bytes(head: bytes) -> int:
    """How long a block is, by its first ``HEAD`` bytes.

    Raises:
        BrokenSeal: There is no such block.
    """
    if not head:
        raise DamagedManifest("it is empty")
    if head[: len(_MAGIC)] != _MAGIC:
        raise DamagedManifest("it does not begin as a checkpoint of this version of mpitrain does")
    digits = head[HEAD - _DIGITS - 1 : HEAD - 1]
    if len(head) < HEAD or not digits.isdigit() or int(digits) <= HEAD or head[HEAD - 1 : HEAD] != b"\n":
        raise DamagedManifest("its first bytes are damaged")
    return int(digits)


def block_size_for(names: Iterable[str]) -> int:
    """Bytes of a block that has room for a range of each of these arrays: a power of two, as HDF5 wants it."""
    needed = 512 + sum(len(json.dumps(name)) + LENGTH + 60 for name in names)  # 60: two numbers, punctuation
    block = 4096
    while block < needed:
        block *= 2
    return block


def gaps(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """What ``ranges``, none of which overlap, leave of [start, stop), in order."""
    for lo, hi in sorted(ranges):
        if start < lo:
            yield start, lo
        start = hi
    if start < stop:
        yield start, stop


def _ranges(values: list[Any]) -> list[Range]:
    return [Range(*each) for each in (values if isinstance(values[0], list) else [values])]


def _digest(block: int, body: bytes) -> str:
    return digest_of(_MAGIC + str(block).encode() + body)
