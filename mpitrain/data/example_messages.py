"""Parses ``tf.train.Example`` and ``SequenceExample`` messages with compiled code, a batch at a time.

A message is a protocol buffer: fields, each a tag (field number and wire type) and a value. An Example has these:

    Example   1: Features
    Features  1: entry, repeated
    entry     1: name   2: Feature
    Feature   one of 1: BytesList, 2: FloatList, 3: Int64List
    lists     1: values, repeated; numbers are mostly packed, that is one after another in one field

A SequenceExample has the same Features in field 1, and these:

    SequenceExample  2: FeatureLists
    FeatureLists     1: entry, repeated
    entry            1: name   2: FeatureList
    FeatureList      1: Feature, repeated, one for each step

Any other field shows that a message is of another kind. See tensorflow/core/example/example.proto and feature.proto,
and "Encoding" in the documentation of protocol buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.kernels import kernel
from ..core.layout import Array
from .trees import Columns

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5  # wire types
_MISSING, _EMPTY, _BYTES, _FLOATS, _INTEGERS = -1, 0, 1, 2, 3  # kinds of features; from 1 on, field numbers of Feature
_COMPLETE, _MALFORMED, _NEW_NAME = 0, 1, 2
_LONGEST_VARINT = 10  # bytes


class Messages(NamedTuple):
    """Some messages in memory.

    Attributes:
        content: Bytes.
        starts, stops: Where each message starts and ends.
    """

    content: Array
    starts: Array
    stops: Array


class ExampleParser:
    """Parses messages. A parser remembers the names of the features that it has parsed."""

    def __init__(self) -> None:
        self._names: list[bytes] = []

    def parse(self, messages: Messages, malformed: Callable[[int], Exception]) -> Sequence[dict[str, Any]]:
        """Return messages as dicts from a feature's name to an array of float32 or int64, bytes, or a list of bytes.

        A feature without a value is left out. A feature of a sequence is a list with such a value for each step.

        Args:
            malformed: Returns the exception to raise, given the number of a message that is not an Example.
        """
        sequences = np.zeros((len(messages.starts), 2), np.int64)
        lists = self._find_lists(messages, sequences, malformed)
        names = [_name(name) for name in self._names]
        is_example = not sequences.any()
        if is_example and _are_alike(lists):
            return Columns({name: _column(messages.content, lists[:, i]) for i, name in enumerate(names)})
        values = [_values(messages.content, lists[:, i]) for i in range(len(names))]
        examples = [
            {names[i]: values[i][message] for i in np.flatnonzero(kinds > _EMPTY)}
            for message, kinds in enumerate(lists[:, :, 0])
        ]
        for message, (start, stop) in enumerate(sequences.tolist()):
            steps = _sequences(messages.content, start, stop)
            if steps is None or examples[message].keys() & steps.keys():
                raise malformed(message)
            examples[message].update(steps)
        return examples

    def _find_lists(self, messages: Messages, sequences: Array, malformed: Callable[[int], Exception]) -> Array:
        """Return kind, number of values, start and stop of the list of each feature of each message.

        Args:
            sequences: Set to start and stop of the FeatureLists of each message that has them.
        """
        while True:
            names, ends = np.frombuffer(b"".join(self._names), np.uint8), np.cumsum([0, *map(len, self._names)])
            lists = np.full((len(messages.starts), len(self._names), 4), _MISSING)
            result, message, start, stop = _find_lists(*messages, names, ends, lists, sequences)
            if result == _MALFORMED:
                raise malformed(message)
            if result == _COMPLETE:
                return lists
            self._names.append(messages.content[start:stop].tobytes())


def _name(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


def _sequences(content: Array, start: int, stop: int) -> dict[str, list[Any]] | None:
    """Return the features of a sequence by name, a list with a value for each step; None if they are malformed."""
    sequences = {}
    while start < stop:
        number, wire, entry, start = _field(content, start, stop)
        name, name_stop, steps, steps_stop = _entry(content, entry, start)
        if start < 0 or number != 1 or wire != _SIZED or name < 0:
            return None
        lists = []
        while steps < steps_stop:
            number, wire, feature, steps = _field(content, steps, steps_stop)
            kind, first, last = _list_of(content, feature, steps)
            count = _count(content, kind, first, last)
            if steps < 0 or number != 1 or wire != _SIZED or count < 0:
                return None
            lists.append((kind, count, first, last))
        values = _values(content, np.array(lists, np.int64).reshape(-1, 4))
        sequences[_name(content[name:name_stop].tobytes())] = values
    return sequences


def _are_alike(lists: Array) -> bool:
    """Return whether all messages have the same features, with equally many values, or one value if they are bytes."""
    first = lists[0, :, :2]
    is_array = (first[:, 0] > _EMPTY) & ((first[:, 0] != _BYTES) | (first[:, 1] == 1))
    return bool(first.size and is_array.all() and (lists[:, :, :2] == first).all())


def _column(content: Array, lists: Array) -> Any:
    """Return a feature of messages that are alike: shape (messages, values), or a list of bytes."""
    if lists[0, 0] == _BYTES:
        return _values(content, lists)
    return _numbers(content, lists, lists[0, 0]).reshape(len(lists), -1)


def _values(content: Array, lists: Array) -> list[Any]:
    """Return a feature of each message: an array, bytes, a list of bytes; None if the message lacks the feature."""
    values: list[Any] = [None] * len(lists)
    for kind in np.unique(lists[:, 0]).tolist():
        chosen = np.flatnonzero(lists[:, 0] == kind)
        if kind <= _EMPTY:
            continue
        ends = np.cumsum(lists[chosen, 1])
        flat = _byte_strings(content, lists[chosen]) if kind == _BYTES else _numbers(content, lists[chosen], kind)
        for message, start, stop in zip(chosen.tolist(), [0, *ends.tolist()], ends.tolist(), strict=False):
            is_one = kind == _BYTES and stop == start + 1
            values[message] = flat[start] if is_one else flat[start:stop]
    return values


def _byte_strings(content: Array, lists: Array) -> list[bytes]:
    """Return all values of the lists, one list after another."""
    ranges = np.empty((lists[:, 1].sum(), 2), np.int64)
    _find_bytes(content, lists, ranges)
    return [content[start:stop].tobytes() for start, stop in ranges.tolist()]


def _numbers(content: Array, lists: Array, kind: int) -> Array:
    """Return all values of the lists, one list after another, float32 or int64."""
    count = lists[:, 1].sum()
    if kind == _FLOATS:
        bits = np.empty(count, np.uint32)
        _read_floats(content, lists, bits)
        return bits.view(np.float32)
    integers = np.empty(count, np.int64)
    if kind == _INTEGERS:
        _read_integers(content, lists, integers)
    return integers


@kernel
def _find_lists(
    content: Array, starts: Array, stops: Array, names: Array, name_ends: Array, lists: Array, sequences: Array
) -> tuple[int, int, int, int]:
    """Set ``lists`` and ``sequences``; return a result, its message, and where a new name starts and ends."""
    for message in range(starts.size):
        expected = 0  # the features of most messages are in the same order
        outer = starts[message]
        while outer < stops[message]:
            number, wire, features, outer = _field(content, outer, stops[message])
            if outer < 0 or wire != _SIZED or number < 1 or number > 2:
                return _MALFORMED, message, 0, 0
            if number == 2:
                if sequences[message, 1] > 0:
                    return _MALFORMED, message, 0, 0
                sequences[message, 0], sequences[message, 1] = features, outer
                continue
            while features < outer:
                number, wire, entry, features = _field(content, features, outer)
                if features < 0 or number != 1 or wire != _SIZED:
                    return _MALFORMED, message, 0, 0
                name, name_stop, feature, feature_stop = _entry(content, entry, features)
                if name < 0:
                    return _MALFORMED, message, 0, 0
                place = _place(content, name, name_stop, names, name_ends, expected)
                if place < 0:
                    return _NEW_NAME, message, name, name_stop
                kind, start, stop = _list_of(content, feature, feature_stop)
                count = _count(content, kind, start, stop)
                if count < 0:
                    return _MALFORMED, message, 0, 0
                lists[message, place, 0], lists[message, place, 1] = kind, count
                lists[message, place, 2], lists[message, place, 3] = start, stop
                expected = place + 1
    return _COMPLETE, 0, 0, 0


@kernel
def _entry(content: Array, at: int, stop: int) -> tuple[int, int, int, int]:
    """Return where the name and the feature of an entry start and end; the first is -1 if the entry is malformed."""
    name, name_stop, feature, feature_stop = at, at, at, at
    while at < stop:
        number, wire, start, at = _field(content, at, stop)
        if at < 0 or wire != _SIZED or number < 1 or number > 2:
            return -1, 0, 0, 0
        if number == 1:
            name, name_stop = start, at
        else:
            feature, feature_stop = start, at
    return name, name_stop, feature, feature_stop


@kernel
def _place(content: Array, start: int, stop: int, names: Array, ends: Array, expected: int) -> int:
    """Return the number of a name, -1 if it is new; ``expected`` is compared first."""
    count = ends.size - 1
    for turn in range(count):
        place = (expected + turn) % count
        if ends[place + 1] - ends[place] == stop - start:
            same = True
            for i in range(stop - start):
                same &= content[start + i] == names[ends[place] + i]
            if same:
                return place
    return -1


@kernel
def _list_of(content: Array, at: int, stop: int) -> tuple[int, int, int]:
    """Return kind, start and stop of a feature's list; an unknown kind if it is malformed, or there are several."""
    kind, list_start, list_stop = _EMPTY, at, at
    while at < stop:
        number, wire, start, at = _field(content, at, stop)
        if at < 0 or number < _BYTES or number > _INTEGERS or wire != _SIZED or kind != _EMPTY:
            return _INTEGERS + 1, 0, 0
        kind, list_start, list_stop = number, start, at
    return kind, list_start, list_stop


