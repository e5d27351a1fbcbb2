"""Arguments of modules for batches of every form, datasets as splits, and batches between processes."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate  # noqa: E402

from mpitrain import data  # noqa: E402
from mpitrain.data.batch import Batch, CollatedBatch  # noqa: E402
from mpitrain.data.split import DatasetSplit  # noqa: E402
from mpitrain.errors import DataError, JobError  # noqa: E402
from mpitrain.pytorch import batches  # noqa: E402
from mpitrain.pytorch.batches import DatasetOnDevice, Inputs, TensorBatch, as_split, as_tensors, inputs_of  # noqa: E402

DTYPE = np.dtype(np.float64)
Pair = namedtuple("Pair", "left right")
LEFT, RIGHT, LABELS = torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4], dtype=torch.int32), torch.tensor([0, 1])


def collated(tree: Any) -> CollatedBatch:
    return CollatedBatch(tree, None, 0, 2)


def test_a_batch_of_arrays_has_one_input_and_labels() -> None:
    batch = Batch(np.float32([[1], [2]]), np.uint8([3, 255]), 0)
    args, kwargs, labels = inputs_of(batch, DTYPE)
    assert not kwargs and len(args) == 1 and args[0].tolist() == [[1], [2]] and labels.tolist() == [3, 255]
    assert (args[0].dtype, labels.dtype) == (torch.float64, torch.int64)
    args, _, again = inputs_of(batch, DTYPE, takes_labels=True)
    assert len(args) == 2 and args[1] is again


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "uint32", "int64"])
def test_integers_become_int64(dtype: str) -> None:
    array = np.array([0, 1, 100 if dtype != "bool" else 1]).astype(dtype)
    tensor = batches.to_tensor(array, DTYPE)
    assert tensor.dtype == torch.int64 and tensor.tolist() == array.astype(int).tolist()


def test_integers_that_int64_lacks() -> None:
    assert batches.to_tensor(np.uint64([2**63 - 1]), DTYPE).tolist() == [2**63 - 1]
    with pytest.raises(DataError, match=str(2**63)):
        batches.to_tensor(np.uint64([1, 2**63]), DTYPE)


def test_an_array_of_the_type_of_the_parameters_is_shared() -> None:
    array = np.zeros(2)
    batches.to_tensor(array, DTYPE)[0] = 7
    assert array.tolist() == [7, 0]


@pytest.mark.parametrize(
    ("tree", "takes_labels", "args", "kwargs", "labels"),
    [
        ((LEFT, LABELS), False, (LEFT,), {}, LABELS),
        ([LEFT, RIGHT, LABELS], False, [LEFT, RIGHT], {}, LABELS),
        ({"x": LEFT, "label": LABELS}, False, (), {"x": LEFT}, LABELS),
        ({"target": RIGHT, "labels": LABELS}, False, (), {"target": RIGHT}, LABELS),
        ((LEFT, LABELS), True, (LEFT, LABELS), {}, None),
        (LEFT, True, (LEFT,), {}, None),
        ({"x": LEFT, "label": LABELS}, True, (), {"x": LEFT, "label": LABELS}, LABELS),
        ({"x": LEFT}, True, (), {"x": LEFT}, None),
        ({"target": RIGHT, "labels": LABELS}, True, (), {"target": RIGHT, "labels": LABELS}, LABELS),
    ],
)
def test_the_arguments_of_trees(tree: Any, takes_labels: bool, args: Any, kwargs: Any, labels: Any) -> None:
    found = inputs_of(collated(tree), DTYPE, takes_labels=takes_labels)
    assert found.kwargs.keys() == kwargs.keys() and len(found.args) == len(args)
    pairs = [
        (found.labels, labels),
        *zip(found.args, args, strict=True),
        *((found.kwargs[k], kwargs[k]) for k in kwargs),
    ]
    for tensor, expected in pairs:
        assert (tensor is None) == (expected is None)
        if expected is not None:
            assert tensor.tolist() == expected.tolist()
            assert tensor.dtype == (torch.float64 if expected.is_floating_point() else expected.dtype)


@pytest.mark.parametrize("tree", [LEFT, (LEFT,), {"x": LEFT}, "text"])
def test_examples_without_a_label_are_refused(tree: Any) -> None:
    with pytest.raises(JobError, match="label"):
        inputs_of(collated(tree), DTYPE)


def test_the_description_has_all_shapes() -> None:
    text = Inputs((LEFT,), {"right": RIGHT}, LABELS).describe()
    assert "float32(2, 1)" in text and "right=int32(2,)" in text and "int64(2,)" in text


def test_arguments_without_labels() -> None:
    args, kwargs = batches.arguments_of(Batch({"a": np.int8([1]), "b": np.float32([2])}, None, 0), DTYPE)
    assert not args and {name: value.dtype for name, value in kwargs.items()} == {"a": torch.int64, "b": torch.float64}
    args, kwargs = batches.arguments_of(Batch(np.float32([2]), None, 0), DTYPE)
    assert args[0].tolist() == [2] and not kwargs


@pytest.mark.parametrize("takes_labels", [False, True])
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(("stored", "scale"), [("uint8", 1 / 255), ("int32", None), ("float32", 1.0), ("float64", 2.0)])
def test_batches_made_on_the_device_are_those_of_arrays(
    stored: str, scale: float | None, bfloat16: bool, takes_labels: bool
) -> None:
    rng = np.random.default_rng(0)
    examples, labels = rng.integers(0, 200, (9, 3)).astype(stored), rng.integers(0, 5, 9).astype(np.uint8)
    before = examples.copy()
    cached = DatasetOnDevice(examples, labels, scale, np.dtype(np.float32), bfloat16, "cpu")
    chosen = torch.tensor([7, 0, 7])
    found = cached.inputs_of(chosen, takes_labels)
    scaled = examples if scale is None else (examples * scale).astype(np.float32)
    expected = inputs_of(Batch(scaled[chosen], labels[chosen], 0), np.dtype(np.float32), takes_labels=takes_labels)
    wanted = torch.bfloat16 if bfloat16 and scale is not None else expected.args[0].dtype
    torch.testing.assert_close(found.args[0], expected.args[0].to(wanted))
    assert torch.equal(found.labels, expected.labels) and len(found.args) == len(expected.args)
    assert cached.labels_of(chosen).dtype == torch.uint8
    np.testing.assert_array_equal(examples, before)  # a scale must not change the stored examples
    torch.testing.assert_close(cached.inputs_of(chosen, takes_labels).args[0], found.args[0])


def test_types_that_cannot_be_on_the_device() -> None:
    assert DatasetOnDevice.supports(np.zeros(1, np.uint8), np.zeros(1))
    assert not DatasetOnDevice.supports(np.zeros(1, np.uint8), np.zeros(1, np.uint32))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor(3),
        torch.zeros(2, 0),
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
    ],
)
def test_a_batch_passes_between_processes(tensor: Any) -> None:
    tree = {"x": [tensor, "text"], "y": Pair(tensor, 3)}
    batch = pickle.loads(pickle.dumps(TensorBatch(tree, None, 5, 2)))
    assert (type(batch), batch.position, batch.count, batch.labels) == (TensorBatch, 5, 2, None)
    for found in (batch.examples["x"][0], batch.examples["y"].left):
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found.to_dense(), tensor.detach().to_dense())
    assert batch.examples["x"][1] == "text" and batch.examples["y"].right == 3


def test_a_dataset_of_two_tensors_is_shared_as_arrays() -> None:
    split = as_split(TensorDataset(LEFT, RIGHT))
    assert split.is_array and split.read_batch(0, 2).labels.tolist() == [3, 4]
    for other in (
        TensorDataset(LEFT, RIGHT, LABELS),
        TensorDataset(LEFT.clone().requires_grad_(), RIGHT),
        TensorDataset(LEFT.half(), RIGHT),
    ):
        assert isinstance(as_split(other), DatasetSplit)
    assert isinstance(as_split(TensorDataset(LEFT, RIGHT), default_collate), DatasetSplit)


def test_examples_are_collated_as_in_torch() -> None:
    examples = [{"x": np.float32([i, 2]), "n": np.int8(i), "pair": (i, 0.5 * i), "text": str(i)} for i in range(4)]
    batch = as_split(examples).read_batch(1, 3)
    assert type(batch) is TensorBatch
    expected = default_collate([{**example, "n": int(example["n"])} for example in examples[1:3]])
    for name in ("x", "n"):
        assert batch.examples[name].dtype == expected[name].dtype and torch.equal(batch.examples[name], expected[name])
    assert batch.examples["text"] == ["1", "2"]
    assert [part.tolist() for part in batch.examples["pair"]] == [[1, 2], [0.5, 1.0]]


def test_a_function_of_the_user_collates() -> None:
    split = as_split([1, 2, 3], lambda examples: torch.tensor([sum(examples)]))
    assert split.read_batch(0, 3).examples.tolist() == [6]
    own = data.dataset([1, 2, 3]).collated(lambda examples: torch.tensor([10 * sum(examples)]))
    assert as_split(own).read_batch(0, 3).examples.tolist() == [60]
    with pytest.raises(JobError, match="collate_fn"):
        as_split(data.from_arrays(np.zeros((2, 1)), np.zeros(2)), default_collate)


def test_each_example_of_a_subset_has_its_own_random_numbers() -> None:
    class Random:
        """Draws its examples, and could draw them all at once."""

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return torch.rand(1), index

        def __getitems__(self, indices: list[int]) -> Any:
            raise AssertionError

    split = as_split(Subset(Random(), [5, 3, 1]))  # type: ignore[arg-type]
    whole = split.load(np.arange(3), 0, 0).examples
    assert whole[1].tolist() == [5, 3, 1]
    alone = [split.load(np.array([place]), 0, place).examples[0].item() for place in range(3)]
    assert whole[0].flatten().tolist() == alone and len(set(alone)) == 3


class Stream(IterableDataset[Any]):
    """Examples in their order."""

    def __iter__(self) -> Any:
        return iter([(torch.tensor([float(i)]), i) for i in range(4)])


class Sized(Stream):
    """A stream of known length."""

    def __len__(self) -> int:
        return 4


def test_streams_need_a_length() -> None:
    with pytest.raises(JobError, match="Stream"):
        as_split(Stream())
    split = as_split(Sized())
    assert len(split) == 4 and split.is_stream and type(split.read_batch(0, 2)) is TensorBatch


def test_what_is_no_dataset_is_unchanged() -> None:
    with pytest.raises(JobError, match="DataLoader"):
        as_split(DataLoader(Sized()))
    for value in (None, 3, np.zeros(2), LEFT, (LEFT, LABELS), {"x": LEFT}):
        assert as_split(value) is value
    split = data.from_arrays(np.zeros((2, 1)), np.zeros(2))
    assert as_split(split) is split


def test_batches_have_the_form_of_a_data_loader() -> None:
    device = torch.device("cpu")
    pair = as_tensors(Batch(np.float32([[1]]), np.int8([2]), 0), device, pin=True)
    assert isinstance(pair, list) and [part.dtype for part in pair] == [torch.float32, torch.int8]
    tree = {"x": (LEFT, "a"), "y": Pair(LABELS, [RIGHT, 5])}
    moved = as_tensors(collated(tree), device)
    assert isinstance(moved["x"], list) and moved["x"][1] == "a" and isinstance(moved["y"], Pair)
    assert moved["x"][0] is LEFT and moved["y"].left is LABELS and moved["y"].right == [RIGHT, 5]
