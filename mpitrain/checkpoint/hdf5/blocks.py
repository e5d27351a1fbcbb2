"""The blocks of an HDF5 file: object headers, trees and heaps. ``parser`` interprets their content.

Every address, length and count comes from the file, which may be crafted. A budget limits the number of reads and of
bytes that are read, and thereby also time and memory.

Source: HDF5 File Format Specification Version 3.0, The HDF Group; sections are named in the docstrings.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from ..structure import MALFORMED, UnsupportedStructure

# Takes an offset in the file and a number of bytes; returns fewer bytes at the end of the file.
Read = Callable[[int, int], bytes]
Message = tuple[int, bytes]  # type and content

MAX_NAME_BYTES = 1024
NOWHERE = 2**64 - 1
CONTINUATION = 16  # type of the message that names a further block of messages

_MAX_MESSAGES_BYTES = 1 << 24  # for each object
_MAX_TEXT_BYTES = 1 << 26  # the list of shards is the longest text
_REPEATS = "its structure repeats itself, or declares more than it contains"


class Blocks:
    """Reads the blocks of one file.

    Args:
        read: Reads bytes of the structure.
        base: Offset of the superblock; addresses are relative to it.
        size: Number of bytes of the structure, which limits the work.
    """

    def __init__(self, read: Read, base: int, size: int) -> None:
        self._read, self.base = read, base
        self._left = 6 * size + (1 << 20)  # the remaining budget of bytes; each read also costs 64
        # Addresses of objects and tree blocks that were read; each may have only one parent.
        self._visited: set[int] = set()
        self._collections: dict[int, dict[int, bytes]] = {}

    def at(self, address: int, count: int, signature: bytes = b"") -> bytes:
        """Return ``count`` bytes at an address, which begin with ``signature``."""
        self.charge(count + 64)
        data = self._read(self.base + address, count) if address < 1 << 62 else b""
        if len(data) != count or not data.startswith(signature):
            raise UnsupportedStructure(MALFORMED)
        return data

    def charge(self, count: int) -> None:
        """Subtract bytes from the budget: blocks of a crafted file may overlap, or be read any number of times."""
        self._left -= count
        if self._left < 0:
            raise UnsupportedStructure(_REPEATS)

    def once(self, address: int) -> int:
        """Return an address; refuse an address that was visited before, which excludes cycles and hard links."""
        if address in self._visited:
            raise UnsupportedStructure(_REPEATS)
        self._visited.add(address)
        return address

    def messages(self, address: int) -> list[Message]:
        """Return the messages of an object (IV.A.1.a: version 1 object header prefix)."""
        version, expected, length = struct.unpack("<BxH4xI4x", self.at(address, 16))
        if version != 1:
            raise UnsupportedStructure(MALFORMED)
        messages: list[Message] = []
        blocks, total = [(address + 16, length)], 0
        for start, length in blocks:  # the loop appends a block for each continuation message
            total += length
            if total > _MAX_MESSAGES_BYTES:
                raise UnsupportedStructure("an object has too many attributes")
            data, at = self.at(start, length), 0
            while at + 8 <= length and len(messages) < expected:
                kind, size, flags = struct.unpack_from("<HHB", data, at)
                content, at = data[at + 8 : at + 8 + size], at + 8 + size
                if len(content) != size or flags & 2:  # 2: shared, the content is elsewhere
                    raise UnsupportedStructure(MALFORMED)
                messages.append((kind, content))
                if kind == CONTINUATION:
                    blocks.append(struct.unpack_from("<QQ", content))
        if len(messages) != expected:
            raise UnsupportedStructure(MALFORMED)
        return messages

    def leaves(self, tree: int, kind: int, key_bytes: int) -> Iterator[tuple[bytes, int]]:
        """Yield key and address of all children of the leaves of a version 1 B-tree (III.A.1)."""
        nodes = [tree]
        while nodes:
            node = self.once(nodes.pop())
            kind_of_node, level, count = struct.unpack_from("<BBH", self.at(node, 24, b"TREE"), 4)
            entries = self.at(node + 24, count * (key_bytes + 8))
            if kind_of_node != kind:
                raise UnsupportedStructure(MALFORMED)
            for key, child in struct.iter_unpack(f"<{key_bytes}sQ", entries):
                if level:
                    nodes.append(child)
                else:
                    yield key, child

    def records(self, tree: int, kind: int, size: int) -> Iterator[bytes]:
        """Yield the records of a version 2 B-tree (III.A.2)."""
        header = self.at(self.once(tree), 38, b"BTHD\0")
        kind_of_tree, node_bytes, record_bytes, depth, root, count = struct.unpack_from("<BIHH2xQH", header, 5)
        if (kind_of_tree, record_bytes) != (kind, size) or depth > 16 or node_bytes > 1 << 16:
            raise UnsupportedStructure(MALFORMED)
        # Numbers of bytes that store two counts: the records in a child, and, by the child's depth, the records in the
        # child and all nodes below it
        below = (node_bytes - 10) // size
        width, totals = _width(below), [0]
        for _ in range(depth):
            pointer = 8 + width + totals[-1]
            fits = (node_bytes - 10 - pointer) // (size + pointer)
            below = (fits + 1) * below + fits
            totals.append(_width(below))
        nodes = [(root, count, depth)] if root != NOWHERE else []
        while nodes:
            node, count, level = nodes.pop()
            pointer = 8 + width + totals[level - 1] if level else 0
            length = 6 + count * size + (count + 1) * pointer
            if length > node_bytes:
                raise UnsupportedStructure(MALFORMED)
            data = self.at(self.once(node), length, b"BTIN\0" if level else b"BTLF\0")
            for at in range(6, 6 + count * size, size):
                yield data[at : at + size]
            for at in range(6 + count * size, length, pointer or 1):
                child = data[at : at + pointer]
                nodes.append((_number(child[:8]), _number(child[8 : 8 + width]), level - 1))

    def text(self, address: int) -> bytes:
        """Return bytes from an address to a zero byte or further, but at most ``MAX_NAME_BYTES`` + 8."""
        text = b""
        while b"\0" not in text and len(text) <= MAX_NAME_BYTES:
            text += self.at(address + len(text), 8)  # names are padded to 8 bytes
        return text

    def heap_object(self, heap: int, identity: bytes) -> bytes:
        """Return a managed object of a fractal heap (III.G)."""
        header = self.at(heap, 146, b"FRHP\0")
        (filters,) = struct.unpack_from("<H", header, 7)
        width, first, largest, bits, _, root, rows = struct.unpack_from("<HQQHHQH", header, 110)
        offset_bytes = -(-bits // 8)
        offset, length = _number(identity[1 : 1 + offset_bytes]), _number(identity[1 + offset_bytes :])
        if filters or identity[0] or not width or not first or largest < first or offset_bytes > 8 or length > 1 << 16:
            raise UnsupportedStructure(MALFORMED)
        prefix = 13 + offset_bytes  # bytes in a block before its entries
        block, begin, size = root, 0, first
        while rows:
            row, at, size = 0, begin, first
            while row < rows and offset >= at + width * size:
                at += width * size
                size *= 2 if row else 1
                row += 1
            if row == rows:
                raise UnsupportedStructure(MALFORMED)
            column = (offset - at) // size
            begin = at + column * size
            block = _number(self.at(block + prefix + 8 * (row * width + column), 8))
            rows = 0 if size <= largest else (size // (first * width)).bit_length()
        return self.at(block + offset - begin, length)

    def global_object(self, collection: int, index: int) -> bytes:
        """Return an object of the global heap (III.E)."""
        if collection not in self._collections:
            self._collections[collection] = dict(self._global_objects(collection))
        if index not in self._collections[collection]:
            raise UnsupportedStructure(MALFORMED)
        content = self._collections[collection][index]
        self.charge(len(content))
        return content

    def _global_objects(self, collection: int) -> Iterator[tuple[int, bytes]]:
        (size,) = struct.unpack_from("<Q", self.at(collection, 16, b"GCOL\x01"), 8)
        if size > _MAX_TEXT_BYTES:
            raise UnsupportedStructure("it contains a text that is too long")
        data, at = self.at(collection, size), 16
        while at + 16 <= size:
            index, length = struct.unpack_from("<H6xQ", data, at)
            if not index:  # free space
                return
            yield index, data[at + 16 : at + 16 + length]
            at += 16 + -(-length // 8) * 8


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _width(largest: int) -> int:
    """Return the number of bytes in which HDF5 stores numbers up to ``largest``."""
    return (largest.bit_length() - 1) // 8 + 1
