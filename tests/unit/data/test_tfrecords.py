"""TFRecord files: the examples, and errors that name file and record."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import Any

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


def features_of(features: dict[str, bytes]) -> bytes:
    return b"".join(field(1, field(1, name.encode()) + field(2, value)) for name, value in features.items())


def record_of(features: dict[str, bytes]) -> bytes:
    """Return a record with a message, given the fields of its features."""
    return framed(field(1, features_of(features)))


def framed(message: bytes) -> bytes:
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


FLOATS = field(2, field(1, struct.pack("<2f", 1, 2)))


class TestOtherMessages:
    def test_sequences_are_lists_of_steps(self, tmp_path: Path) -> None:
        steps = b"".join(
            field(1, step) for step in (FLOATS, b"", field(1, field(1, b"a")), field(3, field(1, b"\1\2")))
        )
        lists = field(2, features_of({"steps": steps, "none": b""}))
        messages = [field(1, features_of({"x": FLOATS})) + lists, lists, field(1, features_of({"x": FLOATS})), b""]
        (tmp_path / "a").write_bytes(b"".join(map(framed, messages)))
        split = data.tfrecord(tmp_path / "a")
        examples = [split.dataset[i] for i in range(4)]
        assert [sorted(example) for example in examples] == [["none", "steps", "x"], ["none", "steps"], ["x"], []]
        floats, unset, text, integers = examples[1]["steps"]
        assert (floats.tolist(), unset, text, integers.tolist()) == ([1, 2], None, b"a", [1, 2])
        assert examples[1]["none"] == []
        refused("record 0", split.load, np.arange(2), 0, 0)

    @pytest.mark.parametrize(
        "message",
        [
            field(3, b"text"),
            field(1, b"text of another message"),
            b"\x08\1",  # a number in field 1
            field(1, field(2, b"")),
            field(1, field(1, field(1, b"x") + field(3, b""))),
            field(1, features_of({"x": field(4, b"")})),
            field(1, features_of({"x": field(2, field(2, b"1234"))})),
            field(2, field(1, b"\x08\1")),
            field(2, features_of({"x": field(2, FLOATS)})),
            field(1, features_of({"x": FLOATS})) + field(2, features_of({"x": b""})),
        ],
    )
    def test_messages_of_other_kinds_are_refused(self, message: bytes, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(framed(message))
        refused(f"{tmp_path / 'a'}: record 0 ", data.tfrecord(tmp_path / "a").load, np.arange(1), 0, 0)

    @pytest.mark.parametrize("turn", [1, -1])
    def test_a_feature_without_a_value_is_missing(self, turn: int, tmp_path: Path) -> None:
        messages = [record_of({"x": FLOATS, "w": FLOATS}), record_of({"x": FLOATS, "w": b""})][::turn]
        (tmp_path / "a").write_bytes(b"".join(messages))
        split = data.tfrecord(tmp_path / "a")
        assert sorted([*split.dataset[i]] for i in range(2)) == [["x"], ["x", "w"]]
        refused("record 1", split.load, np.arange(2), 0, 0)
        (tmp_path / "b").write_bytes(messages[turn < 0 and 1] * 3)
        assert data.tfrecord(tmp_path / "b").load(np.arange(3), 0, 0).examples["w"].dtype == np.float32

    @pytest.mark.parametrize(
        ("compress", "word"),
        [(gzip.compress, "gzip"), (zlib.compress, "zlib"), (lambda _: b"<!doctype html>" + bytes(9), "HTML")],
    )
    def test_other_files_are_named(self, compress: Any, word: str, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(compress(record(1)))
        refused(word, data.tfrecord, tmp_path / "a")

    def test_a_record_whose_length_looks_like_gzip(self, tmp_path: Path) -> None:
        length = 0x088B1F
        text = field(1, features_of({"x": field(1, field(1, b"y" * (length - 30)))}))
        text = field(1, features_of({"x": field(1, field(1, b"y" * (length - 30 - (len(text) - length))))}))
        assert len(text) == length
        (tmp_path / os.fsdecode(b"\xff")).write_bytes(framed(text))
        assert len(data.tfrecord(tmp_path / os.fsdecode(b"\xff")).dataset[0]["x"]) > length - 40
