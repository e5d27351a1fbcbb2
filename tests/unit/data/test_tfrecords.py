"""TFRecord files: the examples, and errors that name file and record."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from mpitrain import data
from mpitrain.data.trees import stack

from ...support.examples import refused


def masked(content: bytes) -> bytes:
    value = google_crc32c.value(content)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    """Return a field of a protocol buffer."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def record_of(features: dict[str, bytes]) -> bytes:
    """Return a record with a message, given the fields of its features."""
    entries = [field(1, field(1, name.encode()) + field(2, value)) for name, value in features.items()]
    message = field(1, b"".join(entries))
    length = struct.pack("<Q", len(message))
    return length + masked(length) + message + masked(message)


def record(index: int) -> bytes:
    return record_of(
        {
            "label": field(3, field(1, bytes([index]))),
            "x": field(2, field(1, struct.pack("<3f", index, 1.5, -2))),
            "image": field(1, field(1, b"pixels")),
        }
    )


class TestTfRecord:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        for number in range(2):
            (tmp_path / f"{number}.tfrecord").write_bytes(
                b"".join(record(i) for i in range(10 * number, 10 * number + 5))
            )
        return tmp_path / "*.tfrecord"

    def test_examples_are_dicts(self, path: Path) -> None:
        split = data.tfrecord(path)
        read = [split.dataset[index] for index in range(len(split))]
        assert [int(example["label"][0]) for example in read] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
        assert read[7]["image"] == b"pixels"
        np.testing.assert_array_equal(read[7]["x"], np.array([12, 1.5, -2], np.float32))

    def test_a_batch_is_what_its_examples_stacked_are(self, path: Path) -> None:
        split, indices = data.tfrecord(path), np.array([8, 0, 3, 3])
        batch, expected = split.load(indices, 0, 0).examples, stack([split.dataset[index] for index in indices])
        assert list(batch) == list(expected) and batch["image"] == expected["image"]
        for name in ("label", "x"):
            np.testing.assert_array_equal(batch[name], expected[name], strict=True)
        assert split.collated(lambda examples: [*examples]).load(indices, 0, 0).examples[2]["label"] == [3]

    def test_every_encoding_of_the_format(self, tmp_path: Path) -> None:
        integers = [0, 127, 128, 2**40, -1, -(2**63)]
        records = [
            {
                "packed": field(3, field(1, b"".join(map(varint, integers)))),
                "single": field(3, b"".join(b"\x08" + varint(value) for value in integers)),
                "floats": field(2, struct.pack("<bfbf", 13, 0.5, 13, -1)),
                "several": field(1, field(1, b"a") + field(1, b"") + field(1, b"b" * 300)),
                "nothing": b"",
                "without values": field(2, b""),
            },
            {"other": field(3, field(1, b"\1")), "packed": field(3, field(1, b"\5"))},
            {},
        ]
        (tmp_path / "a").write_bytes(b"".join(map(record_of, records)))
        split = data.tfrecord(tmp_path / "a")
        first, second, third = split.collated(list).load(np.arange(3), 0, 0).examples
        assert first["packed"].tolist() == first["single"].tolist() == integers
        assert first["floats"].tolist() == [0.5, -1] and first["floats"].dtype == np.float32
        assert first["several"] == [b"a", b"", b"b" * 300]
        assert "nothing" not in first
        assert (first["without values"].dtype, first["without values"].shape) == (np.float32, (0,))
        assert {name: value.tolist() for name, value in second.items()} == {"packed": [5], "other": [1]}
        assert third == {}

    @pytest.mark.parametrize(
        "feature",
        [
            field(3, field(1, b"\x80")),  # the last integer is not complete
            field(3, field(1, b"\xff" * 11)),
            field(2, field(1, b"\0" * 5)),
            field(1, b"\x08\1"),  # a number in a list of bytes
            field(1, b"\x0a\7a"),  # the element is longer than the list
            b"\x1a\x7f",
            b"\x0f",  # an unknown wire type
        ],
    )
    def test_a_message_that_is_not_valid_is_named(self, tmp_path: Path, feature: bytes) -> None:
        (tmp_path / "a").write_bytes(record_of({"x": field(3, field(1, b"\1"))}) + record_of({"x": feature}))
        refused(f"{tmp_path / 'a'}: record 1 ", data.tfrecord(tmp_path / "a").load, np.arange(2), 0, 0)

    def test_a_file_that_shrinks_is_named(self, path: Path) -> None:
        split, file = data.tfrecord(path), path.with_name("1.tfrecord")
        status = file.stat()
        content = file.read_bytes()
        file.write_bytes(content[:-9] + bytes(9))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        refused(f"{file}: record 4 ", split.load, np.arange(8, 10), 0, 0)
        file.write_bytes(content[:-9])
        refused(file, split.load, np.arange(8, 10), 0, 0)

    def test_a_file_is_indexed_once(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data.tfrecord(path)
        monkeypatch.setattr("mpitrain.data.tfrecords._index", None)
        assert len(data.tfrecord(path)) == 10

    @pytest.mark.parametrize("place", [3, 20, 70, -3])
    def test_damage_is_found(self, path: Path, place: int) -> None:
        file = path.with_name("1.tfrecord")
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)
        refused(file, lambda: [*map(data.tfrecord(path).dataset.__getitem__, range(10))])

    def test_a_truncated_file_is_named(self, path: Path) -> None:
        file = path.with_name("0.tfrecord")
        file.write_bytes(file.read_bytes()[:-1])
        refused(file, data.tfrecord, path)
