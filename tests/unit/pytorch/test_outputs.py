"""Outputs of many batches, shares of a DataLoader, and correct predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset  # noqa: E402

from mpitrain.errors import JobError  # noqa: E402
from mpitrain.pytorch.outputs import are_scores, correct_predictions, facts_of, joined, on_host, outputs_of, share_of  # noqa: E402

DATASET = TensorDataset(torch.arange(11.0).view(11, 1), torch.arange(11) % 3)


def test_a_copy_on_the_host_has_float32_for_16_bits() -> None:
    tensors = [torch.ones(2, dtype=dtype, requires_grad=dtype.is_floating_point) for dtype in (
        torch.bfloat16, torch.float16, torch.float64, torch.int8
    )]  # fmt: skip
    tree = on_host({"a": [*tensors], "b": (tensors[2], "text", 3)})
    assert [part.dtype for part in tree["a"]] == [torch.float32, torch.float32, torch.float64, torch.int8]
    assert isinstance(tree["a"], tuple) and tree["b"][1:] == ("text", 3)
    assert not tree["b"][0].requires_grad and tree["b"][0].data_ptr() != tensors[2].data_ptr()


def test_parts_are_joined_along_the_first_dimension() -> None:
    parts = [{"y": (torch.full((n, 2), n), torch.tensor(n)), "name": f"part {n}"} for n in (1, 3)]
    whole = joined(parts)
    assert whole["y"][0].tolist() == [[1, 1], [3, 3], [3, 3], [3, 3]] and whole["y"][1].tolist() == [1, 3]
    assert whole["name"] == "part 1"
    with pytest.raises(ValueError, match="shorter"):
        joined([(1, 2), (1,)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_outputs_and_labels_of_a_batch(dtype: Any) -> None:
    model = nn.Linear(2, 3).to(dtype)
    batch = (torch.rand(4, 2), torch.tensor([0, 1, 2, 0]))
    number = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
    outputs, labels = outputs_of(model, batch, number, "cpu")
    torch.testing.assert_close(outputs, on_host(model(batch[0].to(dtype))))
    assert torch.equal(labels, batch[1])
    with pytest.raises(JobError):
        outputs_of(model, (batch[0],), number, "cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("own_sampler", [False, True])
def test_shares_together_are_all_batches_in_order(size: int, own_sampler: bool) -> None:
    sampler = BatchSampler(SequentialSampler(DATASET), 3, drop_last=False)
    loader = DataLoader(DATASET, batch_sampler=sampler) if own_sampler else DataLoader(DATASET, 3)
    shares = [pair for rank in range(size) for pair in share_of(loader, rank, size)]
    assert [number for number, _ in sorted(shares, key=lambda pair: pair[0])] == list(range(len(loader)))
    found: dict[int, Any] = dict(shares)
    for number, batch in enumerate(loader):
        assert all(map(torch.equal, found[number], batch))
    assert [len(list(share_of(loader, rank, size))) for rank in range(size)] == [
        len(range(rank, len(loader), size)) for rank in range(size)
    ]


class Stream(IterableDataset[Any]):
    """A dataset without indices."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        ([1, 2], "list"),
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(DATASET, batch_size=None), "batch_size"),
        (DataLoader(DATASET, 2, shuffle=True), "RandomSampler"),
        (DataLoader(DATASET, 2, sampler=[1, 2]), "list"),
        (DataLoader(DATASET, batch_sampler=[[0], [1]]), "list"),
    ],
)
def test_loaders_whose_batches_may_differ_on_the_ranks(loader: Any, named: str) -> None:
    with pytest.raises(JobError, match=named):
        share_of(loader, 0, 2)


def test_facts_that_must_be_equal_on_all_ranks() -> None:
    facts = {facts_of(DataLoader(Subset(DATASET, indices), 2)) for indices in ([0, 1, 2], [0, 2, 1], [0, 1, 3])}
    assert len(facts) == 3 and {each[:2] for each in facts} == {(3, 2)}
    assert facts_of(DataLoader(DATASET, 4)) == (11, 3, None)
    arrays = [DataLoader(Subset(DATASET, np.array([0, 5])), 1), DataLoader(Subset(DATASET, [0, 5]), 1)]  # type: ignore[arg-type]
    assert facts_of(arrays[0]) == facts_of(arrays[1])


@pytest.mark.parametrize(
    ("outputs", "labels", "expected"),
    [
        ((5, 3), (5,), True),
        ((5, 3, 2, 2), (5, 2, 2), True),
        ((5, 3), (5, 3), False),
        ((5, 3, 2), (5, 3), False),
        ((5,), (5,), False),
        ((4, 3), (5,), False),
    ],
)
def test_scores_of_classes(outputs: tuple[int, ...], labels: tuple[int, ...], expected: bool) -> None:
    assert are_scores(torch.zeros(outputs), torch.zeros(labels, dtype=torch.int64)) is expected
    assert not are_scores(torch.zeros(outputs), torch.zeros(labels))
    assert not are_scores({"scores": torch.zeros(outputs)}, torch.zeros(labels, dtype=torch.int64))


def test_predictions_are_the_largest_scores_without_ignored_labels() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    labels = torch.tensor([1, 0, 0, 0])
    assert correct_predictions(outputs, labels, None) == (3, 4)
    assert correct_predictions(outputs, labels, 0) == (1, 1)
    assert correct_predictions(outputs, torch.tensor([255, 0, 0, 0], dtype=torch.uint8), 255) == (2, 3)
    assert correct_predictions(outputs, labels.double(), None) == (0, 0)
    assert correct_predictions(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64), None) == (0, 0)
