"""Batches: they have the right examples, scaled, from memory or from a file."""

import threading
import time

import h5py
import numpy as np
import pytest

from mpitrain import data
from mpitrain.data.batch import Batch, IndexBatch
from mpitrain.data.checks import check_conversion
from mpitrain.data.loader import IndexLoader
from mpitrain.data.permutation import order
from mpitrain.data.split import Split
from mpitrain.errors import DataError

from ...support.waiting import wait_until


def arrays(batch: Batch):
    """Return the examples and the labels of a batch."""
    return batch.examples, batch.labels


def make(n=23, shape=(5,), dtype=np.uint8, scale=1 / 255):
    """Return a loader of float32 batches from memory, and its examples and labels."""
    rng = np.random.default_rng(0)
    examples = (rng.random((n, *shape)) * 200).astype(dtype)
    labels = np.arange(n) % 4
    split = data.from_arrays(examples, labels, 4, scale)
    return data.Loader(split, data.InMemory(examples, labels), 9, np.float32), examples, labels


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float32, np.float64, np.bool_])
@pytest.mark.parametrize("shape", [(5,), (), (3, 2, 1)])
@pytest.mark.parametrize("out", [np.float32, np.float64])
def test_a_batch_is_the_examples_of_the_order_converted_and_scaled(dtype, shape, out):
    _, examples, labels = make(23, shape, dtype)
    split = data.from_arrays(examples, labels, 4, 0.25)
    loader = data.Loader(split, data.InMemory(examples, labels), 9, out)
    for position, count in ((0, 1), (1, 23), (20, 7), (1000, 3)):
        indices = order(position, count, 23, 9)
        batch, batch_labels = arrays(loader.batch(position, count))
        assert batch.dtype == out and batch.shape == (count, *shape)
        np.testing.assert_array_equal(batch, examples[indices].astype(out) * out(0.25))
        assert np.array_equal(batch_labels, labels[indices])


@pytest.mark.parametrize(("dtype", "out"), [(np.uint8, np.uint8), (np.uint8, np.float32), (np.float32, np.float32)])
def test_a_large_batch_is_copied_by_several_threads(dtype, out):
    examples = np.random.default_rng(0).integers(0, 256, (500, 3, 5001)).astype(dtype)
    storage = data.InMemory(examples, np.arange(500), threads=3)
    indices = order(0, 300, 500, 9)
    batch, labels = np.empty((300, 3, 5001), out), np.empty(300, np.int64)
    storage.take(indices, 0.5, batch, labels)
    assert sum(thread.name.startswith("gather") for thread in threading.enumerate()) > 1
    storage.close()
    np.testing.assert_array_equal(batch, examples[indices] if out == np.uint8 else examples[indices] * np.float32(0.5))
    assert np.array_equal(labels, indices)


def test_batches_of_indices_are_in_the_order_of_batches_of_examples():
    loader, examples, _ = make(23, (), np.float32, 1.0)
    indices = IndexLoader(loader, lambda: True)
    for number, (position, count) in enumerate(((0, 1), (20, 7), (3, 5), (1000, 3))):
        batch, expected = indices.batch(position, count), loader.batch(position, count)
        if number < 2:  # the model allocates its memory
            assert not isinstance(batch, IndexBatch) and np.array_equal(batch.examples, expected.examples)
            continue
        assert np.array_equal(examples[batch.examples], expected.examples)
        part = batch.part(1, 3)
        assert part.position == position + 1 and np.array_equal(part.examples, batch.examples[1:3])
    with pytest.raises(DataError):
        indices.batch(0, 24)


def test_a_split_that_does_not_fit_is_tried_once():
    loader, _, _ = make(23, (), np.float32, 1.0)
    tried = []
    indices = IndexLoader(loader, lambda: bool(tried.append(1)))
    assert not any(isinstance(indices.batch(position, 3), IndexBatch) for position in range(6)) and len(tried) == 1


def test_an_epoch_is_every_example_once_though_batches_do_not_divide_it():
    loader, examples, _ = make(23, (), np.float32, 1.0)
    seen = np.concatenate([loader.batch(p, min(5, 69 - p)).examples.copy() for p in range(0, 69, 5)])
    for epoch in seen.reshape(3, 23):
        assert np.array_equal(np.sort(epoch), np.sort(examples))


