"""Shares of the cores of a host."""

from __future__ import annotations

import os

import pytest

from mpitrain.core import cpus


@pytest.mark.parametrize(
    ("cores", "processes", "own", "expected"),
    [
        (8, 2, range(8), 4),
        (8, 3, range(8), 2),
        (8, 2, [5], 1),
        (8, 2, range(3), 3),
        (2, 4, range(2), 1),
        (4, 0, [1, 2], 2),
    ],
)
def test_a_process_has_a_share_of_the_cores_to_which_it_is_bound(
    cores: int, processes: int, own: list[int], expected: int
) -> None:
    assert cpus.share_of(cores, processes, own) == expected


def test_cores_of_processes() -> None:
    assert cpus.all_cores([{0, 1}, {1, 2}, (2, 7)]) == 4
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpus.own_cores() == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
