"""TFRecord files with ``tf.train.Example`` messages, without TensorFlow.

The format of a record: its length (8 bytes), a checksum of these bytes (4), the message, a checksum of the message (4);
integers are little-endian. See tensorflow/core/lib/io/record_writer.h and tensorflow/core/example/example.proto.
"""

from __future__ import annotations

import functools
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .files import Paths, UnchangedFile, describe, expand, file_of, required, starts_of
from .split import DatasetSplit

_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")
_INDEX_READ_BYTES = 1 << 20


class TfRecords:
    """Messages as dicts of arrays, by the names of their features; those with one bytes value as bytes.

    Attributes:
        count: Number of records.
    """

    def __init__(self, files: list[Path]) -> None:
        self._checksum = required("google_crc32c", "tfrecord").value
        self._files = [UnchangedFile(path) for path in files]
        self._records = [file.index("tfrecord", self._index) for file in self._files]  # (offset, length) of messages
        self._starts, self.count = starts_of(len(records) for records in self._records)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, record = file_of(self._starts, index)
        file = self._files[number]
        offset, length = self._records[number][record].tolist()
        content = file.read(offset, length + _FOOTER.size)
        message = content[:length]
        if not self._is_valid(message, *_FOOTER.unpack(content[length:])):
            raise DataError(f"{file.path}: record {record} at byte {offset - _HEADER.size} is damaged")
        return _features(message)

    def name_of(self, index: int) -> str:
        """Return the file and the number of a record."""
        number, record = file_of(self._starts, index)
        return f"{self._files[number].path}, record {record}"

    def _index(self, path: Path) -> Array:
        records: list[tuple[int, int]] = []
        size, offset = os.path.getsize(path), 0
        with open(path, "rb", buffering=_INDEX_READ_BYTES) as file:
            while offset < size:
                file.seek(offset)
                header = file.read(_HEADER.size)
                length, checksum = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, None)
                end = offset + _HEADER.size + length + _FOOTER.size
                if checksum is None or not self._is_valid(header[:8], checksum) or end > size:
                    raise DataError(f"{path} is damaged or truncated at byte {offset}, after {len(records)} records")
                records.append((offset + _HEADER.size, length))
                offset = end
        return np.array(records, np.int64).reshape(-1, 2)

    def _is_valid(self, read: bytes, checksum: int) -> bool:
        value = self._checksum(read)
        return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF == checksum


def tfrecord(paths: Paths) -> DatasetSplit:
    """Return a split of TFRecord files with ``tf.train.Example`` messages.

    An example is a dict: by the name of a feature its array of float32 or int64, or its bytes; a list of bytes if it
    has several. ``map`` decodes it, for instance with Pillow or ``numpy.frombuffer``. A file is indexed once: the
    index is in the user's cache.

    Args:
        paths: A file, a pattern such as ``train-*.tfrecord``, or a list of them.

    Raises:
        DataError: A file does not exist or is damaged; or protobuf or google-crc32c is not installed.
    """
    files = expand(paths)
    _message_class()
    return DatasetSplit(TfRecords(files), describe(files))


def _features(message: bytes) -> dict[str, Any]:
    features = {}
    for name, feature in _message_class().FromString(message).features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind == "bytes_list":
            values = list(feature.bytes_list.value)
            features[name] = values[0] if len(values) == 1 else values
        else:
            dtype = np.float32 if kind == "float_list" else np.int64
            features[name] = np.array([] if kind is None else getattr(feature, kind).value, dtype)
    return features


@functools.cache
def _message_class() -> Any:
    """Return the class of ``tf.train.Example``, made from its description."""
    descriptors = required("google.protobuf.descriptor_pb2", "tfrecord")
    field = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(name="mpitrain/example.proto", package="mpitrain.example", syntax="proto3")
    for name, kind in (
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ):
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(
        (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")), 1
    ):
        feature.field.add(
            name=name, number=number, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL,
            type_name=f".mpitrain.example.{kind}", oneof_index=0,
        )  # fmt: skip
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL,
        type_name=".mpitrain.example.Feature",
    )  # fmt: skip
    features.field.add(
        name="feature", number=1, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED,
        type_name=".mpitrain.example.Features.FeatureEntry",
    )  # fmt: skip
    file.message_type.add(name="Example").field.add(
        name="features", number=1, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL,
        type_name=".mpitrain.example.Features",
    )  # fmt: skip
    pool = required("google.protobuf.descriptor_pool", "tfrecord").DescriptorPool()
    pool.Add(file)
    return required("google.protobuf.message_factory", "tfrecord").GetMessageClass(
        pool.FindMessageTypeByName("mpitrain.example.Example")
    )