def test_a_batch_stays_until_the_second_call_after_it():
    loader, _, _ = make()
    first, first_labels = arrays(loader.batch(0, 10))
    kept, kept_labels = first.copy(), first_labels.copy()
    loader.batch(10, 10)
    assert np.array_equal(first, kept) and np.array_equal(first_labels, kept_labels)
    loader.batch(20, 10)
    assert not np.array_equal(first, kept)


@pytest.mark.parametrize(
    ("n", "features", "at_once"), [(1000, 5, 6), (130, 5, 2), (50, 5, 1), (1000, 10_000, 2), (300, 50_000, 1)]
)
def test_batches_of_a_step_that_are_made_at_once_are_those_made_one_by_one(n, features, at_once, monkeypatch):
    examples = np.random.default_rng(0).integers(0, 256, (n, features)).astype(np.uint8)
    split, storage = data.from_arrays(examples, np.arange(n) % 4, 4), data.InMemory(examples, np.arange(n) % 4)
    one_by_one, loader = (data.Loader(split, storage, 9, np.float32, period=period) for period in (1, 6))
    make, made = loader._make, []
    monkeypatch.setattr(loader, "_make", lambda position, count: (made.append(count), make(position, count))[1])
    for step in (*range(5), 3):  # it may be moved back
        for index in range(6):
            position = 12 * 50 * step + 50 * index
            batch, expected = loader.batch(position, 50), one_by_one.batch(position, 50)
            assert batch.position == expected.position == position
            assert np.array_equal(batch.examples, expected.examples) and np.array_equal(batch.labels, expected.labels)
    assert set(made) == {50 * at_once}


def test_sequential_is_the_order_of_the_split():
    loader, examples, labels = make()
    for start, stop in ((0, 10), (10, 20), (20, 23)):
        batch, batch_labels = arrays(loader.sequential(start, stop))
        np.testing.assert_allclose(batch, examples[start:stop] / 255, rtol=1e-6)
        assert np.array_equal(batch_labels, labels[start:stop])


def test_a_batch_larger_than_the_split_is_refused_with_both_numbers():
    loader, _, _ = make(1200)
    loader.batch(7, 1200)
    with pytest.raises(DataError, match=r"1,201 examples.*1,200"):
        loader.batch(0, 1201)


class Watched(Split):
    """Examples whose values are their indices; records the ranges that are read, and the threads that read."""

    def __init__(self, n, block, fails_at=None, delay_s=0.0):
        super().__init__("watched", n, (2,), np.float32, (), np.int64, classes=n, block=block)
        self.reads = []
        self.threads = set()
        self.fails_at, self.delay_s = fails_at, delay_s

    def read(self, start, stop, examples, labels):
        time.sleep(self.delay_s)
        if self.fails_at is not None and start <= self.fails_at < stop:
            raise DataError(f"watched cannot be read at {self.fails_at}")
        self.reads.append((start, stop))
        self.threads.add(threading.current_thread())
        examples[...] = np.arange(start, stop)[:, np.newaxis]
        labels[...] = np.arange(start, stop)


@pytest.fixture
def streaming():
    """A function that makes streaming loaders, which are closed after the test."""
    loaders = []

    def make(split, stride=0):
        loaders.append(data.Loader(split, data.Streaming(split), 3, np.float32, stride=stride))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize(("n", "block", "batch"), [(100, 10, 7), (23, 5, 23), (12, 12, 5), (7, 1, 3), (50, 49, 8)])
def test_streaming_gives_each_example_once_an_epoch_with_its_label(streaming, n, block, batch):
    loader = streaming(Watched(n, block), stride=batch)
    seen = []
    for position in range(0, 3 * n, batch):
        count = min(batch, 3 * n - position)
        examples, labels = arrays(loader.batch(position, count))
        assert np.array_equal(examples[:, 0], labels) and np.array_equal(examples[:, 1], labels)
        seen.extend(labels)
    for epoch in np.reshape(seen, (3, n)):
        assert np.array_equal(np.sort(epoch), np.arange(n))


def test_streaming_reads_a_block_once_an_epoch_and_ahead(streaming):
    split = Watched(4000, 100, delay_s=0.002)
    loader = streaming(split, stride=50)
    for position in range(0, 3950, 50):
        loader.batch(position, 50)
    assert sorted(split.reads) == [(i, i + 100) for i in range(0, 4000, 100)]
    loader.batch(3950, 50)
    # Blocks of the next epoch are read before a batch needs them.
    wait_until(lambda: len(split.reads) > 40, lambda: len(split.reads), 5)
    assert threading.current_thread() not in split.threads


