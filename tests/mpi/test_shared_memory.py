"""Memory shared by the ranks of a node, with each MPI library."""

from __future__ import annotations

import pytest

from ..support.launch import PROGRAMS
from ..support.world.controller import World

PROGRAM = PROGRAMS / "shared_memory.py"


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_arrays_board_and_averages(each_world: World, n: int) -> None:
    assert each_world.run(n, PROGRAM).stdout.strip() == "ok"