@kernel
def _count(content: Array, kind: int, at: int, stop: int) -> int:
    """Return the number of values of a list; -1 if it is malformed."""
    count = 0
    if kind > _INTEGERS:
        return -1
    while at < stop:
        number, wire, start, at = _field(content, at, stop)
        if at < 0 or number != 1:
            return -1
        size = at - start
        if kind == _FLOATS:
            if size % 4 != 0 or (wire != _SIZED and wire != _FIXED32):
                return -1
            count += size // 4
        elif kind == _INTEGERS:
            if wire != _SIZED and wire != _VARINT:
                return -1
            while start < at:
                _, start = _varint(content, start, at)
                if start < 0:
                    return -1
                count += 1
        elif wire == _SIZED:
            count += 1
        else:
            return -1
    return count


@kernel
def _find_bytes(content: Array, lists: Array, ranges: Array) -> None:
    """Set where each value of lists of bytes starts and ends."""
    place = 0
    for i in range(len(lists)):
        at = lists[i, 2]
        while at < lists[i, 3]:
            _, _, start, at = _field(content, at, lists[i, 3])
            ranges[place, 0], ranges[place, 1] = start, at
            place += 1


@kernel
def _read_floats(content: Array, lists: Array, bits: Array) -> None:
    """Set ``bits`` to the values of lists of floats, four bytes each."""
    place = 0
    for i in range(len(lists)):
        at = lists[i, 2]
        while at < lists[i, 3]:
            _, _, start, at = _field(content, at, lists[i, 3])
            for byte in range(start, at, 4):
                low = content[byte] | np.uint32(content[byte + 1]) << np.uint32(8)
                high = content[byte + 2] | np.uint32(content[byte + 3]) << np.uint32(8)
                bits[place] = low | high << np.uint32(16)
                place += 1


