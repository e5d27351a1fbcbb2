"""Memory through which the simulated ranks of a node pass blocks: buffers, signatures and ends of ranks."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend import staging as module  # noqa: E402
from mpitrain.backend.staging import TEXT_BYTES, Staging, block_bytes, shared_bytes_per_rank  # noqa: E402
from mpitrain.core.layout import PAGE  # noqa: E402

from ...support.simulated_groups import make_members  # noqa: E402


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Staging]:
    return [members.staging for members in make_members(monkeypatch, (0, 0, 0))]


def test_the_buffers_of_a_node_have_a_limited_size() -> None:
    sizes = [block_bytes(ranks) for ranks in (1, 2, 16, 64, 128, 256, 10_000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 1 << 20 and sizes[-1] == 64 << 10
    for ranks in (16, 64, 128, 200, 256):
        assert block_bytes(ranks) % PAGE == 0 and 2 * ranks * block_bytes(ranks) <= 32 << 20
    assert all(shared_bytes_per_rank(ranks) > 2 * block_bytes(ranks) for ranks in (1, 16, 256))


def test_blocks_alternate_between_two_buffers_that_all_ranks_see(ranks: list[Staging]) -> None:
    for round_ in range(4):
        for rank, staging in enumerate(ranks):
            staging.next_buffers(torch.float32)[rank].fill_(10 * round_ + rank)
        for staging in ranks:
            found = [buffer.unique().tolist() for buffer in staging.buffers(torch.float32)]
            assert found == [[10 * round_ + rank] for rank in range(3)]
    # The block before the last one is still there.
    assert [buffer[0].item() for buffer in ranks[0].next_buffers(torch.float32)] == [20, 21, 22]
    assert ranks[0].buffers(torch.float64)[0].data_ptr() == ranks[0].buffers(torch.uint8)[0].data_ptr()


def test_ranks_that_have_not_published_are_behind(ranks: list[Staging]) -> None:
    assert [ranks[0].publish(), ranks[0].publish(), ranks[2].publish()] == [1, 2, 1]
    assert ranks[0].behind() == [1, 2] and ranks[2].behind() == [1] and ranks[1].behind() == []
    assert [staging.is_behind() for staging in ranks] == [False, True, True]


@pytest.mark.parametrize("operation", [4, 5])
def test_ranks_compare_the_signatures_of_an_operation(ranks: list[Staging], operation: int) -> None:
    for staging in ranks:
        staging.sign(operation, b"first\0", -7)
        staging.sign(operation + 1, b"second\0", 7)
    assert not any(staging.disagrees(operation) for staging in ranks)
    for odd in range(3):
        ranks[odd].sign(operation, b"\xc3\xa4\0", 8)
        assert all(staging.disagrees(operation) for staging in ranks)
        assert not any(staging.disagrees(operation + 1) for staging in ranks)
        assert ranks[0].texts(operation) == ["ä" if rank == odd else "first" for rank in range(3)]
        ranks[odd].sign(operation, b"first\0", -7)
    ranks[0].sign(operation, b"x" * (TEXT_BYTES - 1) + b"\0", 0)
    assert [len(text) for text in ranks[1].texts(operation)] == [TEXT_BYTES - 1, 5, 5]


def test_ranks_that_have_ended(ranks: list[Staging]) -> None:
    assert not any(staging.has_ended(rank) for staging in ranks for rank in range(3))
    ranks[1].mark_ended()
    assert [ranks[0].has_ended(rank) for rank in range(3)] == [False, True, False]
    ranks[2]._own[module._PID] = 99_999_999  # no process has this id
    assert ranks[0].has_ended(2)
    ranks[2]._own[module._NAMESPACE] = -1  # the process id has no meaning here
    assert not ranks[0].has_ended(2)
    ranks[2]._own[module._PID] = os.getpid()
    ranks[2].mark_ended()
    assert ranks[0].has_ended(2)
