"""TFRecord files with ``tf.train.Example`` or ``SequenceExample`` messages, without TensorFlow.

The format of a record: its length (8 bytes), a checksum of these bytes (4), the message, a checksum of the message (4);
integers are little-endian. See tensorflow/core/lib/io/record_writer.h, and for the messages
tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.words import one_line
from ..errors import DataError
from .files import (
    Paths,
    UnchangedFile,
    by_file,
    describe,
    expand,
    file_of,
    first_bytes,
    foreign,
    names_and_sizes,
    required,
    starts_of,
)
from .split import DatasetSplit

_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_FEW = 64  # numbers that NumPy takes faster one by one than from protobuf's buffer

# A message with the fields of both types. Maps have the form of lists of entries, and texts that of bytes, so that
# names may have any bytes.
_FIELDS = {
    "BytesList": "repeated bytes value",
    "FloatList": "repeated float value",
    "Int64List": "repeated int64 value",
    "Feature": "optional BytesList bytes_list; optional FloatList float_list; optional Int64List int64_list",
    "Entry": "optional bytes key; optional Feature value",
    "Features": "repeated Entry feature",
    "FeatureList": "repeated Feature feature",
    "ListEntry": "optional bytes key; optional FeatureList value",
    "FeatureLists": "repeated ListEntry feature_list",
    "Example": "optional Features features; optional FeatureLists feature_lists",
}


@functools.cache
def _message_type() -> Any:
    """Return the class of the messages."""
    pb2 = required("google.protobuf.descriptor_pb2", "tfrecord")
    file, kinds = pb2.FileDescriptorProto(name="example.proto", syntax="proto3"), pb2.FieldDescriptorProto
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (label, kind, field) in enumerate(map(str.split, fields.split(";")), 1):
            added = message.field.add(name=field, number=number, label=getattr(kinds, f"LABEL_{label.upper()}"))
            if kind in _FIELDS:
                added.type, added.type_name = kinds.TYPE_MESSAGE, kind
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = required("google.protobuf.descriptor_pool", "tfrecord").DescriptorPool()
    pool.Add(file)
    factory = required("google.protobuf.message_factory", "tfrecord")
    return factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


class TfRecords:
    """Messages as dicts of arrays, by the names of their features; features with a single bytes value become bytes.

    Attributes:
        starts: Index of the first record of each file.
        names_and_sizes: See ``files.names_and_sizes``.
    """

    def __init__(self, files: list[Path]) -> None:
        self._parse = _message_type().FromString
        self._files = [UnchangedFile(path) for path in files]
        self._records = [file.index("tfrecord", _index) for file in self._files]  # (offset, length) of messages
        self.names_and_sizes = names_and_sizes(self._files, self._records)
        self.starts, self._count = starts_of(len(records) for records in self._records)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        examples: list[Any] = [None] * len(indices)
        for number, places in by_file(self.starts, indices).items():
            lengths = self._records[number][[record for _, record in places]].tolist()
            with self._files[number].opened() as file:
                for (place, record), (offset, length) in zip(places, lengths, strict=True):
                    content = os.pread(file.fileno(), length + _FOOTER_BYTES, offset)
                    try:
                        examples[place] = self._example(content[:length], content[length:])
                    except ValueError as error:
                        where = f"{self._files[number].path}: record {record} at byte {offset - _HEADER_BYTES}"
                        raise DataError(f"{where} {error}") from error
        return examples

    def _example(self, content: bytes, checksum: bytes) -> dict[str, Any]:
        """Return the features of a message.

        Raises:
            ValueError: The content is damaged, the message has other fields, or a name twice.
        """
        if not _is_valid(content, checksum):
            raise ValueError("is damaged or truncated")
        try:
            message = self._parse(content)
            message.DiscardUnknownFields()
            known = message.ByteSize()  # another size than that of the content also if a list was not packed
            if known != len(content) and known != self._parse(content).ByteSize():
                raise ValueError("it has other fields")
            return _features(message)
        except Exception as error:
            raise ValueError(f"is not a tf.train.Example or SequenceExample: {one_line(error)}") from error

    def name_of(self, index: int) -> str:
        """Return the file and the number of a record."""
        number, record = file_of(self.starts, index)
        return f"{self._files[number].path}, record {record}"


def tfrecord(paths: Paths) -> DatasetSplit:
    """Return a split of uncompressed TFRecord files with ``tf.train.Example`` or ``SequenceExample`` messages.

    An example is a dict from the name of a feature to an array of float32 or int64, bytes, or a list of bytes. A
    feature without a value is left out. The feature lists of a SequenceExample are lists with such a value for each
    step, None if it has none. Use ``map`` to decode an example, for instance with ``data.decode_image`` or
    ``numpy.frombuffer``. A file is indexed once; the index is stored in the user's cache directory.

    Args:
        paths: A file, a pattern such as ``train-*.tfrecord``, or a list of them.

    Raises:
        DataError: A file does not exist or is damaged, or protobuf or google-crc32c is not installed.
    """
    files = expand(paths)
    return DatasetSplit(TfRecords(files), describe(files))


def _features(message: Any) -> dict[str, Any]:
    example: dict[str, Any] = {}
    for entry in message.features.feature:
        _add(example, entry.key, _value(entry.value))
    for entry in message.feature_lists.feature_list:
        _add(example, entry.key, [_value(step) for step in entry.value.feature])
    return example


def _add(example: dict[str, Any], key: bytes, value: Any) -> None:
    name = key.decode("utf-8", "surrogateescape")
    if name in example:
        raise ValueError(f"it has {name!r} twice")
    if value is not None:
        example[name] = value


def _value(feature: Any) -> Any:
    """Return an array of float32 or int64, bytes, or a list of bytes; None if no value is set."""
    lists = feature.ListFields()
    if len(lists) > 1:
        raise ValueError("a feature has values of two types")
    if not lists:
        return None
    field, values = lists[0]
    if field.number == 1:
        return values.value[0] if len(values.value) == 1 else list(values.value)
    dtype: Any = np.float32 if field.number == 2 else np.int64
    few = values.value if (count := len(values.value)) < _FEW else ()
    return np.fromiter(few, dtype, count) if few else np.array(values.value, dtype)


def _index(path: Path) -> Array:
    """Return offset and length of each message in a file."""
    return np.fromiter(_places(path), np.dtype((np.int64, 2)))


def _places(path: Path) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each message."""
    offset, count, size = 0, 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while offset < size:
            file.seek(offset)
            header = file.read(_HEADER_BYTES)
            length = int.from_bytes(header[:8], "little")
            end = offset + _HEADER_BYTES + length + _FOOTER_BYTES
            if not _is_valid(header[:8], header[8:]) or end > size:
                if not count and (what := foreign(first_bytes(path))):
                    raise DataError(f"{path} {what}")
                raise DataError(f"{path} is damaged or truncated at byte {offset}, after {count} records")
            yield offset + _HEADER_BYTES, length
            offset, count = end, count + 1


@functools.cache
def _crc32c() -> Any:
    return required("google_crc32c", "tfrecord").value


def _is_valid(content: bytes, stored: bytes) -> bool:
    """Return whether bytes match their masked checksum."""
    value = _crc32c()(content)
    masked = ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", masked) == stored
