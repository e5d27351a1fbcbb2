"""TFRecord files with ``tf.train.Example`` or ``SequenceExample`` messages, without TensorFlow.

The format of a record: its length (8 bytes), a checksum of these bytes (4), the message, a checksum of the message (4);
integers are little-endian. See tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.kernels import kernel, read_file
from ..core.layout import Array
from ..errors import DataError
from .crc32c import crc32c
from .example_messages import ExampleParser, Messages
from .files import Paths, UnchangedFile, describe, expand, file_of, first_bytes, foreign, names_and_sizes, starts_of
from .split import DatasetSplit

_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_INDEXED_AT_ONCE = 1 << 14  # records


class TfRecords:
    """Messages as dicts of arrays, by the names of their features; features with a single bytes value become bytes.

    Attributes:
        count: Number of records.
        starts: Index of the first record of each file.
        names_and_sizes: See ``files.names_and_sizes``.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files = [UnchangedFile(path) for path in files]
        self.names_and_sizes = names_and_sizes(self._files)
        self._records = [file.index("tfrecord", _index) for file in self._files]  # (offset, length) of messages
        self.starts, self.count = starts_of(len(records) for records in self._records)
        self._parser = ExampleParser()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        numbers = np.searchsorted(self.starts, indices, "right") - 1
        records = np.asarray(indices) - np.asarray(self.starts)[numbers]
        places = np.empty((len(records), 2), np.int64)  # offset and length of each message
        for number in np.unique(numbers):
            places[numbers == number] = self._records[number][records[numbers == number]]
        stops = np.cumsum(places[:, 1] + _FOOTER_BYTES)
        starts = stops - places[:, 1] - _FOOTER_BYTES
        content = np.empty(stops[-1], np.uint8)
        for number in np.unique(numbers):
            chosen = numbers == number
            with self._files[number].opened() as file:
                short = _read_messages(file, places[chosen], starts[chosen], content)
            if short >= 0:
                raise self._damaged(indices[np.flatnonzero(chosen)[short]], "is truncated")
        messages = Messages(content, starts, starts + places[:, 1])
        if (damaged := _first_damaged(*messages)) >= 0:
            raise self._damaged(indices[damaged], "is damaged")
        return self._parser.parse(
            messages,
            lambda message: self._damaged(indices[message], "is not a valid tf.train.Example or SequenceExample"),
        )

    def name_of(self, index: int) -> str:
        """Return the file and the number of a record."""
        number, record = file_of(self.starts, index)
        return f"{self._files[number].path}, record {record}"

    def _damaged(self, index: int, problem: str) -> DataError:
        number, record = file_of(self.starts, index)
        offset = self._records[number][record, 0] - _HEADER_BYTES
        return DataError(f"{self._files[number].path}: record {record} at byte {offset} {problem}")


def tfrecord(paths: Paths) -> DatasetSplit:
    """Return a split of uncompressed TFRecord files with ``tf.train.Example`` or ``SequenceExample`` messages.

    An example is a dict from the name of a feature to an array of float32 or int64, bytes, or a list of bytes. A
    feature without a value is left out. The feature lists of a SequenceExample are lists with such a value for each
    step. Use ``map`` to decode it, for instance with ``data.decode_image`` or ``numpy.frombuffer``. Without ``map``, a
    batch is made as a whole if all its examples have the same features of the same lengths. A file is indexed once; the
    index is stored in the user's cache directory.

    Args:
        paths: A file, a pattern such as ``train-*.tfrecord``, or a list of them.

    Raises:
        DataError: A file does not exist or is damaged.
    """
    files = expand(paths)
    return DatasetSplit(TfRecords(files), describe(files))


def _index(path: Path) -> Array:
    """Return offset and length of each message in a file."""
    parts, count, offset, size = [np.empty((0, 2), np.int64)], 0, 0, path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        while offset < size:
            part = np.empty((_INDEXED_AT_ONCE, 2), np.int64)
            indexed, offset, is_damaged = _index_part(file.fileno(), offset, size, part)
            parts.append(part[:indexed])
            count += indexed
            if is_damaged:
                if not count and (what := foreign(first_bytes(path))):
                    raise DataError(f"{path} {what}")
                raise DataError(f"{path} is damaged or truncated at byte {offset}, after {count} records")
    return np.concatenate(parts)


@kernel
def _index_part(file: int, offset: int, size: int, part: Array) -> tuple[int, int, bool]:
    """Set offset and length of the next messages; return their number, the next offset, and whether damage is found."""
    header = np.empty(_HEADER_BYTES, np.uint8)
    for record in range(len(part)):
        if offset == size:
            return record, offset, False
        is_read = read_file(file, offset, header, 0, _HEADER_BYTES)
        length = _little_endian(header, 0, 8)
        free = size - offset - _HEADER_BYTES - _FOOTER_BYTES
        if not is_read or not _is_valid(header, 0, 8) or length < 0 or length > free:
            return record, offset, True
        part[record, 0], part[record, 1] = offset + _HEADER_BYTES, length
        offset += _HEADER_BYTES + length + _FOOTER_BYTES
    return len(part), offset, False


@kernel
def _read_messages(file: int, places: Array, starts: Array, content: Array) -> int:
    """Read messages with their checksums into ``content``; return the index of the first truncated message, or -1."""
    for i in range(starts.size):
        if not read_file(file, places[i, 0], content, starts[i], places[i, 1] + _FOOTER_BYTES):
            return i
    return -1


@kernel
def _first_damaged(content: Array, starts: Array, stops: Array) -> int:
    """Return the index of the first message that does not match its checksum, or -1."""
    for i in range(starts.size):
        if not _is_valid(content, starts[i], stops[i]):
            return i
    return -1


@kernel
def _is_valid(content: Array, start: int, stop: int) -> bool:
    """Return whether bytes match the masked checksum that follows them."""
    value = np.int64(crc32c(content, start, stop))
    masked = ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked == _little_endian(content, stop, 4)


@kernel
def _little_endian(content: Array, at: int, size: int) -> int:
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(content[at + i]) << np.int64(8 * i)
    return value