def test_streaming_keeps_few_blocks_in_memory(streaming):
    split = Watched(10_000, 10)
    loader = streaming(split)
    for position in range(0, 30_000, 50):
        loader.batch(position, 50)
    assert len(split.reads) > 2800


def test_streaming_takes_the_split_in_its_order_too(streaming):
    loader = streaming(Watched(23, 5))
    for start, stop in ((0, 4), (4, 12), (12, 23)):
        assert np.array_equal(loader.sequential(start, stop).labels, np.arange(start, stop))


def test_an_error_of_the_reading_thread_is_raised_by_the_batch_that_needs_it(streaming):
    needed = 160  # beginning of the third group of blocks
    block = int(order(needed, 1, 1000, 3, 10)[0]) // 10
    assert block not in order(0, needed, 1000, 3, 10) // 10  # no earlier batch needs it
    loader = streaming(Watched(1000, 10, fails_at=10 * block + 5), stride=10)
    for position in range(0, needed, 10):
        loader.batch(position, 10)
    with pytest.raises(DataError, match=f"cannot be read at {10 * block + 5}"):
        loader.batch(needed, 10)


def test_streaming_checks_labels_as_it_reads(streaming):
    split = Watched(20, 5)
    split.classes = 13
    with pytest.raises(DataError, match="watched: label 13 of example 13"):
        streaming(split).sequential(0, 20)


def test_close_ends_the_thread():
    before = threading.active_count()
    split = Watched(20, 5, delay_s=0.01)
    loader = data.Loader(split, data.Streaming(split), 3, np.float32)
    loader.batch(0, 20)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


def test_an_hdf5_file_streams_as_it_would_from_memory(tmp_path, streaming):
    path = tmp_path / "set.h5"
    pixels = np.random.default_rng(0).integers(0, 256, (37, 4, 3), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=pixels, chunks=(2, 4, 3))
        file["labels"] = np.arange(37)
    split = data.hdf5(path, classes=37)
    split.block = 6
    loader = streaming(split)
    for position in range(0, 80, 8):
        examples, labels = arrays(loader.batch(position, 8))
        assert np.array_equal(labels, order(position, 8, 37, 3, 6))
        np.testing.assert_allclose(examples, pixels[labels] / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("stored", "batch", "exact", "rounded"),
    [
        (np.int32, np.float32, [2**24, -(2**24), 2**24 + 2, -(2**31), 2**30], [2**24 + 1, -(2**24) - 1, 2**31 - 1]),
        (np.uint32, np.float32, [2**31, 2**32 - 256], [2**32 - 1]),
        (np.int64, np.float32, [-(2**63), 3 * 2**50], [2**50 + 1, 2**63 - 1]),
        (np.int64, np.float64, [2**53, -(2**63)], [2**53 + 1, 2**63 - 1]),
        (np.uint64, np.float64, [2**63, 2**64 - 2**11], [2**64 - 1]),
        (np.int64, None, [2**53 + 1], []),
        (np.float64, np.float32, [0.1], []),
    ],
)
def test_integers_that_a_conversion_would_round_are_refused_with_their_place(stored, batch, exact, rounded):
    dtype = None if batch is None else np.dtype(batch)
    for value, is_exact in [*((value, True) for value in exact), *((value, False) for value in rounded)]:
        examples = np.array([[0, 1], [1, value]], stored)
        split = data.from_arrays(examples, np.zeros(2))
        if is_exact:
            check_conversion("validation", split, dtype, examples, 40)
        else:
            with pytest.raises(DataError, match=rf"validation.* {value} .* 41 "):
                check_conversion("validation", split, dtype, examples, 40)


def test_a_streamed_block_is_checked_when_it_is_read():
    checked = []
    storage = data.Streaming(
        Watched(20, 5), lambda examples, labels, first: checked.append((first, examples[0, 0], labels[0]))
    )
    loader = data.Loader(Watched(20, 5), storage, 3, np.float32)
    loader.batch(0, 20)
    loader.close()
    assert sorted(checked) == [(0, 0, 0), (5, 5, 5), (10, 10, 10), (15, 15, 15)]
