"""Reductions between simulated nodes, also with a combination whose order matters, and tensors as messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend import internode  # noqa: E402
from mpitrain.backend.internode import messages_of, reduce_chunk  # noqa: E402
from mpitrain.backend.reductions import Reduction  # noqa: E402

from ...simulators.simulated_mpi import interleave, simulate  # noqa: E402
from ...support.simulated_groups import make_small  # noqa: E402


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("n", [1, 32, 50, 200])
@pytest.mark.parametrize("combine", [torch.sub, torch.maximum])
def test_a_chunk_is_reduced_in_the_order_of_the_nodes(
    monkeypatch: pytest.MonkeyPatch, nodes: int, n: int, combine: Any
) -> None:
    make_small(monkeypatch)
    world = simulate(monkeypatch, range(nodes))
    chunks = list(torch.randn(nodes, n, dtype=torch.float64).unbind())
    expected = chunks[0].clone()
    for chunk in chunks[1:]:
        expected = combine(expected, chunk)

    def steps(rank: int) -> Iterator[Any]:
        return reduce_chunk(chunks[rank], Reduction("own", combine), world.comm(rank))  # type: ignore[arg-type]

    interleave({rank: steps(rank) for rank in range(nodes)}, lambda rank, request: request.Test(), n)
    assert all(torch.equal(chunk, expected) for chunk in chunks)


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 250])
def test_messages_are_views_of_at_most_the_limit(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(internode, "MESSAGE_BYTES", 100)
    tensor = torch.arange(nbytes, dtype=torch.uint8)
    parts = [memory for memory, _ in messages_of(tensor)]
    assert parts and all(len(part) <= 100 for part in parts) and all(len(part) for part in parts[:-1])
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(nbytes))
    if nbytes:
        parts[-1][-1] = 255
        assert tensor[-1] == 255


def test_messages_of_a_type_that_numpy_lacks() -> None:
    tensor = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    ((memory, _),) = messages_of(tensor)
    assert memory.view(np.uint16).tolist() == [0x3F80, 0xC000]
