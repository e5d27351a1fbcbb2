"""The manifest: a block of text at the start of a checkpoint, used to verify the file before it is interpreted.

HDF5 reserves the first bytes of a file, the *user block*, for applications. In a checkpoint it is text, which
``head -c 4096`` shows::

    mpitrain checkpoint 2
    xxh3-128:<of the rest of the block> <bytes of the block>
    {"bytes": <of the file>, "rest": "xxh3-128:...", "arrays": {NAME: [start, stop, "xxh3-128:..."], ...},
     "structure": {"groups": {PATH: {ATTRIBUTE: value, ...}, ...},
                   "datasets": {NAME: {"dtype": "float32", "shape": [784, 256]}, ...}}}

``arrays`` contains the byte ranges of the datasets' values with their digests. ``rest`` is the digest of all other
bytes after the block: names, shapes, attributes and compressed values. Together with the digest of the block, these
digests cover every byte of the file. An array that several nodes have written has a list of consecutive ranges.

``structure`` contains everything else that a reader needs. Datasets of a sharded checkpoint also have the rows in each
file, ``"rows": [[FILE, first, last (exclusive)], ...]``. Compressed datasets have their chunks, in the order of the
chunks' first elements: ``"filters": ["shuffle", "gzip"], "chunk_shape": [512, 256], "offsets": [OFFSET, ...],
"sizes": [BYTES, ...]``. Earlier versions wrote files without ``structure``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from .digest import LENGTH, Digest, is_digest

_MAGIC = b"mpitrain checkpoint 2\n"
_DIGITS = 12
_MAX_BLOCK = 1 << 28  # a million ranges
# Lists and objects need up to 200 bytes of memory each. Texts, such as the state of hooks, may contain many brackets.
_ALWAYS_BRACKETS, _BYTES_PER_BRACKET = 1 << 18, 16
HEAD = len(_MAGIC) + LENGTH + 1 + _DIGITS + 1  # bytes of the first two lines


class DamagedManifest(ValueError):
    """The block is damaged or missing; the message states the problem."""


class Range(NamedTuple):
    """Bytes [start, stop) of a file, and their digest."""

    start: int
    stop: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The content of the block.

    Attributes:
        block: Size of the block in bytes.
        size: Size of the file in bytes.
        rest: Digest of all bytes after the block that are in none of ``arrays``.
        arrays: The ranges of the datasets' values, by name; consecutive.
        structure: The value of ``structure``, which is not checked here; None if there is none.
    """

    block: int
    size: int
    rest: str
    arrays: Mapping[str, list[Range]]
    structure: Any = None

    def pack(self) -> bytes:
        """Return the block, which has ``block`` bytes."""
        arrays = {name: ranges if len(ranges) > 1 else ranges[0] for name, ranges in self.arrays.items()}
        content = {"bytes": self.size, "rest": self.rest, "arrays": arrays}
        content |= {} if self.structure is None else {"structure": self.structure}
        body = f"{json.dumps(content)}\n".encode().ljust(self.block - HEAD, b"\0")
        assert len(body) == self.block - HEAD
        return _MAGIC + f"{_digest(self.block, body)} {self.block:0{_DIGITS}d}\n".encode() + body

    @classmethod
    def unpack(cls, block: bytes) -> Manifest:
        """Read a block of the length given by ``block_bytes``.

        Raises:
            DamagedManifest: It is damaged.
        """
        digest = block[len(_MAGIC) : HEAD].decode("ascii", "replace").split(" ")[0]
        if digest != _digest(len(block), memoryview(block)[HEAD:]):
            raise DamagedManifest("its first bytes are damaged")
        try:
            content = parse_json(block.rstrip(b"\0")[HEAD:])
            size, rest = content["bytes"], content["rest"]
            arrays = {name: _ranges(values) for name, values in content["arrays"].items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise DamagedManifest("its manifest is malformed") from error
        if type(size) is not int or not is_digest(rest) or not _disjoint(arrays, len(block), size):
            raise DamagedManifest("its manifest is malformed")
        return cls(len(block), size, rest, arrays, content.get("structure"))

    def other_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges covered by ``rest``, in order."""
        yield from gaps(((r.start, r.stop) for ranges in self.arrays.values() for r in ranges), self.block, self.size)


def block_bytes(head: bytes) -> int:
    """Return the length of a block, given its first ``HEAD`` bytes.

    Raises:
        DamagedManifest: The file does not begin with a manifest block.
    """
    if not head:
        raise DamagedManifest("it is empty")
    if head[: len(_MAGIC)] != _MAGIC:
        raise DamagedManifest("it is not a checkpoint, or was written by an incompatible version of mpitrain")
    digits = head[HEAD - _DIGITS - 1 : HEAD - 1]
    if len(head) < HEAD or not digits.isdigit() or int(digits) <= HEAD or head[HEAD - 1 : HEAD] != b"\n":
        raise DamagedManifest("its first bytes are damaged")
    if int(digits) > _MAX_BLOCK:
        raise DamagedManifest(f"its manifest is longer than {_MAX_BLOCK >> 20} MiB")
    return int(digits)


def parse_json(text: bytes) -> Any:
    """Parse JSON that may be crafted.

    Raises:
        ValueError, RecursionError: It is malformed, or nested too deeply.
    """
    if text.count(b"[") + text.count(b"{") > max(_ALWAYS_BRACKETS, len(text) // _BYTES_PER_BRACKET):
        raise ValueError("too many brackets: parsed objects would need many times the memory of the text")
    return json.loads(text)


def block_size_for(names: Iterable[str], structure: Any = None) -> int:
    """Return the block size for these arrays, with one range per name: a power of two, as HDF5 requires."""
    needed = 512 + sum(len(json.dumps(name)) + LENGTH + 60 for name in names)  # 60: numbers and punctuation
    needed += len(json.dumps(structure))
    return 1 << max(12, (needed - 1).bit_length())


def gaps(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, stop) that the disjoint ``ranges`` do not cover, in order."""
    for lo, hi in sorted(ranges):
        if start < lo:
            yield start, lo
        start = hi
    if start < stop:
        yield start, stop


def _ranges(values: list[Any]) -> list[Range]:
    """Parse the ranges of an array.

    Raises:
        ValueError, TypeError, IndexError: The values are not ranges, or the ranges are not consecutive.
    """
    ranges = [Range(*part) for part in (values if isinstance(values[0], list) else [values])]
    for part in ranges:
        if type(part.start) is not int or type(part.stop) is not int or not is_digest(part.digest):
            raise ValueError("not a range")
    if any(one.stop != other.start for one, other in pairwise(ranges)):
        raise ValueError("not consecutive")
    return ranges


def _disjoint(arrays: Mapping[str, list[Range]], start: int, stop: int) -> bool:
    """Return whether no two ranges overlap, none is empty, and all are within [start, stop)."""
    for lo, hi in sorted((part.start, part.stop) for ranges in arrays.values() for part in ranges):
        if not start <= lo < hi:
            return False
        start = hi
    return start <= stop


def _digest(block: int, body: bytes | memoryview) -> str:
    digest = Digest()
    digest.add(_MAGIC + str(block).encode())
    digest.add(body)
    return str(digest)
