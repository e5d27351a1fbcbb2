"""Trees of state as values of a checkpoint, and back; values of a damaged or forged checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpitrain.errors import CheckpointError, JobError  # noqa: E402
from mpitrain.pytorch.state_tree import flatten, unflatten  # noqa: E402


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected.detach())
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)  # the order is kept
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        -3,
        0.1,
        float("inf"),
        "ä\n\0",
        [],
        (),
        {},
        [1, (2.0, "3", None), [True]],
        {"b": 1, "a": {(0, "x"): [2], 3: (), None: 1.5, True: 0}},
        Counter({2: 3, 5: 1}),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        torch.tensor(7, dtype=torch.uint8),
        torch.zeros(2, 0),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        np.float32([[1, 2]]),
        {
            "state": {0: {"step": torch.tensor(3.0), "sum": [torch.ones(2), np.arange(3)]}},
            "param_groups": [{"lr": 0.1}],
        },
    ],
    ids=repr,
)
def test_a_tree_is_restored(tree: Any) -> None:
    values = flatten("it", tree)
    assert all(isinstance(value, np.ndarray) for value in values.values())
    assert_equal(unflatten(values), tree)


def test_numbers_of_numpy_become_those_of_python() -> None:
    assert_equal(unflatten(flatten("it", [np.int64(3), np.float32(0.5), np.bool_(True)])), [3, 0.5, True])


def test_the_values_are_copies() -> None:
    tensor, array = torch.zeros(2, requires_grad=True), np.zeros(2)
    values = flatten("it", [tensor, array])
    with torch.no_grad():
        tensor += 1
    array += 1
    restored = unflatten(values)
    assert [value.tolist() for value in restored] == [[0, 0], [0, 0]] and not restored[0].requires_grad
    restored[0] += 1
    assert values["0"].tolist() == [0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", 1j, torch.eye(2).to_sparse(), np.array([object()]), np.array(["text"]), lambda: 0],
)
def test_what_cannot_be_stored_names_its_owner(value: Any) -> None:
    with pytest.raises(JobError, match="the sampler"):
        flatten("the sampler", {"a": [value]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"tensor": 0, "list": []}',
        '{"tensor": 9}',
        '{"unknown": 3}',
        '{"dict": [[1]]}',
        '{"dict": [[{"list": []}, 1]]}',
        '{"list": 3}',
        '{"bfloat16": 1}',
        "[" * 100_000,
        '{"list": [{}]}',
    ],
    ids=range(11),
)
def test_malformed_values_are_refused(text: str) -> None:
    values = {"tree": np.frombuffer(text.encode(), np.uint8), "0": np.zeros(2), "1": "text"}
    with pytest.raises(CheckpointError) as error:
        unflatten(values)
    assert error.value.on_all_ranks
    with pytest.raises(CheckpointError):
        unflatten({name: value for name, value in values.items() if name != "tree"})


def test_the_structure_is_json() -> None:
    values = flatten("it", {"a": torch.ones(1)})
    assert json.loads(bytes(np.asarray(values["tree"]))) == {"dict": [["a", {"tensor": 0}]]}
