"""A parser of the part of HDF5 that checkpoints use.

The HDF5 library trusts the files that it reads. Damaged metadata can make the library crash or loop. Links, external
storage and virtual datasets make it open other files. Checkpoints may come from untrusted sources, so they are read
without the library. The parser supports only structures that ``container`` writes, with whichever version of HDF5; it
refuses everything else.

It reads no values and opens no file. The work is limited by the size of the structure, whatever the structure declares.

Source: HDF5 File Format Specification Version 3.0, The HDF Group; sections are named in the docstrings.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from ...core.layout import Shape
from ..structure import MALFORMED, Chunk, Dataset, Rows, Structure, UnsupportedStructure, Value
from .blocks import CONTINUATION, MAX_NAME_BYTES, NOWHERE, Blocks, Message, Read

_MAX_DEPTH = 8  # of groups
_MAX_RANK = 32
_MAX_CHUNK_BYTES = 1 << 24
_ITEM_BYTES = 128  # budget used by each chunk and shard, because it needs more memory than its bytes in the file
_SIGNATURE = b"\x89HDF\r\n\x1a\n"

# Types of object header messages
_NIL, _SPACE, _LINK_INFO, _TYPE, _OLD_FILL, _FILL, _LINK, _EXTERNAL, _LAYOUT = 0, 1, 2, 3, 4, 5, 6, 7, 8
_GROUP_INFO, _FILTERS, _ATTRIBUTE, _SYMBOLS, _MODIFIED, _ATTRIBUTE_INFO = 10, 11, 12, 17, 18, 21
_KNOWN = {_NIL, _ATTRIBUTE, CONTINUATION, _MODIFIED, _ATTRIBUTE_INFO}
_OF_GROUP = _KNOWN | {_LINK_INFO, _LINK, _GROUP_INFO, _SYMBOLS}
_OF_DATASET = _KNOWN | {_SPACE, _TYPE, _OLD_FILL, _FILL, _LAYOUT, _FILTERS}

# Properties of IEEE floating point numbers by size: offset, precision, then location and size of exponent and mantissa
_FLOATS = {2: (0, 16, 10, 5, 0, 10, 15), 4: (0, 32, 23, 8, 0, 23, 127), 8: (0, 64, 52, 11, 0, 52, 1023)}
_BOOL = b"FALSE\0\0\0TRUE\0\0\0\0\0\1"  # names and values of the enumeration
_DEFLATE, _SHUFFLE = 1, 2


def parse(read: Read, base: int, size: int) -> Structure:
    """Parse the structure of a file.

    Args:
        read: Reads bytes of the structure.
        base: Offset of the superblock.
        size: Number of bytes of the structure, which limits the work.

    Raises:
        UnsupportedStructure: The structure is malformed, or uses parts of HDF5 that checkpoints do not use.
    """
    try:
        return _Parser(Blocks(read, base, size)).structure()
    except UnsupportedStructure:
        raise
    except (struct.error, ValueError, IndexError, OverflowError) as error:  # a number or text is malformed
        raise UnsupportedStructure(MALFORMED) from error


class _Parser:
    """Parses one file. Addresses are relative to ``base``, except in the result."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._structure = blocks, Structure({}, {})

    def structure(self) -> Structure:
        """Parse the superblock (II.A) and everything below it."""
        version, offset_bytes, length_bytes, base, root = struct.unpack_from(
            "<B4xBB9xQ32xQ", self._blocks.at(0, 96, _SIGNATURE), 8
        )
        if (version, offset_bytes, length_bytes, base) != (0, 8, 8, self._blocks.base):
            raise UnsupportedStructure("its superblock is malformed or has another version")
        self._visit("/", root, 0)
        return self._structure

    def _visit(self, path: str, address: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise UnsupportedStructure(f"its groups are nested deeper than {_MAX_DEPTH}")
        self._blocks.charge(len(path))
        messages = self._blocks.messages(self._blocks.once(address))
        kinds = {kind for kind, _ in messages}
        if _EXTERNAL in kinds:
            raise UnsupportedStructure(f"the values of {path!r} are in an external file")
        unknown = kinds - (_OF_DATASET if _LAYOUT in kinds else _OF_GROUP)
        if unknown:
            raise UnsupportedStructure(
                f"{path!r} uses a feature of HDF5 that checkpoints do not support (header message {min(unknown)})"
            )
        if _LAYOUT in kinds:
            self._structure.datasets[path] = self._dataset(path, dict(messages))
            return
        self._structure.groups[path] = dict(self._attributes(path, messages))
        links = sorted(self._links(messages))
        if len(dict(links)) != len(links):
            raise UnsupportedStructure(f"{path!r} has a name twice")
        if any("/" in name for name, _ in links):
            raise UnsupportedStructure(f"{path!r} contains a name with a slash")
        for name, child in links:
            self._visit(name if path == "/" else f"{path}/{name}", child, depth + 1)

    # Links

    def _links(self, messages: list[Message]) -> Iterator[tuple[str, int]]:
        """Yield name and address of each object in a group; the links are in one of three forms."""
        for kind, data in messages:
            if kind == _SYMBOLS:
                tree, heap = struct.unpack_from("<QQ", data)
                (names,) = struct.unpack_from("<Q", self._blocks.at(heap, 32, b"HEAP"), 24)
                for node in self._blocks.leaves(tree, 0, 8):
                    yield from self._symbols(node[1], names)
            elif kind == _LINK:
                yield self._link(data)
            elif kind == _LINK_INFO:
                heap, tree = struct.unpack_from("<QQ", data, 10 if data[1] & 1 else 2)
                if heap != NOWHERE:
                    for record in self._blocks.records(tree, 5, 11):
                        yield self._link(self._blocks.heap_object(heap, record[4:]))

    def _symbols(self, node: int, names: int) -> Iterator[tuple[str, int]]:
        """Yield the links of a symbol table node (III.B)."""
        (count,) = struct.unpack_from("<H", self._blocks.at(self._blocks.once(node), 8, b"SNOD"), 6)
        for name, child, cached in struct.iter_unpack("<QQI20x", self._blocks.at(node + 8, 40 * count)):
            if cached not in (0, 1):
                raise UnsupportedStructure("it contains a soft link")
            yield self._name(self._blocks.text(names + name)), child

    def _link(self, data: bytes) -> tuple[str, int]:
        """Parse a link message (IV.A.2.g)."""
        version, flags = data[0], data[1]
        at = 2
        if flags & 8:
            if data[at]:
                raise UnsupportedStructure(
                    "it contains a soft link" if data[at] == 1 else "it contains an external link"
                )
            at += 1
        at += (8 if flags & 4 else 0) + (1 if flags & 16 else 0)
        width = 1 << (flags & 3)
        length, at = int.from_bytes(data[at : at + width], "little"), at + width
        (address,) = struct.unpack_from("<Q", data, at + length)
        if version != 1:
            raise UnsupportedStructure(MALFORMED)
        return self._name(data[at : at + length]), address

    def _name(self, data: bytes) -> str:
        name = data.split(b"\0")[0]
        if not 0 < len(name) <= MAX_NAME_BYTES:
            raise UnsupportedStructure("it contains a name that is empty or too long")
        return name.decode()

    # Attributes

    def _attributes(self, path: str, messages: list[Message]) -> Iterator[tuple[str, Value]]:
        for kind, data in messages:
            if kind == _ATTRIBUTE:
                yield self._attribute(path, data)
            elif kind == _ATTRIBUTE_INFO:
                heap, tree = struct.unpack_from("<QQ", data, 4 if data[1] & 1 else 2)
                if heap != NOWHERE:
                    for record in self._blocks.records(tree, 8, 17):
                        yield self._attribute(path, self._blocks.heap_object(heap, record[:8]))

    def _attribute(self, path: str, data: bytes) -> tuple[str, Value]:
        """Parse an attribute message (IV.A.2.m) with one number or text."""
        version, flags, *sizes = struct.unpack_from("<BBHHH", data)
        if version not in (1, 3) or (version == 3 and flags):
            raise UnsupportedStructure(f"an attribute of {path!r} is malformed")
        at, parts = (8, []) if version == 1 else (9, [])
        for size in sizes:
            parts.append(data[at : at + size])
            at += -(-size // 8) * 8 if version == 1 else size
        name = self._name(parts[0])
        if _shape(parts[2]) != ():
            raise UnsupportedStructure(f"attribute {name!r} of {path!r} is not a number or text")
        return name, self._value(f"attribute {name!r} of {path!r}", parts[1], data[at:])

    def _value(self, name: str, kind: bytes, data: bytes) -> Value:
        if kind[0] & 15 == 9 and kind[1] & 15 == 1:  # a text of variable length
            length, collection, index = struct.unpack_from("<IQI", data)
            text = self._blocks.global_object(collection, index)[:length] if length else b""
            if len(text) != length:
                raise UnsupportedStructure(f"{name} is malformed")
            return text.decode()
        dtype = _dtype(name, kind)
        value: Value = np.frombuffer(data[: dtype.itemsize], dtype)[0].item()
        return value

    # Datasets

    def _dataset(self, path: str, messages: dict[int, bytes]) -> Dataset:
        """Parse the messages of a dataset (IV.A.2.b, d, i, l)."""
        shape = _shape(messages[_SPACE]) if _SPACE in messages else None
        if shape is None or _TYPE not in messages:
            raise UnsupportedStructure(f"{path!r} has no shape or dtype")
        dtype, layout = _dtype(repr(path), messages[_TYPE]), messages[_LAYOUT]
        if (_FILTERS in messages) != (tuple(layout[:2]) == (3, 2)):
            raise UnsupportedStructure(f"the compression of {path!r} is malformed")
        if tuple(layout[:2]) == (3, 1):
            address, size = struct.unpack_from("<QQ", layout, 2)
            start = self._blocks.base + address
            return Dataset(shape, dtype, place=(start, start + size) if size and address != NOWHERE else None)
        if tuple(layout[:2]) == (3, 2):
            return self._compressed(path, shape, dtype, layout, messages[_FILTERS])
        if tuple(layout[:2]) == (4, 3):
            return Dataset(shape, dtype, virtual=tuple(self._virtual(path, shape, layout)))
        raise UnsupportedStructure(f"checkpoints do not support the storage layout of {path!r}")

    def _compressed(self, path: str, shape: Shape, dtype: np.dtype[Any], layout: bytes, filters: bytes) -> Dataset:
        rank = len(shape)
        tree, *chunk = struct.unpack_from(f"<Q{rank + 1}I", layout, 3)
        if layout[2] != rank + 1 or chunk.pop() != dtype.itemsize or not rank or 0 in (*chunk, *shape):
            raise UnsupportedStructure(f"the chunks of {path!r} are malformed")
        if math.prod(chunk) * dtype.itemsize > _MAX_CHUNK_BYTES:
            raise UnsupportedStructure(f"the chunks of {path!r} are larger than {_MAX_CHUNK_BYTES >> 20} MiB")
        if [*_filters(filters)] != [_SHUFFLE, _DEFLATE]:
            raise UnsupportedStructure(f"the compression of {path!r} is not gzip")
        expected, chunks = math.prod(-(-n // size) for n, size in zip(shape, chunk, strict=True)), []
        self._blocks.charge(expected * _ITEM_BYTES)
        for key, address in islice(self._blocks.leaves(tree, 1, 8 * rank + 16), expected + 1):
            size, mask, *first = struct.unpack(f"<II{rank + 1}Q", key)
            if mask or any(at % size or at >= n for at, size, n in zip(first, chunk, shape, strict=False)):
                raise UnsupportedStructure(f"the chunks of {path!r} are malformed")
            chunks.append(Chunk(tuple(first[:rank]), self._blocks.base + address, self._blocks.base + address + size))
        if len(chunks) != expected or len({chunk.first for chunk in chunks}) != expected:
            raise UnsupportedStructure(f"{path!r} does not have {expected:,} different chunks")
        return Dataset(shape, dtype, chunk_shape=tuple(chunk), chunks=tuple(chunks))

    def _virtual(self, path: str, shape: Shape, layout: bytes) -> Iterator[Rows]:
        """Yield the sources of a virtual dataset (III.E, global heap block for virtual datasets)."""
        collection, index = struct.unpack_from("<QI", layout, 2)
        data = self._blocks.global_object(collection, index)
        version, count = struct.unpack_from("<BQ", data)
        if version or not count:
            raise UnsupportedStructure(f"the shards of {path!r} are malformed")
        at = 9
        for _ in range(count):
            self._blocks.charge(_ITEM_BYTES)
            file, name = _two_texts(data, at)
            at += len(file) + len(name) + 2
            whole = struct.unpack_from("<II8x", data, at)
            lo, hi, at = _rows(path, shape, data, at + 16)
            if whole != (3, 1) or name.strip(b"/") != path.encode():  # 3: a selection of all elements
                raise UnsupportedStructure(f"the shards of {path!r} are malformed")
            yield Rows(file.decode(), lo, hi)


def _shape(space: bytes) -> Shape | None:
    """Return the shape in a dataspace message (IV.A.2.b); None for a null dataspace or an unsupported message."""
    version, rank, _, kind = space[:4]
    if version not in (1, 2) or rank > _MAX_RANK or (version == 2 and kind == 2):
        return None
    return struct.unpack_from(f"<{rank}Q", space, 8 if version == 1 else 4)


def _dtype(name: str, data: bytes) -> np.dtype[Any]:
    """Return the dtype in a datatype message (IV.A.2.d): a little-endian number in a NumPy format, or NumPy's bool."""
    size = struct.unpack_from("<I", data, 4)[0]
    kind, bits, properties = data[0] & 15, data[1:4], data[8:]
    if kind == 0 and size in (1, 2, 4, 8) and properties[:4] == struct.pack("<HH", 0, 8 * size) and not bits[0] & ~8:
        return np.dtype(f"<{'i' if bits[0] & 8 else 'u'}{size}")
    if (
        kind == 1
        and size in _FLOATS
        and struct.unpack_from("<HHBBBBI", properties) == _FLOATS[size]
        and not bits[0] & 1
    ):
        return np.dtype(f"<f{size}")
    if kind == 8 and size == 1 and bits[0] == 2 and _BOOL in properties:
        return np.dtype(bool)
    raise UnsupportedStructure(f"{name} has a dtype that checkpoints do not support")


def _filters(data: bytes) -> Iterator[int]:
    """Yield the number of each filter of a filter pipeline message (IV.A.2.l), version 1."""
    at = 8
    for _ in range(data[1] if data[0] == 1 else 0):
        number, name, _, values = struct.unpack_from("<4H", data, at)
        yield number
        at += 8 + -(-name // 8) * 8 + 4 * (values + values % 2)


def _two_texts(data: bytes, at: int) -> tuple[bytes, bytes]:
    """Return two texts, each of which ends with a zero byte."""
    middle = data.index(b"\0", at)
    return data[at:middle], data[middle + 1 : data.index(b"\0", middle + 1)]


def _rows(path: str, shape: Shape, data: bytes, at: int) -> tuple[int, int, int]:
    """Parse a selection of whole rows (VIII); return first and last (exclusive) row, and where the selection ends."""
    rank = len(shape)
    kind, version = struct.unpack_from("<II", data, at)
    if (kind, version) == (2, 1):
        rank_of_selection, blocks, *bounds = struct.unpack_from(f"<II{2 * rank}I", data, at + 16)
        first, last, at = bounds[:rank], [n + 1 for n in bounds[rank:]], at + 24 + 8 * rank
    else:
        rank_of_selection, *numbers = struct.unpack_from(f"<I{4 * rank}Q", data, at + 13)
        first, count, block = numbers[::4], numbers[2::4], numbers[3::4]
        blocks = 1 if version == 2 and set(count) == {1} else 0
        last, at = [lo + n for lo, n in zip(first, block, strict=True)], at + 17 + 32 * rank
    whole = (*first[1:], *last[1:]) == (*(0 for _ in shape[1:]), *shape[1:])
    if kind != 2 or rank_of_selection != rank or blocks != 1 or not whole or first[0] >= last[0]:
        raise UnsupportedStructure(f"the shards of {path!r} are malformed")
    return first[0], last[0], at