@kernel
def _read_integers(content: Array, lists: Array, values: Array) -> None:
    """Set ``values`` to the values of lists of integers."""
    place = 0
    for i in range(len(lists)):
        at = lists[i, 2]
        while at < lists[i, 3]:
            _, _, start, at = _field(content, at, lists[i, 3])
            while start < at:
                values[place], start = _varint(content, start, at)
                place += 1


@kernel
def _field(content: Array, at: int, stop: int) -> tuple[int, int, int, int]:
    """Return number and wire type of a field, and where its value starts and ends; end -1 if the field is malformed."""
    tag, start = _varint(content, at, stop)
    if start < 0:
        return 0, 0, 0, -1
    number, wire = tag >> 3, tag & 7
    size = 0
    if wire == _VARINT:
        _, end = _varint(content, start, stop)
        return number, wire, start, end
    if wire == _SIZED:
        size, start = _varint(content, start, stop)
        if start < 0:
            return 0, 0, 0, -1
    elif wire == _FIXED32:
        size = 4
    elif wire == _FIXED64:
        size = 8
    if size < 0 or size > stop - start or (wire != _SIZED and size == 0):
        return 0, 0, 0, -1
    return number, wire, start, start + size


@kernel
def _varint(content: Array, at: int, stop: int) -> tuple[int, int]:
    """Return an integer of variable size, seven bits in a byte, and where it ends; -1 if it is malformed."""
    value, shift = np.int64(0), np.int64(0)
    for place in range(at, min(stop, at + _LONGEST_VARINT)):
        byte = np.int64(content[place])
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place + 1
        shift += 7
    return value, -1
