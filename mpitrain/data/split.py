"""A split: examples and labels in files, loaded only when they are read."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..core.layout import Array, Shape
from ..errors import DataError
from .batch import Batch, BatchSource, CollatedBatch, Loading
from .dataset_loader import DatasetLoader
from .example_batches import ExampleBatches, Examples as Examples, Transform, name_of
from .orders import Order, OwnOrder, Sequential, Shuffled, Streams
from .stored_examples import SAMPLE, StoredExamples
from .trees import Allocate, describe, leaves, stack


class Split:
    """Examples with labels, addressed by index.

    Subclasses implement ``read``; construction reads only headers.

    Attributes:
        source: Origin of the data, for messages.
        count: Number of examples, also ``len(split)``.
        shape: Shape of an example.
        dtype: Stored data type, in this machine's byte order.
        label_shape, label_dtype: Shape and data type of a label.
        classes: Number of classes; labels are integers in [0, classes). None if labels are not classes.
        scale: Factor applied to examples when a batch is made; not to integers that the model takes unchanged.
        block: Number of consecutive examples to read at a time; None if the file cannot be read in ranges.
        note: A note to the user about how the files are read and what is left out, or None.
        columns: The types of the columns of a table, by name.
        names_and_sizes: What identifies the files; see ``files.names_and_sizes``.
        is_array: Whether all examples have the shape and type above, so that a batch is an array.
        is_stream: Whether examples can only be read in their order, from the first one on.
    """

    note: str | None = None
    columns: Mapping[str, str] = MappingProxyType({})
    names_and_sizes = b""
    is_array = True
    is_stream = False
    _order: Order | None = None

    def __init__(
        self,
        source: str,
        count: int,
        shape: Shape,
        dtype: Any,
        label_shape: Shape = (),
        label_dtype: Any = np.int64,
        classes: int | None = None,
        scale: float = 1.0,
        block: int | None = None,
    ) -> None:
        self.source, self.count, self.shape, self.dtype = source, count, tuple(shape), _native(source, dtype)
        self.label_shape, self.label_dtype = tuple(label_shape), _native(source, label_dtype)
        self.classes, self.scale, self.block = classes, scale, block
        self._stored = count  # ``ordered`` changes ``count``

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Size of all examples and labels in bytes."""
        example = math.prod(self.shape) * self.dtype.itemsize
        label = math.prod(self.label_shape) * self.label_dtype.itemsize
        return self.count * (example + label)

    @property
    def has_integers(self) -> bool:
        """Whether the stored examples are integers."""
        return self.dtype.kind in "iu"

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        """Read the examples [start, stop) and their labels into arrays.

        Args:
            examples: Shape ``(stop - start, *shape)``, of ``dtype``, C-contiguous.
            labels: Shape ``(stop - start, *label_shape)``, of ``label_dtype``, C-contiguous.

        Raises:
            DataError: The files do not match their headers.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Free memory that reading has taken, after all examples have been read; they can be read again."""

    def read_batch(self, start: int, stop: int) -> Batch:
        """Return the examples [start, stop) in stored form.

        Raises:
            DataError: The files do not match their headers.
        """
        examples = np.empty((stop - start, *self.shape), self.dtype)
        labels = np.empty((stop - start, *self.label_shape), self.label_dtype)
        self.read(start, stop, examples, labels)
        return Batch(examples, labels, start)

    def scaled(self, examples: Array, dtype: Any) -> Array:
        """Return examples in stored form times the scale, as ``dtype``; unchanged if ``dtype`` is None."""
        return examples if dtype is None else np.multiply(examples, self.scale, dtype=dtype)

    def sample_digest(self) -> str:
        """Return a digest of examples and labels spread over the split; of the first ones if ``has_ranges`` is False.

        Raises:
            DataError: The files do not match their headers.
        """
        content, count = hashlib.sha256(self.names_and_sizes), min(SAMPLE, self._stored)
        for number in range(count):
            content.update(self._bytes_at(number * self._stored // count if self.has_ranges else number))
        return content.hexdigest()[:16]

    def identity(self) -> str:
        """Return what must be the same when a run is resumed: the stored examples, not their order and transforms."""
        return f"{self._stored} examples, {self.sample_digest()}"

    def _bytes_at(self, index: int) -> bytes:
        batch = self.read_batch(index, index + 1)
        return batch.examples.tobytes() + batch.labels.tobytes()

    @property
    def has_ranges(self) -> bool:
        """Whether a part can be read without reading the preceding parts."""
        return self.block is not None

    def order(self, position: int, count: int, seed: int) -> Array:
        """Return the indices of the examples at [position, position + count) of the endless stream.

        Unless ``ordered`` has changed the order, ``seed`` determines it, and every example occurs once in each epoch.
        An epoch is a range of ``len(self)`` positions that starts at a multiple of ``len(self)``.

        Raises:
            DataError: There are fewer examples than ``count``.
        """
        if count > len(self):
            raise DataError(
                f"a batch of {count:,} examples is larger than {self.source}, which has {len(self):,}; reduce the "
                "batch size"
            )
        return (self._order or Shuffled()).indices(position, count, len(self), seed, self.block)

    @property
    def order_name(self) -> str:
        """A text that identifies the order of the examples, for comparisons."""
        return repr(self._order or Shuffled())

    def ordered(self, order: Order | Callable[[int, int], int]) -> Split:
        """Return this split with its training examples in another order.

        Args:
            order: One of ``data.orders``; or a function that takes the seed and a position of the endless stream, and
                returns the index of the example there.

        Raises:
            DataError: The order does not fit the number of examples.
        """
        copied = copy.copy(self)
        copied._order = own = OwnOrder(order) if callable(order) else order
        copied.count = own.length(self.count)
        return copied

    def check_step(self, examples: int) -> None:
        """Check that the order is possible with this number of examples in a step of all workers.

        Raises:
            DataError: The order is not possible.
        """
        if isinstance(self._order, Streams):
            self._order.check_step(examples)

    def check_streamed(self) -> None:
        """Check that the order of the examples supports reading in blocks, for files that do not fit into memory.

        Raises:
            DataError: The order does not support it.
        """
        if not isinstance(self._order or Shuffled(), (Shuffled, Sequential)):
            raise DataError(
                f"{self.source} does not fit into half of a node's free memory, and is therefore read in "
                f"blocks: the order must be Shuffled or Sequential, not {self._order!r}"
            )

    def map(self, function: Callable[[Any], Any]) -> DatasetSplit:
        """Return the examples with ``function`` applied to each when it is loaded.

        Args:
            function: Takes an example, such as a tuple of image and label, and returns an example of any structure.
        """
        return self._one_by_one()._transformed(Transform(function, is_random=False))

    def random_map(self, function: Callable[[Any, np.random.Generator], Any]) -> DatasetSplit:
        """Return the examples with a random ``function`` applied to each when it is loaded.

        Args:
            function: Takes an example and a generator, and returns an example. The seed and the example's position in
                the run determine the generator. Results therefore do not depend on the number of ranks and data
                workers, and are the same after a resume.
        """
        return self._one_by_one()._transformed(Transform(function, is_random=True))

    def _one_by_one(self) -> DatasetSplit:
        """Return these examples in the same order, to be loaded one by one."""
        split = DatasetSplit(StoredExamples(self), self.source, self.classes)
        split.block, split._order = self.block, self._order
        return split

    def own_loader(self, seed: int, loading: Loading = Loading()) -> BatchSource | None:
        """Return a source of this split's batches, in an order determined by ``seed``; None to use a ``Loader``."""
        return None


class DatasetSplit(Split):
    """Examples of any object with ``__len__`` and ``__getitem__``, loaded one by one.

    Before an example is loaded, the random generators of Python, NumPy and torch are seeded with the run's seed and the
    example's position in the stream. Random transforms are therefore the same when a run is resumed. If the object has
    ``__getitems__``, a batch is loaded at once, and the random generators are seeded with the position of its first
    example.

    An example is an array, a tensor, a number, or a nested tuple or dict of these.

    Args:
        dataset: The examples. If it has a method ``name_of(index)``, errors contain the name of the example.
        source: Origin of the data, for messages.
        classes: Number of classes if labels are classes, else None.

    Attributes:
        dataset: As given.
        collate: Makes a batch from a list of examples.
        batch_type: Type of the batch.
        class_names: The names of the classes by label; empty if the classes have no names.

    Raises:
        DataError: There are no examples.
    """

    is_array = False
    class_names: Sequence[str] = ()
    _transforms: tuple[Transform, ...] = ()

    def __init__(self, dataset: Any, source: str | None = None, classes: int | None = None) -> None:
        super().__init__(
            source or f"the dataset {type(dataset).__name__}", len(dataset), (), np.float32, classes=classes
        )
        if not self.count:
            raise DataError(f"{self.source} has no examples")
        self.dataset, self.batch_type = dataset, CollatedBatch
        self.names_and_sizes = getattr(dataset, "names_and_sizes", b"")
        self.collate: Callable[[Any], Any] = stack

    def collated(
        self, collate: Callable[[list[Any]], Any], batch_type: type[CollatedBatch] = CollatedBatch
    ) -> DatasetSplit:
        """Return this split with another function that makes a batch from a list of examples."""
        copied = copy.copy(self)
        copied.collate, copied.batch_type = collate, batch_type
        return copied

    def with_dataset(self, dataset: Any) -> DatasetSplit:
        """Return this split with the same examples in another object."""
        copied = copy.copy(self)
        copied.dataset = dataset
        return copied

    def as_arrays(self) -> DatasetSplit:
        """Return this split with batches that consist of an array of examples and an array of labels.

        Raises:
            DataError: The first example is not a pair of arrays or numbers, or cannot be loaded.
        """
        first = self.load(np.arange(1), 0, 0).examples
        if not isinstance(first, tuple) or len(first) != 2 or not all(isinstance(part, np.ndarray) for part in first):
            raise DataError(f"an example of {self.source} is {describe(first)}: must be a pair, an example and a label")
        copied = copy.copy(self)
        examples, labels = first
        copied.shape, copied.dtype = examples.shape[1:], _native(self.source, examples.dtype)
        copied.label_shape, copied.label_dtype = labels.shape[1:], _native(self.source, labels.dtype)
        copied.is_array = True
        return copied

    def read_batch(self, start: int, stop: int) -> Batch:
        return self.finish(self.load(np.arange(start, stop), 0, start))

    def identity(self) -> str:
        if isinstance(self.dataset, StoredExamples):
            return str(self.dataset.split.identity())
        return f"{self._stored} examples, {hashlib.sha256(self.names_and_sizes).hexdigest()[:16]}"

    def _bytes_at(self, index: int) -> bytes:
        return b"".join(map(_bytes_of, leaves(self.load(np.array([index]), 0, 0).examples)))

    @property
    def has_ranges(self) -> bool:
        return not isinstance(self.dataset, StoredExamples) or self.dataset.split.has_ranges

    def own_loader(self, seed: int, loading: Loading = Loading()) -> BatchSource:
        if not loading.workers:
            return DatasetLoader(self, seed, loading)
        from .processes import ProcessLoader  # here, because importing multiprocessing takes 20 ms

        return ProcessLoader(self, seed, loading)

    def start(self, share: int, shares: int, is_forked: bool = False) -> None:
        """Prepare to load examples in this process, one of ``shares`` processes that load them. Called once."""
        if is_forked and isinstance(self.dataset, StoredExamples):
            self.dataset.start_in_process()

    def load(self, indices: Array, seed: int, position: int, allocate: Allocate = np.empty) -> CollatedBatch:
        """Return the examples of these indices, which are at consecutive positions of the stream, as a batch.

        Args:
            allocate: Returns arrays for the batch; not all batches use it.

        Raises:
            DataError: An example cannot be loaded, or the examples cannot be collated.
        """
        examples = self._load_each(indices.tolist(), seed, position)
        batch = self._batches.collated(examples, indices.tolist(), allocate)
        return self.batch_type(batch, None, position, len(indices))

    @property
    def _batches(self) -> ExampleBatches:
        return ExampleBatches(self.dataset, self.source, self._transforms, self.collate)

    def _load_each(self, indices: list[int], seed: int, position: int) -> Iterable[Any]:
        return self._batches.examples(indices, seed, position)

    def finish(self, batch: Batch, loading: Loading = Loading(), indices: Array | None = None) -> Batch:
        """Return a batch of ``load`` in the form that the model accepts. In the rank.

        Args:
            indices: Indices of the examples, for messages.

        Raises:
            DataError: A label or a value is not valid.
        """
        if not self.is_array:
            return batch
        examples, labels = batch.examples
        is_numeric = isinstance(examples, np.ndarray) and examples.dtype.kind in "biuf"
        if not is_numeric or examples.shape != (batch.count, *self.shape) or len(labels) != batch.count:
            first = name_of(self.dataset, batch.position if indices is None else int(indices[0]))
            raise DataError(
                f"a batch of {batch.count} examples of {self.source} from {first} on is {describe(batch.examples)}: "
                f"must have numbers of shape {(batch.count, *self.shape)}, and as many labels"
            )
        if loading.check is not None:
            loading.check(examples, labels, batch.position if indices is None else indices)
        converted = examples if loading.dtype is None else examples.astype(loading.dtype, copy=False)
        return Batch(converted, labels, batch.position)

    def _transformed(self, transform: Transform) -> DatasetSplit:
        copied = copy.copy(self)
        copied._transforms = (*self._transforms, transform)
        return copied

    def _one_by_one(self) -> DatasetSplit:
        return self


def dataset(examples: Examples, classes: int | None = None) -> DatasetSplit:
    """Return a split of any object with ``__len__`` and ``__getitem__``: a dataset of torch, Hugging Face, Grain, ...

    Job and ``Trainer.loader`` accept such objects directly. A split also has the methods ``map``, ``random_map``,
    ``collated`` and ``ordered``.

    Args:
        examples: The object. All ranks must pass equal objects.
        classes: Number of classes if labels are classes, else None.

    Raises:
        DataError: The object has no examples.
    """
    return DatasetSplit(examples, classes=classes)


class DescribedSplit(Split):
    """Size, shape and digest of a split, for ranks that read no examples."""

    def __init__(self, count: int, shape: Shape, digest: str) -> None:
        super().__init__("the training examples", count, shape, np.float32)
        self._digest = digest

    def sample_digest(self) -> str:
        return self._digest


def _bytes_of(leaf: Any) -> bytes:
    """Return the bytes of an array or a number, and of any other object the bytes of its ``repr``."""
    try:
        array = np.asarray(leaf)
    except TypeError:
        return repr(leaf).encode()
    return repr(leaf).encode() if array.dtype.hasobject else array.tobytes()


def _native(source: str, dtype: Any) -> np.dtype[Any]:
    """Return ``dtype`` in this machine's byte order, the only one that kernels support."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or dtype == np.float16:
        raise DataError(f"{source} has values of type {dtype}: must be integers, float32 or float64")
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native
