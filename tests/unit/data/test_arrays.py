"""Arrays as data."""

import re

import numpy as np
import pytest

from mpitrain import data
from mpitrain.errors import DataError

from ...support.splits import message, read


def test_arrays_are_a_split():
    examples, labels = np.arange(12.0).reshape(4, 3), np.array([[0], [1], [2], [1]])
    split = data.from_arrays(examples, labels, classes=3)
    assert (len(split), split.shape, split.label_shape, split.block) == (4, (3,), (1,), None)
    found = read(split, 1, 3)
    assert np.array_equal(found[0], examples[1:3]) and np.array_equal(found[1], labels[1:3])
    labels[2] = 3
    assert "label 3 of example 12 " in message(lambda: data.check_labels(split, labels, 10))


@pytest.mark.parametrize(
    ("examples", "labels", "expected"),
    [
        (np.zeros((3, 2)), np.zeros(4), "3 examples.* 4 labels"),
        (np.zeros((0, 2)), np.zeros(0), r"\(0, 2\)"),
        (np.zeros((3, 2)), np.zeros(()), "0 labels"),
        (np.array(["a", "b"]), np.zeros(2), "<U1"),
        (np.zeros((2, 2), np.complex128), np.zeros(2), "complex128"),
        (np.zeros((2, 2), np.float16), np.zeros(2), "float16"),
    ],
)
def test_arrays_that_are_no_split_are_refused(examples, labels, expected):
    assert re.search(expected, message(lambda: data.from_arrays(examples, labels)))


@pytest.mark.parametrize("labels", [np.array([0, -1, 1]), np.array([0, 2, 1]), np.array([0.0, 1.0, 1.0])])
def test_labels_are_integers_of_the_classes(labels):
    split = data.from_arrays(np.zeros((3, 1)), labels, classes=2)
    assert message(lambda: data.check_labels(split, labels))
    data.check_labels(data.from_arrays(np.zeros((3, 1)), labels), labels)


@pytest.mark.parametrize("place", [0, 1])
def test_masked_values_are_refused(place):
    arrays = [np.ones((3, 2)), np.arange(3.0)]
    arrays[place] = np.ma.masked_equal(arrays[place], 1)
    with pytest.raises(DataError, match="masked"):
        data.from_arrays(*arrays)
    arrays[place] = np.ma.masked_equal(arrays[place].data, 7)
    assert len(data.from_arrays(*arrays)) == 3


def test_the_layout_in_memory_does_not_matter():
    x = np.arange(12).reshape(4, 3)
    for examples in (np.asfortranarray(x), x.astype(">i4"), x[::-1][::-1]):
        batch = data.from_arrays(examples, np.arange(4, dtype=">u2")).read_batch(1, 3)
        assert batch.examples.tolist() == x[1:3].tolist() and batch.labels.tolist() == [1, 2]
        assert batch.examples.dtype.isnative and batch.labels.dtype.isnative
